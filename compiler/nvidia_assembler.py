"""The assembler that Triton will use for a chip: which file, which version, and whether it knows the chip; looked at before anything is compiled.

Triton brings two. Which of them serves a chip differs from version to version and is read off Triton's own rule; its environment variables
for another path count here as they count there.
"""

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tapeout.codegen.nvidia.facts import Chip
from tapeout.compiler.errors import ToolchainMissing

LEAST = {90: (12, 0), 100: (12, 8), 103: (12, 9)}
"""The CUDA release whose assembler first knew a chip (PTX ISA, release notes)."""
PATHS = {"ptxas": "TRITON_PTXAS_PATH", "ptxas-blackwell": "TRITON_PTXAS_BLACKWELL_PATH"}
SECONDS = 60


@dataclass(frozen=True)
class Assembler:
    """Its path, its version as it says it, and the CUDA release (major, minor) that it is of."""

    path: Path
    version: str
    release: tuple[int, int]


def assembler(triton: Path, chip: Chip, environment: Mapping[str, str] | None = None) -> Assembler:
    """The assembler for a chip of the Triton in a folder. Raises ToolchainMissing: what was found, what is needed."""
    name = _serving(triton, chip.capability)
    given = (os.environ if environment is None else environment).get(PATHS[name])
    path = Path(given) if given else triton / "backends" / "nvidia" / "bin" / name
    least = LEAST[chip.capability]
    needed = f"compiling for {chip.name} needs the assembler of CUDA {least[0]}.{least[1]} or later: pip install --force-reinstall triton"
    if not path.is_file():
        raise ToolchainMissing(f"found no assembler at {path}; {needed}")
    found = re.search(r"release (\d+)\.(\d+), V([\d.]+)", _said(path, needed))
    if found is None:
        raise ToolchainMissing(f"found an assembler that tells no version at {path}; {needed}")
    made = Assembler(path, found[3], (int(found[1]), int(found[2])))
    if made.release < least:
        raise ToolchainMissing(f"found the assembler of CUDA {found[1]}.{found[2]} at {path}; {needed}")
    return made


def _said(path: Path, needed: str) -> str:
    try:
        return subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", check=False, timeout=SECONDS).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolchainMissing(f"found an assembler that does not run at {path} ({error}); {needed}") from None


def _serving(triton: Path, capability: int) -> str:
    """The name of the assembler by Triton's rule, `arch < 90` for the older or `arch >= 100` for the newer one."""
    try:
        text = (triton / "backends" / "nvidia" / "compiler.py").read_text()
    except OSError:
        return "ptxas-blackwell"
    rule = re.search(r"def get_ptxas\(.{0,400}?arch\s*(<|>=)\s*(\d+)", text, re.DOTALL)
    if rule is None:
        return "ptxas-blackwell"
    return "ptxas-blackwell" if capability >= int(rule[2]) else "ptxas"
