"""plan-memory: where every value lies: offsets into one arena, per row bucket, by lifetime.

A function is planned on its own: values it makes get offsets in its frame, values it returns lie where the caller says. A call's frame lies in
the caller's. Offsets are written on the op (`tapeout.offsets`, one list a bucket: result parts, then workspaces; -1 where the caller decides)
and frame sizes on the function (`tapeout.frame`). First fit by descending size; two values share bytes only if their lifetimes are disjoint.
"""

from dataclasses import dataclass
from typing import ClassVar

from tapeout.codegen.kernel import parts
from tapeout.codegen.select_kernels import KERNEL, kernel_of, launches
from tapeout.dialects._mlir import func, ir
from tapeout.dialects.define import from_attribute, to_attribute
from tapeout.dialects.format import BITS
from tapeout.dialects.types import Tensor, from_ir
from tapeout.passes.bucket_rows import buckets_of
from tapeout.passes.define import Pass, PassError, Promise, functions, operations
from tapeout.passes.extents import Extents, callee, extents

ALIGNMENT = 64
APART_ROWS = 512
"""Buckets up to this many rows may be planned apart: their values are small, and launches of few rows leave room beside them."""
OFFSETS, FRAME = "tapeout.offsets", "tapeout.frame"


@dataclass(frozen=True)
class PlanMemory(Pass):
    """Places every value. `sequences`, `outputs` and `drafts_each` bound those extents; the others are bounded by the bucket.

    `apart` gives the values of small buckets places of their own, so that launches wait for what they need and for no other's memory; a
    call's frame is used again by the call after the next.
    """

    name: ClassVar[str] = "plan-memory"
    keeps: ClassVar[Promise] = "bits"
    sequences: int = 8
    outputs: int = 512
    drafts_each: int = 5
    apart: bool = False

    def run(self, module: ir.Module) -> None:
        if min(self.sequences, self.drafts_each) < 1:
            raise PassError(f"plan-memory{{sequences, drafts_each}}: found {self.sequences}, {self.drafts_each}, expected at least 1 each")
        missing = next((op for op in launches(module) if KERNEL not in op.attributes), None)
        if missing is not None:
            raise PassError(f"{missing.name} at {missing.location} has no kernel; expected pass select-kernels in front of this one")
        buckets = buckets_of(module)
        frames: dict[str, list[int]] = {}
        for function in _callees_first(module):
            frames[function.name.value] = self._plan(function, buckets, frames)
            function.operation.attributes[FRAME] = to_attribute(frames[function.name.value])

    def bound(self, extent: str, bucket: int) -> int:
        """The largest run-time count of an extent in a bucket."""
        sequences = min(bucket, self.sequences)
        return {"sequences": sequences, "drafts": sequences * self.drafts_each, "outputs": min(bucket, self.outputs)}.get(extent, bucket)

    def _plan(self, function: func.FuncOp, buckets: list[int], frames: dict[str, list[int]]) -> list[int]:
        ragged = extents(function)
        ops = operations(function)
        death = _last_uses(ops)
        returned = set(ops[-1].operands)
        offsets: dict[ir.Operation, list[list[int]]] = {op: [] for op in ops[:-1]}
        sizes = []
        for number, bucket in enumerate(buckets):
            requests = [
                _Block(birth, max((death.get(v, birth) for v in values), default=birth), size, op, slot)
                for birth, op in enumerate(ops[:-1])
                for slot, (values, size) in enumerate(self._needs(op, bucket, number, ragged, returned, frames))
            ]
            if self.apart and bucket <= APART_ROWS:
                _keep_apart(requests, len(ops))
            sizes.append(_place(requests))
            for op in ops[:-1]:
                offsets[op].append([])
            for block in sorted(requests, key=lambda b: (b.birth, b.slot)):
                offsets[block.op][number].append(block.offset)
        for op, lists in offsets.items():
            op.attributes[OFFSETS] = to_attribute(lists)
        return sizes

    def _needs(
        self, op: ir.Operation, bucket: int, number: int, ragged: Extents, returned: set[ir.Value], frames: dict[str, list[int]]
    ) -> list[tuple[list[ir.Value], int]]:
        """The blocks an op needs: (values that keep it alive, bytes); bytes -1 where the caller places the value."""
        out: list[tuple[list[ir.Value], int]] = []
        for result in op.results:
            view = from_ir(result.type)
            if not isinstance(view, Tensor):
                raise PassError(f"{op.name} at {op.location} yields a state handle; expected states as arguments only")
            rows = self.bound(ragged[result], bucket) if result in ragged else 0
            sizes = [-1] * len(parts(view)) if result in returned else part_bytes(view, rows)
            out.extend(([result], size) for size in sizes)
        if op.name == "func.call":
            name = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
            return [*out, ([], frames[name][number])]
        rows = max((self.bound(ragged[v], bucket) for v in (*op.results, *op.operands) if v in ragged), default=0)
        return [*out, *(([], w.elements(rows) * BITS_OF[w.element] // 8) for w in kernel_of(op, number).workspaces)]


BITS_OF = {**BITS, "i8": 8, "i16": 16}


@dataclass
class _Block:
    birth: int
    death: int
    size: int
    op: ir.Operation
    slot: int
    offset: int = -1


def _keep_apart(blocks: list[_Block], end: int) -> None:
    """Values live to the end of their function, the frames of calls until the next call is through."""
    calls = sorted({b.birth for b in blocks if b.op.name == "func.call"})
    following = dict(zip(calls, [*calls[1:], end], strict=False))
    for block in blocks:
        is_frame = block.op.name == "func.call" and block.death == block.birth
        block.death = following[block.birth] if is_frame else end


def part_bytes(view: Tensor, rows: int) -> list[int]:
    """Bytes of each part of a value: its codes, then its scales."""
    shape = view.sized(rows)
    total = view.number.bytes(shape)
    if view.number.scaling is None:
        return [total]
    plain = type(view.number)(view.number.element).bytes(shape)
    return [plain, total - plain]


def _last_uses(ops: list[ir.Operation]) -> dict[ir.Value, int]:
    death: dict[ir.Value, int] = {}
    for time, op in enumerate(ops):
        for value in op.operands:
            death[value] = time
    return death


def _place(blocks: list[_Block]) -> int:
    """First fit by descending size; returns the bytes needed."""
    placed: list[_Block] = []
    for block in sorted((b for b in blocks if b.size >= 0), key=lambda b: (-b.size, b.birth, b.slot)):
        size, offset = _aligned(block.size), 0
        for other in sorted((o for o in placed if o.birth <= block.death and block.birth <= o.death), key=lambda o: o.offset):
            if offset + size <= other.offset:
                break
            offset = max(offset, other.offset + _aligned(other.size))
        block.offset = offset
        placed.append(block)
    return max((b.offset + _aligned(b.size) for b in placed), default=0)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _callees_first(module: ir.Module) -> list[func.FuncOp]:
    found: dict[str, func.FuncOp] = {}

    def visit(function: func.FuncOp) -> None:
        if function.name.value in found:
            return
        for op in operations(function):
            if op.name == "func.call":
                visit(callee(function, op))
        found[function.name.value] = function

    for function in functions(module):
        visit(function)
    return list(found.values())


def offsets_of(op: ir.Operation) -> list[list[int]]:
    """Per bucket: offsets of result parts, then of workspaces (of a call: then its frame)."""
    return [list(map(int, row)) for row in from_attribute(op.attributes[OFFSETS])]
