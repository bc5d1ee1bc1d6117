"""What the scheduler knows of running sequences, one numpy column a fact, indexed by slot: the hot path works on whole columns.

`length` counts committed tokens; `steps` and `pending` what steps in flight may still add. docs/runtime.md, 3.2.
"""

import numpy as np

from tapeout.runtime.request import Sequence


class Columns:
    """Facts of `slots` slots. `epoch` grows whenever a slot changes hands, so results of an earlier holder are told apart."""

    def __init__(self, slots: int, drafts: int) -> None:
        self.length = np.zeros(slots, np.int64)
        self.stop_at = np.zeros(slots, np.int64)  # tokens with which the sequence surely ends
        self.steps = np.zeros(slots, np.int64)  # steps in flight that yield a token
        self.pending = np.zeros(slots, np.int64)  # tokens that they may yield
        self.capacity = np.zeros(slots, np.int64)  # tokens that the held blocks can hold
        self.named = np.zeros(slots, np.int64)  # blocks that have been named
        self.epoch = np.zeros(slots, np.int64)
        self.watch = np.zeros(slots, np.bool_)  # every token must be looked at by itself
        self.last = np.zeros(slots, np.int32)
        self.most_drafts = np.zeros(slots, np.int64)
        self.temperature = np.zeros(slots, np.float64)
        self.top_p = np.ones(slots, np.float64)
        self.top_k = np.zeros(slots, np.int64)
        self.seed = np.zeros(slots, np.int64)
        self.rates = np.zeros((2, slots, drafts), np.float64)  # survival of the drafts of the newest step, and of the one before
        self.rated = np.full((2, slots), -1, np.int64)  # the step that each is of
        self.confidences = np.zeros((slots, drafts), np.float64)  # of the newest drafts, as the head gave them
        self.has_block = np.zeros(slots, np.bool_)  # those confidences are of drafts, behind the newest token
        self.drafted = np.zeros(slots, np.int64)  # tokens drafted behind the newest token
        self.accepted = np.zeros(slots, np.float64)  # faded mean of accepted drafts
        self.undrafted = np.zeros(slots, np.int64)  # steps since the last block

    def start(self, slot: int, sequence: Sequence, max_context: int, drafts: int) -> None:
        """Writes the facts of a sequence that has just got the slot."""
        params, seed = sequence.request.params, sequence.request.seed
        self.length[slot] = sequence.target
        self.stop_at[slot] = min(len(sequence.request.prompt) + params.max_tokens, max_context + 1)
        self.steps[slot] = self.pending[slot] = self.capacity[slot] = self.named[slot] = 0
        self.watch[slot] = bool(params.stop_token_ids or params.min_tokens or sequence.text is not None)
        self.most_drafts[slot] = min(params.most_drafts, drafts)
        self.temperature[slot], self.top_p[slot], self.top_k[slot] = params.temperature, params.top_p, params.top_k
        self.seed[slot] = seed - (1 << 64) if seed >> 63 else seed
        self.rated[:, slot] = -1
        self.drafted[slot] = self.undrafted[slot] = 0
        self.has_block[slot] = False
        self.accepted[slot] = drafts  # until something is known every block is worth its time

    def end(self, slot: int) -> None:
        """The slot is given up: whatever is in flight for it counts no more."""
        self.epoch[slot] += 1
        self.steps[slot] = self.pending[slot] = 0
