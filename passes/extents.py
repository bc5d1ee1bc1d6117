"""Ragged extents by name: how many rows a `?` axis has at run time (rows, kept, outputs, sequences, drafts).

A function's arguments say theirs (`tapeout.extent`); an op hands the extent of its first ragged operand to its results unless its declaration
says otherwise. Planning sizes buffers by it, kernels read their row count from the cell of that name.
"""

from typing import Any

from tapeout.dialects._mlir import func, ir
from tapeout.dialects.define import attributes_of, declaration_of, operand_groups
from tapeout.dialects.types import Tensor, from_ir
from tapeout.passes.define import PassError

EXTENTS = ("rows", "kept", "outputs", "sequences", "drafts")
"""What a run-time row count may be of; the runtime counts just these (runtime/artifact.py)."""
Extents = dict[ir.Value, str]


def extents(function: func.FuncOp, arguments: list[str | None] | None = None) -> Extents:
    """The extent of every ragged value of a function, fused regions included; `arguments` stand in for its own attributes."""
    block = function.entry_block
    found: Extents = {}
    for i, value in enumerate(block.arguments):
        name = arguments[i] if arguments is not None else argument_attribute(function, i, "tapeout.extent")
        if _is_ragged(value):
            if name is None:
                raise PassError(f"argument {i} of @{function.name.value} has a run-time row count and no tapeout.extent")
            if name not in EXTENTS:
                raise PassError(f'argument {i} of @{function.name.value} has tapeout.extent "{name}"; expected one of {", ".join(EXTENTS)}')
            found[value] = name
    _walk(block, found, function)
    return found


def argument_attribute(function: func.FuncOp, index: int, name: str) -> str | None:
    """A string attribute of one argument, None where it has none."""
    if "arg_attrs" not in function.operation.attributes:
        return None
    attributes = ir.DictAttr(ir.ArrayAttr(function.arg_attrs)[index])
    if name not in attributes:
        return None
    value = attributes[name].maybe_downcast()
    if not isinstance(value, ir.StringAttr):
        raise PassError(f"argument {index} of @{function.name.value} has {name} = {value}; expected a string")
    return value.value


def extent_of(op: ir.Operation, known: Extents) -> str | None:
    """The extent by which an op counts its rows: that of its results, else of its first ragged operand."""
    return next((known[v] for v in (*op.results, *op.operands) if v in known), None)


def _is_ragged(value: ir.Value) -> bool:
    view = from_ir(value.type)
    return isinstance(view, Tensor) and None in view.shape


def _walk(block: ir.Block, found: Extents, function: func.FuncOp) -> None:
    for op in block.operations:
        raw = op.operation
        if raw.name in ("func.return", "nn.yield"):
            return
        if raw.name in ("nn.fused", "func.call"):
            _enter(raw, found, function)
            continue
        names = [_group(g, found) for g in operand_groups(op)]
        rule = getattr(declaration_of(op).cls, "extent", None)
        name = rule(attributes_of(op), names) if rule else _one_extent(raw, found)
        for result in raw.results:
            if _is_ragged(result):
                if name is None:
                    raise PassError(f"{raw.name} at {raw.location} makes a ragged value and no operand says how many rows it has")
                found[result] = name


def _one_extent(op: ir.Operation, found: Extents) -> str | None:
    """The extent that all ragged operands share; an op without a rule of its own counts its rows once."""
    names = list(dict.fromkeys(found[v] for v in op.operands if v in found))
    if len(names) > 1:
        raise PassError(
            f"{op.name} at {op.location} takes values of {' and '.join(names)} rows; expected one extent: bring them to one with nn.take"
        )
    return names[0] if names else None


def _group(group: Any, found: Extents) -> str | None:
    values = group if isinstance(group, list) else [group]
    return next((found[v] for v in values if v is not None and v in found), None)


def _enter(raw: ir.Operation, found: Extents, function: func.FuncOp) -> None:
    if raw.name == "nn.fused":
        body = raw.regions[0].blocks[0]
        found.update({a: found[v] for a, v in zip(body.arguments, raw.operands, strict=True) if v in found})
        _walk(body, found, function)
        inner, ending = found, list(body.operations)[-1].operation
    else:
        target = callee(function, raw)
        given = [found.get(v) for v in raw.operands]
        _require_extents(target, raw, given)
        inner = extents(target, given)
        ending = list(target.entry_block.operations)[-1].operation
    found.update({r: inner[v] for r, v in zip(raw.results, ending.operands, strict=True) if v in inner})


def _require_extents(target: func.FuncOp, call: ir.Operation, given: list[str | None]) -> None:
    """A function is planned once, for the extents its arguments state: a call hands over just those."""
    for i, name in enumerate(given):
        stated = argument_attribute(target, i, "tapeout.extent")
        if stated != name:
            raise PassError(
                f"{call.name} at {call.location} passes {name or 'no'} rows as argument {i} of @{target.name.value}; expected {stated or 'none'}"
            )


def callee(function: func.FuncOp, call: ir.Operation) -> func.FuncOp:
    """The function that a call inside `function` names: one in front of it, so that no function reaches itself."""
    name = ir.FlatSymbolRefAttr(call.attributes["callee"]).value
    for op in function.operation.block.operations:
        if op.operation == function.operation:
            break
        if isinstance(op, func.FuncOp) and op.name.value == name:
            return op
    raise PassError(
        f"{call.name} at {call.location} in @{function.name.value} calls @{name}; expected a function in front of @{function.name.value}"
    )
