"""Builds one kernel for this host and runs it on numpy buffers: what tests and the tuner use. The runtime loads whole libraries itself."""

import ctypes
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tapeout.codegen.cpu.facts import Cpu
from tapeout.codegen.cpu.linker import ToolchainError, link
from tapeout.codegen.cpu.toolchain import compile_object
from tapeout.codegen.tile_memory import argument_names, kernel_name
from tapeout.dialects._mlir import ir


@dataclass(frozen=True)
class NativeKernel:
    """A loaded kernel; the library stays loaded with it."""

    name: str
    arguments: tuple[str, ...]
    function: Any
    library: Any

    def run(self, buffers: Mapping[str, np.ndarray], worker: int = 0, workers: int = 1) -> None:
        """Runs one worker's share of the grid on contiguous arrays by argument name. Types and lengths are the caller's promise."""
        missing = [a for a in self.arguments if a not in buffers]
        if missing:
            raise ToolchainError(f"kernel {self.name} takes buffers {list(self.arguments)}; missing {missing}")
        self.function(self.table(buffers), worker, workers)

    def table(self, buffers: Mapping[str, np.ndarray]) -> Any:
        """The array of addresses that the kernel takes."""
        return (ctypes.c_void_p * len(self.arguments))(*[buffers[a].ctypes.data for a in self.arguments])


def native_kernel(module: ir.Module, target: Cpu | None = None) -> NativeKernel:
    """Compiles, links and loads a kernel module."""
    name = kernel_name(module)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.so"
        link({name: compile_object(module, target)}, path)
        library = ctypes.CDLL(str(path))
    function = getattr(library, name)
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64], None
    return NativeKernel(name, tuple(argument_names(module)), function, library)
