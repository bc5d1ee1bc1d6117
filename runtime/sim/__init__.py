"""Simulators: what a rule of the engine would do under a described or a recorded load, with no device and no model."""
