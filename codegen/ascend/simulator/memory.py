"""Memories of one AI core and typed views of them; every view knows the extent of the buffer it was cut from and stays inside it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from tapeout.codegen.ascend.facts import CORE

POISON = 0xFF
"""Bytes of memory that nothing has written: NaN in every float type, -1 in every integer."""

Bytes = np.ndarray[Any, Any]


class SimulationError(Exception):
    """A program that reads or writes where it may not, waits forever, or holds an op whose meaning is not known here."""


class View:
    """`shape` elements of `dtype` in `memory` (bytes) from element `offset` on. Elements [low, high) are its buffer, which `base` counts from.

    `twins` holds the unified buffers of both vector cores, where the cube core sees one. Views are not changed once made; a simulated kernel
    makes hundreds of thousands, hence slots and no dataclass.
    """

    __slots__ = ("base", "dtype", "high", "low", "memory", "offset", "shape", "space", "strides", "twins")

    def __init__(
        self, memory: Bytes, dtype: Any, offset: int, shape: Sequence[int], strides: Sequence[int], space: str, low: int, high: int, base: int,
        twins: tuple[Bytes, ...] = (),
    ) -> None:  # fmt: skip
        self.memory, self.dtype, self.offset, self.shape, self.strides = memory, dtype, offset, tuple(shape), tuple(strides)
        self.space, self.low, self.high, self.base, self.twins = space, low, high, base, twins

    def moved(self, offset: int, shape: Sequence[int], strides: Sequence[int]) -> "View":
        """Another window of the same buffer."""
        return View(self.memory, self.dtype, offset, shape, strides, self.space, self.low, self.high, self.base, self.twins)

    def of(self, memory: Bytes) -> "View":
        """The same window of another memory."""
        return View(memory, self.dtype, self.offset, self.shape, self.strides, self.space, self.low, self.high, self.base, self.twins)

    def array(self) -> Any:
        """The elements, writable in place; raises `SimulationError` where one lies outside the buffer."""
        if 0 in self.shape:
            return np.empty(self.shape, self.dtype)
        first = last = self.offset
        for n, stride in zip(self.shape, self.strides, strict=True):
            if stride > 0:
                last += (n - 1) * stride
            else:
                first += (n - 1) * stride
        if first < self.low or last >= self.high:
            raise SimulationError(f"access outside its buffer in {self.space}: elements {first} to {last} of {self.dtype}, "
                                  f"the buffer holds {self.low} to {self.high - 1}")
        size = self.dtype.itemsize
        return np.ndarray(self.shape, self.dtype, self.memory, self.offset * size, [s * size for s in self.strides])

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

    unified: tuple[Bytes, Bytes] = field(default_factory=lambda: (_memory(CORE.unified_bytes), _memory(CORE.unified_bytes)))
    l1: Bytes = field(default_factory=lambda: _memory(CORE.l1_bytes))
    l0c: Bytes = field(default_factory=lambda: _memory(CORE.l0c_bytes))
    signals: dict[tuple[str, int, int], int] = field(default_factory=dict)


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
