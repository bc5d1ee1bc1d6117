"""`mla.pool` and `mla.attend` against per-element loops; the rows they must not read are NaN."""

from math import exp

import numpy as np
import pytest
from tests.dialects.harness import Case, agree, complaint, refusal, values
from tests.dialects.ragged import MIXED, NOTHING, SLOTS, Step, normal, poisoned, step_of, store

from tapeout.dialects import mla, step
from tapeout.dialects.format import BF16, FP32, INT32, Q4_MAIN, Q8, REAL, Array, Number, decode, encode
from tapeout.dialects.rows import TABLE
from tapeout.dialects.state import State
from tapeout.dialects.types import Blocks, Ring, Tensor

RING = 7
WIDTH, HEADS = 32, 3
SCALE = WIDTH**-0.5


def naive_pool(first: Array, second: Array) -> Array:
    d = len(first) // 2
    out = []
    for c in range(d):
        a0, a1 = exp(first[c]), exp(second[c])
        out.append((a0 * first[d + c] + a1 * second[d + c]) / (a0 + a1))
    return np.array(out)


def pairs_of(s: Step, pairs: Array, number: Number) -> State:
    """A ring of pairs [slot, position, 2D] as the steps before `s` left it, with the step's own staged."""
    state = poisoned(Tensor((pairs.shape[2],), number), SLOTS * RING + s.rows)
    for r in range(s.rows):
        for t in range(max(0, s.positions[s.starts[r]] - RING), s.positions[s.starts[r]]):
            store(state, [s.slots[r] * RING + t % RING], pairs[s.slots[r], t][None], number)
    store(state, SLOTS * RING + np.arange(s.rows), pairs[s.slots, s.positions], number)
    return state


@pytest.mark.parametrize(("number", "out"), [(REAL, None), (FP32, None), (FP32, FP32)])
@pytest.mark.parametrize("s", [MIXED, step_of((0, 1, 1), (1, 2, 1)), step_of((2, 7, 2), (4, 3, 3)), step_of((4, 14, 11))])
def test_pool_merges_each_odd_token_with_the_one_before(s: Step, number: Number, out: Number | None) -> None:
    pairs = decode(encode(normal(3, SLOTS, 30, 10), number))
    pairs_number = Tensor((10,), number)
    partners = Case(step.partners, [TABLE] * 3, ring=RING, sequences=SLOTS).run(s.positions, s.slots, s.starts)
    case = Case(mla.pool, [Ring(pairs_number, RING), TABLE], out, length=RING, sequences=SLOTS)
    found = case.run(pairs_of(s, pairs, number), partners)
    expected = np.stack([naive_pool(pairs[slot, t - t % 2], pairs[slot, t]) if t % 2 else pairs[slot, t, 5:]
                         for slot, t in zip(s.slots, s.positions, strict=True)])
    result = case.results[0].number
    assert result == (out or (REAL if number == REAL else BF16))
    agree(found, expected, result)


def test_pool_stays_finite_where_gates_are_far_apart() -> None:
    state = poisoned(Tensor((4,), FP32), 1 + 2)
    store(state, [1, 2], np.array([[-3e4, 3e4, 1.0, 2.0], [3e4, -3e4, 4.0, 8.0]]), FP32)
    found = Case(mla.pool, [Ring(Tensor((4,), FP32), 1), TABLE], length=1, sequences=1).run(state, np.array([-1, 1], np.int32))
    assert decode(found).tolist() == [[1.0, 2.0], [4.0, 2.0]]


def naive_attend(q: Array, keys: list[Array], sink: float) -> Array:
    """One head of one row: q [D], keys in order."""
    weights = [exp(SCALE * sum(a * b for a, b in zip(q, v, strict=True))) for v in keys]
    total = sum(weights) + exp(sink)
    return np.array([sum(w * v[d] for w, v in zip(weights, keys, strict=True)) / total for d in range(len(q))]) * bool(keys)


def listed(rows: list[list[int]], width: int) -> tuple[Array, Array]:
    return (np.array([r + [-1] * (width - len(r)) for r in rows], np.int32).reshape(len(rows), width),
            np.array([len(r) for r in rows], np.int32))


WINDOWS = [[4], [0, 1, 2], [], [9, 3, 5, 7], [], [2, 8, 2]]
ENTRIES = [[], [5, 6, 7, 8, 9], [1, 2], [0], [], [11]]


def attend_case(q: Number, ring: Number, entries: Number | None, out: Number | None = None) -> Case:
    paged = [None] * 3 if entries is None else [Blocks(Tensor((WIDTH,), entries), 2), Tensor((None, 5), INT32), TABLE]
    operands = [Tensor((None, HEADS * WIDTH), q), Ring(Tensor((WIDTH,), ring), 9), Tensor((None, 4), INT32), TABLE, Tensor((HEADS,), FP32)]
    return Case(mla.attend, [*operands, *paged], out, heads=HEADS, scale=SCALE)


def keys_of(number: Number, ids: list[list[int]], rows: int, seed: int) -> tuple[State, Array]:
    """A state in which exactly the listed rows are written, and all values."""
    state, used = poisoned(Tensor((WIDTH,), number), rows), sorted({i for row in ids for i in row})
    stored = np.full((rows, WIDTH), np.nan)
    stored[used] = store(state, used, values(seed, len(used), WIDTH, block=8) / 8, number)
    return state, stored


@pytest.mark.parametrize("formats", [(REAL, REAL, REAL), (BF16, Q8, Q4_MAIN), (BF16, Q8, None), (REAL, REAL, None)])
def test_attend_is_the_loop_over_window_then_entries(formats: tuple[Number, Number, Number | None]) -> None:
    number, ring, entries = formats
    q, sink = decode(encode(normal(5, 6, HEADS * WIDTH), number)), np.array([-1.5, 0.0, 2.0], np.float32)
    window, window_values = keys_of(ring, WINDOWS, 10, 6)
    inputs = [encode(q, number), window, *listed(WINDOWS, 4), sink]
    paged: list[list[int]] = [[] for _ in WINDOWS]
    paged_values = np.zeros((12, WIDTH))
    if entries is None:
        inputs += [None] * 3
    else:
        paged = ENTRIES
        blocks, paged_values = keys_of(entries, ENTRIES, 12, 7)
        inputs += [blocks, *listed(ENTRIES, 5)]
    found = attend_case(*formats).run(*inputs)
    expected = np.stack([np.concatenate([
        naive_attend(q[r, h * WIDTH : (h + 1) * WIDTH], [*window_values[WINDOWS[r]], *paged_values[paged[r]]], float(sink[h]))
        for h in range(HEADS)]) for r in range(6)])
    assert not decode(found)[4].any(), "a row that sees no key yields 0"
    agree(found, expected, number)


def test_attend_does_not_depend_on_how_rows_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    q, sink = normal(5, 6, HEADS * WIDTH), np.zeros(HEADS, np.float32)
    (window, _), (blocks, _) = keys_of(REAL, WINDOWS, 10, 6), keys_of(REAL, ENTRIES, 12, 7)
    inputs = [q, window, *listed(WINDOWS, 4), sink, blocks, *listed(ENTRIES, 5)]
    whole = attend_case(REAL, REAL, REAL).run(*inputs)
    monkeypatch.setattr(mla, "KEYS_AT_ONCE", 2 * 9 * WIDTH)
    np.testing.assert_array_equal(attend_case(REAL, REAL, REAL).run(*inputs), whole)
    alone = [attend_case(REAL, REAL, REAL).run(*(x[r : r + 1] if isinstance(x, np.ndarray) and x.shape[0] == 6 else x for x in inputs))
             for r in range(6)]
    np.testing.assert_array_equal(np.concatenate(alone), whole)


def one_key(sink: float, key: float, q: float, count: int = 1) -> Array:
    state = poisoned(Tensor((WIDTH,), REAL), 3)
    store(state, [1], np.full((1, WIDTH), key), REAL)
    operands = [Tensor((None, WIDTH), REAL), Ring(Tensor((WIDTH,), REAL), 2), Tensor((None, 2), INT32), TABLE, Tensor((1,), FP32)]
    case = Case(mla.attend, [*operands, None, None, None], heads=1, scale=SCALE)
    inputs = (np.full((1, WIDTH), q), state, np.array([[1, -1]], np.int32), np.array([count], np.int32), np.array([sink], np.float32))
    return np.asarray(case.run(*inputs, None, None, None))


def test_sink_alone_takes_everything_or_nothing() -> None:
    """Against a sink far above the logits nothing remains; far below, the one key is returned; both without overflow."""
    assert one_key(sink=1e4, key=3.0, q=1.0).max() == 0.0
    assert one_key(sink=-1e4, key=3.0, q=1.0).tolist() == [[3.0] * WIDTH]
    assert one_key(sink=-np.inf, key=3.0, q=-1e3).tolist() == [[3.0] * WIDTH]
    assert one_key(sink=-np.inf, key=3.0, q=1.0, count=0).tolist() == [[0.0] * WIDTH]
    np.testing.assert_allclose(one_key(sink=0.0, key=3.0, q=0.0), np.full((1, WIDTH), 1.5), rtol=1e-15)


def test_the_sink_is_not_scaled() -> None:
    np.testing.assert_allclose(one_key(sink=2.0, key=1.0, q=0.0), np.full((1, WIDTH), 1 / (1 + exp(2.0))), rtol=1e-14)


def test_no_rows() -> None:
    none = np.zeros(0, np.int32)
    assert NOTHING.rows == 0
    state = poisoned(Tensor((10,), FP32), SLOTS * RING)
    case = Case(mla.pool, [Ring(Tensor((10,), FP32), RING), TABLE], length=RING, sequences=SLOTS)
    assert case.run(state, none).shape == (0, 5)
    window, blocks = poisoned(Tensor((WIDTH,), Q8), 9), poisoned(Tensor((WIDTH,), Q4_MAIN), 4)
    ids = [np.zeros((0, w), np.int32) for w in (4, 5)]
    inputs = [encode(np.zeros((0, HEADS * WIDTH)), BF16), window, ids[0], none, np.zeros(HEADS, np.float32), blocks, ids[1], none]
    assert attend_case(BF16, Q8, Q4_MAIN).run(*inputs).shape == (0, HEADS * WIDTH)


def test_cost_is_that_of_the_model_page() -> None:
    """docs/model.md 12.2: window 128 keys 16.8 MFLOP and 67,584 bytes, 512 entries 67.1 MFLOP and 147,456 bytes a row."""
    operands = [Tensor((None, 64 * 512), BF16), Ring(Tensor((512,), Q8), 134), Tensor((None, 128), INT32), TABLE, Tensor((64,), FP32)]
    paged = [Blocks(Tensor((512,), Q4_MAIN), 1), Tensor((None, 512), INT32), TABLE]
    tables = 64 * 512 * 2 + 128 * 4 + 4 + 64 * 4
    alone = Case(mla.attend, [*operands, None, None, None], heads=64, scale=1.0).cost(rows=1, entries=4096)
    assert (alone.operations, alone.read, alone.written) == ({"bf16": 16_777_216}, 67_584 + tables, 65_536)
    case = Case(mla.attend, [*operands, *paged], heads=64, scale=1.0)
    full, few = case.cost(rows=1, entries=4096), case.cost(rows=1, entries=100)
    assert (full.operations, full.read) == ({"bf16": 16_777_216 + 67_108_864}, 67_584 + 147_456 + tables + 512 * 4 + 4)
    assert few.operations == {"bf16": 4 * 64 * 512 * 228}
    assert case.cost(rows=3, entries=4096).operations == {"bf16": 3 * 83_886_080}
    pool = Case(mla.pool, [Ring(Tensor((1024,), FP32), 7), TABLE], length=7, sequences=1).cost(rows=2)
    assert (pool.read, pool.written) == (2 * (2 * 4096 + 4), 2 * 1024)


ENTRY = Tensor((WIDTH,), Q8)
GIVEN = [Tensor((None, HEADS * WIDTH), BF16), Ring(ENTRY, 9), Tensor((None, 4), INT32), TABLE, Tensor((HEADS,), FP32), None, None, None]


@pytest.mark.parametrize(("place", "view", "sentence"), [
    (0, TABLE, "q is [?] i32, expected rank 2"),
    (0, Tensor((None, 97), BF16), "q is [?, 97] bf16, expected whole columns for each of 3 heads"),
    (1, Blocks(ENTRY, 2), "window is blocks of [32] f8E4M3FN*e8m0[1x32], one for 2 tokens, expected a ring"),
    (1, Ring(Tensor((16,), BF16), 9), "window has entries [16] bf16, expected the 32 columns of one head of q"),
    (2, TABLE, "window_ids is [?] i32, expected rank 2"),
    (3, Tensor((None,), BF16), "window_counts is [?] bf16, expected [?] i32"),
    (4, Tensor((2,), FP32), "sink is [2] f32, expected [3] of real elements"),
    (6, Tensor((None, 5), INT32), "entries, ids and counts are given together or not at all"),
])
def test_attend_refusals(place: int, view: object, sentence: str) -> None:
    operands = [view if i == place else v for i, v in enumerate(GIVEN)]
    assert refusal(mla.attend, operands, heads=HEADS, scale=1.0) == f"mla.attend: {sentence}"


@pytest.mark.parametrize(("paged", "sentence"), [
    ([Ring(ENTRY, 9), Tensor((None, 5), INT32), TABLE], "entries is ring of 9 x [32] f8E4M3FN*e8m0[1x32], expected blocks"),
    ([Blocks(Tensor((8,), BF16), 2), Tensor((None, 5), INT32), TABLE],
     "entries has entries [8] bf16, expected the 32 columns of one head of q"),
    ([Blocks(ENTRY, 2), Tensor((5,), INT32), TABLE], "ids is [5] i32, expected rank 2"),
    ([Blocks(ENTRY, 2), Tensor((None, 5), INT32), Tensor((4,), INT32)], "counts is [4] i32, expected [?] i32"),
])
def test_attend_refuses_wrong_entries(paged: list[object], sentence: str) -> None:
    assert refusal(mla.attend, [*GIVEN[:5], *paged], heads=HEADS, scale=1.0) == f"mla.attend: {sentence}"


def test_attend_refuses_no_heads() -> None:
    assert refusal(mla.attend, GIVEN, heads=0, scale=1.0) == "mla.attend: attribute heads is 0, expected at least 1"


def test_pool_refusals() -> None:
    pairs = Ring(Tensor((10,), FP32), RING)
    assert refusal(mla.pool, [TABLE, TABLE], length=RING, sequences=1) == "mla.pool: pairs is [?] i32, expected a ring"
    assert refusal(mla.pool, [pairs, TABLE], length=6, sequences=1) == (
        "mla.pool: the op addresses a ring of 6 rows, but pairs is a ring of 7 x [10] f32")
    assert refusal(mla.pool, [Ring(Tensor((9,), FP32), 7), TABLE], length=7, sequences=1) == (
        "mla.pool: pairs has entries [9] f32, expected g and e, equally long")
    assert refusal(mla.pool, [pairs, pairs], length=RING, sequences=1) == "mla.pool: partners is ring of 7 x [10] f32, expected a tensor"
    assert refusal(mla.pool, [pairs, TABLE], length=RING, sequences=0) == "mla.pool: attribute sequences is 0, expected at least 1"
    assert refusal(mla.pool, [pairs, TABLE], INT32, length=RING, sequences=1) == (
        "mla.pool: the result is [?, 5] i32, expected real elements")


def test_the_verifier_says_the_same_of_text() -> None:
    case = attend_case(BF16, Q8, Q4_MAIN)
    assert "'mla.attend' q is [?, 96] bf16, expected whole columns for each of 5 heads" in complaint(case, "heads = 3", "heads = 5")
