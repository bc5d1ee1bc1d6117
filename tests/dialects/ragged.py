"""Ragged steps for tests: row tables of any mix of sequences, block tables in scrambled order, states whose unused rows are poison."""

from dataclasses import dataclass

import numpy as np

from tapeout.dialects.format import Array, Number, Scaled, decode, encode
from tapeout.dialects.state import State, empty
from tapeout.dialects.types import Tensor

SLOTS = 5
BLOCK_TOKENS = 4


@dataclass(frozen=True)
class Step:
    """Row tables of one step."""

    positions: Array
    slots: Array
    starts: Array
    ends: Array

    @property
    def rows(self) -> int:
        return len(self.positions)


def step_of(*parts: tuple[int, int, int]) -> Step:
    """The step that runs, for each (slot, first position, count), those tokens of that sequence."""
    columns: list[list[int]] = [[], [], [], []]
    for slot, first, count in parts:
        start = len(columns[0])
        for t in range(first, first + count):
            for column, value in zip(columns, (t, slot, start, start + count), strict=True):
                column.append(value)
    return Step(*(np.array(c, np.int32) for c in columns))


MIXED = step_of((3, 0, 1), (0, 5, 7), (4, 12, 1), (1, 0, 13))
"""A first token, a chunk in the middle, a decode row and a whole prompt; slot 2 takes no part."""
NOTHING = step_of()


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


def block_table(blocks: int, seed: int = 0) -> Array:
    """[SLOTS, blocks]: every block of every slot somewhere else, none where the order would suggest."""
    return np.random.default_rng(seed).permutation(SLOTS * blocks).astype(np.int32).reshape(SLOTS, blocks)


def poisoned(entry: Tensor, rows: int) -> State:
    """A state in which every row decodes to NaN until it is written."""
    state = empty(entry, rows)
    if not isinstance(state.value, Scaled):
        state.value[...] = np.nan if entry.number.is_float else -(2**31)
    elif state.value.scaling.scale == "e4m3":
        state.value.scales[...] = np.nan
    else:
        state.value.codes[...] = np.nan if entry.number.element == "f8E4M3FN" else 6
        state.value.scales[...] = 255
    return state


def store(state: State, ids: Array, values: Array, number: Number) -> Array:
    """Writes rows rounded to `number`; returns what they decode to."""
    rows = encode(values, number)
    state.write(np.asarray(ids, np.int32), rows)
    return decode(rows)
