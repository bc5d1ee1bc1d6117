"""The GPU form of `sinkhorn.py`: every program keeps its matrices in registers. Training only; imported when a GPU asks for it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _offsets(count, S: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    matrix = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    line = tl.arange(0, S)
    offsets = matrix[:, None, None] * (S * S) + line[None, :, None] * S + line[None, None, :]
    return offsets, (matrix < count)[:, None, None] & (line >= 0)[None, :, None] & (line >= 0)[None, None, :]


@triton.jit
def _forward(logits, result, count, iterations, epsilon, S: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets, inside = _offsets(count, S, BLOCK)
    c = tl.load(logits + offsets, inside, other=0.0)
    p = tl.exp(c - tl.max(c, 2, keep_dims=True))
    p = p / tl.sum(p, 2, keep_dims=True) + epsilon
    p = p / (tl.sum(p, 1, keep_dims=True) + epsilon)
    for _ in range(iterations - 1):
        p = p / (tl.sum(p, 2, keep_dims=True) + epsilon)
        p = p / (tl.sum(p, 1, keep_dims=True) + epsilon)
    tl.store(result + offsets, p, inside)


@triton.jit
def _backward(result, gradient, out, count, iterations, S: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets, inside = _offsets(count, S, BLOCK)
    p = tl.load(result + offsets, inside, other=1.0)
    rest = tl.load(gradient + offsets, inside, other=0.0)
    by_row = p / tl.sum(p, 2, keep_dims=True)
    by_column = p / tl.sum(p, 1, keep_dims=True)
    for _ in range(iterations):
        rest = rest - tl.sum(by_row * rest, 2, keep_dims=True)
        rest = rest - tl.sum(by_column * rest, 1, keep_dims=True)
    tl.store(out + offsets, p * rest, inside)


def launch_forward(logits: Tensor, iterations: int, epsilon: float, block: int) -> Tensor:
    """`sinkhorn` on float32 `[n, S, S]`, S a power of two."""
    logits = logits.contiguous()
    result = torch.empty_like(logits)
    count, size = logits.shape[0], logits.shape[-1]
    _forward[(triton.cdiv(count, block),)](logits, result, count, iterations, epsilon, S=size, BLOCK=block)
    return result


def launch_backward(result: Tensor, gradient: Tensor, iterations: int, block: int) -> Tensor:
    """`sinkhorn_gradient` on float32 `[n, S, S]`, S a power of two."""
    out = torch.empty_like(result)
    count, size = result.shape[0], result.shape[-1]
    _backward[(triton.cdiv(count, block),)](result, gradient, out, count, iterations, S=size, BLOCK=block)
    return out
