"""tile.load, store, gather, scatter, compress_store and scalar as reads and writes of flat buffers."""

from typing import TYPE_CHECKING, Any

from tapeout.codegen.cpu.linear_index import Index, number
from tapeout.codegen.cpu.nests import pieces, traverse, write
from tapeout.codegen.cpu.plan import ALL, Demand, Rows, rows_of_box
from tapeout.codegen.cpu.registers import create, rep_of
from tapeout.codegen.cpu.tiles import WIDEST, At, Gathered, Panelled, Stored, Tile, evaluate, on_stack, strides_of
from tapeout.dialects import tile as dialect
from tapeout.dialects._mlir import arith, ir, memref, vector

if TYPE_CHECKING:
    from tapeout.codegen.cpu.lower_tile_to_loops import KernelLowering


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(ir.RankedTensorType(value.type).shape)


def _rep(value: Any) -> str:
    return rep_of(value.type.element_type)


class Memory:
    """The memory ops of one kernel."""

    def __init__(self, lowering: "KernelLowering") -> None:
        self.lowering = lowering
        self.e = lowering.e

    def rows_there(self, op: Any) -> Demand:
        """The rows that a load or gather may read."""
        if op.name == "tile.load":
            return rows_of_box(op.opview, list(_shape(op.results[0])))
        valid = list(op.opview.valid)
        return Rows(valid[0], None, _shape(op.results[0])[0]) if valid else ALL

    def _box(self, op: Any, shape: tuple[int, ...]) -> tuple[Any, Index, tuple[int, ...]]:
        strides = strides_of(dialect.integers(op.shape))
        offset = number(0)
        for at, stride in zip(op.at, strides, strict=True):
            offset = offset + self.lowering.form(at) * stride
        return self.lowering.scalar(op.base), offset, strides[len(strides) - len(shape) :]

    def load(self, op: Any) -> Tile:
        """A box of a buffer, read where it is used."""
        shape, rep, panel = _shape(op.out), _rep(op.out), op.panel.value
        if panel:
            return self._panelled(op, shape, rep, panel)
        memory, offset, strides = self._box(op, shape)
        return Stored(shape, rep, memory, offset, strides)

    def _panelled(self, op: Any, shape: tuple[int, ...], rep: str, panel: int) -> Tile:
        array = dialect.integers(op.shape)
        strides = strides_of(array)
        *lead, k, n = [self.lowering.form(at) for at in op.at]
        block, _ = self.e.divide(n, panel)  # boxes start at a panel
        offset = block * (array[-2] * panel) + k * panel
        for at, stride in zip(lead, strides, strict=False):
            offset = offset + at * stride
        inner = strides[len(strides) - len(shape) : len(strides) - 2]
        return Panelled(shape, rep, self.lowering.scalar(op.base), offset, inner, array[-2], panel, grains=frozenset({panel}))

    def gather(self, op: Any) -> Tile:
        """Rows by id, read where they are used."""
        w = self.lowering
        base, ids = w.scalar(op.base), w.scalar(op.ids)
        return Gathered(_shape(op.out), _rep(op.out), base, ids, w.form(op.first), w.form(op.column), op.row_stride.value)

    def store(self, op: Any) -> None:
        """Evaluates the tile into the buffer."""
        shape = _shape(op.value)
        target = Stored(shape, _rep(op.value), *self._box(op, shape))
        write(self.e, self.lowering.tile(op.value), target, self.lowering.rows(rows_of_box(op, list(shape))))

    def scatter(self, op: Any) -> None:
        """Evaluates row after row into the row that its id names."""
        e, w, (height, width) = self.e, self.lowering, _shape(op.value)
        source, ids, base = w.tile(op.value), w.scalar(op.ids), w.scalar(op.base)
        rows = w.rows(Rows(op.valid, None, height))
        with e.nest(), e.loop(0, rows, 1, height) as loop:
            where = e.value_of(w.form(op.first) + loop.counter)
            with e.here():
                row = arith.index_cast(e.type("index"), memref.load(ids, [where]))
                is_real = arith.cmpi(arith.CmpIPredicate.sge, row, e.constant("index", 0))
            with e.branch(is_real):
                offset = e.counter(row, 0, e.depth - 1) * op.row_stride.value + w.form(op.column)
                target = Stored((width,), source.rep, base, offset, (1,))

                def body(at: At, lanes: int, target: Stored = target, line: Index = loop.counter) -> None:
                    target.write(e, at, evaluate(e, source, (line, *at), lanes))

                traverse(e, (width,), None, source.grains, body)

    def scalar(self, op: Any) -> None:
        """Reads one count."""
        e, w = self.e, self.lowering
        where = e.value_of(w.form(op.at))
        with e.here():
            w.define(op.out, arith.index_cast(e.type("index"), memref.load(w.scalar(op.base), [where])))

    # ---- compress

    def compress_store(self, op: Any) -> None:
        """Blocks of 16: the mask becomes an integer, and its set bits are taken one by one."""
        e, w, (length,) = self.e, self.lowering, _shape(op.values)
        values, mask = w.tile(op.values), w.tile(op.mask)
        block = on_stack(e, (WIDEST,), values.rep)
        count = e.constant("index", 0)
        whole = length // WIDEST
        with e.nest():
            if whole:
                with e.loop(0, whole, 1, whole, [count]) as loop:
                    at = loop.counter * WIDEST
                    loop.yielded = [self._take(op, values, mask, block, (at,), WIDEST, loop.carried[0])]
                (count,) = loop.results
            for first, lanes in pieces(length - whole * WIDEST, WIDEST):
                count = self._take(op, values, mask, block, (number(whole * WIDEST + first),), lanes, count)
        w.define(op.count, count)

    def _take(self, op: Any, values: Tile, mask: Tile, block: Stored, at: At, lanes: int, count: Any) -> Any:
        e, w = self.e, self.lowering
        block.write(e, (number(0),), evaluate(e, values, at, lanes))
        chosen = evaluate(e, mask, at, lanes)
        first, limit = e.value_of(w.form(op.at)), e.value_of(w.form(op.limit))
        with e.here():
            bits = _mask_bits(e, chosen, lanes)
            turns = arith.index_cast(e.type("index"), create("math.ctpop", e.type("i32"), bits))
        with e.loop(0, turns, 1, lanes, [bits, count]) as loop:
            left, done = loop.carried
            with e.here():
                lane = arith.index_cast(e.type("index"), create("math.cttz", e.type("i32"), left))
                value = memref.load(block.memory, [lane])
                to = arith.addi(first, done)
                fits = arith.cmpi(arith.CmpIPredicate.slt, to, limit)
            with e.branch(fits), e.here():
                memref.store(value, w.scalar(op.base), [to])
            with e.here():
                rest = arith.andi(left, arith.subi(left, e.constant("i32", 1)))
                loop.yielded = [rest, arith.addi(done, arith.index_castui(e.type("index"), fits))]
        return loop.results[1]


def _mask_bits(e: Any, chosen: Any, lanes: int) -> Any:
    if lanes == 1:
        return arith.extui(e.type("i32"), chosen)
    word = ir.VectorType.get([1], ir.IntegerType.get_signless(lanes))
    narrow = vector.extract(vector.bitcast(word, chosen), [], [0])
    return arith.extui(e.type("i32"), narrow)
