"""Step programs: the planned functions of a module, read as flat lists of launches with every buffer resolved.

A launch's buffers are the operand parts, result parts, workspaces and the count cell of its op, in the order the kernel declares them. Nothing
is decided here: offsets come from plan-memory, kernels from select-kernels, names from the graph.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tapeout.codegen.costs import launch_cost
from tapeout.codegen.kernel import parts
from tapeout.codegen.plan_memory import FRAME, offsets_of
from tapeout.codegen.select_kernels import Choice, choice_of, kernel_of
from tapeout.dialects._mlir import func, ir
from tapeout.dialects.define import from_attribute
from tapeout.dialects.types import Blocks, Ring, Tensor, View, from_ir
from tapeout.passes.bucket_rows import buckets_of
from tapeout.passes.define import PassError, functions, operations
from tapeout.passes.extents import argument_attribute, callee, extent_of, extents
from tapeout.runtime.artifact import Launch, Program, Value

Ref = tuple[Any, ...]
NAMES = {"": "values", "_codes": "codes", "_scales": "scales"}


@dataclass(frozen=True)
class _Frame:
    """Where a function runs: bucket (number in the list), arena offset of its frame, parts of its arguments and results."""

    bucket: int
    base: int
    arguments: list[list[Ref]]
    results: list[list[Ref]]
    extents: list[str | None]


def step_programs(module: ir.Module, kernels: Mapping[Choice, int]) -> dict[str, dict[str, Program]]:
    """Programs by entry point and bucket; `kernels` numbers the kernel of each choice."""
    costs: dict[tuple[ir.Operation, str | None], Any] = {}
    out: dict[str, dict[str, Program]] = {}
    for function in functions(module):
        if not is_entry_point(function):
            continue
        arguments, results = _interface(function)
        names = [argument_attribute(function, i, "tapeout.extent") for i in range(len(arguments))]
        out[function.name.value] = {}
        for number, bucket in enumerate(buckets_of(module)):
            frame = _Frame(number, 0, arguments, results, names)
            launches = tuple(_launches(function, frame, kernels, costs))
            arena = int(from_attribute(function.operation.attributes[FRAME])[number])
            out[function.name.value][str(bucket)] = Program(
                arena_bytes=arena, inputs=_inputs(function), results=_results(function), launches=launches)
    return out


def is_entry_point(function: func.FuncOp) -> bool:
    """Whether the runtime may call a function: private ones are outlined parts of others."""
    attributes = function.operation.attributes
    return "sym_visibility" not in attributes or ir.StringAttr(attributes["sym_visibility"]).value != "private"


def _launches(function: func.FuncOp, frame: _Frame, kernels: Mapping[Choice, int], costs: dict[Any, Any]) -> Iterator[Launch]:
    ragged = extents(function, frame.extents)
    places: dict[ir.Value, list[Ref]] = dict(zip(function.entry_block.arguments, frame.arguments, strict=True))
    *ops, ending = operations(function)
    returned = _returned(ending, frame)
    for op in ops:
        offsets = iter(offsets_of(op)[frame.bucket])
        for result in op.results:
            own = [("arena", frame.base + next(offsets)) for _ in parts(from_ir(result.type))]
            places[result] = returned.get(result, own)
        rest = [("arena", frame.base + offset) for offset in offsets]
        operands = [places[v] for v in op.operands]
        results = [places[r] for r in op.results]
        if op.name == "func.call":
            inner = _Frame(frame.bucket, rest[0][1], operands, results, [ragged.get(v) for v in op.operands])
            yield from _launches(callee(function, op), inner, kernels, costs)
            continue
        extent = extent_of(op, ragged)
        if (op, extent) not in costs:
            costs[op, extent] = launch_cost(op, extent)
        buffers = [ref for group in (*operands, *results) for ref in group] + rest[:len(kernel_of(op).workspaces)]
        yield Launch(kernel=kernels[choice_of(op)], buffers=(*buffers, ("extent", extent or "rows")), cost=costs[op, extent])


def _returned(ending: ir.Operation, frame: _Frame) -> dict[ir.Value, list[Ref]]:
    values = list(ending.operands)
    if len(set(values)) != len(values) or any(isinstance(v.owner, ir.Block) for v in values):
        raise PassError(f"{ending.name} at {ending.location} hands out a value twice or an argument; expected each result made by one op")
    return dict(zip(values, frame.results, strict=True))


def _interface(function: func.FuncOp) -> tuple[list[list[Ref]], list[list[Ref]]]:
    """Parts of a public function's arguments (io, weight or state) and results (io)."""
    arguments = []
    for i, kind in enumerate(function.type.inputs):
        role = argument_attribute(function, i, "tapeout.kind")
        where = "weight" if role in ("weight", "table") else "state" if role == "state" else "io"
        name = argument_attribute(function, i, "tapeout.name")
        arguments.append([(where, name, NAMES[suffix]) for suffix, _ in parts(from_ir(kind))])
    results = [[("io", name, NAMES[suffix]) for suffix, _ in parts(from_ir(kind))]
               for name, kind in zip(result_names(function), function.type.results, strict=True)]
    return arguments, results


def result_names(function: func.FuncOp) -> list[str]:
    """`tapeout.name` of each result."""
    if "res_attrs" not in function.operation.attributes:
        return []
    return [ir.StringAttr(ir.DictAttr(a)["tapeout.name"]).value for a in ir.ArrayAttr(function.operation.attributes["res_attrs"])]


def _inputs(function: func.FuncOp) -> tuple[Value, ...]:
    found: list[Value] = []
    for i, kind in enumerate(function.type.inputs):
        if argument_attribute(function, i, "tapeout.kind") == "input":
            name, extent = (argument_attribute(function, i, f"tapeout.{key}") for key in ("name", "extent"))
            found.extend(_values(str(name), from_ir(kind), extent))
    return tuple(found)


def _results(function: func.FuncOp) -> tuple[Value, ...]:
    ragged = extents(function)
    ending = operations(function)[-1]
    return tuple(v for name, value in zip(result_names(function), ending.operands, strict=True)
                 for v in _values(name, from_ir(value.type), ragged.get(value)))


def _values(name: str, view: View, extent: str | None) -> Iterator[Value]:
    if isinstance(view, Ring | Blocks) or not isinstance(view, Tensor):
        raise PassError(f"{name} is a state handle; expected a tensor where programs exchange values")
    scaling = view.number.scaling
    shapes = [view.shape] if scaling is None else [_packed(view), scaling.blocks(view.shape)]
    for (suffix, element), shape in zip(parts(view), shapes, strict=True):
        yield Value(name=name, part=NAMES[suffix], dtype=element, extent=extent,  # type: ignore[arg-type]
                    shape=tuple(extent if n is None else n for n in shape))  # type: ignore[misc]


def _packed(view: Tensor) -> tuple[int | None, ...]:
    *lead, last = view.shape
    return (*lead, (last or 0) // 2) if view.number.element == "f4E2M1FN" else view.shape
