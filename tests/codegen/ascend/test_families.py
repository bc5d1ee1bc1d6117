"""Every kernel family on Ascend, by the cases of tests/codegen/kernels: emitted, within the rules, compiled, linked by name, simulated.

A handful runs always; the rest, hours on two cores, is marked simulated (`make test-ascend`).
"""

import importlib
import inspect
import itertools
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tests.codegen.kernels as kernels
from tests.codegen.ascend.harness import on_ascend, tools
from tests.codegen.kernels.harness import COMPILED

ALWAYS = (
    "test_norms.test_rms_norm_is_the_formula[96-schedule1]", "test_rope.test_quantize_makes_the_codes_of_the_model[32-schedule0-number0]",
    "test_linear.test_products_are_inside_the_bound[q8 fp8-48-64-1-schedule0]",
    "test_linear.test_products_are_inside_the_bound[bf16 bf16-48-64-1-schedule0]", "test_movement.test_take_of_a_row_table",
    "test_movement.test_append_scatters_entries[schedule0-number3]", "test_streams.test_mixer_balances_the_golden_matrix",
    "test_streams.test_mixer_makes_the_coefficients[4-128-schedule2]",
    "test_tables.test_remember_keeps_the_last_token_of_a_slot[32]", "test_experts.test_dispatch_sorts_stably[3-1]",
)  # fmt: skip

ELSEWHERE = (
    *(f"test_sampling.test_the_real_vocabulary[settings{number}-form1]" for number in range(4)),
    "test_streams.test_a_mixer_adds_segments_in_one_order_whoever_does", "test_streams.test_mixer_makes_the_coefficients[4-128-schedule4]",
    *(f"test_linear.test_the_last_instance_takes_the_blocks_that_are_left[{columns}]" for columns in (80, 72)),
)  # fmt: skip
"""Cases in the blocks of another target's row: a list of 32,768 tokens, which no vector core's memory holds, sums of groups of segments, stored
with rows side by side, and a weight as the left factor, whose products are stored turned."""


def _cases() -> Iterator[Any]:
    for module in sorted(m.name for m in pkgutil.iter_modules(kernels.__path__) if m.name.startswith("test_")):
        found = importlib.import_module(f"tests.codegen.kernels.{module}")
        for name, function in sorted(vars(found).items()):
            if name.startswith("test_") and inspect.isfunction(function) and function.__module__ == found.__name__:
                yield from _expanded(module, name, function)


def _expanded(module: str, name: str, function: Callable[..., None]) -> Iterator[Any]:
    """The parametrized forms of a test function; the way to run is fixed here."""
    axes = [_axis(mark) for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize" and mark.args[0] != "how"]
    fixed = {"how": COMPILED} if "how" in inspect.signature(function).parameters else {}
    for choice in itertools.product(*axes):
        values = {key: value for part in choice for key, value in part[0].items()}
        if set(inspect.signature(function).parameters) != set(values) | set(fixed):
            continue  # takes fixtures
        label = "-".join(part[1] for part in choice)
        case = f"{module}.{name}" + (f"[{label}]" if label else "")
        yield pytest.param(function, {**fixed, **values}, id=case, marks=_marks(case))


def _axis(mark: Any) -> list[tuple[dict[str, Any], str]]:
    names = [n.strip() for n in mark.args[0].split(",")] if isinstance(mark.args[0], str) else list(mark.args[0])
    out = []
    for number, row in enumerate(mark.args[1]):
        values = row.values if hasattr(row, "marks") else [row] if len(names) == 1 else list(row)
        words = [str(v) if isinstance(v, int | float | str) else f"{n}{number}" for n, v in zip(names, values, strict=True)]
        out.append((dict(zip(names, values, strict=True)), "-".join(words)))
    return out


def _marks(case: str) -> list[Any]:
    return [] if case in ALWAYS else [pytest.mark.simulated]


ALL = list(_cases())
CASES = [case for case in ALL if case.id not in ELSEWHERE]


def test_the_cases_that_are_named_exist():
    named, found = {*ALWAYS, *ELSEWHERE}, {case.id for case in ALL}
    assert named <= found, sorted(named - found)


@pytest.mark.parametrize(("function", "values"), CASES)
def test_case(function, values):
    tools()
    with on_ascend():
        function(**values)
