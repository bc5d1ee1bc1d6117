"""What all families rely on: block sizes that fit or are refused, real numbers refused, scaled values never read column by column."""

from functools import partial

import pytest

from tapeout.codegen.kernel import KernelError, Request
from tapeout.codegen.row_values import Rows, block, columns_of, scale_group
from tapeout.codegen.schedule_rows import divisor
from tapeout.dialects import dspark, mhc, mla, moe, nn, sample
from tapeout.dialects.format import BF16, FP8_WEIGHT, FP32, INT32, Q4_MAIN, Q8, REAL
from tapeout.dialects.rows import TABLE
from tapeout.dialects.types import Blocks, Ring, Tensor
from tests.codegen.kernels.harness import KernelCase
from tests.codegen.kernels.test_sampling import REALS, SEEDS


def test_a_block_that_does_not_fit_is_refused():
    assert block({"block_columns": 32}, "block_columns", 96, 32) == 32
    with pytest.raises(KernelError, match=r"schedule entry block_columns is 40, expected a divisor of 96$"):
        block({"block_columns": 40}, "block_columns", 96)
    with pytest.raises(KernelError, match=r"schedule entry block_columns is 48, expected a divisor of 96 that is a multiple of 32$"):
        block({"block_columns": 48}, "block_columns", 96, 32)
    with pytest.raises(KernelError, match="block_k is 0"):
        block({"block_k": 0}, "block_k", 96)


@pytest.mark.parametrize(("build", "views", "wrong"), [
    (partial(nn.rms_norm, epsilon=1e-6, out=BF16), [Tensor((None, 96), BF16), Tensor((96,), BF16)], {"block_columns": 40}),
    (partial(nn.linear, groups=1, wide=False, out=BF16), [Tensor((None, 96), BF16), Tensor((32, 96), BF16)], {"block_k": 64}),
    (partial(nn.linear, groups=1, wide=False, out=BF16), [Tensor((None, 96), Q8), Tensor((32, 96), FP8_WEIGHT)], {"block_k": 48}),
    (partial(nn.linear, groups=1, wide=False, out=BF16), [Tensor((None, 96), BF16), Tensor((32, 96), BF16)], {"block_n": 24}),
    (partial(nn.linear, groups=1, wide=False, out=BF16), [Tensor((None, 96), Q8), Tensor((32, 96), FP8_WEIGHT)], {"decoded": 2}),
    (partial(mhc.collapse, out=BF16), [Tensor((None, 4, 96), BF16), Tensor((None, 4), FP32)], {"block_columns": 64}),
    (partial(moe.gate, top_k=2, scale=1.0, out=(INT32, FP32)),
     [Tensor((None, 96), BF16), Tensor((8, 96), BF16), Tensor((8,), FP32)], {"block_k": 36}),
    (partial(mla.pool, length=7, sequences=3, out=BF16), [Ring(Tensor((192,), FP32), 7), TABLE], {"block_columns": 64}),
    (partial(dspark.correct, step=0, size=5), [Tensor((None, 96), FP32)] * 2, {"block_columns": 95}),
    (lambda x, e, w: dspark.confidence(x, [e], w), [Tensor((None, 96), BF16), Tensor((None, 32), BF16), Tensor((1, 128), BF16)],
     {"block_embedded": 12}),
    (partial(sample.draw, stream=0), [Tensor((None, 96), FP32), REALS, TABLE, REALS, SEEDS, TABLE], {"block_columns": 64}),
])
def test_families_refuse_a_tuned_row_that_does_not_fit(build, views, wrong):
    with pytest.raises(KernelError, match=f"schedule entry {next(iter(wrong))} is {next(iter(wrong.values()))}"):
        KernelCase(build, views, **wrong)


def test_real_numbers_are_refused():
    with pytest.raises(KernelError, match=r"mhc.collapse works on real numbers .* run assign-formats before kernels are chosen"):
        KernelCase(mhc.collapse, [Tensor((None, 4, 96), REAL), Tensor((None, 4), REAL)])


def test_columns_and_groups_of_values():
    assert [columns_of(v) for v in (Tensor((None, 4, 96), BF16), Tensor((None,), INT32), Blocks(Tensor((64,), Q8), 2))] == [384, 1, 64]
    assert scale_group(Request("op", (), (Tensor((None, 64), BF16), None), (Tensor((None, 64), Q4_MAIN),))) == 16
    assert scale_group(Request("op", (), (Tensor((None, 64), BF16),), ())) == 1


def test_buffers_of_a_packed_value():
    assert [width for _, width in Rows(Q4_MAIN, 64, "codes", "scales").buffers()] == [32, 4]
    assert [width for _, width in Rows(Q8, 64, "codes", "scales").buffers()] == [64, 2]
    with pytest.raises(KernelError, match="single columns of f8E4M3FN"):
        Rows(Q8, 64, "codes", "scales").line(0, 0, 32)


def test_divisors():
    cases = ((5120, 32), (2304, 32), (1280, 1), (96, 32), (40, 1), (1021, 1))
    assert [divisor(n, 512, m) for n, m in cases] == [512, 384, 320, 96, 40, 1021]
