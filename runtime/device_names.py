"""The names of devices and of what they run, in one place: what `LLM(device=...)`, `open_artifact`, `tapeout run --device` and its settings accept.

Imports nothing of ours, so that a command's help can say them at once. What each runs is `artifact_set.py`.
"""

from typing import Literal, get_args

DeviceName = Literal["cpu", "cuda", "ascend", "ascend-sim"]
DEVICES: tuple[DeviceName, ...] = get_args(DeviceName)

CHIPS = {"sm90": (9, 0), "sm100": (10, 0), "sm103": (10, 3)}
"""Compute capabilities of the targets that are GPUs."""

NPU = "ascend950"
"""How names of targets begin that are Ascend chips; the device `ascend` runs them, `ascend-sim` in place of it on any machine."""


def is_target(name: str) -> bool:
    """Whether an artifact may be for a target of that name."""
    return name == "cpu" or name in CHIPS or name.startswith(NPU)
