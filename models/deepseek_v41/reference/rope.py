"""Rotary embedding on adjacent pairs of the last R dimensions, with and without YaRN (model spec 4.2).

Promises: frequencies and angles are rounded to FP32 exactly where the released model rounds them. Leaves to others:
which positions are rotated, and the rounding of the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .arithmetic import Arithmetic
from .formats import Array


@dataclass(frozen=True)
class Yarn:
    """YaRN settings of `rope_scaling`."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float


def frequencies(width: int, base: float, yarn: Yarn | None) -> Array:
    """Returns the `width / 2` frequencies omega_i in float64."""
    index = np.arange(width // 2, dtype=np.float64)
    plain: Array = base ** (-2.0 * index / width)
    if yarn is None:
        return plain

    def corner(rotations: float) -> float:
        return width * math.log(yarn.original_positions / (2 * math.pi * rotations)) / (2 * math.log(base))

    low = max(math.floor(corner(yarn.beta_fast)), 0)
    high = min(math.ceil(corner(yarn.beta_slow)), width - 1)
    ramp = np.clip((index - low) / (high - low), 0.0, 1.0)
    return plain * (ramp / yarn.factor + 1.0 - ramp)


@dataclass(frozen=True)
class Rotation:
    """The rotation of one layer kind: `omega` FP32 `[R/2]`, under one arithmetic."""

    omega: Array
    arithmetic: Arithmetic

    def apply(self, x: Array, positions: Array) -> Array:
        """Rotates the last R dims of `x` `[n, ..., D]` by `positions` `[n]`; one rounding to BF16."""
        cosine, sine = self._table(positions)
        return self._turn(x, cosine, sine)

    def undo(self, x: Array, positions: Array) -> Array:
        """Rotates back by `positions` (the conjugate rotation); one rounding to BF16."""
        cosine, sine = self._table(positions)
        return self._turn(x, cosine, -sine)

    def _table(self, positions: Array) -> tuple[Array, Array]:
        # An FP32 product of FP32 operands, as in both references: near position 10^6 it differs from the FP64 angle.
        angles = (positions.astype(np.float32)[:, None] * self.omega).astype(np.float64)
        stored = np.float32 if self.arithmetic.is_faithful else np.float64
        dtype = self.arithmetic.dtype
        return np.cos(angles).astype(stored).astype(dtype), np.sin(angles).astype(stored).astype(dtype)

    def _turn(self, x: Array, cosine: Array, sine: Array) -> Array:
        shape = (len(cosine), *(1,) * (x.ndim - 2), cosine.shape[1])
        cosine, sine = cosine.reshape(shape), sine.reshape(shape)
        start = x.shape[-1] - 2 * len(self.omega)
        even, odd = x[..., start::2], x[..., start + 1 :: 2]
        turned = x.copy()
        turned[..., start::2] = even * cosine - odd * sine
        turned[..., start + 1 :: 2] = even * sine + odd * cosine
        return self.arithmetic.bf16(turned)
