"""Held-out figures of the backbone: bits per byte, and what bounded replay changes.

Sequences are cut from the held-out stream without overlap, so tokens at their start have little context: figures for the training
log. Those of the model card are measured elsewhere, on the stored checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import Differentiable
from .weights import Weights

_FIRST_CUT, _LEAST_SCORED = 16, 8  # rows before the first replay start, rows scored behind the last one


def sequences(stream: Tensor, length: int, most: int | None = None) -> Tensor:
    """Rows `[n, length + 1]` of a stream, each beginning with the last token of the one before."""
    count = (len(stream) - 1) // length
    rows = stream[: count * length + 1].unfold(0, length + 1, length)
    return rows if most is None else rows[:most]


@torch.no_grad()
def bits_per_byte(model: Differentiable, weights: Weights, rows: Tensor, byte_counts: Tensor, batch: int) -> float:
    """Bits per byte of text over all rows but a last partial batch; ids that stand for no text are not scored."""
    bits, count = 0.0, 0.0
    for part in rows.split(batch):
        if len(part) < min(batch, len(rows)):
            break
        losses = _losses(model.forward(weights, part[:, :-1]).logits, part[:, 1:])
        scored = byte_counts[part[:, 1:]]
        bits += float((losses * (scored > 0)).sum()) / math.log(2)
        count += float(scored.sum())
    return bits / count


@dataclass(frozen=True)
class Replay:
    """Bounded replay against exact prefill, over rows that decode behind a replay: mean divergence in nats, both mean losses."""

    divergence: float
    exact_loss: float
    replayed_loss: float


@torch.no_grad()
def replay(model: Differentiable, weights: Weights, rows: Tensor, keep: int, batch: int) -> Replay:
    """Replays the last `keep` rows of prompts of several lengths and compares every row from the prompt's last one on."""
    length = rows.shape[1] - 1
    starts = torch.arange(_FIRST_CUT, length - keep - _LEAST_SCORED, _FIRST_CUT, device=rows.device)
    sums = torch.zeros(3, device=rows.device, dtype=torch.float64)
    count = 0
    for number, part in enumerate(rows.split(batch)):
        if len(part) < min(batch, len(rows)):
            break
        floors = starts[(torch.arange(len(part), device=rows.device) + number) % len(starts)]
        position = torch.arange(length, device=rows.device)
        cut = torch.where(position >= floors[:, None], floors[:, None], 0)
        exact = model.forward(weights, part[:, :-1]).logits
        replayed = model.forward(weights, part[:, :-1], floors=cut).logits
        scored = position >= floors[:, None] + keep - 1
        p, q = torch.log_softmax(exact.float(), -1), torch.log_softmax(replayed.float(), -1)
        divergence = (p.exp() * (p - q)).sum(-1)
        figures = (divergence, _losses(exact, part[:, 1:]), _losses(replayed, part[:, 1:]))
        sums += torch.stack([(figure * scored).sum().double() for figure in figures])
        count += int(scored.sum())
    divergence, exact_loss, replayed_loss = (sums / count).tolist()
    return Replay(divergence, exact_loss, replayed_loss)


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
