"""What the scheduler would do under a load: arrivals on the null device, with waits, idle slots, prefix hits and preemptions.

Arrivals are drawn, or recorded as JSON lines. Steps take scripted time (fixed, a decode row, a prompt row), so a run is a function of scenario
and seed. Tokens are checked nowhere here: tests do that. docs/runtime.md, 3.6.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tapeout.runtime.blocks import BlockPool
from tapeout.runtime.device.null import Clock, NullDevice, NullModel
from tapeout.runtime.driver import Direct, Driver
from tapeout.runtime.params import SamplingParams
from tapeout.runtime.prefix import CacheIdentity, PrefixIndex
from tapeout.runtime.replay import Mode, ReplayRules
from tapeout.runtime.request import Request
from tapeout.runtime.scheduler import Scheduler, SchedulerOptions
from tapeout.runtime.sim.errors import MOST_MS, ScenarioRefused

VOCABULARY = 129_280
MOST, LEAST_RATE = 2**31 - 1, 1e-6  # of a count; of arrivals a second: one in eleven days


@dataclass(frozen=True)
class Arrival:
    """A request: when it comes, how long its prompt and answer are, and how many first tokens it shares with others of its group."""

    at_ms: float
    prompt_tokens: int
    output_tokens: int
    group: int = 0
    shared_tokens: int = 0


@dataclass(frozen=True)
class ServingScenario:
    """An engine and its times. `keep` rows of a prompt run through the decoder half; `in_flight` steps are planned ahead."""

    slots: int = 64
    blocks: int = 4096
    block_tokens: int = 128
    max_context: int = 32_768
    max_rows: int = 4096
    keep: int = 140
    drafts: int = 0
    accepted: float = 0.7
    in_flight: int = 1
    is_caching: bool = True
    fixed_ms: float = 8.0
    decode_row_ms: float = 0.02
    prompt_row_ms: float = 0.02

    def __post_init__(self) -> None:
        for name in ("slots", "blocks", "block_tokens", "max_context", "max_rows"):
            if getattr(self, name) < (2 if name == "blocks" else 1):
                raise ScenarioRefused(f"scenario, {name}", getattr(self, name), "a larger number")


def drawn_arrivals(count: int, per_second: float, seed: int, *, prompt_tokens: int = 1024, output_tokens: int = 200, groups: int = 10,
                   shared: float = 0.5) -> list[Arrival]:  # fmt: skip
    """Poisson arrivals with exponential lengths; the first part of a prompt is its group's. Raises ScenarioRefused."""
    if count < 1 or not per_second >= LEAST_RATE or groups < 1 or not 0 <= shared < 1:
        found = (count, per_second, groups, shared)
        raise ScenarioRefused("arrivals: count, rate, groups, share", found, f"at least 1, {LEAST_RATE:g}, 1 and 0, the share below 1")
    random = np.random.default_rng(seed)
    times = np.cumsum(random.exponential(1e3 / per_second, count))
    prompts = 1 + random.exponential(prompt_tokens, count).astype(int)
    outputs = 1 + random.exponential(output_tokens, count).astype(int)
    group = random.integers(0, groups, count)
    return [Arrival(float(t), int(p), int(o), int(g), int(p * shared)) for t, p, o, g in zip(times, prompts, outputs, group, strict=True)]


def recorded_arrivals(file: Path) -> list[Arrival]:
    """Arrivals from JSON lines with the fields of `Arrival`, in any order. Raises ScenarioRefused, naming file and line."""
    found = []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ScenarioRefused(str(file), reason, "a text file of JSON lines") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            found.append(_arrival(line, f"{file}:{number}"))
    if not found:
        raise ScenarioRefused(str(file), "no line", "at least one arrival")
    return sorted(found, key=lambda arrival: arrival.at_ms)


def _arrival(line: str, where: str) -> Arrival:
    expected = "an object with at_ms, prompt_tokens, output_tokens, optionally group and shared_tokens"
    try:
        arrival = Arrival(**json.loads(line))
    except (ValueError, TypeError, RecursionError):
        raise ScenarioRefused(where, line[:60], expected) from None
    numbers = (arrival.prompt_tokens, arrival.output_tokens, arrival.group, arrival.shared_tokens)
    if type(arrival.at_ms) not in (int, float) or not 0 <= arrival.at_ms <= MOST_MS:
        raise ScenarioRefused(f"{where}, at_ms", line[:60], f"milliseconds from 0 to {MOST_MS:.0f}")
    if not all(type(number) is int and 0 <= number <= MOST for number in numbers):
        raise ScenarioRefused(where, line[:60], f"whole numbers from 0 to {MOST}")
    if not arrival.shared_tokens <= arrival.prompt_tokens or not arrival.prompt_tokens:
        raise ScenarioRefused(where, line[:60], "prompts of at least 1 token, no more shared than that")
    return arrival


def simulated_serving(arrivals: Sequence[Arrival], scenario: ServingScenario) -> dict[str, Any]:
    """Runs a load to its end and returns what the engine's statistics say of it."""
    clock, scheduler, driver = _engine(scenario)
    waiting = sorted(arrivals, key=lambda arrival: -arrival.at_ms)
    number = 0
    while waiting or driver.has_work:
        if not driver.has_work:
            clock.now_s = max(clock.now_s, waiting[-1].at_ms / 1e3)
        while waiting and waiting[-1].at_ms / 1e3 <= clock.now_s:
            scheduler.roster.add(_request(waiting.pop(), number, scheduler.options.max_context))
            number += 1
        driver.step()
    return _summary(scheduler, scenario, clock.now_s, arrivals)


def _engine(scenario: ServingScenario) -> tuple[Clock, Scheduler, Driver]:
    clock = Clock()
    table = np.zeros((scenario.slots, -(-scenario.max_context // scenario.block_tokens)), np.int32)
    pool = BlockPool(scenario.blocks, scenario.block_tokens, table)
    window = min(128, scenario.block_tokens)
    rules = ReplayRules(Mode.COMPACT, max(scenario.keep, window + scenario.drafts + 1), window=window, backtrack=scenario.drafts + 1,
                        block=scenario.block_tokens)  # fmt: skip
    index = PrefixIndex(pool, rules, CacheIdentity("simulated")) if scenario.is_caching else None
    context = min(scenario.max_context, (scenario.blocks - 1) * scenario.block_tokens)
    options = SchedulerOptions(scenario.max_rows, context, drafts=scenario.drafts, alignment=min(scenario.block_tokens, scenario.max_rows),
                               copy_slack=rules.backtrack)  # fmt: skip
    scheduler = Scheduler(options, pool, scenario.slots, index, clock=clock)

    def ms(decode: int, prompt: int) -> float:
        return scenario.fixed_ms + scenario.decode_row_ms * decode + scenario.prompt_row_ms * prompt

    model = NullModel(VOCABULARY, scenario.drafts, scenario.accepted, ms)
    device = NullDevice(model, table, scenario.blocks, scenario.block_tokens, None, clock)
    return clock, scheduler, Driver(scheduler, Direct(device), scenario.in_flight)


def _request(arrival: Arrival, number: int, most: int) -> Request:
    """A prompt whose first tokens are those of its group, and whose rest is its own; no longer than shows that it exceeds `most` tokens."""
    place = np.arange(min(arrival.prompt_tokens, most + 1))
    tokens = np.where(place < arrival.shared_tokens, arrival.group * 7919 + place, number * 104_729 + 3 * place + 1) % VOCABULARY
    params = SamplingParams(temperature=0, max_tokens=arrival.output_tokens, ignore_eos=True)
    return Request(f"r{number}", tuple(tokens.tolist()), params, number)


def _summary(scheduler: Scheduler, scenario: ServingScenario, seconds: float, arrivals: Sequence[Arrival]) -> dict[str, Any]:
    line = scheduler.statistics.line()
    prompts = sum(arrival.prompt_tokens for arrival in arrivals)
    cache = {} if scheduler.prefix is None else {outcome.name.lower(): n for outcome, n in sorted(scheduler.prefix.outcomes.items(), key=str)}
    return {
        "scenario": asdict(scenario),
        "requests": len(arrivals),
        "seconds": seconds,
        "output_tokens_per_s": scheduler.statistics.counts.output_tokens / seconds if seconds else 0.0,
        "prompt_tokens": prompts,
        "hit_share": scheduler.statistics.counts.hit_tokens / prompts,
        "lookups": cache,
        "evictions": scheduler.pool.evictions,
        **line,
    }
