"""outline-layers: layers that are built alike become one function, called with each layer's weights and states.

Kernels, schedules and memory are then decided once per kind of layer, and a program of forty layers reads as forty calls.
"""

from dataclasses import dataclass
from itertools import count, pairwise
from typing import ClassVar

from tapeout.dialects._mlir import func, ir
from tapeout.passes.define import Pass, Promise, functions, operations
from tapeout.passes.extents import Extents, extents

LAYER = "tapeout.layer"


@dataclass(frozen=True)
class OutlineLayers(Pass):
    """Moves each run of ops of one layer into a private function; equal functions are kept once."""

    name: ClassVar[str] = "outline-layers"
    keeps: ClassVar[Promise] = "bits"

    def run(self, module: ir.Module) -> None:
        known: dict[str, str] = {}
        taken = {f.name.value for f in functions(module)}
        for function in functions(module):
            ragged = extents(function)
            free = (name for number in count() if (name := f"{function.name.value}_part{number}") not in taken)
            for group in _runs(function):
                _outline(function, group, next(free), ragged, known)


@dataclass(frozen=True)
class _Run:
    """Adjacent ops of one layer and the op behind them."""

    ops: list[ir.Operation]
    behind: ir.Operation


def _runs(function: func.FuncOp) -> list[_Run]:
    """The runs of one layer each; a layer that is one call is outlined already."""
    runs: list[_Run] = []
    run: list[ir.Operation] = []
    ops = operations(function)
    for op, following in pairwise(ops):
        if LAYER in op.attributes:
            run.append(op)
        if run and (LAYER not in following.attributes or following.attributes[LAYER] != op.attributes[LAYER]):
            runs.append(_Run(run, following))
            run = []
    return [r for r in runs if [op.name for op in r.ops] != ["func.call"]]


def _outline(function: func.FuncOp, run: _Run, name: str, ragged: Extents, known: dict[str, str]) -> None:
    made = {r for op in run.ops for r in op.results}
    inputs = list(dict.fromkeys(v for op in run.ops for v in op.operands if v not in made))
    layer, location = run.ops[0].attributes[LAYER], run.ops[0].location
    body = _function(function, name, inputs, ragged)
    block = body.entry_block
    for op in run.ops:
        _forget_layer(op)
        block.append(op)
    _replace_inside(dict(zip(inputs, block.arguments, strict=True)), run.ops)
    results = [r for op in run.ops for r in op.results if any(use.owner.operation.block != block for use in r.uses)]
    body.operation.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get([v.type for v in inputs], [r.type for r in results]))
    with ir.InsertionPoint(run.behind), location:
        call = func.CallOp([r.type for r in results], ir.FlatSymbolRefAttr.get(name), inputs)
    call.operation.attributes[LAYER] = layer
    for old, new in zip(results, call.operation.results, strict=True):
        _replace_outside(old, new, block)
        if old in ragged:
            ragged[new] = ragged[old]
    with ir.InsertionPoint(block), location:
        func.ReturnOp(results)
    _keep_once(body, call, name, known)


def _keep_once(body: func.FuncOp, call: func.CallOp, name: str, known: dict[str, str]) -> None:
    """A function that reads like an earlier one is dropped; its call names the earlier one."""
    key = body.operation.get_asm(assume_verified=True).replace(f"@{name}", "@")
    if key in known:
        call.operation.attributes["callee"] = ir.FlatSymbolRefAttr.get(known[key])
        body.operation.erase()
    else:
        known[key] = name


def _function(caller: func.FuncOp, name: str, inputs: list[ir.Value], ragged: Extents) -> func.FuncOp:
    with ir.InsertionPoint(caller), caller.location:
        made = func.FuncOp(name, ([v.type for v in inputs], []), visibility="private")
    made.operation.regions[0].blocks.append(*[v.type for v in inputs])
    made.operation.attributes["arg_attrs"] = ir.ArrayAttr.get(
        [ir.DictAttr.get({"tapeout.extent": ir.StringAttr.get(ragged[v])} if v in ragged else {}) for v in inputs]
    )
    return made


def _forget_layer(op: ir.Operation) -> None:
    """Removes the layer's name from an op and from the ops of a fused group: equal layers must read equal."""
    if LAYER in op.attributes:
        del op.attributes[LAYER]
    for region in op.regions:
        for inner in region.blocks[0].operations:
            _forget_layer(inner.operation)


def _replace_inside(new: dict[ir.Value, ir.Value], group: list[ir.Operation]) -> None:
    for op in group:
        for i, value in enumerate(list(op.operands)):
            if value in new:
                op.operands[i] = new[value]


def _replace_outside(old: ir.Value, new: ir.Value, block: ir.Block) -> None:
    for use in list(old.uses):
        if use.owner.operation.block != block:
            use.owner.operation.operands[use.operand_number] = new
