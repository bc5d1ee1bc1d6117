"""The engine: continuous batching of requests over one artifact, one synchronous step at a time.

A step computes the newest token of every running request and, with the rows that remain, pieces of prompts; all rows go through
the decoder (exact mode). Scheduling proposes a plan, `_commit` applies it; admission and `_release` are the only places where slots
and blocks change hands. A request holds what it may need until its last token, so nothing is ever preempted (docs/runtime.md, 3).
"""

import secrets
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from itertools import count, pairwise
from time import perf_counter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tapeout.runtime.artifact import Artifact
from tapeout.runtime.blocks import BlockPool
from tapeout.runtime.device.cpu import CpuDevice
from tapeout.runtime.errors import BatchRefused, OptionRefused, PromptRefused, RequestTaken, SlotBusy
from tapeout.runtime.params import SamplingParams
from tapeout.runtime.program import Draw, LoadedPrograms, StepRows
from tapeout.runtime.request import (
    LOWEST_LOGPROB,
    Draft,
    Event,
    FinishedEvent,
    Request,
    RequestOutput,
    Sequence,
    Status,
    StopRule,
    TokenEvent,
    finish_of,
    output_of,
)
from tapeout.runtime.weights import BoundWeights

CACHE_BUDGET_BYTES = 2 << 30  # of cache blocks, unless one full-length sequence needs more or the caller says otherwise
LARGEST_TEMPERATURE = 3e38  # what float32 holds; every distribution is flat long before


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is set up. None leaves a choice to it: all processors, as many blocks as fit, prompts cut only by max_rows.

    `chunk_tokens` cuts prompts into pieces of that many rows; results do not depend on it.
    """

    workers: int | None = None
    cache_blocks: int | None = None
    chunk_tokens: int | None = None
    drafts: bool = False

    def __post_init__(self) -> None:
        for name, least in (("cache_blocks", 2), ("chunk_tokens", 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise OptionRefused(f"EngineOptions.{name}", repr(value), f"a whole number of at least {least}, or None")
        if type(self.drafts) is not bool:
            raise OptionRefused("EngineOptions.drafts", repr(self.drafts), "True or False")


@dataclass(slots=True)
class Piece:
    """Rows of one sequence in a step: `count` tokens from `computed` on. `is_last` if they reach its newest token."""

    sequence: Sequence
    count: int
    is_last: bool


class Engine:
    """Requests in, events out. Not thread safe. `forward`, `draft` and `reset` run given rows without a request, for tests."""

    def __init__(self, artifact: Artifact, weights: BoundWeights, options: EngineOptions | None = None) -> None:
        self.artifact, self.options = artifact, options or EngineOptions()
        limits = artifact.manifest.options
        self.device = CpuDevice(artifact.library, self.options.workers)
        blocks = self.options.cache_blocks or default_blocks(artifact)
        self.programs = LoadedPrograms(artifact, weights, self.device, blocks)
        if self.options.drafts and not self.programs.has_draft:
            raise OptionRefused("EngineOptions.drafts", True, "False: the artifact has no draft program")
        self.blocks = BlockPool(blocks, limits.block_tokens, _int32(self.programs, "block_table"))
        self.vocabulary = self.programs.vocabulary
        self.context = min(limits.max_context, (blocks - 1) * limits.block_tokens, self.blocks.tokens_per_slot)
        eos = artifact.manifest.model.config.get("eos_token_id")
        self.eos_id = eos if type(eos) is int else None
        self._results = {name: self.programs.array(name) for name in ("sampled", "logprobs", "logits")}
        if self.programs.has_draft:
            self._results |= {name: self.programs.array(name) for name in ("drafts", "confidences")}
        self._free_slots = deque(range(limits.max_sequences))
        self._numbers = count()
        self._sequences: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._events: list[Event] = []
        self._lengths: dict[int, int] = {}  # tokens of slots that `forward` drives

    # -- requests

    def submit(self, prompt: Iterable[int], params: SamplingParams | None = None, request_id: str | None = None) -> str:
        """Queues a request and returns its id. Raises PromptRefused or RequestTaken; a prompt that is too long ends as such.

        An unseeded request draws its own seed here.
        """
        params = params or SamplingParams()
        name = request_id if request_id is not None else f"request-{next(self._numbers)}"
        if name in self._sequences:
            raise RequestTaken(f"request {name}", "the id of another request")
        tokens = self.checked_prompt(prompt, f"request {name}")
        seed = secrets.randbits(64) if params.seed is None else params.seed
        sequence = Sequence(Request(name, tuple(tokens), params, seed), tokens, perf_counter())
        self._sequences[name] = sequence
        if len(tokens) > self.context:
            self._finish(sequence, Status.PROMPT_TOO_LONG, None)
        else:
            self._waiting.append(sequence)
        return name

    def checked_prompt(self, prompt: Iterable[int], where: str) -> list[int]:
        """The prompt as a list of ids of the vocabulary, at least one. Raises PromptRefused."""
        if isinstance(prompt, str | bytes | Mapping) or not isinstance(prompt, Iterable):
            raise PromptRefused(where, type(prompt).__name__, "a list of token ids")
        tokens = prompt.tolist() if isinstance(prompt, np.ndarray) else list(prompt)
        if not tokens:
            raise PromptRefused(where, "an empty prompt", "at least one token")
        for place, token in enumerate(tokens):
            if isinstance(token, bool | np.bool_) or not isinstance(token, int | np.integer):
                raise PromptRefused(f"{where}, token {place}", repr(token), "a whole number")
            if not 0 <= token < self.vocabulary:
                raise PromptRefused(f"{where}, token {place}", token, f"0 to {self.vocabulary - 1}")
        return [int(token) for token in tokens]

    def abort(self, request_id: str) -> bool:
        """Ends a request wherever it stands; its one terminal event comes with the next step. False if there is nothing to end."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.status.is_finished:
            return False
        self._finish(sequence, Status.ABORTED, None)
        return True

    @property
    def has_work(self) -> bool:
        """Says whether a step would do or report something."""
        return bool(self._running or self._waiting or self._events)

    def take(self, request_id: str, prompt: str | None = None, text: str = "") -> RequestOutput:
        """Returns the result of a finished request and forgets it. Raises KeyError for a request that is unknown or not finished."""
        if not self._sequences[request_id].status.is_finished:
            raise KeyError(request_id)
        return output_of(self._sequences.pop(request_id), prompt, text)

    def forget(self, request_id: str) -> None:
        """Drops a finished request and what is still to be reported of it. Nothing happens for any other."""
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.status.is_finished:
            del self._sequences[request_id]
            self._events = [event for event in self._events if event.request_id != request_id]

    def close(self) -> None:
        """Ends the workers. May be called twice."""
        self.device.close()

    # -- a step

    def step(self) -> list[Event]:
        """Runs one step and returns what happened, in order."""
        self._admit()
        plan = self._plan()
        if plan:
            rows = self._rows(plan)
            self.programs.step(rows, drafting=self.options.drafts)
            self._commit(plan, rows)
        events, self._events = self._events, []
        return events

    def _admit(self) -> None:
        """Gives slots and blocks to waiting requests, first come first served."""
        while self._waiting and self._free_slots:
            sequence = self._waiting[0]
            slot, needed = self._free_slots[0], self._tokens_needed(sequence.request)
            if not self.blocks.can_hold(slot, needed):
                return
            self.blocks.reserve(slot, needed)
            sequence.slot = self._free_slots.popleft()
            sequence.status, sequence.started_s = Status.RUNNING, perf_counter()
            self._running.append(self._waiting.popleft())

    def _tokens_needed(self, request: Request) -> int:
        """Tokens that the cache must hold for a request: all but the last one."""
        return min(len(request.prompt) + max(request.params.max_tokens - 1, 0), self.context)

    def _plan(self) -> list[Piece]:
        """Decode rows first, then prompts in order of admission while rows remain."""
        budget, chunk = self.artifact.manifest.options.max_rows, self.options.chunk_tokens
        plan = [Piece(sequence, 1, True) for sequence in self._running if sequence.is_decoding]
        budget -= len(plan)
        for sequence in self._running:
            if budget <= 0:
                break
            if not sequence.is_decoding:
                left = len(sequence.tokens) - sequence.computed
                size = min(left, budget, chunk or left)
                plan.append(Piece(sequence, size, size == left))
                budget -= size
        return plan

    def _rows(self, plan: Ordered[Piece]) -> StepRows:
        rows = StepRows()
        for piece in plan:
            sequence, first = piece.sequence, piece.sequence.computed
            slot = _held(sequence)
            rows.add(slot, first, sequence.tokens[first : first + piece.count])
            if piece.is_last and sequence.request.params.max_tokens:
                rows.outputs.append(len(rows.tokens) - 1)
                rows.draws.append(_draw(sequence.request, slot, len(sequence.tokens)))
        return rows

    def _commit(self, plan: Ordered[Piece], rows: StepRows) -> None:
        """Applies a step: rows are in the cache, sampled tokens join their sequences, those that ended leave."""
        tokens = iter(self._results["sampled"][: len(rows.outputs)].tolist())
        logprobs = iter(self._results["logprobs"][: len(rows.outputs)].tolist())
        output = 0
        for piece in plan:
            sequence = piece.sequence
            sequence.computed += piece.count
            if not piece.is_last:
                continue
            if not sequence.request.params.max_tokens:
                self._finish(sequence, Status.LENGTH_CAPPED, StopRule.MAX_TOKENS.value)
                continue
            self._emit(sequence, next(tokens), next(logprobs), output)
            output += 1

    def _emit(self, sequence: Sequence, token: int, logprob: float, output: int) -> None:
        if sequence.first_token_s is None:
            sequence.first_token_s = perf_counter()
        logprob = max(logprob, LOWEST_LOGPROB)
        self._events.append(TokenEvent(sequence.request.id, sequence.emitted, token, logprob))
        sequence.tokens.append(token)
        sequence.logprobs.append(logprob)
        sequence.decode_steps += 1
        if self.options.drafts:
            block = (self._results[name][output].tolist() for name in ("drafts", "confidences"))
            sequence.drafts.append(Draft(len(sequence.tokens), *map(tuple, block)))
        ended = finish_of(sequence, self.eos_id, self.context)
        if ended is not None:
            self._finish(sequence, *ended)

    def _finish(self, sequence: Sequence, status: Status, stop_reason: str | int | None) -> None:
        """The one way out: takes the sequence off its queue, gives back what it holds, reports once."""
        if sequence.status is Status.RUNNING:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        self._release(sequence)
        sequence.status, sequence.stop_reason, sequence.finished_s = status, stop_reason, perf_counter()
        self._events.append(FinishedEvent(sequence.request.id, status.value, stop_reason))

    def _release(self, sequence: Sequence) -> None:
        if sequence.slot is not None:
            self.blocks.release(sequence.slot)
            self._free_slots.append(sequence.slot)
            sequence.slot = None

    # -- given rows, without a request

    def forward(
        self, batch: Ordered[tuple[int, Ordered[int]]], logits: Literal["all", "last"] = "all"
    ) -> list[NDArray[np.float32]]:
        """Computes the next tokens of each (slot, tokens) and returns logits [tokens or 1, V] of each; the slots' states advance.

        Slots start empty; a slot stays taken until `reset`. Raises SlotBusy, BatchRefused, PromptRefused or BlocksExhausted.
        """
        rows, bounds = StepRows(), [0]
        for slot, tokens in self._checked_batch(batch):
            rows.add(slot, self._lengths[slot], tokens)
            first = len(rows.tokens) - (len(tokens) if logits == "all" else 1)
            rows.outputs += range(first, len(rows.tokens))
            bounds.append(len(rows.outputs))
            self._lengths[slot] += len(tokens)
        if not rows.tokens:
            return []
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
        if not self.programs.has_draft:
            raise OptionRefused("draft", "an artifact without a draft program", "one with it")
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
            self._free_slots.append(slot)

    def _checked_batch(self, batch: Ordered[tuple[int, Ordered[int]]]) -> list[tuple[int, list[int]]]:
        """The batch with its slots taken and its blocks reserved; nothing is taken if any part of it is refused."""
        checked = [(slot, self.checked_prompt(tokens, f"slot {slot}")) for slot, tokens in batch]
        rows, most = sum(len(tokens) for _, tokens in checked), self.artifact.manifest.options.max_rows
        if rows > most or len({slot for slot, _ in checked}) < len(checked):
            raise BatchRefused("batch", f"{rows} rows, slots {[slot for slot, _ in checked]}", f"at most {most} rows, each slot once")
        for slot, tokens in checked:
            length = self._lengths.get(slot, 0) + len(tokens)
            if slot not in self._lengths and slot not in self._free_slots:
                raise SlotBusy(f"slot {slot}", "a slot of a request, or none", "a free slot or one that forward uses")
            if length > self.context:
                raise BatchRefused(f"slot {slot}", f"{length} tokens", f"at most {self.context}, the context")
        self.blocks.reserve_all({slot: self._lengths.get(slot, 0) + len(tokens) for slot, tokens in checked})
        for slot, _ in checked:
            if slot not in self._lengths:
                self._free_slots.remove(slot)
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


def _held(sequence: Sequence) -> int:
    if sequence.slot is None:
        raise RuntimeError(f"internal: request {sequence.request.id} runs without a slot")
    return sequence.slot


def _int32(programs: LoadedPrograms, name: str) -> NDArray[np.int32]:
    return programs.array(name).view(np.int32)
