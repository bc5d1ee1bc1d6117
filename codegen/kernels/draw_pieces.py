"""`sample.draw` with rows cut into pieces, so that few rows keep a whole chip busy: four launches on the same buffers.

1. Every piece: its peak; where they are asked for the sum of its exponentials, sums for mean and deviation, and logits that are a sum. 2. Rows
with a filter: counts and masses of a piece at or above each of some levels of the logit. 3. Rows with a temperature: the level that the border
of the filters lies under is found; tokens surely above it get their noise, the best of a piece is kept; those between this level and the one
before are listed, in order of their ids, if noise can lift one of them above the largest logit. 4. Every row: the greedy token, or the border
among the listed ones and the best of all that stay. Ranks are exact; lists that do not fit are read from the row again.
"""

from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.kernel import Kernel, KernelError, Part, Request, Schedule, width
from tapeout.codegen.kernels.draw_workspace import (
    ABOVE,
    ALLOWED,
    BELOW,
    BITS,
    DRAWN,
    END,
    FILTERED,
    FLAG,
    FLOOR,
    GREEDY,
    HOT,
    LAST,
    LEAST,
    LISTED,
    LIVE,
    MODE,
    OVER,
    OWN,
    PEAK,
    PLACE,
    PLAIN,
    SCORE,
    SHORTER,
    SQUARES,
    START,
    STAY,
    SUM,
    SURE,
    UNIT,
    Row,
    Sizes,
    workspaces,
)
from tapeout.codegen.kernels.drawn_rows import (
    HIGHEST_ID,
    HIGHEST_MASS,
    LOWEST_SCORE,
    POSITION,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    Above,
    Base,
    Block,
    Line,
    Search,
    Settings,
    base_of,
    border_from,
    last_of,
    noise_key,
    noisy,
    numbered,
)
from tapeout.codegen.kernels.ordered_bits import LOWEST_KEY, WORD_BITS, f32_of, ordered_f32
from tapeout.codegen.row_values import Bound, bind, row_count

Value = Any
FAR = -1024.0
"""A logit further below its piece's peak is a masked one: it must not move the levels."""
FIRST_KEY, WIDEST = LOWEST_KEY + 1, 2.0**30
HOPELESS = -20.5
"""A scaled logit this far below the largest one, which always stays, loses: -log(-log u) of numbers of 24 bits lies between -2.86 and 17.33."""
MASKED_LEVELS = 8
"""Levels from which on the last but one lies just above masked tokens."""



def in_pieces(request: Request, schedule: Schedule) -> Kernel:
    """Grids: instances that share all pieces of all rows, three times, then rows."""
    n, piece = width(request.operands[0]), schedule["block_columns"]
    if n % piece or n % schedule["row_columns"] or schedule["pieces"] != n // piece:
        raise KernelError(f"schedule entries block_columns, row_columns and pieces are {piece}, {schedule['row_columns']} and {schedule['pieces']}, "
                          f"expected divisors of {n} and the quotient of the first")  # fmt: skip
    sizes, base = Sizes(n, piece, schedule["row_columns"], n // piece, schedule["levels"], schedule["listed"]), base_of(request)
    stream, most = request.of("sample.draw")["stream"], schedule["instances"]
    if most < 1:
        raise KernelError(f"schedule entry instances is {most}, expected at least 1")

    def shared(least: int, step: Callable[[Row, Value, Value], None]) -> Part:
        return Part(lambda *buffers: _share(sizes, base, bind(request, buffers), most, least, step), grid)

    def grid(*buffers: Value) -> list[Any]:
        return [t.minimum(t.mul(row_count(buffers), sizes.pieces), most)]

    def last(*buffers: Value) -> None:
        _finish(Row(sizes, bind(request, buffers), t.program_id(0), t.index(0), base), stream)

    parts = shared(PLAIN, _peaks), shared(FILTERED, _levels), shared(HOT, lambda row, first, end: _sort_out(row, first, end, stream))
    order = f"row: pieces of {piece} tokens, then the pieces"
    return Kernel(last, lambda *b: [row_count(b)], order, workspaces=workspaces(sizes, base), before=parts)


def _share(sizes: Sizes, base: Base | None, bound: Bound, most: int, least: int, step: Callable[[Row, Value, Value], None]) -> None:
    """Runs `step` on this instance's share of all pieces, row by row, where a row asks for no less than `least`: what all pieces of a row need is
    then found once, and rows that ask for nothing cost few instances."""
    pieces = sizes.pieces
    items = t.mul(bound.rows, pieces)
    each = t.ceil_div(items, most)
    start = t.mul(t.program_id(0), each)
    stop = t.minimum(t.add(start, each), items)

    def of_row(at: Value) -> None:
        before = t.mul(at, pieces)
        first, end = t.maximum(t.sub(start, before), 0), t.minimum(t.sub(stop, before), pieces)
        row = Row(sizes, bound, at, first, base)
        if least == PLAIN:
            step(row, first, end)
        else:
            t.when(t.greater(row.scalar(MODE), least - 1), lambda: step(row, first, end))

    t.loop(t.quotient(start, pieces), t.ceil_div(stop, pieces), 1, [], of_row)


def _peaks(row: Row, first: Value, end: Value) -> None:
    """What every row needs of its pieces, and what the row asks for."""
    mode = _asked(row)
    row.put(MODE, mode)
    asked = row.scalar(MODE)

    def of_piece(piece: Value) -> None:
        one = replace(row, piece=piece)
        x = one.given()
        one.put(MODE, mode)
        below = _peak(one, x)
        if row.base is not None:
            t.when(t.greater(asked, PLAIN), lambda: one.keep(x))
        t.when(t.equal(asked, FILTERED), lambda: _moments(one, below))

    t.loop(first, end, 1, [], of_piece)


def _peak(row: Row, x: Value) -> Value:
    """The greedy token of a piece, and the sum of its exponentials where a log-probability is asked for; gives logits less the peak."""
    size = row.sizes.piece
    peak = t.reduce(x, "max", 0)
    below = t.sub(x, t.broadcast(t.maximum(peak, LOWEST_SCORE), 0, size))  # a piece of masked tokens must not make a NaN
    row.put(PEAK, peak, True)
    if row.bound.results[1:]:
        row.put(SUM, t.reduce(t.exp(below), "add", 0), True)
    ids = numbered(t.mul(row.piece, size), size)
    row.put(GREEDY, t.reduce(t.select(t.equal(x, t.broadcast(peak, 0, size)), ids, HIGHEST_ID), "min", 0))
    return below


def _asked(row: Row) -> Value:
    """What a row asks for."""
    top_k = row.operand(TOP_K)
    fewer = t.bit_and(t.greater(top_k, 0), t.less(top_k, row.sizes.tokens))
    filtered = t.bit_or(fewer, t.less(row.operand(TOP_P), 1.0))
    asked = t.select(filtered, t.full([], FILTERED, "i32"), HOT)
    return t.select(t.greater(row.operand(TEMPERATURE), 0.0), asked, PLAIN)


def _moments(row: Row, below: Value) -> None:
    """Sums over the piece's tokens that are not masked, by which levels are placed."""
    live = t.greater(below, FAR)
    near = t.select(live, below, 0.0)
    row.put_lines(BELOW, t.reduce(t.pairs(near, t.cast(live, "f32")), "add", 0), True)
    row.put(SQUARES, t.reduce(t.mul(near, near), "add", 0), True)


def _levels(row: Row, first: Value, end: Value) -> None:
    """Counts and masses of pieces at or above each level, and the levels' keys."""
    size, levels, settings, spread = row.sizes.piece, row.sizes.levels, row.settings(), _mean_and_deviation(row)
    keys = [_level(settings.peak, *spread, number, levels) for number in range(levels)]

    def of_the_row() -> None:
        for number, key in enumerate(keys):
            row.put_key(number, key)

    t.when(t.equal(first, 0), of_the_row)

    def of_piece(piece: Value) -> None:
        one, x = replace(row, piece=piece), row.logits(t.mul(piece, size), size)
        own, weights = ordered_f32(x), settings.weight(x)

        def sums(key: Value) -> tuple[Value, Value]:
            inside = t.greater_equal(own, t.broadcast(key, 0, size))
            return t.cast(inside, "f32"), t.select(inside, weights, 0.0)

        for number in range(0, levels - 1, 2):
            (count, mass), (fewer, less) = sums(keys[number]), sums(keys[number + 1])
            both = t.split_last(t.merge_last(t.pairs(t.interleave(count, fewer), t.interleave(mass, less))), 4)
            one.put_level(number, t.reduce(both, "add", 0))
        if levels % 2:
            one.put_level(levels - 1, t.reduce(t.pairs(*sums(keys[-1])), "add", 0))

    t.loop(first, end, 1, [], of_piece)


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


def _mean_and_deviation(row: Row) -> tuple[Value, Value]:
    """Of a row's logits that are not masked, rank 0."""
    peaks = row.numbers(PEAK)
    some = t.greater(peaks, t.broadcast(t.add(t.reduce(peaks, "max", 0), FAR), 0, row.sizes.pieces))
    live, below, squares = (t.select(some, row.numbers(line), 0.0) for line in (LIVE, BELOW, SQUARES))
    bases, count = t.select(some, peaks, 0.0), t.reduce(live, "add", 0)
    mean = t.div(t.reduce(t.add(t.mul(bases, live), below), "add", 0), count)
    further = t.sub(bases, t.broadcast(mean, 0, row.sizes.pieces))
    squares = t.add(t.add(squares, t.mul(t.mul(below, further), 2.0)), t.mul(t.mul(further, further), live))
    return mean, t.sqrt(t.maximum(t.div(t.reduce(squares, "add", 0), count), 0.0))


def _sort_out(row: Row, first: Value, end: Value, stream: int) -> None:
    """Tokens surely above the border get their noise, those that may be are listed."""
    sizes = row.sizes
    least, highest, surely, between = t.when(t.equal(row.scalar(MODE), FILTERED), lambda: _place(row), lambda: _take_all(row))
    row.put_all(SURE, surely)
    row.put_all(OWN, between)
    row.put_all(PLACE, _in_front(between))
    row.put(LISTED, t.reduce(between, "add", 0))
    settings = row.settings()
    fits = t.less_equal(row.scalar(LISTED), sizes.listed)

    def of_piece(piece: Value) -> None:
        one = replace(row, piece=piece)
        x, ids = one.logits(t.mul(piece, sizes.piece), sizes.piece), numbered(t.mul(piece, sizes.piece), sizes.piece)
        keys = ordered_f32(x)
        above = t.greater_equal(keys, t.broadcast(highest, 0, sizes.piece))
        one.put(SCORE, t.full([], LOWEST_SCORE), True)
        one.put(DRAWN, t.full([], 0, "i32"))
        t.when(t.greater(one.scalar(SURE), 0), lambda: _score(one, settings, x, ids, above, stream))

        def listed() -> None:
            chosen = t.bit_and(t.logical_not(above), t.greater_equal(keys, t.broadcast(least, 0, sizes.piece)))
            at, stop = t.add(t.mul(row.at, sizes.listed), one.scalar(PLACE)), t.mul(t.add(row.at, 1), sizes.listed)
            t.compress_store(x, chosen, row.bound.workspaces[4], at, stop)
            t.compress_store(ids, chosen, row.bound.workspaces[5], at, stop)

        t.when(t.greater(one.scalar(OWN), 0), lambda: t.when(fits, listed))

    t.loop(first, end, 1, [], of_piece)


def _in_front(counts: Value) -> Value:
    """Of each place the sum of all before it, i32 [n]."""
    (n,) = t.shape_of(counts)
    number = t.iota(n)
    before = t.less(t.broadcast(number, 0, n), t.broadcast(number, 1, n))
    return t.reduce(t.select(before, t.broadcast(counts, 0, n), 0), "add", 1)


def _score(row: Row, settings: Settings, x: Value, ids: Value, stays: Value, stream: int) -> None:
    scores = noisy(settings, x, ids, noise_key(row.operand(SEED), row.operand(POSITION), stream), stays)
    best = t.reduce(scores, "max", 0)
    row.put(SCORE, best, True)
    found = t.equal(scores, t.broadcast(best, 0, row.sizes.piece))
    row.put(DRAWN, t.reduce(t.select(found, ids, HIGHEST_ID), "min", 0))


def _take_all(row: Row) -> list[Value]:
    """All tokens of a row without a filter are above its border."""
    pieces = [row.sizes.pieces]
    return [t.full([], LOWEST_KEY, "i32"), t.full([], FIRST_KEY, "i32"), t.full(pieces, row.sizes.piece, "i32"), t.full(pieces, 0, "i32")]


def _place(row: Row) -> list[Value]:
    """The first level at which both filters are satisfied and the end of what is listed, and of each piece how many tokens are surely above and
    how many are listed. A list that stays short has all tokens from the level on, another only those between it and the level before."""
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

    def of_the_row() -> None:
        row.put(LEAST, least)
        row.put(END, end)
        row.put(ABOVE, t.cast(at(over, count, 0.0), "i32"))
        row.put(OVER, at(over, mass, 0.0), True)
        row.put(ALLOWED, allowed, True)
        _plan_search(row, least, end)

    t.when(t.equal(row.piece, 0), of_the_row)
    hopeless = t.less(t.mul(t.sub(f32_of(t.sub(end, 1)), settings.peak), settings.rate), HOPELESS)
    return [least, end, *_counted(row, counts, under, over, hopeless)]


def _plan_search(row: Row, least: Value, end: Value) -> None:
    """The border is one of end - least keys. Where those are too many for an i32 all keys are looked through."""
    wide = t.greater_equal(t.sub(t.cast(end, "f32"), t.cast(least, "f32")), WIDEST)
    length = t.bitcast(t.cast(t.maximum(t.sub(end, least), 1), "f32"), "i32")
    exponent = t.sub(t.shr_unsigned(length, 23), 127)  # 2^(exponent + 1) is more than the length
    unit = t.cast(t.bitcast(t.shl(t.add(t.minimum(exponent, 30), 127), 23), "f32"), "i32")
    row.put(START, t.select(wide, LOWEST_KEY, least))
    row.put(BITS, t.select(wide, WORD_BITS, t.add(exponent, 1)))
    row.put(UNIT, t.select(wide, LOWEST_KEY, unit))


def _counted(row: Row, counts: Value, under: Value, over: Value, hopeless: Value) -> tuple[Value, Value]:
    """Of every piece the tokens down to a level, and those from there down to another; none that cannot win."""
    sizes = row.sizes
    level = t.broadcast(t.iota(sizes.levels), 1, sizes.pieces)

    def line(which: Value) -> Value:
        """Counts of the pieces at a level, i32 [pieces]; none at -1."""
        here = t.equal(level, t.broadcast(t.broadcast(which, 0, sizes.levels), 1, sizes.pieces))
        return t.cast(t.reduce(t.select(here, counts, 0.0), "add", 0), "i32")

    surely = line(over)
    return surely, t.select(t.broadcast(hopeless, 0, sizes.pieces), 0, t.sub(line(under), surely))


def _allowed(settings: Settings, total: Value) -> Value:
    """The mass that may lie before the last token that stays, rank 0."""
    return t.select(t.less(settings.top_p, 1.0), t.mul(total, settings.top_p), HIGHEST_MASS)


def _finish(row: Row, stream: int) -> None:
    """Token and log-probability, where it is asked for, of a row from what the pieces found."""
    sizes, bound = row.sizes, row.bound
    peaks, mode = row.numbers(PEAK), row.scalar(MODE)
    peak = t.reduce(peaks, "max", 0)
    across = t.broadcast(peak, 0, sizes.pieces)
    tokens, loss = bound.results[0].values, _loss(row, peaks, across) if bound.results[1:] else None
    greedy = t.reduce(t.select(t.equal(peaks, across), row.numbers(GREEDY, False), HIGHEST_ID), "min", 0)

    def plain() -> None:
        row.put_token(tokens, greedy)
        if loss is not None:
            row.put_logprob(loss)

    def drawn() -> None:
        scores = row.numbers(SCORE)
        best = t.reduce(scores, "max", 0)
        found = t.equal(scores, t.broadcast(best, 0, sizes.pieces))
        drawn = t.reduce(t.select(found, row.numbers(DRAWN, False), HIGHEST_ID), "min", 0)
        surely = lambda: row.put_token(tokens, drawn)  # noqa: E731
        border = lambda: t.when(t.greater(row.scalar(LISTED), 0), lambda: _at_the_border(row, best, drawn, stream), surely)  # noqa: E731
        t.when(t.equal(mode, FILTERED), border, surely)
        if loss is not None:
            chosen = row.logits(t.scalar(tokens, row.at), 1)
            row.put_logprob(t.add(t.sub(t.reduce(chosen, "add", 0), peak), loss))

    t.when(t.greater(mode, PLAIN), drawn, plain)


def _loss(row: Row, peaks: Value, peak: Value) -> Value:
    """The log-probability of a token whose logit is the peak, rank 0."""
    bases = t.sub(t.maximum(peaks, LOWEST_SCORE), peak)
    return t.negate(t.log(t.reduce(t.mul(row.numbers(SUM), t.exp(bases)), "add", 0)))


def _at_the_border(row: Row, best: Value, drawn: Value, stream: int) -> None:
    """Of the tokens between two keys those that stay, with their noise; the best of them wins over `drawn` where it is above `best`."""
    sizes, settings, listed = row.sizes, row.settings(), row.scalar(LISTED)
    above, allowed, least = Above(row.get(ABOVE), row.get(OVER, True)), row.get(ALLOWED, True), row.get(LEAST)
    search = Search(row.get(START), row.scalar(BITS), row.get(UNIT), least)
    key, bits = noise_key(row.operand(SEED), row.operand(POSITION), stream), sizes.tokens.bit_length()

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


def _listed(row: Row, first: Value, size: int) -> tuple[Value, Value, Value]:
    """Logits, keys and ids of places of the list."""
    at = t.add(t.mul(row.at, row.sizes.listed), first)
    x, ids = (t.View(buffer, [None]).load([at], [size]) for buffer in row.bound.workspaces[4:6])
    there = t.less(numbered(first, size), t.splat(row.scalar(LISTED), [size]))
    return x, t.select(there, ordered_f32(x), LOWEST_KEY), ids


def _held_list(row: Row, size: int) -> Line:
    """The list, of at most `size` places, whose keys are held."""
    x, keys, ids = _listed(row, t.index(0), size)
    return Line(size, size, lambda _: x, lambda _: keys, lambda _: ids)


def _long_list(row: Row, block: int) -> Line:
    """The list, read again and again."""
    part: Callable[[int], Block] = lambda n: lambda first: _listed(row, first, block)[n]  # noqa: E731
    return Line(row.scalar(LISTED), block, *(part(n) for n in range(3)))


def _among_all(row: Row, least: Value, end: Value) -> Line:
    """The whole row, of which only the keys in [least, end) take part."""
    block = row.sizes.block

    def keys(first: Value) -> Value:
        found = ordered_f32(row.logits(first, block))
        inside = t.bit_and(t.greater_equal(found, t.broadcast(least, 0, block)), t.less(found, t.broadcast(end, 0, block)))
        return t.select(inside, found, LOWEST_KEY)

    return Line(row.sizes.tokens, block, lambda first: row.logits(first, block), keys, lambda first: numbered(first, block))
