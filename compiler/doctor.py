"""What this machine has of what compiling and running need: found, needed, what to do. Looks, and changes nothing."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass

from tapeout.compiler.cache import default_root


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for."""

    what: str
    found: str
    needed: str
    is_ok: bool
    remedy: str


def findings() -> list[Finding]:
    """Everything, in the order in which it is needed."""
    return [_python(), *map(_package, PACKAGES), _compiler(), *_ascend(), _processor(), _cache()]


PACKAGES = (
    ("numpy", "running", "pip install tapeout"),
    ("safetensors", "running", "pip install tapeout"),
    ("tokenizers", "running", "pip install tapeout"),
    ("torch-mlir", "compiling", "pip install 'tapeout[compile]'"),
)


def _python() -> Finding:
    return Finding("python", platform.python_version(), "3.11 or later", sys.version_info >= (3, 11), "use a newer Python")


def _package(row: tuple[str, str, str]) -> Finding:
    name, use, remedy = row
    try:
        return Finding(f"{name} ({use})", importlib.metadata.version(name), "any tested version", True, remedy)
    except importlib.metadata.PackageNotFoundError:
        return Finding(f"{name} ({use})", "none", name, False, remedy)


def _compiler() -> Finding:
    path = shutil.which("cc")
    if path is None:
        return Finding("C linker (compiling for the CPU)", "none", "cc", False, "install gcc or clang")
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return Finding(
        "C linker (compiling for the CPU)",
        (done.stdout.splitlines() or ["unknown version"])[0],
        "cc",
        done.returncode == 0,
        "install gcc or clang",
    )


def _ascend() -> list[Finding]:
    """The compiler of `--target ascend950`, and the back end that makes objects of its modules; both are optional."""
    from tapeout.codegen.ascend.toolchain import BACKEND, PACKAGE, VERSION, PackageMissing, find_tools

    try:
        tools = find_tools(os.environ.get("PATH", ""), os.environ.get("BISHENG_INSTALL_PATH"))
    except PackageMissing as error:
        return [Finding("Ascend compiler (compiling for ascend950)", "none", f"{PACKAGE} {VERSION}", False, str(error))]
    remedy = "install CANN 9.2 and source its environment script; until then kernels are lowered and checked, not assembled"
    return [Finding("Ascend compiler (compiling for ascend950)", f"{PACKAGE} {tools.version}", VERSION, True, ""),
            Finding(f"Ascend back end {BACKEND} (objects for ascend950)", str(tools.backend or "none"), BACKEND, tools.backend is not None, remedy)]


def _processor() -> Finding:
    from tapeout.runtime.artifact_check import host_features

    wanted = {"avx2", "fma", "bmi2", "f16c"}
    missing = sorted(wanted - host_features())
    found = "x86-64-v3" if not missing else f"{platform.machine()} without {', '.join(missing)}"
    return Finding("processor (running --target cpu)", found, "x86-64-v3", not missing, "run on a processor with AVX2, FMA, BMI2 and F16C")


def _cache() -> Finding:
    root = default_root()
    return Finding("compile cache", str(root), "a folder", not root.is_file(), "set TAPEOUT_CACHE_DIR to a folder")
