"""Rotary embedding of heads, its fusion with quantization, and quantization of plain rows.

A head's columns that do not turn are moved as they are; the others turn in adjacent pairs (model spec 4.2).
"""

from collections.abc import Mapping
from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.kernel import Kernel, KernelError, Request, Schedule, family, width
from tapeout.codegen.kernels.column_blocks import own_columns, parts
from tapeout.codegen.row_values import Rows, bind, block, row_count, scale_group
from tapeout.dialects.types import Tensor, View

Value = Any


def rotated_columns(table: View | None) -> int:
    """How many columns of a head an angle table turns: a cosine and a sine for each pair."""
    return width(table)


def angles(table: Rows, positions: Rows, rows: Value, row: Value, turned: int, offset: int) -> tuple[Value, Value]:
    """Cosines and sines [turned / 2] of one row: table row max(position + offset, 0)."""
    at = t.maximum(t.add(t.scalar(positions.values, row), offset), 0)
    half = turned // 2
    view = t.View(table.values, [None, turned])
    return t.cast(view.load([at, 0], [half]), "f32"), t.cast(view.load([at, half], [half]), "f32")


def angles_of_rows(table: Rows, positions: Rows, rows: Value, first: Value, count: int, turned: int, offset: int) -> tuple[Value, Value]:
    """Cosines and sines [count, turned / 2] of rows from `first` on, [turned / 2] of one row; behind the last row its own stand once more."""
    if count == 1:
        return angles(table, positions, rows, first, turned, offset)
    each = [angles(table, positions, rows, t.minimum(t.add(first, r), t.sub(rows, 1)), turned, offset) for r in range(count)]
    cos, sin = (t.broadcast(x, 0, count) for x in each[0])
    number = t.broadcast(t.iota(count), 1, turned // 2)
    for r, own in enumerate(each[1:], 1):
        here = t.equal(number, r)
        cos, sin = (t.select(here, t.broadcast(x, 0, count), other) for x, other in zip(own, (cos, sin), strict=True))
    return cos, sin


def rotated(x: Value, cos: Value, sin: Value, inverse: bool) -> Value:
    """Pairs of the f32 tile x [rows, turned] turned by angles [rows, turned / 2], or turned back; [turned / 2] are those of every row."""

    def every(v: Value) -> Value:
        return v if len(t.shape_of(v)) > 1 else t.broadcast(v, 0, t.shape_of(x)[0])

    cos, sin = every(cos), every(t.negate(sin) if inverse else sin)
    even, odd = t.even_odd(x)
    return t.interleave(t.sub(t.mul(even, cos), t.mul(odd, sin)), t.add(t.mul(even, sin), t.mul(odd, cos)))


def cannot_rotate(request: Request, rope: Mapping[str, Any], table: View | None) -> str | None:
    """Why rotated heads cannot be stored in the result's number: a scale group must not straddle turned and unturned columns."""
    number = request.results[-1].number if isinstance(request.results[-1], Tensor) else None
    if number is None or number.scaling is None:
        return None
    group, turned = number.scaling.columns, rotated_columns(table)
    if turned % group or (rope["width"] - turned) % group:
        return f"{turned} of {rope['width']} columns turn; a quantized result needs both parts in whole groups of {group}"
    return None


def _cannot_rope(request: Request) -> str | None:
    x = request.operands[0]
    if not isinstance(x, Tensor) or x.number.element not in ("bf16", "f32"):
        return f"x is {x}, this kernel rotates BF16 or FP32 rows"
    return cannot_rotate(request, request.of("nn.rope"), request.operands[2])


@family("nn.rope", "nn.fused:rope_quantize", refuses=_cannot_rope)
def rope(request: Request, schedule: Schedule) -> Kernel:
    """Heads of rows [?, heads*width] rotated, then rounded to BF16 and quantized where fused. Grid: rows x head blocks (model spec 4.2).

    Rows of one head may come in blocks of `block_rows`.
    """
    settings, fused = request.of("nn.rope"), request.op.startswith("nn.fused")
    block_heads = block(schedule, "block_heads", settings["heads"])
    heads, columns, turned = settings["heads"], settings["width"], rotated_columns(request.operands[2])
    block_rows = schedule.get("block_rows", 1)
    if block_rows > 1 and heads > 1:
        raise KernelError(f"schedule entry block_rows is {block_rows}, expected 1 for rows of {heads} heads")

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        x, positions, table = b.operands
        row = t.mul(t.program_id(0), block_rows)
        first, rows = t.add(t.mul(row, heads), t.mul(t.program_id(1), block_heads)), b.rows if block_rows > 1 else None
        cos, sin = angles_of_rows(table, positions, b.rows, row, block_rows, turned, settings["offset"])
        source, result, lines = x.folded(columns), b.results[0].folded(columns), block_rows * block_heads
        left = source.load(rows, [first, 0], [lines, columns - turned]) if columns > turned else None
        at = [first, columns - turned]
        y = rotated(source.load(rows, at, [lines, turned]), cos, sin, settings["inverse"])
        if left is not None:
            result.store(rows, [first, 0], left)
        result.store(rows, at, t.round_bf16(y) if fused else y)

    return Kernel(body, lambda *b: [t.ceil_div(row_count(b), block_rows), heads // block_heads], "no sums")


def _cannot_quantize(request: Request) -> str | None:
    x = request.operands[0]
    if not isinstance(x, Tensor) or x.number.element != "bf16":
        return f"x is {x}, this kernel quantizes BF16 rows (model spec 9.3)"
    return None


@family("nn.quantize", refuses=_cannot_quantize)
def quantize(request: Request, schedule: Schedule) -> Kernel:
    """BF16 rows [?, n] to codes and scales. Grid: row blocks (model spec 9.3, 9.4)."""
    n, block_rows = width(request.operands[0]), schedule["block_rows"]
    columns = block(schedule, "block_columns", n, scale_group(request))

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        row = t.mul(t.program_id(0), block_rows)

        def step(column: Value) -> None:
            b.results[0].store(b.rows, [row, column], b.operands[0].load(b.rows, [row, column], [block_rows, columns]))

        own_columns(schedule, n, columns, step)

    return Kernel(body, lambda *b: [t.ceil_div(row_count(b), block_rows), *parts(schedule, n, columns)], "no sums")
