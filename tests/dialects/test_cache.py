"""Writes to states: which physical row each op touches and that it touches no other, refusals, empty rows, costs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.dialects.harness import Case, complaint, refusal, same, values

from tapeout.dialects import cache
from tapeout.dialects.define import Cost
from tapeout.dialects.format import BF16, INT32, Q4_INDEX, Q4_MAIN, Q8, REAL, Scaled
from tapeout.dialects.state import State, empty
from tapeout.dialects.types import Blocks, Ring, Tensor

ROWS = Tensor((None,), INT32)
ENTRIES = [Tensor((1,), INT32), Tensor((5,), REAL), Tensor((6,), BF16), Tensor((64,), Q8), Tensor((32,), Q4_MAIN),
           Tensor((2, 32), Q4_INDEX)]
EACH = pytest.mark.parametrize("entry", ENTRIES, ids=str)


def contents(seed: int, rows: int, entry: Tensor) -> Any:
    """Rows that differ from each other in codes and scales."""
    if entry.number == INT32:
        return (np.arange(rows, dtype=np.int32) + 100 * seed)[:, None]
    return values(seed, rows, *entry.sized(0), number=entry.number)


def filled(seed: int, rows: int, entry: Tensor) -> tuple[State, Any]:
    """A state whose every row has contents of its own, and a copy of them."""
    value, state = contents(seed, rows, entry), empty(entry, rows)
    state.write(np.arange(rows, dtype=np.int32), value)
    return state, value


def replaced(value: Any, ids: list[int], rows: Any) -> Any:
    """`value` with row ids[i] replaced by rows[i], one by one."""
    if isinstance(value, Scaled):
        return Scaled(replaced(value.codes, ids, rows.codes), replaced(value.scales, ids, rows.scales), value.scaling)
    value = value.copy()
    for i, physical in enumerate(ids):
        if physical >= 0:
            value[physical] = rows[i]
    return value


def ragged(entry: Tensor) -> Tensor:
    return Tensor((None, *entry.shape), entry.number)


@EACH
def test_stage_fills_the_rows_behind_all_slots(entry: Tensor) -> None:
    state, before = filled(1, 2 * 3 + 5, entry)
    rows = contents(2, 4, entry)
    Case(cache.stage, [Ring(entry, 3), ragged(entry)], length=3, sequences=2).run(state, rows)
    same(state.value, replaced(before, [6, 7, 8, 9], rows))


@EACH
def test_commit_copies_staged_rows_and_leaves_out_negative_ids(entry: Tensor) -> None:
    state, before = filled(3, 2 * 3 + 5, entry)
    Case(cache.commit, [Ring(entry, 3), ROWS], length=3, sequences=2).run(state, np.array([4, -1, 0, 3, -1], np.int32))
    same(state.value, replaced(before, [4, 0, 3], before[[6, 8, 9]]))


@EACH
def test_append_stores_rows_where_their_ids_say(entry: Tensor) -> None:
    state, before = filled(4, 9, entry)
    rows = contents(5, 4, entry)
    Case(cache.append, [Blocks(entry, 2), ragged(entry), ROWS]).run(state, rows, np.array([-1, 8, -1, 2], np.int32))
    same(state.value, replaced(before, [-1, 8, -1, 2], rows))


@EACH
def test_stage_then_commit_keeps_the_last_positions(entry: Tensor) -> None:
    """Five tokens of slot 1 pass through a ring of three, two and then three a step."""
    state, tokens = empty(entry, 2 * 3 + 3), contents(6, 5, entry)
    stage = Case(cache.stage, [Ring(entry, 3), ragged(entry)], length=3, sequences=2)
    commit = Case(cache.commit, [Ring(entry, 3), ROWS], length=3, sequences=2)
    for first, last in ((0, 2), (2, 5)):
        stage.run(state, tokens[np.arange(first, last)])
        commit.run(state, np.array([3 + t % 3 for t in range(first, last)], np.int32))
    same(state.value[np.arange(3, 6)], tokens[np.array([3, 4, 2])])


@EACH
def test_no_rows(entry: Tensor) -> None:
    state, before = filled(7, 8, entry)
    none, nothing = np.zeros(0, np.int32), contents(8, 0, entry)
    Case(cache.stage, [Ring(entry, 3), ragged(entry)], length=3, sequences=2).run(state, nothing)
    Case(cache.commit, [Ring(entry, 3), ROWS], length=3, sequences=2).run(state, none)
    Case(cache.append, [Blocks(entry, 2), ragged(entry), ROWS]).run(state, nothing, none)
    same(state.value, before)


ENTRY, AT = Tensor((64,), Q8), {"length": 3, "sequences": 2}
RING, BLOCKS, KV = Ring(ENTRY, 3), Blocks(ENTRY, 2), Tensor((None, 64), Q8)
REFUSED: list[tuple[Callable[..., Any], list[Any], dict[str, Any], str]] = [
    (cache.stage, [RING, Tensor((None, 64), BF16)], AT,
     "cache.stage: rows is [?, 64] bf16, expected [?, 64] f8E4M3FN*e8m0[1x32], entries of the state"),
    (cache.stage, [RING, Tensor((None, 96), Q8)], AT,
     "cache.stage: rows is [?, 96] f8E4M3FN*e8m0[1x32], expected [?, 64] f8E4M3FN*e8m0[1x32], entries of the state"),
    (cache.stage, [RING, KV], AT | {"length": 4},
     "cache.stage: the op addresses a ring of 4 rows, but ring is a ring of 3 x [64] f8E4M3FN*e8m0[1x32]"),
    (cache.stage, [BLOCKS, KV], AT, "cache.stage: ring is blocks of [64] f8E4M3FN*e8m0[1x32], one for 2 tokens, expected a ring"),
    (cache.stage, [RING, KV], AT | {"sequences": 0}, "cache.stage: attribute sequences is 0, expected at least 1"),
    (cache.commit, [RING, KV], AT, "cache.commit: ids is [?, 64] f8E4M3FN*e8m0[1x32], expected rank 1"),
    (cache.commit, [KV, ROWS], AT, "cache.commit: ring is [?, 64] f8E4M3FN*e8m0[1x32], expected a ring"),
    (cache.commit, [RING, ROWS], AT | {"length": 2},
     "cache.commit: the op addresses a ring of 2 rows, but ring is a ring of 3 x [64] f8E4M3FN*e8m0[1x32]"),
    (cache.append, [RING, KV, ROWS], {}, "cache.append: blocks is ring of 3 x [64] f8E4M3FN*e8m0[1x32], expected blocks"),
    (cache.append, [BLOCKS, Tensor((None, 64), Q4_MAIN), ROWS], {},
     "cache.append: rows is [?, 64] f4E2M1FN*e4m3[1x16], expected [?, 64] f8E4M3FN*e8m0[1x32], entries of the state"),
    (cache.append, [BLOCKS, KV, Tensor((4,), INT32)], {}, "cache.append: ids is [4] i32, expected [?] i32"),
]


@pytest.mark.parametrize(("op", "operands", "attributes", "sentence"), REFUSED, ids=[r[3][:60] for r in REFUSED])
def test_refused(op: Callable[..., Any], operands: list[Any], attributes: dict[str, Any], sentence: str) -> None:
    assert refusal(op, operands, **attributes) == sentence


def test_the_verifier_says_the_same_of_text() -> None:
    case = Case(cache.stage, [RING, KV], **AT)
    assert complaint(case, "sequences = 2", "sequences = 0") == "'cache.stage' attribute sequences is 0, expected at least 1"
    assert complaint(case, ", sequences = 2 : i64", "") == "'cache.stage' has no attribute sequences"


def test_costs() -> None:
    r, entry = 5, 66
    assert Case(cache.stage, [RING, KV], **AT).cost(r) == Cost(r * entry, r * entry)
    assert Case(cache.commit, [RING, ROWS], **AT).cost(r) == Cost(r * entry + r * 4, r * entry)
    assert Case(cache.append, [BLOCKS, KV, ROWS]).cost(r) == Cost(3 * entry + r * 4, 3 * entry)  # 5 rows complete 3 entries at most
