"""Row tables, and how a row finds and reads the state rows it sees: visible entries, physical rows of paged entries, masked reads.

A row of a step is (sequence slot, position, token). Everything visible is a function of the position alone (docs/model.md 4.9); a state
row that a mask excludes is never read.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapeout.dialects.define import Group, require
from tapeout.dialects.format import INT32, decode
from tapeout.dialects.rules import ROWS, index, positive
from tapeout.dialects.state import State
from tapeout.dialects.types import Tensor

Ids = NDArray[np.int32]
Mask = NDArray[np.bool_]
Real = NDArray[np.float64]
TABLE = Tensor((ROWS,), INT32)
"""A row table: one number a row."""


def tables(**operands: Group) -> None:
    """Every operand named is a row table."""
    for name, view in operands.items():
        index(view, name, ROWS)


def paged(block_table: Group, ratio: int, block_tokens: int) -> None:
    """The operand is a block table, and blocks of `block_tokens` tokens hold whole entries of `ratio` tokens."""
    index(block_table, "block_table", "sequences", "blocks")
    positive(ratio=ratio, block_tokens=block_tokens)
    require(block_tokens % ratio == 0, f"attribute block_tokens is {block_tokens}, expected a multiple of ratio {ratio}")


def read_rows(state: State, ids: Ids, valid: Mask) -> Real:
    """The exact values of state rows `ids`, [*ids.shape, *entry]; zero where `valid` is false."""
    wanted, places = np.unique(ids[valid], return_inverse=True)
    rows = decode(state.read(wanted))
    out = np.zeros((*ids.shape, *rows.shape[1:]))
    out[valid] = rows[places]
    return out


def left_aligned(counts: NDArray[np.integer[Any]], width: int) -> Mask:
    """The mask [rows, width] of the first counts[r] places of each row."""
    return np.arange(width) < np.asarray(counts)[:, None]


def visible_entries(positions: Ids, ratio: int) -> NDArray[np.int64]:
    """n_t of docs/model.md 4.4: how many entries of a cache of this ratio the token at each position sees."""
    return (np.asarray(positions, np.int64) + 1) // ratio


def entry_rows(block_table: Ids, slots: Ids, entries: NDArray[np.integer[Any]], per_block: int) -> Ids:
    """Physical rows of entries j of slots (broadcast together): block_table[slot, j // per_block] * per_block + j % per_block."""
    numbers = np.asarray(entries, np.int64)
    blocks = np.asarray(block_table, np.int64)[slots, numbers // per_block]
    return (blocks * per_block + numbers % per_block).astype(np.int32)
