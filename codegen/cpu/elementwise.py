"""Elementwise ops of a kernel as register functions: one table, from op name to what it does to registers and what it costs.

Costs are instructions per 8 lanes, rounded: they decide what is computed twice and what is kept (see `plan`).
"""

from collections.abc import Callable, Sequence
from typing import Any

from tapeout.codegen.cpu import polynomials
from tapeout.codegen.cpu.registers import Registers, create, rep_of
from tapeout.codegen.cpu.tiles import Splat, Tile, mapped
from tapeout.dialects._mlir import arith, ir

_PLAIN = {
    "arith.addf": 1, "arith.subf": 1, "arith.mulf": 1, "arith.divf": 5, "arith.negf": 1,
    "arith.addi": 1, "arith.subi": 1, "arith.muli": 2, "arith.maxsi": 1, "arith.minsi": 1,
    "arith.divsi": 40, "arith.divui": 40, "arith.remsi": 40, "arith.remui": 40,
    "arith.shli": 1, "arith.shrsi": 1, "arith.shrui": 1, "arith.andi": 1, "arith.ori": 1, "arith.xori": 1,
}  # fmt: skip
_CONVERSIONS = {
    "arith.trunci": 2, "arith.extsi": 1, "arith.extui": 1, "arith.sitofp": 1, "arith.uitofp": 1, "arith.fptosi": 1, "arith.index_cast": 1,
}  # fmt: skip
_FUNCTIONS: dict[str, tuple[int, Callable[[Registers, Any], Any]]] = {
    "math.exp": (16, polynomials.exp),
    "math.log": (24, polynomials.log),
    "math.log1p": (32, polynomials.log1p),
    "math.sqrt": (6, lambda r, x: create("math.sqrt", x.type, x)),
    "math.rsqrt": (11, lambda r, x: r.binary("divf", r.constant("f32", 1.0), create("math.sqrt", x.type, x))),
    "math.absf": (1, lambda r, x: create("math.absf", x.type, x)),
}
_WIDEN = {("i16", "bf16"): 1, ("i16", "f16"): 1, ("i8", "f8E4M3FN"): 6}
_NARROW = {"bf16": 7, "f16": 1, "f8E4M3FN": 16}
_OTHERS = {
    "arith.cmpf": 1,
    "arith.cmpi": 1,
    "arith.select": 1,
    "arith.bitcast": 0,
    "arith.maxnumf": 2,
    "arith.minnumf": 2,
}

NAMES = frozenset({*_PLAIN, *_CONVERSIONS, *_FUNCTIONS, *_OTHERS, "arith.extf", "arith.truncf"})


def element_of(value: Any) -> Any:
    """The element type of a tile value, or the type of a scalar."""
    return ir.RankedTensorType(value.type).element_type if isinstance(value.type, ir.RankedTensorType) else value.type


def is_exact(op: Any) -> bool:
    """Whether a narrowing is known to lose nothing, so that the wide value may stay."""
    return op.name == "arith.truncf" and "tile.exact" in op.attributes


def cost(op: Any) -> int:
    """Instructions per 8 lanes of one elementwise op, its operands not counted."""
    if op.name == "arith.extf":
        return _WIDEN.get((rep_of(element_of(op.operands[0])), str(element_of(op.operands[0]))), 1)
    if op.name == "arith.truncf":
        return 0 if is_exact(op) else _NARROW.get(str(element_of(op.results[0])), 1)
    table = {**_PLAIN, **_CONVERSIONS, **_OTHERS}
    return _FUNCTIONS[op.name][0] if op.name in _FUNCTIONS else table[op.name]


def build(op: Any, sources: Sequence[Tile]) -> Tile:
    """The tile of an elementwise op, given the tiles of its operands."""
    result = str(element_of(op.results[0]))
    if op.name == "arith.extf":
        return _widen(sources[0], str(element_of(op.operands[0])), result)
    if op.name == "arith.truncf":
        return sources[0] if is_exact(op) else narrow_float(sources[0], result)
    sources = [narrow(s, str(element_of(v))) for s, v in zip(sources, op.operands, strict=True)]
    return mapped(_function(op, sources, rep_of(result)), rep_of(result), *sources)


def narrow(tile: Tile, elem: str) -> Tile:
    """A tile held wider than its element type (an exact bf16 kept in f32), in its own bits."""
    if elem == "bf16" and tile.rep == "f32":
        return mapped(lambda r, x: r.upper_half(r.convert("bitcast", x, "i32")), "i16", tile)
    return tile


def widened(tile: Tile, elem: str) -> Tile:
    """A float tile as f32 (f64 stays), for products and `extf`."""
    if tile.rep in ("f32", "f64"):
        return tile
    function = {"bf16": Registers.bf16_to_f32, "f16": Registers.f16_to_f32, "f8E4M3FN": Registers.e4m3_to_f32}[elem]
    return mapped(function, "f32", tile)


def _widen(tile: Tile, source: str, result: str) -> Tile:
    tile = widened(tile, source)
    return tile if result == tile.rep else mapped(lambda r, x: r.convert("extf", x, result), result, tile)


def narrow_float(tile: Tile, result: str) -> Tile:
    """f32 rounded to bf16, f16 or e4m3, or f64 to f32."""
    if result == "f32":
        return mapped(lambda r, x: r.convert("truncf", x, "f32"), "f32", tile)
    function = {"bf16": Registers.f32_to_bf16, "f16": Registers.f32_to_f16, "f8E4M3FN": Registers.f32_to_e4m3}[result]
    return mapped(function, rep_of(result), tile)


def _function(op: Any, sources: Sequence[Tile], rep: str) -> Callable[..., Any]:
    name = op.name.split(".")[1]
    if op.name in _FUNCTIONS:
        return _FUNCTIONS[op.name][1]
    if op.name in _CONVERSIONS:
        return lambda r, x: r.convert(name, x, rep)
    if op.name == "arith.bitcast":
        same = sources[0].rep == rep
        return lambda r, x: x if same else r.convert("bitcast", x, rep)
    if name in ("cmpf", "cmpi"):
        predicate = op.attributes["predicate"]
        return lambda r, a, b: create(f"arith.{name}", r.type("i1"), a, b, predicate=predicate)
    if name in ("maxnumf", "minnumf"):
        return _extreme(name, sources)
    return lambda r, *values: create(f"arith.{name}", r.type(rep), *values)


def _extreme(name: str, sources: Sequence[Tile]) -> Callable[..., Any]:
    """With a constant on one side, one compare and select does (a vector maximum instruction); else the NaN-aware intrinsic."""
    predicate = arith.CmpFPredicate.OGT if name == "maxnumf" else arith.CmpFPredicate.OLT
    constant = [isinstance(s, Splat) and isinstance(s.value, float | int) for s in sources]
    if not any(constant):
        return lambda r, a, b: r.binary(name, a, b)
    flipped = constant[0]

    def build(r: Registers, a: Any, b: Any) -> Any:
        x, limit = (b, a) if flipped else (a, b)
        return r.select(r.compare(predicate, x, limit), x, limit)

    return build
