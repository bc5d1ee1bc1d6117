"""Runs a graph by the meanings of its ops: the executable definition that every pass and kernel is compared with.

`Interpreter(function)` prepares one `func.func` (calls included) and may be run many times. Tensors are numpy arrays or `Scaled`; state handles
are `State` objects that ops change in place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tapeout.dialects._mlir import func, ir
from tapeout.dialects.define import REGISTRY, as_tuple, attributes_of, operand_groups
from tapeout.dialects.types import from_ir

_Scope = dict[ir.Value, int]
Observer = Callable[[Any, list[Any], tuple[Any, ...]], None]


@dataclass(frozen=True)
class _Step:
    """One op: where its operands lie (a group is an index, a list of them or None) and where its results go."""

    op: Any
    run: Callable[..., Any]
    operands: list[Any]
    results: list[int]


class Interpreter:
    """A function ready to be run by meaning. `observe(op, inputs, outputs)` sees every executed op, those inside fused regions too."""

    def __init__(self, function: func.FuncOp, observe: Observer | None = None) -> None:
        self._observe = observe
        self._count = 0
        self._steps: list[_Step] = []
        scope: _Scope = {}
        block = function.entry_block
        self._arguments = [self._fresh(scope, a) for a in block.arguments]
        self._results = self._prepare(block, scope, function.operation.parent)

    def run(self, *inputs: Any) -> tuple[Any, ...]:
        """The function's results for its arguments in order."""
        if len(inputs) != len(self._arguments):
            raise TypeError(f"the function takes {len(self._arguments)} arguments, found {len(inputs)}")
        values: list[Any] = [None] * self._count
        for number, value in zip(self._arguments, inputs, strict=True):
            values[number] = value
        for step in self._steps:
            operands = [_pick(values, o) for o in step.operands]
            results = as_tuple(step.run(*operands))
            for number, value in zip(step.results, results, strict=True):
                values[number] = value
            if self._observe is not None:
                self._observe(step.op, operands, results)
        return tuple(values[i] for i in self._results)

    def _fresh(self, scope: _Scope, value: ir.Value) -> int:
        scope[value] = self._count
        self._count += 1
        return scope[value]

    def _prepare(self, block: ir.Block, scope: _Scope, module: ir.Operation) -> list[int]:
        """Appends the block's steps; returns where the values lie that its terminator hands out."""
        for op in block.operations:
            raw = op.operation
            if raw.name in ("func.return", "nn.yield"):
                return [scope[v] for v in raw.operands]
            if raw.name in ("func.call", "nn.fused"):
                body = raw.regions[0].blocks[0] if raw.name == "nn.fused" else callee(module, raw).entry_block
                inner = {a: scope[v] for a, v in zip(body.arguments, raw.operands, strict=True)}
                scope.update(zip(raw.results, self._prepare(body, inner, module), strict=True))
            else:
                self._steps.append(self._step(op, scope))
        raise ValueError("a block without func.return or nn.yield")

    def _step(self, op: Any, scope: _Scope) -> _Step:
        raw = op.operation
        if raw.name not in REGISTRY:
            raise KeyError(f"{raw.name} at {raw.location} has no declared meaning")
        views = [from_ir(r.type) for r in raw.results]
        run = partial(REGISTRY[raw.name].meaning, attributes_of(op), views)
        groups = [None if g is None else [scope[v] for v in g] if isinstance(g, list) else scope[g] for g in operand_groups(op)]
        return _Step(op, run, groups, [self._fresh(scope, r) for r in raw.results])


def callee(module: ir.Operation, call: ir.Operation) -> func.FuncOp:
    """The function that a `func.call` names."""
    name = ir.FlatSymbolRefAttr(call.attributes["callee"]).value
    found = next((f for f in module.regions[0].blocks[0].operations if isinstance(f, func.FuncOp) and f.name.value == name), None)
    if found is None:
        raise KeyError(f"func.call of @{name}, which the module does not define")
    return found


def _pick(values: list[Any], where: Any) -> Any:
    if isinstance(where, list):
        return [values[i] for i in where]
    return None if where is None else values[where]
