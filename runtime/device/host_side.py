"""The host's half of a device that has memory of its own: what a region looks like from the host, and kernels by symbol.

The driver's calls are the device's; here is what does not depend on whose driver it is.
"""

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tapeout.runtime.device import Use
from tapeout.runtime.device.memory import zeroed
from tapeout.runtime.errors import SymbolMissing

Bytes = NDArray[np.uint8]
Pinned = Callable[[int, str], Bytes]
"""Zeroed page-locked bytes of a size, for what is named."""


def host_side(size: int, what: str, use: Use, pinned: Pinned) -> Bytes | None:
    """What the host has of a region: nothing, plain memory where it is fetched, page-locked memory where every run copies it."""
    if use == "device":
        return None
    return zeroed(size, what) if use == "fetched" else pinned(size, what)


def locked_bytes(start: int, size: int) -> Bytes:
    """Page-locked memory that a driver gave, zeroed; at least one byte, as devices ask for."""
    found = np.ctypeslib.as_array((ctypes.c_uint8 * max(size, 1)).from_address(start))
    found[:] = 0
    return found


def number_of(symbol: str, numbers: Mapping[str, int], place: Path) -> int:
    """The device's number of a kernel. Raises SymbolMissing, naming the manifest."""
    if symbol not in numbers:
        raise SymbolMissing(str(place), f"no kernel {symbol}", "every kernel of the manifest")
    return numbers[symbol]
