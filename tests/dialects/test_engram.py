"""Engram: golden rows of docs/model.md appendix C, look-back over any cut of a sequence, lookup and gate by element, refusals, costs."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.dialects.harness import Case, agree, complaint, element, refusal, same, tabulate, values

from tapeout.dialects import engram
from tapeout.dialects.define import Cost
from tapeout.dialects.format import BF16, FP8_TABLE, FP8_WEIGHT, FP32, INT32, REAL, Number, encode
from tapeout.dialects.state import empty
from tapeout.dialects.types import Ring, Tensor

ROWS = Tensor((None,), INT32)
PRIMES = {
    1: [16000057, 16000079, 16000081, 16000097, 16000121, 16000129, 16000133, 16000183, 16000189, 16000207, 16000211, 16000253, 16000277,
        16000289, 16000307, 16000321, 16000339, 16000381, 16000393, 16000399, 16000403, 16000409, 16000447, 16000463],
    14: [16000477, 16000487, 16000499, 16000507, 16000511, 16000573, 16000609, 16000627, 16000667, 16000669, 16000693, 16000697, 16000711,
         16000729, 16000759, 16000769, 16000781, 16000799, 16000813, 16000819, 16000841, 16000877, 16000879, 16000889],
}
MULTIPLIERS = {1: [76632096046245, 4839876093313, 35959672319349, 73987337458391],
               14: [67716810739261, 51510806800915, 30921347202721, 82619226485591]}
GOLDEN = {
    1: [3507628, 26094887, 36875744, 59123204, 76497369, 87622947, 109186021, 122730918, 136697021, 155284773, 171860214, 177904959,
        197363312, 215093719, 233690553, 251711515, 259313488, 286992741, 294902923, 314858713, 328162689, 348118827, 362509550, 383729552],
    14: [479760, 21082118, 33005698, 62289446, 76931532, 95894768, 99694698, 117599430, 142177360, 149505520, 173443140,
         188100300, 207399932, 209357764, 239294159, 243940891, 258515087, 283181207,
         302367745, 310591021, 324744634, 342094812, 360837763, 374548603],
}
TINY = {1: ([15624748274515705, 986816876211159, 7331925616191283], [257, 263, 269, 271], [98, 290, 662, 954]),
        2: ([15599337840602443, 7563982961475545, 4617643475272425], [277, 281, 283, 293], [161, 495, 750, 1001])}


# compress


def test_compress() -> None:
    case = Case(engram.compress, [ROWS, Tensor((6,), INT32)])
    same(case.run(np.array([5, 0, 3, 3], np.int32), np.array([9, 8, 7, 6, 5, 4], np.int32)), np.array([[4], [9], [6], [6]], np.int32))
    with pytest.raises(IndexError, match="row 6 selected, found 6 rows"):
        case.run(np.array([6], np.int32), np.zeros(6, np.int32))


# lookback


def lookback_case(depth: int, length: int, sequences: int) -> Case:
    history = Ring(Tensor((1,), INT32), length)
    return Case(engram.lookback, [history, ROWS, ROWS, ROWS], depth=depth, pad=-7, length=length, sequences=sequences)


@pytest.mark.parametrize(("depth", "length"), [(4, 3), (4, 8), (3, 7), (1, 1), (2, 1)])
@pytest.mark.parametrize("cuts", [(12,), (1,) * 12, (5, 1, 4, 2), (2, 0, 3, 7)], ids=str)
def test_lookback_is_the_same_for_any_cut_of_two_sequences(depth: int, length: int, cuts: tuple[int, ...]) -> None:
    """Two sequences share every step; the second starts two tokens later and lies in the lower slot."""
    sequences, ids = 3, {2: np.arange(100, 112, dtype=np.int32), 0: np.arange(200, 212, dtype=np.int32)}
    case, state, done = lookback_case(depth, length, sequences), empty(Tensor((1,), INT32), 3 * length + 32), {2: 0, 0: 0}
    state.value[:] = -99  # a row never written shows
    for step, cut in enumerate(cuts):
        spans = {slot: range(done[slot], min(12, done[slot] + max(cut - (2 if step == 0 and slot == 0 else 0), 0))) for slot in (2, 0)}
        slots = np.array([s for s, span in spans.items() for _ in span], np.int32)
        positions = np.array([t for span in spans.values() for t in span], np.int32)
        starts = np.array([0] * len(spans[2]) + [len(spans[2])] * len(spans[0]), np.int32)
        tokens = np.array([[ids[s][t]] for s, t in zip(slots, positions, strict=True)], np.int32).reshape(-1, 1)
        state.write(sequences * length + np.arange(len(slots), dtype=np.int32), tokens)
        found = case.run(state, positions, slots, starts)
        assert found.tolist() == [[ids[s][t - b] if t >= b else -7 for b in range(depth)] for s, t in zip(slots, positions, strict=True)]
        state.write(slots * length + positions % length, tokens)
        done = {slot: span.stop for slot, span in spans.items()}


# hash


@pytest.mark.parametrize("layer", [1, 14])
def test_hash_golden(layer: int) -> None:
    case = Case(engram.hash, [Tensor((None, 4), INT32)], multipliers=MULTIPLIERS[layer], primes=PRIMES[layer], heads=8)
    assert case.run(np.array([[11, 7, 5, 3]], np.int32)).tolist() == [GOLDEN[layer]]


@pytest.mark.parametrize("layer", [1, 2])
def test_hash_golden_of_the_tiny_configuration(layer: int) -> None:
    multipliers, primes, rows = TINY[layer]
    case = Case(engram.hash, [Tensor((None, 3), INT32)], multipliers=multipliers, primes=primes, heads=2)
    assert case.run(np.array([[11, 7, 5]], np.int32)).tolist() == [rows]


def test_hash_element_by_element_up_to_the_last_id() -> None:
    back = np.array([[99091, 99091, 99091, 99091], [0, 0, 0, 0], [1, 99091, 2, 50000]], np.int32)
    found = Case(engram.hash, [Tensor((None, 4), INT32)], multipliers=MULTIPLIERS[1], primes=PRIMES[1], heads=8).run(back)
    for r in range(3):
        h, wanted = int(back[r, 0]) * MULTIPLIERS[1][0], []
        for order in (2, 3, 4):
            h ^= int(back[r, order - 1]) * MULTIPLIERS[1][order - 1]
            for head in range(8):
                column = 8 * (order - 2) + head
                wanted.append(h % PRIMES[1][column] + sum(PRIMES[1][:column]))
        assert found[r].tolist() == wanted


# lookup


@pytest.mark.parametrize("number", [FP8_TABLE, BF16, REAL], ids=str)
def test_lookup(number: Number) -> None:
    table, ids = values(1, 7, 64, number=number, block=32), np.array([[6, 0, 3], [3, 3, 5]], np.int32)
    found = Case(engram.lookup, [Tensor((None, 3), INT32), Tensor((7, 64), number)]).run(ids, table)
    wanted = tabulate((2, 192), lambda r, c: element(table, ids[r, c // 64], c % 64))
    agree(found, wanted, BF16 if number == FP8_TABLE else number)
    if number == FP8_TABLE:
        np.testing.assert_array_equal(found.astype(np.float64), wanted)  # decoding a table is exact


def test_lookup_of_a_row_that_does_not_exist() -> None:
    case = Case(engram.lookup, [Tensor((None, 2), INT32), Tensor((7, 64), FP8_TABLE)])
    with pytest.raises(IndexError, match="row -1 selected, found 7 rows"):
        case.run(np.array([[0, -1]], np.int32), values(1, 7, 64, number=FP8_TABLE))


# gate


def gate_case(number: Number, s: int, h: int) -> Case:
    operands = [Tensor((None, s, h), number), Tensor((None, (s + 1) * h), number), Tensor((s, h), BF16), Tensor((s, h), BF16)]
    return Case(engram.gate, operands, norm_epsilon=1e-20, floor=1e-6)


@pytest.mark.parametrize("number", [REAL, BF16], ids=str)
@pytest.mark.parametrize(("s", "h"), [(4, 5), (2, 1), (1, 7)])
def test_gate(number: Number, s: int, h: int) -> None:
    x, kv = values(1, 3, s, h, number=number), values(2, 3, (s + 1) * h, number=number, block=3)
    q, k = values(3, s, h, number=BF16), values(4, s, h, number=BF16)

    def gamma(r: int, i: int) -> float:
        stream = [element(x, r, i, d) for d in range(h)]
        key = [element(kv, r, i * h + d) for d in range(h)]
        rho = [(sum(v * v for v in row) / h + 1e-20) ** -0.5 for row in (stream, key)]
        delta = sum(stream[d] * element(q, i, d) * element(k, i, d) * key[d] for d in range(h)) * rho[0] * rho[1] * h**-0.5
        return 1 / (1 + math.exp(-math.copysign(math.sqrt(max(abs(delta), 1e-6)), delta)))

    wanted = tabulate((3, s, h), lambda r, i, d: element(x, r, i, d) + gamma(r, i) * element(kv, r, s * h + d))
    agree(gate_case(number, s, h).run(x, kv, q, k), wanted, number)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_gate_of_nothing_is_open_by_the_root_of_the_floor(sign: float) -> None:
    """A zero score counts as positive, whatever the sign of its zero."""
    x, kv = np.full((1, 1, 2), sign), np.array([[0.0, 0.0, 1.0, 1.0]])
    found = gate_case(REAL, 1, 2).run(x, kv, np.ones((1, 2)), np.ones((1, 2)))
    np.testing.assert_allclose(found, sign + 1 / (1 + math.exp(-1e-3)), rtol=1e-15)


# all


RING, BACK = Ring(Tensor((1,), INT32), 4), Tensor((None, 3), INT32)
LOOK = {"depth": 3, "pad": 2, "length": 4, "sequences": 2}
HASH = {"multipliers": [5, 3, 7], "primes": [257, 263, 269, 271], "heads": 2}
X, KV, WEIGHT = Tensor((None, 4, 32), BF16), Tensor((None, 160), BF16), Tensor((4, 32), BF16)
GATE = {"norm_epsilon": 1e-20, "floor": 1e-6}
EMPTY: list[tuple[Callable[..., Any], list[Any], dict[str, Any]]] = [
    (engram.compress, [ROWS, Tensor((6,), INT32)], {}),
    (engram.lookback, [RING, ROWS, ROWS, ROWS], LOOK),
    (engram.hash, [BACK], HASH),
    (engram.lookup, [BACK, Tensor((7, 64), FP8_TABLE)], {}),
    (engram.gate, [X, KV, WEIGHT, WEIGHT], GATE),
]


@pytest.mark.parametrize(("op", "operands", "attributes"), EMPTY, ids=[e[0].__name__ for e in EMPTY])
def test_no_rows(op: Callable[..., Any], operands: list[Any], attributes: dict[str, Any]) -> None:
    def fill(v: Any) -> Any:
        if isinstance(v, Ring):
            return empty(v.entry, 8)
        return np.zeros(v.sized(0), np.int32) if v.number == INT32 else encode(np.ones(v.sized(0)), v.number)
    case = Case(op, operands, **attributes)
    assert case.run(*map(fill, operands)).shape == case.results[0].sized(0)  # type: ignore[union-attr]


REFUSED: list[tuple[Callable[..., Any], list[Any], dict[str, Any], str]] = [
    (engram.compress, [ROWS, Tensor((None,), INT32)], {}, "engram.compress: token_map is [?] i32, expected [V] i32"),
    (engram.compress, [BACK, Tensor((6,), INT32)], {}, "engram.compress: ids is [?, 3] i32, expected rank 1"),
    (engram.lookback, [ROWS, ROWS, ROWS, ROWS], LOOK, "engram.lookback: history is [?] i32, expected a ring"),
    (engram.lookback, [Ring(Tensor((1,), INT32), 5), ROWS, ROWS, ROWS], LOOK,
     "engram.lookback: the op addresses a ring of 4 rows, but history is a ring of 5 x [1] i32"),
    (engram.lookback, [Ring(Tensor((2,), INT32), 4), ROWS, ROWS, ROWS], LOOK,
     "engram.lookback: history is a ring of 4 x [2] i32, expected entries of [1] i32"),
    (engram.lookback, [RING, ROWS, BACK, ROWS], LOOK, "engram.lookback: slots is [?, 3] i32, expected rank 1"),
    (engram.lookback, [RING, ROWS, ROWS, ROWS], LOOK | {"depth": 6},
     "engram.lookback: a look-back of 6 needs a history of 5 tokens, found 4"),
    (engram.lookback, [RING, ROWS, ROWS, ROWS], LOOK | {"sequences": 0}, "engram.lookback: attribute sequences is 0, expected at least 1"),
    (engram.hash, [Tensor((None, 1), INT32)], HASH, "engram.hash: lookback must have at least 2 columns, found 1"),
    (engram.hash, [BACK], HASH | {"multipliers": [5, 3]}, "engram.hash: multipliers must be one a column of lookback, 3, found 2"),
    (engram.hash, [BACK], HASH | {"heads": 3}, "engram.hash: primes must be one an order and head, 6, found 4"),
    (engram.hash, [BACK], HASH | {"heads": 0}, "engram.hash: attribute heads is 0, expected at least 1"),
    (engram.hash, [BACK], HASH | {"primes": [257, 263, 0, 271]}, "engram.hash: primes must be at least 1, found 0"),
    (engram.hash, [BACK], HASH | {"primes": [2**29] * 3 + [2**30]},
     "engram.hash: the table has 2684354560 rows, more than an i32 can number"),
    (engram.lookup, [ROWS, Tensor((7, 64), FP8_TABLE)], {}, "engram.lookup: ids is [?] i32, expected rank 2"),
    (engram.lookup, [BACK, Tensor((7, 64), FP8_WEIGHT)], {},
     "engram.lookup: table must have one row a scale, found [7, 64] f8E4M3FN*e8m0[32x32]"),
    (engram.gate, [X, Tensor((None, 128), BF16), WEIGHT, WEIGHT], GATE,
     "engram.gate: kv is [?, 128] bf16, expected [?, 160] of real elements"),
    (engram.gate, [X, KV, Tensor((4, 31), BF16), WEIGHT], GATE, "engram.gate: q_weight is [4, 31] bf16, expected [4, 32] of real elements"),
    (engram.gate, [X, KV, WEIGHT, Tensor((32,), FP32)], GATE, "engram.gate: k_weight is [32] f32, expected rank 2"),
    (engram.gate, [X, KV, WEIGHT, WEIGHT], GATE | {"floor": -1.0},
     "engram.gate: norm_epsilon and floor must be at least 0, found 1e-20 and -1.0"),
]


@pytest.mark.parametrize(("op", "operands", "attributes", "sentence"), REFUSED, ids=[r[3][:60] for r in REFUSED])
def test_refused(op: Callable[..., Any], operands: list[Any], attributes: dict[str, Any], sentence: str) -> None:
    assert refusal(op, operands, **attributes) == sentence


def test_the_verifier_says_the_same_of_text() -> None:
    case = Case(engram.hash, [BACK], **HASH)
    assert complaint(case, "heads = 2", "heads = 3") == "'engram.hash' primes must be one an order and head, 6, found 4"
    look = Case(engram.lookback, [RING, ROWS, ROWS, ROWS], **LOOK)
    wrong = "'engram.lookback' the op addresses a ring of 5 rows, but history is a ring of 4 x [1] i32"
    assert complaint(look, "length = 4", "length = 5") == wrong


def test_costs() -> None:
    r = 5
    assert Case(engram.compress, [ROWS, Tensor((600,), INT32)]).cost(r) == Cost(r * 4 + r * 4, r * 4)
    assert Case(engram.lookback, [RING, ROWS, ROWS, ROWS], **LOOK).cost(r) == Cost(3 * r * 4 + r * 3 * 4, r * 3 * 4)
    assert Case(engram.hash, [BACK], **HASH).cost(r) == Cost(r * 12, r * 16, {"integer": r * (3 + 2 + 2 * 4)})
    table = Tensor((1000, 64), FP8_TABLE)
    assert Case(engram.lookup, [BACK, table]).cost(r) == Cost(r * 12 + r * 3 * 66, r * 3 * 64 * 2)
    gate = Case(engram.gate, [X, KV, WEIGHT, WEIGHT], **GATE)
    assert gate.cost(r) == Cost(r * 256 + r * 320 + 2 * 256, r * 256, {"f32": 10 * r * 128})
