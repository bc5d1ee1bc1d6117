"""lower-tile-to-hivm: golden text, the same bytes twice, the mode from the ops, and the roundings that must not be lost."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tapeout.codegen.ascend import rules
from tapeout.codegen.ascend.emit import emit, lowered
from tests.codegen.ascend import sample_kernels
from tests.codegen.ascend.harness import simulated

GOLDEN = Path(__file__).parent / "scale.mlir"


def test_golden_text():
    """Regenerate by writing emit(sample_kernels.scale()) to the file; read the difference as code."""
    assert emit(sample_kernels.scale()) == GOLDEN.read_text()


@pytest.mark.parametrize("make", [sample_kernels.scale, sample_kernels.product, sample_kernels.rounded, sample_kernels.handed_over])
def test_two_emissions_are_equal_and_sound(make):
    module = make()
    before = module.operation.get_asm()
    assert emit(module) == emit(make())
    assert module.operation.get_asm() == before
    assert rules.problems(lowered(module)) == []


@pytest.mark.parametrize(("make", "mode"), [(sample_kernels.scale, "aiv"), (sample_kernels.product, "aic"), (sample_kernels.handed_over, "mix")])
def test_the_mode_follows_from_the_ops(make, mode):
    assert f'mix_mode = "{mode}"' in emit(make())


def test_values_rounded_to_e4m3_stay_rounded():
    n = 64
    x = (np.linspace(-2.0, 2.0, n) ** 7).astype(np.float32)
    x[:6] = [0.0, -0.0, 2.0**-10, 3 * 2.0**-10, 447.9, 2.0**-6]
    y = np.zeros(n, np.float32)
    simulated(sample_kernels.rounded(n), {"x": x, "y": y})
    np.testing.assert_array_equal(y, x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))


def test_numbers_of_rank_0_become_scalars():
    """Carried by a loop, reduced, compared, passed through a function of math, stored: no tile of rank 0 is left, and values stay."""
    text = emit(sample_kernels.largest_log())
    assert not [line for line in text.splitlines() if '"scf.' in line and "tensor<f32>" in line]
    assert '"arith.maximumf"(' in text and "(f32, f32) -> f32" in text
    for n in (1, 3):
        x = (np.arange(n * 64, dtype=np.float32) * 37 % 101 + 1).reshape(n, 64)
        y = np.zeros(1, np.float32)
        simulated(sample_kernels.largest_log(), {"x": x, "y": y, "count": np.array([n], np.int32)})
        np.testing.assert_allclose(y[0], np.log(x.max()), rtol=1e-6)


@pytest.mark.parametrize("n", [64, 128, 133])
def test_lane_numbers_of_several_registers(n):
    """Fused into the loop that reduces, those of later registers were lost."""
    x = np.arange(16, dtype=np.int32) * 5
    for count in (3, n // 2 + 5, n):
        y = np.zeros(16, np.int32)
        simulated(sample_kernels.numbered(16, n), {"x": x, "y": y, "count": np.array([count], np.int32)})
        np.testing.assert_array_equal(y, count * (count - 1) // 2 + count * x)


def test_any_launch_size_and_row_count():
    for rows in (0, 1, 7, 13):
        x, y = np.arange(16 * 32, dtype=np.float32), np.full(16 * 32, -1.0, np.float32)
        simulated(sample_kernels.scale(), {"x": x, "y": y, "count": np.array([rows], np.int32)})
        np.testing.assert_array_equal(y, np.where(np.arange(y.size) < rows * 32, 2 * x, -1.0))


def test_vector_cores_meet_before_one_reads_what_another_wrote():
    """Run with either core first; both must see all rows."""
    a = np.random.default_rng(3).integers(-3, 4, (16, 32)).astype(ml_dtypes.bfloat16)
    y, work = np.zeros((16, 16), np.float32), np.full((16, 16), np.nan, np.float32)
    simulated(sample_kernels.handed_over(), {"a": a, "y": y, "work": work})
    wide = a.astype(np.float32)
    np.testing.assert_array_equal(y, (wide @ wide.T)[::-1] + 1)
