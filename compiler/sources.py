"""What every target does with the tile dialect and its own sources: one context to parse tile modules in, one hash of the files that decide a binary.

A schedule file decides which kernels there are, not what becomes of one: it is left out of the hash.
"""

import hashlib
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


def fingerprint(package: ModuleType, others: Iterable[ModuleType], suffixes: tuple[str, ...] = (".py",)) -> str:
    """A hash of a package's sources of these suffixes, by name, and of single modules beside it."""
    own = sorted(path for path in Path(package.__path__[0]).iterdir() if path.suffix in suffixes and not path.name.endswith(SCHEDULES))
    digest = hashlib.sha256()
    for path in [*own, *(Path(str(module.__file__)) for module in others)]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
