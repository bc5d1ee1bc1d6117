"""Reductions of one axis, always in an order that only the tile's static shape decides: a row's sum never depends on the rows beside it.

Last axis: vectors of 16 lanes in up to 4 running registers, those added pairwise, lanes halved, the tail added last.
A last axis of 2 or 4: whole groups side by side in vectors, combined lane by lane. Another axis: one step after the other.
"""

from collections.abc import Sequence
from typing import Any

from tapeout.codegen.cpu.emitter import Emitter
from tapeout.codegen.cpu.linear_index import Index, number
from tapeout.codegen.cpu.nests import lanes_for, pieces, traverse
from tapeout.codegen.cpu.registers import Registers, across, combine, lanes_of
from tapeout.codegen.cpu.tiles import WIDEST, At, Stored, Tile, evaluate, grains_of, on_stack, strides_of, unflatten

RUNNING = 4  # registers that accumulate side by side
SHORT = (2, 4)  # group lengths that are combined lane by lane


def neutral(kind: str, rep: str) -> float:
    """What a reduction starts from."""
    if kind == "add":
        return 0
    if rep[0] == "f":
        return float("-inf") if kind == "max" else float("inf")
    bits = int(rep[1:])
    return -(2 ** (bits - 1)) if kind == "max" else 2 ** (bits - 1) - 1


def reduce(e: Emitter, source: Tile, axis: int, kind: str, rows: Any) -> Stored:
    """The reduced tile in a stack buffer; `rows` bounds axis 0 of the result (and of the source, where axis is not 0)."""
    shape = (*source.shape[:axis], *source.shape[axis + 1 :])
    target = on_stack(e, shape, source.rep)
    last = axis == len(source.shape) - 1
    with e.nest():
        if last and source.shape[-1] in SHORT and len(source.shape) > 1:
            _short_groups(e, source, kind, target, rows)
        elif last:
            _last_axis(e, source, kind, target, rows)
        else:
            _other_axis(e, source, axis, kind, target, rows)
    return target


def _short_groups(e: Emitter, source: Tile, kind: str, target: Stored, rows: Any) -> None:
    group = source.shape[-1]

    def body(at: At, lanes: int) -> None:
        parts = [_groups_from(e, source, at, lanes, part) for part in range(group)]
        with e.here():
            target.write(e, at, _fold(e, parts, kind, source.rep))

    traverse(e, target.shape, rows, source.grains | grains_of(target.shape), body)


def _groups_from(e: Emitter, source: Tile, at: At, lanes: int, part: int) -> Any:
    """The part-th register of `lanes` elements of the `lanes` groups that start at group `at`."""
    group, groups = source.shape[-1], source.shape[:-1]
    flat = number(0)
    for i, stride in zip(at, strides_of(groups), strict=True):
        flat = flat + i * stride
    if lanes % group == 0:
        return evaluate(e, source, (*unflatten(e, flat + part * lanes // group, groups), number(0)), lanes)
    scalars = []
    for element in range(part * lanes, (part + 1) * lanes):
        group_at = unflatten(e, flat + element // group, groups)
        scalars.append(evaluate(e, source, (*group_at, number(element % group)), 1))
    with e.here():
        return Registers(e, lanes).from_elements(scalars)


def _fold(e: Emitter, parts: Sequence[Any], kind: str, rep: str) -> Any:
    """Adjacent lanes of the concatenation of `parts` are combined until one register is left."""
    while len(parts) > 1:
        lanes = lanes_of(parts[0])
        halves = []
        for a, b in zip(parts[::2], parts[1::2], strict=True):
            halves.append(_adjacent(e, a, b, lanes, kind, rep))
        parts = halves
    return parts[0]


def _adjacent(e: Emitter, a: Any, b: Any, lanes: int, kind: str, rep: str) -> Any:
    if lanes == 1:
        return combine(e, kind, a, b, rep)
    registers = Registers(e, lanes)
    even = registers.shuffle(a, b, range(0, 2 * lanes, 2))
    odd = registers.shuffle(a, b, range(1, 2 * lanes, 2))
    return combine(e, kind, even, odd, rep)


def _last_axis(e: Emitter, source: Tile, kind: str, target: Stored, rows: Any) -> None:
    def row(at: At) -> None:
        parts = _running(e, source, at, kind)
        with e.here():
            total = parts[0]
            for part in parts[1:]:
                total = combine(e, kind, total, part, source.rep)
        target.write(e, at, total)

    _each(e, target.shape, rows, (), row)


def _each(e: Emitter, shape: Sequence[int], rows: Any, at: At, body: Any) -> None:
    """One call for each element of the result."""
    if len(at) == len(shape):
        body(at)
        return
    bound = rows if rows is not None and not at else shape[len(at)]
    if bound == 1:
        _each(e, shape, rows, (*at, number(0)), body)
        return
    with e.loop(0, bound, 1, shape[len(at)]) as loop:
        _each(e, shape, rows, (*at, loop.counter), body)


def _running(e: Emitter, source: Tile, at: At, kind: str) -> list[Any]:
    """The scalars left of one row: the wide part, then one for each tail piece."""
    length, rep = source.shape[-1], source.rep
    lanes = min(lanes_for(source.grains), WIDEST)
    count = length // lanes
    turns = count // RUNNING
    out = []
    if turns > 1:
        parts = _loop(e, source, at, kind, lanes, turns)
        with e.here():
            out.append(across(e, kind, _pairwise(e, parts, kind, rep), rep))
    done = turns * RUNNING * lanes if turns > 1 else 0
    for first, width in pieces(length - done, lanes):
        value = evaluate(e, source, (*at, number(done + first)), width)
        with e.here():
            start = e.constant(rep, neutral(kind, rep), width)
            out.append(across(e, kind, value if kind == "add" else combine(e, kind, start, value, rep), rep))
    return out


def _loop(e: Emitter, source: Tile, at: At, kind: str, lanes: int, turns: int) -> list[Any]:
    rep = source.rep
    starts = [e.constant(rep, neutral(kind, rep), lanes)] * RUNNING
    with e.loop(0, turns, 1, turns, starts) as loop:
        values = [evaluate(e, source, (*at, _position(loop.counter, lanes, part)), lanes) for part in range(RUNNING)]
        with e.here():
            loop.yielded = [combine(e, kind, old, new, rep) for old, new in zip(loop.carried, values, strict=True)]
    return loop.results


def _position(counter: Index, lanes: int, part: int) -> Index:
    return counter * (lanes * RUNNING) + part * lanes


def _pairwise(e: Emitter, parts: list[Any], kind: str, rep: str) -> Any:
    while len(parts) > 1:
        parts = [combine(e, kind, a, b, rep) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _other_axis(e: Emitter, source: Tile, axis: int, kind: str, target: Stored, rows: Any) -> None:
    rep, length = source.rep, source.shape[axis]

    def body(outer: At, inner: At, lanes: int) -> None:
        start = e.constant(rep, neutral(kind, rep), lanes)
        with e.loop(0, length, 1, length, [start]) as loop:
            value = evaluate(e, source, (*outer, loop.counter, *inner), lanes)
            with e.here():
                loop.yielded = [combine(e, kind, loop.carried[0], value, rep)]
        target.write(e, (*outer, *inner), loop.results[0])

    def group(outer: At) -> None:
        traverse(e, target.shape[axis:], None if axis else rows, source.grains, lambda at, lanes: body(outer, at, lanes))

    _each(e, target.shape[:axis], rows if axis else None, (), group)
