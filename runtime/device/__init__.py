"""Devices: memory, kernels and queues behind one small interface; `cpu`, `cuda`, `ascend` and `ascend_sim` implement it, `program.py` uses it.

A device owns what it hands out until it is closed; then all but `kernel` and `close` raises DeviceClosed. Addresses are what kernels see; the
host reaches a region only through `host`, between runs only, and after `check_open` where the device may have been closed: a closed one has
given that memory back. No kernel's launch depends on a value that the device computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tapeout.runtime.artifact import Artifact

Use = Literal["device", "inputs", "results", "fetched"]
"""What a region is for: kernels alone; filled by the host and seen by the next run; back on the host after each run, or on request."""

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Region:
    """Zeroed memory that kernels reach at `address` (64-byte aligned). `host` is the host's view of it, None where it has none."""

    address: int
    host: NDArray[np.uint8] | None


@dataclass(frozen=True, slots=True)
class Call:
    """One kernel call: the device's number of the kernel, buffer addresses in order, instances by axis (None: the kernel finds its own).

    `after` says how many calls back those lie that must be through before it; None: every call in front. With no distance at all it waits for
    what the last call with None waited for.
    """

    kernel: int
    buffers: tuple[int, ...]
    grid: Grid | None = None
    after: tuple[int, ...] | None = None


class Device(Protocol):
    """What `program.py` needs of a device. `run` returns when the work is done; a table is used with the device that made it only."""

    def kernel(self, symbol: str) -> int:
        """The device's number of a kernel. Raises SymbolMissing."""

    def memory(self, size: int, what: str, use: Use = "device") -> Region:
        """`size` zeroed bytes. Raises MemoryRefused, naming `what`."""

    def place(self, array: NDArray[Any], what: str, *, by_rows: bool = False) -> int:
        """The address of a weight; `by_rows` marks a table of which a step reads few rows. The device keeps `array` alive or copies it."""

    def table(self, calls: Sequence[Call]) -> Any:
        """Calls to be run in order, or side by side where `after` allows it, packed once."""

    def run(self, table: Any, *, alone: bool = False) -> None:
        """Runs a table: regions for inputs as the host left them, regions for results on the host afterwards.

        `alone` says that the work is too short to be shared: a device of several workers then uses one, with the same bits.
        """

    def upload(self, region: Region, size: int) -> None:
        """Makes the first `size` bytes of a region what the host wrote there."""

    def download(self, region: Region, size: int) -> None:
        """Brings the first `size` bytes of a region to the host."""

    def check_open(self) -> None:
        """Raises DeviceClosed once the device is closed."""

    def close(self) -> None:
        """Gives everything back. May be called twice."""


@runtime_checkable
class Readable(Protocol):
    """A device whose memory the host can read and write between runs: what caching, branches and snapshots need."""

    def read(self, address: int, size: int) -> bytes:
        """The bytes at an address of one of the device's regions, once all runs are done."""

    def write(self, address: int, data: bytes) -> None:
        """Puts bytes at an address of one of the device's regions, before the next run."""


@runtime_checkable
class Queueing(Protocol):
    """A device that takes a table while it still runs others: what keeps it busy while the host reads one step and makes the next."""

    def table(self, calls: Sequence[Call], *, copies: bool = True) -> Any:
        """As Device.table; without `copies` for `start`."""

    def start(self, table: Any) -> Any:
        """Puts a table behind what was started before, with regions for inputs as the host leaves them: they may change once this returns."""

    def finish(self, started: Any) -> None:
        """Waits for what `start` returned; then regions for results are on the host as it left them. It may be asked again until `release`."""

    def release(self, started: Any) -> None:
        """Nobody asks for its results again."""


def open_device(
    artifact: "Artifact", workers: int | None = None, *, tables: Literal["host", "device"] = "host", simulated: bool = False
) -> Device:
    """The device that an artifact is compiled for, with its kernels loaded. Raises DeviceError.

    `workers` counts threads of a CPU. `tables` says where a GPU reads large tables: mapped from host memory, or copied to its own.
    `simulated` takes the simulator in place of an NPU.
    """
    if artifact.target == "cpu":
        from tapeout.runtime.device.cpu import CpuDevice

        return CpuDevice(artifact.library, workers)
    if artifact.manifest.npu is not None and simulated:
        from tapeout.runtime.device.ascend_sim import AscendSimDevice

        return AscendSimDevice(artifact)
    if artifact.manifest.npu is not None:
        from tapeout.runtime.device.ascend import AscendDevice

        return AscendDevice(artifact)
    from tapeout.runtime.device.cuda import CudaDevice

    return CudaDevice(artifact, tables=tables)
