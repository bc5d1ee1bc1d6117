"""Storage and rounding formats of the checkpoint, written from model spec 9.2 to 9.4.

Promises: every decoded weight is exact, every quantiser returns the dequantised value (`q * s`) in the dtype it was
given, and rounding is to nearest, ties to even. Written apart from the dialects on purpose: two statements, one truth.
Leaves to others: where in the model each rounding happens (`arithmetic.py`).
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

BLOCK = 32
"""Rows and columns per FP8 weight scale, columns per FP4 weight scale, elements per activation scale."""

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

_BF16_DROPPED_BITS = 52 - 7
_BF16_SMALLEST_NORMAL = 2.0**-126
_BF16_SUBNORMAL_STEP = 2.0**-133


def round_bf16(x: Array) -> Array:
    """Rounds float32 or float64 values once to BF16 and returns them in their own dtype."""
    if x.dtype == np.float32:
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)
    # float64 is rounded on its bits: going through float32 would round twice and break ties.
    bits = x.view(np.int64)
    half = (1 << (_BF16_DROPPED_BITS - 1)) - 1
    rounded: Array = (bits + half + ((bits >> _BF16_DROPPED_BITS) & 1)) & -(1 << _BF16_DROPPED_BITS)
    result = rounded.view(np.float64)
    magnitude = np.abs(x)
    small = magnitude < _BF16_SMALLEST_NORMAL
    if small.any():
        tiny = np.where(small, x, 0.0)
        result = np.where(small, np.rint(tiny / _BF16_SUBNORMAL_STEP) * _BF16_SUBNORMAL_STEP, result)
    if magnitude.size and magnitude.max() > 3e38:
        result = np.where(np.abs(result) >= 2.0**128, np.copysign(np.inf, x), result)
    return result


def round_e4m3(x: Array) -> Array:
    """Rounds values already clamped to +-448 to E4M3; inputs are exact in float32, so the detour is lossless."""
    return x.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(x.dtype)


def round_e2m1(x: Array) -> Array:
    """Rounds to the nearest E2M1 value, ties to the even code, saturating at +-6 (model spec 9.4)."""
    magnitude = np.minimum(np.abs(x), E2M1_MAX)
    # Codes step by 0.5 below 2, by 1 below 4, by 2 up to 6; in each range even quotients are even codes.
    step = np.where(magnitude < 2.0, 0.5, np.where(magnitude < 4.0, 1.0, 2.0)).astype(x.dtype)
    result: Array = np.copysign(np.rint(magnitude / step) * step, x)
    return result


def next_power_of_two(x: Array) -> Array:
    """Returns the smallest power of two that is not below `x` (positive), exactly."""
    mantissa, exponent = np.frexp(x)
    result: Array = np.ldexp(np.ones_like(x), exponent - (mantissa == 0.5))
    return result


def q8(x: Array) -> Array:
    """Activation and window quantiser: E4M3 in groups of 32 with a power-of-two scale (model spec 9.3)."""
    groups = _in_groups(x, BLOCK)
    scale = next_power_of_two(_largest_magnitude(groups, 1e-4) / E4M3_MAX)
    codes = round_e4m3(np.clip(groups / scale, -E4M3_MAX, E4M3_MAX))
    return (codes * scale).reshape(x.shape)


def q4main(x: Array) -> Array:
    """Entry quantiser: E2M1 in groups of 16 with an E4M3 scale rounded to nearest; may saturate (model spec 9.4)."""
    groups = _in_groups(x, 16)
    scale = round_e4m3(np.minimum(_largest_magnitude(groups, 6.0 * 2.0**-9) / E2M1_MAX, E4M3_MAX))
    return (round_e2m1(groups / scale) * scale).reshape(x.shape)


def q4idx(x: Array) -> Array:
    """Index query and key quantiser: E2M1 in groups of 32 with a power-of-two scale (model spec 9.4)."""
    groups = _in_groups(x, BLOCK)
    scale = next_power_of_two(_largest_magnitude(groups, 6.0 * 2.0**-126) / E2M1_MAX)
    return (round_e2m1(groups / scale) * scale).reshape(x.shape)


def decode_ue8m0(scale: Array, dtype: type[np.floating[Any]]) -> Array:
    """Decodes UE8M0 bytes `b` to `2^(b-127)` (model spec 9.2)."""
    exponent = np.ascontiguousarray(scale).view(np.uint8).astype(np.int32) - 127
    return np.ldexp(np.ones(exponent.shape, dtype), exponent)


def decode_fp8_blocks(weight: Array, scale: Array, dtype: type[np.floating[Any]]) -> Array:
    """Decodes an FP8 linear `[out, in]` with one scale per 32 x 32 block, last blocks possibly partial."""
    out_width, in_width = weight.shape
    by_row = np.repeat(decode_ue8m0(scale, dtype), BLOCK, axis=0)[:out_width]
    result: Array = weight.astype(dtype) * np.repeat(by_row, BLOCK, axis=1)[:, :in_width]
    return result


def decode_fp8_rows(rows: Array, scale: Array, dtype: type[np.floating[Any]]) -> Array:
    """Decodes FP8 rows `[n, width]` with one scale per row and 32 columns (Engram tables)."""
    result: Array = rows.astype(dtype) * np.repeat(decode_ue8m0(scale, dtype), BLOCK, axis=1)[:, : rows.shape[1]]
    return result


def decode_fp4_rows(packed: Array, scale: Array, dtype: type[np.floating[Any]]) -> Array:
    """Decodes an FP4 expert stored `[out, in/2]`, low nibble first, with one scale per row and 32 columns."""
    data = packed.view(np.uint8)
    codes = np.stack((data & 15, data >> 4), axis=-1).reshape(data.shape[0], -1)
    signed = np.concatenate((E2M1_MAGNITUDES, -E2M1_MAGNITUDES)).astype(dtype)
    result: Array = signed[codes] * np.repeat(decode_ue8m0(scale, dtype), BLOCK, axis=1)
    return result


def _in_groups(x: Array, size: int) -> Array:
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _largest_magnitude(groups: Array, floor: float) -> Array:
    result: Array = np.maximum(np.abs(groups).max(axis=-1, keepdims=True), floor).astype(groups.dtype)
    return result
