"""Residual streams: start, collapse (with norm and quantization), expand, mean (model spec 3).

X [?, S, H] is read one row at a time, all streams of a block of columns together.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.kernel import Kernel, Request, Schedule, family, width
from tapeout.codegen.kernels.column_blocks import ahead, blocks, own_columns, parts
from tapeout.codegen.kernels.norms import inverse_root, order_of, scaled
from tapeout.codegen.row_values import Rows, bind, block, row_count, scale_group
from tapeout.dialects.types import Tensor

Value = Any
Grid = Callable[..., Sequence[Any]]


def stream_shape(request: Request) -> tuple[int, int]:
    """Streams and columns of the first operand [?, S, H]."""
    view = request.operands[0]
    assert isinstance(view, Tensor), view
    _, streams, columns = view.sized(0)
    return streams, columns


def stream_block(x: Rows, row: Value, streams: int, column: Value, size: int) -> Value:
    """Columns [column, column + size) of all streams of a row, f32 [streams, size]."""
    return x.load(None, [t.mul(row, streams), column], [streams, size])


def _collapsed(x: Rows, premix: list[Value], row: Value, column: Value, size: int) -> Value:
    """sum_i a_i X_i, f32 [1, size]."""
    first = t.mul(row, len(premix))
    terms = [t.mul(x.load(None, [t.add(first, i), column], [1, size]), t.broadcast(a, 1, size)) for i, a in enumerate(premix)]
    total = terms[0]
    for term in terms[1:]:
        total = t.add(total, term)
    return total


def _each(x: Rows, row: Value, count: int) -> list[Value]:
    """The row's own `count` numbers, f32 [1] each."""
    return [x.folded(count).line(row, i, 1) for i in range(count)]


def own(x: Rows, row: Value, count: int) -> Value:
    """The row's own `count` numbers, f32."""
    return x.folded(count).line(row, 0, count)


@family("mhc.start")
def start(request: Request, schedule: Schedule) -> Kernel:
    """x [?, H] copied to every stream of X, pre-mix (1, 0, ..). Grid: rows (model spec 3.1)."""
    streams, columns = request["streams"], width(request.operands[0])
    size = block(schedule, "block_columns", columns)

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        x, (out, premix), row = b.operands[0].folded(columns), b.results, t.program_id(0)
        out = out.folded(columns)

        def step(column: Value) -> None:
            out.store(None, [t.mul(row, streams), column], t.broadcast(x.line(row, column, size), 0, streams))

        t.loop(0, columns, size, [], step)
        first = t.cast(t.equal(t.iota(streams), 0), "f32")
        premix.store(None, [row, 0], t.broadcast(first, 0, 1))

    return Kernel(body, lambda *b: [row_count(b)], "no sums")


@family("mhc.collapse")
def collapse(request: Request, schedule: Schedule) -> Kernel:
    """z = sum_i a_i X_i of X [?, S, H], a [?, S]. Grid: rows (model spec 3.3)."""
    streams, columns = stream_shape(request)
    size = block(schedule, "block_columns", columns)

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        x, row = b.operands[0].folded(columns), t.program_id(0)
        premix = _each(b.operands[1], row, streams)
        own_columns(schedule, columns, size, lambda c: b.results[0].store(b.rows, [row, c], _collapsed(x, premix, row, c, size)))

    return Kernel(body, lambda *b: [row_count(b), *parts(schedule, columns, size)], "streams: ascending")


@family("nn.fused:collapse_norm", "nn.fused:collapse_norm_quantize")
def collapse_norm(request: Request, schedule: Schedule) -> Kernel:
    """Collapse of X [?, S, H], its norm, and the norm's quantization where asked for; each rounded to BF16. Grid: rows (model spec 3.3)."""
    streams, columns = stream_shape(request)
    size = block(schedule, "block_columns", columns, scale_group(request))
    epsilon = request.of("nn.rms_norm")["epsilon"]

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        x, weight, row = b.operands[0].folded(columns), b.operands[2], t.program_id(0)
        premix = _each(b.operands[1], row, streams)

        def load(column: Value) -> Value:
            return t.round_bf16(_collapsed(x, premix, row, column, size))

        over = blocks(load, columns, size, schedule)
        weights = ahead(lambda column: weight.vector(columns, column, size), columns, size, schedule)
        factor = inverse_root(over, columns, (1, size), schedule, epsilon)

        def step(column: Value, z: Value) -> None:
            y = t.round_bf16(scaled(z, factor, weights(column)))
            for result in b.results:
                result.store(b.rows, [row, column], y)

        over([], step)

    return Kernel(body, lambda *b: [row_count(b)], f"streams: ascending; {order_of(schedule)}")


@family("mhc.expand")
def expand(request: Request, schedule: Schedule) -> Kernel:
    """X'_j = post_j y + sum_i comb_ij X_i. X [?, S, H], y [?, H], post [?, S], comb [?, S, S]. Grid: rows (model spec 3.3)."""
    streams, columns = stream_shape(request)
    size = block(schedule, "block_columns", columns)

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        x, y, post, comb = b.operands
        x, out, row = x.folded(columns), b.results[0].folded(columns), t.program_id(0)
        factor = own(post, row, streams)
        mixes = [own(comb.folded(streams), t.add(t.mul(row, streams), i), streams) for i in range(streams)]

        def step(column: Value) -> None:
            total = _outer(factor, y.line(row, column, size))
            for i, mix in enumerate(mixes):
                total = t.add(total, _outer(mix, x.line(t.add(t.mul(row, streams), i), column, size)))
            out.store(None, [t.mul(row, streams), column], total)

        own_columns(schedule, columns, size, step)

    return Kernel(body, lambda *b: [row_count(b), *parts(schedule, columns, size)], "post y first, then streams ascending")


def _outer(a: Value, b: Value) -> Value:
    """a_j b_c, [streams, columns]."""
    return t.mul(t.broadcast(a, 1, t.shape_of(b)[0]), t.broadcast(b, 0, t.shape_of(a)[0]))


@family("mhc.mean")
def mean(request: Request, schedule: Schedule) -> Kernel:
    """The mean of the streams of X [?, S, H]. Grid: rows (model spec 7.1)."""
    streams, columns = stream_shape(request)
    size = block(schedule, "block_columns", columns)

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        x, row = b.operands[0].folded(columns), t.program_id(0)

        def step(column: Value) -> None:
            total = t.reduce(stream_block(x, row, streams, column, size), "add", 0)
            b.results[0].store(b.rows, [row, column], t.broadcast(t.div(total, float(streams)), 0, 1))

        own_columns(schedule, columns, size, step)

    return Kernel(body, lambda *b: [row_count(b), *parts(schedule, columns, size)], "streams: ascending")
