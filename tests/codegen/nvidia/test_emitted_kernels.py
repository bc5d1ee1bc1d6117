"""Every kernel's emitted Triton source against its op's meaning: the cases of tests/codegen/kernels, run in Triton's interpreter.

The same test functions are collected once more, with an NVIDIA target's schedule rows: awkward sizes, poisoned rows and states come with them.
By default fewer row counts; all of them, and the slowest cases, are marked full.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import pytest

from tapeout.codegen.launch_grid import module_grid_at
from tapeout.codegen.nvidia.emit import emit_module
from tapeout.codegen.nvidia.facts import SM90, SM100, Chip
from tapeout.codegen.nvidia.schedules import schedule_for
from tapeout.dialects import mhc, nn
from tapeout.dialects._mlir import ir
from tapeout.dialects.format import BF16, FP32, Q8
from tapeout.dialects.types import Tensor
from tests.codegen import kernels
from tests.codegen.kernels.harness import BEHIND, INTERPRETED, TARGET, KernelCase, Target, assert_same, numbers, uneven
from tests.codegen.nvidia import triton_interpreter

FEW_ROWS, ALL_ROWS = (0, 1, 17), (0, 1, 2, 5, 17, 33)
OTHER_ON_SM100 = ("attention",)  # files of families whose rows differ in more than sizes
SLOW = ("test_ties_at_the_border_are_cut_by_id", "test_attend_rotate_is_attend_then_rotate")


def run_emitted(module: Any, arrays: dict[str, Any]) -> None:
    """The kernel's Triton source on named arrays, launched as for a bucket above the count."""
    with module.context:
        source, grid = emit_module(module), module_grid_at(module, int(arrays["count"][0]) + BEHIND)
    triton_interpreter.run(source, arrays, grid)


@cache
def _target(rows: tuple[int, ...], chip: Chip) -> Target:
    return Target(schedule_for(chip), run_emitted, rows)


@contextmanager
def emitted(rows: tuple[int, ...], chip: Chip) -> Iterator[None]:
    """Cases that are made and run inside are emitted ones of a chip, with these row counts."""
    token = TARGET.set(_target(rows, chip))
    try:
        yield
    finally:
        TARGET.reset(token)


def _again(test: Callable[..., None], rows: tuple[int, ...], full: bool, chip: Chip = SM90) -> Callable[..., None]:
    @wraps(test)
    def run(**given: Any) -> None:
        with emitted(rows, chip):
            test(how=INTERPRETED, **given)

    del run.__wrapped__
    signature = inspect.signature(test)
    run.__signature__ = signature.replace(parameters=[p for name, p in signature.parameters.items() if name != "how"])
    marks = [m for m in getattr(test, "pytestmark", []) if not (m.name == "parametrize" and m.args[0] == "how")]
    run.pytestmark = [*marks, *([pytest.mark.full.mark] if full else [])]
    return run


def _collect() -> None:
    for name in sorted(m.name for m in pkgutil.iter_modules(kernels.__path__) if m.name.startswith("test_")):
        module = importlib.import_module(f"tests.codegen.kernels.{name}")
        for label, test in list(vars(module).items()):
            if label.startswith("test_") and inspect.isfunction(test) and "how" in inspect.signature(test).parameters:
                file = name.removeprefix("test_")
                globals()[f"{label}__{file}"] = _again(test, FEW_ROWS, label in SLOW)
                if file in OTHER_ON_SM100:
                    globals()[f"{label}__{file}__sm100"] = _again(test, FEW_ROWS, label in SLOW, SM100)
                if "ROWS" in inspect.getsource(test) and label not in SLOW:
                    globals()[f"{label}__{file}__all_rows"] = _again(test, ALL_ROWS, True)


_collect()


def test_cases_are_collected():
    """Every family's file brings cases; none would mean that nothing is checked here."""
    found = {name.split("__")[1] for name in globals() if name.startswith("test_") and "__" in name}
    assert found >= {"linear", "experts", "attention", "selection", "sampling", "norms", "rope", "streams", "tables", "movement", "engram", "draft"}


@pytest.mark.parametrize("count", [0, 1, 5])
def test_eager_instances_do_the_same(count):
    """Rows of collapse, norm and quantization are read in front of the exit: results are the same, rows behind the count stay as they are."""

    def build(x, a, weight):
        return nn.quantize(nn.rms_norm(mhc.collapse(x, a, out=BF16), weight, epsilon=1e-6, out=BF16), out=Q8)

    with emitted(FEW_ROWS, SM90):
        views = [Tensor((None, 4, 96), BF16), Tensor((None, 4), FP32), Tensor((96,), BF16)]
        case, eager = (KernelCase(build, views, "collapse_norm_quantize", block_columns=32) for _ in range(2))
        with eager.module.context:
            next(iter(eager.module.body.operations)).attributes["tile.eager"] = ir.UnitAttr.get()
        text, plain = (emit_module(one.module).text for one in (eager, case))
        assert text.index("in0 + (") < text.index("    return\n") and plain.index("    return\n") < plain.index("in0 + (")
        given = uneven(count, count, 4 * 96).reshape(count, 4, 96), numbers(9, count, 4, number=FP32), numbers(7, 96)
        assert_same(eager.run(INTERPRETED, *given), case.run(INTERPRETED, *given))
