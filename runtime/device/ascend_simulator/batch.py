"""Loops whose iterations do not depend on one another, run at once: one numpy call an op instead of one an op and iteration.

`may_batch` says from the text whether a loop qualifies: addresses are linear in its counter, and it carries nothing. Whether iterations touch
one another's memory depends on where the buffers lie; `is_independent` finds out by walking the addresses alone, once for each set of places.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import gcd, prod
from typing import Any

import numpy as np

from tapeout.runtime.device.ascend_simulator.attributes import affine_map
from tapeout.runtime.device.ascend_simulator.memory import Linear, View
from tapeout.runtime.device.ascend_simulator.program import HANDLERS, IGNORED, TIMES_SLOT, Env, Op, Run, Scope, execute
from tapeout.runtime.device.ascend_simulator.text import Kind, Node

VIEWS = frozenset({
    "memref.subview", "memref.reinterpret_cast", "memref.collapse_shape", "memref.expand_shape", "memref.cast", "memref.memory_space_cast",
})  # fmt: skip
TRANSFERS = frozenset({"vector.transfer_read", "vector.transfer_write"})
LANES = frozenset({
    "vector.shape_cast", "vector.broadcast", "vector.splat", "vector.constant_mask", "vector.create_mask", "vector.reduction",
    "vector.interleave", "vector.deinterleave", "builtin.unrealized_conversion_cast",
})  # fmt: skip
ENDS = frozenset({"scf.yield", "vector.yield"})
LINEAR = frozenset({"arith.addi", "arith.subi", "arith.index_cast", "arith.extsi", "arith.trunci"})
ADDRESSES = VIEWS | LINEAR | {"arith.constant", "affine.apply", "arith.muli"}
"""What a walk over addresses runs, where it makes no vector."""
MASKS = frozenset({"arith.constant", "vector.constant_mask", "vector.create_mask", "vector.shape_cast"})


# ---- what the text says ------------------------------------------------------------------------------------------------


class _Text:
    """Walks a loop's body: names that change from iteration to iteration, and those of them that are no linear function of counters."""

    def __init__(self) -> None:
        self.varying: set[str] = set()
        self.crooked: set[str] = set()

    def loop(self, node: Node) -> bool:
        """Whether a loop, its bounds fixed outside, may run with others at once."""
        if any(name in self.varying for name in node.operands[:3]):
            return False
        block = node.regions[0][0]
        (counter, _), *carried = block.arguments
        if any(kind.form == "memref" or (kind.form == "scalar" and kind.element == "index") for _, kind in carried):
            return False
        self.varying |= {counter, *(name for name, _ in carried), *node.results}
        self.crooked |= {*(name for name, _ in carried), *node.results}
        return all(self._op(op) for op in block.ops)

    def _op(self, node: Node) -> bool:
        if node.name in IGNORED or node.name in ENDS:
            return True
        if node.name == "scf.for":
            return self.loop(node)
        if node.name == "vector.mask":
            self.varying |= set(node.results)
            self.crooked |= set(node.results)
            return all(op.name in ("vector.reduction", "vector.yield") for op in _nodes(node))
        changing = [name for name in node.operands if name in self.varying]
        known = self._known(node, changing)
        if changing or node.name == "vector.transfer_read":
            self.varying |= set(node.results)
            if known and not self._is_linear(node, changing):
                self.crooked |= set(node.results)
        return known

    def _is_linear(self, node: Node, changing: Sequence[str]) -> bool:
        if any(name in self.crooked for name in changing):
            return False
        if node.name == "affine.apply":
            return affine_map(node.attributes["map"]).is_linear
        return node.name in VIEWS or node.name in LINEAR or (node.name == "arith.muli" and len(changing) == 1)

    def _known(self, node: Node, changing: Sequence[str]) -> bool:
        """Whether an op has a meaning for many iterations at once."""
        if node.name in VIEWS or node.name in TRANSFERS:
            return self._is_access_known(node, changing)
        if node.name == "affine.apply":
            return not changing or self._is_linear(node, changing)
        if node.name in LANES:
            return not (node.name == "vector.create_mask" and changing)
        if not node.name.startswith(("arith.", "math.")):
            return False
        scalars = any(kind.form == "scalar" for kind in node.result_kinds)
        return not (scalars and changing) or self._is_linear(node, changing) or all(name in self.crooked for name in changing)

    def _is_access_known(self, node: Node, changing: Sequence[str]) -> bool:
        """Addresses must be linear; extents, strides and what decides whether lanes are inside must not change."""
        data = {name for name, kind in zip(node.operands, node.operand_kinds, strict=True) if kind.form == "vector" or (node.name in TRANSFERS
                and kind.form == "scalar" and kind.element != "index")}  # fmt: skip
        moved = [name for name in changing if name not in data]
        if any(name in self.crooked for name in moved):
            return False
        if node.name in TRANSFERS:
            indices = [n for n, kind in zip(node.operands, node.operand_kinds, strict=True) if kind.form == "scalar" and kind.element == "index"]
            return "false" not in node.attributes.get("in_bounds", "false") or not any(name in self.varying for name in indices)
        if "operandSegmentSizes" not in node.attributes:
            return all(kind.form == "memref" for kind in node.operand_kinds)
        sources, offsets, *_ = _segments(node)
        return not any(name in self.varying for name in node.operands[sources + offsets :])


def _segments(node: Node) -> list[int]:
    return [int(n) for n in node.attributes["operandSegmentSizes"].removeprefix("array<i32:").removesuffix(">").split(",")]


def may_batch(node: Node) -> bool:
    """Whether a loop's text lets all iterations run at once."""
    return len(node.operands) == 3 and not node.results and _Text().loop(node) and _has_transfers(node)


def _nodes(node: Node) -> Iterator[Node]:
    for region in node.regions:
        for block in region:
            for op in block.ops:
                yield op
                yield from _nodes(op)


def _has_transfers(node: Node) -> bool:
    return any(op.name in TRANSFERS for op in _nodes(node))


def free_places(node: Node) -> list[tuple[str, Kind]]:
    """Views and scalars that a loop reads and does not make."""
    made: set[str] = {name for region in node.regions for block in region for name, _ in block.arguments}
    read: dict[str, Kind] = {}
    for op in _nodes(node):
        made |= {*op.results, *(name for region in op.regions for block in region for name, _ in block.arguments)}
        read.update(zip(op.operands, op.operand_kinds, strict=True))
    return [(name, kind) for name, kind in read.items() if name not in made and kind.form != "vector"]


# ---- what memory says --------------------------------------------------------------------------------------------------


Loops = tuple[tuple[int, int], ...]
"""Loops that run at once around an access, outermost first: a number and the trip count of each."""


@dataclass(frozen=True)
class Access:
    """One read or write of all iterations of `loops`."""

    view: View
    loops: Loops
    writes: bool

    @property
    def reach(self) -> tuple[int, int]:
        """The first byte and the one behind the last."""
        offset, size = self.view.offset, self.view.dtype.itemsize
        low, high = offset.bounds if isinstance(offset, Linear) else (offset, offset)
        for n, stride in zip(self.view.shape, self.view.strides, strict=True):
            low, high = low + min(0, (n - 1) * stride), high + max(0, (n - 1) * stride)
        return low * size, (high + 1) * size

    @property
    def pattern(self) -> tuple[Any, ...]:
        """Equal for accesses that touch the same bytes in iterations of the same numbers."""
        offset = self.view.offset
        where = (offset.start, offset.coefficients) if isinstance(offset, Linear) else (offset, ())
        return (id(self.view.memory), *where, self.view.shape, self.view.strides, self.view.dtype.itemsize, [n for _, n in self.loops])

    def axes(self) -> tuple[list[int], list[int]]:
        """Extents and byte strides: the loops, then the view's own axes."""
        offset, size = self.view.offset, self.view.dtype.itemsize
        coefficients = offset.coefficients if isinstance(offset, Linear) else ()
        moved = [c * size for c in (*coefficients, *[0] * (len(self.loops) - len(coefficients)))]
        return [*(n for _, n in self.loops), *self.view.shape], [*moved, *(s * size for s in self.view.strides)]

    def units(self, unit: int) -> Any:
        """Numbers of the units of memory that are touched, iterations in order."""
        extents, strides = self.axes()
        offset = self.view.offset
        found: Any = np.full((1,) * len(extents), (offset.start if isinstance(offset, Linear) else offset) * self.view.dtype.itemsize)
        for axis, (n, stride) in enumerate(zip(extents, strides, strict=True)):
            found = found + (np.arange(n) * stride).reshape([n if a == axis else 1 for a in range(len(extents))])
        within = np.arange(0, self.view.dtype.itemsize, unit)
        return ((np.broadcast_to(found, extents)[..., None] + within) // unit).reshape(-1)

    def is_apart(self) -> bool:
        """Whether no two iterations touch the same byte."""
        extents, strides = self.axes()
        covered = self.view.dtype.itemsize
        for stride, n in sorted((abs(s), n) for n, s in zip(extents, strides, strict=True) if n > 1):
            if stride < covered:
                break
            covered += stride * (n - 1)
        else:
            return True
        flat = self.units(self.view.dtype.itemsize)
        return bool(len(np.unique(flat)) == flat.size)


@dataclass
class Walk:
    """A walk over the addresses of a loop: accesses in the order in which they would be made at once, and the loops around the next."""

    accesses: list[Access] = field(default_factory=list)
    loops: Loops = ()
    is_local: bool = True


MOST_ACCESSES = 400


def is_independent(walk: Walk) -> bool:
    """Whether making each access for all iterations at once, in order, leaves what the iterations one after the other leave."""
    found = walk.accesses
    if not walk.is_local or len(found) > MOST_ACCESSES:
        return False
    for number, access in enumerate(found):
        if access.writes and not access.is_apart():
            return False
        if not all(_is_ordered(earlier, access) for earlier in found[:number] if earlier.writes or access.writes):
            return False
    return True


def _is_ordered(earlier: Access, later: Access) -> bool:
    """Whether no iteration of `later` touches a byte that a later iteration of `earlier` touches: at once, `earlier` comes first."""
    (a, b), (c, d) = earlier.reach, later.reach
    apart = earlier.view.memory is not later.view.memory or b <= c or d <= a
    if apart or (earlier.pattern == later.pattern and later.is_apart()):
        return True
    unit = gcd(earlier.view.dtype.itemsize, later.view.dtype.itemsize)
    first, second = earlier.units(unit), later.units(unit)
    shared = [n for (one, n), (other, _) in zip(earlier.loops, later.loops, strict=False) if one == other]
    iterations, low = prod(shared), int(min(first.min(), second.min()))
    latest = np.full(int(max(first.max(), second.max())) - low + 1, -1)
    latest[first - low] = np.arange(iterations).repeat(first.size // iterations)  # places met twice keep the last, which is the largest
    return bool((latest[second - low] <= np.arange(iterations).repeat(second.size // iterations)).all())


# ---- running -----------------------------------------------------------------------------------------------------------


class BatchedLoop:
    """A loop of the outermost level: run at once where its iterations are independent, else one after the other."""

    def __init__(self, op: Op, one_by_one: Run) -> None:
        self.op, self.one_by_one = op, one_by_one
        self.slots = [op.scope.operand(name, kind) for name, kind in free_places(op.node)]
        self.known: dict[tuple[Any, ...], bool] = {}
        self.at_once: Run | None = None

    def __call__(self, env: Env) -> None:
        low, high, step = (env[s] for s in self.op.operands)
        if high - low <= step:
            self.one_by_one(env)
            return
        key = (low, high, step, *(_key(env[s]) for s in self.slots))
        if key not in self.known:
            self.known[key] = self._is_independent(env)
        if not self.known[key]:
            self.one_by_one(env)
            return
        if self.at_once is None:
            self.at_once = at_once(self.op)
            self.op.scope.function.room(env)
        self.at_once(env)

    def _is_independent(self, env: Env) -> bool:
        function, walk = self.op.scope.function, Walk()
        scope = Scope(function, self.op.level, lambda op: _address(op, walk))
        run = at_once(Op(self.op.node, scope), walk)
        function.room(env)
        clean = list(env)
        clean[TIMES_SLOT] = 0  # a walk computes nothing
        for op in _nodes(self.op.node):
            for name in op.results:
                clean[function.slot(name)] = None
        run(clean)
        return is_independent(walk)


def _key(value: Any) -> Any:
    if isinstance(value, View):
        return (value.space, value.offset, value.shape, value.strides, value.dtype.char)
    return value if isinstance(value, int) else None


def at_once(op: Op, walk: Walk | None = None) -> Run:
    """All iterations of a loop as one more leading axis."""
    inner = op.scope.inner(levels=1)
    (counter,), code = op.block(0, inner)
    low, high, step = op.operands
    level = op.level

    def run(env: Env) -> None:
        first, stride = env[low], env[step]
        count = len(range(first, env[high], stride))
        if not count:
            return
        outer = () if walk is None else walk.loops
        if walk is not None:
            walk.loops = (*outer, (id(run), count))
        times = env[TIMES_SLOT]
        inner.lift(env)
        env[TIMES_SLOT] = times * count
        env[counter] = Linear(first, (0,) * level + (stride,), (1,) * level + (count,))
        execute(code, env)
        env[TIMES_SLOT] = times
        if walk is not None:
            walk.loops = outer

    return run


def _address(op: Op, walk: Walk) -> Run | None:
    """How a walk runs an op: addresses as they are, transfers into the list, nothing else."""
    if op.name == "scf.for":
        return at_once(op, walk) if len(op.operands) == 3 else _steps(op)
    if op.name in TRANSFERS:
        return _recorded(op, walk)
    if op.name in ADDRESSES and op.node.result_kinds[0].form != "vector":
        return HANDLERS[op.name](op)
    return _mask(op) if op.name in MASKS and op.node.result_kinds[0].element == "i1" else None


def _mask(op: Op) -> Run | None:
    """Masks that do not come from data; the others are unknown to a walk."""
    run = HANDLERS[op.name](op)

    def known(env: Env) -> None:
        if run is not None and all(env[s] is not None for s in op.operands):
            run(env)

    return known


def _steps(op: Op) -> Run:
    low, high, step = op.operands[:3]
    (counter, *_), code = op.block(0)

    def run(env: Env) -> None:
        for i in range(env[low], env[high], env[step]):
            env[counter] = i
            execute(code, env)

    return run


def _recorded(op: Op, walk: Walk) -> Run:
    from tapeout.runtime.device.ascend_simulator.vectors import touched

    find = touched(op)

    def run(env: Env) -> None:
        view = find(env)
        if view is not None:
            walk.is_local = walk.is_local and view.space != "gm"
            walk.accesses.append(Access(view, walk.loops, op.name == "vector.transfer_write"))

    return run
