"""The only module that names the distribution the MLIR Python bindings come from.

Everything else imports `ir`, `ext`, `rewrite`, `passmanager` and upstream dialects from here, so a change of bindings is a change of one file.
"""

import importlib
import importlib.metadata
import importlib.util
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

from tapeout.dialects.errors import MlirMissing

_ROOT = "torch_mlir"
_NEEDED = "needed torch-mlir==20261001: pip install 'tapeout[compile]'"


def load(name: str) -> ModuleType:
    """Imports `name` of the bindings; raises `MlirMissing` with the command that installs them."""
    try:
        with _ending_later():
            return importlib.import_module(f"{_ROOT}.{name}")
    except ImportError as error:
        if importlib.util.find_spec(_ROOT) is None:
            raise MlirMissing(f"the MLIR bindings ({_ROOT}) are not installed; found none, {_NEEDED}") from error
        raise MlirMissing(
            f"the MLIR bindings ({_ROOT}) cannot be imported; found torch-mlir {_installed()} ({error}), {_NEEDED}"
        ) from error


@contextmanager
def _ending_later() -> Iterator[None]:
    """Signals that end the process are heard when the block is through: an exception of theirs while the bindings start takes the process down."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    held = {number: handler for number, handler in handlers.items() if callable(handler)}
    try:
        for number in held:
            signal.signal(number, lambda found, _: came.append(found))
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        for found in came[:1]:
            signal.raise_signal(found)


def _installed() -> str:
    try:
        return importlib.metadata.version("torch-mlir")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


if TYPE_CHECKING:
    from torch_mlir import ir, passmanager, rewrite
    from torch_mlir.dialects import arith, bufferization, ext, func, linalg, llvm, math, memref, scf, tensor, vector
else:
    ir, passmanager, rewrite = (load(name) for name in ("ir", "passmanager", "rewrite"))
    ext = load("dialects.ext")
    arith, bufferization, func, linalg, llvm, math, memref, scf, tensor, vector = (
        load(f"dialects.{name}")
        for name in ("arith", "bufferization", "func", "linalg", "llvm", "math", "memref", "scf", "tensor", "vector")
    )

# Without this line every op of our dialects pays for a failed import when it is wrapped: 20 to 40 times slower walks.
load("dialects._ods_common")._cext.globals.append_dialect_search_prefix("tapeout.dialects")

__all__ = [
    "MlirMissing",
    "arith",
    "bufferization",
    "ext",
    "func",
    "ir",
    "linalg",
    "llvm",
    "load",
    "math",
    "memref",
    "passmanager",
    "rewrite",
    "scf",
    "tensor",
    "vector",
]
