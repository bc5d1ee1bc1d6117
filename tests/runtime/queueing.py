"""A CPU device with a queue, for tests: work is done when somebody waits for it and not before, on inputs as they were when it was started, and
what it leaves on the host is seen behind `finish` alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tapeout.runtime import engine
from tapeout.runtime.device import Call, Region, Use
from tapeout.runtime.device.cpu import CpuDevice

POISON = 0x7F


def put_behind_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines over the CPU find a device with a queue."""
    monkeypatch.setattr(engine, "open_device", lambda artifact, workers, simulated: QueueingCpu(artifact.library, workers))


class Work:
    """A started table: its inputs, and its results once it is through."""

    def __init__(self, table: Any, inputs: list[NDArray[np.uint8]]) -> None:
        self.table, self.inputs = table, inputs
        self.results: list[NDArray[np.uint8]] | None = None
        self.is_released = False


class QueueingCpu(CpuDevice):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._regions: dict[str, list[NDArray[np.uint8]]] = {"inputs": [], "results": []}
        self.queue: list[Work] = []
        self.most = 0  # tables that waited at a time

    def memory(self, size: int, what: str, use: Use = "device") -> Region:
        region = super().memory(size, what, use)
        if use in self._regions:
            assert region.host is not None
            self._regions[use].append(region.host)
        return region

    def table(self, calls: Sequence[Call], *, copies: bool = True) -> Any:
        return super().table(calls)

    def start(self, table: Any) -> Work:
        work = Work(table, [region.copy() for region in self._regions["inputs"]])
        self.queue.append(work)
        self.most = max(self.most, len(self.queue))
        for region in self._regions["results"]:
            region[:] = POISON  # whoever reads results now has not waited for them
        return work

    def finish(self, started: Work) -> None:
        assert not started.is_released, "another table may have its memory"
        while started.results is None:
            self._oldest()
        for region, left in zip(self._regions["results"], started.results, strict=True):
            region[:] = left

    def release(self, started: Work) -> None:
        assert started.results is not None and not started.is_released
        started.is_released = True

    def _oldest(self) -> None:
        """Does the oldest work; what the host has written since then is the next one's and stays."""
        work, regions = self.queue[0], [*self._regions["inputs"], *self._regions["results"]]
        kept = [region.copy() for region in regions]
        for region, given in zip(self._regions["inputs"], work.inputs, strict=True):
            region[:] = given
        CpuDevice.run(self, work.table)
        work.results = [region.copy() for region in self._regions["results"]]
        self.queue.pop(0)
        for region, own in zip(regions, kept, strict=True):
            region[:] = own

    def run(self, table: Any, *, alone: bool = False) -> None:
        """Behind all that was started; drafts are run so, when their step is through."""
        while self.queue:
            self._oldest()
        super().run(table, alone=alone)

    def write(self, address: int, data: bytes) -> None:
        assert not self.queue, "states are written when all work is done"
        super().write(address, data)
