"""The stop rules in their order, and what a result reports (docs/runtime.md, 1.1, 1.4, 1.5)."""

import itertools

import numpy as np
import pytest

from tapeout.runtime.params import SamplingParams
from tapeout.runtime.request import CacheUse, Draft, Request, Sequence, Status, finish_of, output_of

EOS, CONTEXT = 1, 10


def sequence(prompt: int, emitted: list[int], **params: object) -> Sequence:
    request = Request("r", tuple(range(20, 20 + prompt)), SamplingParams(**params), 9)  # type: ignore[arg-type]
    return Sequence(request, [*request.prompt, *emitted], submitted_s=1.0)


CASES = [
    # prompt, emitted, parameters, expected
    (3, [5], {}, None),
    (3, [1], {}, (Status.STOPPED, "eos")),
    (3, [1], {"ignore_eos": True}, None),
    (3, [1], {"ignore_eos": True, "stop_token_ids": [1]}, (Status.STOPPED, 1)),
    (3, [1], {"stop_token_ids": [1]}, (Status.STOPPED, "eos")),
    (3, [7], {"stop_token_ids": [6, 7]}, (Status.STOPPED, 7)),
    (3, [7, 5], {"stop_token_ids": [6, 7]}, None),
    (3, [0], {"stop_token_ids": [0]}, (Status.STOPPED, 0)),
    (3, [5], {"max_tokens": 1}, (Status.LENGTH_CAPPED, "max_tokens")),
    (3, [5, 5], {"max_tokens": 2}, (Status.LENGTH_CAPPED, "max_tokens")),
    (3, [5], {"max_tokens": 2}, None),
    (3, [1], {"max_tokens": 1}, (Status.STOPPED, "eos")),
    (3, [7], {"max_tokens": 1, "stop_token_ids": [7]}, (Status.STOPPED, 7)),
    (9, [5], {}, None),
    (9, [5, 5], {}, (Status.LENGTH_CAPPED, "max_context")),
    (10, [5], {}, (Status.LENGTH_CAPPED, "max_context")),
    (10, [1], {}, (Status.STOPPED, "eos")),
    (10, [7], {"stop_token_ids": [7]}, (Status.STOPPED, 7)),
    (10, [5], {"max_tokens": 1}, (Status.LENGTH_CAPPED, "max_context")),
    (9, [5], {"max_tokens": 1}, (Status.LENGTH_CAPPED, "max_tokens")),
    (3, [1], {"min_tokens": 1}, (Status.STOPPED, "eos")),
    (3, [1], {"min_tokens": 2}, None),
    (3, [7], {"min_tokens": 2, "stop_token_ids": [7]}, None),
    (3, [5, 1], {"min_tokens": 2}, (Status.STOPPED, "eos")),
    (3, [5, 7], {"min_tokens": 2, "stop_token_ids": [7]}, (Status.STOPPED, 7)),
    (10, [1], {"min_tokens": 5}, (Status.LENGTH_CAPPED, "max_context")),
    (3, [1, 1], {"min_tokens": 2, "max_tokens": 2}, (Status.STOPPED, "eos")),
    (3, [1], {"ignore_eos": True, "max_tokens": 1}, (Status.LENGTH_CAPPED, "max_tokens")),
    (3, [5, 5, 5], {"max_tokens": 3, "ignore_eos": True}, (Status.LENGTH_CAPPED, "max_tokens")),
    (10, [1], {"ignore_eos": True, "stop_token_ids": [1]}, (Status.STOPPED, 1)),
]


@pytest.mark.parametrize(("prompt", "emitted", "params", "expected"), CASES)
def test_a2_stop_rules(prompt: int, emitted: list[int], params: dict[str, object], expected: object) -> None:
    assert finish_of(sequence(prompt, emitted, **params), EOS, CONTEXT) == expected


@pytest.mark.parametrize(("stop", "full", "enough"), list(itertools.product([False, True], repeat=3)))
def test_eos_comes_first_whatever_else_holds(stop: bool, full: bool, enough: bool) -> None:
    found = sequence(10 if full else 2, [EOS], stop_token_ids=[EOS] if stop else [], max_tokens=1 if enough else 9)
    assert finish_of(found, EOS, CONTEXT) == (Status.STOPPED, "eos")


def test_a_model_without_eos_goes_on() -> None:
    assert finish_of(sequence(2, [1]), None, CONTEXT) is None


def test_reasons_are_the_published_words() -> None:
    finished = {status.name: status.value for status in Status if status.is_finished}
    assert finished == {
        "STOPPED": "stop",
        "LENGTH_CAPPED": "length",
        "ABORTED": "abort",
        "DEADLINE": "deadline",
        "PROMPT_TOO_LONG": "prompt_length_exceeded",
        "PREEMPTED": "insufficient_system_resource",
        "FAILED": "error",
    }


def test_a_result_reports_everything_once() -> None:
    done = sequence(2, [5, 6, 7], logprobs=True)
    done.logprobs, done.status, done.stop_reason = [-1.0, -2.0, -3.0], Status.STOPPED, 7
    done.started_s, done.first_token_s, done.finished_s, done.decode_steps = 1.001, 1.003, 1.25, 3
    tokens, chances = np.array([[6, 7], [7, 9], [1, 2]], np.int32), np.array([[0.5, 0.25], [1.0, 0.75], [0.0, 0.0]])
    done.drafts = [(3, 0, 2, tokens, chances), (4, 1, 2, tokens, chances), (5, 2, 1, tokens, chances)]
    result = output_of([done], prompt="ab", text="xyz")
    (completion,) = result.outputs
    assert (completion.text, completion.token_ids, completion.logprobs) == ("xyz", (5, 6, 7), (-1.0, -2.0, -3.0))
    assert (completion.finish_reason, completion.stop_reason, completion.index) == ("stop", 7, 0)
    assert (result.request_id, result.prompt, result.prompt_token_ids, result.seed) == ("r", "ab", (20, 21), 9)
    timing = result.timing
    assert [round(t, 6) for t in (timing.queue_ms, timing.ttft_ms or 0, timing.total_ms)] == [1.0, 3.0, 250.0]
    s = result.speculation
    assert (s.steps, s.drafted, s.verified, s.accepted, s.foreseen) == (3, 5, 0, 0, 3)
    assert result.drafts == (Draft(3, (6, 7), (0.5, 0.25)), Draft(4, (7, 9), (1.0, 0.75)), Draft(5, (1,), (0.0,)))


def test_what_branches_did_is_summed_and_what_their_prompt_found_is_not() -> None:
    branches = [sequence(2, [5], n=2), sequence(2, [6], n=2)]
    for i, branch in enumerate(branches):
        branch.status, branch.finished_s = Status.LENGTH_CAPPED, 1.5
        branch.hit_tokens, branch.replayed, branch.preemptions = 16, 3 + i, 1 + i
        branch.decode_steps, branch.verified, branch.accepted = 10 + i, 20 + i, 5 + i
    result = output_of(branches)
    assert result.cache == CacheUse(16, 7, 3)
    assert (result.speculation.steps, result.speculation.verified, result.speculation.accepted) == (21, 41, 11)


def test_a_request_that_never_ran_waited_all_its_time() -> None:
    done = sequence(2, [])
    done.status, done.finished_s = Status.ABORTED, 1.5
    result = output_of([done])
    assert (result.timing.queue_ms, result.timing.ttft_ms, result.timing.total_ms) == (500.0, None, 500.0)
    assert result.outputs[0].token_ids == () and result.outputs[0].logprobs is None
