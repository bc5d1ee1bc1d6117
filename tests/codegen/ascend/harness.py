"""The cases of tests/codegen/kernels on Ascend: each kernel is emitted, checked, compiled, linked by name, and run in the simulator.

Launched twice: cube core first and vector cores first. Results must agree to the last bit; where they do not, two cores race.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest

from tapeout.codegen import tile_builder as t
from tapeout.codegen.ascend.build import build
from tapeout.codegen.ascend.schedules import schedule
from tapeout.codegen.ascend.simulator import Simulator
from tapeout.codegen.ascend.toolchain import PackageMissing, Tools, find_tools
from tapeout.dialects._mlir import ir
from tests.codegen.kernels.harness import TARGET, Array, Target

INSTANCES = 2
ROWS = (0, 1, 5)
_BUILT: dict[str, Simulator] = {}


@cache
def tools() -> Tools:
    """The installed compiler, or a skipped test with the reason."""
    try:
        return find_tools()
    except PackageMissing as error:
        pytest.skip(str(error))


def simulated(module: ir.Module, arrays: dict[str, Array]) -> None:
    """Runs a kernel module on named arrays; equal kernels are built once."""
    text = module.operation.get_asm(print_generic_op_form=True)
    if text not in _BUILT:
        _BUILT[text] = Simulator(build(module, tools()).compiled.dump)
    name, names, simulator = t.kernel_name(module), t.argument_names(module), _BUILT[text]
    again = {n: a.copy() for n, a in arrays.items()}
    simulator.launch(name, [arrays[n] for n in names], INSTANCES)
    if not simulator.is_mixed(name):
        return
    simulator.launch(name, [again[n] for n in names], INSTANCES, vectors_first=True)
    for n in names:
        if n.startswith(("in", "out")):
            np.testing.assert_array_equal(again[n].view(np.uint8), arrays[n].view(np.uint8), f"{n}: two cores race")


@contextmanager
def on_ascend() -> Iterator[None]:
    """Cases built inside run on Ascend."""
    token = TARGET.set(Target(schedule, simulated, ROWS))
    try:
        yield
    finally:
        TARGET.reset(token)
