"""What is applied of a step's result: whose rows failed, whose slot has a new holder, what is told of text, log-probabilities and reuse.

And what is refused before there is one, where no other file has it.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tapeout.runtime.device.null import Prepared
from tapeout.runtime.errors import ParameterRange, ParameterType, PromptRefused
from tapeout.runtime.params import SamplingParams
from tapeout.runtime.request import FinishedEvent, Status, TokenEvent
from tapeout.runtime.step import StepResult
from tests.runtime.null import prompt, serving
from tests.runtime.test_engine import Letters
from tests.runtime.toy import VOCABULARY, toy_engine

LONG = {"max_tokens": 40, "ignore_eos": True}


def failing_in(number: int) -> dict[str, object]:
    return {"fails": lambda step: {0: "a bad row"} if step.number == number else {}}


def test_nothing_is_told_of_rows_that_came_to_nothing() -> None:
    s = serving(slots=2, model=failing_in(4))
    for i in range(2):
        s.submit(f"r{i}", prompt(9, i), **LONG)
    events = [event for event in s.run() if event.request_id == "r0"]
    assert isinstance(events[-1], FinishedEvent) and events[-1].finish_reason == "error", "the terminal event is the last"
    assert len(s.tokens("r0")) == 4 and len(s.tokens("r1")) == 40
    counts = s.scheduler.statistics.counts
    assert counts.output_tokens == 44


def test_a_failure_is_of_who_had_the_slot_then() -> None:
    """A step is in flight when its request is aborted and another one gets the slot."""
    s = serving(slots=1, depth=1, model=failing_in(1))
    s.submit("aborted", prompt(9), **LONG)
    s.driver.step()
    s.driver.step()
    s.scheduler.roster.finish_all("aborted", Status.ABORTED)
    s.submit("next", prompt(9, 1), **LONG)
    s.run()
    assert s.scheduler.roster.branches("next")[0].status is Status.LENGTH_CAPPED and s.tokens("next") == s.expected("next")
    s.assert_empty()


def test_log_probabilities_have_a_floor_in_every_row() -> None:
    s = serving()
    execute = s.device.execute

    def unlikely(prepared: Prepared) -> StepResult:
        result = execute(prepared)
        return replace(result, logprobs=np.full_like(result.logprobs, -1e6))

    s.device.execute = unlikely  # type: ignore[method-assign]
    s.submit("r", prompt(9), max_tokens=3, ignore_eos=True, logprobs=True)
    events = s.run()
    assert [event.logprob for event in events if isinstance(event, TokenEvent)] == [-9999.0] * 3
    assert s.scheduler.roster.take("r").outputs[0].logprobs == (-9999.0,) * 3


def test_what_a_preempted_request_finds_of_itself_is_no_hit() -> None:
    s = serving()
    s.submit("r", prompt(40), **LONG)
    for _ in range(10):
        s.driver.step()
    branch = s.scheduler.roster.branches("r")[0]
    s.scheduler.roster.preempt(branch)
    s.run()
    result = s.scheduler.roster.take("r")
    assert result.cache.preemptions == 1 and result.cache.hit_tokens == 0 and s.scheduler.statistics.counts.hit_tokens > 0


def test_of_a_long_answer_the_newest_two_windows_stay() -> None:
    s = serving(blocks=100, snapshot_bytes=10**6)
    s.submit("r", prompt(9), max_tokens=150, ignore_eos=True)
    s.run()
    keys, store = s.scheduler.roster.branches("r")[0].keys, s.cache.snapshots  # type: ignore[union-attr]
    assert store is not None and len(keys) > 15
    assert [i for i, key in enumerate(keys) if key in store] == [0, len(keys) - 2, len(keys) - 1], "and the one of the prompt"
    assert store.bytes == sum(len(kept.snapshot.payload) for kept in store._kept.values())


def test_a_stop_token_is_an_id_of_the_vocabulary(toy: Path) -> None:
    engine = toy_engine(toy)
    engine.check_params(SamplingParams(stop_token_ids=[VOCABULARY - 1]))
    with pytest.raises(ParameterRange, match=f"found {VOCABULARY} .int., expected ids of the vocabulary, 0 to {VOCABULARY - 1}"):
        engine.check_params(SamplingParams(stop_token_ids=[VOCABULARY]))
    engine.close()


def test_an_array_without_axes_is_no_list(toy: Path) -> None:
    for name in ("stop", "stop_token_ids", "logit_bias", "golden_token_ids"):
        with pytest.raises(ParameterType, match=name):
            SamplingParams(**{name: np.array(1)})
    engine = toy_engine(toy)
    with pytest.raises(PromptRefused, match="found ndarray, expected a list of token ids"):
        engine.submit(np.array(3))
    engine.close()


def test_told_text_is_the_text_of_the_result(toy: Path) -> None:
    """What was held back for a stop string comes with the last token, or with the end where no token came any more; each branch has its own."""
    engine = toy_engine(toy)
    engine.detokenizer = Letters
    for name, n, aborted in (("ends", 1, False), ("branches", 3, False), ("aborted", 1, True)):
        engine.submit([3, 4, 5], SamplingParams(seed=3, max_tokens=12, ignore_eos=True, stop=["never there"], n=n), name)
        events = []
        for _ in range(8 if aborted else 100):
            events += engine.step()
        if aborted:
            engine.abort(name)
            events += engine.step()
        told = [""] * n
        for event in events:
            told[event.branch if isinstance(event, TokenEvent) else 0] += event.text
        assert told == [output.text for output in engine.take(name).outputs] and all(told), name
    engine.close()
