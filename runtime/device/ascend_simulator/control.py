"""Meanings of control flow, calls, addresses and memref views."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from tapeout.runtime.device.ascend_simulator.attributes import groups
from tapeout.runtime.device.ascend_simulator.batch import BatchedLoop, at_once, may_batch
from tapeout.runtime.device.ascend_simulator.memory import SimulationError, View, whole
from tapeout.runtime.device.ascend_simulator.program import CORE_SLOT, Env, Op, Run, execute, meaning
from tapeout.runtime.device.ascend_simulator.text import DYNAMIC


@meaning("scf.for")
def _for(op: Op) -> Run:
    if op.level and len(op.operands) == 3:  # inside a loop that runs at once, and was found to be independent with all of its loops
        return at_once(op)
    is_simple = op.scope.function.program.at_once and not op.level and may_batch(op.node)
    return BatchedLoop(op, _one_by_one(op)) if is_simple else _one_by_one(op)


def _one_by_one(op: Op) -> Run:
    low, high, step, *starts = op.operands
    (counter, *carried), code = op.block(0)
    results = op.results

    def run(env: Env) -> None:
        values = [env[s] for s in starts]
        for i in range(env[low], env[high], env[step]):
            env[counter] = i
            for slot, value in zip(carried, values, strict=True):
                env[slot] = value
            values = execute(code, env)
        for slot, value in zip(results, values, strict=True):
            env[slot] = value

    return run


@meaning("scf.if")
def _if(op: Op) -> Run:
    (mask,), results = op.operands, op.results
    then, otherwise = op.block(0)[1], op.block(1)[1]

    def run(env: Env) -> None:
        values = execute(then if env[mask] else otherwise, env)
        for slot, value in zip(results, values or (), strict=True):
            env[slot] = value

    return run


@meaning("scf.while")
def _while(op: Op) -> Run:
    starts, results = op.operands, op.results
    (before, test), (after, body) = op.block(0), op.block(1)

    def run(env: Env) -> None:
        values = [env[s] for s in starts]
        while True:
            for slot, value in zip(before, values, strict=True):
                env[slot] = value
            goes_on, *values = execute(test, env)
            if not goes_on:
                break
            for slot, value in zip(after, values, strict=True):
                env[slot] = value
            values = execute(body, env)
        for slot, value in zip(results, values, strict=True):
            env[slot] = value

    return run


@meaning("scf.yield", "func.return", "vector.yield", "scf.condition")
def _yield(op: Op) -> Run:
    operands = op.operands
    return lambda env: tuple(env[slot] for slot in operands)


@meaning("func.call")
def _call(op: Op) -> Run:
    name = (op.attribute("callee") or "").removeprefix("@")
    functions, operands, results = op.scope.function.program.functions, op.operands, op.results

    def run(env: Env) -> None:
        for slot, value in zip(results, functions[name].call([env[s] for s in operands], env[CORE_SLOT]), strict=True):
            env[slot] = value

    return run


@meaning("builtin.unrealized_conversion_cast")
def _conversion(op: Op) -> Run:
    operands, results, kinds = op.operands, op.results, op.node.result_kinds
    if kinds[0].form != "vector":
        return _scalar_of(operands[0], results[0], op.rank())
    ranks = [op.rank(number) for number in range(len(operands))]

    def run(env: Env) -> None:
        # Registers: inputs follow one another, results take them in order; what is left over falls away.
        parts = []
        for slot, rank in zip(operands, ranks, strict=True):
            value = np.asarray(env[slot])
            parts.append(value.reshape((*value.shape[: value.ndim - rank], -1)))
        lead, at = np.broadcast_shapes(*(part.shape[:-1] for part in parts)), 0
        values = parts[0] if len(parts) == 1 else np.concatenate([np.broadcast_to(part, (*lead, part.shape[-1])) for part in parts], -1)
        for slot, kind in zip(results, kinds, strict=True):
            size = int(np.prod(kind.shape))
            env[slot], at = values[..., at : at + size].reshape(lead + kind.shape), at + size

    return run


def _scalar_of(source: int, target: int, rank: int) -> Run:
    """The one number of a register, or a value as it is."""

    def run(env: Env) -> None:
        value = env[source]
        if isinstance(value, np.ndarray) and rank:
            value = value.reshape(value.shape[: value.ndim - rank])
        env[target] = value

    return run


def _copied(source: int, target: int) -> Run:
    def run(env: Env) -> None:
        env[target] = env[source]

    return run


# ---- addresses ---------------------------------------------------------------------------------------------------------


@meaning("affine.apply", "affine.min", "affine.max")
def _affine(op: Op) -> Run:
    expressions, operands, (out,) = op.map("map", "lowerBoundMap").results, op.operands, op.results
    choose: Any = {"apply": lambda v: v[0], "min": min, "max": max}[op.name.split(".")[1]]

    def run(env: Env) -> None:
        values = [env[s] for s in operands]
        env[out] = choose([e(values) for e in expressions])

    return run


def _mixed(static: Sequence[int], slots: Sequence[int]) -> Callable[[Env], list[int]]:
    """Extents, offsets or strides of which some are operands."""
    left = list(slots)
    if not left:
        fixed = list(static)
        return lambda env: fixed
    plan = [(True, left.pop(0)) if n == DYNAMIC else (False, n) for n in static]
    return lambda env: [env[n] if runs else n for runs, n in plan]


@meaning("memref.subview")
def _subview(op: Op) -> Run:
    (source, *_), offsets, sizes, steps = op.segments()
    at, extents, strides = (_mixed(op.integers(f"static_{name}"), slots)
                            for name, slots in (("offsets", offsets), ("sizes", sizes), ("strides", steps)))
    (out,), kept = op.results, _kept_axes(op)
    is_fixed = not (offsets or sizes or steps)
    known: list[Any] = [None, None]  # of a fixed window: the view it was cut from last, and the window

    def run(env: Env) -> None:
        view: View = env[source]
        if is_fixed and view is known[0]:
            env[out] = known[1]
            return
        offset = view.offset
        for a, s in zip(at(env), view.strides, strict=True):
            offset += a * s
        shape, stride = extents(env), [a * b for a, b in zip(strides(env), view.strides, strict=True)]
        env[out] = view.moved(offset, [shape[i] for i in kept], [stride[i] for i in kept])
        if is_fixed:
            known[:] = view, env[out]

    return run


def _kept_axes(op: Op) -> list[int]:
    """Axes of a subview that its result type keeps: where the rank is lower, unit axes fell away."""
    sizes, result = op.integers("static_sizes"), list(op.shape)
    kept: list[int] = []
    drop = len(sizes) - len(result)
    for axis, size in enumerate(sizes):
        wanted = result[len(kept)] if len(kept) < len(result) else None
        if drop and size == 1 and (wanted != 1 or sum(n == 1 for n in sizes[axis:]) > sum(n == 1 for n in result[len(kept) :])):
            drop -= 1
        else:
            kept.append(axis)
    return kept


@meaning("memref.reinterpret_cast")
def _reinterpret(op: Op) -> Run:
    (source, *_), offsets, sizes, steps = op.segments()
    at, extents, strides = (_mixed(op.integers(f"static_{name}"), slots)
                            for name, slots in (("offsets", offsets), ("sizes", sizes), ("strides", steps)))
    (out,) = op.results

    def run(env: Env) -> None:
        view: View = env[source]
        env[out] = view.moved(view.base + at(env)[0], extents(env), strides(env))

    return run


@meaning("memref.cast", "memref.memory_space_cast")
def _cast(op: Op) -> Run:
    return _copied(op.operands[0], op.results[0])


def _groups(op: Op) -> list[list[int]]:
    return groups(op.attribute("reassociation") or "")


@meaning("memref.collapse_shape")
def _collapse(op: Op) -> Run:
    (source,), (out,), axes = op.operands, op.results, _groups(op)

    def run(env: Env) -> None:
        view: View = env[source]
        merged = [_merged(view, group) for group in axes]
        env[out] = view.moved(view.offset, [n for n, _ in merged], [s for _, s in merged])

    return run


def _merged(view: View, group: list[int]) -> tuple[int, int]:
    long = [axis for axis in group if view.shape[axis] != 1]
    for a, b in pairwise(long):
        if view.strides[a] != view.strides[b] * view.shape[b]:
            raise SimulationError(f"axes {group} of a view {view.shape} with strides {view.strides} are not one")
    return int(np.prod([view.shape[axis] for axis in group])), view.strides[(long or group)[-1]]


@meaning("memref.expand_shape")
def _expand(op: Op) -> Run:
    source, *extents = op.operands
    (out,), axes, shape = op.results, _groups(op), _mixed(op.integers("static_output_shape"), extents)

    def run(env: Env) -> None:
        view: View = env[source]
        sizes = shape(env)
        strides = [0] * len(sizes)
        for axis, group in enumerate(axes):
            stride = view.strides[axis]
            for inner in reversed(group):
                strides[inner], stride = stride, stride * sizes[inner]
        env[out] = view.moved(view.offset, sizes, strides)

    return run


@meaning("memref.alloca", "memref.alloc")
def _alloca(op: Op) -> Run:
    dynamic, (out,), dtype = op.operands, op.results, op.result_dtype
    extents = _mixed(list(op.shape), dynamic)

    def run(env: Env) -> None:
        shape = extents(env)
        env[out] = whole(np.full(max(1, int(np.prod(shape))) * dtype.itemsize, 0xFF, np.uint8), dtype, shape, "stack")

    return run


@meaning("memref.dim")
def _dim(op: Op) -> Run:
    (source, axis), (out,) = op.operands, op.results

    def run(env: Env) -> None:
        env[out] = env[source].shape[env[axis]]

    return run


@meaning("memref.load")
def _load(op: Op) -> Run:
    source, *at = op.operands
    (out,) = op.results

    def run(env: Env) -> None:
        found = _element(env[source], [env[s] for s in at])[()]
        env[out] = found.item() if found.dtype.kind in "iub" else found

    return run


@meaning("memref.store")
def _store(op: Op) -> Run:
    value, target, *at = op.operands

    def run(env: Env) -> None:
        _element(env[target], [env[s] for s in at])[()] = env[value]

    return run


def _element(view: View, at: Sequence[int]) -> Any:
    return view.moved(view.offset + sum(i * s for i, s in zip(at, view.strides, strict=True)), (), ()).array()
