"""Values of a kernel as rows and columns: what kernel bodies load and store where they need not know how a number lies in memory.

`bind` sorts a kernel's flat buffers into operands, results, workspaces and the row count. A `Rows` loads f32 tiles and stores f32 tiles in
its own number, block-scaled ones included. Rounding that the model documents in front of a quantizer is the kernel's, not done here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.kernel import KernelError, Request, Schedule, parts
from tapeout.dialects.format import REAL, Number
from tapeout.dialects.types import Tensor, View

Value = Any
Coordinate = Any  # an int or an index value
KINDS = {"f8E4M3FN": "e4m3"}
FP4_PAIR = 2  # elements in one byte


@dataclass(frozen=True)
class Rows:
    """A value of `number` seen as [rows, columns]: the buffer of its values or codes, and that of its scales where it has some.

    The first axis is the ragged one, all others are columns. A state's rows are its physical rows. Of plain numbers a value may be the columns
    of its buffer's rows from `first` on.
    """

    number: Number
    columns: int
    values: Value
    scales: Value = None
    first: int = 0

    def folded(self, columns: int) -> "Rows":
        """The same buffers with `columns` to a row: heads, streams or choices become rows."""
        return replace(self, columns=columns)

    def buffers(self) -> list[tuple[Value, int]]:
        """Each buffer with how many of its elements make one row."""
        if self.number.scaling is None:
            return [(self.values, self.columns)]
        packed = FP4_PAIR if self.number.element == "f4E2M1FN" else 1
        return [(self.values, self.columns // packed), (self.scales, self.columns // self.number.scaling.columns)]

    def raw(self, rows: Coordinate, at: Sequence[Coordinate], box: Sequence[int]) -> Value:
        """A box in the buffer's own element type."""
        where = [*at[:-1], behind(at[-1], self.first)]
        return t.View(self.values, [rows, self.columns]).load(where, box)

    def write(self, rows: Coordinate, at: Sequence[Coordinate], value: Value) -> None:
        """Stores a tile of the buffer's own element type."""
        t.View(self.values, [rows, self.columns]).store(at, value)

    def table(self, rows: Coordinate, at: Coordinate, count: int) -> Value:
        """`count` cells of a value with one number a row, as a rank 1 tile of the buffer's own element type."""
        return t.View(self.values, [rows]).load([at], [count])

    def vector(self, length: int, at: Coordinate, count: int) -> Value:
        """Cells [at, at + count) of a static vector of `length`, as f32."""
        self._require_plain()
        return t.cast(t.View(self.values, [length]).load([at], [count]), "f32")

    def line(self, row: Coordinate, at: Coordinate, count: int) -> Value:
        """Columns [at, at + count) of one row, as a rank 1 f32 tile."""
        self._require_plain()
        return t.cast(t.View(self.values, [None, self.columns]).load([row, behind(at, self.first)], [count]), "f32")

    def _require_plain(self) -> None:
        if self.number.scaling is not None:
            raise KernelError(f"a kernel reads single columns of {self.number}; it needs a value that is not block scaled")

    def load(self, rows: Coordinate, at: Sequence[Coordinate], box: Sequence[int]) -> Value:
        """A box as f32, exact for BF16 and FP8."""
        if self.number.scaling is None:
            return t.cast(self.raw(rows, at, box), "f32")
        if self.number.element != "f8E4M3FN":
            raise KernelError(f"rows of {self.number} are not decoded by boxes; use decode_fp4_row")
        group = self.number.scaling.columns
        (codes, width), (scales, groups) = self.buffers()
        where, shape = [*at[:-1], by(at[-1], group)], [*box[:-1], box[-1] // group]
        return t.dequantize_q8(t.View(codes, [rows, width]).load(at, box), t.View(scales, [rows, groups]).load(where, shape))

    def store(self, rows: Coordinate, at: Sequence[Coordinate], value: Value) -> None:
        """Stores an f32 tile, rounded or block-scaled to the number; a block-scaled one takes BF16 values."""
        if self.number.scaling is None:
            return self.write(rows, at, t.cast(value, kind(self.number)))
        pieces = quantized(self.number, value)
        steps = [self.columns // width for _, width in self.buffers()]
        for (buffer, width), piece, step in zip(self.buffers(), pieces, steps, strict=True):
            t.View(buffer, [rows, width]).store([*at[:-1], by(at[-1], step)], piece)
        return None


def quantized(number: Number, value: Value) -> tuple[Value, Value]:
    """Codes and scales of an f32 tile of BF16 values (model spec 9.3, 9.4)."""
    assert number.scaling is not None, number
    match number.element, number.scaling.scale:
        case "f8E4M3FN", "e8m0":
            return t.quantize_q8(value)
        case "f4E2M1FN", "e4m3":
            return t.quantize_fp4_main(value)
        case "f4E2M1FN", "e8m0":
            return t.quantize_fp4_index(value)
    raise KernelError(f"no quantizer makes {number}; there are those of model spec 9.3 and 9.4")


def kind(number: Number) -> str:
    """The builder's name of a number's element type."""
    return KINDS.get(number.element, number.element)


def behind(at: Coordinate, first: int) -> Coordinate:
    """A coordinate counted from `first` on, as one of the whole."""
    if first == 0:
        return at
    return at + first if isinstance(at, int) else t.add(at, first)


def by(at: Coordinate, step: int) -> Coordinate:
    """A coordinate divided by the elements that one scale or byte stands for."""
    if step == 1:
        return at
    return at // step if isinstance(at, int) else t.quotient(at, step)


@dataclass(frozen=True)
class Bound:
    """A kernel's buffers by role; `rows` is the run-time row count, an index."""

    operands: list[Any]
    results: list[Rows]
    workspaces: list[Value]
    rows: Value


def bind(request: Request, buffers: Sequence[Value]) -> Bound:
    """Sorts flat buffers: an absent operand is None, the others are `Rows`. Raises `KernelError` where a value is still a real number."""
    real = [str(v) for v in (*request.operands, *request.results) if isinstance(v, Tensor) and v.number == REAL]
    if real:
        raise KernelError(f"{request.op} works on real numbers ({', '.join(real)}); run assign-formats before kernels are chosen")
    left = list(buffers)
    operands = [None if view is None else _rows(view, left) for view in request.operands]
    results = [_rows(view, left) for view in request.results]
    return Bound(operands, results, left[:-1], t.scalar(left[-1], 0))


def block(schedule: Schedule, name: str, extent: int, multiple: int = 1) -> int:
    """The block size `name` of a schedule row; raises `KernelError` unless it divides `extent` in whole groups of `multiple`."""
    size = schedule[name]
    if size < 1 or extent % size or size % multiple:
        steps = f" that is a multiple of {multiple}" if multiple > 1 else ""
        raise KernelError(f"schedule entry {name} is {size}, expected a divisor of {extent}{steps}")
    return size


def scale_group(request: Request) -> int:
    """Columns that a block of rows must hold whole: those of the widest scale of an operand or result, 1 where nothing is block scaled."""
    scalings = [v.number.scaling for v in (*request.operands, *request.results) if isinstance(v, Tensor)]
    return max((s.columns for s in scalings if s is not None), default=1)


def row_count(buffers: Sequence[Value]) -> Value:
    """The run-time row count of a kernel's buffers, for its grid."""
    return t.scalar(buffers[-1], 0)


def columns_of(view: View | None) -> int:
    """Elements of one row of a value: all axes but the first; of a state, those of one entry."""
    if view is None:
        raise KernelError("an absent operand has no columns")
    shape = view.shape[1:] if isinstance(view, Tensor) else view.entry.shape
    if None in shape:
        raise KernelError(f"{view} has a run-time extent behind its first axis")
    return prod(n or 0 for n in shape)


def taken(request: Request, x: Rows) -> Rows:
    """x, or the columns of it that the first op of a fused group takes."""
    first = next((dict(attributes)["first"] for name, attributes in request.body if name == "nn.columns"), 0)
    return replace(x, first=first)


def _rows(view: View, left: list[Value]) -> Rows:
    number = view.number if isinstance(view, Tensor) else view.entry.number
    taken = [left.pop(0) for _ in parts(view)]
    return Rows(number, columns_of(view), *taken)


__all__ = ["Bound", "Rows", "bind", "block", "by", "columns_of", "kind", "quantized", "row_count", "scale_group", "taken"]
