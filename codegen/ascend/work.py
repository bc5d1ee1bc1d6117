"""What one instance of a lowered kernel does, read from its dump: vector operations, multiply-adds by element, bytes of global memory.

Loops of known length are multiplied out. A loop whose length only the run knows is a *step* where the cube multiplies in it or a vector core
serves the cube in it, and is counted once in any other place; a branch counts as its larger side. So the numbers are those of a full tile.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from tapeout.codegen.ascend.dump import COLLAPSE, Dump, is_counted, parsed
from tapeout.codegen.ascend.resources import BITS
from tapeout.dialects._mlir import ir

VECTOR, READ, WRITTEN, PRODUCTS = "vector_operations", "read", "written", "products"
MULTIPLIES = {"hivm.hir.mmadL1": 6, "hivm.hir.mmadmxL1": 8}
"""Products by name, with the operand behind M, K and N."""
ALIVE = frozenset({*MULTIPLIES, "hivm.hir.sync_block_wait", "hivm.hir.sync_block_set"})
COPIES = frozenset({"hivm.hir.load", "hivm.hir.nd2nz", "hivm.hir.load_scale", "hivm.hir.store", "hivm.hir.fixpipe"})
Counts = Counter[str]
DYNAMIC = ir.ShapedType.get_dynamic_size()


@dataclass(frozen=True)
class Work:
    """Of one instance, and of one pass over each of its steps. Vector operations are those of one vector core, the rest are of all cores.

    Keys: VECTOR, READ and WRITTEN (bytes), and PRODUCTS with the element, as `products.bf16` (multiply-adds).
    """

    instance: Mapping[str, int]
    step: Mapping[str, int]


def work(dump: str) -> Work:
    """The work of a kernel; raises what the bindings raise for a dump that the simulator could not read either."""
    read = parsed(dump)
    with read.context:
        entries = {name: op for name, op in read.functions.items() if "hacc.entry" in op.attributes}
        reader = _Reader(read)
        found = [(name, *reader.function(op)) for name, op in sorted(entries.items())]
    total: tuple[Counts, Counts] = (Counter(), Counter())
    for name, *parts in found:
        cores = 2 if name.endswith("_mix_aiv") else 1
        for into, counts in zip(total, parts, strict=True):
            into.update({key: value * (1 if key == VECTOR else cores) for key, value in counts.items()})
    return Work(*(dict(sorted((+counts).items())) for counts in total))


class _Reader:
    """Counts ops; bodies of called functions are counted once."""

    def __init__(self, dump: Dump) -> None:
        self.functions = dump.functions
        self.known: dict[str, tuple[Counts, Counts]] = {}

    def function(self, op: Any) -> tuple[Counts, Counts]:
        """(instance, step) of a device function: its outermost loop of unknown length walks instances."""
        instance, step = Counter[str](), Counter[str]()
        for block in op.regions[0].blocks:
            for inner in (o.operation for o in block.operations):
                is_walk = inner.name == "scf.for" and _trips(inner) is None
                found = self.block(inner.regions[0].blocks[0]) if is_walk else self.op(inner)
                instance.update(found[0])
                step.update(found[1])
        return instance, step

    def block(self, block: Any) -> tuple[Counts, Counts]:
        total = Counter[str](), Counter[str]()
        for op in block.operations:
            for into, counts in zip(total, self.op(op.operation), strict=True):
                into.update(counts)
        return total

    def op(self, op: Any) -> tuple[Counts, Counts]:
        """What one op adds to the instance, and to its steps."""
        if op.name == "scf.for":
            return self.loop(op)
        if op.name == "scf.if":
            sides = [self.block(region.blocks[0]) for region in op.regions if list(region.blocks)]
            return _larger([s[0] for s in sides]), _larger([s[1] for s in sides])
        if op.name == "func.call":
            return self.call(ir.FlatSymbolRefAttr(op.attributes["callee"]).value)
        inner = [self.block(block) for region in op.regions for block in region.blocks]
        counts = _counted(op)
        for part in inner:
            counts.update(part[0])
        return counts, Counter()

    def call(self, name: str) -> tuple[Counts, Counts]:
        if name not in self.known:
            regions = list(self.functions[name].regions)
            self.known[name] = self.block(regions[0].blocks[0]) if list(regions[0].blocks) else (Counter(), Counter())
        return self.known[name]

    def loop(self, op: Any) -> tuple[Counts, Counts]:
        instance, step = self.block(op.regions[0].blocks[0])
        trips = _trips(op)
        if trips is not None:
            return _times(instance, trips), _times(step, trips)
        if step or not any(o.name in ALIVE for o in _inside(op)):
            return instance, step
        return Counter(), instance


def _times(counts: Counts, number: int) -> Counts:
    return Counter({key: value * number for key, value in counts.items()})


def _larger(sides: list[Counts]) -> Counts:
    return Counter({key: max(side[key] for side in sides) for side in sides for key in side})


def _inside(op: Any) -> list[Any]:
    found = []
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                found += [inner.operation, *_inside(inner.operation)]
    return found


def _counted(op: Any) -> Counts:
    """What the op itself does."""
    counts = Counter[str]()
    if is_counted(op):
        counts[VECTOR] = 1
    if op.name in MULTIPLIES:
        last = MULTIPLIES[op.name]
        m, k, n = (_most(v) or 0 for v in list(op.operands)[last - 3 : last])
        counts[f"{PRODUCTS}.{ir.MemRefType(op.operands[0].type).element_type}"] = m * k * n
    if op.name in COPIES:
        source, target = op.operands[0], op.operands[1]
        size = min(filter(None, (_bytes(source), _bytes(target))), default=0)
        counts[READ if _is_global(source) else "local"] += size
        counts[WRITTEN if _is_global(target) else "local"] += size
        del counts["local"]
    if op.name in ("hivm.hir.indirect_load", "hivm.hir.indirect_store"):
        counts[READ if op.name.endswith("load") else WRITTEN] = _bytes(op.operands[2]) or 0
    return counts


def _is_global(value: Any) -> bool:
    return "gm" in str(ir.MemRefType(value.type).memory_space)


def _bytes(value: Any) -> int | None:
    """Bytes of a view; where its extents are known to the run alone, those of the view that it is part of."""
    kind = ir.MemRefType(value.type)
    owner = value.owner
    if DYNAMIC not in list(kind.shape):
        return prod(kind.shape) * BITS[str(kind.element_type)] // 8
    if isinstance(owner, ir.Block) or owner.name not in ("memref.subview", "memref.cast", COLLAPSE, "memref.expand_shape"):
        return None
    return _bytes(owner.operands[0])


def _trips(op: Any) -> int | None:
    """How often a loop runs at most; None where nothing in its bounds says so."""
    low, high, step = list(op.operands)[:3]
    by, first, last = _constant(step), _constant(low), _most(high)
    if by is None or last is None:
        return None
    return max(0, -(-(last - (first or 0)) // by))


def _constant(value: Any) -> int | None:
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != "arith.constant" or not isinstance(owner.attributes["value"], ir.IntegerAttr):
        return None
    return int(ir.IntegerAttr(owner.attributes["value"]).value)


def _most(value: Any) -> int | None:
    """The largest value that a number can have, as far as constants, minima and remainders say."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        return None
    known = [_most(v) for v in owner.operands] if owner.name in _MOST else []
    return _MOST[owner.name](known) if owner.name in _MOST else _constant(value)


def _least_known(known: list[int | None]) -> int | None:
    return min((k for k in known if k is not None), default=None)


def _all_known(known: list[int | None]) -> int | None:
    values = [k for k in known if k is not None]
    return max(values) if len(values) == len(known) else None


_MOST: dict[str, Callable[[list[int | None]], int | None]] = {
    "arith.minsi": _least_known, "arith.minui": _least_known, "arith.maxsi": _all_known, "arith.index_cast": _all_known,
    "arith.extsi": _all_known, "arith.trunci": _all_known, "arith.select": lambda known: _all_known(known[1:]),
    "arith.remui": lambda known: None if known[1] is None else known[1] - 1,
    "arith.remsi": lambda known: None if known[1] is None else known[1] - 1,
}  # fmt: skip
