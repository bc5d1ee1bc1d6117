"""linalg.matmul and tile.dot_scaled: finds the form of their operands and calls the register-blocked products."""

from typing import TYPE_CHECKING, Any

from tapeout.codegen.cpu import elementwise
from tapeout.codegen.cpu.emitter import Emitter
from tapeout.codegen.cpu.linear_index import Index, number
from tapeout.codegen.cpu.nests import materialise, write
from tapeout.codegen.cpu.plan import PRODUCTS, is_tile
from tapeout.codegen.cpu.products import LANES, SCALE_GROUP, Product, multiply, multiply_transposed, stage
from tapeout.codegen.cpu.registers import Registers, create
from tapeout.codegen.cpu.tiles import Splat, Stored, Tile, broadcasted, evaluate, mapped, on_stack, reshaped, transposed
from tapeout.dialects._mlir import ir, vector

if TYPE_CHECKING:
    from tapeout.codegen.cpu.lower_tile_to_loops import KernelLowering

TRANSPOSED_MULTIPLE = 8  # columns of both operands of A B^T are padded to this
SCALE_BIAS = 8  # e4m3 codes are decoded times 2^-8 (registers), the scale puts it back


class Products:
    """The products of one kernel; operands that a loop does not change are staged in front of it."""

    def __init__(self, lowering: "KernelLowering") -> None:
        self.lowering = lowering
        self.e = lowering.e
        self.staged: dict[tuple[Any, int], Stored] = {}
        self.destinations: dict[Any, Stored] = {}  # results that a loop carries on in a known buffer

    def matmul(self, op: Any) -> None:
        """a b, or a right^T where b is a transposed tile."""
        a, b, acc = op.operands
        rows, target, fresh = self._target(op, acc)
        right = _transposed_source(b)
        if right is None:
            left = self._stage(a, 1)
            multiply(self.e, Product(left, self._wide(b), target, fresh, rows, self.lowering.blocks))
        else:
            left = self._stage(a, TRANSPOSED_MULTIPLE)
            product = Product(left, transposed(self._wide(right)), target, fresh, rows, self.lowering.blocks)
            multiply_transposed(self.e, product, self._stage(right, TRANSPOSED_MULTIPLE))
        self.lowering.own(op.results[0], target)

    def dot_scaled(self, op: Any) -> None:
        """A block-scaled product: both operands decoded and scaled, exactly, then multiplied as f32."""
        e, w = self.e, self.lowering
        rows, target, fresh = self._target(op.operation, op.acc)
        scale = mapped(lambda r, x: r.e8m0_to_f32(x, SCALE_BIAS), "f32", w.tile(op.sa))
        a = _scaled(w.tile(op.a), reshaped(broadcasted(scale, 2, SCALE_GROUP), w.tile(op.a).shape))
        with w.scope():
            table = _scale_table(e, w.tile(op.sb))
            b = _scaled(w.tile(op.b), reshaped(broadcasted(table, 1, SCALE_GROUP), w.tile(op.b).shape))
            multiply(e, Product(stage(e, a, rows), b, target, fresh, rows, w.blocks))
        w.own(op.out, target)

    def _wide(self, value: Any) -> Tile:
        return elementwise.widened(self.lowering.tiles[value], str(elementwise.element_of(value)))

    def _stage(self, value: Any, multiple: int) -> Stored:
        """The rows that any product asks for: another product of the same block finds them here."""
        if (value, multiple) not in self.staged:
            rows = self.lowering.demanded(value)
            self.staged[value, multiple] = stage(self.e, self._wide(value), rows, multiple)
        return self.staged[value, multiple]

    def _target(self, op: Any, acc: Any) -> tuple[Any, Stored, bool]:
        """(rows, buffer of the result, whether it starts from zero)."""
        e, w = self.e, self.lowering
        rows = w.demanded(op.results[0])
        reused = w.takes_over(acc, op.block)
        if reused is not None:
            return rows, reused, False
        start = w.tile(acc)
        target = self.destinations.get(op.results[0]) or on_stack(e, start.shape, "f32")
        if isinstance(start, Splat) and start.value == 0:
            return rows, target, True
        write(e, start, target, rows)
        return rows, target, False

    def stage_invariants(self, loop: Any) -> None:
        """Stages operands of products inside a loop that are defined outside it."""
        for op in _products_in(loop):
            if op.name != "linalg.matmul":
                continue
            right = _transposed_source(op.operands[1])
            multiple = 1 if right is None else TRANSPOSED_MULTIPLE
            for value in (op.operands[0], right):
                if value is not None and value in self.lowering.tiles:
                    self._stage(value, multiple)


def _products_in(loop: Any) -> list[Any]:
    found: list[Any] = []

    def visit(op: Any) -> Any:
        if op.name in PRODUCTS:
            found.append(op.operation)
        return ir.WalkResult.ADVANCE

    loop.walk(visit)
    return found


def _transposed_source(value: Any) -> Any:
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != "linalg.transpose":
        return None
    return owner.operands[0] if is_tile(owner.operands[0]) else None


def _scaled(codes: Tile, factor: Tile) -> Tile:
    def decode(r: Registers, code: Any, scale: Any) -> Any:
        return r.binary("mulf", r.e4m3_to_f32_over_256(code), scale)

    return mapped(decode, "f32", codes, factor)


def _scale_table(e: Emitter, scales: Tile) -> Stored:
    """e8m0 bytes [N, G] as f32 factors [G, N] (times 2^8): columns of a panel want their scales side by side."""
    n, groups = scales.shape
    factor = mapped(lambda r, x: r.e8m0_to_f32(x, SCALE_BIAS), "f32", scales)
    if n % LANES or groups not in (2, 4, 8):
        return materialise(e, transposed(factor))
    table = on_stack(e, (groups, n), "f32")
    with e.nest(), e.loop(0, n // LANES, 1, n // LANES) as loop:
        first = loop.counter * LANES
        words = [_word(e, evaluate(e, scales, (first + i, number(0)), groups), groups) for i in range(LANES)]
        with e.here():
            packed = Registers(e, LANES).from_elements(words)
        for group in range(groups):
            _write_group(e, table, packed, first, group)
    return table


def _word(e: Emitter, codes: Any, groups: int) -> Any:
    with e.here():
        word = ir.VectorType.get([1], ir.IntegerType.get_signless(8 * groups))
        return vector.extract(vector.bitcast(word, codes), [], [0])


def _write_group(e: Emitter, table: Stored, packed: Any, first: Index, group: int) -> None:
    """The group-th byte of 16 words as 16 factors."""
    registers = Registers(e, LANES)
    rep = f"i{ir.VectorType(packed.type).element_type.width}"
    with e.here():
        shifted = registers.shift("shrui", packed, rep, 8 * group) if group else packed
        wide = shifted if rep == "i32" else create("arith.trunci" if rep == "i64" else "arith.extui", registers.type("i32"), shifted)
        byte = registers.binary("andi", wide, registers.constant("i32", 0xFF))
        biased = registers.binary("addi", byte, registers.constant("i32", SCALE_BIAS))
        value = registers.convert("bitcast", registers.shift("shli", biased, "i32", 23), "f32")
    table.write(e, (number(group), first), value)
