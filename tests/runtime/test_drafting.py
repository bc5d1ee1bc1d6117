"""What the engine learns of drafts and decides with it: calibration, step times, draft length, who stops drafting; on the null device."""

from typing import Any

import numpy as np
import pytest

from tapeout.runtime.calibration import EARLY_STEPS, REFIT_STEPS, Calibrator, mapped
from tapeout.runtime.columns import Columns
from tapeout.runtime.cost import decode_table
from tapeout.runtime.drafting import WARM_UP, Drafting, DraftOptions
from tapeout.runtime.errors import OptionRefused
from tapeout.runtime.planner import Reason, Rules, survival
from tests.runtime.null import Serving, prompt, serving

FLAT = decode_table(range(1, 200), [10.0] * 199, is_padded=False)
STEEP_MS = {"ms": lambda decode, prompt: 1.0 + decode}
STEEP = decode_table(range(1, 200), [1.0 + rows for rows in range(1, 200)], is_padded=False)


def ran(requests: int = 6, tokens: int = 120, **options: Any) -> Serving:
    s = serving(**{"drafts": 5, "blocks": 200, "caching": False, **options})
    for i in range(requests):
        s.submit(f"r{i}", prompt(9, i), max_tokens=tokens, ignore_eos=True)
    s.run()
    assert all(s.tokens(f"r{i}") == s.expected(f"r{i}") for i in range(requests))
    s.assert_empty()
    return s


# -- calibration


def test_a_calibrator_gives_maps_by_age() -> None:
    calibrator, random = Calibrator(2), np.random.default_rng(0)
    for step in range(2 * REFIT_STEPS):
        chance = random.uniform(0.1, 0.9, (50, 2))
        passed = random.random((50, 2)) < chance
        accepted = np.where(passed.all(axis=1), 2, np.argmin(passed, axis=1))
        calibrator.observe(step, chance / 2, np.full(50, 3), accepted)
    assert calibrator.map(EARLY_STEPS[0] - 2) is None, "nothing was fitted by then"
    first, second = calibrator.map(REFIT_STEPS), calibrator.map(10**9)
    assert first is not None and second is not None and first.tolist() != second.tolist()
    asked = np.array([[0.1, 0.2], [0.3, 0.35], [0.4, 0.15]])
    np.testing.assert_allclose(mapped(asked, second), 2 * asked, atol=0.12)
    calibrator.observe(999, np.ones((1, 2)), np.ones(1, np.int64), np.zeros(1, np.int64))
    assert calibrator.map(10**9) is second and calibrator.told == 2 * REFIT_STEPS, "a step that verified nothing tells nothing"


@pytest.mark.parametrize("depth", [0, 1])
def test_the_planner_sees_calibrated_confidences(depth: int) -> None:
    """The null device says 0.95 of drafts that are right and 0.45 of those that are wrong: far too careful in both directions."""
    s = ran(depth=depth, plan="ours", decode_times=FLAT)
    gauges = s.scheduler.gauges()
    assert gauges["calibration_temperature_1"] < 0.6 and gauges["calibration_error_1"] > 0.05
    calibrator, columns = s.scheduler.drafting.calibrator, s.scheduler.columns
    newest = int(columns.rated[0].argmax())
    monotone = calibrator.map(int(columns.rated[0, newest]))
    assert monotone is not None
    np.testing.assert_allclose(columns.rates[0, newest], survival(mapped(columns.confidences[[newest]], monotone))[0])
    assert not np.allclose(columns.rates[0, newest], survival(columns.confidences[[newest]])[0], atol=0.02)
    plain = ran(depth=depth, plan="ours", decode_times=FLAT, is_calibrating=False)
    assert plain.scheduler.drafting.calibrator.told == 0 and plain.scheduler.drafting.map(10**9) is None


def test_a_step_carries_the_map_of_two_steps_before() -> None:
    s = serving(drafts=5, blocks=200, plan="ours", decode_times=FLAT)
    s.submit("r", prompt(9), max_tokens=150, ignore_eos=True)
    maps, seen = [], []
    execute = s.device.execute

    def watched(prepared: Any) -> Any:
        seen.append((prepared.step.number, prepared.step.monotone))
        maps.append(s.scheduler.drafting.calibrator.map(10**9))
        return execute(prepared)

    s.device.execute = watched  # type: ignore[method-assign]
    s.run()
    assert seen[0][1] is None and seen[-1][1] is not None
    assert all(found is (maps[number - 1] if number > 1 else None) for number, found in seen), "what was known when the step before was run"


def test_warming_up_everything_is_verified_and_now_and_then_later() -> None:
    """Every row costs as much as a whole step, so planning verifies nothing; but what is never verified can teach nothing."""
    s = serving(drafts=5, blocks=200, plan="ours", decode_times=STEEP)
    s.submit("first", prompt(9), max_tokens=20)
    s.driver.step()
    s.driver.step()
    assert s.scheduler.drafting.last is not None and s.scheduler.drafting.last.reason is Reason.EXPLORING
    s = ran(tokens=170, plan="ours", decode_times=STEEP, model={"accepted": 0.02, **STEEP_MS})
    widths = s.scheduler.statistics.verified
    assert WARM_UP * 0.5 * 6 < widths.counts[5] < 0.4 * widths.total and widths.counts[0] > 0.5 * widths.total
    assert s.scheduler.drafting.calibrator.told > WARM_UP + 1


def test_reasons_of_plans_are_counted() -> None:
    """Where drafts do not pay the gauges say so: why a step verified what it did is no secret of the engine."""
    s = ran(tokens=170, plan="ours", decode_times=STEEP, model={"accepted": 0.02, **STEEP_MS})
    plans = {name: count for name, count in s.scheduler.gauges().items() if name.startswith("plans_")}
    assert plans["plans_exploring"] >= WARM_UP * 0.5 and plans["plans_averaged"] > plans["plans_exploring"]
    assert sum(plans.values()) <= s.scheduler.statistics.counts.steps
    assert not any(name.startswith("plans_") for name in ran(tokens=9, plan="all").scheduler.gauges()), "everything is verified without a plan"


def test_drafts_that_are_better_than_they_say_are_used() -> None:
    """The head says 0.1 of drafts that are always right: without calibration the planner would not use them."""
    confident = {"accepted": 1.0, "confidence": lambda right: 0.1, "ms": lambda decode, prompt: 10 + 2.0 * decode}
    times = decode_table(range(1, 200), [10 + 2.0 * rows for rows in range(1, 200)], is_padded=False)
    shares = []
    for is_calibrating in (True, False):
        s = ran(tokens=170, plan="ours", decode_times=times, block_ms=(0.5, 0.1), is_calibrating=is_calibrating, model=confident)
        shares.append(s.scheduler.statistics.accepted.sum / s.scheduler.statistics.accepted.total)
    assert shares[0] > 4.5 and shares[1] < 1


# -- step times


def test_times_that_steps_take_correct_the_table() -> None:
    """The table says that rows cost nothing, but every row costs as much as a whole step: soon nothing is verified."""
    times = {"ms": lambda decode, prompt: 2.0 + 8.0 * decode}
    s = ran(plan="ours", decode_times=FLAT, model={**times, "accepted": 0.2})
    assert s.scheduler.statistics.verified.counts[0] > 0.5 * s.scheduler.statistics.verified.total
    gauges = s.scheduler.gauges()
    assert gauges["planned_steps_ms"] > 0 and 0.5 < gauges["planned_ms"] / gauges["planned_steps_ms"] < 1.5


def test_the_peer_s_slope_is_learned_for_compat() -> None:
    s = ran(plan="compat", decode_times=FLAT, model={"ms": lambda decode, prompt: 10 + 2.0 * decode})
    assert s.scheduler.drafting._slope.value == pytest.approx(2.0)
    s = ran(plan="compat", decode_times=FLAT, model={"ms": lambda decode, prompt: 10.0})
    assert s.scheduler.drafting._slope.value == 0.0


def test_steps_with_prompt_pieces_or_without_time_teach_nothing() -> None:
    drafting = Drafting(DraftOptions(5, "ours", FLAT))
    drafting.took(0, 5, 100.0, 99.0, is_decode=False)
    drafting.took(1, 5, 100.0, 0.0, is_decode=True)
    assert drafting._table is FLAT
    drafting.took(2, 5, 100.0, 99.0, is_decode=True)
    assert drafting._table is not FLAT


# -- how much is drafted


def drafted_tokens(s: Serving) -> list[int]:
    return [draft[2] for name in s.scheduler.roster.requests for b in s.scheduler.roster.branches(name) for draft in b.drafts]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_draft_length_is_a_decision(depth: int) -> None:
    dear = ran(depth=depth, tokens=150, plan="ours", decode_times=STEEP, planner_rules=Rules(draft_ms=((0, 0.0), (3, 60.0), (5, 80.0))))
    cheap = ran(depth=depth, tokens=150, plan="ours", decode_times=FLAT, planner_rules=Rules(draft_ms=((0, 0.0), (3, 0.1), (5, 0.11))),
                model={"accepted": 0.95, "ms": lambda decode, prompt: 10.0})  # fmt: skip
    steps = dear.scheduler.statistics.counts.steps
    assert len(drafted_tokens(dear)) < 0.5 * 6 * steps and 5 in drafted_tokens(dear), "now and then a whole block shows what it would bring"
    assert drafted_tokens(cheap).count(5) > 0.9 * len(drafted_tokens(cheap))


def test_sequences_whose_drafts_do_not_pay_stop_drafting() -> None:
    """A row costs 1 ms and a block 1 ms: a block pays from one accepted draft a step on."""
    poor = ran(tokens=180, requests=2, plan="ours", decode_times=STEEP, block_ms=(0.0, 1.0), model={"accepted": 0.02, **STEEP_MS})
    rich = ran(tokens=180, requests=2, plan="ours", decode_times=STEEP, block_ms=(0.0, 1.0), model={"accepted": 0.95, **STEEP_MS})
    poor_steps = sum(b.decode_steps for n in ("r0", "r1") for b in poor.scheduler.roster.branches(n))
    rich_steps = sum(b.decode_steps for n in ("r0", "r1") for b in rich.scheduler.roster.branches(n))
    assert len(drafted_tokens(poor)) < 0.5 * poor_steps and len(drafted_tokens(rich)) > 0.9 * rich_steps


def test_who_may_not_verify_drafts_nothing() -> None:
    s = serving(drafts=5)
    s.submit("off", prompt(9), max_tokens=20, ignore_eos=True, spec="off")
    s.submit("on", prompt(9, 1), max_tokens=20, ignore_eos=True)
    s.run()
    assert s.scheduler.roster.branches("off")[0].drafts == [] and len(s.scheduler.roster.branches("on")[0].drafts) > 0


def test_options_are_checked() -> None:
    with pytest.raises(OptionRefused, match=r"DraftOptions.plan - found best, expected all, compat or ours"):
        DraftOptions(5, "best")


# -- windows at the end of an output


@pytest.mark.parametrize(("drafts", "depth"), [(0, 0), (0, 1), (5, 0), (5, 1)])
def test_the_next_turn_of_a_conversation_starts_from_the_window_of_the_last(drafts: int, depth: int) -> None:
    s = serving(blocks=200, drafts=drafts, depth=depth, snapshot_bytes=100_000)
    s.submit("turn 1", prompt(20), max_tokens=70, ignore_eos=True)
    s.run()
    said = prompt(20) + s.tokens("turn 1")
    assert s.cache is not None and s.cache.snapshots is not None
    kept = [length for length in range(8, 90, 8) if s.scheduler.roster.branches("turn 1")[0].keys[length // 8 - 1] in s.cache.snapshots]
    assert kept[0] == 16 and len(kept) == 3, "the prompt's and the newest two of the output"
    if depth == 0 or not drafts:
        assert kept[1:] == [80, 88]
    s.submit("turn 2", said + prompt(30, 9), max_tokens=20, ignore_eos=True)
    s.run()
    branch = s.scheduler.roster.branches("turn 2")[0]
    assert s.tokens("turn 2") == s.expected("turn 2") and branch.hit_tokens == 88
    if kept[2] == 88:
        assert branch.replayed == 0 and s.scheduler.statistics.counts.snapshots_restored == 1
    s.assert_empty()


def test_a_preempted_sequence_goes_on_from_its_newest_window() -> None:
    s = serving(blocks=200, snapshot_bytes=100_000)
    s.submit("r", prompt(20), max_tokens=90, ignore_eos=True)
    for _ in range(60):
        s.driver.step()
    branch = s.scheduler.roster.branches("r")[0]
    s.scheduler.roster.preempt(branch)
    s.run()
    assert s.tokens("r") == s.expected("r") and branch.preemptions == 1 and branch.lineage is None
    assert s.scheduler.statistics.counts.snapshots_restored == 1
    assert s.scheduler.statistics.counts.recomputed_rows == 79 - 64, "all but what the window before the last boundary spares"
    s.assert_empty()


def test_a_window_that_rows_in_flight_overwrote_is_not_kept() -> None:
    """Deep pipelines verify past the boundary before it is known to be crossed; the null device refuses a window that is gone."""
    for seed in range(6):
        s = serving(blocks=200, drafts=5, depth=2, snapshot_bytes=100_000, model={"accepted": 0.9})
        for i in range(5):
            s.submit(f"r{i}", prompt(10 + seed + i, i), max_tokens=90, ignore_eos=True)
        s.run()
        assert all(s.tokens(f"r{i}") == s.expected(f"r{i}") for i in range(5))
        s.assert_empty()


@pytest.mark.parametrize("newest", [6, 7])
def test_the_total_of_a_step_rests_on_rates_two_steps_old(newest: int) -> None:
    """The information barrier: synchronous driving knows newer rates when step 8 is planned, and does not use them."""
    rates = {"sure": np.array([[0.9, 0.9]]), "hopeless": np.array([[0.01, 0.01]])}
    totals = []
    for new, old in (("sure", "hopeless"), ("hopeless", "sure")):
        drafting, columns = Drafting(DraftOptions(2, "compat", STEEP)), Columns(1, 2)
        columns.length[0], columns.drafted[0], columns.has_block[0] = 20, 2, True
        columns.rates[0, 0], columns.rated[0, 0] = rates[new][0], newest
        columns.rates[1, 0], columns.rated[1, 0] = rates[old][0], newest - 1
        totals.append(drafting.total(columns, np.array([0]), 2, 8))
    sure, hopeless = totals if newest == 6 else totals[::-1]
    assert (sure, hopeless) == (2, 0)


def test_a_short_block_has_no_rates_behind_its_end() -> None:
    drafting, columns = Drafting(DraftOptions(3)), Columns(2, 3)
    drafting.rated(columns, 5, np.array([0, 1]), np.full((2, 3), 0.5), np.array([2, 0]))
    assert columns.rates[0].tolist() == [[0.5, 0.25, 0.0], [0.0, 0.0, 0.0]] and columns.rated[0].tolist() == [5, 5]
    assert columns.has_block.tolist() == [True, False]


def test_who_stopped_drafting_tries_again_every_64_steps() -> None:
    drafting, columns, slots = Drafting(DraftOptions(2, "compat", STEEP, block_ms=(0.0, 100.0))), Columns(1, 2), np.array([0])
    columns.length[0], columns.most_drafts[0] = 20, 2
    drafting.total(columns, slots, 2, 0)
    asked = [int(drafting.lengths(columns, slots)[0]) for _ in range(130)]
    assert asked == [*[0] * 64, 2, *[0] * 64, 2]
