"""Which rows a prompt runs through which half of the model when earlier state is reused: bounded replay as plain numbers and arrays.

A plan is a pure function of prompt length, hit, snapshots and rules; chunks are cut from it. What is promised: no row reads a window
entry that was not written for it, no cached block is written again, and every cut of the prompt leaves the same rings. Which hit and
snapshots there are is the prefix index's business. docs/planning.md, replay.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from tapeout.runtime.errors import OptionRefused

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Mode(Enum):
    """Exact: all rows run everywhere. Mask: all rows run, rows before the keep region see no window. Compact: they do not run."""

    EXACT = "exact"
    MASK = "mask"
    COMPACT = "compact"


@dataclass(frozen=True)
class ReplayRules:
    """Sizes in tokens: the window, `keep` rows that the decoder half runs, backtracking of verification, positions of a cache block.

    `is_whole`: snapshots hold the windows of both halves, so that the exact mode can go on from one. `replays`: rows behind cached blocks can
    run without writing them; where they cannot, only a snapshot makes a hit, and what is behind it is computed anew.
    """

    mode: Mode
    keep: int
    window: int = 128
    backtrack: int = 6
    block: int = 128
    is_whole: bool = False
    replays: bool = True

    def __post_init__(self) -> None:
        for name in ("window", "backtrack", "block"):
            if getattr(self, name) < 1:
                raise OptionRefused(f"ReplayRules.{name}", getattr(self, name), "at least 1")
        if self.mode is not Mode.EXACT and self.keep < self.window + self.backtrack:
            raise OptionRefused("ReplayRules.keep", self.keep, f"at least window + backtrack = {self.window + self.backtrack}",
                                remedy="keep more rows, or choose the exact mode")

    @property
    def ring(self) -> int:
        """Entries of a window ring: no rejected draft may overwrite what the next window needs."""
        return self.window + self.backtrack


def keep_rows(window: int, backtrack: int, row_tile: int = 1) -> int:
    """The fewest rows to keep that fill whole row tiles of the prompt kernels."""
    return -(-(window + backtrack) // row_tile) * row_tile


@dataclass(frozen=True)
class ReplayPlan:
    """How one prompt is computed. Positions are absolute; a prompt is `length` tokens (prompt and output when it is computed again).

    The encoder half runs rows first_row .. length-1; its windows are cut at `encoder_floor`; blocks before `write_from` are cached and stay
    as they are. `restore_at`: put back the window snapshot that ends there. The decoder half keeps rows from `keep_from` on, with windows
    cut at `decoder_floor`. `lineage`: None if everything computed is exact, else the hit that it depends on.
    """

    rules: ReplayRules
    length: int
    first_row: int
    write_from: int
    restore_at: int | None
    encoder_floor: int
    keep_from: int
    decoder_floor: int
    lineage: int | None

    @property
    def encoder_rows(self) -> int:
        """Rows through the encoder half."""
        return self.length - self.first_row

    @property
    def decoder_rows(self) -> int:
        """Rows through the decoder half when each is run once, in the chunk that holds it or in the last."""
        return self.length - (self.keep_from if self.rules.mode is Mode.COMPACT else self.first_row)

    @property
    def replayed_rows(self) -> int:
        """Rows run again although their blocks are cached."""
        return max(0, self.write_from - self.first_row)


def replay_plan(length: int, hit: int, snapshots: Collection[int], rules: ReplayRules) -> ReplayPlan:
    """The plan for a prompt of `length` tokens whose first `hit` tokens have cached blocks; `snapshots` are positions where the window
    state of the encoder half is stored. Of replay and snapshots the way with fewer rows is taken, of equals the exact one.

    Raises OptionRefused for lengths below 1 and hits below 0.
    """
    if length < 1 or hit < 0:
        raise OptionRefused("replay, length and hit", (length, hit), "a length of at least 1 and a hit of at least 0")
    usable = min(hit, length - 1) // rules.block * rules.block
    is_exact = rules.mode is Mode.EXACT
    if not usable or (is_exact and not rules.is_whole):
        return _from_start(length, rules)
    keep_from = 0 if is_exact else max(0, length - rules.keep)
    latest = latest_restore(length, hit, rules)
    restored = max((s for s in snapshots if 0 < s <= latest and s % rules.block == 0), default=0)
    # A hit of a window or less saves nothing: its replay would compute all of it.
    replayed = min(usable - rules.window, keep_from) if usable > rules.window and rules.replays and not is_exact else 0
    if max(restored, replayed) <= 0:
        return _from_start(length, rules)
    if restored >= replayed:
        write_from = usable if rules.replays and not is_exact else restored
        return ReplayPlan(rules, length, restored, write_from, restored, 0, keep_from, keep_from, None)
    return ReplayPlan(rules, length, replayed, usable, None, replayed, keep_from, max(keep_from, replayed), usable)


def latest_restore(length: int, hit: int, rules: ReplayRules) -> int:
    """The last place where a stored window helps a prompt: within the hit, before its last token and, where rows are kept, before the first."""
    latest = min(hit, length - 1) if rules.mode is Mode.EXACT else min(hit, length - 1, max(0, length - rules.keep))
    return latest // rules.block * rules.block


def _from_start(length: int, rules: ReplayRules) -> ReplayPlan:
    keep_from = 0 if rules.mode is Mode.EXACT else max(0, length - rules.keep)
    return ReplayPlan(rules, length, 0, 0, None, 0, keep_from, keep_from, None)


@dataclass(frozen=True)
class ChunkRows:
    """Rows of one chunk. All arrays are [rows] but those of the decoder, which are [decoder rows].

    `window_from`, `decoder_window_from`: the first position each row's window shows; one past the row's own position means none.
    `writes_block`: rows whose global entries are stored. `ring_slot`, `decoder_ring_slot`: where the window entry goes, -1 for nowhere.
    `output`: the decoder row that yields logits, None before the last chunk.
    """

    positions: Ints
    window_from: Ints
    writes_block: Bools
    ring_slot: Ints
    decoder_positions: Ints
    decoder_window_from: Ints
    decoder_ring_slot: Ints
    output: int | None


def chunk_rows(plan: ReplayPlan, start: int, count: int) -> ChunkRows:
    """Rows `start` .. `start + count` - 1 of a plan. Raises OptionRefused for rows outside it.

    Kept rows run in the chunk that holds them; a chunk before the keep region has no decoder rows at all.
    """
    rules = plan.rules
    if count < 1 or start < plan.first_row or start + count > plan.length:
        raise OptionRefused("replay chunk", f"rows {start} to {start + count}", f"at least one of {plan.first_row} to {plan.length}")
    positions = np.arange(start, start + count)
    decoder = positions[positions >= plan.keep_from] if rules.mode is Mode.COMPACT else positions
    return ChunkRows(
        positions,
        _window_from(positions, plan.encoder_floor, rules),
        positions >= plan.write_from,
        _ring_slots(positions, positions[-1], 0, rules),
        decoder,
        _window_from(decoder, plan.decoder_floor, rules),
        _ring_slots(decoder, positions[-1], plan.keep_from, rules),
        len(decoder) - 1 if start + count == plan.length else None,
    )


def _window_from(positions: Ints, floor: int, rules: ReplayRules) -> Ints:
    """max(p - W + 1, floor), at most p + 1, which is an empty window."""
    return np.clip(np.maximum(positions - rules.window + 1, floor), 0, positions + 1)


def _ring_slots(positions: Ints, last: int, floor: int, rules: ReplayRules) -> Ints:
    """p mod ring for the chunk's last `ring` rows: an earlier row would be overwritten within the chunk, in no fixed order."""
    return np.where((positions > last - rules.ring) & (positions >= floor), positions % rules.ring, -1)
