"""`sample.draw` with rows cut into pieces, so that few rows keep a whole chip busy: four launches on the same buffers.

1. Every piece: its peak, the sum of its exponentials, its mean. 2. Rows with a filter: counts and masses of a piece at or above each of some
levels of the logit. 3. Rows with a temperature: the level that the border of the filters lies under is found; tokens surely above it get their
noise, the best of a piece is kept; those between this level and the one before are listed, in order of their ids. 4. Every row: the greedy
token, or the border among the listed ones and the best of all that stay. Ranks are exact; lists that do not fit are read from the row again.
"""

from dataclasses import dataclass
from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.kernel import Kernel, KernelError, Part, Request, Schedule, Workspace, width
from tapeout.codegen.kernels.drawn_rows import (
    HIGHEST_ID,
    HIGHEST_MASS,
    LOWEST_SCORE,
    Above,
    Cells,
    Line,
    Settings,
    border,
    last_of,
    noise_key,
    noisy,
    number_at,
    numbered,
    settings_of,
)
from tapeout.codegen.kernels.ordered_bits import LOWEST_KEY, ordered_f32
from tapeout.codegen.row_values import Bound, bind, row_count

Value = Any
FAR = -1024.0
"""A logit further below its piece's peak is a masked one: it must not move the levels."""
BELOW_THE_MEAN = 3.0
"""How much further apart levels lie below the mean."""
PEAK, SUM, BELOW, LIVE, SCORE, MASS = range(6)
"""Lines of a row's f32 workspace, a number a piece each. BELOW: the sum of logits less the peak; LIVE: of how many; masses are a line a level."""
GREEDY, DRAWN, MODE, UNDER, OVER, SURE, OWN, PLACE, LISTED, FLAG, STAY, LAST, COUNT = range(13)
"""Lines of its i32 workspace. MODE: what a row asks for; UNDER: the level that its border lies above; OVER: the cell of a key that it lies below;
SURE, OWN: tokens of a piece from that key on, and between the two; PLACE, LISTED: where a piece's part of the list begins, how long the list is;
FLAG: a condition; STAY, LAST: how many tokens stay at the border, the id of the last of them."""
PLAIN, HOT, FILTERED = range(3)
SHORT = 4
"""A list that fills no more than one in SHORT places is read as a short one."""
NO_KEY, FIRST_KEY = 2**31 - 1, LOWEST_KEY + 1


@dataclass(frozen=True)
class _Sizes:
    """Tokens of a row, of a piece, of a block of the whole row; pieces; levels; places of a list."""

    tokens: int
    piece: int
    block: int
    pieces: int
    levels: int
    listed: int


@dataclass(frozen=True)
class _Row:
    """One row in one launch; `piece` is the piece's number, 0 where a launch has whole rows."""

    sizes: _Sizes
    bound: Bound
    at: Value
    piece: Value

    def numbers(self, line: int | Value, real: bool = True) -> Value:
        """A line of a workspace, [pieces]."""
        lines, buffer = self._lines(real)
        return t.View(buffer, [None, self.sizes.pieces]).load([t.add(t.mul(self.at, lines), line), 0], [self.sizes.pieces])

    def table(self, line: int, real: bool) -> Value:
        """Levels x pieces."""
        lines, buffer = self._lines(real)
        box = [self.sizes.levels, self.sizes.pieces]
        return t.View(buffer, [None, self.sizes.pieces]).load([t.add(t.mul(self.at, lines), line), 0], box)

    def own(self, line: int | Value, real: bool = False) -> Value:
        """Where the piece's own number of a line lies."""
        lines, _ = self._lines(real)
        return t.add(t.mul(t.add(t.mul(self.at, lines), line), self.sizes.pieces), self.piece)

    def put(self, line: int | Value, value: Value, real: bool = False) -> None:
        t.View(self._lines(real)[1], [None]).store([self.own(line, real)], value)

    def get(self, line: int) -> Value:
        return number_at(self._lines(False)[1], self.own(line))

    def scalar(self, line: int) -> Value:
        return t.scalar(self._lines(False)[1], self.own(line))

    def keys(self) -> Cells:
        """The keys of the levels, from 1 on, the last one below all logits; in front NO_KEY, above all."""
        return Cells(self.bound.workspaces[2], t.mul(self.at, self.sizes.levels + 1))

    def logits(self, first: Value, count: int) -> Value:
        view = t.View(self.bound.operands[0].values, [None, self.sizes.tokens])
        return t.cast(view.load([self.at, first], [count]), "f32")

    def operand(self, number: int) -> Value:
        return number_at(self.bound.operands[number].values, self.at)

    def settings(self) -> Settings:
        peak = t.reduce(self.numbers(PEAK), "max", 0)
        return settings_of(self.operand(1), self.operand(2), self.operand(3), peak, self.sizes.tokens)

    def _lines(self, real: bool) -> tuple[int, Value]:
        return (MASS + self.sizes.levels, self.bound.workspaces[0]) if real else (COUNT + self.sizes.levels, self.bound.workspaces[1])


def in_pieces(request: Request, schedule: Schedule) -> Kernel:
    """Grids: rows x pieces three times, then rows."""
    n, piece = width(request.operands[0]), schedule["block_columns"]
    if n % piece or n % schedule["row_columns"] or schedule["pieces"] != n // piece:
        raise KernelError(f"schedule entries block_columns, row_columns and pieces are {piece}, {schedule['row_columns']} and {schedule['pieces']}, "
                          f"expected divisors of {n} and the quotient of the first")  # fmt: skip
    sizes = _Sizes(n, piece, schedule["row_columns"], n // piece, schedule["levels"], schedule["listed"])

    def launch(step: Any) -> Any:
        return lambda *buffers: step(_Row(sizes, bind(request, buffers), t.program_id(0), t.program_id(1)))

    def last(*buffers: Value) -> None:
        _finish(_Row(sizes, bind(request, buffers), t.program_id(0), t.index(0)), request["stream"])

    def grid(*buffers: Value) -> list[Any]:
        return [row_count(buffers), sizes.pieces]

    steps = (_peaks, _levels, lambda row: _sort_out(row, request["stream"]))
    cells = [("f32", (MASS + sizes.levels) * sizes.pieces), ("i32", (COUNT + sizes.levels) * sizes.pieces), ("i32", sizes.levels + 1),
             ("f32", sizes.listed), ("i32", sizes.listed)]  # fmt: skip
    work = tuple(_workspace(kind, size) for kind, size in cells)
    order = f"row: pieces of {piece} tokens, then the pieces"
    return Kernel(last, lambda *b: [row_count(b)], order, workspaces=work, before=tuple(Part(launch(step), grid) for step in steps))


def _workspace(kind: str, size: int) -> Workspace:
    return Workspace(kind, lambda rows: rows * size)


def _peaks(row: _Row) -> None:
    """What every row needs of a piece, and what the row asks for."""
    first, size = t.mul(row.piece, row.sizes.piece), row.sizes.piece
    x, ids = row.logits(first, size), numbered(first, size)
    peak = t.reduce(x, "max", 0)
    base = t.broadcast(t.maximum(peak, LOWEST_SCORE), 0, size)  # a piece of masked tokens must not make a NaN
    below = t.sub(x, base)
    row.put(PEAK, peak, True)
    row.put(SUM, t.reduce(t.exp(below), "add", 0), True)
    live = t.greater(below, FAR)
    row.put(BELOW, t.reduce(t.select(live, below, 0.0), "add", 0), True)
    row.put(LIVE, t.reduce(t.cast(live, "f32"), "add", 0), True)
    row.put(GREEDY, t.reduce(t.select(t.equal(x, t.broadcast(peak, 0, size)), ids, HIGHEST_ID), "min", 0))
    top_k = row.operand(2)
    fewer = t.bit_and(t.greater(top_k, 0), t.less(top_k, row.sizes.tokens))
    filtered = t.bit_or(fewer, t.less(row.operand(3), 1.0))
    asked = t.select(filtered, t.full([], FILTERED, "i32"), HOT)
    row.put(MODE, t.select(t.greater(row.operand(1), 0.0), asked, PLAIN))


def _levels(row: _Row) -> None:
    """Counts and masses of a piece at or above each level; the first piece writes the levels' keys, behind one that is above all."""
    size, levels = row.sizes.piece, row.sizes.levels

    def note(cell: Value, key: Value) -> None:
        t.when(t.equal(row.piece, 0), lambda: row.keys().put(cell, key))

    def measured() -> None:
        settings = row.settings()
        x = row.logits(t.mul(row.piece, size), size)
        keys, weights = ordered_f32(x), settings.weight(x)
        step = t.mul(t.sub(settings.peak, _mean(row)), 1.0 / _upper(levels))

        def one(number: Value) -> None:
            key = _level(settings.peak, step, number, levels)
            inside = t.greater_equal(keys, t.broadcast(key, 0, size))
            row.put(t.add(number, COUNT), t.reduce(t.cast(inside, "i32"), "add", 0))
            row.put(t.add(number, MASS), t.reduce(t.select(inside, weights, 0.0), "add", 0), True)
            note(t.add(number, 1), key)

        t.loop(0, levels, 1, [], one)
        note(t.index(0), t.full([], NO_KEY, "i32"))

    t.when(t.equal(row.scalar(MODE), FILTERED), measured)


def _upper(levels: int) -> int:
    """Levels between the peak and the mean."""
    return max(1, 3 * levels // 4)


def _level(peak: Value, step: Value, number: Value, levels: int) -> Value:
    """The key of a level, rank 0: they fall from the peak, below the mean in longer steps; at the last one are all logits."""
    at = t.full([], t.cast(number, "i32"), "i32")
    place = t.add(t.cast(at, "f32"), 1.0)
    further = t.mul(t.maximum(t.sub(place, float(_upper(levels))), 0.0), BELOW_THE_MEAN - 1.0)
    key = ordered_f32(t.sub(peak, t.mul(t.add(place, further), step)))
    return t.select(t.equal(at, levels - 1), FIRST_KEY, key)


def _mean(row: _Row) -> Value:
    """The mean of a row's logits that are not masked, rank 0."""
    live = row.numbers(LIVE)
    total = t.add(t.mul(t.maximum(row.numbers(PEAK), LOWEST_SCORE), live), row.numbers(BELOW))
    return t.div(t.reduce(total, "add", 0), t.reduce(live, "add", 0))


def _sort_out(row: _Row, stream: int) -> None:
    """Tokens surely above the border get their noise, those that may be are listed."""
    sizes, mode = row.sizes, row.scalar(MODE)
    t.when(t.equal(mode, FILTERED), lambda: _place(row), lambda: _take_all(row))

    def sorted_out() -> None:
        under = row.scalar(UNDER)
        (over,) = t.when(t.equal(mode, FILTERED), lambda: [row.keys().get(row.scalar(OVER))], lambda: [t.full([], FIRST_KEY, "i32")])
        settings, first = row.settings(), t.mul(row.piece, sizes.piece)
        x, ids = row.logits(first, sizes.piece), numbered(first, sizes.piece)
        keys = ordered_f32(x)
        surely = t.greater_equal(keys, t.broadcast(over, 0, sizes.piece))
        row.put(SCORE, t.full([], LOWEST_SCORE), True)
        row.put(DRAWN, t.full([], 0, "i32"))
        t.when(t.greater(row.scalar(SURE), 0), lambda: _score(row, settings, x, ids, surely, stream))

        def listed() -> None:
            between = t.bit_and(t.logical_not(surely), t.greater_equal(keys, t.broadcast(row.keys().get(t.add(under, 1)), 0, sizes.piece)))
            at, end = t.add(t.mul(row.at, sizes.listed), row.scalar(PLACE)), t.mul(t.add(row.at, 1), sizes.listed)
            t.compress_store(x, between, row.bound.workspaces[3], at, end)
            t.compress_store(ids, between, row.bound.workspaces[4], at, end)

        fits = lambda: t.when(t.less_equal(row.scalar(LISTED), sizes.listed), listed)  # noqa: E731
        t.when(t.greater(row.scalar(OWN), 0), fits)

    t.when(t.greater(mode, PLAIN), sorted_out)


def _score(row: _Row, settings: Settings, x: Value, ids: Value, stays: Value, stream: int) -> None:
    scores = noisy(settings, x, ids, noise_key(row.operand(4), row.operand(5), stream), stays)
    best = t.reduce(scores, "max", 0)
    row.put(SCORE, best, True)
    found = t.equal(scores, t.broadcast(best, 0, row.sizes.piece))
    row.put(DRAWN, t.reduce(t.select(found, ids, HIGHEST_ID), "min", 0))


def _take_all(row: _Row) -> None:
    """All tokens of a row without a filter are above its border."""
    row.put(SURE, t.full([], row.sizes.piece, "i32"))
    row.put(OWN, t.full([], 0, "i32"))


def _place(row: _Row) -> None:
    """The first level at which both filters are satisfied, the piece's place in the list, and the list's length. A list that stays short has
    all tokens from the level on, another only those between it and the level before."""
    sizes, settings = row.sizes, row.settings()
    counts = row.table(COUNT, False)
    count, mass = t.reduce(counts, "add", 1), t.reduce(row.table(MASS, True), "add", 1)
    number = t.iota(sizes.levels)
    total = t.reduce(t.select(t.equal(number, sizes.levels - 1), mass, 0.0), "add", 0)
    enough = t.greater_equal(count, t.broadcast(settings.top_k, 0, sizes.levels))
    heavy = t.greater(mass, t.broadcast(_allowed(settings, total), 0, sizes.levels))
    under = t.reduce(t.select(t.bit_or(enough, heavy), number, sizes.levels - 1), "min", 0)
    level = t.broadcast(t.iota(sizes.levels), 1, sizes.pieces)

    def line(which: Value) -> Value:
        """Counts of the pieces at a level, [pieces]; none at -1."""
        here = t.equal(level, t.broadcast(t.broadcast(which, 0, sizes.levels), 1, sizes.pieces))
        return t.reduce(t.select(here, counts, 0), "add", 0)

    few = t.less_equal(t.reduce(line(under), "add", 0), sizes.listed // SHORT)
    over = t.select(few, 0, under)
    surely = line(t.sub(over, 1))
    between = t.sub(line(under), surely)
    piece = t.splat(row.piece, [sizes.pieces])
    before, own = t.less(t.iota(sizes.pieces), piece), t.equal(t.iota(sizes.pieces), piece)
    row.put(UNDER, under)
    row.put(OVER, over)
    row.put(SURE, t.reduce(t.select(own, surely, 0), "add", 0))
    row.put(OWN, t.reduce(t.select(own, between, 0), "add", 0))
    row.put(PLACE, t.reduce(t.select(before, between, 0), "add", 0))
    row.put(LISTED, t.reduce(between, "add", 0))


def _allowed(settings: Settings, total: Value) -> Value:
    """The mass that may lie before the last token that stays, rank 0."""
    return t.select(t.less(settings.top_p, 1.0), t.mul(total, settings.top_p), HIGHEST_MASS)


def _finish(row: _Row, stream: int) -> None:
    """Token and log-probability of a row from what the pieces found."""
    sizes, bound = row.sizes, row.bound
    peaks, mode = row.numbers(PEAK), row.scalar(MODE)
    peak = t.reduce(peaks, "max", 0)
    across = t.broadcast(peak, 0, sizes.pieces)
    bases = t.sub(t.maximum(peaks, LOWEST_SCORE), across)
    loss = t.negate(t.log(t.reduce(t.mul(row.numbers(SUM), t.exp(bases)), "add", 0)))
    token, lost = (t.View(r.values, [None]) for r in bound.results)
    greedy = t.reduce(t.select(t.equal(peaks, across), row.numbers(GREEDY, False), HIGHEST_ID), "min", 0)

    def plain() -> None:
        token.store([row.at], greedy)
        lost.store([row.at], loss)

    def drawn() -> None:
        scores = row.numbers(SCORE)
        best = t.reduce(scores, "max", 0)
        ids = t.select(t.equal(scores, t.broadcast(best, 0, sizes.pieces)), row.numbers(DRAWN, False), HIGHEST_ID)
        token.store([row.at], t.reduce(ids, "min", 0))
        t.when(t.equal(mode, FILTERED), lambda: _at_the_border(row, best, stream))
        chosen = row.logits(t.scalar(bound.results[0].values, row.at), 1)
        lost.store([row.at], t.add(t.sub(t.reduce(chosen, "add", 0), peak), loss))

    t.when(t.greater(mode, PLAIN), drawn, plain)


def _at_the_border(row: _Row, best: Value, stream: int) -> None:
    """Of the tokens between two levels those that stay, with their noise; the best of them wins where it is above `best`."""
    sizes, settings, under, over = row.sizes, row.settings(), row.scalar(UNDER), row.scalar(OVER)
    masses = t.reduce(row.table(MASS, True), "add", 1)
    counts = t.reduce(row.table(COUNT, False), "add", 1)
    number, before = t.iota(sizes.levels), t.splat(t.sub(over, 1), [sizes.levels])
    total = t.reduce(t.select(t.equal(number, sizes.levels - 1), masses, 0.0), "add", 0)
    above = Above(t.reduce(t.select(t.equal(number, before), counts, 0), "add", 0),
                  t.reduce(t.select(t.equal(number, before), masses, 0.0), "add", 0))  # fmt: skip
    least, end = row.keys().get(t.add(under, 1)), row.keys().get(over)
    key, bits = noise_key(row.operand(4), row.operand(5), stream), sizes.tokens.bit_length()

    def found_in(line: Line) -> None:
        floor, stay, tied = border(line, above, settings, _allowed(settings, total), least)
        row.put(STAY, stay)
        row.put(LAST, t.full([], HIGHEST_ID, "i32"))
        row.put(FLAG, t.cast(t.less(stay, tied), "i32"))
        t.when(t.not_equal(row.scalar(FLAG), 0), lambda: row.put(LAST, last_of(line, floor, row.get(STAY), bits)))
        last = row.get(LAST)

        def score(first: Value) -> Value:
            keys, ids = line.keys(first), line.ids(first)
            tie = t.bit_and(t.equal(keys, line.across(floor)), t.less_equal(ids, line.across(last)))
            return noisy(settings, line.load(first), ids, key, t.bit_or(t.greater(keys, line.across(floor)), tie))

        most, token = line.largest(score)
        row.put(FLAG, t.cast(t.greater(most, best), "i32"))
        t.when(t.not_equal(row.scalar(FLAG), 0), lambda: t.View(row.bound.results[0].values, [None]).store([row.at], token))

    def listed() -> None:
        short = max(1, sizes.listed // SHORT)
        t.when(t.less_equal(row.scalar(LISTED), short), lambda: found_in(_listed(row, short)), lambda: found_in(_listed(row, sizes.listed)))

    t.when(t.less_equal(row.scalar(LISTED), sizes.listed), listed, lambda: found_in(_among_all(row, least, end)))


def _listed(row: _Row, size: int) -> Line:
    """The list, of at most `size` places, read once."""
    first = t.mul(row.at, row.sizes.listed)
    x, ids = (t.View(buffer, [None]).load([first], [size]) for buffer in row.bound.workspaces[3:5])
    there = t.less(t.iota(size), t.splat(row.scalar(LISTED), [size]))
    keys = t.select(there, ordered_f32(x), LOWEST_KEY)
    return Line(size, size, lambda _: x, lambda _: keys, lambda _: ids)


def _among_all(row: _Row, least: Value, end: Value) -> Line:
    """The whole row, of which only the keys in [least, end) take part."""
    block = row.sizes.block

    def keys(first: Value) -> Value:
        found = ordered_f32(row.logits(first, block))
        inside = t.bit_and(t.greater_equal(found, t.broadcast(least, 0, block)), t.less(found, t.broadcast(end, 0, block)))
        return t.select(inside, found, LOWEST_KEY)

    return Line(row.sizes.tokens, block, lambda first: row.logits(first, block), keys, lambda first: numbered(first, block))
