"""What one step may hold, who is admitted to it and who gives way: bounds of rows, outputs, drafts and time, costs of computing again."""

from pathlib import Path

import numpy as np
import pytest

from tapeout.runtime.blocks import BlockPool
from tapeout.runtime.cost import decode_table
from tapeout.runtime.disk import DiskTier
from tapeout.runtime.fairness import WaitingLine, victim
from tapeout.runtime.params import SamplingParams
from tapeout.runtime.replay import Mode, ReplayRules, replay_plan
from tapeout.runtime.request import Request, Sequence
from tapeout.runtime.scheduler import Scheduler, SchedulerOptions
from tapeout.runtime.state import Snapshot
from tapeout.runtime.step import Piece
from tests.runtime.null import prompt, serving
from tests.runtime.test_scheduler import pieces_of, recorded

LONG = {"max_tokens": 60, "ignore_eos": True}


@pytest.mark.parametrize("depth", [0, 2])
def test_drafts_and_prompts_keep_to_the_rows_and_outputs_of_a_step(depth: int) -> None:
    s = serving(slots=10, blocks=300, max_rows=32, max_outputs=12, alignment=1, prompt_rows=1, drafts=5, depth=depth, model={"accepted": 1.0})
    steps = recorded(s)
    for i in range(30):
        s.submit(f"r{i}", prompt(3 + i, i), max_tokens=20, ignore_eos=True)
    s.run()
    outputs = [step.decode_rows + sum(piece.yields for piece in step.pieces) for step in steps]
    assert max(outputs) == 12 and max(step.decode_rows + step.prompt_rows for step in steps) == 32
    assert all(s.tokens(f"r{i}") == s.expected(f"r{i}") for i in range(30))


def test_drafts_leave_a_waiting_prompt_its_smallest_piece() -> None:
    """Whatever share prompts are given: with less than a block of rows no piece of one could run."""
    s = serving(slots=9, blocks=300, max_rows=40, drafts=5, prompt_rows=0, model={"accepted": 1.0})
    steps = recorded(s)
    for i in range(8):
        s.submit(f"r{i}", prompt(4, i), **LONG)
    for _ in range(3):
        s.driver.step()
    s.submit("waits", prompt(24, 9), max_tokens=1)
    s.driver.step()
    assert pieces_of(steps, "waits") == [(steps[-1].number, 0, 8)] and steps[-1].decode_rows == 32
    s.run()


def test_where_no_block_is_left_drafts_fill_what_is_held() -> None:
    s = serving(slots=3, blocks=6, drafts=5, caching=False, model={"accepted": 0.0})
    steps = recorded(s)
    for i in range(2):
        s.submit(f"r{i}", prompt(9, i), **LONG)
    s.driver.step()
    s.scheduler.pool.reserve(2, 8)  # the one block that was left
    for _ in range(7):
        s.driver.step()
    assert s.scheduler.statistics.counts.preemptions == 0
    assert [step.widths.tolist() for step in steps[1:]] == [[min(6, 16 - 9 - k)] * 2 for k in range(7)], "of 16 places 9 + k are taken behind token k"
    s.scheduler.pool.release(2)
    s.run()
    s.assert_empty()


def test_pieces_of_several_prompts_share_the_time_of_a_step() -> None:
    s = serving(max_rows=64, slots=6, step_ms=3.0, caching=False, model={"ms": lambda decode, rows: 0.1 * decode + 0.1 * rows})
    steps = recorded(s)
    for i in range(12):
        s.submit(f"warm {i}", prompt(8 + i, i), max_tokens=1)
        s.run()
    started = len(steps)
    for i in range(5):
        s.submit(f"r{i}", prompt(60, i), max_tokens=1)
    s.run()
    assert max(step.prompt_rows for step in steps[started:]) <= 32, "3 ms are 30 rows, whoever they belong to"
    assert any(len(step.pieces) > 1 for step in steps[started:])


def test_where_nothing_fits_the_time_one_smallest_piece_runs() -> None:
    s = serving(max_rows=64, slots=6, step_ms=1e-6, caching=False, model={"ms": lambda decode, rows: 0.1 * decode + 0.1 * rows})
    steps = recorded(s)
    for i in range(4):
        s.submit(f"warm {i}", prompt(20, i), max_tokens=1)
        s.run()
    started = len(steps)
    for i in range(3):
        s.submit(f"r{i}", prompt(20, i), max_tokens=1)
    s.run()
    assert [[len(piece.tokens) for piece in step.pieces] for step in steps[started:]] == [[8]] * 6 + [[4]] * 3


def test_nothing_is_remembered_of_what_a_lost_step_was_to_take() -> None:
    s = serving(drafts=5, plan="compat", decode_times=decode_table(range(1, 99), range(1, 99), is_padded=False), depth=1,
                model={"loses": lambda step: step.number == 5})  # fmt: skip
    s.submit("lost", prompt(9), **LONG)
    s.run()
    assert s.scheduler.statistics.counts.lost_steps == 1 and not s.scheduler.drafting._forecasts


def test_a_step_holds_32_768_rows_of_prompts_in_all() -> None:
    pool = BlockPool(1000, 128, np.zeros((4, 400), np.int32))
    scheduler = Scheduler(SchedulerOptions(max_rows=100_000, max_context=50_000), pool, 4, clock=lambda: 0.0)
    for i in range(3):
        scheduler.roster.add(Request(f"r{i}", tuple(prompt(20_000, i)), SamplingParams(), 0))
    step = scheduler.propose()
    assert step is not None and [len(piece.tokens) for piece in step.pieces] == [20_000, 12_672], "12,768 less what is no whole block"


# -- admission


@pytest.mark.parametrize(("behind", "passes"), [(0, True), (1, True), (2, True), (3, False)])
def test_so_many_may_be_tried_behind_one_that_does_not_fit(behind: int, passes: bool) -> None:
    s = serving(slots=8, blocks=20, caching=False, overtakers=2)
    s.submit("runs", prompt(60), **LONG)
    s.driver.step()
    for i in range(behind):
        s.submit(f"large {i}", prompt(120, i), max_tokens=1)
    s.submit("small", prompt(9, 9), max_tokens=1)
    s.driver.step()
    assert (s.scheduler.roster.branches("small")[0].started_s is not None) == passes
    s.run()


def test_nobody_is_admitted_past_one_that_has_waited_too_long() -> None:
    """Small requests come and go one by one, so that memory for the large one is never free at once while they are let past."""
    s = serving(slots=4, blocks=20, max_wait_ms=40.0, caching=False, model={"ms": lambda decode, rows: 1.0})
    number = 0

    def step_with_arrivals() -> None:
        nonlocal number
        if number % 7 == 0 and len(s.scheduler.roster.waiting) < 4:
            s.submit(f"small {number}", prompt(9, number), max_tokens=20, ignore_eos=True)
        number += 1
        s.driver.step()

    for _ in range(30):
        step_with_arrivals()
    s.submit("large", prompt(140), max_tokens=1)
    submitted_ms = s.clock() * 1e3
    large = s.scheduler.roster.branches("large")[0]
    for _ in range(300):
        if large.started_s is None:
            step_with_arrivals()
    assert large.started_s is not None and large.started_s * 1e3 - submitted_ms <= 40 + 25, "the bound, and the end of those that run"
    s.run()


def test_a_prompt_leaves_each_running_sequence_its_next_block() -> None:
    s = serving(slots=3, blocks=8, caching=False)
    s.submit("runs", prompt(15), max_tokens=20, ignore_eos=True)
    s.driver.step()
    s.submit("waits", prompt(33, 1), max_tokens=4, ignore_eos=True)  # five blocks: all that are free
    s.driver.step()
    assert s.scheduler.roster.branches("waits")[0].slot is None
    s.run()
    assert s.scheduler.statistics.counts.preemptions == 0
    s.assert_empty()


def test_a_branch_is_promised_what_its_prompt_still_needs() -> None:
    """17 tokens in blocks of 8: each branch shares two, and its prompt's last row needs a third one of its own."""
    s = serving(slots=3, blocks=20)
    s.submit("r", prompt(17), n=3, **LONG)
    s.driver.step()
    assert s.scheduler.pool.free_blocks - s.scheduler.pool.unpromised_blocks == 2
    s.run()
    s.assert_empty()


# -- giving way


def test_the_cost_of_computing_again_is_what_no_block_keeps_and_the_window() -> None:
    s = serving(slots=3)  # blocks and window of 8
    for name, length in (("long", 60), ("window", 8), ("short", 5)):
        s.submit(name, prompt(length, length), **LONG)
    for _ in range(3):
        s.driver.step()
    assert len(s.scheduler.roster.decoding) == 3
    s.driver.settle()
    costs = {name: s.scheduler._cost_of_recompute(s.scheduler.roster.branches(name)[0]) for name in ("long", "window", "short")}
    computed = {name: len(s.scheduler.roster.branches(name)[0].tokens) - 1 for name in costs}
    assert costs == {"long": computed["long"] % 8 + 8, "window": computed["window"], "short": computed["short"]}, (costs, computed)
    s.run()


def test_who_has_just_come_back_is_spared_while_others_run() -> None:
    s = serving(slots=4, blocks=16, caching=False, min_run_steps=8)
    preempt, spared = s.scheduler.roster.preempt, 0

    def fresh(branch: Sequence) -> bool:
        return branch.preemptions > 0 and (branch.scheduled < branch.target or s.scheduler.number - branch.resumed_step < 8)

    def watched(branch: Sequence) -> None:
        nonlocal spared
        running = s.scheduler._running()
        assert not fresh(branch) or all(map(fresh, running))
        spared += any(map(fresh, running)) and not fresh(branch)
        preempt(branch)

    s.scheduler.roster.preempt = watched  # type: ignore[method-assign]
    for i in range(6):
        s.submit(f"r{i}", prompt(9 + 5 * i, i), max_tokens=60, ignore_eos=True)
    s.run()
    assert spared > 0 and all(s.tokens(f"r{i}") == s.expected(f"r{i}") for i in range(6))


def test_who_is_being_computed_again_is_spared_however_long_that_takes() -> None:
    running, again = (Sequence(Request(f"r{i}", (1, 2), SamplingParams(), 0), [1, 2], 0.0, order=i, scheduled=2, target=2) for i in range(2))
    again.preemptions, again.scheduled = 1, 1
    assert victim([(running, 500), (again, 1)], 100, 8) is running
    again.scheduled = 2
    assert victim([(running, 500), (again, 1)], 100, 8) is again


def test_virtual_time_never_goes_back() -> None:
    """One that comes back with its old place in the line is served first, and takes nobody else's turn with it."""
    line = WaitingLine(60.0)
    late, early, new = (Sequence(Request(f"r{i}", (1,), SamplingParams(), 0), [1], 0.0, order=i, tag=tag) for i, tag in enumerate((50.0, 3.0, 0.0)))
    line.served(late, 1)
    line.served(early, 1)
    line.join(new)
    assert (line.virtual_time, new.tag) == (50.0, 50.0)
    early.preemptions, early.tag = 1, 4.0
    line.join(early)
    assert early.tag == 4.0 and line.first(0.0) is early, "who gave way keeps its old place"


def test_the_step_that_completes_a_prompt_is_remembered() -> None:
    s = serving(max_rows=16, caching=False)
    steps = recorded(s)
    s.submit("first", prompt(9), **LONG)
    s.driver.step()
    s.submit("second", prompt(30, 1), **LONG)
    for _ in range(6):
        s.driver.step()
    last = pieces_of(steps, "second")[-1]
    assert last[0] > 1 and s.scheduler.roster.branches("second")[0].resumed_step == last[0]
    s.run()


# -- what a sequence builds on


@pytest.mark.parametrize("place", ["window", "block"])
def test_blocks_behind_what_a_replay_left_carry_its_mark(tmp_path: Path, place: str) -> None:
    """A window in memory, blocks on disk: what is computed behind either depends on the same hit, and STRICT must lend it to nobody else."""
    disk = DiskTier(tmp_path, 10**6)
    first = serving(disk=disk, snapshot_bytes=10**6, blocks=200)
    first.submit("a", prompt(64), max_tokens=1)
    first.run()
    keys, store = first.scheduler.roster.branches("a")[0].keys, first.cache.snapshots  # type: ignore[union-attr]
    assert store is not None
    store.flush()
    windows = {key: found for key in keys if (found := store.get(key)) is not None}
    assert windows
    for key in keys:
        stored = disk.get("block", key)
        assert stored is not None and stored.lineage is None
        disk.drop(key)
        disk.put("block", key, stored.payload, 24 if place == "block" else None, "another")
    second = serving(disk=disk, snapshot_bytes=10**6, blocks=200)
    for key, window in windows.items():
        second.cache.snapshots.put(key, Snapshot(window.payload, 24 if place == "window" else None, "another"))  # type: ignore[union-attr]
    second.submit("b", prompt(64) + prompt(40, 7), max_tokens=9, ignore_eos=True)
    second.run()
    branch = second.scheduler.roster.branches("b")[0]
    counts = second.scheduler.statistics.counts
    assert counts.snapshots_restored == 1 and counts.blocks_loaded > 0 and second.tokens("b") == second.expected("b")
    own = [second.scheduler.pool.named(key) for key in branch.keys[8:]]
    assert own and [named[1].lineage for named in own if named is not None] == [24] * len(own)


def test_rows_of_a_piece_that_the_decoder_half_keeps() -> None:
    plan = replay_plan(60, 0, (), ReplayRules(Mode.COMPACT, 20, window=8, backtrack=6, block=8))
    asked = Sequence(Request("r", tuple(prompt(60)), SamplingParams(), 0), prompt(60), 0.0)
    cuts = [(0, 30), (30, 45), (45, 52), (52, 60)]
    pieces = [Piece(asked, 0, 0, start, asked.tokens[start:end], end == 60, end == 60, plan) for start, end in cuts]
    assert [(piece.kept_rows, piece.decoder_rows) for piece in pieces] == [(0, 0), (5, 5), (7, 7), (8, 8)]
