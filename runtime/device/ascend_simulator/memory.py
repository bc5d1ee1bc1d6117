"""Memories of one AI core and typed views of them; every view knows the extent of the buffer it was cut from and stays inside it.

Where the iterations of a loop run at once, an offset is a `Linear` function of their counters, and a view's array has leading axes for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import prod
from typing import Any

import numpy as np

UNIFIED_BYTES, L1_BYTES, L0C_BYTES, ALIGNMENT = 253_952, 524_288, 262_144, 32
"""Local memories of a core of architecture dav-c310, and where copies start in them."""
POISON = 0xFF
"""Bytes of memory that nothing has written: NaN in every float type, -1 in every integer."""

Bytes = np.ndarray[Any, Any]


class SimulationError(Exception):
    """A program that reads or writes where it may not, waits forever, or holds an op whose meaning is not known here."""


class Linear:
    """start + sum of coefficients times counters; counter i runs from 0 below counts[i], the outermost loop first."""

    __slots__ = ("coefficients", "counts", "start")

    def __init__(self, start: int, coefficients: tuple[int, ...], counts: tuple[int, ...]) -> None:
        self.start, self.coefficients, self.counts = start, coefficients, counts

    def __add__(self, other: Any) -> "Linear":
        if not isinstance(other, Linear):
            return Linear(self.start + int(other), self.coefficients, self.counts)
        coefficients = zip_longest(self.coefficients, other.coefficients, fillvalue=0)
        counts = zip_longest(self.counts, other.counts, fillvalue=1)
        return Linear(self.start + other.start, tuple(a + b for a, b in coefficients), tuple(max(a, b) for a, b in counts))

    __radd__ = __add__

    def __mul__(self, other: Any) -> "Linear":
        factor = int(other)
        return Linear(self.start * factor, tuple(c * factor for c in self.coefficients), self.counts)

    __rmul__ = __mul__

    def __sub__(self, other: Any) -> "Linear":
        return self.__add__(other * -1)

    def __rsub__(self, other: Any) -> "Linear":
        return self.__mul__(-1).__add__(other)

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the largest value."""
        low = high = self.start
        for c, n in zip(self.coefficients, self.counts, strict=True):
            low, high = low + min(0, c * (n - 1)), high + max(0, c * (n - 1))
        return low, high

    def axes(self, level: int) -> tuple[list[int], list[int]]:
        """Extents and strides of the leading axes of what lies here, seen from `level` loops: 1 where a loop does not move it."""
        extents, strides = [1] * level, [0] * level
        for axis, (c, n) in enumerate(zip(self.coefficients, self.counts, strict=True)):
            if c:
                extents[axis], strides[axis] = n, c
        return extents, strides

    def values(self, level: int) -> Any:
        """All values, int64, with `level` axes."""
        extents, strides = self.axes(level)
        found = np.full([1] * level, self.start, np.int64)
        for axis, (n, stride) in enumerate(zip(extents, strides, strict=True)):
            found = found + (np.arange(n) * stride).reshape([n if a == axis else 1 for a in range(level)])
        return found


class View:
    """`shape` elements of `dtype` in `memory` (bytes) from element `offset` on. Elements [low, high) are its buffer, which `base` counts from.

    `twins` holds the unified buffers of both vector cores, where the cube core sees one. Views are not changed once made; a simulated kernel
    makes hundreds of thousands, hence slots and no dataclass.
    """

    __slots__ = ("base", "dtype", "high", "low", "memory", "offset", "shape", "space", "strides", "twins")

    def __init__(
        self, memory: Bytes, dtype: Any, offset: Any, shape: Sequence[int], strides: Sequence[int], space: str, low: int, high: int, base: int,
        twins: tuple[Bytes, ...] = (),
    ) -> None:  # fmt: skip
        self.memory, self.dtype, self.offset, self.shape, self.strides = memory, dtype, offset, tuple(shape), tuple(strides)
        self.space, self.low, self.high, self.base, self.twins = space, low, high, base, twins

    def moved(self, offset: Any, shape: Sequence[int], strides: Sequence[int]) -> "View":
        """Another window of the same buffer."""
        return View(self.memory, self.dtype, offset, shape, strides, self.space, self.low, self.high, self.base, self.twins)

    def of(self, memory: Bytes) -> "View":
        """The same window of another memory."""
        return View(memory, self.dtype, self.offset, self.shape, self.strides, self.space, self.low, self.high, self.base, self.twins)

    def array(self, level: int = 0) -> Any:
        """The elements, writable in place, behind `level` axes of loops where the offset moves; raises `SimulationError` where one lies
        outside the buffer."""
        shape, offset, size = self.shape, self.offset, self.dtype.itemsize
        if 0 in shape:
            return np.empty(shape, self.dtype)
        steps = [s * size for s in self.strides]
        if offset.__class__ is Linear:
            first, last = offset.bounds
            extents, strides = offset.axes(level)
            start = offset.start
            lead, steps = (*extents, *shape), [*(s * size for s in strides), *steps]
        else:
            first = last = start = offset
            lead = shape
        for n, stride in zip(shape, self.strides, strict=True):
            if stride > 0:
                last += (n - 1) * stride
            else:
                first += (n - 1) * stride
        if first < self.low or last >= self.high:
            raise SimulationError(f"access outside its buffer in {self.space}: elements {first} to {last} of {self.dtype}, "
                                  f"the buffer holds {self.low} to {self.high - 1}")
        return np.ndarray(lead, self.dtype, self.memory, start * size, steps)

    def flat(self) -> Any:
        """The whole buffer from `base` on, for accesses by computed position."""
        return self.moved(self.base, [self.high - self.base], [1]).array()


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def whole(memory: Bytes, dtype: Any, shape: Sequence[int], space: str, first: int = 0) -> View:
    """A contiguous view that is its own buffer."""
    return View(memory, dtype, first, tuple(shape), row_major(shape), space, first, first + prod(shape), first)


def _memory(size: int) -> Bytes:
    return np.full(size, POISON, np.uint8)


@dataclass
class AiCore:
    """Local memories of a cube core with its two vector cores, and the signals between them."""

    unified: tuple[Bytes, Bytes] = field(default_factory=lambda: (_memory(UNIFIED_BYTES), _memory(UNIFIED_BYTES)))
    l1: Bytes = field(default_factory=lambda: _memory(L1_BYTES))
    l0c: Bytes = field(default_factory=lambda: _memory(L0C_BYTES))
    signals: dict[tuple[str, int, int], int] = field(default_factory=dict)

    def reset(self) -> "AiCore":
        """As no block has used it."""
        for memory in (*self.unified, self.l1, self.l0c):
            memory.fill(POISON)
        self.signals.clear()
        return self


@dataclass
class Core:
    """One running core: `kind` cube or vector, `number` 0 or 1 among the vector cores, `block` the launch instance."""

    kind: str
    number: int
    block: int
    shared: AiCore
    pause: Any = None
    predicates: dict[tuple[str, int], Bytes] = field(default_factory=dict)
    vector_operations: int = 0
    moved_bytes: dict[str, int] = field(default_factory=dict)
    products: int = 0

    def memory(self, space: str) -> Bytes:
        """The local memory behind an address space."""
        return {"ub": self.shared.unified[self.number], "cbuf": self.shared.l1, "cc": self.shared.l0c}[space]

    def set(self, flag: int) -> None:
        """Signals the other side: the cube core both vector cores, a vector core the cube core."""
        keys = [("vector", v, flag) for v in (0, 1)] if self.kind == "cube" else [("cube", self.number, flag)]
        for key in keys:
            self.shared.signals[key] = self.shared.signals.get(key, 0) + 1

    def wait(self, flag: int) -> None:
        """Takes one signal of each sender; other cores run until they are there."""
        keys = [("cube", v, flag) for v in (0, 1)] if self.kind == "cube" else [("vector", self.number, flag)]
        self.pause(lambda: all(self.shared.signals.get(key, 0) > 0 for key in keys), f"flag {flag}")
        for key in keys:
            self.shared.signals[key] -= 1

    def arrive(self, flag: int) -> None:
        """Tells the other vector core that this one has come to a meeting point."""
        key = ("arrivals", self.number, flag)
        self.shared.signals[key] = self.shared.signals.get(key, 0) + 1

    def meet(self, flag: int) -> None:
        """Waits until both vector cores have come as often as this one."""
        mine = self.shared.signals.get(("arrivals", self.number, flag), 0)
        self.pause(lambda: all(self.shared.signals.get(("arrivals", v, flag), 0) >= mine for v in (0, 1)), f"the meeting point {flag}")

    def count(self, path: str, array: Any) -> None:
        """Adds an array's bytes to what moved on a path."""
        self.moved_bytes[path] = self.moved_bytes.get(path, 0) + int(array.nbytes)
