"""Tile modules through the cache: a kernel whose text is known needs no lowering, which is half the time of a compile that finds every binary.

The key is the choice and all that can take part in making its text: every source of the dialects, the passes and codegen, and the versions of the
bindings and of Python. A family of another package is lowered each time, as nobody knows what it is made from; so is everything in a process that
began before the last edit of a source.
"""

import importlib.metadata
import platform
from collections.abc import Callable
from functools import cache, partial

from tapeout.codegen.kernel import named
from tapeout.codegen.lower_to_tile import Texts
from tapeout.codegen.select_kernels import Choice
from tapeout.compiler.cache import Cache, key_of
from tapeout.compiler.sources import tree_fingerprint


def cached_texts(store: Cache) -> Texts:
    """`lower_to_tile.Texts` over a cache. What it is called with raises through it; and CacheRefused."""
    return partial(_text, store)


def _text(store: Cache, choice: Choice, make: Callable[[], str]) -> str:
    is_ours = named(choice.request.op, choice.family).build.__module__.startswith(f"{_codegen()}.")
    if not is_ours or _sources() is None:
        return make()
    return store.get_or_make(text_key(choice), lambda: make().encode()).decode()


def text_key(choice: Choice) -> str:
    """Everything that the text of a choice's tile module is made from."""
    return key_of("tile", repr(choice), str(_sources()), importlib.metadata.version("torch-mlir"), platform.python_version())


@cache
def _sources() -> str | None:
    import tapeout.codegen
    import tapeout.dialects
    import tapeout.passes

    return tree_fingerprint((tapeout.codegen, tapeout.dialects, tapeout.passes))


def _codegen() -> str:
    import tapeout.codegen

    return tapeout.codegen.__name__
