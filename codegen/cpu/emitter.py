"""Where loops are written: a stack of open loop levels, constants and stack buffers at the function's entry, and hoisting by construction.

A value is created at the shallowest level that knows its operands (`at`), so nothing invariant is computed in an inner loop; each level
remembers what it already holds. A `nest` is one traversal of a tile: its memory of loaded values ends with it, since buffers change
between nests.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tapeout.codegen.cpu.linear_index import Counter, Index, number
from tapeout.dialects._mlir import arith, ir, memref, scf

BYTES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "f32": 4, "i64": 8, "f64": 8}
ALIGNMENT = 64


@dataclass
class Level:
    """One open block: where its ops go, and what it has computed."""

    block: Any
    anchor: Any = None  # the loop being written inside it; hoisted ops go in front
    pure: dict[Any, Any] = field(default_factory=dict)
    loaded: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Buffer:
    """A stack buffer: flat memref of `count` elements of register type `rep`."""

    memory: Any
    rep: str
    count: int

    @property
    def size_bytes(self) -> int:
        """Bytes on the stack."""
        return self.count * BYTES[self.rep]


class Emitter:
    """The function being written."""

    def __init__(self, entry: Any, spare_rows: int = 0) -> None:
        self.entry = entry
        self.spare_rows = spare_rows  # rows behind a rank 2 f32 stack tile that products may overwrite
        self.levels = [Level(entry)]
        self.base = 0
        self.depths: dict[Any, int] = {}
        self._constants: dict[Any, Any] = {}
        self._free: dict[str, list[Buffer]] = {}
        self.taken: list[list[Buffer]] = []  # buffers taken in each open scope
        self._serial = 0
        self._types: dict[tuple[str, int], Any] = {}
        self.buffers: list[Buffer] = []  # all stack buffers of the function

    # ---- levels

    @property
    def depth(self) -> int:
        """The depth of the innermost open level."""
        return len(self.levels) - 1

    def at(self, depth: int) -> Any:
        """The insertion point for a value of that depth: in front of the loop being written there, or at the block's end."""
        level = self.levels[depth]
        return ir.InsertionPoint(level.anchor) if level.anchor is not None else ir.InsertionPoint(level.block)

    def here(self) -> Any:
        """The insertion point at the end of the innermost block."""
        return self.at(self.depth)

    @contextlib.contextmanager
    def nest(self) -> Iterator[None]:
        """One traversal: values read from memory are remembered inside, and never above the current level."""
        level = self.levels[-1]
        kept, level.loaded, base, self.base = level.loaded, {}, self.base, self.depth
        yield
        level.loaded, self.base = kept, base

    @contextlib.contextmanager
    def inside(self, op: Any, block: Any) -> Iterator[None]:
        """Writes into a block of `op`, which is already in place."""
        self.levels[-1].anchor = op
        self.levels.append(Level(block))
        yield
        self.levels.pop()
        self.levels[-1].anchor = None

    @contextlib.contextmanager
    def loop(self, low: Any, high: Any, step: int, extent: int = 0, carried: Sequence[Any] = ()) -> Iterator["Loop"]:
        """scf.for over [low, high): ints or values. `extent` bounds the counter for index arithmetic (0: unknown)."""
        with self.here():
            op = scf.ForOp(self.index(low), self.index(high), self.index(step), list(carried))
        with self.inside(op, op.body):
            loop = Loop(op, self.counter(op.induction_variable, extent))
            yield loop
            with self.here():
                scf.YieldOp(list(loop.yielded))

    @contextlib.contextmanager
    def branch(self, condition: Any) -> Iterator[None]:
        """scf.if without results and without else."""
        with self.here():
            op = scf.IfOp(condition)
        with self.inside(op, op.then_block):
            yield
            with self.here():
                scf.YieldOp([])

    # ---- values

    def counter(self, value: Any, extent: int = 0, depth: int | None = None) -> Index:
        """An index value as a linear form."""
        self._serial += 1
        return Index(0, ((Counter(value, self.depth if depth is None else depth, extent, self._serial), 1),))

    def constant(self, rep: str, value: Any, lanes: int = 1) -> Any:
        """A number, or a vector of equal (or listed) numbers, at the function's entry."""
        key = (rep, lanes, tuple(value) if isinstance(value, list | tuple) else value, str(value))
        if key not in self._constants:
            with ir.InsertionPoint.at_block_begin(self.entry):
                self._constants[key] = arith.constant(self.type(rep, lanes), self._attribute(rep, value, lanes))
        return self._constants[key]

    def _attribute(self, rep: str, value: Any, lanes: int) -> Any:
        if isinstance(value, list | tuple):
            entries = [self._attribute(rep, v, 1) for v in value]
            return ir.DenseElementsAttr.get(entries, self.type(rep, lanes))
        scalar = self.type(rep)
        attribute = ir.FloatAttr.get(scalar, float(value)) if rep[0] == "f" else ir.IntegerAttr.get(scalar, wrap(rep, value))
        return attribute if lanes == 1 else ir.DenseElementsAttr.get_splat(self.type(rep, lanes), attribute)

    def type(self, rep: str, lanes: int = 1) -> Any:
        """The MLIR type of a register: a scalar for one lane."""
        if (rep, lanes) not in self._types:
            scalar = ir.IndexType.get() if rep == "index" else ir.Type.parse(rep)
            self._types[rep, lanes] = scalar if lanes == 1 else ir.VectorType.get([lanes], scalar)
        return self._types[rep, lanes]

    def index(self, value: Any) -> Any:
        """An int or an `Index` as an index value; values pass."""
        if isinstance(value, int):
            return self.constant("index", value)
        return self.value_of(value) if isinstance(value, Index) else value

    def value_of(self, form: Index) -> Any:
        """The value of a linear form, made at the depth that knows it."""
        level = self.levels[form.depth].pure
        if form not in level:
            with self.at(form.depth):
                level[form] = self._sum(form)
        return level[form]

    def _sum(self, form: Index) -> Any:
        total = None
        for counter, factor in sorted(form.terms, key=lambda term: term[0].depth):
            term = counter.value if factor == 1 else arith.muli(counter.value, self.constant("index", factor))
            total = term if total is None else arith.addi(total, term)
        if total is None:
            return self.constant("index", form.constant)
        return arith.addi(total, self.constant("index", form.constant)) if form.constant else total

    def divide(self, form: Index, divisor: int) -> tuple[Index, Index]:
        """(quotient, remainder) of a linear form that is never negative."""
        if divisor == 1:
            return form, number(0)
        exact = form.split(divisor)
        if exact is not None:
            return exact
        level = self.levels[form.depth].pure
        if (form, divisor) not in level:
            value = self.value_of(form)
            with self.at(form.depth):
                parts = [op(value, self.constant("index", divisor)) for op in (arith.divui, arith.remui)]
            bound = 0 if form.limit is None else (form.limit - 1) // divisor + 1
            level[form, divisor] = (
                self.counter(parts[0], bound, form.depth),
                self.counter(parts[1], divisor, form.depth),
            )
        quotient, remainder = level[form, divisor]
        return quotient, remainder

    # ---- stack buffers

    def buffer(self, rep: str, count: int) -> Buffer:
        """A stack buffer, taken from those given back where one is large enough and not wastefully so."""
        found = self._buffer(rep, count)
        if self.taken:
            self.taken[-1].append(found)
        return found

    def _buffer(self, rep: str, count: int) -> Buffer:
        fitting = [b for b in self._free.get(rep, []) if count <= b.count <= 2 * count + 64]
        if fitting:
            best = min(fitting, key=lambda b: b.count)
            self._free[rep].remove(best)
            return best
        stored = "i8" if rep == "i1" else rep
        with ir.InsertionPoint.at_block_begin(self.entry):
            memory = memref.alloca(ir.MemRefType.get([max(count, 1)], self.type(stored)), [], [], alignment=ALIGNMENT)
        self.buffers.append(Buffer(memory, rep, max(count, 1)))
        return self.buffers[-1]

    def give_back(self, buffer: Buffer) -> None:
        """Lets a later request reuse a buffer."""
        for taken in self.taken:
            if buffer in taken:
                taken.remove(buffer)
        self._free.setdefault(buffer.rep, []).append(buffer)


@dataclass
class Loop:
    """An open loop: its counter and carried values; `yielded` is what the body passes on."""

    op: Any
    counter: Index
    yielded: Sequence[Any] = ()

    @property
    def carried(self) -> list[Any]:
        """The values at the start of this turn."""
        return list(self.op.inner_iter_args)

    @property
    def results(self) -> list[Any]:
        """The values after the last turn."""
        return list(self.op.results)


def wrap(rep: str, value: int) -> int:
    """An integer as the signed number with the same bits."""
    if rep == "index":
        return int(value)
    if rep == "i1":
        return int(bool(value))
    bits = BYTES[rep] * 8
    return int(np.int64(((int(value) + 2 ** (bits - 1)) % 2**bits) - 2 ** (bits - 1)))
