"""A sequence's state as the interpreter holds it: the physical rows behind one `!cache.ring` or `!cache.blocks` handle.

Ops address physical rows; which row belongs to which slot and position is their business (docs/model.md 11). The bytes a device keeps are the
same rows in the same order.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tapeout.dialects.format import DTYPES, Array, Scaled
from tapeout.dialects.types import Blocks, Ring, Tensor

Ids = NDArray[np.int32]


@dataclass
class State:
    """`value` has one row per physical entry: an array, or codes and scales."""

    value: Array | Scaled

    def read(self, ids: Ids) -> Array | Scaled:
        """Rows `ids`, which must all be valid: an op masks negative ids before it reads."""
        if ids.size and int(ids.min()) < 0:
            raise IndexError(f"state row {int(ids.min())} read; ops mask negative ids before reading")
        return self.value[ids]

    def write(self, ids: Ids, rows: Array | Scaled) -> None:
        """Stores row r at physical row ids[r]; negative ids are dropped, of equal ids the last wins."""
        keep = ids >= 0
        if isinstance(self.value, Scaled) != isinstance(rows, Scaled):
            raise TypeError(f"a state of {type(self.value).__name__} was given rows of {type(rows).__name__}")
        if isinstance(self.value, Scaled) and isinstance(rows, Scaled):
            self.value.codes[ids[keep]] = rows.codes[keep]
            self.value.scales[ids[keep]] = rows.scales[keep]
        elif not isinstance(self.value, Scaled) and not isinstance(rows, Scaled):
            self.value[ids[keep]] = rows[keep]


def empty(entry: Tensor, rows: int) -> State:
    """A state of `rows` physical entries, all zero."""
    shape = (rows, *entry.sized(0))
    number = entry.number
    codes = np.zeros(shape, DTYPES[number.element])
    if number.scaling is None:
        return State(codes)
    blocks = tuple(n or 0 for n in number.scaling.blocks(shape))
    dtype = np.uint8 if number.scaling.scale == "e8m0" else DTYPES["f8E4M3FN"]
    return State(Scaled(codes, np.zeros(blocks, dtype), number.scaling))


def ring_rows(ring: Ring, sequences: int, staging: int) -> int:
    """Physical rows of a ring: `length` per sequence, then room for the new rows of one step."""
    return sequences * ring.length + staging


def block_rows(blocks: Blocks, count: int, block_tokens: int) -> int:
    """Physical rows of `count` blocks of `block_tokens` tokens."""
    return count * (block_tokens // blocks.ratio)


__all__ = ["Ids", "State", "block_rows", "empty", "ring_rows"]
