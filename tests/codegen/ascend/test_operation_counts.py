"""What Ascend kernels execute at the model's widths: vector operations against figures, products on the cube, loads in two buffers."""

from functools import partial

import ml_dtypes
import numpy as np
import pytest

from tapeout.codegen.ascend.build import BUFFERED, Built, build
from tapeout.codegen.ascend.work import VECTOR, work
from tapeout.dialects import nn
from tapeout.dialects.format import BF16, FP8_WEIGHT, Q8, Number
from tapeout.dialects.types import Tensor
from tapeout.runtime.device.ascend_simulator import Simulator
from tests.bench import ascend_operations as bench
from tests.codegen.ascend.harness import on_ascend, tools
from tests.codegen.kernels.harness import KernelCase

ALWAYS = ("quantizer e4m3, groups of 32", "FP4 weights unpacked")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in ALWAYS else pytest.mark.full) for n in bench.COUNTED])
def test_vector_operations_are_within_a_quarter_of_the_figure(name: str) -> None:
    found = bench.row(name)
    assert found.ratio <= bench.MOST, f"{found.name}: {found.found:.1f} per {found.unit}, the figure is {found.figure}"


def test_what_is_counted_is_what_runs() -> None:
    """One row, all columns: the simulator executes the operations that the dump holds."""
    with on_ascend():
        built = build(KernelCase(partial(nn.quantize, out=Q8), [Tensor((None, 256), BF16)], block_rows=1).module, tools())
    arrays = [np.ones(256, ml_dtypes.bfloat16), np.zeros(256, ml_dtypes.float8_e4m3fn), np.zeros(8, np.int8), np.array([1], np.int32)]
    executed = Simulator(built.compiled.dump).launch("kernel", arrays, 1).vector_operations
    assert executed == built.work.instance[VECTOR] == work(built.compiled.dump).instance[VECTOR] > 0


def linear(x: Number, weight: Number) -> Built:
    with on_ascend():
        case = KernelCase(partial(nn.linear, groups=1, wide=False, out=BF16), [Tensor((None, 1280), x), Tensor((512, 1280), weight)])
        return build(case.module, tools())


def test_products_run_on_the_cube_alone_and_load_into_two_buffers() -> None:
    built = linear(BF16, BF16)
    assert built.resources.mode == "aic" and VECTOR not in built.work.instance and built.resources.vector_functions == 0
    assert built.compiled.dump.count('"hivm.hir.mmadL1"') == 1 and built.compiled.flags == BUFFERED
    rows, columns, step = 128, 256, 64
    assert built.resources.memory["cbuf"] == 2 * 2 * (rows + columns) * step and built.resources.memory["cc"] == 2 * 4 * rows * columns
    assert built.work.instance["products.bf16"] == rows * columns * 1280


def test_block_scaled_products_leave_the_vector_cores_their_sums() -> None:
    built = linear(Q8, FP8_WEIGHT)
    assert built.compiled.dump.count('"hivm.hir.mmadmxL1"') == 1 and built.work.instance["products.f8E4M3FN"] == 128 * 256 * 1280
    each = built.work.instance[VECTOR] / (128 * 256 * 1280 / 64)
    assert each < 0.05, "vector operations of one core for 64 multiply-adds"


def test_experts_and_attention_multiply_on_the_cube() -> None:
    with on_ascend():
        experts = bench.made(bench.experts())
        attention = bench.made(bench.attention())
    assert experts.compiled.dump.count('"hivm.hir.mmadmxL1"') == 1 and experts.work.step["products.f8E4M3FN"] > 0
    assert attention.compiled.dump.count('"hivm.hir.mmadL1"') == 6 and attention.work.step["products.bf16"] > 0
    assert experts.compiled.flags[:1] == BUFFERED
