"""The compiler from Python: what `tapeout.compile` and the commands call."""

import gc
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tapeout.compiler.cache import Cache, default_root, key_of
from tapeout.compiler.driver import Watch, compile_model
from tapeout.compiler.errors import SettingsError
from tapeout.compiler.settings import OPTIONS, Settings, parse_dump
from tapeout.models.deepseek_v41.config import load_config
from tapeout.runtime.artifact import MANIFEST
from tapeout.runtime.artifact_set import members


@dataclass(frozen=True)
class Compiled:
    """What a compile wrote: folder, identity hash (of several targets: the hash of theirs), kernel symbols, bytes on disk, seconds it took.

    `targets` holds the identity of each target's artifact; `kernels_compiled` counts the kernels that did not come from the cache.
    """

    directory: Path
    identity: str
    targets: dict[str, str]
    kernels: tuple[str, ...]
    size_bytes: int
    seconds: float
    kernels_compiled: int


def compile_path(
    path: Path | str,
    output: Path | str,
    settings: Settings | None = None,
    watch: Watch | None = None,
    *,
    cache: Path | None = None,
    allow_unknown_keys: bool = False,
) -> Compiled | None:
    """Compiles the configuration at `path` into the folder `output`; None where `settings.stop_after` ended it earlier."""
    started = time.perf_counter()
    config = load_config(path, allow_unknown_keys=allow_unknown_keys)
    watch, compiled = watch or Watch(), [0]

    def count(number: int) -> None:
        compiled[0] += number
        watch.compiled(number)

    store = Cache(cache or default_root())
    with _no_collections():
        made = compile_model(config, settings or Settings(), Path(output), store, replace(watch, compiled=count))
    if made is None:
        return None
    manifests = {target: json.loads((folder / MANIFEST).read_text()) for target, folder in members(made).items()}
    identities = {target: str(manifest["identity"]) for target, manifest in manifests.items()}
    identity = next(iter(identities.values())) if len(identities) == 1 else key_of(*identities.values())
    size = sum(p.stat().st_size for p in made.rglob("*") if p.is_file())
    symbols = tuple(k["symbol"] for manifest in manifests.values() for k in manifest["kernels"])
    return Compiled(made, identity, identities, symbols, size, time.perf_counter() - started, compiled[0])


@contextmanager
def _no_collections() -> Iterator[None]:
    """Nobody looks for cycles meanwhile: a compile makes millions of small objects that live until its end, and looking through them again and
    again is a sixth of its time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def compile(path: Path | str, output: Path | str, **settings: object) -> Compiled:
    """`tapeout.compile("DIR or config.json", "artifact", max_rows=64, …)`: keyword arguments are the fields of `Settings`.

    Lists and path texts are taken where a setting is a tuple or a path. Raises `SettingsError` with the names of the fields, and what
    `compile_path` raises.
    """
    wrong = [
        f"{name}: found {place!r}, expected a path"
        for name, place in (("path", path), ("output", output))
        if not isinstance(place, str | Path)
    ]
    wrong += [f"{name}: there is no such setting, expected {_nearest(name)}" for name in settings if name not in OPTIONS]
    if settings.get("stop_after") is not None:
        wrong.append("stop_after: ends a compile before anything is written; use tapeout.compiler.api.compile_path")
    if wrong:
        raise SettingsError(wrong)
    try:
        made = compile_path(path, output, Settings(**{name: _typed(name, value) for name, value in settings.items()}))  # type: ignore[arg-type]
    except SettingsError as error:
        raise error.renamed({option: name for name, option in OPTIONS.items()}) from None
    assert made is not None, "only stop_after ends a compile early"
    return made


def _nearest(name: str) -> str:
    from difflib import get_close_matches

    return next(iter(get_close_matches(name, OPTIONS, 1)), f"one of {', '.join(OPTIONS)}")


def _typed(name: str, value: object) -> object:
    if name == "dump" and isinstance(value, str):
        return parse_dump(value)
    return tuple(value) if name in ("buckets", "print_ir_after", "tuned") and isinstance(value, list) else value
