"""Engram: compressed ids, look-back, table rows by hash, lookup of decoded rows, and the gate onto the streams (model spec 6)."""

from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.kernel import Kernel, Request, Schedule, family, width
from tapeout.codegen.kernels.column_blocks import ahead, blocks
from tapeout.codegen.kernels.streams import stream_block, stream_shape
from tapeout.codegen.row_values import bind, block, columns_of, row_count
from tapeout.dialects.format import Q8
from tapeout.dialects.types import Tensor

Value = Any


@family("engram.compress")
def compress(request: Request, schedule: Schedule) -> Kernel:
    """token_map[id]: ids [?] -> [?, 1]. Grid: row blocks (model spec 6.1)."""
    block_rows = schedule["block_rows"]

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        (ids, token_map), row = b.operands, t.mul(t.program_id(0), block_rows)
        b.results[0].write(b.rows, [row, 0], t.gather(token_map.values, ids.values, row, block_rows, 1, valid=t.sub(b.rows, row)))

    return Kernel(body, lambda *b: [t.ceil_div(row_count(b), block_rows)], "no sums")


@family("engram.lookback")
def lookback(request: Request, schedule: Schedule) -> Kernel:
    """Compressed ids 0 .. depth - 1 tokens back, staged or from the ring, `pad` before the sequence. Grid: row blocks (model spec 6.2)."""
    block_rows, depth, length = schedule["block_rows"], request["depth"], request["length"]
    behind = request["sequences"] * length

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        history, positions, slots, starts = (operand.values for operand in b.operands)
        row = t.mul(t.program_id(0), block_rows)

        def step(r: Value) -> None:
            at, first = t.scalar(positions, r), t.scalar(positions, t.scalar(starts, r))
            kept = t.mul(t.scalar(slots, r), length)
            for back in range(depth):
                wanted = t.sub(at, back)
                ring = t.add(kept, t.remainder(t.maximum(wanted, 0), length))
                physical = t.select(t.greater_equal(wanted, t.maximum(first, 0)), t.add(t.sub(r, back), behind), ring)
                found = t.select(t.greater_equal(wanted, 0), t.scalar(history, physical), t.index(request["pad"]))
                t.View(b.results[0].values, [None, depth]).store([r, back], t.splat(found, [1]))

        t.loop(row, t.minimum(t.add(row, block_rows), b.rows), 1, [], step)

    return Kernel(body, lambda *b: [t.ceil_div(row_count(b), block_rows)], "no sums")


@family("engram.hash")
def hash_rows(request: Request, schedule: Schedule) -> Kernel:
    """Xor of multiplied look-backs modulo each column's prime, plus its offset, in i64. Grid: row blocks (model spec 6.2).

    Look-backs and multipliers are not negative, so neither is a hash, and the remainder needs no correction.
    """
    block_rows, heads, primes = schedule["block_rows"], request["heads"], request["primes"]

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        row = t.mul(t.program_id(0), block_rows)
        products = [t.mul(t.cast(b.operands[0].raw(b.rows, [row, s], [block_rows, 1]), "i64"), multiplier)
                    for s, multiplier in enumerate(request["multipliers"])]
        hashed, column, offset = products[0], 0, 0
        for product in products[1:]:
            hashed = t.bit_xor(hashed, product)
            for prime in primes[column : column + heads]:
                b.results[0].write(b.rows, [row, column], t.cast(t.add(t.remainder(hashed, prime), offset), "i32"))
                column, offset = column + 1, offset + prime

    return Kernel(body, lambda *b: [t.ceil_div(row_count(b), block_rows)], "no sums")


def _cannot_look_up(request: Request) -> str | None:
    table = request.operands[1]
    known = isinstance(table, Tensor) and (table.number == Q8 or table.number.element in ("bf16", "f32"))
    return None if known else f"the table is {table}, this kernel reads FP8 rows with a scale per 32 columns, BF16 or FP32 rows"


@family("engram.lookup", "nn.fused:lookup_quantize", refuses=_cannot_look_up)
def lookup(request: Request, schedule: Schedule) -> Kernel:
    """Decoded table rows of ids [?, C], side by side, plain or quantized. Grid: blocks of ids (model spec 6.3).

    With `instances` in the schedule there are at most so many, which take blocks in turns: rows of a table in host memory come no faster to more.
    """
    block_rows, columns, ids_each = schedule["block_rows"], width(request.operands[1]), columns_of(request.operands[0])
    most, fused = schedule.get("instances", 0), request.op.startswith("nn.fused")

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        (ids, table), count = b.operands, t.mul(b.rows, ids_each)

        def some(first: Value) -> None:
            parts = [t.gather(buffer, ids.values, first, block_rows, size, valid=t.sub(count, first)) for buffer, size in table.buffers()]
            found = t.cast(parts[0], "f32") if len(parts) == 1 else t.dequantize_q8(*parts)
            b.results[0].folded(columns).store(count, [first, 0], t.round_bf16(found) if fused else found)

        first = t.mul(t.program_id(0), block_rows)
        if most:
            t.loop(first, count, most * block_rows, [], some)
        else:
            some(first)

    def grid(*b: Value) -> list[Value]:
        blocks = t.ceil_div(t.mul(row_count(b), ids_each), block_rows)
        return [t.minimum(blocks, most) if most else blocks]

    return Kernel(body, grid, "no sums")


@family("engram.gate")
def engram_gate(request: Request, schedule: Schedule) -> Kernel:
    """X_i += gamma_i value. X [?, S, H], kv [?, (S+1) H] keys then value, q_weight, k_weight [S, H]. Grid: rows (model spec 6.3)."""
    streams, columns = stream_shape(request)
    size = block(schedule, "block_columns", columns)

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        x, kv, q, k = (operand.folded(columns) for operand in b.operands)
        out, row = b.results[0].folded(columns), t.program_id(0)
        keys = t.mul(row, streams + 1)

        over = blocks(lambda column: stream_block(x, row, streams, column, size), columns, size, schedule)
        values = ahead(lambda column: kv.line(t.add(keys, streams), column, size), columns, size, schedule)

        def step(column: Value, v: Value, products: Value, own: Value, others: Value) -> list[Value]:
            key = kv.load(None, [keys, column], [streams, size])
            weights = t.mul(q.load(None, [0, column], [streams, size]), k.load(None, [0, column], [streams, size]))
            sums = (t.mul(t.mul(v, key), weights), t.mul(v, v), t.mul(key, key))
            return [t.add(total, t.reduce(s, "add", 1)) for total, s in zip((products, own, others), sums, strict=True)]

        products, own, others = over([t.full([streams], 0.0)] * 3, step)
        roots = [t.rsqrt(t.add(t.mul(s, 1.0 / columns), request["norm_epsilon"])) for s in (own, others)]
        d = t.mul(t.mul(t.mul(products, roots[0]), roots[1]), columns**-0.5)
        root = t.sqrt(t.maximum(t.absolute(d), request["floor"]))
        gamma = t.sigmoid(t.select(t.less(d, 0.0), t.negate(root), root))

        def add(column: Value, v: Value) -> None:
            value = values(column)
            opened = t.mul(t.broadcast(gamma, 1, size), t.broadcast(value, 0, streams))
            out.store(None, [t.mul(row, streams), column], t.add(v, opened))

        over([], add)

    return Kernel(body, lambda *b: [row_count(b)], f"stream: sums over column blocks of {size}, ascending")
