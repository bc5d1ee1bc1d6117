"""The names of devices, in one place: what `LLM(device=...)`, `open_artifact`, `tapeout run --device` and its settings accept.

Imports nothing, so that a command's help can say them at once. What each runs is `artifact_set.py`.
"""

from typing import Literal, get_args

DeviceName = Literal["cpu", "cuda", "ascend", "ascend-sim"]
DEVICES: tuple[DeviceName, ...] = get_args(DeviceName)
