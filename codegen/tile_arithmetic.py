"""Arithmetic on tiles and scalars for kernel bodies: thin functions over `arith`, `math`, `linalg`, `tensor`.

A value is a tile (static ranked tensor) or a scalar (index, integer, float). Python numbers take the type of the other operand, and a
scalar beside a tile becomes a tile of it. Shapes are never broadcast silently: `broadcast` inserts one axis.
Memory and control flow are in `tile_memory`, number formats in `tile_formats`; kernels import all of them as `tile_builder`.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from tapeout.dialects import tile
from tapeout.dialects._mlir import arith, ir, linalg, math, tensor

Value: TypeAlias = Any  # an ir.Value; the bindings carry no types
Number: TypeAlias = Any  # an ir.Value or a Python int or float

ELEMENTS = {
    "bf16": "bf16", "f16": "f16", "f32": "f32", "f64": "f64", "e4m3": "f8E4M3FN",
    "i1": "i1", "i8": "i8", "i16": "i16", "i32": "i32", "i64": "i64", "index": "index",
}  # fmt: skip


class KernelError(ValueError):
    """A kernel definition asks for something that no tile op means."""


def element(kind: str) -> Any:
    """The MLIR element type of a short name; raises `KernelError` with the names there are."""
    if kind not in ELEMENTS:
        raise KernelError(f"no element type is called {kind!r}; there are {', '.join(ELEMENTS)}")
    return ir.Type.parse(ELEMENTS[kind])


def tile_type(shape: Sequence[int], elem: Any) -> Any:
    """tensor<shape x elem>."""
    return ir.RankedTensorType.get(list(shape), elem)


def is_tile(value: Any) -> bool:
    """Whether a value is a tile."""
    return isinstance(value, ir.Value) and isinstance(value.type, ir.RankedTensorType)


def shape_of(x: Value) -> list[int]:
    """The static shape of a tile; [] for a scalar."""
    return list(ir.RankedTensorType(x.type).shape) if is_tile(x) else []


def element_of(x: Value) -> Any:
    """The element type of a tile, or the type of a scalar."""
    return ir.RankedTensorType(x.type).element_type if is_tile(x) else x.type


def kind_of(x: Value) -> str:
    """The short name of a value's element type."""
    text = str(element_of(x))
    return next(kind for kind, spelled in ELEMENTS.items() if spelled == text)


def is_float(elem: Any) -> bool:
    """Whether an element type is a floating-point one."""
    return not isinstance(elem, ir.IntegerType | ir.IndexType)


def index(value: Number) -> Value:
    """A Python int as an index constant; a value as it is."""
    return arith.constant(ir.IndexType.get(), value) if isinstance(value, int) else value


def _attribute(elem: Any, number: float) -> Any:
    return ir.FloatAttr.get(elem, float(number)) if is_float(elem) else ir.IntegerAttr.get(elem, int(number))


def constant(number: float, kind: str) -> Value:
    """A scalar constant."""
    elem = element(kind)
    return arith.constant(elem, _attribute(elem, number))


def full(shape: Sequence[int], number: Number, kind: str = "f32") -> Value:
    """A tile of one number: the form a loop-carried accumulator starts from. `number` may be a scalar value of that kind."""
    elem = element(kind)
    scalar = number if isinstance(number, ir.Value) else constant(number, kind)
    return linalg.fill(scalar, outs=[tensor.empty(list(shape), elem)])


def like(number: Number, x: Value) -> Value:
    """`number` as a value of x's type: a Python number becomes a constant, a scalar beside a tile a tile of it."""
    if isinstance(number, int | float):
        attribute = _attribute(element_of(x), number)
        return arith.constant(x.type, ir.DenseElementsAttr.get_splat(x.type, attribute) if is_tile(x) else attribute)
    if is_tile(x) and not is_tile(number):
        return splat(number, shape_of(x), kind_of(x))
    return number


def splat(scalar: Value, shape: Sequence[int], kind: str = "i32") -> Value:
    """A tile of a run-time scalar; an index is converted to an integer of `kind`."""
    if isinstance(scalar.type, ir.IndexType):
        scalar = arith.index_cast(element(kind), scalar)
    return full(shape, scalar, kind)


def _pair(a: Number, b: Number) -> tuple[Value, Value]:
    a = a if isinstance(a, ir.Value) and (is_tile(a) or not is_tile(b)) else like(a, b)
    b = b if isinstance(b, ir.Value) and (is_tile(b) or not is_tile(a)) else like(b, a)
    if a.type != b.type:
        raise KernelError(f"operands have types {a.type} and {b.type}; broadcast or cast one of them")
    return a, b


def _binary(floats: Any, ints: Any, doc: str) -> Callable[[Number, Number], Value]:
    def build(a: Number, b: Number) -> Value:
        a, b = _pair(a, b)
        make = floats if is_float(element_of(a)) else ints
        if make is None:
            raise KernelError(f"{doc.split(':')[0]} does not apply to {element_of(a)}")
        return make(a, b)

    build.__doc__ = doc
    return build


add = _binary(arith.addf, arith.addi, "a + b: integers wrap.")
sub = _binary(arith.subf, arith.subi, "a - b: integers wrap.")
mul = _binary(arith.mulf, arith.muli, "a b: integers wrap.")
div = _binary(arith.divf, None, "a / b: floats only; `quotient` divides integers.")
maximum = _binary(arith.maxnumf, arith.maxsi, "max(a, b): a NaN loses; integers are signed.")
minimum = _binary(arith.minnumf, arith.minsi, "min(a, b): a NaN loses; integers are signed.")
shl = _binary(None, arith.shli, "a << b: integers.")
shr = _binary(None, arith.shrsi, "a >> b: the sign bit is copied in.")
shr_unsigned = _binary(None, arith.shrui, "a >> b: zeros come in.")
bit_and = _binary(None, arith.andi, "a & b: integers and masks.")
bit_or = _binary(None, arith.ori, "a | b: integers and masks.")
bit_xor = _binary(None, arith.xori, "a ^ b: integers and masks.")
quotient_unsigned = _binary(None, arith.divui, "a / b of unsigned integers: rounds down.")
remainder_unsigned = _binary(None, arith.remui, "a mod b of unsigned integers: b is not 0.")
_quotient = _binary(None, arith.divsi, "a / b of signed integers: rounds towards zero.")
_remainder = _binary(None, arith.remsi, "a mod b of signed integers: takes the sign of a.")


def quotient(a: Number, b: Number) -> Value:
    """a / b rounded towards zero: signed integers, or an index (never negative)."""
    return (quotient_unsigned if _has_index(a, b) else _quotient)(a, b)


def remainder(a: Number, b: Number) -> Value:
    """The remainder of `quotient`, with the sign of a."""
    return (remainder_unsigned if _has_index(a, b) else _remainder)(a, b)


def _has_index(*values: Number) -> bool:
    return any(isinstance(v, ir.Value) and isinstance(v.type, ir.IndexType) for v in values)


def ceil_div(a: Number, b: int) -> Value:
    """The index a / b rounded up: how many blocks of b cover a."""
    return -(-a // b) if isinstance(a, int) else quotient(add(a, b - 1), b)


def _compare(floats: Any, ints: Any, doc: str) -> Callable[[Number, Number], Value]:
    def build(a: Number, b: Number) -> Value:
        a, b = _pair(a, b)
        return arith.cmpf(floats, a, b) if is_float(element_of(a)) else arith.cmpi(ints, a, b)

    build.__doc__ = doc
    return build


_F, _I = arith.CmpFPredicate, arith.CmpIPredicate
less = _compare(_F.OLT, _I.slt, "a < b as a mask: false where one is NaN; integers are signed.")
less_equal = _compare(_F.OLE, _I.sle, "a <= b as a mask.")
greater = _compare(_F.OGT, _I.sgt, "a > b as a mask.")
greater_equal = _compare(_F.OGE, _I.sge, "a >= b as a mask.")
equal = _compare(_F.OEQ, _I.eq, "a == b as a mask.")
not_equal = _compare(_F.UNE, _I.ne, "a != b as a mask: true where one is NaN.")
less_unsigned = _compare(_F.OLT, _I.ult, "a < b of unsigned integers.")


def logical_not(mask: Value) -> Value:
    """The opposite of a mask."""
    return bit_xor(mask, 1)


def select(mask: Value, a: Number, b: Number) -> Value:
    """a where the mask holds, else b. One of a and b is a value; the mask is a tile of their shape or a scalar."""
    if not isinstance(a, ir.Value) and not isinstance(b, ir.Value):
        raise KernelError("select needs a value on one side; make one number a tile with full()")
    return arith.select(mask, *_pair(a, b))


def cast(x: Value, kind: str) -> Value:
    """Converts values. To floats: nearest even (e4m3 takes |x| <= 448); to integers: truncation. Integers are signed, masks 0 or 1."""
    source, target = element_of(x), element(kind)
    if source == target:
        return x
    out = tile_type(shape_of(x), target) if is_tile(x) else target
    if isinstance(source, ir.IndexType) or isinstance(target, ir.IndexType):
        return arith.index_cast(out, x)
    if is_float(source) and is_float(target):
        return _cast_float(x, out, source, target)
    if is_float(source) or is_float(target):
        return _cast_number(x, out, source, target)
    if source.width > target.width:
        return arith.trunci(out, x)
    return (arith.extui if source.width == 1 else arith.extsi)(out, x)


def _cast_float(x: Value, out: Any, source: Any, target: Any) -> Value:
    if 32 not in (source.width, target.width):  # one of each pair of conversions is f32: a target needs no others
        return cast(cast(x, "f32"), kind_of_element(target))
    return (arith.extf if target.width > source.width else arith.truncf)(out, x)


def _cast_number(x: Value, out: Any, source: Any, target: Any) -> Value:
    if is_float(source):
        return arith.fptosi(out, x)
    return (arith.uitofp if source.width == 1 else arith.sitofp)(out, x)


def kind_of_element(elem: Any) -> str:
    """The short name of an element type."""
    return next(kind for kind, spelled in ELEMENTS.items() if spelled == str(elem))


def exact_bf16(x: Value) -> Value:
    """f32 to bf16 where every value is known to be a bf16 number (decoded codes): a target may keep the wider value."""
    out = arith.truncf(tile_type(shape_of(x), element("bf16")), x)
    out.owner.attributes["tile.exact"] = ir.UnitAttr.get()
    return out


def widen_unsigned(x: Value, kind: str) -> Value:
    """Integers read as unsigned (bytes as 0..255) in a wider integer."""
    return arith.extui(tile_type(shape_of(x), element(kind)) if is_tile(x) else element(kind), x)


def bitcast(x: Value, kind: str) -> Value:
    """The same bits as another element type of equal width."""
    if kind_of(x) == kind:
        return x
    return arith.bitcast(tile_type(shape_of(x), element(kind)) if is_tile(x) else element(kind), x)


exp, log, log1p, sqrt, rsqrt, absolute = math.exp, math.log, math.log1p, math.sqrt, math.rsqrt, math.absf


def negate(x: Value) -> Value:
    """-x."""
    return arith.negf(x) if is_float(element_of(x)) else sub(0, x)


def clamp(x: Value, low: Number, high: Number) -> Value:
    """min(max(x, low), high)."""
    return minimum(maximum(x, low), high)


def near_quotient(a: Number, b: Value) -> Value:
    """a / b of f32 numbers where no tie hangs on the last bit; b is at least 2^-126, infinite ones too: a target may multiply by a reciprocal."""
    out = div(a, b)
    out.owner.attributes["tile.near"] = ir.UnitAttr.get()
    return out


def sigmoid(x: Value) -> Value:
    """1 / (1 + exp(-x))."""
    return near_quotient(1.0, add(exp(negate(x)), 1.0))


def silu(x: Value) -> Value:
    """x sigmoid(x)."""
    return near_quotient(x, add(exp(negate(x)), 1.0))


def softplus(x: Value) -> Value:
    """log(1 + exp(x)), and x itself above 20 (model spec 5)."""
    return select(greater(x, 20.0), x, log1p(exp(minimum(x, 20.0))))


# ---- shapes, reductions, products --------------------------------------------------------------------------------------

_LOWEST = {"i8": -(2**7), "i16": -(2**15), "i32": -(2**31), "i64": -(2**63)}


def _neutral(kind: str, number: str) -> float:
    if kind == "add":
        return 0
    lowest = _LOWEST.get(number, float("-inf"))
    return lowest if kind == "max" else -lowest - 1 if number in _LOWEST else float("inf")


def reduce(x: Value, kind: str, axis: int) -> Value:
    """Removes `axis`; kind is add, max or min. It starts from the neutral value (0, lowest, highest); a NaN loses in max and min."""
    shape, elem, number = shape_of(x), element_of(x), kind_of(x)
    axis = axis % len(shape)
    makers = {"add": (arith.addf, arith.addi), "max": (arith.maxnumf, arith.maxsi), "min": (arith.minnumf, arith.minsi)}
    if kind not in makers:
        raise KernelError(f"reduce knows add, max and min, not {kind!r}")
    init = full([n for d, n in enumerate(shape) if d != axis], _neutral(kind, number), number)
    op = linalg.ReduceOp(result=[init.type], inputs=[x], inits=[init], dimensions=[axis])
    block = op.regions[0].blocks.append(elem, elem)
    with ir.InsertionPoint(block):
        linalg.YieldOp([makers[kind][not is_float(elem)](*block.arguments)])
    return op.results[0]


def broadcast(x: Value, axis: int, extent: int) -> Value:
    """Inserts `axis` of `extent` equal slices; axis -1 appends one."""
    shape = shape_of(x)
    axis = axis if axis >= 0 else len(shape) + 1 + axis
    shape.insert(axis, extent)
    return linalg.broadcast(x, outs=[tensor.empty(shape, element_of(x))], dimensions=[axis]).results[0]


def transpose(x: Value) -> Value:
    """[a, b] to [b, a]."""
    empty = tensor.empty(shape_of(x)[::-1], element_of(x))
    return linalg.transpose(x, outs=[empty], permutation=[1, 0]).results[0]


def dot(a: Value, b: Value, acc: Value | None = None) -> Value:
    """acc + a b in f32: a [M, K], b [K, N] of one element type (bf16, f16, f32), acc [M, N] f32 (zeros when left out)."""
    acc = full([shape_of(a)[0], shape_of(b)[1]], 0.0) if acc is None else acc
    return linalg.matmul(a, b, outs=[acc])


def dot_scaled(a: Value, sa: Value, b: Value, sb: Value, acc: Value | None = None) -> Value:
    """acc + (a 2^(sa-127)) (b 2^(sb-127)): e4m3 a [M, K], b [K, N], bytes sa [M, K/32], sb [N, K/32], all straight from loads.

    `a` may be i8 [M, K/2]: e2m1 codes, element 2k in the low half of byte k; for targets whose schedule asks for it.
    """
    acc = full([shape_of(a)[0], shape_of(b)[1]], 0.0) if acc is None else acc
    return tile.DotScaledOp(acc.type, a, sa, b, sb, acc).out


def _groups(rank: int, joined: int) -> list[list[int]]:
    """Reassociation of a tile of `rank` axes in which axes joined and joined + 1 of the longer shape are one."""
    return [[d + (d > joined), d + 1][: 1 + (d == joined)] if d == joined else [d + (d > joined)] for d in range(rank)]


def _split(x: Value, axis: int, sizes: Sequence[int]) -> Value:
    shape = shape_of(x)
    longer = [*shape[:axis], *sizes, *shape[axis + 1 :]]
    return tensor.expand_shape(tile_type(longer, element_of(x)), x, _groups(len(shape), axis), [], longer)


def _merge(x: Value, axis: int) -> Value:
    shape = shape_of(x)
    shorter = [*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :]]
    return tensor.collapse_shape(tile_type(shorter, element_of(x)), x, _groups(len(shorter), axis))


def split_last(x: Value, inner: int) -> Value:
    """[..., n] to [..., n / inner, inner]."""
    n = _divisible(shape_of(x)[-1], inner)
    return _split(x, len(shape_of(x)) - 1, [n // inner, inner])


def split_first(x: Value, inner: int) -> Value:
    """[n, ...] to [n / inner, inner, ...]."""
    n = _divisible(shape_of(x)[0], inner)
    return _split(x, 0, [n // inner, inner])


def _divisible(extent: int, inner: int) -> int:
    if extent % inner:
        raise KernelError(f"an axis of {extent} does not split by {inner}")
    return extent


def merge_last(x: Value) -> Value:
    """[..., n, inner] to [..., n inner]."""
    return _merge(x, len(shape_of(x)) - 2)


def merge_first(x: Value) -> Value:
    """[a, b, ...] to [a b, ...]."""
    return _merge(x, 0)


def even_odd(x: Value) -> tuple[Value, Value]:
    """The even and the odd elements of the last axis: [..., 2n] to two tiles [..., n]. Exact for every number but NaN."""
    kind = kind_of(x)
    wide = {"bf16": "f32", "f16": "f32", "i8": "i32", "i16": "i32"}.get(kind, kind)
    pairs = split_last(cast(x, wide), 2)
    return cast(_pick(pairs, 0), kind), cast(_pick(pairs, 1), kind)


def _pick(pairs: Value, which: int) -> Value:
    chosen = _lane_mask(shape_of(pairs), which)
    found = reduce(select(chosen, pairs, _neutral("max", kind_of(pairs))), "max", -1)
    found.owner.attributes["tile.pick"] = _i32(which)  # a target that can split pairs need not search for the one that was chosen
    return found


def pairs(first: Value, second: Value) -> Value:
    """Two tiles [..., n] side by side, [..., n, 2]."""
    shape = [*shape_of(first), 2]
    found = select(_lane_mask(shape, 0), broadcast(first, -1, 2), broadcast(second, -1, 2))
    found.owner.attributes["tile.join"] = ir.UnitAttr.get()
    return found


def interleave(even: Value, odd: Value) -> Value:
    """Undoes `even_odd`: two tiles [..., n] to [..., 2n]."""
    return merge_last(pairs(even, odd))


def _i32(number: int) -> Any:
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(32), number)


def _lane_mask(shape: Sequence[int], which: int) -> Value:
    mask = equal(tile.IotaOp(tile_type([2], element("i32"))).out, which)
    for extent in reversed(shape[:-1]):
        mask = broadcast(mask, 0, extent)
    return mask
