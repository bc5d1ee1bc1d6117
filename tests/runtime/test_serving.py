"""Whole engines on the null device: A3, A7, A20, the trace of 200 prompts, faults of every kind; tokens are those of the model alone."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tapeout.runtime.cost import decode_table
from tapeout.runtime.device.null import Prepared
from tapeout.runtime.disk import DiskTier
from tapeout.runtime.errors import RequestTaken
from tapeout.runtime.replay import Mode, ReplayRules
from tapeout.runtime.request import Event, FinishedEvent, Status, TokenEvent
from tapeout.runtime.step import Step, StepResult
from tests.runtime.null import EOS, VOCABULARY, Dying, Serving, prompt, serving, terminal

TIMES = decode_table(range(1, 200), [1 + 0.05 * max(rows - 12, 0) for rows in range(1, 200)], is_padded=False)


def load(s: Serving, count: int, seed: int, *, aborts: bool = True, branches: bool = True, check_every: int = 1) -> tuple[list[str], list[Event]]:
    """Random requests that share prefixes, submitted while the engine runs; some are aborted, some end at once, some never fit."""
    rng = random.Random(seed)
    names: list[str] = []
    events: list[Event] = []
    while len(names) < count or s.driver.has_work:
        for _ in range(rng.choice([0, 0, 1, 2]) if len(names) < count else 0):
            names.append(f"r{len(names)}")
            submit_random(s, names[-1], rng, branches)
        if aborts and names and rng.random() < 0.04:
            s.scheduler.roster.finish_all(rng.choice(names[-20:]), Status.ABORTED)
        events += s.driver.step()
        if rng.randrange(check_every) == 0:
            assert s.scheduler.roster.faults() == []
    return names, events


def submit_random(s: Serving, name: str, rng: random.Random, branches: bool) -> None:
    length = 210 if rng.random() < 0.01 else rng.randint(1, 30)
    tokens = prompt(rng.choice([0, 8, 16, 24, 40, 80]), rng.randrange(4)) + prompt(length, int(name[1:]))
    s.submit(
        name, tokens, max_tokens=rng.choice([0, 1, rng.randint(2, 30), 30]), temperature=rng.choice([0, 1]), seed=int(name[1:]),
        ignore_eos=rng.random() < 0.5, stop_token_ids=[5] if rng.random() < 0.2 else [], spec=rng.choice(["auto", "auto", "off", 2]),
        n=rng.choice([1, 1, 1, 1, 3]) if branches else 1, priority=rng.choice([0, 0, 0, -1, 3]),
        deadline_ms=rng.choice([None, None, None, 400.0]) if branches else None,
    )  # fmt: skip


def check(s: Serving, names: list[str], events: list[Event], faulty: bool = False) -> Counter[str]:
    """One terminal event each, tokens of the model, events that say what the sequences hold; nothing is left behind."""
    s.assert_empty()
    assert sorted(terminal(events)) == sorted(names)
    told: dict[tuple[str, int], list[int]] = {}
    for event in events:
        if isinstance(event, TokenEvent):
            own = told.setdefault((event.request_id, event.branch), [])
            assert event.ordinal == len(own), "tokens come in order"
            own.append(event.token)
    reasons: Counter[str] = Counter()
    for name in names:
        for branch in s.scheduler.roster.branches(name):
            number, status = branch.request.branch, branch.status
            found, expected = s.tokens(name, number), s.expected(name, number)
            reasons[status.value] += 1
            assert told.get((name, number), []) == found == expected[: len(found)], name
            if status in (Status.STOPPED, Status.LENGTH_CAPPED):
                assert found == expected, name
            else:
                assert status in (Status.ABORTED, Status.DEADLINE, Status.PROMPT_TOO_LONG) or (faulty and status is Status.FAILED), name
    return reasons


# -- A3


def failing(step: Step) -> dict[int, str]:
    return {int(step.slots[0]): "a bad row"} if len(step.slots) and step.number % 41 == 7 else {}


def a3(count: int, check_every: int) -> None:
    """Requests, aborts, deadlines, preemptions, forks, prefix hits, failing rows and lost steps, all mixed, in four ways of driving."""
    faults = {"fails": failing, "loses": lambda step: step.number % 173 == 100}
    seen: Counter[str] = Counter()
    for seed, (depth, drafts) in enumerate([(0, 0), (1, 5), (2, 0), (1, 0)]):
        s = serving(slots=8, blocks=56, depth=depth, drafts=drafts, model=faults, snapshot_bytes=4000 if seed % 2 else 0)
        names, events = load(s, count // 4, seed, check_every=check_every)
        seen += check(s, names, events, faulty=True)
        counts = s.scheduler.statistics.counts
        assert counts.hit_tokens > 0 and counts.lost_steps > 0 and counts.preemptions > 0
        waits = [b.started_s - b.submitted_s for name in names for b in s.scheduler.roster.branches(name) if b.started_s is not None]
        assert max(waits) < 30.0, "nobody waits for ever: a hundred times the time of a request"
    assert set(seen) == {"stop", "length", "abort", "deadline", "prompt_length_exceeded", "error"}


def test_a3_one_terminal_event_for_each_request() -> None:
    a3(3000, 7)


@pytest.mark.full
def test_a3_one_terminal_event_for_each_of_100_000_requests() -> None:
    a3(100_000, 97)


# -- A7


def a7(count: int, configurations: list[dict[str, Any]]) -> None:
    """R32: one core, four ways of driving, one outcome."""
    for options in configurations:
        outcomes = []
        for how in ({"depth": 0}, {"depth": 1}, {"depth": 2}, {"depth": 1, "background": True}):
            s = serving(slots=8, blocks=56, **how, **options)
            names, events = load(s, count, 5, aborts=False, branches=False, check_every=50)
            check(s, names, events)
            outcomes.append({name: s.tokens(name) for name in names})
            if options.get("plan", "all") != "all":
                assert s.scheduler.drafting.last is not None, "a plan was made"
        assert all(outcome == outcomes[0] for outcome in outcomes[1:])
        assert sum(map(len, outcomes[0].values())) > 5 * count


CONFIGURATIONS: list[dict[str, Any]] = [
    {"drafts": 0},
    {"drafts": 5},
    {"drafts": 5, "plan": "compat", "decode_times": TIMES},
    {"drafts": 5, "plan": "ours", "decode_times": TIMES, "caching": False},
]


def test_a7_asynchronous_equals_synchronous() -> None:
    a7(120, CONFIGURATIONS)


@pytest.mark.full
def test_a7_asynchronous_equals_synchronous_for_1000_requests() -> None:
    a7(1000, CONFIGURATIONS)


def test_r29_every_width_gives_the_same_tokens() -> None:
    outcomes = []
    for drafts in range(9):
        s = serving(drafts=drafts, blocks=80, rules=ReplayRules(Mode.COMPACT, 18, window=8, backtrack=10, block=8))
        for offset in range(10):
            s.submit(f"r{offset}", prompt(15 + offset, 1), max_tokens=40, ignore_eos=True)
        s.run()
        outcomes.append([s.tokens(f"r{offset}") for offset in range(10)])
        s.assert_empty()
    assert outcomes == [outcomes[0]] * 9


def test_r33_draws_depend_on_seed_and_position_alone() -> None:
    answers = []
    for drafts, before, company, depth in ((0, 0, 0, 0), (5, 0, 7, 0), (0, 100, 3, 1), (5, 100, 7, 2)):
        s = serving(drafts=drafts, depth=depth, blocks=120)
        s.submit("warm", prompt(5, 9), max_tokens=before, ignore_eos=True)
        s.run()
        for i in range(company):
            s.submit(f"other {i}", prompt(6, i), temperature=i % 2, seed=i, max_tokens=60, ignore_eos=True)
        s.submit("same", prompt(20), temperature=1, seed=77, max_tokens=30, ignore_eos=True)
        s.run()
        answers.append(s.tokens("same"))
    assert answers == [answers[0]] * 4 and len(answers[0]) == 30


def test_defect_7_a_least_number_of_tokens_counts_those_before_a_preemption() -> None:
    """The null device does not mask eos: what is tested is that stop rules look at tokens emitted, not at the last prompt chunk."""
    s = serving(slots=2)
    s.submit("r", prompt(20), max_tokens=40, min_tokens=12, stop_token_ids=list(range(60)))
    for _ in range(6):
        s.driver.step()
    branch = s.scheduler.roster.branches("r")[0]
    s.scheduler.roster.preempt(branch)
    s.run()
    assert branch.preemptions == 1 and branch.emitted >= 12
    assert all(token >= 60 and token != EOS for token in s.tokens("r")[11:-1]) and s.tokens("r")[-1] < 60


# -- A20


def test_a20_counters_equal_the_event_log() -> None:
    s = serving(slots=6, blocks=50, drafts=5, depth=1, model={"fails": failing})
    names, events = load(s, 400, 9, check_every=50)
    check(s, names, events, faulty=True)
    counts, statistics = s.scheduler.statistics.counts, s.scheduler.statistics
    assert counts.submitted == len(names)
    assert counts.output_tokens == sum(isinstance(event, TokenEvent) for event in events)
    assert counts.requests_finished == Counter(event.finish_reason for event in events if isinstance(event, FinishedEvent))
    assert counts.prompt_rows == s.device.encoder_rows and counts.steps == s.device.steps
    assert counts.steps == counts.decode_steps + counts.prompt_steps + counts.mixed_steps
    branches = [branch for name in names for branch in s.scheduler.roster.branches(name)]
    assert counts.preemptions == sum(branch.preemptions for branch in branches) > 0
    assert counts.drafts_verified == sum(branch.verified for branch in branches) > 0
    assert counts.drafts_accepted == sum(branch.accepted for branch in branches)
    assert counts.drafts_accepted <= counts.drafts_verified <= counts.decode_rows
    assert counts.replayed_rows == sum(branch.replayed for branch in branches)
    assert statistics.ttft_ms.total == sum(branch.first_token_s is not None for branch in branches)
    assert statistics.total_ms.total == len(branches)
    assert statistics.accepted.total == statistics.verified.total


# -- prompts that share their beginning


def test_200_prompts_in_ten_groups_cost_what_bounded_replay_says() -> None:
    rules = ReplayRules(Mode.COMPACT, 28, window=16, backtrack=6, block=128)
    s = serving(slots=32, blocks=600, block_tokens=128, max_context=1152, max_rows=2048, rules=rules)
    groups = [[g] * 768 for g in range(10)]

    def rest(i: int) -> list[int]:
        return [50 + i // 40, i % 40, *[2] * 254]

    for g, shared in enumerate(groups):
        s.submit(f"first {g}", shared + rest(190 + g), max_tokens=1, ignore_eos=True)
    s.run()
    assert s.device.encoder_rows == 10 * 1024
    for g, shared in enumerate(groups):
        for i in range(19):
            s.submit(f"{g} {i}", shared + rest(19 * g + i), max_tokens=1, ignore_eos=True)
    events = s.run()
    assert len(terminal(events)) == 190
    assert s.device.encoder_rows == s.scheduler.statistics.counts.prompt_rows == 61_920
    assert s.device.decoder_prompt_rows == 5600
    assert all(s.tokens(f"{g} {i}") == s.expected(f"{g} {i}") for g in range(10) for i in range(19))
    s.assert_empty()


def test_snapshots_spare_the_replay_and_change_no_token() -> None:
    rows = []
    for snapshot_bytes in (0, 100_000):
        s = serving(blocks=200, snapshot_bytes=snapshot_bytes)
        for i in range(6):
            s.submit(f"r{i}", prompt(64, 1) + prompt(i * 5, 50 + i), max_tokens=8, ignore_eos=True)
            s.run()
            assert s.tokens(f"r{i}") == s.expected(f"r{i}")
        rows.append((s.scheduler.statistics.counts.replayed_rows, s.scheduler.statistics.counts.snapshots_restored))
        s.assert_empty()
    assert rows[0][0] > rows[1][0] and rows[0][1] == 0 and rows[1][1] > 0


def test_branches_share_the_prompt() -> None:
    s = serving(blocks=100, drafts=0)
    s.submit("r", prompt(45), n=4, max_tokens=12, temperature=1, seed=9, ignore_eos=True)
    events = s.run()
    assert len(terminal(events)) == 1
    answers = [s.tokens("r", branch) for branch in range(4)]
    assert answers == [s.expected("r", branch) for branch in range(4)] and len({tuple(a) for a in answers}) == 4
    assert s.device.encoder_rows == 45 + 3, "the prompt runs once; each other branch draws its first token from the last row again"
    result = s.scheduler.roster.take("r")
    assert [output.index for output in result.outputs] == [0, 1, 2, 3] and result.seed == 9
    s.assert_empty()


def test_branches_that_find_no_room_wait_and_lose_nothing() -> None:
    s = serving(slots=2, blocks=30, drafts=5)
    s.submit("r", prompt(45), n=5, max_tokens=12, temperature=1, seed=9, ignore_eos=True)
    s.run()
    assert all(s.tokens("r", branch) == s.expected("r", branch) for branch in range(5))
    s.assert_empty()


# -- faults: one clear error for the request concerned, the others unharmed, nothing leaked


def test_a_corrupted_snapshot_is_replayed_around() -> None:
    s = serving(blocks=200, snapshot_bytes=100_000)
    s.submit("a", prompt(64), max_tokens=1)
    s.run()
    assert s.cache is not None and s.cache.snapshots is not None
    (kept,) = s.cache.snapshots._kept.values()
    kept.snapshot = kept.snapshot._replace(payload=b"\0" + kept.snapshot.payload[1:])
    kept.digest = b"damaged"
    s.submit("b", prompt(64) + prompt(20, 5), max_tokens=9, ignore_eos=True)
    s.run()
    assert s.tokens("b") == s.expected("b") and s.cache.snapshots.damaged == 1
    branch = s.scheduler.roster.branches("b")[0]
    assert branch.hit_tokens == 64 and branch.replayed > 0
    s.assert_empty()


@pytest.mark.parametrize("damaged", [False, True])
def test_blocks_come_back_from_disk_after_a_restart(tmp_path: Path, damaged: bool) -> None:
    first = serving(disk=DiskTier(tmp_path, 10**6))
    first.submit("a", prompt(60), max_tokens=1)
    first.run()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 60 // 8
    if damaged:
        key = first.scheduler.roster.branches("a")[0].keys[3]
        file = next(f for f in files if key.hex() in f.name)
        file.write_bytes(file.read_bytes()[:-5])
    again = serving(disk=DiskTier(tmp_path, 10**6))
    again.submit("b", prompt(60), max_tokens=20, ignore_eos=True)
    again.run()
    assert again.tokens("b") == again.expected("b")
    assert again.scheduler.statistics.counts.blocks_loaded == (3 if damaged else 7)
    assert again.scheduler.roster.branches("b")[0].hit_tokens == (24 if damaged else 56)
    again.assert_empty()


def stored(folder: Path, length: int) -> None:
    """A folder with the blocks and windows of a prompt."""
    first = serving(disk=DiskTier(folder, 10**6), snapshot_bytes=10**6)
    first.submit("a", prompt(length), max_tokens=1)
    first.run()
    assert first.cache is not None and first.cache.snapshots is not None
    first.cache.snapshots.flush()


@pytest.mark.parametrize("kind", ["block", "snapshot"])
def test_entries_that_another_process_removes_as_soon_as_they_are_read(tmp_path: Path, kind: str) -> None:
    stored(tmp_path, 60)
    s = serving(disk=DiskTier(tmp_path, 10**6), snapshot_bytes=10**6)
    assert s.cache is not None and s.cache.disk is not None
    get = s.cache.disk.get

    def vanishing(wanted: Any, key: bytes) -> Any:
        found = get(wanted, key)
        for file in tmp_path.glob(f"{kind}-{key.hex()}*"):
            file.unlink()
        return found

    s.cache.disk.get = vanishing  # type: ignore[method-assign]
    s.submit("b", prompt(60) + prompt(20, 7), max_tokens=9, ignore_eos=True)
    s.run()
    assert s.tokens("b") == s.expected("b")
    s.assert_empty()


def test_a_prompt_that_waits_for_memory_is_not_read_from_disk_again_and_again(tmp_path: Path) -> None:
    stored(tmp_path, 60)
    disk = DiskTier(tmp_path, 10**6)
    s = serving(disk=disk, snapshot_bytes=10**6, blocks=14)
    s.submit("long", prompt(60, 5), max_tokens=40, ignore_eos=True)
    s.driver.step()
    s.submit("b", prompt(60) + prompt(20, 7), max_tokens=9, ignore_eos=True)
    s.run()
    assert s.tokens("b") == s.expected("b") and s.scheduler.statistics.counts.blocks_loaded == 7
    assert disk.read == 7 + 1, "each block once, and the window"
    s.assert_empty()


def test_a_lost_step_leaves_no_snapshot_of_what_built_on_it() -> None:
    s = serving(depth=1, snapshot_bytes=100_000, blocks=200, max_rows=24, model={"loses": lambda step: step.number == 0})
    s.submit("r", prompt(40), max_tokens=4)
    s.run()
    assert s.scheduler.roster.branches("r")[0].status is Status.FAILED and s.cache is not None and s.cache.snapshots is not None
    assert len(s.cache.snapshots) == 0 and s.scheduler.statistics.counts.lost_steps == 1
    s.submit("again", prompt(40), max_tokens=4)
    s.run()
    assert s.tokens("again") == s.expected("again") and s.scheduler.roster.branches("again")[0].hit_tokens == 0
    s.assert_empty()


def test_a_lost_step_takes_its_loads_and_copies_with_it(tmp_path: Path) -> None:
    first = serving(disk=DiskTier(tmp_path, 10**6))
    first.submit("a", prompt(60), max_tokens=1)
    first.run()
    s = serving(disk=DiskTier(tmp_path, 10**6), depth=1, model={"loses": lambda step: bool(step.loads) and step.number == 0})
    s.submit("loads", prompt(60), max_tokens=9, ignore_eos=True)
    s.driver.step()
    assert s.scheduler.pool.named(first.scheduler.roster.branches("a")[0].keys[0]) is not None
    s.submit("builds on it", prompt(60), max_tokens=9, ignore_eos=True)
    s.run()
    assert s.scheduler.roster.branches("loads")[0].status is Status.FAILED
    assert s.scheduler.roster.branches("builds on it")[0].preemptions == 1
    assert s.tokens("builds on it") == s.expected("builds on it")
    s.assert_empty()


def test_who_waited_for_the_copies_of_a_lost_step_computes_its_prompt_again() -> None:
    s = serving(max_rows=16)
    s.submit("copied", prompt(40), max_tokens=9, ignore_eos=True)
    s.driver.step()
    branch = s.scheduler.roster.branches("copied")[0]
    nobody = np.zeros(0, np.int64)
    step = s.scheduler.propose()
    assert step is not None and branch.slot is not None
    other = replace(step, branches=(), slots=nobody, epochs=nobody, widths=nobody, pieces=(), slot_copies=[(3, branch.slot)])
    s.scheduler.lose(other, "gone")
    assert branch.status is Status.WAITING and branch.slot is None and branch.preemptions == 1
    s.run()
    assert s.tokens("copied") == s.expected("copied")
    s.assert_empty()


def test_an_interrupted_step_ends_its_requests_and_nothing_else() -> None:
    for depth in (0, 1):
        s = serving(slots=2, depth=depth)
        for i in range(3):
            s.submit(f"r{i}", prompt(9, i), max_tokens=9, ignore_eos=True)
        s.driver.step()
        execute = s.device.execute

        def interrupted(prepared: Prepared) -> StepResult:
            raise KeyboardInterrupt

        s.device.execute = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            s.driver.step()
        s.device.execute = execute  # type: ignore[method-assign]
        s.run()
        found = [s.scheduler.roster.branches(f"r{i}")[0] for i in range(3)]
        assert [b.status.value for b in found] == ["error", "error", "length"]
        assert found[0].error == "the step was interrupted: KeyboardInterrupt" and s.tokens("r2") == s.expected("r2")
        s.assert_empty()


@pytest.mark.parametrize("way", [{"depth": 0}, {"depth": 1}, {"depth": 2}, {"depth": 1, "background": True}], ids=str)
@pytest.mark.parametrize("call", ["launch", "collect"])
def test_an_interrupt_behind_a_call_of_the_device_shifts_no_results(call: str, way: dict[str, Any]) -> None:
    """The step is on its way, or its result is there, when the interrupt comes: what later steps get is theirs all the same."""
    s = serving(slots=2, **way)
    for i in range(4):
        s.submit(f"r{i}", prompt(9, i), max_tokens=9, ignore_eos=True)
    s.driver.step()
    own = getattr(s.driver.device, call)

    def interrupted(*arguments: object) -> None:
        own(*arguments)
        raise KeyboardInterrupt

    setattr(s.driver.device, call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(5):
            s.driver.step()
    setattr(s.driver.device, call, own)
    s.run(500)
    found = [s.scheduler.roster.branches(f"r{i}")[0].status.value for i in range(4)]
    assert found == (["error", "error", "length", "length"] if call == "launch" else ["length"] * 4)
    assert all(s.tokens(f"r{i}") == s.expected(f"r{i}")[: len(s.tokens(f"r{i}"))] for i in range(4))
    s.assert_empty()
    s.driver.device.close()  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_behind_an_interrupted_launch_loses_what_is_in_flight_and_no_more() -> None:
    s = serving(depth=1, background=True, slots=2)
    prepare = s.device.prepare

    def interrupted(step: Step) -> Prepared:
        if step.number == 1:
            raise KeyboardInterrupt
        return prepare(step)

    s.device.prepare = interrupted  # type: ignore[method-assign]
    s.submit("interrupted", prompt(9), max_tokens=9, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(5):
            s.driver.step()
    s.device.__class__ = Dying
    for i in range(4):
        s.submit(f"r{i}", prompt(9, i), max_tokens=9, ignore_eos=True)
    s.scheduler.roster.finish_all("interrupted", Status.ABORTED)
    s.run(500)
    lost = [s.scheduler.roster.branches(f"r{i}")[0].status.value for i in range(4)]
    assert lost == ["error", "error", "length", "length"]
    assert all(s.tokens(f"r{i}") == s.expected(f"r{i}") for i in (2, 3))
    s.assert_empty()
    s.driver.device.close()  # type: ignore[attr-defined]


def test_a_failing_row_ends_its_request_alone() -> None:
    s = serving(model={"fails": lambda step: {int(step.slots[1]): "not a number"} if step.number == 3 else {}})
    for i in range(3):
        s.submit(f"r{i}", prompt(9, i), max_tokens=9, ignore_eos=True)
    s.run()
    found = [s.scheduler.roster.branches(f"r{i}")[0] for i in range(3)]
    assert [(b.status.value, b.error) for b in found] == [("length", None), ("error", "not a number"), ("length", None)]
    assert s.scheduler.roster.take("r1").outputs[0].error == "not a number"
    s.assert_empty()


def test_an_id_is_taken_until_its_result_is() -> None:
    s = serving()
    s.submit("a", prompt(5), max_tokens=1)
    with pytest.raises(RequestTaken):
        s.submit("a", prompt(5), max_tokens=1)
    s.run()
    s.scheduler.roster.take("a")
    s.submit("a", prompt(5), max_tokens=1)
    s.run()
    s.assert_empty()


def test_r30_every_packed_id_is_in_the_vocabulary() -> None:
    """The null device refuses any other id; skips, preemptions, aborts and reordering are in the load."""
    for depth in (1, 2):
        s = serving(slots=5, blocks=40, depth=depth, drafts=3, max_rows=24)
        names, events = load(s, 150, 30 + depth, check_every=20)
        check(s, names, events)
        assert all(0 <= event.token < VOCABULARY for event in events if isinstance(event, TokenEvent))
