"""What this machine has of what compiling and running need: found, needed, what to do. Looks, and changes nothing.

A package counts as there when its version is one that tapeout names and a fresh Python can import it.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from tapeout.compiler.cache import default_root

IMPORT_SECONDS = 120
PACKAGES = (
    ("numpy", "numpy", "running", "pip install tapeout"),
    ("ml-dtypes", "ml_dtypes", "running", "pip install tapeout"),
    ("pydantic", "pydantic", "running", "pip install tapeout"),
    ("safetensors", "safetensors", "running", "pip install tapeout"),
    ("tokenizers", "tokenizers", "running", "pip install tapeout"),
    ("filelock", "filelock", "compiling", "pip install tapeout"),
    ("platformdirs", "platformdirs", "compiling", "pip install tapeout"),
    ("torch-mlir", "torch_mlir.ir", "compiling", "pip install 'tapeout[compile]'"),
    ("jinja2", "jinja2", "compiling for sm90, sm100 and sm103", "pip install 'tapeout[compile]'"),
    ("triton", "triton", "compiling for sm90, sm100 and sm103", "pip install 'tapeout[nvidia]'"),
)
"""Distribution, module to import, what needs it, what to do."""
_PREAMBLE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for."""

    what: str
    found: str
    needed: str
    is_ok: bool
    remedy: str

    @property
    def stops_running(self) -> bool:
        """Whether no artifact can be run without it; the rest is needed by who compiles, each target by its own users."""
        return not self.is_ok and "running" in self.what


def findings() -> list[Finding]:
    """Everything, in the order in which it is needed."""
    return [_python(), *(_package(*row) for row in PACKAGES), *_assemblers(), _compiler(), *_ascend(), _processor(), _gpu(), _cache()]


def _python() -> Finding:
    return Finding("python (running)", platform.python_version(), "3.11 or later", sys.version_info >= (3, 11), "use a newer Python")


def _package(name: str, module: str, use: str, remedy: str) -> Finding:
    needed = needed_version(name)
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(f"{name} ({use})", "none", f"{name}{needed}", False, remedy)
    fault = import_fault(module)
    if fault is not None:
        return Finding(
            f"{name} ({use})", f"{version}, cannot be imported: {fault}", f"{name}{needed}", False, f"{remedy} --force-reinstall"
        )
    return Finding(f"{name} ({use})", version, f"{name}{needed}", is_version(version, needed), remedy)


def needed_version(name: str) -> str:
    """What tapeout's own metadata asks of a package, as `>=2.0` or `==1`; empty where it names no version."""
    try:
        lines = importlib.metadata.requires("tapeout") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    for line in lines:
        match = re.match(r"([A-Za-z0-9._-]+)\s*([<>=!~][^;]*)?", line)
        if match is not None and match[1].lower().replace("_", "-") == name:
            return (match[2] or "").strip()
    return ""


def is_version(version: str, needed: str) -> bool:
    """Whether a version fits `>=` and `==` rules; other rules and letters in versions are left to the installer."""
    found = _numbers(version)
    for rule in filter(None, needed.split(",")):
        sign, wanted = re.match(r"\s*([<>=!~]+)\s*(.*)", rule).groups()  # type: ignore[union-attr]
        pairs = list(zip_longest(found, _numbers(wanted), fillvalue=0))
        if (sign == ">=" and [a for a, _ in pairs] < [b for _, b in pairs]) or (sign == "==" and any(a != b for a, b in pairs)):
            return False
    return True


def _numbers(version: str) -> list[int]:
    match = re.match(r"\d+(\.\d+)*", version)
    return [int(word) for word in match[0].split(".")] if match else []


def import_fault(module: str) -> str | None:
    """Why a module cannot be imported, None if it can; tried in a fresh process, which a broken library may take down."""
    if importlib.util.find_spec(module.split(".")[0]) is None:
        return f"no module {module.split('.')[0]}"
    command = [sys.executable, "-c", f"{_PREAMBLE}import {module}", json.dumps(sys.path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no end within {IMPORT_SECONDS} s"
    if done.returncode < 0:
        return f"the import ends with signal {-done.returncode}"
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def _compiler() -> Finding:
    from tapeout.codegen.cpu.linker import ToolMissing, linker

    what = "C linker (compiling for the CPU)"
    try:
        return Finding(what, linker(), "cc", True, "")
    except ToolMissing as error:
        return Finding(what, "none that works", "cc", False, str(error))


def _ascend() -> list[Finding]:
    """The compiler of `--target ascend950`, and the back end that makes objects of its modules."""
    from tapeout.codegen.ascend.toolchain import BACKEND, PACKAGE, VERSION, PackageMissing, find_tools

    what = "Ascend compiler (compiling for ascend950)"
    try:
        tools = find_tools(os.environ.get("PATH", ""), os.environ.get("BISHENG_INSTALL_PATH"))
    except PackageMissing as error:
        return [Finding(what, "none", f"{PACKAGE} {VERSION}", False, str(error))]
    remedy = "install CANN 9.2 and source its environment script; until then kernels are lowered and checked, not assembled"
    back_end = Finding(f"Ascend back end {BACKEND} (objects for ascend950)", str(tools.backend or "none"), BACKEND, tools.backend is not None, remedy)
    return [Finding(what, f"{PACKAGE} {tools.version}", VERSION, True, ""), back_end]


def _assemblers() -> list[Finding]:
    """The assembler of every NVIDIA target, where there is a Triton to bring one."""
    from tapeout.compiler.errors import ToolchainMissing

    try:
        from tapeout.codegen.nvidia import toolchain
        from tapeout.codegen.nvidia.facts import CHIPS
        from tapeout.compiler.nvidia_assembler import LEAST, assembler
    except ImportError:  # of the bindings, which have a line of their own
        return []
    try:
        folder = toolchain.probe().folder
    except toolchain.ToolchainMissing:
        return []
    out = []
    for chip in CHIPS.values():
        what, needed = f"assembler (compiling for {chip.name})", "CUDA {}.{} or later".format(*LEAST[chip.capability])
        try:
            out.append(Finding(what, assembler(folder, chip).version, needed, True, ""))
        except ToolchainMissing as error:
            found = str(error).split("found ", 1)[-1].split("; ")[0]
            out.append(Finding(what, found, needed, False, "pip install --force-reinstall triton"))
    return out


def _gpu() -> Finding:
    """The first GPU, its driver, and the target whose artifacts it runs."""
    from tapeout.runtime.device.cuda import description, load_driver
    from tapeout.runtime.device_names import CHIPS
    from tapeout.runtime.errors import TapeoutError

    what, needed = "GPU (--device cuda)", f"a GPU of {', '.join(CHIPS)} with its driver, and cuda-bindings"
    try:
        name, capability, cuda = description(load_driver())
    except TapeoutError as error:
        return Finding(what, f"none: {error.where}, {error.found}", needed, False, "install the driver and pip install 'tapeout[nvidia]'")
    target = next((target for target, wanted in CHIPS.items() if wanted == capability), None)
    found = f"{name}, compute capability {capability[0]}.{capability[1]}, driver for CUDA {cuda[0]}.{cuda[1]}"
    return Finding(what, found + (f", runs {target}" if target else ""), needed, target is not None, "use another GPU, or --device cpu")


def _processor() -> Finding:
    from tapeout.runtime.artifact_check import host_features

    wanted = {"avx2", "fma", "bmi2", "f16c"}
    missing = sorted(wanted - host_features())
    found = "x86-64-v3" if not missing else f"{platform.machine()} without {', '.join(missing)}"
    return Finding("processor (running --target cpu)", found, "x86-64-v3", not missing, "run on a processor with AVX2, FMA, BMI2 and F16C")


def _cache() -> Finding:
    """The folder, or the nearest one above it that exists, in which it would be made."""
    what, needed, remedy = "compile cache", "a folder that can be written", "set TAPEOUT_CACHE_DIR to a folder"
    try:
        root = default_root().absolute()
    except ImportError as error:  # of the package that knows where caches are, which has a line of its own
        return Finding(what, f"no place for it: {error}", needed, False, remedy)
    there = next((path for path in (root, *root.parents) if os.path.lexists(path)), Path("/"))
    is_ok = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    found = str(root) if is_ok else f"{root}, as {there} is {'not writable' if there.is_dir() else 'no folder'}"
    return Finding(what, found, needed, is_ok, remedy)
