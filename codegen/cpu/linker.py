"""Shared libraries of the CPU's objects, and the one outside tool that makes them: which linker there is, and how it is run. Needs no MLIR.

A library's bytes are the linker's too, so its name is part of what a library is kept under (`linker`); nothing else of the machine enters them.
Libraries need nothing but the C library's memory functions, which every process has.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

SECONDS = 60  # that the linker has to tell its version


class ToolchainError(RuntimeError):
    """A kernel that does not lower, or a linker that is missing or fails."""


class ToolMissing(ToolchainError):
    """There is no linker on this machine that works."""


def probe() -> str:
    """The path of the linker; raises `ToolMissing`. Needed once, before kernels are compiled for a library."""
    found = shutil.which("cc")
    if found is None:
        raise ToolMissing("found no C compiler driver `cc` on the path; linking kernels for the CPU needs it: install gcc or clang")
    return found


def linker() -> str:
    """Which linker makes libraries here: the driver and the program behind it, each with its version. Raises `ToolMissing`."""
    driver = probe()
    said = [_said([driver, *words]) for words in (["--version"], ["-shared", "-nostdlib", "-Wl,--version"])]
    return ", ".join(said)


def _said(command: list[str]) -> str:
    """The first line that a command prints."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=_environment(), timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolMissing(f"found a C compiler driver that does not run ({error}); linking kernels for the CPU needs one: "
                          "install gcc or clang") from None  # fmt: skip
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        words = next((line for line in lines if "error" in line), lines[0])
        raise ToolMissing(f"linking failed: {words}; linking kernels for the CPU needs a working `cc`")
    return (done.stdout.splitlines() or ["no version"])[0]


def _environment() -> dict[str, str]:
    """This process's, without what would be written into a library or put the tools' words into another language."""
    return {**{name: value for name, value in os.environ.items() if name != "LD_RUN_PATH"}, "LC_ALL": "C"}


def link(objects: Mapping[str, bytes], path: Path) -> None:
    """Links objects (kernel name -> bytes, in sorted order) and exports the kernels' names and `tapeout_execute`, if among them.

    Raises `ToolMissing`, or `ToolchainError` with the linker's words.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for name in sorted(objects):
            files.append(Path(folder) / f"{name}.o")
            files[-1].write_bytes(objects[name])
        exports = Path(folder) / "exports"
        exports.write_text("{ global: " + " ".join(f"{name};" for name in sorted(objects)) + " local: *; };\n")
        _run_linker([*map(str, files), f"-Wl,--version-script={exports}", "-o", str(path)])


def _run_linker(arguments: list[str]) -> None:
    command = [
        probe(),
        "-shared",
        "-nostdlib",
        "-Wl,--build-id=none",
        "-Wl,--gc-sections",
        "-Wl,--hash-style=gnu",
        "-Wl,-z,noexecstack",
        "-Wl,-s",
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=_environment())
    if done.returncode:
        raise ToolchainError(f"linking failed: {done.stderr.strip()}")
