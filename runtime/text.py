"""Text of a sequence as its tokens come: stop strings are found, and nothing is given out that may yet turn out to be part of one.

Works on characters, not tokens: a stop string may begin inside one token and end inside another. Where characters come from, and that
they are whole, is the detokenizer's business (`models`). docs/runtime.md, 1.4.
"""

from collections.abc import Callable, Sequence
from typing import Protocol


class TokenStream(Protocol):
    """Tokens in, whole characters out."""

    def push(self, token: int) -> str: ...

    def finish(self) -> str: ...


Detokenizer = Callable[[], TokenStream]
"""Gives a fresh stream."""


class StopText:
    """The text of one sequence. `text` is what it is known to say; `stop` the string that ended it."""

    def __init__(self, stream: TokenStream, stops: Sequence[str]) -> None:
        self._stream, self._stops = stream, tuple(stops)
        self._hold = max(map(len, stops), default=1) - 1
        self._pieces: list[str] = []
        self._tail = ""
        self.stop: str | None = None

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._pieces)

    def push(self, token: int) -> str:
        """Text that can no longer be part of a stop string. After a stop string is complete, nothing more."""
        return self._take(self._stream.push(token), self._hold)

    def finish(self) -> str:
        """What was held back, once no token follows."""
        return self._take(self._stream.finish(), 0)

    def _take(self, fresh: str, hold: int) -> str:
        if self.stop is not None:
            return ""
        self._tail += fresh
        found = [(place, -len(stop), stop) for stop in self._stops if (place := self._tail.find(stop)) >= 0]
        if found:
            place, _, self.stop = min(found)
            return self._give(self._tail[:place], "")
        keep = min(hold, len(self._tail))
        return self._give(self._tail[: len(self._tail) - keep], self._tail[len(self._tail) - keep :])

    def _give(self, text: str, tail: str) -> str:
        self._tail = tail
        if text:
            self._pieces.append(text)
        return text
