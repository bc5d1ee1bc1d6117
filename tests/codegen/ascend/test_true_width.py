"""Kernels at the widths of the released model, on row counts that fill no block: the first, a middle and the last instance of their grids.

A launch of as many blocks as a grid has instances gives each block one instance, so chosen blocks run alone. What they write is compared, and
nothing else may be written; operand rows behind the count are poison.
"""

import json
from math import prod
from typing import Any

import numpy as np
import pytest

from tapeout.codegen import tile_builder as t
from tapeout.codegen.ascend.schedules import schedule
from tapeout.codegen.launch_grid import module_grid_at
from tapeout.compiler.api import compile_path
from tapeout.compiler.settings import Settings
from tapeout.dialects import nn
from tapeout.dialects.format import BF16, FP8_WEIGHT, Q4_INDEX, Q8, decode
from tapeout.dialects.types import Tensor
from tapeout.models.deepseek_v41.config import shipped_config
from tapeout.models.deepseek_v41.slice import sliced
from tapeout.runtime.artifact import load_artifact
from tapeout.runtime.device.ascend_sim import AscendSimDevice
from tests.bench.gpu_meaning import check, summary
from tests.bench.meanings.cases import case_data, case_from, cases_of
from tests.codegen.ascend.harness import kept, simulator_of, tools
from tests.codegen.kernels.harness import COMPILED, PATTERN, TARGET, KernelCase, Target, gamma, stored, uneven
from tests.codegen.kernels.test_linear import exact_product, fp8_weight, linear_case, quantized_rows
from tests.codegen.kernels.test_norms import exact_norm, norm_case, rows_of

HIDDEN, HEAD = 5120, 512


class Chosen:
    """The first, the middle and the last instance of a kernel's grid; `arrays` are those of the last run."""

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}
        self.instances = 0

    def run(self, module: Any, arrays: dict[str, Any]) -> None:
        total = self.instances = prod(module_grid_at(module, int(arrays["count"][0])))
        self.arrays = arrays
        buffers = [arrays[name] for name in t.argument_names(module)]
        simulator_of(module).launch(t.kernel_name(module), buffers, total, blocks=sorted({0, total // 2, total - 1}))

    def results(self, rows: int) -> list[tuple[Any, Any]]:
        """Each result's rows, and which of its elements were written. First and last ones are."""
        found = []
        for name, array in self.arrays.items():
            if name.startswith("out"):
                own = np.ascontiguousarray(array[:rows])
                written = (own.view(np.uint8).reshape(*own.shape, -1) != PATTERN).any(-1)
                assert written[0].any() and written[-1].any() and (rows < 8 or self.instances < 4 or not written.all()), name
                found.append((own, written))
        return found


def chosen(make: Any, *operands: Any) -> tuple[KernelCase, Chosen]:
    """A case after its run on Ascend."""
    tools()
    target = Chosen()
    token = TARGET.set(Target(schedule, target.run, ()))
    try:
        case = make()
        case.run(COMPILED, *operands)
    finally:
        TARGET.reset(token)
    return case, target


@pytest.mark.parametrize(("number", "width", "rows"), [(Q8, HIDDEN, 37), (Q4_INDEX, HEAD, 61)])
def test_quantized_rows_are_equal_bit_for_bit(number, width, rows):
    x = uneven(1, rows, width, block=32)
    case, target = chosen(lambda: KernelCase(lambda v: nn.quantize(v, out=number), [Tensor((None, width), BF16)]), x)
    (wanted,) = case.meaning(x).results
    for (found, written), array in zip(target.results(rows), stored(wanted), strict=True):
        array = array.view(found.dtype)
        np.testing.assert_array_equal(found[written], array[written])


def test_norms_are_inside_the_bound():
    x, weight = rows_of(37, HIDDEN)
    _, target = chosen(lambda: norm_case(HIDDEN), x, weight)
    ((found, written),) = target.results(37)
    exact = exact_norm(x, weight)
    slack = (gamma(HIDDEN) + 2.0**-8) * np.abs(exact)
    assert (np.abs(decode(found) - exact) <= slack)[written].all()


@pytest.mark.parametrize("rows", [1, 301])
def test_products_are_inside_the_bound(rows):
    """FP8 rows and weights with their scales on the cube, ten steps of 512: sums of several steps, ragged rows, four blocks of columns."""
    x, weight = quantized_rows(1, rows, HIDDEN), fp8_weight(3, 1024, HIDDEN)
    _, target = chosen(lambda: linear_case(1024, HIDDEN, 1, Q8, FP8_WEIGHT), x, weight)
    ((found, written),) = target.results(rows)
    exact = exact_product(x, weight, 1)
    slack = gamma(HIDDEN) * exact_product(np.abs(decode(x)), np.abs(decode(weight)), 1) + 2.0**-8 * np.abs(exact)
    assert (np.abs(decode(found) - exact) <= slack)[written].all()


LAYERS, EXPERTS = (0, 1, 2, 20, 21, 24), 8
"""Windows alone, Engram, entries of ratio 2, the boundary's source of candidates, a reader of its entries, a selection within candidates."""


@pytest.mark.simulated
def test_every_kernel_of_a_slice_is_what_its_op_means(tmp_path, request):
    """Whole steps of a slice of the released model, launch by launch over random weights and states; rows behind the count are poison, ids there
    far out of range. First, middle and last rows are compared, whole."""
    tools()
    config = sliced(shipped_config("v4.1-flash"), LAYERS, EXPERTS)
    (tmp_path / "config.json").write_text(json.dumps(config.canonical()))
    settings = Settings(target="ascend950", max_rows=64, max_sequences=4, max_context=256)
    compile_path(tmp_path / "config.json", tmp_path / "artifact", settings, cache=kept(request.config, tmp_path / "cache"))
    artifact = load_artifact(tmp_path / "artifact", target=settings.target)
    cases = {case.symbol: case_from(case_data(case)) for case in cases_of(config, settings)}
    table = summary(check(artifact, AscendSimDevice(artifact), cases, rows=(1, 37)))
    assert not [(row["kernel"], row["wrong"]) for row in table if row["wrong"]]
    assert {row["kernel"] for row in table} == {k.symbol for k in artifact.manifest.kernels if not cases[k.symbol].part}
