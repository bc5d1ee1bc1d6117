"""Ctrl-C at every few lines of an engine: what was asked for is given up, the next request gets its tokens, and nothing is held by anybody."""

import sys
from linecache import getline
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tapeout.runtime.blocks import BlockPool
from tapeout.runtime.engine import Engine
from tapeout.runtime.reuse import CacheOptions
from tests.runtime.test_engine import GREEDY, assert_empty, drain, prompt
from tests.runtime.toy import toy_answer, toy_engine

RUNNING = ("driver", "runner", "program")
PLANNING = ("scheduler", "commit", "roster", "blocks", "columns", "request", "drafting", "prefix", "stats", "fairness", "state", "reuse")
EACH = 13  # lines between two interrupts


def interrupted_at(engine: Engine, files: tuple[str, ...], point: int) -> bool:
    """Steps to the end, with an interrupt at the `point`-th line of these files of the runtime; False if there are fewer. Not at a `with`: there a
    tracer could raise between the end of its block and what it has to give back, where Python looks for no signal."""
    left, ends = point, tuple(f"runtime/{name}.py" for name in files)

    def seen(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(ends):
            return None
        if event == "line" and not getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            left -= 1
        else:
            return seen
        if left == 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return seen

    before = sys.gettrace()
    try:
        while engine.has_work:
            sys.settrace(seen)
            engine.step()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def survives(engine: Engine, files: tuple[str, ...], least: int) -> None:
    """One engine for all interrupts: what one of them left behind would add up."""
    point = 1
    while True:
        names = [engine.submit(prompt(12, i % 2), GREEDY) for i in range(3)]
        if not interrupted_at(engine, files, point):
            break
        for name in names:
            engine.abort(name)
        after = engine.submit(prompt(12, point % 2), GREEDY)
        drain(engine)
        assert list(engine.take(after).outputs[0].token_ids) == toy_answer(prompt(12, point % 2), 7), point
        engine.forget(*names)
        roster = engine.scheduler.roster
        assert roster.faults() == [] and not roster.requests and not any(roster.tenants.values()), point
        point += EACH
    assert point > least
    engine.close()


@pytest.mark.parametrize("files", [RUNNING, PLANNING], ids=["running", "planning"])
@pytest.mark.parametrize("drafts", [False, True])
def test_steps_behind_one_another(toy: Path, queueing: None, drafts: bool, files: tuple[str, ...]) -> None:
    engine = toy_engine(toy, drafts=drafts)
    survives(engine, files, 1000)
    assert_empty(engine)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_short_of_memory_that_is_reused(toy: Path, asynchronous: bool) -> None:
    survives(toy_engine(toy, cache_blocks=24, cache=CacheOptions(), asynchronous=asynchronous), PLANNING, 2000)


def test_books_that_were_left_half_done_are_put_right(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks next, for room or for faults, finds all of it."""
    engine = toy_engine(toy, cache_blocks=14)
    pool, taken = engine.blocks, BlockPool._take

    def interrupted(self: BlockPool) -> int:
        taken(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(BlockPool, "_take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.reserve(0, 9)
    monkeypatch.setattr(BlockPool, "_take", taken)
    assert len(pool._free) == 12 and pool.free_blocks == 13 and pool.faults() == []
    pool.reserve(0, 9)
    assert pool.held_count(0) == 3 and pool.faults() == []
    engine.close()
