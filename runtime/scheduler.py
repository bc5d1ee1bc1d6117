"""The scheduler: one core for synchronous and asynchronous driving. `propose` makes the next step, `commit` (commit.py) applies a result.

A step takes decode rows first, then pieces of prompts up to the row and time budget. Memory is taken here, piece by piece, within what the
ledger promised; when decoding needs a block and none is left, somebody cheap gives way. Nothing depends on whether earlier steps were
committed already, except which tokens are known by number. docs/runtime.md, 3.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain as joined
from math import inf

import numpy as np

from tapeout.runtime import cost
from tapeout.runtime.blocks import BlockPool, Named
from tapeout.runtime.columns import Columns
from tapeout.runtime.commit import committed, lost
from tapeout.runtime.drafting import OUR_RULES, Drafting, DraftOptions
from tapeout.runtime.errors import BlocksExhausted, OptionRefused
from tapeout.runtime.fairness import urgency, victim
from tapeout.runtime.planner import Rules
from tapeout.runtime.prefix import Hit, Payloads, PrefixIndex, boundary_outside
from tapeout.runtime.replay import Mode
from tapeout.runtime.request import Event, Status
from tapeout.runtime.request import Sequence as Branch
from tapeout.runtime.roster import Chores, Roster
from tapeout.runtime.state import SlotPool
from tapeout.runtime.stats import Statistics
from tapeout.runtime.step import Draws, FollowingRows, Int64, KnownRows, Piece, Restore, Save, Step, StepResult
from tapeout.runtime.trace import Recorder

NOBODY = np.zeros(0, np.int64)
MOST_PASSED = 256  # prompts of tenants at their cap that are passed over in one step


@dataclass(frozen=True)
class SchedulerOptions:
    """Bounds and choices. Rows are of one step; `step_ms` bounds the predicted time of a step's prompt pieces, None: rows alone do.

    `drafts`: the most that the device verifies for a sequence. `plan`, `decode_times`, `planner_rules`, `block_ms`, `is_calibrating`: how many drafts
    are verified and drafted (`DraftOptions`).
    `prompt_rows`: what drafts leave to prompts that wait. `overtakers`: waiting prompts that may be tried behind one that does not fit.
    `min_run_steps`: a preempted request is spared for so long. `copy_slack`: rows that a sequence may have in flight when its state is
    copied for another branch (the ring's backtracking); None: the device cannot copy, branches compute their prompts themselves.
    """

    max_rows: int
    max_context: int
    max_outputs: int | None = None
    drafts: int = 0
    plan: str = "all"
    decode_times: cost.DecodeTable | None = None
    planner_rules: Rules = OUR_RULES
    block_ms: tuple[float, float] | None = None
    is_calibrating: bool = True
    chunk_tokens: int | None = None
    alignment: int = cost.CHUNK_ALIGNMENT
    step_ms: float | None = None
    prompt_rows: int | None = None
    max_wait_ms: float = 10_000.0
    overtakers: int = 8
    min_run_steps: int = 8
    tenant_sequences: int | None = None
    copy_slack: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_rows", 1), ("max_context", 1), ("alignment", 1), ("drafts", 0), ("overtakers", 0), ("min_run_steps", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise OptionRefused(f"SchedulerOptions.{name}", repr(value), f"a whole number of at least {least}")
        if self.alignment > self.max_rows:
            raise OptionRefused("SchedulerOptions.alignment", self.alignment, f"at most max_rows, {self.max_rows}",
                                remedy="allow more rows in a step, or smaller blocks")  # fmt: skip
        _ = self.drafting

    @property
    def drafting(self) -> DraftOptions:
        """What concerns drafts. Raises OptionRefused."""
        return DraftOptions(self.drafts, self.plan, self.decode_times, self.planner_rules, self.block_ms, self.is_calibrating)


class _Verdict(Enum):
    ADMITTED = 1
    DOES_NOT_FIT = 2
    NO_SLOT = 3
    CAPPED = 4


class Scheduler:
    """Requests in, steps out, results in, events out. Not thread safe; `roster` has the requests."""

    def __init__(self, options: SchedulerOptions, pool: BlockPool, slots: int, prefix: PrefixIndex | None = None, *,
                 clock: Callable[[], float], eos_id: int | None = None, recorder: Recorder | None = None) -> None:  # fmt: skip
        self.options, self.eos_id, self.prefix, self.pool = options, eos_id, prefix, pool
        self.columns = Columns(slots, options.drafts)
        self.statistics = Statistics()
        self.roster = Roster(pool, SlotPool(slots), self.columns, prefix, options.max_wait_ms / 1e3, clock, self.statistics, recorder)
        self.roster.max_context, self.roster.drafts, self.roster.copy_slack = options.max_context, options.drafts, options.copy_slack
        self.prefill_fit, self.decode_fit = cost.new_prefill_fit(), cost.new_fit([1, 64])
        self.drafting = Drafting(options.drafting)
        self.number = 0
        self._proposed_s: dict[int, float] = {}

    @property
    def has_work(self) -> bool:
        """Says whether there is something to run or to report, now or once steps in flight are committed."""
        roster = self.roster
        return bool(roster.waiting or roster.prefilling or roster.decoding or roster.events or roster.chores.saves)

    def gauges(self) -> dict[str, float]:
        """What holds at this moment, for `Statistics.json_line` and `prometheus`."""
        roster, pool = self.roster, self.pool
        found: dict[str, float] = {
            "running": len(roster.prefilling) + len(roster.decoding),
            "waiting": len(roster.waiting),
            "slots_free": len(roster.slots),
            "blocks_free": pool.free_blocks,
            "blocks_cached": pool.cached_blocks,
            "blocks_unpromised": pool.unpromised_blocks,
            "blocks_evicted": pool.evictions,
        }
        return found | ({} if self.prefix is None else self.prefix.gauges()) | self.drafting.gauges()

    def events(self) -> list[Event]:
        """What has happened since the last call, in order."""
        events, self.roster.events = self.roster.events, []
        return events

    # -- proposing

    def propose(self) -> Step | None:
        """The next step, or None if there is nothing to run now."""
        now = self.roster.clock()
        self.roster.expire(now)
        self.roster.put_right()
        slots, widths = self._decode_rows()
        drafts = int(widths.sum()) - len(slots)
        draft_total = self.drafting.total(self.columns, slots, drafts, self.number)
        rows = self.options.max_rows - len(slots) - (drafts if draft_total is None else draft_total)
        pieces, saves = self._pieces(now, rows, self.options.max_rows - rows)
        if not len(slots) and not pieces and not self.roster.chores.saves:
            return None
        return self._step(slots, widths, draft_total, pieces, saves, now)

    def commit(self, step: Step, result: StepResult) -> None:
        """Applies what a step gave: tokens join their sequences, full blocks get names, those that ended leave."""
        started = self._proposed_s.pop(step.number, None)
        committed(self.roster, step, result, self.eos_id, self.drafting)
        context = float(self.columns.length[step.slots].mean()) if len(step.slots) else 0.0
        self.statistics.observe_step(step, result, self.roster.slots.count, context)
        if self.roster.recorder is not None and started is not None:
            tokens = int(result.counts.sum())
            self.roster.recorder.stepped(step.number, started, self.roster.clock(), int(result.widths.sum()), step.prompt_rows, tokens)
        if self.options.step_ms is not None:
            self._learn(step, result)
        if self.options.plan != "all":
            self.drafting.took(step.number, int(result.widths.sum()), context, result.ms, is_decode=not step.pieces)

    def lose(self, step: Step, reason: str) -> None:
        """Ends the requests of a step that the device lost; the others are unharmed."""
        self._proposed_s.pop(step.number, None)
        self.drafting.forget(step.number)
        lost(self.roster, step, reason)

    # -- decode rows

    def _decode_rows(self) -> tuple[Int64, Int64]:
        """Slots that get rows and the most rows of each; blocks for them are taken.

        Every running sequence has its row: a prompt ends only in a step that had a row and an output for it beside theirs.
        """
        columns = self.columns
        if not self.roster.decoding:
            return NOBODY, NOBODY
        slots = np.fromiter(self.roster.decoding, np.int64, len(self.roster.decoding))
        left = columns.stop_at[slots] - columns.length[slots] - columns.steps[slots]
        if left.min() < 1:  # steps in flight already end these
            slots, left = slots[left > 0], left[left > 0]
        widths = np.ones(len(slots), np.int64)
        if self.options.drafts:
            widths = np.minimum(1 + np.minimum(columns.most_drafts[slots], columns.drafted[slots]), left)
            widths = _within(widths, self._draft_rows(len(slots)))
        top = columns.length[slots] - 1 + columns.pending[slots] + widths
        room = columns.capacity[slots]
        if (top > room).any():
            return self._grown(slots, widths, top, room)
        return slots, widths

    def _draft_rows(self, sequences: int) -> int:
        """Rows that drafts may take: what is left, but for a share of prompts that wait or are under way."""
        left = min(self.options.max_rows, self.options.max_outputs or self.options.max_rows) - sequences
        if self.roster.prefilling or self.roster.waiting:
            share = self.options.prompt_rows if self.options.prompt_rows is not None else self.options.max_rows // 4
            left -= max(share, self.options.alignment)
        return max(0, left)

    def _grown(self, slots: Int64, widths: Int64, top: Int64, room: Int64) -> tuple[Int64, Int64]:
        """Takes blocks for those that need them, oldest first; who does not even get one row's worth gives way or is waited for."""
        widths, branches = widths.copy(), [self.roster.by_slot[slot] for slot in slots.tolist()]
        limit = min(self.pool.tokens_per_slot, self.roster.max_context)  # rows beyond it, of drafts in flight, are not run
        for i in np.flatnonzero(top > room).tolist():
            branch, slot = branches[i], int(slots[i])
            if branch is None or branch.slot != slot:
                continue
            wanted = min(int(top[i]), limit)
            least = min(int(top[i] - widths[i]) + 1, limit)
            if self.pool.blocks_for(wanted) - self.pool.held_count(slot) > self.pool.unpromised_blocks:
                wanted = max(least, min(wanted, int(room[i])))
                widths[i] = max(1, wanted - least + 1)
                if wanted > room[i] and not self._make_room(branch, slot, wanted):
                    continue
            self.pool.reserve(slot, wanted)
            self.columns.capacity[slot] = self.pool.held_count(slot) * self.pool.block_tokens
        stays = np.array([branch is not None and branch.slot == slot for branch, slot in zip(branches, slots.tolist(), strict=True)])
        return slots[stays], widths[stays]

    def _make_room(self, branch: Branch, slot: int, tokens: int) -> bool:
        """Preempts until `slot` can hold `tokens`. False if the sequence itself had to give way, or can never go on."""
        while self.pool.blocks_for(tokens) - self.pool.held_count(slot) > self.pool.unpromised_blocks:
            candidates = [(b, self._cost_of_recompute(b)) for b in self._running()]
            chosen = victim(candidates, self.number, self.options.min_run_steps) if len(candidates) > 1 else branch
            if chosen is branch and len(candidates) == 1:
                found = f"{self.pool.free_blocks + self.pool.held_count(slot)} of {self.pool.count - 1}"
                reason = BlocksExhausted(f"request {branch.request.id}", f"a need of {self.pool.blocks_for(tokens)} blocks", found)
                self.roster.finish(branch, Status.PREEMPTED, error=str(reason))
                return False
            if chosen is None:
                return False
            self.roster.preempt(chosen)
            if chosen is branch:
                return False
        return True

    def _running(self) -> list[Branch]:
        return list(joined(self.roster.decoding.values(), self.roster.prefilling.values()))

    def _cost_of_recompute(self, branch: Branch) -> int:
        """Rows that computing a sequence again takes: what is not in named blocks, and the replay of a window behind those."""
        slot = branch.slot if branch.slot is not None else 0
        computed = int(self.columns.length[slot]) - 1 if slot in self.roster.decoding else branch.computed
        kept = int(self.columns.named[slot]) * self.pool.block_tokens
        if self.prefix is None or kept <= self.prefix.rules.window:
            return computed
        return max(0, computed - kept) + self.prefix.rules.window

    # -- prompt pieces

    def _pieces(self, now: float, rows: int, outputs: int) -> tuple[list[Piece], list[Save]]:
        """Pieces of prompts in the order of urgency while rows, time and outputs remain."""
        roster = self.roster
        pieces: list[Piece] = []
        saves: list[Save] = []
        aside: list[Branch] = []
        rows, outputs_left = min(rows, cost.STEP_TOKENS), (self.options.max_outputs or self.options.max_rows) - outputs
        left_ms = inf if self.options.step_ms is None else self.options.step_ms - self._decode_ms(outputs)
        under_way = sorted(roster.prefilling.values(), key=lambda b: urgency(b, now, inf), reverse=True)
        may_admit = True
        while rows > 0 and outputs_left > 0 and (under_way or (may_admit and roster.waiting)):
            branch = roster.waiting.first(now) if may_admit else None
            if under_way and (branch is None or urgency(under_way[-1], now, inf) <= urgency(branch, now, roster.waiting.max_wait_s)):
                branch = under_way.pop()
            elif branch is not None:
                verdict = self._admit(branch, rows, left_ms, now)
                if verdict in (_Verdict.DOES_NOT_FIT, _Verdict.CAPPED):
                    is_old = urgency(branch, now, roster.waiting.max_wait_s)[0] == 0
                    passed = MOST_PASSED if verdict is _Verdict.CAPPED else 0 if is_old else self.options.overtakers
                    may_admit = len(aside) < passed
                    roster.waiting.leave(branch)
                    aside.append(branch)
                if verdict is _Verdict.NO_SLOT:
                    may_admit = False
                if verdict is not _Verdict.ADMITTED:
                    continue
            else:
                break
            piece = self._cut(branch, rows, left_ms, is_first=not pieces)
            if piece is None:
                continue
            pieces.append(piece)
            rows, outputs_left = rows - len(piece.tokens), outputs_left - piece.yields
            left_ms -= self._piece_ms(piece)
            saves += self._saves(branch, piece)
        for branch in aside:
            roster.waiting.join(branch)
        return pieces, saves

    def _admit(self, branch: Branch, rows: int, left_ms: float, now: float) -> _Verdict:
        """Gives a waiting prompt its place if a slot is free, its blocks can be promised, and a piece of it fits this step."""
        roster, cap = self.roster, self.options.tenant_sequences
        if not len(roster.slots):
            return _Verdict.NO_SLOT
        if cap is not None and roster.tenants[branch.request.tenant] >= cap:
            return _Verdict.CAPPED
        payloads: Payloads | None = None
        while payloads is None:  # what was damaged or gone is no part of the next lookup
            hit = self._looked_up(branch)
            if not self._chunk(branch, 0 if hit is None else hit.plan.first_row, rows, left_ms):
                return _Verdict.NO_SLOT
            if not self._fits(branch, hit):
                return _Verdict.DOES_NOT_FIT
            payloads = Payloads() if self.prefix is None or hit is None else self.prefix.read(hit, branch.keys)
        roster.admit(branch, hit, now)
        if hit is not None and self.prefix is not None:
            self.prefix.count(hit)
            self._put_back(branch, hit, payloads)
        return _Verdict.ADMITTED

    def _looked_up(self, branch: Branch) -> Hit | None:
        """What is cached of a prompt."""
        request = branch.request
        return None if self.prefix is None else self.prefix.lookup(branch.tokens, request.images, request.tenant, request.id, branch.keys)

    def _fits(self, branch: Branch, hit: Hit | None) -> bool:
        """Says whether a prompt's blocks can be promised and each running sequence can still have the one that it may need soon, its own included:
        one that gives way as soon as it is computed was computed for nothing."""
        pool, shared = self.pool, () if hit is None else hit.blocks
        most = min(len(branch.request.prompt) + branch.request.params.max_tokens - 1, self.roster.max_context)  # the last token needs no place
        needed = pool.blocks_for(max(branch.target, min(branch.target + 1, most))) - len(shared) + sum(map(pool.is_cached, shared))
        return needed + len(self.roster.decoding) <= pool.unpromised_blocks

    def _put_back(self, branch: Branch, hit: Hit, payloads: Payloads) -> None:
        """Schedules what the device must load before the prompt's first row."""
        slot, chores = branch.slot, self.roster.chores
        if slot is None:
            return
        if hit.loads:
            self.pool.reserve(slot, hit.tokens)
        for block, key, stored in zip(self.pool.held(slot)[len(hit.blocks) :], hit.loads, payloads.blocks, strict=True):
            self.pool.publish(block, Named(key, stored.lineage, stored.session))
            chores.loads.append((block, stored.payload))
            if stored.lineage is not None:
                branch.lineage = max(branch.lineage or 0, stored.lineage)
        self.statistics.counts.blocks_loaded += len(hit.loads)
        if payloads.window is not None and hit.plan.restore_at is not None:
            chores.restores.append(Restore(slot, hit.plan.restore_at, payloads.window.payload))
            branch.lineage = payloads.window.lineage if branch.lineage is None else branch.lineage
            self.statistics.counts.snapshots_restored += 1

    def _chunk(self, branch: Branch, start: int, rows: int, left_ms: float, is_first: bool = True) -> int:
        """Rows of a prompt from `start` on that fit now; 0 for none. A cut never falls inside an image."""
        todo, options = branch.target - start, self.options
        most = min(rows, options.chunk_tokens or rows)
        keep = self.prefix.rules.keep if self.prefix is not None and self.prefix.rules.mode is Mode.COMPACT else 0
        size = cost.chunk(self.prefill_fit, start, todo, left_ms=left_ms, keep=keep, step_tokens=most, alignment=1)
        if size < todo:  # a piece that does not end its prompt ends where a block does
            size = max(0, (start + size) // options.alignment * options.alignment - start)
        smallest = options.alignment - start % options.alignment
        if not size and left_ms < inf and is_first and rows >= smallest:
            size = min(todo, smallest)  # where nothing fits the time, the smallest piece runs: prompts must not starve
        return self._outside_images(branch, start, size, rows, is_first) if size < todo else size

    def _outside_images(self, branch: Branch, start: int, size: int, rows: int, is_first: bool) -> int:
        for image in branch.request.images:
            if image.start < start + size < image.end:
                whole = image.end - start
                return whole if is_first and whole <= rows else max(0, image.start - start)
        return size

    def _cut(self, branch: Branch, rows: int, left_ms: float, is_first: bool) -> Piece | None:
        """The next piece of a prompt, with blocks for it; None if nothing of it fits."""
        slot, start = branch.slot, branch.scheduled
        size = self._chunk(branch, start, rows, left_ms, is_first)
        if not size or slot is None:
            return None
        size = self._until_snapshot(branch, start, size)
        end = start + size
        self.pool.reserve(slot, end)
        columns = self.columns
        columns.capacity[slot] = self.pool.held_count(slot) * self.pool.block_tokens
        branch.scheduled = end
        self.roster.waiting.served(branch, size)
        is_last = end == branch.target
        yields = is_last and branch.request.params.max_tokens > 0
        if is_last:
            branch.resumed_step = self.number
            del self.roster.prefilling[slot]
            self.roster.decoding[slot] = branch
            columns.steps[slot] += 1
            columns.pending[slot] += 1
        return Piece(branch, slot, int(columns.epoch[slot]), start, branch.tokens[start:end], is_last, yields, branch.replay)

    # -- snapshots

    def _until_snapshot(self, branch: Branch, start: int, size: int) -> int:
        """Cuts a piece where a window state shall be kept."""
        boundary = self._wanted_snapshot(branch, start)
        return boundary - start if boundary is not None and boundary < start + size else size

    def _wanted_snapshot(self, branch: Branch, start: int) -> int | None:
        """The next boundary behind `start` whose window state shall be kept: the prompt's last one, and where nothing can be replayed the one
        where others have begun alike, and the last one that leaves all kept rows of such a prompt to compute."""
        prefix, block, images = self.prefix, self.pool.block_tokens, branch.request.images
        if prefix is None or prefix.snapshots is None or not branch.keys:
            return None
        rules, ends = prefix.rules, {boundary_outside(images, branch.target, block)}
        if not rules.replays:
            latest = branch.target if rules.mode is Mode.EXACT else max(0, branch.target - rules.keep)
            ends |= {boundary_outside(images, min(branch.shared_end, latest), block), boundary_outside(images, latest, block)}
        for end in sorted(ends):
            if end > start and prefix.may_keep_snapshot(branch.replay, end) and branch.keys[end // block - 1] not in prefix.snapshots:
                return end
        return None

    def _saves(self, branch: Branch, piece: Piece) -> list[Save]:
        end = piece.start + len(piece.tokens)
        if self._wanted_snapshot(branch, piece.start) != end:
            return []
        key = branch.keys[end // self.pool.block_tokens - 1]
        return [Save(piece.slot, piece.epoch, end, key, branch.lineage, branch.request.id)]

    # -- cost

    def _decode_ms(self, rows: int) -> float:
        return float(self.decode_fit.values @ np.array([1.0, rows])) if rows else 0.0

    def _piece_ms(self, piece: Piece) -> float:
        if self.options.step_ms is None:
            return 0.0
        alone = cost.prefill_ms(self.prefill_fit, [cost.Chunk(len(piece.tokens), piece.start, piece.kept_rows)])
        return alone - cost.prefill_ms(self.prefill_fit, [])

    def _learn(self, step: Step, result: StepResult) -> None:
        """Fits the costs to a committed step: decode steps their own, prompt pieces what is beyond that."""
        rows = int(result.widths.sum())
        if not step.pieces:
            self.decode_fit = cost.observed(self.decode_fit, [1, rows], result.ms)
            return
        pieces = [cost.Chunk(len(p.tokens), p.start, p.kept_rows) for p in step.pieces]
        ms = max(0.0, result.ms - self._decode_ms(rows))
        self.prefill_fit = cost.observed(self.prefill_fit, cost.prefill_features(pieces), ms)

    # -- putting a step together

    def _step(self, slots: Int64, widths: Int64, draft_total: int | None, pieces: Sequence[Piece], saves: Sequence[Save],
              now: float) -> Step:  # fmt: skip
        columns, roster = self.columns, self.roster
        follows = columns.steps[slots] > 0
        if follows.any() and not follows.all():
            order = np.argsort(follows, kind="stable")
            slots, widths, follows = slots[order], widths[order], follows[order]
        known = slots[~follows]
        branches = [roster.by_slot[slot] for slot in slots.tolist()]
        columns.steps[slots] += 1
        columns.pending[slots] += widths
        chores, roster.chores = roster.chores, Chores()
        drawn = slots if not pieces else np.concatenate([slots, np.array([p.slot for p in pieces if p.yields], np.int64)])
        step = Step(
            self.number, branches, slots, columns.epoch[slots], widths,  # type: ignore[arg-type]
            KnownRows(known, columns.length[known] - 1, columns.last[known]), FollowingRows(slots[follows]), draft_total, pieces,
            Draws(columns.temperature[drawn], columns.top_k[drawn], columns.top_p[drawn], columns.seed[drawn]),
            self.drafting.lengths(columns, drawn) if self.options.drafts else None, self.drafting.map(self.number),
            chores.block_copies, chores.slot_copies, chores.loads, chores.restores, saves, chores.saves,
        )  # fmt: skip
        self._proposed_s[self.number] = now
        self.number += 1
        return step


def _within(widths: Int64, drafts: int) -> Int64:
    """Widths with at most `drafts` drafts in all, shared evenly from the first sequence on."""
    if int(widths.sum()) - len(widths) <= drafts:
        return widths
    each, more = divmod(drafts, len(widths))
    shared: Int64 = np.minimum(widths, 1 + each + (np.arange(len(widths)) < more))
    return shared

