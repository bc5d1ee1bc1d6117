"""The residual streams: meaning against docs/model.md 3 element by element, the Sinkhorn golden values, refusals, empty rows, costs."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.dialects.harness import Case, agree, complaint, element, refusal, same, tabulate, values

from tapeout.dialects import mhc
from tapeout.dialects.define import Cost
from tapeout.dialects.format import BF16, FP32, INT32, REAL, Number, Scaled, encode
from tapeout.dialects.types import Tensor

MIXER = {"iterations": 20, "epsilon": 1e-6, "norm_epsilon": 1e-20}
BOTH = pytest.mark.parametrize("number", [REAL, BF16], ids=str)


def wide(number: Number) -> Number:
    return REAL if number == REAL else FP32


def mixer_case(number: Number, s: int, h: int, **more: Any) -> Case:
    n = (2 + s) * s
    weights = [Tensor((n, s * h), FP32), Tensor((n,), FP32), Tensor((3,), FP32)]
    return Case(mhc.mixer, [Tensor((None, s, h), number), *weights], **MIXER | more)


@BOTH
def test_start(number: Number) -> None:
    case = Case(mhc.start, [Tensor((None, 5), number)], streams=3)
    x = values(1, 2, 5, number=number)
    streams, premix = case.run(x)
    agree(streams, tabulate((2, 3, 5), lambda r, i, d: element(x, r, d)), number)
    agree(premix, np.array([[1.0, 0, 0], [1.0, 0, 0]]), wide(number))


def test_sinkhorn_golden() -> None:
    c = [[0, 1, 2, 3], [1, 0, -1, 2], [0.5, 0.5, 0.5, 0.5], [-2, 0, 2, -1]]
    wanted = [[0.088392022, 0.215957347, 0.197079934, 0.498569697], [0.468412839, 0.154883964, 0.019129501, 0.357572697],
              [0.402998749, 0.362220223, 0.121606220, 0.113173809], [0.040195390, 0.266937467, 0.662183345, 0.030682796]]
    base = np.concatenate([np.zeros(8), np.ravel(c)]).astype(np.float32)
    x, fn, scale = values(1, 1, 4, 3), np.zeros((24, 12), np.float32), np.ones(3, np.float32)
    pre, post, comb = mixer_case(REAL, 4, 3).run(x, fn, base, scale)
    np.testing.assert_allclose(comb[0], wanted, rtol=0, atol=1e-9)  # nine printed digits
    np.testing.assert_allclose([pre[0], post[0]], [[0.5 + 1e-6] * 4, [1.0] * 4], rtol=1e-15)


def naive_mixer(x: Any, fn: Any, base: Any, scale: Any, iterations: int, eps: float, norm: float) -> tuple[np.ndarray, ...]:
    rows, s, h = x.shape
    pre, post, comb = np.zeros((rows, s)), np.zeros((rows, s)), np.zeros((rows, s, s))
    for r in range(rows):
        u = [element(x, r, n // h, n % h) for n in range(s * h)]
        rho = (sum(v * v for v in u) / (s * h) + norm) ** -0.5
        m = [rho * sum(element(fn, c, n) * u[n] for n in range(s * h)) for c in range((2 + s) * s)]
        for i in range(s):
            pre[r, i] = 1 / (1 + math.exp(-(m[i] * element(scale, 0) + element(base, i)))) + eps
            post[r, i] = 2 / (1 + math.exp(-(m[s + i] * element(scale, 1) + element(base, s + i))))
        c = [[m[2 * s + s * i + j] * element(scale, 2) + element(base, 2 * s + s * i + j) for j in range(s)] for i in range(s)]
        p = [[math.exp(c[i][j]) / sum(math.exp(v) for v in c[i]) + eps for j in range(s)] for i in range(s)]
        for step in range(2 * iterations - 1):
            if step % 2 == 0:
                sums = [sum(p[i][j] for i in range(s)) + eps for j in range(s)]
                p = [[p[i][j] / sums[j] for j in range(s)] for i in range(s)]
            else:
                p = [[p[i][j] / (sum(p[i]) + eps) for j in range(s)] for i in range(s)]
        comb[r] = p
    return pre, post, comb


@BOTH
@pytest.mark.parametrize(("s", "h", "iterations"), [(4, 5, 20), (2, 7, 1), (1, 1, 3), (3, 2, 2)])
def test_mixer(number: Number, s: int, h: int, iterations: int) -> None:
    x, n = values(1, 3, s, h, number=number), (2 + s) * s
    weights = [values(2, n, s * h, number=FP32), values(3, n, number=FP32), values(4, 3, number=FP32)]
    found = mixer_case(number, s, h, iterations=iterations).run(x, *weights)
    for result, wanted in zip(found, naive_mixer(x, *weights, iterations, 1e-6, 1e-20), strict=True):
        agree(result, wanted, wide(number))


def test_mixer_of_extreme_inputs_is_finite() -> None:
    x = values(1, 2, 2, 3) * np.array([0.0, 1e300])[:, None, None] ** 0.5
    fn = values(2, 8, 6, number=FP32) * 1000
    for result in mixer_case(REAL, 2, 3).run(x, fn, np.zeros(8, np.float32), np.full(3, 1e4, np.float32)):
        assert np.isfinite(result).all()


@BOTH
def test_collapse(number: Number) -> None:
    x, a = values(1, 3, 4, 5, number=number), values(2, 3, 4, number=FP32)
    found = Case(mhc.collapse, [Tensor((None, 4, 5), number), Tensor((None, 4), FP32)]).run(x, a)
    agree(found, tabulate((3, 5), lambda r, d: sum(element(a, r, i) * element(x, r, i, d) for i in range(4))), number)


def expand_case(number: Number, s: int, h: int) -> Case:
    return Case(mhc.expand, [Tensor((None, s, h), number), Tensor((None, h), BF16), Tensor((None, s), FP32), Tensor((None, s, s), FP32)])


@BOTH
def test_expand_sums_over_the_source_stream(number: Number) -> None:
    x, y = values(1, 2, 4, 5, number=number), values(2, 2, 5, number=BF16)
    post, comb = values(3, 2, 4, number=FP32), values(4, 2, 4, 4, number=FP32, block=1)
    def streams(r: int, j: int, d: int) -> float:
        return element(post, r, j) * element(y, r, d) + sum(element(comb, r, i, j) * element(x, r, i, d) for i in range(4))
    agree(expand_case(number, 4, 5).run(x, y, post, comb), tabulate((2, 4, 5), streams), number)


def test_expand_with_identity_keeps_the_streams() -> None:
    x, y = values(1, 2, 3, 5, number=BF16), values(2, 2, 5, number=BF16)
    identity = np.tile(np.eye(3, dtype=np.float32), (2, 1, 1))
    same(expand_case(BF16, 3, 5).run(x, y, np.zeros((2, 3), np.float32), identity), x)


@BOTH
def test_mean(number: Number) -> None:
    x = values(1, 3, 4, 5, number=number)
    found = Case(mhc.mean, [Tensor((None, 4, 5), number)]).run(x)
    agree(found, tabulate((3, 5), lambda r, d: sum(element(x, r, i, d) for i in range(4)) / 4), number)


def test_results_may_be_asked_for() -> None:
    case = Case(mhc.start, [Tensor((None, 5), BF16)], out=[REAL, REAL], streams=2)
    assert case.results == [Tensor((None, 2, 5), REAL), Tensor((None, 2), REAL)]
    assert [r.number for r in mixer_case(BF16, 2, 3, out=[BF16, REAL, None]).results] == [BF16, REAL, FP32]


X = Tensor((None, 4, 32), BF16)
EMPTY: list[tuple[Callable[..., Any], list[Tensor], dict[str, Any]]] = [
    (mhc.start, [Tensor((None, 5), BF16)], {"streams": 4}),
    (mhc.mixer, [X, Tensor((24, 128), FP32), Tensor((24,), FP32), Tensor((3,), FP32)], MIXER),
    (mhc.collapse, [X, Tensor((None, 4), FP32)], {}),
    (mhc.expand, [X, Tensor((None, 32), BF16), Tensor((None, 4), FP32), Tensor((None, 4, 4), FP32)], {}),
    (mhc.mean, [X], {}),
]


@pytest.mark.parametrize(("op", "operands", "attributes"), EMPTY, ids=[e[0].__name__ for e in EMPTY])
def test_no_rows(op: Callable[..., Any], operands: list[Tensor], attributes: dict[str, Any]) -> None:
    case = Case(op, operands, **attributes)
    found = case.run(*[encode(np.ones(v.sized(0)), v.number) for v in operands])
    for value, view in zip(found if isinstance(found, tuple) else (found,), case.results, strict=True):
        assert value.shape == view.sized(0) and not isinstance(value, Scaled)  # type: ignore[union-attr]


FN, BASE, SCALE = Tensor((24, 128), FP32), Tensor((24,), FP32), Tensor((3,), FP32)
POST, COMB, Y = Tensor((None, 4), FP32), Tensor((None, 4, 4), FP32), Tensor((None, 32), BF16)
REFUSED: list[tuple[Callable[..., Any], list[Any], dict[str, Any], str]] = [
    (mhc.start, [X], {"streams": 4}, "mhc.start: x is [?, 4, 32] bf16, expected rank 2"),
    (mhc.start, [Y], {"streams": 0}, "mhc.start: attribute streams is 0, expected at least 1"),
    (mhc.start, [Y], {"streams": 4, "out": INT32}, "mhc.start: the result is [?, 4, 32] i32, expected real elements"),
    (mhc.mixer, [Y, FN, BASE, SCALE], MIXER, "mhc.mixer: X is [?, 32] bf16, expected rank 3"),
    (mhc.mixer, [X, Tensor((24, 129), FP32), BASE, SCALE], MIXER, "mhc.mixer: fn is [24, 129] f32, expected [24, 128] of real elements"),
    (mhc.mixer, [X, FN, Tensor((23,), FP32), SCALE], MIXER, "mhc.mixer: base is [23] f32, expected [24] of real elements"),
    (mhc.mixer, [X, FN, BASE, Tensor((4,), FP32)], MIXER, "mhc.mixer: scale is [4] f32, expected [3] of real elements"),
    (mhc.mixer, [X, FN, BASE, SCALE], MIXER | {"iterations": 0}, "mhc.mixer: attribute iterations is 0, expected at least 1"),
    (mhc.mixer, [X, FN, BASE, SCALE], MIXER | {"epsilon": 0.0},
     "mhc.mixer: epsilon must be above 0 and norm_epsilon at least 0, found 0.0 and 1e-20"),
    (mhc.collapse, [X, Tensor((None, 3), FP32)], {}, "mhc.collapse: premix is [?, 3] f32, expected [?, 4] of real elements"),
    (mhc.expand, [X, Tensor((None, 31), BF16), POST, COMB], {}, "mhc.expand: y is [?, 31] bf16, expected [?, 32] of real elements"),
    (mhc.expand, [X, Y, Tensor((4,), FP32), COMB], {}, "mhc.expand: post is [4] f32, expected rank 2"),
    (mhc.expand, [X, Y, POST, Tensor((None, 4, 5), FP32)], {}, "mhc.expand: comb is [?, 4, 5] f32, expected [?, 4, 4] of real elements"),
    (mhc.mean, [Tensor((2, 4, 5), BF16)], {}, "mhc.mean: X is [2, 4, 5] bf16, expected [?, S, H] of real elements"),
]


@pytest.mark.parametrize(("op", "operands", "attributes", "sentence"), REFUSED, ids=[r[3][:60] for r in REFUSED])
def test_refused(op: Callable[..., Any], operands: list[Any], attributes: dict[str, Any], sentence: str) -> None:
    assert refusal(op, operands, **attributes) == sentence


def test_the_verifier_says_the_same_of_text() -> None:
    case = mixer_case(BF16, 4, 5)
    assert complaint(case, "iterations = 20", "iterations = 0") == "'mhc.mixer' attribute iterations is 0, expected at least 1"
    assert complaint(case, "tensor<?x4x4xf32>", "tensor<?x4x3xf32>") == "'mhc.mixer' result comb is [?, 4, 3] f32, expected [?, 4, 4] f32"


def test_costs() -> None:
    r, stream, row, four, comb = 3, 4 * 32 * 2, 32 * 2, 4 * 4, 4 * 4 * 4
    assert Case(mhc.start, [Y], streams=4).cost(r) == Cost(r * row, r * (stream + four))
    per_row = 2 * 24 * 128 + 3 * 128 + 4 * 16 * 20
    assert mixer_case(BF16, 4, 32).cost(r) == Cost(r * stream + 4 * (24 * 128 + 24 + 3), r * (2 * four + comb), {"f32": r * per_row})
    assert Case(mhc.collapse, [X, POST]).cost(r) == Cost(r * (stream + four), r * row, {"f32": r * 2 * 128})
    assert Case(mhc.expand, [X, Y, POST, COMB]).cost(r) == Cost(r * (stream + row + four + comb), r * stream, {"f32": r * 2 * 5 * 128})
    assert Case(mhc.mean, [X]).cost(r) == Cost(r * stream, r * row, {"f32": r * 128})
