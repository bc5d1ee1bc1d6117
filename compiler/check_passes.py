"""`--check-passes`: runs the module before and after every pass on toy data and names the pass and op that broke a promise.

Every public function is fed the same seeded inputs, weights and states. `keeps = bits` asks for equal results and states, `sums` for equality
up to rounding; after `formats` the new values are the ones later passes must keep.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tapeout.compiler.errors import PromiseBroken, SettingsError
from tapeout.compiler.programs import is_entry_point, result_names
from tapeout.dialects._mlir import func, ir
from tapeout.dialects.format import decode
from tapeout.dialects.interpreter import Interpreter
from tapeout.dialects.state import State
from tapeout.dialects.types import Tensor, from_ir
from tapeout.models.deepseek_v41.config import ModelConfig
from tapeout.models.deepseek_v41.graph import GraphOptions
from tapeout.models.deepseek_v41.toy_inputs import toy_input, toy_state, toy_weight
from tapeout.passes.define import Pass, functions
from tapeout.passes.extents import argument_attribute

LARGEST = 50_000_000
"""Weight elements of the largest module that is worth running on toy data; real widths are refused."""


@dataclass(frozen=True)
class Meaning:
    """What a module did on toy data: every named value that passes between functions or stays in a state, and every op's results with their names,
    in the order in which they were made.

    A name has several results where one function is called for several layers, and where two functions begin alike.
    """

    values: dict[str, Any]
    ops: list[tuple[str, Any]]


class Checker:
    """Holds what the module meant before the pass that runs now."""

    def __init__(self, module: ir.Module, config: ModelConfig, options: GraphOptions) -> None:
        elements = sum(_elements(f) for f in functions(module))
        if elements > LARGEST:
            raise SettingsError(
                [
                    f"--check-passes: the module has {elements:,} weight elements, expected at most {LARGEST:,}: "
                    "use a small configuration such as config-tiny.json"
                ]
            )
        self._config, self._options = config, options
        self._meaning: Meaning | None = None

    def before(self, one: Pass, module: ir.Module) -> None:
        if self._meaning is None:
            self._meaning = self.measure(module)

    def after(self, one: Pass, module: ir.Module) -> None:
        """Raises `PromiseBroken` naming pass, op and value."""
        found, old = self.measure(module), self._meaning
        assert old is not None, "after() follows before()"
        if one.keeps != "formats":
            for name, value in old.values.items():
                problem = _difference(value, found.values.get(name), exact=one.keeps == "bits")
                if problem is not None:
                    raise PromiseBroken(
                        f"pass {one.name} promised to keep {one.keeps} and changed {name}: {problem}; the first op whose "
                        f"results changed is {_first_changed(old.ops, found.ops)}"
                    )
        self._meaning = found

    def measure(self, module: ir.Module) -> Meaning:
        """Every public function on the toy step, in order; values and states pass from one to the next."""
        values: dict[str, Any] = {}
        states: dict[str, State] = {}
        ops: list[tuple[str, Any]] = []

        def observe(op: Any, _: list[Any], made: tuple[Any, ...]) -> None:
            ops.extend(_named(op, made))

        for function in functions(module):
            if is_entry_point(function):
                inputs = [self._argument(function, i, values, states) for i in range(len(function.type.inputs))]
                results = Interpreter(function, observe).run(*inputs)
                values.update(zip(result_names(function), results, strict=True))
        return Meaning(values | {name: state.value for name, state in states.items()}, ops)

    def _argument(self, function: func.FuncOp, index: int, values: dict[str, Any], states: dict[str, State]) -> Any:
        name, kind = (str(argument_attribute(function, index, f"tapeout.{key}")) for key in ("name", "kind"))
        view = from_ir(function.type.inputs[index])
        if not isinstance(view, Tensor):
            return states.setdefault(name, toy_state(view, self._options))
        if kind == "input":
            return values[name] if name in values else toy_input(name, view, self._config, self._options)
        return toy_weight(name, view)


def _named(op: Any, made: tuple[Any, ...]) -> list[tuple[str, Any]]:
    name = str(op.operation.location)
    return [(f"{op.operation.name} at {name}, result {i}", value) for i, value in enumerate(made)]


def _first_changed(old: list[tuple[str, Any]], new: list[tuple[str, Any]]) -> str:
    """The first op, in the order of the old run, that both runs executed under one name and whose result the new one never made."""
    found: dict[str, list[Any]] = {}
    for name, value in new:
        found.setdefault(name, []).append(value)
    changed = (name for name, value in old if name in found and all(_difference(value, made, exact=True) for made in found[name]))
    return next(changed, "one that the pass made")


def _elements(function: func.FuncOp) -> int:
    if not is_entry_point(function):
        return 0
    views = [from_ir(t) for t in function.type.inputs]
    return sum(int(np.prod(v.sized(0))) for v in views if isinstance(v, Tensor))


def _difference(old: Any, new: Any, exact: bool) -> str | None:
    if new is None:
        return "it is gone"
    a, b = (decode(v) for v in (old, new))
    if a.shape != b.shape:
        return f"shape {a.shape} became {b.shape}"
    same = np.array_equal(a, b, equal_nan=True) if exact else np.allclose(a, b, rtol=1e-6, atol=1e-9, equal_nan=True)
    if same:
        return None
    apart = (a != b) & ~(np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        distance = np.where(apart, np.nan_to_num(np.abs(a - b), nan=np.inf), -1.0)
    where = np.unravel_index(int(distance.argmax()), a.shape)
    return f"at {tuple(int(i) for i in where)} {a[where]!r} became {b[where]!r}"
