"""Runs a kernel in the interpreter and compiled, and compares every buffer.

Buffers of native runs end at a page that may not be touched: code that reads or writes behind one ends the test run at once.
"""

import ctypes
import mmap
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tapeout.codegen import tile_builder as t
from tapeout.codegen import tile_interpreter
from tapeout.codegen.cpu.native_kernel import NativeKernel, native_kernel
from tapeout.codegen.verify_tile import problems

Arrays = dict[str, np.ndarray]


def kernel(arguments: dict[str, str], body: Callable[..., Any], grid: Callable[..., Any] = lambda *buffers: [1]) -> Any:
    """A kernel called `k`, one instance unless told otherwise."""
    return t.kernel("k", arguments, body, grid)


def interpreted(module: Any, buffers: Mapping[str, np.ndarray]) -> Arrays:
    """Buffers after the interpreter."""
    copies = {name: array.copy() for name, array in buffers.items()}
    tile_interpreter.run(module, copies)
    return copies


def compiled(module: Any, buffers: Mapping[str, np.ndarray]) -> Arrays:
    """Buffers after the native kernel."""
    return _shared(native_kernel(module), buffers, 1)


def _shared(native: NativeKernel, buffers: Mapping[str, np.ndarray], workers: int) -> Arrays:
    copies = {name: guarded(array) for name, array in buffers.items()}
    for worker in range(workers):
        native.run(copies, worker, workers)
    return copies


def guarded(array: np.ndarray) -> np.ndarray:
    """A copy whose last byte is the last before a forbidden page."""
    size = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(address + size), mmap.PAGESIZE, 0) == 0
    copy = np.frombuffer(memory, np.uint8, array.nbytes, size - array.nbytes).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def agree(module: Any, buffers: Mapping[str, np.ndarray], tolerance: float = 0.0) -> Arrays:
    """Both ways give equal bits (or, relative to each buffer's largest value, differ by at most `tolerance`); returns the compiled buffers.

    NaN is one value: which of its bits a conversion sets is nobody's business.
    """
    assert problems(module) == []
    native = native_kernel(module)
    expected, found, shared = interpreted(module, buffers), _shared(native, buffers, 1), _shared(native, buffers, 3)
    for name in buffers:
        assert shared[name].tobytes() == found[name].tobytes(), f"{name} depends on the number of workers"
        if tolerance == 0.0:
            np.testing.assert_array_equal(_bits(found[name]), _bits(expected[name]), err_msg=name)
        else:
            _close(name, expected[name].astype(np.float64), found[name].astype(np.float64), tolerance)
    return found


def _close(name: str, expected: np.ndarray, found: np.ndarray, tolerance: float) -> None:
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected), err_msg=name)
    if expected.size:
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * max(np.nanmax(np.abs(expected)), 1e-30), err_msg=name)


def _bits(array: np.ndarray) -> np.ndarray:
    is_integer = np.issubdtype(array.dtype, np.integer)
    array = array if is_integer else np.where(np.isnan(array.astype(np.float64)), np.full_like(array, np.nan), array)
    return np.ascontiguousarray(array).view(np.dtype(f"u{array.dtype.itemsize}"))
