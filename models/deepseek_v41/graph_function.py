"""One `func.func` of the model while it is being written: arguments appear when first asked for, ops get names and a layer.

Promises: every argument and result carries its tapeout.* attributes, every value a name location, every op of a layer the attribute
`tapeout.layer`. What the ops are is said in graph.py and its neighbours.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tapeout.dialects._mlir import func, ir
from tapeout.dialects.types import Tensor, View, to_ir
from tapeout.models.deepseek_v41.graph_states import StateSource
from tapeout.models.deepseek_v41.weights import WeightSource

ROTARY_FORMAT = "f32"


@dataclass(frozen=True)
class Operands:
    """What functions may take besides inputs: weights and states by name."""

    weights: Mapping[str, WeightSource]
    states: Mapping[str, StateSource]


class Function:
    """A public function of `module` under construction; `finish` closes it. Needs a current context and location."""

    def __init__(self, module: ir.Module, name: str, operands: Operands) -> None:
        with ir.InsertionPoint(module.body):
            self._op = func.FuncOp(name, ir.FunctionType.get([], []), visibility="public")
        self.block: ir.Block = self._op.add_entry_block()
        self._operands = operands
        self._arguments: dict[str, ir.Value] = {}
        self._attributes: list[ir.DictAttr] = []
        self._layer: str | None = None

    def input(self, name: str, view: Tensor, extent: str | None = None, format: str | None = None) -> ir.Value:
        """A value the host or an earlier function fills; `extent` names its run-time number of rows, `format` a real value's number."""
        return self._argument(name, view, {"kind": "input", "extent": extent, "format": format})

    def weight(self, name: str) -> ir.Value:
        """A weight or table operand. Raises KeyError where the model has none of this name."""
        source = self._operands.weights[name]
        real = source.derived is not None and source.view.number.is_float
        return self._argument(name, source.view, {"kind": source.kind, "format": ROTARY_FORMAT if real else None})

    def state(self, name: str) -> ir.Value:
        """A state handle. Raises KeyError where the model has none of this name."""
        source = self._operands.states[name]
        return self._argument(name, source.view, {"kind": "state", "format": source.format})

    def at(self, name: str) -> ir.Location:
        """The location of a value called `name`, within the current layer."""
        return ir.Location.name(name if self._layer is None else f"{self._layer}.{name}")

    @contextmanager
    def writing(self) -> Iterator["Function"]:
        """Ops built inside go to the end of this function."""
        with ir.InsertionPoint(self.block):
            yield self

    @contextmanager
    def layer(self, label: str) -> Iterator[None]:
        """Ops built inside belong to the layer `label` ("layers.3", "draft.0")."""
        before, self._layer = len(self.block.operations), label
        yield
        for op in list(self.block.operations)[before:]:
            op.operation.attributes["tapeout.layer"] = ir.StringAttr.get(label)
        self._layer = None

    def finish(self, results: Mapping[str, ir.Value]) -> None:
        """Returns `results` under their names and settles the function's type."""
        func.ReturnOp(list(results.values()))
        taken, made = [a.type for a in self.block.arguments], [v.type for v in results.values()]
        self._op.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(taken, made))
        self._op.attributes["arg_attrs"] = ir.ArrayAttr.get(self._attributes)
        self._op.attributes["res_attrs"] = ir.ArrayAttr.get([_attributes({"name": name}) for name in results])

    def _argument(self, name: str, view: View, facts: dict[str, str | None]) -> ir.Value:
        if name not in self._arguments:
            self._arguments[name] = self.block.add_argument(to_ir(view), ir.Location.name(name))
            self._attributes.append(_attributes({"name": name, **facts}))
        return self._arguments[name]


def _attributes(facts: dict[str, Any]) -> ir.DictAttr:
    return ir.DictAttr.get({f"tapeout.{key}": ir.StringAttr.get(value) for key, value in facts.items() if value is not None})
