"""Every way to run the trained checkpoint gives the same answers, bit for bit: text, tokens, log-probabilities and why each one ended.

Requests mix everything that a request may ask for; ways mix workers, driving, chunks, time limits, speculation, small pools, reuse and whole replay.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tapeout.compiler.api import compile_path
from tapeout.compiler.settings import Settings
from tapeout.models import tiny
from tapeout.runtime import scheduler
from tapeout.runtime.llm import LLM
from tapeout.runtime.params import SamplingParams
from tapeout.runtime.reuse import CacheOptions
from tests.runtime.queueing import put_behind_engines

SHIPPED = Path(tiny.__file__).parent / "trained"
TEXT = Path(scheduler.__file__).read_text()
STOPS = ["\n", "def", "self.", "e", "\n\n", "return ", "(self", '"""', "ing ", "\n    "]
WAYS: dict[str, dict[str, Any]] = {
    "two workers, short chunks": {"workers": 2, "chunk_tokens": 7},
    "asynchronous, short of memory": {"asynchronous": True, "cache_blocks": 70},
    "all drafts": {"drafts": True},
    "planned drafts, asynchronous, two workers": {"drafts": True, "plan": "ours", "asynchronous": True, "workers": 2, "chunk_tokens": 50},
    "reuse and drafts": {"drafts": True, "asynchronous": True, "cache": CacheOptions()},
    "replay that keeps everything": {"replay": "compact", "keep": 1024, "cache": CacheOptions()},
}
UNQUEUED: dict[str, dict[str, Any]] = {
    "synchronous": {"asynchronous": False},
    "reuse, short of memory": {"cache": CacheOptions(), "cache_blocks": 70},
}
"""Beside queued steps, which are the plain way on a device with a queue."""
QUEUED: dict[str, dict[str, Any]] = {
    "drafts": {"drafts": True, "plan": "ours"},
    "replay": {"replay": "compact", "keep": 1024, "cache": CacheOptions(), "chunk_tokens": 50},
}
MORE: dict[str, dict[str, Any]] = {
    "asynchronous": {"asynchronous": True},
    "a row at a time": {"chunk_tokens": 1},
    "by time": {"step_ms": 2.0, "asynchronous": True},
    "planned as the peer does": {"drafts": True, "plan": "compat"},
    "drafts, short of memory": {"drafts": True, "asynchronous": True, "cache_blocks": 70},
    "little kept": {"cache": CacheOptions(1 << 16), "chunk_tokens": 33},
    "everything masked": {"replay": "mask", "keep": 1024},
}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ways") / "artifact"
    compile_path(SHIPPED, place, Settings(max_rows=256, max_outputs=64, max_sequences=8, max_context=1024, block_tokens=16))
    return place


def request(random: random.Random) -> tuple[str, dict[str, Any]]:
    """A prompt that may share its beginning with others, and parameters of every kind."""
    start = 0 if random.random() < 0.3 else random.randrange(len(TEXT) - 1500)
    params: dict[str, Any] = {"max_tokens": random.choice([0, 1, 3, 9, 30]), "temperature": random.choice([0.0, 0.0, 0.4, 1.0, 30.0])}
    params["seed"] = random.choice([0, 1, -1, 2**63, random.getrandbits(64)])
    some = {
        "top_p": random.choice([1e-6, 0.5, 0.9]), "top_k": random.choice([1, 5, 100_000]), "ignore_eos": True, "logprobs": True,
        "stop": tuple(random.sample(STOPS, 2)), "stop_token_ids": tuple(random.sample(range(2000), 20)), "n": random.choice([2, 3]),
        "priority": random.choice([-3, 5]),
    }  # fmt: skip
    params |= {name: value for name, value in some.items() if random.random() < 0.35}
    return TEXT[start : start + random.choice([1, 5, 60, 260, 900])], params


def answers(artifact: Path, requests: list[tuple[str, dict[str, Any]]], **how: Any) -> Iterator[list[tuple[Any, ...]]]:
    llm = LLM(artifact, SHIPPED, **{"workers": 1, **how})
    try:
        results = llm.generate([prompt for prompt, _ in requests], [SamplingParams(**params) for _, params in requests])
        assert llm.engine.blocks.faults() == [] and llm.engine.scheduler.roster.faults() == []
    finally:
        llm.close()
    for result in results:
        yield [(a.text, a.token_ids, a.logprobs, a.finish_reason, a.stop_reason) for a in result.outputs]


def agree(artifact: Path, seed: int, ways: dict[str, dict[str, Any]], count: int) -> None:
    source = random.Random(seed)
    requests = [request(source) for _ in range(count)]
    plain = list(answers(artifact, requests))
    assert len({answer[0][1] for answer in plain}) > count // 2, "they differ"
    for way, how in ways.items():
        for asked, found, expected in zip(requests, answers(artifact, requests, **how), plain, strict=True):
            assert found == expected, (way, asked)


def test_ways_agree(artifact: Path) -> None:
    agree(artifact, 1, WAYS, 10)


@pytest.fixture
def queueing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newest tokens come from the kernels that remember them, as the host does not know them yet."""
    put_behind_engines(monkeypatch)


def test_steps_behind_one_another_agree(artifact: Path, queueing: None) -> None:
    agree(artifact, 3, UNQUEUED, 6)


@pytest.mark.full
def test_many_ways_agree(artifact: Path) -> None:
    agree(artifact, 2, WAYS | MORE, 40)


@pytest.mark.full
def test_many_steps_behind_one_another_agree(artifact: Path, queueing: None) -> None:
    agree(artifact, 4, UNQUEUED | QUEUED, 30)
