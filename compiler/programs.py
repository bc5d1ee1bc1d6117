"""Step programs: the planned functions of a module, read as flat lists of launches with every buffer resolved.

A launch's buffers are the operand parts, result parts, workspaces and the count cell of its op, in the order the kernel declares them. Nothing
is decided here: offsets come from plan-memory, kernels from select-kernels, names from the graph.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tapeout.codegen.costs import launch_cost
from tapeout.codegen.kernel import parts
from tapeout.codegen.plan_memory import APART_ROWS, BITS_OF, FRAME, offsets_of, part_bytes
from tapeout.codegen.select_kernels import Choice, choice_of, in_launches, kernel_of
from tapeout.compiler.branches import Branches
from tapeout.dialects._mlir import func, ir
from tapeout.dialects.define import from_attribute
from tapeout.dialects.fused import reads_host
from tapeout.dialects.types import Blocks, Ring, Tensor, View, from_ir
from tapeout.passes.bucket_rows import buckets_of
from tapeout.passes.define import PassError, functions, operations
from tapeout.passes.extents import Extents, argument_attribute, callee, extent_of, extents
from tapeout.runtime.artifact import Extent, Launch, Program, Value
from tapeout.runtime.artifact_kernels import Element

Ref = tuple[Any, ...]
NAMES = {"": "values", "_codes": "codes", "_scales": "scales"}


Grids = Callable[[int, str, int], tuple[int, int, int] | None]
"""Instances of a launch by number of the kernel, extent that it counts, and row bucket; None where kernels find their own."""
Bound = Callable[[str, int], int]
"""The most that an extent counts in a bucket."""


def step_programs(
    module: ir.Module, kernels: Mapping[Choice, int], grids: Grids = lambda kernel, extent, bucket: None, bound: Bound | None = None
) -> dict[str, dict[str, Program]]:
    """Programs by entry point and bucket; `kernels` numbers the kernel of each choice.

    With `bound`, launches say which earlier ones they wait for (branches.py): where values lie apart, whose memory or results they need; in larger
    buckets the one before, but for those of ops that read host memory.
    """
    reader = _Reader(kernels, grids, buckets_of(module), bound)
    out: dict[str, dict[str, Program]] = {}
    for function in functions(module):
        if not is_entry_point(function):
            continue
        arguments, results = _interface(function)
        names = tuple(argument_attribute(function, i, "tapeout.extent") for i in range(len(arguments)))
        out[function.name.value] = {}
        for number, bucket in enumerate(buckets_of(module)):
            launches = tuple(reader.program(function, _Frame(number, 0, arguments, results, names)))
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
    """What is the same wherever an op's function is called: values by number, offsets, workspaces and kernels of its launches per bucket, cost;
    or the function it calls."""

    operands: list[int]
    results: list[int]
    result_parts: list[int]
    offsets: list[list[int]]
    sizes: list[list[int]]
    workspaces: list[int]
    kernels: list[list[int]]
    extent: str
    cost: Any
    calls: func.FuncOp | None
    reads_host: bool


@dataclass(frozen=True)
class _Body:
    """A function read once: its ops, how many values it has, and which of them it returns."""

    ops: list[_Op]
    count: int
    returned: list[int]


class _Reader:
    """Reads functions into launches; a function that is called often is analysed once for each set of argument extents."""

    def __init__(self, kernels: Mapping[Choice, int], grids: Grids, buckets: Sequence[int], bound: Bound | None) -> None:
        self._kernels, self._grids, self._buckets, self._bound = kernels, grids, buckets, bound
        self._bodies: dict[tuple[str, tuple[str | None, ...]], _Body] = {}
        self._branches: Branches | None = None
        self._bytes: dict[Ref, int] = {}

    def program(self, function: func.FuncOp, frame: _Frame) -> Iterator[Launch]:
        """The launches of an entry point."""
        in_line = self._buckets[frame.bucket] > APART_ROWS
        self._branches, self._bytes = Branches(in_line=in_line) if self._bound is not None else None, {}
        return self.launches(function, frame)

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
            given, made = [ref for group in operands for ref in group], [ref for group in results for ref in group]
            made += offsets[: op.workspaces[frame.bucket]]
            buffers, waits = given + made, self._waits(op, frame, given, made)
            *parts, last = op.kernels[frame.bucket]
            for kernel in (*parts, last):  # the op's whole cost stands on its last launch
                grid, cost = self._grids(kernel, op.extent, self._buckets[frame.bucket]), op.cost if kernel == last else {}
                after = None if waits is None else waits if kernel == (*parts, last)[0] else (1,)
                yield Launch.model_construct(kernel=kernel, buffers=(*buffers, ("extent", op.extent)), cost=cost, grid=grid, after=after)

    def _waits(self, op: _Op, frame: _Frame, given: list[Ref], made: list[Ref]) -> tuple[int, ...] | None:
        """The launches in front that an op's first one waits for; None where nobody asks. An op without results writes the states it takes."""
        if self._branches is None:
            return None
        self._bytes.update(zip(made, op.sizes[frame.bucket], strict=True))
        changed = [ref for ref in given if ref[0] == "state" and not op.results]
        read, written = ([(ref, self._bytes.get(ref, 0)) for ref in refs if ref[0] != "weight"] for refs in (given, made + changed))
        waits = self._branches.add(read, written, beside=op.reads_host)
        for _ in op.kernels[frame.bucket][1:]:
            self._branches.add(read, written, beside=op.reads_host)
        return waits

    def _sizes(self, op: ir.Operation, ragged: Extents, number: int, bucket: int) -> list[int]:
        """Bytes of an op's result parts, then of its workspaces."""
        if self._bound is None:
            return []
        views = [(from_ir(r.type), self._bound(ragged[r], bucket) if r in ragged else 0) for r in op.results]
        sizes = [size for view, rows in views if isinstance(view, Tensor) for size in part_bytes(view, rows)]
        rows = max((self._bound(ragged[v], bucket) for v in (*op.results, *op.operands) if v in ragged), default=0)
        return sizes + [w.elements(rows) * BITS_OF[w.element] // 8 for w in kernel_of(op, number).workspaces]

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
        extent, buckets = extent_of(op, ragged), range(len(self._buckets))
        return _Op(
            [numbers[v] for v in op.operands],
            [numbers[r] for r in op.results],
            [len(parts(from_ir(r.type))) for r in op.results],
            offsets_of(op),
            [] if called else [self._sizes(op, ragged, number, rows) for number, rows in enumerate(self._buckets)],
            [] if called else [len(kernel_of(op, bucket).workspaces) for bucket in buckets],
            [] if called else [[self._kernels[one] for one in in_launches(choice_of(op, bucket))] for bucket in buckets],
            extent or "rows",
            None if called else launch_cost(op, extent),
            called,
            called is None and reads_host(op),
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
