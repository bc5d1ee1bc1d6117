"""verify-hivm: what a module on the tile contract must keep so that the Ascend compiler neither refuses it nor, worse, miscompiles it.

Checked after lower-tile-to-hivm and before any text leaves. Each rule stands for a refusal or a silent miscompile that was seen; all problems
are reported together, as sentences.
"""

from collections.abc import Callable, Iterator
from typing import Any

from tapeout.codegen.ascend.emit import LEAD, PRODUCTS, SCALED_STEP, TRAIL, mix_mode, operations
from tapeout.codegen.ascend.facts import CORE
from tapeout.codegen.ascend.lane_numbers import REGISTER_LANES, is_wide
from tapeout.codegen.ascend.lower_tile_memory import ROW_LOOP
from tapeout.dialects._mlir import ir

Rule = Callable[[Any], Iterator[str]]
ELEMENTS = frozenset({"f32", "f16", "bf16", "f8E4M3FN", "f8E5M2", "i1", "i8", "i16", "i32", "i64", "index"})
WIDTHS = {"f8E4M3FN": 1, "f8E5M2": 1, "bf16": 2, "f16": 2, "f32": 4, "i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8}


def problems(module: ir.Module) -> list[str]:
    """What is wrong with a module on the tile contract; empty for a sound one."""
    functions = [op.operation for op in module.body.operations]
    if len(functions) != 1 or functions[0].name != "func.func":
        return ["a module on the tile contract holds one function"]
    return [sentence for rule in RULES for sentence in rule(functions[0])]


def signature(function: Any) -> Iterator[str]:
    """Lock and workspace in front, six i32 behind, flat buffers between, and the attributes that say so."""
    types = [str(a.type) for a in function.regions[0].blocks[0].arguments]
    if types[:LEAD] != ["memref<?xi8>"] * LEAD or types[-TRAIL:] != ["i32"] * TRAIL:
        yield f"takes {types}; expected {LEAD} memref<?xi8> in front and {TRAIL} i32 behind"
    marks = {name: str(function.attributes[name]) for name in function.attributes}
    for name, at in (("SyncBlockLockArgIdx", "0 : i64"), ("WorkspaceArgIdx", "1 : i64"), ("mix_mode", f'"{mix_mode(function)}"')):
        if marks.get(name) != at:
            yield f"has {name} = {marks.get(name, 'nothing')}; its ops ask for {at}"


def elements(function: Any) -> Iterator[str]:
    """Only element types that LLVM 19 parses; no generic elementwise ops; no run-time allocations."""
    for op in operations(function):
        kinds = {_element(v) or "index" for v in (*op.operands, *op.results)} - ELEMENTS
        if kinds:
            yield f"'{op.name}' has elements {', '.join(sorted(kinds))}, which the Ascend compiler does not parse; hold them as i8"
        if op.name == "linalg.generic":
            yield "'linalg.generic' is not taken; use arith and math ops on tensors"
        if op.name == "memref.alloc" and not op.results[0].type.has_static_shape:
            yield "'memref.alloc' has a run-time size; take a static box and a valid extent"
        if op.name.startswith("tile."):
            yield f"'{op.name}' is left from the tile dialect"


def scaled_products(function: Any) -> Iterator[str]:
    """Block-scaled operands come straight from global memory, else the compiler lays them out wrongly without a word."""
    for op in operations(function):
        if op.name != "hfusion.matmul_mx":
            continue
        if any(_name(v.owner) != "bufferization.to_tensor" or _is_gathered(v.owner) for v in list(op.operands)[:4]):
            yield "'hfusion.matmul_mx' multiplies a computed or gathered operand; load all four straight from global memory"
        if op.operands[0].type.shape[1] % SCALED_STEP:
            yield f"'hfusion.matmul_mx' steps by {op.operands[0].type.shape[1]} of K; scales are taken in pairs, so by multiples of {SCALED_STEP}"


def products_alike(function: Any) -> Iterator[str]:
    """Both sides of a block-scaled product hold one kind of number: the library has no other product, and bytes would be taken for e4m3."""
    for op in operations(function):
        kinds = [_element(v) for v in list(op.operands)[:2]] if op.name == "hfusion.matmul_mx" else []
        if len(set(kinds)) > 1:
            yield f"'hfusion.matmul_mx' multiplies {kinds[0]} with {kinds[1]}; decode one side, both must hold one kind of number"


def slices(function: Any) -> Iterator[str]:
    """A part of a loaded tile is stored and nothing else: bufferization ends by an assertion where vector code reads it."""
    for op in operations(function):
        is_part = op.name == "tensor.extract_slice" and _name(op.operands[0].owner) == "bufferization.to_tensor"
        if is_part and any(use.owner.operation.name != "bufferization.materialize_in_destination" for use in op.results[0].uses):
            yield "'tensor.extract_slice' of a loaded tile is computed with; load that part by itself"


def mixed_kernels(function: Any) -> Iterator[str]:
    """What only vector kernels may do: copies inside the unified buffer, lanes parted and joined."""
    if mix_mode(function) != "mix":
        return
    for op in operations(function):
        if op.name == "memref.copy" and not any(_is_global(v) for v in op.operands):
            yield "'memref.copy' between local buffers of a mixed kernel; only vector kernels copy inside the unified buffer"
        if op.name in ("hfusion.interleave", "hfusion.deinterleave"):
            yield f"'{op.name}' in a mixed kernel undoes the division of rows between its vector cores; keep even columns before odd ones"


def ranks(function: Any) -> Iterator[str]:
    """No tile of rank 0: the compiler orders copies of such buffers by their addresses, and two compiles of one kernel differ."""
    for op in operations(function):
        if any(isinstance(v.type, ir.RankedTensorType) and v.type.rank == 0 for v in op.results):
            yield f"'{op.name}' makes a tile of rank 0; take a tile of one number"


def views(function: Any) -> Iterator[str]:
    """A view walks over its buffer: the compiler refuses stride 0."""
    for op in operations(function):
        if op.name == "memref.reinterpret_cast" and 0 in list(ir.DenseI64ArrayAttr(op.attributes["static_strides"])):
            yield "'memref.reinterpret_cast' has a stride of 0; copy the rows instead"


def lane_numbers(function: Any) -> Iterator[str]:
    """Lane numbers fit a register: fused into a loop that reduces, those of later registers are lost."""
    for op in operations(function):
        if is_wide(op):
            yield f"'{op.name}' makes lane numbers of {op.results[0].type.shape[0]} columns, a register holds {REGISTER_LANES}; sum up ones instead"


def carried_boxes(function: Any) -> Iterator[str]:
    """No loop hands a box that it loads on to its next turn: the compiler may put it over the box in use, and the sums are those of the next."""
    for op in operations(function):
        if op.name == "scf.for" and any(_name(v.owner) == "bufferization.to_tensor" for v in list(op.regions[0].blocks[0].operations)[-1].operands):
            yield "'scf.for' carries a box straight from memory to its next turn; load it in the turn that uses it"


def accumulators(function: Any) -> Iterator[str]:
    """One product an accumulator: a second one in the same step sends the sums through the unified buffer."""
    for op in operations(function):
        if op.name in PRODUCTS and _name(op.operands[len(list(op.operands)) - 1].owner) in PRODUCTS:
            yield f"'{op.name}' adds to the sums of another product of the same step; split the step"


def row_loops(function: Any) -> Iterator[str]:
    """One copy a buffer in a loop over rows, and none of rows that start between aligned addresses."""
    for loop in (op for op in operations(function) if ROW_LOOP in op.attributes):
        copies = [op for op in operations(loop) if op.name == "memref.copy"]
        targets = [_root(op.operands[1]) for op in copies]
        if len(set(targets)) < len(targets):
            yield "a loop over rows copies twice into one buffer; of several, only the last is divided rightly between the vector cores"
        for op in copies:
            width = op.operands[1].type.shape[1] * WIDTHS[_element(op.operands[1]) or "i8"]
            if width % CORE.unified_alignment:
                yield f"a loop over rows copies rows of {width} bytes; they start at multiples of {CORE.unified_alignment} bytes only"


def roundings(function: Any) -> Iterator[str]:
    """No e4m3 value, and in a mixed kernel no bf16 one, is widened where it was made: the compiler drops the pair, and the rounding with it."""
    dropped = {"f8E4M3FN": "e4m3", **({"bf16": "bf16"} if mix_mode(function) == "mix" else {})}
    for op in operations(function):
        source = op.operands[0].owner if op.name == "arith.extf" else None
        if source is not None and _name(source) == "arith.truncf" and _element(op.operands[0]) in dropped:
            kind = dropped[_element(op.operands[0]) or ""]
            yield f"'arith.extf' widens what 'arith.truncf' just rounded to {kind}; round by arithmetic (emit.rounded_{kind})"


RULES: tuple[Rule, ...] = (
    signature, elements, ranks, views, scaled_products, products_alike, row_loops, slices, mixed_kernels, roundings, lane_numbers,
    carried_boxes,
)  # fmt: skip
ADVICE: tuple[Rule, ...] = (accumulators,)
"""Rules whose breach costs time, not bits."""


def _name(owner: Any) -> str:
    return "" if isinstance(owner, ir.Block) else str(owner.name)


def _element(value: Any) -> str | None:
    kind = value.type
    return str(kind.element_type) if isinstance(kind, ir.RankedTensorType | ir.MemRefType) else None


def _root(view: Any) -> Any:
    while _name(view.owner) in ("memref.subview", "memref.cast"):
        view = view.owner.operands[0]
    return view


def _is_global(view: Any) -> bool:
    """Whether a view is of a buffer that the kernel takes."""
    root = _root(view)
    return isinstance(root.owner, ir.Block) or _name(root.owner) == "memref.reinterpret_cast"


def _is_gathered(to_tensor: Any) -> bool:
    local = to_tensor.operands[0]
    return any(ROW_LOOP in use.owner.operation.parent.attributes for use in local.uses if use.owner.operation.name == "memref.subview")
