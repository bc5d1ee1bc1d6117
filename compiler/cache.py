"""The content-addressed compile cache: bytes under the hash of everything they were made from.

One lock a key: two processes that want the same thing make it once. Entries are written aside, renamed, and checked against their own hash
when read; a damaged one is made again. The cache touches only files that have its own names.
"""

import hashlib
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tapeout.compiler.errors import CacheRefused

_ENTRY = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{64}")
LEFTOVER_SECONDS = 3600
"""Age at which a file that was being written is taken for abandoned."""
VERSION = "v1"
"""Entries lie in a folder of this name, so that another layout would never meet them."""
_LOCK = re.compile(r"[0-9a-f]{64}\.lock")
_LEFTOVER = re.compile(r"\.tapeout-[A-Za-z0-9_]+\.part")


@dataclass(frozen=True)
class Entry:
    """One entry: its key, file, size in bytes and time of last use (seconds)."""

    key: str
    path: Path
    size: int
    used: float

    @property
    def is_sound(self) -> bool:
        """Whether the bytes are there and still hash to what the name says."""
        return _sound(self.path) is not None


@dataclass(frozen=True)
class Cache:
    """A folder of entries `<key[:2]>/<key>.<sha256 of the bytes>`."""

    root: Path

    def get_or_make(self, key: str, make: Callable[[], bytes]) -> bytes:
        """The bytes of `key`; makes, checks and stores them where they are missing or damaged. Raises CacheRefused, and what `make` does."""
        found = self._read(key)
        if found is not None:
            return found
        with self._turn(key):
            found = self._read(key)
            if found is None:
                found = make()
                self._write(self.root / key[:2], key, found)
        return found

    def lookup(self, key: str) -> bytes | None:
        """The bytes of `key`, None where there are none that are sound."""
        return self._read(key)

    def entries(self) -> Iterator[Entry]:
        """Every entry, by key; none where there is no folder yet. Raises CacheRefused where there is something else."""
        with self._refusing():
            if self.root.exists() and not self.root.is_dir():
                raise CacheRefused(self.root, "a file")
            for path in sorted(self.root.glob("[0-9a-f][0-9a-f]/*")):
                facts = _facts(path) if _ENTRY.fullmatch(path.name) else None
                if facts is not None:
                    yield Entry(path.name.split(".")[0], path, facts.st_size, facts.st_mtime)

    def damaged(self) -> list[Entry]:
        """Entries that do not hash to their names any more. Raises CacheRefused."""
        with self._refusing():
            return [entry for entry in self.entries() if not entry.is_sound]

    def prune(self, keep_bytes: int) -> list[Entry]:
        """Removes damaged entries, then the least recently used ones until at most `keep_bytes` are left; returns what went. Raises CacheRefused."""
        with self._refusing():
            return self._pruned(keep_bytes)

    def _pruned(self, keep_bytes: int) -> list[Entry]:
        entries = sorted(self.entries(), key=lambda e: e.used)
        total, gone = sum(e.size for e in entries), []
        for entry in entries:
            if total > keep_bytes or not entry.is_sound:
                entry.path.unlink(missing_ok=True)
                total -= entry.size
                gone.append(entry)
        for path in self.root.glob("[0-9a-f][0-9a-f]/.tapeout-*.part"):
            facts = _facts(path) if _LEFTOVER.fullmatch(path.name) else None
            if facts is not None and time.time() - facts.st_mtime > LEFTOVER_SECONDS:
                path.unlink(missing_ok=True)
        self._prune_locks()
        return gone

    def _prune_locks(self) -> None:
        """Removes the locks of entries that are gone, except those that somebody holds."""
        from filelock import FileLock, Timeout

        left = {entry.key for entry in self.entries()}
        for path in self.root.glob("[0-9a-f][0-9a-f]/*.lock"):
            if _LOCK.fullmatch(path.name) and path.stem not in left and _facts(path) is not None:
                with suppress(Timeout, OSError), FileLock(path, timeout=0):
                    path.unlink(missing_ok=True)

    @contextmanager
    def _turn(self, key: str) -> Iterator[None]:
        """One process at a time for one key."""
        from filelock import FileLock

        folder = self.root / key[:2]
        lock = FileLock(folder / f"{key}.lock")
        with self._refusing():
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """What the system refuses becomes one sentence about the folder."""
        try:
            yield
        except OSError as error:
            raise CacheRefused(self.root, error.strerror or str(error)) from None

    def _read(self, key: str) -> bytes | None:
        with self._refusing():
            for path in (self.root / key[:2]).glob(f"{key}.*"):
                if not _ENTRY.fullmatch(path.name):
                    continue
                content = _sound(path)
                if content is not None:
                    with suppress(OSError):  # gone meanwhile, or of a cache that may only be read
                        os.utime(path)
                    return content
                path.unlink(missing_ok=True)
        return None

    def _write(self, folder: Path, key: str, content: bytes) -> None:
        with self._refusing():
            handle, aside = tempfile.mkstemp(prefix=".tapeout-", suffix=".part", dir=folder)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(content)
                Path(aside).rename(folder / f"{key}.{hashlib.sha256(content).hexdigest()}")
            finally:
                Path(aside).unlink(missing_ok=True)


def _sound(path: Path) -> bytes | None:
    """The bytes of an entry; None where they are damaged or another process has removed them."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    return content if hashlib.sha256(content).hexdigest() == path.name.split(".")[1] else None


def _facts(path: Path) -> os.stat_result | None:
    """What is known of a regular file; None where there is none (any more)."""
    try:
        facts = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    return facts if stat.S_ISREG(facts.st_mode) else None


def default_root() -> Path:
    """The user's cache folder for compiled kernels; TAPEOUT_CACHE_DIR overrides it."""
    given = os.environ.get("TAPEOUT_CACHE_DIR")
    if given:
        return Path(given) / VERSION
    import platformdirs

    return Path(platformdirs.user_cache_dir("tapeout")) / VERSION


def named_root(folder: Path | None) -> Path:
    """The folder of entries that a user means: one that TAPEOUT_CACHE_DIR might name, or the one in it, as the commands print it."""
    if folder is None:
        return default_root()
    with suppress(OSError):  # of a folder that cannot be read, which is said where entries are looked for
        if (folder / VERSION).is_dir():
            return folder / VERSION
    return folder


def key_of(*parts: bytes | str) -> str:
    """One hash of many parts, each with its length, so that no two lists of parts give one key."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()
