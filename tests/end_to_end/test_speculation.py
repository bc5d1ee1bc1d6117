"""Speculative verification on the compiled tiny model: the tokens of plain decoding, greedy and drawn, whatever is drafted."""

from collections.abc import Mapping
from typing import Any

import pytest

from tapeout.runtime.engine import Engine
from tapeout.runtime.params import SamplingParams
from tapeout.runtime.request import RequestOutput
from tests.end_to_end.conftest import Model, prompt
from tests.runtime.oracle import foretell

LENGTHS = (1, 7, 130, 200, 261, 300)
TOKENS = 40


def asked(extra: int = 0) -> dict[int, tuple[list[int], SamplingParams]]:
    """Requests by seed: greedy ones, and ones that draw from a flat distribution."""
    found = {}
    for i, length in enumerate(LENGTHS):
        params = SamplingParams(temperature=0 if i % 2 else 8, seed=i, max_tokens=TOKENS + extra, ignore_eos=True)
        found[i] = prompt(length, i), params
    return found


def ran(engine: Engine, requests: Mapping[int, tuple[list[int], SamplingParams]]) -> dict[int, RequestOutput]:
    for seed, (tokens, params) in requests.items():
        engine.submit(tokens, params, str(seed))
    while engine.has_work:
        engine.step()
    assert engine.scheduler.roster.faults() == [] and engine.blocks.free_blocks == engine.blocks.count - 1
    return {seed: engine.take(str(seed)) for seed in requests}


@pytest.fixture(scope="module")
def plain(model: Model) -> dict[int, list[int]]:
    """Whole sequences of plain decoding, a block longer than what the tests ask for."""
    with model.engine(workers=1) as engine:
        results = ran(engine, asked(extra=8))
    return {seed: [*result.prompt_token_ids, *result.outputs[0].token_ids] for seed, result in results.items()}


def test_the_requests_differ(plain: dict[int, list[int]]) -> None:
    assert len({tuple(tokens[-8:]) for tokens in plain.values()}) == len(LENGTHS)


@pytest.mark.parametrize(("right", "options"), [
    (0.0, {}), (0.5, {}), (0.9, {"asynchronous": True}), (1.0, {"workers": 1}), (1.0, {"chunk_tokens": 50}), (0.7, {"plan": "ours"}),
], ids=str)  # fmt: skip
def test_drafts_change_no_token(model: Model, plain: dict[int, list[int]], right: float, options: dict[str, Any]) -> None:
    with model.engine(drafts=True, **options) as engine:
        foretell(engine, plain, right)
        results = ran(engine, asked())
    for seed, result in results.items():
        start = LENGTHS[seed]
        assert list(result.outputs[0].token_ids) == plain[seed][start : start + TOKENS], seed
    verified, accepted, steps = (sum(getattr(r.speculation, name) for r in results.values()) for name in ("verified", "accepted", "steps"))
    if right == 0:
        assert accepted == 0 and verified > 0
    if right == 1 and not options.get("chunk_tokens"):
        assert accepted == verified and steps == len(LENGTHS) * (1 + -(-(TOKENS - 1) // 6)), "six tokens a step behind the first"


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5])
def test_r29_every_width_gives_the_same_tokens(model: Model, plain: dict[int, list[int]], width: int) -> None:
    with model.engine(drafts=True) as engine:
        foretell(engine, plain, 0.8)
        requests = {seed: (tokens, SamplingParams(temperature=p.temperature, seed=seed, max_tokens=TOKENS, ignore_eos=True, spec=width))
                    for seed, (tokens, p) in asked().items()}  # fmt: skip
        results = ran(engine, requests)
        assert engine.statistics.verified.largest == width
    assert all(list(r.outputs[0].token_ids) == plain[s][LENGTHS[s] : LENGTHS[s] + TOKENS] for s, r in results.items())


def test_the_model_s_own_drafts_change_no_token(model: Model, plain: dict[int, list[int]]) -> None:
    with model.engine(drafts=True) as engine:
        results = ran(engine, asked())
        line = engine.statistics.line()
    assert all(list(r.outputs[0].token_ids) == plain[s][LENGTHS[s] : LENGTHS[s] + TOKENS] for s, r in results.items())
    assert sum(line["verified_at"]) == line["drafts_verified"] > 0
    assert all(0 <= chance <= 1 for r in results.values() for draft in r.drafts for chance in draft.confidences)


def test_to_the_end_of_the_context(model: Model) -> None:
    """The last rows of a context: nothing is verified beyond it, in flight or not."""
    tokens = prompt(1010, 3)
    params = SamplingParams(temperature=0, seed=5, max_tokens=40, ignore_eos=True)
    with model.engine(workers=1) as engine:
        said = ran(engine, {5: (tokens, params)})[5].outputs[0]
    assert said.stop_reason == "max_context" and len(said.token_ids) == 15
    for asynchronous in (False, True):
        with model.engine(drafts=True, asynchronous=asynchronous) as engine:
            foretell(engine, {5: [*tokens, *said.token_ids, *[7] * 9]}, 1.0)
            assert ran(engine, {5: (tokens, params)})[5].outputs[0].token_ids == said.token_ids
