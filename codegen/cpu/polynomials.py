"""exp, log and log1p of f32 registers as polynomials: at most 2 units in the last place, no call into a math library.

The polynomials are the classic single-precision ones of the Cephes library (public domain, S. Moshier), evaluated with fused steps.
Infinities, zeros, subnormals and NaN behave as in IEEE functions.
"""

from collections.abc import Sequence
from typing import Any

from tapeout.codegen.cpu.registers import Registers
from tapeout.dialects._mlir import arith

_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LOG = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
    2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
_LOG2E = 1.44269504088896341
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_ROUND = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in the low bits
_ORDERED = arith.CmpFPredicate


def _horner(r: Registers, x: Any, coefficients: Sequence[float]) -> Any:
    value = r.constant("f32", coefficients[0])
    for c in coefficients[1:]:
        value = r.fma(value, x, r.constant("f32", c))
    return value


def _at_least(r: Registers, bound: float, x: Any) -> Any:
    limit = r.constant("f32", bound)
    return r.select(r.compare(_ORDERED.OGT, limit, x), limit, x)  # a NaN passes


def _at_most(r: Registers, bound: float, x: Any) -> Any:
    limit = r.constant("f32", bound)
    return r.select(r.compare(_ORDERED.OLT, limit, x), limit, x)


def exp(r: Registers, x: Any) -> Any:
    """e^x: x = n ln 2 + r, |r| <= ln 2 / 2, and 2^n in two factors so that subnormal results come out right."""
    x = _at_least(r, -104.0, _at_most(r, 89.0, x))
    shifted = r.fma(x, r.constant("f32", _LOG2E), r.constant("f32", _ROUND))
    n = r.binary("subf", shifted, r.constant("f32", _ROUND))
    rest = r.fma(n, r.constant("f32", -_LN2_HIGH), x)
    rest = r.fma(n, r.constant("f32", -_LN2_LOW), rest)
    square = r.binary("mulf", rest, rest)
    value = r.fma(_horner(r, rest, _EXP), square, rest)
    value = r.binary("addf", value, r.constant("f32", 1.0))
    count = r.binary("subi", r.convert("bitcast", shifted, "i32"), r.constant("i32", 0x4B400000))
    half = r.shift("shrsi", count, "i32", 1)
    value = r.binary("mulf", value, _power(r, half))
    return r.binary("mulf", value, _power(r, r.binary("subi", count, half)))


def _power(r: Registers, n: Any) -> Any:
    return r.convert("bitcast", r.shift("shli", r.binary("addi", n, r.constant("i32", 127)), "i32", 23), "f32")


def log(r: Registers, x: Any) -> Any:
    """ln x: x = m 2^e with m in [sqrt(1/2), sqrt(2)), polynomial in m - 1."""
    small = r.compare(_ORDERED.OLT, x, r.constant("f32", 2.0**-126))
    scaled = r.select(small, r.binary("mulf", x, r.constant("f32", 2.0**25)), x)
    bits = r.convert("bitcast", scaled, "i32")
    # Subtracting the bits of sqrt(1/2) moves the exponent's boundary there.
    offset = r.binary("subi", bits, r.constant("i32", 0x3F3504F3))
    exponent = r.shift("shrsi", offset, "i32", 23)
    mantissa = r.binary("subi", bits, r.shift("shli", exponent, "i32", 23))
    f = r.binary("subf", r.convert("bitcast", mantissa, "f32"), r.constant("f32", 1.0))
    e = r.convert("sitofp", r.binary("subi", exponent, r.select(small, r.constant("i32", 25), r.constant("i32", 0))), "f32")
    square = r.binary("mulf", f, f)
    value = r.binary("mulf", r.binary("mulf", _horner(r, f, _LOG), square), f)
    value = r.fma(e, r.constant("f32", _LN2_LOW), value)
    value = r.fma(square, r.constant("f32", -0.5), value)
    value = r.binary("addf", f, value)
    return _log_edges(r, x, r.fma(e, r.constant("f32", _LN2_HIGH), value))


def _log_edges(r: Registers, x: Any, value: Any) -> Any:
    infinite = r.constant("f32", float("inf"))
    # x + inf is inf for inf, NaN for NaN; what is left below 0 is NaN as well.
    value = r.select(r.compare(_ORDERED.ULT, x, infinite), value, x)
    value = r.select(r.compare(_ORDERED.OEQ, x, r.constant("f32", 0.0)), r.constant("f32", float("-inf")), value)
    outside = r.compare(_ORDERED.ULT, x, r.constant("f32", 0.0))
    return r.select(outside, r.constant("f32", float("nan")), value)


def log1p(r: Registers, x: Any) -> Any:
    """ln(1 + x): the rounding error of 1 + x is put back as error / (1 + x)."""
    total = r.binary("addf", x, r.constant("f32", 1.0))
    lost = r.binary("subf", x, r.binary("subf", total, r.constant("f32", 1.0)))
    value = log(r, total)
    mended = r.binary("addf", value, r.binary("divf", lost, total))
    uneven = r.compare(_ORDERED.ONE, lost, r.constant("f32", 0.0))
    return r.select(uneven, mended, value)
