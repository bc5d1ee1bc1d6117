"""What a sequence carries from chunk to chunk, and what a forward pass returns (model spec 11.3).

Promises: arrays are replaced, never written in place, so `copy` is cheap and a copy is a snapshot to roll back to.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .formats import Array
from .sparse import Carry


@dataclass
class SequenceState:
    """State of one sequence.

    `windows`: last W window vectors per block name; `entries` and `index_keys`: per KV source, one row per completed
    group; `carries`: per ratio-2 source, the token that waits for its partner.
    """

    token_ids: Array
    windows: dict[str, Array]
    entries: dict[int, Array]
    index_keys: dict[int, Array]
    carries: dict[int, Carry]

    @property
    def length(self) -> int:
        """Tokens processed so far."""
        return len(self.token_ids)

    def copy(self) -> SequenceState:
        """A snapshot; later forward passes on either do not touch the other."""
        return SequenceState(self.token_ids, dict(self.windows), dict(self.entries), dict(self.index_keys), dict(self.carries))


@dataclass(frozen=True)
class LayerRecord:
    """What one layer saw and did, for per-layer comparison; all `[n, ...]`.

    `streams` and `pre_mix` enter the layer (before Engram); inputs are the normed rows a sublayer gets, outputs what it
    returns; `index_scores` `[n, entries]` (index sources only) are `-inf` where a row may not look, candidates applied.
    """

    streams: Array
    pre_mix: Array
    attention_input: Array
    attention_output: Array
    moe_input: Array
    moe_output: Array
    index_scores: Array | None


@dataclass(frozen=True)
class Output:
    """Results for the `n` rows of one call.

    `logits` `[n, V]`; `hidden` `[n, H]` collapsed, before the final norm; `normed` `[n, H]` after it; `features`
    `[n, targets * H]` for the draft; `selected` maps an index source to the ascending entry ids of each row; `candidates`
    are the ascending block ids of each row; `layers` is filled when the call was made with `record=True`.
    """

    logits: Array
    hidden: Array
    normed: Array
    features: Array
    selected: dict[int, list[Array]]
    candidates: list[Array]
    layers: dict[int, LayerRecord] = field(default_factory=dict)


@dataclass(frozen=True)
class DraftOutput:
    """`tokens` `[B]`, `logits` `[B, V]`, raw confidence logits `[B]`, collapsed hidden rows `[B, H]`."""

    tokens: Array
    logits: Array
    confidences: Array
    hidden: Array


def appended(kept: Array, new: Array, most: int | None = None) -> Array:
    """`kept` followed by `new`, cut to the last `most` rows."""
    rows = np.concatenate((kept, new))
    return rows if most is None else rows[max(len(rows) - most, 0) :]
