"""Rotary embedding of heads, its fusion with quantization, and quantization of plain rows.

A head's columns that do not turn are moved as they are; the others turn in adjacent pairs (model spec 4.2).
"""

from collections.abc import Mapping
from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.kernel import Kernel, Request, Schedule, family, width
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


def rotated(x: Value, cos: Value, sin: Value, inverse: bool) -> Value:
    """Pairs of the f32 tile x [heads, turned] turned by the row's angles, or turned back."""
    heads = t.shape_of(x)[0]
    cos, sin = t.broadcast(cos, 0, heads), t.broadcast(t.negate(sin) if inverse else sin, 0, heads)
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
    return cannot_rotate(request, _rope_of(request), request.operands[2])


def _rope_of(request: Request) -> dict[str, Any]:
    return request.of("nn.rope") if request.op.startswith("nn.fused") else dict(request.attributes)


@family("nn.rope", "nn.fused:rope_quantize", refuses=_cannot_rope)
def rope(request: Request, schedule: Schedule) -> Kernel:
    """Heads of rows [?, heads*width] rotated, then rounded to BF16 and quantized where fused. Grid: rows x head blocks (model spec 4.2)."""
    settings, fused = _rope_of(request), request.op.startswith("nn.fused")
    block_heads = block(schedule, "block_heads", settings["heads"])
    heads, columns, turned = settings["heads"], settings["width"], rotated_columns(request.operands[2])

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        x, positions, table = b.operands
        row = t.program_id(0)
        first = t.add(t.mul(row, heads), t.mul(t.program_id(1), block_heads))
        cos, sin = angles(table, positions, b.rows, row, turned, settings["offset"])
        source, result = x.folded(columns), b.results[0].folded(columns)
        if columns > turned:
            result.store(None, [first, 0], source.load(None, [first, 0], [block_heads, columns - turned]))
        at = [first, columns - turned]
        y = rotated(source.load(None, at, [block_heads, turned]), cos, sin, settings["inverse"])
        result.store(None, at, t.round_bf16(y) if fused else y)

    return Kernel(body, lambda *b: [row_count(b), heads // block_heads], "no sums")


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
