"""Triton as an assembler: from the emitted source of one kernel to a cubin, PTX and the assembler's report. No GPU, no driver.

Same source, chip and row, same bytes: line information (paths) is off, contraction of a multiply and an add is off, so that what is checked
in the interpreter is what runs, and nothing is read from or left in a cache. Triton 3.6 to 3.9.
"""

import contextlib
import importlib
import importlib.util
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapeout.codegen.nvidia.early import waits
from tapeout.codegen.nvidia.emit import Source
from tapeout.codegen.nvidia.facts import Chip
from tapeout.codegen.nvidia.report import Report, report
from tapeout.codegen.nvidia.schedules import launch_settings

FIRST, LAST = (3, 6), (3, 9)
GLUON = (3, 9)
"""The Triton whose Gluon the overrides are written in."""
WARP = 32
ALIGNMENT = 16
"""Bytes that every buffer's address is a multiple of: the code relies on it and the loader checks it."""
OWN_MEMORY = re.compile(r"\.global \.align \d+ \.b\d+ \w+\[\d+\];")
"""A kernel's words of its own in global memory, no table, which its next launch finds as this one left them: two launches must not run side by
side. Launches that take scratch memory never do (runtime/device/cuda.py), so such a kernel takes a byte of it."""
CHANGING = (
    "TRITON_OVERRIDE_ARCH", "TRITON_KERNEL_OVERRIDE", "TRITON_INSTRUMENTATION_MODE", "TRITON_ENABLE_ASAN", "TRITON_F32_DEFAULT",
    "TRITON_MOCK_PTX_VERSION", "TRITON_LIBDEVICE_PATH", "TRITON_PLUGIN_PATHS", "TRITON_STORE_BINARY_ONLY", "USE_IR_LOC",
    "ALLOW_LHS_TMEM_LAYOUT_CONVERSION", "LLVM_PASS_PLUGIN_PATH", "DISABLE_LLVM_OPT", "DISABLE_PTXAS_OPT", "PTXAS_OPTIONS",
)  # fmt: skip
"""Variables by which Triton makes other code of one source, or none: what it makes is kept under a key that knows nothing of them."""


class ToolchainMissing(RuntimeError):
    """No usable Triton; the text is one sentence: what was found, what is needed. Exit code 3."""

    exit_code = 3


class ToolchainError(RuntimeError):
    """Triton or its assembler refused a kernel; the text names the kernel and carries the first words of the reason."""


@dataclass(frozen=True)
class Triton:
    """An installed Triton: version and folder."""

    version: str
    folder: Path


@dataclass(frozen=True)
class Compiled:
    """One kernel for one chip. Arguments at launch: the buffers' addresses in order of `parameters`, then two scratch addresses (null where
    their bytes are 0). A block has 32 `warps` threads and `shared_bytes` of dynamic shared memory. One that `waits` may begin early."""

    name: str
    chip: str
    cubin: bytes
    ptx: str
    parameters: tuple[str, ...]
    warps: int
    stages: int
    shared_bytes: int
    tensor_memory_columns: int
    global_scratch_bytes: int
    profile_scratch_bytes: int
    waits: bool
    report: Report


def probe() -> Triton:
    """The installed Triton; raises `ToolchainMissing`."""
    found = importlib.util.find_spec("triton")
    needed = f"compiling for NVIDIA needs Triton {'.'.join(map(str, FIRST))} to {'.'.join(map(str, LAST))}"
    if found is None or found.origin is None:
        raise ToolchainMissing(f"found no Triton; {needed}: pip install 'tapeout[nvidia]'")
    version = _version(Path(found.origin))
    if not FIRST <= _release(version) <= LAST:
        raise ToolchainMissing(f"found Triton {version}; {needed}: pip install 'triton>=3.6,<3.10'")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ToolchainMissing(f"found Triton {version} with TRITON_INTERPRET=1, under which it compiles nothing; {needed}: unset the variable")
    if changing := [name for name in CHANGING if os.environ.get(name)]:
        raise ToolchainMissing(f"found Triton {version} with {' and '.join(changing)} set, by which it makes other code; expected code that "
                               "depends on its source alone: unset the variable")  # fmt: skip
    return Triton(version, Path(found.origin).parent)


def _version(init: Path) -> str:
    lines = [line for line in init.read_text().splitlines() if line.startswith("__version__")]
    return lines[0].split("=")[1].strip().strip("'\"") if lines else "of unknown version"


def _release(version: str) -> tuple[int, ...]:
    words = version.split(".")[:2]
    return tuple(int(w) for w in words) if all(w.isdigit() for w in words) else (0, 0)


def compile_cubin(source: Source, chip: Chip, schedule: Mapping[str, Any]) -> Compiled:
    """Compiles an emitted kernel for a chip with a schedule row's warps, stages and, where it sets some, registers a thread.

    Raises `ToolchainMissing`, `ToolchainError`.
    """
    found = probe()
    if source.language == "gluon" and _release(found.version) < GLUON:
        raise ToolchainError(f"kernel {source.name} for {chip.name}: its override needs Triton {'.'.join(map(str, GLUON))} or later, found "
                             f"{found.version}; the plain form is chosen by a tuned row with override 0")  # fmt: skip
    warps, stages = launch_settings(schedule)
    with tempfile.TemporaryDirectory() as folder, _settings(Path(folder)) as log:
        try:
            made = _compile(source, chip, schedule, Path(folder))
        except Exception as error:  # Triton raises what its parts raise: the border to it is here
            raise ToolchainError(f"kernel {source.name} for {chip.name}: {_first_words(error, log.getvalue())}") from error
        text = log.getvalue()
        if "registers" not in text:
            text = _assembler_log(made.asm["ptx"], chip, Path(folder))
    return _compiled(source, chip, warps, stages, made, text)


def _compiled(source: Source, chip: Chip, warps: int, stages: int, made: Any, log: str) -> Compiled:
    meta, ptx = made.metadata, made.asm["ptx"]
    threads = re.search(r"\.reqntid\s+(\d+)", ptx)
    if threads is not None and int(threads[1]) != warps * WARP:
        raise ToolchainError(f"kernel {source.name} for {chip.name}: compiled for {threads[1]} threads, its row says {warps} warps")
    columns, scratch, profile = (int(getattr(meta, name, 0) or 0) for name in ("tmem_size", "global_scratch_size", "profile_scratch_size"))
    scratch = max(scratch, int(OWN_MEMORY.search(ptx) is not None))
    found = report(log, ptx, chip, warps, meta.shared, columns, source.scaled_products)
    emitted = source.language == "triton"
    early = waits(ptx, reads=1 if emitted else None, groups=0 < source.first_warps < warps)
    return Compiled(meta.name, chip.name, made.asm["cubin"], ptx, tuple(name for name, _ in source.parameters), warps, stages, meta.shared,
                    columns, scratch, profile, early, found)


def _compile(source: Source, chip: Chip, schedule: Mapping[str, Any], folder: Path) -> Any:
    backends, compiler = _part("backends.compiler"), _part("compiler")
    aligned = {(i,): [["tt.divisibility", ALIGNMENT]] for i in range(len(source.parameters))}
    warps, stages = launch_settings(schedule)
    options = {"num_warps": source.first_warps or warps, "num_stages": stages, "enable_fp_fusion": False, "sanitize_overflow": False}
    if schedule.get("registers"):
        options["maxnreg"] = int(schedule["registers"])
    tree = _part("experimental.gluon._runtime").GluonASTSource if source.language == "gluon" else compiler.ASTSource
    made = tree(_function(source, folder), source.signature, {}, aligned)
    return compiler.compile(made, target=backends.GPUTarget("cuda", chip.capability, WARP), options=options)


def _part(name: str) -> Any:
    """A module of Triton. It is no import of this package: whoever only reads or emits kernels needs none."""
    return importlib.import_module(f"triton.{name}")


def _function(source: Source, folder: Path) -> Any:
    """The kernel as Triton's frontend wants it: a function that stands in a file."""
    path = folder / f"{source.name}.py"
    path.write_text(source.text)
    spec = importlib.util.spec_from_file_location(source.name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = written
    return getattr(module, source.name)


@contextlib.contextmanager
def _settings(folder: Path) -> Iterator[io.StringIO]:
    """Triton's own switches for one compile, put back behind it; yields what the assembler says."""
    knobs, log = _part("knobs"), io.StringIO()
    with knobs.cache.scope(), knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        knobs.cache.dir = str(folder / "cache")
        knobs.compilation.always_compile = True
        knobs.compilation.disable_line_info = True
        if hasattr(type(knobs.nvidia), "dump_ptxas_log"):
            knobs.nvidia.dump_ptxas_log = True
        yield log


def _assembler_log(ptx: str, chip: Chip, folder: Path) -> str:
    """`ptxas -v` once more, for a Triton that does not hand out its log."""
    knobs = _part("knobs")
    (folder / "kernel.ptx").write_text(ptx)
    tool = getattr(knobs.nvidia, "ptxas_blackwell", knobs.nvidia.ptxas).path
    command = [tool, "-v", "--fmad=false", f"--gpu-name={chip.architecture}", str(folder / "kernel.ptx"), "-o", str(folder / "kernel.o")]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def _first_words(error: Exception, log: str) -> str:
    lines = [line.strip() for line in f"{error}\n{log}".splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:6])[:600]}"
