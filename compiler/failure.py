"""From an exception to one line and an exit code; an internal error also writes a folder that reproduces it.

Only typed errors are the user's: an OSError counts as one where it is about a path that the command line names, or a full disk, and want of
memory or of a package is the machine's.
"""

import errno
import json
import os
import platform
import shlex
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def report(error: Exception, arguments: Sequence[str]) -> int:
    """Prints the error to stderr and returns its exit code."""
    error = _not_ours(error, arguments) or error
    code = exit_code(error)
    if code != 4:
        print(f"tapeout: {error}", file=sys.stderr)
        return code
    folder = write_reproduction(error, arguments)
    print(
        f"tapeout: internal error ({type(error).__name__}: {error}); expected none: this is a fault of tapeout. What reproduces it is in {folder}; "
        "please report it with that folder",
        file=sys.stderr,
    )
    return code


def exit_code(error: Exception) -> int:
    """1 for a refused input, 3 for a missing tool, 4 for everything that is our own fault."""
    from tapeout.compiler.errors import CompilerError
    from tapeout.dialects.errors import MlirMissing
    from tapeout.models.deepseek_v41.errors import InputError
    from tapeout.runtime.errors import TapeoutError

    if isinstance(error, CompilerError | TapeoutError):
        return error.exit_code
    if isinstance(error, MlirMissing):
        return 3
    return 1 if isinstance(error, InputError) else 4


def _not_ours(error: Exception, arguments: Sequence[str]) -> Exception | None:
    """A typed error for want of memory, disk or a package, and for an OSError about a path that an argument names or one below it; None for any
    other."""
    from tapeout.compiler.errors import FileRefused, MemoryLacking, ToolchainMissing
    from tapeout.compiler.files import reason

    if isinstance(error, MemoryError):
        return MemoryLacking(str(error))
    if isinstance(error, ModuleNotFoundError) and (package := (error.name or "tapeout").split(".")[0]) != "tapeout":
        return ToolchainMissing(f"found no Python package {package}; the command needs it: pip install tapeout, or tapeout[compile], [nvidia] or "
                                "[ascend] for what compiles; `tapeout doctor` says what else is missing")  # fmt: skip
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FileRefused("writing to", error.filename or "standard output", reason(error), "room for it", "free some, or write elsewhere")
    if not isinstance(error, OSError) or not isinstance(error.filename, str | bytes | os.PathLike):
        return None
    path = os.fsdecode(error.filename)
    named = [word for argument in arguments if (word := argument.split("=", 1)[-1] if argument.startswith("--") else argument)]
    if not any(path == word or path.startswith(word.rstrip("/") + "/") for word in named):
        return None
    return FileRefused("path", path, reason(error), "a path that can be used so", "give another path")


def write_reproduction(error: Exception, arguments: Sequence[str]) -> Path:
    """A folder with the command, versions, traceback and the small input files that the command names."""
    folder = Path(tempfile.mkdtemp(prefix="tapeout-error-"))
    (folder / "command.txt").write_text(f"tapeout {shlex.join(arguments)}\n", "utf-8", "backslashreplace")
    (folder / "traceback.txt").write_text("".join(traceback.format_exception(error)), "utf-8", "backslashreplace")
    (folder / "versions.json").write_text(
        json.dumps({"python": platform.python_version(), "machine": platform.machine(), **_versions()}, indent=1)
    )
    for argument in arguments:
        for path in (Path(argument), Path(argument) / "config.json"):
            with suppress(OSError, ValueError):
                if path.is_file() and path.stat().st_size < 1 << 20:
                    (folder / path.name).write_bytes(path.read_bytes())
    return folder


def _versions() -> dict[str, str]:
    import importlib.metadata

    found = {}
    for name in ("tapeout", "torch-mlir", "numpy", "pydantic", "typer"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
