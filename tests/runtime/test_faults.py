"""Faults on purpose: one clear error for the request concerned, the others unharmed, nothing leaked; in every way of driving.

Malformed prompt files, invalid UTF-8 and huge texts enter through the command line: `tests/compiler/test_run.py`.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tapeout.runtime.device.null import NullDevice, Prepared
from tapeout.runtime.disk import DiskTier
from tapeout.runtime.request import Event, Status
from tapeout.runtime.step import StepResult
from tests.runtime.null import Dying, Serving, forget_names, prompt, serving, terminal

WAYS: list[dict[str, Any]] = [
    {"depth": 0}, {"depth": 1}, {"depth": 2}, {"depth": 1, "background": True}, {"depth": 1, "drafts": 5}, {"depth": 0, "drafts": 5},
]  # fmt: skip


def healthy(s: Serving, names: list[str], events: list[Event]) -> None:
    """The others: tokens of the model, exactly one end each, nothing held by anybody."""
    for name in names:
        branch = s.scheduler.roster.branches(name)[0]
        assert branch.status.value == "length" and branch.error is None and s.tokens(name) == s.expected(name), name
    assert sorted(terminal(events)) == sorted(s.scheduler.roster.requests)
    s.assert_empty()
    if hasattr(s.driver.device, "_thread"):
        s.driver.device.close()  # type: ignore[attr-defined]
        assert not s.driver.device._thread.is_alive()


def others(s: Serving, count: int = 5) -> list[str]:
    names = [f"other {i}" for i in range(count)]
    for i, name in enumerate(names):
        s.submit(name, prompt(24) + prompt(3 + i, 9 + i), max_tokens=25, ignore_eos=True)
    return names


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_memory_that_one_request_can_never_have(way: dict[str, Any]) -> None:
    """The pool holds 12 blocks of 8 tokens, `huge` needs 13 and runs alone at last."""
    s = serving(blocks=13, max_context=104, **way)
    s.scheduler.roster.max_context = 104
    names = others(s)
    s.submit("huge", prompt(60, 3), max_tokens=44, ignore_eos=True)
    events = s.run()
    branch = s.scheduler.roster.branches("huge")[0]
    assert branch.status.value == "insufficient_system_resource"
    assert "[B101] there are not enough free cache blocks - request huge - found a need of 13 blocks" in (branch.error or "")
    assert s.tokens("huge") == s.expected("huge")[: branch.emitted], "what it said so far was right"
    healthy(s, names, events)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_full_memory_makes_requests_wait_and_harms_none(way: dict[str, Any]) -> None:
    s = serving(blocks=14, **way)
    names = others(s, 9)
    healthy(s, names, s.run())
    assert s.scheduler.statistics.counts.preemptions > 0


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_prompt_longer_than_the_context(way: dict[str, Any]) -> None:
    s = serving(blocks=100, **way)
    s.submit("huge", [3] * 2_500_000, max_tokens=5)
    names = others(s)
    events = s.run()
    branch = s.scheduler.roster.branches("huge")[0]
    assert branch.status.value == "prompt_length_exceeded" and branch.emitted == 0
    assert "[Q101] a prompt is refused - request huge - found 2500000 tokens, expected at most 200, the context" in (branch.error or "")
    healthy(s, names, events)


def damage_snapshot(s: Serving) -> None:
    assert s.cache is not None and s.cache.snapshots is not None and len(s.cache.snapshots) > 0
    for kept in s.cache.snapshots._kept.values():
        kept.snapshot = kept.snapshot._replace(payload=b"\0" + kept.snapshot.payload[1:])
        kept.digest = b"damaged"


def damage_disk(s: Serving) -> None:
    assert s.cache is not None and s.cache.disk is not None
    files = sorted(s.cache.disk.folder.iterdir())
    for file in files[::2]:
        data = bytearray(file.read_bytes())
        data[-3] ^= 4
        file.write_bytes(bytes(data))
    files[1].write_bytes(b"")
    forget_names(s.scheduler.pool)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("damage", [damage_snapshot, damage_disk])
def test_damaged_entries_count_as_absent_and_are_counted(
    tmp_path: Path, damage: Callable[[Serving], None], way: dict[str, Any]
) -> None:
    s = serving(blocks=200, snapshot_bytes=100_000, disk=DiskTier(tmp_path, 10**6), **way)
    s.submit("first", prompt(24) + prompt(40, 8), max_tokens=1, ignore_eos=True)
    events = s.run()
    damage(s)
    s.submit("second", prompt(24) + prompt(40, 8) + prompt(20, 5), max_tokens=9, ignore_eos=True)
    names = others(s)
    events += s.run()
    gauges = s.scheduler.gauges()
    assert gauges["snapshots_damaged"] + gauges["disk_damaged"] > 0
    healthy(s, [*names, "first", "second"], events)


class Failing(NullDevice):
    """The rows of the slot that `bad` has come to nothing in the steps of these numbers."""

    in_steps: tuple[int, ...] = ()
    bad = 0

    def execute(self, prepared: Prepared) -> StepResult:
        number, step = self.steps, prepared.step
        slots = {*step.slots.tolist(), *(piece.slot for piece in step.pieces if piece.yields)}
        result = super().execute(prepared)
        return replace(result, failed={self.bad: "no numbers"}) if number in self.in_steps and self.bad in slots else result


@pytest.mark.parametrize("way", [way for way in WAYS if "background" not in way], ids=str)
@pytest.mark.parametrize("at", [2, 5, 12])
def test_nothing_is_kept_of_a_sequence_whose_rows_came_to_nothing(tmp_path: Path, way: dict[str, Any], at: int) -> None:
    """Its blocks may hold what made it fail: the same prompt is computed anew, whatever memory and disk held of it."""
    s = serving(blocks=200, snapshot_bytes=100_000, disk=DiskTier(tmp_path, 10**6), **way)
    s.device.__class__ = Failing
    s.device.in_steps = tuple(range(at, 400))  # type: ignore[attr-defined]
    text = prompt(60, 8)
    s.submit("bad", text, max_tokens=40, ignore_eos=True)
    names = [f"other {i}" for i in range(3)]
    for i, name in enumerate(names):
        s.submit(name, prompt(40 + i, 9 + i), max_tokens=25, ignore_eos=True)
    events = s.run()
    branch = s.scheduler.roster.branches("bad")[0]
    assert branch.status.value == "error" and branch.error == "no numbers" and s.tokens("bad") == s.expected("bad")[: branch.emitted]
    assert s.cache is not None and s.cache.disk is not None and s.cache.snapshots is not None
    assert branch.keys and not any(s.scheduler.pool.named(key) is not None or key in s.cache.snapshots for key in branch.keys)
    assert not any(s.cache.disk.has(kind, key) for kind in ("block", "snapshot") for key in branch.keys)
    s.device.in_steps = ()  # type: ignore[attr-defined]
    hits = s.scheduler.gauges().get("prefix_hit", 0)
    s.submit("again", text, max_tokens=40, ignore_eos=True)
    events += s.run()
    assert s.scheduler.gauges().get("prefix_hit", 0) == hits
    healthy(s, [*names, "again"], events)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("drafts", [0, 5])
def test_a_killed_driver_thread(drafts: int) -> None:
    s = serving(depth=1, background=True, slots=3, drafts=drafts, blocks=100)
    s.device.__class__ = Dying
    for i in range(3):
        s.submit(f"in flight {i}", prompt(9, i), max_tokens=40, ignore_eos=True)
    names = others(s)
    events = s.run()
    for i in range(3):
        branch = s.scheduler.roster.branches(f"in flight {i}")[0]
        assert branch.status.value == "error" and "[D120] the device lost a step - device thread - found the thread has ended" in (branch.error or "")
    assert s.device.is_dead and 1 <= s.scheduler.statistics.counts.lost_steps <= 1 + s.driver.depth
    healthy(s, names, events)


def test_an_interrupt_at_any_line_of_driver_and_threads_stops_nothing() -> None:
    """Ctrl-C is raised wherever the caller stands, between any two calls of `threading` too: no lock stays taken, no thread is replaced alive."""
    way = {"depth": 1, "background": True, "slots": 2}
    for point in count(1):
        s = serving(**way)
        for i in range(3):
            s.submit(f"r{i}", prompt(9, i), max_tokens=4, ignore_eos=True)
        thread = s.driver.device._thread  # type: ignore[attr-defined]
        if not interrupted_at(s, point):
            break
        for i in range(3):
            s.scheduler.roster.finish_all(f"r{i}", Status.ABORTED)
        s.submit("after", prompt(9, 5), max_tokens=4, ignore_eos=True)
        s.run(500)
        assert s.tokens("after") == s.expected("after") and thread is s.driver.device._thread, point  # type: ignore[attr-defined]
        s.assert_empty()
        s.driver.device.close()  # type: ignore[attr-defined]
    assert point > 50, "the interrupt came at every line of all steps"
    s.driver.device.close()  # type: ignore[attr-defined]


def interrupted_at(s: Serving, point: int) -> bool:
    """Steps to the end, with an interrupt at the `point`-th line or return of the driver's and the threads' files; False if there are fewer."""
    left = point

    def seen(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(("runtime/driver.py", "/threading.py")):
            return None
        left -= event in ("line", "return")
        if left == 0 and event in ("line", "return"):
            sys.settrace(None)
            raise KeyboardInterrupt
        return seen

    before = sys.gettrace()
    try:
        while s.driver.has_work:
            sys.settrace(seen)
            s.driver.step()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
