"""Positions as linear forms of loop counters, so that `/` and `%` of reshapes vanish and invariant parts can be hoisted.

An `Index` is constant + sum of coefficient * counter. Every counter knows its range and the loop depth it lives at.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Counter:
    """A run-time value in [0, extent), computed at loop depth `depth`; `extent` 0 means unbounded. Equal only to itself."""

    value: Any
    depth: int
    extent: int
    serial: int


@dataclass(frozen=True)
class Index:
    """constant + sum of coefficient * counter."""

    constant: int = 0
    terms: tuple[tuple[Counter, int], ...] = ()

    def __add__(self, other: "Index | int") -> "Index":
        other = number(other) if isinstance(other, int) else other
        sums = dict(self.terms)
        for counter, factor in other.terms:
            sums[counter] = sums.get(counter, 0) + factor
        kept = sorted(((c, f) for c, f in sums.items() if f), key=lambda term: term[0].serial)
        return Index(self.constant + other.constant, tuple(kept))

    def __mul__(self, factor: int) -> "Index":
        if factor == 0:
            return Index()
        return Index(self.constant * factor, tuple((c, f * factor) for c, f in self.terms))

    @property
    def depth(self) -> int:
        """The loop depth the value is known at."""
        return max((c.depth for c, _ in self.terms), default=0)

    @property
    def limit(self) -> int | None:
        """An exclusive upper bound of a form without negative factors; None where there is none."""
        if any(f < 0 or c.extent == 0 for c, f in self.terms) or self.constant < 0:
            return None
        return self.constant + sum((c.extent - 1) * f for c, f in self.terms) + 1

    def split(self, divisor: int) -> "tuple[Index, Index] | None":
        """(quotient, remainder) by a positive divisor where both are linear forms again, else None."""
        high = Index(self.constant // divisor, tuple((c, f // divisor) for c, f in self.terms if f % divisor == 0))
        low = Index(self.constant % divisor, tuple((c, f) for c, f in self.terms if f % divisor))
        return (high, low) if low.limit is not None and low.limit <= divisor else None


def number(value: int) -> Index:
    """A constant index."""
    return Index(value)
