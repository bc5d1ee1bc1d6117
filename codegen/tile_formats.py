"""Number formats in kernel bodies: decode and encode of e4m3, e2m1 (FP4), e8m0, and the model's quantisers (model spec 9.2 to 9.5).

All of it is standard integer and float arithmetic, exact by construction, so every target computes the same codes.
FP4 weights: byte row 64 t + r (0 <= r < 64) holds k = 128 t + r in its low nibble and k = 128 t + 64 + r in its high one.
FP4 cache rows: byte n of a row holds element 2n in its low nibble and 2n + 1 in its high one.
"""

from tapeout.codegen.tile_arithmetic import (
    Value,
    absolute,
    add,
    bit_and,
    bit_or,
    bitcast,
    broadcast,
    cast,
    clamp,
    element,
    greater_equal,
    less,
    like,
    maximum,
    merge_first,
    merge_last,
    minimum,
    mul,
    near_quotient,
    reduce,
    select,
    shape_of,
    shl,
    shr,
    shr_unsigned,
    split_last,
    sub,
    tile_type,
    widen_unsigned,
)
from tapeout.dialects import tile
from tapeout.dialects._mlir import ir

E4M3_MAX = 448.0
FP4_MAX = 6.0
SCALE_GROUP = 32
MAIN_GROUP = 16
WEIGHT_HALF = 64  # rows of k in one nibble plane of packed FP4 weights


def round_bf16(x: Value) -> Value:
    """An f32 tile rounded to bf16 numbers and kept in f32."""
    return cast(cast(x, "bf16"), "f32")


def decode_e4m3(codes: Value) -> Value:
    """e4m3 to f32, exact."""
    return cast(codes, "f32")


def encode_e4m3(x: Value) -> Value:
    """f32 to e4m3: nearest, ties to even, saturating at 448."""
    return cast(clamp(x, -E4M3_MAX, E4M3_MAX), "e4m3")


def e8m0(codes: Value) -> Value:
    """e8m0 bytes (i8) to f32 factors 2^(byte - 127), exact for bytes 0 to 254; 255 (NaN) becomes infinity."""
    return bitcast(maximum(shl(widen_unsigned(codes, "i32"), 23), 0x400000), "f32")  # byte 0 is the subnormal 2^-127


def power_exponent(peak: Value, largest: float) -> Value:
    """The biased exponent (an e8m0 byte, as i32) of 2^ceil(log2(peak / largest)) for f32 peaks that are normal numbers.

    The factor 1/largest in f32 gives the power of two of the exact quotient for every bf16 peak (model spec 9.3).
    """
    return shr(add(bitcast(mul(peak, 1.0 / largest), "i32"), 0x7FFFFF), 23)


def inverse_power(exponent: Value) -> Value:
    """2^(127 - exponent) as f32: the exact reciprocal of the factor with that biased exponent (1 to 253)."""
    return bitcast(shl(sub(254, exponent), 23), "f32")


def quantize_q8(x: Value) -> tuple[Value, Value]:
    """The model's q8 (spec 9.3): f32 tile [..., n] of bf16 values to e4m3 codes [..., n] and e8m0 bytes (i8) [..., n/32]."""
    groups = split_last(x, SCALE_GROUP)
    peak = maximum(reduce(absolute(groups), "max", -1), 1e-4)
    exponent = power_exponent(peak, E4M3_MAX)
    scaled = mul(groups, broadcast(inverse_power(exponent), -1, SCALE_GROUP))  # at most 448: nothing to clamp
    return merge_last(cast(scaled, "e4m3")), cast(exponent, "i8")


def dequantize_q8(codes: Value, scales: Value) -> Value:
    """e4m3 codes [..., n] with e8m0 bytes [..., n/32] to f32, exact."""
    groups = split_last(decode_e4m3(codes), SCALE_GROUP)
    return merge_last(mul(groups, broadcast(e8m0(scales), -1, SCALE_GROUP)))


def fp4_codes(x: Value) -> Value:
    """f32 to e2m1 codes 0 to 15 (i32): nearest, ties to the even code, saturating at 6."""
    size = minimum(absolute(x), FP4_MAX)
    bits = bitcast(size, "i32")
    odd = bit_and(shr_unsigned(bits, 22), 1)
    large = sub(shr_unsigned(add(add(bits, 0x1FFFFF), odd), 22), 2 * 126)  # from 1 on: one mantissa bit, rebiased
    small = sub(bitcast(add(size, 4194304.0), "i32"), 0x4A800000)  # below 1: 2^22 has an ulp of one half
    sign = bit_and(shr_unsigned(bitcast(x, "i32"), 28), 8)
    return bit_or(select(greater_equal(size, 1.0), large, small), sign)


def encode_fp4_row(x: Value) -> Value:
    """Scaled f32 values [..., n] to cache bytes (i8) [..., n/2]: element 2n in the low nibble, 2n + 1 in the high one."""
    pairs = split_last(fp4_codes(x), 2)
    weights = add(mul(tile.IotaOp(tile_type([2], element("i32"))).out, 15), 1)  # 1 for the low nibble, 16 for the high
    for extent in reversed(shape_of(pairs)[:-1]):
        weights = broadcast(weights, 0, extent)
    bytes_ = reduce(mul(pairs, weights), "add", -1)
    bytes_.owner.attributes["tile.pack"] = ir.UnitAttr.get()  # a target that can split pairs need not sum over two lanes
    return cast(bytes_, "i8")


def fp4_values(nibbles: Value) -> Value:
    """e2m1 codes 0 to 15 in i16 (higher bits ignored) to f32 values times 2^-14, exact: the code's bits placed in an f16."""
    size, sign = shl(bit_and(nibbles, 7), 9), shl(bit_and(nibbles, 8), 12)
    return cast(bitcast(bit_or(size, sign), "f16"), "f32")


FP4_BIAS = 2.0**14  # what fp4_values leaves out


def decode_fp4_row(codes: Value, factors: Value) -> tuple[Value, Value]:
    """Cache bytes (i8) [..., n/2] with f32 group factors [..., n/group] to the even and the odd elements, two f32 tiles [..., n/2].

    Every decoded value is a bf16 number. A product over n may be taken as two: rows and the other operand split by `even_odd`.
    """
    width, groups = shape_of(codes)[-1], shape_of(factors)[-1]
    factor = merge_last(broadcast(mul(factors, FP4_BIAS), -1, width // groups))
    wide = widen_unsigned(codes, "i16")
    return mul(fp4_values(wide), factor), mul(fp4_values(shr(wide, 4)), factor)


def quantize_fp4_main(x: Value) -> tuple[Value, Value]:
    """The model's q4main (spec 9.4): f32 [..., n] of bf16 values to bytes (i8) [..., n/2] and e4m3 scales [..., n/16]."""
    groups = split_last(x, MAIN_GROUP)
    peak = maximum(reduce(absolute(groups), "max", -1), FP4_MAX * 2.0**-9)
    scale = cast(minimum(mul(peak, 1.0 / FP4_MAX), E4M3_MAX), "e4m3")
    inverse = near_quotient(1.0, decode_e4m3(scale))
    return encode_fp4_row(merge_last(_snapped(mul(groups, broadcast(inverse, -1, MAIN_GROUP))))), scale


def _snapped(x: Value) -> Value:
    """Rounded to 12 significant bits, ties up: products of a bf16 number with the rounded inverse of an e4m3 one on the same side of each border
    between two codes as the quotient, and on it where the quotient is.

    A border has at most 3 significant bits, times a scale at most 7: a quotient is on it or further away than 2^-8 of it, the product is off by
    less than 2^-22.
    """
    return bitcast(bit_and(add(bitcast(x, "i32"), 0x800), -0x1000), "f32")


def quantize_fp4_index(x: Value) -> tuple[Value, Value]:
    """The model's q4idx (spec 9.4): f32 [..., n] of bf16 values to bytes (i8) [..., n/2] and e8m0 bytes (i8) [..., n/32]."""
    groups = split_last(x, SCALE_GROUP)
    peak = maximum(reduce(absolute(groups), "max", -1), FP4_MAX * 2.0**-126)
    exponent = power_exponent(peak, FP4_MAX)
    scaled = mul(groups, broadcast(inverse_power(exponent), -1, SCALE_GROUP))
    return encode_fp4_row(merge_last(scaled)), cast(exponent, "i8")


def decode_fp4_weight(codes: Value, low_scales: Value, high_scales: Value) -> tuple[Value, Value]:
    """64 byte rows (i8) [64, N] of packed weights to two bf16 tiles [64, N]: k = 128 t + r, then k = 128 t + 64 + r.

    low_scales and high_scales (i8, e8m0) [2, N] are the groups of 32 that each half covers. Scales 2 to 250: the products must be normal
    numbers.
    """
    wide = widen_unsigned(codes, "i16")
    return _scaled_fp4(wide, low_scales), _scaled_fp4(shr(wide, 4), high_scales)


def _scaled_fp4(nibbles: Value, scales: Value) -> Value:
    # A scale is an exponent addition in bf16 bits: 16-bit arithmetic alone, half the width of the float route.
    half = shl(sub(widen_unsigned(scales, "i16"), 1), 7)  # bits of scale / 2, the value of code 1
    half = merge_first(broadcast(half, 1, WEIGHT_HALF // shape_of(scales)[0]))
    low = bit_and(nibbles, 7)
    size = select(less(low, 2), select(less(low, 1), like(0, half), half), add(shl(low, 6), half))
    return bitcast(bit_or(size, shl(bit_and(nibbles, 8), 12)), "bf16")


__all__ = [
    "E4M3_MAX", "FP4_BIAS", "FP4_MAX", "decode_e4m3", "decode_fp4_row", "decode_fp4_weight", "dequantize_q8", "e8m0",
    "encode_e4m3", "encode_fp4_row", "fp4_codes", "fp4_values", "inverse_power", "power_exponent",
    "quantize_fp4_index", "quantize_fp4_main", "quantize_q8", "round_bf16",
]  # fmt: skip
