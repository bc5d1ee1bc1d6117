"""The draft block's own ops and the ratio-2 compressor's pooling: rows, window ids, Markov correction, confidence.

The count of a kernel is that of its results: draft rows (`size` for each sequence) for the block and its window, sequences for the rest.
"""

from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.kernel import Kernel, Request, Schedule, family, width
from tapeout.codegen.row_values import Rows, bind, block, row_count
from tapeout.dialects.types import Ring, Tensor

Value = Any


def _cannot_pool(request: Request) -> str | None:
    pairs = request.operands[0]
    if not isinstance(pairs, Ring) or pairs.entry.number.element not in ("f32", "bf16"):
        return f"pairs is {pairs}, this kernel pools FP32 or BF16 pairs"
    return None


@family("mla.pool", refuses=_cannot_pool)
def pool(request: Request, schedule: Schedule) -> Kernel:
    """Rows [?, D] of two tokens' e, weighted by the softmax of their g. Grid: rows x column blocks (model spec 4.4)."""
    n = width(request.operands[0]) // 2
    size, staged = block(schedule, "block_columns", n), request["sequences"] * request["length"]

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        pairs, partners = b.operands
        row, column = t.program_id(0), t.mul(t.program_id(1), size)
        own, partner = t.add(row, staged), t.scalar(partners.values, row)
        first = _pair(pairs, t.select(t.less(partner, 0), own, partner), column, n, size)
        second = _pair(pairs, own, column, n, size)
        peak = t.maximum(first[0], second[0])
        a, c = t.exp(t.sub(first[0], peak)), t.exp(t.sub(second[0], peak))
        pooled = t.div(t.add(t.mul(a, first[1]), t.mul(c, second[1])), t.add(a, c))
        b.results[0].store(b.rows, [row, column], pooled)

    return Kernel(body, lambda *b: [row_count(b), n // size], "two terms, the partner's first")


def _pair(pairs: Rows, row: Value, column: Value, n: int, size: int) -> tuple[Value, Value]:
    """g and e of one ring row, [1, size] each."""
    return pairs.load(None, [row, column], [1, size]), pairs.load(None, [row, t.add(column, n)], [1, size])


@family("dspark.block")
def draft_block(request: Request, schedule: Schedule) -> Kernel:
    """Tokens, positions and slots of each sequence's draft rows. Grid: sequences (model spec 7.2)."""
    size, noise = request["size"], request["noise"]

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        sequence = t.program_id(0)
        golden, last, slot = (t.splat(t.scalar(x.values, sequence), [size]) for x in b.operands)
        place = t.iota(size)
        values = (t.select(t.equal(place, 0), golden, noise), t.add(t.add(place, last), 1), slot)
        for result, value in zip(b.results, values, strict=True):
            t.View(result.values, [None]).store([t.mul(sequence, size)], value)

    return Kernel(body, lambda *b: [t.quotient(row_count(b), size)], "no sums")


@family("dspark.window")
def draft_window(request: Request, schedule: Schedule) -> Kernel:
    """Ids [?, window + size] and counts of each draft row, the same for all rows of a sequence. Grid: sequences (model spec 7.2)."""
    window, ring, size = request["window"], request["ring"], request["size"]
    staged = request["sequences"] * ring

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        sequence, columns = t.program_id(0), window + size
        last, slot = (t.scalar(x.values, sequence) for x in b.operands)
        kept = t.clamp(t.add(last, 1), 0, window)
        column = t.iota(columns)
        seen = t.add(column, t.splat(t.add(t.sub(last, kept), 1), [columns]))
        old = t.add(t.remainder(seen, ring), t.splat(t.mul(slot, ring), [columns]))
        new = t.add(column, t.splat(t.add(t.sub(t.mul(sequence, size), kept), staged), [columns]))
        ids = t.select(_below(column, kept), old, t.select(_below(column, t.add(kept, size)), new, -1))
        first = t.mul(sequence, size)
        for place in range(size):
            b.results[0].write(None, [t.add(first, place), 0], _as_row(ids))
        t.View(b.results[1].values, [None]).store([first], t.splat(t.add(kept, size), [size]))

    return Kernel(body, lambda *b: [t.quotient(row_count(b), size)], "no sums")


def _below(column: Value, bound: Value) -> Value:
    return t.less(column, t.splat(bound, t.shape_of(column)))


def _as_row(x: Value) -> Value:
    return t.broadcast(x, 0, 1)


def _cannot_correct(request: Request) -> str | None:
    views = [v for v in request.operands if isinstance(v, Tensor)]
    if any(v.number.element not in ("bf16", "f32") or v.number.scaling is not None for v in views):
        return f"operands are {', '.join(map(str, views))}, this kernel takes BF16 or FP32"
    return None


@family("dspark.correct", refuses=_cannot_correct)
def correct(request: Request, schedule: Schedule) -> Kernel:
    """Base logits of one place of each block plus the Markov bias, [?, V]. Grid: sequences x column blocks (model spec 7.2)."""
    n, step, size = width(request.operands[1]), request["step"], request["size"]
    columns = block(schedule, "block_columns", n)

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        base, bias = b.operands
        row, column = t.program_id(0), t.mul(t.program_id(1), columns)
        at = [t.add(t.mul(row, size), step), column]
        b.results[0].store(None, [row, column], t.add(base.load(None, at, [1, columns]), bias.load(None, [row, column], [1, columns])))

    return Kernel(body, lambda *b: [row_count(b), n // columns], "no sums")


@family("dspark.confidence", refuses=_cannot_correct)
def confidence(request: Request, schedule: Schedule) -> Kernel:
    """projection . [x ; e] of every place of each block, [?, places]. Grid: sequences x places (model spec 7.2)."""
    hidden, embedded, places = width(request.operands[0]), width(request.operands[1]), width(request.results[0])
    block_hidden, block_embedded = block(schedule, "block_hidden", hidden), block(schedule, "block_embedded", embedded)

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        x, *parts, projection = b.operands
        row, place = t.program_id(0), t.program_id(1)
        at = t.add(t.mul(row, places), place)
        total = _dotted(x, at, hidden, projection, 0, block_hidden, t.full([1], 0.0))
        for number, part in enumerate(parts):
            columns = t.select(t.equal(place, number), t.index(embedded), 0)  # of another place none
            total = _dotted(part, row, columns, projection, hidden, block_embedded, total)
        t.View(b.results[0].values, [None]).store([at], total)

    order = f"row: hidden columns by {block_hidden}, then embedded ones by {block_embedded}, ascending"
    return Kernel(body, lambda *b: [row_count(b), places], order)


def _dotted(x: Rows, row: Value, columns: Value, projection: Rows, first: int, size: int, total: Value) -> Value:
    """total [1] + the first columns of one row of x times the projection's from `first` on."""

    def add(column: Value, total: Value) -> list[Value]:
        weight = projection.vector(projection.columns, t.add(column, first), size)
        products = t.mul(x.load(None, [row, column], [1, size]), t.broadcast(weight, 0, 1))
        return [t.add(total, t.reduce(products, "add", 1))]

    return t.loop(0, columns, size, [total], add)[0]
