"""lower-tile-to-hivm: a kernel module becomes one function of the Ascend tile contract, as generic text that the Ascend compiler parses.

The function takes lock, workspace, the kernel's buffers, and six i32 of the grid. It walks the kernel's own grid, whose extents it computes from
the counts, in steps of the launched grid x: any launch size is right, and no count needs to be known at launch. `mix_mode` follows from the ops.
"""

import re
from collections.abc import Iterator
from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.ascend.lower_tile_memory import ROW_LOOP, is_access, lower_access
from tapeout.codegen.tile_arithmetic import element, tile_type
from tapeout.dialects import tile
from tapeout.dialects._mlir import arith, func, ir, linalg, scf, tensor

Value = Any
PRODUCTS = ("linalg.matmul", "hfusion.matmul_mx")
CUBE_OPS = frozenset({
    "tensor.empty", "linalg.fill", "linalg.matmul", "hfusion.matmul_mx", "linalg.transpose", "arith.truncf", "bufferization.to_tensor",
    "tensor.extract_slice", "scf.for",
})  # fmt: skip
"""What the cube core does without a vector core, among ops that make tiles."""
LEAD, TRAIL = 2, 6

# The Ascend parser wants the body that this op has by definition, and our bindings cannot build it: a lane number outside linalg does not verify.
_ARANGE = '"hfusion.arange"'
_ARANGE_BODY = """ <{operandSegmentSizes = array<i32: 1, 1, 1>}> ({
    ^bb0(%from: index, %by: index, %old: i32):
      %at = "linalg.index"() <{dim = 0 : i64}> : () -> index
      %far = "arith.muli"(%by, %at) : (index, index) -> index
      %sum = "arith.addi"(%far, %from) : (index, index) -> index
      %lane = "arith.index_cast"(%sum) : (index) -> i32
      "linalg.yield"(%lane) : (i32) -> ()
    }) : """


def emit(module: ir.Module) -> str:
    """The text of a kernel module (not changed) on the tile contract."""
    with module.context:
        copy = ir.Module.parse(module.operation.get_asm(print_generic_op_form=True))
    lower_tile_to_hivm(copy)
    return text_of(copy)


def lower_tile_to_hivm(module: ir.Module) -> None:
    """Rewrites a kernel module in place; the grid function ends inside the kernel."""
    module.context.allow_unregistered_dialects = True
    with module.context, ir.Location.unknown():
        function = _contract_function(module)
        for op in list(operations(function.operation)):
            _lower(op)
        _erase_unused(function.operation)
        _mark(function)


def text_of(module: ir.Module) -> str:
    """Generic text without what LLVM 19 does not know."""
    text = module.operation.get_asm(print_generic_op_form=True)
    text = re.sub(rf"({_ARANGE}\([^)]*\)) <?\{{operandSegmentSizes = array<i32: 1, 1, 1>\}}>? : ", rf"\1{_ARANGE_BODY}", text)
    return re.sub(r'("arith\.trunci"\([^)]*\)) <\{overflowFlags = [^}]*\}>', r"\1", text)


def operations(root: Any) -> Iterator[Any]:
    """The ops inside an op, in order, without those that define a reduction."""
    for region in root.regions:
        for block in region.blocks:
            for op in block.operations:
                yield op.operation
                if not op.operation.name.startswith("linalg."):
                    yield from operations(op.operation)


def mix_mode(function: Any) -> str:
    """Which cores a kernel needs, a fact of its ops: aiv without products, aic with little else, mix otherwise."""
    found = list(operations(function))
    if not any(op.name in PRODUCTS for op in found):
        return "aiv"
    tiles = {op.name for op in found if any(t.is_tile(v) for v in op.results)}
    rows = any(ROW_LOOP in op.attributes for op in found)
    return "mix" if rows or tiles - CUBE_OPS else "aic"


# ---- the function ------------------------------------------------------------------------------------------------------


def _contract_function(module: ir.Module) -> Any:
    kernel, grid = list(module.body.operations)
    i32, byte = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
    scratch = ir.MemRefType.get([ir.ShapedType.get_dynamic_size()], byte)
    types = [*[scratch] * LEAD, *(a.type for a in kernel.arguments), *[i32] * TRAIL]
    with ir.InsertionPoint(module.body):
        function = func.FuncOp(kernel.name.value, (types, []))
    block = function.add_entry_block()
    buffers = list(block.arguments)[LEAD:-TRAIL]
    with ir.InsertionPoint(block):
        extents = _moved(grid, buffers, block)
        _instances(kernel, buffers, extents, list(block.arguments)[-TRAIL:])
        func.ReturnOp([])
    kernel.operation.erase()
    grid.operation.erase()
    return function


def _moved(function: Any, buffers: list[Value], block: Any) -> list[Value]:
    """Moves a function's ops to the end of a block and returns what it returned."""
    for before, after in zip(function.arguments, buffers, strict=True):
        before.replace_all_uses_with(after)
    *body, last = list(function.entry_block.operations)
    results = list(last.operands)
    last.operation.erase()
    for op in body:
        block.append(op)
    return results


def _instances(kernel: Any, buffers: list[Value], extents: list[Value], grid: list[Value]) -> None:
    """The loop over the kernel's instances, x fastest, from this launch instance in steps of the launched ones."""
    index = ir.IndexType.get()
    total = t.mul(t.mul(extents[0], extents[1]), extents[2])
    first, step = arith.index_cast(index, grid[3]), arith.index_cast(index, grid[0])
    loop = scf.ForOp(first, total, step)
    with ir.InsertionPoint(loop.body):
        number = loop.induction_variable
        plane = t.mul(extents[0], extents[1])
        ids = [t.remainder(number, extents[0]), t.remainder(t.quotient(number, extents[0]), extents[1]), t.quotient(number, plane)]
        _moved(kernel, buffers, loop.body)
        scf.YieldOp([])
    for op in list(operations(loop.operation)):
        if op.name == "tile.program_id":
            op.results[0].replace_all_uses_with(ids[op.opview.axis.value])
            op.erase()


def _mark(function: Any) -> None:
    i64 = ir.IntegerType.get_signless(64)
    for name, at in (("SyncBlockLockArgIdx", 0), ("WorkspaceArgIdx", 1)):
        function.attributes[name] = ir.IntegerAttr.get(i64, at)
    for name, word in (("global_kernel", "local"), ("mix_mode", mix_mode(function.operation)), ("parallel_mode", "simd")):
        function.attributes[name] = ir.StringAttr.get(word)


def _erase_unused(function: Any) -> None:
    for op in reversed(list(operations(function))):
        if op.name in ("arith.constant", "tensor.empty", "arith.index_cast") and not any(list(v.uses) for v in op.results):
            op.erase()


# ---- ops ---------------------------------------------------------------------------------------------------------------


def _lower(op: Any) -> None:
    if "tile.exact" in op.attributes:
        del op.attributes["tile.exact"]
    lower = lower_access if is_access(op) else _LOWER.get(op.name)
    if lower is None:
        return
    with ir.InsertionPoint(op):
        result = lower(op)
    if result is not None:
        op.results[0].replace_all_uses_with(result)
    op.erase()


def _iota(op: Any) -> Value:
    return lanes(t.shape_of(op.results[0])[0])


def lanes(n: int) -> Value:
    """[0, ..., n - 1] as i32."""
    kind = tile_type([n], element("i32"))
    segments = ir.DenseI32ArrayAttr.get([1, 1, 1])
    return ir.Operation.create("hfusion.arange", results=[kind], operands=[t.index(0), t.index(1), tensor.empty([n], element("i32"))],
                               attributes={"operandSegmentSizes": segments}).result


def _dot_scaled(op: Any) -> Value:
    a, sa, b, sb, acc = op.operands
    return ir.Operation.create("hfusion.matmul_mx", results=[op.results[0].type], operands=[a, b, sa, sb, acc]).result


def _compress_store(op: Any) -> Value:
    """Running counts of the mask are positions; what the mask leaves out, or the limit cuts off, is masked in the store."""
    view = op.opview
    n, i32 = t.shape_of(view.values)[0], element("i32")
    marks = t.cast(view.mask, "i32")
    sums = ir.Operation.create("hfusion.cumsum", results=[marks.type], operands=[marks],
                               attributes={"cum_dims": ir.DenseI64ArrayAttr.get([0]), "reverse": ir.BoolAttr.get(False)}).result
    places = t.add(t.sub(sums, 1), t.splat(view.at, [n]))
    kept = t.bit_and(view.mask, t.less(places, t.splat(view.limit, [n])))
    ir.Operation.create("hfusion.indirect_store", results=[], operands=[view.values, places, t.widen_unsigned(kept, "i8"), view.base])
    total = tensor.extract(t.reduce(t.cast(kept, "i32"), "add", 0), [])
    return arith.index_cast(ir.IndexType.get(), total) if total.type == i32 else total


_LOWER = {"tile.iota": _iota, "tile.dot_scaled": _dot_scaled, "tile.compress_store": _compress_store}

__all__ = ["CUBE_OPS", "PRODUCTS", "emit", "lanes", "linalg", "lower_tile_to_hivm", "mix_mode", "operations", "text_of", "tile"]
