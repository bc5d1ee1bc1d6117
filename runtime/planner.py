"""How many drafted tokens to verify: a pure function of survival rates, step times and what earlier steps taught; it says why.

The total of a step rests on rates of step N-2 and older, the split over sequences on rates of step N-1 (the information barrier):
whether a token is verified never depends on that token, so the output keeps the model's distribution. Rates are products of confidences,
step times come from `cost.py`, and nothing here reads a clock or draws a number. docs/planning.md, planning.
"""

from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tapeout.runtime.errors import OptionRefused

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Reason(Enum):
    """Why a step verifies what it verifies."""

    NOT_MEASURED = "no step times, or no rates of such a block yet: everything that fits is verified"
    NO_DRAFTS = "nothing was drafted"
    PEER = "the best rate by the newest rates"
    EARLY_STOP = "the rate fell at the next draft"
    AVERAGED = "the best rate by averaged rates has scored best"
    ALL_SCORED_BEST = "verifying everything has scored best"
    GAIN_TOO_SMALL = "verifying less would gain less than the least gain"
    DRAFTS_DO_NOT_PAY = "plain decoding has scored best: one row a sequence"
    WIDENED = "filled up to the rows of the slowest rank"
    EXPLORING = "everything is verified at first and now and then, as what is never verified teaches nothing"


@dataclass(frozen=True)
class Plan:
    """Rows of each sequence in this step [sequences], each 1 + drafts verified; how long the block drafted at its end is; and why.

    `expected_tokens` and `expected_ms` are the planner's forecast of the step, `predicted_gain` that over verifying everything (0.05: 5 %),
    `averaged_over` the steps whose rates it used.
    """

    widths: Ints
    draft_length: int
    reason: Reason
    expected_tokens: float
    expected_ms: float
    predicted_gain: float = 0.0
    averaged_over: int = 0

    @property
    def rows(self) -> int:
        return int(self.widths.sum())


# -- rates


def survival(confidences: Floats) -> Floats:
    """The chance that each draft is reached and accepted [sequences, positions]: the running product of confidences."""
    return np.cumprod(confidences, axis=1, dtype=np.float64)


def assumed_rates(rates: Floats, is_known: Bools, has_drafts: Bools) -> Floats:
    """Rates with unknown rows filled: 1 for a sequence whose drafts nobody has judged yet, 0 for one that has none."""
    return np.where(is_known[:, None], rates, np.where(has_drafts, 1.0, 0.0)[:, None])


def expected_tokens(rates: Floats) -> Floats:
    """Tokens that a step emits if it verifies the 0, 1, 2, ... most likely drafts, one token a sequence included [drafts + 1]."""
    curve = np.empty(rates.size + 1)
    curve[0] = len(rates)
    descending = np.sort(rates, axis=None)[::-1]
    curve[1:] = descending
    return np.cumsum(curve, out=curve)


def best_total(tokens: Floats, times: Floats) -> int:
    """The number of drafts with the most tokens a millisecond; the smallest of equals. 0 if no step fits."""
    return int(np.argmax(tokens / times))


def split(rates: Floats, drafts: int) -> Ints:
    """Rows of each sequence when the `drafts` most likely drafts are verified; of equals the first sequence's count [sequences].

    Rates of a sequence never rise, so what is chosen of it is a prefix of its block.
    """
    sequences, positions = rates.shape
    if drafts <= 0:
        return np.ones(sequences, np.int64)
    if drafts >= rates.size:
        return np.full(sequences, 1 + positions, np.int64)
    flat = rates.reshape(-1)
    least = np.partition(flat, flat.size - drafts)[flat.size - drafts]
    chosen = flat > least
    missing = drafts - int(np.count_nonzero(chosen))
    chosen[np.flatnonzero(flat == least)[:missing]] = True
    widths: Ints = 1 + np.count_nonzero(chosen.reshape(sequences, positions), axis=1)
    return widths


# -- rules without memory


def compat(budget: Floats, allocation: Floats, times: Floats) -> Plan:
    """The peer's rule: the total by the rates of step N-2, the split by the newest ones (docs/planning.md, the peer's rule).

    `budget` and `allocation` are [sequences, positions], `times` is [drafts + 1] as `cost.step_times` gives it.
    """
    if not times.size or not budget.size:
        return _unmeasured(allocation, times)
    tokens = expected_tokens(budget)
    total = best_total(tokens, times)
    return Plan(split(allocation, total), allocation.shape[1], Reason.PEER, float(tokens[total]), float(times[total]),
                _gain(tokens, times, total), 1)


def early_stop(rates: Floats, times: Floats) -> Plan:
    """Admits drafts of this step from the most likely one down until the rate first falls: lossless with the newest rates, but it
    stays before the first cliff of padded step times, where the rate falls although more drafts would raise it again.
    """
    if not times.size or not rates.size:
        return _unmeasured(rates, times)
    tokens = expected_tokens(rates)
    falls = np.flatnonzero(np.diff(tokens / times) < 0)
    total = int(falls[0]) if falls.size else rates.size
    gain = _gain(tokens, times, total)
    return Plan(split(rates, total), rates.shape[1], Reason.EARLY_STOP, float(tokens[total]), float(times[total]), gain, 1)


def _unmeasured(rates: Floats, times: Floats) -> Plan:
    reason = Reason.NOT_MEASURED if rates.size else Reason.NO_DRAFTS
    widths = np.full(len(rates), 1 + rates.shape[1], np.int64)
    ms = float(times[-1]) if times.size else 0.0
    return Plan(widths, rates.shape[1], reason, float(len(rates) + rates.sum()), ms)


def _gain(tokens: Floats, times: Floats, total: int) -> float:
    """Rate of `total` drafts over the rate of all, minus 1. Where not even all fit, there is nothing to compare with."""
    if not np.isfinite(times[-1]):
        return 0.0
    return float(tokens[total] / times[total] * times[-1] / tokens[-1]) - 1


# -- our rule


@dataclass(frozen=True)
class Rules:
    """What the planner may do. `means`: numbers of steps over which rates are averaged, 1 is the peer's budget.

    `draft_ms`: (length, time) of the draft blocks to choose from, longest last; empty: blocks are as long as they come and their time is
    part of the step times. `variable_ms`: what a step costs extra when sequences verify different numbers of drafts. `least_gain`: below
    it everything is verified. `probe_steps`: after so many steps with shorter blocks, one of full length shows whether they would pay.
    """

    means: tuple[int, ...] = (1, 4, 32)
    score_fading: float = 0.99
    rate_fading: float = 0.98
    least_gain: float = 0.01
    variable_ms: float = 0.0
    draft_ms: tuple[tuple[int, float], ...] = ()
    probe_steps: int = 64

    def __post_init__(self) -> None:
        if not self.means or min(self.means) < 1 or any(a >= b for a, b in pairwise(self.means)):
            raise OptionRefused("Rules.means", self.means, "rising numbers of steps, each at least 1")
        lengths = [length for length, _ in self.draft_ms]
        if any(a >= b for a, b in pairwise(lengths)) or (lengths and lengths[0] < 0):
            raise OptionRefused("Rules.draft_ms", self.draft_ms, "rising lengths, each at least 0")
        for name in ("score_fading", "rate_fading"):
            if not 0 < getattr(self, name) < 1:
                raise OptionRefused(f"Rules.{name}", getattr(self, name), "above 0 and below 1")


@dataclass(frozen=True)
class Track:
    """Memory for one draft length: the newest curves of expected tokens, newest last, their sums over each mean, and for every candidate
    (all, then one a mean) the total it chose last and its score."""

    length: int
    curves: tuple[Floats, ...]
    sums: tuple[Floats, ...]
    totals: tuple[int, ...]
    scores: Floats


@dataclass(frozen=True)
class Memory:
    """What earlier steps taught: a track for each draft length, faded tokens and ms of verifying everything, steps since a full block."""

    sequences: int = 0
    tracks: tuple[Track, ...] = ()
    all_tokens: float = 0.0
    all_ms: float = 0.0
    steps_short: int = 0


def plan(memory: Memory, rules: Rules, budget: Floats, allocation: Floats, times: Floats) -> tuple[Plan, Memory]:
    """Our rule: of several averaged budgets, the one that would have done best so far (docs/planning.md, our rule).

    `budget` [sequences, positions]: rates of step N-2; `allocation` [sequences, positions of the block at hand]: rates of step N-1;
    `times` [sequences x longest block + 1], without draft time if `rules.draft_ms` is given. Every candidate is scored with the newest
    budget rates on the total it had chosen for them, so a choice rests on steps up to N-2 only. Ties go to verifying everything.
    """
    if not times.size or not len(allocation):
        return _unmeasured(allocation, times), memory
    memory = _learned(memory, rules, budget, times)
    best = max((float(track.scores.max()), track.length) for track in memory.tracks)[1]
    length, steps_short = _next_length(memory, rules, best)
    return _for_block(memory, rules, allocation, times, length), replace(memory, steps_short=steps_short)


def _learned(memory: Memory, rules: Rules, budget: Floats, times: Floats) -> Memory:
    """Scores the last totals with the newest rates, then chooses new totals with those rates added."""
    sequences, drafted = budget.shape
    lengths = tuple(length for length, _ in rules.draft_ms) or (drafted,)
    if tuple(track.length for track in memory.tracks) != lengths:
        memory = Memory(sequences, tuple(_new_track(length, sequences, rules) for length in lengths))
    if memory.sequences != sequences:
        tracks = tuple(_resized(track, memory.sequences, sequences, rules) for track in memory.tracks)
        memory = replace(memory, sequences=sequences, tracks=tracks)
    curves = {length: expected_tokens(budget[:, :length]) for length in lengths if length <= drafted}
    full = lengths[-1]
    if full in curves and np.isfinite(times[sequences * full]):  # a short block cannot tell what a longer one would have given
        memory = _scored(memory, rules, curves, times)
    tracks = tuple(_advanced(t, curves[t.length], times, rules) if t.length in curves else t for t in memory.tracks)
    return replace(memory, tracks=tracks)


def _new_track(length: int, sequences: int, rules: Rules) -> Track:
    nothing = np.zeros(sequences * length + 1)
    candidates = 1 + len(rules.means)
    return Track(length, (), (nothing,) * len(rules.means), (sequences * length,) * candidates, np.zeros(candidates))


def _scored(memory: Memory, rules: Rules, curves: dict[int, Floats], times: Floats) -> Memory:
    """Adds to each score the tokens of its total beyond what verifying everything makes of the same time."""
    longest = memory.tracks[-1]
    curve, ms = curves[longest.length], times[longest.totals[0]] + _draft_ms(rules, longest.length)
    all_tokens, all_ms = rules.rate_fading * memory.all_tokens + curve[-1], rules.rate_fading * memory.all_ms + ms
    tracks = []
    for track in memory.tracks:
        own, totals = _step_ms(track.length, times, memory.sequences, rules), list(track.totals)
        earned = curves[track.length][totals] - all_tokens / all_ms * own[totals]
        tracks.append(replace(track, scores=rules.score_fading * track.scores + earned))
    return replace(memory, tracks=tuple(tracks), all_tokens=float(all_tokens), all_ms=float(all_ms))


def _advanced(track: Track, curve: Floats, times: Floats, rules: Rules) -> Track:
    """Takes the newest curve into the means and chooses every candidate's total anew."""
    own = _step_ms(track.length, times, int(curve[0]), rules)
    sums = tuple(total + (curve - track.curves[-mean]) if len(track.curves) >= mean else total + curve
                 for mean, total in zip(rules.means, track.sums, strict=True))
    totals = (len(curve) - 1, *(best_total(total, own) for total in sums))
    return replace(track, curves=(*track.curves, curve)[-rules.means[-1] :], sums=sums, totals=totals)


def _resized(track: Track, before: int, now: int, rules: Rules) -> Track:
    """Curves and totals for another number of sequences: tokens a sequence as a function of drafts a sequence stay as they are."""
    if not track.curves or not track.length:
        return replace(_new_track(track.length, now, rules), scores=track.scores)
    place = np.arange(now * track.length + 1) * (before / now)
    left = np.minimum(place.astype(np.int64), before * track.length - 1)
    stack = np.array(track.curves)
    moved = stack.take(left, axis=1, mode="clip")  # clip: without it numpy copies for a bounds check; the places are inside
    step = stack.take(left + 1, axis=1, mode="clip")
    step -= moved
    step *= place - left
    moved += step
    moved *= now / before
    sums = tuple(moved[-mean:].sum(axis=0) for mean in rules.means)
    totals = tuple(round(total * now / before) for total in track.totals)
    return replace(track, curves=tuple(moved), sums=sums, totals=totals)


def _step_ms(length: int, times: Floats, sequences: int, rules: Rules) -> Floats:
    """Times of steps that verify 0, 1, ... drafts of blocks of `length`, drafting the next block included."""
    own = times[: sequences * length + 1] + _draft_ms(rules, length)
    own[:-1] += rules.variable_ms
    return own


def _draft_ms(rules: Rules, length: int) -> float:
    return dict(rules.draft_ms).get(length, 0.0)


def _next_length(memory: Memory, rules: Rules, best: int) -> tuple[int, int]:
    """Length of the block to draft now, and steps since the last full one."""
    full = memory.tracks[-1].length
    steps = memory.steps_short + 1
    return (full, 0) if best == full or steps >= rules.probe_steps else (best, steps)


def _for_block(memory: Memory, rules: Rules, allocation: Floats, times: Floats, length: int) -> Plan:
    """The plan for the block at hand, by the candidate of its length that has scored best."""
    track = next((t for t in memory.tracks if t.length == allocation.shape[1]), None)
    if track is None or not track.curves or not track.length:
        is_off = length == 0 < memory.tracks[-1].length
        fitting = int(np.count_nonzero(np.isfinite(times[: allocation.size + 1]))) - 1
        reason = Reason.DRAFTS_DO_NOT_PAY if is_off else Reason.NOT_MEASURED if allocation.size else Reason.NO_DRAFTS
        return replace(_unmeasured(allocation, times), widths=split(allocation, fitting), draft_length=length, reason=reason)
    own = _step_ms(track.length, times, memory.sequences, rules)
    fits = bool(np.isfinite(own[-1]))
    candidate = int(np.argmax(track.scores)) if fits else len(rules.means)
    total, tokens, steps = track.totals[candidate], track.sums[-1], len(track.curves)
    mean = min(rules.means[candidate - 1], steps) if candidate else 0
    reason = Reason.AVERAGED if candidate else Reason.ALL_SCORED_BEST
    # Judged at the longest mean's own total: that of a shorter mean jumps, and the mode would jump with it.
    if candidate and fits and _gain(tokens, own, track.totals[-1]) < rules.least_gain:
        total, reason, mean = track.totals[0], Reason.GAIN_TOO_SMALL, 0
    forecast = float(tokens[total]) / steps
    return Plan(split(allocation, total), length, reason, forecast, float(own[total]), _gain(tokens, own, total), mean)


# -- sequences and ranks


def worth_drafting(accepted: Floats, idle_steps: Ints, *, draft_ms: float, row_ms: float, probe_steps: int = 64) -> Bools:
    """Which sequences should draft: those whose faded mean of accepted drafts [sequences] earns the draft's time, and those to probe.

    An accepted draft saves one row of a later step. `draft_ms` is the time of a block for one sequence, `idle_steps` since its last block.
    """
    return (accepted * row_ms >= draft_ms) | (idle_steps >= probe_steps)


def widened(given: Plan, allocation: Floats, rows: int) -> Plan:
    """The plan filled up to `rows`, what the slowest rank of a group proposes: below that more drafts cost the group nothing."""
    drafts = min(rows, allocation.size + len(allocation)) - len(allocation)
    if drafts <= given.rows - len(allocation):
        return given
    return replace(given, widths=split(allocation, drafts), reason=Reason.WIDENED)
