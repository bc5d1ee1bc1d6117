"""Host memory for kernels: 64-byte aligned, zeroed, and viewed through numpy under the artifact's element names."""

from math import prod

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tapeout.runtime.artifact import ALIGNMENT, BITS
from tapeout.runtime.errors import MemoryRefused

Bytes = NDArray[np.uint8]

NUMPY: dict[str, np.dtype[np.generic]] = {
    "f64": np.dtype(np.float64),
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f8E4M3FN": np.dtype(ml_dtypes.float8_e4m3fn),
    "f8E8M0FNU": np.dtype(np.uint8),
    "f4E2M1FN": np.dtype(np.uint8),
    "i64": np.dtype(np.int64),
    "i32": np.dtype(np.int32),
    "i16": np.dtype(np.int16),
    "i8": np.dtype(np.int8),
    "ui8": np.dtype(np.uint8),
    "i1": np.dtype(np.bool_),
}
"""Element name to the dtype it has in memory. E8M0 scales and FP4 pairs are bytes."""


def value_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a dense array; FP4 is two to the byte."""
    return -(-prod(shape) * BITS[dtype] // 8)


def zeroed(size_bytes: int, what: str) -> Bytes:
    """Zeroed bytes at a 64-byte boundary (at least one, so that there is an address). Raises MemoryRefused, naming `what`."""
    size = max(size_bytes, 1)
    try:
        raw = np.zeros(size + ALIGNMENT, dtype=np.uint8)
    except (MemoryError, ValueError):
        raise MemoryRefused(what, f"a need of {size_bytes} bytes", "memory the system can map") from None
    start = -address(raw) % ALIGNMENT
    return raw[start : start + size]


def typed(raw: Bytes, dtype: str, shape: tuple[int, ...]) -> NDArray[np.generic]:
    """The first bytes of `raw` as an array of `shape`."""
    return raw[: value_bytes(dtype, shape)].view(NUMPY[dtype]).reshape(shape)


def address(array: NDArray[np.generic]) -> int:
    """The address of the first element."""
    return int(array.__array_interface__["data"][0])
