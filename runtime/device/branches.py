"""Order inside a graph that is being captured: each call becomes a node behind the calls that it waits for, and behind nothing else.

The driver's capture puts everything in one line; here the line is told, before every call, which nodes the next one follows.
"""

from collections.abc import Sequence
from typing import Any

from tapeout.runtime.device import Call


def is_branching(calls: Sequence[Call]) -> bool:
    """Whether some call need not wait for all in front of it."""
    return any(call.after is not None for call in calls)


class Branching:
    """The nodes of a capture so far. `follow` before a call, `took` behind it, `join` behind the last."""

    def __init__(self, driver: Any, stream: Any) -> None:
        self._driver, self._stream = driver, stream
        self._set = int(driver.module.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES)
        self._nodes: list[Any] = []
        self._base = self._last = self._current()
        self._open: dict[int, None] = {}  # calls that nobody waits for yet
        self._waits: list[int] = []

    def follow(self, after: tuple[int, ...] | None, more: int | None = None) -> bool:
        """The next call waits for calls at these distances (None: for all), and for the one numbered `more`. Whether it waits for calls at all,
        and not for what was captured in front of them."""
        number = len(self._nodes)
        if after is None:
            self._waits = list(self._open)
            self._base = [self._nodes[i] for i in self._waits] or self._last
        else:
            self._waits = [number - distance for distance in after]
        if more is not None and more not in self._waits:
            self._waits.append(more)
        self._put([self._nodes[i] for i in self._waits] or self._base)
        return bool(self._waits) or self._base is not self._last

    def took(self) -> None:
        """The call is a node now."""
        for number in self._waits:
            self._open.pop(number, None)
        self._open[len(self._nodes)] = None
        (node,) = self._current()
        self._nodes.append(node)

    def join(self) -> None:
        """What is captured next waits for everything."""
        self._put([self._nodes[i] for i in self._open] or self._last)

    def _put(self, nodes: list[Any]) -> None:
        self._driver("cuStreamUpdateCaptureDependencies", self._stream, nodes, None, len(nodes), self._set)

    def _current(self) -> list[Any]:
        return list(self._driver("cuStreamGetCaptureInfo", self._stream)[3] or ())
