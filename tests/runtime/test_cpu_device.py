"""The CPU device with kernels of a few lines of C: addresses, order, barriers between launches, workers."""

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tapeout.runtime.device import Call
from tapeout.runtime.device.cpu import CpuDevice, LaunchTable, launch_table
from tapeout.runtime.device.memory import address, typed, zeroed
from tapeout.runtime.errors import DeviceClosed, LibraryUnloadable, MemoryRefused, SymbolMissing, WorkersRefused
from tests.runtime.toy import library


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("library") / "libtapeout.so"
    path.write_bytes(library())
    return path


@pytest.fixture(params=[1, 2, 3])
def device(path: Path, request: pytest.FixtureRequest) -> Iterator[CpuDevice]:
    device = CpuDevice(path, request.param)
    yield device
    device.close()


def int32(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def addition(device: CpuDevice, a: np.ndarray, b: np.ndarray, out: np.ndarray, count: np.ndarray) -> LaunchTable:
    return launch_table([device.kernel("toy_add")], [[address(x) for x in (a, b, out, count)]])


def test_one_kernel(device: CpuDevice) -> None:
    a, b, out, count = int32([1, 2, 3, 4, 5]), int32([10, 20, 30, 40, 50]), int32([0] * 5), int32([4])
    device.run(addition(device, a, b, out, count))
    assert out.tolist() == [11, 22, 33, 44, 0], "the run-time count bounds the work"
    count[0] = 0
    out[:] = 7
    device.run(addition(device, a, b, out, count))
    assert out.tolist() == [7] * 5


def shifts(device: CpuDevice, a: np.ndarray, b: np.ndarray, count: np.ndarray, launches: int) -> LaunchTable:
    """a to b, b to a, ...: each element needs a neighbour's from the launch before."""
    pairs = [(a, b) if i % 2 == 0 else (b, a) for i in range(launches)]
    return launch_table([device.kernel("toy_shift")] * launches, [[address(x), address(y), address(count)] for x, y in pairs])


def test_launches_run_in_order_with_a_barrier_between(device: CpuDevice) -> None:
    n, launches = 7, 200
    a, b, count = int32(list(range(0, 100 * n, 100))), int32([0] * n), int32([n])
    expected = np.roll(a, -launches) + launches
    table = shifts(device, a, b, count, launches)
    device.run(table)
    assert a.tolist() == expected.tolist()
    device.run(table)  # the barrier starts afresh
    assert a.tolist() == (np.roll(expected, -launches) + launches).tolist()


def test_calls_of_many_kernels_are_one_table(device: CpuDevice) -> None:
    a, b, c, count = int32([1, 2, 3]), int32([4, 5, 6]), int32([0, 0, 0]), int32([3])
    add, shift = device.kernel("toy_add"), device.kernel("toy_shift")
    x, y, z, n = (address(array) for array in (a, b, c, count))
    table = device.table([Call(add, (x, y, z, n)), Call(shift, (z, x, n)), Call(shift, (x, z, n)), Call(add, (x, z, y, n), (1, 1, 1))])
    device.run(table)
    single = int32([5, 7, 9])
    shifted = np.roll(single, -1) + 1  # into a, and once more into c
    again = np.roll(shifted, -1) + 1
    assert (a.tolist(), c.tolist(), b.tolist()) == (shifted.tolist(), again.tolist(), (shifted + again).tolist())
    assert table.count == 4


def test_memory_is_shared_with_the_host(device: CpuDevice) -> None:
    for use in ("device", "inputs", "results", "fetched"):
        region = device.memory(64, "test", use)
        assert region.host is not None and region.address == address(region.host) and not region.host.any()
        device.upload(region, 64)
        device.download(region, 64)
    array = int32([1, 2])
    assert device.place(array, "weight", by_rows=True) == address(array)


RECORDER = """
#include <stdint.h>
void tapeout_execute(const void *launches, int64_t count, int64_t worker, int64_t workers, int64_t *barrier) {
  int64_t *seen = ((int64_t ***)launches)[1][0] + 4 * worker;
  seen[0] = count; seen[1] = worker; seen[2] = workers;
  for (int i = 0; i < 8; i++) { seen[3] += worker ? 0 : barrier[i]; barrier[i] = 9; }
}
"""


def test_each_worker_makes_one_call_with_a_zeroed_barrier(tmp_path: Path) -> None:
    (tmp_path / "recorder.c").write_text(RECORDER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / "recorder.so"), str(tmp_path / "recorder.c")], check=True)
    device, seen = CpuDevice(tmp_path / "recorder.so", 1), np.zeros((3, 4), dtype=np.int64)
    table = launch_table([0, 0], [[address(seen)], []])
    for _ in range(2):
        device.run(table)
        assert seen.tolist() == [[2, 0, 1, 0], [0] * 4, [0] * 4]
    device.close()
    device = CpuDevice(tmp_path / "recorder.so", 3)
    device.run(table)
    assert seen[:, :3].tolist() == [[2, 0, 3], [2, 1, 3], [2, 2, 3]]
    device.close()


def test_an_empty_table_does_nothing(device: CpuDevice) -> None:
    device.run(launch_table([], []))


def test_concurrent_callers_take_turns(device: CpuDevice) -> None:
    n = 5
    buffers = [(int32([i] * n), int32([0] * n), int32([n])) for i in range(4)]
    tables = [shifts(device, *each, 100) for each in buffers]
    threads = [threading.Thread(target=device.run, args=(table,)) for table in tables]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each[0].tolist() for each in buffers] == [[i + 100] * n for i in range(4)]


def test_a_close_that_meets_a_run_waits_for_it(path: Path) -> None:
    """It comes when the run has asked whether the device is open and has not handed its entry over yet, which would then wait for ever."""
    n, device = 5, CpuDevice(path, 2)
    queue, buffers = device._queues[0], (int32([2] * n), int32([0] * n), int32([n]))
    table, closing = shifts(device, *buffers, 100), threading.Thread(target=device.close)

    class Meeting:
        def put(self, item: Any) -> None:
            closing.start()
            closing.join(0.1)
            queue.put(item)

    device._queues[0] = Meeting()  # type: ignore[call-overload]
    running = threading.Thread(target=device.run, args=(table,), daemon=True)
    running.start()
    running.join(10)
    assert not running.is_alive() and buffers[0].tolist() == [102] * n
    closing.join(10)
    with pytest.raises(DeviceClosed):
        device.run(table)


def test_abandoned_devices_end_their_threads(path: Path) -> None:
    before = threading.active_count()
    device = CpuDevice(path, 3)
    threads = device._threads
    assert threading.active_count() == before + 3
    del device
    for thread in threads:
        thread.join(timeout=5)
        assert not thread.is_alive()


class Interrupted:
    """A queue of which one call is interrupted: before it, or just behind it."""

    def __init__(self, queue: Any, call: str, is_behind: bool) -> None:
        self._queue, self._interrupts, self._is_behind = queue, [call], is_behind

    def _called(self, name: str, *arguments: Any) -> Any:
        interrupts = name in self._interrupts
        if interrupts:
            self._interrupts.remove(name)
        found = None if interrupts and not self._is_behind else getattr(self._queue, name)(*arguments)
        if interrupts:
            raise KeyboardInterrupt
        return found

    def get(self) -> Any:
        return self._called("get")

    def put(self, item: Any) -> None:
        self._called("put", item)


@pytest.mark.parametrize(("queue", "call", "is_behind"), [("_done", "get", False), ("_done", "get", True), ("_queues", "put", True)])
def test_an_interrupt_is_raised_when_every_worker_is_through(path: Path, queue: str, call: str, is_behind: bool) -> None:
    """The device is then as good as before: no worker waits at a barrier for one that never comes."""
    device = CpuDevice(path, 2)
    a, b, out, count = int32([1, 2, 3]), int32([10, 20, 30]), int32([0, 0, 0]), int32([3])
    table = launch_table([device.kernel("toy_add")], [[address(a), address(b), address(out), address(count)]])
    if queue == "_done":
        device._done = Interrupted(device._done, call, is_behind)  # type: ignore[assignment]
    else:
        device._queues[0] = Interrupted(device._queues[0], call, is_behind)  # type: ignore[call-overload]
    with pytest.raises(KeyboardInterrupt):
        device.run(table)
    assert out.tolist() == [11, 22, 33], "the entry has ended"
    for i in range(3):
        a[:] = i
        device.run(table)
        assert out.tolist() == [10 + i, 20 + i, 30 + i]
    device.close()


def test_workers_that_the_system_does_not_start(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on threads: those that were started end again, and the sentence says how many."""
    before, start = set(threading.enumerate()), threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name == "tapeout-2":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(WorkersRefused) as caught:
        CpuDevice(path, 4)
    assert str(caught.value) == (
        "[D103] the number of workers is refused - workers - found 4, of which the system starts 2 (can't start new thread), expected as many "
        "threads as it starts - give fewer workers, or allow the process more threads and memory"
    )
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("workers", [0, -1, 257, True, 1.0, "2"])
def test_workers_are_checked(path: Path, workers: object) -> None:
    with pytest.raises(WorkersRefused, match="expected 1 to 256"):
        CpuDevice(path, workers)  # type: ignore[arg-type]


def test_libraries_are_checked(path: Path, tmp_path: Path) -> None:
    with pytest.raises(SymbolMissing, match="no symbol toy_nothing"):
        CpuDevice(path, 1).kernel("toy_nothing")
    with pytest.raises(LibraryUnloadable, match=r"\[D101\]"):
        CpuDevice(tmp_path / "none.so", 1)
    (tmp_path / "text.so").write_text("not a library")
    with pytest.raises(LibraryUnloadable, match=r"\[D101\]"):
        CpuDevice(tmp_path / "text.so", 1)
    (tmp_path / "empty.c").write_text("int nothing;\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / "empty.so"), str(tmp_path / "empty.c")], check=True)
    with pytest.raises(SymbolMissing, match="tapeout_execute"):
        CpuDevice(tmp_path / "empty.so", 1)


def test_memory_is_aligned_and_zeroed() -> None:
    for size in (0, 1, 63, 64, 65, 1000):
        raw = zeroed(size, "test")
        assert address(raw) % 64 == 0 and len(raw) >= max(size, 1) and not raw.any()
    view = typed(zeroed(100, "test"), "bf16", (5, 10))
    assert view.shape == (5, 10) and view.dtype.itemsize == 2
    with pytest.raises(MemoryRefused, match="state x"):
        zeroed(1 << 60, "state x")
