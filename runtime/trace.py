"""What happened to each request and in each step, as Trace Event JSON, which Perfetto and chrome://tracing open.

A recorder only remembers; it is asked for with `--trace FILE` or `EngineOptions.trace`. docs/runtime.md, 11.4.
"""

import json
from pathlib import Path
from typing import Any

_ENGINE, _REQUESTS = 1, 2  # process ids of the two groups of tracks


class Recorder:
    """Events of one engine in order. Times are seconds of the scheduler's clock; the first one is the zero of the trace."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._tracks: dict[str, int] = {}
        self._started: dict[tuple[str, int], float] = {}
        self._zero: float | None = None

    def arrived(self, request: str, at_s: float, prompt_tokens: int) -> None:
        """A request was submitted."""
        track = self._tracks.setdefault(request, len(self._tracks) + 1)  # an id may come again
        self._add("i", "arrived", at_s, _REQUESTS, track, s="t", args={"prompt_tokens": prompt_tokens})
        self._started[request, -1] = at_s

    def scheduled(self, request: str, branch: int, at_s: float, slot: int, preemptions: int) -> None:
        """A branch got a slot."""
        waited = self._started.pop((request, -1), at_s)
        if at_s > waited:
            self._span("waiting", waited, at_s, _REQUESTS, self._tracks.get(request, 0), {})
        self._started[request, branch] = at_s
        args = {"branch": branch, "slot": slot, "preemptions": preemptions}
        self._add("i", "scheduled", at_s, _REQUESTS, self._tracks.get(request, 0), s="t", args=args)

    def first_token(self, request: str, branch: int, at_s: float) -> None:
        """The first token of a branch was committed."""
        self._add("i", "first token", at_s, _REQUESTS, self._tracks.get(request, 0), s="t", args={"branch": branch})

    def advanced(self, request: str, branch: int, at_s: float, tokens: int) -> None:
        """A step of a branch was committed: `tokens` is its accepted drafts and one."""
        self._add("C", f"{request} branch {branch} tokens a step", at_s, _REQUESTS, self._tracks.get(request, 0), args={"tokens": tokens})

    def preempted(self, request: str, branch: int, at_s: float) -> None:
        """A branch lost its slot."""
        self._run_ends(request, branch, at_s, "preempted")

    def finished(self, request: str, at_s: float, reason: str, tokens: int) -> None:
        """A request ended."""
        for name, branch in [key for key in self._started if key[0] == request]:
            self._run_ends(name, branch, at_s, reason)
        self._add("i", "finished", at_s, _REQUESTS, self._tracks.get(request, 0), s="t", args={"reason": reason, "tokens": tokens})

    def stepped(self, number: int, from_s: float, to_s: float, decode_rows: int, prompt_rows: int, tokens: int) -> None:
        """A step was proposed at `from_s` and committed at `to_s`."""
        args = {"decode_rows": decode_rows, "prompt_rows": prompt_rows, "tokens": tokens}
        self._span(f"step {number}", from_s, to_s, _ENGINE, 1 + number % 2, args)

    def document(self) -> dict[str, Any]:
        """The whole trace as Trace Event JSON."""
        names = [_named(_ENGINE, None, "engine"), _named(_REQUESTS, None, "requests")]
        names += [_named(_REQUESTS, track, request) for request, track in self._tracks.items()]
        return {"traceEvents": [*names, *self._events], "displayTimeUnit": "ms"}

    def write(self, file: str | Path) -> None:
        """Writes the trace to a file."""
        Path(file).write_text(json.dumps(self.document()))

    def _run_ends(self, request: str, branch: int, at_s: float, why: str) -> None:
        since = self._started.pop((request, branch), None)
        if since is not None:
            self._span("waiting" if branch < 0 else "running", since, at_s, _REQUESTS, self._tracks.get(request, 0), {"end": why})

    def _span(self, name: str, from_s: float, to_s: float, process: int, track: int, args: dict[str, Any]) -> None:
        self._add("X", name, from_s, process, track, dur=round((to_s - from_s) * 1e6, 3), args=args)

    def _add(self, phase: str, name: str, at_s: float, process: int, track: int, **more: Any) -> None:
        if self._zero is None:
            self._zero = at_s
        self._events.append({"ph": phase, "name": name, "ts": round((at_s - self._zero) * 1e6, 3), "pid": process, "tid": track, **more})


def _named(process: int, track: int | None, name: str) -> dict[str, Any]:
    kind = "process_name" if track is None else "thread_name"
    return {"ph": "M", "name": kind, "pid": process, "tid": track or 0, "args": {"name": name}}
