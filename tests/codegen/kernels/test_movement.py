"""Movement is bit-equal for every number, block-scaled parts included; negative ids, odd widths and column pieces among the cases."""

from functools import partial

import numpy as np
import pytest

from tapeout.codegen.kernel import KernelError
from tapeout.dialects import cache, nn
from tapeout.dialects.format import BF16, FP32, INT32, Q4_INDEX, Q4_MAIN, Q8, Number, Scaled
from tapeout.dialects.state import State
from tapeout.dialects.types import Blocks, Ring, Tensor
from tests.codegen.kernels.harness import HOW, ROWS, KernelCase, assert_same, uneven

IDS = Tensor((None,), INT32)
NUMBERS = [BF16, FP32, INT32, Q8, Q4_MAIN, Q4_INDEX]
PIECES = {"block_rows": 4, "block_columns": 24}


def values(seed: int, rows: int, *columns: int, number: Number = BF16):
    """Rows of distinct values of any number, each scale its own."""
    n = int(np.prod(columns))
    if number == INT32:
        return (np.arange(rows * n, dtype=np.int32) * 7 + seed).reshape(rows, *columns)
    found = uneven(seed, rows, n, number=number, block=8)
    if isinstance(found, Scaled):
        groups = columns[-1] // found.scaling.columns
        return Scaled(found.codes.reshape(rows, *columns), found.scales.reshape(rows, *columns[:-1], groups), found.scaling)
    return found.reshape(rows, *columns)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("h", "schedule"), [(32, {}), (100, PIECES), (7, {"block_rows": 3})])
@pytest.mark.parametrize(("number", "out"), [(BF16, BF16), (FP32, FP32), (BF16, FP32), (FP32, BF16)])
def test_embed_picks_rows(how, h, schedule, number, out):
    case = KernelCase(partial(nn.embed, out=out), [IDS, Tensor((11, h), number)], **schedule)
    table = uneven(1, 11, h, number=number)
    for count in ROWS:
        ids = (np.arange(count) * 5 % 11).astype(np.int32)
        assert_same(case.run(how, ids, table), case.meaning(ids, table))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(("columns", "schedule"), [((64,), PIECES), ((2, 32), {}), ((96,), {"block_rows": 4})])
def test_take_picks_rows_of_any_number(how, number, columns, schedule):
    case = KernelCase(lambda x, rows: nn.take(x, rows), [Tensor((None, *columns), number), IDS], **schedule)
    x = values(3, 13, *columns, number=number)
    for count in ROWS:
        rows = (np.arange(count) * 8 % 13).astype(np.int32)
        assert_same(case.run(how, x, rows, rows=count), case.meaning(x, rows))


@pytest.mark.parametrize("how", HOW)
def test_take_of_a_row_table(how):
    case = KernelCase(lambda x, rows: nn.take(x, rows), [IDS, IDS])
    x = np.arange(19, dtype=np.int32) * 3
    for count in ROWS:
        rows = (np.arange(count) * 8 % 19).astype(np.int32)
        assert_same(case.run(how, x, rows, rows=count), case.meaning(x, rows))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("number", NUMBERS)
def test_concat_joins_columns(how, number):
    widths = (64,) * 3 if number.scaling else (5,) * 4
    case = KernelCase(lambda *parts: nn.concat(list(parts)), [Tensor((None, n), number) for n in widths], **PIECES)
    for count in ROWS:
        parts = [values(i, count, n, number=number) for i, n in enumerate(widths)]
        assert_same(case.run(how, *parts), case.meaning(*parts))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("number", [BF16, FP32])
@pytest.mark.parametrize(("first", "count", "wide"), [(0, 64, 64), (7, 53, 61), (32, 64, 96), (60, 1, 61)])
def test_columns_are_taken_of_wider_rows(how, number, first, count, wide):
    case = KernelCase(partial(nn.columns, first=first, count=count), [Tensor((None, wide), number)], **PIECES)
    for rows in ROWS:
        x = values(5, rows, wide, number=number)
        assert_same(case.run(how, x), case.meaning(x))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("number", [INT32, FP32])
def test_stack_makes_columns(how, number):
    case = KernelCase(lambda *parts: nn.stack(list(parts)), [Tensor((None,), number)] * 5, block_rows=4)
    for count in ROWS:
        parts = [values(i, count, 1, number=number).reshape(-1) for i in range(5)]
        assert_same(case.run(how, *parts), case.meaning(*parts))


SEQUENCES, LENGTH = 3, 5


def ring_state(number: Number, columns: int, rows: int, seed: int = 20) -> State:
    """A ring whose every row differs, with room for `rows` staged ones."""
    return State(values(seed, SEQUENCES * LENGTH + rows, columns, number=number))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("schedule", [PIECES, {}])
def test_stage_writes_behind_the_slots(how, number, schedule):
    ring = Ring(Tensor((64,), number), LENGTH)
    case = KernelCase(partial(cache.stage, length=LENGTH, sequences=SEQUENCES), [ring, Tensor((None, 64), number)], **schedule)
    for count in ROWS:
        state, rows = ring_state(number, 64, count + 2), values(1, count, 64, number=number)
        assert_same(case.run(how, state, rows), case.meaning(state, rows))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("schedule", [PIECES, {}])
def test_commit_copies_staged_rows(how, number, schedule):
    ring = Ring(Tensor((64,), number), LENGTH)
    case = KernelCase(partial(cache.commit, length=LENGTH, sequences=SEQUENCES), [ring, IDS], **schedule)
    for count in ROWS:
        ids = np.full(count, -1, np.int32)
        kept = np.random.default_rng(count).permutation(count)[: SEQUENCES * LENGTH]
        ids[kept] = np.random.default_rng(count + 1).permutation(SEQUENCES * LENGTH)[: len(kept)]
        state = ring_state(number, 64, count)
        assert_same(case.run(how, state, ids), case.meaning(state, ids))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("schedule", [PIECES, {}])
def test_append_scatters_entries(how, number, schedule):
    case = KernelCase(cache.append, [Blocks(Tensor((64,), number), 2), Tensor((None, 64), number), IDS], **schedule)
    for count in ROWS:
        ids = np.random.default_rng(count).permutation(40)[:count].astype(np.int32)
        ids[::3] = -1
        state = State(values(20, 40, 64, number=number))
        rows = values(1, count, 64, number=number)
        assert_same(case.run(how, state, rows, ids), case.meaning(state, rows, ids))


def test_a_block_scaled_embedding_is_refused():
    with pytest.raises(KernelError, match="this kernel reads BF16 or FP32 rows"):
        KernelCase(partial(nn.embed, out=BF16), [IDS, Tensor((11, 64), Q8)])
