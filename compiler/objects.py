"""Kernel objects: tile modules compiled by worker processes, each kernel once per cache however many compiles ask for it."""

import importlib.metadata
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from tapeout.codegen.cpu.toolchain import StackExceeded
from tapeout.codegen.lower_to_tile import TileKernel
from tapeout.compiler.cache import Cache, key_of
from tapeout.compiler.cached_kernels import cached_kernels, made_once
from tapeout.compiler.sources import fingerprint, tile_context

Progress = Callable[[str], None]


def kernel_objects(kernels: Sequence[TileKernel], cpu: str, store: Cache, jobs: int, progress: Progress) -> tuple[dict[str, bytes], int]:
    """Object bytes by symbol in the order of `kernels`, and how many were compiled here; the others came from the cache.

    `progress(symbol)` is called as each is done. Raises `ModuleRefused` for a kernel whose blocks are too large, `CacheRefused`, `WorkerLost`.
    """
    tasks = {k.symbol: (k.text, cpu, str(store.root)) for k in kernels}
    keys = {k.symbol: object_key(k.text, cpu) for k in kernels}
    return cached_kernels(compile_one, tasks, keys, store, jobs, progress, StackExceeded)


def compile_one(text: str, cpu: str, root: str) -> tuple[bytes, bool]:
    """The object of one tile module, and whether it was compiled now (else it is from the cache); runs in a worker process."""
    return made_once(Cache(Path(root)), object_key(text, cpu), lambda: _object(text, cpu))


def _object(text: str, cpu: str) -> bytes:
    from tapeout.codegen.cpu.facts import cpu as target
    from tapeout.codegen.cpu.toolchain import compile_object
    from tapeout.dialects._mlir import ir

    with tile_context(), ir.Location.unknown():
        return compile_object(ir.Module.parse(text), target(cpu))


def object_key(text: str, cpu: str) -> str:
    """Everything an object is made from: tile text, processor, our lowering's sources, the versions of the bindings."""
    return key_of("object", text, processor(cpu), lowering_fingerprint(), importlib.metadata.version("torch-mlir"))


def processor(cpu: str) -> str:
    """The processor as a key: its name and feature list (the host's own for `native`)."""
    from tapeout.codegen.cpu.facts import cpu as target

    return f"{cpu}:{','.join(target(cpu).features)}"


@cache
def lowering_fingerprint() -> str:
    """A hash of the sources that turn tile text into an object."""
    import tapeout.codegen.cpu as package
    import tapeout.dialects.tile as dialect

    return fingerprint(package, [dialect], (".py", ".mlir"))
