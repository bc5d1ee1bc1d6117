"""Files that the user names: read and written here, so that what goes wrong is one sentence with option, path, found and expected.

A regular file is written aside and renamed, so that a reader never sees half of it; its mode is kept, links are followed. Anything else
(a device, a pipe, standard output by name, a file in a folder that cannot be written) is written through.
"""

import fcntl
import hashlib
import os
import secrets
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tapeout.compiler.errors import FileRefused

_PART = ".part"
_OPEN_FILES = ("/dev", "/proc")
"""Below these a link may stand for a file that a process holds open: replacing it would leave that process with the old one."""


def read_text(path: Path, where: str) -> str:
    """The text of a file in UTF-8, with or without a byte order mark; `-` is standard input. Raises FileRefused."""
    try:
        return sys.stdin.read().removeprefix("\ufeff") if str(path) == "-" else read_bytes(path, where).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileRefused(where, path, f"bytes that are not text ({error})", "text in UTF-8", "convert it") from None
    except (OSError, ValueError) as error:
        raise FileRefused(where, path, reason(error), "a readable file", "give another file") from None


def read_bytes(path: Path, where: str) -> bytes:
    """The bytes of a file; `-` is standard input. Raises FileRefused."""
    try:
        return sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except (OSError, ValueError) as error:
        raise FileRefused(where, path, reason(error), "a readable file", "give another file") from None


def check_output(path: Path, where: str) -> None:
    """Raises FileRefused where `write_text` could not write; changes nothing."""
    if str(path) == "-":
        raise FileRefused(where, path, "the sign for standard input", "a file that can be written", "give a file, or /dev/stdout")
    try:
        facts, folder = _facts(path), path.resolve().parent
    except (OSError, RuntimeError, ValueError) as error:
        raise FileRefused(where, path, reason(error), "a file that can be written", "give another file") from None
    if facts is not None and stat.S_ISDIR(facts.st_mode):
        raise FileRefused(where, path, "a folder", "a file that can be written", "give a file in it")
    if facts is not None and not os.access(path, os.W_OK):
        raise FileRefused(where, path, "a file without permission to write", "a file that can be written", "give another file")
    if facts is None and not folder.is_dir():
        raise FileRefused(where, path, f"no folder {folder}", "a file in a folder that exists", "make the folder, or give another file")
    if facts is None and not os.access(folder, os.W_OK | os.X_OK):
        raise FileRefused(where, path, f"folder {folder} without permission to write", "a writable folder", "give another file")


def check_apart(outputs: Mapping[str, Path | None], inputs: Mapping[str, Path | None]) -> None:
    """Raises FileRefused where a file that is written would replace another one that the command names, or two inputs are standard input."""
    named = [(option, path) for option, path in [*inputs.items(), *outputs.items()] if path is not None]
    for place, (option, path) in enumerate(named):
        for other, earlier in named[:place]:
            if option in outputs and _is_one_file(path, earlier):
                raise FileRefused(option, path, f"the file of {other}", "a file of its own", "give another file")
            if option in inputs and str(path) == str(earlier) == "-":
                raise FileRefused(option, path, f"standard input, which {other} reads", "an input of its own", "give a file")


def _is_one_file(one: Path, other: Path) -> bool:
    """Whether two names stand for one regular file, there or to be; what is wrong with either is said where it is used."""
    try:
        found = [_facts(path) for path in (one, other)]
        if found[0] is None or found[1] is None:
            return found == [None, None] and one.resolve() == other.resolve()
        return stat.S_ISREG(found[0].st_mode) and os.path.samestat(found[0], found[1])
    except (OSError, RuntimeError, ValueError):
        return False


def write_text(path: Path, content: str, where: str) -> None:
    """Writes a file whole or not at all (what is no regular file is written through). Raises FileRefused."""
    check_output(path, where)
    try:
        facts = _facts(path)
        if facts is not None and _is_standard_output(facts):
            sys.stdout.write(content)
        elif _is_written_through(path, facts):
            with path.open("w", encoding="utf-8") as file:
                file.write(content)
        else:
            _replace(path.resolve(), content, facts)
    except OSError as error:
        raise FileRefused(where, path, reason(error), "a file that can be written", "make room, or give another file") from None


def is_written_whole(path: Path) -> bool:
    """Whether `write_text` writes aside and renames: what other names beside it are then ours to use. For a path that `check_output` passes."""
    facts = _facts(path)
    return facts is None or not (_is_standard_output(facts) or _is_written_through(path, facts))


def write_in_folder(folder: Path, name: str, content: str, where: str) -> None:
    """Writes one file of a folder, which is made where it is missing. Raises FileRefused."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise FileRefused(where, folder, reason(error), "a folder that can be written", "give another folder") from None


def reason(error: Exception) -> str:
    """What the system says, without the path that the message names anyway."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _facts(path: Path) -> os.stat_result | None:
    """What is known of the file behind links, None where there is none."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _is_standard_output(facts: os.stat_result) -> bool:
    """Whether a file is the one behind standard output: opened a second time, each would overwrite what the other wrote."""
    try:
        return os.path.samestat(os.fstat(1), facts)
    except OSError:
        return False


def _is_written_through(path: Path, facts: os.stat_result | None) -> bool:
    if facts is None:
        return False
    is_held = any(path.absolute().is_relative_to(folder) for folder in _OPEN_FILES)
    return is_held or not stat.S_ISREG(facts.st_mode) or not os.access(path.resolve().parent, os.W_OK | os.X_OK)


def _replace(path: Path, content: str, facts: os.stat_result | None) -> None:
    """Beside the file, under a name of this file's own: what a writer left there when it was killed goes with the next one."""
    begins = f".tapeout-{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]}-"
    for left in path.parent.glob(f"{begins}*{_PART}"):
        _remove_if_left(left)
    aside, lock = _aside(path, begins)
    try:
        with os.fdopen(os.dup(lock), "w", encoding="utf-8") as file:  # closed before it is renamed: some systems say only then that a disk is full
            file.write(content)
        if facts is not None:
            aside.chmod(stat.S_IMODE(facts.st_mode))
        aside.rename(path)
    finally:
        os.close(lock)
        aside.unlink(missing_ok=True)


def _aside(path: Path, begins: str) -> tuple[Path, int]:
    """A new file, locked as long as its writer lives. Without locks it stays when that is killed."""
    while True:
        aside = path.with_name(f"{begins}{secrets.token_hex(8)}{_PART}")
        lock = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        if aside.exists():
            return aside, lock
        os.close(lock)  # another writer came before the lock and removed it


def _remove_if_left(aside: Path) -> None:
    with suppress(OSError), aside.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        aside.unlink()
