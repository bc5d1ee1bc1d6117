"""Verification of drafts by arithmetic on columns: how many rows each sequence gets, and what the sampled rows accept.

A draft is accepted where it is the token that its row yields by itself, drawn by seed and position or the largest logit: the output is the
same token for token as without drafts, whatever is drafted and however many are verified. docs/runtime.md, 4.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tapeout.runtime.calibration import mapped
from tapeout.runtime.planner import split, survival
from tapeout.runtime.step import Step

Int64 = NDArray[np.int64]
Tokens = NDArray[np.int32]


class Accepted(NamedTuple):
    """Of each sequence, tokens emitted, accepted drafts and one [sequences], and the number of the output that yields its newest token."""

    counts: Int64
    newest: Int64


def verified_widths(step: Step, confidences: NDArray[np.float64]) -> Int64:
    """Rows of each decode sequence: all it may have, or the step's total split by the newest confidences [sequences, positions]."""
    if step.draft_total is None or not len(step.slots):
        return step.widths
    if step.monotone is not None:
        confidences = mapped(confidences, step.monotone)
    rates = np.where(np.arange(confidences.shape[1]) < (step.widths - 1)[:, None], survival(confidences), -1.0)
    return split(rates, step.draft_total)


def accepted(sampled: Tokens, drafts: Tokens, widths: Int64) -> Accepted:
    """What rows accept: `sampled` [outputs] are the tokens that all rows yield, sequence by sequence, `widths` [sequences] rows of each,
    `drafts` [sequences, positions] the tokens of rows behind the first."""
    first = np.cumsum(widths) - widths
    if not drafts.shape[1] or int(widths.max(initial=1)) == 1:
        return Accepted(np.ones(len(widths), np.int64), first)
    place = np.arange(drafts.shape[1])
    is_row = place < (widths - 1)[:, None]
    found = sampled[np.where(is_row, first[:, None] + place, 0)]
    won = np.cumprod(is_row & (found == drafts), axis=1, dtype=np.int64).sum(axis=1)
    return Accepted(won + 1, first + won)


def flat(first: Int64, counts: Int64) -> Int64:
    """Numbers first[i], first[i] + 1, ..., `counts[i]` of them for each i, one after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    numbers: Int64 = np.arange(total) - np.repeat(ends - counts, counts) + np.repeat(first, counts)
    return numbers
