"""Residual streams: start, mixer coefficients, collapse (with norm and quantization), expand, mean (model spec 3).

X [?, S, H] is read one row at a time, all streams of a block of columns together.
"""

from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.kernel import Kernel, Part, Request, Schedule, Workspace, family, width
from tapeout.codegen.kernels.column_blocks import blocks, own_columns, parts
from tapeout.codegen.kernels.linear import number_of, weight_layout
from tapeout.codegen.kernels.linear import padded as whole_panels
from tapeout.codegen.kernels.norms import ORDER, inverse_root, scaled
from tapeout.codegen.row_values import Bound, Rows, bind, block, row_count, scale_group
from tapeout.dialects.types import Tensor

Value = Any


def stream_shape(request: Request) -> tuple[int, int]:
    """Streams and columns of the first operand [?, S, H]."""
    view = request.operands[0]
    assert isinstance(view, Tensor), view
    _, streams, columns = view.sized(0)
    return streams, columns


def stream_block(x: Rows, row: Value, streams: int, column: Value, size: int) -> Value:
    """Columns [column, column + size) of all streams of a row, f32 [streams, size]."""
    return x.load(None, [t.mul(row, streams), column], [streams, size])


def _collapsed(x: Rows, premix: Value, row: Value, column: Value, size: int) -> Value:
    """sum_i a_i X_i, f32 [1, size]."""
    streams = t.shape_of(premix)[0]
    weighed = t.mul(stream_block(x, row, streams, column, size), t.broadcast(premix, 1, size))
    return t.broadcast(t.reduce(weighed, "add", 0), 0, 1)


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
        x, premix, row = b.operands[0].folded(columns), own(b.operands[1], t.program_id(0), streams), t.program_id(0)
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
        premix = own(b.operands[1], row, streams)

        def load(column: Value) -> Value:
            return t.round_bf16(_collapsed(x, premix, row, column, size))

        over = blocks(load, columns, size, schedule)
        factor = inverse_root(over, columns, 1, epsilon)

        def step(column: Value, z: Value) -> None:
            y = t.round_bf16(scaled(z, factor, weight.vector(columns, column, size)))
            for result in b.results:
                result.store(b.rows, [row, column], y)

        over([], step)

    return Kernel(body, lambda *b: [row_count(b)], f"streams: ascending; {ORDER.format(**schedule)}")


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


@family("mhc.mixer")
def mixer(request: Request, schedule: Schedule) -> Kernel:
    """pre, post [?, S] and comb [?, S, S] from X [?, S, H] and fn [(2+S)S, S H]. Grid: row blocks (model spec 3.2).

    Products and squares of a row pass through workspaces: then each valid row is finished alone, which keeps the coefficients in small tiles.
    With `segments` in the schedule K is cut in as many, multiplied by a launch of their own, and a second launch finishes: grid rows.
    """
    streams, columns = stream_shape(request)
    count, k, panel, segments = (2 + streams) * streams, streams * columns, schedule["panel"], schedule.get("segments", 0)
    padded, pieces = whole_panels(count, panel), segments or 1
    block_rows, block_k = schedule["block_rows"], block(schedule, "block_k", k // pieces)

    def multiply(b: Bound, row: Value, piece: Value) -> None:
        (x, fn), (products, squares) = b.operands[:2], b.workspaces
        first = t.mul(piece, k // pieces)

        def step(k0: Value, acc: Value, squares: Value) -> list[Value]:
            u = x.load(b.rows, [row, k0], [block_rows, block_k])
            weights = t.View(fn.values, [k, padded], panel).load([k0, 0], [block_k, padded])
            return [t.dot(u, t.cast(weights, "f32"), acc), t.add(squares, t.reduce(t.mul(u, u), "add", 1))]

        zeros = [t.full([block_rows, padded], 0.0), t.full([block_rows], 0.0)]
        acc, sums = t.loop(first, t.add(first, k // pieces), block_k, zeros, step)
        t.View(products, [b.rows, pieces * padded]).store([row, t.mul(piece, padded)], acc)
        t.View(squares, [b.rows, pieces]).store([row, piece], t.split_last(sums, 1))

    def whole(*buffers: Value) -> None:
        b, row = bind(request, buffers), t.mul(t.program_id(0), block_rows)
        multiply(b, row, t.index(0))
        last = t.minimum(t.add(row, block_rows), b.rows)
        t.loop(row, last, 1, [], lambda r: _finish(request, (streams, k, pieces, padded), b, r))

    def part(*buffers: Value) -> None:
        multiply(bind(request, buffers), t.mul(t.program_id(0), block_rows), t.program_id(1))

    def finish(*buffers: Value) -> None:
        _finish(request, (streams, k, pieces, padded), bind(request, buffers), t.program_id(0))

    def blocks(*buffers: Value) -> list[Value]:
        return [t.ceil_div(row_count(buffers), block_rows)]

    order = f"coefficient: sum over k in blocks of {block_k}, ascending" + (f", then over {segments} segments" if segments else "")
    layouts = {1: weight_layout((count, k), number_of(request, 1), False, panel)}
    work = (Workspace("f32", lambda rows: rows * pieces * padded), Workspace("f32", lambda rows: rows * pieces))
    if not segments:
        return Kernel(whole, blocks, order, layouts, work)
    return Kernel(finish, lambda *b: [row_count(b)], order, layouts, work, (Part(part, lambda *b: [*blocks(*b), segments]),))


def _finish(request: Request, sizes: tuple[int, int, int, int], b: Bound, row: Value) -> None:
    """Coefficients of one row from its products and squares, added up over the segments; `sizes`: streams, k, segments, columns of products."""
    (s, k, pieces, padded), (_, _, base, scale), (products, squares) = sizes, b.operands, b.workspaces
    epsilon, total = request["epsilon"], (2 + s) * s
    power = t.reduce(t.View(squares, [None, pieces]).load([row, 0], [1, pieces]), "add", 1)
    factor = t.rsqrt(t.add(t.mul(power, 1.0 / k), request["norm_epsilon"]))

    def part(number: int, first: int, count: int) -> Value:
        sums = t.reduce(t.View(products, [None, padded]).load([t.mul(row, pieces), first], [pieces, count]), "add", 0)
        weight = t.merge_last(t.broadcast(scale.vector(3, number, 1), 1, count))
        return t.add(t.mul(t.mul(sums, t.merge_last(t.broadcast(factor, 1, count))), weight), base.vector(total, first, count))

    pre, post, comb = b.results
    pre.store(None, [row, 0], t.broadcast(t.add(t.sigmoid(part(0, 0, s)), epsilon), 0, 1))
    post.store(None, [row, 0], t.broadcast(t.mul(t.sigmoid(part(1, s, s)), 2.0), 0, 1))
    mixed = _sinkhorn(t.split_last(part(2, 2 * s, s * s), s), s, request["iterations"], epsilon)
    comb.folded(s).store(None, [t.mul(row, s), 0], mixed)


def _sinkhorn(c: Value, s: int, iterations: int, epsilon: float) -> Value:
    """Softmax over destinations, then columns; then `iterations` - 1 rounds of rows and columns (model spec 3.2). c is [S, S]."""

    def over(p: Value, axis: int, floor: float) -> Value:
        return t.div(p, t.broadcast(t.add(t.reduce(p, "add", axis), floor), axis, s))

    grown = t.exp(t.sub(c, t.broadcast(t.reduce(c, "max", 1), 1, s)))
    p = over(t.add(over(grown, 1, 0.0), epsilon), 0, epsilon)
    (p,) = t.loop(1, iterations, 1, [p], lambda i, p: [over(over(p, 1, epsilon), 0, epsilon)])
    return p
