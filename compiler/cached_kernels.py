"""Kernels through the cache: what it holds is read, the rest is made in worker processes, each kernel once however many compiles ask for it.

Every target makes its kernels this way and says only what one is made from (its key) and how (a function that workers can find by name).
"""

from collections.abc import Callable, Mapping
from typing import Any

from tapeout.compiler.cache import Cache
from tapeout.compiler.errors import ModuleRefused
from tapeout.compiler.workers import in_processes


def cached_kernels(
    make_one: Callable[..., tuple[bytes, bool]],
    tasks: Mapping[str, tuple[Any, ...]],
    keys: Mapping[str, str],
    store: Cache,
    jobs: int,
    progress: Callable[[str], None],
    refusal: type[Exception],
) -> tuple[dict[str, bytes], int]:
    """Content by symbol in the order of `keys`, and how many were made here; the others came from the cache.

    `make_one(*task)` ends with `made_once`. `progress(symbol)` is called as each is done; kernels that are missing are begun in the order of
    `tasks`. Raises `ModuleRefused` with the sentence of a `refusal`, `CacheRefused`, `WorkerLost`.
    """
    done = {symbol: found for symbol, key in keys.items() if (found := store.lookup(key)) is not None}
    for symbol in done:
        progress(symbol)
    made = 0

    def ready(symbol: str, answer: tuple[bytes, bool]) -> None:
        nonlocal made
        done[symbol] = answer[0]
        made += answer[1]
        progress(symbol)

    try:
        in_processes(make_one, {symbol: task for symbol, task in tasks.items() if symbol not in done}, jobs, ready)
    except refusal as error:
        raise ModuleRefused(str(error)) from None
    return {symbol: done[symbol] for symbol in keys}, made


def made_once(store: Cache, key: str, make: Callable[[], bytes]) -> tuple[bytes, bool]:
    """The content behind a key, and whether it was made now: another process may have made it since the cache was asked."""
    made: list[bytes] = []

    def making() -> bytes:
        made.append(make())
        return made[0]

    return store.get_or_make(key, making), bool(made)
