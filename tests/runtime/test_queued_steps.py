"""Steps that are put behind one another on a device with a queue: the same tokens, and no result, input or state that another step has changed."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tapeout.runtime.driver import Queued
from tapeout.runtime.engine import Engine
from tapeout.runtime.errors import DeviceFailed
from tapeout.runtime.params import SamplingParams
from tapeout.runtime.program import StepRows
from tapeout.runtime.request import FinishedEvent
from tapeout.runtime.reuse import CacheOptions
from tapeout.runtime.runner import UNKNOWN
from tests.runtime.queueing import QueueingCpu
from tests.runtime.test_engine import GREEDY, assert_empty, drain, prompt
from tests.runtime.toy import MAX_SEQUENCES, toy_answer, toy_engine


def loaded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of every step that is put into the queue: rows whose token only the device knows, and steps that wait in front of it."""
    seen: list[tuple[int, int]] = []
    begin = engine.programs.begin

    def watched(rows: StepRows) -> Any:
        assert isinstance(engine.device, QueueingCpu)
        seen.append((sum(token == UNKNOWN for token in rows.tokens), len(engine.device.queue)))
        return begin(rows)

    monkeypatch.setattr(engine.programs, "begin", watched)
    return seen


def test_a_device_with_a_queue_is_kept_busy(toy: Path, queueing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an option: behind the first step there is always one that waits, and its tokens are not known to the host."""
    engine = toy_engine(toy)
    assert isinstance(engine._runs, Queued)
    seen = loaded(engine, monkeypatch)
    names = [engine.submit(prompt(4, i), GREEDY) for i in range(MAX_SEQUENCES)]
    drain(engine)
    assert [list(engine.take(name).outputs[0].token_ids) for name in names] == [toy_answer(prompt(4, i), 7) for i in range(MAX_SEQUENCES)]
    assert seen[:3] == [(0, 0), (MAX_SEQUENCES, 1), (MAX_SEQUENCES, 1)] and len(seen) == 7 and all(waiting == 1 for _, waiting in seen[1:]), seen
    engine.close()
    assert isinstance(engine.device, QueueingCpu) and engine.device.most == 2


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_option_says_so(toy: Path, queueing: None, asynchronous: bool) -> None:
    engine = toy_engine(toy, asynchronous=asynchronous)
    assert isinstance(engine._runs, Queued) == asynchronous
    engine.close()


WAYS: list[dict[str, Any]] = [
    {}, {"chunk_tokens": 3}, {"cache_blocks": 17}, {"cache": CacheOptions()}, {"cache": CacheOptions(), "cache_blocks": 20, "chunk_tokens": 5},
    {"drafts": True}, {"drafts": True, "cache": CacheOptions(), "cache_blocks": 20},
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_random_requests_get_the_tokens_of_plain_steps(toy: Path, queueing: None, way: dict[str, Any], seed: int) -> None:
    """Prompts that begin alike, several answers, stop tokens, temperatures, aborts at any time, short memory, reuse and drafts."""
    source = random.Random(seed)
    asked = []
    for number in range(24):
        begin = prompt(source.choice([4, 12]), source.randrange(2))
        params = {"max_tokens": source.choice([0, 1, 2, 9]), "temperature": source.choice([0.0, 0.8]), "seed": number, "n": source.choice([1, 1, 3]),
                  "ignore_eos": source.random() < 0.5, "stop_token_ids": tuple(source.sample(range(2, 37), 3))}  # fmt: skip
        asked.append((begin + prompt(source.randrange(1, 9), number), SamplingParams(**params), source.random() < 0.15, source.randrange(40)))

    def answers(**options: Any) -> list[list[tuple[Any, ...]]]:
        engine = toy_engine(toy, **options)
        names = [engine.submit(tokens, params) for tokens, params, _, _ in asked]
        turn = 0
        while engine.has_work:
            for name, (_, _, is_aborted, when) in zip(names, asked, strict=True):
                if is_aborted and when == turn:
                    engine.abort(name)
            engine.step()
            turn += 1
        found = [[(list(answer.token_ids), list(answer.logprobs or ()), answer.finish_reason) for answer in engine.take(name).outputs]
                 for name in names]  # fmt: skip
        assert_empty(engine)
        engine.close()
        return found

    plain, queued = answers(asynchronous=False), answers(**way)
    for (_, _, is_aborted, _), one, other in zip(asked, plain, queued, strict=True):
        if not is_aborted:
            assert one == other
            continue
        for (tokens, *_), (others, *_) in zip(one, other, strict=True):  # an abort comes behind other tokens, of the same sequence
            shared = min(len(tokens), len(others))
            assert tokens[:shared] == others[:shared]


def test_a_fault_is_the_loss_of_its_step(toy: Path, queueing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy_engine(toy)
    finish, count = engine.device.finish, iter(range(100))  # type: ignore[attr-defined]

    def faulty(started: Any) -> None:
        finish(started)
        if next(count) == 3:
            raise DeviceFailed("cuEventSynchronize", "CUDA_ERROR_LAUNCH_FAILED", "CUDA_SUCCESS")

    monkeypatch.setattr(engine.device, "finish", faulty)
    names = [engine.submit(prompt(4, i), GREEDY) for i in range(MAX_SEQUENCES + 3)]
    ended = [event.request_id for event in drain(engine) if isinstance(event, FinishedEvent)]
    results = [engine.take(name).outputs[0] for name in names]
    lost = [result for result in results if result.finish_reason == "error"]
    assert sorted(ended) == sorted(names) and 3 < len(lost) <= MAX_SEQUENCES
    assert all("the device lost a step - step 3 - found [D109]" in (result.error or "") for result in lost)
    for i, result in enumerate(results):
        assert result in lost or list(result.token_ids) == toy_answer(prompt(4, i), 7)
    assert_empty(engine)
    engine.close()


def test_a_step_that_cannot_be_started_is_lost_and_no_other(toy: Path, queueing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy_engine(toy)
    start, count = engine.device.start, iter(range(100))  # type: ignore[attr-defined]

    def faulty(table: Any) -> Any:
        if next(count) == 3:
            raise DeviceFailed("cuGraphLaunch", "CUDA_ERROR_OUT_OF_MEMORY", "CUDA_SUCCESS")
        return start(table)

    monkeypatch.setattr(engine.device, "start", faulty)
    names = [engine.submit(prompt(4, i), GREEDY) for i in range(MAX_SEQUENCES + 3)]
    drain(engine)
    results = [engine.take(name).outputs[0] for name in names]
    lost = [result for result in results if result.finish_reason == "error"]
    assert 3 < len(lost) <= MAX_SEQUENCES and all("step 3 - found [D109]" in (result.error or "") for result in lost)
    for i, result in enumerate(results):
        assert result in lost or list(result.token_ids) == toy_answer(prompt(4, i), 7)
    assert_empty(engine)
    engine.close()


@pytest.mark.parametrize("at", [4, 6])
def test_logits_that_are_not_finite_end_their_request_alone(toy: Path, queueing: None, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """They are seen when the next step has been started already, with a row of that request."""
    engine = toy_engine(toy)
    programs, end, count = engine.programs, engine.programs.end, iter(range(4, 100))

    def damaged(begun: Any) -> None:
        end(begun)
        if next(count) == at:
            programs.array("logprobs")[1] = np.nan

    monkeypatch.setattr(programs, "end", damaged)
    names = [engine.submit(prompt(4, i), GREEDY) for i in range(MAX_SEQUENCES)]
    drain(engine)
    results = [engine.take(name).outputs[0] for name in names]
    assert [i for i, result in enumerate(results) if result.finish_reason == "error"] == [1]
    assert f"[D121] the logits of a token are not finite - behind {at} tokens - " in (results[1].error or "")
    for i, result in enumerate(results):
        assert list(result.token_ids) == toy_answer(prompt(4, i), 7)[: at - 4 if i == 1 else 7]
    assert_empty(engine)
    engine.close()


@pytest.mark.parametrize("place", ["start", "finish"])
@pytest.mark.parametrize("at", range(6))
def test_an_interrupt_shifts_no_result(toy: Path, queueing: None, monkeypatch: pytest.MonkeyPatch, place: str, at: int) -> None:
    """In front of a wait it costs nothing; in a launch it costs the requests of that step."""
    engine = toy_engine(toy)
    call, count = getattr(engine.device, place), iter(range(1000))

    def interrupted(what: Any) -> Any:
        if next(count) == at:
            raise KeyboardInterrupt
        return call(what)

    monkeypatch.setattr(engine.device, place, interrupted)
    names = [engine.submit(prompt(4, i), GREEDY) for i in range(MAX_SEQUENCES + 2)]
    while engine.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            continue
    results = [engine.take(name).outputs[0] for name in names]
    failed = [result for result in results if result.finish_reason == "error"]
    assert (not failed) if place == "finish" else 0 < len(failed) < len(results)
    for i, result in enumerate(results):
        assert result in failed or list(result.token_ids) == toy_answer(prompt(4, i), 7)
    assert_empty(engine)
    engine.close()


def test_what_is_in_flight_is_there_behind_the_end(toy: Path, queueing: None) -> None:
    engine = toy_engine(toy)
    name = engine.submit(prompt(3), SamplingParams(temperature=0, max_tokens=1))
    engine.step()
    engine.close()
    drain(engine)
    assert list(engine.take(name).outputs[0].token_ids) == toy_answer(prompt(3), 1)
