"""Streams: every op inside its bound, fused collapse bit-equal to its ops one by one, rows independent."""

from functools import partial

import numpy as np
import pytest

from tapeout.dialects import mhc, nn
from tapeout.dialects.format import BF16, FP32, Q8, decode
from tapeout.dialects.types import Tensor
from tests.codegen.kernels.harness import COMPILED, HOW, ROWS, KernelCase, assert_close, assert_same, gamma, numbers, row, uneven, whole

EPSILON = 1e-6
SHAPES = [(4, 96, {"block_columns": 32}), (2, 40, {"block_columns": 20}), (4, 512, {}), (4, 96, {"block_columns": 16, "parts": 3}),
          (3, 96, {"block_columns": 32, "parts": 3})]  # fmt: skip


def streams(seed, count, s, h):
    return uneven(seed, count, s * h).reshape(count, s, h)


def premixes(seed, count, *shape):
    return numbers(seed, count, *shape, number=FP32)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("s", "h", "schedule"), SHAPES)
def test_start_copies(how, s, h, schedule):
    case = KernelCase(partial(mhc.start, streams=s, out=(BF16, FP32)), [Tensor((None, h), BF16)], **schedule)
    for count in ROWS:
        x = uneven(count, count, h)
        assert_same(case.run(how, x), case.meaning(x))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("s", "h", "schedule"), SHAPES)
def test_collapse_is_the_sum(how, s, h, schedule):
    case = KernelCase(partial(mhc.collapse, out=BF16), [Tensor((None, s, h), BF16), Tensor((None, s), FP32)], **schedule)
    for count in ROWS:
        x, a = streams(count, count, s, h), premixes(9, count, s)
        (found,) = case.run(how, x, a)
        terms = decode(a)[:, :, None] * decode(x)
        assert_close(found, terms.sum(1), gamma(s) * np.abs(terms).sum(1), BF16)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("s", "h", "schedule"), SHAPES)
def test_mean_is_the_mean(how, s, h, schedule):
    case = KernelCase(partial(mhc.mean, out=BF16), [Tensor((None, s, h), BF16)], **schedule)
    for count in ROWS:
        x = streams(count, count, s, h)
        (found,) = case.run(how, x)
        assert_close(found, decode(x).mean(1), gamma(s) * np.abs(decode(x)).mean(1), BF16)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("s", "h", "schedule"), SHAPES)
def test_expand_is_the_sum(how, s, h, schedule):
    views = [Tensor((None, s, h), BF16), Tensor((None, h), BF16), Tensor((None, s), FP32), Tensor((None, s, s), FP32)]
    case = KernelCase(partial(mhc.expand, out=BF16), views, **schedule)
    for count in ROWS:
        x, y = streams(count, count, s, h), uneven(8, count, h)
        post, comb = premixes(9, count, s), premixes(10, count, s, s)
        (found,) = case.run(how, x, y, post, comb)
        terms = [decode(post)[:, :, None] * decode(y)[:, None], *(decode(comb)[:, i, :, None] * decode(x)[:, i, None] for i in range(s))]
        assert_close(found, sum(terms), gamma(s + 1) * sum(np.abs(v) for v in terms), BF16)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("held", [{"held": 0}, {"held": 1, "ahead": 0}, {"held": 1, "ahead": 1}])
@pytest.mark.parametrize(("quantized", "keep"), [(False, False), (True, False), (True, True)])
def test_collapse_norm_is_its_ops_one_by_one(how, quantized, keep, held):
    s, h, block = 4, 96, {"block_columns": 32, **held}

    def build(x, a, weight):
        y = nn.rms_norm(mhc.collapse(x, a, out=BF16), weight, epsilon=EPSILON, out=BF16)
        if not quantized:
            return y
        q = nn.quantize(y, out=Q8)
        return (y, q) if keep else q

    views = [Tensor((None, s, h), BF16), Tensor((None, s), FP32), Tensor((h,), BF16)]
    case = KernelCase(build, views, "collapse_norm_quantize" if quantized else "collapse_norm", **block)
    collapse = KernelCase(partial(mhc.collapse, out=BF16), views[:2], **block)
    norm = KernelCase(partial(nn.rms_norm, epsilon=EPSILON, out=BF16), [Tensor((None, h), BF16), views[2]], block_rows=1, **block)
    quantize = KernelCase(partial(nn.quantize, out=Q8), [Tensor((None, h), BF16)])
    weight = numbers(7, h)
    for count in ROWS:
        x, a = streams(count, count, s, h), premixes(9, count, s)
        (z,) = collapse.run(how, x, a)
        (y,) = norm.run(how, z, weight)
        wanted = [*([y] if keep or not quantized else []), *(quantize.meaning(y) if quantized else [])]
        assert_same(case.run(how, x, a, weight), wanted)


def mixer_case(s, h, **schedule):
    views = [Tensor((None, s, h), BF16), Tensor(((2 + s) * s, s * h), FP32), Tensor(((2 + s) * s,), FP32), Tensor((3,), FP32)]
    return KernelCase(partial(mhc.mixer, iterations=20, epsilon=1e-6, norm_epsilon=1e-6, out=(FP32,) * 3), views, **schedule)


def mixer_operands(count, s, h):
    fn = numbers(11, (2 + s) * s, s * h, number=FP32, scale=(s * h) ** -0.5)
    return streams(count, count, s, h), fn, numbers(12, (2 + s) * s, number=FP32), np.array([0.5, 1.5, 2.0], np.float32)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("s", "h", "schedule"), [
    (4, 128, {"block_rows": 4, "block_k": 128, "segments": 0}), (3, 32, {}),
    (4, 128, {"block_k": 32, "square_columns": 32, "panel": 32, "segments": 4, "grouped": 1, "finished_rows": 1}),
    (4, 128, {"block_k": 64, "square_columns": 32, "panel": 32, "segments": 4, "grouped": 4}),
    (4, 128, {"block_k": 32, "square_columns": 32, "panel": 32, "segments": 4, "grouped": 2, "joined": 1, "block_rows": 8, "finished_rows": 4,
              "decoded": 1}),
    (3, 32, {"block_k": 48, "square_columns": 48, "panel": 16, "segments": 1}), (2, 40, {"block_k": 16, "segments": 0})])  # fmt: skip
def test_mixer_makes_the_coefficients(how, s, h, schedule):
    """A coefficient is a smooth function of products whose absolute error is gamma; 20 divisions of numbers below 1 keep it within 1e-5."""
    case = mixer_case(s, h, **schedule)
    for count in ROWS:
        given = mixer_operands(count, s, h)
        for found, wanted in zip(case.run(how, *given), case.meaning(*given), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("how", HOW)
def test_mixer_balances_the_golden_matrix(how):
    """The Sinkhorn values that the model's specification prints, reached through base alone."""
    s, h = 4, 32
    c = np.array([[0, 1, 2, 3], [1, 0, -1, 2], [0.5] * 4, [-2, 0, 2, -1]])
    base = np.concatenate([np.zeros(2 * s), c.reshape(-1)]).astype(np.float32)
    given = whole(1, 1, s * h).reshape(1, s, h), np.zeros(((2 + s) * s, s * h), np.float32), base, np.ones(3, np.float32)
    *_, comb = mixer_case(s, h).run(how, *given)
    golden = [[0.088392022, 0.215957347, 0.197079934, 0.498569697], [0.468412839, 0.154883964, 0.019129501, 0.357572697],
              [0.402998749, 0.362220223, 0.121606220, 0.113173809], [0.040195390, 0.266937467, 0.662183345, 0.030682796]]
    np.testing.assert_allclose(comb[0], golden, rtol=1e-5)


@pytest.mark.parametrize("how", HOW)
def test_a_mixer_adds_segments_in_one_order_whoever_does(how):
    cut = {"block_rows": 16, "block_k": 32, "square_columns": 32, "panel": 32, "segments": 8, "grouped": 4}
    apart = mixer_case(4, 128, joined=0, finished_rows=1, **cut)
    for number, rows in enumerate((1, 4, 16)):
        joined = mixer_case(4, 128, joined=1, finished_rows=rows, decoded=number % 2, **cut)
        given = mixer_operands(5 + 8 * number, 4, 128)
        for found, wanted in zip(joined.run(how, *given), apart.run(how, *given), strict=True):
            np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


def test_thirds_are_made_in_front_only_of_instances_that_add_segments_up():
    cut = {"block_rows": 16, "block_k": 32, "square_columns": 32, "panel": 32, "segments": 8, "grouped": 4, "decoded": 1}
    assert [len(mixer_case(4, 128, joined=joined, finished_rows=1, **cut).kernel.before) for joined in (0, 1)] == [1, 2]


def test_a_row_does_not_depend_on_its_batch():
    """Compiled only: the interpreter's products are numpy's, whose order may differ from row to row."""
    case = mixer_case(4, 128, block_rows=4, block_k=128)
    x, *rest = mixer_operands(17, 4, 128)
    batch = case.run(COMPILED, x, *rest)
    for r in (0, 6, 16):
        for alone, whole_batch in zip(case.run(COMPILED, row(x, r), *rest), batch, strict=True):
            np.testing.assert_array_equal(alone[0].view(np.uint32), whole_batch[r].view(np.uint32))
