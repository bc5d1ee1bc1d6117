"""The Ascend 950 targets: every kernel emitted, lowered, link-checked and held against its budget, without an NPU.

Kernels are compiled in worker processes through the cache: the same tile text, chip, tool version and emitter give the same bytes. The back end
that makes objects is not asked here, so an artifact does not depend on whether a machine has it; `tapeout finish` runs it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from tapeout.codegen.kernel import EVERY_SCALE
from tapeout.codegen.lower_to_tile import TileKernel
from tapeout.codegen.select_kernels import Choice
from tapeout.compiler.cache import Cache, key_of
from tapeout.compiler.cached_kernels import cached_kernels, made_once
from tapeout.compiler.errors import ToolchainMissing
from tapeout.compiler.settings import Settings
from tapeout.compiler.sources import fingerprint, tile_context
from tapeout.compiler.targets import Built, Grid, Progress
from tapeout.dialects._mlir import ir
from tapeout.runtime.artifact_kernels import CpuLevel, Lowered, NpuLevel


class KernelRefused(Exception):
    """A kernel that a rule, the compiler, the link check or the budget refuses; crosses the border of a worker process as its one sentence."""


@dataclass(frozen=True)
class Versions:
    """What decides a lowered module besides its kernel: the compiler, our emitter's sources."""

    compiler: str
    emitter: str


@dataclass(frozen=True)
class AscendTarget:
    """One chip. Tile modules are parsed once, in a context of their own, to ask for grids."""

    name: str
    _modules: dict[str, ir.Module] = field(default_factory=dict, compare=False)

    def require(self) -> None:
        _require_compiler()

    def levels(self, settings: Settings) -> tuple[CpuLevel, NpuLevel]:
        """Any host processor; this chip."""
        from tapeout.codegen.ascend.facts import TARGETS, chip

        facts = chip(TARGETS[self.name])
        return CpuLevel(level="any", features=()), NpuLevel(chip=facts.name, cube_cores=facts.cube_cores, vector_cores=facts.vector_cores)

    def grid(self, kernel: TileKernel, rows: int) -> Grid:
        """Blocks of a launch: as many as the kernel has instances, at most one a core; a kernel walks its own grid from its block on."""
        return max(1, min(self.instances(kernel, rows), self._cores(kernel))), 1, 1

    def instances(self, kernel: TileKernel, rows: int) -> int:
        """Instances of a kernel for a row count of at most `rows`."""
        from tapeout.codegen.launch_grid import module_grid_at

        with tile_context(), ir.Location.unknown():
            if kernel.symbol not in self._modules:
                self._modules[kernel.symbol] = ir.Module.parse(kernel.text)
            return prod(module_grid_at(self._modules[kernel.symbol], rows))

    def _cores(self, kernel: TileKernel) -> int:
        from tapeout.codegen.ascend.facts import TARGETS, chip

        facts = chip(TARGETS[self.name])
        return facts.cube_cores if has_products(kernel.text) else facts.vector_cores

    def scale_limits(self, choice: Choice) -> tuple[int, int]:
        return EVERY_SCALE

    def build(self, kernels: Sequence[TileKernel], settings: Settings, store: Cache, progress: Progress) -> Built:
        made, compiled = lowered_kernels(kernels, self.name, store, settings.jobs, progress)
        files: dict[str, bytes] = {}
        rows: dict[str, Lowered] = {}
        for symbol, one in made.items():
            paths = {"file": f"kernels/{self.name}/{symbol}.mlir", "simulated": f"kernels/{self.name}/{symbol}.dump.mlir",
                     "source": f"source/{self.name}/{symbol}.mlir"}  # fmt: skip
            for key, path in paths.items():
                files[path] = one[key].encode()
            rows[symbol] = Lowered.model_validate_json(json.dumps({**one["facts"], **paths}))
        found = versions()
        return Built(files, {"ascendnpu-ir": found.compiler, "emitter": found.emitter}, rows, compiled)


def target(name: str) -> AscendTarget:
    """The target of a chip."""
    return AscendTarget(name)


def has_products(text: str) -> bool:
    """Whether a tile module multiplies matrices, and so needs a cube core."""
    return "linalg.matmul" in text or "tile.dot_scaled" in text


def _require_compiler() -> Any:
    """The installed compiler; raises `ToolchainMissing` with one sentence."""
    from tapeout.codegen.ascend.toolchain import PackageMissing, find_tools

    try:
        return find_tools()
    except PackageMissing as error:
        raise ToolchainMissing(str(error)) from None


def lowered_kernels(
    kernels: Sequence[TileKernel], name: str, store: Cache, jobs: int, progress: Progress) -> tuple[dict[str, dict[str, Any]], int]:
    """For each symbol `facts`, and the texts `file`, `simulated`, `source`; and how many were compiled here, the others came from the cache.

    `progress(symbol)` is called as each is done. Raises `ModuleRefused` with the sentence of the first kernel that is refused.
    """
    keys = {k.symbol: _key(k.text, name) for k in kernels}
    longest_first = sorted(kernels, key=lambda k: -len(k.text))
    tasks = {k.symbol: (k.text, name, str(store.root)) for k in longest_first}
    made, compiled = cached_kernels(compile_one, tasks, keys, store, jobs, progress, KernelRefused)
    return {symbol: json.loads(content) for symbol, content in made.items()}, compiled


def compile_one(text: str, name: str, root: str) -> tuple[bytes, bool]:
    """A lowered kernel as JSON, and whether it was compiled now (else it is from the cache); runs in a worker process."""
    return made_once(Cache(Path(root)), _key(text, name), lambda: _lowered(text, name))


def _lowered(text: str, name: str) -> bytes:
    from tapeout.codegen.ascend.build import build
    from tapeout.codegen.ascend.facts import TARGETS
    from tapeout.codegen.ascend.toolchain import CompileError

    tools = _require_compiler()
    with tile_context(), ir.Location.unknown():
        try:
            built = build(ir.Module.parse(text), tools, target=TARGETS[name])
        except CompileError as error:
            raise KernelRefused(f"{error} (--target {name})") from None
    content = {"facts": built.facts(), "file": built.compiled.module, "simulated": built.compiled.dump, "source": built.text}
    return json.dumps(content, sort_keys=True).encode()


def _key(text: str, name: str) -> str:
    from tapeout.codegen.ascend.facts import TARGETS

    found = versions()
    return key_of("lowered", text, TARGETS[name], found.compiler, found.emitter)


@cache
def versions() -> Versions:
    """The version of the compiler, and a hash of the sources that emit, drive and check."""
    import tapeout.codegen.ascend as package
    import tapeout.codegen.tile_arithmetic as arithmetic
    import tapeout.codegen.tile_builder as builder
    import tapeout.codegen.tile_formats as formats
    import tapeout.codegen.tile_memory as memory
    import tapeout.dialects.tile as dialect

    return Versions(_require_compiler().version, fingerprint(package, [arithmetic, builder, formats, memory, dialect]))
