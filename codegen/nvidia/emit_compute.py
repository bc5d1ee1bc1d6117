"""Triton forms of standard ops on tiles and scalars: arithmetic, conversions, shapes, reductions, products.

Divisions and roots are the rounded ones, codes and ties depend on them; a near quotient is a product with a reciprocal. A sum's order is fixed
by its tile's shape and the number of warps.
"""

from collections.abc import Callable
from math import prod
from typing import Any

from tapeout.codegen.nvidia.exact import DECODER, FP4_DECODER, FP4_ENCODER, RECIPROCAL, ROUNDED, nibble, packed_numbers, squared
from tapeout.codegen.nvidia.printer import KINDS, EmitError, Printer, element, extents, literal, padded
from tapeout.dialects._mlir import ir

INFIX = {"addf": "+", "subf": "-", "mulf": "*", "addi": "+", "subi": "-", "muli": "*", "andi": "&", "ori": "|", "xori": "^", "shli": "<<",
         "shrsi": ">>", "divsi": "//", "remsi": "%"}  # fmt: skip
UNSIGNED = {"divui": "//", "remui": "%", "shrui": ">>"}
CALLS = {"arith.maxnumf": "tl.maximum({0}, {1})", "arith.minnumf": "tl.minimum({0}, {1})",
         "arith.maxsi": "tl.maximum({0}, {1})", "arith.minsi": "tl.minimum({0}, {1})", "arith.select": "tl.where({0}, {1}, {2})",
         "arith.negf": "-{0}", "math.exp": "tl.exp({0})", "math.log": "tl.log({0})", "math.sqrt": "tl.sqrt_rn({0})",
         "math.rsqrt": "tl.rsqrt({0})", "math.absf": "tl.abs({0})"}  # fmt: skip
INTEGER_ORDER = {0: "==", 1: "!=", 2: "<", 3: "<=", 4: ">", 5: ">=", 6: "<", 7: "<=", 8: ">", 9: ">="}
FIRST_UNSIGNED = 6
FLOAT_ORDER = {1: "==", 2: ">", 3: ">=", 4: "<", 5: "<=", 13: "!="}
REDUCTIONS = {"arith.addf": ("tl.sum", "0.0"), "arith.addi": ("tl.sum", "0"), "arith.maxnumf": ("tl.max", 'float("-inf")'),
              "arith.minnumf": ("tl.min", 'float("inf")'), "arith.maxsi": ("tl.max", None), "arith.minsi": ("tl.min", None)}  # fmt: skip
F32_PRODUCT = "tf32x3"
"""Three tensor-core products of split operands: the error of an f32 product, not that of one tf32 product."""
SCALED_FORMAT, PACKED_FORMAT = '"e4m3"', '"e2m1"'
PICKED_ELEMENTS = 1024
"""Elements of a reshape that is worth a sum over all of them for each."""


def _infix(sign: str) -> Callable[[Printer, Any], None]:
    def form(p: Printer, op: Any) -> None:
        a, b = p.of(op.operands)
        p.assign(op.results[0], op.name.split(".")[1], f"{a} {sign} {b}")

    return form


def _unsigned_type(value: Any) -> str:
    return f"tl.uint{ir.IntegerType(ir.Type.parse(element(value))).width}"


def _as_unsigned(p: Printer, value: Any) -> str:
    return f"{p.names[value]}.to({_unsigned_type(value)}, bitcast=True)"


def _unsigned(sign: str) -> Callable[[Printer, Any], None]:
    def form(p: Printer, op: Any) -> None:
        a, b = op.operands
        if element(a) == "index":  # an index is never negative
            return _infix(sign)(p, op)
        p.assign(op.results[0], op.name.split(".")[1],
                 f"({_as_unsigned(p, a)} {sign} {_as_unsigned(p, b)}).to({KINDS[element(a)]}, bitcast=True)")
        return None

    return form


def _call(text: str) -> Callable[[Printer, Any], None]:
    return lambda p, op: p.assign(op.results[0], op.name.split(".")[1], text.format(*p.of(op.operands)))


def _add(p: Printer, op: Any) -> None:
    """A sum onto which the square of a BF16 number comes is one op with the same result, as that square is an f32 number: only one below 2^-126 is
    not, and only a sum below 2^-100 could show that."""
    found = [(squared(v), other) for v, other in zip(op.operands, reversed(list(op.operands)), strict=True)]
    x, other = next(((x, other) for x, other in found if x is not None and x not in p.narrow), (None, None))
    if x is None:
        return _infix("+")(p, op)
    return p.assign(op.results[0], "addf", f"tl.fma({p.names[x]}, {p.names[x]}, {p.names[other]})")


def _divide(p: Printer, op: Any) -> None:
    a, b = p.of(op.operands)
    if "tile.near" not in op.operation.attributes or element(op.results[0]) != "f32":
        p.assign(op.results[0], "divf", f"tl.div_rn({a}, {b})")
    elif _is_one(op.operands[0]):
        p.assign(op.results[0], "inverse", f"{p.helper(RECIPROCAL)}({b})")
    else:
        p.assign(op.results[0], "divf", f"{a} * {p.helper(RECIPROCAL)}({b})")


def _is_one(value: Any) -> bool:
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != "arith.constant" or not isinstance(value.type, ir.RankedTensorType):
        return False
    return bool(ir.DenseElementsAttr(owner.attributes["value"]).get_splat_value().value == 1.0)


def _log1p(p: Printer, op: Any) -> None:
    """log(1 + x) = log(u) x / (u - 1) for u = 1 + x rounded: what u lost to rounding the quotient gives back."""
    (x,) = p.of(op.operands)
    u = p.fresh_line("grown", f"{x} + 1.0")
    p.assign(op.results[0], "log1p", f"tl.where({u} == 1.0, {x}, tl.log({u}) * {x} * {p.helper(RECIPROCAL)}(tl.where({u} == 1.0, 1.0, {u} - 1.0)))")


def _compare_integers(p: Printer, op: Any) -> None:
    order = op.predicate.value if hasattr(op.predicate, "value") else int(op.predicate)
    a, b = p.of(op.operands)
    if order >= FIRST_UNSIGNED and element(op.operands[0]) != "index":
        a, b = (_as_unsigned(p, v) for v in op.operands)
    p.assign(op.results[0], "mask", f"{a} {INTEGER_ORDER[order]} {b}")


def _compare_floats(p: Printer, op: Any) -> None:
    order = op.operation.attributes["predicate"].value
    if order not in FLOAT_ORDER:
        raise EmitError(f"arith.cmpf predicate {order} has no Triton form")
    a, b = p.of(op.operands)
    p.assign(op.results[0], "mask", f"{a} {FLOAT_ORDER[order]} {b}")


# ---- constants and conversions -----------------------------------------------------------------------------------------


def _constant(p: Printer, op: Any) -> None:
    value, out = op.operation.attributes["value"], op.results[0]
    if element(out) == "index":
        p.names[out] = literal(value.value)
    elif isinstance(out.type, ir.RankedTensorType):
        number = literal(ir.DenseElementsAttr(value).get_splat_value().value)
        p.assign(out, "constant", p.full(out, number, "bf16" if out in p.narrow else None))
    else:
        p.assign(out, "constant", p.full(out, literal(value.value)))


def _convert(p: Printer, op: Any) -> None:
    source, out = op.operands[0], op.results[0]
    if source in p.narrow:  # BF16 already
        p.names[out] = p.names[source]
    elif out in p.narrow:
        _decode(p, out, source)
    elif _is_rounding(op):
        p.assign(out, "rounded", f"{p.helper(ROUNDED)}({p.names[source.owner.operands[0]]})")
    else:
        p.assign(out, op.name.split(".")[1], f"{p.names[source]}.to({KINDS[element(out)]})")


def _is_rounding(op: Any) -> bool:
    """Whether an f32 tile is one that was rounded to BF16 and is no code that is decoded in BF16."""
    source, out = op.operands[0], op.results[0]
    if op.name != "arith.extf" or isinstance(source.owner, ir.Block) or source.owner.name != "arith.truncf" or not extents(out):
        return False
    return [element(v) for v in (source.owner.operands[0], source, out)] == ["f32", "bf16", "f32"]


def _decode(p: Printer, out: Any, source: Any) -> None:
    """Codes as BF16; both halves of packed bytes come at once, the other's name is kept for its own op."""
    found = nibble(out)
    if found is None:
        p.assign(out, "decoded", f"{p.helper(DECODER)}({p.names[source]})")
        return
    codes, half = found
    if (codes, "halves") not in p.names:
        names = [p.fresh(stem) for stem in ("low", "high")]
        p.line(f"{', '.join(names)} = {p.helper(FP4_DECODER)}({p.names[codes]})")
        p.names[codes, "halves"] = ", ".join(names)
    p.names[out] = p.names[codes, "halves"].split(", ")[half]


def _convert_index(p: Printer, op: Any) -> None:
    p.assign(op.results[0], "index", f"tl.cast({p.names[op.operands[0]]}, {KINDS[element(op.results[0])]})")


def _convert_unsigned(p: Printer, op: Any) -> None:
    source = op.operands[0]
    text = p.names[source] if element(source) == "i1" else _as_unsigned(p, source)  # i1 is unsigned as it is
    p.assign(op.results[0], op.name.split(".")[1], f"{text}.to({KINDS[element(op.results[0])]})")


def _bitcast(p: Printer, op: Any) -> None:
    narrow = ".to(tl.bfloat16)" if op.results[0] in p.narrow else ""
    p.assign(op.results[0], "bits", f"{p.names[op.operands[0]]}.to({KINDS[element(op.results[0])]}, bitcast=True){narrow}")


# ---- shapes, reductions, products --------------------------------------------------------------------------------------


def _empty(p: Printer, op: Any) -> None:
    p.names[op.results[0]] = "undefined"


def _fill(p: Printer, op: Any) -> None:
    out = op.results[0]
    if all(use.owner.name == "linalg.reduce" for use in out.uses):  # a reduction starts from its neutral value
        p.names[out] = "neutral"
    else:
        p.assign(out, "full", p.full(out, p.names[op.operands[0]]))


def _reshape(p: Printer, op: Any) -> None:
    source, out = op.operands[0], op.results[0]
    longer, shorter = sorted((extents(source), extents(out)), key=len, reverse=True)
    joined = next((d for d in range(len(shorter)) if shorter[d] != longer[d]), len(shorter))
    if not extents(source) or not extents(out):
        raise EmitError(f"{op.name} of {source.type} to {out.type}: rank 0 has no axes to join")
    if joined == len(shorter) or longer[joined] == 1 or longer[joined + 1] == padded(longer[joined + 1]):
        p.assign(out, "reshape", f"tl.reshape({p.names[source]}, {p.shape(out)})")
    elif len(longer) == 2 and prod(map(padded, longer)) <= PICKED_ELEMENTS and element(source) == "f32":
        _pick_places(p, op, longer[1])
    else:
        raise EmitError(f"{op.name} of {source.type} to {out.type}: the inner one of joined extents must be a power of two")


def _pick_places(p: Printer, op: Any, inner: int) -> None:
    """A small reshape whose elements move when extents are rounded up: each result is the sum of the one element that belongs there."""
    source, out = op.operands[0], op.results[0]
    (flat,), split = sorted((extents(source), extents(out)), key=len)
    box = [flat, *split]
    home = f"{p.lanes(box, 0)} == {p.lanes(box, 1)} * {inner} + {p.lanes(box, 2)}"
    inside = f"({p.lanes(box, 2)} < {inner}) & ({p.lanes(box, 0)} < {flat})"
    pick = "[:, None, None]" if len(extents(source)) == 1 else "[None, :, :]"
    found = p.fresh_line("picked", f"tl.where(({home}) & {inside}, {p.names[source]}{pick}, 0.0)")
    p.assign(out, "reshape", f"tl.sum({found}, 0)" if pick.startswith("[:") else f"tl.sum(tl.sum({found}, 2), 1)")


def _broadcast(p: Printer, op: Any) -> None:
    out, added = op.results[0], list(op.operation.attributes["dimensions"])
    source = op.operands[0]
    if not extents(source):
        return p.assign(out, "broadcast", p.full(out, p.names[source]))
    if source in p.spread:  # stands in every row already
        p.names[out] = p.names[source]
        return None
    pick = ", ".join("None" if d in added else ":" for d in range(len(extents(out))))
    return p.assign(out, "broadcast", f"tl.broadcast_to({p.names[source]}[{pick}], {p.shape(out)})")


def _neutral(combiner: str, kind: str) -> str:
    known = REDUCTIONS[combiner][1]
    if known is not None:
        return known
    highest = 2 ** (int(kind[1:]) - 1) - 1
    return str(-highest - 1 if combiner == "arith.maxsi" else highest)


def _split(p: Printer, op: Any) -> None:
    """One element of each pair: both are split off at once, the other's name is kept for its own op."""
    pairs = op.operands[0].owner.operands[1]
    if (pairs, "split") not in p.names:
        names = [p.fresh(stem) for stem in ("even", "odd")]
        p.line(f"{', '.join(names)} = tl.split({p.names[pairs]})")
        p.names[pairs, "split"] = ", ".join(names)
    p.names[op.results[0]] = p.names[pairs, "split"].split(", ")[op.operation.attributes["tile.pick"].value]


def _select(p: Printer, op: Any) -> None:
    if "tile.join" not in op.operation.attributes:
        return _call(CALLS["arith.select"])(p, op)
    even, odd = (p.names[v.owner.operands[0]] for v in list(op.operands)[1:])
    return p.assign(op.results[0], "pairs", f"tl.join({even}, {odd})")


def _reduce(p: Printer, op: Any) -> None:
    if "tile.pick" in op.operation.attributes:
        return _split(p, op)
    if (numbers := packed_numbers(op)) is not None:
        return _pack(p, op, numbers)
    combiner = next(iter(op.regions[0].blocks[0].operations)).operation.name
    source, axis = op.operands[0], next(iter(op.operation.attributes["dimensions"]))
    call, x, n = REDUCTIONS[combiner][0], p.names[source], extents(source)[axis]
    if n != padded(n):
        x = f"tl.where({p.lane(source, axis)} < {n}, {x}, {_neutral(combiner, element(source))})"
    return p.assign(op.results[0], "reduce", f"{call}({x}, {axis})")


def _pack(p: Printer, op: Any, numbers: Any) -> None:
    """Codes of pairs of numbers as bytes."""
    pairs = p.fresh_line("pairs", f"tl.reshape({p.names[numbers]}, {[*p.shape(op.results[0]), 2]})")
    even, odd = p.fresh("even"), p.fresh("odd")
    p.line(f"{even}, {odd} = tl.split({pairs})")
    p.assign(op.results[0], "bytes", f"{p.helper(FP4_ENCODER)}({even}, {odd})")


def _transpose(p: Printer, op: Any) -> None:
    p.assign(op.results[0], "transpose", f"tl.trans({p.names[op.operands[0]]})")


def _without_excess(p: Printer, value: Any, axis: int) -> str:
    """An operand whose added lanes along the summed axis are 0."""
    n = extents(value)[axis]
    if n == padded(n):
        return p.names[value]
    return p.fresh_line("inner", f"tl.where({p.lane(value, axis)} < {n}, {p.names[value]}, 0.0).to({KINDS[element(value)]})")


def _is_wide_bf16(value: Any) -> bool:
    """Whether an f32 tile is a BF16 one, converted."""
    return not isinstance(value.owner, ir.Block) and value.owner.name == "arith.extf" and element(value.owner.operands[0]) == "bf16"


def _matmul_by_parts(p: Printer, op: Any) -> None:
    """A BF16 tile times an f32 one: the f32 numbers are sums of three BF16 ones, so three BF16 products have the error of an f32 product."""
    a, b, acc = op.operands
    left, rest, found = _without_excess(p, a.owner.operands[0], 1), _without_excess(p, b, 0), p.names[acc]
    parts = []
    for _ in range(2):
        parts.append(p.fresh_line("part", f"{rest}.to(tl.bfloat16)"))
        rest = p.fresh_line("rest", f"{rest} - {parts[-1]}.to(tl.float32)")
    for part in (f"{rest}.to(tl.bfloat16)", *reversed(parts)):
        found = p.fresh_line("dot", f"tl.dot({left}, {part}, {found})")
    p.names[op.results[0]] = found


def _matmul(p: Printer, op: Any) -> None:
    a, b, acc = op.operands
    if element(a) == "f32" and _is_wide_bf16(a):
        _matmul_by_parts(p, op)
        return
    precision = f', input_precision="{F32_PRODUCT}"' if element(a) == "f32" else ""
    p.assign(op.results[0], "dot", f"tl.dot({_without_excess(p, a, 1)}, {_without_excess(p, b, 0)}, {p.names[acc]}{precision})")


def _dot_scaled(p: Printer, op: Any) -> None:
    """Operands come straight from loads, so that added lanes hold zeros already; no scale is a NaN (fast_math skips looking for one)."""
    a, sa, b, sb, acc = p.of(op.operands)
    scales = [f"{s}.to(tl.uint8, bitcast=True)" for s in (sa, sb)]
    packed = element(op.a) == "i8"
    left = f'{a}.to(tl.uint8, bitcast=True), {scales[0]}, {PACKED_FORMAT}' if packed else f"{a}, {scales[0]}, {SCALED_FORMAT}"
    p.assign(op.out, "dot", f"tl.dot_scaled({left}, {b}, {scales[1]}, {SCALED_FORMAT}, {acc}, fast_math=True)")


FORMS: dict[str, Callable[[Printer, Any], None]] = {
    **{f"arith.{name}": _infix(sign) for name, sign in INFIX.items()},
    **{f"arith.{name}": _unsigned(sign) for name, sign in UNSIGNED.items()},
    **{name: _call(text) for name, text in CALLS.items()},
    **dict.fromkeys(("arith.extf", "arith.truncf", "arith.extsi", "arith.trunci", "arith.sitofp", "arith.fptosi"), _convert),
    **dict.fromkeys(("arith.extui", "arith.uitofp"), _convert_unsigned),
    **dict.fromkeys(("tensor.expand_shape", "tensor.collapse_shape"), _reshape),
    "arith.select": _select,
    "arith.index_cast": _convert_index,
    "arith.bitcast": _bitcast,
    "arith.constant": _constant,
    "arith.addf": _add,
    "arith.divf": _divide,
    "arith.cmpi": _compare_integers,
    "arith.cmpf": _compare_floats,
    "math.log1p": _log1p,
    "tensor.empty": _empty,
    "linalg.fill": _fill,
    "linalg.broadcast": _broadcast,
    "linalg.reduce": _reduce,
    "linalg.transpose": _transpose,
    "linalg.matmul": _matmul,
    "tile.dot_scaled": _dot_scaled,
}
