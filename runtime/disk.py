"""Blocks and snapshots in a folder: they survive a restart, and what is read is checked.

Off unless a folder is given. One file an entry, written aside and renamed; only files that this module names are ever touched. An entry
that is cut, altered or under another name counts as absent and is removed. Names cover model and formats (`prefix`), so a folder may serve
several models. docs/runtime.md, 2.3.
"""

import os
import re
import struct
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Literal

from tapeout.runtime.errors import CacheFolderRefused

Kind = Literal["block", "snapshot"]
SUFFIX = ".tapeout-kv"
_MAGIC = b"TPKV0001"
_HEADER = struct.Struct("<8s16sqI16s")  # magic, key, lineage (-1: exact), bytes of the session, digest of all that follows the header
_NAME = re.compile(r"(block|snapshot)-[0-9a-f]{32}" + re.escape(SUFFIX))
_PARTIAL = re.compile(rf"\.{_NAME.pattern}\.[0-9]+(-[0-9]+)?\.partial")
_WRITERS = count()  # engines of one process that share a folder write under names of their own
STALE_S = 3600.0  # no entry takes that long to write


@dataclass(frozen=True)
class Stored:
    """An entry as it was written."""

    payload: bytes
    lineage: int | None
    session: str


class DiskTier:
    """A folder of entries within `budget_bytes`, the least recently used leaving first. Raises CacheFolderRefused."""

    def __init__(self, folder: str | Path, budget_bytes: int) -> None:
        self.folder, self.budget_bytes = Path(folder), budget_bytes
        self.bytes = self.written = self.read = self.damaged = self.evicted = self.failed = self.unsaved = 0
        self._writer = next(_WRITERS)
        self.reason = ""
        """Why the last entry was not saved."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            found = _listed(self.folder)
        except (OSError, ValueError) as error:  # ValueError: what is no path
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise CacheFolderRefused(repr(str(folder)), reason, "a folder that can be read and written") from None
        self._sizes: OrderedDict[str, int] = OrderedDict((name, size) for _, name, size in sorted(found))
        self.bytes = sum(self._sizes.values())
        self._shrink()

    def __len__(self) -> int:
        return len(self._sizes)

    def has(self, kind: Kind, key: bytes) -> bool:
        """Says whether an entry of this name was seen; `get` alone knows whether it is whole."""
        return _name(kind, key) in self._sizes

    def put(self, kind: Kind, key: bytes, payload: bytes, lineage: int | None, session: str = "") -> None:
        """Stores an entry, unless it is there. A full disk is no error: the entry is then not stored, and `failed` and `unsaved` count it."""
        name, tag = _name(kind, key), session.encode()
        size = _HEADER.size + len(tag) + len(payload)
        if name in self._sizes or size > self.budget_bytes:
            return
        header = _HEADER.pack(_MAGIC, key, -1 if lineage is None else lineage, len(tag), _digest(kind, key, lineage, tag, payload))
        aside = self.folder / f".{name}.{os.getpid()}-{self._writer}.partial"
        try:
            with aside.open("wb") as file:
                file.writelines((header, tag, payload))
            aside.replace(self.folder / name)
        except OSError as error:
            self.failed, self.unsaved, self.reason = self.failed + 1, self.unsaved + 1, error.strerror or type(error).__name__
            with suppress(OSError):
                aside.unlink()
            return
        self._sizes[name] = size
        self.bytes += size
        self.written += 1
        self._shrink()

    def get(self, kind: Kind, key: bytes) -> Stored | None:
        """The entry of this name, or None if it is not there or not what was written; then it is removed."""
        name = _name(kind, key)
        if name not in self._sizes:
            return None
        stored = _parsed(kind, key, self._bytes_of(name))
        if stored is None:
            self.damaged += 1
            self._remove(name)
            return None
        self.read += 1
        self._sizes.move_to_end(name)
        try:
            os.utime(self.folder / name)
        except OSError:
            self.failed += 1
        return stored

    def drop(self, key: bytes) -> None:
        """Removes what is stored under a block's name."""
        for name in (_name("block", key), _name("snapshot", key)):
            if name in self._sizes:
                self._remove(name)

    def _bytes_of(self, name: str) -> bytes:
        try:
            return (self.folder / name).read_bytes()
        except OSError:
            return b""

    def _shrink(self) -> None:
        while self.bytes > self.budget_bytes:
            self._remove(next(iter(self._sizes)))
            self.evicted += 1

    def _remove(self, name: str) -> None:
        self.bytes -= self._sizes.pop(name)
        try:
            (self.folder / name).unlink(missing_ok=True)
        except OSError:
            self.failed += 1


def _listed(folder: Path) -> list[tuple[int, str, int]]:
    """Time of last use, name and size of each entry. What another process removes meanwhile is not there; what a killed one left is removed."""
    found = []
    for entry in folder.iterdir():
        is_partial = _PARTIAL.fullmatch(entry.name) is not None
        if not is_partial and not _NAME.fullmatch(entry.name):
            continue
        with suppress(FileNotFoundError):
            facts = entry.stat()
            if not is_partial:
                found.append((facts.st_mtime_ns, entry.name, facts.st_size))
            elif time.time() - facts.st_mtime > STALE_S:
                entry.unlink()
    return found


def _name(kind: Kind, key: bytes) -> str:
    return f"{kind}-{key.hex()}{SUFFIX}"


def _digest(kind: Kind, key: bytes, lineage: int | None, tag: bytes, payload: bytes) -> bytes:
    head = f"{kind} {lineage} {len(tag)} ".encode()
    return blake2b(head + key + tag + payload, digest_size=16).digest()


def _parsed(kind: Kind, key: bytes, data: bytes) -> Stored | None:
    if len(data) < _HEADER.size:
        return None
    magic, stored_key, number, tag_bytes, digest = _HEADER.unpack_from(data)
    tag, payload = data[_HEADER.size : _HEADER.size + tag_bytes], data[_HEADER.size + tag_bytes :]
    lineage = None if number == -1 else number
    if magic != _MAGIC or stored_key != key or digest != _digest(kind, key, lineage, tag, payload):
        return None
    return Stored(payload, lineage, tag.decode())
