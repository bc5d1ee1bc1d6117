"""Greedy text of the backbone, many sequences at once, and what drafting behind it would have been worth.

Every step runs whole sequences again: at this size that costs less than a cache would cost to write. Used to teach the draft stages
on text that the backbone writes itself, and to measure them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .capture import Captured
from .draft import draft
from .model import Differentiable
from .weights import Weights

_FIT_STEPS = 40
_FOLDS = 4
_RIDGES = (1e-3, 1e-2, 3e-2, 1e-1, 3e-1)
_SMALL = 1e-4  # penalty on the head itself, for directions in which nothing varies


@dataclass(frozen=True)
class Written:
    """`tokens` `[n, T + 1]`; the backbone wrote those from `start` `[n]` up to and with `start + count - 1`."""

    tokens: Tensor
    start: Tensor
    count: int


def write(logits_of: Callable[[Tensor], Tensor], prompts: Tensor, start: Tensor, count: int, batch: int) -> Written:
    """Continues row `i` of `prompts` `[n, T + 1]` greedily from position `start[i]`; what lies behind is overwritten.

    `logits_of` runs `[batch, T]` tokens; it may be captured.
    """
    tokens, cursor = prompts[:batch].clone(), start[:batch].clone()

    def step() -> None:
        logits = logits_of(tokens[:, :-1]).detach()
        last = logits.gather(1, (cursor - 1)[:, None, None].expand(-1, 1, logits.shape[2]))[:, 0]
        tokens.scatter_(1, cursor[:, None], last.argmax(-1)[:, None])
        cursor.add_(1)

    captured = Captured(step, prompts.device)
    done = []
    for first in range(0, len(prompts), batch):
        tokens.copy_(prompts[first : first + batch])
        cursor.copy_(start[first : first + batch])
        for _ in range(count):
            captured()
        done.append(tokens.clone())
    return Written(torch.cat(done), start, count)


@dataclass(frozen=True)
class Acceptance:
    """Of greedy decoding with drafts: mean accepted drafts a step, and by position how often it is reached, accepted, and believed.

    `errors` `[D]`: expected calibration error over ten bins of equal width; `gaps` `[D]`: mean confidence minus share accepted.
    """

    mean: float
    reached: list[int]
    accepted: list[float]
    errors: list[float]
    gaps: list[float]


@dataclass(frozen=True)
class Trial:
    """Drafts behind every written token of `n` sequences: `hits` `[n, anchors, D]`, `confidences` raw, `observed` `[n, anchors, D, w]`."""

    hits: Tensor
    confidences: Tensor
    observed: Tensor

    def of(self, texts: Tensor) -> Trial:
        """The trial on some of its texts, a mask `[n]`."""
        return Trial(self.hits[texts], self.confidences[texts], self.observed[texts])


@torch.no_grad()
def trial(model: Differentiable, weights: Weights, written: Written, batch: int) -> Trial:
    """Drafts greedily behind every written token that has as many written tokens behind it as a block has drafts."""
    drafts = model.settings.drafts
    span = written.count - drafts - 1
    parts = []
    for first in range(0, len(written.tokens), batch):
        tokens, start = written.tokens[first : first + batch], written.start[first : first + batch]
        features = model.forward(weights, tokens[:, :-1]).features
        anchors = (start - 1)[:, None] + torch.arange(span, device=tokens.device)
        found = draft(model, weights, features, anchors, tokens.gather(1, anchors + 1))
        index = (anchors[:, :, None] + 2 + torch.arange(drafts, device=tokens.device)).flatten(1)
        truth = tokens.gather(1, index).unflatten(1, (span, drafts))
        hits = found.tokens.view_as(truth) == truth
        parts.append((hits, found.confidences.view(hits.shape), found.observed.unflatten(0, hits.shape[:2])))
    return Trial(*(torch.cat(part) for part in zip(*parts, strict=True)))


def acceptance(tried: Trial) -> Acceptance:
    """Walks each sequence as a decoder would: the accepted drafts of a block and one bonus token a step."""
    return _walk(tried.hits.cpu().numpy(), torch.sigmoid(tried.confidences.float()).cpu().numpy())


def fitted_confidence(tried: Trial) -> tuple[Tensor, dict[str, list[float]]]:
    """The confidence head `[1, w]` of a logistic regression on which reached drafts were hits, and how its strength was chosen.

    Drafts of one text are alike, so strength is chosen across texts: the penalty with the least loss on texts that were left out.
    """
    means = torch.stack([_left_out(tried, ridge) for ridge in _RIDGES]).mean(1)
    chosen = int(means.argmin())
    told = {"ridges": list(_RIDGES), "left_out_losses": [round(x, 5) for x in means.tolist()], "chosen": [_RIDGES[chosen]]}
    return _regression(tried, _RIDGES[chosen]).float()[None], told


def _left_out(tried: Trial, ridge: float) -> Tensor:
    """Losses `[folds]` on every fold of texts of a head that was fitted to the others."""
    fold = torch.arange(len(tried.hits), device=tried.hits.device) % _FOLDS
    losses = []
    for number in range(_FOLDS):
        inside, outside = tried.of(fold == number), tried.of(fold != number)
        losses.append(_doubt(inside, inside.observed.double() @ _regression(outside, ridge)))
    return torch.stack(losses)


def _regression(tried: Trial, ridge: float) -> Tensor:
    observed = tried.observed.double()
    scale = observed.square().mean((0, 1, 2)).sqrt() + 1e-6
    head = torch.zeros_like(scale, requires_grad=True)
    solver = torch.optim.LBFGS([head], max_iter=_FIT_STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        logits = (observed / scale) @ head
        apart = (logits - logits.mean((0, 1))).square().mean()  # the head has no bias: this shrinks it to a mean for each position
        total = _doubt(tried, logits) + ridge * apart + _SMALL * head.square().sum()
        total.backward()
        return total

    solver.step(loss)
    return head.detach() / scale


def _doubt(tried: Trial, logits: Tensor) -> Tensor:
    """Mean cross entropy of hits where a block was right so far; every position counts the same."""
    hits = tried.hits.double()
    reached = torch.cat((torch.ones_like(hits[..., :1]), hits[..., :-1].cumprod(-1)), dim=-1)
    doubt = F.binary_cross_entropy_with_logits(logits, hits, reduction="none")
    return ((doubt * reached).sum((0, 1)) / reached.sum((0, 1)).clamp(min=1)).mean()


def _walk(hits: np.ndarray, beliefs: np.ndarray) -> Acceptance:
    """`hits` and `beliefs` `[n, anchors, D]`."""
    lengths = np.cumprod(hits, axis=2).sum(2)
    visited: list[tuple[int, int]] = []
    for row, accepted in enumerate(lengths):
        anchor = 0
        while anchor < len(accepted):
            visited.append((row, anchor))
            anchor += int(accepted[anchor]) + 1
    rows, anchors = np.array(visited).T
    hit, belief, length = hits[rows, anchors], beliefs[rows, anchors], lengths[rows, anchors]
    reached, accepted, errors, gaps = [], [], [], []
    for position in range(hits.shape[2]):
        there = length >= position
        h, b = hit[there, position].astype(float), belief[there, position]
        reached.append(int(there.sum()))
        accepted.append(float(h.sum() / max(len(h), 1)))
        gaps.append(float((b - h).sum() / max(len(h), 1)))
        errors.append(_calibration_error(h, b))
    return Acceptance(float(length.mean()), reached, accepted, errors, gaps)


def _calibration_error(hits: np.ndarray, beliefs: np.ndarray) -> float:
    bins = np.minimum((beliefs * 10).astype(int), 9)
    return float(sum(abs(hits[bins == b].sum() - beliefs[bins == b].sum()) for b in range(10)) / max(len(hits), 1))
