"""Memory that holds one or two of several requests: all come to their end, and nobody is computed for nothing (docs/runtime.md, 1.7 and 2.1)."""

import random
from typing import Any

import pytest

from tapeout.runtime.replay import Mode, ReplayRules
from tests.runtime.null import prompt, serving

Crowd = tuple[dict[str, Any], list[tuple[int, int, int]]]
"""Settings, and of each request: prompt tokens, priority, answer tokens."""


def crowd(seed: int) -> Crowd:
    """A few requests of which memory holds one or two at a time, in pieces so small that computing a prompt again takes many steps."""
    rng = random.Random(seed)
    options = {"blocks": rng.choice([5, 7, 9]), "max_rows": rng.choice([1, 2, 3, 4]), "chunk_tokens": rng.choice([None, 1]),
               "depth": rng.choice([0, 1]), "min_run_steps": rng.choice([8, 8, 0]), "step_ms": rng.choice([None, 1.0])}  # fmt: skip
    lengths = [min(rng.choice([1, 4, 8, 12, 16, 20, 24, 28]), 4 * options["blocks"] - 4) for _ in range(rng.choice([2, 3, 4]))]
    return options, [(length, rng.choice([0, 0, 1]), rng.choice([2, 10, 30])) for length in lengths]


FOUND: Crowd = {"max_rows": 4, "chunk_tokens": 1, "depth": 1, "blocks": 9}, [(24, 1, 10), (1, 0, 2), (28, 1, 2), (8, 1, 10)]


@pytest.mark.parametrize("given", [FOUND, *map(crowd, range(60))], ids=str)
def test_requests_that_crowd_memory_come_to_an_end(given: Crowd) -> None:
    """Who gives way again before having said a word computed for nothing; where two do so in turns, nobody gets anywhere."""
    options, asked = given
    rules = ReplayRules(Mode.COMPACT, 9, window=8, backtrack=1, block=4)
    s = serving(slots=4, block_tokens=4, max_context=32, caching=False, alignment=1, rules=rules,
                model={"ms": lambda decode, rows: float(decode + rows)}, **options)  # fmt: skip
    for i, (length, priority, answer) in enumerate(asked):
        s.submit(f"r{i}", prompt(length, i), max_tokens=answer, ignore_eos=True, priority=priority)
    s.run(1500)
    assert all(s.tokens(name) == s.expected(name) for name in s.scheduler.roster.requests)
    s.assert_empty()


def test_a_prompt_starts_only_where_its_next_token_has_room_too() -> None:
    """One that fills its blocks exactly would have to give way at once, and be computed again as often as it does."""
    s = serving(slots=2, blocks=27, block_tokens=8, caching=False, max_rows=16)
    s.submit("long", prompt(200), max_tokens=1, ignore_eos=True)
    for _ in range(3):
        s.driver.step()
    s.submit("short", prompt(8, 1), max_tokens=20, ignore_eos=True)
    s.run()
    assert s.tokens("short") == s.expected("short") and s.scheduler.statistics.counts.preemptions == 0
    s.submit("exact", prompt(200), max_tokens=1)
    s.run()
    assert s.scheduler.roster.branches("exact")[0].status.value in ("length", "stop"), "one that ends with its first token needs no more room"


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("drafts", [0, 2, 5])
def test_drafts_in_flight_ask_for_no_block_beyond_the_context(drafts: int, depth: int) -> None:
    """The whole pool is one sequence: it ends where the context does, although what is in flight may look longer."""
    s = serving(slots=2, blocks=5, block_tokens=4, drafts=drafts, depth=depth, rules=ReplayRules(Mode.COMPACT, 12, window=5, backtrack=6, block=4))
    for i, length in enumerate((1, 7, 12, 16)):
        s.submit(f"r{i}", prompt(length, i), max_tokens=30, ignore_eos=True)
        s.run()
        branch = s.scheduler.roster.branches(f"r{i}")[0]
        assert (branch.stop_reason, branch.error, branch.emitted) == ("max_context", None, 17 - length)
        assert s.tokens(f"r{i}") == s.expected(f"r{i}")
    s.assert_empty()
