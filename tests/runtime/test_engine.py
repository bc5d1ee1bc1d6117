"""Continuous batching on the toy model: every schedule yields the tokens of the model run alone (docs/runtime.md, 1 and 3)."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tapeout.runtime.engine import Engine, EngineOptions
from tapeout.runtime.errors import (
    BatchRefused,
    BlocksExhausted,
    OptionRefused,
    ParameterUnsupported,
    PromptRefused,
    RequestsMismatched,
    RequestTaken,
    SlotBusy,
)
from tapeout.runtime.params import SamplingParams, branch_seed
from tapeout.runtime.request import Event, FinishedEvent, TokenEvent
from tests.runtime.toy import (
    DRAFTS,
    EOS,
    MAX_CONTEXT,
    MAX_ROWS,
    MAX_SEQUENCES,
    VOCABULARY,
    toy_answer,
    toy_engine,
    toy_logits,
)

GREEDY = SamplingParams(temperature=0, max_tokens=7)


@pytest.fixture
def engine(toy: Path) -> Iterator[Engine]:
    engine = toy_engine(toy)
    yield engine
    assert_empty(engine)
    engine.close()


def assert_empty(engine: Engine) -> None:
    """All slots and blocks are back."""
    assert engine.scheduler.roster.faults() == []
    assert engine.blocks.free_blocks == engine.blocks.unpromised_blocks == engine.blocks.count - 1
    assert all(slot in engine.scheduler.roster.slots for slot in range(MAX_SEQUENCES))


def drain(engine: Engine) -> list[Event]:
    events = []
    while engine.has_work:
        events += engine.step()
    return events


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(5 * i + i * i + salt) % VOCABULARY for i in range(length)]


# -- forward


@pytest.mark.parametrize("cuts", [[17], [1] * 17, [3, 7, 7], [16, 1], [4, 13]])
def test_forward_in_any_chunks_gives_the_model(engine: Engine, cuts: list[int]) -> None:
    tokens, found, at = prompt(17), [], 0
    for cut in cuts:
        found += engine.forward([(2, tokens[at : at + cut])])
        at += cut
    assert np.array_equal(np.concatenate(found), toy_logits(tokens))
    engine.reset(2)


def test_forward_of_several_slots_at_once(engine: Engine) -> None:
    first, second = prompt(9), prompt(5, salt=11)
    a, b = engine.forward([(4, first), (0, second)])
    assert np.array_equal(a, toy_logits(first)) and np.array_equal(b, toy_logits(second))
    b, a = engine.forward([(0, [3]), (4, [7, 8])], logits="last")
    assert np.array_equal(a, toy_logits([*first, 7, 8])[-1:]) and np.array_equal(b, toy_logits([*second, 3])[-1:])
    for slot in (0, 4):
        engine.reset(slot)


def test_forward_fills_every_row_and_the_whole_context(engine: Engine) -> None:
    tokens = prompt(MAX_CONTEXT)
    found = [engine.forward([(1, tokens[at : at + MAX_ROWS])])[0] for at in range(0, MAX_CONTEXT, MAX_ROWS)]
    assert np.array_equal(np.concatenate(found), toy_logits(tokens))
    with pytest.raises(BatchRefused, match="found 62 tokens, expected at most 61, the context"):
        engine.forward([(1, [1])])
    engine.reset(1)


def test_a_slot_that_was_used_shows_nothing_of_it(engine: Engine) -> None:
    engine.forward([(0, prompt(20, salt=3))])
    engine.reset(0)
    assert np.array_equal(engine.forward([(0, prompt(6))])[0], toy_logits(prompt(6)))
    engine.reset(0)


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        ([(0, [1] * (MAX_ROWS + 1))], BatchRefused, "found 25 rows, slots"),
        ([(0, [1]), (0, [2])], BatchRefused, "each slot once"),
        ([(5, [1])], SlotBusy, "slot 5"),
        ([(-1, [1])], SlotBusy, "slot -1"),
        ([(0, [])], PromptRefused, "an empty prompt"),
        ([(0, [VOCABULARY])], PromptRefused, "found 37, expected 0 to 36"),
        ([(0, [-1])], PromptRefused, "found -1"),
        ([(0, [True])], PromptRefused, "found True"),
        ([(0, [1.0])], PromptRefused, "found 1.0"),
    ],
)
def test_forward_refuses(engine: Engine, batch: list[tuple[int, list[int]]], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        engine.forward(batch)


def test_forward_takes_nothing_when_too_many_rows_ask_for_logits(toy: Path) -> None:
    """The slot was as long as rows that were refused: what followed stood at wrong positions, without a word."""
    engine = toy_engine(toy)
    manifest = engine.artifact.manifest
    few = manifest.model_copy(update={"options": manifest.options.model_copy(update={"max_outputs": 4})})
    engine.artifact = engine.programs.artifact = replace(engine.artifact, manifest=few)
    for batch, how, error in (([(0, prompt(5))], "all", BatchRefused), ([(s, prompt(2)) for s in range(4)], "both", OptionRefused)):
        with pytest.raises(error):
            engine.forward(batch, how)  # type: ignore[arg-type]
    assert_empty(engine)
    assert np.array_equal(engine.forward([(0, prompt(5))], "last")[0], toy_logits(prompt(5))[-1:])
    with pytest.raises(BatchRefused, match=f"draft - found {MAX_SEQUENCES + 1} blocks, expected at most {MAX_SEQUENCES}"):
        engine.draft([(0, 1)] * (MAX_SEQUENCES + 1))


def test_forward_takes_nothing_when_blocks_run_out(toy: Path) -> None:
    engine = toy_engine(toy, cache_blocks=5)
    with pytest.raises(BlocksExhausted, match="found a need of 5 blocks, expected 4 free of 4"):
        engine.forward([(0, prompt(8)), (1, prompt(9))])
    assert_empty(engine)


def test_forward_and_requests_share_slots(engine: Engine) -> None:
    engine.forward([(0, prompt(3))])
    engine.submit(prompt(4), GREEDY)
    engine.step()
    with pytest.raises(SlotBusy):
        engine.forward([(1, [2])])
    drain(engine)
    assert np.array_equal(engine.forward([(0, [2])])[0], toy_logits([*prompt(3), 2])[-1:])
    engine.reset(0)


def test_draft_follows_the_golden_token(engine: Engine) -> None:
    engine.forward([(3, prompt(6)), (1, prompt(2))])
    tokens, confidences = engine.draft([(1, 36), (3, 10)])
    assert tokens.tolist() == [[0, 1, 2], [11, 12, 13]]
    assert confidences.tolist() == [[1.0, 1.125, 1.25], [5.0, 5.125, 5.25]]
    assert np.array_equal(engine.forward([(3, [9])])[0], toy_logits([*prompt(6), 9])[-1:])
    with pytest.raises(BatchRefused, match="slot 0"):
        engine.draft([(0, 1)])
    engine.reset(1)
    engine.reset(3)


# -- requests


@pytest.mark.parametrize("chunk", [None, 1, 3])
@pytest.mark.parametrize("workers", [1, 2])
def test_every_request_gets_the_model_alone(toy: Path, chunk: int | None, workers: int) -> None:
    engine = toy_engine(toy, chunk_tokens=chunk, workers=workers, drafts=True)
    asked = {f"r{i}": (prompt(1 + 7 * i % 50, salt=i), SamplingParams(temperature=i % 3, seed=i, max_tokens=3 + i)) for i in range(13)}
    for name, (tokens, params) in asked.items():
        engine.submit(tokens, params, name)
    events = drain(engine)
    for name, (tokens, params) in asked.items():
        result = engine.take(name)
        expected = toy_answer(tokens, params.max_tokens, params.temperature, params.seed or 0)
        assert list(result.outputs[0].token_ids) == expected, name
        assert [e.token for e in events if isinstance(e, TokenEvent) and e.request_id == name] == expected
        said = [*tokens, *expected]
        assert [draft.tokens[0] for draft in result.drafts] == [(said[draft.position - 1] + 1) % VOCABULARY for draft in result.drafts]
        assert len(result.drafts) == result.speculation.steps and result.speculation.accepted + result.speculation.steps >= len(expected)
    finished = [event.request_id for event in events if isinstance(event, FinishedEvent)]
    assert sorted(finished) == sorted(asked)
    assert_empty(engine)
    engine.close()


def test_a_step_mixes_decode_rows_and_prompt_pieces(engine: Engine) -> None:
    engine.submit(prompt(3), GREEDY, "short")
    engine.step()
    engine.submit(prompt(MAX_ROWS + 5), GREEDY, "long")
    plan_before = engine.step()
    assert [type(event) for event in plan_before] == [TokenEvent], "the short one decodes while the long prompt fills the rows"
    assert int(engine.programs._cells["rows"][0]) == MAX_ROWS
    assert [event.request_id for event in engine.step()] == ["short", "long"]
    drain(engine)


def test_randomness_is_a_function_of_seed_and_position(engine: Engine) -> None:
    params = SamplingParams(temperature=1, seed=2**63 + 5, max_tokens=9)
    alone = run_one(engine, prompt(5), params)
    for salt in range(4):
        engine.submit(prompt(7, salt), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    for _ in range(3):
        engine.step()
    engine.submit(prompt(5), params, "late")
    drain(engine)
    assert engine.take("late").outputs[0].token_ids == alone


def test_r34_unseeded_requests_draw_and_report_their_own_seed(engine: Engine) -> None:
    params = SamplingParams(temperature=1, max_tokens=8, ignore_eos=True)
    names = [engine.submit(prompt(5), params) for _ in range(8)]
    drain(engine)
    results = [engine.take(name) for name in names]
    assert len({result.outputs[0].token_ids for result in results}) > 1
    assert len({result.seed for result in results}) == 8
    again = run_one(engine, prompt(5), params.with_seed(results[3].seed))
    assert again == results[3].outputs[0].token_ids


def test_r35_a_greedy_row_beside_seeded_rows_is_greedy(engine: Engine) -> None:
    for seed in range(4):
        engine.submit(prompt(5), SamplingParams(temperature=1, seed=seed, max_tokens=9))
    engine.submit(prompt(5), SamplingParams(temperature=0, max_tokens=9), "greedy")
    drain(engine)
    assert list(engine.take("greedy").outputs[0].token_ids) == toy_answer(prompt(5), 9)


def run_one(engine: Engine, tokens: list[int], params: SamplingParams) -> tuple[int, ...]:
    name = engine.submit(tokens, params)
    drain(engine)
    return engine.take(name).outputs[0].token_ids


# -- how requests end


def test_no_token_when_none_is_asked_for(engine: Engine) -> None:
    engine.submit(prompt(30), SamplingParams(max_tokens=0), "fill")
    assert drain(engine) == [FinishedEvent("fill", "length", "max_tokens")]
    result = engine.take("fill")
    assert result.outputs[0].token_ids == () and result.outputs[0].finish_reason == "length"
    assert result.timing.ttft_ms is None and result.timing.total_ms >= result.timing.queue_ms >= 0


def test_context_ends_a_request_one_token_past_its_length(engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    engine.submit(prompt(MAX_CONTEXT), params, "full")
    engine.submit(prompt(MAX_CONTEXT - 3), params, "nearly")
    drain(engine)
    for name, count in (("full", 1), ("nearly", 4)):
        completion = engine.take(name).outputs[0]
        assert (len(completion.token_ids), completion.finish_reason, completion.stop_reason) == (count, "length", "max_context")


def test_a_prompt_that_is_too_long_gets_a_result_without_tokens(engine: Engine) -> None:
    engine.submit(prompt(MAX_CONTEXT + 1), GREEDY, "long")
    assert drain(engine) == [FinishedEvent("long", "prompt_length_exceeded", None)]
    assert engine.take("long").outputs[0].token_ids == ()


def test_eos_ends_a_request_unless_ignored(engine: Engine) -> None:
    tokens, answer = next((p, a) for salt in range(99) if EOS in (a := toy_answer(p := prompt(4, salt), 20)) and len(a) > 1)
    engine.submit(tokens, SamplingParams(temperature=0, max_tokens=20), "stops")
    engine.submit(tokens, SamplingParams(temperature=0, max_tokens=len(answer) + 1, ignore_eos=True), "goes on")
    engine.submit(tokens, SamplingParams(temperature=0, max_tokens=20, stop_token_ids=(answer[0], VOCABULARY - 1)), "early")
    drain(engine)
    stops, goes_on, early = (engine.take(name).outputs[0] for name in ("stops", "goes on", "early"))
    assert (list(stops.token_ids), stops.finish_reason, stops.stop_reason) == (answer, "stop", "eos")
    assert (len(goes_on.token_ids), goes_on.finish_reason, goes_on.stop_reason) == (len(answer) + 1, "length", "max_tokens")
    assert (list(early.token_ids), early.finish_reason, early.stop_reason) == (answer[:1], "stop", answer[0])


def test_logprobs_only_where_asked_for(engine: Engine) -> None:
    engine.submit(prompt(4), SamplingParams(temperature=1, seed=1, max_tokens=55, logprobs=True, ignore_eos=True), "with")
    engine.submit(prompt(4), GREEDY, "without")
    drain(engine)
    asked = engine.take("with").outputs[0]
    assert asked.logprobs == tuple(-token - 0.25 if token else -9999.0 for token in asked.token_ids)
    assert 0 in asked.token_ids, "a token whose log-probability lies below the floor"
    assert engine.take("without").outputs[0].logprobs is None


def test_abort_works_everywhere_once(engine: Engine) -> None:
    for i in range(MAX_SEQUENCES + 1):
        engine.submit(prompt(30), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), f"r{i}")
    engine.step()  # r0 fills all rows: it is between chunks, the others have slots, the last one waits
    assert engine.abort(f"r{MAX_SEQUENCES}") and engine.abort("r0") and engine.abort("r1")
    assert not engine.abort("r0") and not engine.abort("nobody")
    events = drain(engine)
    aborted = [event for event in events if isinstance(event, FinishedEvent) and event.finish_reason == "abort"]
    assert [event.request_id for event in aborted] == [f"r{MAX_SEQUENCES}", "r0", "r1"]
    assert not engine.abort("r2")
    assert len(engine.take("r2").outputs[0].token_ids) == 20


def test_small_pools_make_requests_wait_and_lose_nothing(toy: Path) -> None:
    engine = toy_engine(toy, cache_blocks=8)  # 28 tokens
    assert engine.context == 28
    names = [engine.submit(prompt(9, i), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)) for i in range(7)]
    engine.step()
    assert engine.blocks.free_blocks == 7 - 6, "two prompts of three blocks run; a third does not fit"
    drain(engine)
    results = [engine.take(name) for name in names]
    for salt, result in enumerate(results):
        alone = toy_engine(toy)
        assert result.outputs[0].token_ids == run_one(alone, prompt(9, salt), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        alone.close()
    assert engine.statistics.counts.preemptions == sum(result.cache.preemptions for result in results) > 0
    assert_empty(engine)


def test_random_schedules_leak_nothing_and_report_once(toy: Path) -> None:
    rng = random.Random(7)
    engine = toy_engine(toy, cache_blocks=20, chunk_tokens=5)
    alive: dict[str, tuple[list[int], SamplingParams]] = {}
    events: list[Event] = []
    for i in range(400):
        if rng.random() < 0.4:
            tokens = prompt(rng.randint(1, 70), i)
            params = SamplingParams(temperature=rng.choice([0, 1]), seed=i, max_tokens=rng.randint(0, 9))
            alive[engine.submit(tokens, params)] = (tokens, params)
        if alive and rng.random() < 0.1:
            engine.abort(rng.choice(list(alive)))
        events += engine.step()
        packed = engine.programs.array("tokens")[: int(engine.programs._cells["rows"][0])]
        assert ((packed >= 0) & (packed < VOCABULARY)).all()
    events += drain(engine)
    finished = [event for event in events if isinstance(event, FinishedEvent)]
    assert sorted(event.request_id for event in finished) == sorted(alive)
    for event in finished:
        tokens, params = alive[event.request_id]
        answer = list(engine.take(event.request_id).outputs[0].token_ids)
        expected = toy_answer(tokens, params.max_tokens, params.temperature, params.seed or 0)
        assert answer == expected[: len(answer)]
        assert event.finish_reason in ("abort", "prompt_length_exceeded") or answer == expected
    assert_empty(engine)


# -- asynchronous, stop strings, observation


class Letters:
    """A stream in which token i is the letter i."""

    def push(self, token: int) -> str:
        return chr(97 + token % 26)

    def finish(self) -> str:
        return ""


@pytest.mark.parametrize("workers", [1, 2])
def test_asynchronous_equals_synchronous_on_programs(toy: Path, workers: int) -> None:
    outcomes = []
    for asynchronous in (False, True):
        engine = toy_engine(toy, asynchronous=asynchronous, workers=workers, cache_blocks=20, chunk_tokens=5)
        events: list[Event] = []
        for i in range(40):
            engine.submit(prompt(1 + 7 * i % 40, salt=i), SamplingParams(temperature=i % 2, seed=i, max_tokens=i % 11), f"r{i}")
            events += engine.step()
        events += drain(engine)
        assert_empty(engine)
        assert sorted(event.request_id for event in events if isinstance(event, FinishedEvent)) == sorted(f"r{i}" for i in range(40))
        outcomes.append([engine.take(f"r{i}").outputs for i in range(40)])
        engine.close()
        engine.close()
    assert outcomes[0] == outcomes[1]
    for i, (output,) in enumerate(outcomes[0]):
        assert list(output.token_ids) == toy_answer(prompt(1 + 7 * i % 40, salt=i), i % 11, i % 2, i)


def test_forward_waits_for_steps_in_flight(toy: Path) -> None:
    engine = toy_engine(toy, asynchronous=True)
    engine.submit(prompt(9), GREEDY, "r")
    engine.step()
    assert np.array_equal(engine.forward([(3, prompt(6))])[0], toy_logits(prompt(6)))
    drain(engine)
    assert list(engine.take("r").outputs[0].token_ids) == toy_answer(prompt(9), 7)
    engine.reset(3)
    assert_empty(engine)
    engine.close()


def test_a_stop_string_ends_a_request_and_is_not_part_of_its_text(engine: Engine) -> None:
    engine.detokenizer = Letters
    free = run_one(engine, prompt(5), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    text = "".join(chr(97 + token % 26) for token in free)
    stop = text[5:8]
    at = text.find(stop)
    engine.submit(prompt(5), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=[stop, "never there"]), "s")
    events = drain(engine)
    completion = engine.take("s").outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (text[:at], "stop", stop)
    assert completion.token_ids == free[: at + 3]
    shown = [event.text for event in events]
    assert "".join(shown) == text[:at] and shown[0] == "", "the longest stop string but one letter is held back"


@pytest.mark.parametrize("n", [1, 2])
def test_an_aborted_request_has_the_text_that_was_held_back(engine: Engine, n: int) -> None:
    engine.detokenizer = Letters
    engine.submit(prompt(5), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=["never there"], n=n), "r")
    for _ in range(5):
        engine.step()
    engine.abort("r")
    drain(engine)
    for output in engine.take("r").outputs:
        assert len(output.token_ids) >= 3 and output.text == "".join(chr(97 + token % 26) for token in output.token_ids)


def test_several_answers_to_one_prompt(engine: Engine) -> None:
    engine.submit(prompt(9), SamplingParams(temperature=1, seed=3, n=3, max_tokens=6, ignore_eos=True), "r")
    events = drain(engine)
    result = engine.take("r")
    assert [output.index for output in result.outputs] == [0, 1, 2] and sum(isinstance(e, FinishedEvent) for e in events) == 1
    for i, output in enumerate(result.outputs):
        assert output.token_ids == run_one(engine, prompt(9), SamplingParams(temperature=1, seed=branch_seed(3, i), max_tokens=6, ignore_eos=True))


def test_statistics_and_trace_are_at_hand(toy: Path) -> None:
    engine = toy_engine(toy, trace=True, drafts=True)
    run_one(engine, prompt(9), GREEDY)
    assert engine.statistics.counts.output_tokens == len(toy_answer(prompt(9), 7))
    assert engine.recorder is not None and any(event["name"] == "finished" for event in engine.recorder.document()["traceEvents"])
    engine.close()


UNSUPPORTED = [
    {"min_p": 0.1}, {"presence_penalty": 1}, {"frequency_penalty": -1}, {"repetition_penalty": 1.2}, {"logit_bias": {3: 1}}, {"min_tokens": 1},
    {"golden_token_ids": [3]}, {"top_logprobs": 2}, {"prompt_logprobs": True}, {"logprobs_mode": "processed"}, {"spec": 3}, {"stop": "x"},
]  # fmt: skip


@pytest.mark.parametrize("params", UNSUPPORTED, ids=lambda params: next(iter(params)))
def test_what_the_sampler_cannot_do_is_refused_never_ignored(engine: Engine, params: dict[str, object]) -> None:
    with pytest.raises(ParameterUnsupported) as refused:
        engine.submit(prompt(3), SamplingParams(**params), "r")  # type: ignore[arg-type]
    assert (refused.value.field, refused.value.request_id) == (next(iter(params)), "r")
    assert str(refused.value).startswith("[P104] the compiled sampler cannot do what a sampling parameter asks for - SamplingParams.")
    assert not engine.has_work


# -- refusals


def test_defect_6_submit_refuses_at_the_door(engine: Engine) -> None:
    engine.submit(prompt(2), GREEDY, "a")
    with pytest.raises(RequestTaken, match="request a"):
        engine.submit(prompt(2), GREEDY, "a")
    for wrong in ("text", 5, [], [VOCABULARY], [None]):
        with pytest.raises(PromptRefused):
            engine.submit(wrong, GREEDY)  # type: ignore[arg-type]
    with pytest.raises(KeyError):
        engine.take("a")
    drain(engine)


def test_parameters_are_sampling_parameters(engine: Engine) -> None:
    with pytest.raises(RequestsMismatched, match=r"\[Q103\].* - params - found dict, expected SamplingParams"):
        engine.submit([3], {"temperature": 0})  # type: ignore[arg-type]


WRONG_OPTIONS = [
    {"cache_blocks": 1}, {"chunk_tokens": 0}, {"chunk_tokens": True}, {"cache_blocks": 2.0}, {"drafts": 1}, {"asynchronous": 1}, {"step_ms": 0},
    {"max_wait_ms": "1"}, {"decode_times": 5}, {"record_drafts": True},
]  # fmt: skip


@pytest.mark.parametrize("options", WRONG_OPTIONS)
def test_options_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(OptionRefused, match=next(iter(options))):
        EngineOptions(**options)  # type: ignore[arg-type]


def test_drafts_are_counted_against_the_sequence(toy: Path) -> None:
    engine = toy_engine(toy, drafts=True)
    engine.submit(prompt(3), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), "d")
    drain(engine)
    result = engine.take("d")
    tokens = [*result.prompt_token_ids, *result.outputs[0].token_ids]
    assert [draft.position for draft in result.drafts] == list(range(4, 16))
    assert result.speculation.drafted == 12 * DRAFTS and result.speculation.steps == 12
    assert result.speculation.verified == 8 * DRAFTS + 2 + 1, "never more than tokens are left"
    foreseen = 0
    for draft in result.drafts:
        pairs = list(zip(draft.tokens, tokens[draft.position :], strict=False))
        foreseen += next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    assert result.speculation.foreseen == foreseen
