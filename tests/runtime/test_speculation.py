"""Speculative verification on programs: the tokens are those without drafts, whatever is drafted, and fewer steps are taken when drafts are right.

On the toy model; `tests/end_to_end/test_speculation.py` does the same on a compiled one.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tapeout.runtime.cost import decode_table
from tapeout.runtime.engine import Engine
from tapeout.runtime.errors import ParameterUnsupported
from tapeout.runtime.params import SamplingParams
from tapeout.runtime.program import StepRows
from tapeout.runtime.request import FinishedEvent, RequestOutput
from tapeout.runtime.step import Step, StepResult
from tapeout.runtime.verify import accepted, flat, verified_widths
from tests.runtime.oracle import foretell
from tests.runtime.toy import DRAFTS, EOS, MAX_CONTEXT, VOCABULARY, toy_answer, toy_engine

WIDE = decode_table(range(1, 25), [1.0 + 0.5 * rows for rows in range(1, 25)], is_padded=False)


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(5 * i + i * i + salt) % VOCABULARY for i in range(length)]


ASKED = {
    seed: (prompt(1 + 7 * seed % 40, seed), SamplingParams(temperature=seed % 3, seed=seed, max_tokens=2 + 2 * seed, ignore_eos=seed % 2 == 0))
    for seed in range(1, 14)
}


def answers() -> dict[int, list[int]]:
    """Whole sequences, as long as the model would go on."""
    found = {}
    for seed, (tokens, params) in ASKED.items():
        said = list(tokens)
        while len(said) < MAX_CONTEXT + DRAFTS:
            said += toy_answer(said, 1, params.temperature, seed)[:1]
        found[seed] = said
    return found


@pytest.fixture(scope="module")
def told() -> dict[int, list[int]]:
    return answers()


def ran(engine: Engine) -> dict[int, RequestOutput]:
    for seed, (tokens, params) in ASKED.items():
        engine.submit(tokens, params, str(seed))
    ends = 0
    while engine.has_work:
        ends += sum(isinstance(event, FinishedEvent) for event in engine.step())
        assert engine.scheduler.roster.faults() == []
    assert ends == len(ASKED) and engine.blocks.free_blocks == engine.blocks.count - 1
    found = {seed: engine.take(str(seed)) for seed in ASKED}
    engine.close()
    return found


def expected(seed: int, told: dict[int, list[int]]) -> list[int]:
    tokens, params = ASKED[seed]
    said = told[seed][len(tokens) : min(len(tokens) + params.max_tokens, MAX_CONTEXT + 1)]
    stop = said.index(EOS) + 1 if EOS in said and not params.ignore_eos else len(said)
    return said[:stop]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("chunk", [None, 3])
def test_drafts_change_no_token(toy: Path, told: dict[int, list[int]], right: float, asynchronous: bool, chunk: int | None) -> None:
    engine = toy_engine(toy, drafts=True, asynchronous=asynchronous, chunk_tokens=chunk)
    foretell(engine, told, right)
    results = ran(engine)
    for seed, result in results.items():
        assert list(result.outputs[0].token_ids) == expected(seed, told), seed
    verified = sum(r.speculation.verified for r in results.values())
    won = sum(r.speculation.accepted for r in results.values())
    assert verified > 0 and (won == 0 if right == 0 else won == verified if right == 1 and not asynchronous else 0 < won <= verified)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_sequence_as_long_as_the_pool_ends_with_the_context(toy: Path, told: dict[int, list[int]], asynchronous: bool) -> None:
    engine = toy_engine(toy, drafts=True, asynchronous=asynchronous, cache_blocks=5)
    foretell(engine, told, 1.0)
    load, last = engine.programs.load, 0

    def loaded(rows: StepRows) -> tuple[int, int]:
        nonlocal last
        last = max(last, *rows.positions)
        return load(rows)

    engine.programs.load = loaded  # type: ignore[method-assign]
    engine.submit(ASKED[1][0], SamplingParams(temperature=1, seed=1, max_tokens=50, ignore_eos=True), "r")
    while engine.has_work:
        engine.step()
    (answer,) = engine.take("r").outputs
    engine.close()
    assert (answer.stop_reason, answer.error) == ("max_context", None)
    assert last == engine.context - 1 == 15, "no row lies behind the last position, in flight or not: tables end there"
    assert list(answer.token_ids) == told[1][len(ASKED[1][0]) : 17]


def test_right_drafts_spare_steps(toy: Path, told: dict[int, list[int]]) -> None:
    steps = []
    for right in (0.0, 1.0):
        engine = toy_engine(toy, drafts=True)
        foretell(engine, told, right)
        engine.submit(prompt(8, 2), SamplingParams(temperature=0, seed=1, max_tokens=41, ignore_eos=True), "r")
        told = told | {1: [*prompt(8, 2), *toy_answer_on(prompt(8, 2), 53)]}
        foretell(engine, told, right)
        while engine.has_work:
            engine.step()
        result = engine.take("r")
        assert list(result.outputs[0].token_ids) == told[1][8:49]
        steps.append(result.speculation.steps)
        engine.close()
    assert steps == [41, 1 + 40 // (1 + DRAFTS)]


def toy_answer_on(tokens: list[int], count: int) -> list[int]:
    said = list(tokens)
    while len(said) < len(tokens) + count:
        said += toy_answer(said, 1)[:1]
    return said[len(tokens) :]


@pytest.mark.parametrize("spec", ["off", 0, 1, 2, 3, 5, "auto"])
def test_a_request_bounds_its_own_drafts(toy: Path, told: dict[int, list[int]], spec: str | int) -> None:
    """R29: every width gives the same tokens."""
    engine = toy_engine(toy, drafts=True)
    foretell(engine, told, 1.0)
    most = DRAFTS if spec in ("auto", 5) else 0 if spec == "off" else int(spec)
    tokens, _ = ASKED[2]
    engine.submit(tokens, SamplingParams(temperature=2, seed=2, max_tokens=12, ignore_eos=True, spec=spec), "r")
    while engine.has_work:
        engine.step()
    result = engine.take("r")
    engine.close()
    assert list(result.outputs[0].token_ids) == told[2][len(tokens) : len(tokens) + 12]
    assert engine.statistics.verified.largest == most and (result.speculation.drafted > 0) == (most > 0)


def test_width_needs_drafts(toy: Path) -> None:
    engine = toy_engine(toy)
    with pytest.raises(ParameterUnsupported, match="spec"):
        engine.submit([3], SamplingParams(spec=2))
    engine.close()


@pytest.mark.parametrize("plan", ["compat", "ours"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_planned_widths_change_no_token(toy: Path, told: dict[int, list[int]], plan: str, asynchronous: bool) -> None:
    engine = toy_engine(toy, drafts=True, asynchronous=asynchronous, plan=plan, decode_times=WIDE)
    foretell(engine, told, 0.7)
    results = ran(engine)
    assert all(list(result.outputs[0].token_ids) == expected(seed, told) for seed, result in results.items())
    assert engine.scheduler.drafting.last is not None


def test_what_is_verified_rests_on_the_newest_confidences(toy: Path, told: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy_engine(toy, drafts=True)
    foretell(engine, told, 0.5)
    runner = engine._runs._runner  # type: ignore[union-attr]
    execute, newest, seen = runner.execute, {}, []

    def executed(prepared: Any) -> StepResult:
        result, step = execute(prepared), prepared.step
        owners = [*step.slots.tolist(), *(piece.slot for piece in step.pieces if piece.yields)]
        newest.update(zip(owners, result.confidences.tolist(), strict=True))
        return result

    def split(step: Step, confidences: NDArray[np.float64]) -> NDArray[np.int64]:
        assert confidences.tolist() == [newest[slot] for slot in step.slots.tolist()]
        seen.extend(confidences.reshape(-1).tolist())
        return verified_widths(step, confidences)

    monkeypatch.setattr(runner, "execute", executed)
    monkeypatch.setattr("tapeout.runtime.runner.verified_widths", split)
    ran(engine)
    assert len({round(x, 3) for x in seen}) > 1


def test_drafts_are_the_likeliest_tokens_whatever_the_temperature(toy: Path) -> None:
    engine = toy_engine(toy, drafts=True)
    engine.submit(prompt(5), SamplingParams(temperature=2, seed=1, max_tokens=8, ignore_eos=True))
    seen = engine.programs.array("draft_temperature")
    seen[:] = 9
    while engine.has_work:
        engine.step()
        assert seen[0] == 0
    engine.close()


def test_statistics_count_by_position(toy: Path, told: dict[int, list[int]]) -> None:
    engine = toy_engine(toy, drafts=True)
    foretell(engine, told, 0.7)
    results = ran(engine)
    line = engine.statistics.line()
    assert line["drafts_verified"] == sum(r.speculation.verified for r in results.values()) == sum(line["verified_at"])
    assert line["drafts_accepted"] == sum(r.speculation.accepted for r in results.values()) == sum(line["accepted_at"])
    assert len(line["verified_at"]) == DRAFTS and line["verified_at"] == sorted(line["verified_at"], reverse=True)
    assert all(0 < a < v for a, v in zip(line["accepted_at"], line["verified_at"], strict=True))


# -- the arithmetic


@pytest.fixture(scope="module")
def random() -> Iterator[np.random.Generator]:
    yield np.random.default_rng(4)


def test_acceptance_equals_a_loop(random: np.random.Generator) -> None:
    for _ in range(300):
        sequences, block = int(random.integers(0, 6)), int(random.integers(1, 6))
        widths = random.integers(1, block + 2, sequences)
        sampled, drafts = random.integers(0, 2, int(widths.sum())).astype(np.int32), random.integers(0, 2, (sequences, block)).astype(np.int32)
        found, at = accepted(sampled, drafts, widths), 0
        for i, width in enumerate(widths.tolist()):
            won = 0
            while won < width - 1 and sampled[at + won] == drafts[i, won]:
                won += 1
            assert (int(found.counts[i]), int(found.newest[i])) == (won + 1, at + won)
            at += width


def test_flat_numbers() -> None:
    assert flat(np.array([4, 0, 9]), np.array([2, 0, 3])).tolist() == [4, 5, 9, 10, 11]
    assert flat(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []
