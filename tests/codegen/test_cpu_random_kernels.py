"""Random kernels in wrapping i32 arithmetic, where every order of evaluation gives the same bits: compiled equals interpreted, always.

Tiles are combined, reduced, reshaped, transposed, carried through loops and branches, and written to buffers that later loads read again.
"""

import os
import random
from typing import Any

import numpy as np
import pytest

from tapeout.codegen import tile_builder as t
from tests.codegen.both import agree, kernel

COUNT = int(os.environ.get("TAPEOUT_RANDOM_KERNELS", "60"))
EXTENTS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 20, 32, 33, 48)
CELLS = 4096


class Author:
    """Writes one random kernel body."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.written = 0

    def body(self, x: Any, y: Any, z: Any, counts: Any) -> None:
        """A few values from x and y, then statements; everything left over is stored to z."""
        self.x, self.y, self.z, self.counts = x, y, z, counts
        self.loads = [self.load() for _ in range(3)]
        values = self.statements(list(self.loads), 6, 2)
        for value in values[-4:]:
            self.keep(value)

    def load(self) -> Any:
        """A box of x or y, sometimes ragged; what is unspecified is masked by the extent, as a kernel has to."""
        r = self.random
        buffer = r.choice((self.x, self.y))
        shape = self.shape()
        if len(shape) == 1 or r.random() < 0.6:
            at = [r.randrange(3) for _ in shape]
            return t.View(buffer, [None, *[n + 2 for n in shape[1:]]]).load(at, shape)
        rows = t.scalar(self.counts, r.randrange(3))
        tile = t.View(buffer, [rows, *shape[1:]]).load([0] * len(shape), shape)
        return self.masked(tile, rows)

    def masked(self, tile: Any, rows: Any) -> Any:
        shape = t.shape_of(tile)
        real = t.less(t.iota(shape[0]), t.splat(rows, [shape[0]]))
        for extent in shape[1:]:
            real = t.broadcast(real, -1, extent)
        return t.select(real, tile, self.random.randrange(-5, 5))

    def shape(self) -> list[int]:
        """One to three axes, not too many elements."""
        rank = self.random.choice((1, 2, 2, 2, 3))
        shape = [self.random.choice(EXTENTS) for _ in range(rank)]
        while int(np.prod(shape)) > 600:
            shape[self.random.randrange(rank)] = self.random.choice((1, 2, 3, 4))
        return shape

    def statements(self, values: list[Any], count: int, depth: int) -> list[Any]:
        """Grows the list of known values; inner blocks see copies of it."""
        for _ in range(count):
            kind = self.random.random()
            if depth and kind < 0.15:
                values = self.loop(values, depth)
            elif depth and kind < 0.25:
                values = self.branch(values, depth)
            elif kind < 0.35:
                self.keep(self.random.choice(values))
            elif kind < 0.45:
                values = [*values, self.load()]
            else:
                values = [*values, self.value(values)]
        return values

    def value(self, values: list[Any]) -> Any:
        """One new tile."""
        make = self.random.choice((self.combined, self.combined, self.combined, self.changed, self.reduced, self.reshaped))
        return make(values)

    def fitted(self, values: list[Any], shape: list[int]) -> Any:
        """A value of a shape: one that has it, one made to fit by axes, or a constant."""
        same = [v for v in values if t.shape_of(v) == shape]
        if same and self.random.random() < 0.7:
            return self.random.choice(same)
        for axis in range(len(shape)):
            rest = shape[:axis] + shape[axis + 1 :]
            fitting = [v for v in values if t.shape_of(v) == rest]
            if fitting:
                return t.broadcast(self.random.choice(fitting), axis, shape[axis])
        return t.full(shape, self.random.randrange(-9, 9), "i32")

    def combined(self, values: list[Any]) -> Any:
        a = self.random.choice(values)
        b = self.fitted(values, t.shape_of(a))
        make = self.random.choice((t.add, t.sub, t.mul, t.maximum, t.minimum, t.bit_xor, t.bit_and, self.chosen))
        return make(a, b) if self.random.random() < 0.5 else make(b, a)

    def chosen(self, a: Any, b: Any) -> Any:
        test = self.random.choice((t.less, t.equal, t.greater_equal))
        return t.select(test(a, b), t.mul(a, 3), b)

    def changed(self, values: list[Any]) -> Any:
        a = self.random.choice(values)
        make = self.random.choice((lambda v: t.shr(v, 3), lambda v: t.shr_unsigned(v, 5), lambda v: t.remainder(v, 7), lambda v: t.mul(v, v),
                                   lambda v: t.cast(t.cast(v, "i8"), "i32"), lambda v: t.cast(t.add(t.cast(v, "i64"), 1 << 20), "i32"),
                                   lambda v: t.widen_unsigned(t.cast(v, "i16"), "i32")))  # fmt: skip
        return make(a)

    def reduced(self, values: list[Any]) -> Any:
        a = self.random.choice(values)
        shape = t.shape_of(a)
        axis = self.random.randrange(len(shape))
        less = t.reduce(a, self.random.choice(("add", "max", "min")), axis)
        return t.broadcast(less, axis, shape[axis]) if len(shape) == 1 or self.random.random() < 0.4 else less

    def reshaped(self, values: list[Any]) -> Any:
        a = self.random.choice(values)
        shape = t.shape_of(a)
        ways = [lambda: t.add(a, 1)]
        if len(shape) == 2:
            ways += [lambda: t.transpose(a), lambda: t.merge_last(a)]
        if len(shape) == 3:
            ways += [lambda: t.merge_first(a), lambda: t.merge_last(a)]
        for inner in (2, 3, 4, 8, 16):
            if shape[-1] % inner == 0 and len(shape) < 3:
                ways.append(lambda inner=inner: t.split_last(a, inner))  # type: ignore[misc]
            if shape[0] % inner == 0 and len(shape) < 3:
                ways.append(lambda inner=inner: t.split_first(a, inner))  # type: ignore[misc]
        if shape[-1] % 2 == 0 and len(shape) < 3:
            ways += [lambda: t.interleave(*reversed(t.even_odd(a))), lambda: t.sub(*t.even_odd(a))]
        return self.random.choice(ways)()

    def keep(self, value: Any) -> None:
        """Stores a tile: to a place of its own, or over x or y, where later loads see it; sometimes ragged."""
        r, shape = self.random, t.shape_of(value)
        size = int(np.prod(shape))
        if r.random() < 0.25:
            t.View(r.choice((self.x, self.y)), [None, *shape[1:]]).store([0] * len(shape), value)
            return
        extent = t.scalar(self.counts, r.randrange(3)) if r.random() < 0.4 else None
        flat = self.written
        self.written = (flat + size) % (CELLS - 600)
        t.View(self.z, [None, *shape[1:]]).store([0] * len(shape), value, extent=extent) if r.random() < 0.3 else t.View(
            self.z, [None]
        ).store([flat], self.flat(value))

    def flat(self, value: Any) -> Any:
        while len(t.shape_of(value)) > 1:
            value = t.merge_last(value)
        return value

    def loop(self, values: list[Any], depth: int) -> list[Any]:
        carried = self.random.sample(values, min(len(values), self.random.randrange(4)))
        turns = t.scalar(self.counts, 3 + self.random.randrange(3))

        def step(i: Any, *tiles: Any) -> list[Any]:
            inner = self.statements([*values, *tiles], 3, depth - 1)
            return [self.same_shape(inner, tile) for tile in tiles]

        return [*values, *t.loop(0, turns, 1, carried, step)]

    def same_shape(self, values: list[Any], tile: Any) -> Any:
        fitting = [v for v in values if t.shape_of(v) == t.shape_of(tile)]
        made = self.random.choice(fitting)
        return made if self.random.random() < 0.5 else t.add(made, self.random.choice(fitting))

    def branch(self, values: list[Any], depth: int) -> list[Any]:
        model = self.random.choice(values)
        condition = t.less(t.scalar(self.counts, 3 + self.random.randrange(3)), 2)

        def side() -> list[Any]:
            return [self.same_shape(self.statements(list(values), 2, depth - 1), model)]

        return [*values, *t.when(condition, side, side)]


@pytest.mark.parametrize("seed", range(COUNT))
def test_random_kernel(seed: int) -> None:
    author = Author(seed)
    module = kernel({"x": "i32", "y": "i32", "z": "i32", "counts": "i32"}, author.body)
    rng = np.random.default_rng(seed)
    x, y = (rng.integers(-100, 100, CELLS).astype(np.int32) for _ in range(2))
    counts = np.array([*rng.integers(0, 9, 3), *rng.integers(0, 4, 3)], np.int32)
    agree(module, {"x": x, "y": y, "z": np.zeros(CELLS, np.int32), "counts": counts})
