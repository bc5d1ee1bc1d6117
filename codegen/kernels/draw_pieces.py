"""`sample.draw` with rows cut into pieces, so that few rows keep a whole chip busy: four launches on the same buffers.

1. Every piece: its peak, the sum of its exponentials, sums for mean and deviation. 2. Rows with a filter: counts and masses of a piece at or
above each of some levels of the logit. 3. Rows with a temperature: the level that the border of the filters lies under is found; tokens surely
above it get their noise, the best of a piece is kept; those between this level and the one before are listed, in order of their ids, if noise
can lift one of them above the largest logit. 4. Every row: the greedy token, or the border among the listed ones and the best of all that stay.
Ranks are exact; lists that do not fit are read from the row again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.kernel import Kernel, KernelError, Part, Request, Schedule, Workspace, width
from tapeout.codegen.kernels.drawn_rows import (
    HIGHEST_ID,
    HIGHEST_MASS,
    LOWEST_SCORE,
    Above,
    Block,
    Line,
    Search,
    Settings,
    border_from,
    last_of,
    noise_key,
    noisy,
    number_at,
    numbered,
    settings_of,
)
from tapeout.codegen.kernels.ordered_bits import LOWEST_KEY, WORD_BITS, f32_of, ordered_f32
from tapeout.codegen.row_values import Bound, bind, row_count

Value = Any
FAR = -1024.0
"""A logit further below its piece's peak is a masked one: it must not move the levels."""
PEAK, SUM, BELOW, LIVE, SQUARES, SCORE, OVER, ALLOWED, REAL_LINES = range(9)
"""Lines of a row's f32 workspace, a number a piece each. BELOW: the sum of logits less the peak; LIVE: of how many; SQUARES: of their squares;
OVER: the mass of tokens surely above the border; ALLOWED: the mass that may lie before the last token that stays."""
GREEDY, DRAWN, MODE, LEAST, END, ABOVE, SURE, OWN, PLACE, LISTED, START, BITS, UNIT, FLAG, STAY, FLOOR, LAST, LINES = range(18)
"""Lines of its i32 workspace. MODE: what a row asks for; LEAST, END: keys between which its border lies; ABOVE: tokens from END on; SURE, OWN:
tokens of a piece from END on, and between the two; PLACE, LISTED: where a piece's part of the list begins, how long the list is; START, BITS,
UNIT: the search for the border (`drawn_rows.Search`); FLAG: a condition; STAY, FLOOR, LAST: how many tokens stay at the border, their key, the id
of the last of them."""
PLAIN, HOT, FILTERED = range(3)
LONGEST_HELD, SHORTER = 16384, (8, 2)
"""Places of the longest list that is held in registers; one that fills no more than one in so many of them takes fewer."""
FIRST_KEY, WIDEST = LOWEST_KEY + 1, 2.0**30
HOPELESS = -20.5
"""A scaled logit this far below the largest one, which always stays, loses: -log(-log u) of numbers of 24 bits lies between -2.86 and 17.33."""
MASKED_LEVELS = 8
"""Levels from which on the last but one lies just above masked tokens."""


@dataclass(frozen=True)
class _Sizes:
    """Tokens of a row, of a piece, of a block of the whole row; pieces; levels; places of a list, of one that is held, of a short one."""

    tokens: int
    piece: int
    block: int
    pieces: int
    levels: int
    listed: int

    @property
    def held(self) -> int:
        return _divisor(self.listed, LONGEST_HELD)

    @property
    def short(self) -> int:
        held = self.held
        return _divisor(held, max(1, held // SHORTER[0]))


def _divisor(number: int, most: int) -> int:
    """The largest divisor of a number that is at most `most`."""
    return next(n for n in range(min(number, most), 0, -1) if number % n == 0)


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

    def levels(self) -> tuple[Value, Value, Value]:
        """What is known at each level: its key, and counts and masses of the pieces, f32 [levels, pieces]."""
        first, (levels, pieces) = t.mul(self.at, self.sizes.levels), (self.sizes.levels, self.sizes.pieces)
        table, keys = t.View(self.bound.workspaces[3], [None, 2 * pieces]), t.View(self.bound.workspaces[2], [None])
        return keys.load([first], [levels]), table.load([first, 0], [levels, pieces]), table.load([first, pieces], [levels, pieces])

    def put_level(self, number: int, key: Value, count: Value, mass: Value) -> None:
        """Count and mass of the piece at or above a level, f32; the first piece writes the key too."""
        at, table = t.add(t.mul(self.at, self.sizes.levels), number), t.View(self.bound.workspaces[3], [None, 2 * self.sizes.pieces])
        table.store([at, self.piece], count)
        table.store([at, t.add(self.piece, self.sizes.pieces)], mass)
        t.when(t.equal(self.piece, 0), lambda: t.View(self.bound.workspaces[2], [None]).store([at], key))

    def own(self, line: int | Value, real: bool = False) -> Value:
        """Where the piece's own number of a line lies."""
        lines, _ = self._lines(real)
        return t.add(t.mul(t.add(t.mul(self.at, lines), line), self.sizes.pieces), self.piece)

    def put(self, line: int | Value, value: Value, real: bool = False) -> None:
        t.View(self._lines(real)[1], [None]).store([self.own(line, real)], value)

    def put_lines(self, line: int | Value, values: Value, real: bool = False) -> None:
        """The piece's numbers of lines from `line` on."""
        lines, buffer = self._lines(real)
        at = [t.add(t.mul(self.at, lines), line), self.piece]
        t.View(buffer, [None, self.sizes.pieces]).store(at, t.split_last(values, 1))

    def get(self, line: int, real: bool = False) -> Value:
        return number_at(self._lines(real)[1], self.own(line, real))

    def scalar(self, line: int) -> Value:
        return t.scalar(self._lines(False)[1], self.own(line))

    def logits(self, first: Value, count: int) -> Value:
        view = t.View(self.bound.operands[0].values, [None, self.sizes.tokens])
        return t.cast(view.load([self.at, first], [count]), "f32")

    def operand(self, number: int) -> Value:
        return number_at(self.bound.operands[number].values, self.at)

    def settings(self) -> Settings:
        peak = t.reduce(self.numbers(PEAK), "max", 0)
        return settings_of(self.operand(1), self.operand(2), self.operand(3), peak, self.sizes.tokens)

    def put_token(self, results: Value, token: Value) -> None:
        """Stores the row's token. Where logits are NaN none may have been found: some token of the vocabulary then, as others read rows by it."""
        t.View(results, [None]).store([self.at], t.maximum(t.minimum(token, self.sizes.tokens - 1), 0))

    def _lines(self, real: bool) -> tuple[int, Value]:
        return (REAL_LINES, self.bound.workspaces[0]) if real else (LINES, self.bound.workspaces[1])


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
    cells = [("f32", REAL_LINES * sizes.pieces), ("i32", LINES * sizes.pieces), ("i32", sizes.levels), ("f32", 2 * sizes.levels * sizes.pieces),
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
    live = t.greater(below, FAR)
    near = t.select(live, below, 0.0)
    sums = t.pairs(t.interleave(t.exp(below), t.cast(live, "f32")), t.interleave(near, t.mul(near, near)))
    row.put_lines(SUM, t.reduce(t.split_last(t.merge_last(sums), SQUARES - SUM + 1), "add", 0), True)
    row.put(GREEDY, t.reduce(t.select(t.equal(x, t.broadcast(peak, 0, size)), ids, HIGHEST_ID), "min", 0))
    top_k = row.operand(2)
    fewer = t.bit_and(t.greater(top_k, 0), t.less(top_k, row.sizes.tokens))
    filtered = t.bit_or(fewer, t.less(row.operand(3), 1.0))
    asked = t.select(filtered, t.full([], FILTERED, "i32"), HOT)
    row.put(MODE, t.select(t.greater(row.operand(1), 0.0), asked, PLAIN))


def _levels(row: _Row) -> None:
    """Counts and masses of a piece at or above each level, and the levels' keys."""
    size, levels = row.sizes.piece, row.sizes.levels

    def measured() -> None:
        settings, spread = row.settings(), _mean_and_deviation(row)
        x = row.logits(t.mul(row.piece, size), size)
        keys, weights = ordered_f32(x), settings.weight(x)

        for number in range(levels):
            key = _level(settings.peak, *spread, number, levels)
            inside = t.greater_equal(keys, t.broadcast(key, 0, size))
            count = t.cast(t.reduce(t.cast(inside, "i32"), "add", 0), "f32")
            row.put_level(number, key, count, t.reduce(t.select(inside, weights, 0.0), "add", 0))

    t.when(t.equal(row.scalar(MODE), FILTERED), measured)


def _level(peak: Value, mean: Value, deviation: Value, number: int, levels: int) -> Value:
    """The key of a level, rank 0. The first ones fall from the peak to where a normal distribution has few tokens, the next ones have as many of
    its tokens between each other, two thirds of them above the mean; the last but one lies above masked logits, the last one below all."""
    upper, masked = levels // 8, int(levels >= MASKED_LEVELS)
    if number == levels - 1:
        return t.full([], FIRST_KEY, "i32")
    if number == levels - 1 - masked:
        return ordered_f32(t.add(peak, FAR))
    shares = _shares(levels - 1 - masked - upper)
    level = t.add(mean, t.mul(deviation, NormalDist().inv_cdf(1.0 - shares[max(0, number - upper)])))
    way = (number + 1) / (upper + 1)
    return ordered_f32(t.add(peak, t.mul(t.sub(level, peak), way)) if way < 1.0 else level)


def _shares(count: int) -> list[float]:
    """What part of a normal distribution lies above each of some levels."""
    above = max(1, 2 * count // 3)
    below = count - above
    return [0.5 * (n + 1) / above for n in range(above)] + [0.5 + 0.5 * (n + 1) / (below + 1) for n in range(below)]


def _mean_and_deviation(row: _Row) -> tuple[Value, Value]:
    """Of a row's logits that are not masked, rank 0."""
    peaks = row.numbers(PEAK)
    some = t.greater(peaks, t.broadcast(t.add(t.reduce(peaks, "max", 0), FAR), 0, row.sizes.pieces))
    live, below, squares = (t.select(some, row.numbers(line), 0.0) for line in (LIVE, BELOW, SQUARES))
    bases, count = t.select(some, peaks, 0.0), t.reduce(live, "add", 0)
    mean = t.div(t.reduce(t.add(t.mul(bases, live), below), "add", 0), count)
    further = t.sub(bases, t.broadcast(mean, 0, row.sizes.pieces))
    squares = t.add(t.add(squares, t.mul(t.mul(below, further), 2.0)), t.mul(t.mul(further, further), live))
    return mean, t.sqrt(t.maximum(t.div(t.reduce(squares, "add", 0), count), 0.0))


def _sort_out(row: _Row, stream: int) -> None:
    """Tokens surely above the border get their noise, those that may be are listed."""
    sizes, mode = row.sizes, row.scalar(MODE)
    t.when(t.equal(mode, FILTERED), lambda: _place(row), lambda: _take_all(row))

    def sorted_out() -> None:
        settings, first = row.settings(), t.mul(row.piece, sizes.piece)
        x, ids = row.logits(first, sizes.piece), numbered(first, sizes.piece)
        keys = ordered_f32(x)
        surely = t.greater_equal(keys, t.broadcast(row.get(END), 0, sizes.piece))
        row.put(SCORE, t.full([], LOWEST_SCORE), True)
        row.put(DRAWN, t.full([], 0, "i32"))
        t.when(t.greater(row.scalar(SURE), 0), lambda: _score(row, settings, x, ids, surely, stream))

        def listed() -> None:
            between = t.bit_and(t.logical_not(surely), t.greater_equal(keys, t.broadcast(row.get(LEAST), 0, sizes.piece)))
            at, end = t.add(t.mul(row.at, sizes.listed), row.scalar(PLACE)), t.mul(t.add(row.at, 1), sizes.listed)
            t.compress_store(x, between, row.bound.workspaces[4], at, end)
            t.compress_store(ids, between, row.bound.workspaces[5], at, end)

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
    for line, number in ((END, FIRST_KEY), (SURE, row.sizes.piece), (OWN, 0)):
        row.put(line, t.full([], number, "i32"))


def _place(row: _Row) -> None:
    """The first level at which both filters are satisfied, the piece's place in the list, and the list's length. A list that stays short has
    all tokens from the level on, another only those between it and the level before."""
    sizes, settings = row.sizes, row.settings()
    keys, counts, masses = row.levels()
    count, mass = t.reduce(counts, "add", 1), t.reduce(masses, "add", 1)
    number = t.iota(sizes.levels)

    def at(which: Value, of: Value, none: float) -> Value:
        """A level's own of numbers [levels], rank 0."""
        return t.reduce(t.select(t.equal(number, t.broadcast(which, 0, sizes.levels)), of, none), "max", 0)

    allowed = _allowed(settings, t.reduce(t.select(t.equal(number, sizes.levels - 1), mass, 0.0), "add", 0))
    enough = t.greater(count, t.broadcast(t.sub(t.cast(settings.top_k, "f32"), 0.5), 0, sizes.levels))
    heavy = t.greater(mass, t.broadcast(allowed, 0, sizes.levels))
    under = t.reduce(t.select(t.bit_or(enough, heavy), number, sizes.levels - 1), "min", 0)
    over = t.sub(t.select(t.less_equal(at(under, count, 0.0), float(sizes.short)), 0, under), 1)
    highest = t.add(ordered_f32(settings.peak), 1)
    least, end = at(under, keys, LOWEST_KEY), t.select(t.less(over, 0), highest, at(over, keys, LOWEST_KEY))
    row.put(LEAST, least)
    row.put(END, end)

    def of_the_row() -> None:
        row.put(ABOVE, t.cast(at(over, count, 0.0), "i32"))
        row.put(OVER, at(over, mass, 0.0), True)
        row.put(ALLOWED, allowed, True)
        _plan_search(row, least, end)

    t.when(t.equal(row.piece, 0), of_the_row)
    hopeless = t.less(t.mul(t.sub(f32_of(t.sub(end, 1)), settings.peak), settings.rate), HOPELESS)
    _plan_list(row, counts, under, over, hopeless)


def _plan_search(row: _Row, least: Value, end: Value) -> None:
    """The border is one of end - least keys. Where those are too many for an i32 all keys are looked through."""
    wide = t.greater_equal(t.sub(t.cast(end, "f32"), t.cast(least, "f32")), WIDEST)
    length = t.bitcast(t.cast(t.maximum(t.sub(end, least), 1), "f32"), "i32")
    exponent = t.sub(t.shr_unsigned(length, 23), 127)  # 2^(exponent + 1) is more than the length
    unit = t.cast(t.bitcast(t.shl(t.add(t.minimum(exponent, 30), 127), 23), "f32"), "i32")
    row.put(START, t.select(wide, LOWEST_KEY, least))
    row.put(BITS, t.select(wide, WORD_BITS, t.add(exponent, 1)))
    row.put(UNIT, t.select(wide, LOWEST_KEY, unit))


def _plan_list(row: _Row, counts: Value, under: Value, over: Value, hopeless: Value) -> None:
    """Of every piece the tokens from a level on, down to another; none that cannot win."""
    sizes = row.sizes
    level = t.broadcast(t.iota(sizes.levels), 1, sizes.pieces)

    def line(which: Value) -> Value:
        """Counts of the pieces at a level, i32 [pieces]; none at -1."""
        here = t.equal(level, t.broadcast(t.broadcast(which, 0, sizes.levels), 1, sizes.pieces))
        return t.cast(t.reduce(t.select(here, counts, 0.0), "add", 0), "i32")

    surely = line(over)
    between = t.select(t.broadcast(hopeless, 0, sizes.pieces), 0, t.sub(line(under), surely))
    number, piece = t.iota(sizes.pieces), t.splat(row.piece, [sizes.pieces])
    own = t.equal(number, piece)
    row.put(SURE, t.reduce(t.select(own, surely, 0), "add", 0))
    row.put(OWN, t.reduce(t.select(own, between, 0), "add", 0))
    row.put(PLACE, t.reduce(t.select(t.less(number, piece), between, 0), "add", 0))
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
    tokens, lost = bound.results[0].values, t.View(bound.results[1].values, [None])
    greedy = t.reduce(t.select(t.equal(peaks, across), row.numbers(GREEDY, False), HIGHEST_ID), "min", 0)

    def plain() -> None:
        row.put_token(tokens, greedy)
        lost.store([row.at], loss)

    def drawn() -> None:
        scores = row.numbers(SCORE)
        best = t.reduce(scores, "max", 0)
        found = t.equal(scores, t.broadcast(best, 0, sizes.pieces))
        drawn = t.reduce(t.select(found, row.numbers(DRAWN, False), HIGHEST_ID), "min", 0)
        surely = lambda: row.put_token(tokens, drawn)  # noqa: E731
        border = lambda: t.when(t.greater(row.scalar(LISTED), 0), lambda: _at_the_border(row, best, drawn, stream), surely)  # noqa: E731
        t.when(t.equal(mode, FILTERED), border, surely)
        chosen = row.logits(t.scalar(tokens, row.at), 1)
        lost.store([row.at], t.add(t.sub(t.reduce(chosen, "add", 0), peak), loss))

    t.when(t.greater(mode, PLAIN), drawn, plain)


def _at_the_border(row: _Row, best: Value, drawn: Value, stream: int) -> None:
    """Of the tokens between two keys those that stay, with their noise; the best of them wins over `drawn` where it is above `best`."""
    sizes, settings, listed = row.sizes, row.settings(), row.scalar(LISTED)
    above, allowed, least = Above(row.get(ABOVE), row.get(OVER, True)), row.get(ALLOWED, True), row.get(LEAST)
    search = Search(row.get(START), row.scalar(BITS), row.get(UNIT), least)
    key, bits = noise_key(row.operand(4), row.operand(5), stream), sizes.tokens.bit_length()

    def found_in(line: Line) -> None:
        floor, stay, tied = border_from(line, above, settings, allowed, search)
        row.put(FLOOR, floor)
        row.put(STAY, stay)
        row.put(LAST, t.full([], HIGHEST_ID, "i32"))
        row.put(FLAG, t.cast(t.less(stay, tied), "i32"))
        t.when(t.not_equal(row.scalar(FLAG), 0), lambda: row.put(LAST, last_of(line, floor, row.get(STAY), bits)))

    def best_of(line: Line) -> None:
        floor, last = row.get(FLOOR), row.get(LAST)

        def score(first: Value) -> Value:
            keys, ids = line.keys(first), line.ids(first)
            tie = t.bit_and(t.equal(keys, line.across(floor)), t.less_equal(ids, line.across(last)))
            return noisy(settings, line.load(first), ids, key, t.bit_or(t.greater(keys, line.across(floor)), tie))

        most, token = line.largest(score)
        row.put_token(row.bound.results[0].values, t.select(t.greater(most, best), token, drawn))

    def no_longer_than(places: int, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
        t.when(t.less_equal(listed, places), then, otherwise)

    def long() -> None:
        no_longer_than(sizes.listed, lambda: found_in(_long_list(row, sizes.held)), lambda: found_in(_among_all(row, least, row.get(END))))

    def held(places: int, *longer: int) -> None:
        no_longer_than(places, lambda: found_in(_held_list(row, places)), lambda: held(*longer) if longer else long())

    held(sizes.short, max(1, sizes.held // SHORTER[1]), sizes.held)
    no_longer_than(sizes.listed, lambda: best_of(_long_list(row, sizes.short)), lambda: best_of(_among_all(row, least, row.get(END))))


def _listed(row: _Row, first: Value, size: int) -> tuple[Value, Value, Value]:
    """Logits, keys and ids of places of the list."""
    at = t.add(t.mul(row.at, row.sizes.listed), first)
    x, ids = (t.View(buffer, [None]).load([at], [size]) for buffer in row.bound.workspaces[4:6])
    there = t.less(numbered(first, size), t.splat(row.scalar(LISTED), [size]))
    return x, t.select(there, ordered_f32(x), LOWEST_KEY), ids


def _held_list(row: _Row, size: int) -> Line:
    """The list, of at most `size` places, whose keys are held."""
    x, keys, ids = _listed(row, t.index(0), size)
    return Line(size, size, lambda _: x, lambda _: keys, lambda _: ids)


def _long_list(row: _Row, block: int) -> Line:
    """The list, read again and again."""
    part: Callable[[int], Block] = lambda n: lambda first: _listed(row, first, block)[n]  # noqa: E731
    return Line(row.scalar(LISTED), block, *(part(n) for n in range(3)))


def _among_all(row: _Row, least: Value, end: Value) -> Line:
    """The whole row, of which only the keys in [least, end) take part."""
    block = row.sizes.block

    def keys(first: Value) -> Value:
        found = ordered_f32(row.logits(first, block))
        inside = t.bit_and(t.greater_equal(found, t.broadcast(least, 0, block)), t.less(found, t.broadcast(end, 0, block)))
        return t.select(inside, found, LOWEST_KEY)

    return Line(row.sizes.tokens, block, lambda first: row.logits(first, block), keys, lambda first: numbered(first, block))
