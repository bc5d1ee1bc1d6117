"""Two ways to drive one scheduler: synchronously, and asynchronously with steps in flight; and two ways to run a device.

Both drivers call the same `propose` and `commit`; asynchronous driving only commits later, so that the host plans step N + 1 while the
device runs N. A step that is lost ends the requests in it and nothing else. docs/runtime.md, 3.2.
"""

import queue
import threading
from collections import deque
from typing import Any, Protocol

from tapeout.runtime.errors import OptionRefused, StepLost
from tapeout.runtime.request import Event
from tapeout.runtime.scheduler import Scheduler
from tapeout.runtime.step import Step, StepDevice, StepResult


class StepRunner(Protocol):
    """What runs steps: `prepare` takes all it needs from the host's tables, `execute` does the work, in the order of preparation."""

    def prepare(self, step: Step) -> Any: ...

    def execute(self, prepared: Any) -> StepResult: ...

    def read_block(self, block: int) -> bytes | None: ...


class Direct:
    """Runs each step in the calling thread when it is launched."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self._results: deque[StepResult | StepLost] = deque()

    def launch(self, step: Step) -> None:
        prepared = self._runner.prepare(step)
        try:
            self._results.append(self._runner.execute(prepared))
        except StepLost as error:
            self._results.append(error)

    def collect(self) -> StepResult:
        """The result of the oldest launched step. Raises StepLost."""
        found = self._results.popleft()
        if isinstance(found, StepLost):
            raise found
        return found

    def read_block(self, block: int) -> bytes | None:
        return self._runner.read_block(block)

    def close(self) -> None:
        """Nothing to end."""


class Background:
    """Runs steps in a thread of its own, in order. If the thread ends, for whatever reason, steps in flight are lost and it starts anew."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[StepResult | StepLost] = queue.SimpleQueue()
        self._in_flight = 0
        self._thread = self._started()

    def _started(self) -> threading.Thread:
        thread = threading.Thread(target=_serve, args=(self._runner, self._work, self._done), name="tapeout-device", daemon=True)
        thread.start()
        return thread

    def launch(self, step: Step) -> None:
        if not self._thread.is_alive():
            self._restart()
        self._in_flight += 1
        self._work.put(self._runner.prepare(step))

    def collect(self) -> StepResult:
        """The result of the oldest launched step. Raises StepLost."""
        found = self._wait()
        self._in_flight -= 1
        if isinstance(found, StepLost):
            raise found
        return found

    def _wait(self) -> StepResult | StepLost:
        while True:
            try:
                return self._done.get(timeout=0.1)
            except queue.Empty:
                if not self._thread.is_alive():
                    self._restart()

    def _restart(self) -> None:
        """What the dead thread left behind is lost; its queue is emptied before a new thread serves it."""
        while not self._work.empty():
            self._work.get()
        for _ in range(self._in_flight - self._done.qsize()):
            self._done.put(StepLost("device thread", "the thread has ended"))
        self._thread = self._started()

    def read_block(self, block: int) -> bytes | None:
        return self._runner.read_block(block)

    def close(self) -> None:
        """Ends the thread once it has run what was launched. May be called twice."""
        if self._thread.is_alive():
            self._work.put(None)
            self._thread.join()


def _serve(runner: StepRunner, work: "queue.SimpleQueue[Any]", done: "queue.SimpleQueue[StepResult | StepLost]") -> None:
    while (prepared := work.get()) is not None:
        try:
            done.put(runner.execute(prepared))
        except StepLost as error:
            done.put(error)
        except Exception as error:
            done.put(StepLost("device thread", f"{type(error).__name__}: {error}"))
            return


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
        """Waits for the oldest step; an interrupt while waiting leaves it in flight."""
        step = self._in_flight[0]
        try:
            result = self.device.collect()
        except StepLost as error:
            self._in_flight.popleft()
            self.scheduler.lose(step, str(error))
        else:
            self._in_flight.popleft()
            self.scheduler.commit(step, result)
