"""`step` ops against loops over rows, and the property they exist for: any chunking of a sequence sees the same window."""

import numpy as np
import pytest
from tests.dialects.harness import Case, complaint, refusal
from tests.dialects.ragged import BLOCK_TOKENS, MIXED, NOTHING, SLOTS, Step, block_table, step_of

from tapeout.dialects import step
from tapeout.dialects.format import BF16, INT32, Array
from tapeout.dialects.rows import TABLE
from tapeout.dialects.state import State, empty
from tapeout.dialects.types import Ring, Tensor

LAST = Ring(Tensor((1,), INT32), 1)
PAGES = Tensor((SLOTS, 5), INT32)
WINDOW, RING = 4, 7
PLACES = {"window": WINDOW, "ring": RING, "sequences": SLOTS}


def i32(*values: int) -> Array:
    return np.array(values, np.int32)


def last_tokens(*tokens: int) -> State:
    state = empty(LAST.entry, len(tokens))
    state.value[:, 0] = tokens
    return state


def naive_window(s: Step, floors: Array, window: int, ring: int) -> list[list[int]]:
    out = []
    for r in range(s.rows):
        t, slot, start = int(s.positions[r]), int(s.slots[r]), int(s.starts[r])
        ids = []
        for u in range(max(0, t - window + 1, int(floors[r])), t + 1):
            back = t - u
            ids.append(SLOTS * ring + r - back if r - back >= start else slot * ring + u % ring)
        out.append(ids)
    return out


def padded(rows: list[list[int]], width: int) -> Array:
    return np.array([row + [-1] * (width - len(row)) for row in rows], np.int32).reshape(len(rows), width)


def test_patch_reads_the_slot_only_where_a_token_is_missing() -> None:
    case = Case(step.patch, [TABLE, TABLE, LAST])
    found = case.run(i32(7, -1, 0, -1, 9), i32(2, 0, 1, 4, 0), last_tokens(100, 101, 102, 103, 104))
    assert found.tolist() == [7, 100, 0, 104, 9]


def test_remember_keeps_the_last_row_of_a_slot_and_drops_negative_slots() -> None:
    state = last_tokens(100, 101, 102)
    Case(step.remember, [LAST, TABLE, TABLE]).run(state, i32(2, 0, -1, 2), i32(5, 6, 7, 8))
    assert state.value[:, 0].tolist() == [6, 101, 8]


def test_patch_after_remember_gives_the_token_back() -> None:
    state = last_tokens(0, 0, 0)
    Case(step.remember, [LAST, TABLE, TABLE]).run(state, i32(1, 2), i32(41, 42))
    assert Case(step.patch, [TABLE, TABLE, LAST]).run(i32(-1, -1), i32(2, 1), state).tolist() == [42, 41]


@pytest.mark.parametrize("s", [MIXED, step_of((2, RING - 1, 1)), step_of((2, 100, 3), (0, 1, 2), (4, 6, 20))])
@pytest.mark.parametrize(("window", "ring"), [(WINDOW, RING), (1, 1), (5, 5), (16, 22)])
def test_window_is_the_loop_over_visible_positions(s: Step, window: int, ring: int) -> None:
    case = Case(step.window, [TABLE] * 4, window=window, ring=ring, sequences=SLOTS)
    ids, counts = case.run(s.positions, s.slots, s.starts, np.zeros(s.rows, np.int32))
    expected = naive_window(s, np.zeros(s.rows, np.int32), window, ring)
    assert counts.tolist() == [len(row) for row in expected]
    np.testing.assert_array_equal(ids, padded(expected, window))


def test_window_starts_at_the_floor_and_is_empty_above_the_row() -> None:
    s, floors = step_of((1, 10, 4), (0, 6, 2)), i32(9, 9, 13, 14, 0, 8)
    ids, counts = Case(step.window, [TABLE] * 4, **PLACES).run(s.positions, s.slots, s.starts, floors)
    assert counts.tolist() == [2, 3, 0, 0, 4, 0]
    np.testing.assert_array_equal(ids, padded(naive_window(s, floors, WINDOW, RING), WINDOW))


def through_ring(chunks: list[tuple[int, int, int]], window: int, ring: int) -> list[tuple[int, int, list[int]]]:
    """Runs chunks (slot, first, count) one step after another on a ring of marks slot*1000 + position; what each row's ids hold."""
    see = Case(step.window, [TABLE] * 4, window=window, ring=ring, sequences=SLOTS)
    keep = Case(step.commits, [TABLE] * 3, ring=ring)
    marks = np.full(SLOTS * ring + 64, -1)
    found = []
    for chunk in chunks:
        s = step_of(chunk)
        marks[SLOTS * ring :] = -1
        staged = SLOTS * ring + np.arange(s.rows)
        marks[staged] = s.slots * 1000 + s.positions
        ids, counts = see.run(s.positions, s.slots, s.starts, np.zeros(s.rows, np.int32))
        found += [(chunk[0], int(t), marks[row[:n]].tolist()) for t, row, n in zip(s.positions, ids, counts, strict=True)]
        goes = keep.run(s.positions, s.slots, s.ends)
        assert len(set(goes[goes >= 0].tolist())) == (goes >= 0).sum() == min(s.rows, ring)
        marks[goes[goes >= 0]] = marks[staged[goes >= 0]]
    return found


@pytest.mark.parametrize("chunks", [
    [(1, 0, 30)],
    [(1, t, 1) for t in range(20)],
    [(1, 0, 1), (4, 0, 9), (1, 1, 9), (4, 9, 1), (1, 10, 2), (1, 12, 11), (4, 10, 15)],
    [(0, 0, 10), (0, 10, 3), (0, 11, 3), (0, 12, 3), (0, 15, 3), (0, 16, 1)],
])
def test_every_chunking_sees_the_same_positions(chunks: list[tuple[int, int, int]]) -> None:
    """Chunks shorter and longer than the ring of 7, and drafts taken back: up to RING - WINDOW positions may be run again."""
    for slot, t, marks in through_ring(chunks, WINDOW, RING):
        assert marks == [slot * 1000 + u for u in range(max(0, t - WINDOW + 1), t + 1)]


def test_partners_are_the_tokens_before_odd_positions() -> None:
    ring = 3
    found = Case(step.partners, [TABLE] * 3, ring=ring, sequences=SLOTS).run(MIXED.positions, MIXED.slots, MIXED.starts)
    for r, t in enumerate(MIXED.positions):
        staged = r > MIXED.starts[r]
        kept = MIXED.slots[r] * ring + (t - 1) % ring
        assert found[r] == (-1 if t % 2 == 0 else SLOTS * ring + r - 1 if staged else kept)
    assert found[1] == 0 * ring + 4 % ring, "the chunk that starts at position 5 finds token 4 in the ring"


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_entries_are_paged_rows_of_completed_groups(ratio: int) -> None:
    table, per = block_table(5), BLOCK_TOKENS // ratio
    found = Case(step.entries, [TABLE, TABLE, PAGES], ratio=ratio, block_tokens=BLOCK_TOKENS).run(MIXED.positions, MIXED.slots, table)
    for r, t in enumerate(MIXED.positions):
        j = t // ratio
        assert found[r] == (table[MIXED.slots[r], j // per] * per + j % per if (t + 1) % ratio == 0 else -1)
    assert len(set(found[found >= 0].tolist())) == (found >= 0).sum()


def test_commits_keep_the_last_rows_of_each_sequence() -> None:
    s = step_of((2, 3, 5), (0, 0, 2), (4, 9, 3))
    found = Case(step.commits, [TABLE] * 3, ring=3).run(s.positions, s.slots, s.ends)
    assert found.tolist() == [-1, -1, 2 * 3 + 5 % 3, 2 * 3 + 6 % 3, 2 * 3 + 7 % 3, 0, 1, 4 * 3, 4 * 3 + 1, 4 * 3 + 2]


def test_no_rows() -> None:
    n, none = NOTHING, np.zeros(0, np.int32)
    assert Case(step.patch, [TABLE, TABLE, LAST]).run(none, none, last_tokens(1)).shape == (0,)
    Case(step.remember, [LAST, TABLE, TABLE]).run(last_tokens(1), none, none)
    ids, counts = Case(step.window, [TABLE] * 4, **PLACES).run(n.positions, n.slots, n.starts, none)
    assert (ids.shape, counts.shape) == ((0, WINDOW), (0,))
    assert Case(step.partners, [TABLE] * 3, ring=3, sequences=SLOTS).run(none, none, none).shape == (0,)
    assert Case(step.entries, [TABLE, TABLE, PAGES], ratio=2, block_tokens=4).run(none, none, block_table(5)).shape == (0,)
    assert Case(step.commits, [TABLE] * 3, ring=3).run(none, none, none).shape == (0,)


def test_cost_counts_tables_and_the_remembered_token() -> None:
    patch = Case(step.patch, [TABLE, TABLE, LAST]).cost(rows=10)
    assert (patch.read, patch.written) == (3 * 40, 40)
    remember = Case(step.remember, [LAST, TABLE, TABLE]).cost(rows=10)
    assert (remember.read, remember.written) == (2 * 40, 40)


COLUMN = Tensor((None, 1), INT32)
REALS = Tensor((None,), BF16)


def test_refusals() -> None:
    assert refusal(step.patch, [COLUMN, TABLE, LAST]) == "step.patch: tokens is [?, 1] i32, expected rank 1"
    assert refusal(step.patch, [REALS, TABLE, LAST]) == "step.patch: tokens is [?] bf16, expected [?] i32"
    assert refusal(step.patch, [TABLE, TABLE, Ring(Tensor((1,), INT32), 2)]) == (
        "step.patch: last is ring of 2 x [1] i32, expected a ring of 1 x [1] i32")
    assert refusal(step.remember, [TABLE, TABLE, TABLE]) == "step.remember: last is [?] i32, expected a ring of 1 x [1] i32"
    assert refusal(step.window, [TABLE] * 4, window=8, ring=7, sequences=1) == (
        "step.window: a ring of 7 positions cannot hold a window of 8")
    assert refusal(step.window, [TABLE] * 4, window=0, ring=7, sequences=1) == "step.window: attribute window is 0, expected at least 1"
    assert refusal(step.partners, [TABLE] * 3, ring=0, sequences=1) == "step.partners: attribute ring is 0, expected at least 1"
    assert refusal(step.entries, [TABLE, TABLE, TABLE], ratio=2, block_tokens=4) == (
        "step.entries: block_table is [?] i32, expected rank 2")
    assert refusal(step.entries, [TABLE, TABLE, PAGES], ratio=2, block_tokens=5) == (
        "step.entries: attribute block_tokens is 5, expected a multiple of ratio 2")
    assert refusal(step.commits, [TABLE, TABLE, LAST], ring=3) == "step.commits: ends is ring of 1 x [1] i32, expected a tensor"


def test_the_verifier_says_the_same_of_text() -> None:
    case = Case(step.window, [TABLE] * 4, **PLACES)
    assert "'step.window' a ring of 3 positions cannot hold a window of 4" in complaint(case, "ring = 7", "ring = 3")
    assert "result ids is [?, 4] i32, expected [?, 5] i32" in complaint(case, "window = 4", "window = 5")
