"""`sample.draw`: greedy, or nucleus and top-k with keyed noise, on rows of logits in memory.

Tokens are ranked by the bits of their logits, lowest id first among equals: the filters are bisections on those bits, and ranks are exact.
Masses are FP32 sums in one order: a token stands on the other side of the top_p border than in real arithmetic only where the mass before
it is within V * 2^-23 of top_p.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.kernel import Kernel, Request, Schedule, Workspace, family, width
from tapeout.codegen.kernels.ordered_bits import LOWEST_KEY, WORD_BITS, f32_of, largest, ordered_f32
from tapeout.codegen.row_values import Rows, bind, row_count
from tapeout.dialects.sample import COOLEST
from tapeout.dialects.types import Tensor

Value = Any
Block = Callable[[Value], Value]
"""A block of the row, as a function of its first token."""
HIGHEST_ID = 2**31 - 1
LOWEST_SCORE = -3e38
GOLDEN, OF_POSITION, FIRST_MIX, SECOND_MIX = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
WORD = 2**24
"""Numbers that the top 24 bits of a hash make."""
CELLS = 4
FLAG, LIMIT, FLOOR, LAST = range(CELLS)
"""Scratch of a row: a condition; how many tokens stay; the least key of them, and the last id that stays at that key."""


@dataclass(frozen=True)
class _Row:
    """One row of logits: `load(first)` is an f32 tile [block] from token `first` on; `peak` is its largest logit, rank 0."""

    tokens: int
    block: int
    load: Block
    peak: Value = None

    def sum(self, term: Block, kind: str = "f32") -> Value:
        """The sum of `term` over all tokens: blocks ascending, each place of a block by itself, then the places."""
        step: Callable[[Value, Value], list[Value]] = lambda first, total: [t.add(total, term(first))]  # noqa: E731
        (lanes,) = t.loop(0, self.tokens, self.block, [t.full([self.block], 0, kind)], step)
        return t.reduce(lanes, "add", 0)

    def count(self, mask: Block) -> Value:
        """How many tokens a mask holds for."""
        return self.sum(lambda first: t.cast(mask(first), "i32"), "i32")

    def largest(self, score: Block) -> tuple[Value, Value]:
        """The largest score and the lowest token that has it."""

        def step(first: Value, best: Value, ids: Value) -> list[Value]:
            found = score(first)
            better = t.greater(found, best)
            return [t.select(better, found, best), t.select(better, self.ids(first), ids)]

        start = [t.full([self.block], LOWEST_SCORE), t.full([self.block], 0, "i32")]
        best, ids = t.loop(0, self.tokens, self.block, start, step)
        peak = t.reduce(best, "max", 0)
        return peak, t.reduce(t.select(t.equal(best, self.across(peak)), ids, HIGHEST_ID), "min", 0)

    def across(self, scalar: Value) -> Value:
        """A rank 0 tile for every place of a block."""
        return t.broadcast(scalar, 0, self.block)

    def keys(self, first: Value) -> Value:
        """Integers in the order of the logits."""
        return ordered_f32(self.load(first))

    def ids(self, first: Value) -> Value:
        """The token numbers of a block."""
        return t.add(t.iota(self.block), t.splat(first, [self.block]))

    def scaled(self, first: Value, cold: Value) -> Value:
        """(x - peak) / temperature."""
        return t.div(t.sub(self.load(first), self.across(self.peak)), self.across(cold))


@dataclass(frozen=True)
class _Cells:
    """Scratch of one row in memory: what a branch hands on, and tiles of one number that a branch depends on."""

    buffer: Value
    row: Value

    def at(self, cell: int) -> Value:
        return t.add(t.mul(self.row, CELLS), cell)

    def put(self, cell: int, value: Value) -> None:
        t.View(self.buffer, [None]).store([self.at(cell)], value)

    def get(self, cell: int) -> Value:
        return _cell(self.buffer, self.at(cell))

    def when(self, mask: Value, then: Callable[[], None]) -> None:
        """Runs `then` where a rank 0 mask holds."""
        self.put(FLAG, t.cast(mask, "i32"))
        t.when(t.not_equal(t.scalar(self.buffer, self.at(FLAG)), 0), then)


def _cell(buffer: Value, at: Value) -> Value:
    """One number of a buffer, rank 0."""
    return t.View(buffer, [None]).load([at], [])


def _cannot_draw(request: Request) -> str | None:
    logits = request.operands[0]
    if not isinstance(logits, Tensor) or logits.number.element not in ("bf16", "f32"):
        return f"logits is {logits}, this kernel draws from BF16 or FP32 logits"
    return None


@family("sample.draw", refuses=_cannot_draw)
def draw(request: Request, schedule: Schedule) -> Kernel:
    """Tokens [?] and their log-probabilities under the plain softmax of logits [?, V]. Grid: rows (model spec 8.2)."""
    n, block = width(request.operands[0]), schedule["block_columns"]

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        at, logits = t.program_id(0), b.operands[0]
        load: Block = lambda first: t.cast(t.View(logits.values, [None, n]).load([at, first], [block]), "f32")  # noqa: E731
        peak, greedy = _Row(n, block, load).largest(load)
        row, cells = _Row(n, block, load, peak), _Cells(b.workspaces[0], at)
        token = t.View(b.results[0].values, [None])
        token.store([at], greedy)
        temperature = _cell(b.operands[1].values, at)

        def drawn() -> None:
            token.store([at], _drawn(row, cells, at, temperature, b.operands[2:], request["stream"]))

        cells.when(t.greater(temperature, 0.0), drawn)
        chosen = t.cast(_cell(logits.values, t.add(t.mul(at, n), t.scalar(b.results[0].values, at))), "f32")
        total = row.sum(lambda first: t.exp(t.sub(load(first), row.across(peak))))
        t.View(b.results[1].values, [None]).store([at], t.sub(t.sub(chosen, peak), t.log(total)))

    order = f"row: blocks of {block} tokens ascending, each place by itself, then the places"
    return Kernel(body, lambda *b: [row_count(b)], order, workspaces=(Workspace("i32", lambda rows: CELLS * rows),))


def _drawn(row: _Row, cells: _Cells, at: Value, temperature: Value, operands: Sequence[Rows], stream: int) -> Value:
    """The token with the largest scaled logit plus noise, of those that both filters leave."""
    top_k, top_p, seeds, positions = (_cell(x.values, at) for x in operands)
    cold = t.maximum(temperature, COOLEST)
    top_k = t.select(t.less(top_k, 1), row.tokens, t.minimum(top_k, row.tokens))
    _keep_all(cells, top_k)
    cells.when(t.less(top_p, 1.0), lambda: cells.put(LIMIT, t.minimum(top_k, _nucleus(row, cold, top_p))))
    cells.when(t.less(cells.get(LIMIT), row.tokens), lambda: _cut(row, cells))
    floor, last = cells.get(FLOOR), cells.get(LAST)
    key = _mix(t.bit_xor(seeds, _mix(t.add(t.mul(t.cast(positions, "i64"), _signed(OF_POSITION)), stream))))

    def score(first: Value) -> Value:
        found, ids = row.keys(first), row.ids(first)
        tied = t.bit_and(t.equal(found, row.across(floor)), t.less_equal(ids, row.across(last)))
        stays = t.bit_or(t.greater(found, row.across(floor)), tied)
        words = _mix(t.add(t.mul(t.cast(ids, "i64"), _signed(GOLDEN)), row.across(key)))
        return t.select(stays, t.add(row.scaled(first, cold), _noise(words)), LOWEST_SCORE)

    return row.largest(score)[1]


def _keep_all(cells: _Cells, limit: Value) -> None:
    cells.put(LIMIT, limit)
    cells.put(FLOOR, t.full([], LOWEST_KEY, "i32"))
    cells.put(LAST, t.full([], HIGHEST_ID, "i32"))


def _nucleus(row: _Row, cold: Value, top_p: Value) -> Value:
    """How many of the best tokens have at most top_p of the mass before them, at least 1, rank 0."""
    weight: Block = lambda first: t.exp(row.scaled(first, cold))  # noqa: E731
    allowed = t.mul(row.sum(weight), top_p)

    def mass(keep: Block) -> Value:
        return row.sum(lambda first: t.select(keep(row.keys(first)), weight(first), 0.0))

    def reaches(key: Value) -> Value:
        return t.greater(mass(lambda keys: t.greater_equal(keys, row.across(key))), allowed)

    border = largest(LOWEST_KEY, WORD_BITS, reaches)
    above: Block = lambda keys: t.greater(keys, row.across(border))  # noqa: E731
    better = row.count(lambda first: above(row.keys(first)))
    tied = row.count(lambda first: t.equal(row.keys(first), row.across(border)))
    each = t.exp(t.div(t.sub(f32_of(border), row.peak), cold))
    fitting = t.minimum(t.div(t.sub(allowed, mass(above)), each), float(WORD))  # the quotient may be infinite; a NaN loses
    return t.maximum(t.add(better, t.minimum(t.add(t.cast(fitting, "i32"), 1), tied)), 1)


def _cut(row: _Row, cells: _Cells) -> None:
    """The LIMIT best tokens exactly: the least key among them, and the last id that stays at it."""
    limit = cells.get(LIMIT)

    def reaches(key: Value) -> Value:
        return t.greater_equal(row.count(lambda first: t.greater_equal(row.keys(first), row.across(key))), limit)

    floor = largest(LOWEST_KEY, WORD_BITS, reaches)
    left = t.sub(limit, row.count(lambda first: t.greater(row.keys(first), row.across(floor))))

    def tied_before(bound: Value) -> Value:
        tied: Block = lambda first: t.equal(row.keys(first), row.across(floor))  # noqa: E731
        return row.count(lambda first: t.bit_and(tied(first), t.less(row.ids(first), row.across(bound))))

    cells.put(FLOOR, floor)
    cells.put(LAST, largest(0, row.tokens.bit_length(), lambda bound: t.less(tied_before(bound), left)))


def _noise(words: Value) -> Value:
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
