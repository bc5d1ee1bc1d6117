"""The memory half of lower-tile-to-hivm: tile.* accesses of flat buffers become memref and bufferization ops of the Ascend tile contract.

A load is a cast of the buffer, a local allocation, a copy and a tensor; a store is `materialize_in_destination`; a run-time extent is a pair of
subviews (what is outside stays unspecified); rows by id are a loop marked `ExtractedLoadOrStore`, which the Ascend compiler recognises.
Products, lane numbers and the signature are `emit`'s.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.ascend.facts import CORE
from tapeout.codegen.tile_arithmetic import element, element_of, tile_type
from tapeout.dialects import tile
from tapeout.dialects._mlir import arith, bufferization, ir, linalg, memref, scf, tensor

Value = Any
DYNAMIC = ir.ShapedType.get_dynamic_size()
DYNAMIC_STRIDE = ir.ShapedType.get_dynamic_stride_or_offset()
ROW_LOOP = "ExtractedLoadOrStore"


def lower_access(op: Any) -> Value | None:
    """The replacement of one memory op, built at the insertion point; None for an op without a result."""
    return _LOWER[op.name](op.opview)


def is_access(op: Any) -> bool:
    """Whether an op is one that `lower_access` replaces."""
    return op.name in _LOWER


def strides_of(shape: Sequence[int]) -> list[int]:
    """Row-major strides; the first extent does not matter."""
    out = [1] * len(shape)
    for axis in reversed(range(len(shape) - 1)):
        out[axis] = out[axis + 1] * shape[axis + 1]
    return out


def cast_view(base: Value, offset: Value, shape: Sequence[int], strides: Sequence[int]) -> Value:
    """`shape` of a flat buffer from element `offset` on."""
    layout = ir.StridedLayoutAttr.get(DYNAMIC_STRIDE, list(strides))
    out = ir.MemRefType.get(list(shape), ir.MemRefType(base.type).element_type, layout)
    return memref.ReinterpretCastOp(out, base, [offset], [], [], [DYNAMIC_STRIDE], list(shape), list(strides)).result


def rows_of_view(view: Value, first: Value | int, count: Value | int) -> Value:
    """Rows [first, first + count) of a view; each is an int or an index."""
    kind = ir.MemRefType(view.type)
    strides, at = kind.get_strides_and_offset()
    fixed, whole = isinstance(count, int), isinstance(first, int)
    shape = [count if fixed else DYNAMIC, *list(kind.shape)[1:]]
    layout = ir.StridedLayoutAttr.get(at if whole else DYNAMIC_STRIDE, strides)
    out = ir.MemRefType.get(shape, kind.element_type, layout)
    offsets = [first if whole else DYNAMIC_STRIDE] + [0] * (len(shape) - 1)
    return memref.SubViewOp(out, view, [] if whole else [first], [] if fixed else [count], [], offsets, shape, [1] * len(shape)).result


def rows_of_tile(value: Value, first: Value | int, count: Value | int) -> Value:
    """Rows [first, first + count) of a tile."""
    shape, fixed, whole = t.shape_of(value), isinstance(count, int), isinstance(first, int)
    out = [count if fixed else DYNAMIC, *shape[1:]]
    kind = ir.RankedTensorType.get(out, ir.RankedTensorType(value.type).element_type)
    offsets = [first if whole else DYNAMIC_STRIDE] + [0] * (len(shape) - 1)
    return tensor.ExtractSliceOp(kind, value, [] if whole else [first], [] if fixed else [count], [], offsets, out, [1] * len(shape)).result


def _allocated(kind: Any) -> Value:
    tile_kind = ir.RankedTensorType(kind)
    return memref.AllocOp(ir.MemRefType.get(list(tile_kind.shape), tile_kind.element_type), [], []).result


def _as_tensor(local: Value, kind: Any) -> Value:
    return bufferization.ToTensorOp(kind, local, restrict=True, writable=True).result


def _written(value: Value, view: Value) -> None:
    bufferization.MaterializeInDestinationOp(None, value, view, writable=True)


def _cell(base: Value, at: Value) -> Value:
    """One element of a buffer, by the scalar unit."""
    return memref.load(cast_view(base, at, [1], [1]), [t.index(0)])


def _scalar(op: Any) -> Value:
    return arith.index_cast(ir.IndexType.get(), _cell(op.base, op.at))


def _offset(op: Any, shape: Sequence[int]) -> Value:
    offset = t.index(0)
    for at, stride in zip(op.at, strides_of(shape), strict=True):
        offset = t.add(offset, t.mul(at, stride))
    return offset


def _box(op: Any, box: Sequence[int]) -> tuple[Value, list[Value]]:
    """The global view of a load or store, and its number of real rows where only the run knows it."""
    shape = tile.integers(op.shape)
    axis = len(shape) - len(box)
    valid = [_clamped(t.sub(extent, list(op.at)[axis]), box[0]) for extent in op.extent]
    return cast_view(op.base, _offset(op, shape), box, strides_of(shape)[axis:]), valid


def _clamped(rows: Value, most: int) -> Value:
    return t.minimum(t.maximum(rows, 0), most)


def load_number(op: Any) -> Value:
    """The scalar behind a load of rank 0."""
    return _cell(op.base, _offset(op, tile.integers(op.shape)))


def _load(op: Any) -> Value:
    box = t.shape_of(op.out)
    local = _allocated(op.out.type)
    source, valid = _box(op, box)
    target = local
    for rows in valid:
        source, target = rows_of_view(source, 0, rows), rows_of_view(local, 0, rows)
    memref.copy(source, target)
    return _as_tensor(local, op.out.type)


def _store(op: Any) -> None:
    value = op.value
    view, valid = _box(op, t.shape_of(value))
    for rows in valid:
        value, view = rows_of_tile(value, 0, rows), rows_of_view(view, 0, rows)
    _written(value, view)


def _row_loop(op: Any, count: Value, width: int, body: Callable[[Value, Value, Value], None]) -> None:
    """body(r, id, view of the row that it names) for r in [0, count); a negative id names row 0."""
    loop = scf.ForOp(t.index(0), count, t.index(1))
    loop.operation.attributes[ROW_LOOP] = ir.UnitAttr.get()
    stride = op.row_stride.value
    with ir.InsertionPoint(loop.body):
        r = loop.induction_variable
        row = arith.index_cast(ir.IndexType.get(), _cell(op.ids, t.add(op.first, r)))
        offset = t.add(t.mul(t.maximum(row, 0), stride), op.column)
        body(r, row, cast_view(op.base, offset, [1, width], [stride, 1]))
        scf.YieldOp([])


def _is_aligned(value: Value) -> bool:
    """Whether rows of a tile start at aligned addresses of the unified buffer, one behind the other."""
    width = t.shape_of(value)[1]
    return width * _bytes(value) % CORE.unified_alignment == 0


def _bytes(value: Value) -> int:
    return int(ir.RankedTensorType(value.type).element_type.width) // 8


def _gather(op: Any) -> Value:
    rows, width = t.shape_of(op.out)
    valid = [_clamped(v, rows) for v in op.valid]
    if not _is_aligned(op.out):
        return _gather_elements(op, rows, width, valid)
    local = _allocated(op.out.type)
    _row_loop(op, valid[0] if valid else t.index(rows), width, lambda r, _, row: memref.copy(row, rows_of_view(local, r, 1)))
    return _as_tensor(local, op.out.type)


def _gather_elements(op: Any, rows: int, width: int, valid: list[Value]) -> Value:
    """Element by element: a copy cannot start a row between two aligned addresses."""
    count = valid[0] if valid else t.index(rows)
    local = _allocated(tile_type([rows], element("i32")))
    memref.copy(rows_of_view(cast_view(op.ids, op.first, [rows], [1]), 0, count), rows_of_view(local, 0, count))
    ids = t.maximum(_as_tensor(local, tile_type([rows], element("i32"))), 0)
    starts = t.add(t.mul(t.cast(ids, "i64"), op.row_stride.value), t.splat(op.column, [rows], "i64"))
    places = t.add(t.broadcast(starts, 1, width), t.broadcast(t.cast(lanes(width), "i64"), 0, rows))
    there = t.broadcast(t.cast(t.less(lanes(rows), t.splat(count, [rows])), "i32"), 1, width)
    empty = tensor.empty([rows, width], element_of(op.out))
    other = t.full([rows, width], 0, t.kind_of(op.out))
    return ir.Operation.create("hfusion.indirect_load", results=[op.out.type], operands=[op.base, places, empty, t.cast(there, "i8"), other],
                               attributes={"isVolatile": ir.BoolAttr.get(True)}).result


def _scatter(op: Any) -> None:
    rows, width = t.shape_of(op.value)
    value = op.value if width == 1 or _is_aligned(op.value) else _widened(op.value)

    def write(r: Value, row: Value, view: Value) -> None:
        kept = scf.IfOp(t.greater_equal(row, 0))
        with ir.InsertionPoint(kept.then_block):
            _written(_number(value, r) if width == 1 else _one_row(value, r, width), view)
            scf.YieldOp([])

    _row_loop(op, _clamped(op.valid, rows), width, write)


def _number(value: Value, r: Value) -> Value:
    """One element in a tile of its own, which starts at an aligned address."""
    number = tensor.extract(value, [r, t.index(0)])
    return linalg.fill(number, outs=[tensor.empty([1, 1], number.type)])


def _widened(value: Value) -> Value:
    """The tile with rows that fill whole aligned blocks."""
    rows, width = t.shape_of(value)
    step = CORE.unified_alignment // _bytes(value)
    wide = -(-width // step) * step
    target = tensor.empty([rows, wide], element_of(value))
    return tensor.InsertSliceOp(value, target, [], [], [], [0, 0], [rows, width], [1, 1]).result


def _one_row(value: Value, r: Value, width: int) -> Value:
    kind = tile_type([1, width], element_of(value))
    return tensor.ExtractSliceOp(kind, value, [r], [], [], [DYNAMIC_STRIDE, 0], [1, width], [1, 1]).result


def lanes(n: int) -> Value:
    """[0, ..., n - 1] as i32."""
    if n == 1:  # the compiler does not take a single lane
        return t.full([1], 0, "i32")
    segments = ir.DenseI32ArrayAttr.get([1, 1, 1])
    return ir.Operation.create("hfusion.arange", results=[tile_type([n], element("i32"))],
                               operands=[t.index(0), t.index(1), tensor.empty([n], element("i32"))],
                               attributes={"operandSegmentSizes": segments}).result


_LOWER: dict[str, Callable[[Any], Value | None]] = {
    "tile.scalar": _scalar, "tile.load": _load, "tile.store": _store, "tile.gather": _gather, "tile.scatter": _scatter,
}  # fmt: skip
