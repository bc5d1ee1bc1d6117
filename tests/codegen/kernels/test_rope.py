"""Rotation within one rounding of the formula, quantization bit-equal to the model's rules, fused equal to unfused."""

from functools import partial

import numpy as np
import pytest

from tapeout.codegen.kernel import KernelError
from tapeout.dialects import nn
from tapeout.dialects.format import BF16, FP32, INT32, Q4_INDEX, Q4_MAIN, Q8, decode, encode
from tapeout.dialects.types import Tensor
from tests.codegen.kernels.harness import HOW, ROWS, KernelCase, assert_close, assert_same, numbers, uneven

TABLE = numbers(5, 50, 32, number=FP32)


def views(n: int):
    return [Tensor((None, n), BF16), Tensor((None,), INT32), Tensor(TABLE.shape, FP32)]


def operands(count: int, n: int):
    return uneven(count, count, n), (np.arange(count) * 7 % 50).astype(np.int32), TABLE


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("heads", "width", "blocks", "offset", "inverse", "rows"), [
    (1, 32, 1, 0, False, 1), (1, 128, 1, -1, False, 1), (1, 96, 1, -1, True, 4), (4, 64, 2, 0, True, 1), (6, 96, 3, 2, False, 1),
    (3, 34, 1, 0, True, 1)])
def test_rope_is_the_formula(how, heads, width, blocks, offset, inverse, rows):
    settings = {"heads": heads, "width": width, "offset": offset, "inverse": inverse}
    case = KernelCase(partial(nn.rope, out=BF16, **settings), views(heads * width), block_heads=blocks, block_rows=rows)
    real = KernelCase(partial(nn.rope, out=FP32, **settings), views(heads * width), block_heads=blocks)
    for count in ROWS:
        x, positions, table = operands(count, heads * width)
        positions = np.minimum(positions, 47)
        (found,) = case.run(how, x, positions, table)
        (exact,) = real.meaning(x, positions, table)
        pairs = np.abs(decode(x)).reshape(count, heads * width // 2, 2)
        slack = np.repeat(pairs.sum(-1), 2, axis=-1) * np.abs(TABLE).max() * 2.0**-22
        assert_close(found, decode(exact), slack, BF16)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("number", [Q8, Q4_MAIN, Q4_INDEX])
@pytest.mark.parametrize(("n", "schedule"), [
    (32, {"block_rows": 4, "block_columns": 32}), (224, {"block_rows": 2, "block_columns": 32}), (5120, {}),
    (224, {"block_rows": 2, "block_columns": 32, "parts": 7})])
def test_quantize_makes_the_codes_of_the_model(how, number, n, schedule):
    case = KernelCase(partial(nn.quantize, out=number), [Tensor((None, n), BF16)], **schedule)
    for count in ROWS if n < 1000 else (1, 2):
        x = operands(count, n)[0]
        assert_same(case.run(how, x), case.meaning(x))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("number", [Q8, Q4_MAIN, Q4_INDEX])
def test_quantize_takes_zeros_ties_and_extremes(how, number):
    x = np.zeros((6, 32))
    x[1], x[2] = 3e38, -1e-38
    x[3] = np.arange(32) / 4
    x[4, ::2], x[4, 1::2] = 448, np.arange(16) * 28 + 14
    x[5] = np.linspace(-6, 6, 32)
    x = encode(x, BF16)
    case = KernelCase(partial(nn.quantize, out=number), [Tensor((None, 32), BF16)], block_rows=4)
    assert_same(case.run(how, x), case.meaning(x))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("number", [Q8, Q4_MAIN, Q4_INDEX])
@pytest.mark.parametrize(("heads", "width", "rows"), [(1, 128, 1), (1, 128, 4), (4, 64, 1), (2, 32, 1)])
def test_rope_quantize_is_rope_then_quantize(how, number, heads, width, rows):
    settings = {"heads": heads, "width": width, "offset": 0, "inverse": False}
    build = lambda x, p, a: nn.quantize(nn.rope(x, p, a, out=BF16, **settings), out=number)  # noqa: E731
    case = KernelCase(build, views(heads * width), "rope_quantize", block_heads=1, block_rows=rows)
    rope = KernelCase(partial(nn.rope, out=BF16, **settings), views(heads * width), block_heads=1)
    quantize = KernelCase(partial(nn.quantize, out=number), [Tensor((None, heads * width), BF16)])
    for count in ROWS:
        given = operands(count, heads * width)
        (turned,) = rope.run(how, *given)
        assert_same(case.run(how, *given), quantize.meaning(turned))


def test_a_group_across_turned_and_unturned_columns_is_refused():
    build = lambda x, p, a: nn.quantize(nn.rope(x, p, a, out=BF16, heads=2, width=48, offset=0, inverse=False), out=Q8)  # noqa: E731
    with pytest.raises(KernelError, match="32 of 48 columns turn; a quantized result needs both parts in whole groups of 32"):
        KernelCase(build, views(96), "rope_quantize")


def test_rows_of_several_heads_do_not_come_in_blocks():
    with pytest.raises(KernelError, match="block_rows is 4, expected 1 for rows of 2 heads"):
        KernelCase(partial(nn.rope, heads=2, width=64, offset=0, inverse=False, out=BF16), views(128), block_rows=4)


def test_rows_that_are_no_bf16_are_refused():
    with pytest.raises(KernelError, match="this kernel rotates BF16 or FP32 rows"):
        KernelCase(partial(nn.rope, heads=1, width=64, offset=0, inverse=False, out=BF16), [Tensor((None, 64), Q8), *views(64)[1:]])
    with pytest.raises(KernelError, match="this kernel quantizes BF16 rows"):
        KernelCase(partial(nn.quantize, out=Q8), [Tensor((None, 64), FP32)])
