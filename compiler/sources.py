"""What every target does with the tile dialect and its own sources: one context to parse tile modules in, one hash of the files that decide a binary.

A schedule file decides which kernels there are, not what becomes of one: it is left out of the hash.
"""

import hashlib
import os
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType

from tapeout.dialects._mlir import ir

SCHEDULES = "schedules.py"


@cache
def tile_context() -> ir.Context:
    """The context of tile modules, made once a process."""
    from tapeout.dialects import tile

    context = ir.Context()
    tile.load_into(context)
    return context


def tree_fingerprint(packages: Iterable[ModuleType]) -> str | None:
    """A hash of every Python source of packages and of all that is in them, by place; None where one changed after this process began, which may
    then run another text than lies there."""
    digest, began = hashlib.sha256(), process_began()
    for root in (Path(package.__path__[0]) for package in packages):
        for path in sorted(root.rglob("*.py")):
            content = path.read_bytes()
            if path.stat().st_ctime > began:
                return None
            digest.update(f"{root.name}/{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def process_began() -> float:
    """When this process was started, in seconds of `time.time`; 0, as if long ago, where the system does not say."""
    try:
        ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0


def fingerprint(package: ModuleType, others: Iterable[ModuleType], suffixes: tuple[str, ...] = (".py",)) -> str:
    """A hash of a package's sources of these suffixes, by name, and of single modules beside it."""
    own = sorted(path for path in Path(package.__path__[0]).iterdir() if path.suffix in suffixes and not path.name.endswith(SCHEDULES))
    digest = hashlib.sha256()
    for path in [*own, *(Path(str(module.__file__)) for module in others)]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
