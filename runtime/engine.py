"""The engine: continuous batching of requests over one artifact, synchronously or with one step in flight.

It checks what callers give, and ties a scheduler, which knows requests and memory, to the artifact's programs on a device, which know
neither. Events, results and statistics are the scheduler's.
"""

import secrets
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from itertools import count, pairwise
from time import perf_counter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tapeout.runtime.artifact import HOST_INPUTS, Artifact
from tapeout.runtime.blocks import BlockPool
from tapeout.runtime.cost import DecodeTable
from tapeout.runtime.device import Queueing, open_device
from tapeout.runtime.driver import Background, Direct, Driver, Queued
from tapeout.runtime.errors import (
    BatchRefused,
    OptionRefused,
    ParameterRange,
    ParameterUnsupported,
    PromptRefused,
    RequestsMismatched,
    SlotBusy,
    shown,
)
from tapeout.runtime.measure import step_times
from tapeout.runtime.params import SAMPLER_FIELDS, SamplingParams, unmet
from tapeout.runtime.prefix import PrefixIndex
from tapeout.runtime.program import Draw, LoadedPrograms, StepRows
from tapeout.runtime.replay import Mode, ReplayRules
from tapeout.runtime.request import Event, Request, RequestOutput, Status
from tapeout.runtime.reuse import CacheOptions, prefix_index, replay_rules
from tapeout.runtime.runner import LARGEST_TEMPERATURE, ProgramRunner
from tapeout.runtime.scheduler import Scheduler, SchedulerOptions
from tapeout.runtime.stats import Statistics
from tapeout.runtime.text import Detokenizer
from tapeout.runtime.trace import Recorder
from tapeout.runtime.weights import BoundWeights

CACHE_BUDGET_BYTES = 2 << 30  # of cache blocks, unless one full-length sequence needs more or the caller says otherwise
ABILITIES = frozenset(HOST_INPUTS["sample"]) & frozenset(SAMPLER_FIELDS)
"""Sampling fields beyond the plain ones that sample programs take from the host."""


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is set up. None leaves a choice to it: all processors, as many blocks as fit, prompts cut only by max_rows.

    `chunk_tokens` cuts prompts into pieces of that many rows, `step_ms` by predicted time; results depend on neither, nor on
    `asynchronous`, which plans a step while the device runs the one before (None: where the device has a queue, as GPUs do). `max_wait_ms`: a
    request that has waited so long goes first.
    `trace`: remember what happens, for `Engine.recorder`; `record_drafts`: the confidences of every step, for the planner's simulator.
    `simulated`: the simulator in place of an NPU.

    `drafts`: draft behind every token and verify what was drafted; `plan` says how much of it, "all", or "ours" or "compat" by `decode_times`,
    which are measured when the engine starts if they are not given.

    `cache`: prompts go on from what earlier ones have in common with them. `replay`: "exact" runs every row everywhere, "compact" only the last
    `keep` rows of a prompt through the decoder half, "mask" all rows with the windows that compact leaves.
    """

    workers: int | None = None
    cache_blocks: int | None = None
    chunk_tokens: int | None = None
    drafts: bool = False
    asynchronous: bool | None = None
    step_ms: float | None = None
    max_wait_ms: float = 10_000.0
    trace: bool = False
    simulated: bool = False
    plan: str = "all"
    decode_times: DecodeTable | None = None
    cache: CacheOptions | None = None
    replay: str = "exact"
    keep: int | None = None
    record_drafts: bool = False

    def __post_init__(self) -> None:
        for name, least in (("cache_blocks", 2), ("chunk_tokens", 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise OptionRefused(f"EngineOptions.{name}", repr(value), f"a whole number of at least {least}, or None")
        for name in ("drafts", "trace", "simulated", "record_drafts"):
            if type(getattr(self, name)) is not bool:
                raise OptionRefused(f"EngineOptions.{name}", repr(getattr(self, name)), "True or False")
        if self.asynchronous is not None and type(self.asynchronous) is not bool:
            raise OptionRefused("EngineOptions.asynchronous", repr(self.asynchronous), "True, False or None")
        for name, kind in (("cache", CacheOptions), ("decode_times", DecodeTable)):
            if not isinstance(getattr(self, name), kind | None):
                raise OptionRefused(f"EngineOptions.{name}", shown(getattr(self, name)), f"{kind.__name__}, or None")
        if self.record_drafts and not self.drafts:
            raise OptionRefused("EngineOptions.record_drafts", True, "False, as nothing is drafted (`drafts`, --spec)")
        if self.replay not in [mode.value for mode in Mode]:
            raise OptionRefused("EngineOptions.replay", repr(self.replay), "exact, mask or compact")
        if self.keep is not None and (type(self.keep) is not int or self.keep < 1):
            raise OptionRefused("EngineOptions.keep", repr(self.keep), "a whole number of at least 1, or None")
        if self.plan not in ("all", "ours", "compat"):
            raise OptionRefused("EngineOptions.plan", repr(self.plan), "all, ours or compat")
        for name in ("step_ms", "max_wait_ms"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
                raise OptionRefused(f"EngineOptions.{name}", repr(value), "a number of milliseconds above 0")


class Engine:
    """Requests in, events out. Not thread safe. `forward`, `draft` and `reset` run given rows without a request, for tests."""

    def __init__(self, artifact: Artifact, weights: BoundWeights, options: EngineOptions | None = None) -> None:
        self.artifact, self.options, self.weights_stamp = artifact, options or EngineOptions(), weights.stamp
        self.device = open_device(artifact, self.options.workers, simulated=self.options.simulated)
        try:
            self._set_up(artifact, weights)
        except BaseException:
            self.device.close()
            raise

    def _set_up(self, artifact: Artifact, weights: BoundWeights) -> None:
        """Memory, scheduler and driver, once the device is open."""
        limits = artifact.manifest.options
        blocks = self.options.cache_blocks or default_blocks(artifact)
        self.programs = LoadedPrograms(artifact, weights, self.device, blocks)
        if self.options.drafts and not self.programs.has_draft:
            raise OptionRefused("EngineOptions.drafts", True, "False: the artifact has no draft program")
        self.blocks = BlockPool(blocks, limits.block_tokens, np.zeros_like(_int32(self.programs, "block_table")))
        self.vocabulary = self.programs.vocabulary
        self.context = min(limits.max_context, (blocks - 1) * limits.block_tokens, self.blocks.tokens_per_slot)
        eos = artifact.manifest.model.config.get("eos_token_id")
        self.eos_id = eos if type(eos) is int else None
        self.image_token = artifact.manifest.model.config.get("image_token_id")
        self.recorder = Recorder() if self.options.trace else None
        rules = replay_rules(artifact, Mode(self.options.replay), self.options.keep)
        self.scheduler = Scheduler(self._scheduling(rules), self.blocks, limits.max_sequences, self._prefix(weights, rules), eos_id=self.eos_id,
                                   clock=perf_counter, recorder=self.recorder)  # fmt: skip
        self.scheduler.drafting.records = [] if self.options.record_drafts else None
        runner = ProgramRunner(self.programs, self.blocks.table, drafting=self.options.drafts, limit=self.context, rules=rules)
        queueing = isinstance(self.device, Queueing)
        ahead = queueing if self.options.asynchronous is None else self.options.asynchronous
        self._runs = (Queued(runner) if queueing else Background(runner)) if ahead else Direct(runner)
        self._driver = Driver(self.scheduler, self._runs, int(ahead))
        self._results = {name: self.programs.array(name) for name in ("sampled", "logprobs", "logits")}
        if self.programs.has_draft:
            self._results |= {name: self.programs.array(name) for name in ("drafts", "confidences")}
        self._numbers = count()
        self._lengths: dict[int, int] = {}  # tokens of slots that `forward` drives

    def _prefix(self, weights: BoundWeights, rules: ReplayRules) -> PrefixIndex | None:
        cache = self.options.cache
        if cache is None and rules.mode is Mode.EXACT:
            return None
        if cache is not None and not self.programs.states.is_readable:
            raise OptionRefused("EngineOptions.cache", "a device whose states the host cannot reach", "None, or a CPU or CUDA device")
        return prefix_index(self.artifact, weights, self.blocks, rules, cache, perf_counter)

    def _scheduling(self, rules: ReplayRules) -> SchedulerOptions:
        limits, own = self.artifact.manifest.options, self.options
        times, block_ms = own.decode_times, None
        if own.drafts and own.plan != "all" and times is None:
            times, block_ms = step_times(self.programs, limits.max_sequences, self.artifact.draft_block)
        return SchedulerOptions(
            max_rows=limits.max_rows, max_context=self.context, max_outputs=limits.max_outputs, chunk_tokens=own.chunk_tokens, alignment=1,
            step_ms=own.step_ms, max_wait_ms=own.max_wait_ms, drafts=self.artifact.draft_block if own.drafts else 0, plan=own.plan,
            decode_times=times, block_ms=block_ms, copy_slack=rules.backtrack - 1 if self.programs.states.is_readable else None,
        )  # fmt: skip

    @property
    def detokenizer(self) -> Detokenizer | None:
        """Gives fresh streams from tokens to text; stop strings need one."""
        return self.scheduler.roster.detokenizer

    @detokenizer.setter
    def detokenizer(self, detokenizer: Detokenizer | None) -> None:
        self.scheduler.roster.detokenizer = detokenizer

    @property
    def statistics(self) -> Statistics:
        return self.scheduler.statistics

    # -- requests

    def submit(self, prompt: Iterable[int], params: SamplingParams | None = None, request_id: str | None = None, *, tenant: str = "") -> str:
        """Queues a request and returns its id. A prompt that is too long ends as such. An unseeded request draws its own seed here.

        `tenant`: whose request it is; nothing cached of one tenant is used for another.

        Raises PromptRefused, RequestTaken, or ParameterUnsupported for what this engine cannot do.
        """
        params = params or SamplingParams()
        name = request_id if request_id is not None else f"request-{next(self._numbers)}"
        tokens = self.checked_prompt(prompt, f"request {name}")
        self.check_params(params, name)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        self.scheduler.roster.add(Request(name, tuple(tokens), params, seed, tenant=tenant))
        return name

    def check_params(self, params: SamplingParams, request_id: str | None = None) -> None:
        """Refuses parameters that the compiled sampler cannot honour: raises ParameterUnsupported, never ignores one.

        Raises RequestsMismatched for what is no SamplingParams, and ParameterRange for a stop token that no token can be.
        """
        if not isinstance(params, SamplingParams):
            raise RequestsMismatched("params", type(params).__name__, "SamplingParams")
        found = unmet(params, ABILITIES | {"spec"} if self.options.drafts else ABILITIES)
        if found is not None:
            off = "auto or off, as this engine verifies no drafts (--spec)" if found[0] == "spec" else f"{found[2]!r}, which is off"
            raise ParameterUnsupported(found[0], found[1], off, request_id=request_id)
        strange = next((token for token in params.stop_token_ids if token >= self.vocabulary), None)
        if strange is not None:
            raise ParameterRange("stop_token_ids", strange, f"ids of the vocabulary, 0 to {self.vocabulary - 1}", request_id=request_id)
        if params.stop and self.detokenizer is None:
            raise ParameterUnsupported("stop", params.stop, "(), as this engine has no tokenizer", request_id=request_id)

    def checked_prompt(self, prompt: Iterable[int], where: str) -> list[int]:
        """The prompt as a list of ids of the vocabulary, at least one. Raises PromptRefused."""
        if isinstance(prompt, str | bytes | Mapping) or not isinstance(prompt, Iterable) or (isinstance(prompt, np.ndarray) and not prompt.ndim):
            raise PromptRefused(where, type(prompt).__name__, "a list of token ids")
        tokens = prompt.tolist() if isinstance(prompt, np.ndarray) else list(prompt)
        if not tokens:
            raise PromptRefused(where, "an empty prompt", "at least one token")
        for place, token in enumerate(tokens):
            if isinstance(token, bool | np.bool_) or not isinstance(token, int | np.integer):
                raise PromptRefused(f"{where}, token {place}", shown(token), "a whole number")
            if not 0 <= token < self.vocabulary:
                raise PromptRefused(f"{where}, token {place}", shown(token), f"0 to {self.vocabulary - 1}")
            if token == self.image_token:
                raise PromptRefused(f"{where}, token {place}", f"{token}, the image token", "text: this artifact runs the text path only")
        return [int(token) for token in tokens]

    def abort(self, request_id: str) -> bool:
        """Ends a request wherever it stands; its one terminal event comes with the next step. False if there is nothing to end."""
        return self.scheduler.roster.finish_all(request_id, Status.ABORTED)

    @property
    def has_work(self) -> bool:
        """Says whether a step would do or report something."""
        return self._driver.has_work

    def take(self, request_id: str, prompt: str | None = None, text: str = "") -> RequestOutput:
        """Returns the result of a finished request and forgets it. Raises KeyError for a request that is unknown or not finished."""
        return self.scheduler.roster.take(request_id, prompt, text)

    def forget(self, *request_ids: str) -> None:
        """Drops finished requests and what is still to be reported of them. Nothing happens for any other."""
        self.scheduler.roster.forget(*request_ids)

    def close(self) -> None:
        """Ends the workers, and keeps on disk what is cached where a folder was given. May be called twice."""
        self._runs.close()
        if self.scheduler.prefix is not None and self.scheduler.prefix.snapshots is not None:
            self.scheduler.prefix.snapshots.flush()
        self.device.close()

    def step(self) -> list[Event]:
        """Runs one step and returns what happened, in order; asynchronously, what the step before brought.

        Raises SlotBusy where requests wait, none runs, and the rows of `forward` leave no room: without `reset` they would wait for ever.
        """
        events, roster = self._driver.step(), self.scheduler.roster
        if self._lengths and not events and roster.waiting and not roster.prefilling and not roster.decoding:
            waiting = next(iter(roster.waiting)).request.id
            raise SlotBusy(f"request {waiting}", f"{len(self._lengths)} slots and their blocks in use by forward", "room for a request",
                           remedy="reset slots that forward used")  # fmt: skip
        return events

    # -- given rows, without a request

    def forward(
        self, batch: Ordered[tuple[int, Ordered[int]]], logits: Literal["all", "last"] = "all"
    ) -> list[NDArray[np.float32]]:
        """Computes the next tokens of each (slot, tokens) and returns logits [tokens or 1, V] of each; the slots' states advance.

        Slots start empty; a slot stays taken until `reset`. Raises SlotBusy, BatchRefused, PromptRefused or BlocksExhausted.
        """
        self.device.check_open()
        if logits not in ("all", "last"):
            raise OptionRefused("forward: logits", shown(logits), "all or last")
        rows, bounds = StepRows(), [0]
        self._driver.settle()
        self.scheduler.roster.chores.saves.clear()  # of slots that these rows may overwrite
        for slot, tokens in self._checked_batch(batch, logits):
            rows.add(slot, self._lengths[slot], tokens)
            first = len(rows.tokens) - (len(tokens) if logits == "all" else 1)
            rows.outputs += range(first, len(rows.tokens))
            bounds.append(len(rows.outputs))
            self._lengths[slot] += len(tokens)
        if not rows.tokens:
            return []
        slots = list(self._lengths)
        _int32(self.programs, "block_table")[slots] = self.blocks.table[slots]
        self.programs.forward(rows)
        found = self._results["logits"]
        return [found[a:b].astype(np.float32) for a, b in pairwise(bounds)]

    def draft(
        self,
        batch: Ordered[tuple[int, int]],
        params: SamplingParams | None = None,
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Drafts behind each (slot, golden token): tokens [n, B] and confidence logits [n, B]. The slots' states stay as they are.

        `golden` follows the last token that `forward` computed in the slot. Default: greedy.
        """
        self.device.check_open()
        if not self.programs.has_draft:
            raise OptionRefused("draft", "an artifact without a draft program", "one with it")
        if len(batch) > (most := self.artifact.manifest.options.max_sequences):
            raise BatchRefused("draft", f"{len(batch)} blocks", f"at most {most}")
        wanted = params or SamplingParams(temperature=0.0)
        draws = []
        for slot, golden in batch:
            if not self._lengths.get(slot):
                raise BatchRefused(f"slot {slot}", "no computed token", "a slot that forward has used")
            self.checked_prompt([golden], f"golden token of slot {slot}")
            draws.append(_draw(Request("", (), wanted, wanted.seed or 0), slot, self._lengths[slot]))
        if draws:
            self.programs.draft([golden for _, golden in batch], draws)
        drafts, confidences = (self._results[name][: len(draws)] for name in ("drafts", "confidences"))
        return drafts.astype(np.int32), confidences.astype(np.float32)

    def reset(self, slot: int) -> None:
        """Empties a slot that `forward` used and frees it. Nothing happens for any other slot."""
        if self._lengths.pop(slot, None) is not None:
            self.blocks.release(slot)
            self.scheduler.roster.slots.give(slot)

    def _checked_batch(self, batch: Ordered[tuple[int, Ordered[int]]], logits: str) -> list[tuple[int, list[int]]]:
        """The batch with its slots taken and its blocks reserved; nothing is taken if any part of it is refused."""
        checked, limits = [(slot, self.checked_prompt(tokens, f"slot {slot}")) for slot, tokens in batch], self.artifact.manifest.options
        rows = sum(len(tokens) for _, tokens in checked)
        if rows > limits.max_rows or len({slot for slot, _ in checked}) < len(checked):
            raise BatchRefused("batch", f"{rows} rows, slots {[slot for slot, _ in checked]}", f"at most {limits.max_rows} rows, each slot once")
        if (outputs := rows if logits == "all" else len(checked)) > limits.max_outputs:
            raise BatchRefused("rows that ask for logits", outputs, f"at most {limits.max_outputs}")
        for slot, tokens in checked:
            length = self._lengths.get(slot, 0) + len(tokens)
            if slot not in self._lengths and slot not in self.scheduler.roster.slots:
                raise SlotBusy(f"slot {slot}", "a slot of a request, or none", "a free slot or one that forward uses")
            if length > self.context:
                raise BatchRefused(f"slot {slot}", f"{length} tokens", f"at most {self.context}, the context")
        self.blocks.reserve_all({slot: self._lengths.get(slot, 0) + len(tokens) for slot, tokens in checked})
        for slot, _ in checked:
            if slot not in self._lengths:
                self.scheduler.roster.slots.take(slot)
                self._lengths[slot] = 0
        return checked


def default_blocks(artifact: Artifact) -> int:
    """Blocks of a cache: enough for every slot at full length, within CACHE_BUDGET_BYTES, and never less than one full sequence."""
    options = artifact.manifest.options
    per_sequence = -(-options.max_context // options.block_tokens)
    block_bytes = sum(
        state.bytes_per_entry * (options.block_tokens // (state.ratio or 1))
        for state in artifact.manifest.states
        if state.kind == "blocks"
    )
    affordable = CACHE_BUDGET_BYTES // max(block_bytes, 1)
    return 1 + max(per_sequence, min(options.max_sequences * per_sequence, affordable))


def _draw(request: Request, slot: int, position: int) -> Draw:
    """How the token at `position` is drawn: seed and position are all the randomness there is."""
    params, seed = request.params, request.seed
    signed = seed - (1 << 64) if seed >> 63 else seed
    return Draw(min(params.temperature, LARGEST_TEMPERATURE), params.top_k, params.top_p, signed, slot, position)


def _int32(programs: LoadedPrograms, name: str) -> NDArray[np.int32]:
    return programs.array(name).view(np.int32)
