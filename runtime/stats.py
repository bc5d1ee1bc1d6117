"""Statistics of an engine: counters that equal the event log, histograms, one line of JSON, and Prometheus text.

Nothing here decides anything. Times are milliseconds of the scheduler's clock. docs/runtime.md, 11.3.
"""

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import isfinite

from tapeout.runtime.request import Sequence as Branch
from tapeout.runtime.step import Step, StepResult

MS_BOUNDS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 30_000, 60_000)
COUNT_BOUNDS = (0, 1, 2, 3, 4, 5)
TOKEN_BOUNDS = (0, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072, 1_048_576)


class Histogram:
    """Counts of values by upper bound, their sum and their largest."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = self.largest = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times
        self.largest = max(self.largest, value)

    @property
    def total(self) -> int:
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """The bound below which a share of the values lies; the largest value beyond the last bound, 0 without values."""
        left = share * self.total
        for bound, count in zip((*self.bounds, self.largest), self.counts, strict=True):
            left -= count
            if left <= 0 and count:
                return min(bound, self.largest)
        return 0.0


@dataclass
class Counts:
    """What happened since the start. `wasted_rows`: rows of sequences that had ended or been preempted before the step was committed."""

    submitted: int = 0
    requests_finished: Counter[str] = field(default_factory=Counter)
    output_tokens: int = 0
    steps: int = 0
    decode_steps: int = 0
    prompt_steps: int = 0
    mixed_steps: int = 0
    prompt_rows: int = 0
    decoder_prompt_rows: int = 0
    decode_rows: int = 0
    drafts_verified: int = 0
    drafts_accepted: int = 0
    wasted_rows: int = 0
    preemptions: int = 0
    recomputed_rows: int = 0
    hit_tokens: int = 0
    replayed_rows: int = 0
    snapshots_saved: int = 0
    snapshots_restored: int = 0
    blocks_loaded: int = 0
    lost_steps: int = 0


@dataclass
class Statistics:
    """Counters and histograms. `busy_ms` is the time of steps by kind; `gauges` what holds at the moment; `step_ms_by` splits step times
    by rows and mean context of decode rows, each rounded up to a power of two; `verified_at`, `accepted_at` count drafts by their place in the
    block."""

    counts: Counts = field(default_factory=Counts)
    queue_ms: Histogram = field(default_factory=lambda: Histogram(MS_BOUNDS))
    ttft_ms: Histogram = field(default_factory=lambda: Histogram(MS_BOUNDS))
    between_tokens_ms: Histogram = field(default_factory=lambda: Histogram(MS_BOUNDS))
    total_ms: Histogram = field(default_factory=lambda: Histogram(MS_BOUNDS))
    step_ms: Histogram = field(default_factory=lambda: Histogram(MS_BOUNDS))
    accepted: Histogram = field(default_factory=lambda: Histogram(COUNT_BOUNDS))
    verified: Histogram = field(default_factory=lambda: Histogram(COUNT_BOUNDS))
    hit_tokens: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS))
    busy_ms: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    step_ms_by: dict[tuple[int, int], Histogram] = field(default_factory=dict)
    verified_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    idle_slot_steps: int = 0
    slot_steps: int = 0

    def observe_step(self, step: Step, result: StepResult, slots: int, context: float = 0.0) -> None:
        """Counts the rows of a step, committed or wasted; a step without rows only keeps windows."""
        counts, decoding = self.counts, len(step.slots)
        if not decoding and not step.pieces:
            return
        counts.steps += 1
        counts.decode_steps += bool(decoding) and not step.pieces
        counts.prompt_steps += bool(step.pieces) and not decoding
        counts.mixed_steps += bool(step.pieces) and bool(decoding)
        counts.prompt_rows += step.prompt_rows
        counts.decoder_prompt_rows += step.decoder_prompt_rows
        counts.decode_rows += int(result.widths.sum())
        self.slot_steps += slots
        self.idle_slot_steps += slots - decoding - len(step.pieces)
        self.step_ms.observe(result.ms)
        sizes = _rounded_up(step.prompt_rows + int(result.widths.sum())), _rounded_up(int(context))
        if sizes not in self.step_ms_by:
            self.step_ms_by[sizes] = Histogram(MS_BOUNDS)
        self.step_ms_by[sizes].observe(result.ms)
        kind = "mixed" if step.pieces and decoding else "prompt" if step.pieces else "decode"
        self.busy_ms[kind] = self.busy_ms.get(kind, 0.0) + result.ms

    def judged(self, verified: Sequence[int], accepted: Sequence[int]) -> None:
        """Counts drafts by place: how many sequences verified and accepted 0, 1, ... of them [drafts + 1 each]."""
        places = max(len(verified), len(accepted)) - 1
        for counts, histogram in ((self.verified_at, verified), (self.accepted_at, accepted)):
            counts += [0] * (places - len(counts))
            for place in range(places):
                counts[place] += sum(histogram[place + 1 :])

    def finished(self, branch: Branch) -> None:
        """Observes a branch that has ended."""
        if branch.finished_s is not None:
            self.total_ms.observe((branch.finished_s - branch.submitted_s) * 1e3)
        if branch.started_s is not None:
            self.hit_tokens.observe(branch.hit_tokens)

    def line(self, **more: float) -> dict[str, object]:
        """One flat object: counters, rates, quantiles; `more` are gauges of the moment."""
        counts = self.counts
        sequences = self.verified.total
        found: dict[str, object] = {f.name: getattr(counts, f.name) for f in fields(counts) if f.name != "requests_finished"}
        found["requests_finished"] = dict(sorted(counts.requests_finished.items()))
        found |= {"verified_at": list(self.verified_at), "accepted_at": list(self.accepted_at)}
        found["acceptance"] = counts.drafts_accepted / counts.drafts_verified if counts.drafts_verified else 0.0
        found["verified_mean"] = counts.drafts_verified / sequences if sequences else 0.0
        found["idle_slot_share"] = self.idle_slot_steps / self.slot_steps if self.slot_steps else 0.0
        found["busy_ms"] = dict(sorted(self.busy_ms.items()))
        for name, histogram in self.histograms().items():
            found |= {f"{name}_p50": histogram.quantile(0.5), f"{name}_p99": histogram.quantile(0.99), f"{name}_max": histogram.largest}
        found["step_ms_by"] = [
            {"rows": rows, "context": context, "steps": histogram.total, "p50": histogram.quantile(0.5)}
            for (rows, context), histogram in sorted(self.step_ms_by.items())
        ]
        return found | self.gauges | more

    def json_line(self, **more: float) -> str:
        """`line` as one line of JSON with sorted keys."""
        return json.dumps(self.line(**more), sort_keys=True)

    def histograms(self) -> Mapping[str, Histogram]:
        """All histograms by name."""
        return {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Histogram)}

    def prometheus(self, **more: float) -> str:
        """The text exposition format: counters, gauges, histograms; names start with tapeout_."""
        lines = []
        for f in fields(self.counts):
            if f.name != "requests_finished":
                lines += [f"# TYPE tapeout_{f.name}_total counter", f"tapeout_{f.name}_total {getattr(self.counts, f.name)}"]
        lines.append("# TYPE tapeout_requests_finished_total counter")
        finished = sorted(self.counts.requests_finished.items())
        lines += [f'tapeout_requests_finished_total{{reason="{reason}"}} {count}' for reason, count in finished]
        for name in ("verified_at", "accepted_at"):
            lines.append(f"# TYPE tapeout_drafts_{name}_total counter")
            lines += [f'tapeout_drafts_{name}_total{{place="{place}"}} {count}' for place, count in enumerate(getattr(self, name), 1)]
        for name, value in sorted((self.gauges | more).items()):
            lines += [f"# TYPE tapeout_{name} gauge", f"tapeout_{name} {_exact(value)}"]
        for name, histogram in self.histograms().items():
            lines += [f"# TYPE tapeout_{name} histogram", *_exposed(f"tapeout_{name}", histogram)]
        lines.append("# TYPE tapeout_step_ms_by histogram")
        for (rows, context), histogram in sorted(self.step_ms_by.items()):
            lines += _exposed("tapeout_step_ms_by", histogram, f'rows="{rows}",context="{context}",')
        return "\n".join(lines) + "\n"


def _exposed(name: str, histogram: Histogram, labels: str = "") -> list[str]:
    lines, below = [], 0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
        below += count
        lines.append(f'{name}_bucket{{{labels}le="{_exact(bound)}"}} {below}')
    own = f"{{{labels[:-1]}}}" if labels else ""
    last = f'{name}_bucket{{{labels}le="+Inf"}} {histogram.total}'
    return [*lines, last, f"{name}_sum{own} {_exact(histogram.sum)}", f"{name}_count{own} {histogram.total}"]


def _exact(value: float) -> str:
    """A number with all its digits: small steps of large sums are what a rate is made of."""
    return str(int(value)) if isfinite(value) and value == int(value) else repr(float(value))


def _rounded_up(size: int) -> int:
    return 1 << max(0, size - 1).bit_length() if size > 0 else 0
