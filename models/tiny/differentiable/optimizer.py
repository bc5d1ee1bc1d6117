"""One optimiser for two kinds of weights: orthogonalised momentum (Muon) for matrices of hidden layers, Adam for everything else.

All state lives on the device and learning rates are tensors, so that a whole step can be captured once and replayed. Matrices of
one shape are stacked and orthogonalised together. Leaves to others: the schedule, and the gate biases, which no gradient moves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .weights import Weights

_COEFFICIENTS = ((3.4445, -4.7750, 2.0315),) * 5
_MOMENTUM = 0.95
_BETAS = (0.9, 0.98)
_EPSILON = 1e-12
_MATRICES = (
    "wq_a.weight",
    "wq_b.weight",
    "attn.wkv.weight",
    "wo_a.weight",
    "wo_b.weight",
    "compressor.wkv.weight",
    "compressor.wgate.weight",
    "indexer.wk.weight",
    "experts.w1",
    "experts.w2",
    "experts.w3",
    "w1.weight",
    "w2.weight",
    "w3.weight",
    "engram.wkv.weight",
    "main_proj.weight",
)
_STEADY = ("gate.bias", "gate.bias_vl")  # moved by load, not by gradient
_TABLES = ("embed.weight", "head.weight", "markov_head.embed.weight", "markov_head.head.weight")


@dataclass(frozen=True)
class Rates:
    """Learning rates as factors of the schedule, and weight decay per unit of learning rate."""

    matrices: float = 0.02
    tables: float = 0.006
    rest: float = 0.003
    decay: float = 0.05


def learns(name: str) -> bool:
    """Whether gradients move this tensor."""
    return not name.endswith(_STEADY)


class Optimizer:
    """State for the named weights, which `step` changes in place."""

    def __init__(self, weights: Weights, names: list[str], rates: Rates) -> None:
        self._rates = rates
        self.names = names
        self._weights = weights
        device = weights[names[0]].device
        self.schedule = torch.zeros((), device=device)
        self._count = torch.zeros((), device=device)
        self._stacks: dict[tuple[int, int], list[str]] = {}
        self._adam: list[str] = []
        for name in names:
            if name.endswith(_MATRICES):
                self._stacks.setdefault(tuple(weights[name].shape[-2:]), []).append(name)  # type: ignore[arg-type]
            else:
                self._adam.append(name)
        self._momenta = {shape: torch.zeros_like(self._stacked(weights, group)) for shape, group in self._stacks.items()}
        self._first = [torch.zeros_like(weights[name]) for name in self._adam]
        self._second = [torch.zeros_like(weights[name]) for name in self._adam]

    @torch.no_grad()
    def step(self, gradients: Weights) -> None:
        """One update at the rate that `schedule` holds."""
        self._count += 1
        for shape, group in self._stacks.items():
            self._matrices(shape, group, gradients)
        self._others(gradients)

    def _matrices(self, shape: tuple[int, int], group: list[str], gradients: Weights) -> None:
        gradient = self._stacked(gradients, group)
        momentum = self._momenta[shape]
        momentum.lerp_(gradient, 1 - _MOMENTUM)
        update = orthogonalised(gradient.lerp(momentum, _MOMENTUM))
        rate = self.schedule * self._rates.matrices
        start = 0
        for name in group:
            weight = self._weights[name].unflatten(0, (-1, shape[0])) if self._weights[name].dim() == 2 else self._weights[name]
            part = update[start : start + len(weight)]
            start += len(weight)
            weight.mul_(1 - rate * self._rates.decay).sub_(part * (rate * max(1.0, shape[0] / shape[1]) ** 0.5))

    def _others(self, gradients: Weights) -> None:
        found = [gradients[name] for name in self._adam]
        if not found:
            return
        torch._foreach_lerp_(self._first, found, 1 - _BETAS[0])
        torch._foreach_mul_(self._second, _BETAS[1])
        torch._foreach_addcmul_(self._second, found, found, 1 - _BETAS[1])
        bias = (1 - _BETAS[1] ** self._count).sqrt() / (1 - _BETAS[0] ** self._count)
        scale = torch._foreach_sqrt(self._second)
        torch._foreach_add_(scale, _EPSILON)
        update = torch._foreach_div(self._first, scale)
        torch._foreach_mul_(update, -self.schedule * bias)
        for table in (True, False):
            chosen = [index for index, name in enumerate(self._adam) if name.endswith(_TABLES) is table]
            if chosen:
                rate = self._rates.tables if table else self._rates.rest
                targets = [self._weights[self._adam[index]] for index in chosen]
                torch._foreach_add_(targets, [update[index] for index in chosen], alpha=rate)

    @staticmethod
    def _stacked(values: Weights, group: list[str]) -> Tensor:
        return torch.cat([values[name] if values[name].dim() == 3 else values[name][None] for name in group]).float()


def orthogonalised(matrices: Tensor) -> Tensor:
    """The nearest matrices with singular values near 1, by five Newton-Schulz steps, in BF16 on a GPU."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    wide = x.shape[-2] > x.shape[-1]
    if wide:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in _COEFFICIENTS:
        square = x @ x.mT
        x = a * x + (b * square + c * (square @ square)) @ x
    return (x.mT if wide else x).float()


@torch.no_grad()
def balance(weights: Weights, loads: dict[str, Tensor], speed: float) -> None:
    """Moves every gate bias by `speed` towards even loads (auxiliary-loss-free balancing)."""
    for name, load in loads.items():
        weights[f"{name}.ffn.gate.bias"].add_(torch.sign(load.mean() - load), alpha=speed)
