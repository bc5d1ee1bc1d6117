"""Roundings of the model with gradients that pass straight through (docs/model.md, section 9).

Promises: values equal those of the reference's formats bit for bit; the gradient of every cast is the identity. Leaves to others:
which value is rounded where.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32
"""Rows and columns per FP8 weight scale, columns per FP4 weight scale, elements per activation scale."""

_E4M3_MAX = 448.0
_E2M1_MAX = 6.0
_SMALLEST_SCALE = 2.0**-126
_MANTISSA = 0x7FFFFF


@dataclass(frozen=True)
class Numerics:
    """Whether casts round, the dtype values are carried in, and the dtype of sums, norms, softmax and mixers.

    `per_expert` rounds every expert's output before they are added, as the model does; without it they are added in one
    product, which is faster and differs by that rounding only.
    """

    rounds: bool
    dtype: torch.dtype
    wide: torch.dtype
    per_expert: bool = True

    @classmethod
    def exact(cls) -> Numerics:
        """Float64 without roundings."""
        return cls(False, torch.float64, torch.float64)

    @classmethod
    def faithful(cls) -> Numerics:
        """All roundings, values carried in float32."""
        return cls(True, torch.float32, torch.float32)

    @classmethod
    def plain(cls) -> Numerics:
        """No roundings, float32: the full-precision model that a quantised one is measured against."""
        return cls(False, torch.float32, torch.float32)

    @classmethod
    def training(cls) -> Numerics:
        """All roundings, values carried in BF16, experts added in one product."""
        return cls(True, torch.bfloat16, torch.float32, per_expert=False)

    def bf16(self, x: Tensor) -> Tensor:
        """One rounding to BF16, in the dtype values are carried in."""
        if not self.rounds or self.dtype == torch.bfloat16:
            return x.to(self.dtype)
        return straight(x, x.to(torch.bfloat16).to(self.dtype))

    def q8(self, x: Tensor) -> Tensor:
        """Activations and window vectors: E4M3 in groups of 32 along the last axis (section 9.3)."""
        return straight(x, round_q8(x.detach())) if self.rounds else x

    def q4main(self, x: Tensor) -> Tensor:
        """Compressed entries: E2M1 in groups of 16 with an E4M3 scale (section 9.4)."""
        return straight(x, round_q4main(x.detach())) if self.rounds else x

    def q4idx(self, x: Tensor) -> Tensor:
        """Index queries and keys: E2M1 in groups of 32 with a power-of-two scale (section 9.4)."""
        return straight(x, round_q4idx(x.detach())) if self.rounds else x

    def rms(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """`weight * x * (mean(x^2) + epsilon)^(-1/2)` over the last axis, rounded once."""
        wide = x.to(self.wide)
        return self.bf16(weight.to(self.wide) * wide * inverse_rms(wide, epsilon))

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """`weight[out, in]` applied to rows `[..., in]`, output rounded once."""
        return self.bf16(x @ weight.transpose(-1, -2))

    def quantised_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """FP8 or FP4 linear: `q8` in front, output rounded once."""
        return self.linear(self.q8(x), weight)

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        """`x @ y` with wide sums that are not rounded."""
        return x.to(self.wide) @ y.to(self.wide)


def straight(x: Tensor, value: Tensor) -> Tensor:
    """`value` with the gradient of `x`; exact, since the difference that carries the gradient is zero."""
    if not torch.is_grad_enabled():
        return value
    return value.detach() + (x - x.detach())


def inverse_rms(x: Tensor, epsilon: float) -> Tensor:
    """`(mean(x^2) + epsilon)^(-1/2)` over the last axis, kept as an axis of length one."""
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)


def round_q8(x: Tensor) -> Tensor:
    groups = _groups(x, BLOCK)
    scale = next_power_of_two(_largest(groups, 1e-4) / _E4M3_MAX)
    return (_e4m3(groups / scale) * scale).reshape(x.shape).to(x.dtype)


def round_q4main(x: Tensor) -> Tensor:
    groups = _groups(x, 16)
    scale = _e4m3((_largest(groups, _E2M1_MAX * 2.0**-9) / _E2M1_MAX).clamp(max=_E4M3_MAX))
    return (_e2m1(groups / scale) * scale).reshape(x.shape).to(x.dtype)


def round_q4idx(x: Tensor) -> Tensor:
    groups = _groups(x, BLOCK)
    scale = next_power_of_two(_largest(groups, _E2M1_MAX * _SMALLEST_SCALE) / _E2M1_MAX)
    return (_e2m1(groups / scale) * scale).reshape(x.shape).to(x.dtype)


def round_fp4_rows(weight: Tensor) -> Tensor:
    """Expert weights `[..., in]`: E2M1 with one power-of-two scale per row and 32 columns."""
    return round_q4idx(weight)


def round_fp8_rows(weight: Tensor) -> Tensor:
    """Engram tables `[rows, width]`: E4M3 with one power-of-two scale per row and 32 columns."""
    groups = _groups(weight, BLOCK)
    scale = next_power_of_two(_largest(groups, _E4M3_MAX * _SMALLEST_SCALE) / _E4M3_MAX)
    return (_e4m3(groups / scale) * scale).reshape(weight.shape)


def round_fp8_blocks(weight: Tensor) -> Tensor:
    """FP8 linears `[out, in]`, both multiples of 32: E4M3 with one power-of-two scale per 32 x 32 block."""
    rows, columns = weight.shape
    blocks = weight.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    largest = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(min=_E4M3_MAX * _SMALLEST_SCALE)
    scale = next_power_of_two(largest / _E4M3_MAX)
    return (_e4m3(blocks / scale) * scale).reshape(weight.shape)


def next_power_of_two(x: Tensor) -> Tensor:
    """The smallest power of two that is not below `x`, a positive normal float32."""
    exponent = (x.view(torch.int32) + _MANTISSA) >> 23
    return (exponent << 23).view(torch.float32)


def _groups(x: Tensor, size: int) -> Tensor:
    return x.float().unflatten(-1, (-1, size))


def _largest(groups: Tensor, floor: float) -> Tensor:
    return groups.abs().amax(-1, keepdim=True).clamp(min=floor)


def _e4m3(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).float()


def _e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 value, ties to the even code: codes step by 0.5 below 2, by 1 below 4, by 2 up to 6."""
    magnitude = x.abs().clamp(max=_E2M1_MAX)
    step = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    return torch.copysign(torch.round(magnitude / step) * step, x)
