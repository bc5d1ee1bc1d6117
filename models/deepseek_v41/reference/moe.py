"""Mixture of experts: gate, routed experts, shared expert (model spec 5).

Promises: ties in the gate go to the lowest expert; expert outputs are added best score first, the shared expert last,
with one rounding. Text tokens only, so `bias`, never `bias_vl`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .arithmetic import Arithmetic, silu
from .formats import Array
from .parameters import Parameters


@dataclass(frozen=True)
class MoeSettings:
    """Active experts `k`, the factor on routing weights and the SwiGLU limit."""

    active: int
    scaling: float
    limit: float


def gate(logits: Array, bias: Array, settings: MoeSettings) -> tuple[Array, Array]:
    """Chosen experts `[n, k]`, best first, and their weights `[n, k]`, from `z` `[n, E]`."""
    softplus = np.where(logits > 20, logits, np.log1p(np.exp(np.minimum(logits, 20))))
    scores = np.sqrt(softplus)
    chosen = np.argsort(-(scores + bias), axis=1, kind="stable")[:, : settings.active]
    best = np.take_along_axis(scores, chosen, axis=1)
    total = best.sum(axis=1, keepdims=True) + best.dtype.type(1e-20)
    return chosen, best.dtype.type(settings.scaling) * best / total


def moe(x: Array, block: Parameters, settings: MoeSettings, arithmetic: Arithmetic) -> Array:
    """`bf16(sum over chosen y_e + y_shared)` for normed rows `[n, H]`."""
    logits = x @ block.matrix("ffn.gate").T
    chosen, weights = gate(logits, block.array("ffn.gate.bias"), settings)
    outputs = np.zeros((*chosen.shape, x.shape[1]), x.dtype)
    for expert_id in np.unique(chosen):
        rows, ranks = np.nonzero(chosen == expert_id)
        expert_block = block.under(f"ffn.experts.{expert_id}")
        outputs[rows, ranks] = expert(x[rows], weights[rows, ranks, None], expert_block, settings, arithmetic)
    total = outputs[:, 0]
    for rank in range(1, settings.active):
        total = total + outputs[:, rank]
    one = np.ones((1, 1), x.dtype)
    return arithmetic.bf16(total + expert(x, one, block.under("ffn.shared_experts"), settings, arithmetic))


def expert(x: Array, weight: Array, block: Parameters, settings: MoeSettings, arithmetic: Arithmetic) -> Array:
    """One expert on rows `[n, H]`; the routing weight `[n, 1]` enters before `w2`."""
    quantised = arithmetic.q8(x)
    g = arithmetic.bf16(quantised @ block.matrix("w1").T)
    u = arithmetic.bf16(quantised @ block.matrix("w3").T)
    limit = x.dtype.type(settings.limit)
    activated = silu(np.minimum(g, limit)) * np.clip(u, -limit, limit) * weight
    return arithmetic.quantised_linear(arithmetic.bf16(activated), block.matrix("w2"))
