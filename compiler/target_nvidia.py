"""The NVIDIA targets: every kernel as Triton source, PTX and cubin, made without a GPU; launches get the largest grid of their bucket.

Kernels are compiled in worker processes through the cache: the same tile text, chip, tool versions and emitter give the same bytes.
"""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tapeout.codegen.lower_to_tile import TileKernel
from tapeout.codegen.select_kernels import Choice
from tapeout.compiler.cache import Cache, key_of
from tapeout.compiler.cached_kernels import cached_kernels, made_once
from tapeout.compiler.errors import ModuleRefused, ToolchainMissing
from tapeout.compiler.settings import Settings
from tapeout.compiler.sources import fingerprint, tile_context
from tapeout.compiler.targets import Built, Grid, Progress
from tapeout.dialects._mlir import ir
from tapeout.runtime.artifact_kernels import Binary, CpuLevel, GpuLevel


class KernelRefused(Exception):
    """A kernel that the toolchain or a check of its report refuses; crosses the border of a worker process as its one sentence."""


@dataclass(frozen=True)
class Versions:
    """What decides a cubin besides its kernel: Triton, its assembler, our emitter's sources."""

    triton: str
    assembler: str
    emitter: str
    cuda: tuple[int, int]


@dataclass(frozen=True)
class NvidiaTarget:
    """One chip. Tile modules are parsed once, in a context of their own, to ask for grids."""

    name: str
    _modules: dict[str, ir.Module] = field(default_factory=dict, compare=False)

    def require(self) -> None:
        from tapeout.codegen.nvidia import toolchain

        try:
            toolchain.probe()
            versions(self.name)
        except toolchain.ToolchainMissing as error:
            raise ToolchainMissing(str(error)) from None

    def levels(self, settings: Settings) -> tuple[CpuLevel, GpuLevel]:
        """Any host processor; this chip, and a driver of the assembler's CUDA generation (minor versions are compatible)."""
        from tapeout.codegen.nvidia.facts import chip

        facts = chip(self.name)
        level = GpuLevel(chip=facts.architecture, capability=divmod(facts.capability, 10), cuda=(versions(self.name).cuda[0], 0))
        return CpuLevel(level="any", features=()), level

    def grid(self, kernel: TileKernel, rows: int) -> Grid:
        from tapeout.codegen.launch_grid import grid_part, module_grid_at

        with tile_context(), ir.Location.unknown():
            if kernel.symbol not in self._modules:
                self._modules[kernel.symbol] = ir.Module.parse(grid_part(kernel.text))
            x, y, z = module_grid_at(self._modules[kernel.symbol], rows)
        return max(x, 1), max(y, 1), max(z, 1)

    def scale_limits(self, choice: Choice) -> tuple[int, int]:
        from tapeout.codegen.nvidia.overrides import scale_limits

        return scale_limits(choice)

    def build(self, kernels: Sequence[TileKernel], settings: Settings, store: Cache, progress: Progress) -> Built:
        made, compiled = kernel_binaries(kernels, self.name, store, settings.jobs, progress)
        files: dict[str, bytes] = {}
        binaries: dict[str, Binary] = {}
        for symbol, one in made.items():
            path = f"kernels/{self.name}/{symbol}.cubin"
            files[path] = base64.b64decode(one["cubin"])
            files[f"source/{self.name}/{symbol}.py"] = one["source"].encode()
            files[f"source/{self.name}/{symbol}.ptx"] = one["ptx"].encode()
            binaries[symbol] = Binary(file=path, **one["facts"])
        found = versions(self.name)
        return Built(files, {"triton": found.triton, "ptxas": found.assembler, "emitter": found.emitter}, binaries, compiled)


def target(name: str) -> NvidiaTarget:
    """The target of a chip."""
    return NvidiaTarget(name)


def kernel_binaries(
    kernels: Sequence[TileKernel], chip: str, store: Cache, jobs: int, progress: Progress) -> tuple[dict[str, dict[str, Any]], int]:
    """For each symbol `facts`, `cubin` (base64), `ptx` and `source`; and how many were compiled here, the others came from the cache.

    `progress(symbol)` is called as each is done.
    """
    given = {k.symbol: _override(k, chip) for k in kernels}
    tasks = {k.symbol: (k.choice.family, k.text, k.choice.schedule, chip, given[k.symbol], str(store.root)) for k in kernels}
    keys = {k.symbol: _key(k.text, k.choice.schedule, chip, given[k.symbol]) for k in kernels}
    made, compiled = cached_kernels(compile_one, tasks, keys, store, jobs, progress, KernelRefused)
    return {symbol: json.loads(content) for symbol, content in made.items()}, compiled


def _override(kernel: TileKernel, name: str) -> Any:
    from tapeout.codegen.nvidia.emit import EmitError
    from tapeout.codegen.nvidia.facts import chip
    from tapeout.codegen.nvidia.overrides import source_for

    try:
        return source_for(kernel, chip(name))
    except EmitError as error:
        raise ModuleRefused(str(error)) from None


def compile_one(family: str, text: str, schedule: tuple[tuple[str, int], ...], chip: str, given: Any, root: str) -> tuple[bytes, bool]:
    """The binary of one tile module as JSON, and whether it was compiled now (else it is from the cache); runs in a worker process.

    `given` is the source that stands in for the emitted one, or None; `root` is the root of the cache.
    """
    return made_once(Cache(Path(root)), _key(text, schedule, chip, given), lambda: _binary(family, text, dict(schedule), chip, given))


def _binary(family: str, text: str, schedule: dict[str, int], name: str, given: Any) -> bytes:
    from tapeout.codegen.nvidia.emit import EmitError, emit
    from tapeout.codegen.nvidia.facts import chip
    from tapeout.codegen.nvidia.report import after, before
    from tapeout.codegen.nvidia.toolchain import ToolchainError, compile_cubin

    try:
        source = given or emit(text)
        _require_none(before(family, schedule, source, chip(name)), source.name, name)
        made = compile_cubin(source, chip(name), schedule)
    except (EmitError, ToolchainError) as error:
        raise KernelRefused(str(error)) from None
    _require_none(after(family, made.report, chip(name)), source.name, name)
    report = made.report
    facts = {
        "function": made.name,
        "warps": made.warps,
        "shared_bytes": made.shared_bytes,
        "registers": report.registers,
        "spills": report.spill_stores + report.spill_loads,
        "local_bytes": report.stack_bytes,
        "occupancy": report.occupancy,
        "scratch": made.global_scratch_bytes,
        "waits": made.waits,
    }
    content = {"facts": facts, "cubin": base64.b64encode(made.cubin).decode(), "ptx": made.ptx, "source": source.text}
    return json.dumps(content, sort_keys=True).encode()


def _require_none(problems: list[str], kernel: str, chip: str) -> None:
    if problems:
        raise KernelRefused(f"kernel {kernel} for {chip}: {'; '.join(problems)}")


def _key(text: str, schedule: tuple[tuple[str, int], ...], chip: str, given: Any) -> str:
    found = versions(chip)
    return key_of("cubin", text, repr(schedule), chip, repr(given), found.triton, found.assembler, found.emitter)


@cache
def versions(name: str) -> Versions:
    """Versions of the tools that a chip's binaries are made with, and a hash of the sources that print and compile kernels."""
    from tapeout.codegen.nvidia.facts import chip
    from tapeout.codegen.nvidia.toolchain import probe
    from tapeout.compiler.nvidia_assembler import assembler

    triton = probe()
    tool = assembler(triton.folder, chip(name))
    return Versions(triton.version, tool.version, _emitter(), tool.release)


@cache
def _emitter() -> str:
    import tapeout.codegen.nvidia as package
    import tapeout.dialects.tile as dialect

    return fingerprint(package, [dialect])
