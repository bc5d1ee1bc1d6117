"""What the launches of a draw in pieces leave for each other: lines of numbers a row, a number a piece each, levels, and a list of tokens.

Sizes of a row are the schedule's. What is found and when is `draw_pieces`'.
"""

from dataclasses import dataclass
from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.kernel import Workspace
from tapeout.codegen.kernels.drawn_rows import TEMPERATURE, TOP_K, TOP_P, Base, Settings, given_logits, number_at, settings_of
from tapeout.codegen.row_values import Bound

Value = Any
PEAK, SUM, BELOW, LIVE, SQUARES, SCORE, OVER, ALLOWED, REAL_LINES = range(9)
"""Lines of a row's f32 workspace, a number a piece each. BELOW: the sum of logits less the peak; LIVE: of how many; SQUARES: of their squares;
OVER: the mass of tokens surely above the border; ALLOWED: the mass that may lie before the last token that stays."""
GREEDY, DRAWN, MODE, LEAST, END, ABOVE, SURE, OWN, PLACE, LISTED, START, BITS, UNIT, FLAG, STAY, FLOOR, LAST, LINES = range(18)
"""Lines of its i32 workspace. MODE: what a row asks for; LEAST, END: keys between which its border lies; ABOVE: tokens from END on; SURE, OWN:
tokens of a piece from END on, and between the two; PLACE, LISTED: where a piece's part of the list begins, how long the list is; START, BITS,
UNIT: the search for the border (`drawn_rows.Search`); FLAG: a condition; STAY, FLOOR, LAST: how many tokens stay at the border, their key, the id
of the last of them."""
PLAIN, HOT, FILTERED = range(3)
SUMMED = 6
"""Workspace of the logits of rows that have a temperature, where operands give them as a sum."""
LONGEST_HELD, SHORTER = 16384, (8, 2)
"""Places of the longest list that is held in registers; one that fills no more than one in so many of them takes fewer."""


@dataclass(frozen=True)
class Sizes:
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
class Row:
    """One row in one launch; `piece` is the piece's number, 0 where a launch has whole rows. `base`: how its logits are a sum, if they are."""

    sizes: Sizes
    bound: Bound
    at: Value
    piece: Value
    base: Base | None

    def numbers(self, line: int | Value, real: bool = True) -> Value:
        """A line of a workspace, [pieces]."""
        lines, buffer = self._lines(real)
        return t.View(buffer, [None, self.sizes.pieces]).load([t.add(t.mul(self.at, lines), line), 0], [self.sizes.pieces])

    def levels(self) -> tuple[Value, Value, Value]:
        """What is known at each level: its key, and counts and masses of the pieces, f32 [levels, pieces]."""
        first, (levels, pieces) = t.mul(self.at, self.sizes.levels), (self.sizes.levels, self.sizes.pieces)
        table, keys = t.View(self.bound.workspaces[3], [None, 2 * pieces]), t.View(self.bound.workspaces[2], [None])
        return keys.load([first], [levels]), table.load([first, 0], [levels, pieces]), table.load([first, pieces], [levels, pieces])

    def put_key(self, number: int, key: Value) -> None:
        """The key of a level."""
        t.View(self.bound.workspaces[2], [None]).store([t.add(t.mul(self.at, self.sizes.levels), number)], key)

    def put_level(self, number: int, sums: Value) -> None:
        """Counts and masses of the piece at or above levels from `number` on, f32: count, mass, count, mass."""
        at, table = t.add(t.mul(self.at, self.sizes.levels), number), t.View(self.bound.workspaces[3], [None, self.sizes.pieces])
        table.store([t.mul(at, 2), self.piece], t.split_last(sums, 1))

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

    def put_all(self, line: int, values: Value) -> None:
        """The numbers of all pieces; instances that share a row write the same."""
        t.View(self.bound.workspaces[1], [None, self.sizes.pieces]).store([t.add(t.mul(self.at, LINES), line), 0], values)

    def get(self, line: int, real: bool = False) -> Value:
        return number_at(self._lines(real)[1], self.own(line, real))

    def scalar(self, line: int) -> Value:
        return t.scalar(self._lines(False)[1], self.own(line))

    def given(self) -> Value:
        """The piece's logits as the operands give them."""
        return given_logits(self.bound, self.base, self.at, t.mul(self.piece, self.sizes.piece), self.sizes.piece)

    def keep(self, x: Value) -> None:
        """Leaves the piece's logits for the next launches."""
        self._kept().store([self.at, t.mul(self.piece, self.sizes.piece)], x)

    def logits(self, first: Value, count: int) -> Value:
        """Logits of a row that has a temperature, behind the first launch."""
        if self.base is None:
            return given_logits(self.bound, None, self.at, first, count)
        return self._kept().load([self.at, first], [count])

    def _kept(self) -> Any:
        return t.View(self.bound.workspaces[SUMMED], [None, self.sizes.tokens])

    def operand(self, number: int) -> Value:
        return number_at(self.bound.operands[number].values, self.at)

    def settings(self) -> Settings:
        peak = t.reduce(self.numbers(PEAK), "max", 0)
        return settings_of(self.operand(TEMPERATURE), self.operand(TOP_K), self.operand(TOP_P), peak, self.sizes.tokens)

    def put_token(self, results: Value, token: Value) -> None:
        """Stores the row's token. Where logits are NaN none may have been found: some token of the vocabulary then, as others read rows by it."""
        t.View(results, [None]).store([self.at], t.maximum(t.minimum(token, self.sizes.tokens - 1), 0))

    def put_logprob(self, value: Value) -> None:
        t.View(self.bound.results[1].values, [None]).store([self.at], value)

    def _lines(self, real: bool) -> tuple[int, Value]:
        return (REAL_LINES, self.bound.workspaces[0]) if real else (LINES, self.bound.workspaces[1])


def workspaces(sizes: Sizes, base: Base | None) -> tuple[Workspace, ...]:
    """Scratch of a draw, so much for every row."""
    pieces, sums = sizes.pieces, [] if base is None else [("f32", sizes.tokens)]
    cells = [("f32", REAL_LINES * pieces), ("i32", LINES * pieces), ("i32", sizes.levels), ("f32", 2 * sizes.levels * pieces),
             ("f32", sizes.listed), ("i32", sizes.listed), *sums]  # fmt: skip
    return tuple(_workspace(kind, size) for kind, size in cells)


def _workspace(kind: str, size: int) -> Workspace:
    return Workspace(kind, lambda rows: rows * size)
