"""The CPU device: a kernel library, launch tables, and a queue served by worker threads.

Each worker makes one native call for a queue entry; the library splits every kernel's grid by worker number and puts a barrier
between launches, so no Python runs inside an entry. Tables hold raw addresses: whoever makes one keeps its buffers alive
(`program.py` does).
"""

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from tapeout.runtime.device import Call, Region, Use
from tapeout.runtime.device.memory import address, zeroed
from tapeout.runtime.errors import DeviceClosed, LibraryUnloadable, SymbolMissing, WorkersRefused

BARRIER_CELLS = 8  # int64, zero at the start of each entry
MOST_WORKERS = 256

Work = SimpleQueue["tuple[int, int, int] | None"]  # address of a table, launches, number of the entry


@dataclass(frozen=True)
class LaunchTable:
    """Launches as the library reads them: [n, 2] of kernel address and address of its row of buffer addresses."""

    launches: NDArray[np.uint64]
    buffers: NDArray[np.uint64]

    @property
    def count(self) -> int:
        return len(self.launches)


def launch_table(kernels: Sequence[int], buffers: Sequence[Sequence[int]]) -> LaunchTable:
    """Packs kernel addresses and, for each, its buffer addresses."""
    flat = np.array([cell for row in buffers for cell in (row or (0,))], dtype=np.uint64)
    widths = [max(len(row), 1) for row in buffers]
    starts = np.concatenate(([0], np.cumsum(widths)))[:-1].astype(np.uint64)
    launches = np.empty((len(kernels), 2), dtype=np.uint64)
    launches[:, 0] = kernels
    launches[:, 1] = np.uint64(address(flat)) + starts * np.uint64(8) if len(kernels) else 0
    return LaunchTable(launches, flat)


class CpuDevice:
    """A loaded kernel library and its workers. `run` is a FIFO of one: it returns when all workers are through."""

    def __init__(self, library: Path, workers: int | None = None) -> None:
        self.workers = _checked_workers(workers)
        self._library = _load(library)
        self._execute = self._library.tapeout_execute
        self._execute.restype = None
        self._execute.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
        self._barrier = zeroed(8 * BARRIER_CELLS, "barrier").view(np.int64)
        self._barrier_address = address(self._barrier)
        self._path = library
        self._memory: list[NDArray[np.uint8]] = []
        self._placed: list[NDArray[np.generic]] = []
        self._lock = threading.Lock()
        self._asked = 0  # entries handed to the workers, and so the number of the last one
        self._ended = [0]  # the number of the last one that is through; `_done` only wakes who waits for it
        self._done: SimpleQueue[None] = SimpleQueue()
        self._queues: list[Work] = [SimpleQueue() for _ in range(self.workers if self.workers > 1 else 0)]
        calls = [self._call(worker) for worker in range(len(self._queues))]
        self._threads = [threading.Thread(target=target, args=arguments, name=f"tapeout-{worker}", daemon=True)
                         for worker, (target, arguments) in enumerate(_crew(self._queues, calls, self._ended, self._done))]  # fmt: skip
        self._stop = weakref.finalize(self, _stop, self._queues[:1])
        self._start()

    def _start(self) -> None:
        """Starts the workers; where the system refuses one, those in front of it end again. Raises WorkersRefused."""
        for number, thread in enumerate(self._threads):
            try:
                thread.start()
            except RuntimeError as error:
                self._stop()
                for started in self._threads[:number]:
                    started.join()
                raise WorkersRefused("workers", f"{self.workers}, of which the system starts {number} ({error})", "as many threads as it starts",
                                     remedy="give fewer workers, or allow the process more threads and memory") from None  # fmt: skip

    def kernel(self, symbol: str) -> int:
        """The address of a kernel. Raises SymbolMissing."""
        try:
            function = getattr(self._library, symbol)
        except AttributeError:
            raise SymbolMissing(str(self._path), f"no symbol {symbol}", "every kernel of the manifest") from None
        return ctypes.cast(function, ctypes.c_void_p).value or 0

    def memory(self, size: int, what: str, use: Use = "device") -> Region:
        """Zeroed bytes that host and kernels share. Raises MemoryRefused."""
        self.check_open()
        raw = zeroed(size, what)
        self._memory.append(raw)
        return Region(address(raw), raw)

    def place(self, array: NDArray[np.generic], what: str, *, by_rows: bool = False) -> int:
        """The address of the array itself: kernels read it where it lies."""
        self.check_open()
        self._placed.append(array)
        return address(array)

    def table(self, calls: Sequence[Call]) -> LaunchTable:
        """Packs calls; kernels compute their own grids."""
        self.check_open()
        return launch_table([call.kernel for call in calls], [call.buffers for call in calls])

    def upload(self, region: Region, size: int) -> None:
        """Nothing: the memory is shared."""
        self.check_open()

    def download(self, region: Region, size: int) -> None:
        """Nothing: the memory is shared."""
        self.check_open()

    def read(self, address: int, size: int) -> bytes:
        """Bytes of a region."""
        self.check_open()
        return ctypes.string_at(address, size)

    def write(self, address: int, data: bytes) -> None:
        """Bytes into a region."""
        self.check_open()
        ctypes.memmove(address, data, len(data))

    def run(self, table: LaunchTable, *, alone: bool = False) -> None:
        """Executes a table and returns when the last worker is through; `alone` keeps it on the calling thread, with the same bits.

        An interrupt is raised after the entry has ended on every worker, so that the device can be used again.
        """
        start, count = address(table.launches), table.count
        with self._lock:
            self.check_open()
            if not count:
                return
            if alone or not self._queues:
                self._barrier[:] = 0
                self._execute(start, count, 0, 1, self._barrier_address)
                return
            self._share(start, count)

    def _share(self, start: int, count: int) -> None:
        """Hands an entry to the workers and waits for its end, whatever interrupts come meanwhile; raises the first of them afterwards."""
        interrupt: BaseException | None = None
        self._asked += 1
        try:
            self._queues[0].put((start, count, self._asked))
        except KeyboardInterrupt as error:  # raised behind the call: the entry is on its way
            interrupt = error
        while True:
            try:
                self._done.get()
            except BaseException as error:
                interrupt = interrupt or error
            if self._ended[0] == self._asked:
                break
        if interrupt is not None:
            raise interrupt

    def check_open(self) -> None:
        """Raises DeviceClosed."""
        if not self._stop.alive:
            raise DeviceClosed("device cpu")

    def close(self) -> None:
        """Ends the workers; further runs are not allowed. May be called twice."""
        with self._lock:  # an entry that another thread hands over must not come behind the end
            self._stop()
        for thread in self._threads:
            thread.join()

    def _call(self, worker: int) -> "NativeCall":
        return NativeCall(self._execute, worker, self.workers, self._barrier)


class NativeCall:
    """The native call of one worker; holds no reference to the device, so that an abandoned device can be collected."""

    def __init__(self, execute: "ctypes._NamedFuncPointer", worker: int, workers: int, barrier: NDArray[np.int64]) -> None:
        self._execute, self._worker, self._workers = execute, worker, workers
        self._barrier = barrier
        self._address = address(barrier)

    def clear(self) -> None:
        """Opens the barrier's first round; only while no worker is in a call."""
        self._barrier[:] = 0

    def __call__(self, start: int, count: int) -> None:
        self._execute(start, count, self._worker, self._workers, self._address)


Crew = list[tuple[Callable[..., None], tuple[object, ...]]]


def _crew(queues: Sequence[Work], calls: Sequence[NativeCall], ended: list[int], done: "SimpleQueue[None]") -> Crew:
    """What each worker's thread runs: worker 0 hands entries on and reports their end, so that an interrupted caller leaves none half begun."""
    if not queues:
        return []
    through: SimpleQueue[None] = SimpleQueue()
    follow: Crew = [(_follow, (queue, through, call)) for queue, call in zip(queues[1:], calls[1:], strict=True)]
    return [(_lead, (queues[0], queues[1:], through, calls[0], ended, done)), *follow]


def _lead(queue: Work, others: Sequence[Work], through: "SimpleQueue[None]", call: NativeCall, ended: list[int],
          done: "SimpleQueue[None]") -> None:  # fmt: skip
    while (item := queue.get()) is not None:
        start, count, number = item
        call.clear()
        for other in others:
            other.put(item)
        call(start, count)
        for _ in others:
            through.get()
        ended[0] = number
        done.put(None)
    for other in others:
        other.put(None)


def _follow(queue: Work, through: "SimpleQueue[None]", call: NativeCall) -> None:
    while (item := queue.get()) is not None:
        call(*item[:2])
        through.put(None)


def _stop(queues: Sequence[Work]) -> None:
    for queue in queues:
        queue.put(None)


def available_processors() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _checked_workers(workers: int | None) -> int:
    if workers is None:
        return min(available_processors(), MOST_WORKERS)
    if type(workers) is not int or not 1 <= workers <= MOST_WORKERS:
        raise WorkersRefused("workers", repr(workers), f"1 to {MOST_WORKERS}")
    return workers


def _load(library: Path) -> ctypes.CDLL:
    try:
        loaded = ctypes.CDLL(str(library.resolve()))
        loaded.tapeout_execute  # noqa: B018
    except OSError as error:
        raise LibraryUnloadable(str(library), str(error), "a shared library for this machine") from None
    except AttributeError:
        raise SymbolMissing(str(library), "no symbol tapeout_execute", "the launch loop of the target") from None
    return loaded
