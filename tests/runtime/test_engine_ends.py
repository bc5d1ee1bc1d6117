"""How an engine ends, closed or dropped, and what a fault of its device ends: the requests of one step, on the toy model."""

import gc
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from tapeout.runtime.errors import DeviceClosed, DeviceError, DeviceFailed, NpuFailed, SimulatedFault
from tapeout.runtime.program import StepRows
from tapeout.runtime.request import FinishedEvent
from tests.runtime.test_engine import GREEDY, assert_empty, drain, prompt, run_one
from tests.runtime.toy import MAX_SEQUENCES, toy_answer, toy_engine


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_closed_engine_says_so(toy: Path, asynchronous: bool) -> None:
    engine = toy_engine(toy, asynchronous=asynchronous)
    engine.submit(prompt(9), GREEDY, "r")
    engine.close()
    engine.close()
    with pytest.raises(DeviceClosed, match=r"\[D114\] the device is closed - .* - make another engine"):
        drain(engine)
    assert [event.request_id for event in engine.step() if isinstance(event, FinishedEvent)] == ["r"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_engine_that_is_dropped_without_close_leaves_nothing_behind(toy: Path, asynchronous: bool) -> None:
    before = set(threading.enumerate())
    engine = toy_engine(toy, asynchronous=asynchronous, workers=2)
    run_one(engine, prompt(9), GREEDY)
    threads, device = set(threading.enumerate()) - before, weakref.ref(engine.device)
    assert len(threads) == 2 + asynchronous
    del engine
    for thread in sorted(threads, key=lambda thread: thread.name != "tapeout-device"):
        gc.collect()
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads) and device() is None


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("fault", [SimulatedFault, DeviceFailed, NpuFailed])
def test_r57_a_fault_of_the_device_names_kernel_and_step_and_ends_the_requests_in_it(
    toy: Path, monkeypatch: pytest.MonkeyPatch, fault: type[DeviceError], asynchronous: bool
) -> None:
    engine = toy_engine(toy, asynchronous=asynchronous)
    run, runs = engine.device.run, []

    def faulty(table: object, *, alone: bool = False) -> None:
        runs.append(table)
        if len(runs) == 3:
            raise fault("kernel toy_decode", "an access behind its buffer")
        run(table, alone=alone)

    monkeypatch.setattr(engine.device, "run", faulty)
    names = [engine.submit(prompt(9, i), GREEDY) for i in range(MAX_SEQUENCES + 2)]
    ended = [event.request_id for event in drain(engine) if isinstance(event, FinishedEvent)]
    results = [engine.take(name).outputs[0] for name in names]
    said = f"[D120] the device lost a step - step 2 - found [{fault.code}] {fault.sentence} - kernel toy_decode - found an access behind its buffer"
    lost = [result for result in results if result.finish_reason == "error"]
    assert sorted(ended) == sorted(names) and len(lost) >= 2 and all((result.error or "").startswith(said) for result in lost)
    for i, result in enumerate(results):
        assert result in lost or list(result.token_ids) == toy_answer(prompt(9, i), 7)
    assert len(lost) < len(results)
    assert_empty(engine)
    engine.close()


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("at", [4, 9, 13])
def test_logits_that_are_not_finite_end_their_request_alone(
    toy: Path, monkeypatch: pytest.MonkeyPatch, at: int, value: float, asynchronous: bool, drafts: bool
) -> None:
    """Behind as many tokens of one sequence, its prompt of nine among them, no log-probability can be told; the others are as ever."""
    engine = toy_engine(toy, asynchronous=asynchronous, drafts=drafts)
    programs = engine.programs
    run, bad, names = programs.step, [], [engine.submit(prompt(9, i), GREEDY) for i in range(MAX_SEQUENCES + 2)]

    def damaged(rows: StepRows, **how: bool) -> None:
        run(rows, **how)
        for output, (slot, position) in enumerate(zip(rows.draws.slots.tolist(), rows.draws.positions.tolist(), strict=True)):  # type: ignore[union-attr]
            if position == at and (slot in bad or not bad):
                bad[:] = [slot]
                programs.array("logprobs")[output] = value

    monkeypatch.setattr(programs, "step", damaged)
    ended = [event.request_id for event in drain(engine) if isinstance(event, FinishedEvent)]
    results = [engine.take(name).outputs[0] for name in names]
    failed = [i for i, result in enumerate(results) if result.finish_reason == "error"]
    assert sorted(ended) == sorted(names)
    if at < 9:  # no output of a prompt's inner rows is looked at
        assert not failed
    else:
        assert failed and all(f"[D121] the logits of a token are not finite - behind {at} tokens - " in (results[i].error or "")
                              for i in failed)  # fmt: skip
    for i, result in enumerate(results):
        expected = toy_answer(prompt(9, i), 7)
        assert list(result.token_ids) == (expected[: len(result.token_ids)] if i in failed else expected)
        assert np.isfinite(list(result.logprobs or ())).all()
    assert_empty(engine)
    engine.close()
