"""Meanings of vector ops: transfers between registers and memory, masks, shapes, reductions.

Values of loops that run at once have leading axes in front of a vector's own; axes are counted from the end.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tapeout.runtime.device.ascend_simulator.memory import Linear, View
from tapeout.runtime.device.ascend_simulator.program import Env, Op, Run, execute, meaning

COMBINE: dict[str, Any] = {
    "add": np.add, "mul": np.multiply, "maximumf": np.maximum, "minimumf": np.minimum, "maxnumf": np.fmax, "minnumf": np.fmin,
    "maxsi": np.maximum, "minsi": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip
Axes = list[int | None]
"""For each axis of a vector the memory axis that it walks along; None where every lane reads the same element."""
Find = Callable[[Env], tuple[View, list[int], Any, bool]]
"""What a transfer touches: the window, its extents along the vector's axes, the lanes that count (None: all), and whether all of the window do."""


def _bounds(op: Op, count: int) -> list[bool]:
    found = op.attribute("in_bounds")
    return [False] * count if found is None else [word.strip() == "true" for word in found.strip("[]").split(",") if word.strip()]


class _Masks:
    """Masks of the memory axes, in memory order, spread over a vector's axes: (lanes, reach along each axis, whether all lanes within hold).

    Most masks of a kernel are constants: the last one is remembered.
    """

    def __init__(self, shape: tuple[int, ...], axes: Axes) -> None:
        present = [(axis, place) for place, axis in enumerate(axes) if axis is not None]
        self.order = [place for _, place in sorted(present)]
        self.back = list(np.argsort(np.argsort([axis for axis, _ in present]))) if len(present) > 1 else None
        kept = {place for _, place in present}
        self.spread = [n if place in kept else 1 for place, n in enumerate(shape)]
        self.shape, self.mask = shape, None
        self.found: tuple[Any, list[int], bool] = (None, [], False)

    def __call__(self, mask: Any) -> tuple[Any, list[int], bool]:
        if mask is not self.mask:
            self.mask, self.found = mask, self._spread(np.asarray(mask))
        return self.found

    def _spread(self, mask: Any) -> tuple[Any, list[int], bool]:
        own = [self.shape[place] for place in self.order]
        lead = mask.shape[: mask.ndim - len(own)]
        level = len(lead)
        there = mask.reshape((*lead, *own))
        there = there if self.back is None else np.transpose(there, [*range(level), *(level + axis for axis in self.back)])
        lanes = np.broadcast_to(there.reshape((*lead, *self.spread)), (*lead, *self.shape))
        any_lane = lanes.any(axis=tuple(range(level)))
        reach = [int(found.max()) + 1 if found.size else 0 for found in np.nonzero(any_lane)]
        box: Any = (..., *(slice(0, n) for n in reach))
        return lanes, reach, bool(lanes[box].all())


def _transfer(op: Op, shape: tuple[int, ...], view_at: int) -> Find:
    groups = op.segments()
    source, at = groups[view_at][0], groups[view_at + 1]
    mask = groups[3][0] if len(groups) > 3 and groups[3] else None
    axes = op.map("permutation_map").positions
    inside, masks = _bounds(op, len(shape)), _Masks(shape, axes)
    clamped = [(place, axis) for place, (axis, sure) in enumerate(zip(axes, inside, strict=True)) if axis is not None and not sure]

    def find(env: Env) -> tuple[View, list[int], Any, bool]:
        view: View = env[source]
        where = [env[s] for s in at]
        extents = list(shape)
        for place, axis in clamped:
            extents[place] = max(0, min(shape[place], view.shape[axis] - where[axis]))
        lanes, dense = None, True
        if mask is not None and env[mask] is not None:
            lanes, reach, dense = masks(env[mask])
            extents = [min(a, b) for a, b in zip(extents, reach, strict=True)]
        offset = view.offset
        for i, stride in zip(where, view.strides, strict=True):
            offset = offset + i * stride
        return view.moved(offset, extents, [0 if axis is None else view.strides[axis] for axis in axes]), extents, lanes, dense

    return find


def touched(op: Op) -> Callable[[Env], View | None]:
    """Where a transfer reads or writes; None where nothing is left of it."""
    writes = op.name == "vector.transfer_write"
    find = _transfer(op, op.node.operand_kinds[0].shape if writes else op.shape, 1 if writes else 0)

    def run(env: Env) -> View | None:
        window, extents, _, _ = find(env)
        return window if all(extents) else None

    return run


@meaning("vector.transfer_read")
def _read(op: Op) -> Run:
    padding, (out,), shape, dtype, level = op.segments()[2][0], op.results, op.shape, op.result_dtype, op.level
    find = _transfer(op, shape, 0)
    whole = list(shape)

    def run(env: Env) -> None:
        window, extents, lanes, dense = find(env)
        if dense and extents == whole:
            env[out] = np.array(window.array(level), dtype, order="C")
            return
        if not all(extents):
            env[out] = np.full(shape, env[padding], dtype)
            return
        found = window.array(level)
        box: Any = (..., *(slice(0, n) for n in extents))
        if not dense:
            kept = lanes[box]
            lead = np.broadcast_shapes(found.shape, kept.shape)[: -len(shape) or None]
            result = np.full((*lead, *shape), env[padding], dtype)
            result[box] = np.where(kept, found, result[box])
        else:
            result = np.full((*found.shape[: found.ndim - len(shape)], *shape), env[padding], dtype)
            result[box] = found
        env[out] = result

    return run


@meaning("vector.transfer_write")
def _write(op: Op) -> Run:
    value, shape, level = op.operands[0], op.node.operand_kinds[0].shape, op.level
    find = _transfer(op, shape, 1)

    def run(env: Env) -> None:
        window, extents, lanes, dense = find(env)
        if not all(extents):
            return
        box: Any = (..., *(slice(0, n) for n in extents))
        new, there = np.asarray(env[value]), window.array(level)
        if new.ndim < len(shape):
            new = new.reshape(shape)
        if dense:
            there[...] = new[box]
        else:
            np.copyto(there, new[box], where=lanes[box])

    return run


@meaning("vector.shape_cast")
def _shape_cast(op: Op) -> Run:
    (x,), (out,), shape, rank = op.operands, op.results, op.shape, op.rank()

    def run(env: Env) -> None:
        value = np.asarray(env[x])
        env[out] = value.reshape(value.shape[: value.ndim - rank] + shape)

    return run


@meaning("vector.broadcast", "vector.splat")
def _broadcast(op: Op) -> Run:
    (x,), (out,), shape, dtype, rank, level = op.operands, op.results, op.shape, op.result_dtype, op.rank(), op.level
    added = (1,) * (len(shape) - rank)

    def run(env: Env) -> None:
        value = env[x].values(level) if isinstance(env[x], Linear) else env[x]
        value = np.asarray(value, dtype)
        lead, own = value.shape[: value.ndim - rank], value.shape[value.ndim - rank :]
        env[out] = np.broadcast_to(value.reshape(lead + added + own), lead + shape).copy()

    return run


@meaning("vector.constant_mask", "vector.create_mask")
def _mask(op: Op) -> Run:
    (out,), shape, operands = op.results, op.shape, op.operands
    fixed = _lanes(shape, op.integers("mask_dim_sizes")) if op.name == "vector.constant_mask" else None

    def run(env: Env) -> None:
        env[out] = _lanes(shape, [env[s] for s in operands]) if fixed is None else fixed

    return run


def _lanes(shape: tuple[int, ...], extents: list[int]) -> Any:
    mask = np.zeros(shape, bool)
    mask[tuple(slice(0, max(0, min(n, e))) for n, e in zip(shape, extents, strict=True))] = True
    return mask


def _reduced(op: Op) -> tuple[Any, int, int | None]:
    """(function, slot of the vector, slot of the start or None) of a reduction."""
    merges = op.attribute("withoutInitMergeOp") is None and len(op.operands) > 1
    return COMBINE[op.word("kind")], op.operands[0], op.operands[1] if merges else None


def _finish(function: Any, values: Any, start: Any, dtype: Any) -> Any:
    """The last axis is one sum, in an order that does not depend on how many there are."""
    total = function.reduce(np.ascontiguousarray(values), axis=-1, dtype=values.dtype) if values.shape[-1] else start
    if start is not None and values.shape[-1]:
        total = function(total, np.asarray(start, values.dtype))
    if np.ndim(total):
        return total
    return int(total) if dtype.kind in "iub" else dtype.type(total)


@meaning("vector.reduction")
def _reduction(op: Op) -> Run:
    (function, x, start), (out,), dtype = _reduced(op), op.results, op.result_dtype

    def run(env: Env) -> None:
        env[out] = _finish(function, np.asarray(env[x]), None if start is None else env[start], dtype)

    return run


@meaning("vector.mask")
def _masked(op: Op) -> Run | None:
    """A reduction under a mask; other masked ops do not occur."""
    inner = op.node.regions[0][0].ops[0]
    if inner.name != "vector.reduction":
        return _unmasked(op)
    function, x, start = _reduced(Op(inner, op.scope))
    (mask, *_), (out,), dtype = op.operands, op.results, op.result_dtype

    def run(env: Env) -> None:
        kept, values, first = np.asarray(env[mask]), np.asarray(env[x]), None if start is None else env[start]
        if kept.ndim > 1:
            values, kept = np.broadcast_arrays(values, kept)
            lines = [_finish(function, line[lanes], None if first is None else np.asarray(first).reshape(-1)[n % np.size(first)], dtype)
                     for n, (line, lanes) in enumerate(zip(values.reshape(-1, values.shape[-1]), kept.reshape(-1, values.shape[-1]), strict=True))]
            env[out] = np.array(lines, dtype).reshape(values.shape[:-1])
        else:
            env[out] = _finish(function, values[..., kept], first, dtype)

    return run


def _unmasked(op: Op) -> Run:
    code, results = op.block(0)[1], op.results

    def run(env: Env) -> None:
        for slot, value in zip(results, execute(code, env) or (), strict=True):
            env[slot] = value

    return run


@meaning("vector.multi_reduction")
def _multi_reduction(op: Op) -> Run:
    (x, start), (out,), function = op.operands, op.results, COMBINE[op.word("kind")]
    axes = tuple(sorted(op.integers("reduction_dims"), reverse=True))

    def run(env: Env) -> None:
        values = np.asarray(env[x])
        for axis in axes:
            values = function.reduce(values, axis=axis, dtype=values.dtype)
        env[out] = function(values, env[start])

    return run


def _simple(function: Callable[[Op], Callable[..., Any]]) -> Callable[[Op], Run]:
    def handler(op: Op) -> Run:
        operands, results, build = op.operands, op.results, function(op)

        def run(env: Env) -> None:
            found = build(*(env[s] for s in operands))
            for slot, value in zip(results, found if len(results) > 1 else [found], strict=True):
                env[slot] = value

        return run

    return handler


def _interleaved(a: Any, b: Any) -> Any:
    a, b = np.broadcast_arrays(a, b)
    return np.stack([a, b], -1).reshape(*a.shape[:-1], a.shape[-1] * 2)


meaning("vector.interleave")(_simple(lambda op: _interleaved))
meaning("vector.deinterleave")(_simple(lambda op: lambda x: (x[..., 0::2].copy(), x[..., 1::2].copy())))
meaning("vector.transpose")(_simple(lambda op: lambda x: np.transpose(x, op.integers("permutation"))))


@meaning("vector.extract")
def _extract(op: Op) -> Run:
    x, *dynamic = op.operands
    (out,), position = op.results, op.integers("static_position")

    def run(env: Env) -> None:
        left = iter(dynamic)
        found = np.asarray(env[x])[tuple(env[next(left)] if n < 0 else n for n in position)]
        env[out] = found if np.ndim(found) else found[()]

    return run
