"""One step as the scheduler proposes it and what a device answers: plain arrays, and a protocol for devices that take steps in order.

A token that is not known yet is not a number here: rows that follow a step in flight are `FollowingRows`, which name slots only and refuse
to be packed as ids. The device keeps, for every slot, the newest token, its position and the drafts behind it. docs/runtime.md, 3.2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tapeout.runtime.replay import Mode, ReplayPlan
from tapeout.runtime.request import Sequence as Branch

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class KnownRows:
    """Newest tokens that the host knows [sequences each]: slot, position, id."""

    slots: Int64
    positions: Int64
    tokens: Int32


@dataclass(frozen=True)
class FollowingRows:
    """Slots whose newest token a step in flight will yield [sequences]. It has no id and no position, and cannot stand in for either."""

    slots: Int64

    def __array__(self, dtype: object = None, copy: bool | None = None) -> NDArray[np.generic]:
        raise TypeError("internal: a token that is not known yet was packed for a device")

    def __index__(self) -> int:
        raise TypeError("internal: a token that is not known yet was used as an id")


class Piece(NamedTuple):
    """Rows of one prompt: `tokens` from position `start` on. The last piece yields an output, unless no token is asked for."""

    branch: Branch
    slot: int
    epoch: int
    start: int
    tokens: Sequence[int]
    is_last: bool
    yields: bool
    plan: ReplayPlan | None

    @property
    def kept_rows(self) -> int:
        """Rows that the decoder half runs beside the encoder; 0 where it runs all, as then nothing tells the two apart."""
        if self.plan is None or self.plan.rules.mode is not Mode.COMPACT:
            return 0
        return max(0, self.start + len(self.tokens) - max(self.plan.keep_from, self.start))

    @property
    def decoder_rows(self) -> int:
        """Rows through the decoder half."""
        is_compact = self.plan is not None and self.plan.rules.mode is Mode.COMPACT
        return self.kept_rows if is_compact else len(self.tokens)


@dataclass(frozen=True)
class Draws:
    """How each output is sampled [outputs]: decode rows in order, known ones first, then last pieces. Seeds are signed 64-bit numbers."""

    temperature: NDArray[np.float64]
    top_k: Int64
    top_p: NDArray[np.float64]
    seeds: Int64


class Save(NamedTuple):
    """Keep the window state of a slot that ends at `end`. `replaces` names an older state of the same sequence, which may go then."""

    slot: int
    epoch: int
    end: int
    key: bytes
    lineage: int | None
    session: str
    replaces: bytes | None = None


class Restore(NamedTuple):
    """Put back a window state that ends at `end`."""

    slot: int
    end: int
    payload: bytes


@dataclass(frozen=True)
class Step:
    """What a device does, in this order: early saves, block copies, slot copies, block loads, restores, rows, saves.

    `slots`, `epochs`, `widths` are [decode sequences], known ones first; `widths` are the most rows of each, 1 + drafts. `draft_total`: how
    many drafts to verify in all, split by the device with the newest confidences, mapped through `monotone` [drafts, bins] if that is given; None
    verifies all that the widths allow. `drafts` [outputs]: tokens to draft behind each; None: whole blocks.
    """

    number: int
    branches: Sequence[Branch]
    slots: Int64
    epochs: Int64
    widths: Int64
    known: KnownRows
    following: FollowingRows
    draft_total: int | None
    pieces: Sequence[Piece]
    draws: Draws
    drafts: Int64 | None = None
    monotone: NDArray[np.float64] | None = None
    block_copies: Sequence[tuple[int, int]] = ()
    slot_copies: Sequence[tuple[int, int]] = ()
    loads: Sequence[tuple[int, bytes]] = ()
    restores: Sequence[Restore] = ()
    saves: Sequence[Save] = ()
    early_saves: Sequence[Save] = ()

    @property
    def outputs(self) -> int:
        return len(self.slots) + sum(piece.yields for piece in self.pieces)

    @property
    def prompt_rows(self) -> int:
        return sum(len(piece.tokens) for piece in self.pieces)

    @property
    def decoder_prompt_rows(self) -> int:
        return sum(piece.decoder_rows for piece in self.pieces)

    @property
    def decode_rows(self) -> int:
        """Decode rows at most."""
        if self.draft_total is None:
            return int(self.widths.sum())
        return len(self.slots) + self.draft_total


@dataclass(frozen=True)
class StepResult:
    """What a step gave: `counts` tokens of each output [outputs], flattened in `tokens` and `logprobs`; rows verified of each decode
    sequence in `widths` [decode sequences]; drafts behind each output and their confidences [outputs, block], if it drafts.

    `saved` pairs with `Step.early_saves`, then `Step.saves`. `failed` names slots whose rows came to nothing, with the reason.
    """

    counts: Int64
    tokens: Int32
    logprobs: Floats
    widths: Int64
    drafts: Int32 | None = None
    confidences: NDArray[np.float64] | None = None
    saved: Sequence[bytes] = ()
    failed: Mapping[int, str] = field(default_factory=dict)
    ms: float = 0.0


class StepDevice(Protocol):
    """Takes steps in order and answers each by its number; `collect` raises StepLost for one that is lost, and later ones are still answered.

    A result may be asked for again until that of a later step is. A step that nobody asks for, as its launch was interrupted, may run or not.
    """

    def launch(self, step: Step) -> None: ...

    def collect(self, number: int) -> StepResult: ...

    def read_block(self, block: int) -> bytes | None:
        """The bytes of a block once all launched steps are done; None where blocks cannot be read."""
        ...
