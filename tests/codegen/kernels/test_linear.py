"""Products of every pair of numbers: exact on whole numbers, inside the error bound otherwise; groups, narrow and odd widths."""

from functools import partial

import numpy as np
import pytest

from tapeout.codegen.kernel import KernelError
from tapeout.dialects import nn
from tapeout.dialects.format import BF16, DTYPES, FP4_WEIGHT, FP8_WEIGHT, FP32, Q8, Scaled, decode, encode
from tapeout.dialects.types import Tensor
from tests.codegen.kernels.harness import COMPILED, HOW, ROWS, KernelCase, assert_close, assert_same, gamma, numbers, row, uneven, whole

SHAPES = [  # n, k, groups, schedule
    (48, 64, 1, {"block_m": 8, "block_n": 16, "block_k": 32}),
    (32, 96, 1, {"block_k": 32}),
    (64, 32, 2, {"block_m": 4}),
    (48, 64, 3, {"block_k": 32}),
]
ODD = [(1, 64, 1), (2, 33, 1), (24, 96, 1), (37, 61, 1), (10, 7, 2)]


def linear_case(n, k, groups, x=BF16, weight=BF16, out=BF16, wide=False, **schedule) -> KernelCase:
    views = [Tensor((None, k * groups), x), Tensor((n, k), weight)]
    return KernelCase(partial(nn.linear, groups=groups, wide=wide, out=out), views, **schedule)


def fp8_weight(seed: int, n: int, k: int) -> Scaled:
    """Codes of small whole numbers, a scale of its own for every block of 32 x 32."""
    blocks = (-(-n // 32), -(-k // 32))
    scales = (126 + np.arange(blocks[0] * blocks[1]).reshape(blocks) % 4).astype(np.uint8)
    codes = whole(seed, n, k).astype(np.float32).astype(DTYPES["f8E4M3FN"])
    return Scaled(codes, scales, FP8_WEIGHT.scaling)


def quantized_rows(seed: int, count: int, n: int) -> Scaled:
    return encode(decode(uneven(seed, count, n, block=32)), Q8)


def exact_product(x, weight, groups):
    v, w = decode(x), decode(weight)
    n, k = w.shape
    y = v.reshape(len(v), groups, k).transpose(1, 0, 2) @ w.reshape(groups, n // groups, k).transpose(0, 2, 1)
    return y.transpose(1, 0, 2).reshape(len(v), n)


def check(case: KernelCase, how, x, weight, groups, number):
    (found,) = case.run(how, x, weight)
    slack = gamma(decode(weight).shape[1]) * exact_product(np.abs(decode(x)), np.abs(decode(weight)), groups)
    assert_close(found, exact_product(x, weight, groups), slack, number)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("n", "k", "groups", "schedule"), SHAPES)
@pytest.mark.parametrize("kinds", ["bf16 bf16", "f32 bf16", "q8 fp8", "bf16 fp8"])
def test_products_are_inside_the_bound(how, n, k, groups, schedule, kinds):
    rows, weights = kinds.split()
    x_number = {"bf16": BF16, "f32": FP32, "q8": Q8}[rows]
    case = linear_case(n, k, groups, x_number, BF16 if weights == "bf16" else FP8_WEIGHT, **schedule)
    weight = numbers(3, n, k) if weights == "bf16" else fp8_weight(3, n, k)
    for count in ROWS:
        x = quantized_rows(count, count, k * groups) if rows == "q8" else uneven(count, count, k * groups, number=x_number)
        check(case, how, x, weight, groups, BF16)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("n", [80, 72])
def test_the_last_instance_takes_the_blocks_that_are_left(how, n):
    """Five blocks of 16 columns, three in turn: two instances; the last block of 72 columns overlaps the one before."""
    case = linear_case(n, 64, 1, out=FP32, wide=True, weights_first=1, block_m=8, block_n=16, block_k=32, group=0, turns=3)
    weight = whole(3, n, 64)
    for count in ROWS:
        assert_same(case.run(how, x := whole(count, count, 64), weight), case.meaning(x, weight))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("n", "k", "groups"), ODD)
def test_odd_sizes_are_exact_on_whole_numbers(how, n, k, groups):
    case = linear_case(n, k, groups, out=FP32, wide=True)
    weight = whole(3, n, k)
    for count in ROWS:
        x = whole(count, count, k * groups)
        assert_same(case.run(how, x, weight), case.meaning(x, weight))


@pytest.mark.parametrize("kinds", ["bf16 bf16", "q8 fp8", "bf16 fp8"])
def test_a_row_does_not_depend_on_its_batch(kinds):
    """Compiled only: the interpreter's products are numpy's, whose order may differ from row to row."""
    how = COMPILED
    rows, weights = kinds.split()
    case = linear_case(32, 96, 1, Q8 if rows == "q8" else BF16, BF16 if weights == "bf16" else FP8_WEIGHT, out=FP32, wide=True, block_k=32)
    weight = numbers(3, 32, 96) if weights == "bf16" else fp8_weight(3, 32, 96)
    x = quantized_rows(1, 33, 96) if rows == "q8" else uneven(1, 33, 96)
    (batch,) = case.run(how, x, weight)
    for r in (0, 7, 32):
        (alone,) = case.run(how, row(x, r), weight)
        np.testing.assert_array_equal(alone[0].view(np.uint32), batch[r].view(np.uint32))


def test_fp4_weights_are_refused():
    with pytest.raises(KernelError, match="known are BF16 or FP32 rows with BF16, FP32 or FP8 weights"):
        linear_case(32, 64, 1, Q8, FP4_WEIGHT)
