"""Replay plans: the conditions of docs/planning.md, replay, that need no model, shown on rings that remember which position wrote them."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from tapeout.runtime.errors import OptionRefused
from tapeout.runtime.replay import (
    Mode,
    ReplayRules,
    chunk_rows,
    keep_rows,
    replay_plan,
)

FULL = ReplayRules(Mode.COMPACT, keep=140)
SMALL = ReplayRules(Mode.COMPACT, keep=11, window=5, backtrack=3, block=8)
HITS = [0, 127, 128, 129, 256, -1, 0]  # -1 and the last 0 stand for len - 1 and len
NEW = [1, 5, 11, 12, 13, 127, 128, 139, 140, 141]
CHUNKS = [1, 7, 64, 127, 128, 129, 256]
POISON = -10**9


def rules(mode, keep=140):
    return ReplayRules(mode, keep)


def cuts(plan, size):
    """The plan's rows in chunks of `size`: (start, count) each."""
    return [(start, min(size, plan.length - start)) for start in range(plan.first_row, plan.length, size)]


def run_rings(plan, chunks):
    """Runs chunks over two rings of positions and checks every read: what a row's window shows was written for that position.

    Returns the rings and, for each kept position, the window that its decoder row saw.
    """
    ring = plan.rules.ring
    encoder, decoder = np.full(ring, POISON), np.full(ring, POISON)
    if plan.restore_at is not None:
        stored = np.arange(max(0, plan.restore_at - ring), plan.restore_at)
        encoder[stored % ring] = stored
    windows = {}
    for start, count in chunks:
        rows = chunk_rows(plan, start, count)
        in_decoder = set(rows.decoder_positions.tolist())
        for position, low in zip(rows.positions.tolist(), rows.window_from.tolist(), strict=True):
            seen = np.arange(low, position + 1)
            before = seen[seen < start]
            assert (encoder[before % ring] == before).all(), (position, low)
        for position, low in zip(rows.decoder_positions.tolist(), rows.decoder_window_from.tolist(), strict=True):
            seen = np.arange(low, position + 1)
            before = seen[seen < start]
            assert (decoder[before % ring] == before).all(), (position, low)
            assert set(seen[seen >= start].tolist()) <= in_decoder
            windows[position] = (low, position)
        for held, at, slots in ((encoder, rows.positions, rows.ring_slot), (decoder, rows.decoder_positions, rows.decoder_ring_slot)):
            written = slots >= 0
            assert len(set(slots[written].tolist())) == written.sum()  # no two rows of a chunk share a slot
            held[slots[written]] = at[written]
    return encoder, decoder, windows


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("length", [1, 5, 133, 134, 139, 140, 141, 300])
def test_every_chunking_reads_what_was_written_and_leaves_the_same_rings(mode, length) -> None:
    plan = replay_plan(length, 0, (), rules(mode))
    first = None
    for size in CHUNKS:
        encoder, decoder, windows = run_rings(plan, cuts(plan, size))
        kept = {p: w for p, w in windows.items() if p >= plan.keep_from}
        got = (encoder.tolist(), [x if x >= length - plan.rules.ring else POISON for x in decoder.tolist()], kept)
        first = first or got
        assert got == first, size
    tail = np.arange(max(0, length - plan.rules.ring), length)
    assert (np.array(first[0])[tail % plan.rules.ring] == tail).all()


@pytest.mark.parametrize("length", [1, 17, 140])
def test_a_prompt_within_the_keep_region_is_exact(length) -> None:
    """Keep >= length: bounded equals exact, row by row."""
    plans = [replay_plan(length, 0, (), rules(mode)) for mode in Mode]
    for plan in plans[1:]:
        for start, count in cuts(plan, 64):
            for ours, exact in zip(vars(chunk_rows(plan, start, count)).values(), vars(chunk_rows(plans[0], start, count)).values(), strict=True):
                assert np.array_equal(ours, exact) if ours is not None else exact is None
        assert plan.lineage is None


@pytest.mark.parametrize("length", [141, 200, 268, 300])
@pytest.mark.parametrize("size", CHUNKS)
def test_mask_and_compact_see_the_same_on_kept_rows(length, size) -> None:
    seen = {}
    for mode in (Mode.MASK, Mode.COMPACT):
        plan = replay_plan(length, 0, (), rules(mode))
        encoder, decoder, windows = run_rings(plan, cuts(plan, size))
        seen[mode] = (encoder.tolist(), decoder.tolist(), {p: w for p, w in windows.items() if p >= length - 140})
        outside = [w for p, w in windows.items() if p < length - 140]
        assert len(outside) == (length - 140 if mode is Mode.MASK else 0)
        assert all(low == position + 1 for low, position in outside)  # empty windows
    assert seen[Mode.MASK] == seen[Mode.COMPACT]


def test_nothing_before_the_keep_region_is_ever_read() -> None:
    """What the encoder ring held before is poison, and decoder rings get no entry below length - keep."""
    for length, size in itertools.product([141, 290, 513], CHUNKS):
        plan = replay_plan(length, 0, (), FULL)
        _, decoder, windows = run_rings(plan, cuts(plan, size))
        assert min(low for low, _ in windows.values()) >= length - 140
        assert min(x for x in decoder.tolist() if x != POISON) >= length - 140


def test_replayed_rows_write_no_block() -> None:
    plan = replay_plan(700, 512, (), FULL)
    written = [p for start, count in cuts(plan, 100) for p, w in
               zip(*(lambda r: (r.positions.tolist(), r.writes_block.tolist()))(chunk_rows(plan, start, count)), strict=True) if w]
    assert written == list(range(512, 700))
    assert plan.replayed_rows == 128 and plan.lineage == 512


@pytest.mark.parametrize("new", NEW)
@pytest.mark.parametrize("case", range(len(HITS)))
def test_encoder_rows_of_every_hit_length(new, case) -> None:
    """Rows are the whole prompt for hits up to the window, else max(length - hit + window, keep); one new row always."""
    hit = HITS[case]
    length = {5: 384, 6: 384}.get(case, hit) + new
    given = {5: length - 1, 6: length}.get(case, hit)
    whole = min(given, length - 1) // 128 * 128
    plan = replay_plan(length, given, (), FULL)
    assert plan.encoder_rows == (length if whole <= 128 else max(length - whole + 128, 140))
    assert plan.encoder_rows >= 1 and plan.write_from < length
    assert plan.keep_from >= plan.first_row or plan.first_row == 0
    assert plan.decoder_rows == min(140, length)
    run_rings(plan, cuts(plan, 64))


def test_windows_after_a_hit() -> None:
    """Row s + t sees t + 1 keys, the first new row exactly the window, and no later row is cut."""
    plan = replay_plan(900, 512, (), FULL)
    rows = chunk_rows(plan, plan.first_row, plan.encoder_rows)
    seen = rows.positions - rows.window_from + 1
    assert plan.first_row == plan.encoder_floor == 512 - 128
    assert seen[:128].tolist() == list(range(1, 129))
    assert rows.positions[128] == 512 and set(seen[127:].tolist()) == {128}


def test_fewer_new_tokens_than_the_keep_region_needs() -> None:
    """With 11 new tokens the keep region starts before hit - window, and the encoder with it."""
    plan = replay_plan(512 + 11, 512, (), FULL)
    assert (plan.first_row, plan.keep_from, plan.encoder_floor) == (383, 383, 383)
    assert replay_plan(512 + 12, 512, (), FULL).first_row == 384 == replay_plan(512 + 13, 512, (), FULL).first_row


def test_a_snapshot_replaces_replay() -> None:
    plan = replay_plan(900, 640, {128, 256, 640}, FULL)
    assert (plan.restore_at, plan.first_row, plan.replayed_rows, plan.lineage, plan.encoder_floor) == (640, 640, 0, None, 0)
    assert chunk_rows(plan, 640, 1).window_from.tolist() == [513]
    for size in CHUNKS:
        run_rings(plan, cuts(plan, size))


@pytest.mark.parametrize(("length", "hit", "snapshots", "first", "restored"), [
    (900, 640, {512}, 512, 512),      # 512 = 640 - 128: as few rows, and exact
    (900, 640, {384}, 512, None),     # replay has fewer rows
    (700, 640, {640, 512}, 512, 512),   # 640 is beyond length - keep = 560: the keep region must pass the encoder
    (650, 640, {640, 384}, 510, None),  # the keep region starts before 512
    (641, 640, {640, 512}, 501, None),
    (300, 128, {128}, 128, 128),      # a hit of one window counts if its state is stored
    (300, 128, {130, 0}, 0, None),    # not a save point
    (200, 128, {128}, 0, None),       # keep region starts at 60
])
def test_choice_between_snapshots_and_replay(length, hit, snapshots, first, restored) -> None:
    plan = replay_plan(length, hit, snapshots, FULL)
    assert (plan.first_row, plan.restore_at) == (first, restored)
    assert plan.lineage == (hit if restored is None and first else None)
    run_rings(plan, cuts(plan, 77))


def test_the_exact_mode_runs_everything() -> None:
    plan = replay_plan(900, 640, {640}, rules(Mode.EXACT, 0))
    assert (plan.encoder_rows, plan.decoder_rows, plan.write_from, plan.restore_at) == (900, 900, 0, None)
    rows = chunk_rows(plan, 0, 900)
    assert rows.window_from.tolist() == rows.decoder_window_from.tolist() == [max(0, p - 127) for p in range(900)]


def test_rollback_of_drafts_reads_only_what_was_written() -> None:
    """After a prompt, verification writes up to backtrack - 1 rejected rows ahead; windows from the committed length stay whole."""
    for r, length in ((FULL, 300), (SMALL, 40)):
        plan = replay_plan(length, 0, (), r)
        encoder, decoder, _ = run_rings(plan, cuts(plan, 50))
        committed = length
        for accepted in [*range(r.backtrack), 0, r.backtrack - 1, 2] * 5:
            for held in (encoder, decoder):
                for position in range(committed, committed + r.backtrack):  # the golden row and every draft
                    held[position % r.ring] = position
                    seen = np.arange(position - r.window + 1, position + 1)
                    assert (held[seen % r.ring] == seen).all(), (committed, position)
            committed += accepted + 1


def test_recomputing_after_preemption_counts_the_output() -> None:
    """The keep region follows the length at recompute, so a continuation may differ; the emitted prefix is input now."""
    assert replay_plan(1000, 0, (), FULL).keep_from == 860
    assert replay_plan(1000 + 37, 0, (), FULL).keep_from == 897


@pytest.mark.parametrize(("length", "size"), [(300, 64), (300, 300), (141, 140), (513, 128), (100, 33), (280, 139)])
def test_decoder_rows_are_counted(length, size) -> None:
    plan = replay_plan(length, 0, (), FULL)
    chunks = cuts(plan, size)
    kept = [len(chunk_rows(plan, *c).decoder_positions) for c in chunks]
    assert kept == [sum(p >= length - 140 for p in range(start, start + count)) for start, count in chunks]  # none, no placeholder
    assert sum(kept) == plan.decoder_rows == min(length, 140)
    outputs = [chunk_rows(plan, *c).output for c in chunks]
    assert outputs[:-1] == [None] * (len(chunks) - 1) and outputs[-1] == kept[-1] - 1


def test_two_hundred_prompts_in_ten_groups() -> None:
    """1,024 tokens each, 768 shared in a group, its first finished before the rest; window 16, keep 28, no snapshots."""
    r = ReplayRules(Mode.COMPACT, keep=28, window=16, block=128)
    plans = [replay_plan(1024, 0 if i % 20 == 0 else 768, (), r) for i in range(200)]
    assert sum(p.encoder_rows for p in plans) == 61_920
    assert sum(p.decoder_rows for p in plans) == 5_600


def test_small_geometry_over_all_lengths_and_hits() -> None:
    for length, hit, size in itertools.product(range(1, 45), range(0, 45, 4), (1, 3, 8, 50)):
        for mode in Mode:
            r = ReplayRules(mode, SMALL.keep, SMALL.window, SMALL.backtrack, SMALL.block)
            for snapshots in ((), (8, 16, 24, 32)):
                plan = replay_plan(length, min(hit, length), snapshots, r)
                run_rings(plan, cuts(plan, size))
                assert plan.first_row <= plan.keep_from and plan.first_row < length and plan.write_from < length


def test_keep_rows_fill_tiles() -> None:
    assert (keep_rows(128, 6), keep_rows(128, 6, 16), keep_rows(128, 6, 64)) == (134, 144, 192)


@pytest.mark.parametrize("made", [
    lambda: ReplayRules(Mode.COMPACT, 133), lambda: ReplayRules(Mode.MASK, 0), lambda: ReplayRules(Mode.EXACT, 0, window=0),
    lambda: replay_plan(0, 0, (), FULL), lambda: replay_plan(5, -1, (), FULL),
    lambda: chunk_rows(replay_plan(300, 256, (), FULL), 127, 3), lambda: chunk_rows(replay_plan(30, 0, (), FULL), 29, 2),
    lambda: chunk_rows(replay_plan(30, 0, (), FULL), 3, 0),
])
def test_what_is_refused(made) -> None:
    with pytest.raises(OptionRefused):
        made()


def test_whole_snapshots_let_the_exact_mode_go_on() -> None:
    rules = ReplayRules(Mode.EXACT, 0, window=16, backtrack=6, block=16, is_whole=True)
    plan = replay_plan(100, 80, (16, 48, 96), rules)
    assert (plan.first_row, plan.write_from, plan.restore_at, plan.lineage) == (48, 48, 48, None)
    assert (plan.encoder_rows, plan.decoder_rows, plan.keep_from, plan.encoder_floor, plan.decoder_floor) == (52, 52, 0, 0, 0)
    rows = chunk_rows(plan, 48, 52)
    assert rows.writes_block.all() and int(rows.window_from[0]) == 33 and rows.output == 51, "windows reach behind the snapshot"
    assert replay_plan(64, 64, (64,), rules).first_row == 0, "one token is always computed"
    assert replay_plan(65, 64, (64,), rules).first_row == 64
    assert replay_plan(100, 80, (), rules).first_row == 0 and replay_plan(100, 80, (48,), replace(rules, is_whole=False)).first_row == 0


def test_without_replay_only_a_snapshot_makes_a_hit() -> None:
    rules = ReplayRules(Mode.COMPACT, 22, window=16, backtrack=6, block=16, replays=False)
    assert replay_plan(100, 96, (), rules).first_row == 0
    plan = replay_plan(100, 96, (32, 64, 80), rules)
    assert (plan.first_row, plan.write_from, plan.keep_from, plan.replayed_rows) == (64, 64, 78, 0), "80 would leave too few rows"
    assert chunk_rows(plan, 64, 36).writes_block.all()
