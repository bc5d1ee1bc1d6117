"""scf.for with carried tiles: each lives in one buffer, and a turn's new value is written over the old one where that is safe.

Safe means: the new value reads the old one only at the very place it writes, and no later write of the same turn reads it. Otherwise the
new value is computed aside first.
"""

from typing import TYPE_CHECKING, Any

from tapeout.codegen.cpu.emitter import Buffer
from tapeout.codegen.cpu.nests import materialise, write
from tapeout.codegen.cpu.plan import PRODUCTS, is_lazy, is_tile, sinks_of
from tapeout.codegen.cpu.registers import rep_of
from tapeout.codegen.cpu.tiles import Broadcast, Mapped, Reshaped, Stored, Tile, Transposed, on_stack, strides_of
from tapeout.dialects._mlir import ir, scf

if TYPE_CHECKING:
    from tapeout.codegen.cpu.lower_tile_to_loops import KernelLowering


class CarriedTiles:
    """The loops of one kernel."""

    def __init__(self, lowering: "KernelLowering") -> None:
        self.lowering = lowering
        self.e = lowering.e

    def loop(self, op: Any) -> None:
        """Lowers one scf.for."""
        e, w = self.e, self.lowering
        body = op.regions[0].blocks[0]
        counter, *slots = body.arguments
        starts = list(op.operands)[3:]
        buffers = {slot: self._start(op, slot, start) for slot, start in zip(slots, starts, strict=True) if is_tile(slot)}
        w.products.stage_invariants(op)
        carried = [w.scalar(start) for start in starts if not is_tile(start)]
        with e.here():
            new = scf.ForOp(*(w.scalar(v) for v in list(op.operands)[:3]), carried)
        with e.inside(new, new.body), w.scope():
            self._enter(op, new, counter, slots, buffers)
            values = w.block(body)
            self._write_back(slots, values, buffers)
            with e.here():
                scf.YieldOp([w.scalar(v) for v in values if not is_tile(v)])
        self._leave(op, new, slots, buffers)

    def _start(self, op: Any, slot: Any, start: Any) -> Stored:
        """The buffer of a carried tile, holding its first value."""
        w = self.lowering
        reused = w.takes_over(start, op.block)
        if reused is not None and reused.rep == rep_of(start.type.element_type):
            return reused
        shape = ir.RankedTensorType(slot.type).shape
        stored = on_stack(self.e, shape, rep_of(slot.type.element_type))
        write(self.e, w.tile(start), stored, w.demanded(slot))
        return stored

    def _enter(self, op: Any, new: Any, counter: Any, slots: list[Any], buffers: dict[Any, Stored]) -> None:
        w = self.lowering
        w.define(counter, new.induction_variable)
        scalars = iter(new.inner_iter_args)
        for slot in slots:
            if is_tile(slot):
                w.own(slot, buffers[slot])
                self._send_on(op, slot, buffers[slot])
            else:
                w.define(slot, next(scalars))

    def _leave(self, op: Any, new: Any, slots: list[Any], buffers: dict[Any, Stored]) -> None:
        w = self.lowering
        scalars = iter(new.results)
        for slot, result in zip(slots, op.results, strict=True):
            if is_tile(result):
                w.own(result, buffers[slot])
            else:
                w.define(result, next(scalars))

    def _send_on(self, op: Any, slot: Any, buffer: Stored) -> None:
        """Lets the product that makes the next value write into the carried buffer, if the old value is not read after it starts."""
        body = op.regions[0].blocks[0]
        value = list(list(body.operations)[-1].operands)[slot.arg_number - 1]
        product = None
        while _is_single_product(value, body):
            product = value.owner.operation
            value = product.operands[len(product.operands) - 1]
        if product is None or value == slot:
            return
        start, at = len(product.operands) - 1, self.lowering.plan.order[product][0]
        earlier = all(
            self.lowering.plan.order[sink][0] < at or (sink == product and operand == start)
            for sink, operand in sinks_of(self.lowering.plan, slot)
        )
        if earlier and _reads_in_place(value, slot):
            self.lowering.products.destinations[product.results[0]] = buffer

    def _write_back(self, slots: list[Any], values: list[Any], buffers: dict[Any, Stored]) -> None:
        e, w = self.e, self.lowering
        pending = {s: w.tile(v) for s, v in zip(slots, values, strict=True) if is_tile(s)}
        pending = {s: t for s, t in pending.items() if not _is_there(t, buffers[s])}
        held = {s: b.buffer for s, b in buffers.items()}
        for slot, new in pending.items():
            if not _only_in_place(new, held[slot]):
                pending[slot] = materialise(e, new, w.demanded(slot))
        while pending:
            slot = next((s for s in pending if not _is_read(held[s], [t for o, t in pending.items() if o != s])), None)
            if slot is None:
                slot = next(iter(pending))
                pending[slot] = materialise(e, pending[slot], w.demanded(slot))
                continue
            write(e, pending.pop(slot), buffers[slot], w.demanded(slot))


def _is_single_product(value: Any, body: Any) -> bool:
    owner = value.owner
    return not isinstance(owner, ir.Block) and owner.name in PRODUCTS and owner.operation.block == body and len(list(value.uses)) == 1


def _reads_in_place(value: Any, slot: Any) -> bool:
    """Whether a lazy value reads a carried tile only at the element that it makes."""
    if value == slot or isinstance(value.owner, ir.Block):
        return True
    op = value.owner.operation
    tiles = [v for v in op.operands if is_tile(v)]
    if not is_lazy(op) or op.name.startswith("tile."):
        return True
    if op.name.startswith(("linalg.", "tensor.")):
        return not any(_mentions(v, slot) for v in tiles)
    return all(_reads_in_place(v, slot) for v in tiles)


def _mentions(value: Any, slot: Any) -> bool:
    if value == slot:
        return True
    if isinstance(value.owner, ir.Block) or not is_lazy(value.owner.operation):
        return False
    return any(_mentions(v, slot) for v in value.owner.operands if is_tile(v))


def _is_there(tile: Tile, target: Stored) -> bool:
    return isinstance(tile, Stored) and tile.buffer is target.buffer and tile.strides == target.strides and tile.shape == target.shape


def _sources(tile: Tile) -> tuple[Tile, ...]:
    if isinstance(tile, Mapped):
        return tile.sources
    return (tile.source,) if isinstance(tile, Broadcast | Reshaped | Transposed) else ()


def _reads(tile: Tile, buffer: Buffer | None) -> bool:
    if isinstance(tile, Stored):
        return tile.buffer is buffer
    return any(_reads(source, buffer) for source in _sources(tile))


def _is_read(buffer: Buffer | None, tiles: list[Tile]) -> bool:
    return any(_reads(tile, buffer) for tile in tiles)


def _only_in_place(tile: Tile, buffer: Buffer | None) -> bool:
    """Whether a tile reads a buffer, if at all, only at the element that it makes."""
    if isinstance(tile, Mapped):
        return all(_only_in_place(source, buffer) for source in tile.sources)
    if isinstance(tile, Stored) and tile.buffer is buffer:
        return tile.strides == strides_of(tile.shape)
    return not _reads(tile, buffer)
