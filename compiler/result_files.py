"""Where results of a run go while it is under way, so that none is lost however it ends. docs/runtime.md, 11.6.

`--out FILE`: each result is a line of FILE.partial as soon as it is there, in the order in which requests end; FILE itself is written whole, in
input order and with totals, when all have ended. Standard output: in input order, each as soon as all before it are there.
"""

import fcntl
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from tapeout.compiler.errors import FileRefused, SettingsError
from tapeout.compiler.files import check_output, is_written_whole, read_bytes, reason, write_text
from tapeout.compiler.prompts import Asked, Refused
from tapeout.compiler.result_lines import GOOD_ENDS, Ended, Line, is_good, is_result, json_text, result_line
from tapeout.runtime.request import RequestOutput

PARTIAL = ".partial"
SAME = "the same artifact, weights, prompts, parameters and replay"


class Results(Protocol):
    """What takes the results of one run."""

    def whole(self, run: Callable[[], str]) -> Mapping[str, Line] | None:
        """Results by request where an earlier run of that name, from which this one is to go on, has a good one of each; nothing is added then.

        Called first of all. Raises FileRefused for results of another run.
        """

    def begin(self, run: str) -> Mapping[str, Line]:
        """Called once, when nothing is refused any more: good results of an interrupted run of that name, by request. Raises FileRefused."""

    def add(self, place: int, result: Ended) -> None:
        """The result of a request, once each, in any order."""

    def end(self, totals: Line) -> None:
        """All results are there. Raises FileRefused."""

    def give_up(self) -> list[str]:
        """The run has failed: what is there is kept. Sentences that say where; raises nothing."""


def results_to(out: Path | None, asked: Sequence[Asked | Refused], *, as_json: bool, resume: bool) -> Results:
    """Raises FileRefused where `out` cannot be written or results of an interrupted run would be lost, and SettingsError."""
    if out is not None:
        check_output(out, "--out")
        if is_written_whole(out):
            return Kept(out, asked, resume)
    if resume:
        expected = "--out FILE with a regular file, as a run goes on from its FILE.partial"
        raise SettingsError([f"--resume: found {f'--out {out}' if out is not None else 'no --out'}, expected {expected}"])
    return Printed(asked, as_json) if out is None else Held(out, asked)


class Printed:
    """Standard output, in input order: answers behind their prompts, or JSON lines."""

    def __init__(self, asked: Sequence[Asked | Refused], as_json: bool) -> None:
        self._asked, self._as_json = asked, as_json
        self._next, self._waiting = 0, dict[int, str]()

    def whole(self, run: Callable[[], str]) -> None:
        return None

    def begin(self, run: str) -> Mapping[str, Line]:
        return {}

    def add(self, place: int, result: Ended) -> None:
        one = self._asked[place]
        self._waiting[place] = json_text([result_line(one.id, result)]) if self._as_json else _shown(one, result)
        if place == self._next:
            while self._next in self._waiting:
                sys.stdout.write(self._waiting.pop(self._next))
                self._next += 1
            sys.stdout.flush()

    def end(self, totals: Line) -> None:
        if self._as_json:
            sys.stdout.write(json_text([totals]))

    def give_up(self) -> list[str]:
        with suppress(OSError):
            sys.stdout.write("".join(self._waiting[place] for place in sorted(self._waiting)))
            sys.stdout.flush()
        return []


def _shown(one: Asked | Refused, result: Ended) -> str:
    """Each answer behind its prompt; nothing for a request that was refused, or that ended before its first token."""
    if not isinstance(one, Asked) or not isinstance(result, RequestOutput):
        return ""
    prompt = one.prompt if isinstance(one.prompt, str) else ""
    said = [answer.text for answer in result.outputs if answer.token_ids or answer.finish_reason in GOOD_ENDS]
    return "".join(f"{prompt}{text}\n" for text in said)


class Held:
    """A pipe, a device, or a file whose folder is closed to us: written once, at the end, and where the run fails without totals."""

    def __init__(self, out: Path, asked: Sequence[Asked | Refused]) -> None:
        self._out, self._asked, self._is_refused = out, asked, False
        self._lines: dict[int, Line] = {}

    def whole(self, run: Callable[[], str]) -> None:
        return None

    def begin(self, run: str) -> Mapping[str, Line]:
        return {}

    def add(self, place: int, result: Ended) -> None:
        self._lines[place] = result_line(self._asked[place].id, result)

    def end(self, totals: Line) -> None:
        lines, self._lines = self._lines, {}  # an interrupt in the middle: they are not written twice
        try:
            write_text(self._out, json_text([*(lines[place] for place in range(len(self._asked))), totals]), "--out")
        except FileRefused:
            self._lines, self._is_refused = lines, True
            raise

    def give_up(self) -> list[str]:
        found = json_text([self._lines[place] for place in sorted(self._lines)])
        if not found:
            return []
        if not self._is_refused:
            with suppress(FileRefused):
                write_text(self._out, found, "--out")
                return [f"{len(self._lines)} of {len(self._asked)} results are in {self._out}, without totals"]
        return _printed(found, len(self._lines))


class Kept:
    """FILE.partial, locked while the run is under way: a line that names the run, then results as they end. It is gone when FILE is written.

    A run that goes on from one that has ended finds good results in FILE, which its line of totals names.
    """

    def __init__(self, out: Path, asked: Sequence[Asked | Refused], resume: bool) -> None:
        self._out, self._asked, self._resume = out, asked, resume
        self._path = out.resolve().with_name(out.resolve().name + PARTIAL)
        self._file, self._size, self._count = -1, 0, 0
        self._lines: dict[int, Line] = {}
        self._pending: list[bytes] = []
        self._is_in_trouble = self._is_whole = False
        self._ended: dict[str, Line] = {}
        check_output(self._path, "--out")
        if self._path.exists():
            with suppress(OSError):
                os.close(_locked(self._path))  # first of all: results of a run that is under way are nobody's to go on from
            self._check(*_read(self._path))

    def _check(self, run: str | None, found: Sequence[Line], of: str | None = None) -> None:
        """Raises FileRefused for results that would be lost, or do not belong to the run `of`."""
        if found and not self._resume:
            raise FileRefused("--out", self._path, f"{len(found)} results of a run that was interrupted", "no such file",
                              "add --resume to go on from them, or remove the file")  # fmt: skip
        if found and of is not None and run != of:
            raise FileRefused("--resume", self._path, "results of another run", SAME,
                              "repeat the interrupted command, or remove the file")  # fmt: skip

    def whole(self, run: Callable[[], str]) -> Mapping[str, Line] | None:
        name, found = _read_ended(self._out) if self._resume and not self._path.exists() and self._out.exists() else (None, [])
        if name is None:
            return None
        if name != run():
            raise FileRefused("--resume", self._out, "results of another run", SAME, "repeat that command, or leave --resume out to replace the file")
        self._ended = {line["id"]: line for line in found if is_good(line)}
        self._is_whole = all(isinstance(one, Refused) or one.id in self._ended for one in self._asked)
        return self._ended if self._is_whole else None

    def begin(self, run: str) -> Mapping[str, Line]:
        is_new = not self._path.exists()
        try:
            file = _locked(self._path)
            try:
                name, found = _read(self._path)
                self._check(name, found, run)
                good = self._ended | {line["id"]: line for line in found if is_good(line)}
                self._start(file, run, list(good.values()))
            except BaseException:
                if is_new:
                    self._remove()
                os.close(file)
                raise
        except OSError as error:
            raise FileRefused("--out", self._path, reason(error), "a file that can be written", "make room, or give another file") from None
        self._file = file  # from here on it is this run's, to write and to remove
        return good

    def _start(self, file: int, run: str, good: Sequence[Line]) -> None:
        """The file from its beginning: of what an earlier run left only good results stay, the other requests run again."""
        data = json_text([{"partial": run}, *good]).encode()
        _write(file, data, 0)
        os.ftruncate(file, len(data))
        self._size, self._count = len(data), len(good)

    def add(self, place: int, result: Ended) -> None:
        self._lines[place] = line = result_line(self._asked[place].id, result)
        if isinstance(result, RequestOutput):
            self._pending.append(json_text([line]).encode())
            self._save()

    def _save(self) -> None:
        """What waits is written, or stays for the next time: a full disk ends no run. An interrupt repeats the write at the same place."""
        data = b"".join(self._pending)
        try:
            _write(self._file, data, self._size)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, self._size)
            if not self._is_in_trouble:
                said = FileRefused("--out", self._path, reason(error), "room for each result as it ends", "the run goes on; make room before it ends")
                print(f"tapeout: {said}", file=sys.stderr)
            self._is_in_trouble = True
            return
        self._size, self._count = self._size + len(data), self._count + len(self._pending)
        self._pending.clear()

    def end(self, totals: Line) -> None:
        if self._is_whole:
            return
        write_text(self._out, json_text([*(self._lines[place] for place in range(len(self._asked))), totals]), "--out")
        if self._file >= 0:
            self._remove()
            self._close()

    def give_up(self) -> list[str]:
        if self._file < 0:
            return []
        self._save()
        found = []
        if self._count:
            found.append(f"{self._count} of {len(self._asked)} results are in {self._path}; the same command with --resume runs the others")
        else:
            self._remove()
        if self._pending:
            found += _printed(b"".join(self._pending).decode(), len(self._pending))
        self._close()
        return found

    def _remove(self) -> None:
        with suppress(OSError):
            self._path.unlink()

    def _close(self) -> None:
        os.close(self._file)
        self._file = -1


def _printed(lines: str, count: int) -> list[str]:
    """Puts on standard output what nothing else takes, and says so."""
    try:
        sys.stdout.write(lines)
        sys.stdout.flush()
    except OSError:
        return [f"{count} results could not be written there, nor to standard output"]
    return [f"{count} results could not be written there and are on standard output"]


def _locked(path: Path) -> int:
    """The file, made where it is missing, for this process alone. Raises FileRefused and OSError."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            found = "the file of a run that is under way"
            raise FileRefused("--out", path, found, "one run at a time", "wait for it, or give another file") from None
        except OSError:  # a file system without locks
            return file
        if path.exists() and os.path.samestat(path.stat(), os.fstat(file)):
            return file
        os.close(file)  # the run that had it has ended and removed it meanwhile


def _write(file: int, data: bytes, at: int) -> None:
    while data:
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written


def _read(path: Path) -> tuple[str | None, list[Line]]:
    """The name of the run that left a file behind, and its results; what is cut off or damaged counts as absent. Raises FileRefused.

    None for an empty file.
    """
    whole = read_bytes(path, "--out")
    first, *lines = whole[: whole.rfind(b"\n") + 1].split(b"\n")
    head = _parsed(first)
    name = head.get("partial") if isinstance(head, dict) else None
    if not isinstance(name, str):
        if whole:
            raise FileRefused("--out", path, "a file that no run left behind", "none", "move it away, or give another --out")
        return None, []
    return name, [line for line in map(_parsed, lines) if is_result(line)]


def _read_ended(path: Path) -> tuple[str | None, list[Line]]:
    """The name of the run that wrote a whole file, and its results; None for a file that no such run wrote. Raises FileRefused."""
    *lines, last = map(_parsed, read_bytes(path, "--out").splitlines() or [b""])
    totals = last.get("totals") if isinstance(last, dict) else None
    name = totals.get("run") if isinstance(totals, dict) else None
    return (name, [line for line in lines if is_result(line)]) if isinstance(name, str) and name else (None, [])


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
