"""The offline interface over the toy model: one result for each prompt, in order; seeds; text; refusals before anything runs."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tapeout.runtime.errors import OptionRefused, PromptRefused, RequestsMismatched, RequestTaken, SlotBusy
from tapeout.runtime.llm import LLM
from tapeout.runtime.params import SamplingParams, request_seed
from tapeout.runtime.request import RequestOutput
from tests.runtime.toy import MAX_CONTEXT, MAX_SEQUENCES, toy_answer, toy_engine

GREEDY = SamplingParams(temperature=0, max_tokens=5)


class Letters:
    """A tokenizer of 37 letters in which token 36 is the first half of a character and 35 the second."""

    bytes_of = (*(bytes([97 + i]) if i < 26 else b"" for i in range(35)), b"\xa9", b"\xc3")

    token_bytes = bytes_of

    def encode(self, text: str) -> list[int]:
        return [0, *(ord(letter) - 97 for letter in text)]

    def detokenizer(self) -> "Stream":
        return Stream()


class Stream:
    def __init__(self) -> None:
        self.held = b""

    def push(self, token: int) -> str:
        self.held += Letters.bytes_of[token]
        try:
            text, self.held = self.held.decode(), b""
        except UnicodeDecodeError:
            return ""
        return text

    def finish(self) -> str:
        return self.held.decode(errors="replace")


@pytest.fixture
def llm(toy: Path) -> Iterator[LLM]:
    llm = LLM.over(toy_engine(toy), Letters())  # type: ignore[arg-type]
    yield llm
    llm.close()


def test_one_result_for_each_prompt_in_order(llm: LLM) -> None:
    prompts = [[3, 4], [5] * (MAX_CONTEXT + 1), [6], [7, 8, 9] * 9]
    results = llm.generate(prompts, GREEDY)
    assert [list(r.prompt_token_ids) for r in results] == prompts
    assert [r.request_id for r in results] == ["0", "1", "2", "3"]
    assert [r.outputs[0].finish_reason for r in results][1] == "prompt_length_exceeded"
    for i in (0, 2, 3):
        assert list(results[i].outputs[0].token_ids) == toy_answer(prompts[i], 5)
    assert results[1].outputs[0].token_ids == () and results[1].outputs[0].text == ""
    assert [r.request_id for r in llm.generate(prompts[:1], GREEDY)] == ["4"], "ids go on across calls"


@pytest.mark.parametrize("prompts", [[3, 4, 5], [[3, 4, 5]], np.array([3, 4, 5]), (3, 4, 5), [np.array([3, 4, 5])]])
def test_spellings_of_one_prompt(llm: LLM, prompts: object) -> None:
    (result,) = llm.generate(prompts, GREEDY)  # type: ignore[arg-type]
    assert result.prompt_token_ids == (3, 4, 5) and result.prompt is None


def test_text_in_and_out(llm: LLM) -> None:
    one, two = llm.generate(["abc", "z"], GREEDY)
    assert (one.prompt, two.prompt) == ("abc", "z") and one.prompt_token_ids == (0, 0, 1, 2)
    tokens = one.outputs[0].token_ids
    assert one.outputs[0].text == b"".join(Letters.bytes_of[t] for t in tokens).decode(errors="replace")
    assert llm.generate("abc", GREEDY)[0].outputs[0].text == one.outputs[0].text


def test_the_vocabulary_is_measured_once_and_not_for_every_prompt(toy: Path) -> None:
    class Counting(Letters):
        looks = 0

        @property
        def token_bytes(self) -> tuple[bytes, ...]:  # type: ignore[override]
            type(self).looks += 1
            return self.bytes_of

    llm = LLM.over(toy_engine(toy), Counting())  # type: ignore[arg-type]
    llm.generate(["a", "b", "c" * 1000], GREEDY)
    assert Counting.looks == 1 and llm.fitting("c" * 1000) == "c" * (MAX_CONTEXT + 1)
    llm.close()


def test_slots_of_given_rows_that_leave_no_room_are_said_and_nothing_waits_for_ever(llm: LLM) -> None:
    for slot in range(MAX_SEQUENCES):
        llm.engine.forward([(slot, [3])])
    with pytest.raises(SlotBusy, match=r"\[B102\].* - request 0 - found 5 slots and their blocks in use by forward, expected room .* - reset"):
        llm.generate([[3]], GREEDY)
    assert llm.engine.scheduler.roster.requests == ()
    llm.engine.reset(2)
    assert list(llm.generate([[3]], GREEDY)[0].outputs[0].token_ids) == toy_answer([3], 5)
    for slot in range(MAX_SEQUENCES):
        llm.engine.reset(slot)


def test_nothing_asked_nothing_done(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_defect_10_a_shared_seed_gives_each_request_its_own(llm: LLM) -> None:
    params = SamplingParams(seed=11, max_tokens=8, ignore_eos=True)
    results = llm.generate([[3]] * 4, params)
    assert [r.seed for r in results] == [request_seed(11, i) for i in range(4)]
    assert len({r.outputs[0].token_ids for r in results}) > 1
    assert llm.generate([[3]], params)[0].outputs[0].token_ids == results[0].outputs[0].token_ids
    own = llm.generate([[3]] * 2, [params, params.with_seed(11)])
    assert own[0].outputs[0].token_ids == own[1].outputs[0].token_ids, "seeds given one by one are taken as they are"


def test_a_reported_seed_reproduces(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    results = llm.generate([[3]] * 8, params)
    assert len({r.seed for r in results}) == 8 and len({r.outputs[0].token_ids for r in results}) > 1
    for result in results:
        assert llm.generate([[3]], params.with_seed(result.seed))[0].outputs[0].token_ids == result.outputs[0].token_ids


@pytest.mark.parametrize("prompts", [5, None, [[3], "abc!"], [[3], [99]], [[3], []], [[3], None], [[1.5]], {"a": 1}, np.array(3), [10**5000]])
def test_refusals_come_before_anything_runs(llm: LLM, prompts: object) -> None:
    with pytest.raises(PromptRefused):
        llm.generate(prompts, GREEDY)  # type: ignore[arg-type]
    assert not llm.engine.has_work and llm.engine.scheduler.roster.requests == ()


def test_text_needs_a_tokenizer(toy: Path) -> None:
    llm = LLM.over(toy_engine(toy), None)
    with pytest.raises(PromptRefused, match="without a tokenizer"):
        llm.generate("abc")
    assert llm.generate([[3]], GREEDY)[0].outputs[0].text == ""


@pytest.mark.parametrize("params", [[GREEDY], [GREEDY] * 3, {"max_tokens": 3}, [GREEDY, None], 5])
def test_parameters_pair_with_prompts(llm: LLM, params: object) -> None:
    with pytest.raises(RequestsMismatched):
        llm.generate([[3], [4]], params)  # type: ignore[arg-type]
    assert llm.engine.scheduler.roster.requests == ()


@pytest.mark.parametrize("ids", [["kept", "new"], ["new", "kept"], None, ["twin", "twin"]])
def test_an_id_that_is_taken_refuses_the_call_and_harms_nobody(llm: LLM, ids: list[str] | None) -> None:
    names = ("kept", "1")
    for name in names:
        llm.engine.submit([3, 4], GREEDY, name)
    with pytest.raises(RequestTaken):
        llm.generate([[5], [6]], GREEDY, ids=ids)
    assert llm.engine.scheduler.roster.requests == names
    while llm.engine.has_work:
        llm.engine.step()
    for name in names:
        assert list(llm.engine.take(name).outputs[0].token_ids) == toy_answer([3, 4], 5)


@pytest.mark.parametrize("ids", [5, "ab", [1, 2], [["a"], ["b"]], ["a"]])
def test_ids_are_a_list_of_texts(llm: LLM, ids: object) -> None:
    with pytest.raises(RequestsMismatched, match="ids"):
        llm.generate([[3], [4]], GREEDY, ids=ids)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["watch", "done"])
def test_what_is_to_be_called_is_a_function(llm: LLM, name: str) -> None:
    """Before anything runs: behind the last step the results were gone."""
    with pytest.raises(OptionRefused, match=rf"LLM.generate: {name} - found 5, expected a function, or None"):
        llm.generate([[5, 9]], **{name: 5})  # type: ignore[arg-type]
    assert not llm.engine.has_work and llm.engine.statistics.counts.steps == 0


def test_an_interrupted_call_leaves_a_clean_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = llm.engine.step, []

    def interrupted() -> object:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[3]] * 9, GREEDY)
    assert not llm.engine.has_work and llm.engine.scheduler.roster.requests == ()
    assert llm.engine.blocks.free_blocks == llm.engine.blocks.count - 1
    assert list(llm.generate([[3]], GREEDY)[0].outputs[0].token_ids) == toy_answer([3], 5)


def test_results_are_given_away_as_they_end(llm: LLM) -> None:
    """In the order of ends, each with its prompt's place; requests of others go by. What was given away is the caller's, whatever comes."""
    stranger = llm.engine.submit([4, 5], SamplingParams(temperature=0, max_tokens=1))
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (7, 1, 4)]
    prompts, seen = [[3, 9, 5], [8, 4], [6]], dict[int, RequestOutput]()
    results = llm.generate(prompts, params, done=lambda place, result: seen.update({place: result}))
    assert list(seen) == [1, 2, 0] and [seen[place] for place in range(3)] == results
    assert [len(result.outputs[0].token_ids) for result in results] == [7, 1, 4]
    assert llm.engine.take(stranger).outputs[0].finish_reason == "length"

    def full(place: int, result: RequestOutput) -> None:
        seen[10 + place] = result
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        llm.generate(prompts, params, done=full)
    assert list(seen)[3:] == [11] and seen[11].outputs == results[1].outputs and not llm.engine.scheduler.roster.requests


def test_two_engines_in_one_process_do_not_meet(toy: Path) -> None:
    one, two = (LLM.over(toy_engine(toy, workers=2), None) for _ in range(2))
    one.engine.submit([3, 4], GREEDY, "kept")
    one.engine.step()
    assert list(two.generate([[5]], GREEDY)[0].outputs[0].token_ids) == toy_answer([5], 5)
    while one.engine.has_work:
        one.engine.step()
    assert list(one.engine.take("kept").outputs[0].token_ids) == toy_answer([3, 4], 5)
    one.close()
    two.close()


@pytest.mark.parametrize("caller", ["done", "watch"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_call_from_within_a_call_loses_no_result(toy: Path, asynchronous: bool, caller: str) -> None:
    """It steps the engine, and so ends requests of the call around it."""
    llm = LLM.over(toy_engine(toy, asynchronous=asynchronous), None)
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (2, 7, 4)]
    inside: list[list[int]] = []
    places: list[int] = []

    def again(*_: object) -> None:
        if not inside:
            inside.append([])
            inside[0] += llm.generate([[9, 8]], SamplingParams(temperature=0, max_tokens=20))[0].outputs[0].token_ids

    def done(place: int, result: RequestOutput) -> None:
        places.append(place)
        if caller == "done":
            again()

    found = llm.generate([[5, 6], [7], [8, 9]], params, done=done, watch=again if caller == "watch" else None)
    assert [list(r.outputs[0].token_ids) for r in found] == [toy_answer([5, 6], 2), toy_answer([7], 7), toy_answer([8, 9], 4)]
    assert inside == [toy_answer([9, 8], 20)] and sorted(places) == [0, 1, 2]
    llm.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_threads_take_turns(toy: Path, asynchronous: bool) -> None:
    engine = toy_engine(toy, asynchronous=asynchronous)
    llm, found = LLM.over(engine, None), {}
    prompts = [[[3 + thread, 5, place] for place in range(5)] for thread in range(6)]
    start = threading.Barrier(6)

    def work(thread: int) -> None:
        start.wait()
        found[thread] = llm.generate(prompts[thread], SamplingParams(temperature=0, max_tokens=9))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number in range(6):
        assert [list(r.outputs[0].token_ids) for r in found[number]] == [toy_answer(prompt, 9) for prompt in prompts[number]]
    assert len({r.request_id for results in found.values() for r in results}) == 30
    llm.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_is_told_and_the_first_one_goes_on(toy: Path) -> None:
    """Worker threads do not live in a fork: what would wait for them for ever is refused."""
    llm = LLM.over(toy_engine(toy, workers=2, asynchronous=True), None)
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            llm.generate([[5, 6]], SamplingParams(temperature=0, max_tokens=2))
        except BaseException as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as said:
        assert said.read() == (f"[D114] the device is closed - LLM.generate - found process {child}, forked from the one that loaded it, "
                               f"expected process {os.getpid()} - make another engine")  # fmt: skip
    (result,) = llm.generate([[5, 6]], SamplingParams(temperature=0, max_tokens=2))
    assert list(result.outputs[0].token_ids) == toy_answer([5, 6], 2)
    llm.close()
