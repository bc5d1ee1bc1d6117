"""A request from submission to its result: what was asked, the sequence while it runs, the rule that ends it, the outputs.

Sections 1.1, 1.4 and 1.5 of docs/runtime.md. The scheduler alone changes a `Sequence`; everything a caller sees is frozen.
"""

from collections import deque
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tapeout.runtime.params import SamplingParams
from tapeout.runtime.replay import ReplayPlan
from tapeout.runtime.text import StopText

LOWEST_LOGPROB = -9999.0  # log-probabilities are floored here


class Status(Enum):
    """Where a request stands; the value of a finished one is its finish reason.

    PREPARING: something of it (a grammar, an image) is not ready. PREEMPTED: it can never go on, as memory does not hold it.
    """

    PREPARING = "preparing"
    WAITING = "waiting"
    RUNNING = "running"
    STOPPED = "stop"
    LENGTH_CAPPED = "length"
    ABORTED = "abort"
    DEADLINE = "deadline"
    PROMPT_TOO_LONG = "prompt_length_exceeded"
    PREEMPTED = "insufficient_system_resource"
    FAILED = "error"

    @property
    def is_finished(self) -> bool:
        return self not in _UNFINISHED


_UNFINISHED = frozenset((Status.PREPARING, Status.WAITING, Status.RUNNING))


class StopRule(Enum):
    """Which rule ended a request that ran: reported as `stop_reason`. A stop token or a stop string is reported itself."""

    EOS = "eos"
    MAX_CONTEXT = "max_context"
    MAX_TOKENS = "max_tokens"


class ImageSpan(NamedTuple):
    """Tokens `start` to `end` - 1 of a prompt stand for one image, known by the digest of its content; no chunk may cut it."""

    start: int
    end: int
    digest: bytes


@dataclass(frozen=True)
class Request:
    """What was asked. `seed` is the one in force: given, or drawn at submission. `tenant` keeps caches of users apart."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    branch: int = 0
    images: tuple[ImageSpan, ...] = ()
    tenant: str = ""


class TokenEvent(NamedTuple):
    """A token was emitted; `ordinal` counts the branch's tokens from 0. `text` is what may be shown now, where text is asked for."""

    request_id: str
    ordinal: int
    token: int
    logprob: float
    branch: int = 0
    text: str = ""


class FinishedEvent(NamedTuple):
    """A request ended, with all its branches. There is exactly one for each, and it carries no token; `text` was held back until now."""

    request_id: str
    finish_reason: str
    stop_reason: str | int | None
    text: str = ""


Event = TokenEvent | FinishedEvent


class Draft(NamedTuple):
    """A drafted block: guesses for positions `position`, `position + 1`, ... of the sequence, and how likely each is accepted if those
    before it are, as the draft's head says."""

    position: int
    tokens: tuple[int, ...]
    confidences: tuple[float, ...]


Noted = tuple[int, int, int, NDArray[np.int32], NDArray[np.float64]]
"""A draft as it is kept while its sequence runs, a plain tuple as there is one for each token: its position, and row, length, tokens and
confidences of the step that made it."""


def draft_of(noted: Noted) -> Draft:
    """The draft itself."""
    position, row, length, tokens, confidences = noted
    return Draft(position, tuple(tokens[row, :length].tolist()), tuple(confidences[row, :length].tolist()))


@dataclass(slots=True, eq=False)
class Sequence:
    """One branch of a request under way. `tokens` are prompt and output; `computed` of them are in the cache and committed.

    `scheduled` counts rows of the prompt that are computed or in flight; `target` is how many tokens the cache must hold before the next
    one is drawn: the prompt, or prompt and output after a preemption. `keys` name its full blocks, `window_keys` the windows kept of its output;
    others have been seen to share its first `shared_end` tokens. `resumed_step`: the step that completed its prompt last.
    """

    request: Request
    tokens: list[int]
    submitted_s: float
    status: Status = Status.WAITING
    computed: int = 0
    scheduled: int = 0
    target: int = 0
    slot: int | None = None
    order: int = 0
    tag: float = 0.0
    replay: ReplayPlan | None = None
    keys: list[bytes] = field(default_factory=list)
    lineage: int | None = None
    window_keys: deque[bytes] = field(default_factory=deque)
    shared_end: int = 0
    logprobs: list[float] = field(default_factory=list)
    drafts: list[Noted] = field(default_factory=list)
    text: StopText | None = None
    decode_steps: int = 0
    verified: int = 0
    accepted: int = 0
    hit_tokens: int = 0
    replayed: int = 0
    preemptions: int = 0
    resumed_step: int = 0
    stop_reason: str | int | None = None
    error: str | None = None
    started_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None

    @property
    def emitted(self) -> int:
        """Tokens produced so far."""
        return len(self.tokens) - len(self.request.prompt)


def finish_of(sequence: Sequence, eos_id: int | None, max_context: int) -> tuple[Status, str | int] | None:
    """Returns status and stop reason if the newest token ends the sequence, else None (docs/runtime.md, 1.4).

    Order: eos, stop tokens, stop strings, more tokens than the context holds, enough tokens. Before `min_tokens` the first three do not
    count. The token that ends a request is part of its output; the last one needs no place in the cache, so a sequence may reach one
    token more than `max_context`.
    """
    token, params = sequence.tokens[-1], sequence.request.params
    if sequence.emitted >= params.min_tokens:
        if token == eos_id and not params.ignore_eos:
            return Status.STOPPED, StopRule.EOS.value
        if token in params.stop_token_ids:
            return Status.STOPPED, token
        if sequence.text is not None and sequence.text.stop is not None:
            return Status.STOPPED, sequence.text.stop
    if len(sequence.tokens) > max_context:
        return Status.LENGTH_CAPPED, StopRule.MAX_CONTEXT.value
    if sequence.emitted >= params.max_tokens:
        return Status.LENGTH_CAPPED, StopRule.MAX_TOKENS.value
    return None


# -- what a caller gets


@dataclass(frozen=True)
class CompletionOutput:
    """One answer. `text` is empty where the caller has no tokenizer; `logprobs` pairs with `token_ids` if asked for."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish_reason: str
    stop_reason: str | int | None
    error: str | None = None


@dataclass(frozen=True)
class Timing:
    """Milliseconds from submission to the first row, to the first token (None without one), to the end."""

    queue_ms: float
    ttft_ms: float | None
    total_ms: float


@dataclass(frozen=True)
class Speculation:
    """Decode steps, tokens drafted, drafts verified and accepted; `foreseen` counts drafts that the sequence then confirmed."""

    steps: int
    drafted: int
    verified: int
    accepted: int
    foreseen: int


@dataclass(frozen=True)
class CacheUse:
    """Tokens of the prompt that were found in the cache, rows replayed behind the hit, and how often the request was preempted."""

    hit_tokens: int = 0
    replayed: int = 0
    preemptions: int = 0


@dataclass(frozen=True)
class RequestOutput:
    """The one result of a request. `seed` reproduces its tokens; branch i draws with `branch_seed(seed, i)`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    seed: int
    timing: Timing
    speculation: Speculation
    drafts: tuple[Draft, ...]
    cache: CacheUse = CacheUse()
    finished: bool = True


def output_of(branches: Tokens[Sequence], prompt: str | None = None, text: str = "") -> RequestOutput:
    """The result of a request whose branches have all finished. `text` is for those whose text nobody followed."""
    first = branches[0]
    request = first.request
    drafts = tuple(map(draft_of, first.drafts))
    drafted = sum(len(draft.tokens) for draft in drafts)
    foreseen = sum(_foreseen(draft, first.tokens) for draft in drafts)
    steps, verified, accepted = (sum(getattr(b, name) for b in branches) for name in ("decode_steps", "verified", "accepted"))
    return RequestOutput(
        request.id,
        prompt,
        request.prompt,
        tuple(_completion(branch, text) for branch in branches),
        request.seed,
        _timing(branches),
        Speculation(steps, drafted, verified, accepted, foreseen),
        drafts,
        CacheUse(first.hit_tokens, sum(b.replayed for b in branches), sum(b.preemptions for b in branches)),
    )


def _completion(sequence: Sequence, text: str) -> CompletionOutput:
    request = sequence.request
    tokens = tuple(sequence.tokens[len(request.prompt) :])
    logprobs = tuple(sequence.logprobs) if request.params.logprobs else None
    said = text if sequence.text is None else sequence.text.text
    return CompletionOutput(request.branch, said, tokens, logprobs, sequence.status.value, sequence.stop_reason, sequence.error)


def _foreseen(draft: Draft, tokens: Tokens[int]) -> int:
    """Leading tokens of a draft that are the sequence's own."""
    count = 0
    for guess, token in zip(draft.tokens, tokens[draft.position :], strict=False):
        if guess != token:
            break
        count += 1
    return count


def _timing(branches: Tokens[Sequence]) -> Timing:
    submitted = branches[0].submitted_s
    ends = [b.finished_s for b in branches if b.finished_s is not None]
    starts = [b.started_s for b in branches if b.started_s is not None]
    firsts = [b.first_token_s for b in branches if b.first_token_s is not None]
    total = (max(ends) - submitted) * 1e3 if ends else 0.0
    queue = (min(starts) - submitted) * 1e3 if starts else total
    return Timing(queue, (min(firsts) - submitted) * 1e3 if firsts else None, total)
