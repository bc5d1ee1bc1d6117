"""The device `ascend-sim`: an Ascend artifact executed by the functional simulator of its lowered modules. Slow, exact, and needs no NPU.

Memory is the host's. A buffer reaches from its address to the end of the allocation that it lies in, so an access behind that is refused;
local memories are checked buffer by buffer. Kernels walk their own grids, so a launch of fewer blocks leaves the same bits.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapeout.runtime.artifact import Artifact
from tapeout.runtime.artifact_kernels import Kernel
from tapeout.runtime.device import Call, Region, Use
from tapeout.runtime.device.ascend_simulator import Counts, SimulationError, Simulator
from tapeout.runtime.device.host_side import number_of
from tapeout.runtime.device.memory import address, zeroed
from tapeout.runtime.errors import ChipMismatch, DeviceClosed, SimulatedFault, SymbolMissing

BLOCKS = 2
"""Blocks that a launch is simulated with, so that kernels walk."""


@dataclass(frozen=True)
class SimulatedCall:
    """A kernel by number, its buffers as bytes, and the blocks it is launched with."""

    kernel: int
    buffers: tuple[NDArray[np.uint8], ...]
    blocks: int


class AscendSimDevice:
    """The simulator behind the device interface. Modules are read when their kernel first runs, and kept."""

    def __init__(self, artifact: Artifact) -> None:
        if artifact.manifest.npu is None:
            raise ChipMismatch(f"{artifact.directory}: npu", "no chip", "an Ascend chip", remedy="give another --device")
        self._place = artifact.directory
        self._kernels: tuple[Kernel, ...] = artifact.manifest.kernels
        self._numbers = {kernel.symbol: number for number, kernel in enumerate(self._kernels)}
        self._simulators: dict[int, Simulator] = {}
        self._starts: list[int] = []
        self._allocations: list[NDArray[np.uint8]] = []
        self._is_closed = False
        self.counts: dict[str, Counts] = {}
        """What has been executed, by kernel."""

    def kernel(self, symbol: str) -> int:
        """The number of a kernel. Raises SymbolMissing."""
        return number_of(symbol, self._numbers, self._place)

    def memory(self, size: int, what: str, use: Use = "device") -> Region:
        """Zeroed bytes of the host. Raises MemoryRefused."""
        self.check_open()
        raw = zeroed(size, what)
        self._know(raw)
        return Region(address(raw), raw)

    def place(self, array: NDArray[Any], what: str, *, by_rows: bool = False) -> int:
        """The address of the array itself."""
        self.check_open()
        self._know(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        return self._starts[self._last]

    def _know(self, raw: NDArray[np.uint8]) -> None:
        start = address(raw)
        self._last = bisect_right(self._starts, start)
        self._starts.insert(self._last, start)
        self._allocations.insert(self._last, raw)

    def _from(self, start: int) -> NDArray[np.uint8]:
        """The bytes from an address to the end of its allocation."""
        number = bisect_right(self._starts, start) - 1
        return self._allocations[number][start - self._starts[number] :]

    def table(self, calls: Sequence[Call]) -> tuple[SimulatedCall, ...]:
        """Calls with their buffers found."""
        self.check_open()
        return tuple(
            SimulatedCall(call.kernel, tuple(map(self._from, call.buffers)), min(BLOCKS, call.grid[0] if call.grid else 1)) for call in calls
        )

    def run(self, table: tuple[SimulatedCall, ...], *, alone: bool = False) -> None:
        """Simulates calls in order. Raises SimulatedFault where a kernel does what it may not."""
        self.check_open()
        for call in table:
            kernel = self._kernels[call.kernel]
            try:
                counts = self.simulator(call.kernel).launch(kernel.symbol, call.buffers, call.blocks)
            except SimulationError as error:
                raise SimulatedFault(f"{self._place}: {kernel.symbol}", str(error), "accesses inside its buffers") from None
            self.counts.setdefault(kernel.symbol, Counts()).join(counts)

    def simulator(self, number: int) -> Simulator:
        """The simulator of a kernel, read from the artifact once."""
        if number not in self._simulators:
            lowered = self._kernels[number].lowered
            path = Path(self._place) / (lowered.simulated if lowered else "")
            if lowered is None:
                raise SymbolMissing(str(self._place), f"{self._kernels[number].symbol} without a module", "a lowered module of each kernel")
            self._simulators[number] = Simulator(path.read_text())
        return self._simulators[number]

    def upload(self, region: Region, size: int) -> None:
        """Nothing: the memory is shared."""
        self.check_open()

    def download(self, region: Region, size: int) -> None:
        """Nothing: the memory is shared."""
        self.check_open()

    def check_open(self) -> None:
        """Raises DeviceClosed."""
        if self._is_closed:
            raise DeviceClosed("device ascend-sim")

    def close(self) -> None:
        """Forgets modules and memory. May be called twice."""
        self._is_closed = True
        self._simulators.clear()
        self._starts.clear()
        self._allocations.clear()
