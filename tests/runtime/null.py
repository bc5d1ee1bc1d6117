"""A scheduler over the null device, ready to be driven, and what tests ask of it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tapeout.runtime.blocks import BlockPool
from tapeout.runtime.device.null import Clock, NullDevice, NullModel, Prepared, null_answer
from tapeout.runtime.disk import DiskTier
from tapeout.runtime.driver import Background, Direct, Driver
from tapeout.runtime.params import SamplingParams
from tapeout.runtime.prefix import CacheIdentity, Policy, PrefixIndex
from tapeout.runtime.replay import Mode, ReplayRules
from tapeout.runtime.request import Event, FinishedEvent, ImageSpan, Request, Status
from tapeout.runtime.scheduler import Scheduler, SchedulerOptions
from tapeout.runtime.state import SnapshotStore
from tapeout.runtime.step import StepResult
from tapeout.runtime.trace import Recorder

EOS = 1
VOCABULARY = 97


@dataclass
class Serving:
    """One engine without a model."""

    scheduler: Scheduler
    device: NullDevice
    driver: Driver
    clock: Clock
    cache: PrefixIndex | None

    def submit(self, name: str, prompt: Sequence[int], *, images: Sequence[ImageSpan] = (), tenant: str = "", is_ready: bool = True,
               **params: Any) -> None:  # fmt: skip
        own = SamplingParams(**{"temperature": 0, **params})
        request = Request(name, tuple(prompt), own, own.seed or 0, 0, tuple(images), tenant)
        self.scheduler.roster.add(request, Status.WAITING if is_ready else Status.PREPARING)

    def run(self, limit: int = 1_000_000) -> list[Event]:
        """Steps until nothing is left."""
        events: list[Event] = []
        for _ in range(limit):
            if not self.driver.has_work:
                return events
            events += self.driver.step()
        raise RuntimeError(f"still at work after {limit} steps")

    def tokens(self, name: str, branch: int = 0) -> list[int]:
        found = self.scheduler.roster.branches(name)[branch]
        return found.tokens[len(found.request.prompt) :]

    def expected(self, name: str, branch: int = 0) -> list[int]:
        """What the model alone gives for a request; stop tokens and eos included, stop strings not."""
        request = self.scheduler.roster.branches(name)[branch].request
        params = request.params
        eos = None if params.ignore_eos else EOS
        answer = null_answer(request.prompt, params.max_tokens, temperature=params.temperature, seed=request.seed, eos_id=eos,
                             vocabulary=self.device.model.vocabulary, max_context=self.scheduler.options.max_context)  # fmt: skip
        stops = [i for i, token in enumerate(answer) if token in params.stop_token_ids]
        return answer[: stops[0] + 1] if stops else answer

    def assert_empty(self) -> None:
        """Everything is back: blocks, slots, promises."""
        scheduler = self.scheduler
        assert scheduler.roster.faults() == []
        assert scheduler.pool.free_blocks == scheduler.pool.unpromised_blocks == scheduler.pool.count - 1
        assert len(scheduler.roster.slots) == scheduler.roster.slots.count
        assert not scheduler.has_work and not scheduler.roster.waiting


def serving(
    *, slots: int = 8, blocks: int = 64, block_tokens: int = 8, max_context: int = 200, max_rows: int = 64, rules: ReplayRules | None = None,
    caching: bool = True, drafts: int = 0, depth: int = 0, policy: Policy = Policy.PRODUCTION, snapshot_bytes: int = 0,
    disk: DiskTier | None = None, model: dict[str, Any] | None = None, background: bool = False, recorder: Recorder | None = None,
    **options: Any,
) -> Serving:  # fmt: skip
    """A small engine: window 8, backtracking `drafts` + 1, compact replay of window + backtracking rows."""
    clock = Clock()
    table = np.zeros((slots, -(-max_context // block_tokens)), np.int32)
    pool = BlockPool(blocks, block_tokens, table)
    rules = rules or ReplayRules(Mode.COMPACT, 8 + drafts + 1, window=8, backtrack=drafts + 1, block=block_tokens)
    store = SnapshotStore(snapshot_bytes, 600.0, clock, disk) if snapshot_bytes else None
    index = PrefixIndex(pool, rules, CacheIdentity("null"), policy, store, disk) if caching else None
    chosen: dict[str, Any] = {
        "max_rows": max_rows, "max_context": min(max_context, (blocks - 1) * block_tokens), "drafts": drafts, "alignment": block_tokens,
        "copy_slack": rules.backtrack,
    }  # fmt: skip
    scheduler = Scheduler(SchedulerOptions(**chosen | options), pool, slots, index, eos_id=EOS, clock=clock, recorder=recorder)
    device = NullDevice(NullModel(**{"vocabulary": VOCABULARY, "drafts": drafts, **(model or {})}), table, blocks, block_tokens, rules, clock)
    runner = Background(device) if background else Direct(device)
    return Serving(scheduler, device, Driver(scheduler, runner, depth), clock, index)


class Dying(NullDevice):
    """Ends its thread in step 3, without a word: of the requests in it nothing more is known."""

    is_dead = False

    def execute(self, prepared: Prepared) -> StepResult:
        if self.steps == 3 and not self.is_dead:
            self.is_dead = True
            step = prepared.step
            self._broken |= {*zip(step.slots.tolist(), step.epochs.tolist(), strict=True), *((p.slot, p.epoch) for p in step.pieces)}
            raise SystemExit
        return super().execute(prepared)


def prompt(length: int, salt: int = 0) -> list[int]:
    """Tokens that differ with place and salt."""
    return [(7 * i + i * i + 13 * salt + 2) % VOCABULARY for i in range(length)]


def terminal(events: Iterable[Event]) -> list[str]:
    """Ids of requests that were reported finished, one for each report."""
    return [event.request_id for event in events if isinstance(event, FinishedEvent)]


def forget_names(pool: BlockPool) -> None:
    """Takes every name back, as if all cached blocks had been evicted."""
    for block in list(pool._names):
        pool.withdraw(block)
