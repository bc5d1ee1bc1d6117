"""Traversals of a tile: which loops, which vectors. The body is called with a multi-index and a lane count at every place.

Vectors have 16 lanes (two 256-bit registers of f32) where the tile allows, ends are 8, 4, 2, 1. Rows (axis 0) may be a run-time count;
no other extent is. A last axis shorter than a vector is flattened with the axis before it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tapeout.codegen.cpu.emitter import Emitter
from tapeout.codegen.cpu.linear_index import Index, number
from tapeout.codegen.cpu.tiles import WIDEST, At, Stored, Tile, evaluate, grains_of, on_stack, unflatten
from tapeout.dialects._mlir import arith

UNROLLED = 4  # pieces written one after the other instead of a loop

Body = Callable[[At, int], None]


def lanes_for(grains: Iterable[int]) -> int:
    """The widest vector that straddles none of the inner extents."""
    lanes = WIDEST
    while any(g % lanes and lanes % g for g in grains):
        lanes //= 2
    return lanes


def traverse(e: Emitter, shape: Sequence[int], rows: Any, grains: frozenset[int], body: Body) -> None:
    """Calls `body` so that every element of `shape` is covered once; `rows` (a value or None) bounds axis 0."""
    shape = tuple(shape)
    if not shape:
        body((), 1)
    elif rows is not None and len(shape) == 1:
        _ragged_line(e, shape[0], rows, lanes_for(grains), body)
    else:
        keep = 1 if rows is not None else 0
        outer, length = _flatten(shape, keep)
        merged = frozenset() if len(outer) + 1 == len(shape) else grains_of(shape)
        _outer(e, shape, outer, rows, (), lambda at: _line(e, length, grains | merged, _restore(e, shape, at, body)))


def _flatten(shape: tuple[int, ...], keep: int) -> tuple[tuple[int, ...], int]:
    """(outer axes, length of the last one), merging trailing axes until a vector fits."""
    outer, length = list(shape[:-1]), shape[-1]
    while length < WIDEST and len(outer) > keep:
        length *= outer.pop()
    return tuple(outer), length


def _restore(e: Emitter, shape: tuple[int, ...], outer_at: At, body: Body) -> Callable[[Index, int], None]:
    inner = shape[len(outer_at) :]
    return lambda last, lanes: body((*outer_at, *unflatten(e, last, inner)), lanes)


def _outer(e: Emitter, shape: tuple[int, ...], outer: tuple[int, ...], rows: Any, at: At, body: Callable[[At], None]) -> None:
    if len(at) == len(outer):
        body(at)
        return
    extent = outer[len(at)]
    bound = rows if rows is not None and not at else extent
    if bound == 1:
        _outer(e, shape, outer, rows, (*at, number(0)), body)
        return
    with e.loop(0, bound, 1, extent) as loop:
        _outer(e, shape, outer, rows, (*at, loop.counter), body)


def pieces(length: int, lanes: int) -> Iterator[tuple[int, int]]:
    """(first, lanes) of the vectors that cover a static length."""
    first = 0
    while first < length:
        while lanes > length - first:
            lanes //= 2
        yield first, lanes
        first += lanes


def _line(e: Emitter, length: int, grains: frozenset[int], body: Callable[[Index, int], None]) -> None:
    lanes = lanes_for(grains)
    group = min((g for g in grains if WIDEST <= g < length and length % g == 0 and g % lanes == 0), default=0)
    if group and length // group > 1:
        with e.loop(0, length // group, 1, length // group) as loop:
            _stretch(e, loop.counter * group, group, lanes, body)
    else:
        _stretch(e, number(0), length, lanes, body)


def _stretch(e: Emitter, first: Index, length: int, lanes: int, body: Callable[[Index, int], None]) -> None:
    count = length // lanes
    done = 0
    if count > UNROLLED:
        with e.loop(0, count, 1, count) as loop:
            body(first + loop.counter * lanes, lanes)
        done = count * lanes
    for start, width in pieces(length - done, lanes):
        body(first + (done + start), width)


def _ragged_line(e: Emitter, length: int, rows: Any, lanes: int, body: Body) -> None:
    if lanes > 1 and length >= lanes:
        with e.here():
            full = arith.divui(rows, e.constant("index", lanes))
            done = arith.muli(full, e.constant("index", lanes))
        with e.loop(0, full, 1, length // lanes) as loop:
            body((loop.counter * lanes,), lanes)
    else:
        done = 0
    with e.loop(done, rows, 1, length) as loop:
        body((loop.counter,), 1)


def write(e: Emitter, source: Tile, target: Stored, rows: Any = None) -> None:
    """Stores every element of `source` in `target`, which has its shape."""

    def body(at: At, lanes: int) -> None:
        target.write(e, at, evaluate(e, source, at, lanes))

    with e.nest():
        traverse(e, source.shape, rows, source.grains, body)


def materialise(e: Emitter, source: Tile, rows: Any = None, row_stride: int | None = None) -> Stored:
    """A stack copy of a tile."""
    target = on_stack(e, source.shape, source.rep, row_stride)
    write(e, source, target, rows)
    return target
