"""Lists of keys in memory: what is kept of a row so far and what is new, and the best of both, exactly.

A key is a score with its place behind it in the low bits: no two are equal, one bisection finds the border, and ties go to the lowest place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.kernels.ordered_bits import LOWEST_KEY, largest

Value = Any
SCORE_BITS = 16
HELD_TILE = 4096
"""Keys of a tile of a list that is read once."""


@dataclass(frozen=True)
class KeyList:
    """Two halves of the workspace for one list: keys and what they stand for, `kept` best ones first, then up to `new` of a chunk. A half of
    at most `held` places is read once for the whole search of its border."""

    keys: Value
    values: Value
    base: Value
    kept: int
    new: int
    block: int
    held: int = 0

    @property
    def half(self) -> int:
        """Cells of one half: whole blocks may be read and one block of lowest keys stands behind the last."""
        return (-(-(self.kept + self.new) // self.block) + 1) * self.block

    @property
    def place_bits(self) -> int:
        """Low bits of a key that hold its place, counted down."""
        return (self.kept + self.new).bit_length()

    def cells(self, buffer: Value) -> Any:
        return t.View(buffer, [None])

    def key(self, score: Value, place: Value) -> Value:
        """Keys of scores at `place`, `place` + 1, ... of a half."""
        count = t.shape_of(score)[0]
        down = t.sub((1 << self.place_bits) - 1, t.add(t.iota(count), t.splat(place, [count])))
        return t.bit_or(t.shl(score, self.place_bits), down)

    def score(self, key: Value) -> Value:
        """The score of a key."""
        return t.shr(key, self.place_bits)

    def blocks(self, half: Value, total: Value, step: Callable[..., Any], start: list[Value]) -> list[Value]:
        """Runs step(first place, keys, *carried) over the blocks of a half that hold its first `total` places."""
        load: Callable[[Value], Value] = lambda first: self.cells(self.keys).load([t.add(half, first)], [self.block])  # noqa: E731
        return t.loop(0, total, self.block, start, lambda first, *carried: step(first, load(first), *carried))


    def whole(self, half: Value, total: Value) -> list[Value]:
        """The keys of a half, below all others behind its first `total` places, in tiles: those of one size first."""
        places, found = self.kept + self.new, []
        for first in range(0, places, HELD_TILE):
            size, end = min(HELD_TILE, places - first), t.add(half, total)
            keys = self.cells(self.keys).load([t.add(half, first)], [size], extent=end)
            inside = t.less(t.add(t.iota(size), first), t.splat(total, [size]))
            found.append(t.select(inside, keys, LOWEST_KEY))
        return found


def _count(tiles: list[Value], least: Value) -> Value:
    """How many keys are at least `least`; tiles of one size share their sum over places."""
    counts: dict[int, Value] = {}
    for keys in tiles:
        (size,) = t.shape_of(keys)
        lanes = t.cast(t.greater_equal(keys, t.broadcast(least, 0, size)), "i32")
        counts[size] = t.add(counts[size], lanes) if size in counts else lanes
    total, *others = (t.reduce(lanes, "add", 0) for lanes in counts.values())
    return t.add(total, others[0]) if others else total


def keep_best(full: KeyList, half: Value, total: Value, other: Value) -> None:
    """Moves the `kept` best of the first `total` places of a half to the start of the other, in order; `total` is at least `kept`."""
    full.cells(full.keys).store([t.add(half, total)], t.full([full.block], LOWEST_KEY, "i32"))

    at_once = full.whole(half, total) if full.kept + full.new <= full.held else None

    def reaches(candidate: Value) -> Value:
        if at_once is not None:
            return t.greater_equal(_count(at_once, candidate), full.kept)
        least = t.broadcast(candidate, 0, full.block)
        at_least = lambda _, keys, lanes: [t.add(lanes, t.cast(t.greater_equal(keys, least), "i32"))]  # noqa: E731
        (lanes,) = full.blocks(half, total, at_least, [t.full([full.block], 0, "i32")])
        return t.greater_equal(t.reduce(lanes, "add", 0), full.kept)

    bits = SCORE_BITS + full.place_bits
    border = t.broadcast(largest(-(1 << (bits - 1)), bits, reaches), 0, full.block)

    def move(first: Value, keys: Value, count: Value) -> list[Value]:
        stays, at, end = t.greater_equal(keys, border), t.add(other, count), t.add(other, full.kept)
        values = full.cells(full.values).load([t.add(half, first)], [full.block])
        t.compress_store(values, stays, full.values, at, end)
        return [t.add(count, t.compress_store(keys, stays, full.keys, at, end))]

    full.blocks(half, total, move, [t.index(0)])
    _number_places(full, other)


def _number_places(full: KeyList, half: Value) -> None:
    """Gives the kept keys the places that they have now."""

    def step(first: Value, keys: Value) -> None:
        full.cells(full.keys).store([t.add(half, first)], full.key(full.score(keys), first), extent=t.add(half, full.kept))

    full.blocks(half, full.kept, step, [])
