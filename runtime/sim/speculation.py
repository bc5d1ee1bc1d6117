"""What verifying fewer drafts gains: planner rules replayed on the same load, against verifying everything.

Acceptance is scored by its expected value, so a gain has no coin noise; standard errors are over seeds. The published scenario was searched
for so that it lands near published figures: agreement is a fit, no evidence. docs/planning.md, simulation.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapeout.runtime import planner
from tapeout.runtime.cost import DecodeTable, decode_table, new_fit, observed, step_times
from tapeout.runtime.planner import Memory, Rules, survival
from tapeout.runtime.sim.acceptance import Load, Process, drawn_load
from tapeout.runtime.sim.errors import ScenarioRefused
from tapeout.runtime.sim.plot import Series, line_plot

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOST_DRAFTS = 50_000_000  # of one run: they are drawn at once



@dataclass(frozen=True)
class Scenario:
    """Block length, acceptance, step times (`fixed_ms` + `row_ms` a row, rows rounded up to `graph_rows`), and how old the rates are that
    the total rests on (`lag` steps before the ones that are verified). `variable_ms`: extra time of steps of unequal width."""

    positions: int = 5
    process: Process = field(default_factory=Process)
    fixed_ms: float = 10.057
    row_ms: float = 0.012
    graph_rows: int = 8
    lag: int = 2
    variable_ms: float = 0.0
    steps: int = 1000
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    sequences: tuple[int, ...] = (2, 4, 8, 16, 32, 60)

    def __post_init__(self) -> None:
        checks = (("positions", 1, 64), ("graph_rows", 1, 4096), ("lag", 0, 16), ("steps", 2, 1_000_000))
        for name, low, high in checks:
            if not low <= getattr(self, name) <= high:
                raise ScenarioRefused(name, getattr(self, name), f"{low} to {high}")
        if not self.sequences or not all(1 <= n <= 4096 for n in self.sequences):
            raise ScenarioRefused("sequences", self.sequences, "numbers from 1 to 4096")
        drafts = self.steps * max(self.sequences) * self.positions
        if drafts > MOST_DRAFTS:
            raise ScenarioRefused("steps x sequences x positions", f"{drafts:,}", f"at most {MOST_DRAFTS:,}")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise ScenarioRefused("seeds", self.seeds, "different whole numbers, at least 0")
        if not (self.fixed_ms > 0 and self.row_ms >= 0 and self.variable_ms >= 0):
            raise ScenarioRefused("times", (self.fixed_ms, self.row_ms, self.variable_ms), "fixed_ms above 0, the others at least 0")
        if not 0 <= self.process.persistence < 1:
            raise ScenarioRefused("persistence", self.process.persistence, "at least 0, below 1")
        if not 0 < self.process.overconfidence <= 16:
            raise ScenarioRefused("overconfidence", self.process.overconfidence, "above 0, at most 16")


PRESETS: dict[str, Scenario] = {"published": Scenario()}



def scenario_of(preset: str, *, persistence: float | None = None, **given: Any) -> Scenario:
    """A preset with some fields replaced; what is None stays. Raises ScenarioRefused."""
    if preset not in PRESETS:
        raise ScenarioRefused("preset", preset, ", ".join(PRESETS))
    scenario = PRESETS[preset]
    process = scenario.process if persistence is None else replace(scenario.process, persistence=persistence)
    return replace(scenario, process=process, **{name: value for name, value in given.items() if value is not None})


Chooser = Callable[[Floats, Floats, Floats], Ints]
"""(budget rates, newest rates, step times) -> rows of each sequence."""


def _all(budget: Floats, newest: Floats, times: Floats) -> Ints:
    return np.full(len(newest), 1 + newest.shape[1], np.int64)


def _peer(budget: Floats, newest: Floats, times: Floats) -> Ints:
    return planner.compat(budget, newest, times).widths


def _peer_without_lag(budget: Floats, newest: Floats, times: Floats) -> Ints:
    return planner.compat(newest, newest, times).widths


def _early_stop(budget: Floats, newest: Floats, times: Floats) -> Ints:
    return planner.early_stop(newest, times).widths


def _remembering(rules: Rules) -> Chooser:
    memory = Memory()

    def choose(budget: Floats, newest: Floats, times: Floats) -> Ints:
        nonlocal memory
        chosen, memory = planner.plan(memory, rules, budget, newest, times)
        return chosen.widths

    return choose


def _mean_of(steps: int) -> Chooser:
    """The total by the mean of the last `steps` curves, with no choice between means."""
    curves: list[Floats] = []

    def choose(budget: Floats, newest: Floats, times: Floats) -> Ints:
        curves.append(planner.expected_tokens(budget))
        if len(curves[0]) != len(curves[-1]):
            del curves[:-1]
        del curves[:-steps]
        return planner.split(newest, planner.best_total(np.mean(curves, axis=0), times))

    return choose


def _smoothed(weight: float) -> Chooser:
    """The total by exponentially smoothed rates of each row: smoothing first erases the spread that the curve needs."""
    held: list[Floats] = []

    def choose(budget: Floats, newest: Floats, times: Floats) -> Ints:
        if not held or held[0].shape != budget.shape:
            held[:] = [budget]
        held[0] = weight * held[0] + (1 - weight) * budget
        return planner.compat(held[0], newest, times).widths

    return choose


RULES: dict[str, tuple[str, Callable[[Scenario], Chooser]]] = {
    "fixed": ("every draft is verified", lambda s: _all),
    "peer": ("total by lagged rates", lambda s: _peer),
    "peer-lag-0": ("total by the newest rates; not lossless", lambda s: _peer_without_lag),
    "mean-4": ("total by the mean of 4 lagged curves", lambda s: _mean_of(4)),
    "mean-32": ("total by the mean of 32 lagged curves", lambda s: _mean_of(32)),
    "shadow": ("the mean that has scored best", lambda s: _remembering(Rules(least_gain=-1.0, variable_ms=s.variable_ms))),
    "ours": ("shadow, and everything below 1 % predicted gain", lambda s: _remembering(Rules(variable_ms=s.variable_ms))),
    "early-stop": ("admit drafts until the rate falls", lambda s: _early_stop),
    "smoothed": ("total by rates smoothed over steps, 0.8", lambda s: _smoothed(0.8)),
}
"""Rules by name: what they do, and a fresh chooser for one run."""


@dataclass(frozen=True)
class Outcome:
    """What one rule did on one load. Lengths are per sequence and step; `accepted` counts the token that comes without a draft."""

    tokens: float
    ms: float
    accepted: float
    verified: float

    @property
    def tokens_per_s(self) -> float:
        return 1000 * self.tokens / self.ms


def replayed(load: Load, scenario: Scenario, table: DecodeTable, rule: str) -> Outcome:
    """Runs a rule over a load. Sequences without rates of `lag` steps ago count as if every draft were sure."""
    choose = RULES[rule][1](scenario)
    rates = [survival(c) for c in load.confidences]
    emitted = [np.cumsum(np.hstack([np.ones((len(a), 1)), survival(a)]), axis=1) for a in load.acceptance]
    tokens = ms = rows = steps = 0.0
    for step in range(load.steps):
        count, positions = rates[step].shape
        times = step_times(table, count, count * positions)
        widths = choose(_lagged(load, rates, step, scenario.lag), rates[step], times)
        total = int(widths.sum())
        unequal = widths.min() < 1 + positions
        tokens += float(emitted[step][np.arange(count), widths - 1].sum())
        ms += float(times[total - count]) + (scenario.variable_ms if unequal else 0.0)
        rows, steps = rows + total, steps + count
    return Outcome(tokens, ms, tokens / steps, rows / steps - 1)


def _lagged(load: Load, rates: Sequence[Floats], step: int, lag: int) -> Floats:
    """The rates of `lag` steps ago, in the order of this step's sequences."""
    if step < lag:
        return np.ones_like(rates[step])
    names, then = load.sequences[step], load.sequences[step - lag]
    if names == then:
        return rates[step - lag]
    place = {name: row for row, name in enumerate(then)}
    rows = np.array([place.get(name, -1) for name in names])
    return planner.assumed_rates(rates[step - lag][rows], rows >= 0, np.ones(len(rows), np.bool_))


def scenario_table(scenario: Scenario, sequences: int) -> DecodeTable:
    """Step times of a scenario up to every draft of `sequences` verified."""
    largest = -(-sequences * (1 + scenario.positions) // scenario.graph_rows)
    sizes = scenario.graph_rows * np.arange(1, largest + 1)
    return decode_table(sizes, scenario.fixed_ms + scenario.row_ms * sizes)


def for_trace(scenario: Scenario, load: Load) -> Scenario:
    """The scenario with the block length of a trace. Raises ScenarioRefused for blocks longer than a scenario may have."""
    return replace(scenario, positions=load.confidences[0].shape[1])


def recorded_table(load: Load, scenario: Scenario) -> DecodeTable:
    """Step times fitted to a trace that tells `ms` and `rows`, fixed and a row; those of the scenario if it does not."""
    largest = max(len(a) for a in load.acceptance)
    fit = new_fit([1, 64])
    for ms, rows in zip(load.step_ms, load.step_rows, strict=True):
        fit = observed(fit, [1, rows], ms, forgetting=1.0) if rows else fit
    fixed, row = map(float, fit.values)
    if fixed + row <= 0:
        return scenario_table(scenario, largest)
    sizes = np.arange(1, largest * (1 + scenario.positions) + 1)
    return decode_table(sizes, fixed + row * sizes)


@dataclass(frozen=True)
class Line:
    """One rule at one concurrency, means over seeds: gain over verifying everything in percent, its standard error (0 for one seed)."""

    sequences: float
    rule: str
    accepted: float
    verified: float
    tokens_per_s: float
    gain_percent: float
    standard_error: float


def simulated(scenario: Scenario, rules: Sequence[str]) -> list[Line]:
    """Every rule at every concurrency of the scenario, on the same loads. Raises ScenarioRefused for an unknown rule."""
    _check_rules(rules)
    lines = []
    for sequences in scenario.sequences:
        table = scenario_table(scenario, sequences)
        loads = [drawn_load(scenario.process, sequences, scenario.positions, scenario.steps, seed) for seed in scenario.seeds]
        fixed = [replayed(load, scenario, table, "fixed") for load in loads]
        for rule in rules:
            found = fixed if rule == "fixed" else [replayed(load, scenario, table, rule) for load in loads]
            lines.append(_line(sequences, rule, found, fixed))
    return lines


def simulated_trace(load: Load, scenario: Scenario, rules: Sequence[str]) -> list[Line]:
    """Every rule on a recorded load, for a scenario of its block length; the concurrency is the mean of its steps. Raises ScenarioRefused
    for an unknown rule."""
    _check_rules(rules)
    table, sequences = recorded_table(load, scenario), fmean(len(a) for a in load.acceptance)
    fixed = [replayed(load, scenario, table, "fixed")]
    return [_line(sequences, rule, [replayed(load, scenario, table, rule)], fixed) for rule in rules]


def _check_rules(rules: Sequence[str]) -> None:
    for rule in rules:
        if rule not in RULES:
            raise ScenarioRefused("rule", rule, ", ".join(RULES))


def _line(sequences: float, rule: str, found: Sequence[Outcome], fixed: Sequence[Outcome]) -> Line:
    gains = [100 * (a.tokens_per_s / b.tokens_per_s - 1) for a, b in zip(found, fixed, strict=True)]
    error = stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0
    return Line(sequences, rule, fmean(o.accepted for o in found), fmean(o.verified for o in found),
                fmean(o.tokens_per_s for o in found), fmean(gains), error)


# -- published figures


@dataclass(frozen=True)
class Target:
    """A published figure and what the simulation gives: the rule and concurrency it is read at, and the accepted interval."""

    what: str
    rule: str
    published: str
    low: float
    high: float
    found: float

    @property
    def is_met(self) -> bool:
        return self.low <= self.found <= self.high


def published_targets(lines: Sequence[Line], sequences: int = 60) -> list[Target]:
    """The five published figures at `sequences` a rank, for rules fixed and peer; nothing if they were not simulated."""
    at = {line.rule: line for line in lines if line.sequences == sequences}
    if not {"fixed", "peer"} <= at.keys():
        return []
    fixed, peer = at["fixed"], at["peer"]
    return [
        Target("drafts verified, fixed", "fixed", "5.00", 5.0, 5.0, fixed.verified),
        Target("drafts verified, planned", "peer", "3.2 to 4.4", 3.2, 4.4, peer.verified),
        Target("accepted length, fixed", "fixed", "3.29", 3.29 * 0.97, 3.29 * 1.03, fixed.accepted),
        Target("accepted length, planned", "peer", "3.20", 3.20 * 0.97, 3.20 * 1.03, peer.accepted),
        Target("gain, percent", "peer", "4 to 7", 4.0, 7.0, peer.gain_percent),
    ]


def small_batch_target(lines: Sequence[Line], below: int = 16) -> list[Target]:
    """The least gain of our rule below 16 sequences: no loss beyond three standard errors; nothing if it was not simulated there."""
    small = [line for line in lines if line.rule == "ours" and line.sequences < below]
    if not small:
        return []
    worst = min(small, key=lambda line: line.gain_percent)
    return [Target(f"least gain of ours below {below}, percent", "ours", "no loss", -3 * worst.standard_error - 0.01, 100.0, worst.gain_percent)]


# -- reports


def gain_plot(lines: Sequence[Line]) -> str:
    """Gain over verifying everything against concurrency, a line for each rule, with standard errors: an SVG document."""
    rules = dict.fromkeys(line.rule for line in lines)
    series = [Series(rule, tuple((x.sequences, x.gain_percent, x.standard_error) for x in lines if x.rule == rule)) for rule in rules]
    return line_plot("Throughput against verifying every draft", "concurrent sequences", "gain, percent", series)


def as_data(scenario: Scenario, known: dict[str, float], lines: Sequence[Line], targets: Sequence[Target],
            trace: Path | None) -> dict[str, Any]:
    """All of a simulation as one JSON object."""
    return {
        "trace": None if trace is None else str(trace),
        "scenario": asdict(scenario),
        **{name: None if value != value else value for name, value in known.items()},
        "rules": {name: what for name, (what, _) in RULES.items() if any(line.rule == name for line in lines)},
        "lines": [asdict(line) for line in lines],
        "targets": [{**asdict(target), "is_met": target.is_met} for target in targets],
    }
