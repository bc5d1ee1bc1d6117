"""The compiler from Python: what `tapeout.compile` and the commands call."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

from tapeout.compiler.cache import Cache, default_root, key_of
from tapeout.compiler.driver import Watch, compile_model
from tapeout.compiler.settings import Settings
from tapeout.models.deepseek_v41.config import load_config
from tapeout.runtime.artifact import MANIFEST
from tapeout.runtime.artifact_set import members


@dataclass(frozen=True)
class Compiled:
    """What a compile wrote: folder, identity hash (of several targets: the hash of theirs), kernel symbols, bytes on disk, seconds it took.

    `targets` holds the identity of each target's artifact.
    """

    directory: Path
    identity: str
    targets: dict[str, str]
    kernels: tuple[str, ...]
    size_bytes: int
    seconds: float


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
    made = compile_model(config, settings or Settings(), Path(output), Cache(cache or default_root()), watch)
    if made is None:
        return None
    manifests = {target: json.loads((folder / MANIFEST).read_text()) for target, folder in members(made).items()}
    identities = {target: str(manifest["identity"]) for target, manifest in manifests.items()}
    identity = next(iter(identities.values())) if len(identities) == 1 else key_of(*identities.values())
    size = sum(p.stat().st_size for p in made.rglob("*") if p.is_file())
    symbols = tuple(k["symbol"] for manifest in manifests.values() for k in manifest["kernels"])
    return Compiled(made, identity, identities, symbols, size, time.perf_counter() - started)


def compile(path: Path | str, output: Path | str, **settings: object) -> Compiled:
    """`tapeout.compile("DIR or config.json", "artifact", max_rows=64, …)`: keyword arguments are the fields of `Settings`."""
    made = compile_path(path, output, Settings(**settings))  # type: ignore[arg-type]
    if made is None:
        raise ValueError("stop_after ends a compile before anything is written: use tapeout.compiler.api.compile_path")
    return made
