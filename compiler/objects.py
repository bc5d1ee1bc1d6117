"""Kernel objects: tile modules compiled by worker processes, each kernel once per cache however many compiles ask for it."""

import hashlib
import importlib.metadata
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from tapeout.codegen.lower_to_tile import TileKernel
from tapeout.compiler.cache import Cache, key_of

Progress = Callable[[str], None]


def kernel_objects(kernels: Sequence[TileKernel], cpu: str, store: Cache, jobs: int, progress: Progress) -> dict[str, bytes]:
    """Object bytes by symbol. `progress(symbol)` is called as each is done; the order of the result is that of `kernels`."""
    tasks = {k.symbol: (k.text, cpu, str(store.root)) for k in kernels}
    found = {symbol: store.lookup(object_key(task[0], cpu)) for symbol, task in tasks.items()}
    done = {symbol: content for symbol, content in found.items() if content is not None}
    missing = {symbol: task for symbol, task in tasks.items() if symbol not in done}
    for symbol in done:
        progress(symbol)
    if missing:
        done.update(_compile(missing, jobs, progress))
    return {k.symbol: done[k.symbol] for k in kernels}


def _compile(tasks: dict[str, tuple[str, str, str]], jobs: int, progress: Progress) -> dict[str, bytes]:
    done: dict[str, bytes] = {}
    with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(compile_one, *task): symbol for symbol, task in tasks.items()}
        for future in as_completed(futures):
            done[futures[future]] = future.result()
            progress(futures[future])
    return done


def compile_one(text: str, cpu: str, root: str) -> bytes:
    """The object of one tile module, from the cache or made now; runs in a worker process."""
    return Cache(Path(root)).get_or_make(object_key(text, cpu), lambda: _object(text, cpu))


def _object(text: str, cpu: str) -> bytes:
    from tapeout.codegen.cpu.facts import cpu as target
    from tapeout.codegen.cpu.toolchain import compile_object
    from tapeout.dialects import tile
    from tapeout.dialects._mlir import ir

    context = ir.Context()
    tile.load_into(context)
    with context, ir.Location.unknown():
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

    files = [*sorted(Path(package.__path__[0]).glob("*")), Path(dialect.__file__)]
    digest = hashlib.sha256()
    for path in files:
        if path.is_file() and path.suffix in (".py", ".mlir") and path.name != "schedules.py":
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
