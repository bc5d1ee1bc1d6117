"""RMS norm, alone and with what follows it: quantization, or rotation and quantization.

Rows are read in blocks of columns, so that no tile is a whole wide row: twice, or once where the schedule holds them. The sum of squares of a
row runs over ascending blocks; of held rows every place of a block is summed by itself first. A group may begin with the columns that it takes
of wider rows: they are read where they lie.
"""

from collections.abc import Callable
from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.kernel import Kernel, KernelError, Request, Schedule, family, width
from tapeout.codegen.kernels.column_blocks import Over, ahead, blocks, summed
from tapeout.codegen.kernels.rope import angles, angles_of_rows, cannot_rotate, rotated, rotated_columns
from tapeout.codegen.row_values import Rows, bind, block, row_count, scale_group, taken
from tapeout.dialects.types import Tensor

Value = Any


def order_of(schedule: Schedule) -> str:
    """The order of a row's sum of squares in words."""
    places = ", each place by itself, then the places" if schedule.get("held") else ""
    return f"row: sum of squares over column blocks of {schedule['block_columns']}, ascending{places}"


def inverse_root(over: Over, n: int, box: tuple[int, int], schedule: Schedule, epsilon: float) -> Value:
    """(mean of squares + epsilon)^(-1/2) of rows of n columns, [rows]; `over` walks over f32 tiles `box` of them."""
    total = summed(over, *box, schedule, lambda x: t.mul(x, x))
    return t.rsqrt(t.add(t.mul(total, 1.0 / n), epsilon))


def scaled(x: Value, factor: Value, weight: Value) -> Value:
    """x [rows, columns] times a factor a row and a weight a column."""
    rows, columns = t.shape_of(x)
    return t.mul(t.mul(x, t.broadcast(factor, 1, columns)), t.broadcast(weight, 0, rows))


def cannot_norm(request: Request) -> str | None:
    """Why a norm's operands do not fit: rows must be decoded numbers."""
    x = request.operands[0]
    if not isinstance(x, Tensor) or x.number.element not in ("bf16", "f32"):
        return f"x is {x}, this kernel norms BF16 or FP32 rows"
    return None


@family("nn.rms_norm", "nn.fused:norm_quantize", "nn.fused:columns_norm_quantize", refuses=cannot_norm)
def rms_norm(request: Request, schedule: Schedule) -> Kernel:
    """y = weight x (mean(x^2) + epsilon)^(-1/2) of rows [?, n], stored plain, block scaled, or both. Grid: row blocks (model spec 0.1)."""
    n, block_rows = width(request.operands[1]), schedule["block_rows"]
    columns = block(schedule, "block_columns", n, scale_group(request))
    fused = request.op.startswith("nn.fused")
    epsilon = request.of("nn.rms_norm")["epsilon"]

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        x, weight = taken(request, b.operands[0]), b.operands[1]
        row = t.mul(t.program_id(0), block_rows)

        def load(column: Value) -> Value:
            return x.load(b.rows, [row, column], [block_rows, columns])

        over = blocks(load, n, columns, schedule)
        weights = ahead(lambda column: weight.vector(n, column, columns), n, columns, schedule)
        factor = inverse_root(over, n, (block_rows, columns), schedule, epsilon)

        def step(column: Value, x: Value) -> None:
            y = scaled(x, factor, weights(column))
            for result in b.results:
                result.store(b.rows, [row, column], t.round_bf16(y) if fused else y)

        over([], step)

    return Kernel(body, lambda *b: [t.ceil_div(row_count(b), block_rows)], order_of(schedule))


def _cannot_norm_rope(request: Request) -> str | None:
    return cannot_norm(request) or cannot_rotate(request, request.of("nn.rope"), request.operands[3])


@family("nn.fused:norm_rope_quantize", "nn.fused:columns_norm_rope_quantize", refuses=_cannot_norm_rope)
def norm_rope_quantize(request: Request, schedule: Schedule) -> Kernel:
    """Norm [?, heads*width], rotation of each head's last columns, quantization, each rounding kept. Grid: rows (model spec 4.1, 4.5).

    Rows of one head are read once where the schedule says `block_rows`: grid row blocks.
    """
    if schedule.get("block_rows"):
        return _rows_of_one_head(request, schedule["block_rows"])
    rope = request.of("nn.rope")
    heads, columns, turned = rope["heads"], rope["width"], rotated_columns(request.operands[3])
    n, epsilon = heads * columns, request.of("nn.rms_norm")["epsilon"]
    size = block(schedule, "block_columns", n)

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        x, weight, positions, table = taken(request, b.operands[0]), *b.operands[1:]
        row = t.program_id(0)
        over = blocks(lambda c: x.load(b.rows, [row, c], [1, size]), n, size, schedule)
        factor = inverse_root(over, n, (1, size), schedule, epsilon)
        cos, sin = angles(table, positions, b.rows, row, turned, rope["offset"])

        def normed(first: Value, count: int) -> Value:
            return t.round_bf16(scaled(x.load(b.rows, [row, first], [1, count]), factor, weight.vector(n, first, count)))

        def head(h: Value) -> None:
            first = t.mul(h, columns)
            last = t.add(first, columns - turned)
            _copied(b.results[0], b.rows, row, first, normed, columns - turned)
            b.results[0].store(b.rows, [row, last], t.round_bf16(rotated(normed(last, turned), cos, sin, rope["inverse"])))

        t.loop(0, heads, 1, [], head)

    return Kernel(body, lambda *b: [row_count(b)], order_of(schedule))


def _rows_of_one_head(request: Request, count: int) -> Kernel:
    """Both parts of the columns are held, those that turn and those that do not."""
    rope, turned = request.of("nn.rope"), rotated_columns(request.operands[3])
    n, epsilon = rope["width"], request.of("nn.rms_norm")["epsilon"]
    if rope["heads"] > 1:
        raise KernelError(f"schedule entry block_rows is {count}, expected none for rows of {rope['heads']} heads")
    parts = [(first, size) for first, size in ((0, n - turned), (n - turned, turned)) if size]

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        x, weight, positions, table = taken(request, b.operands[0]), *b.operands[1:]
        row = t.mul(t.program_id(0), count)
        cos, sin = angles_of_rows(table, positions, b.rows, row, count, turned, rope["offset"])
        weights = [weight.vector(n, first, size) for first, size in parts]
        held = [x.load(b.rows, [row, first], [count, size]) for first, size in parts]
        total = t.full([count], 0.0)
        for part in held:
            total = t.add(total, t.reduce(t.mul(part, part), "add", 1))
        factor = t.rsqrt(t.add(t.mul(total, 1.0 / n), epsilon))
        normed = [t.round_bf16(scaled(part, factor, w)) for part, w in zip(held, weights, strict=True)]
        normed[-1] = t.round_bf16(rotated(normed[-1], cos, sin, rope["inverse"]))
        for (first, _), part in zip(parts, normed, strict=True):
            b.results[0].store(b.rows, [row, first], part)

    order = "row: sum of squares of the columns that do not turn, then of those that do"
    return Kernel(body, lambda *b: [t.ceil_div(row_count(b), count)], order)


def _copied(result: Rows, rows: Value, row: Value, first: Value, value: Callable[[Value, int], Value], count: int) -> None:
    if count:
        result.store(rows, [row, first], value(first, count))
