"""The only module that names the distribution the MLIR Python bindings come from.

Everything else imports `ir`, `ext`, `rewrite`, `passmanager` and upstream dialects from here, so a change of bindings is a change of one file.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

_ROOT = "torch_mlir"


class MlirMissing(ImportError):
    """The MLIR Python bindings cannot be imported: only compiling needs them, running an artifact does not."""


def load(name: str) -> ModuleType:
    """Imports `name` of the bindings; raises `MlirMissing` with the command that installs them."""
    try:
        return importlib.import_module(f"{_ROOT}.{name}")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] == _ROOT:
            raise MlirMissing(
                f"the MLIR bindings ({_ROOT}) are not installed; found none, needed torch-mlir==20261001: pip install 'tapeout[compile]'"
            ) from error
        raise


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
