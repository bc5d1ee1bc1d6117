"""Row tables are bit-equal to their meanings on steps of several sequences: decode rows, chunks longer than the ring, first tokens."""

from functools import partial

import numpy as np
import pytest

from tapeout.dialects import step
from tapeout.dialects.format import INT32
from tapeout.dialects.state import State
from tapeout.dialects.types import Ring, Tensor
from tests.codegen.kernels.harness import HOW, KernelCase, assert_same

TABLE = Tensor((None,), INT32)
LAST = Ring(Tensor((1,), INT32), 1)
SEQUENCES = 5
STEPS = [  # (slot, first position, rows) of every sequence of a step
    [], [(0, 0, 1)], [(3, 7, 2)], [(4, 6, 1), (1, 0, 4)], [(2, 11, 9), (0, 100, 1), (4, 0, 7)], [(1, 3, 33)],
]


def i32(values) -> np.ndarray:
    return np.array(values, np.int32).reshape(-1)


def rows_of(sequences):
    """positions, slots, starts, ends of a step's rows."""
    table, start = [], 0
    for slot, first, count in sequences:
        table += [(first + i, slot, start, start + count) for i in range(count)]
        start += count
    return [i32([row[i] for row in table]) for i in range(4)]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("block_rows", [4, 32])
def test_patch_replaces_missing_tokens(how, block_rows):
    case = KernelCase(step.patch, [TABLE, TABLE, LAST], block_rows=block_rows)
    for sequences in STEPS:
        _, slots, _, _ = rows_of(sequences)
        tokens = i32(np.where(np.arange(len(slots)) % 3 == 1, -1, np.arange(len(slots)) + 50))
        last = State(i32(np.arange(SEQUENCES) * 11 + 3)[:, None])
        assert_same(case.run(how, tokens, slots, last), case.meaning(tokens, slots, last))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("block_rows", [4, 32])
def test_remember_keeps_the_last_token_of_a_slot(how, block_rows):
    case = KernelCase(step.remember, [LAST, TABLE, TABLE], block_rows=block_rows)
    for count in (0, 1, 2, 5, 17, 33):
        slots, tokens = i32(np.arange(count) * 3 % 6 - 1), i32(np.arange(count) + 70)
        last = State(i32(np.arange(SEQUENCES))[:, None])
        assert_same(case.run(how, last, slots, tokens), case.meaning(last, slots, tokens))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("window", "ring", "block_rows"), [(4, 6, 4), (16, 22, 8), (5, 5, 1)])
def test_window_lists_visible_rows(how, window, ring, block_rows):
    case = KernelCase(partial(step.window, window=window, ring=ring, sequences=SEQUENCES), [TABLE] * 4, block_rows=block_rows)
    for sequences in STEPS:
        positions, slots, starts, _ = rows_of(sequences)
        for floors in (0 * positions, positions // 2, positions + (np.arange(len(positions)) % 2).astype(np.int32)):
            given = positions, slots, starts, i32(floors)
            assert_same(case.run(how, *given), case.meaning(*given))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("ring", [2, 7])
def test_partners_are_the_tokens_before(how, ring):
    case = KernelCase(partial(step.partners, ring=ring, sequences=SEQUENCES), [TABLE] * 3, block_rows=4)
    for sequences in STEPS:
        positions, slots, starts, _ = rows_of(sequences)
        assert_same(case.run(how, positions, slots, starts), case.meaning(positions, slots, starts))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("ring", [2, 7])
def test_commits_keep_the_last_rows(how, ring):
    case = KernelCase(partial(step.commits, ring=ring), [TABLE] * 3, block_rows=4)
    for sequences in STEPS:
        positions, slots, _, ends = rows_of(sequences)
        assert_same(case.run(how, positions, slots, ends), case.meaning(positions, slots, ends))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("ratio", "block_tokens"), [(1, 8), (2, 8), (2, 128)])
def test_entries_find_their_block(how, ratio, block_tokens):
    build = partial(step.entries, ratio=ratio, block_tokens=block_tokens)
    case = KernelCase(build, [TABLE, TABLE, Tensor((SEQUENCES, 14), INT32)], block_rows=4)
    block_table = np.random.default_rng(2).permutation(SEQUENCES * 14).astype(np.int32).reshape(SEQUENCES, 14)
    for sequences in STEPS:
        positions, slots, _, _ = rows_of(sequences)
        assert_same(case.run(how, positions, slots, block_table), case.meaning(positions, slots, block_table))
