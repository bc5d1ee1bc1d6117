"""Prefix cache and bounded replay on the compiled tiny model: exact reuse is bit-equal, compact equals mask, what is stored survives restarts."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tapeout.runtime.engine import Engine
from tapeout.runtime.errors import CacheFolderRefused, OptionRefused
from tapeout.runtime.params import SamplingParams, branch_seed
from tapeout.runtime.request import RequestOutput
from tapeout.runtime.reuse import CacheOptions
from tests.end_to_end.conftest import Model, prompt
from tests.runtime.oracle import foretell

TOKENS = 12
BLOCK = 16
SHARED = prompt(150, 70)


def prompts() -> list[list[int]]:
    """Ten prompts that share 150 tokens, one that is another's beginning, one that is new."""
    return [*(SHARED + prompt(14 + 9 * i, i) for i in range(10)), SHARED[:100], prompt(90, 33)]


def answered(engine: Engine, asked: Sequence[Sequence[int]], *, at_once: bool = False, **params: Any) -> list[RequestOutput]:
    """Results in order; one request after the other unless told otherwise."""
    results = []
    for i, tokens in enumerate(asked):
        how = {"temperature": 0 if i % 2 else 6, "seed": i, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": True} | params
        engine.submit(tokens, SamplingParams(**how), str(i))
        while engine.has_work and not at_once:
            engine.step()
            assert engine.scheduler.roster.faults() == []
    while engine.has_work:
        engine.step()
    for i in range(len(asked)):
        results.append(engine.take(str(i)))
    assert engine.blocks.free_blocks == engine.blocks.unpromised_blocks == engine.blocks.count - 1
    return results


def said(results: Sequence[RequestOutput]) -> list[tuple[tuple[int, ...], tuple[float, ...] | None]]:
    return [(answer.token_ids, answer.logprobs) for result in results for answer in result.outputs]


@pytest.fixture(scope="module")
def plain(model: Model) -> list[RequestOutput]:
    with model.engine(workers=1) as engine:
        return answered(engine, prompts())


@pytest.mark.parametrize("options", [
    {}, {"asynchronous": True}, {"chunk_tokens": 30}, {"drafts": True}, {"drafts": True, "asynchronous": True},
], ids=str)  # fmt: skip
def test_exact_reuse_gives_the_same_tokens_and_log_probabilities(model: Model, plain: list[RequestOutput], options: dict[str, Any]) -> None:
    with model.engine(cache=CacheOptions(), **options) as engine:
        if options.get("drafts"):
            foretell(engine, {r_id: [*r.prompt_token_ids, *r.outputs[0].token_ids, *[9] * 9] for r_id, r in enumerate(plain)}, 0.7)
        results = answered(engine, prompts())
        counts, gauges = engine.statistics.counts, engine.scheduler.gauges()
    assert said(results) == said(plain)
    hits = [result.cache.hit_tokens for result in results]
    assert hits[0] == 0 and hits[1] == 0, "the second shows what is shared, and keeps the window there"
    assert hits[2:10] == [144] * 8 and hits[11] == 0 and all(result.cache.replayed == 0 for result in results)
    assert counts.prompt_rows < sum(map(len, prompts())) - 8 * 144 + 1 and gauges["prefix_hit"] >= 8 and gauges["prefix_state"] >= 1


def test_reuse_among_requests_at_once(model: Model, plain: list[RequestOutput]) -> None:
    for options in ({}, {"asynchronous": True}, {"drafts": True}, {"cache_blocks": 66}):
        with model.engine(cache=CacheOptions(), **options) as engine:
            assert said(answered(engine, prompts(), at_once=True)) == said(plain)
            again = answered(engine, prompts(), at_once=True)
            assert said(again) == said(plain)
            if "cache_blocks" not in options:
                assert sum(result.cache.hit_tokens > 0 for result in again) >= 10


def test_the_next_turn_goes_on_from_the_last(model: Model) -> None:
    first = prompt(60, 5)
    with model.engine(workers=1) as engine:
        turns = answered(engine, [first], temperature=0, max_tokens=100)
        second = [*first, *turns[0].outputs[0].token_ids, *prompt(20, 6)]
        expected = said(answered(engine, [second], temperature=0))
    for options in ({}, {"asynchronous": True}, {"drafts": True}):
        with model.engine(cache=CacheOptions(), **options) as engine:
            answered(engine, [first], temperature=0, max_tokens=100)
            (result,) = answered(engine, [second], temperature=0)
        assert said([result]) == expected and result.cache.hit_tokens in (128, 144), "160 tokens without the newest, whole blocks"


def test_given_rows_between_requests_spoil_no_window(model: Model) -> None:
    """`forward` may take the slot of a sequence whose window the next step was to keep: the window is not kept then."""
    first = prompt(60, 5)
    with model.engine(workers=1) as engine:
        turn = answered(engine, [first], temperature=0, max_tokens=52)[0]
        second = [*first, *turn.outputs[0].token_ids, *prompt(20, 6)]
        expected = said(answered(engine, [second], temperature=0))
    with model.engine(cache=CacheOptions()) as engine:
        engine.submit(first, SamplingParams(temperature=0, max_tokens=53, ignore_eos=True), "r")
        while not engine.scheduler.roster.chores.saves or engine.scheduler.roster.decoding:
            engine.step()
        for slot in range(64):
            engine.forward([(slot, prompt(90, slot))])
            engine.reset(slot)
        answered(engine, [prompt(5, 99)])  # its first step would keep the window
        assert said(answered(engine, [second], temperature=0)) == expected


def test_a_small_budget_evicts_and_changes_no_token(model: Model, plain: list[RequestOutput]) -> None:
    with model.engine(cache=CacheOptions()) as engine:
        size = len(engine.programs.states.window(0, is_whole=True))
    with model.engine(cache=CacheOptions(snapshot_bytes=2 * size), cache_blocks=66) as engine:
        assert said(answered(engine, prompts())) == said(plain)
        assert engine.scheduler.gauges()["snapshots"] <= 2 and engine.scheduler.gauges()["snapshots_evicted"] > 0


@pytest.mark.parametrize("damage", [None, "cut", "flip"])
def test_a_folder_serves_the_next_process(model: Model, plain: list[RequestOutput], tmp_path: Path, damage: str | None) -> None:
    cache = CacheOptions(folder=tmp_path)
    with model.engine(cache=cache) as engine:
        answered(engine, prompts()[:4])
    files = sorted(tmp_path.iterdir())
    assert {file.name.split("-")[0] for file in files} == {"block", "snapshot"}
    for file in files if damage else []:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(bytes(data[:-7] if damage == "cut" else data))
    with model.engine(cache=cache) as engine:
        results = answered(engine, prompts())
        counts, gauges = engine.statistics.counts, engine.scheduler.gauges()
    assert said(results) == said(plain)
    if damage:
        assert gauges["disk_damaged"] > 0 and results[0].cache.hit_tokens == 0
    else:
        assert counts.blocks_loaded > 0 and gauges["disk_damaged"] == 0 and results[2].cache.hit_tokens == 176, "its own last boundary"


def test_a_checkpoint_that_was_edited_finds_nothing_of_the_old_one(model: Model, tmp_path: Path) -> None:
    """Samples of the weights may miss what was edited (here: nothing but the time differs), so a file that was written again is another one."""
    weights = Path(shutil.copytree(model.weights, tmp_path / "edited", copy_function=shutil.copy2))
    moved = Model(model.config, weights, model.artifact)
    cache = CacheOptions(folder=tmp_path / "kv")
    with moved.engine(cache=cache) as engine:
        answered(engine, prompts()[:3])
    with moved.engine(cache=cache) as engine:
        assert answered(engine, prompts()[:1])[0].cache.hit_tokens > 0, "the same files are the same model"
    for shard in weights.glob("*.safetensors"):
        shard.write_bytes(shard.read_bytes())
    with moved.engine(cache=cache) as engine:
        assert answered(engine, prompts()[:1])[0].cache.hit_tokens == 0 and engine.statistics.counts.blocks_loaded == 0


def test_another_mode_or_checkpoint_finds_nothing_of_this_one(model: Model, tmp_path: Path) -> None:
    with model.engine(cache=CacheOptions(folder=tmp_path)) as engine:
        answered(engine, prompts()[:3])
    with model.engine(cache=CacheOptions(folder=tmp_path), replay="compact") as engine:
        results = answered(engine, prompts()[:1])
        assert engine.statistics.counts.blocks_loaded == 0 and results[0].cache.hit_tokens == 0


def test_refusals(model: Model, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for options, error, sentence in (
        ({"cache": CacheOptions(folder=tmp_path / "file")}, CacheFolderRefused, "K101"),
        ({"cache": 5}, OptionRefused, "EngineOptions.cache - found 5, expected CacheOptions, or None"),
        ({"replay": "some"}, OptionRefused, "EngineOptions.replay"),
        ({"replay": "compact", "keep": 21}, OptionRefused, "ReplayRules.keep - found 21, expected at least window [+] backtrack = 22"),
    ):
        with pytest.raises(error, match=sentence), model.engine(**options):  # type: ignore[arg-type]
            pass
    for options in ({"snapshot_bytes": 0}, {"keep_s": -1}, {"folder": 3}, {"folder_bytes": 1.5}):
        with pytest.raises(OptionRefused, match=f"CacheOptions.{next(iter(options))}"):
            CacheOptions(**options)  # type: ignore[arg-type]


# -- branches


@pytest.mark.parametrize("options", [{}, {"asynchronous": True}, {"drafts": True}, {"cache": CacheOptions()}], ids=str)
def test_branches_share_the_prompt(model: Model, options: dict[str, Any]) -> None:
    """The prompt runs once; each other branch takes a copy of its state and runs its last row again."""
    tokens = prompt(77, 9)
    with model.engine(workers=1) as engine:
        seeds = [answered(engine, [tokens], temperature=9, seed=3, n=4)[0]]
    with model.engine(**options) as engine:
        (result,) = answered(engine, [tokens], temperature=9, seed=3, n=4)
        rows = engine.statistics.counts.prompt_rows
    assert said([result]) == said(seeds) and len(set(said([result]))) == 4
    assert rows == 77 + 3


def test_branches_under_bounded_replay_are_requests_of_their_own(model: Model) -> None:
    """A branch goes on from the windows of both halves, of which a snapshot would hold one."""
    tokens = prompt(77, 9)
    with model.engine(replay="compact") as engine:
        alone = [answered(engine, [tokens], temperature=9, seed=branch_seed(3, i))[0] for i in range(3)]
        (result,) = answered(engine, [tokens], temperature=9, seed=3, n=3)
    assert said([result]) == said(alone) and len(set(said(alone))) == 3


# -- bounded replay


@pytest.mark.parametrize("keep", [22, 40])
def test_compact_equals_mask_and_long_keeps_are_exact(model: Model, keep: int) -> None:
    asked = [prompt(n, n) for n in (9, 22, 23, 41, 120, 261)]
    found = {}
    for mode in ("exact", "mask", "compact"):
        for options in ({}, {"chunk_tokens": 32}, {"asynchronous": True, "chunk_tokens": 7}):
            with model.engine(replay=mode, keep=keep, **options) as engine:
                found[mode, str(options)] = said(answered(engine, asked))
                counts = engine.statistics.counts
            expected = sum(min(len(tokens), keep) for tokens in asked) if mode == "compact" else sum(map(len, asked))
            assert counts.decoder_prompt_rows == expected and counts.prompt_rows == sum(map(len, asked))
    for mode in ("exact", "mask", "compact"):
        assert len({str(value) for (m, _), value in found.items() if m == mode}) == 1, f"{mode}: any chunking gives the same"
    exact, mask, compact = (found[mode, "{}"] for mode in ("exact", "mask", "compact"))
    assert mask == compact and exact != compact
    short = [i for i, tokens in enumerate(asked) if len(tokens) <= keep]
    assert [exact[i] for i in short] == [compact[i] for i in short] and len(short) >= 2


@pytest.mark.parametrize("mode", ["mask", "compact"])
def test_reuse_under_bounded_replay_changes_no_token(model: Model, mode: str) -> None:
    """A prompt goes on from the encoder's windows at a boundary that leaves all kept rows to compute; the result is that of no cache."""
    with model.engine(replay=mode) as engine:
        expected = said(answered(engine, prompts()))
        rows = engine.statistics.counts.prompt_rows
    for options in ({}, {"asynchronous": True}, {"drafts": True}):
        with model.engine(replay=mode, cache=CacheOptions(), **options) as engine:
            assert said(answered(engine, prompts())) == expected
            assert engine.statistics.counts.prompt_rows < rows and engine.statistics.counts.snapshots_restored > 0
