"""Sinkhorn normalisation of the hyper-connection matrices with a gradient that keeps no iterations (docs/model.md, section 3.2).

The forward pass is the model's: softmax over destinations, then columns and rows in turns. The backward pass differentiates the
fixed point instead of the iterations: the change of a doubly stochastic matrix has zero row and column sums, so the incoming
gradient is freed of its row and column parts by the same alternation. One opaque op, so that compilers do not unroll it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 128  # matrices per GPU program


@torch.library.custom_op("tapeout_tiny::sinkhorn", mutates_args=())
def sinkhorn(logits: Tensor, iterations: int, epsilon: float) -> Tensor:
    """Makes `[n, source, destination]` nearly doubly stochastic; columns first and last."""
    if logits.is_cuda:
        from .sinkhorn_kernel import launch_forward

        return launch_forward(logits, iterations, epsilon, _BLOCK)
    p = torch.softmax(logits, dim=-1) + epsilon
    p = p / (p.sum(-2, keepdim=True) + epsilon)
    for _ in range(iterations - 1):
        p = p / (p.sum(-1, keepdim=True) + epsilon)
        p = p / (p.sum(-2, keepdim=True) + epsilon)
    return p


@torch.library.custom_op("tapeout_tiny::sinkhorn_gradient", mutates_args=())
def sinkhorn_gradient(result: Tensor, gradient: Tensor, iterations: int) -> Tensor:
    """The gradient of the logits, from the result and its gradient."""
    if result.is_cuda:
        from .sinkhorn_kernel import launch_backward

        return launch_backward(result, gradient.contiguous(), iterations, _BLOCK)
    rest = gradient
    for _ in range(iterations):
        rest = rest - (result * rest).sum(-1, keepdim=True) / result.sum(-1, keepdim=True)
        rest = rest - (result * rest).sum(-2, keepdim=True) / result.sum(-2, keepdim=True)
    return result * rest


@sinkhorn.register_fake
def _(logits: Tensor, iterations: int, epsilon: float) -> Tensor:
    return torch.empty_like(logits)


@sinkhorn_gradient.register_fake
def _(result: Tensor, gradient: Tensor, iterations: int) -> Tensor:
    return torch.empty_like(result)


def _keep(ctx: object, inputs: tuple[Tensor, int, float], output: Tensor) -> None:
    ctx.save_for_backward(output)  # type: ignore[attr-defined]
    ctx.iterations = inputs[1]  # type: ignore[attr-defined]


def _backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None, None]:
    (result,) = ctx.saved_tensors  # type: ignore[attr-defined]
    return sinkhorn_gradient(result, gradient, ctx.iterations), None, None  # type: ignore[attr-defined]


sinkhorn.register_autograd(_backward, setup_context=_keep)
