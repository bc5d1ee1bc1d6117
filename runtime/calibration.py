"""Confidences against outcomes: counts of what was accepted, and two maps fitted on them, a temperature or a monotone curve per position.

A confidence is the draft's estimate that its token is accepted given that all before it were. Only verified tokens whose predecessors
were accepted tell anything. The map used in a step rests on earlier steps alone, so planning with it stays lossless. docs/planning.md,
calibration.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BINS = 20
FADING = 0.999  # of old outcomes, each step
_PRIOR = 4.0  # outcomes with which every bin starts, accepted as often as its confidence says
_EDGE = 1e-4  # confidences are kept this far from 0 and 1


@dataclass(frozen=True)
class Outcomes:
    """Faded counts by position and bin of confidence: outcomes seen, confidence summed, accepted [positions, bins]."""

    seen: Floats
    claimed: Floats
    accepted: Floats


def no_outcomes(positions: int) -> Outcomes:
    """Nothing seen yet, for drafts of `positions` tokens."""
    shape = (positions, BINS)
    return Outcomes(np.zeros(shape), np.zeros(shape), np.zeros(shape))


def with_outcomes(outcomes: Outcomes, confidences: Floats, widths: Ints, accepted: Ints) -> Outcomes:
    """The counts after a step: confidences [sequences, positions] as the head gave them, rows verified and drafts accepted [sequences]."""
    position = np.arange(confidences.shape[1])
    told = (position < widths[:, None] - 1) & (position <= accepted[:, None])
    row, column = np.nonzero(told)
    confidence = confidences[row, column]
    bins = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    cells, shape = column * BINS + bins, outcomes.seen.shape
    seen, claimed, won = (np.bincount(cells, amount, outcomes.seen.size).reshape(shape)
                          for amount in (np.ones(len(cells)), confidence, (column < accepted[row]).astype(np.float64)))
    return Outcomes(FADING * outcomes.seen + seen, FADING * outcomes.claimed + claimed, FADING * outcomes.accepted + won)


def calibration_error(outcomes: Outcomes) -> Floats:
    """Expected calibration error by position [positions]: mean distance of confidence and acceptance over bins, weighted by outcomes."""
    total = outcomes.seen.sum(axis=1)
    gaps: Floats = np.abs(outcomes.claimed - outcomes.accepted).sum(axis=1)
    return gaps / np.where(total > 0, total, 1.0)


def temperatures(outcomes: Outcomes, rounds: int = 12) -> Floats:
    """The temperature T of each position that makes sigmoid(logit(c) / T) most likely [positions]; 1 where nothing was seen.

    Newton's method on 1 / T, in which the likelihood is concave; T stays within 1/8 and 8.
    """
    seen, accepted = outcomes.seen, outcomes.accepted
    claimed = np.divide(outcomes.claimed, seen, out=np.full_like(seen, 0.5), where=seen > 0)
    logits = _logit(claimed)
    inverse = np.ones((len(seen), 1))
    for _ in range(rounds):
        chance = _sigmoid(inverse * logits)
        slope = (logits * (accepted - seen * chance)).sum(axis=1, keepdims=True) - (inverse - 1) * _PRIOR
        curve = (logits**2 * seen * chance * (1 - chance)).sum(axis=1, keepdims=True) + _PRIOR
        inverse = np.clip(inverse + np.clip(slope / curve, -0.5, 0.5), 1 / 8, 8)
    return 1 / inverse[:, 0]


def tempered(confidences: Floats, temperature: Floats) -> Floats:
    """Confidences [sequences, positions] with the logits of each position divided by its temperature."""
    return _sigmoid(_logit(confidences) / temperature)


def monotone_map(outcomes: Outcomes) -> Floats:
    """Acceptance at the middle of each bin, made non-decreasing by pooling adjacent violators [positions, bins]."""
    middles = (np.arange(BINS) + 0.5) / BINS
    weights = outcomes.seen + _PRIOR
    rates = (outcomes.accepted + _PRIOR * middles) / weights
    return np.array([_pooled(rate, weight) for rate, weight in zip(rates, weights, strict=True)])


def mapped(confidences: Floats, monotone: Floats) -> Floats:
    """Confidences [sequences, positions] through the monotone map of their position, linear between the middles of bins."""
    middles = (np.arange(BINS) + 0.5) / BINS
    return np.stack([np.interp(confidences[:, j], middles, monotone[j]) for j in range(len(monotone))], axis=1)


def _pooled(rates: Floats, weights: Floats) -> Floats:
    """Isotonic regression: neighbours that fall are replaced by their weighted mean until none does."""
    pools: list[tuple[float, float, int]] = []  # weighted sum, weight, bins
    for rate, weight in zip(rates, weights, strict=True):
        pool = (float(rate * weight), float(weight), 1)
        while pools and pools[-1][0] * pool[1] >= pool[0] * pools[-1][1]:
            last = pools.pop()
            pool = (last[0] + pool[0], last[1] + pool[1], last[2] + pool[2])
        pools.append(pool)
    return np.concatenate([np.full(bins, total / weight) for total, weight, bins in pools])


def _logit(chance: Floats) -> Floats:
    inside = np.clip(chance, _EDGE, 1 - _EDGE)
    return np.log(inside / (1 - inside))


def _sigmoid(logit: Floats) -> Floats:
    return 1 / (1 + np.exp(-logit))
