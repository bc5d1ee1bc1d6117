"""What training minimises: next tokens and index scores for the backbone, agreement and confidence for the draft stages.

The draft's mix is that of the DSpark paper: 0.1 cross entropy, 0.9 total variation against the backbone's distribution, 1.0
confidence; later positions of a block weigh less.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .draft import Drafts
from .speed import fast

_Z_LOSS = 1e-5
_CROSS_ENTROPY, _TOTAL_VARIATION = 0.1, 0.9
_POSITION_DECAY = 5.0  # gamma of exp(-(k - 1) / gamma)


@fast
def next_token_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross entropy in nats of `[n, V]` against `[n]`, and a small pull of the log partition towards zero."""
    wide = logits.float()
    partition = torch.logsumexp(wide, dim=-1)
    picked = wide.gather(1, targets[:, None])[:, 0]
    return (partition - picked).mean(), _Z_LOSS * partition.square().mean()


@dataclass(frozen=True)
class DraftLoss:
    """The sum to minimise, and its parts: mean total variation, share of agreeing best tokens, both by position `[D]`."""

    total: Tensor
    variation: Tensor
    agreement: Tensor


def draft_loss(drafts: Drafts, target_logits: Tensor, following: Tensor) -> DraftLoss:
    """Loss of `R` steps; `target_logits` `[R, D, V]` of the backbone, which get no gradient, `following` `[R, D]` the tokens there."""
    return DraftLoss(*_draft_loss(drafts.logits, drafts.confidences, target_logits.detach(), following))


@fast
def _draft_loss(logits: Tensor, confidences: Tensor, targets: Tensor, following: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, p = logits.float(), targets.float()
    drafts = q.shape[1]
    log_q = torch.log_softmax(q, dim=-1)
    variation = 0.5 * (torch.softmax(p, dim=-1) - log_q.exp()).abs().sum(-1)
    entropy = -log_q.gather(-1, following[..., None])[..., 0]
    agreement = (q.detach().argmax(-1) == p.argmax(-1)).float()
    doubt = F.binary_cross_entropy_with_logits(confidences.float(), agreement, reduction="none")
    decay = torch.exp(-torch.arange(drafts, device=q.device) / _POSITION_DECAY)
    decay = decay / decay.sum()
    # A step counts up to its first disagreement: behind it, no confidence is asked for.
    reached = torch.cat((torch.ones_like(agreement[:, :1]), agreement[:, :-1].cumprod(1)), dim=1)
    doubt = (doubt * reached).sum(0) / reached.sum(0).clamp(min=1)
    parts = _CROSS_ENTROPY * entropy.mean(0) + _TOTAL_VARIATION * variation.mean(0) + doubt
    return (decay * parts).sum(), variation.detach().mean(0), agreement.mean(0)
