"""Memory, control flow and the kernel function itself: how a kernel body reads, writes, loops and is wrapped into a module.

A kernel module holds `@NAME(buffers...)`, one program instance, and `@NAME_grid(buffers...) -> (index, index, index)`, the grid extents.
Buffers are flat `memref<?xT>`; a `View` sees one as a row-major array.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tapeout.codegen.tile_arithmetic import (
    KernelError,
    Number,
    Value,
    constant,
    element,
    index,
    shape_of,
    tile_type,
)
from tapeout.dialects import tile
from tapeout.dialects._mlir import arith, func, ir, scf

BUFFERS = ("bf16", "f16", "f32", "f64", "e4m3", "i8", "i16", "i32", "i64")


def program_id(axis: int) -> Value:
    """This instance's index on grid axis 0, 1 or 2."""
    return tile.ProgramIdOp(ir.IndexType.get(), _i64(axis)).out


def iota(n: int) -> Value:
    """[0, 1, ..., n-1] as i32."""
    return tile.IotaOp(tile_type([n], element("i32"))).out


def scalar(buffer: Value, at: Number) -> Value:
    """buffer[at] of an i32 buffer, as an index."""
    return tile.ScalarOp(ir.IndexType.get(), buffer, index(at)).out


@dataclass(frozen=True)
class View:
    """A buffer seen as a row-major array of `shape`.

    shape[0] is an int, a run-time index, or None (unknown, and no box reaches beyond the end). A box higher than one row is ragged where
    the array's rows are a run-time index or do not divide by the box. `panel` p: the last two axes [K, N] are stored as [N/p][K][p].
    """

    buffer: Value
    shape: Sequence[Any]
    panel: int = 0

    def load(self, at: Sequence[Number], box: Sequence[int], extent: Number | None = None) -> Value:
        """The box at `at`. It may have fewer axes than the array: the leading ones are then boxes of one row.

        `extent` bounds the box's leading axis (a coordinate of the array, not a count); by default the array's rows.
        """
        out = tile_type(box, ir.MemRefType(self.buffer.type).element_type)
        return tile.LoadOp(out, self.buffer, *self._where(at, box, extent), _i64(self.panel)).out

    def store(self, at: Sequence[Number], value: Value, extent: Number | None = None) -> None:
        """Writes `value` to the box at `at`; rows at or beyond the extent are dropped."""
        if self.panel:
            raise KernelError("weights in panels are read only; store to a view without panel")
        tile.StoreOp(value, self.buffer, *self._where(at, shape_of(value), extent))

    def _where(self, at: Sequence[Number], box: Sequence[int], extent: Number | None) -> tuple[Any, Any, Any]:
        if any(not isinstance(n, int) for n in self.shape[1:]):
            raise KernelError(f"an array has run-time rows at most: extents {self.shape[1:]} must be ints")
        rows = self.shape[0]
        if extent is None and len(box) == len(self.shape):
            extent = self._rows_bound(rows, box[0])
        static = [rows if isinstance(rows, int) else tile.UNKNOWN, *self.shape[1:]]
        return [index(i) for i in at], [] if extent is None else [index(extent)], _i64s(static)

    @staticmethod
    def _rows_bound(rows: Any, height: int) -> Any:
        if isinstance(rows, int):
            return rows if rows % height else None
        return rows if height > 1 else None


def gather(
    base: Value, ids: Value, first: Number, rows: int, width: int, *,
    row_stride: int | None = None, column: Number = 0, valid: Number | None = None,
) -> Value:  # fmt: skip
    """[rows, width]: row r is columns [column, column + width) of row max(ids[first + r], 0) of `base`.

    `row_stride` is the width of base's rows (default `width`). Rows at or beyond `valid` are unspecified; their ids are not read.
    """
    out = tile_type([rows, width], ir.MemRefType(base.type).element_type)
    bound = [] if valid is None else [index(valid)]
    return tile.GatherOp(out, base, ids, index(first), index(column), bound, _i64(row_stride or width)).out


def scatter(
    value: Value, base: Value, ids: Value, first: Number, valid: Number, *, row_stride: int | None = None, column: Number = 0,
    distinct: bool = False
) -> None:  # fmt: skip
    """Row r < valid of `value` goes to row ids[first + r] of `base`; rows with a negative id are dropped.

    The last of rows with one id stays, which costs a target with many threads a search; `distinct` says that there are none.
    """
    stride = row_stride or shape_of(value)[1]
    op = tile.ScatterOp(value, base, ids, index(first), index(column), index(valid), _i64(stride))
    if distinct:
        op.operation.attributes["tile.distinct"] = ir.UnitAttr.get()


def compress_store(values: Value, mask: Value, base: Value, at: Number, limit: Number) -> Value:
    """Writes values[i] where mask[i] to base[at], base[at + 1], ..., below position `limit`; returns the number written."""
    return tile.CompressStoreOp(ir.IndexType.get(), values, mask, base, index(at), index(limit)).count


def _carried(number: Number) -> Value:
    if isinstance(number, ir.Value):
        return number
    return index(number) if isinstance(number, int) else constant(number, "f32")


def loop(lo: Number, hi: Number, step: Number, carried: Sequence[Number], body: Callable[..., Any]) -> list[Value]:
    """Runs body(i, *carried) for i in [lo, hi) by step; it returns the next carried values (None or [] for none)."""
    start = [_carried(c) for c in carried]
    op = scf.ForOp(index(lo), index(hi), index(step), start)
    with ir.InsertionPoint(op.body):
        results = _as_list(body(op.induction_variable, *op.inner_iter_args))
        _require_types("loop body returns", results, start)
        scf.YieldOp(results)
    return list(op.results)


def when(condition: Value, then: Callable[[], Any], otherwise: Callable[[], Any] | None = None) -> list[Value]:
    """Runs `then` where a scalar mask holds, else `otherwise`; both return the same kinds of values, which are the results.

    The branches are functions without arguments. Without `otherwise` there are no results.
    """
    if otherwise is None:
        op = scf.IfOp(condition)
        with ir.InsertionPoint(op.then_block):
            _require_types("when without otherwise returns", _as_list(then()), [])
            scf.YieldOp([])
        return []
    return _when_else(condition, then, otherwise)


def _when_else(condition: Value, then: Callable[[], Any], otherwise: Callable[[], Any]) -> list[Value]:
    # The result types are known only once a branch is built, so `then` is built aside and moved in.
    aside = ir.Operation.create("scf.execute_region", regions=1)
    with ir.InsertionPoint(aside.regions[0].blocks.append()):
        first = _as_list(then())
    op = scf.IfOp(condition, [v.type for v in first], has_else=True)
    for inner in list(aside.regions[0].blocks[0].operations):
        op.then_block.append(inner)
    aside.erase()
    with ir.InsertionPoint(op.then_block):
        scf.YieldOp(first)
    with ir.InsertionPoint(op.else_block):
        second = _as_list(otherwise())
        _require_types("otherwise returns", second, first)
        scf.YieldOp(second)
    return list(op.results)


def _as_list(values: Any) -> list[Value]:
    if values is None:
        return []
    return [_carried(v) for v in values] if isinstance(values, list | tuple) else [values]


def _require_types(what: str, found: Sequence[Value], needed: Sequence[Value]) -> None:
    types = [str(v.type) for v in found], [str(v.type) for v in needed]
    if types[0] != types[1]:
        raise KernelError(f"{what} {types[0]}, but {types[1]} are carried; return one value of the same type for each")


def kernel(
    name: str, arguments: dict[str, str], body: Callable[..., None], grid: Callable[..., Sequence[Number]]
) -> ir.Module:  # fmt: skip
    """A module with one kernel. `arguments`: {name: element type of the buffer}; `body(*buffers)` is one program instance,
    `grid(*buffers)` returns up to three extents, ints or index values. Uses the current context, or makes one.
    """
    wrong = [f"{a}: {kind}" for a, kind in arguments.items() if kind not in BUFFERS]
    if wrong:
        raise KernelError(f"kernel {name} has buffers of unknown type: {', '.join(wrong)}; there are {', '.join(BUFFERS)}")
    context = ir.Context.current if _has_context() else ir.Context()
    tile.load_into(context)
    with context, ir.Location.name(name):
        module = ir.Module.create()
        types = [ir.MemRefType.get([ir.ShapedType.get_dynamic_size()], element(kind)) for kind in arguments.values()]
        with ir.InsertionPoint(module.body):
            _define(name, arguments, types, [], lambda *buffers: _nothing(body, buffers))
            _define(f"{name}_grid", arguments, types, [ir.IndexType.get()] * 3, lambda *buffers: _extents(grid(*buffers)))
        module.operation.verify()
    return module


def _nothing(body: Callable[..., None], buffers: Sequence[Value]) -> list[Value]:
    body(*buffers)
    return []


def _has_context() -> bool:
    try:
        return ir.Context.current is not None
    except ValueError:
        return False


def _extents(extents: Sequence[Number]) -> list[Value]:
    if not 1 <= len(extents) <= 3:
        raise KernelError(f"a grid has one to three extents, not {len(extents)}")
    return [index(n) for n in (*extents, *[1] * (3 - len(extents)))]


def _define(name: str, arguments: dict[str, str], types: list[Any], results: list[Any], build: Callable[..., Any]) -> None:
    function = func.FuncOp(name, (types, results))
    function.attributes["tile.arguments"] = ir.ArrayAttr.get([ir.StringAttr.get(a) for a in arguments])
    with ir.InsertionPoint(function.add_entry_block()):
        func.ReturnOp(build(*function.arguments))


def argument_names(module: ir.Module) -> list[str]:
    """The buffer names of a kernel module, in order."""
    return [name.value for name in next(iter(module.body.operations)).attributes["tile.arguments"]]


def kernel_name(module: ir.Module) -> str:
    """The kernel's name."""
    return str(next(iter(module.body.operations)).name.value)


def _i64(value: int) -> Any:
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)


def _i64s(values: Sequence[int]) -> Any:
    return ir.ArrayAttr.get([_i64(v) for v in values])  # `ext` fields take no DenseI64ArrayAttr


__all__ = [
    "View", "argument_names", "arith", "compress_store", "gather", "iota", "kernel", "kernel_name", "loop", "program_id",
    "scalar", "scatter", "when",
]  # fmt: skip
