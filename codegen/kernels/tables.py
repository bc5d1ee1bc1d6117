"""Row tables of a step: last tokens, window rows, partners, entry rows, commit rows (docs/model.md 4.3, 4.4, 11).

Integer arithmetic on blocks of rows; where an address depends on two tables, row by row with scalars.
"""

from collections.abc import Callable
from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.kernel import Kernel, Request, Schedule, family
from tapeout.codegen.row_values import Bound, Rows, bind, row_count
from tapeout.dialects.types import Tensor

Value = Any


def _by_rows(request: Request, schedule: Schedule, compute: Callable[[Bound, Value], None]) -> Kernel:
    block_rows = schedule["block_rows"]

    def body(*buffers: Value) -> None:
        compute(bind(request, buffers), t.mul(t.program_id(0), block_rows))

    return Kernel(body, lambda *b: [t.ceil_div(row_count(b), block_rows)], "no sums")


def looked_up(table: Rows, ids: Rows, row: Value, block_rows: int, valid: Value) -> Value:
    """table[ids[r]] of a block of rows, [block_rows]; row 0 of the table where the id is negative."""
    return t.merge_last(t.gather(table.values, ids.values, row, block_rows, 1, valid=valid))


def _across(width: int, x: Value) -> Value:
    return t.broadcast(x, 1, width)


def _row_numbers(row: Value, block_rows: int) -> Value:
    return t.add(t.iota(block_rows), t.splat(row, [block_rows]))


@family("step.patch")
def patch(request: Request, schedule: Schedule) -> Kernel:
    """tokens [?] with the slot's last token in place of a negative one. Grid: row blocks."""
    block_rows = schedule["block_rows"]

    def compute(b: Bound, row: Value) -> None:
        tokens, slots, last = b.operands
        found = tokens.table(b.rows, row, block_rows)
        remembered = looked_up(last, slots, row, block_rows, t.sub(b.rows, row))
        t.View(b.results[0].values, [b.rows]).store([row], t.select(t.less(found, 0), remembered, found))

    return _by_rows(request, schedule, compute)


@family("step.remember")
def remember(request: Request, schedule: Schedule) -> Kernel:
    """Each row's token becomes the last one of its slot. Grid: one instance, so that of equal slots the last row wins."""
    block_rows = schedule["block_rows"]

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        last, slots, tokens = b.operands

        def step(row: Value) -> None:
            t.scatter(tokens.raw(b.rows, [row, 0], [block_rows, 1]), last.values, slots.values, row, t.sub(b.rows, row))

        t.loop(0, b.rows, block_rows, [], step)

    return Kernel(body, lambda *b: [1], "rows ascending")


@family("step.window")
def window(request: Request, schedule: Schedule) -> Kernel:
    """Ring rows of visible positions max(0, t - W + 1, floor) .. t, left aligned, and their number. Grid: row blocks."""
    block_rows, width = schedule["block_rows"], request["window"]
    ring, behind = request["ring"], request["sequences"] * request["ring"]

    def compute(b: Bound, row: Value) -> None:
        at, slot, start, floor = (table.table(b.rows, row, block_rows) for table in b.operands)
        first = looked_up(b.operands[0], b.operands[2], row, block_rows, t.sub(b.rows, row))
        lowest = t.maximum(t.maximum(t.sub(at, width - 1), floor), 0)
        counts = t.maximum(t.add(t.sub(at, lowest), 1), 0)
        column = t.broadcast(t.iota(width), 0, block_rows)
        seen = t.add(_across(width, lowest), column)
        staged = t.add(_across(width, t.add(t.sub(start, first), behind)), seen)
        kept = t.add(_across(width, t.mul(slot, ring)), t.remainder(seen, ring))
        ids = t.select(t.greater_equal(seen, _across(width, first)), staged, kept)
        ids = t.select(t.less(column, _across(width, counts)), ids, -1)
        b.results[0].write(b.rows, [row, 0], ids)
        t.View(b.results[1].values, [b.rows]).store([row], counts)

    return _by_rows(request, schedule, compute)


@family("step.partners")
def partners(request: Request, schedule: Schedule) -> Kernel:
    """Ring row of token t - 1 of rows at odd positions, else -1. Grid: row blocks (model spec 4.4)."""
    block_rows, ring = schedule["block_rows"], request["ring"]
    behind = request["sequences"] * ring

    def compute(b: Bound, row: Value) -> None:
        at, slot, start = (table.table(b.rows, row, block_rows) for table in b.operands)
        number = _row_numbers(row, block_rows)
        kept = t.add(t.mul(slot, ring), t.remainder(t.maximum(t.sub(at, 1), 0), ring))
        found = t.select(t.greater(number, start), t.add(number, behind - 1), kept)
        t.View(b.results[0].values, [b.rows]).store([row], t.select(t.equal(t.bit_and(at, 1), 1), found, -1))

    return _by_rows(request, schedule, compute)


@family("step.commits")
def commits(request: Request, schedule: Schedule) -> Kernel:
    """Ring row of each of the last `ring` rows of a sequence, else -1. Grid: row blocks."""
    block_rows, ring = schedule["block_rows"], request["ring"]

    def compute(b: Bound, row: Value) -> None:
        at, slot, end = (table.table(b.rows, row, block_rows) for table in b.operands)
        remaining = t.sub(end, _row_numbers(row, block_rows))
        kept = t.add(t.mul(slot, ring), t.remainder(at, ring))
        t.View(b.results[0].values, [b.rows]).store([row], t.select(t.less_equal(remaining, ring), kept, -1))

    return _by_rows(request, schedule, compute)


@family("step.entries")
def entries(request: Request, schedule: Schedule) -> Kernel:
    """Physical row of the entry that a row completes, else -1. Grid: row blocks (model spec 4.4)."""
    block_rows, ratio = schedule["block_rows"], request["ratio"]
    per_block, table = request["block_tokens"] // ratio, request.operands[2]
    assert isinstance(table, Tensor), table
    blocks = table.sized(0)[1]

    def compute(b: Bound, row: Value) -> None:
        positions, slots, block_table = b.operands

        def step(r: Value) -> None:
            at, slot = t.scalar(positions.values, r), t.scalar(slots.values, r)
            entry = t.quotient(at, ratio)
            block = t.scalar(block_table.values, t.add(t.mul(slot, blocks), t.quotient(entry, per_block)))
            found = t.add(t.mul(block, per_block), t.remainder(entry, per_block))
            complete = t.equal(t.remainder(t.add(at, 1), ratio), 0)
            t.View(b.results[0].values, [None]).store([r], t.splat(t.select(complete, found, -1), [1]))

        t.loop(row, t.minimum(t.add(row, block_rows), b.rows), 1, [], step)

    return _by_rows(request, schedule, compute)
