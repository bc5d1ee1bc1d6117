"""Confidences against outcomes: counts of what was accepted, and two maps fitted on them, a temperature or a monotone curve per position.

A confidence is the draft's estimate that its token is accepted given that all before it were. Only verified tokens whose predecessors
were accepted tell anything. The map used in a step rests on earlier steps alone, so planning with it stays lossless. `Calibrator` is the one
thing here that remembers. docs/planning.md, calibration.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BINS = 20
FADING = 0.999  # of old outcomes, each step
REFIT_STEPS = 32  # the map changes so seldom: it is a mean over a thousand steps
EARLY_STEPS = (4, 8, 16)  # but at first every outcome counts
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


def with_outcomes(outcomes: Outcomes, confidences: Floats, widths: Ints, accepted: Ints, steps: int = 1) -> Outcomes:
    """The counts after a step: confidences [sequences, positions] as the head gave them, rows verified and drafts accepted [sequences].

    Several steps can be taken at once, one after the other in the rows: old outcomes then fade by so many.
    """
    fading = FADING**steps
    position = np.arange(confidences.shape[1])
    told = (position < widths[:, None] - 1) & (position <= accepted[:, None])
    row, column = np.nonzero(told)
    confidence = confidences[row, column]
    bins = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    cells, shape = column * BINS + bins, outcomes.seen.shape
    seen, claimed, won = (np.bincount(cells, amount, outcomes.seen.size).reshape(shape)
                          for amount in (np.ones(len(cells)), confidence, (column < accepted[row]).astype(np.float64)))
    return Outcomes(fading * outcomes.seen + seen, fading * outcomes.claimed + claimed, fading * outcomes.accepted + won)


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


class Calibrator:
    """Counts outcomes step by step and fits the monotone map anew every REFIT_STEPS steps that told something.

    A map is asked for by step: whoever plans step N says how old what it rests on must be. `told` counts steps that told something.
    """

    def __init__(self, positions: int) -> None:
        self.told = 0
        self._outcomes = no_outcomes(positions)
        self._fresh: list[tuple[Floats, Ints, Ints]] = []  # steps that are counted later, together: that is cheaper
        self._maps: deque[tuple[int, Floats]] = deque(maxlen=4)

    def observe(self, step: int, confidences: Floats, widths: Ints, accepted: Ints) -> None:
        """Takes what came of drafts that `step` verified: confidences [sequences, positions], rows, drafts accepted [sequences]."""
        if not len(widths) or int(widths.max()) < 2:
            return
        self._fresh.append((confidences, widths, accepted))
        self.told += 1
        if self.told % REFIT_STEPS == 0 or self.told in EARLY_STEPS:
            self._maps.append((step, monotone_map(self.outcomes)))

    @property
    def outcomes(self) -> Outcomes:
        """All outcomes so far."""
        if self._fresh:
            confidences, widths, accepted = (np.concatenate(column) for column in zip(*self._fresh, strict=True))
            self._outcomes = with_outcomes(self._outcomes, confidences, widths, accepted, len(self._fresh))
            self._fresh = []
        return self._outcomes

    def map(self, step: int) -> Floats | None:
        """The newest map that rests on outcomes of `step` and older ones only [positions, bins]; None: confidences are taken as they are."""
        known = [values for number, values in self._maps if number <= step]
        return known[-1] if known else None


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
