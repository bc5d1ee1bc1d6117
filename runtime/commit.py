"""Applying what a step gave: the only place where tokens join sequences, blocks get names and sequences end by themselves.

Results of a sequence that lost its slot since the step was proposed (ended, aborted, preempted) are dropped: its epoch tells. Most
sequences take the quick way, a few column operations for all of them; one that may end takes its tokens one by one. docs/runtime.md, 3.4.
"""

from collections.abc import Iterable
from itertools import compress

import numpy as np

from tapeout.runtime.drafting import Drafting
from tapeout.runtime.prefix import chain
from tapeout.runtime.request import LOWEST_LOGPROB, Status, StopRule, TokenEvent, finish_of
from tapeout.runtime.request import Sequence as Branch
from tapeout.runtime.roster import Roster
from tapeout.runtime.state import Snapshot
from tapeout.runtime.step import Int64, Piece, Save, Step, StepResult

Ending = tuple[Branch, Status, str | int]
KEPT_WINDOWS = 2  # of the output of a sequence


def committed(roster: Roster, step: Step, result: StepResult, eos_id: int | None, drafting: Drafting) -> None:
    """Applies a result to the sequences that still are what the step was made for."""
    now = roster.clock()
    alive = roster.columns.epoch[step.slots] == step.epochs
    for slot, reason in result.failed.items():
        _fail(roster, step, slot, reason)
    if result.failed:
        alive &= ~np.isin(step.slots, list(result.failed))
    decoded = step.slots[alive]
    drafting.judged(roster.columns, step.number, decoded, result.widths[alive], result.counts[: len(step.slots)][alive] - 1)
    endings = _decode(roster, step, result, alive, eos_id, now)
    endings += _prompts(roster, step, result, eos_id, now)
    _rate(roster, step, result, alive, drafting)
    _name(roster, _grown(roster, step, alive))
    _keep_windows(roster, step, result, alive)
    _keep_snapshots(roster, step, result)
    for branch, status, stop_reason in endings:
        roster.finish(branch, status, stop_reason)


def lost(roster: Roster, step: Step, reason: str) -> None:
    """Ends all that was part of a step. What others needed of it (copies, loads, restores) never came: they compute their prompts again."""
    roster.statistics.counts.lost_steps += 1
    loaded = {block for block, _ in step.loads}
    waiting = {child for _, child in step.slot_copies} | {restore.slot for restore in step.restores}
    for slot, epoch in [*zip(step.slots.tolist(), step.epochs.tolist(), strict=True), *((p.slot, p.epoch) for p in step.pieces)]:
        branch = roster.by_slot[slot]
        if branch is not None and roster.columns.epoch[slot] == epoch:
            roster.finish_all(branch.request.id, Status.FAILED, reason)
    for slot, branch in enumerate(roster.by_slot):
        if branch is not None and (loaded.intersection(roster.pool.held(slot)) or (slot in waiting and slot in roster.prefilling)):
            roster.preempt(branch)
    for block in loaded:
        roster.pool.withdraw(block)


def _fail(roster: Roster, step: Step, slot: int, reason: str) -> None:
    """Ends the request of a slot whose rows came to nothing. What is kept of it, or was going to be, is nobody else's."""
    branch = roster.by_slot[slot]
    epochs = dict(zip(step.slots.tolist(), step.epochs.tolist(), strict=True)) | {p.slot: p.epoch for p in step.pieces}
    if branch is None or roster.columns.epoch[slot] != epochs.get(slot):
        return
    if roster.prefix is not None:
        roster.prefix.withdraw(slot, branch.keys)
    roster.chores.saves[:] = [save for save in roster.chores.saves if save.slot != slot]
    roster.finish_all(branch.request.id, Status.FAILED, reason)


# -- decode rows


def _decode(roster: Roster, step: Step, result: StepResult, alive: np.ndarray, eos_id: int | None, now: float) -> list[Ending]:
    """Appends the tokens of decode rows; returns the sequences that end."""
    count = len(step.slots)
    if not count:
        return []
    columns, stats = roster.columns, roster.statistics
    counts = result.counts[:count]
    slots = step.slots if alive.all() else step.slots[alive]
    columns.steps[slots] -= 1
    columns.pending[slots] -= step.widths if len(slots) == count else step.widths[alive]
    if len(slots) < count:
        stats.counts.wasted_rows += int(result.widths[~alive].sum())
    ends = np.cumsum(counts)
    tokens = result.tokens[: int(ends[-1])]
    columns.length[slots] += counts if len(slots) == count else counts[alive]
    last = tokens[ends - 1]
    columns.last[slots] = last if len(slots) == count else last[alive]
    suspects = columns.watch[step.slots] | (columns.length[step.slots] >= columns.stop_at[step.slots])
    if eos_id is not None:
        is_eos = tokens == eos_id
        if is_eos.any():
            suspects |= np.logical_or.reduceat(is_eos, ends - counts)
    _count_drafts(roster, step, result, counts, alive)
    return _append(roster, step, result, ends - counts, alive, suspects, eos_id, now)


def _append(roster: Roster, step: Step, result: StepResult, starts: Int64, alive: np.ndarray, suspects: np.ndarray, eos_id: int | None,
            now: float) -> list[Ending]:  # fmt: skip
    events, endings = roster.events, []
    counts, tokens = result.counts.tolist(), result.tokens.tolist()
    logprobs = np.maximum(result.logprobs, LOWEST_LOGPROB).tolist()
    recorder, drafts, confidences, lengths = roster.recorder, result.drafts, result.confidences, _draft_lengths(step, result)
    flags = zip(step.branches, starts.tolist(), counts, alive.tolist(), suspects.tolist(), strict=False)
    emitted, between = 0, roster.statistics.between_tokens_ms
    gaps: dict[float, int] = {}
    for i, (branch, start, count, lives, suspect) in enumerate(flags):
        if not lives:
            continue
        branch.decode_steps += 1
        if suspect:
            ended, joined = _one_by_one(roster, branch, tokens[start : start + count], logprobs[start : start + count], eos_id)
            emitted += joined
            endings += ended
        else:
            request, own = branch.request, branch.tokens
            ordinal = len(own) - len(request.prompt)
            for k in range(start, start + count):
                own.append(tokens[k])
                branch.logprobs.append(logprobs[k])
                events.append(TokenEvent(request.id, ordinal, tokens[k], logprobs[k], request.branch))
                ordinal += 1
            emitted += count
        if lengths[i] and drafts is not None and confidences is not None:
            branch.drafts.append((len(branch.tokens), i, lengths[i], drafts, confidences))
        if branch.last_token_s is not None:
            gap = now - branch.last_token_s
            gaps[gap] = gaps.get(gap, 0) + 1
        branch.last_token_s = now
        if recorder is not None:
            recorder.advanced(branch.request.id, branch.request.branch, now, count)
    for gap, times in gaps.items():
        between.observe(gap * 1e3, times)
    roster.statistics.counts.output_tokens += emitted
    return endings


def _one_by_one(roster: Roster, branch: Branch, tokens: list[int], logprobs: list[float], eos_id: int | None) -> tuple[list[Ending], int]:
    """Appends tokens until one ends the sequence; what follows it is dropped. Returns the ending, if any, and how many joined."""
    request, text = branch.request, branch.text
    for k, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True), 1):
        branch.tokens.append(token)
        branch.logprobs.append(logprob)
        shown = "" if text is None else text.push(token)
        ended = finish_of(branch, eos_id, roster.max_context)
        if ended is not None and text is not None:
            shown += text.finish()
        roster.events.append(TokenEvent(request.id, branch.emitted - 1, token, logprob, request.branch, shown))
        if ended is not None:
            return [(branch, *ended)], k
    return [], len(tokens)


def _count_drafts(roster: Roster, step: Step, result: StepResult, counts: Int64, alive: np.ndarray) -> None:
    stats = roster.statistics
    if int(result.widths.max(initial=1)) == 1:
        stats.verified.observe(0, int(alive.sum()))
        stats.accepted.observe(0, int(alive.sum()))
        return
    verified, accepted = result.widths[alive] - 1, counts[alive] - 1
    for branch, rows, won in zip(compress(step.branches, alive.tolist()), verified.tolist(), accepted.tolist(), strict=True):
        branch.verified += rows
        branch.accepted += won
    stats.counts.drafts_verified += int(verified.sum())
    stats.counts.drafts_accepted += int(accepted.sum())
    counted = [np.bincount(values).tolist() for values in (verified, accepted)]
    stats.judged(*counted)
    for histogram, times_of in zip((stats.verified, stats.accepted), counted, strict=True):
        for value, times in enumerate(times_of):
            if times:
                histogram.observe(value, times)


def _draft_lengths(step: Step, result: StepResult) -> list[int]:
    """Tokens drafted behind each output, a short block or none where the step asked for that."""
    if result.drafts is None:
        return [0] * step.outputs
    return [result.drafts.shape[1]] * step.outputs if step.drafts is None else step.drafts.tolist()  # type: ignore[no-any-return]


# -- prompts


def _prompts(roster: Roster, step: Step, result: StepResult, eos_id: int | None, now: float) -> list[Ending]:
    """Commits pieces; the last piece of a prompt yields its first token. Returns the sequences that end."""
    endings: list[Ending] = []
    output, place = len(step.slots), int(result.counts[: len(step.slots)].sum())
    for piece in step.pieces:
        here, at = output, place
        if piece.yields:
            output, place = output + 1, place + 1
        if roster.columns.epoch[piece.slot] != piece.epoch:
            roster.statistics.counts.wasted_rows += len(piece.tokens)
            continue
        branch = piece.branch
        branch.computed = piece.start + len(piece.tokens)
        if not piece.is_last:
            continue
        roster.columns.steps[piece.slot] -= 1
        roster.columns.pending[piece.slot] -= 1
        if branch.request.branch == 0 and branch.request.params.n > 1:
            roster.fork(branch)
        if not piece.yields:
            endings.append((branch, Status.LENGTH_CAPPED, StopRule.MAX_TOKENS.value))
            continue
        endings += _first(roster, step, branch, piece, result, here, at, eos_id, now)
    return endings


def _first(roster: Roster, step: Step, branch: Branch, piece: Piece, result: StepResult, output: int, place: int, eos_id: int | None,
           now: float) -> list[Ending]:  # fmt: skip
    """Appends the token that a prompt's last row yields."""
    if branch.first_token_s is None:
        branch.first_token_s = now
        roster.statistics.ttft_ms.observe((now - branch.submitted_s) * 1e3)
        if roster.recorder is not None:
            roster.recorder.first_token(branch.request.id, branch.request.branch, now)
    branch.last_token_s = now
    branch.decode_steps += 1
    token, logprob = int(result.tokens[place]), max(float(result.logprobs[place]), LOWEST_LOGPROB)
    roster.columns.length[piece.slot] += 1
    roster.columns.last[piece.slot] = token
    endings, _ = _one_by_one(roster, branch, [token], [logprob], eos_id)
    roster.statistics.counts.output_tokens += 1
    if result.drafts is not None and result.confidences is not None and (length := _draft_lengths(step, result)[output]):
        branch.drafts.append((len(branch.tokens), output, length, result.drafts, result.confidences))
    return endings


# -- what later steps need


def _rate(roster: Roster, step: Step, result: StepResult, alive: np.ndarray, drafting: Drafting) -> None:
    """Remembers how sure the newest drafts are."""
    columns = roster.columns
    if result.confidences is None or not columns.rates.shape[2]:
        return
    lives = np.array([*alive.tolist(), *(columns.epoch[p.slot] == p.epoch for p in step.pieces if p.yields)], np.bool_)
    slots = np.concatenate([step.slots, np.array([p.slot for p in step.pieces if p.yields], np.int64)])[lives]
    drafting.rated(columns, step.number, slots, result.confidences[lives], None if step.drafts is None else step.drafts[lives])
    if drafting.records is not None:
        drafted = columns.has_block[slots]
        owners = [branch.order for slot in slots[drafted].tolist() if (branch := roster.by_slot[slot]) is not None]
        drafting.record(owners, result.confidences[lives][drafted], int(result.widths.sum()), result.ms)


def _grown(roster: Roster, step: Step, alive: np.ndarray) -> Iterable[int]:
    """Slots with a full block that has no name yet."""
    if roster.prefix is None:
        return ()
    columns, block = roster.columns, roster.pool.block_tokens
    slots = step.slots[alive]
    full = slots[(columns.length[slots] - 1) // block > columns.named[slots]]
    return [*full.tolist(), *(p.slot for p in step.pieces if columns.epoch[p.slot] == p.epoch)]


def _name(roster: Roster, slots: Iterable[int]) -> None:
    """Names the full blocks of slots, as far as their tokens are committed."""
    prefix, columns, block = roster.prefix, roster.columns, roster.pool.block_tokens
    for slot in slots:
        branch = roster.by_slot[slot]
        if prefix is None or branch is None:
            continue
        # Once the prompt is computed only the newest token has no row yet; what was verified beyond a stop never joined.
        computed = len(branch.tokens) - 1 if branch.computed >= branch.target and len(branch.tokens) > branch.target else branch.computed
        full, first = computed // block, int(columns.named[slot])
        if full <= first:
            continue
        request = branch.request
        keys = chain(prefix.root(request.tenant), branch.tokens, request.images, block, branch.keys)[:full]
        fresh = prefix.publish(slot, keys, first, branch.lineage, request.id)
        columns.named[slot] = full
        if prefix.disk is not None and roster.read_block is not None:
            _store(roster, slot, [(i, keys[i]) for i in fresh], branch)


def _store(roster: Roster, slot: int, blocks: list[tuple[int, bytes]], branch: Branch) -> None:
    held = roster.pool.held(slot)
    for i, key in blocks:
        payload = roster.read_block(held[i]) if roster.read_block is not None else None
        if payload is not None and roster.prefix is not None and roster.prefix.disk is not None:
            roster.prefix.disk.put("block", key, payload, branch.lineage, branch.request.id)


def _keep_windows(roster: Roster, step: Step, result: StepResult, alive: np.ndarray) -> None:
    """Asks the next step for the window at each block boundary that decoding has crossed, as far as no row in flight has overwritten it.

    Of a sequence the newest ones stay: the next turn of a conversation starts there, and so does the sequence after a preemption. One alone
    would not do: a window serves prompts that keep all their decoder rows behind it.
    """
    prefix, columns, block = roster.prefix, roster.columns, roster.pool.block_tokens
    if prefix is None or prefix.snapshots is None or not alive.any():
        return
    slots, widths = step.slots[alive], result.widths[alive]
    before = columns.length[slots] - result.counts[: len(step.slots)][alive]
    ends = (columns.length[slots] - 1) // block * block
    written = np.maximum(before - 1 + widths, columns.length[slots] - 1 + columns.pending[slots])  # positions below this may be written
    for i in np.flatnonzero((ends > before - 1) & (written <= ends + prefix.rules.backtrack)).tolist():
        slot, end = int(slots[i]), int(ends[i])
        branch = roster.by_slot[slot]
        if branch is None or len(branch.keys) * block < end or not prefix.may_keep_snapshot(branch.replay, end):
            continue
        key = branch.keys[end // block - 1]
        if key not in prefix.snapshots:
            oldest = branch.window_keys.popleft() if len(branch.window_keys) == KEPT_WINDOWS else None
            roster.chores.saves.append(Save(slot, int(columns.epoch[slot]), end, key, branch.lineage, branch.request.id, oldest))
            branch.window_keys.append(key)


def _keep_snapshots(roster: Roster, step: Step, result: StepResult) -> None:
    if roster.prefix is None or roster.prefix.snapshots is None:
        return
    early = len(step.early_saves)
    for i, (save, payload) in enumerate(zip((*step.early_saves, *step.saves), result.saved, strict=True)):
        if save.slot in result.failed or (i >= early and roster.columns.epoch[save.slot] != save.epoch):
            continue  # its rows came to nothing, or a step that this one built on was lost: what was saved is not what its name says
        if save.replaces is not None:
            roster.prefix.snapshots.drop(save.replaces)
        roster.prefix.snapshots.put(save.key, Snapshot(payload, save.lineage, save.session))
        roster.statistics.counts.snapshots_saved += 1
