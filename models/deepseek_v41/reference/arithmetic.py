"""The two numerics of the reference: `exact` (float64, no rounding) and `faithful` (the casts of model spec 9.6).

Promises: every rounding of the forward pass goes through one of these methods, so the formulas in the other files
read the same in both numerics. Leaves to others: which value is rounded where.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from . import formats
from .formats import Array


@dataclass(frozen=True)
class Arithmetic:
    """Rounding rules (`is_faithful`) and the dtype of sums, means, softmax and mixers (`dtype`)."""

    is_faithful: bool
    dtype: type[np.floating[Any]]

    def bf16(self, x: Array) -> Array:
        """One rounding to BF16; the identity in `exact`."""
        return formats.round_bf16(x) if self.is_faithful else x

    def q8(self, x: Array) -> Array:
        """Quantises and dequantises activations or window vectors along the last axis; the identity in `exact`."""
        return formats.q8(x) if self.is_faithful else x

    def q4main(self, x: Array) -> Array:
        """Quantises and dequantises compressed entries; the identity in `exact`."""
        return formats.q4main(x) if self.is_faithful else x

    def q4idx(self, x: Array) -> Array:
        """Quantises and dequantises index queries and keys; the identity in `exact`."""
        return formats.q4idx(x) if self.is_faithful else x

    def rms(self, x: Array, weight: Array, epsilon: float) -> Array:
        """`weight * x * (mean(x^2) + epsilon)^(-1/2)` over the last axis, rounded once (model spec 0.1)."""
        return self.bf16(weight * x * inverse_rms(x, epsilon))

    def linear(self, x: Array, weight: Array) -> Array:
        """BF16 linear: `weight[out, in]` applied to rows `[..., in]`, output rounded to BF16."""
        return self.bf16(x @ weight.T)

    def quantised_linear(self, x: Array, weight: Array) -> Array:
        """FP8 or FP4 linear: `q8` in front, output rounded to BF16 (model spec 9.3)."""
        return self.bf16(self.q8(x) @ weight.T)


def inverse_rms(x: Array, epsilon: float) -> Array:
    """`(mean(x^2) + epsilon)^(-1/2)` over the last axis, kept as an axis of length one."""
    mean = np.add.reduce(x * x, axis=-1, keepdims=True) / x.dtype.type(x.shape[-1])
    result: Array = 1 / np.sqrt(mean + x.dtype.type(epsilon))
    return result


def sigmoid(x: Array) -> Array:
    """The logistic function, without overflow on either side."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small))


def silu(x: Array) -> Array:
    """`x * sigmoid(x)`."""
    return x * sigmoid(x)
