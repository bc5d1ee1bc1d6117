"""A request from submission to its result: what was asked, the sequence while it runs, the rule that ends it, the outputs.

Sections 1.1, 1.4 and 1.5 of docs/runtime.md. The engine alone changes a `Sequence`; everything a caller sees is frozen.
"""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from tapeout.runtime.params import SamplingParams

LOWEST_LOGPROB = -9999.0  # log-probabilities are floored here


class Status(Enum):
    """Where a request stands; the value of a finished one is its finish reason."""

    WAITING = "waiting"
    RUNNING = "running"
    STOPPED = "stop"
    LENGTH_CAPPED = "length"
    ABORTED = "abort"
    PROMPT_TOO_LONG = "prompt_length_exceeded"

    @property
    def is_finished(self) -> bool:
        return self not in (Status.WAITING, Status.RUNNING)


class StopRule(Enum):
    """Which rule ended a request that ran: reported as `stop_reason`."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    MAX_CONTEXT = "max_context"
    MAX_TOKENS = "max_tokens"


@dataclass(frozen=True)
class Request:
    """What was asked. `seed` is the one in force: given, or drawn at submission."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int


class TokenEvent(NamedTuple):
    """A token was emitted; `ordinal` counts the request's tokens from 0."""

    request_id: str
    ordinal: int
    token: int
    logprob: float


class FinishedEvent(NamedTuple):
    """A request ended. There is exactly one for each, and it carries no token."""

    request_id: str
    finish_reason: str
    stop_reason: str | int | None


Event = TokenEvent | FinishedEvent


class Draft(NamedTuple):
    """A drafted block: guesses for positions `position`, `position + 1`, ... of the sequence, with confidence logits."""

    position: int
    tokens: tuple[int, ...]
    confidences: tuple[float, ...]


@dataclass(slots=True, eq=False)
class Sequence:
    """A request under way. `computed` tokens are in the cache; `tokens` are prompt and output."""

    request: Request
    tokens: list[int]
    submitted_s: float
    status: Status = Status.WAITING
    computed: int = 0
    slot: int | None = None
    logprobs: list[float] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)
    decode_steps: int = 0
    stop_reason: str | int | None = None
    started_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None

    @property
    def emitted(self) -> int:
        """Tokens produced so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def is_decoding(self) -> bool:
        """Says whether only the newest token waits to be computed, and it was sampled."""
        return len(self.tokens) > len(self.request.prompt)


def finish_of(sequence: Sequence, eos_id: int | None, max_context: int) -> tuple[Status, str | int] | None:
    """Returns status and stop reason if the newest token ends the sequence, else None (docs/runtime.md, 1.4).

    Order: eos, stop tokens, more tokens than the context holds, enough tokens. The token that ends a request is part of its output;
    the last one needs no place in the cache, so a sequence may reach one token more than `max_context`.
    """
    token, params = sequence.tokens[-1], sequence.request.params
    if token == eos_id and not params.ignore_eos:
        return Status.STOPPED, StopRule.EOS.value
    if token in params.stop_token_ids:
        return Status.STOPPED, token
    if len(sequence.tokens) > max_context:
        return Status.LENGTH_CAPPED, StopRule.MAX_CONTEXT.value
    if sequence.emitted >= params.max_tokens:
        return Status.LENGTH_CAPPED, StopRule.MAX_TOKENS.value
    return None


# -- what a caller gets


@dataclass(frozen=True)
class CompletionOutput:
    """The answer. `text` is empty where the caller has no tokenizer; `logprobs` pairs with `token_ids` if asked for."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish_reason: str
    stop_reason: str | int | None


@dataclass(frozen=True)
class Timing:
    """Milliseconds from submission to the first row, to the first token (None without one), to the end."""

    queue_ms: float
    ttft_ms: float | None
    total_ms: float


@dataclass(frozen=True)
class Speculation:
    """Decode steps, tokens drafted, rows verified and drafts accepted; `foreseen` counts drafts that the sequence then confirmed.

    Nothing is verified yet: drafts are computed and reported only.
    """

    steps: int
    drafted: int
    verified: int
    accepted: int
    foreseen: int


@dataclass(frozen=True)
class RequestOutput:
    """The one result of a request. `seed` reproduces its tokens."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    seed: int
    timing: Timing
    speculation: Speculation
    drafts: tuple[Draft, ...]
    finished: bool = True


def output_of(sequence: Sequence, prompt: str | None = None, text: str = "") -> RequestOutput:
    """The result of a finished sequence."""
    request = sequence.request
    tokens = tuple(sequence.tokens[len(request.prompt) :])
    logprobs = tuple(sequence.logprobs) if request.params.logprobs else None
    completion = CompletionOutput(0, text, tokens, logprobs, sequence.status.value, sequence.stop_reason)
    drafted = sum(len(draft.tokens) for draft in sequence.drafts)
    foreseen = sum(_foreseen(draft, sequence.tokens) for draft in sequence.drafts)
    return RequestOutput(
        request.id,
        prompt,
        request.prompt,
        (completion,),
        request.seed,
        _timing(sequence),
        Speculation(sequence.decode_steps, drafted, 0, 0, foreseen),
        tuple(sequence.drafts),
    )


def _foreseen(draft: Draft, tokens: Tokens[int]) -> int:
    """Leading tokens of a draft that are the sequence's own."""
    count = 0
    for guess, token in zip(draft.tokens, tokens[draft.position :], strict=False):
        if guess != token:
            break
        count += 1
    return count


def _timing(sequence: Sequence) -> Timing:
    def since(moment: float | None) -> float | None:
        return None if moment is None else (moment - sequence.submitted_s) * 1e3

    total = since(sequence.finished_s) or 0.0
    started = since(sequence.started_s)
    return Timing(total if started is None else started, since(sequence.first_token_s), total)
