"""lower-tile-to-hivm: a kernel module becomes one function of the Ascend tile contract, as generic text that the Ascend compiler parses.

The function takes lock, workspace, the kernel's buffers, and six i32 of the grid. It walks the kernel's own grid, whose extents it computes from
the counts, in steps of the launched grid x: any launch size is right, and no count needs to be known at launch. `mix_mode` follows from the ops.
"""

import re
from collections.abc import Iterator
from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.ascend.lane_numbers import running_sum, sum_up_lanes
from tapeout.codegen.ascend.loops_from_zero import start_at_zero
from tapeout.codegen.ascend.lower_tile_memory import ROW_LOOP, is_access, lanes, lower_access
from tapeout.codegen.ascend.pairs import split_pairs
from tapeout.codegen.ascend.scalars import tiles_to_scalars
from tapeout.codegen.tile_arithmetic import element
from tapeout.dialects._mlir import arith, func, ir, scf, tensor

Value = Any
PRODUCTS = ("linalg.matmul", "hfusion.matmul_mx")
CUBE_OPS = frozenset({
    "tensor.empty", "linalg.fill", "linalg.matmul", "hfusion.matmul_mx", "linalg.transpose", "arith.truncf", "bufferization.to_tensor",
    "tensor.extract_slice", "scf.for",
})  # fmt: skip
"""What the cube core does without a vector core, among ops that make tiles."""
LEAD, TRAIL = 2, 6
SCALED_STEP = 64  # elements of K: the block-scaled product takes its scales in pairs

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
    return text_of(lowered(module))


def lowered(module: ir.Module, drops_nan: bool = False) -> ir.Module:
    """A copy of a kernel module on the tile contract; `drops_nan` keeps maxima that drop a NaN (see `_use_single_instructions`)."""
    with module.context:
        copy = ir.Module.parse(module.operation.get_asm(print_generic_op_form=True))
    lower_tile_to_hivm(copy, drops_nan)
    return copy


def lower_tile_to_hivm(module: ir.Module, drops_nan: bool = False) -> None:
    """Rewrites a kernel module in place; the grid function ends inside the kernel."""
    module.context.allow_unregistered_dialects = True
    with module.context, ir.Location.unknown():
        function = _contract_function(module)
        tiles_to_scalars(function.entry_block)
        start_at_zero(function.operation, operations)
        if not drops_nan:
            _use_single_instructions(function.entry_block)
        _order_round_trips(function.operation)
        if mix_mode(function.operation) == "aiv":
            split_pairs(function.operation, operations)
        for op in list(operations(function.operation)):
            _lower(op)
        sum_up_lanes(function.operation, operations)
        _keep_roundings(function.operation)
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
        ids = [t.remainder(number, extents[0]), t.remainder(t.quotient(number, extents[0]), extents[1]), t.quotient(number, plane), first]
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
    """Erases what nobody reads: ops of plain dialects, and lane numbers."""
    for op in reversed(list(operations(function))):
        is_plain = op.name.startswith(("arith.", "tensor.", "math.", "linalg.")) or op.name == "hfusion.arange"
        if is_plain and list(op.results) and not any(list(v.uses) for v in op.results):
            op.erase()


EXTREMA = {"arith.maxnumf": arith.MaximumFOp, "arith.minnumf": arith.MinimumFOp}


def _use_single_instructions(block: Any) -> None:
    """Maxima and minima that hand a NaN on are one instruction; those that drop it take nine, and part vector functions."""
    for op in [op.operation for op in block.operations]:
        for region in op.regions:
            for inner in region.blocks:
                _use_single_instructions(inner)
        if op.name in EXTREMA:
            with ir.InsertionPoint(op):
                op.results[0].replace_all_uses_with(EXTREMA[op.name](*op.operands).result)
            op.erase()


# ---- order between cores -----------------------------------------------------------------------------------------------

READS = {"tile.load": (0,), "tile.gather": (0, 1), "tile.scalar": (0,), "tile.scatter": (2,)}
WRITES = {"tile.store": 1, "tile.scatter": 1, "tile.compress_store": 2}
"""Operand numbers of buffers."""
BARRIER_FLAG = 15  # the compiler numbers its own flags from 0


def round_trips(function: Any) -> set[Any]:
    """Buffers that a kernel both writes and reads, but for those that the cube alone reads: for it the compiler waits by itself."""
    found = list(operations(function))
    read = {op.operands[number] for op in found for number in READS.get(op.name, ()) if not _is_factor(op)}
    return read & {op.operands[WRITES[op.name]] for op in found if op.name in WRITES}


def _is_factor(op: Any) -> bool:
    """Whether a load is multiplied and nothing else, as it is or turned."""
    uses = [use.owner.operation for result in op.results for use in result.uses] if op.name == "tile.load" else []
    return bool(uses) and all(
        use.name in ("linalg.matmul", "tile.dot_scaled")
        or (use.name == "linalg.transpose" and all(after.owner.operation.name == "linalg.matmul" for after in use.results[0].uses))
        for use in uses
    )


def _order_round_trips(function: Any) -> None:
    """Around a write of a buffer that is read again, both vector cores meet: the tile contract orders one core's accesses alone."""
    shared = round_trips(function)
    has_products = any(op.name in ("linalg.matmul", "tile.dot_scaled") for op in operations(function))
    if not shared or not has_products:
        return
    for op in [op for op in operations(function) if op.name in WRITES and op.operands[WRITES[op.name]] in shared]:
        with ir.InsertionPoint(op):
            _through_vector_core(op)
            _meet()
        with ir.InsertionPoint(_next(op)):
            _meet()


def _next(op: Any) -> Any:
    siblings = list(op.block.operations)
    return siblings[siblings.index(op) + 1]


def _through_vector_core(op: Any) -> None:
    """A tile of sums would be stored by the cube core, which does not meet the vector cores: a maximum with the lowest number moves it."""
    value = op.operands[0]
    if t.is_tile(value) and t.kind_of(value) == "f32":
        op.operands[0] = arith.maxnumf(value, t.like(-3.4028234663852886e38, value))


def _meet() -> None:
    words = {"sync_block_mode": "sync_block_mode<ALL_SUB_VECTOR>", "tvector_pipe": "pipe<PIPE_MTE3>"}
    attributes: dict[str, Any] = {name: ir.Attribute.parse(f"#hivm.{word}") for name, word in words.items()}
    attributes["flag_id"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), BARRIER_FLAG)
    ir.Operation.create("hivm.hir.sync_block", attributes=attributes)
    ir.Operation.create("hivm.hir.pipe_barrier", attributes={"pipe": ir.Attribute.parse("#hivm.pipe<PIPE_ALL>")})


# ---- ops ---------------------------------------------------------------------------------------------------------------


def _lower(op: Any) -> None:
    for hint in ("tile.exact", "tile.pick", "tile.join", "tile.pack"):
        if hint in op.attributes:
            del op.attributes[hint]
    lower = lower_access if is_access(op) else _LOWER.get(op.name)
    if lower is None:
        return
    with ir.InsertionPoint(op):
        result = lower(op)
    if result is not None:
        op.results[0].replace_all_uses_with(result)
    if result is not None or not list(op.results):
        op.erase()


def _iota(op: Any) -> Value:
    return lanes(t.shape_of(op.results[0])[0])


def _dot_scaled(op: Any) -> Value:
    """The block-scaled product where a step holds pairs of scale groups; else both sides decoded to bf16, which is exact.

    It always starts afresh: the device library's function takes no word for adding to sums, though the compiler leaves loops as if it did
    (silent; found by the simulator). So a vector core adds the sums of several steps.
    """
    a, sa, b, sb, acc = op.operands
    if t.shape_of(a)[1] % SCALED_STEP:
        return t.dot(_decoded(a, sa), t.transpose(_decoded(t.transpose(b), sb)), acc)
    start = acc if _is_zero(acc) else t.full(t.shape_of(acc), 0.0)
    made = ir.Operation.create("hfusion.matmul_mx", results=[op.results[0].type], operands=[a, b, sa, sb, start]).result
    return made if _is_zero(acc) else t.add(acc, made)


def _is_zero(acc: Value) -> bool:
    """Whether sums start here: a fill, or what a loop of one step carries."""
    if not isinstance(acc.owner, ir.Block):
        return acc.owner.name == "linalg.fill"
    loop = acc.owner.owner
    return loop.name == "scf.for" and _is_one_step(loop)


def _is_one_step(loop: Any) -> bool:
    bounds = [v.owner for v in list(loop.operands)[:3]]
    if any(isinstance(b, ir.Block) or b.name != "arith.constant" for b in bounds):
        return False
    low, high, step = (ir.IntegerAttr(b.attributes["value"]).value for b in bounds)
    return bool(low + step >= high)


def _decoded(codes: Value, scales: Value) -> Value:
    return t.cast(t.dequantize_q8(codes, scales), "bf16")


def _compress_store(op: Any) -> Value:
    """Running counts of the mask are positions; what the mask leaves out, or the limit cuts off, is masked in the store."""
    view = op.opview
    n, i32 = t.shape_of(view.values)[0], element("i32")
    marks = t.cast(view.mask, "i32")
    sums = running_sum(marks)
    places = t.add(t.sub(sums, 1), t.splat(view.at, [n]))
    kept = t.bit_and(view.mask, t.less(places, t.splat(view.limit, [n])))
    ir.Operation.create("hfusion.indirect_store", results=[], operands=[view.base, places, view.values, t.cast(kept, "i8")])
    total = tensor.extract(t.reduce(t.split_first(t.cast(kept, "i32"), n), "add", 1), [t.index(0)])
    return arith.index_cast(ir.IndexType.get(), total) if total.type == i32 else total


def _keep_roundings(function: Any) -> None:
    """A widened value that was just rounded to e4m3, or in a mixed kernel to bf16: the compiler drops such a pair, and the rounding with it."""
    is_mixed = mix_mode(function) == "mix"
    for op in list(operations(function)):
        source = op.operands[0].owner if op.name == "arith.extf" else None
        if source is None or isinstance(source, ir.Block) or source.name != "arith.truncf" or not t.is_tile(op.operands[0]):
            continue
        by = {"e4m3": rounded_e4m3, **({"bf16": rounded_bf16} if is_mixed else {})}.get(t.kind_of(op.operands[0]))
        if by is not None:
            with ir.InsertionPoint(op):
                op.results[0].replace_all_uses_with(by(source.operands[0]))


def rounded_bf16(x: Value) -> Value:
    """f32 numbers rounded to bf16 ones (nearest, ties to even) by integer arithmetic alone."""
    bits = t.bitcast(x, "i32")
    odd = t.bit_and(t.shr_unsigned(bits, 16), 1)
    return t.bitcast(t.bit_and(t.add(t.add(bits, 0x7FFF), odd), -0x10000), "f32")


def rounded_e4m3(x: Value) -> Value:
    """f32 values of at most 448, rounded to e4m3 numbers (nearest, ties to even) by f32 and integer arithmetic alone."""
    bits = t.bitcast(x, "i32")
    odd = t.bit_and(t.shr_unsigned(bits, 20), 1)
    normal = t.bitcast(t.bit_and(t.add(t.add(bits, 0x7FFFF), odd), -0x100000), "f32")
    step = 1.5 * 2.0**14  # numbers near it are 2^-9 apart, as e4m3 ones are below 2^-6
    return t.select(t.less(t.absolute(x), 2.0**-6), t.sub(t.add(x, step), step), normal)


def _narrow(op: Any) -> Value | None:
    """A value that was widened and is narrowed again is what it was; the compiler would convert it twice."""
    source = op.operands[0].owner
    is_same = not isinstance(source, ir.Block) and source.name == "arith.extf" and source.operands[0].type == op.results[0].type
    return source.operands[0] if is_same else None


_LOWER = {"arith.truncf": _narrow, "tile.iota": _iota, "tile.dot_scaled": _dot_scaled, "tile.compress_store": _compress_store}

__all__ = ["CUBE_OPS", "PRODUCTS", "emit", "lower_tile_to_hivm", "mix_mode", "operations", "text_of"]
