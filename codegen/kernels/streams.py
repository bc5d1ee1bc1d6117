"""Residual streams: start, mixer coefficients, collapse (with norm and quantization), expand, mean (model spec 3).

X [?, S, H] is read one row at a time, all streams of a block of columns together.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.kernel import Kernel, Part, Request, Schedule, Workspace, family, width
from tapeout.codegen.kernels.column_blocks import ahead, blocks, own_columns, parts
from tapeout.codegen.kernels.finished_mixer import finish_lanes
from tapeout.codegen.kernels.linear import number_of, weight_layout
from tapeout.codegen.kernels.linear import padded as whole_panels
from tapeout.codegen.kernels.norms import inverse_root, order_of, scaled
from tapeout.codegen.row_values import Bound, Rows, bind, block, row_count, scale_group
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


@family("mhc.mixer")
def mixer(request: Request, schedule: Schedule) -> Kernel:
    """pre, post [?, S] and comb [?, S, S] from X [?, S, H] and fn [(2+S)S, S H]. Grid: row blocks (model spec 3.2).

    Products and squares of a row pass through workspaces: then each valid row is finished alone, which keeps the coefficients in small tiles.
    With `segments` in the schedule K is cut in as many, multiplied by a launch of their own, and a second launch finishes blocks of
    `finished_rows` rows, one for each lane. `grouped` neighbouring segments are added up one after another, then the groups; where the
    schedule says `joined` by the instance that multiplies them, so that little passes through the workspace, else by the second launch.
    """
    streams, columns = stream_shape(request)
    k, panel, segments = streams * columns, schedule["panel"], schedule.get("segments", 0)
    padded, pieces = whole_panels((2 + streams) * streams, panel), segments or 1
    grouped = block({"grouped": schedule.get("grouped", 1)}, "grouped", pieces) if segments else 1
    groups, own = pieces // grouped, grouped if schedule.get("joined") else 1
    sizes, finished = (streams, k, grouped // own, groups, padded), schedule.get("finished_rows", 1)
    block_rows, block_k = schedule["block_rows"], block(schedule, "block_k", k // pieces)

    def multiply(b: Bound, row: Value, piece: Value) -> None:
        (x, fn), (products, squares), each = b.operands[:2], b.workspaces[:2], k // pieces
        first = t.mul(piece, own * each)

        def step(k0: Value, acc: Value, squares: Value, *total: Value) -> list[Value]:
            u = x.load(b.rows, [row, k0], [block_rows, block_k])
            weights = t.View(fn.values, [k, padded], panel).load([k0, 0], [block_k, padded])
            found = [t.dot(u, t.cast(weights, "f32"), acc), t.add(squares, t.reduce(t.mul(u, u), "add", 1))]
            return segment_ends(t.add(k0, block_k), found, list(total)) if total else found

        def segment_ends(k0: Value, found: list[Value], total: list[Value]) -> list[Value]:
            """Behind the last step of a segment its sums join the total."""
            ends = t.equal(t.remainder(k0, each), 0)
            added = [t.select(ends, t.add(all_, own), all_) for all_, own in zip(total, found, strict=True)]
            return [*(t.select(ends, t.like(0.0, own), own) for own in found), *added]

        zeros = [t.full([block_rows, padded], 0.0), t.full([block_rows], 0.0)]
        acc, sums = t.loop(first, t.add(first, own * each), block_k, zeros if own == 1 else zeros * 2, step)[-2:]
        at = piece if own > 1 else t.add(t.mul(t.remainder(piece, grouped), groups), t.quotient(piece, grouped))
        t.View(products, [b.rows, pieces // own * padded]).store([row, t.mul(at, padded)], acc)
        t.View(squares, [b.rows, pieces // own]).store([row, at], t.split_last(sums, 1))

    def whole(*buffers: Value) -> None:
        b, row = bind(request, buffers), t.mul(t.program_id(0), block_rows)
        multiply(b, row, t.index(0))
        last = t.minimum(t.add(row, block_rows), b.rows)
        t.loop(row, last, 1, [], lambda r: _finish(request, (streams, k, padded), b, r))

    def part(*buffers: Value) -> None:
        multiply(bind(request, buffers), t.mul(t.program_id(0), block_rows), t.program_id(1))

    def finish(*buffers: Value) -> None:
        finish_lanes(request, sizes, finished, bind(request, buffers), t.mul(t.program_id(0), finished))

    def blocks(*buffers: Value) -> list[Value]:
        return [t.ceil_div(row_count(buffers), block_rows)]

    over = f", then over {grouped} segments ascending, then over {groups} groups of them" if segments else ""
    order = f"coefficient: sum over k in blocks of {block_k}, ascending{over}"
    layouts = {1: weight_layout(((2 + streams) * streams, k), number_of(request, 1), False, panel)}
    work = [Workspace("f32", lambda rows: rows * (pieces // own) * padded), Workspace("f32", lambda rows: rows * (pieces // own))]
    if not segments:
        return Kernel(whole, blocks, order, layouts, tuple(work))
    work += [Workspace("f32", lambda rows: rows * padded), Workspace("f32", lambda rows: rows)]
    rows: Grid = lambda *b: [t.ceil_div(row_count(b), finished)]  # noqa: E731
    return Kernel(finish, rows, order, layouts, tuple(work), (Part(part, lambda *b: [*blocks(*b), segments // own]),))


def _finish(request: Request, sizes: tuple[int, int, int], b: Bound, row: Value) -> None:
    """Coefficients of one row from its products and squares; `sizes`: streams, k, columns of products."""
    (s, k, padded), (_, _, base, scale), (products, squares) = sizes, b.operands, b.workspaces
    epsilon, total = request["epsilon"], (2 + s) * s
    power = t.View(squares, [None]).load([row], [1])
    factor = t.rsqrt(t.add(t.mul(power, 1.0 / k), request["norm_epsilon"]))

    def part(number: int, first: int, count: int) -> Value:
        sums = t.merge_first(t.View(products, [None, padded]).load([row, first], [1, count]))
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
