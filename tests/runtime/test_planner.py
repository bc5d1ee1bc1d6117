"""The planner: equals brute force over all totals, the peer's rule with its ties, our rule against one written with lists, its reasons."""

import numpy as np
import pytest

from tapeout.runtime.cost import decode_table, step_times
from tapeout.runtime.errors import OptionRefused
from tapeout.runtime.planner import (
    Memory,
    Plan,
    Reason,
    Rules,
    assumed_rates,
    compat,
    early_stop,
    expected_tokens,
    plan,
    split,
    survival,
    widened,
    worth_drafting,
)

GRID = np.array([0.0, 0.25, 0.5, 0.75, 1.0])
"""Confidences whose products and sums are exact in binary: ties are ties."""


def instance(random):
    """Rates old and new, a table, and the terms added to it. Half of the instances are full of ties, some tables are too small."""
    n, positions = int(random.integers(1, 13)), int(random.integers(1, 7))
    drawn = (lambda: random.choice(GRID, (n, positions))) if random.random() < 0.5 else (lambda: random.random((n, positions)))
    sizes = np.unique(random.integers(1, n * (1 + positions) + 9, int(random.integers(1, 9))))
    ms = np.sort(random.choice([1.0, 1.5, 2.0, 4.0], len(sizes))) if random.random() < 0.5 else np.cumsum(random.random(len(sizes)) + 0.1)
    slope, extra = float(random.choice([0.0, 0.25])), float(random.choice([0.0, 0.5]))
    return survival(drawn()), survival(drawn()), sizes, ms, slope, extra


def peer_aloud(old, new, sizes, ms, slope, extra):
    """The rule of docs/planning.md, the peer's rule, word by word: lists, loops, first of equals wins."""
    n = len(old)
    ranked = sorted(((-rate, i) for i, row in enumerate(old.tolist()) for rate in row))
    allocation = sorted(((-rate, i) for i, row in enumerate(new.tolist()) for rate in row))
    best, best_rows, expected, rows = 0.0, n, float(n), n
    for extra_rate in [None, *(-rate for rate, _ in ranked)]:
        if extra_rate is not None:
            expected, rows = expected + extra_rate, rows + 1
        fitting = [(size, t) for size, t in zip(sizes.tolist(), ms.tolist(), strict=True) if size >= rows]
        if fitting:
            rate = expected / (fitting[0][1] + slope * fitting[0][0] + extra)
            if rate > best:
                best, best_rows = rate, rows
    widths = [1] * n
    for _, i in allocation[: best_rows - n]:
        widths[i] += 1
    return widths


def device_split(new, drafts):
    """The re-ranking on the device: by value, then by flat index; the chosen entries of a sequence are a prefix."""
    flat = new.reshape(-1).tolist()
    chosen = sorted(range(len(flat)), key=lambda k: (-flat[k], k))[:drafts]
    widths = [1] * len(new)
    for k in chosen:
        widths[k // new.shape[1]] += 1
    return widths


def check_instances(seed, count):
    random = np.random.default_rng(seed)
    ties = fits = 0
    for number in range(count):
        old, new, sizes, ms, slope, extra = instance(random)
        n = len(old)
        times = step_times(decode_table(sizes, ms), n, old.size, row_slope=slope, extra_ms=extra)
        found = compat(old, new, times)
        assert found.widths.tolist() == peer_aloud(old, new, sizes, ms, slope, extra), (seed, number)
        rates = expected_tokens(old) / times
        best = [k for k in range(old.size + 1) if rates[k] == max(rates)]
        total = found.rows - n
        if np.isfinite(times[0]):
            assert total == best[0]  # brute force over all totals, the first of equals
            ours, _ = plan(Memory(), Rules(means=(1,), least_gain=-1), old, new, times)
            assert ours.rows - n == (old.size if np.isfinite(times[-1]) else total)  # nothing has scored yet: everything, if it fits
        assert split(new, total).tolist() == device_split(new, total)
        ties, fits = ties + (len(best) > 1), fits + bool(np.isfinite(times[-1]))
    assert ties > count // 100 and count // 10 < fits < count


def test_a8_the_total_equals_brute_force() -> None:
    check_instances(0, 1000)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 10))
def test_a8_the_total_equals_brute_force_on_all_instances(seed) -> None:
    check_instances(seed, 1000)


def test_a8_ties_go_to_the_first_sequence_and_the_fewest_rows() -> None:
    flat = np.array([4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0])
    halves = np.full((3, 2), 0.5)
    assert compat(halves, halves, flat).widths.tolist() == [3, 3, 3]
    nothing = np.zeros((3, 2))
    assert compat(nothing, halves, flat).widths.tolist() == [1, 1, 1]  # equal rates: the fewest rows
    assert split(halves, 3).tolist() == [3, 2, 1]
    assert split(np.array([[0.5, 0.25], [0.5, 0.5]]), 2).tolist() == [2, 2]
    assert split(np.array([[0.5, 0.25], [0.5, 0.5]]), 3).tolist() == [2, 3]
    assert [split(halves, k).tolist() for k in (-1, 0, 6, 9)] == [[1, 1, 1], [1, 1, 1], [3, 3, 3], [3, 3, 3]]


def test_missing_rates() -> None:
    rates = np.array([[0.9, 0.8], [0.7, 0.6], [0.5, 0.4]])
    found = assumed_rates(rates, np.array([True, False, False]), np.array([True, True, False]))
    assert found.tolist() == [[0.9, 0.8], [1, 1], [0, 0]]


def test_without_step_times_or_drafts_everything_is_verified() -> None:
    rates = np.full((2, 3), 0.5)
    for found in (compat(rates, rates, np.zeros(0)), early_stop(rates, np.zeros(0)), plan(Memory(), Rules(), rates, rates, np.zeros(0))[0]):
        assert (found.widths.tolist(), found.reason) == ([4, 4], Reason.NOT_MEASURED)
    nothing = np.zeros((2, 0))
    assert compat(nothing, nothing, np.ones(1)).reason is Reason.NO_DRAFTS
    assert plan(Memory(), Rules(), nothing, nothing, np.ones(1))[0].reason is Reason.NO_DRAFTS
    some = Rules(draft_ms=((0, 0.0), (3, 1.0)))
    found, _ = plan(Memory(), some, nothing, rates, np.array([1, 1, 1, 1, np.inf, np.inf, np.inf]))
    assert (found.rows, found.reason, found.draft_length) == (2 + 3, Reason.NOT_MEASURED, 3)  # as many as fit
    assert plan(Memory(), Rules(), np.zeros((0, 5)), np.zeros((0, 5)), np.ones(1))[0].rows == 0


def test_early_stopping_stays_before_a_cliff() -> None:
    rates = np.array([[0.9, 0.9, 0.9]])
    times = np.array([1.0, 2.0, 2.0, 2.0])
    assert early_stop(rates, times).rows == 1
    assert compat(rates, rates, times).rows == 4
    assert early_stop(rates, np.ones(4)).rows == 4


def test_a_plan_says_what_it_expects() -> None:
    rates = survival(np.array([[0.8, 0.5], [0.5, 0.5]]))
    found = compat(rates, rates, np.array([10.0, 10.0, 12.0, 20.0, 20.0]))
    assert found == Plan(found.widths, 2, Reason.PEER, 2.8, 10.0, pytest.approx(2.8 / 10 / (3.95 / 20) - 1), 1)
    assert found.widths.tolist() == [2, 1] and found.rows == 3


class Aloud:
    """Our rule with lists: keeps every matrix, sums anew, scores as docs/planning.md, our rule, says."""

    def __init__(self, means):
        self.means, self.seen = means, []
        self.scores, self.totals = [0.0] * (1 + len(means)), None
        self.tokens = self.ms = 0.0

    def step(self, budget, times):
        curve = expected_tokens(budget)
        full = len(curve) - 1
        totals = self.totals or [full] * len(self.scores)
        self.tokens, self.ms = 0.98 * self.tokens + curve[full], 0.98 * self.ms + times[full]
        self.scores = [0.99 * s + (curve[k] - self.tokens / self.ms * times[k]) for s, k in zip(self.scores, totals, strict=True)]
        self.seen.append(curve)
        means = [np.sum(self.seen[-m:], axis=0) for m in self.means]
        self.totals = [full] + [max(range(full + 1), key=lambda k, c=c: (c[k] / times[k], -k)) for c in means]
        return self.totals[self.scores.index(max(self.scores))]


@pytest.mark.parametrize("seed", range(6))
def test_our_rule_equals_the_one_with_lists(seed) -> None:
    """Over 120 steps: totals, scores and reasons. Rates on a binary grid, so sums are exact in any order."""
    random = np.random.default_rng(seed)
    n, positions = int(random.integers(2, 9)), 3
    times = step_times(decode_table([4, 8, 16, 24, 36], 2.0 + np.array([4, 8, 16, 24, 36]) / 8), n, n * positions)
    memory, aloud, rules, reasons = Memory(), Aloud((1, 4, 32)), Rules(least_gain=-1), set()
    level = random.choice(GRID[1:], n)
    for _ in range(120):
        level = np.where(random.random(n) < 0.2, random.choice(GRID, n), level)
        budget = survival(np.minimum(level[:, None], random.choice(GRID, (n, positions))))
        newest = survival(random.choice(GRID, (n, positions)))
        expected = aloud.step(budget, times)
        found, memory = plan(memory, rules, budget, newest, times)
        assert found.rows - n == expected
        assert found.widths.tolist() == device_split(newest, expected)
        np.testing.assert_allclose(memory.tracks[0].scores, aloud.scores, rtol=0, atol=1e-9)
        reasons.add(found.reason)
    assert Reason.AVERAGED in reasons


def steady(rules, budget, times, steps=60, newest=None):
    memory = Memory()
    for _ in range(steps):
        found, memory = plan(memory, rules, budget, budget if newest is None else newest, times)
    return found, memory


def test_everything_is_verified_where_less_would_gain_too_little() -> None:
    rates = survival(np.full((4, 3), 0.9))
    rates[:, 2] = 0.0
    times = 10 + 0.01 * np.arange(13)
    found, _ = steady(Rules(), rates, times)
    assert (found.rows, found.reason) == (16, Reason.GAIN_TOO_SMALL)
    less, _ = steady(Rules(least_gain=0.0), rates, times)
    assert (less.rows, less.reason, less.averaged_over) == (12, Reason.AVERAGED, 1)
    assert 0 < less.predicted_gain < 0.01
    dear, _ = steady(Rules(), rates, 10 + 1.0 * np.arange(13))
    assert (dear.rows, dear.reason) == (12, Reason.AVERAGED) and dear.predicted_gain > 0.1
    overhead, _ = steady(Rules(least_gain=0.0, variable_ms=5.0), rates, times)
    assert (overhead.rows, overhead.reason) == (16, Reason.ALL_SCORED_BEST)


def test_all_drafts_that_do_not_fit_are_never_chosen() -> None:
    rates = survival(np.full((4, 3), 0.9))
    times = np.where(np.arange(13) > 7, np.inf, 10.0)
    found, _ = steady(Rules(), rates, times)
    assert found.rows == 4 + 7 and found.expected_ms == 10.0 and found.predicted_gain == 0.0


def test_the_total_ignores_the_newest_rates() -> None:
    """The information barrier: whatever step N-1 says, the total is the same; only the split moves."""
    random = np.random.default_rng(5)
    budget, times = survival(random.random((6, 5))), 10 + 0.5 * np.arange(31)
    one, other = survival(random.random((6, 5))), survival(random.random((6, 5)))
    (a, memory_a), (b, memory_b) = (steady(Rules(), budget, times, newest=newest) for newest in (one, other))
    assert a.rows == b.rows and a.widths.tolist() != b.widths.tolist()
    assert memory_a.tracks[0].totals == memory_b.tracks[0].totals and (memory_a.tracks[0].scores == memory_b.tracks[0].scores).all()


def test_sequences_may_come_and_go() -> None:
    random = np.random.default_rng(7)
    memory, all_times = Memory(), 10 + 0.3 * np.arange(101)
    for step in range(150):
        n = int(random.integers(1, 21)) if step >= 40 else 20
        rates = survival(np.tile([0.9, 0.9, 0.5, 0.1, 0.1], (n, 1)))
        found, memory = plan(memory, Rules(means=(1, 4, 32), least_gain=0), rates, rates, all_times[: 5 * n + 1])
        assert len(found.widths) == n and found.widths.min() >= 1
        assert n < 8 or found.rows == 3 * n or step < 3  # equal sequences: the mean curve scales to any number of them


def test_short_blocks_where_long_ones_do_not_pay() -> None:
    """Lengths 0, 3 and 5 with measured draft times: the choice follows acceptance, and a probe brings it back."""
    rules = Rules(draft_ms=((0, 0.0), (3, 2.0), (5, 4.0)), probe_steps=8)
    times = 10 + 0.05 * np.arange(41)
    def settled(level, memory, steps=200):
        lengths, length = [], 5
        pipeline = [5, 5]
        for _ in range(steps):
            budget, newest = (survival(np.full((8, k), level)) for k in pipeline)
            found, memory = plan(memory, rules, budget, newest, times)
            length = found.draft_length
            pipeline = [pipeline[1], length]
            lengths.append(length)
        return lengths, memory, found

    good, memory, found = settled(0.95, Memory())
    assert set(good[-50:]) == {5} and found.reason in (Reason.ALL_SCORED_BEST, Reason.GAIN_TOO_SMALL)
    bad, memory, found = settled(0.02, memory, 1500)
    assert sorted(set(bad[-50:])) == [0, 5] and bad[-50:].count(5) <= 7
    assert found.widths.tolist() == [1] * 8
    middle, memory, _ = settled(0.5, Memory())
    assert max(set(middle[-50:]), key=middle[-50:].count) == 3
    again, memory, _ = settled(0.95, memory, 1500)
    assert set(again[-50:]) == {5}


def test_r36_drafts_that_do_not_pay_are_not_made_and_the_plan_says_so() -> None:
    rules = Rules(draft_ms=((0, 0.0), (5, 40.0)))
    memory, none = Memory(), np.zeros((4, 0))
    for _ in range(30):
        found, memory = plan(memory, rules, survival(np.full((4, 5), 0.1)), none, 10 + 0.1 * np.arange(21))
    assert (found.reason, found.draft_length, found.widths.tolist()) == (Reason.DRAFTS_DO_NOT_PAY, 0, [1, 1, 1, 1])


def test_sequences_that_should_not_draft() -> None:
    found = worth_drafting(np.array([0.0, 0.49, 0.5, 3.0, 0.0]), np.array([0, 5, 0, 0, 64]), draft_ms=0.1, row_ms=0.2)
    assert found.tolist() == [False, False, True, True, True]


def test_ranks_fill_up_to_the_slowest() -> None:
    rates = survival(np.array([[0.9, 0.8], [0.7, 0.1]]))
    given = compat(rates, rates, np.array([1.0, 5.0, 5.0, 5.0, 5.0]))
    assert given.rows == 2
    assert widened(given, rates, 4).widths.tolist() == [3, 1] and widened(given, rates, 4).reason is Reason.WIDENED
    assert widened(given, rates, 2) is given and widened(given, rates, 1) is given
    assert widened(given, rates, 100).widths.tolist() == [3, 3]


@pytest.mark.parametrize("given", [
    {"means": ()}, {"means": (4, 1)}, {"means": (0, 1)}, {"draft_ms": ((5, 1.0), (3, 1.0))}, {"draft_ms": ((-1, 1.0),)},
    {"score_fading": 1.0}, {"rate_fading": 0.0},
])
def test_rules_that_are_refused(given) -> None:
    with pytest.raises(OptionRefused):
        Rules(**given)
