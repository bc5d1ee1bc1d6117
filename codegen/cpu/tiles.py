"""Tile values before they are anywhere: each knows how to produce consecutive elements of itself in a register.

`evaluate(emitter, tile, at, lanes)` gives `lanes` elements in row-major order from multi-index `at`, either inside the last axis or,
where the last axis is shorter than the register, over whole trailing axes (then `at` starts them). Loads, arithmetic, broadcasts and
reshapes stay like this until a nest stores, reduces or multiplies them; only then is code made, each part at the loop depth that its
index needs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tapeout.codegen.cpu.emitter import Buffer, Emitter
from tapeout.codegen.cpu.linear_index import Index, number
from tapeout.codegen.cpu.registers import Registers, create, lanes_of
from tapeout.dialects._mlir import arith, memref, vector

At = tuple[Index, ...]
WIDEST = 16  # lanes of the widest vectors that nests use


@dataclass(frozen=True, eq=False)
class Tile:
    """A value of `shape` whose elements are registers of type `rep`. `grains` are inner extents that a vector must not straddle."""

    shape: tuple[int, ...]
    rep: str
    grains: frozenset[int] = field(default=frozenset(), kw_only=True)

    def emit(self, e: Emitter, at: At, lanes: int) -> Any:
        """The register, at the current insertion point."""
        raise NotImplementedError(type(self).__name__)


def evaluate(e: Emitter, tile: Tile, at: At, lanes: int) -> Any:
    """The register of a tile, remembered per nest, made no deeper than its index needs."""
    depth = max([e.base, *(i.depth for i in at)])
    known = e.levels[depth].loaded
    key = (tile, at, lanes)
    if key not in known:
        with e.at(depth):
            known[key] = tile.emit(e, at, lanes)
    return known[key]


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides."""
    out = [1]
    for extent in reversed(shape[1:]):
        out.insert(0, out[0] * extent)
    return tuple(out[: len(shape)])


def lane_offsets(shape: Sequence[int], lanes: int) -> list[tuple[int, ...]]:
    """Multi-index of each lane relative to the first: along the last axis, carrying into earlier ones where it is the shorter."""
    if not shape:
        return [()]
    out = []
    for lane in range(lanes):
        offset, rest = [0] * len(shape), lane
        for axis in range(len(shape) - 1, -1, -1):
            inside = lanes > shape[axis] and axis > 0
            offset[axis], rest = (rest % shape[axis], rest // shape[axis]) if inside else (rest, 0)
            if not rest:
                break
        out.append(tuple(offset))
    return out


def _one_by_one(e: Emitter, tile: Tile, at: At, lanes: int) -> Any:
    scalars = [evaluate(e, tile, tuple(i + o for i, o in zip(at, offset, strict=True)), 1) for offset in lane_offsets(tile.shape, lanes)]
    with e.at(max([e.base, *(i.depth for i in at)])):
        return Registers(e, lanes).from_elements(scalars)


@dataclass(frozen=True, eq=False)
class Stored(Tile):
    """In memory: element at offset + sum of index * stride. `buffer` is set for our own stack buffers."""

    memory: Any
    offset: Index
    strides: tuple[int, ...]
    buffer: Buffer | None = None

    def position(self, at: At) -> Index:
        """The flat position of an element."""
        total = self.offset
        for i, stride in zip(at, self.strides, strict=True):
            total = total + i * stride
        return total

    def is_dense(self, lanes: int) -> bool:
        """Whether `lanes` consecutive elements lie side by side."""
        if lanes == 1:
            return True
        if self.strides[-1] != 1:
            return False
        offsets = lane_offsets(self.shape, lanes)
        return all(sum(o * s for o, s in zip(offset, self.strides, strict=True)) == lane for lane, offset in enumerate(offsets))

    def emit(self, e: Emitter, at: At, lanes: int) -> Any:
        if not self.is_dense(lanes):
            return _one_by_one(e, self, at, lanes)
        where = e.value_of(self.position(at))
        stored = "i8" if self.rep == "i1" else self.rep
        value = memref.load(self.memory, [where]) if lanes == 1 else vector.load(e.type(stored, lanes), self.memory, [where])
        if self.rep == "i1":
            return arith.cmpi(arith.CmpIPredicate.ne, value, e.constant("i8", 0, lanes))
        return value

    def write(self, e: Emitter, at: At, value: Any) -> None:
        """Stores a register at the current end of the innermost block."""
        lanes = lanes_of(value)
        where = e.value_of(self.position(at))
        with e.here():
            if self.rep == "i1":
                value = create("arith.extui", e.type("i8", lanes), value)
            if lanes == 1:
                memref.store(value, self.memory, [where])
            elif self.is_dense(lanes):
                vector.store(value, self.memory, [where])
            else:
                self._scatter_lanes(e, at, value, lanes)

    def _scatter_lanes(self, e: Emitter, at: At, value: Any, lanes: int) -> None:
        for lane, offset in enumerate(lane_offsets(self.shape, lanes)):
            where = e.value_of(self.position(tuple(i + o for i, o in zip(at, offset, strict=True))))
            memref.store(Registers(e, lanes).extract(value, lane), self.memory, [where])


def on_stack(e: Emitter, shape: Sequence[int], rep: str, row_stride: int | None = None) -> Stored:
    """A dense stack buffer of a shape; `row_stride` spreads the rows of a rank 2 one."""
    strides = strides_of(shape) if row_stride is None else (row_stride, 1)
    spare = e.spare_rows if len(shape) == 2 and rep == "f32" and shape[0] > 1 else 0
    count = max((shape[0] + spare) * strides[0], 1) if shape else 1
    buffer = e.buffer(rep, count)
    return Stored(tuple(shape), rep, buffer.memory, number(0), strides, buffer)


@dataclass(frozen=True, eq=False)
class Panelled(Tile):
    """A box of weights stored as [N/p][K][p]: `offset` is the box's first element, `lead` the strides of the axes before K."""

    memory: Any
    offset: Index
    lead: tuple[int, ...]
    k_extent: int
    panel: int

    def emit(self, e: Emitter, at: At, lanes: int) -> Any:
        if self.panel % lanes:
            return _one_by_one(e, self, at, lanes)
        *first, k, n = at
        block, lane = e.divide(n, self.panel)
        position = self.offset + block * (self.k_extent * self.panel) + k * self.panel + lane
        for i, stride in zip(first, self.lead, strict=True):
            position = position + i * stride
        where = e.value_of(position)
        if lanes == 1:
            return memref.load(self.memory, [where])
        return vector.load(e.type(self.rep, lanes), self.memory, [where])


@dataclass(frozen=True, eq=False)
class Gathered(Tile):
    """Rows chosen by an id buffer; a negative id reads row 0."""

    memory: Any
    ids: Any
    first: Index
    column: Index
    row_stride: int

    def row(self, e: Emitter, at: Index) -> Index:
        """The position of a row's first element."""
        depth = max(e.base, at.depth)
        known = e.levels[depth].loaded
        if (self, at) not in known:
            where = e.value_of(self.first + at)
            with e.at(depth):
                row = arith.index_cast(e.type("index"), arith.maxsi(memref.load(self.ids, [where]), e.constant("i32", 0)))
                known[self, at] = e.counter(row, 0, depth) * self.row_stride + self.column
        position: Index = known[self, at]
        return position

    def emit(self, e: Emitter, at: At, lanes: int) -> Any:
        if lanes > self.shape[1]:
            return _one_by_one(e, self, at, lanes)
        where = e.value_of(self.row(e, at[0]) + at[1])
        if lanes == 1:
            return memref.load(self.memory, [where])
        return vector.load(e.type(self.rep, lanes), self.memory, [where])


@dataclass(frozen=True, eq=False)
class Splat(Tile):
    """One number everywhere: a Python number or a scalar value."""

    value: Any

    def emit(self, e: Emitter, at: At, lanes: int) -> Any:
        if isinstance(self.value, int | float | bool):
            return e.constant(self.rep, self.value, lanes)
        return Registers(e, lanes).splat(self.value)


@dataclass(frozen=True, eq=False)
class Iota(Tile):
    """0, 1, 2, ... as i32."""

    def emit(self, e: Emitter, at: At, lanes: int) -> Any:
        (i,) = at
        steps = list(range(lanes))
        if not i.terms:
            return e.constant("i32", [i.constant + s for s in steps] if lanes > 1 else i.constant, lanes)
        registers = Registers(e, lanes)
        first = registers.splat(arith.index_cast(e.type("i32"), e.value_of(i)))
        return registers.binary("addi", first, e.constant("i32", steps, lanes)) if lanes > 1 else first


@dataclass(frozen=True, eq=False)
class Mapped(Tile):
    """An elementwise function of tiles of the same shape."""

    function: Callable[..., Any]
    sources: tuple[Tile, ...]

    def emit(self, e: Emitter, at: At, lanes: int) -> Any:
        values = [evaluate(e, source, at, lanes) for source in self.sources]
        return self.function(Registers(e, lanes), *values)


def mapped(function: Callable[..., Any], rep: str, *sources: Tile) -> Mapped:
    """An elementwise tile."""
    grains = frozenset().union(*(s.grains for s in sources))
    return Mapped(sources[0].shape, rep, function, sources, grains=grains)


@dataclass(frozen=True, eq=False)
class Broadcast(Tile):
    """A source with one axis inserted."""

    source: Tile
    axis: int

    def emit(self, e: Emitter, at: At, lanes: int) -> Any:
        source_at = at[: self.axis] + at[self.axis + 1 :]
        last = len(self.shape) - 1
        if lanes <= self.shape[-1]:
            if lanes > 1 and self.axis == last:
                return Registers(e, lanes).splat(evaluate(e, self.source, source_at, 1))
            return evaluate(e, self.source, source_at, lanes)
        return self._across(e, source_at, lanes)

    def _across(self, e: Emitter, source_at: At, lanes: int) -> Any:
        steps = strides_of(self.source.shape)
        order = [
            sum(o * s for o, s in zip(offset[: self.axis] + offset[self.axis + 1 :], steps, strict=True))
            for offset in lane_offsets(self.shape, lanes)
        ]
        count = max(order) + 1
        value = evaluate(e, self.source, source_at, count)
        registers = Registers(e, lanes)
        if count == 1:
            return registers.splat(value)
        return value if order == list(range(lanes)) else registers.shuffle(value, value, order)


@dataclass(frozen=True, eq=False)
class Reshaped(Tile):
    """The same elements in row-major order under another shape."""

    source: Tile

    def emit(self, e: Emitter, at: At, lanes: int) -> Any:
        flat = number(0)
        for i, stride in zip(at, strides_of(self.shape), strict=True):
            flat = flat + i * stride
        return evaluate(e, self.source, unflatten(e, flat, self.source.shape), lanes)


def unflatten(e: Emitter, flat: Index, shape: Sequence[int]) -> At:
    """The multi-index of a row-major position."""
    out = []
    for stride in strides_of(shape)[:-1]:
        quotient, flat = e.divide(flat, stride)
        out.append(quotient)
    return (*out, flat) if shape else ()


@dataclass(frozen=True, eq=False)
class Transposed(Tile):
    """A rank 2 source with its axes exchanged; vectors of it are put together lane by lane."""

    source: Tile

    def emit(self, e: Emitter, at: At, lanes: int) -> Any:
        if lanes == 1:
            return evaluate(e, self.source, (at[1], at[0]), 1)
        return _one_by_one(e, self, at, lanes)


def grains_of(shape: Sequence[int]) -> frozenset[int]:
    """The trailing extents that a vector of up to 16 lanes could straddle: products of last axes, up to the first long enough."""
    products, total = set(), 1
    for extent in reversed(shape):
        total *= extent
        products.add(total)
        if total >= WIDEST:
            break
    return frozenset(products)


def broadcasted(source: Tile, axis: int, extent: int) -> Tile:
    """Inserts an axis."""
    shape = (*source.shape[:axis], extent, *source.shape[axis:])
    if isinstance(source, Splat):
        return Splat(shape, source.rep, source.value)
    return Broadcast(shape, source.rep, source, axis, grains=source.grains)


def reshaped(source: Tile, shape: Sequence[int]) -> Tile:
    """Another shape of the same row-major order; a dense buffer is just seen differently."""
    shape = tuple(shape)
    if isinstance(source, Splat):
        return Splat(shape, source.rep, source.value)
    if isinstance(source, Stored) and source.strides == strides_of(source.shape):
        return Stored(shape, source.rep, source.memory, source.offset, strides_of(shape), source.buffer)
    return Reshaped(shape, source.rep, source, grains=source.grains | grains_of(source.shape) | grains_of(shape))


def transposed(source: Tile) -> Tile:
    """[a, b] as [b, a]."""
    shape = source.shape[::-1]
    if isinstance(source, Splat):
        return Splat(shape, source.rep, source.value)
    if isinstance(source, Stored):
        return Stored(shape, source.rep, source.memory, source.offset, source.strides[::-1], source.buffer)
    return Transposed(shape, source.rep, source, grains=frozenset())
