"""verify-tile: refuses what not every target can take, before any target sees it.

A kernel is two functions of flat buffers, and holds the ops of `OPS` on static tiles of at most four axes. Beyond the ops' own verifiers
it checks element types (arithmetic on f32, f64 and integers of 16 bits or more; bf16, f16, e4m3 and i8 only move, convert and compare
bits), the form of reductions, transposes and constants, and that the grid function only reads counts. Every error is a sentence at the
op's location.
"""

from collections.abc import Callable
from typing import Any

from tapeout.dialects._mlir import ir

ARITHMETIC = frozenset({
    "arith.addf", "arith.subf", "arith.mulf", "arith.divf", "arith.negf", "arith.maxnumf", "arith.minnumf",
    "arith.addi", "arith.subi", "arith.muli", "arith.divsi", "arith.divui", "arith.remsi", "arith.remui",
    "arith.maxsi", "arith.minsi", "arith.shli", "arith.shrsi", "arith.shrui", "arith.cmpf", "arith.cmpi",
})  # fmt: skip
BITWISE = frozenset({"arith.andi", "arith.ori", "arith.xori", "arith.select", "arith.bitcast"})
CONVERSIONS = frozenset({
    "arith.extf", "arith.truncf", "arith.extsi", "arith.extui", "arith.trunci", "arith.sitofp", "arith.uitofp", "arith.fptosi",
    "arith.index_cast",
})  # fmt: skip
FUNCTIONS = frozenset({"math.exp", "math.log", "math.log1p", "math.sqrt", "math.rsqrt", "math.absf"})
SHAPES = frozenset({
    "arith.constant", "tensor.empty", "tensor.expand_shape", "tensor.collapse_shape", "linalg.fill", "linalg.broadcast", "linalg.transpose",
    "linalg.reduce", "linalg.matmul",
})  # fmt: skip
CONTROL = frozenset({"scf.for", "scf.if", "scf.yield", "func.return"})
TILE = frozenset({
    "tile.program_id", "tile.iota", "tile.scalar", "tile.load", "tile.store", "tile.gather", "tile.scatter", "tile.compress_store",
    "tile.dot_scaled",
})  # fmt: skip
OPS = ARITHMETIC | BITWISE | CONVERSIONS | FUNCTIONS | SHAPES | CONTROL | TILE
GRID_OPS = frozenset({"arith.constant", "arith.index_cast", "tile.scalar", "func.return", "arith.select", "arith.cmpi"}) | {
    f"arith.{name}" for name in ("addi", "subi", "muli", "divsi", "divui", "remsi", "remui", "maxsi", "minsi")
}

BUFFER_ELEMENTS = ("bf16", "f16", "f32", "f64", "f8E4M3FN", "i8", "i16", "i32", "i64")
TILE_ELEMENTS = (*BUFFER_ELEMENTS, "i1")
COMPUTED = ("f32", "f64", "i16", "i32", "i64", "index")
REDUCTIONS = {"arith.addf": ("f32", "f64"), "arith.maxnumf": ("f32", "f64"), "arith.minnumf": ("f32", "f64"),
              "arith.addi": ("i32", "i64"), "arith.maxsi": ("i32", "i64"), "arith.minsi": ("i32", "i64")}  # fmt: skip
PRODUCT_ELEMENTS = ("bf16", "f16", "f32")
MAX_RANK = 4


def verify_tile(module_op: Any, pass_: Any) -> None:
    """The pass."""
    found = _problems(module_op)
    for op, sentence in found:
        op.location.emit_error(f"'{op.name}' {sentence}")
    if found:
        pass_.signal_pass_failure()


def problems(module: ir.Module) -> list[str]:
    """What is wrong with a kernel module, as sentences; empty for a sound one."""
    return [f"'{op.name}' {sentence}" for op, sentence in _problems(module.operation)]


def _problems(module_op: Any) -> list[tuple[Any, str]]:
    found: list[tuple[Any, str]] = []
    functions = list(module_op.regions[0].blocks[0].operations)
    if len(functions) != 2 or any(f.operation.name != "func.func" for f in functions):
        return [(module_op, "holds a kernel and its grid function, nothing else; build it with tile_builder.kernel")]
    name, grid = (str(f.name.value) for f in functions)
    if grid != f"{name}_grid":
        found.append((functions[1].operation, f"is called {grid}; the grid function of {name} is {name}_grid"))
    found.extend(_signature(functions[0], 0) + _signature(functions[1], 3))
    _walk(functions[0].operation.regions[0].blocks[0], OPS, found)
    _walk(functions[1].operation.regions[0].blocks[0], GRID_OPS, found)
    return found


def _signature(function: Any, results: int) -> list[tuple[Any, str]]:
    wrong = [str(a.type) for a in function.arguments if not _is_buffer(a.type)]
    found = []
    if wrong:
        found.append(
            (
                function.operation,
                f"takes {', '.join(wrong)}; a kernel takes flat buffers memref<?xT> of {', '.join(BUFFER_ELEMENTS)}",
            )
        )
    if [str(t) for t in function.type.results] != ["index"] * results:
        found.append(
            (
                function.operation,
                f"returns {[str(t) for t in function.type.results]}; it must return {results} index values",
            )
        )
    return found


def _is_buffer(kind: Any) -> bool:
    if not isinstance(kind, ir.MemRefType):
        return False
    flat = kind.rank == 1 and kind.is_dynamic_dim(0)
    return flat and str(kind.element_type) in BUFFER_ELEMENTS


def _walk(block: Any, allowed: frozenset[str], found: list[tuple[Any, str]]) -> None:
    for op in block.operations:
        sentence = _problem(op, allowed)
        if sentence:
            found.append((op.operation, sentence))
        if not op.operation.name.startswith("linalg."):
            for region in op.regions:
                for inner in region.blocks:
                    _walk(inner, allowed, found)


def _problem(op: Any, allowed: frozenset[str]) -> str | None:
    name = op.operation.name
    if name not in allowed:
        where = "kernels" if allowed is OPS else "grid functions, which only read counts and compute with them"
        return f"is not an op of tile {where}; found {name}"
    for value in [*op.operands, *op.results]:
        sentence = _type_problem(value.type)
        if sentence:
            return sentence
    check = _CHECKS.get(name) or _by_group(name)
    return check(op) if check else None


def _type_problem(kind: Any) -> str | None:
    if isinstance(kind, ir.RankedTensorType):
        if not kind.has_static_shape or any(n < 1 for n in kind.shape):
            return f"has a tile {kind}; tile extents are known and positive"
        if kind.rank > MAX_RANK:
            return f"has a tile of {kind.rank} axes; tiles have at most {MAX_RANK}"
        if str(kind.element_type) not in TILE_ELEMENTS:
            return f"has a tile of {kind.element_type}; elements are {', '.join(TILE_ELEMENTS)}"
        return None
    known = isinstance(kind, ir.MemRefType) or str(kind) in (*TILE_ELEMENTS, "index")
    return None if known else f"has a value of type {kind}; kernels know tiles, buffers and scalars"


def _element(value: Any) -> str:
    kind = value.type
    return str(kind.element_type if isinstance(kind, ir.RankedTensorType) else kind)


def _by_group(name: str) -> Callable[[Any], str | None] | None:
    return _computed if name in ARITHMETIC else _f32_only if name in FUNCTIONS else None


def _computed(op: Any) -> str | None:
    kind = _element(op.operands[0])
    if kind in COMPUTED or (op.operation.name in ("arith.cmpi", "arith.addi", "arith.subi") and kind == "i8"):
        return None
    return f"computes on {kind}; widen it first: arithmetic is done on {', '.join(COMPUTED)}"


def _f32_only(op: Any) -> str | None:
    kind = _element(op.operands[0])
    exact = op.operation.name in ("math.absf", "math.sqrt") and kind == "f64"
    return None if kind == "f32" or exact else f"is computed in f32, found {kind}; cast it first"


def _constant(op: Any) -> str | None:
    attribute = op.operation.attributes["value"]
    if isinstance(op.results[0].type, ir.RankedTensorType) and not ir.DenseElementsAttr(attribute).is_splat:
        return "holds different numbers; a constant tile is one number, others come from a buffer or tile.iota"
    return None


def _convert_float(op: Any) -> str | None:
    kinds = {_element(op.operands[0]), _element(op.results[0])}
    return None if "f32" in kinds else f"converts {' and '.join(sorted(kinds))}; go through f32, the one type that targets convert with"


def _reduce(op: Any) -> str | None:
    body = list(op.regions[0].blocks[0].operations)
    kind, inner = _element(op.operands[0]), body[0].operation.name
    if len(op.operands) != 2 or len(body) != 2 or inner not in REDUCTIONS:
        return f"combines with {inner}; a reduction is one of {', '.join(REDUCTIONS)}"
    if kind not in REDUCTIONS[inner]:
        return f"reduces {kind} by {inner}; that takes {', '.join(REDUCTIONS[inner])}"
    if len(list(op.operation.attributes["dimensions"])) != 1:
        return "removes several axes; reduce one after the other"
    return None if _is_neutral(op.operands[1], inner) else "starts from another value than the neutral one; combine that afterwards"


def _is_neutral(start: Any, inner: str) -> bool:
    fill = start.owner
    if isinstance(fill, ir.Block) or fill.name != "linalg.fill" or isinstance(fill.operands[0].owner, ir.Block):
        return False
    constant = fill.operands[0].owner
    if constant.name != "arith.constant":
        return False
    value, bits = constant.attributes["value"].value, {"i32": 31, "i64": 63}.get(_element(start), 0)
    lowest, highest = (-(2**bits), 2**bits - 1) if bits else (float("-inf"), float("inf"))
    return bool(value == {"add": 0, "max": lowest, "min": highest}[inner.split(".")[1][:3]])


def _transpose(op: Any) -> str | None:
    order = list(op.operation.attributes["permutation"])
    return None if order == [1, 0] else f"permutes axes by {order}; only two axes are exchanged"


def _broadcast(op: Any) -> str | None:
    count = len(list(op.operation.attributes["dimensions"]))
    return None if count == 1 else f"inserts {count} axes; insert one after the other"


def _matmul(op: Any) -> str | None:
    kinds = [_element(v) for v in op.operands]
    if kinds[0] != kinds[1] or kinds[0] not in PRODUCT_ELEMENTS or kinds[2] != "f32":
        return f"multiplies {kinds[0]} by {kinds[1]} into {kinds[2]}; both are one of {', '.join(PRODUCT_ELEMENTS)}, sums are f32"
    return None


def _fill(op: Any) -> str | None:
    return None if _element(op.operands[0]) == _element(op.results[0]) else "fills with a scalar of another type"


_CHECKS: dict[str, Callable[[Any], str | None]] = {
    "arith.constant": _constant, "arith.extf": _convert_float, "arith.truncf": _convert_float, "linalg.reduce": _reduce,
    "linalg.transpose": _transpose, "linalg.broadcast": _broadcast, "linalg.matmul": _matmul, "linalg.fill": _fill,
}  # fmt: skip
