"""Two ways to drive one scheduler: synchronously, and asynchronously with steps in flight; and three ways to run a device.

Both drivers call the same `propose` and `commit`; asynchronous driving only commits later, so that the host plans step N + 1 while the
device runs N, and, where the device has a queue, begins N + 1 at once behind N. A step that is lost ends the requests in it and nothing
else. docs/runtime.md, 3.2.
"""

import queue
import threading
import weakref
from collections import deque
from contextlib import suppress
from typing import Any, Protocol

from tapeout.runtime.errors import OptionRefused, StepFault, StepLost
from tapeout.runtime.request import Event
from tapeout.runtime.scheduler import Scheduler
from tapeout.runtime.step import Step, StepDevice, StepResult


class StepRunner(Protocol):
    """What runs steps: `prepare` takes all it needs from the host's tables, `execute` does the work, in the order of preparation.

    `prepare` raises DeviceClosed where no step can run any more.
    """

    def prepare(self, step: Step) -> Any: ...

    def execute(self, prepared: Any) -> StepResult: ...

    def read_block(self, block: int) -> bytes | None: ...


class QueueRunner(StepRunner, Protocol):
    """A runner that can put a step behind one that still runs. `start` and `finish` raise StepFault."""

    def start(self, prepared: Any) -> Any: ...

    def finish(self, started: Any) -> StepResult: ...

    def settle(self) -> None: ...


Results = dict[int, StepResult | StepLost | None]
"""What has become of launched steps, by number; None: not known yet."""


def _result(results: Results, number: int) -> StepResult:
    """What a step gave; it stays until a later step is asked for. Raises StepLost."""
    found = results[number]
    if isinstance(found, StepLost):
        raise found
    if found is None:
        raise RuntimeError(f"internal: step {number} is collected before it has run")
    return found


def _forget_before(results: dict[int, Any], number: int) -> None:
    """Drops what nobody will ask for any more, results of steps among it whose launch was interrupted."""
    for older in [n for n in list(results) if n < number]:
        del results[older]


def _ran(runner: StepRunner, number: int, prepared: Any) -> StepResult | StepLost:
    """What a step gives; a fault of the device in it is the loss of the step, and of no other."""
    try:
        return runner.execute(prepared)
    except StepLost as error:
        return error
    except StepFault as error:
        return StepLost(f"step {number}", str(error))


class Direct:
    """Runs each step in the calling thread when it is launched."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self._results: Results = {}

    def launch(self, step: Step) -> None:
        self._results[step.number] = _ran(self._runner, step.number, self._runner.prepare(step))

    def collect(self, number: int) -> StepResult:
        """The result of a launched step. Raises StepLost."""
        _forget_before(self._results, number)
        return _result(self._results, number)

    def read_block(self, block: int) -> bytes | None:
        return self._runner.read_block(block)

    def close(self) -> None:
        """Nothing to end."""


Work = queue.SimpleQueue["tuple[int, Any] | None"]
News = queue.SimpleQueue[None]


class Background:
    """Runs steps in a thread of its own, in order. If the thread ends, for whatever reason, steps in flight are lost and it starts anew.

    The thread writes results where the caller looks for them, and `_news` only wakes the caller: an interrupt at any point loses no result.
    So nothing here asks `threading` for an event or whether the thread lives: an interrupt half way through leaves a lock taken, or a thread that
    runs said to be dead. The thread knows nothing of this object, so that one which is dropped without `close` ends it too.
    """

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self._work: Work = queue.SimpleQueue()
        self._results: Results = {}
        self._news: News = queue.SimpleQueue()
        self._thread = self._started()
        self._stop = weakref.finalize(self, self._work.put, None)

    def _started(self) -> threading.Thread:
        self._ended: list[bool] = []  # of this thread; something once it has
        given = (self._runner, self._work, self._results, self._news, self._ended)
        thread = threading.Thread(target=_serve, args=given, name="tapeout-device", daemon=True)
        thread.start()
        return thread

    def launch(self, step: Step) -> None:
        prepared = self._runner.prepare(step)
        if self._ended:
            self._restart()
        self._results[step.number] = None
        self._work.put((step.number, prepared))

    def collect(self, number: int) -> StepResult:
        """The result of a launched step, once it is there. Raises StepLost."""
        _forget_before(self._results, number)
        while self._results[number] is None:
            with suppress(queue.Empty):
                self._news.get(timeout=0.1)
            if self._ended:
                self._restart()
        return _result(self._results, number)

    def _restart(self) -> None:
        """What the dead thread left behind is lost; its queue is emptied before a new thread serves it."""
        while not self._work.empty():
            self._work.get()
        for number, found in self._results.items():
            if found is None:
                self._results[number] = StepLost("device thread", "the thread has ended")
        self._thread = self._started()

    def read_block(self, block: int) -> bytes | None:
        return self._runner.read_block(block)

    def close(self) -> None:
        """Ends the thread once it has run what was launched. May be called twice."""
        if not self._ended:
            self._work.put(None)
        self._thread.join()


def _serve(runner: StepRunner, work: Work, results: Results, news: News, ended: list[bool]) -> None:
    try:
        while (launched := work.get()) is not None:
            number, prepared = launched
            try:
                results[number] = _ran(runner, number, prepared)
            except Exception as error:
                ended.append(True)  # before the result can be seen: nothing is launched into a thread that goes
                results[number] = StepLost("device thread", f"{type(error).__name__}: {error}")
                return
            if news.empty():  # one word wakes the caller, who then looks at all results
                news.put(None)
    finally:
        ended.append(True)
        news.put(None)


class Queued:
    """Puts steps behind one another on the device, in the calling thread, and waits for one when its result is asked for."""

    def __init__(self, runner: QueueRunner) -> None:
        self._runner = runner
        self._started: dict[int, Any] = {}
        self._results: Results = {}

    def launch(self, step: Step) -> None:
        prepared = self._runner.prepare(step)
        self._results[step.number] = None
        try:
            self._started[step.number] = self._runner.start(prepared)
        except StepFault as error:
            self._results[step.number] = StepLost(f"step {step.number}", str(error))

    def collect(self, number: int) -> StepResult:
        """The result of a launched step, once it is there. Raises StepLost."""
        _forget_before(self._results, number)
        _forget_before(self._started, number)
        if self._results[number] is None:
            try:
                self._results[number] = self._runner.finish(self._started[number])
            except StepFault as error:
                self._results[number] = StepLost(f"step {number}", str(error))
        return _result(self._results, number)

    def read_block(self, block: int) -> bytes | None:
        return self._runner.read_block(block)

    def close(self) -> None:
        """Waits for what was launched. May be called twice."""
        self._runner.settle()


class Driver:
    """Steps a scheduler over a device with `depth` steps in flight between calls; 0 is synchronous."""

    def __init__(self, scheduler: Scheduler, device: StepDevice, depth: int = 0) -> None:
        if type(depth) is not int or not 0 <= depth <= 2:
            raise OptionRefused("depth", repr(depth), "0 (synchronous), 1 or 2 steps in flight")
        self.scheduler, self.device, self.depth = scheduler, device, depth
        self._in_flight: deque[Step] = deque()
        scheduler.roster.read_block = device.read_block

    @property
    def has_work(self) -> bool:
        """Says whether a step would do or report something."""
        return bool(self._in_flight) or self.scheduler.has_work

    def step(self) -> list[Event]:
        """Proposes and launches a step, commits what is due, and returns what happened, in order."""
        if len(self._in_flight) > self.depth:  # the wait for it was interrupted
            self._commit_oldest()
        step = self.scheduler.propose()
        if step is not None:
            self._launch(step)
        if self._in_flight and (step is None or len(self._in_flight) > self.depth):
            self._commit_oldest()
        return self.scheduler.events()

    def settle(self) -> None:
        """Commits all steps in flight."""
        while self._in_flight:
            self._commit_oldest()

    def _launch(self, step: Step) -> None:
        try:
            self.device.launch(step)
        except BaseException as error:  # an interrupt in the middle of a step: whoever was in it must not wait for its results
            self.scheduler.lose(step, f"the step was interrupted: {type(error).__name__}")
            raise
        self._in_flight.append(step)

    def _commit_oldest(self) -> None:
        """Waits for the oldest step; an interrupt before its result is here leaves it in flight."""
        step = self._in_flight[0]
        try:
            result = self.device.collect(step.number)
        except StepLost as error:
            self._in_flight.popleft()
            self.scheduler.lose(step, str(error))
        else:
            self._in_flight.popleft()
            self.scheduler.commit(step, result)
