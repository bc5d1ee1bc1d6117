"""One training or decoding step as a CUDA graph; on a CPU, a plain call.

A captured step reads and writes the same buffers at every call, so its inputs are tensors that the caller fills before. Warm-up
calls happen at construction and do real work: callers set learning rates to zero for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

R = TypeVar("R")
_WARM_UPS = 3


class Captured(Generic[R]):
    """Calling it repeats the step; the result's tensors are overwritten by the next call."""

    def __init__(self, step: Callable[[], R], device: torch.device) -> None:
        self._step = step
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._capture()

    def __call__(self) -> R:
        if self._graph is None:
            return self._step()
        self._graph.replay()
        return self._result

    def _capture(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._result = self._step()
        self._graph = graph
