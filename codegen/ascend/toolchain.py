"""Drives bishengir-compile-a5 of the installed package: from the text of the tile contract to a lowered module, and to an object where CANN is.

The last step of the driver, `hivmc-a5`, belongs to CANN. Without it a stand-in takes its place: the result is then *lowered*, not *assembled*,
and carries the command that assembles it. Same text, chip and flags, same bytes: library paths are replaced by a word.
"""

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tapeout.codegen.ascend.facts import DEFAULT_CHIP, chip

PACKAGE, MODULE, VERSION = "ascendnpu-ir", "ascendnpuir", "1.2.0"
BACKEND = "hivmc-a5"
LOWERED, ASSEMBLED = "lowered", "assembled"
CONTRACT_FLAGS = ("--enable-hfusion-compile=true", "--enable-triton-kernel-compile=true", "--enable-hivm-compile=true")
LIBRARY_WORD = "${ASCENDNPUIR}/lib/"
DUMP_POINT = "convert-vector-to-hivmave"
PRODUCT = "module.hivm.opt.mlir"
TIMEOUT_S = 600

_STAND_IN = """#!/bin/sh
# in place of the closed back end: keeps its command and its input
printf '%s\\n' "$*" >> "$(dirname "$0")/command"
from="$1"; before=""
for word in "$@"; do [ "$before" = "-o" ] && cp "$from" "$word"; before="$word"; done
exit 0
"""

# What the compiler says, and what that means for whoever wrote the kernel or its schedule row.
CAUSES = (
    (r"(ub|cbuf|cc) overflow, requires (\d+) bits while (\d+) bits", "needs {1} bits of {0} and has {2}: take smaller blocks in the schedule row"),
    (r"'linalg.generic' that was explicitly marked illegal", "holds an elementwise linalg.generic: use arith and math ops on tensors"),
    (r"Failed to obtain op buffer shape size which should be static", "allocates a buffer of run-time size: take a static box and a valid extent"),
    (r"Unknown PIPE", "copies inside the unified buffer of a mixed kernel: only vector kernels may"),
    (r"strides must not be zero", "reads a view of stride 0: copy the rows instead"),
    (r"vinterleave' op expected type", "interleaves lanes in a mixed kernel: keep even columns before odd ones"),
    (r"Cannot find option named", "was compiled for a chip that the compiler does not know"),
    (r"failed to satisfy constraint: Microscaling", "names a block-scaled format that does not exist"),
    (r"error: ([^\n]{1,200})", "is refused: {0}"),
    (r"Assertion `([^`']{1,160})", "meets an assertion of the compiler: {0}"),
)  # fmt: skip


class PackageMissing(RuntimeError):
    """The Ascend compiler is not installed; one sentence with the command that installs it."""


class CompileError(RuntimeError):
    """A kernel that the Ascend compiler does not lower; the text says which, why, and what to change."""


class CompileTimeout(CompileError):
    """A kernel that was not lowered in time, which says nothing about the kernel where the machine is busy: no other way is tried for it."""


class CompilerCrash(CompileError):
    """A kernel on which the Ascend compiler ends by a signal."""


@dataclass(frozen=True)
class Tools:
    """The installed compiler, and the real back end where there is one."""

    folder: Path
    version: str
    backend: Path | None = None

    @property
    def driver(self) -> Path:
        return self.folder / "bin" / "bishengir-compile-a5"

    def library(self, core: str) -> Path:
        """Device library bitcode of `aiv` or `aic`."""
        return self.folder / "lib" / f"meta_op.{core}.c310.bc"

    @property
    def state(self) -> str:
        return ASSEMBLED if self.backend else LOWERED


@dataclass(frozen=True)
class Compiled:
    """One lowered kernel. `module` has no machine paths; `dump` is what the simulator runs; `binary` the object file where assembled."""

    module: str
    dump: str
    binary: bytes | None
    command: str
    flags: tuple[str, ...]
    chip: str


def find_tools(search: str = "", install: str | None = None) -> Tools:
    """The installed package; `search` (a PATH) and `install` ($BISHENG_INSTALL_PATH) are where the back end may be.

    Raises `PackageMissing` where the package is missing or of another version.
    """
    found = importlib.util.find_spec(MODULE)
    if found is None or found.origin is None:
        raise PackageMissing(f"the Ascend compiler is not installed: found no package {PACKAGE}, needed {PACKAGE}=={VERSION}; "
                             f"pip install {PACKAGE}=={VERSION} (x86-64 Linux)")
    version = importlib.metadata.version(PACKAGE)
    if version != VERSION:
        raise PackageMissing(f"the Ascend compiler is {PACKAGE} {version}, needed {VERSION}: its checks hold for that version alone; "
                             f"pip install {PACKAGE}=={VERSION}")
    return Tools(Path(found.origin).parent, version, _backend(search, install))


def _backend(search: str, install: str | None) -> Path | None:
    folders = [install, f"{install}/bin", search] if install else [search]
    found = next((path for folder in folders if folder and (path := shutil.which(BACKEND, path=folder))), None)
    return Path(found) if found else None


def compile_kernel(text: str, name: str, tools: Tools, flags: Sequence[str] = (), target: str = DEFAULT_CHIP) -> Compiled:
    """Lowers one kernel; raises `CompileError` with a sentence, or `ChipError` for an unknown chip."""
    chip(target)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "kernel.mlir").write_text(text)
        done = _run(folder, tools, (*CONTRACT_FLAGS, f"--target={target}", *flags), name)
        product = folder / "out" / PRODUCT
        if done.returncode or not product.exists():
            kind = CompilerCrash if done.returncode < 0 else CompileError
            raise kind(f"kernel {name} {_cause(done.stderr)} (bishengir-compile-a5 returned {done.returncode})")
        dumps = sorted(folder.glob(f"dump/*/*_{DUMP_POINT}.mlir"), key=lambda p: (p.stat().st_mtime_ns, p.name))
        if not dumps:
            raise CompileError(f"kernel {name} was lowered but its module before {DUMP_POINT} was not printed; this compiler is not {VERSION}")
        binary = (folder / "out" / "kernel.o").read_bytes() if tools.backend else None
        return Compiled(normalised(product.read_text()), dumps[-1].read_text(), binary, finishing_command(target, flags), tuple(flags), target)


def _run(folder: Path, tools: Tools, flags: Sequence[str], name: str) -> "subprocess.CompletedProcess[str]":
    (folder / "out").mkdir()
    stand_in = folder / "stand-in"
    stand_in.mkdir()
    if tools.backend is None:
        (stand_in / BACKEND).write_text(_STAND_IN)
        (stand_in / BACKEND).chmod(0o755)
    first = stand_in if tools.backend is None else tools.backend.parent
    command = [str(tools.driver), "kernel.mlir", *flags, "--save-temps=out", "-o", "out/kernel.o", f"--mlir-print-ir-before={DUMP_POINT}",
               "--mlir-print-ir-tree-dir=dump", "--mlir-print-op-generic", "--mlir-disable-threading"]
    try:
        return subprocess.run(
            command, cwd=folder, env={"PATH": f"{first}:/usr/bin:/bin"}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise CompileTimeout(f"kernel {name} was not lowered in {TIMEOUT_S} s; take smaller blocks in the schedule row") from None
    except OSError as error:
        raise CompileError(f"{tools.driver.name} cannot be started ({error.strerror}); reinstall {PACKAGE}=={VERSION}") from error


def _cause(messages: str) -> str:
    for pattern, sentence in CAUSES:
        found = re.search(pattern, messages)
        if found:
            return sentence.format(*(str(group).strip() for group in found.groups()))
    return "is not lowered, and the compiler says nothing that is known here: " + (messages.strip().splitlines() or ["nothing at all"])[-1][:200]


def normalised(module: str) -> str:
    """The module without the paths of this machine."""
    return re.sub(r'"[^"\n]*/lib/((?:meta_op|host)[^"/\n]*\.bc)"', rf'"{LIBRARY_WORD}\1"', module)


def finishing_command(target: str, flags: Sequence[str] = ()) -> str:
    """The command that makes an object of a lowered module on a machine with CANN; `MODULE` and `OBJECT` stand for the files."""
    forwarded = [flag for flag in flags if flag.startswith(("--disable-fma", "--append-bisheng-options", "--link-aicore-bitcode"))]
    words = [BACKEND, "MODULE", f"--target={target}", "--enable-hfusion-compile=true", "--enable-hivm-compile=true",
             "--enable-triton-kernel-compile=true", *forwarded, "-o", "OBJECT", "--only-run-hivm-pipeline=false"]
    return " ".join(words)
