"""What an engine knows of its drafts and decides with it: how many to verify in a step, how many to draft next, who need not draft.

The one place of the scheduler that remembers planning: the planner's memory, the calibration of confidences, what steps took beyond the table.
What step N verifies rests on drafts of steps up to N - 2 (the information barrier), whether results came sooner or not. docs/planning.md.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tapeout.runtime import cost
from tapeout.runtime.calibration import Calibrator, calibration_error, mapped, temperatures
from tapeout.runtime.columns import Columns
from tapeout.runtime.errors import OptionRefused
from tapeout.runtime.planner import Memory, Plan, Reason, Rules, assumed_rates, compat, survival, worth_drafting
from tapeout.runtime.planner import plan as planned

Floats = NDArray[np.float64]
Int64 = NDArray[np.int64]
OUR_RULES = Rules()
LAG = 2  # steps
WARM_UP = 32  # steps that verify everything before planning begins: until then nobody knows what confidences mean
EXPLORED = 64  # steps at most between two that verify all there is: what is never verified can teach nothing
ACCEPTED_FADING = 0.9  # of a sequence's mean of accepted drafts, each step that verified one


@dataclass(frozen=True)
class DraftOptions:
    """`positions`: drafts of a block, 0 for none. `plan`: "all", or "compat" or "ours" with measured `times` of decode steps.

    `rules` are those of "ours"; with `rules.draft_ms` the length of blocks is a decision too. `block_ms`: the time of a block, a fixed part and one
    for each sequence; where given, whether to draft at all is a decision, and sequences whose blocks do not earn their time stop drafting.
    `is_calibrating`: confidences are set right by what came of them.
    """

    positions: int = 0
    plan: str = "all"
    times: cost.DecodeTable | None = None
    rules: Rules = OUR_RULES
    block_ms: tuple[float, float] | None = None
    is_calibrating: bool = True

    def __post_init__(self) -> None:
        if self.plan not in ("all", "compat", "ours"):
            raise OptionRefused("DraftOptions.plan", self.plan, "all, compat or ours")


class Drafting:
    """Plans verification and drafting step by step, and learns from results. `last` is the newest plan, `reasons` counts why plans were made.

    `records`, if it is a list, gets what `sim.acceptance.recorded_load` reads: drafts of each step with their confidences, its rows and time.
    """

    def __init__(self, options: DraftOptions) -> None:
        self.options = options
        self.last: Plan | None = None
        self.reasons: Counter[Reason] = Counter()
        self.records: list[dict[str, object]] | None = None
        self.calibrator = Calibrator(options.positions)
        self.planned_ms = self.measured_ms = 0.0
        self._memory = Memory()
        self._fit, self._slope = cost.new_decode_fit(), cost.RowSlope()
        self._table = options.times
        self._times = np.zeros(0)
        self._forecasts: dict[int, float] = {}  # of steps in flight, ms
        self._since_all = 0  # steps since one that verified all there was

    # -- deciding

    def total(self, columns: Columns, slots: Int64, most: int, step: int) -> int | None:
        """How many drafts `step` verifies, at most `most`; None verifies all."""
        options, table = self.options, self._table
        if options.plan == "all" or table is None or not options.positions or not len(slots):
            return None
        if self._is_warming_up:
            self._decide(Plan(1 + columns.drafted[slots], options.positions, Reason.EXPLORING, float(len(slots)), 0.0))
            return None
        # A rate counts if its step lies LAG back: synchronous driving knows newer ones and must not use them.
        old = np.where(columns.rated[0, slots] <= step - LAG, 0, 1)
        drafted = columns.drafted[slots]
        budget = assumed_rates(columns.rates[old, slots], columns.rated[old, slots] >= 0, drafted > 0)
        slope = self._slope.value if options.plan == "compat" else 0.0
        context = float(columns.length[slots].mean())
        self._times = cost.step_times(table, len(slots), len(slots) * options.positions, context=context, row_slope=slope)
        if options.plan == "compat":
            found = compat(budget, budget, self._times)
        else:
            found, self._memory = planned(self._memory, self._rules(len(slots)), budget, budget[:, : int(drafted.max())], self._times)
        total = max(0, min(most, found.rows - len(slots)))
        self._since_all = 0 if total >= most > 0 else self._since_all + 1
        if options.plan == "ours" and options.is_calibrating and most and self._since_all > EXPLORED:
            self._since_all = 0
            self._decide(replace(found, widths=1 + drafted, reason=Reason.EXPLORING))
            return None
        self._forecasts[step] = found.expected_ms
        self._decide(found)
        return total

    def _decide(self, found: Plan) -> None:
        self.last = found
        self.reasons[found.reason] += 1

    @property
    def _is_warming_up(self) -> bool:
        return self.options.plan == "ours" and self.options.is_calibrating and self.calibrator.told < WARM_UP

    def _rules(self, sequences: int) -> Rules:
        """The rules with what a block costs for so many sequences."""
        rules, block = self.options.rules, self.options.block_ms
        if block is None or rules.draft_ms:
            return rules
        return replace(rules, draft_ms=((0, 0.0), (self.options.positions, block[0] + block[1] * sequences)))

    def lengths(self, columns: Columns, slots: Int64) -> Int64:
        """How many tokens to draft behind each of these sequences at the end of a step [sequences]."""
        options, length = self.options, self.options.positions
        if options.plan == "ours" and self.last is not None:
            length = min(length, self.last.draft_length)
        lengths = np.where(columns.most_drafts[slots] > 0, length, 0)
        if options.block_ms is not None and len(self._times) > 1 and np.isfinite(self._times[-1]):
            row_ms = float(self._times[-1] - self._times[0]) / (len(self._times) - 1)
            pays = worth_drafting(columns.accepted[slots], columns.undrafted[slots], draft_ms=options.block_ms[1], row_ms=row_ms)
            lengths = np.where(pays, lengths, 0)
        columns.drafted[slots] = lengths
        columns.undrafted[slots] = np.where(lengths > 0, 0, columns.undrafted[slots] + 1)
        return lengths

    def map(self, step: int) -> Floats | None:
        """What confidences are mapped through when `step` splits its drafts [positions, bins]; None: nothing."""
        return self.calibrator.map(step - LAG)

    # -- learning

    def judged(self, columns: Columns, step: int, slots: Int64, widths: Int64, accepted: Int64) -> None:
        """Takes what came of the drafts that `step` verified: rows and drafts accepted of each sequence."""
        if not self.options.positions or not len(slots):
            return
        had = columns.has_block[slots]
        # A block of which nothing was verified was not worth its time either.
        columns.accepted[slots[had]] = ACCEPTED_FADING * columns.accepted[slots[had]] + (1 - ACCEPTED_FADING) * accepted[had]
        told = had & (widths > 1)
        if self.options.is_calibrating and told.any():
            self.calibrator.observe(step, columns.confidences[slots[told]], widths[told], accepted[told])

    def rated(self, columns: Columns, step: int, slots: Int64, confidences: Floats, lengths: Int64 | None) -> None:
        """Remembers how sure the drafts are that `step` made behind these sequences; those of the step before move back."""
        if not self.options.positions or not len(slots):
            return
        monotone = self.calibrator.map(step)
        claimed = confidences if monotone is None else mapped(confidences, monotone)
        columns.has_block[slots] = True if lengths is None else lengths > 0
        if lengths is not None:
            claimed = np.where(np.arange(claimed.shape[1]) < lengths[:, None], claimed, 0.0)
        columns.rates[1, slots], columns.rated[1, slots] = columns.rates[0, slots], columns.rated[0, slots]
        columns.rates[0, slots], columns.rated[0, slots] = survival(claimed), step
        columns.confidences[slots] = confidences

    def record(self, sequences: Sequence[int], confidences: Floats, rows: int, ms: float) -> None:
        """Keeps a step for the simulator, if that is wanted: sequences by number, confidences [sequences, positions], rows verified."""
        if self.records is not None and len(sequences):
            line: dict[str, object] = {"sequences": list(sequences), "confidences": np.round(confidences, 6).tolist(), "rows": rows}
            self.records.append(line | ({"ms": ms} if ms > 0 else {}))

    def took(self, step: int, rows: int, context: float, ms: float, *, is_decode: bool) -> None:
        """Takes the time of a step; only those of decode rows alone say anything of the table."""
        forecast = self._forecasts.pop(step, None)
        table = self.options.times
        if table is None or not is_decode or not rows or ms <= 0:
            return
        if forecast is not None and np.isfinite(forecast):
            self.planned_ms += forecast
            self.measured_ms += ms
        if self.options.plan == "compat":
            expected = cost.step_times(table, rows, 0, context=context)
            if expected.size and np.isfinite(expected[0]):
                self._slope.observe(int(table.rows[table.size_index[rows]]) if table.is_padded else rows, float(expected[0]), ms)
        else:
            self._fit = cost.decode_observed(self._fit, table, rows, context, ms)
            self._table = cost.corrected(table, self._fit)

    def forget(self, step: int) -> None:
        """A step was lost: nothing is learned from it."""
        self._forecasts.pop(step, None)

    def gauges(self) -> dict[str, float]:
        """Calibration by position, how planned and measured times compare, and plans by reason; for `Statistics`."""
        if not self.options.positions:
            return {}
        outcomes = self.calibrator.outcomes
        found = {f"calibration_error_{j + 1}": float(error) for j, error in enumerate(calibration_error(outcomes))}
        found |= {f"calibration_temperature_{j + 1}": float(t) for j, t in enumerate(temperatures(outcomes))}
        found["planned_ms"], found["planned_steps_ms"] = self.planned_ms, self.measured_ms
        found |= {f"plans_{reason.name.lower()}": float(count) for reason, count in self.reasons.items()}
        return found
