"""Planning keeps the model's distribution: one step enumerated exactly, and drawn with a chi-squared test; a planner that looks ahead fails both.

Two tokens, blocks of two drafts. A sequence's outcome is its first three tokens: what the step emits, continued by the target.
"""

import itertools
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import pytest
from numpy.typing import NDArray

from tapeout.runtime.planner import Memory, Rules, compat, early_stop, plan, survival

Floats = NDArray[np.float64]
LENGTH, DRAFTS = 3, 2
STRINGS = list(itertools.product((0, 1), repeat=LENGTH))
BLOCKS = list(itertools.product((0, 1), repeat=DRAFTS))
Planner = Callable[[Floats], NDArray[np.int64]]
"""Rates of this step's drafts [sequences, 2] -> rows of each sequence."""


class Pair:
    """Target and draft of one sequence: probabilities of the next token [at the start, after token 0, after token 1]."""

    def __init__(self, target: list[list[float]], draft: list[list[float]]) -> None:
        self.target, self.draft = np.array(target), np.array(draft)
        self.accepted = np.minimum(self.target, self.draft).sum(axis=1)

    def confidences(self, block: tuple[int, ...]) -> list[float]:
        """A perfect head: position j sees the drafts before j, not its own."""
        return [float(self.accepted[row]) for row in rows_of(block)]

    def drafted(self, block: tuple[int, ...]) -> float:
        return float(np.prod([self.draft[row][token] for row, token in zip(rows_of(block), block, strict=True)]))

    def outcomes(self, block: tuple[int, ...], verified: int) -> dict[tuple[int, ...], float]:
        """What a step emits, with its probability: accepted drafts and one token more."""
        found: dict[tuple[int, ...], float] = {}
        chance, prefix, row = 1.0, (), 0
        for token in block[:verified]:
            p, d = self.target[row], self.draft[row]
            keep, rest = min(1.0, p[token] / d[token]), np.maximum(p - d, 0)
            for other in (0, 1):
                if keep < 1:
                    found[(*prefix, other)] = found.get((*prefix, other), 0.0) + chance * (1 - keep) * rest[other] / rest.sum()
            chance, prefix, row = chance * keep, (*prefix, token), 1 + token
        for other in (0, 1):
            found[(*prefix, other)] = found.get((*prefix, other), 0.0) + chance * self.target[row][other]
        return found

    def continued(self, emitted: dict[tuple[int, ...], float]) -> Floats:
        """Probabilities of all strings of LENGTH: what was emitted, then the target."""
        total = np.zeros(len(STRINGS))
        for start, chance in emitted.items():
            for i, string in enumerate(STRINGS):
                if string[: len(start)] == start:
                    steps = list(zip(rows_of(string), string, strict=True))[len(start) :]
                    total[i] += chance * np.prod([self.target[row][token] for row, token in steps])
        return total

    @property
    def truth(self) -> Floats:
        return self.continued({(): 1.0})


def rows_of(string: tuple[int, ...]) -> list[int]:
    """For each token, the row of the tables that it is drawn from."""
    return [0, *(1 + token for token in string[:-1])]


def joint(pairs: list[Pair], planner: Planner) -> Floats:
    """Exact joint distribution of all sequences' strings."""
    total = np.zeros((len(STRINGS),) * len(pairs))
    for blocks in itertools.product(BLOCKS, repeat=len(pairs)):
        chance = np.prod([pair.drafted(block) for pair, block in zip(pairs, blocks, strict=True)])
        if chance:
            widths = planner(survival(np.array([pair.confidences(block) for pair, block in zip(pairs, blocks, strict=True)])))
            parts = [pair.continued(pair.outcomes(block, int(w) - 1)) for pair, block, w in zip(pairs, blocks, widths, strict=True)]
            total += chance * (parts[0] if len(parts) == 1 else np.multiply.outer(*parts))
    return total


def truth(pairs: list[Pair]) -> Floats:
    return pairs[0].truth if len(pairs) == 1 else np.multiply.outer(*(pair.truth for pair in pairs))


# The counter-example of the DSpark paper's appendix: 1, 0.5, 0.45 steps a second for 1, 2, 3 rows; after token 0 the draft is perfect,
# after token 1 it is hopeless.
PUBLISHED = Pair([[0.7, 0.3], [0.5, 0.5], [0.0, 1.0]], [[0.5, 0.5], [0.5, 0.5], [1.0, 0.0]])
TIMES = np.array([1, 1 / 0.5, 1 / 0.45])
PAIRS = [
    Pair([[0.7, 0.3], [0.7, 0.3], [0.1, 0.9]], [[0.5, 0.5], [0.6, 0.4], [0.9, 0.1]]),
    Pair([[0.35, 0.65], [0.05, 0.95], [0.6, 0.4]], [[0.6, 0.4], [0.9, 0.1], [0.5, 0.5]]),
]
PAIR_TIMES = np.array([1.0, 1.27, 1.75, 1.89, 1.92])


def lagged(rows: list[list[float]]) -> Floats:
    return survival(np.array(rows))


def by_peer(old: Floats, times: Floats) -> Planner:
    return lambda newest: compat(old, newest, times).widths


def by_us(old: Floats, times: Floats) -> Planner:
    memory = Memory()
    for _ in range(40):
        _, memory = plan(memory, Rules(least_gain=0), old, old, times)
    return lambda newest: plan(memory, Rules(least_gain=0), old, newest, times)[0].widths


def looking_ahead(times: Floats) -> Planner:
    """The forbidden rule: the total from this step's own rates."""
    return lambda newest: compat(newest, newest, times).widths


OLD = {1: [[[0.8, 0.9]], [[0.1, 0.1]], [[1.0, 1.0]]], 2: [[[0.8, 0.9], [0.3, 0.2]], [[0.1, 0.1], [0.1, 0.9]], [[1.0, 0.7], [0.9, 0.9]]]}


@pytest.mark.parametrize("rates", OLD[2])
@pytest.mark.parametrize("rule", [by_peer, by_us])
def test_a9_a_lagged_total_is_lossless_for_sequences_together(rule, rates) -> None:
    """Two sequences compete for one total: each keeps its distribution, and they stay independent."""
    np.testing.assert_allclose(joint(PAIRS, rule(lagged(rates), PAIR_TIMES)), truth(PAIRS), rtol=0, atol=1e-14)


def test_the_cases_differ_in_what_is_verified() -> None:
    """The test above is about something: over its cases and blocks several widths occur."""
    widths = {tuple(by_peer(lagged(rates), PAIR_TIMES)(survival(np.array([PAIRS[0].confidences(a), PAIRS[1].confidences(b)]))).tolist())
              for rates in OLD[2] for a in BLOCKS for b in BLOCKS}
    assert len(widths) >= 3


def test_early_stopping_is_lossless() -> None:
    np.testing.assert_allclose(joint(PAIRS, lambda newest: early_stop(newest, PAIR_TIMES).widths), truth(PAIRS), rtol=0, atol=1e-14)
    np.testing.assert_allclose(joint([PUBLISHED], lambda newest: early_stop(newest, TIMES).widths), PUBLISHED.truth, rtol=0, atol=1e-14)


@pytest.mark.parametrize("rates", OLD[1])
@pytest.mark.parametrize("rule", [by_peer, by_us])
def test_a_lagged_total_is_lossless_on_the_published_case(rule, rates) -> None:
    np.testing.assert_allclose(joint([PUBLISHED], rule(lagged(rates), TIMES)), PUBLISHED.truth, rtol=0, atol=1e-14)


def first_token(strings: Floats) -> Floats:
    return strings.reshape(2, -1).sum(axis=1)


def test_a9_looking_ahead_is_biased_as_published() -> None:
    """(0.85, 0.15) instead of (0.7, 0.3): after token 0 the rates are 1.00, 0.90, 1.17, after token 1 they are 1.00, 0.90, 0.81."""
    np.testing.assert_allclose(first_token(joint([PUBLISHED], looking_ahead(TIMES))), [0.85, 0.15], rtol=0, atol=1e-12)
    np.testing.assert_allclose(first_token(PUBLISHED.truth), [0.7, 0.3], rtol=0, atol=1e-12)
    assert np.abs(joint(PAIRS, looking_ahead(PAIR_TIMES)) - truth(PAIRS)).sum() > 0.1


# -- by drawing


def drawn(pair: Pair, planner: Planner, draws: int, seed: int) -> NDArray[np.int64]:
    """Counts of strings over `draws` steps: the block is drawn, then the outcome given what the planner verifies of it."""
    random = np.random.default_rng(seed)
    counts = random.multinomial(draws, [pair.drafted(block) for block in BLOCKS])
    total = np.zeros(len(STRINGS), np.int64)
    for block, count in zip(BLOCKS, counts, strict=True):
        if not count:
            continue
        width = int(planner(survival(np.array([pair.confidences(block)])))[0])
        chance = pair.continued(pair.outcomes(block, width - 1))
        cells = np.searchsorted(np.cumsum(chance) / chance.sum(), random.random(int(count)), side="right")
        total += np.bincount(cells, minlength=len(STRINGS))
    return total


def is_rejected(counts: NDArray[np.int64], expected: Floats, level: float = 1e-6) -> bool:
    """A chi-squared test at `level`, its quantile by Wilson and Hilferty; strings that cannot occur must not."""
    possible = expected > 0
    if counts[~possible].any():
        return True
    mean = expected[possible] * counts.sum()
    statistic = float(((counts[possible] - mean) ** 2 / mean).sum())
    freedom, normal = int(possible.sum()) - 1, NormalDist().inv_cdf(1 - level)
    return statistic > freedom * (1 - 2 / (9 * freedom) + normal * (2 / (9 * freedom)) ** 0.5) ** 3


DRAWS = [pytest.param(200_000, id="2e5"), pytest.param(10_000_000, id="1e7", marks=pytest.mark.full)]


@pytest.mark.parametrize("draws", DRAWS)
def test_a9_draws_follow_the_target_unless_the_planner_looks_ahead(draws) -> None:
    pair = PUBLISHED
    lossless = {
        "peer": by_peer(lagged([[0.8, 0.9]]), TIMES),
        "ours": by_us(lagged([[0.8, 0.9]]), TIMES),
        "early stop": lambda newest: early_stop(newest, TIMES).widths,
    }
    for seed, (name, planner) in enumerate(lossless.items()):
        assert not is_rejected(drawn(pair, planner, draws, seed), pair.truth), name
    assert is_rejected(drawn(pair, looking_ahead(TIMES), draws, 9), pair.truth)
