"""Devices: memory, kernel libraries and launch queues. `cpu` is the one that exists."""
