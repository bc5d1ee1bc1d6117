"""Linear layers: BF16 or FP32 rows with BF16 weights, FP8 rows with FP8 weights, BF16 rows with FP8 weights decoded exactly.

One definition for all: a block of rows times a block of weight columns, over K in blocks of `block_k`. Weights lie as [K, N], in panels of
`panel` columns where the width of a group is a multiple of it, else row by row. With `weights_first` in the schedule they lie as stored,
[N, K], and are the left factor: the product is transposed, and few rows of x fill its columns.
"""

from collections.abc import Callable
from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.kernel import Kernel, KernelError, Layout, Request, Schedule, family
from tapeout.codegen.row_values import Rows, bind, block, by, kind, row_count
from tapeout.dialects.format import FP8_WEIGHT, Q8, Number
from tapeout.dialects.types import Tensor

Value = Any
SCALE_GROUP = 32
Product = Callable[[Value, Value, Value, Value, Value], Value]
"""acc + x[row .., column ..] weight[k .., n ..]: (row, column of x, k, n, acc) to acc."""


def number_of(request: Request, operand: int) -> Number:
    """The number of a tensor operand."""
    view = request.operands[operand]
    if not isinstance(view, Tensor):
        raise KernelError(f"operand {operand} of {request} is not a tensor")
    return view.number


def stored_layout(shape: tuple[int, ...], number: Number) -> Layout:
    """Values or codes as they are, [N, K]; 32x32 scales as [N, K/32]."""
    return Layout() if number.scaling is None else Layout((), (f"expand_rows:{number.scaling.rows}:{shape[-2]}",))


def weight_layout(shape: tuple[int, ...], number: Number, scaled_rows: bool, panel: int) -> Layout:
    """Codes as [K, N]; 32x32 scales as [N, K/32] beside block-scaled rows, as [K/32, N] where the kernel decodes the weight."""
    codes = ("transpose", *([f"panels:{panel}"] if panel else []))
    if number.scaling is None:
        return Layout(codes)
    expand = f"expand_rows:{number.scaling.rows}:{shape[-2]}"
    return Layout(codes, (expand,) if scaled_rows else (expand, "transpose"))


def _cannot_multiply(request: Request) -> str | None:
    x, weight = number_of(request, 0), number_of(request, 1)
    plain = x.scaling is None and x.element in ("bf16", "f32")
    if plain and (weight == FP8_WEIGHT or (weight.scaling is None and weight.element in ("bf16", "f32"))):
        return None
    if x == Q8 and weight == FP8_WEIGHT:
        return None
    return f"x is {x} and the weight {weight}; known are BF16 or FP32 rows with BF16, FP32 or FP8 weights, and FP8 rows with FP8 weights"


@family("nn.linear", refuses=_cannot_multiply)
def linear(request: Request, schedule: Schedule) -> Kernel:
    """y [?, N] = x [?, K*groups] weight [N, K]; group g has columns K*g.. of x and rows N/G*g.. of the weight. Grid: columns x rows.

    A group whose width is no multiple of `block_n` ends with a block that overlaps the one before; both store the same bits.
    """
    view = request.operands[1]
    assert isinstance(view, Tensor)
    n, k = view.sized(0)
    groups, width = request["groups"], n // request["groups"]
    block_m, block_n, panel = schedule["block_m"], schedule["block_n"], schedule["panel"]
    block_k = block(schedule, "block_k", k, SCALE_GROUP if number_of(request, 1).scaling else 1)
    if panel:
        block(schedule, "block_n", width, panel)
    blocks, first = -(-width // block_n), bool(schedule.get("weights_first"))

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        x, weight = b.operands
        place, m0 = t.program_id(0), t.mul(t.program_id(1), block_m)
        group = t.quotient(place, blocks)
        n0 = t.add(t.mul(group, width), t.minimum(t.mul(t.remainder(place, blocks), block_n), width - block_n))
        column = t.mul(group, k)
        product = (_product_of_weights if first else _product)(x, weight, b.rows, (n, k), schedule)
        start = t.full([block_n, block_m] if first else [block_m, block_n], 0.0)
        (acc,) = t.loop(0, k, block_k, [start], lambda k0, acc: [product(m0, t.add(column, k0), k0, n0, acc)])
        b.results[0].store(b.rows, [m0, n0], t.transpose(acc) if first else acc)

    number = number_of(request, 1)
    layout = stored_layout((n, k), number) if first else weight_layout((n, k), number, number_of(request, 0) == Q8, panel)
    return Kernel(body, lambda *b: [groups * blocks, t.ceil_div(row_count(b), block_m)],
                  f"column: sum over k in blocks of {block_k}, ascending", {1: layout})


def _product(x: Rows, weight: Rows, rows: Value, shape: tuple[int, int], schedule: Schedule) -> Product:
    """How one block of K is multiplied, by the numbers of x and the weight."""
    n, k = shape
    block_m, block_n, block_k, panel = (schedule[name] for name in ("block_m", "block_n", "block_k", "panel"))

    def codes(k0: Value, n0: Value) -> Value:
        return t.View(weight.values, [k, padded(n, panel)], panel).load([k0, n0], [block_k, block_n])

    def scaled(m0: Value, column: Value, k0: Value, n0: Value, acc: Value) -> Value:
        (values, width), (scales, groups) = x.buffers()
        a = t.View(values, [rows, width]).load([m0, column], [block_m, block_k])
        sa = t.View(scales, [rows, groups]).load([m0, by(column, SCALE_GROUP)], [block_m, block_k // SCALE_GROUP])
        sb = t.View(weight.scales, [n, k // SCALE_GROUP]).load([n0, by(k0, SCALE_GROUP)], [block_n, block_k // SCALE_GROUP], n)
        return t.dot_scaled(a, sa, codes(k0, n0), sb, acc)

    def decoded(m0: Value, column: Value, k0: Value, n0: Value, acc: Value) -> Value:
        scales = t.View(weight.scales, [k // SCALE_GROUP, n]).load([by(k0, SCALE_GROUP), n0], [block_k // SCALE_GROUP, block_n])
        factors = t.merge_first(t.broadcast(t.e8m0(scales), 1, SCALE_GROUP))
        b = t.mul(t.decode_e4m3(codes(k0, n0)), factors)
        a = x.raw(rows, [m0, column], [block_m, block_k])
        return t.dot(a, b if kind(x.number) == "f32" else t.exact_bf16(b), acc)

    def plain(m0: Value, column: Value, k0: Value, n0: Value, acc: Value) -> Value:
        a, b = x.raw(rows, [m0, column], [block_m, block_k]), codes(k0, n0)
        wide = {kind(x.number), kind(weight.number)} != {"bf16"}
        return t.dot(t.cast(a, "f32"), t.cast(b, "f32"), acc) if wide else t.dot(a, b, acc)

    if x.number.scaling is not None:
        return scaled
    return plain if weight.number.scaling is None else decoded


def _product_of_weights(x: Rows, weight: Rows, rows: Value, shape: tuple[int, int], schedule: Schedule) -> Product:
    """The same, transposed: weight [n .., k ..] times x [row .., column ..] transposed, acc [n, row]."""
    k = shape[1]
    block_m, block_n, block_k = (schedule[name] for name in ("block_m", "block_n", "block_k"))
    groups = block_k // SCALE_GROUP

    def scales(k0: Value, n0: Value) -> Value:
        return t.View(weight.scales, [None, k // SCALE_GROUP]).load([n0, by(k0, SCALE_GROUP)], [block_n, groups])

    def product(m0: Value, column: Value, k0: Value, n0: Value, acc: Value) -> Value:
        w = t.View(weight.values, [None, k]).load([n0, k0], [block_n, block_k])
        if x.number.scaling is not None:
            (values, width), (bytes_, each) = x.buffers()
            a = t.View(values, [rows, width]).load([m0, column], [block_m, block_k])
            sa = t.View(bytes_, [rows, each]).load([m0, by(column, SCALE_GROUP)], [block_m, groups])
            return t.dot_scaled(w, scales(k0, n0), t.transpose(a), sa, acc)
        a, plain = x.raw(rows, [m0, column], [block_m, block_k]), weight.number.scaling is None
        if kind(x.number) == "f32" or (plain and kind(weight.number) == "f32"):
            wide = t.cast(w, "f32") if plain else t.dequantize_q8(w, scales(k0, n0))
            return t.dot(wide, t.transpose(t.cast(a, "f32")), acc)
        return t.dot(w if plain else t.exact_bf16(t.dequantize_q8(w, scales(k0, n0))), t.transpose(a), acc)

    return product


def padded(n: int, panel: int) -> int:
    """Columns in memory: whole panels."""
    return -(-n // panel) * panel if panel else n
