"""Norms alone and fused: within one BF16 rounding of the formula, fused groups bit-equal to their ops one by one, rows independent."""

from functools import partial

import numpy as np
import pytest

from tapeout.codegen.kernel import KernelError
from tapeout.dialects import nn
from tapeout.dialects.format import BF16, FP32, INT32, Q4_INDEX, Q8, decode
from tapeout.dialects.types import Tensor
from tests.codegen.kernels.harness import HOW, ROWS, KernelCase, assert_close, assert_same, gamma, numbers, row, uneven

EPSILON = 1e-6


def norm_case(n: int, out=BF16, number=BF16, **schedule) -> KernelCase:
    return KernelCase(partial(nn.rms_norm, epsilon=EPSILON, out=out), [Tensor((None, n), number), Tensor((n,), BF16)], **schedule)


def exact_norm(x, weight):
    v = decode(x)
    return decode(weight) * v / np.sqrt((v * v).mean(axis=-1, keepdims=True) + EPSILON)


def rows_of(count: int, n: int):
    return uneven(count, count, n), numbers(7, n)


def amid(x, first: int, wide: int):
    """Rows of `wide` columns that hold x from column `first` on, and nothing that is a number beside it."""
    out = np.full((len(x), wide), np.nan, np.float32).astype(x.dtype)
    out[:, first : first + x.shape[1]] = x
    return out



@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("n", "schedule"), [
    (32, {}), (96, {"block_rows": 4, "block_columns": 32, "held": 0}), (96, {"block_rows": 4, "block_columns": 32, "held": 1}), (1280, {}),
    (96, {"block_rows": 4, "block_columns": 32, "held": 1, "ahead": 1}), (5120, {"block_columns": 512})])
def test_rms_norm_is_the_formula(how, n, schedule):
    case = norm_case(n, **schedule)
    for count in ROWS:
        x, weight = rows_of(count, n)
        (found,) = case.run(how, x, weight)
        exact = exact_norm(x, weight)
        assert_close(found, exact, gamma(n) * np.abs(exact), BF16)


@pytest.mark.parametrize("how", HOW)
def test_f32_rows_and_results_are_not_rounded(how):
    case = norm_case(64, out=FP32, number=FP32, block_rows=2, block_columns=32)
    x, weight = numbers(3, 5, 64, number=FP32), numbers(7, 64)
    (found,) = case.run(how, x, weight)
    exact = exact_norm(x, weight)
    assert_close(found, exact, gamma(64) * np.abs(exact), FP32)


@pytest.mark.parametrize("how", HOW)
def test_a_row_does_not_depend_on_its_batch(how):
    case = norm_case(96, block_rows=4, block_columns=32)
    x, weight = rows_of(17, 96)
    (batch,) = case.run(how, x, weight)
    for r in (0, 3, 16):
        (alone,) = case.run(how, row(x, r), weight)
        np.testing.assert_array_equal(alone[0].view(np.uint16), batch[r].view(np.uint16))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("number", [Q8, Q4_INDEX])
def test_norm_quantize_is_norm_then_quantize(how, keep, number):
    n, blocks = 96, {"block_rows": 4, "block_columns": 32}

    def build(x, weight):
        y = nn.rms_norm(x, weight, epsilon=EPSILON, out=BF16)
        q = nn.quantize(y, out=number)
        return (y, q) if keep else q

    case = KernelCase(build, [Tensor((None, n), BF16), Tensor((n,), BF16)], "norm_quantize", **blocks)
    norm, quantize = norm_case(n, **blocks), KernelCase(partial(nn.quantize, out=number), [Tensor((None, n), BF16)], **blocks)
    for count in ROWS:
        x, weight = rows_of(count, n)
        (y,) = norm.run(how, x, weight)
        (q,) = quantize.meaning(y)
        assert_same(case.run(how, x, weight), [y, q] if keep else [q])


PLACES = [(0, 96), (32, 128), (37, 160), (1, 98)]
"""First column and columns of rows that a norm of 96 columns reads some of."""


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(("first", "wide"), PLACES)
@pytest.mark.parametrize("form", [{"held": 0}, {"held": 1, "ahead": 1}], ids=str)
def test_a_norm_reads_its_columns_of_wider_rows(how, keep, first, wide, form):
    n, blocks = 96, {"block_rows": 4, "block_columns": 32, **form}

    def build(x, weight):
        y = nn.rms_norm(x, weight, epsilon=EPSILON, out=BF16)
        q = nn.quantize(y, out=Q8)
        return (y, q) if keep else q

    views = [Tensor((None, n), BF16), Tensor((n,), BF16)]
    alone = KernelCase(build, views, "norm_quantize", **blocks)
    case = KernelCase(
        lambda x, w: build(nn.columns(x, first=first, count=n), w), [Tensor((None, wide), BF16), views[1]], "columns_norm_quantize", **blocks)
    for count in ROWS:
        x, weight = rows_of(count, n)
        assert_same(case.run(how, amid(x, first, wide), weight), alone.run(how, x, weight))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("heads", "schedule"), [(1, {"block_rows": 0}), (3, {"block_rows": 0}), (1, {"block_rows": 2}), (1, {"block_rows": 1})])
@pytest.mark.parametrize(("first", "wide"), PLACES)
def test_norm_and_rotation_read_their_columns_of_wider_rows(how, heads, schedule, first, wide):
    turn, n = {"heads": heads, "width": 96 // heads, "offset": 0, "inverse": False}, 96
    table = numbers(5, 50, 32, number=FP32)

    def build(x, weight, positions, angles):
        y = nn.rms_norm(x, weight, epsilon=EPSILON, out=BF16)
        return nn.quantize(nn.rope(y, positions, angles, out=BF16, **turn), out=Q8)

    rest = [Tensor((n,), BF16), Tensor((None,), INT32), Tensor(table.shape, FP32)]
    blocks = {"block_columns": 32, "held": 0, **schedule}
    alone = KernelCase(build, [Tensor((None, n), BF16), *rest], "norm_rope_quantize", **blocks)
    case = KernelCase(
        lambda x, *others: build(nn.columns(x, first=first, count=n), *others), [Tensor((None, wide), BF16), *rest],
        "columns_norm_rope_quantize", **blocks)
    for count in ROWS:
        x, weight = rows_of(count, n)
        positions = (np.arange(count) * 7 % 50).astype(np.int32)
        assert_same(case.run(how, amid(x, first, wide), weight, positions, table), alone.run(how, x, weight, positions, table))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("heads", "width", "number", "offset", "schedule"), [
    (1, 128, Q8, 0, {"block_rows": 0}), (1, 128, Q4_INDEX, -1, {"block_rows": 0}), (2, 64, Q8, 0, {"block_rows": 0}),
    (1, 128, Q8, 0, {"block_rows": 1}), (1, 128, Q4_INDEX, -1, {"block_rows": 4}), (1, 32, Q8, 0, {"block_rows": 2})])
def test_norm_rope_quantize_is_its_ops_one_by_one(how, heads, width, number, offset, schedule):
    turn = {"heads": heads, "width": width, "offset": offset, "inverse": False}
    table, n = numbers(5, 50, 32, number=FP32), heads * width

    def build(x, weight, positions, angles):
        y = nn.rms_norm(x, weight, epsilon=EPSILON, out=BF16)
        return nn.quantize(nn.rope(y, positions, angles, out=BF16, **turn), out=number)

    views = [Tensor((None, n), BF16), Tensor((n,), BF16), Tensor((None,), INT32), Tensor(table.shape, FP32)]
    case = KernelCase(build, views, "norm_rope_quantize", block_columns=32, held=0, **schedule)
    norm = norm_case(n, block_columns=32, held=0)
    rope = KernelCase(partial(nn.rope, out=BF16, **turn), [views[0], *views[2:]])
    for count in ROWS:
        x, weight = rows_of(count, n)
        positions = (np.arange(count) * 7 % 50).astype(np.int32)
        (y,) = norm.run(how, x, weight)
        (turned,) = rope.run(how, y, positions, table)
        (q,) = KernelCase(partial(nn.quantize, out=number), [views[0]]).meaning(turned)
        assert_same(case.run(how, x, weight, positions, table), [q])


def test_rows_of_several_heads_do_not_come_in_blocks():
    turn = {"heads": 2, "width": 64, "offset": 0, "inverse": False}
    build = lambda x, w, p, a: nn.quantize(nn.rope(nn.rms_norm(x, w, epsilon=EPSILON, out=BF16), p, a, out=BF16, **turn), out=Q8)  # noqa: E731
    views = [Tensor((None, 128), BF16), Tensor((128,), BF16), Tensor((None,), INT32), Tensor((50, 32), FP32)]
    with pytest.raises(KernelError, match="block_rows is 4, expected none for rows of 2 heads"):
        KernelCase(build, views, "norm_rope_quantize", block_rows=4)


def test_block_scaled_rows_are_refused():
    with pytest.raises(KernelError, match="this kernel norms BF16 or FP32 rows"):
        norm_case(96, number=Q8)
