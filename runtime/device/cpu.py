"""The CPU device: a kernel library, launch tables, and a queue served by worker threads.

Each worker makes one native call for a queue entry; the library splits every kernel's grid by worker number and puts a barrier
between launches, so no Python runs inside an entry. The calling thread is worker 0. Tables hold raw addresses: whoever makes one
keeps its buffers alive (`program.py` does).
"""

import ctypes
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from tapeout.runtime.device import Call, Region, Use
from tapeout.runtime.device.memory import address, zeroed
from tapeout.runtime.errors import LibraryUnloadable, SymbolMissing, WorkersRefused

BARRIER_CELLS = 8  # int64, zero at the start of each entry
MOST_WORKERS = 256

Work = SimpleQueue["tuple[int, int] | None"]


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
        self._lock = threading.Lock()
        self._done: SimpleQueue[None] = SimpleQueue()
        self._queues: list[Work] = [SimpleQueue() for _ in range(self.workers - 1)]
        self._threads = [
            threading.Thread(target=_serve, args=(queue, self._done, self._call(worker)), name=f"tapeout-{worker}", daemon=True)
            for worker, queue in enumerate(self._queues, start=1)
        ]
        for thread in self._threads:
            thread.start()
        self._stop = weakref.finalize(self, _stop, self._queues)

    def kernel(self, symbol: str) -> int:
        """The address of a kernel. Raises SymbolMissing."""
        try:
            function = getattr(self._library, symbol)
        except AttributeError:
            raise SymbolMissing(str(self._path), f"no symbol {symbol}", "every kernel of the manifest") from None
        return ctypes.cast(function, ctypes.c_void_p).value or 0

    def memory(self, size: int, what: str, use: Use = "device") -> Region:
        """Zeroed bytes that host and kernels share. Raises MemoryRefused."""
        raw = zeroed(size, what)
        self._memory.append(raw)
        return Region(address(raw), raw)

    def place(self, array: NDArray[np.generic], what: str, *, by_rows: bool = False) -> int:
        """The address of the array itself: kernels read it where it lies. Whoever made it keeps it alive."""
        return address(array)

    def table(self, calls: Sequence[Call]) -> LaunchTable:
        """Packs calls; kernels compute their own grids."""
        return launch_table([call.kernel for call in calls], [call.buffers for call in calls])

    def upload(self, region: Region, size: int) -> None:
        """Nothing: the memory is shared."""

    def download(self, region: Region, size: int) -> None:
        """Nothing: the memory is shared."""

    def run(self, table: LaunchTable) -> None:
        """Executes a table on all workers and returns when the last one is through."""
        if not table.count:
            return
        if not self._stop.alive:
            raise WorkersRefused("run", "a closed device", "an open one", remedy="make another engine")
        start, count = address(table.launches), table.count
        with self._lock:
            self._barrier[:] = 0
            if not self._queues:
                self._execute(start, count, 0, 1, self._barrier_address)
                return
            for queue in self._queues:
                queue.put((start, count))
            try:
                self._execute(start, count, 0, self.workers, self._barrier_address)
            finally:
                for _ in self._queues:
                    self._done.get()

    def close(self) -> None:
        """Ends the workers; further runs are not allowed. May be called twice."""
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

    def __call__(self, start: int, count: int) -> None:
        self._execute(start, count, self._worker, self._workers, self._address)


def _serve(queue: Work, done: "SimpleQueue[None]", call: NativeCall) -> None:
    while (item := queue.get()) is not None:
        call(*item)
        done.put(None)


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
