"""Launches: one AI core an instance, its cores as threads of which one runs at a time, in a fixed order, until it waits."""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tapeout.runtime.device.ascend_simulator import arithmetic, control, instructions, vectors
from tapeout.runtime.device.ascend_simulator.memory import AiCore, Core, SimulationError, whole
from tapeout.runtime.device.ascend_simulator.program import NUMPY, Function, Program
from tapeout.runtime.device.ascend_simulator.text import Kind

MEANINGS = (arithmetic, control, instructions, vectors)
LEAD, GRID = 2, 3
"""Lock and workspace in front of the buffers, launched extents behind them."""


@dataclass
class Counts:
    """What a launch executed, over all cores: vector operations, products (m k n), bytes by path."""

    vector_operations: int = 0
    products: int = 0
    moved_bytes: dict[str, int] = field(default_factory=dict)

    def join(self, more: "Core | Counts") -> None:
        """Adds what a core, or another launch, has executed."""
        self.vector_operations += more.vector_operations
        self.products += more.products
        for path, count in more.moved_bytes.items():
            self.moved_bytes[path] = self.moved_bytes.get(path, 0) + count


class Simulator:
    """A lowered module, ready to launch; `text` is the compiler's dump right before vector code becomes intrinsics.

    Without `at_once` the iterations of every loop run one after the other: slower, and the same bits.
    """

    def __init__(self, text: str, at_once: bool = True) -> None:
        self.program, self.ai_core = Program(text, at_once), AiCore()

    def is_mixed(self, name: str) -> bool:
        """Whether a kernel runs on the cube core and on vector cores."""
        return f"{name}_mix_aic" in self.program.functions

    def launch(
        self, name: str, buffers: Sequence[Any], instances: int = 1, vectors_first: bool = False, blocks: Iterable[int] | None = None
    ) -> Counts:
        """Runs every block of a launch of `instances`, or only `blocks` of them, on flat or shaped arrays, written in place.

        `vectors_first` starts the vector cores before the cube core: a result that depends on it is a race. Raises `SimulationError` with
        kernel, instance and core.
        """
        counts = Counts()
        for block in range(instances) if blocks is None else blocks:
            cores = self._cores(name, block)
            if vectors_first:
                cores = cores[::-1]
            _Turns([(core, self._call(function, core, buffers, instances)) for core, function in cores], f"{name} instance {block}").run()
            for core, _ in cores:
                counts.join(core)
        return counts

    def _cores(self, name: str, block: int) -> list[tuple[Core, Function]]:
        functions, shared = self.program.functions, self.ai_core.reset()
        if name in functions:
            kind = "cube" if "AIC" in functions[name].node.attributes["hivm.func_core_type"] else "vector"
            return [(Core(kind, 0, block, shared), functions[name])]
        halves = [(f"{name}_mix_aic", "cube", 0), (f"{name}_mix_aiv", "vector", 0), (f"{name}_mix_aiv", "vector", 1)]
        found = [(Core(kind, number, block, shared), functions[half]) for half, kind, number in halves if half in functions]
        if not found:
            raise SimulationError(f"the module holds no kernel {name}; it holds {', '.join(sorted(functions))}")
        return found

    def _call(self, function: Function, core: Core, buffers: Sequence[Any], instances: int) -> Callable[[], None]:
        function.compiled()
        kinds = function.parameters
        lead = len(kinds) - len(buffers) - GRID
        values: list[Any] = [0] * (lead - LEAD) + [np.zeros(1, np.int8)] * LEAD + [*buffers, instances, 1, 1]
        bound = [_bound(kind, value) for kind, value in zip(kinds, values, strict=True)]
        return lambda: (function.call(bound, core), None)[1]


def _bound(kind: Kind, value: Any) -> Any:
    if kind.form != "memref":
        return value
    dtype, held = NUMPY[kind.element], value.reshape(-1).view(np.uint8)
    if value.size and not np.shares_memory(held, value):
        raise SimulationError("a buffer must be contiguous")
    return whole(held, dtype, [held.nbytes // dtype.itemsize], "gm")


class _Turns:
    """Runs calls as threads of which one is awake: the next in order whose condition holds. None left that can go on is a deadlock."""

    def __init__(self, calls: Sequence[tuple[Core, Callable[[], None]]], what: str) -> None:
        self.what, self.main = what, threading.Semaphore(0)
        self.error: Exception | None = None
        self.tasks = [_Task(core, call, self) for core, call in calls]

    def run(self) -> None:
        if len(self.tasks) == 1:
            self.tasks[0].alone()
        while self.error is None and not all(task.done for task in self.tasks):
            ready = [task for task in self.tasks if not task.done and task.condition()]
            if not ready:
                waiting = ", ".join(f"{task.title} waits for {task.reason}" for task in self.tasks if not task.done)
                self.error = SimulationError(f"{self.what} cannot go on: {waiting}")
                break
            ready[0].step()
        self._stop()
        if self.error is not None:
            raise self.error

    def _stop(self) -> None:
        for task in self.tasks:
            task.cancel()


class _Cancelled(BaseException):
    """Ends a thread whose launch has failed."""


class _Task:
    def __init__(self, core: Core, call: Callable[[], None], turns: _Turns) -> None:
        self.core, self.call, self.turns = core, call, turns
        self.done, self.cancelled, self.reason = False, False, "its start"
        self.condition: Callable[[], bool] = lambda: True
        self.turn = threading.Semaphore(0)
        self.title = f"{core.kind} core {core.number}"
        self.thread: threading.Thread | None = None
        core.pause = self._pause

    def alone(self) -> None:
        """Runs a lone core without a thread."""
        self.core.pause = self._never
        self._guarded()

    def step(self) -> None:
        """Lets the core run until it waits or ends."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._threaded, daemon=True)
            self.thread.start()
        else:
            self.turn.release()
        self.turns.main.acquire()

    def cancel(self) -> None:
        """Ends a core that still waits."""
        if self.thread is not None and not self.done:
            self.cancelled = True
            self.step()
        if self.thread is not None:
            self.thread.join()

    def _threaded(self) -> None:
        self._guarded()
        self.turns.main.release()

    def _guarded(self) -> None:
        try:
            with np.errstate(all="ignore"):  # NaN and overflow are values here, as on the device
                self.call()
        except _Cancelled:
            pass
        except SimulationError as error:
            self.turns.error = SimulationError(f"{self.turns.what}, {self.title}: {error}")
        except Exception as error:  # a fault of the simulator: handed to the launching thread as it is
            self.turns.error = error
        finally:
            self.done = True

    def _pause(self, condition: Callable[[], bool], reason: str) -> None:
        if condition():
            return
        self.condition, self.reason = condition, reason
        self.turns.main.release()
        self.turn.acquire()
        if self.cancelled:
            raise _Cancelled

    def _never(self, condition: Callable[[], bool], reason: str) -> None:
        if not condition():
            raise SimulationError(f"waits for {reason}, which no other core can set")
