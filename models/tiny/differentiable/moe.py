"""Mixture of experts in torch (docs/model.md, section 5): every expert runs on every row, and the gate's zeros silence most.

At this size two wide products cost less than sorting rows by expert, and they need no capacity, so no row is ever dropped. The
shared expert is one more expert with weight 1. Selection is hard: an expert that was not chosen gets no gradient from a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tapeout.models.deepseek_v41.reference.moe import MoeSettings

from .casts import Numerics
from .speed import fast


def moe(weights: dict[str, Tensor], name: str, x: Tensor, settings: MoeSettings, numerics: Numerics) -> tuple[Tensor, Tensor]:
    """The output `[n, H]` for rows `[n, H]`, and how many rows chose each expert, `[E]`."""
    p = f"{name}.ffn."
    up, down = joined_experts(weights, p)
    result: tuple[Tensor, Tensor] = _moe(x, weights[f"{p}gate.weight"], weights[f"{p}gate.bias"], up, down, settings, numerics)
    return result


def joined_experts(weights: dict[str, Tensor], p: str) -> tuple[Tensor, Tensor]:
    """`[2 (E + 1), F, H]`, all `w1` then all `w3`, and `[E + 1, H, F]`, the shared expert last in each."""
    w1, w3, w2 = (torch.cat((weights[f"{p}experts.{w}"], weights[f"{p}shared_experts.{w}.weight"][None])) for w in ("w1", "w3", "w2"))
    return torch.cat((w1, w3)), w2


@fast
def _moe(
    x: Tensor, gate_weight: Tensor, bias: Tensor, up: Tensor, down: Tensor, settings: MoeSettings, numerics: Numerics
) -> tuple[Tensor, Tensor]:
    experts, hidden, width = down.shape
    chosen, routing = gate(numerics.product(x, gate_weight.T), bias, settings)
    both = numerics.quantised_linear(x, up.flatten(0, 1)).to(numerics.wide).unflatten(1, (2, experts, width))
    g, u = both[:, 0], both[:, 1]
    limit = settings.limit
    every = torch.cat((routing, torch.ones_like(routing[:, :1])), dim=1)
    a = numerics.q8(numerics.bf16(F.silu(g.clamp(max=limit)) * u.clamp(-limit, limit) * every[:, :, None]))
    if numerics.per_expert:
        y = torch.einsum("nef,ehf->neh", a, down)
        total = numerics.bf16(y).to(numerics.wide).sum(1)
    else:
        total = a.flatten(1) @ down.transpose(1, 2).reshape(experts * width, hidden)
    return numerics.bf16(total), chosen.sum(0)


def gate(logits: Tensor, bias: Tensor, settings: MoeSettings) -> tuple[Tensor, Tensor]:
    """Which experts are chosen, `[n, E]` as zeros and ones, and the routing weights, `[n, E]`, zero elsewhere."""
    scores = torch.sqrt(F.softplus(logits))
    best = torch.topk((scores + bias).detach(), settings.active, dim=1).indices
    chosen = torch.zeros_like(scores).scatter(1, best, 1.0)
    kept = scores * chosen
    return chosen, settings.scaling * kept / (kept.sum(1, keepdim=True) + 1e-20)
