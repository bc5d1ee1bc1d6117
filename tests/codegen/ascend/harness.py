"""The cases of tests/codegen/kernels on Ascend: each kernel is emitted, checked, compiled, linked by name, and run in the simulator.

Launched twice: cube core first and vector cores first. Results must agree to the last bit; where they do not, two cores race.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tapeout.codegen import tile_builder as t
from tapeout.codegen.ascend.schedules import schedule
from tapeout.codegen.ascend.toolchain import PackageMissing, Tools, find_tools
from tapeout.compiler.target_ascend import KernelRefused, compile_one
from tapeout.dialects._mlir import ir
from tapeout.runtime.device.ascend_simulator import Simulator
from tests.codegen.kernels.harness import TARGET, Array, Target

INSTANCES = 2
TARGET_NAME = "ascend950"
MOST_KEPT = 8
STORE = Path()
"""Where lowered kernels are kept; set by conftest.py."""
ROWS = (0, 1, 5)
_BUILT: dict[str, Simulator] = {}


@cache
def tools() -> Tools:
    """The installed compiler, or a skipped test with the reason."""
    try:
        return find_tools()
    except PackageMissing as error:
        pytest.skip(str(error))


def kept(config: pytest.Config, otherwise: Path) -> Path:
    """The folder of lowered kernels that stays between runs, in pytest's cache; `otherwise` where pytest keeps none."""
    cache = getattr(config, "cache", None)
    return Path(cache.mkdir("ascend")) if cache else otherwise


def _lowered(module: ir.Module) -> str:
    """What the simulator runs of a kernel, by the route of a compile: rules, budget, link check, cache."""
    tools()
    with module.context:
        text = module.operation.get_asm()
    try:
        made, _ = compile_one(text, TARGET_NAME, str(STORE))
    except KernelRefused as error:
        raise AssertionError(str(error)) from None
    return str(json.loads(made)["simulated"])


def simulator_of(module: ir.Module) -> Simulator:
    """The simulator of a kernel module; equal kernels are built once."""
    text = module.operation.get_asm(print_generic_op_form=True)
    if text not in _BUILT:
        if len(_BUILT) >= MOST_KEPT:
            _BUILT.clear()
        _BUILT[text] = Simulator(_lowered(module))
    return _BUILT[text]


def simulated(module: ir.Module, arrays: dict[str, Array]) -> None:
    """Runs a kernel module on named arrays, mixed ones from either side."""
    name, names, simulator = t.kernel_name(module), t.argument_names(module), simulator_of(module)
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
