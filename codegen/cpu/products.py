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
from tapeout.codegen.cpu.nests import pieces, traverse, write
from tapeout.codegen.cpu.registers import Registers, create, lanes_of
from tapeout.codegen.cpu.tiles import At, Panelled, Stored, Tile, evaluate, on_stack
from tapeout.dialects._mlir import arith, vector

LANES = 16  # columns of a panel: two 256-bit registers or one of 512 bits
SCALE_GROUP = 32
PAD = 16  # floats between staged rows: power-of-two strides would share cache sets


@dataclass(frozen=True)
class Blocks:
    """Register blocks: heights of a tall and a short block of rows, panels that one row takes side by side, rows and columns of A B^T.

    6 x 16 sums fill twelve 256-bit registers; the short block and the panels are the least that hide the latency of fma. The last block may hold
    up to `tall - 1` rows that nobody asked for: stack tiles have room for them.
    """

    tall: int = 6
    short: int = 4
    panels: int = 4
    lane_rows: tuple[int, ...] = (3, 1)
    lane_columns: tuple[int, ...] = (4, 1)

    def tall_rows(self, rows: int) -> int:
        """Rows done in tall blocks; short ones do the rest, two of them where that is less work than a tall and a short one."""
        count, left = (rows + self.tall - self.short - 1) // self.tall, rows % self.tall
        return (count - (count > 0 and 0 < left <= 2 * self.short - self.tall)) * self.tall


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
        """Length of the sums."""
        return self.a.shape[1]

    @property
    def n(self) -> int:
        """Columns of the result."""
        return self.b.shape[1]


def stage(e: Emitter, tile: Tile, rows: Any, multiple: int = 1) -> Stored:
    """f32 rows on the stack, columns padded with zeros to a multiple; a buffer that is one already is used as it is."""
    m, k = tile.shape
    if isinstance(tile, Stored) and _serves(e, tile, multiple):
        return tile
    width = -(-k // multiple) * multiple
    held = on_stack(e, (m, width), "f32", width + PAD if m > 1 else width)
    write(e, tile, Stored((m, k), "f32", held.memory, held.offset, held.strides, held.buffer), rows)
    if width > k:
        _clear_columns(e, held, k, rows)
    if m > 1:
        _clear_spare_rows(e, held, rows)
    return held


def _serves(e: Emitter, tile: Stored, multiple: int) -> bool:
    if tile.buffer is None or tile.strides[1] != 1 or tile.shape[1] % multiple:
        return False
    return tile.buffer.count >= (tile.shape[0] + e.spare_rows) * tile.strides[0]


def _clear_columns(e: Emitter, held: Stored, first: int, rows: Any) -> None:
    m, width = held.shape
    with e.loop(0, m if rows is None else rows, 1, m) as loop:
        for column, lanes in pieces(width - first, 8):
            held.write(e, (loop.counter, number(first + column)), e.constant("f32", 0.0, lanes))


def _clear_spare_rows(e: Emitter, held: Stored, rows: Any) -> None:
    """Rows that only fill a block are multiplied too: what lies there must not be subnormal, which some CPUs take a hundred cycles for."""
    m, width = held.shape
    first = m if rows is None else rows
    with e.here():
        last = arith.addi(e.index(first), e.constant("index", e.spare_rows))
    with e.loop(first, last, 1, m + e.spare_rows) as loop:
        traverse(e, (width,), None, frozenset(), lambda at, lanes: held.write(e, (loop.counter, *at), e.constant("f32", 0.0, lanes)))


def multiply(e: Emitter, product: Product) -> None:
    """target (+)= a b."""
    if product.rows is not None:
        _by_row_count(e, product)
    elif product.a.shape[0] == 1:
        _single_row(e, product)
    elif product.a.shape[0] <= product.blocks.short:
        _few_rows(e, product)
    else:
        _panels(e, product)


def _by_row_count(e: Emitter, product: Product) -> None:
    short, m = product.blocks.short, product.a.shape[0]
    forms = [(1, 1, _single_row), (2, short, _few_rows), (short + 1, m, _panels)]
    for least, most, form in forms:
        if least <= m:
            with e.here():
                enough = arith.cmpi(arith.CmpIPredicate.sge, product.rows, e.constant("index", least))
                few = arith.cmpi(arith.CmpIPredicate.sle, product.rows, e.constant("index", most))
                condition = arith.andi(enough, few)
            with e.branch(condition):
                form(e, product)


# ---- rows by panels ----------------------------------------------------------------------------------------------------


def _panels(e: Emitter, product: Product) -> None:
    panel = on_stack(e, (product.k, LANES), "f32")
    rows = product.a.shape[0] if product.rows is None else product.rows
    tall = product.blocks.tall_rows(rows) if isinstance(rows, int) else _tall_rows(e, product.blocks, rows)
    whole, tail = divmod(product.n, LANES)
    if whole:
        with e.loop(0, whole, 1, whole) as loop:
            _panel(e, product, panel, loop.counter * LANES, LANES, tall, rows)
    if tail:
        _panel(e, product, panel, number(whole * LANES), tail, tall, rows)
    if panel.buffer is not None:
        e.give_back(panel.buffer)


def _panel(e: Emitter, product: Product, panel: Stored, column: Index, width: int, tall: Any, rows: Any) -> None:
    if not _is_panel(product.b, width):
        _decode(e, product.b, panel, column, width)
    extent = product.a.shape[0]
    with e.loop(0, tall, product.blocks.tall, extent) as loop:
        _block(e, product, panel, loop.counter, column, width, product.blocks.tall)
    with e.loop(tall, rows, product.blocks.short, extent) as loop:
        _block(e, product, panel, loop.counter, column, width, product.blocks.short)


def _is_panel(b: Tile, width: int) -> bool:
    """Whether B lies in memory as the f32 panels that blocks read."""
    return isinstance(b, Panelled) and b.rep == "f32" and b.panel == LANES == width


def _tall_rows(e: Emitter, blocks: Blocks, rows: Any) -> Any:
    """`Blocks.tall_rows` of a run-time count."""

    def c(value: int) -> Any:
        return e.constant("index", value)

    with e.here():
        count = arith.divui(arith.addi(rows, c(blocks.tall - blocks.short - 1)), c(blocks.tall))
        left = arith.remui(rows, c(blocks.tall))
        is_some = arith.andi(arith.cmpi(arith.CmpIPredicate.ugt, count, c(0)), arith.cmpi(arith.CmpIPredicate.ugt, left, c(0)))
        is_little = arith.cmpi(arith.CmpIPredicate.ule, left, c(2 * blocks.short - blocks.tall))
        fewer = arith.select(arith.andi(is_some, is_little), arith.subi(count, c(1)), count)
        return arith.muli(fewer, c(blocks.tall))


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


def _block(e: Emitter, product: Product, panel: Stored, row: Index, column: Index, width: int, height: int) -> None:
    lines = [row + r for r in range(height)]
    starts = [_start(e, product, line, column, width) for line in lines]
    with e.loop(0, product.k, 1, product.k, starts) as loop, e.nest():
        source, first = (product.b, column) if _is_panel(product.b, width) else (panel, number(0))
        right = evaluate(e, source, (loop.counter, first), LANES)
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


# ---- few rows ----------------------------------------------------------------------------------------------------------


def _few_rows(e: Emitter, product: Product) -> None:
    """One short block for all rows: B goes through registers, no panel is written."""
    lines = [number(r) for r in range(product.blocks.short)]
    _without_panel(e, product, lines, 1)


def _single_row(e: Emitter, product: Product) -> None:
    _without_panel(e, product, [number(0)], product.blocks.panels)


def _without_panel(e: Emitter, product: Product, lines: list[Index], together: int) -> None:
    """`lines` rows times all columns, `together` panels side by side."""
    whole, tail = divmod(product.n, LANES)
    together = min(together, max(whole, 1))
    groups, rest = divmod(whole, together)
    if groups:
        with e.loop(0, groups, 1, groups) as loop:
            _through_registers(e, product, lines, loop.counter * (LANES * together), together)
    if rest:
        with e.loop(0, rest, 1, rest) as loop:
            _through_registers(e, product, lines, loop.counter * LANES + groups * together * LANES, 1)
    if tail:
        panel = on_stack(e, (product.k, LANES), "f32")
        _decode(e, product.b, panel, number(whole * LANES), tail)
        _block(e, product, panel, lines[0], number(whole * LANES), tail, len(lines))
        if panel.buffer is not None:
            e.give_back(panel.buffer)


def _through_registers(e: Emitter, product: Product, lines: list[Index], column: Index, together: int) -> None:
    places = [(line, column + i * LANES) for line in lines for i in range(together)]
    starts = [_start(e, product, line, c, LANES) for line, c in places]

    def step(k: Index, accumulators: list[Any]) -> list[Any]:
        return [
            _step(e, product.a, line, k, evaluate(e, product.b, (k, c), LANES), acc)
            for (line, c), acc in zip(places, accumulators, strict=True)
        ]

    with e.nest():
        results = _over_k(e, product.k, starts, step)
    for (line, c), value in zip(places, results, strict=True):
        _finish(e, product, line, c, LANES, value)


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


def _last_whole(e: Emitter, first: Any, rows: Any, height: int) -> Any:
    with e.here():
        left = arith.subi(rows, e.index(first))
        return arith.addi(e.index(first), arith.muli(arith.divui(left, e.constant("index", height)), e.constant("index", height)))


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
