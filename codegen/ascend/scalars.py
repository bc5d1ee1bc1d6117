"""tiles-to-scalars: tiles of rank 0 become scalars, which the scalar unit computes; the Ascend vectorizer ends by an assertion on some of them.

Arithmetic is repeated on the element type, reductions are followed by an extraction, loops carry the scalar itself. Functions of math stay on
the vector core, on a tile of one number. Values do not change.
"""

from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.ascend.lower_tile_memory import load_number
from tapeout.codegen.tile_arithmetic import element_of, tile_type
from tapeout.dialects._mlir import arith, ir, linalg, scf, tensor

Value = Any


class _Scalars(dict[Value, Value]):
    """Scalars by the tiles of rank 0 that they stand for, and the ops that they made needless.

    Those are erased at the very end: a value that came to lie where an erased one lay would be taken for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stale: list[Any] = []

    def erase(self) -> None:
        """Users before what they use, and loops, whose arguments are used, last and cut off from one another."""
        loops = [op for op in self.stale if op.name.startswith("scf.")]
        for op in loops:
            for i, value in enumerate(op.operands):
                op.operands[i] = self.get(value, value)
        for op in reversed([op for op in self.stale if not op.name.startswith("scf.")]):
            op.erase()
        for op in reversed(loops):
            op.erase()


def tiles_to_scalars(block: Any) -> None:
    """Rewrites a block of a kernel in place."""
    scalars = _Scalars()
    _rewrite(block, scalars)
    scalars.erase()


def _is_number(value: Value) -> bool:
    return isinstance(value.type, ir.RankedTensorType) and value.type.rank == 0


def _rewrite(block: Any, scalars: _Scalars) -> None:
    for op in [op.operation for op in block.operations]:
        with ir.InsertionPoint(op):
            if _replaced(op, scalars):
                scalars.stale.append(op)


def _replaced(op: Any, scalars: _Scalars) -> bool:
    """Builds what stands for an op in front of it; True where the op itself is to go."""
    if op.name == "scf.for":
        return _loop(op, scalars)
    if op.name == "scf.if":
        return _branch(op, scalars)
    if op.name == "linalg.reduce":
        return _reduction(op, scalars)
    if any(_is_number(v) for v in op.results):
        scalars[op.results[0]] = _number(op, scalars)
        return True
    return _used(op, scalars)


def _used(op: Any, scalars: _Scalars) -> bool:
    """An op that takes numbers and makes none."""
    numbers = [i for i, v in enumerate(op.operands) if v in scalars]
    if not numbers:
        return False
    if op.name == "tensor.extract":
        op.results[0].replace_all_uses_with(scalars[op.operands[0]])
        return True
    if op.name in ("linalg.broadcast", "tensor.expand_shape"):
        op.results[0].replace_all_uses_with(_filled(scalars[op.operands[0]], t.shape_of(op.results[0])))
        return True
    for i in numbers:
        op.operands[i] = _filled(scalars[op.operands[i]], [1]) if op.name == "tile.store" else scalars[op.operands[i]]
    return False


def _filled(number: Value, shape: list[int]) -> Value:
    return linalg.fill(number, outs=[tensor.empty(shape, number.type)])


def _number(op: Any, scalars: _Scalars) -> Value:
    """The scalar behind an op that makes one number."""
    kind = element_of(op.results[0])
    match op.name:
        case "tensor.empty":
            return None
        case "linalg.fill":
            return op.operands[0]
        case "arith.constant":
            return arith.constant(kind, ir.DenseElementsAttr(op.attributes["value"]).get_splat_value())
        case "tile.load":
            return load_number(op.opview)
        case "tensor.collapse_shape":
            return tensor.extract(op.operands[0], [t.index(0)] * len(t.shape_of(op.operands[0])))
    operands = [scalars.get(v, v) for v in op.operands]
    attributes = {name: op.attributes[name] for name in op.attributes}
    if not op.name.startswith("math."):
        return ir.Operation.create(op.name, results=[kind], operands=operands, attributes=attributes).result
    made = ir.Operation.create(op.name, results=[tile_type([1], kind)], operands=[_filled(v, [1]) for v in operands], attributes=attributes)
    return tensor.extract(made.result, [t.index(0)])


KINDS = {
    "arith.addf": "add", "arith.addi": "add", "arith.maxnumf": "max", "arith.maxsi": "max", "arith.minnumf": "min", "arith.minsi": "min",
}  # fmt: skip


def _reduction(op: Any, scalars: _Scalars) -> bool:
    """A tile of one number in place of one of rank 0: where the compiler copies the latter, it orders two of its own ops by their addresses."""
    if not _is_number(op.results[0]):
        return False
    source, combine = op.operands[0], op.regions[0].blocks[0].operations[0].operation.name
    row = t.split_first(source, *t.shape_of(source))
    scalars[op.results[0]] = tensor.extract(t.reduce(row, KINDS[combine], 1), [t.index(0)])
    return True


def _loop(op: Any, scalars: _Scalars) -> bool:
    low, high, step, *starts = op.operands
    old = op.regions[0].blocks[0]
    if not any(v in scalars for v in starts):
        _rewrite(old, scalars)
        return False
    made = scf.ForOp(low, high, step, [scalars.get(v, v) for v in starts])
    for before, after in zip(old.arguments, made.body.arguments, strict=True):
        _stands_for(before, after, scalars)
    for inner in list(old.operations):
        made.body.append(inner)
    _rewrite(made.body, scalars)
    for before, after in zip(op.results, made.results, strict=True):
        _stands_for(before, after, scalars)
    return True


def _stands_for(before: Value, after: Value, scalars: _Scalars) -> None:
    if _is_number(before):
        scalars[before] = after
    else:
        before.replace_all_uses_with(after)


def _branch(op: Any, scalars: _Scalars) -> bool:
    blocks = [region.blocks[0] for region in op.regions if list(region.blocks)]
    if not any(_is_number(v) for v in op.results):
        for block in blocks:
            _rewrite(block, scalars)
        return False
    made = scf.IfOp(op.operands[0], [element_of(v) if _is_number(v) else v.type for v in op.results], has_else=True)
    for block, target in zip(blocks, (made.then_block, made.else_block), strict=True):
        for inner in list(block.operations):
            target.append(inner)
        _rewrite(target, scalars)
    for before, after in zip(op.results, made.results, strict=True):
        _stands_for(before, after, scalars)
    return True
