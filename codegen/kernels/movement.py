"""Ops that move rows without changing them: embedding, take, concat, columns, stack, and the writes to a sequence's states.

Every part of a block-scaled value moves with its rows. Ids below 0 read row 0 or are dropped, as the tile ops do; an id behind the end is
the caller's error (docs/model.md 11).
"""

from collections.abc import Callable
from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.kernel import Kernel, Request, Schedule, family, width
from tapeout.codegen.row_values import Bound, bind, kind, row_count
from tapeout.dialects.types import Tensor

Value = Any
Move = Callable[[Bound, Value, Value], None]
"""(buffers, first row, valid rows) of one block."""


def _by_rows(request: Request, schedule: Schedule, move: Move) -> Kernel:
    block_rows = schedule["block_rows"]

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        row = t.mul(t.program_id(0), block_rows)
        move(b, row, t.sub(b.rows, row))

    return Kernel(body, lambda *b: [t.ceil_div(row_count(b), block_rows)], "no sums")


def pieces(columns: int, limit: int) -> list[tuple[int, int]]:
    """(first, count) of the column pieces of a row: as few as `limit` allows, all but the last of it."""
    return [(c, min(limit, columns - c)) for c in range(0, columns, limit)]


def _cannot_embed(request: Request) -> str | None:
    table = request.operands[1]
    plain = isinstance(table, Tensor) and table.number.element in ("bf16", "f32")
    return None if plain else f"the table is {table}, this kernel reads BF16 or FP32 rows"


@family("nn.embed", refuses=_cannot_embed)
def embed(request: Request, schedule: Schedule) -> Kernel:
    """y = table[id]: ids [?], table [V, H] -> [?, H]. Grid: row blocks (model spec 3.1)."""
    columns, block_rows = width(request.operands[1]), schedule["block_rows"]

    def move(b: Bound, row: Value, valid: Value) -> None:
        ids, table = b.operands
        (result,) = b.results
        for first, count in pieces(columns, schedule["block_columns"]):
            found = t.gather(table.values, ids.values, row, block_rows, count, row_stride=columns, column=first, valid=valid)
            result.write(b.rows, [row, first], t.cast(found, kind(result.number)))

    return _by_rows(request, schedule, move)


@family("nn.take")
def take(request: Request, schedule: Schedule) -> Kernel:
    """y_r = x[rows_r] of any number. Grid: row blocks."""
    block_rows = schedule["block_rows"]

    def move(b: Bound, row: Value, valid: Value) -> None:
        x, ids = b.operands
        for (source, columns), (target, _) in zip(x.buffers(), b.results[0].buffers(), strict=True):
            for first, count in pieces(columns, schedule["block_columns"]):
                found = t.gather(source, ids.values, row, block_rows, count, row_stride=columns, column=first, valid=valid)
                t.View(target, [b.rows, columns]).store([row, first], found)

    return _by_rows(request, schedule, move)


@family("nn.concat")
def concat(request: Request, schedule: Schedule) -> Kernel:
    """The columns of parts [?, n_i] side by side. Grid: row blocks."""
    block_rows = schedule["block_rows"]

    def move(b: Bound, row: Value, valid: Value) -> None:
        ends = [0] * len(b.results[0].buffers())
        for part in b.operands:
            for i, (source, columns) in enumerate(part.buffers()):
                target = t.View(b.results[0].buffers()[i][0], [b.rows, b.results[0].buffers()[i][1]])
                for first, count in pieces(columns, schedule["block_columns"]):
                    box = t.View(source, [b.rows, columns]).load([row, first], [block_rows, count])
                    target.store([row, ends[i] + first], box)
                ends[i] += columns

    return _by_rows(request, schedule, move)


@family("nn.columns")
def columns(request: Request, schedule: Schedule) -> Kernel:
    """Columns [first, first + count) of rows [?, n]; norms read theirs in place. Grid: row blocks."""
    block_rows = schedule["block_rows"]

    def move(b: Bound, row: Value, valid: Value) -> None:
        (x,), (result,) = b.operands, b.results
        for first, count in pieces(request["count"], schedule["block_columns"]):
            result.write(b.rows, [row, first], x.raw(b.rows, [row, request["first"] + first], [block_rows, count]))

    return _by_rows(request, schedule, move)


@family("nn.stack")
def stack(request: Request, schedule: Schedule) -> Kernel:
    """Part i [?] becomes column i. Grid: row blocks."""
    block_rows = schedule["block_rows"]

    def move(b: Bound, row: Value, valid: Value) -> None:
        for i, part in enumerate(b.operands):
            b.results[0].write(b.rows, [row, i], part.raw(b.rows, [row, 0], [block_rows, 1]))

    return _by_rows(request, schedule, move)


@family("cache.stage")
def stage(request: Request, schedule: Schedule) -> Kernel:
    """Row r of this step to physical row sequences * length + r of a ring. Grid: row blocks."""
    block_rows, behind = schedule["block_rows"], request["sequences"] * request["length"]

    def move(b: Bound, row: Value, valid: Value) -> None:
        ring, rows = b.operands
        for (source, columns), (target, _) in zip(rows.buffers(), ring.buffers(), strict=True):
            for first, count in pieces(columns, schedule["block_columns"]):
                box = t.View(source, [b.rows, columns]).load([row, first], [block_rows, count])
                t.View(target, [t.add(b.rows, behind), columns]).store([t.add(row, behind), first], box)

    return _by_rows(request, schedule, move)


@family("cache.commit")
def commit(request: Request, schedule: Schedule) -> Kernel:
    """Staged row r to physical row ids[r] of its ring; a negative id leaves it out. Grid: row blocks."""
    block_rows, behind = schedule["block_rows"], request["sequences"] * request["length"]

    def move(b: Bound, row: Value, valid: Value) -> None:
        ring, ids = b.operands
        for buffer, columns in ring.buffers():
            for first, count in pieces(columns, schedule["block_columns"]):
                staged = t.View(buffer, [t.add(b.rows, behind), columns]).load([t.add(row, behind), first], [block_rows, count])
                t.scatter(staged, buffer, ids.values, row, valid, row_stride=columns, column=first)

    return _by_rows(request, schedule, move)


@family("cache.append")
def append(request: Request, schedule: Schedule) -> Kernel:
    """Row r to the paged entry at physical row ids[r]; a negative id leaves it out. Grid: row blocks."""
    block_rows = schedule["block_rows"]

    def move(b: Bound, row: Value, valid: Value) -> None:
        blocks, rows, ids = b.operands
        for (source, columns), (target, _) in zip(rows.buffers(), blocks.buffers(), strict=True):
            for first, count in pieces(columns, schedule["block_columns"]):
                box = t.View(source, [b.rows, columns]).load([row, first], [block_rows, count])
                t.scatter(box, target, ids.values, row, valid, row_stride=columns, column=first)

    return _by_rows(request, schedule, move)
