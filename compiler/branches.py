"""Which earlier launches of a program a launch has to wait for: those that wrote what it reads, and those that still read or wrote what it
overwrites. A device that can run launches side by side needs no more order than that. A line of launches, each behind the one before, may have
some beside it: these wait for what they must, and the line does for them where it uses what they made.

Waits are written as distances back (1: the launch before), without those that follow from others.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Ref = tuple[Any, ...]
Place = tuple[Ref, int]
"""A buffer of a program and its bytes; bytes count in the arena only, a named value is one thing."""
ARENA = "arena"


@dataclass
class _Bytes:
    """Arena bytes [start, end), who wrote them last and who has read them since."""

    start: int
    end: int
    writer: int | None
    readers: list[int] = field(default_factory=list)

    def part(self, start: int, end: int) -> "_Bytes":
        return _Bytes(start, end, self.writer, list(self.readers))


class Branches:
    """The launches of one program so far; `add` takes the next one. `in_line`: each also waits for the one before, but for those beside the line."""

    def __init__(self, *, in_line: bool = False) -> None:
        self._in_line = in_line
        self._last: set[int] = set()  # of the line
        self._arena: list[_Bytes] = []
        self._named: dict[Ref, _Bytes] = {}
        self._behind: list[int] = []  # for each launch, the set of those before it, as bits

    def add(self, reads: Iterable[Place], writes: Iterable[Place], *, beside: bool = False) -> tuple[int, ...]:
        """Distances to the launches that the next one waits for."""
        number, waits, read, written = len(self._behind), set[int](), list(reads), list(writes)
        if self._in_line and not beside:
            waits, self._last = self._last, {number}
        for ref, size in read:
            for found in self._found(ref, size):
                waits |= set() if found.writer is None else {found.writer}
        for ref, size in written:
            for found in self._found(ref, size):
                waits |= {*found.readers} | (set() if found.writer is None else {found.writer})
        for ref, size in read:
            for found in self._found(ref, size):
                found.readers.append(number)
        for ref, size in written:
            self._write(ref, size, number)
        return self._shortest(number, waits - {number})

    def _shortest(self, number: int, waits: set[int]) -> tuple[int, ...]:
        chosen, behind = [], 0
        for wait in sorted(waits, reverse=True):
            if not behind >> wait & 1:
                chosen.append(number - wait)
                behind |= self._behind[wait] | 1 << wait
        self._behind.append(behind)
        return tuple(chosen)

    def _found(self, ref: Ref, size: int) -> list[_Bytes]:
        """What is known of the bytes of a buffer, cut at its ends."""
        if ref[0] != ARENA:
            return [self._named.setdefault(ref, _Bytes(0, 1, None))]
        first, last = self._cut(ref[1]), self._cut(ref[1] + size)
        end, tiles = ref[1], []
        for found in self._arena[first:last]:
            tiles += [_Bytes(end, found.start, None)] if end < found.start else []
            tiles.append(found)
            end = found.end
        tiles += [_Bytes(end, ref[1] + size, None)] if end < ref[1] + size else []
        self._arena[first:last] = tiles
        return tiles

    def _cut(self, at: int) -> int:
        """Where bytes that start at `at` or behind it begin in the list; bytes that `at` lies inside of are cut in two."""
        place = bisect_left(self._arena, at, key=lambda b: b.start)
        before = self._arena[place - 1] if place else None
        if before is not None and before.end > at:
            self._arena[place - 1 : place] = [before.part(before.start, at), before.part(at, before.end)]
        return place

    def _write(self, ref: Ref, size: int, number: int) -> None:
        """Makes a launch the last writer of a buffer's bytes."""
        for found in self._found(ref, size):
            found.writer, found.readers = number, []
