"""The targets of a compile: what each needs, makes and says of itself. A new target is one row here and one module beside this file.

An artifact holds one target; a compile for several shares the graph and its passes up to kernel selection (driver.py).
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tapeout.codegen.ascend.facts import TARGETS as ASCEND
from tapeout.codegen.lower_to_tile import TileKernel
from tapeout.codegen.select_kernels import Choice
from tapeout.compiler.cache import Cache
from tapeout.runtime.artifact_kernels import Binary, CpuLevel, GpuLevel, Lowered, NpuLevel

if TYPE_CHECKING:
    from tapeout.compiler.settings import Settings

Progress = Callable[[str], None]
"""Called with the symbol of each kernel that is done."""

Grid = tuple[int, int, int]

MODULES = {
    "cpu": "target_cpu",
    **dict.fromkeys(("sm90", "sm100", "sm103"), "target_nvidia"),
    **dict.fromkeys(ASCEND, "target_ascend"),
}
"""The module of `tapeout.compiler` that builds for a target."""


@dataclass(frozen=True)
class Built:
    """What a target made of the kernels: files by path inside the artifact, compiled facts by symbol, versions that decided the bytes.

    `compiled` kernels were compiled by this process; the others came from the cache.
    """

    files: dict[str, bytes]
    toolchain: dict[str, str]
    binaries: Mapping[str, Binary | Lowered] = field(default_factory=dict)
    compiled: int = 0


class Target(Protocol):
    """What the driver asks of a target."""

    def require(self) -> None:
        """Raises ToolchainMissing at once where a tool of the target is absent: what was found, what is needed."""

    def levels(self, settings: "Settings") -> tuple[CpuLevel, GpuLevel | NpuLevel | None]:
        """What the machine that runs the artifact must have."""

    def grid(self, kernel: TileKernel, rows: int) -> Grid | None:
        """Instances of a launch whose count is at most `rows`; None where kernels find their own at run time."""

    def scale_limits(self, choice: Choice) -> tuple[int, int]:
        """The smallest and the largest E8M0 byte of a weight's scales that a choice's kernel multiplies by exactly; byte 0 over zeros is always
        fine."""

    def build(self, kernels: Sequence[TileKernel], settings: "Settings", store: Cache, progress: Progress) -> Built | None:
        """Compiles and, where the target has one, links; None where `stop_after` ends the compile in between."""


def target_of(name: str) -> Target:
    """The target called `name`, one of MODULES."""
    made: Target = importlib.import_module(f"tapeout.compiler.{MODULES[name]}").target(name)
    return made
