"""Number formats: what a tensor's elements are, how a block-scaled value is made and what it decodes to.

A `Number` is an element type with an optional `Scaling` (one scale per block of rows x columns of the last two axes); a `Scaled` is
such a value in memory. Quantization follows docs/model.md 9.2 to 9.4 to the last code. Every decoded value is exact in BF16.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tapeout.dialects._mlir import ext, ir

Array = NDArray[np.generic]

DTYPES: dict[str, np.dtype[np.generic]] = {
    "f64": np.dtype(np.float64),
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f8E4M3FN": np.dtype(ml_dtypes.float8_e4m3fn),
    "f4E2M1FN": np.dtype(ml_dtypes.float4_e2m1fn),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
}
BITS = {"f64": 64, "f32": 32, "bf16": 16, "f8E4M3FN": 8, "f4E2M1FN": 4, "i32": 32, "i64": 64}
LARGEST = {"f8E4M3FN": 448.0, "f4E2M1FN": 6.0}
E8M0_BIAS = 127


class Format(ext.Dialect, name="format"):
    """Holds the one attribute that a tensor type carries as its encoding when it is block scaled."""


class ScaledAttr(Format.Attribute, name="scaled"):
    """`#format.scaled<"e8m0", 1, 32>`: element of the scales, then the block of the last two axes that one scale covers."""

    scale: ir.StringAttr
    rows: ir.IntegerAttr
    columns: ir.IntegerAttr


@dataclass(frozen=True)
class Scaling:
    """One scale of element `e8m0` (a power of two) or `e4m3` for each block of `rows` x `columns`."""

    scale: str
    rows: int
    columns: int

    def blocks(self, shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """The shape of the scales of a value of `shape` (None: run-time extent, never blocked)."""
        *lead, last = shape
        if last is None:
            raise ValueError(f"a block-scaled value needs a static last axis, found {shape}")
        if self.rows > 1:
            *lead, row = lead
            lead.append(None if row is None else -(-row // self.rows))
        return (*lead, -(-last // self.columns))


@dataclass(frozen=True)
class Number:
    """What one element is: `Number("bf16")`, `Number("f8E4M3FN", Scaling("e8m0", 1, 32))`."""

    element: str
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        if self.element not in DTYPES:
            raise ValueError(f"unknown element type {self.element}; known: {', '.join(DTYPES)}")

    def __str__(self) -> str:
        s = self.scaling
        return self.element if s is None else f"{self.element}*{s.scale}[{s.rows}x{s.columns}]"

    @property
    def is_float(self) -> bool:
        return not self.element.startswith("i")

    def bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a value of `shape`, scales included; FP4 is packed two to a byte."""
        count = int(np.prod(shape, dtype=np.int64))
        scales = 0 if self.scaling is None else int(np.prod([n or 0 for n in self.scaling.blocks(shape)], dtype=np.int64))
        return -(-count * BITS[self.element] // 8) + scales


REAL = Number("f64")
BF16 = Number("bf16")
FP32 = Number("f32")
INT32 = Number("i32")
Q8 = Number("f8E4M3FN", Scaling("e8m0", 1, 32))
"""Activations and window KV (9.3, 9.4)."""
Q4_MAIN = Number("f4E2M1FN", Scaling("e4m3", 1, 16))
"""Compressed KV entries (9.4)."""
Q4_INDEX = Number("f4E2M1FN", Scaling("e8m0", 1, 32))
"""Index queries and keys (9.4); also the stored form of expert weights (9.2)."""
FP8_WEIGHT = Number("f8E4M3FN", Scaling("e8m0", 32, 32))
FP4_WEIGHT = Q4_INDEX
FP8_TABLE = Q8


@dataclass(frozen=True)
class Scaled:
    """A block-scaled array: `codes` in its element's dtype, `scales` as E8M0 bytes (uint8) or E4M3 values."""

    codes: Array
    scales: Array
    scaling: Scaling

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def __getitem__(self, rows: object) -> "Scaled":
        """Selects along leading axes that no block spans."""
        return Scaled(self.codes[rows], self.scales[rows], self.scaling)  # type: ignore[call-overload]


def scale_values(scales: Array, kind: str) -> NDArray[np.float64]:
    """Scales as numbers: E8M0 byte b is 2^(b-127)."""
    if kind == "e8m0":
        return np.ldexp(1.0, scales.astype(np.int32) - E8M0_BIAS)
    return scales.astype(np.float64)


def decode(value: "Array | Scaled") -> NDArray[np.float64]:
    """The exact real numbers a value stands for, as float64."""
    if not isinstance(value, Scaled):
        return value.astype(np.float64)
    codes, s = value.codes.astype(np.float64), value.scaling
    factors = np.repeat(scale_values(value.scales, s.scale), s.columns, axis=-1)[..., : codes.shape[-1]]
    if s.rows > 1:
        factors = np.repeat(factors, s.rows, axis=-2)[..., : codes.shape[-2], :]
    return codes * factors


def encode(x: NDArray[np.float64], number: Number) -> "Array | Scaled":
    """Rounds real numbers to `number`: nearest even for floats, block quantization where the number has a scaling."""
    if number.scaling is not None:
        return quantize(x, number)
    narrow = number.element in ("bf16", "f8E4M3FN", "f4E2M1FN")
    return (to_odd(x) if narrow else x).astype(DTYPES[number.element])


def to_odd(x: NDArray[np.float64]) -> NDArray[np.float32]:
    """float32 with the last bit set where x is not representable: a later rounding to fewer bits is then the only one."""
    near = x.astype(np.float32)
    bits = near.view(np.uint32)
    inexact = (near != x) & np.isfinite(near)
    outward = inexact & (np.abs(near.astype(np.float64)) > np.abs(x))
    return np.where(inexact, (bits - outward) | 1, bits).view(np.float32)


def quantize(x: NDArray[np.float64], number: Number) -> Scaled:
    """Block quantization of rows (9.3, 9.4): one scale per `columns` of the last axis, codes rounded to nearest even, saturating."""
    scaling = number.scaling
    if scaling is None or scaling.rows != 1 or x.shape[-1] % scaling.columns:
        raise ValueError(f"cannot quantize an array of shape {x.shape} to {number}: blocks of one row must divide the last axis")
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // scaling.columns, scaling.columns)
    peak = np.abs(groups).max(axis=-1, initial=0.0)
    scales = _scales(peak, number)
    ratio = groups / scale_values(scales, scaling.scale)[..., None]
    largest = LARGEST[number.element]
    codes = to_odd(np.clip(ratio, -largest, largest)).astype(DTYPES[number.element])
    return Scaled(codes.reshape(x.shape), scales, scaling)


def _scales(peak: NDArray[np.float64], number: Number) -> Array:
    match number:
        case Number("f8E4M3FN", Scaling("e8m0", _, _)):
            return _power_of_two(np.maximum(peak, 1e-4) / 448.0)
        case Number("f4E2M1FN", Scaling("e8m0", _, _)):
            return _power_of_two(np.maximum(peak, 6 * 2.0**-126) / 6.0)
        case Number("f4E2M1FN", Scaling("e4m3", _, _)):
            return to_odd(np.minimum(448.0, np.maximum(peak, 6 * 2.0**-9) / 6.0)).astype(ml_dtypes.float8_e4m3fn)
    raise ValueError(f"no rule makes the scales of {number}")


def _power_of_two(x: NDArray[np.float64]) -> NDArray[np.uint8]:
    """The E8M0 byte of the least power of two at or above x."""
    mantissa, exponent = np.frexp(x)
    ceiling = np.where(mantissa == 0.5, exponent - 1, exponent)
    return (ceiling + E8M0_BIAS).astype(np.uint8)
