"""Step programs: the planned functions of a module, read as flat lists of launches with every buffer resolved.

A launch's buffers are the operand parts, result parts, workspaces and the count cell of its op, in the order the kernel declares them. Nothing
is decided here: offsets come from plan-memory, kernels from select-kernels, names from the graph.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tapeout.codegen.costs import launch_cost
from tapeout.codegen.kernel import parts
from tapeout.codegen.plan_memory import FRAME, offsets_of
from tapeout.codegen.select_kernels import Choice, choice_of, kernel_of
from tapeout.dialects._mlir import func, ir
from tapeout.dialects.define import from_attribute
from tapeout.dialects.types import Blocks, Ring, Tensor, View, from_ir
from tapeout.passes.bucket_rows import buckets_of
from tapeout.passes.define import PassError, functions, operations
from tapeout.passes.extents import Extents, argument_attribute, callee, extent_of, extents
from tapeout.runtime.artifact import Element, Extent, Launch, Program, Value

Ref = tuple[Any, ...]
NAMES = {"": "values", "_codes": "codes", "_scales": "scales"}


Grids = Callable[[int, str, int], tuple[int, int, int] | None]
"""Instances of a launch by number of the kernel, extent that it counts, and row bucket; None where kernels find their own."""


def step_programs(
    module: ir.Module, kernels: Mapping[Choice, int], grids: Grids = lambda kernel, extent, bucket: None
) -> dict[str, dict[str, Program]]:
    """Programs by entry point and bucket; `kernels` numbers the kernel of each choice."""
    reader = _Reader(kernels, grids, buckets_of(module))
    out: dict[str, dict[str, Program]] = {}
    for function in functions(module):
        if not is_entry_point(function):
            continue
        arguments, results = _interface(function)
        names = tuple(argument_attribute(function, i, "tapeout.extent") for i in range(len(arguments)))
        out[function.name.value] = {}
        for number, bucket in enumerate(buckets_of(module)):
            launches = tuple(reader.launches(function, _Frame(number, 0, arguments, results, names)))
            arena = int(from_attribute(function.operation.attributes[FRAME])[number])
            out[function.name.value][str(bucket)] = Program.model_construct(
                arena_bytes=arena, inputs=_inputs(function), results=_results(function), launches=launches
            )
    return out


def is_entry_point(function: func.FuncOp) -> bool:
    """Whether the runtime may call a function: private ones are outlined parts of others."""
    attributes = function.operation.attributes
    return "sym_visibility" not in attributes or ir.StringAttr(attributes["sym_visibility"]).value != "private"


@dataclass(frozen=True)
class _Frame:
    """Where a function runs: bucket (number in the list), arena offset of its frame, parts of its arguments and results."""

    bucket: int
    base: int
    arguments: list[list[Ref]]
    results: list[list[Ref]]
    extents: tuple[str | None, ...]


@dataclass(frozen=True)
class _Op:
    """What is the same wherever an op's function is called: values by number, offsets per bucket, kernel, cost; or the function it calls."""

    operands: list[int]
    results: list[int]
    result_parts: list[int]
    offsets: list[list[int]]
    workspaces: int
    kernel: int
    extent: str
    cost: Any
    calls: func.FuncOp | None


@dataclass(frozen=True)
class _Body:
    """A function read once: its ops, how many values it has, and which of them it returns."""

    ops: list[_Op]
    count: int
    returned: list[int]


class _Reader:
    """Reads functions into launches; a function that is called often is analysed once for each set of argument extents."""

    def __init__(self, kernels: Mapping[Choice, int], grids: Grids, buckets: Sequence[int]) -> None:
        self._kernels, self._grids, self._buckets = kernels, grids, buckets
        self._bodies: dict[tuple[str, tuple[str | None, ...]], _Body] = {}

    def launches(self, function: func.FuncOp, frame: _Frame) -> Iterator[Launch]:
        """The function's launches in order, calls expanded."""
        body = self._body(function, frame.extents)
        places: list[list[Ref]] = [[] for _ in range(body.count)]
        places[: len(frame.arguments)] = frame.arguments
        returned = dict(zip(body.returned, frame.results, strict=True))
        for op in body.ops:
            offsets = [("arena", frame.base + offset) for offset in op.offsets[frame.bucket]]
            for result, count in zip(op.results, op.result_parts, strict=True):
                own, offsets = offsets[:count], offsets[count:]
                places[result] = returned.get(result, own)
            operands, results = [places[i] for i in op.operands], [places[i] for i in op.results]
            if op.calls is not None:
                names = tuple(argument_attribute(op.calls, i, "tapeout.extent") for i in range(len(operands)))
                yield from self.launches(op.calls, _Frame(frame.bucket, offsets[0][1], operands, results, names))
                continue
            buffers = [ref for group in (*operands, *results) for ref in group] + offsets[: op.workspaces]
            grid = self._grids(op.kernel, op.extent, self._buckets[frame.bucket])
            yield Launch.model_construct(kernel=op.kernel, buffers=(*buffers, ("extent", op.extent)), cost=op.cost, grid=grid)

    def _body(self, function: func.FuncOp, names: tuple[str | None, ...]) -> _Body:
        key = (function.name.value, names)
        if key not in self._bodies:
            self._bodies[key] = self._read(function, names)
        return self._bodies[key]

    def _read(self, function: func.FuncOp, names: tuple[str | None, ...]) -> _Body:
        ragged = extents(function, list(names))
        numbers = {v: i for i, v in enumerate(function.entry_block.arguments)}
        *ops, ending = operations(function)
        read = []
        for op in ops:
            for result in op.results:
                numbers[result] = len(numbers)
            read.append(self._op(op, function, numbers, ragged))
        return _Body(read, len(numbers), _returned(ending, numbers))

    def _op(self, op: ir.Operation, function: func.FuncOp, numbers: dict[ir.Value, int], ragged: Extents) -> _Op:
        called = callee(function, op) if op.name == "func.call" else None
        extent = extent_of(op, ragged)
        return _Op(
            [numbers[v] for v in op.operands],
            [numbers[r] for r in op.results],
            [len(parts(from_ir(r.type))) for r in op.results],
            offsets_of(op),
            0 if called else len(kernel_of(op).workspaces),
            -1 if called else self._kernels[choice_of(op)],
            extent or "rows",
            None if called else launch_cost(op, extent),
            called,
        )


def _returned(ending: ir.Operation, numbers: dict[ir.Value, int]) -> list[int]:
    values = list(ending.operands)
    if len(set(values)) != len(values) or any(isinstance(v.owner, ir.Block) for v in values):
        raise PassError(f"{ending.name} at {ending.location} hands out a value twice or an argument; expected each result made by one op")
    return [numbers[v] for v in values]


def _interface(function: func.FuncOp) -> tuple[list[list[Ref]], list[list[Ref]]]:
    """Parts of a public function's arguments (io, weight or state) and results (io)."""
    arguments = []
    for i, kind in enumerate(function.type.inputs):
        role = argument_attribute(function, i, "tapeout.kind")
        where = "weight" if role in ("weight", "table") else "state" if role == "state" else "io"
        name = argument_attribute(function, i, "tapeout.name")
        arguments.append([(where, name, NAMES[suffix]) for suffix, _ in parts(from_ir(kind))])
    results = [
        [("io", name, NAMES[suffix]) for suffix, _ in parts(from_ir(kind))]
        for name, kind in zip(result_names(function), function.type.results, strict=True)
    ]
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
    return tuple(
        v
        for name, value in zip(result_names(function), ending.operands, strict=True)
        for v in _values(name, from_ir(value.type), ragged.get(value))
    )


def _values(name: str, view: View, extent: str | None) -> Iterator[Value]:
    if isinstance(view, Ring | Blocks) or not isinstance(view, Tensor):
        raise PassError(f"{name} is a state handle; expected a tensor where programs exchange values")
    scaling = view.number.scaling
    shapes = [view.shape] if scaling is None else [_packed(view), scaling.blocks(view.shape)]
    for (suffix, element), shape in zip(parts(view), shapes, strict=True):
        yield Value(
            name=name,
            part=NAMES[suffix],
            dtype=cast(Element, element),
            extent=cast(Extent | None, extent),
            shape=tuple(cast(Extent, extent) if n is None else n for n in shape),
        )


def _packed(view: Tensor) -> tuple[int | None, ...]:
    *lead, last = view.shape
    return (*lead, (last or 0) // 2) if view.number.element == "f4E2M1FN" else view.shape
