"""The experts: meaning against docs/model.md 5 element by element, the gate's golden values, refusals, empty rows, costs."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.dialects.harness import Case, agree, complaint, element, refusal, tabulate, values

from tapeout.dialects import moe
from tapeout.dialects.define import Cost
from tapeout.dialects.format import BF16, FP4_WEIGHT, FP8_WEIGHT, FP32, INT32, Q8, REAL, Number, encode
from tapeout.dialects.types import Tensor

BOTH = pytest.mark.parametrize("number", [REAL, BF16], ids=str)


def wide(number: Number) -> Number:
    return REAL if number == REAL else FP32


def chosen(seed: int, rows: int, k: int, experts: int) -> np.ndarray:
    """Distinct experts a row, some experts never."""
    rng = np.random.default_rng(seed)
    return np.array([rng.permutation(experts - 1)[:k] for _ in range(rows)], np.int32).reshape(rows, k)


# gate


def gate_case(number: Number, h: int, experts: int, k: int, scale: float = 1.5) -> Case:
    return Case(moe.gate, [Tensor((None, h), number), Tensor((experts, h), number), Tensor((experts,), FP32)], top_k=k, scale=scale)


def test_gate_golden() -> None:
    z = np.array([[2.0], [1.0], [0.0], [-1.0]])
    experts, weights = gate_case(REAL, 1, 4, 2).run(np.ones((1, 1)), z, np.zeros(4, np.float32))
    assert experts.tolist() == [[0, 1]]
    np.testing.assert_allclose(weights, [[0.8400, 0.6600]], rtol=0, atol=5e-5)  # four printed digits
    np.testing.assert_allclose(np.sqrt(moe.softplus(z))[:, 0], [1.4584, 1.1460, 0.8326, 0.5597], rtol=0, atol=5e-5)


@BOTH
@pytest.mark.parametrize(("experts", "k"), [(7, 3), (5, 1), (4, 4)])
def test_gate(number: Number, experts: int, k: int) -> None:
    x, w, b = values(1, 6, 5, number=number), values(2, experts, 5, number=number), values(3, experts, number=FP32, block=1)
    found, weights = gate_case(number, 5, experts, k).run(x, w, b)
    for r in range(6):
        z = [sum(element(w, e, i) * element(x, r, i) for i in range(5)) for e in range(experts)]
        s = [math.sqrt(v if v > 20 else math.log1p(math.exp(v))) for v in z]
        best = sorted(range(experts), key=lambda e: (-(s[e] + element(b, e)), e))[:k]
        assert found[r].tolist() == best
        agree(weights[r], np.array([1.5 * s[e] / (sum(s[c] for c in best) + 1e-20) for e in best]), wide(number))


def test_gate_ties_go_to_the_lowest_id_and_the_bias_only_chooses() -> None:
    x, w = np.zeros((2, 3)), values(1, 6, 3)
    experts, weights = gate_case(REAL, 3, 6, 4).run(x, w, np.zeros(6, np.float32))
    assert experts.tolist() == [[0, 1, 2, 3]] * 2
    experts, weights = gate_case(REAL, 3, 6, 4).run(x, w, np.array([0, 1, 0, 2, 0, 1], np.float32))
    assert experts.tolist() == [[3, 1, 5, 0]] * 2
    np.testing.assert_allclose(weights, 1.5 / 4, rtol=1e-15)


def test_gate_of_extreme_scores_is_finite() -> None:
    experts, weights = gate_case(REAL, 1, 3, 3).run(np.array([[1.0], [-1.0]]), np.array([[1e4], [-1e4], [800.0]]), np.zeros(3, np.float32))
    assert experts.tolist() == [[0, 2, 1], [1, 0, 2]]
    s = [math.sqrt(1e4), math.sqrt(800.0)]  # of a score above 20 the score itself, of the least one nothing
    np.testing.assert_allclose(weights, [[1.5 * s[0] / sum(s), 1.5 * s[1] / sum(s), 0.0], [1.5, 0.0, 0.0]], rtol=1e-15)


# dispatch


@pytest.mark.parametrize(("rows", "k", "experts"), [(7, 3, 6), (1, 1, 2), (5, 2, 97), (0, 2, 4)])
def test_dispatch(rows: int, k: int, experts: int) -> None:
    ids = chosen(1, rows, k, experts)
    order, places, offsets = Case(moe.dispatch, [Tensor((None, k), INT32)], experts=experts).run(ids)
    pairs = sorted(range(rows * k), key=lambda p: (ids[p // k, p % k], p))
    assert order.reshape(-1).tolist() == pairs
    assert places.reshape(-1).tolist() == [pairs.index(p) for p in range(rows * k)]
    assert offsets.tolist() == [sum(int(e) < bound for e in ids.reshape(-1)) for bound in range(experts + 1)]


def test_dispatch_refuses_an_expert_that_does_not_exist() -> None:
    case = Case(moe.dispatch, [Tensor((None, 2), INT32)], experts=4)
    with pytest.raises(IndexError, match=r"expert ids lie in 1 .. 4, expected 0 .. 3"):
        case.run(np.array([[1, 4]], np.int32))


# expert_linear


def expert_case(x: Number, w: Number, shape: tuple[int, int, int], k: int, gathered: bool) -> Case:
    experts, _, width = shape
    entry = (None, width) if gathered else (None, k, width)
    tables = [Tensor((None, k), INT32), Tensor((experts + 1,), INT32)]
    return Case(moe.expert_linear, [Tensor(entry, x), Tensor(shape, w), *tables], gathered=gathered)


@pytest.mark.parametrize(("x_number", "w_number", "n", "width"), [(REAL, REAL, 3, 5), (BF16, BF16, 3, 5), (Q8, FP4_WEIGHT, 3, 64),
                                                                  (Q8, FP8_WEIGHT, 33, 32)], ids=str)
@pytest.mark.parametrize("gathered", [True, False])
def test_expert_linear(x_number: Number, w_number: Number, n: int, width: int, gathered: bool) -> None:
    rows, k, experts = 5, 2, 6
    ids = chosen(4, rows, k, experts)
    order, _, offsets = Case(moe.dispatch, [Tensor((None, k), INT32)], experts=experts).run(ids)
    x = values(1, *((rows, width) if gathered else (rows, k, width)), number=x_number, block=32)
    w = values(2, experts, n, width, number=w_number, block=32)
    def y(row: int, column: int, o: int) -> float:
        pair = int(order[row, column])
        expert, at = ids[pair // k, pair % k], (pair // k,) if gathered else (row, column)
        return sum(element(w, expert, o, i) * element(x, *at, i) for i in range(width))
    found = expert_case(x_number, w_number, (experts, n, width), k, gathered).run(x, w, order, offsets)
    agree(found, tabulate((rows, k, n), y), BF16 if x_number == Q8 else x_number)


# swiglu


def swish(g: float, u: float, limit: float) -> float:
    g = min(g, limit)
    return g / (1 + math.exp(-g)) * max(-limit, min(u, limit))


@BOTH
def test_swiglu_of_the_shared_expert_clamps(number: Number) -> None:
    g, u = values(1, 4, 37, number=number) * 2, values(2, 4, 37, number=number) * 2
    assert (g > 3).any() and (g < -3).any() and (u > 3).any() and (u < -3).any()
    found = Case(moe.swiglu, [Tensor((None, 74), number), None, None], limit=3.0).run(np.concatenate([g, u], -1), None, None)
    agree(found, tabulate((4, 37), lambda r, f: swish(element(g, r, f), element(u, r, f), 3.0)), number)


@BOTH
def test_swiglu_of_sorted_pairs_weighs_each_by_its_own_pair(number: Number) -> None:
    rows, k, f = 4, 3, 5
    order = np.random.default_rng(3).permutation(rows * k).reshape(rows, k).astype(np.int32)
    g, u, w = values(1, rows, k, f, number=number), values(2, rows, k, f, number=number), values(3, rows, k, number=FP32, block=1)
    views = [Tensor((None, k, 2 * f), number), Tensor((None, k), FP32), Tensor((None, k), INT32)]
    found = Case(moe.swiglu, views, limit=10.0).run(np.concatenate([g, u], -1), w, order)
    def y(r: int, c: int, i: int) -> float:
        p = int(order[r, c])
        return swish(element(g, r, c, i), element(u, r, c, i), 10.0) * element(w, p // k, p % k)
    agree(found, tabulate((rows, k, f), y), number)


def test_swiglu_far_out() -> None:
    g = np.array([[-1e4, -745.0, 0.0, 1e4]])
    x = np.concatenate([g, np.full((1, 4), 1e9)], -1)
    found = Case(moe.swiglu, [Tensor((None, 8), REAL), None, None], limit=10.0).run(x, None, None)
    np.testing.assert_allclose(found, [[0, 0, 0, swish(10.0, 10.0, 10.0)]], rtol=1e-12, atol=1e-300)


# combine


@BOTH
def test_combine(number: Number) -> None:
    rows, k, h = 4, 3, 5
    places = np.random.default_rng(5).permutation(rows * k).reshape(rows, k).astype(np.int32)
    y, shared = values(1, rows, k, h, number=number), values(2, rows, h, number=number)
    found = Case(moe.combine, [Tensor((None, k, h), number), Tensor((None, k), INT32), Tensor((None, h), number)]).run(y, places, shared)
    def out(r: int, d: int) -> float:
        return sum(element(y, int(places[r, c]) // k, int(places[r, c]) % k, d) for c in range(k)) + element(shared, r, d)
    agree(found, tabulate((rows, h), out), number)


def test_dispatch_linear_combine_is_each_rows_own_experts() -> None:
    rows, k, experts, h = 6, 2, 5, 4
    ids = chosen(9, rows, k, experts)
    x, w, shared = values(1, rows, h), values(2, experts, h, h), values(3, rows, h)
    order, places, offsets = Case(moe.dispatch, [Tensor((None, k), INT32)], experts=experts).run(ids)
    y = expert_case(REAL, REAL, (experts, h, h), k, True).run(x, w, order, offsets)
    found = Case(moe.combine, [Tensor((None, k, h), REAL), Tensor((None, k), INT32), Tensor((None, h), REAL)]).run(y, places, shared)
    for r in range(rows):
        np.testing.assert_allclose(found[r], sum(w[e] @ x[r] for e in ids[r]) + shared[r], rtol=1e-12)


# all


PAIRS, OFFSETS = Tensor((None, 2), INT32), Tensor((5,), INT32)
X, W, BIAS = Tensor((None, 32), BF16), Tensor((4, 32), BF16), Tensor((4,), FP32)
SORTED, EXPERTS = Tensor((None, 2, 32), BF16), Tensor((4, 3, 32), FP4_WEIGHT)
GATE = {"top_k": 2, "scale": 1.5}
EMPTY: list[tuple[Callable[..., Any], list[Any], dict[str, Any]]] = [
    (moe.gate, [X, W, BIAS], GATE),
    (moe.dispatch, [PAIRS], {"experts": 4}),
    (moe.expert_linear, [Tensor((None, 32), Q8), EXPERTS, PAIRS, OFFSETS], {"gathered": True}),
    (moe.expert_linear, [SORTED, EXPERTS, PAIRS, OFFSETS], {"gathered": False}),
    (moe.swiglu, [SORTED, Tensor((None, 2), FP32), PAIRS], {"limit": 10.0}),
    (moe.swiglu, [X, None, None], {"limit": 10.0}),
    (moe.combine, [SORTED, PAIRS, X], {}),
]


@pytest.mark.parametrize(("op", "operands", "attributes"), EMPTY, ids=[e[0].__name__ for e in EMPTY])
def test_no_rows(op: Callable[..., Any], operands: list[Any], attributes: dict[str, Any]) -> None:
    case = Case(op, operands, **attributes)
    found = case.run(*[None if v is None else np.zeros(v.sized(0), np.int32) if v.number == INT32 else encode(np.ones(v.sized(0)), v.number)
                       for v in operands])
    for value, view in zip(found if isinstance(found, tuple) else (found,), case.results, strict=True):
        assert value.shape == view.sized(0)  # type: ignore[union-attr]


REFUSED: list[tuple[Callable[..., Any], list[Any], dict[str, Any], str]] = [
    (moe.gate, [X, Tensor((4, 31), BF16), BIAS], GATE, "moe.gate: weight is [4, 31] bf16, expected [E, 32] of real elements"),
    (moe.gate, [X, W, Tensor((5,), FP32)], GATE, "moe.gate: bias is [5] f32, expected [4] of real elements"),
    (moe.gate, [X, W, BIAS], GATE | {"top_k": 5}, "moe.gate: top_k must lie in 1 .. 4, the number of experts, found 5"),
    (moe.gate, [Tensor((None, 32), INT32), W, BIAS], GATE, "moe.gate: x is [?, 32] i32, expected [?, H] of real elements"),
    (moe.dispatch, [Tensor((None, 2), FP32)], {"experts": 4}, "moe.dispatch: chosen is [?, 2] f32, expected [?, k] i32"),
    (moe.dispatch, [PAIRS], {"experts": 0}, "moe.dispatch: attribute experts is 0, expected at least 1"),
    (moe.expert_linear, [SORTED, EXPERTS, PAIRS, OFFSETS], {"gathered": True}, "moe.expert_linear: x is [?, 2, 32] bf16, expected rank 2"),
    (moe.expert_linear, [SORTED, EXPERTS, Tensor((None, 3), INT32), OFFSETS], {"gathered": False},
     "moe.expert_linear: x is [?, 2, 32] bf16, expected [?, 3, 32] of real elements"),
    (moe.expert_linear, [X, EXPERTS, PAIRS, Tensor((4,), INT32)], {"gathered": True},
     "moe.expert_linear: offsets is [4] i32, expected [5] i32"),
    (moe.expert_linear, [X, W, PAIRS, OFFSETS], {"gathered": True}, "moe.expert_linear: weight is [4, 32] bf16, expected rank 3"),
    (moe.expert_linear, [X, EXPERTS, PAIRS, OFFSETS], {"gathered": 1},
     "moe.expert_linear: attribute gathered is 1, expected true or false"),
    (moe.swiglu, [X, None, PAIRS], {"limit": 10.0}, "moe.swiglu: weights and order come together: one of them is absent"),
    (moe.swiglu, [SORTED, None, None], {"limit": 10.0}, "moe.swiglu: x is [?, 2, 32] bf16, expected rank 2"),
    (moe.swiglu, [Tensor((None, 33), BF16), None, None], {"limit": 10.0},
     "moe.swiglu: x is [?, 33] bf16, expected an even number of columns: the gate's, then as many of up"),
    (moe.swiglu, [X, None, None], {"limit": 0.0}, "moe.swiglu: limit must be above 0, found 0.0"),
    (moe.swiglu, [SORTED, Tensor((None, 3), FP32), PAIRS], {"limit": 10.0},
     "moe.swiglu: weights is [?, 3] f32, expected [?, 2] of real elements"),
    (moe.swiglu, [SORTED, Tensor((None, 2), FP32), Tensor((None,), INT32)], {"limit": 10.0},
     "moe.swiglu: order is [?] i32, expected rank 2"),
    (moe.combine, [SORTED, Tensor((None, 3), INT32), X], {}, "moe.combine: places is [?, 3] i32, expected [?, 2] i32"),
    (moe.combine, [SORTED, PAIRS, Tensor((None, 31), BF16)], {}, "moe.combine: shared is [?, 31] bf16, expected [?, 32] of real elements"),
]


@pytest.mark.parametrize(("op", "operands", "attributes", "sentence"), REFUSED, ids=[r[3][:60] for r in REFUSED])
def test_refused(op: Callable[..., Any], operands: list[Any], attributes: dict[str, Any], sentence: str) -> None:
    assert refusal(op, operands, **attributes) == sentence


def test_the_verifier_says_the_same_of_text() -> None:
    case = Case(moe.gate, [X, W, BIAS], **GATE)
    assert complaint(case, "top_k = 2", "top_k = 9") == "'moe.gate' top_k must lie in 1 .. 4, the number of experts, found 9"
    assert complaint(case, "tensor<?x2xi32>", "tensor<?x2xi64>") == "'moe.gate' result experts is [?, 2] i64, expected [?, 2] i32"


def test_costs() -> None:
    r, row = 5, 64
    assert Case(moe.gate, [X, W, BIAS], **GATE).cost(r) == Cost(
        r * row + 4 * row + 4 * 4, r * (2 * 4 + 2 * 4), {"bf16": 2 * r * 4 * 32, "f32": 3 * r * 4})
    assert Case(moe.dispatch, [PAIRS], experts=4).cost(r) == Cost(r * 8, 2 * r * 8 + 5 * 4, {"integer": 4 * r * 2 + 4})
    routed = expert_case(Q8, FP4_WEIGHT, (4, 3, 32), 2, True)
    expert = 3 * 32 // 2 + 3
    for experts, hit in ((0, 4), (2, 2), (9, 4)):
        assert routed.cost(r, experts=experts) == Cost(r * 33 + r * 8 + 5 * 4 + hit * expert, r * 2 * 3 * 2, {"fp4": 2 * r * 2 * 3 * 32})
    assert routed.cost(1).read == 33 + 8 + 5 * 4 + 2 * expert  # two pairs hit two experts at most
    shared = Case(moe.swiglu, [X, None, None], limit=10.0)
    assert shared.cost(r) == Cost(r * row, r * row // 2, {"f32": 8 * r * 16})
    assert Case(moe.combine, [SORTED, PAIRS, X]).cost(r) == Cost(r * (2 * row + 8 + row), r * row, {"f32": r * 2 * 32})
