"""Defects of another engine that no other file pins, and the table of docs/runtime.md that names a test for each.

The table is checked: every number that concerns these parts is in it once, and every test that it names exists.
"""

import gc
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tapeout.runtime.blocks import BlockPool
from tapeout.runtime.errors import BlocksExhausted, ParameterUnsupported
from tapeout.runtime.params import SamplingParams
from tapeout.runtime.request import TokenEvent
from tests.runtime.null import prompt, serving
from tests.runtime.toy import toy_answer, toy_engine

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "runtime.md"
ELSEWHERE = {11, 12, 13, 23, 24, 25, 29, 31}  # parts that do not exist yet


def test_every_defect_has_a_test_that_exists() -> None:
    rows = re.findall(r"^\| (\d+) \| .+ \| `(test_\w+\.py)::(test_\w+)` \|$", PAGE.read_text(), flags=re.MULTILINE)
    assert Counter(int(number) for number, _, _ in rows) == Counter(set(range(1, 32)) - ELSEWHERE)
    for number, file, name in rows:
        assert f"\ndef {name}(" in (HERE / file).read_text(), f"defect {number}: {file}::{name}"


def test_defect_8_a_recompute_reports_no_log_probability_twice(toy: Path) -> None:
    found = []
    for preemptions in (0, 3):
        s = serving(slots=2)
        s.submit("r", prompt(20), max_tokens=40, ignore_eos=True, logprobs=True)
        events = []
        for i in range(30):
            events += s.driver.step()
            branch = s.scheduler.roster.branches("r")[0]
            if i % 10 == 7 and branch.preemptions < preemptions:
                s.scheduler.roster.preempt(branch)
        events += s.run()
        assert branch.preemptions == preemptions
        (answer,) = s.scheduler.roster.take("r").outputs
        assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids) == 40
        assert [event.ordinal for event in events if isinstance(event, TokenEvent)] == list(range(40))
        found.append((answer.token_ids, answer.logprobs))
    assert found[0] == found[1], "values and order are those of a run without preemption"
    engine = toy_engine(toy)
    with pytest.raises(ParameterUnsupported, match="prompt_logprobs"):
        engine.submit([3], SamplingParams(prompt_logprobs=True))
    engine.close()


def test_defect_9_greedy_is_no_draw(toy: Path) -> None:
    """Temperatures below 1e-5 reach the sampler as 0: the seed cannot matter, whatever lies near the largest logit."""
    engine = toy_engine(toy)
    for seed in range(20):
        engine.submit([3, 4], SamplingParams(temperature=9e-6, top_k=3, top_p=0.2, seed=seed, max_tokens=3), f"r{seed}")
    while engine.has_work:
        engine.step()
        assert (engine.programs.array("temperature")[:20] == 0).all()
    assert {engine.take(f"r{seed}").outputs[0].token_ids for seed in range(20)} == {tuple(toy_answer([3, 4], 3))}
    engine.close()


def test_defect_16_a_refusal_leaves_the_allocator_as_it_was() -> None:
    pool = BlockPool(6, 4, np.zeros((3, 5), np.int32))
    pool.reserve(0, 8)
    before = (pool.held(0), pool.free_blocks, pool.table.copy())
    for refused in (lambda: pool.reserve(0, 40), lambda: pool.reserve_all({0: 12, 1: 16}), lambda: pool.reserve(1, 21)):
        with pytest.raises(BlocksExhausted):
            refused()
        assert (pool.held(0), pool.free_blocks) == before[:2] and np.array_equal(pool.table, before[2]) and pool.faults() == []
    pool.reserve(1, 12)
    pool.release(0)
    pool.release(1)
    assert pool.free_blocks == 5 and pool.faults() == []


def test_defects_28_and_30_the_runtime_leaves_process_and_environment_alone(toy: Path) -> None:
    sources = {file: file.read_text() for file in (HERE.parents[1] / "runtime").glob("*.py")}
    sources |= {file: file.read_text() for file in (HERE.parents[1] / "runtime" / "device").glob("*.py")}
    assert len(sources) > 30
    for file, text in sources.items():
        assert not re.search(r"\bgc\.|\bos\.environ|\bgetenv\b", text), file
    engine = toy_engine(toy, asynchronous=True)
    for i in range(7):
        engine.submit([3 + i], SamplingParams(temperature=0, max_tokens=4))
    while engine.has_work:
        engine.step()
    assert gc.isenabled()
    assert engine.statistics.ttft_ms.total == 7, "every first token counts, in whichever step it came"
    engine.close()
