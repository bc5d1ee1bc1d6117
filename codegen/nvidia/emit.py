"""lower-tile-to-triton: one tile module to the source of one Triton kernel, op by op; a jinja2 skeleton holds the printed body.

The kernel takes the module's buffers as pointers, in order. A launch's grid is that of the row bucket, so the kernel computes its true grid
first, waits for the launch in front, and instances behind the grid leave. Same text, same source. What the source is compiled with is the
schedule row's (toolchain.py).
"""

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import jinja2

from tapeout.codegen.nvidia import emit_compute, emit_memory
from tapeout.codegen.nvidia.exact import DECODERS, narrow_values, unread_values
from tapeout.codegen.nvidia.hazards import Order, accesses, inside, nested, shared_buffers
from tapeout.codegen.nvidia.printer import EmitError, Printer, as_number, extents, padded
from tapeout.dialects import tile
from tapeout.dialects._mlir import ir

FORMS = {**emit_memory.FORMS, **emit_compute.FORMS}
POINTERS = {"bf16": "*bf16", "f16": "*fp16", "f32": "*fp32", "i8": "*i8", "i16": "*i16", "i32": "*i32", "i64": "*i64", "f8E4M3FN": "*fp8e4nv"}
SCALED_ROWS = 128
EARLY = ("tile.program_id", "tile.iota", "tensor.empty", "tensor.expand_shape", "tensor.collapse_shape", "linalg.fill", "linalg.broadcast")
"""Ops besides loads and arithmetic that an eager instance may run before it leaves."""
SKELETON = '''\
"""Generated from the tile kernel {{ name }}; do not edit."""
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


{% for helper in helpers -%}
{{ helper }}

{% endfor -%}
@triton.jit
def {{ name }}({{ arguments | join(", ") }}):
{%- for line in lines %}
    {{ line }}
{%- endfor %}
'''


@dataclass(frozen=True)
class Source:
    """A Triton kernel: its name, its text, its parameters as (buffer name, Triton type of the pointer); elements of its largest tile as
    Triton holds it, and how many block-scaled products it has that a chip with such products must keep. `language` "gluon" is a kernel of
    several groups of warps, whose first has `first_warps`."""

    name: str
    text: str
    parameters: tuple[tuple[str, str], ...]
    largest_tile: int
    scaled_products: int
    language: str = "triton"
    first_warps: int = 0

    @property
    def signature(self) -> dict[str, str]:
        """Types by parameter, as Triton's compiler takes them."""
        return dict(self.parameters)


def emit(text: str) -> Source:
    """The Triton kernel of the text of a tile module. Raises `EmitError` where an op has no form, naming kernel and op."""
    context = ir.Context()
    tile.load_into(context)
    with context, ir.Location.unknown():
        return emit_module(ir.Module.parse(text))


def emit_module(module: ir.Module) -> Source:
    """The Triton kernel of a tile module."""
    body, grid = list(module.body.operations)[:2]
    name, arguments = body.name.value, [a.value for a in body.attributes["tile.arguments"]]
    try:
        printed = _Body(body, grid, arguments)
        lines, helpers = printed.lines(), printed.helpers()
        parameters = tuple((a, _pointer(v)) for a, v in zip(arguments, body.arguments, strict=True))
    except EmitError as error:
        raise EmitError(f"kernel {name}: {error}") from None
    text = _skeleton().render(name=name, arguments=arguments, lines=lines, helpers=helpers) + "\n"
    return Source(name, text, parameters, _largest_tile(body.operation), _scaled_products(body.operation))


def _largest_tile(function: Any) -> int:
    return max((prod(map(padded, extents(v))) for op in nested(function) for v in op.results), default=1)


def _scaled_products(function: Any) -> int:
    """Block-scaled products of at least 128 rows: below, the tensor cores have no such form and BF16 ones stand in."""
    return sum(op.name == "tile.dot_scaled" and extents(op.out)[0] >= SCALED_ROWS for op in nested(function))


def _pointer(argument: Any) -> str:
    kind = str(ir.MemRefType(argument.type).element_type)
    if kind not in POINTERS:
        raise EmitError(f"buffers of {kind} have no Triton form")
    return POINTERS[kind]


@cache
def _skeleton() -> jinja2.Template:
    return jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False).from_string(SKELETON)


class _Body:
    """Prints the early exit, then the body."""

    def __init__(self, body: Any, grid: Any, arguments: list[str]) -> None:
        self._body, self._grid = body, grid
        self._p = Printer()
        self._p.names.update(zip(body.arguments, arguments, strict=True))
        self._p.names.update(zip(grid.arguments, arguments, strict=True))
        self._p.narrow = narrow_values(body)
        self._p.spread = emit_memory.spread_values(body)
        self._unread = unread_values(body, self._p.narrow)
        self._order = Order(shared_buffers(body))
        self._streamed = body.attributes["tile.streamed"].value if "tile.streamed" in body.attributes else 0

    def lines(self) -> list[str]:
        """Lines of the kernel, without the function's own indentation."""
        operations = list(self._body.entry_block.operations)
        early = self._early(operations) if "tile.eager" in self._body.attributes else 0
        behind = self._behind()
        self._wait()
        self._ops(operations[:early])
        self._leave(behind)
        self._ops(operations[early:])
        return [*self._p.head, *self._p.lines]

    def helpers(self) -> list[str]:
        """Texts of the functions that the lines call."""
        return [DECODERS[name] for name in self._p.helpers]

    def _behind(self) -> list[str]:
        """Conditions under which an instance has nothing to do: it lies at or beyond the run-time grid."""
        p = self._p
        self._block(self._grid.entry_block)
        p.held.update((emit_memory.read(p, op), p.names[op.out]) for op in self._grid.entry_block.operations if op.operation.name == "tile.scalar")
        extents = p.of(list(self._grid.entry_block.operations)[-1].operands)
        return [f"({p.instance(axis)} >= {extent})" for axis, extent in enumerate(extents) if as_number(extent) is None]

    def _wait(self) -> None:
        """Until the launch in front is through, and no instance leaves before: whoever waits for this kernel then waits for that one too. In
        front of it only the launch's count is read, which no launch writes (runtime/device/early.py). The next launch may begin from here on."""
        self._p.line("gdc_wait()")
        self._p.line("gdc_launch_dependents()")

    def _leave(self, behind: list[str]) -> None:
        if behind:
            self._p.line(f"if {' | '.join(behind)}:")
            self._p.line("    return")

    def _early(self, operations: list[Any]) -> int:
        """How many of the first ops may run before an instance leaves: loads of rows by its own number, which a bucket's buffers have, and
        arithmetic. What a loaded number points to need not be there."""
        count = self._body.entry_block.arguments[len(self._body.entry_block.arguments) - 1]

        def may(op: Any) -> bool:
            name = op.operation.name
            if name == "tile.scalar":
                return bool(op.base == count)
            return (name == "tile.load" and not len(op.extent)) or name in EARLY or name.startswith("arith.")

        return next((i for i, op in enumerate(operations) if not may(op)), 0)

    def _block(self, block: Any) -> None:
        self._ops(block.operations)

    def _ops(self, operations: Any) -> None:
        for op in operations:
            self._op(op)

    def _op(self, op: Any) -> None:
        name = op.operation.name
        if name in ("func.return", "scf.yield") or (self._unread and set(op.results) and set(op.results) <= self._unread):
            return
        if name == "scf.for":
            self._loop(op)
        elif name == "scf.if":
            self._branch(op)
        elif name in FORMS:
            self._barrier(accesses(op))
            FORMS[name](self._p, op)
        else:
            raise EmitError(f"{name} has no Triton form")

    def _barrier(self, new: list[Any]) -> None:
        if self._order.needs_barrier(new):
            self._p.line("tl.debug_barrier()")
        self._order.add(new)

    def _start(self, results: Any, values: Any, stem: str) -> list[str]:
        """One name for each carried value, set to its start."""
        names = [self._p.fresh(stem) for _ in results]
        for name, value in zip(names, values, strict=True):
            self._p.line(f"{name} = {self._p.typed(value)}")
        return names

    def _loop(self, op: Any) -> None:
        p, within = self._p, list(inside(op.operation))
        if self._order.needs_barrier(within):
            p.line("tl.debug_barrier()")
        before = set(self._order.pending)
        self._order.add(within)  # the turn before
        lower, upper, step, *start = op.operands
        carried = self._start(op.results, start, "carry")
        counter = p.fresh("i")
        p.line(f"for {counter} in {self._range(op, ', '.join(p.names[v] for v in (lower, upper, step)))}:")
        p.depth += 1
        block = op.regions[0].blocks[0]
        p.names.update(zip(list(block.arguments)[1:], carried, strict=True))
        p.names[block.arguments[0]] = p.fresh_line("at", f"tl.cast({counter}, tl.int64)")
        self._block(block)
        self._finish(block, carried)
        p.depth -= 1
        p.names.update(zip(op.results, carried, strict=True))
        self._order.pending |= before

    def _range(self, loop: Any, bounds: str) -> str:
        """What a loop counts through. Reads of a streamed kernel's innermost loops go ahead through shared memory, unless a turn could read what one
        in front of it writes."""
        ops = list(nested(loop.operation))
        may = any(op.name == "tile.load" for op in ops) and not any(op.name == "scf.for" for op in ops) and not shared_buffers(loop)
        return f"tl.range({bounds}, num_stages={self._streamed})" if self._streamed and may else f"range({bounds})"

    def _finish(self, block: Any, names: list[str]) -> None:
        """Hands on what a block yields; all values are read before one is set."""
        values = [self._p.typed(v) for v in list(block.operations)[-1].operands]
        if names:
            self._p.line(f"{', '.join(names)} = {', '.join(values)}")

    def _branch(self, op: Any) -> None:
        p, results = self._p, [self._p.fresh("chosen") for _ in op.results]
        before, after = set(self._order.pending), set()
        for number, region in enumerate(r for r in op.regions if len(r.blocks)):
            self._order.pending = set(before)
            p.line(f"if {p.names[op.operands[0]]}:" if number == 0 else "else:")
            p.depth += 1
            mark = len(p.lines)
            self._block(region.blocks[0])
            self._finish(region.blocks[0], results)
            if len(p.lines) == mark:
                p.line("pass")
            p.depth -= 1
            after |= self._order.pending
        self._order.pending = after | before
        p.names.update(zip(op.results, results, strict=True))


__all__ = ["EmitError", "Source", "emit", "emit_module"]
