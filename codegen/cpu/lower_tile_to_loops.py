"""lower-tile-to-loops: a tile kernel becomes one native function of `scf`, `vector` and `memref`.

Removes every tile op and tensor; leaves loops for the standard lowering to LLVM. Tiles stay lazy (`tiles`) until a store, a reduction, a
product or a loop needs them; `plan` says which are kept on the stack and how many rows of each anybody reads. Relies on verify-tile
having passed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np

from tapeout.codegen.cpu import abi, elementwise, fp4
from tapeout.codegen.cpu.carried import CarriedTiles
from tapeout.codegen.cpu.emitter import Emitter
from tapeout.codegen.cpu.linear_index import Index, number
from tapeout.codegen.cpu.lower_memory import Memory
from tapeout.codegen.cpu.lower_products import Products
from tapeout.codegen.cpu.nests import materialise, write
from tapeout.codegen.cpu.plan import LOADS, Demand, Plan, Rows, is_lazy, is_tile, make_plan
from tapeout.codegen.cpu.products import Blocks
from tapeout.codegen.cpu.reductions import reduce
from tapeout.codegen.cpu.registers import rep_of
from tapeout.codegen.cpu.tiles import Iota, Splat, Stored, Tile, broadcasted, mapped, on_stack, reshaped, transposed
from tapeout.dialects._mlir import arith, func, ir, passmanager, scf

_KINDS = {"arith.addf": "add", "arith.addi": "add", "arith.maxnumf": "max", "arith.maxsi": "max", "arith.minnumf": "min",
          "arith.minsi": "min"}  # fmt: skip


def lower_tile_to_loops(module: ir.Module, blocks: Blocks | None = None) -> list[int]:
    """Rewrites a kernel module in place; returns the sizes of its stack buffers in bytes, largest first.

    `blocks` are the register blocks of products (for 16 vector registers by default).
    """
    with module.context, ir.Location.name(module.body.operations[0].name.value):
        passmanager.PassManager.parse("builtin.module(cse)").run(module.operation)
        body, grid = list(module.body.operations)[:2]
        name = body.name.value
        body.attributes["sym_name"] = ir.StringAttr.get(f"{name}_body")
        native = abi.declare(module, name)
        with ir.InsertionPoint(native.add_entry_block()):
            func.ReturnOp([])
        lowering = KernelLowering(native, body, blocks or Blocks())
        lowering.run(grid)
        body.operation.erase()
        grid.operation.erase()
    return sorted((buffer.size_bytes for buffer in lowering.e.buffers), reverse=True)


class KernelLowering:
    """One kernel being lowered: what each value of it has become."""

    def __init__(self, native: Any, body: Any, blocks: Blocks) -> None:
        self.native, self.body, self.blocks = native, body, blocks
        self.e = Emitter(native.entry_block, blocks.tall - 1)
        self.plan: Plan = make_plan(body)
        self.scalars: dict[Any, Any] = {}
        self.depths: dict[Any, int] = {}
        self.tiles: dict[Any, Tile] = {}
        self.owned: set[Any] = set()  # values that are the only user of their stack buffer
        self.forms: dict[Any, Index] = {}
        self.instance: list[Any] = []
        self.memory, self.products, self.carried = Memory(self), Products(self), CarriedTiles(self)

    def run(self, grid: Any) -> None:
        """Writes the native function."""
        e, (table, worker, workers) = self.e, self.native.arguments
        end = self.native.entry_block.operations[0]
        e.levels[0].anchor = end
        elements = [ir.MemRefType(a.type).element_type for a in self.body.arguments]
        with e.here():
            memories = abi.buffers(table, elements)
        for function in (grid, self.body):
            self.scalars.update(zip(function.arguments, memories, strict=True))
        extents = [self.scalar(v) for v in self.block(grid.entry_block)]
        low, high = abi.share(e, extents, worker, workers)
        self._instances(extents, low, high)

    def _instances(self, extents: list[Any], low: Any, high: Any) -> None:
        e = self.e
        with e.here():
            loop = scf.ForOp(low, high, e.constant("index", 1))
        e.levels[0].anchor = loop
        with e.inside(loop, loop.body):
            self.instance = abi.coordinates(e, loop.induction_variable, extents)
            self.block(self.body.entry_block)
            with e.here():
                scf.YieldOp([])

    # ---- values

    def scalar(self, value: Any) -> Any:
        """What a scalar value has become."""
        return self.scalars[value]

    def define(self, value: Any, scalar: Any) -> None:
        """Records a scalar made at the current depth."""
        self.scalars[value] = scalar
        self.depths[value] = self.e.depth

    def form(self, value: Any) -> Index:
        """An index value as a linear form; constants as numbers."""
        owner = value.owner
        if not isinstance(owner, ir.Block) and owner.name == "arith.constant":
            return number(owner.opview.value.value)
        if value not in self.forms:
            self.forms[value] = self.e.counter(self.scalar(value), 0, self.depths.get(value, 0))
        return self.forms[value]

    def tile(self, value: Any) -> Tile:
        """What a tile value has become, in the bits of its own element type."""
        return elementwise.narrow(self.tiles[value], str(elementwise.element_of(value)))

    def own(self, value: Any, stored: Stored) -> None:
        """Records a tile that alone uses its stack buffer."""
        self.tiles[value] = stored
        self.owned.add(value)

    def takes_over(self, value: Any, block: Any) -> Stored | None:
        """The buffer of a value that dies at its only use, in `block`: the use may overwrite it."""
        home = value.owner if isinstance(value.owner, ir.Block) else value.owner.operation.block
        stored = self.tiles[value]
        single = value in self.owned and len(list(value.uses)) == 1 and home == block
        return stored if single and isinstance(stored, Stored) else None

    def rows(self, demand: Demand) -> Any:
        """A demand as a run-time row count; None for all rows."""
        if not isinstance(demand, Rows):
            return None
        parts = [v for v in (demand.bound, demand.start) if v is not None]
        if any(v not in self.scalars and not _is_constant(v) for v in parts):
            return None
        forms = [self.form(v) for v in parts]
        depth = max(f.depth for f in forms)
        known = self.e.levels[depth].pure
        if demand not in known:
            known[demand] = self._clamped(forms, demand.height, depth)
        return known[demand]

    def _clamped(self, forms: list[Index], height: int, depth: int) -> Any:
        e = self.e
        values = [e.value_of(f) for f in forms]
        with e.at(depth):
            count = arith.subi(*values) if len(values) == 2 else values[0]
            return arith.minsi(arith.maxsi(count, e.constant("index", 0)), e.constant("index", height))

    def demanded(self, value: Any) -> Any:
        """The row count that the users of a tile ask for."""
        return self.rows(self.plan.demand.get(value))

    # ---- ops

    def block(self, block: Any) -> list[Any]:
        """Lowers a block's ops; returns the operands of its terminator."""
        for op in block.operations:
            if op.name in ("func.return", "scf.yield"):
                return list(op.operands)
            self._lower(op.operation)
        return []

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Stack buffers taken inside are free again afterwards, and what they held is forgotten."""
        taken: list[Any] = []
        staged = dict(self.products.staged)
        self.e.taken.append(taken)
        yield
        self.e.taken.pop()
        self.products.staged = staged
        for buffer in taken:
            self.e.give_back(buffer)

    def _lower(self, op: Any) -> None:
        handler = _HANDLERS.get(op.name)
        if handler is not None:
            handler(self, op)
        elif op.name == "tensor.empty":
            return
        elif is_lazy(op):
            self._lazy(op)
        else:
            self._clone(op)

    def _clone(self, op: Any) -> None:
        """A scalar op, on what its operands have become."""
        with self.e.here():
            operands = [self.scalar(v) for v in op.operands]
            attributes = {name: op.attributes[name] for name in op.attributes}
            types = [r.type for r in op.results]
            new = ir.Operation.create(op.name, results=types, operands=operands, attributes=attributes)
        for old, result in zip(op.results, new.results, strict=True):
            self.define(old, result)

    def _lazy(self, op: Any) -> None:
        result = op.results[0]
        made = self._make(op)
        if result not in self.plan.kept:
            self.tiles[result] = made
            return
        self.own(result, materialise(self.e, made, self._rows_kept(op, result)))

    def _rows_kept(self, op: Any, result: Any) -> Any:
        asked = self.demanded(result)
        if op.name not in LOADS:
            return asked
        there = self.rows(self.memory.rows_there(op))
        if asked is None or there is None:
            return there if asked is None else asked
        with self.e.here():
            return arith.minsi(asked, there)

    def _make(self, op: Any) -> Tile:
        if op.name in _TILES:
            return _TILES[op.name](self, op)
        packed = fp4.operands(op)
        if packed is not None:
            return mapped(fp4.decode, "f32", *(self.tile(v) for v in packed))
        sources = [self.tiles[v] if is_tile(v) else self._splat(op, v) for v in op.operands]
        return elementwise.build(op, sources)

    def _splat(self, op: Any, value: Any) -> Splat:
        shape = tuple(ir.RankedTensorType(op.results[0].type).shape)
        return Splat(shape, rep_of(value.type), self.scalar(value))

    def _constant(self, op: Any) -> Tile:
        kind = ir.RankedTensorType(op.results[0].type)
        attribute = ir.DenseElementsAttr(op.attributes["value"]).get_splat_value()
        return Splat(tuple(kind.shape), rep_of(kind.element_type), _bits(attribute, str(kind.element_type)))

    def _fill(self, op: Any) -> Tile:
        kind = ir.RankedTensorType(op.results[0].type)
        owner = op.operands[0].owner
        if not isinstance(owner, ir.Block) and owner.name == "arith.constant":
            return Splat(tuple(kind.shape), rep_of(kind.element_type), _bits(owner.attributes["value"], str(kind.element_type)))
        return Splat(tuple(kind.shape), rep_of(kind.element_type), self.scalar(op.operands[0]))

    def _scalar_constant(self, op: Any) -> None:
        if is_tile(op.results[0]):
            self._lazy(op)
            return
        kind = op.results[0].type
        self.scalars[op.results[0]] = self.e.constant(rep_of(kind), _bits(op.attributes["value"], str(kind)))
        self.depths[op.results[0]] = 0

    def _reduce(self, op: Any) -> None:
        kind = _KINDS[next(iter(op.regions[0].blocks[0].operations)).name]
        axis = next(iter(op.attributes["dimensions"]))
        self.own(op.results[0], reduce(self.e, self.tile(op.operands[0]), axis, kind, self.demanded(op.results[0])))

    def _if(self, op: Any) -> None:
        e, types = self.e, [r.type for r in op.results if not is_tile(r)]
        kept = {r: on_stack(e, ir.RankedTensorType(r.type).shape, rep_of(r.type.element_type)) for r in op.results if is_tile(r)}
        has_else = len(op.regions[1].blocks) > 0
        with e.here():
            new = scf.IfOp(self.scalar(op.operands[0]), types, has_else=has_else)
        for region, target in zip(op.regions, (new.then_block, new.else_block if has_else else None), strict=True):
            if target is not None:
                self._branch(op, new, region.blocks[0], target, kept)
        scalars = iter(new.results)
        for result in op.results:
            if is_tile(result):
                self.own(result, kept[result])
            else:
                self.define(result, next(scalars))

    def _branch(self, op: Any, new: Any, source: Any, target: Any, kept: dict[Any, Stored]) -> None:
        e = self.e
        with e.inside(new, target), self.scope():
            values = self.block(source)
            for value, result in zip(values, op.results, strict=True):
                if is_tile(result):
                    write(e, self.tile(value), kept[result], self.demanded(result))
            with e.here():
                scf.YieldOp([self.scalar(v) for v, r in zip(values, op.results, strict=True) if not is_tile(r)])


def _is_constant(value: Any) -> bool:
    return not isinstance(value.owner, ir.Block) and value.owner.name == "arith.constant"


def _bits(attribute: Any, elem: str) -> Any:
    """A constant as the register that holds it: the number, or the bits of a narrow float."""
    if elem not in ("bf16", "f16", "f8E4M3FN"):
        return attribute.value
    kind: Any = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f8E4M3FN": ml_dtypes.float8_e4m3fn}[elem]
    array = np.array(attribute.value, dtype=np.float64).astype(kind)
    return int(array.view(np.int8 if elem == "f8E4M3FN" else np.int16))


_TILES: dict[str, Callable[[KernelLowering, Any], Tile]] = {
    "arith.constant": KernelLowering._constant,
    "linalg.fill": KernelLowering._fill,
    "tile.iota": lambda w, op: Iota(tuple(ir.RankedTensorType(op.results[0].type).shape), "i32"),
    "linalg.broadcast": lambda w, op: broadcasted(
        w.tiles[op.operands[0]], next(iter(op.attributes["dimensions"])), _extent(op, next(iter(op.attributes["dimensions"])))
    ),
    "linalg.transpose": lambda w, op: transposed(w.tiles[op.operands[0]]),
    "tensor.expand_shape": lambda w, op: reshaped(w.tiles[op.operands[0]], ir.RankedTensorType(op.results[0].type).shape),
    "tensor.collapse_shape": lambda w, op: reshaped(w.tiles[op.operands[0]], ir.RankedTensorType(op.results[0].type).shape),
    "tile.load": lambda w, op: w.memory.load(op.opview),
    "tile.gather": lambda w, op: w.memory.gather(op.opview),
}


def _extent(op: Any, axis: int) -> int:
    return int(ir.RankedTensorType(op.results[0].type).shape[axis])


_HANDLERS: dict[str, Callable[[KernelLowering, Any], None]] = {
    "arith.constant": KernelLowering._scalar_constant,
    "linalg.reduce": KernelLowering._reduce,
    "linalg.matmul": lambda w, op: w.products.matmul(op),
    "tile.dot_scaled": lambda w, op: w.products.dot_scaled(op.opview),
    "tile.store": lambda w, op: w.memory.store(op.opview),
    "tile.scatter": lambda w, op: w.memory.scatter(op.opview),
    "tile.compress_store": lambda w, op: w.memory.compress_store(op.opview),
    "tile.scalar": lambda w, op: w.memory.scalar(op.opview),
    "tile.program_id": lambda w, op: w.define(op.results[0], w.instance[op.opview.axis.value]),
    "scf.for": lambda w, op: w.carried.loop(op),
    "scf.if": KernelLowering._if,
}
