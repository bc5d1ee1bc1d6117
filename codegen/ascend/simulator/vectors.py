"""Meanings of vector ops: transfers between registers and memory, masks, shapes, reductions."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tapeout.codegen.ascend.simulator.memory import View
from tapeout.codegen.ascend.simulator.program import Env, Op, Run, execute, meaning
from tapeout.dialects._mlir import ir

COMBINE: dict[str, Any] = {
    "add": np.add, "mul": np.multiply, "maximumf": np.maximum, "minimumf": np.minimum, "maxnumf": np.fmax, "minnumf": np.fmin,
    "maxsi": np.maximum, "minsi": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip
Axes = list[int | None]
"""For each axis of a vector the memory axis that it walks along; None where every lane reads the same element."""


def _axes(op: Op) -> Axes:
    found = op.attribute("permutation_map").value
    return [e.position if isinstance(e, ir.AffineDimExpr) else None for e in found.results]


def _window(view: View, at: list[int], extents: list[int], axes: Axes) -> View:
    """What a transfer touches: `extents` lanes along each vector axis."""
    offset = view.offset
    for i, stride in zip(at, view.strides, strict=True):
        offset += i * stride
    return view.moved(offset, extents, [0 if axis is None else view.strides[axis] for axis in axes])


def _bounds(op: Op, count: int) -> list[bool]:
    found = op.attribute("in_bounds")
    return [False] * count if found is None else [str(x) == "true" for x in ir.ArrayAttr(found)]


def _extents(view: View, at: list[int], shape: tuple[int, ...], axes: Axes, inside: list[bool]) -> list[int]:
    return [n if axis is None or sure else max(0, min(n, view.shape[axis] - at[axis]))
            for n, axis, sure in zip(shape, axes, inside, strict=True)]


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
            self.mask, self.found = mask, self._spread(mask)
        return self.found

    def _spread(self, mask: Any) -> tuple[Any, list[int], bool]:
        there = np.asarray(mask).reshape([self.shape[place] for place in self.order])
        there = there if self.back is None else np.transpose(there, self.back)
        lanes = np.broadcast_to(there.reshape(self.spread), self.shape)
        reach = [int(found.max()) + 1 if found.size else 0 for found in np.nonzero(lanes)]
        return lanes, reach, bool(lanes[tuple(slice(0, n) for n in reach)].all())


@meaning("vector.transfer_read")
def _read(op: Op) -> Run:
    groups = op.segments()
    (source,), at, (padding,) = groups[:3]
    mask = groups[3][0] if len(groups) > 3 and groups[3] else None
    (out,), shape, axes = op.results, tuple(op.op.results[0].type.shape), _axes(op)
    inside, dtype, masks = _bounds(op, len(shape)), op.dtype(op.op.results[0]), _Masks(shape, axes)

    def run(env: Env) -> None:
        view, where = env[source], [env[s] for s in at]
        extents = _extents(view, where, shape, axes, inside)
        lanes: Any
        lanes, reach, dense = (None, extents, True) if mask is None else masks(env[mask])
        extents = [min(a, b) for a, b in zip(extents, reach, strict=True)]
        result = np.full(shape, env[padding], dtype)
        if all(extents):
            box, found = tuple(slice(0, n) for n in extents), _window(view, where, extents, axes).array()
            result[box] = found if dense else np.where(lanes[box], found, result[box])
        env[out] = result

    return run


@meaning("vector.transfer_write")
def _write(op: Op) -> Run:
    groups = op.segments()
    (value,), (target,), at = groups[:3]
    mask = groups[3][0] if len(groups) > 3 and groups[3] else None
    shape, axes = tuple(op.op.operands[0].type.shape), _axes(op)
    inside, masks = _bounds(op, len(shape)), _Masks(shape, axes)

    def run(env: Env) -> None:
        view, where = env[target], [env[s] for s in at]
        extents = _extents(view, where, shape, axes, inside)
        lanes: Any
        lanes, reach, dense = (None, extents, True) if mask is None else masks(env[mask])
        extents = [min(a, b) for a, b in zip(extents, reach, strict=True)]
        if not all(extents):
            return
        box = tuple(slice(0, n) for n in extents)
        there, new = _window(view, where, extents, axes).array(), np.asarray(env[value]).reshape(shape)[box]
        there[...] = new if dense else np.where(lanes[box], new, there)

    return run


@meaning("vector.shape_cast")
def _shape_cast(op: Op) -> Run:
    (x,), (out,), shape = op.operands, op.results, tuple(op.op.results[0].type.shape)

    def run(env: Env) -> None:
        env[out] = np.asarray(env[x]).reshape(shape)

    return run


@meaning("vector.broadcast", "vector.splat")
def _broadcast(op: Op) -> Run:
    (x,), (out,), shape, dtype = op.operands, op.results, tuple(op.op.results[0].type.shape), op.dtype(op.op.results[0])

    def run(env: Env) -> None:
        env[out] = np.broadcast_to(np.asarray(env[x], dtype), shape).copy()

    return run


@meaning("vector.constant_mask", "vector.create_mask")
def _mask(op: Op) -> Run:
    (out,), shape, operands = op.results, tuple(op.op.results[0].type.shape), op.operands
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
    total = function.reduce(values, dtype=values.dtype) if values.size else start
    if start is not None and values.size:
        total = function(total, np.asarray(start, values.dtype).reshape(()))
    return int(total) if dtype.kind in "iub" else dtype.type(total)


@meaning("vector.reduction")
def _reduction(op: Op) -> Run:
    (function, x, start), (out,), dtype = _reduced(op), op.results, op.dtype(op.op.results[0])

    def run(env: Env) -> None:
        env[out] = _finish(function, np.asarray(env[x]), None if start is None else env[start], dtype)

    return run


@meaning("vector.mask")
def _masked(op: Op) -> Run | None:
    """A reduction under a mask; other masked ops do not occur."""
    inner = next(o.operation for o in op.op.regions[0].blocks[0].operations)
    if inner.name != "vector.reduction":
        op.block(0)
        return _unmasked(op)
    child = Op(inner, op.function, [op.function.slot(v) for v in inner.operands], [])
    function, x, start = _reduced(child)
    (mask, *_), (out,), dtype = op.operands, op.results, op.dtype(op.op.results[0])

    def run(env: Env) -> None:
        env[out] = _finish(function, np.asarray(env[x])[np.asarray(env[mask])], None if start is None else env[start], dtype)

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


def _simple(function: Callable[..., Any]) -> Callable[[Op], Run]:
    def handler(op: Op) -> Run:
        operands, results, build = op.operands, op.results, function(op)

        def run(env: Env) -> None:
            found = build(*(env[s] for s in operands))
            for slot, value in zip(results, found if len(results) > 1 else [found], strict=True):
                env[slot] = value

        return run

    return handler


def _interleaved(a: Any, b: Any) -> Any:
    a, b = np.asarray(a), np.asarray(b)
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
