"""Who runs when: mixed steps, admission, chunks and images, fairness (A19), preemption, life cycle, the placeholder that cannot be packed.

Defects of other runtimes that concern these parts are tests here, each named after what must not happen.
"""

import numpy as np
import pytest

from tapeout.runtime.errors import OptionRefused
from tapeout.runtime.fairness import WaitingLine, urgency, victim
from tapeout.runtime.params import SamplingParams
from tapeout.runtime.replay import Mode, ReplayRules
from tapeout.runtime.request import FinishedEvent, ImageSpan, Request, Sequence, Status, TokenEvent
from tapeout.runtime.scheduler import SchedulerOptions
from tapeout.runtime.step import FollowingRows, Step
from tests.runtime.null import Serving, prompt, serving, terminal

FREE = {"max_tokens": 12, "ignore_eos": True}


def recorded(s: Serving) -> list[Step]:
    """All steps that are proposed from now on."""
    steps: list[Step] = []
    propose = s.scheduler.propose

    def noting() -> Step | None:
        step = propose()
        if step is not None:
            steps.append(step)
        return step

    s.scheduler.propose = noting  # type: ignore[method-assign]
    return steps


def pieces_of(steps: list[Step], name: str) -> list[tuple[int, int, int]]:
    """(step, start, rows) of a request's prompt."""
    return [(step.number, p.start, len(p.tokens)) for step in steps for p in step.pieces if p.branch.request.id == name]


# -- steps


def test_decode_rows_come_first_and_prompts_fill_the_step() -> None:
    s = serving(max_rows=32)
    steps = recorded(s)
    s.submit("a", prompt(8), **FREE)
    s.driver.step()
    s.submit("b", prompt(70, 1), **FREE)
    s.run()
    assert (len(steps[1].slots), pieces_of(steps, "b")) == (1, [(1, 0, 24), (2, 24, 24), (3, 48, 22)])
    assert all(step.decode_rows + step.prompt_rows <= 32 for step in steps)


def test_defect_17_an_idle_engine_starts_a_prompt_in_the_next_step() -> None:
    s = serving()
    steps = recorded(s)
    s.submit("a", prompt(8), max_tokens=30, ignore_eos=True)
    for number in range(1, 12):
        s.driver.step()
        s.submit(f"late {number}", prompt(8, number), max_tokens=1)
        s.driver.step()
        assert pieces_of(steps, f"late {number}")[0][0] == len(steps) - 1, "no step counter stands between a request and its first row"


def test_defect_18_a_prompt_does_not_drain_the_pipeline() -> None:
    s = serving(depth=1, drafts=5)
    steps = recorded(s)
    for i in range(3):
        s.submit(f"r{i}", prompt(8, i), max_tokens=40, ignore_eos=True)
        for _ in range(3):
            s.driver.step()
    s.run()
    decode_after = [len(step.slots) for step in steps[1:] if step.pieces]
    assert decode_after == [1, 2], "the steps that take in later prompts go on decoding"
    first = next(step for step in steps if len(step.slots))
    assert first.number == 1 and len(first.following.slots) == 1 and first.widths[0] == 6, "drafts come with the prompt's own first token"


def test_defect_19_short_prompts_overtake_a_long_one_between_its_chunks() -> None:
    s = serving(max_rows=32, slots=6)
    steps = recorded(s)
    s.submit("long", prompt(180), **FREE)
    s.driver.step()
    for i in range(4):
        s.submit(f"s{i}", prompt(8, i), **FREE)
    s.run()
    assert [pieces_of(steps, f"s{i}")[0][0] for i in range(4)] == [1, 1, 1, 1]
    assert pieces_of(steps, "long")[-1][0] > 4


def test_several_unfinished_prompts_share_a_step_and_blocks_come_by_the_piece() -> None:
    s = serving(max_rows=64, slots=4, chunk_tokens=16)
    steps = recorded(s)
    for i in range(3):
        s.submit(f"r{i}", prompt(48, i), **FREE)
    s.driver.step()
    assert [len(piece.tokens) for piece in steps[0].pieces] == [16, 16, 16]
    assert s.scheduler.pool.free_blocks == 63 - 3 * 2 and s.scheduler.pool.unpromised_blocks == 63 - 3 * 6


@pytest.mark.parametrize(("span", "length", "expected"), [
    ((10, 20), 70, [(0, 24), (24, 24), (48, 22)]),  # the cut at 24 lies outside
    ((20, 30), 70, [(0, 30), (30, 18), (48, 22)]),  # first in its step: grown to the span's end
    ((4, 34), 70, [(0, 4), (4, 30), (34, 22), (56, 14)]),  # no room for all of it: cut before it; behind it to a block's end again
])  # fmt: skip
def test_chunks_never_cut_an_image(span: tuple[int, int], length: int, expected: list[tuple[int, int]]) -> None:
    s = serving(max_rows=32, chunk_tokens=24, caching=False)
    steps = recorded(s)
    s.submit("r", prompt(length), images=[ImageSpan(*span, b"x")], max_tokens=1)
    s.run(200)
    pieces = [(start, rows) for _, start, rows in pieces_of(steps, "r")]
    assert pieces == expected and not any(span[0] < start < span[1] for start, _ in pieces)
    assert s.tokens("r") == s.expected("r")


def test_a_time_budget_makes_smaller_pieces_and_starves_nobody() -> None:
    sizes = []
    for step_ms in (None, 2.0, 1e-6):
        s = serving(max_rows=64, step_ms=step_ms, caching=False, model={"ms": lambda decode, rows: 0.1 * decode + 0.1 * rows})
        steps = recorded(s)
        for i in range(12):
            s.submit(f"warm {i}", prompt(8 + i, i), max_tokens=1)
            s.run()
        s.submit("r", prompt(190), max_tokens=1)
        s.run(500)
        assert s.tokens("r") == s.expected("r")
        sizes.append(max(rows for _, _, rows in pieces_of(steps, "r")))
    assert sizes[0] == 64 and 8 <= sizes[1] <= 24 and sizes[2] == 8


# -- A19


def test_a19_a_short_prompt_waits_for_one_chunk_of_each_long_one_at_most() -> None:
    """Long prompts in any number cannot make it wait for more: served rows push a prompt back."""
    for longs in (1, 3, 6):
        s = serving(slots=longs + 4, blocks=400, max_context=800, max_rows=32, caching=False)
        steps = recorded(s)
        for i in range(longs):
            s.submit(f"long {i}", prompt(780, i), max_tokens=1)
        waits = []
        for i in range(20):
            for _ in range(5):
                s.driver.step()
            arrived = len(steps)
            s.submit(f"short {i}", prompt(9, i), max_tokens=1)
            while not pieces_of(steps[arrived:], f"short {i}"):
                s.driver.step()
            waits.append(len(steps) - arrived)
        assert max(waits) <= longs + 1, waits
        s.run()


def test_a19_urgent_requests_cannot_starve_others_for_longer_than_the_bound() -> None:
    s = serving(slots=4, max_rows=16, max_wait_ms=50.0, caching=False, model={"ms": lambda decode, rows: 1.0})
    s.submit("patient", prompt(9, 99), priority=5, max_tokens=2)
    urgent = 0
    while s.scheduler.roster.branches("patient")[0].started_s is None:
        for _ in range(2):
            s.submit(f"urgent {urgent}", prompt(16, urgent), priority=-1, max_tokens=2, ignore_eos=True)
            urgent += 1
        s.driver.step()
    waited_ms = 1e3 * (s.scheduler.roster.branches("patient")[0].started_s or 0)
    assert 50 <= waited_ms <= 50 + 10, f"waited {waited_ms}: the bound, and the few steps until a slot is free"
    s.run()


def test_a19_small_requests_cannot_keep_memory_from_a_large_one_for_longer_than_the_bound() -> None:
    s = serving(slots=4, blocks=20, max_rows=64, max_wait_ms=40.0, caching=False, model={"ms": lambda decode, rows: 1.0})
    small = 0

    def more() -> None:
        nonlocal small
        s.submit(f"small {small}", prompt(20, small), max_tokens=20, ignore_eos=True)
        small += 1

    for _ in range(4):
        more()
    s.driver.step()
    s.submit("large", prompt(140), max_tokens=1)
    while s.scheduler.roster.branches("large")[0].started_s is None:
        if len(s.scheduler.roster.waiting) < 3:
            more()
        s.driver.step()
    assert 1e3 * (s.scheduler.roster.branches("large")[0].started_s or 0) <= 40 + 2 * 22
    s.run()
    s.assert_empty()


def test_priority_decides_among_those_that_wait() -> None:
    s = serving(slots=1)
    for name, priority in (("c", 3), ("a", -7), ("b", 0), ("b2", 0)):
        s.submit(name, prompt(5), priority=priority, max_tokens=2, ignore_eos=True)
    assert terminal(s.run()) == ["a", "b", "b2", "c"]


def test_a_tenant_has_its_share_of_slots() -> None:
    s = serving(slots=4, tenant_sequences=2)
    for i in range(6):
        s.submit(f"greedy {i}", prompt(5, i), tenant="greedy", **FREE)
    s.submit("other", prompt(5, 9), tenant="other", **FREE)
    s.driver.step()
    running = [branch.request.id for branch in s.scheduler.roster.by_slot if branch is not None]
    assert running == ["greedy 0", "greedy 1", "other"]
    assert len(terminal(s.run())) == 7


def of(order: int, *, priority: int = 0, tag: float = 0.0, scheduled: int = 0, submitted_s: float = 0.0) -> Sequence:
    request = Request(f"r{order}", (1, 2), SamplingParams(priority=priority), 0)
    return Sequence(request, [1, 2], submitted_s, order=order, tag=tag, scheduled=scheduled)


def test_the_order_of_urgency() -> None:
    now = 100.0
    ranked = [
        of(3, priority=9, submitted_s=10), of(5, priority=-5, submitted_s=20),  # waited long: oldest first
        of(6, priority=-5, submitted_s=99), of(8, tag=1, submitted_s=99), of(7, tag=2, submitted_s=99), of(9, tag=2, submitted_s=99),
        of(1, tag=3, scheduled=8),  # has had rows: age alone does not help it
    ]  # fmt: skip
    keys = [urgency(sequence, now, 60.0) for sequence in ranked]
    assert keys == sorted(keys) and len(set(keys)) == len(keys)


def test_the_line_survives_leaving_and_joining_again() -> None:
    line = WaitingLine(60.0)
    a, b = of(1), of(2)
    line.join(a)
    line.join(b)
    line.leave(a)
    line.leave(a)
    assert line.first(0.0) is b and len(line) == 1 and a not in line
    line.served(b, 100)
    line.join(a)
    assert list(line) == [b, a] and line.first(0.0) is a, "b was served and moved back"


# -- preemption


def test_defect_20_the_victim_is_the_cheapest_of_the_least_urgent() -> None:
    long, short, urgent, fresh = of(1), of(2), of(3, priority=-1), of(4)
    fresh.preemptions, fresh.resumed_step = 1, 95
    assert victim([(long, 500), (short, 20), (urgent, 1), (fresh, 3)], 100, 8) is short, "not the longest, and not who has just come back"
    assert victim([(long, 500), (urgent, 1), (fresh, 3)], 100, 8) is long
    assert victim([(urgent, 1), (fresh, 3)], 100, 8) is fresh, "priority comes first"
    assert victim([(of(7), 5), (of(9), 5)], 0, 8).order == 9 and victim([], 0, 8) is None  # type: ignore[union-attr]


def test_a_full_pool_without_growth_preempts_nobody() -> None:
    s = serving(slots=2, blocks=6, block_tokens=8)
    s.submit("three blocks", prompt(9), max_tokens=12, ignore_eos=True)
    s.submit("two blocks", prompt(2), max_tokens=14, ignore_eos=True)
    free = []
    while s.driver.has_work:
        s.driver.step()
        free.append(s.scheduler.pool.free_blocks)
    assert free.count(0) > 2 and s.scheduler.statistics.counts.preemptions == 0


def test_defect_21_preemption_keeps_what_is_named() -> None:
    s = serving(slots=3, blocks=26, min_run_steps=4)
    for i in range(3):
        s.submit(f"r{i}", prompt(40, i), max_tokens=30, ignore_eos=True)
    s.run()
    counts = s.scheduler.statistics.counts
    assert counts.preemptions > 0 and counts.recomputed_rows < 30 * counts.preemptions, "a window and the uncached tail, not the whole sequence"
    assert all(s.tokens(f"r{i}") == s.expected(f"r{i}") for i in range(3))
    s.assert_empty()


def test_a_sequence_that_can_never_go_on_ends_with_its_reason() -> None:
    s = serving(slots=2, blocks=4, max_context=200)
    s.scheduler.roster.max_context = 200  # as if the pool had been larger when it was admitted
    s.submit("r", prompt(10), max_tokens=100, ignore_eos=True)
    events = s.run()
    assert events[-1] == FinishedEvent("r", "insufficient_system_resource", None)
    assert len(s.tokens("r")) == 24 - 10 + 1 and s.tokens("r") == s.expected("r")[:15]
    s.assert_empty()


# -- life cycle


def test_defect_1_an_abort_between_chunks_gives_everything_back() -> None:
    s = serving(max_rows=16)
    for i in range(40):
        s.submit(f"r{i}", prompt(100, i), **FREE)
        s.driver.step()
        assert s.scheduler.roster.prefilling
        assert s.scheduler.roster.finish_all(f"r{i}", Status.ABORTED)
        assert not s.scheduler.roster.finish_all(f"r{i}", Status.ABORTED), "a second abort finds nothing"
        assert terminal(s.run()) == [f"r{i}"]
        s.assert_empty()


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("after", range(7))
def test_defects_3_and_4_an_abort_finds_a_request_wherever_it_is(depth: int, after: int) -> None:
    s = serving(slots=2, depth=depth, max_rows=16, drafts=5)
    s.submit("preparing", prompt(9), is_ready=False, **FREE)
    for i in range(4):
        s.submit(f"r{i}", prompt(20, i), n=2, **FREE)
    events = []
    for _ in range(after):
        events += s.driver.step()
    for name in ("preparing", "r0", "r1", "r2", "r3"):
        s.scheduler.roster.finish_all(name, Status.ABORTED)
    events += s.run()
    assert sorted(terminal(events)) == ["preparing", "r0", "r1", "r2", "r3"]
    for name, branch in [("preparing", 0), *((f"r{i}", branch) for i in range(4) for branch in (0, 1))]:
        said = s.tokens(name, branch)
        assert said == s.expected(name, branch)[: len(said)]
        assert said == [e.token for e in events if isinstance(e, TokenEvent) and (e.request_id, e.branch) == (name, branch)]
    s.assert_empty()


def test_a_preparing_request_runs_once_it_is_ready_or_fails_with_a_reason() -> None:
    s = serving()
    s.submit("grammar", prompt(9), is_ready=False, **FREE)
    s.submit("image", prompt(9, 1), is_ready=False, **FREE)
    s.submit("plain", prompt(9, 2), **FREE)
    assert terminal(s.run()) == ["plain"]
    assert s.scheduler.roster.ready("grammar") and not s.scheduler.roster.ready("grammar") and not s.scheduler.roster.ready("nobody")
    s.scheduler.roster.finish_all("image", Status.FAILED, "the image is not a picture")
    assert sorted(terminal(s.run())) == ["grammar", "image"] and s.tokens("grammar") == s.expected("grammar")
    assert s.scheduler.roster.take("image").outputs[0].error == "the image is not a picture"


def test_defect_5_a_request_that_never_ran_has_no_token() -> None:
    s = serving(max_context=40)
    s.submit("long", prompt(41), **FREE)
    s.submit("late", prompt(9), is_ready=False, **FREE)
    s.scheduler.roster.finish_all("late", Status.ABORTED)
    events = s.run()
    assert events == [FinishedEvent("long", "prompt_length_exceeded", None), FinishedEvent("late", "abort", None)]
    assert s.tokens("long") == s.tokens("late") == []


def test_a_deadline_ends_a_request_waiting_or_running() -> None:
    s = serving(slots=1, model={"ms": lambda decode, rows: 10.0})
    s.submit("running", prompt(9), max_tokens=100, ignore_eos=True, deadline_ms=55.0)
    s.submit("waiting", prompt(9, 1), deadline_ms=35.0, **FREE)
    s.submit("in time", prompt(9, 2), deadline_ms=10_000.0, max_tokens=2, ignore_eos=True)
    s.run()
    found = {name: s.scheduler.roster.branches(name)[0] for name in ("running", "waiting", "in time")}
    assert [b.status.value for b in found.values()] == ["deadline", "deadline", "length"]
    assert len(s.tokens("running")) == 6 and s.tokens("waiting") == []
    s.assert_empty()


def test_a_deadline_is_of_its_request_and_not_of_a_later_one_with_its_id() -> None:
    s = serving(model={"ms": lambda decode, rows: 10.0})
    for deadline_ms in (100.0, None, 10_000.0):
        s.submit("r", prompt(9), max_tokens=7, ignore_eos=True, deadline_ms=deadline_ms)
        s.run()
        assert s.scheduler.roster.take("r").outputs[0].finish_reason == "length"


def test_a_line_in_which_nobody_fits_does_not_grow() -> None:
    """A tenant at its cap, memory that is taken: those who wait are looked at in every step."""
    s = serving(slots=4, blocks=20, tenant_sequences=1, caching=False)
    s.submit("runs", prompt(60), max_tokens=90, ignore_eos=True, tenant="a")
    for i in range(12):
        s.submit(f"capped {i}", prompt(9, i), tenant="a", priority=12 - i, max_tokens=1)
        s.submit(f"large {i}", prompt(120, i), tenant=f"t{i}", priority=i % 3, max_tokens=1)
    line, sizes = s.scheduler.roster.waiting, []
    for _ in range(80):
        s.driver.step()
        sizes.append(len(line._fair) + len(line._oldest))
    assert len(line) == 24 and max(sizes) <= 3 * 24, sizes
    s.run()
    s.assert_empty()


def test_a2_what_was_verified_beyond_a_stop_is_not_reported() -> None:
    """Eos, a stop token and the last token of the context, each inside a verified block."""
    for offset in range(6):
        s = serving(drafts=5, model={"accepted": 1.0}, max_context=64)
        s.submit("stop", prompt(9), max_tokens=50, ignore_eos=True)
        s.run()
        answer = s.tokens("stop")
        wanted = answer[7 + offset]
        cut = answer[: answer.index(wanted) + 1]
        s.submit("early", prompt(9), max_tokens=50, ignore_eos=True, stop_token_ids=[wanted])
        s.submit("full", prompt(64 - offset), max_tokens=50, ignore_eos=True)
        events = s.run()
        assert s.tokens("early") == cut and s.scheduler.roster.branches("early")[0].stop_reason == wanted
        assert len(s.tokens("full")) == offset + 1 and s.scheduler.roster.branches("full")[0].stop_reason == "max_context"
        assert sum(isinstance(e, TokenEvent) for e in events) == len(cut) + offset + 1
        s.assert_empty()


def test_defect_14_many_sequences_and_full_acceptance_hold_no_pool() -> None:
    s = serving(slots=900, blocks=3000, max_rows=9000, drafts=5, depth=1, caching=False, model={"accepted": 1.0})
    for i in range(900):
        s.submit(f"r{i}", prompt(4, i), max_tokens=13, ignore_eos=True)
    events = s.run()
    assert sum(isinstance(event, TokenEvent) for event in events) == 900 * 13 and len(terminal(events)) == 900


def test_defect_26_a_request_that_surely_ends_gets_no_row() -> None:
    s = serving(depth=1)
    for i in range(5):
        s.submit(f"r{i}", prompt(8, i), max_tokens=3, ignore_eos=True)
    s.run()
    assert s.scheduler.statistics.counts.wasted_rows == 0 and s.scheduler.statistics.counts.decode_rows == 5 * 2


def test_width_limits_of_a_request_hold() -> None:
    s = serving(drafts=5)
    steps = recorded(s)
    for name, spec in (("off", "off"), ("two", 2), ("auto", "auto")):
        s.submit(name, prompt(8), spec=spec, max_tokens=30, ignore_eos=True)
    s.run()
    widest = {b.request.id: 0 for step in steps for b in step.branches}
    for step in steps:
        for branch, width in zip(step.branches, step.widths.tolist(), strict=True):
            widest[branch.request.id] = max(widest[branch.request.id], width)
    assert widest == {"off": 1, "two": 3, "auto": 6}


# -- what is not known yet


def test_r30_a_placeholder_cannot_be_packed() -> None:
    rows = FollowingRows(np.array([3, 4]))
    buffer = np.zeros(4, np.int32)
    with pytest.raises(TypeError, match="was packed for a device"):
        np.asarray(rows)
    with pytest.raises(TypeError):
        buffer[:2] = rows  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="used as an id"):
        buffer[0] = rows.__index__()
    assert not buffer.any()


def test_following_rows_have_neither_token_nor_position() -> None:
    s = serving(depth=1)
    steps = recorded(s)
    s.submit("r", prompt(8), max_tokens=5, ignore_eos=True)
    s.run()
    assert [(len(step.known.slots), len(step.following.slots)) for step in steps] == [(0, 0), (0, 1), (0, 1), (0, 1), (0, 1)]
    s = serving(depth=0)
    steps = recorded(s)
    s.submit("r", prompt(8), max_tokens=5, ignore_eos=True)
    s.run()
    assert [(len(step.known.slots), len(step.following.slots)) for step in steps] == [(0, 0), (1, 0), (1, 0), (1, 0), (1, 0)]


# -- options


@pytest.mark.parametrize(("option", "value"), [("max_rows", 0), ("max_context", 2.0), ("drafts", -1), ("plan", "best"), ("alignment", 65)])
def test_options_are_checked(option: str, value: object) -> None:
    with pytest.raises(OptionRefused, match=option):
        SchedulerOptions(**{"max_rows": 64, "max_context": 100, "alignment": 8, option: value})  # type: ignore[arg-type]


def test_exact_mode_reuses_nothing_and_says_so() -> None:
    s = serving(rules=ReplayRules(Mode.EXACT, 0, window=8, backtrack=6, block=8))
    for i in range(2):
        s.submit(f"r{i}", prompt(40), **FREE)
        s.run()
    assert s.scheduler.roster.branches("r1")[0].hit_tokens == 0 and s.tokens("r1") == s.expected("r1")
    assert s.cache is not None and {outcome.name: count for outcome, count in s.cache.outcomes.items()} == {"OFF": 2}
