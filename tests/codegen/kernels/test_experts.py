"""Experts: choices with ties, dispatch bit-equal with empty experts, products, activation and combination inside their bounds."""

from functools import partial

import numpy as np
import pytest

from tapeout.codegen.kernel import KernelError
from tapeout.dialects import moe, nn
from tapeout.dialects.format import BF16, DTYPES, FP4_WEIGHT, FP32, INT32, Q8, Scaled, decode, encode
from tapeout.dialects.types import Tensor
from tests.codegen.kernels.harness import COMPILED, HOW, ROWS, KernelCase, assert_close, assert_same, gamma, numbers, row, uneven, whole


def gate_case(experts, h, top_k, **schedule):
    views = [Tensor((None, h), BF16), Tensor((experts, h), BF16), Tensor((experts,), FP32)]
    return KernelCase(partial(moe.gate, top_k=top_k, scale=1.5, out=(INT32, FP32)), views, **schedule)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("experts", "h", "top_k"), [(8, 64, 2), (4, 32, 4), (20, 96, 6), (1, 32, 1)])
def test_gate_chooses_the_best(how, experts, h, top_k):
    """Products are whole numbers and distinct biases keep scores apart, so the chosen ids are those of the formula."""
    case = gate_case(experts, h, top_k, block_rows=4, block_k=32)
    weight, bias = whole(3, experts, h, largest=1), (np.random.default_rng(4).permutation(experts) / 64).astype(np.float32)
    for count in ROWS:
        x = encode(decode(whole(count, count, h)) / 8, BF16)
        ids, weights = case.run(how, x, weight, bias)
        wanted_ids, wanted = case.meaning(x, weight, bias)
        np.testing.assert_array_equal(ids, wanted_ids)
        np.testing.assert_allclose(weights, wanted, rtol=1e-5)


@pytest.mark.parametrize("how", HOW)
def test_gate_takes_the_lowest_id_of_equal_scores(how):
    case = gate_case(24, 32, 5, block_rows=4, block_k=32)
    bias = np.zeros(24, np.float32)
    bias[[3, 17]] = 1.0
    ids, weights = case.run(how, whole(1, 5, 32), encode(np.zeros((24, 32)), BF16), bias)
    np.testing.assert_array_equal(ids, [[3, 17, 0, 1, 2]] * 5)
    np.testing.assert_allclose(weights, 1.5 / 5, rtol=1e-6)


@pytest.mark.parametrize("how", HOW)
def test_gate_golden_weights(how):
    """z = (2, 1, 0, -1), no bias, k = 2: the weights that the model's specification prints, times its scale."""
    weight = np.zeros((4, 32))
    weight[:, 0] = [2, 1, 0, -1]
    x = np.zeros((1, 32))
    x[0, 0] = 1
    ids, weights = gate_case(4, 32, 2).run(how, encode(x, BF16), encode(weight, BF16), np.zeros(4, np.float32))
    np.testing.assert_array_equal(ids, [[0, 1]])
    np.testing.assert_allclose(weights, [[0.8400, 0.6600]], atol=5e-5)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("experts", "k"), [(8, 2), (16, 6), (3, 1), (40, 3)])
def test_dispatch_sorts_stably(how, experts, k):
    case = KernelCase(partial(moe.dispatch, experts=experts), [Tensor((None, k), INT32)], block_experts=4, block_pairs=16)
    for count in ROWS:
        chosen = np.random.default_rng(count).integers(0, max(1, experts // 2), (count, k)).astype(np.int32) * 2 % experts
        assert_same(case.run(how, chosen), case.meaning(chosen))


@pytest.mark.parametrize("how", HOW)
def test_dispatch_takes_one_expert_for_all(how):
    case = KernelCase(partial(moe.dispatch, experts=5), [Tensor((None, 2), INT32)])
    for expert in (0, 4):
        chosen = np.full((33, 2), expert, np.int32)
        assert_same(case.run(how, chosen), case.meaning(chosen))


def fp4_weight(seed, experts, n, k) -> Scaled:
    codes = np.random.default_rng(seed).integers(0, 16, (experts, n, k)).astype(np.uint8).view(DTYPES["f4E2M1FN"])
    scales = (125 + np.arange(experts * n * (k // 32)).reshape(experts, n, k // 32) % 5).astype(np.uint8)
    return Scaled(codes, scales, FP4_WEIGHT.scaling)


def expert_case(experts, n, k, choices, gathered, **schedule):
    x = Tensor((None, k), Q8) if gathered else Tensor((None, choices, k), Q8)
    views = [x, Tensor((experts, n, k), FP4_WEIGHT), Tensor((None, choices), INT32), Tensor((experts + 1,), INT32)]
    return KernelCase(partial(moe.expert_linear, gathered=gathered, out=BF16), views, **schedule)


def dispatched(count, experts, choices):
    """Order and offsets of choices that leave some experts without a pair."""
    chosen = np.random.default_rng(count).integers(0, experts, (count, choices)) // 2 * 2
    flat = chosen.reshape(-1)
    order = np.argsort(flat, kind="stable").astype(np.int32).reshape(count, choices)
    return order, np.concatenate([[0], np.cumsum(np.bincount(flat, minlength=experts))]).astype(np.int32)


def expert_rows(count, k, choices, gathered):
    x = encode(decode(uneven(count, count if gathered else count * choices, k, block=32)), Q8)
    return x if gathered else Scaled(x.codes.reshape(count, choices, k), x.scales.reshape(count, choices, k // 32), x.scaling)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize(("experts", "n", "k", "choices", "schedule"), [
    (6, 64, 128, 2, {"block_m": 4, "block_n": 32}), (3, 32, 384, 3, {}), (5, 160, 256, 1, {"block_m": 8})])
def test_expert_linear_is_inside_the_bound(how, gathered, experts, n, k, choices, schedule):
    case = expert_case(experts, n, k, choices, gathered, **schedule)
    weight = fp4_weight(3, experts, n, k)
    size = Scaled(np.abs(weight.codes.astype(np.float32)).astype(weight.codes.dtype), weight.scales, weight.scaling)
    exact = KernelCase(partial(moe.expert_linear, gathered=gathered, out=FP32), case.operands)
    for count in ROWS:
        x, (order, offsets) = expert_rows(count, k, choices, gathered), dispatched(count, experts, choices)
        (found,) = case.run(how, x, weight, order, offsets)
        magnitudes = Scaled(np.abs(x.codes.astype(np.float32)).astype(x.codes.dtype), x.scales, x.scaling)
        (wanted,), (slack,) = (list(exact.meaning(a, b, order, offsets)) for a, b in ((x, weight), (magnitudes, size)))
        assert_close(found, decode(wanted), gamma(k) * decode(slack), BF16)


def test_an_expert_row_does_not_depend_on_its_batch():
    """Compiled only: the interpreter's products are numpy's, whose order may differ from row to row."""
    case = expert_case(4, 64, 128, 1, True)
    x, weight = expert_rows(33, 128, 1, True), fp4_weight(3, 4, 64, 128)
    order, offsets = np.arange(33, dtype=np.int32)[:, None], np.array([0, 0, 33, 33, 33], np.int32)
    (batch,) = case.run(COMPILED, x, weight, order, offsets)
    for r in (0, 5, 32):
        (alone,) = case.run(COMPILED, row(x, r), weight, np.zeros((1, 1), np.int32), np.array([0, 0, 1, 1, 1], np.int32))
        np.testing.assert_array_equal(alone[0].view(np.uint16), batch[r].view(np.uint16))


def test_expert_columns_outside_whole_groups_are_refused():
    with pytest.raises(KernelError, match="expected columns in groups of 128 and rows in groups of 32"):
        expert_case(2, 32, 64, 1, True)


def swiglu_views(f, choices):
    shape = (None, 2 * f) if choices is None else (None, choices, 2 * f)
    routed = [None, None] if choices is None else [Tensor((None, choices), FP32), Tensor((None, choices), INT32)]
    return Tensor(shape, BF16), routed


def swiglu_operands(count, f, choices):
    shape = (count, f) if choices is None else (count, choices, f)
    x = np.concatenate([uneven(seed, int(np.prod(shape[:-1])), f).reshape(shape) for seed in (count, count + 100)], -1)
    if choices is None:
        return x, None, None
    order = np.random.default_rng(count).permutation(count * choices).astype(np.int32).reshape(count, choices)
    return x, np.abs(numbers(5, count, choices, number=FP32)), order


def real_swiglu(x, weights, order, limit):
    f = x.shape[-1] // 2
    g = np.minimum(decode(x)[..., :f], limit)
    y = g / (1 + np.exp(np.minimum(-g, 700))) * np.clip(decode(x)[..., f:], -limit, limit)
    return y if order is None else y * decode(weights).reshape(-1)[order.reshape(-1)].reshape(*order.shape, 1)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("choices", [None, 1, 3])
@pytest.mark.parametrize(("f", "schedule"), [
    (96, {"block_rows": 4, "block_columns": 32}), (40, {}), (192, {"block_rows": 2, "block_columns": 32, "parts": 3})])
def test_swiglu_is_the_formula(how, choices, f, schedule):
    """Gates below -88 leave the range of the f32 exponential: there the kernel's 0 stands for a number below 2^-100."""
    x, routed = swiglu_views(f, choices)
    case = KernelCase(partial(moe.swiglu, limit=10.0, out=BF16), [x, *routed], **schedule)
    for count in ROWS:
        given = swiglu_operands(count, f, choices)
        exact = real_swiglu(*given, 10.0)
        assert_close(case.run(how, *given).results[0], exact, np.abs(exact) * 2.0**-20 + 2.0**-100, BF16)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("choices", [None, 3])
def test_swiglu_quantize_is_swiglu_then_quantize(how, choices):
    x, routed = swiglu_views(96, choices)
    block = {"block_rows": 4, "block_columns": 32}

    def build(x, weights=None, order=None):
        return nn.quantize(moe.swiglu(x, weights, order, limit=10.0, out=BF16), out=Q8)

    case = KernelCase(build, [x, *(v for v in routed if v)], "swiglu_quantize", **block)
    plain = KernelCase(partial(moe.swiglu, limit=10.0, out=BF16), [x, *routed], **block)
    quantize = KernelCase(partial(nn.quantize, out=Q8), [Tensor((*x.shape[:-1], 96), BF16)])
    for count in ROWS:
        given = swiglu_operands(count, 96, choices)
        (y,) = plain.run(how, *given)
        assert_same(case.run(how, *(g for g in given if g is not None)), quantize.meaning(y))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("k", "h", "schedule"), [
    (2, 96, {"block_columns": 32}), (6, 40, {}), (1, 32, {}), (3, 96, {"block_columns": 32, "parts": 3})])
def test_combine_is_the_sum(how, k, h, schedule):
    views = [Tensor((None, k, h), BF16), Tensor((None, k), INT32), Tensor((None, h), BF16)]
    case = KernelCase(partial(moe.combine, out=BF16), views, **schedule)
    for count in ROWS:
        y, shared = uneven(count, count * k, h).reshape(count, k, h), uneven(50, count, h)
        places = np.random.default_rng(count).permutation(count * k).astype(np.int32).reshape(count, k)
        (found,) = case.run(how, y, places, shared)
        terms = np.concatenate([decode(y).reshape(-1, h)[places.reshape(-1)].reshape(count, k, h), decode(shared)[:, None]], 1)
        assert_close(found, terms.sum(1), gamma(k + 1) * np.abs(terms).sum(1), BF16)


def test_other_numbers_are_refused():
    with pytest.raises(KernelError, match="this kernel scores BF16 or FP32 rows"):
        KernelCase(partial(moe.gate, top_k=1, scale=1.0), [Tensor((None, 64), Q8), Tensor((4, 64), BF16), Tensor((4,), FP32)])
    pairs = [Tensor((None, 1), INT32), Tensor((3,), INT32)]
    for x, weight, words in [(BF16, FP4_WEIGHT, "multiplies FP8 rows"), (Q8, BF16, "reads packed FP4")]:
        with pytest.raises(KernelError, match=words):
            KernelCase(partial(moe.expert_linear, gathered=True), [Tensor((None, 128), x), Tensor((2, 32, 128), weight), *pairs])
