"""Where an artifact is written: only over nothing, an empty folder or what a compile wrote, whole or not at all.

Writers of one folder take turns (a lock on its parent), write aside and exchange, so that a reader sees the old artifact or the new one. What a
writer of the same place left aside when it was killed goes with the next one's turn. A file that tapeout did not write is never removed.
"""

import ctypes
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tapeout.runtime.device_names import is_target
from tapeout.runtime.errors import ArtifactOccupied, ArtifactUnwritable, shown

MANIFEST = "manifest.json"
_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2
_HERE = -100  # AT_FDCWD
_ASIDE, _PART = ".tapeout-", ".part"
"""Names of folders that are being written begin and end so, the name of the place and eight characters between them."""
_RANDOM = "-[a-z0-9_]{8}"


def check_output(directory: Path | str) -> Path:
    """The place behind links, if an artifact may be written there. Raises ArtifactOccupied or ArtifactUnwritable; changes nothing."""
    try:
        place = Path(directory).resolve()
        is_there = place.exists()
        is_above_us = Path.cwd().is_relative_to(place)
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: what is no path; RuntimeError: links in a circle
        reason = getattr(error, "strerror", None) or str(error)
        raise ArtifactUnwritable(shown(str(directory)), reason, "the path of a folder") from None
    if is_above_us:  # it would be gone, and every relative path with it
        found = "the folder that the command runs in, or one above it"
        raise ArtifactUnwritable(str(directory), found, "another one: what stands there is replaced as a whole")
    if is_there and not _is_free(place):
        raise ArtifactOccupied(str(directory), "something that no compile wrote", "nothing, an empty folder or what a compile wrote")
    above = next(p for p in place.parents if p.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ArtifactUnwritable(str(directory), f"{above}, which is {'not writable' if above.is_dir() else 'no folder'}", "a writable folder")
    return place


@contextmanager
def replacing(directory: Path | str) -> Iterator[Path]:
    """Yields an empty folder; what is in it at the end stands at `directory`. An exception leaves everything as it was."""
    place = check_output(directory)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _turn(place.parent):
            for left in _left_aside(place.parent, re.escape(place.name)):  # its writer has no turn any more: it was killed
                shutil.rmtree(left, ignore_errors=True)
            aside = _aside(place)
            try:
                yield aside
                aside.chmod(0o755)
                _put(aside, check_output(place))
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise ArtifactUnwritable(str(directory), error.strerror or str(error), "a folder with room that can be written") from None


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """One writer at a time in `folder`; the lock leaves no file."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _put(aside: Path, place: Path) -> None:
    """Moves `aside` to `place`; what was there is then at `aside`."""
    if not place.exists():
        aside.rename(place)
        return
    exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if exchange is not None and exchange(_HERE, os.fsencode(aside), _HERE, os.fsencode(place), _EXCHANGE) == 0:
        return
    old = _aside(place)
    place.replace(old)
    aside.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def _aside(place: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix=f"{_ASIDE}{place.name}-", suffix=_PART, dir=place.parent))


def _left_aside(folder: Path, name: str) -> list[Path]:
    """Folders in `folder` that were being written for a place whose name this pattern matches."""
    named = re.compile(re.escape(_ASIDE) + name + _RANDOM + re.escape(_PART))
    return [path for path in folder.iterdir() if named.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]


def member_folders(directory: Path) -> dict[str, Path]:
    """The artifacts of a set by target: folders with a manifest that are named after a target. Whether they are whole is said when they are read."""
    return {path.name: path for path in sorted(directory.iterdir()) if is_target(path.name) and (path / MANIFEST).is_file()}


def _is_free(place: Path) -> bool:
    """An empty folder, an artifact, or what a compile for several targets wrote: the members of a set, each whole, and nothing else."""
    if not place.is_dir():
        return False
    inside = {*place.iterdir()} - {*_left_aside(place, ".*")}
    members = member_folders(place)
    return not inside or _is_artifact(place) or (
        inside == {*members.values()} and all(not path.is_symlink() and _is_artifact(path, name) for name, path in members.items())
    )  # fmt: skip


def _is_artifact(folder: Path, target: str | None = None) -> bool:
    """A manifest of ours, for that target if one is given, and no file that it does not list."""
    from tapeout.runtime.artifact import manifest_identity, parsed_json

    try:
        manifest: Any = parsed_json((folder / MANIFEST).read_bytes())
        listed = {MANIFEST, *manifest["files"]}
        ours = manifest["identity"] == manifest_identity(manifest) and (target is None or manifest["targets"] == [target])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    return ours and all(str(path.relative_to(folder)) in listed for path in folder.rglob("*") if not path.is_dir())
