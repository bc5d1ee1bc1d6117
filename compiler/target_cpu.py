"""The CPU target: kernel objects, linked into one library with the executor."""

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass

from tapeout.codegen.kernel import EVERY_SCALE
from tapeout.codegen.lower_to_tile import TileKernel
from tapeout.codegen.select_kernels import Choice
from tapeout.compiler.cache import Cache
from tapeout.compiler.manifest import library, linker_here
from tapeout.compiler.objects import kernel_objects, lowering_fingerprint
from tapeout.compiler.settings import Settings
from tapeout.compiler.targets import Built, Grid, Progress
from tapeout.runtime.artifact import LIBRARY
from tapeout.runtime.artifact_kernels import CpuLevel


@dataclass(frozen=True)
class CpuTarget:
    """Kernels compute their own grids; the library needs the features of `--cpu`."""

    name: str

    def require(self) -> None:
        """The linker."""
        linker_here()

    def levels(self, settings: Settings) -> tuple[CpuLevel, None]:
        from tapeout.codegen.cpu.facts import cpu

        return CpuLevel(level=settings.cpu, features=cpu(settings.cpu).linux_flags), None

    def grid(self, kernel: TileKernel, rows: int) -> Grid | None:
        return None

    def scale_limits(self, choice: Choice) -> tuple[int, int]:
        return EVERY_SCALE

    def build(self, kernels: Sequence[TileKernel], settings: Settings, store: Cache, progress: Progress) -> Built | None:
        objects, compiled = kernel_objects(kernels, settings.cpu, store, settings.jobs, progress)
        if settings.stop_after == "lower-tile-to-loops":
            return None
        sources = {f"source/cpu/{k.symbol}.mlir": k.text.encode() for k in kernels}
        versions = {"torch-mlir": importlib.metadata.version("torch-mlir"), "lowering": lowering_fingerprint(), "linker": linker_here()}
        return Built({LIBRARY: library(objects, settings.cpu, store), **sources}, versions, compiled=compiled)


def target(name: str) -> CpuTarget:
    """The target."""
    return CpuTarget(name)
