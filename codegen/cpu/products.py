"""Tile products: register blocks of `vector.fma`, one code for every row count.

Each element of the result is one chain: its start, then k = 0, 1, 2, ... fused in order (A B), or lane sums over k in a fixed order (A
B^T). So the bits of a row depend neither on how many rows there are nor on where it stands.

A is held as f32 rows on the stack; B is decoded once into a panel [K, 16] that all row blocks reuse. With one row, B goes from memory
through registers into four accumulators and no panel is written.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tapeout.codegen.cpu.emitter import Emitter
from tapeout.codegen.cpu.linear_index import Index, number
from tapeout.codegen.cpu.nests import pieces, write
from tapeout.codegen.cpu.registers import Registers, create, lanes_of
from tapeout.codegen.cpu.tiles import At, Stored, Tile, evaluate, on_stack
from tapeout.dialects._mlir import arith, vector

LANES = 16  # columns of a panel: two 256-bit registers or one of 512 bits
SCALE_GROUP = 32
SINGLE_ROW_PANELS = 4  # accumulators of a one-row product: enough chains to hide the latency of fma
PAD = 16  # floats between staged rows: power-of-two strides would share cache sets


@dataclass(frozen=True)
class Blocks:
    """Row counts of the register blocks, largest first: 6 x 16 fills sixteen 256-bit registers."""

    rows: tuple[int, ...] = (6, 4, 2, 1)
    lane_rows: tuple[int, ...] = (3, 1)
    lane_columns: tuple[int, ...] = (4, 1)


@dataclass(frozen=True)
class Product:
    """One product: f32 tiles a [M, K] and b [K, N], the target [M, N] it is added to (or replaces, if `fresh`), run-time rows."""

    a: Stored
    b: Tile
    target: Stored
    fresh: bool
    rows: Any
    blocks: Blocks

    @property
    def k(self) -> int:
        return self.a.shape[1]

    @property
    def n(self) -> int:
        return self.b.shape[1]


def stage(e: Emitter, tile: Tile, rows: Any, multiple: int = 1) -> Stored:
    """f32 rows on the stack, columns padded with zeros to a multiple; a buffer that is one already is used as it is."""
    m, k = tile.shape
    if isinstance(tile, Stored) and tile.buffer is not None and tile.strides[1] == 1 and k % multiple == 0:
        return tile
    width = -(-k // multiple) * multiple
    held = on_stack(e, (m, width), "f32", width + PAD if m > 1 else width)
    write(e, tile, Stored((m, k), "f32", held.memory, held.offset, held.strides, held.buffer), rows)
    if width > k:
        _clear_columns(e, held, k, rows)
    return held


def _clear_columns(e: Emitter, held: Stored, first: int, rows: Any) -> None:
    m, width = held.shape
    with e.loop(0, m if rows is None else rows, 1, m) as loop:
        for column, lanes in pieces(width - first, 8):
            held.write(e, (loop.counter, number(first + column)), e.constant("f32", 0.0, lanes))


def multiply(e: Emitter, product: Product) -> None:
    """target (+)= a b."""
    m = product.a.shape[0]
    if m == 1 and product.rows is None:
        _single_row(e, product)
        return
    if product.rows is None:
        _panels(e, product, m)
        return
    for predicate, form in (
        (arith.CmpIPredicate.eq, _single_row),
        (arith.CmpIPredicate.ugt, lambda e, p: _panels(e, p, p.rows)),
    ):
        with e.here():
            condition = arith.cmpi(predicate, product.rows, e.constant("index", 1))
        with e.branch(condition):
            form(e, product)


# ---- rows by panels ----------------------------------------------------------------------------------------------------


def _panels(e: Emitter, product: Product, rows: Any) -> None:
    panel = on_stack(e, (product.k, LANES), "f32")
    whole, tail = divmod(product.n, LANES)
    if whole:
        with e.loop(0, whole, 1, whole) as loop:
            column = loop.counter * LANES
            _decode(e, product.b, panel, column, LANES)
            _row_blocks(e, product, panel, column, LANES, rows)
    if tail:
        _decode(e, product.b, panel, number(whole * LANES), tail)
        _row_blocks(e, product, panel, number(whole * LANES), tail, rows)
    if panel.buffer is not None:
        e.give_back(panel.buffer)


def _decode(e: Emitter, b: Tile, panel: Stored, column: Index, width: int) -> None:
    with e.nest():
        _over_k(e, b.shape[0], (), lambda k, _: _decode_row(e, b, panel, k, column, width))


def _decode_row(e: Emitter, b: Tile, panel: Stored, k: Index, column: Index, width: int) -> list[Any]:
    if width < LANES:
        panel.write(e, (k, number(0)), e.constant("f32", 0.0, LANES))
    for first, lanes in pieces(width, LANES):
        panel.write(e, (k, number(first)), evaluate(e, b, (k, column + first), lanes))
    return []


def _over_k(e: Emitter, k: int, carried: Sequence[Any], body: Callable[[Index, list[Any]], list[Any]]) -> list[Any]:
    """Loops over k, by scale groups where it has several, so that what a group shares is made once for it."""
    if k % SCALE_GROUP or k == SCALE_GROUP:
        with e.loop(0, k, 1, k, carried) as loop:
            loop.yielded = body(loop.counter, loop.carried)
        return loop.results
    with e.loop(0, k // SCALE_GROUP, 1, k // SCALE_GROUP, carried) as outer:
        with e.loop(0, SCALE_GROUP, 1, SCALE_GROUP, outer.carried) as inner:
            inner.yielded = body(outer.counter * SCALE_GROUP + inner.counter, inner.carried)
        outer.yielded = inner.results
    return outer.results


def _row_blocks(e: Emitter, product: Product, panel: Stored, column: Index, width: int, rows: Any) -> None:
    """All rows in blocks of falling height: a loop for the highest, at most one turn or so for the others."""
    first: Any = 0
    for height in product.blocks.rows:
        if isinstance(rows, int):
            count = (rows - first) // height
            last: Any = first + count * height
            if count == 0:
                continue
        else:
            last = _last_whole(e, first, rows, height)
        with e.loop(first, last, height, product.a.shape[0]) as loop:
            _block(e, product, panel, loop.counter, column, width, height)
        first = last


def _last_whole(e: Emitter, first: Any, rows: Any, height: int) -> Any:
    with e.here():
        left = arith.subi(rows, e.index(first))
        return arith.addi(e.index(first), arith.muli(arith.divui(left, e.constant("index", height)), e.constant("index", height)))


def _block(e: Emitter, product: Product, panel: Stored, row: Index, column: Index, width: int, height: int) -> None:
    lines = [row + r for r in range(height)]
    starts = [_start(e, product, line, column, width) for line in lines]
    with e.loop(0, product.k, 1, product.k, starts) as loop, e.nest():
        right = evaluate(e, panel, (loop.counter, number(0)), LANES)
        loop.yielded = [_step(e, product.a, line, loop.counter, right, acc) for line, acc in zip(lines, loop.carried, strict=True)]
    for line, value in zip(lines, loop.results, strict=True):
        _finish(e, product, line, column, width, value)


def _step(e: Emitter, a: Stored, line: Index, k: Index, right: Any, acc: Any) -> Any:
    left = evaluate(e, a, (line, k), 1)
    with e.here():
        registers = Registers(e, lanes_of(right))
        return registers.fma(registers.splat(left), right, acc)


def _mask(e: Emitter, width: int) -> Any:
    return e.constant("i1", [lane < width for lane in range(LANES)], LANES)


def _start(e: Emitter, product: Product, line: Index, column: Index, width: int) -> Any:
    zero = e.constant("f32", 0.0, LANES)
    if product.fresh:
        return zero
    where = e.value_of(product.target.position((line, column)))
    with e.here():
        if width < LANES:
            return vector.maskedload(zero.type, product.target.memory, [where], _mask(e, width), zero)
        return vector.load(zero.type, product.target.memory, [where])


def _finish(e: Emitter, product: Product, line: Index, column: Index, width: int, value: Any) -> None:
    where = e.value_of(product.target.position((line, column)))
    with e.here():
        if width < LANES:
            vector.maskedstore(product.target.memory, [where], _mask(e, width), value)
        else:
            vector.store(value, product.target.memory, [where])


# ---- one row -----------------------------------------------------------------------------------------------------------


def _single_row(e: Emitter, product: Product) -> None:
    whole, tail = divmod(product.n, LANES)
    together = min(SINGLE_ROW_PANELS, max(whole, 1))
    groups, rest = divmod(whole, together)
    if groups:
        with e.loop(0, groups, 1, groups) as loop:
            _row_times_panels(e, product, loop.counter * (LANES * together), together)
    for i in range(rest):
        _row_times_panels(e, product, number((groups * together + i) * LANES), 1)
    if tail:
        panel = on_stack(e, (product.k, LANES), "f32")
        _decode(e, product.b, panel, number(whole * LANES), tail)
        _block(e, product, panel, number(0), number(whole * LANES), tail, 1)
        if panel.buffer is not None:
            e.give_back(panel.buffer)


def _row_times_panels(e: Emitter, product: Product, column: Index, together: int) -> None:
    columns = [column + i * LANES for i in range(together)]
    starts = [_start(e, product, number(0), c, LANES) for c in columns]

    def step(k: Index, accumulators: list[Any]) -> list[Any]:
        return [
            _step(e, product.a, number(0), k, evaluate(e, product.b, (k, c), LANES), acc)
            for c, acc in zip(columns, accumulators, strict=True)
        ]

    with e.nest():
        results = _over_k(e, product.k, starts, step)
    for c, value in zip(columns, results, strict=True):
        _finish(e, product, number(0), c, LANES, value)


# ---- A B^T by lanes ----------------------------------------------------------------------------------------------------

_K_LANES = 8


def multiply_transposed(e: Emitter, product: Product, right: Stored) -> None:
    """target (+)= a right^T: vectors along k of both, 3 x 4 sums at a time; `right` [N, K] staged with k a multiple of 8."""
    rows = product.a.shape[0] if product.rows is None else product.rows
    columns, first = right.shape[0], 0
    for width in product.blocks.lane_columns:
        last = first + (columns - first) // width * width
        if last > first:
            with e.loop(first, last, width, columns) as loop:
                _lane_rows(e, product, right, loop.counter, width, rows)
        first = last


def _lane_rows(e: Emitter, product: Product, right: Stored, column: Index, width: int, rows: Any) -> None:
    first: Any = 0
    for height in product.blocks.lane_rows:
        last = first + (rows - first) // height * height if isinstance(rows, int) else _last_whole(e, first, rows, height)
        if isinstance(rows, int) and last == first:
            continue
        with e.loop(first, last, height, product.a.shape[0]) as loop:
            _lane_block(e, product, right, [loop.counter + r for r in range(height)], [column + c for c in range(width)])
        first = last


def _lane_block(e: Emitter, product: Product, right: Stored, lines: list[Index], columns: list[Index]) -> None:
    count = right.shape[1] // _K_LANES
    starts = [e.constant("f32", 0.0, _K_LANES)] * (len(lines) * len(columns))
    with e.loop(0, count, 1, count, starts) as loop, e.nest():
        k = loop.counter * _K_LANES
        left = [evaluate(e, product.a, (line, k), _K_LANES) for line in lines]
        across = [evaluate(e, right, (c, k), _K_LANES) for c in columns]
        pairs = [(x, y) for x in left for y in across]
        with e.here():
            loop.yielded = [create("math.fma", x.type, x, y, acc) for (x, y), acc in zip(pairs, loop.carried, strict=True)]
    for i, line in enumerate(lines):
        _lane_finish(e, product, (line, columns[0]), loop.results[i * len(columns) : (i + 1) * len(columns)])


def _lane_finish(e: Emitter, product: Product, at: At, sums: list[Any]) -> None:
    with e.here():
        value = _lane_sums(e, sums)
    if not product.fresh:
        with e.nest():
            start = evaluate(e, product.target, at, len(sums))
        with e.here():
            value = create("arith.addf", value.type, start, value)
    product.target.write(e, at, value)


def _lane_sums(e: Emitter, sums: list[Any]) -> Any:
    """One lane for each vector: neighbours are added until each vector is one number, in the same order for any count of vectors."""
    wanted = len(sums)
    while len(sums) > 1:
        sums = [_neighbours(e, a, b) for a, b in zip(sums[::2], sums[1::2], strict=True)]
    value = sums[0]
    while lanes_of(value) > wanted:
        value = _halved(e, value)
    return value


def _neighbours(e: Emitter, a: Any, b: Any) -> Any:
    lanes = lanes_of(a)
    even, odd = (Registers(e, lanes).shuffle(a, b, range(first, 2 * lanes, 2)) for first in (0, 1))
    return create("arith.addf", a.type, even, odd)


def _halved(e: Emitter, value: Any) -> Any:
    lanes = lanes_of(value)
    even, odd = (Registers(e, lanes // 2).shuffle(value, value, range(first, lanes, 2)) for first in (0, 1))
    return create("arith.addf", even.type, even, odd)
