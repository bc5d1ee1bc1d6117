"""verify-hivm: what a module on the tile contract must keep so that the Ascend compiler neither refuses it nor, worse, miscompiles it.

Checked after lower-tile-to-hivm and before any text leaves. Each rule stands for a refusal or a silent miscompile that was seen; all problems
are reported together, as sentences.
"""

from collections.abc import Callable, Iterator
from typing import Any

from tapeout.codegen.ascend.emit import LEAD, PRODUCTS, SCALED_STEP, TRAIL, mix_mode, operations
from tapeout.codegen.ascend.facts import CORE
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
    """No e4m3 value is widened where it was made: the compiler drops the pair, and the rounding with it."""
    for op in operations(function):
        source = op.operands[0].owner if op.name == "arith.extf" else None
        if source is not None and _name(source) == "arith.truncf" and _element(op.operands[0]) == "f8E4M3FN":
            yield "'arith.extf' widens what 'arith.truncf' just rounded to e4m3; round by arithmetic (emit.rounded_e4m3)"


RULES: tuple[Rule, ...] = (signature, elements, scaled_products, row_loops, roundings)
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


def _is_gathered(to_tensor: Any) -> bool:
    local = to_tensor.operands[0]
    return any(ROW_LOOP in use.owner.operation.parent.attributes for use in local.uses if use.owner.operation.name == "memref.subview")
