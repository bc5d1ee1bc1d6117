"""A row of logits as the sampler sees it: sums and largest values over tokens, the border that the filters set, noise and scores.

Tokens are ranked by the bits of their logits, lowest id first among equals: the border is one bisection on those bits, and ranks are exact.
Masses are FP32 sums in one order. What is drawn when is left to `sampling` and `draw_pieces`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.kernel import Request
from tapeout.codegen.kernels.ordered_bits import LOWEST_KEY, WORD_BITS, f32_of, largest, largest_from, ordered_f32
from tapeout.codegen.row_values import Bound
from tapeout.dialects.sample import COOLEST

Value = Any
Block = Callable[[Value], Value]
"""A block of the row, as a function of its first place."""
HIGHEST_ID = 2**31 - 1
LOWEST_SCORE, HIGHEST_MASS = -3e38, 3e38
TEMPERATURE, TOP_K, TOP_P, SEED, POSITION = range(-5, 0)
"""Operands of a draw behind the logits."""
GOLDEN, OF_POSITION, FIRST_MIX, SECOND_MIX = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
WORD = 2**24
"""Numbers that the top 24 bits of a hash make."""


@dataclass(frozen=True)
class Line:
    """Places of one row: `places` of them in blocks of `block`; what a function of the first place gives is a tile [block].

    `load`: logits, f32. `keys`: integers in their order, LOWEST_KEY where a place takes no part. `ids`: token numbers, ascending.
    """

    places: int | Value
    block: int
    load: Block
    keys: Block
    ids: Block

    def sum(self, term: Block, kind: str = "f32") -> Value:
        """The sum of `term` over all places: blocks ascending, each place of a block by itself, then the places."""
        if self.places == self.block:
            return t.reduce(term(t.index(0)), "add", 0)
        step: Callable[[Value, Value], list[Value]] = lambda first, total: [t.add(total, term(first))]  # noqa: E731
        (lanes,) = t.loop(0, self.places, self.block, [t.full([self.block], 0, kind)], step)
        return t.reduce(lanes, "add", 0)

    def count(self, mask: Block) -> Value:
        """How many places a mask holds for."""
        return self.sum(lambda first: t.cast(mask(first), "i32"), "i32")

    def tally(self, mask: Block, weight: Block) -> tuple[Value, Value]:
        """How many places a mask holds for, and the sum of their weights."""

        def step(first: Value, count: Value, mass: Value) -> list[Value]:
            kept = mask(first)
            return [t.add(count, t.cast(kept, "i32")), t.add(mass, t.select(kept, weight(first), 0.0))]

        count, mass = (t.reduce(lane, "add", 0) for lane in self._walked("i32", step))
        return count, mass

    def tally_together(self, mask: Block, weight: Block) -> Value:
        """The same two numbers, f32 [2]: one sum instead of two that wait for each other."""

        def step(first: Value, count: Value, mass: Value) -> list[Value]:
            kept = mask(first)
            return [t.add(count, t.cast(kept, "f32")), t.add(mass, t.select(kept, weight(first), 0.0))]

        return t.reduce(t.pairs(*self._walked("f32", step)), "add", 0)

    def _walked(self, kind: str, step: Callable[..., list[Value]]) -> list[Value]:
        zeros = [t.full([self.block], 0, kind), t.full([self.block], 0.0)]
        return step(t.index(0), *zeros) if self.places == self.block else t.loop(0, self.places, self.block, zeros, step)

    def largest(self, score: Block) -> tuple[Value, Value]:
        """The largest score and the lowest token that has it."""

        def step(first: Value, best: Value, ids: Value) -> list[Value]:
            found = score(first)
            better = t.greater(found, best)
            return [t.select(better, found, best), t.select(better, self.ids(first), ids)]

        start = [t.full([self.block], LOWEST_SCORE), t.full([self.block], 0, "i32")]
        best, ids = t.loop(0, self.places, self.block, start, step)
        peak = t.reduce(best, "max", 0)
        return peak, t.reduce(t.select(t.equal(best, self.across(peak)), ids, HIGHEST_ID), "min", 0)

    def across(self, scalar: Value) -> Value:
        """A rank 0 tile for every place of a block."""
        return t.broadcast(scalar, 0, self.block)


def numbered(first: Value, count: int) -> Value:
    """first, first + 1, ..., i32 [count]."""
    return t.add(t.iota(count), t.splat(first, [count]))


def whole_line(places: int, block: int, load: Block) -> Line:
    """All tokens of a row."""
    return Line(places, block, load, lambda first: ordered_f32(load(first)), lambda first: numbered(first, block))


@dataclass(frozen=True)
class Base:
    """Logits that are a sum: of row `size` r + `step` of the first operand and row r of the second (model spec 7.2)."""

    size: int
    step: int


def base_of(request: Request) -> Base | None:
    """How the logits of a request are a sum; None where they are an operand."""
    if request.op == "sample.draw":
        return None
    place = request.of("dspark.correct")
    return Base(place["size"], place["step"])


def given_logits(bound: Bound, base: Base | None, row: Value, first: Value, count: int) -> Value:
    """Logits [first, first + count) of a row from the operands, f32 [count]."""
    if base is None:
        return bound.operands[0].line(row, first, count)
    return t.add(bound.operands[0].line(t.add(t.mul(row, base.size), base.step), first, count), bound.operands[1].line(row, first, count))


@dataclass(frozen=True)
class Cells:
    """Numbers of one row in memory: what a branch hands on, and conditions that a branch depends on."""

    buffer: Value
    first: Value

    def at(self, cell: int | Value) -> Value:
        return t.add(self.first, cell)

    def put(self, cell: int | Value, value: Value) -> None:
        """Stores a rank 0 tile."""
        t.View(self.buffer, [None]).store([self.at(cell)], value)

    def get(self, cell: int | Value) -> Value:
        """One number, rank 0."""
        return number_at(self.buffer, self.at(cell))

    def scalar(self, cell: int | Value) -> Value:
        """One number as an index."""
        return t.scalar(self.buffer, self.at(cell))

    def when(self, mask: Value, cell: int | Value, then: Callable[[], None]) -> None:
        """Runs `then` where a rank 0 mask holds; it passes through `cell`."""
        self.put(cell, t.cast(mask, "i32"))
        t.when(t.not_equal(self.scalar(cell), 0), then)


def number_at(buffer: Value, at: Value) -> Value:
    """One number of a buffer, rank 0."""
    return t.View(buffer, [None]).load([at], [])


@dataclass(frozen=True)
class Settings:
    """Of one row, rank 0: 1 / temperature, how many tokens may stay (1 to all), the share of mass before the last one, the peak."""

    rate: Value
    top_k: Value
    top_p: Value
    peak: Value

    def scaled(self, x: Value) -> Value:
        """(x - peak) / temperature."""
        count = t.shape_of(x)[0]
        return t.mul(t.sub(x, t.broadcast(self.peak, 0, count)), t.broadcast(self.rate, 0, count))

    def weight(self, x: Value) -> Value:
        """exp of it."""
        return t.exp(self.scaled(x))


def settings_of(temperature: Value, top_k: Value, top_p: Value, peak: Value, tokens: int) -> Settings:
    """A row's settings as they are used: a number of tokens below 1 means all."""
    kept = t.select(t.less(top_k, 1), tokens, t.minimum(top_k, tokens))
    return Settings(t.div(1.0, t.maximum(temperature, COOLEST)), kept, top_p, peak)


@dataclass(frozen=True)
class Above:
    """Tokens and mass above the places that are looked at, rank 0."""

    count: Value
    mass: Value


@dataclass(frozen=True)
class Search:
    """Where the border is looked for: among the 2^bits keys from `start` on; `unit` is 2^(bits - 1). It is none below `least`."""

    start: Value
    bits: Value
    unit: Value
    least: Value


def border_from(line: Line, above: Above, settings: Settings, allowed: Value, search: Search) -> tuple[Value, Value, Value]:
    """As `border`, where a range is known that the border lies in."""
    held = settings.weight(line.load(t.index(0))) if line.places == line.block else None
    weight: Block = lambda first: settings.weight(line.load(first)) if held is None else held  # noqa: E731
    offset = t.pairs(t.cast(above.count, "f32"), above.mass)
    needed = t.pairs(t.sub(t.cast(settings.top_k, "f32"), 0.5), allowed)

    def reaches(key: Value) -> Value:
        found = line.tally_together(lambda first: t.greater_equal(line.keys(first), line.across(key)), weight)
        passed = t.cast(t.greater(t.add(offset, found), needed), "i32")
        return t.bit_and(t.greater(t.reduce(passed, "max", 0), 0), t.greater(key, search.start))  # behind the last i32 keys start anew

    floor = t.maximum(largest_from(search.start, search.bits, search.unit, reaches), search.least)
    better, mass = line.tally(lambda first: t.greater(line.keys(first), line.across(floor)), weight)
    tied = line.count(lambda first: t.equal(line.keys(first), line.across(floor)))
    fitting = _fitting(settings, allowed, t.add(above.mass, mass), floor)
    return floor, t.minimum(t.minimum(t.sub(settings.top_k, t.add(above.count, better)), tied), fitting), tied


def _fitting(settings: Settings, allowed: Value, mass: Value, floor: Value) -> Value:
    """How many tokens of a key stay for their mass: one more than fit beside that of the tokens above."""
    each = t.exp(t.mul(t.sub(f32_of(floor), settings.peak), settings.rate))
    fitting = t.minimum(t.div(t.sub(allowed, mass), each), float(WORD))  # the quotient may be infinite; a NaN loses
    return t.add(t.cast(fitting, "i32"), 1)


def border(line: Line, settings: Settings, allowed: Value | None) -> tuple[Value, Value, Value]:
    """The least key that stays, how many stay at it, and how many there are, rank 0.

    `allowed` is the mass that may lie before the last token that stays; None: only the number counts.
    """
    held = settings.weight(line.load(t.index(0))) if allowed is not None and line.places == line.block else None
    weight: Block = lambda first: settings.weight(line.load(first)) if held is None else held  # noqa: E731

    def found(keep: Callable[[Value], Value]) -> tuple[Value, Value | None]:
        """Tokens and mass of the keys for which `keep` holds."""
        mask: Block = lambda first: keep(line.keys(first))  # noqa: E731
        return (line.count(mask), None) if allowed is None else line.tally(mask, weight)

    def reaches(key: Value) -> Value:
        count, mass = found(lambda keys: t.greater_equal(keys, line.across(key)))
        enough = t.greater_equal(count, settings.top_k)
        return enough if allowed is None else t.bit_or(enough, t.greater(mass, allowed))

    floor = largest(LOWEST_KEY, WORD_BITS, reaches)
    better, mass = found(lambda keys: t.greater(keys, line.across(floor)))
    tied = line.count(lambda first: t.equal(line.keys(first), line.across(floor)))
    stay = t.minimum(t.sub(settings.top_k, better), tied)
    return floor, stay if allowed is None else t.minimum(stay, _fitting(settings, allowed, mass, floor)), tied


def last_of(line: Line, floor: Value, stay: Value, bits: int) -> Value:
    """The id of the last of the `stay` tokens with the lowest ids among those at `floor`; ids have fewer than `bits` bits."""

    def tied_before(bound: Value) -> Value:
        tied: Block = lambda first: t.equal(line.keys(first), line.across(floor))  # noqa: E731
        return line.count(lambda first: t.bit_and(tied(first), t.less(line.ids(first), line.across(bound))))

    return largest(0, bits, lambda bound: t.less(tied_before(bound), stay))


def noise_key(seed: Value, position: Value, stream: int) -> Value:
    """The word that a row's noise comes from, i64 rank 0."""
    return _mix(t.bit_xor(seed, _mix(t.add(t.mul(t.cast(position, "i64"), _signed(OF_POSITION)), stream))))


def noisy(settings: Settings, x: Value, ids: Value, key: Value, stays: Value) -> Value:
    """Scaled logits plus the tokens' noise, LOWEST_SCORE for those that do not stay."""
    words = _mix(t.add(t.mul(t.cast(ids, "i64"), _signed(GOLDEN)), t.broadcast(key, 0, t.shape_of(x)[0])))
    return t.select(stays, t.add(settings.scaled(x), noise(words)), LOWEST_SCORE)


def noise(words: Value) -> Value:
    """-log(-log u) for u = (n + 1/2) 2^-24, n the top 24 bits of a word; the half of u that f32 cannot hold is reached from 1 - u."""
    n = t.cast(t.shr_unsigned(words, 40), "i32")
    small = t.less(n, WORD // 2)
    near = t.mul(t.add(t.cast(t.select(small, n, t.sub(WORD - 1, n)), "f32"), 0.5), 1.0 / WORD)
    return t.negate(t.log(t.negate(t.select(small, t.log(near), t.log1p(t.negate(near))))))


def _mix(x: Value) -> Value:
    """The finaliser of SplitMix64 on i64 words."""
    for shift, factor in ((30, FIRST_MIX), (27, SECOND_MIX)):
        x = t.mul(t.bit_xor(x, t.shr_unsigned(x, shift)), _signed(factor))
    return t.bit_xor(x, t.shr_unsigned(x, 31))


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
