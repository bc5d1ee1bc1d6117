"""Binds an artifact's weight operands to a checkpoint: what lies as the kernel reads it is mapped, the rest is packed when it is asked for.

All names, element types, shapes and scales are checked before the first byte is packed. Where the tensors come from is a `TensorSource`
(the checkpoint of `models`, or a dictionary in a test); nothing here opens a file.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tapeout.runtime.artifact import ALIGNMENT, Rotary, WeightOperand, WeightPart
from tapeout.runtime.device.memory import NUMPY, address, zeroed
from tapeout.runtime.errors import ScaleTooLarge, ScaleTooSmall, TableUnavailable, TensorMismatch, TensorMissing, ZeroScales
from tapeout.runtime.transforms import NEUTRAL_SCALE, Array, transformed, transformed_shape

BYTES = (np.dtype(np.uint8), np.dtype(np.int8), np.dtype(ml_dtypes.float8_e8m0fnu))
"""Elements that are interchangeable in memory: packed FP4 and E8M0 scales."""
LOOK_BYTES = 1 << 16  # of scales looked at in one go
ROTARY_ROWS = 65536  # rows of a rotary table made at a time, so that float64 temporaries stay small


class TensorSource(Protocol):
    """Tensors by name as read-only views; raises KeyError for a name it does not have."""

    def tensor(self, name: str, /) -> NDArray[np.generic]: ...


Key = tuple[str, str]
"""Operand and part."""


class Parts(Mapping[Key, Array]):
    """Operand parts as arrays. A packed one is made anew whenever it is asked for and kept by nobody here: a device that copies weights needs one at
    a time, not all of them in the host's memory."""

    def __init__(self, operands: Sequence[WeightOperand], source: TensorSource, tables: Mapping[Key, Array]) -> None:
        self._source, self._tables = source, tables
        self._of = {(operand.name, part.part): (operand, part) for operand in operands for part in operand.parts}

    def __getitem__(self, key: Key) -> Array:
        operand, part = self._of[key]
        stored = [array for _, array in self.stored(key)]
        if part.layout == "as_stored" or operand.derived is not None:
            return stored[0]
        pad = NEUTRAL_SCALE if part.part == "scales" else 0
        made = transformed(stored, part.transforms, pad=pad, where=operand.name)
        is_new = not any(np.may_share_memory(made, array) for array in stored)
        return made if is_new and address(made) % ALIGNMENT == 0 else _aligned(made, part)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def stored(self, key: Key) -> list[tuple[str, Array]]:
        """What a part is made of: tensors by name as the checkpoint has them, or the table that was derived."""
        operand, part = self._of[key]
        if operand.derived is not None:
            return [(operand.name, self._tables[key])]
        return [(name, self._source.tensor(name)) for name in part.tensors]


@dataclass(frozen=True)
class BoundWeights:
    """Operand parts, and how many bytes are mapped and packed. `stamp` tells the files from edited ones."""

    parts: Parts
    mapped_bytes: int
    packed_bytes: int
    stamp: str = ""


def bind_weights(
    operands: Sequence[WeightOperand], source: TensorSource, token_map: Callable[[], NDArray[np.int32]] | None = None
) -> BoundWeights:
    """Binds every operand part. Raises a WeightsError before packing if a tensor is missing or does not fit.

    `token_map` makes the table of compressed token ids; it is called only if an operand needs it.
    """
    _check_tensors(operands, source)
    tables: dict[Key, Array] = {}
    sums = {"as_stored": 0, "packed": 0}
    for operand in operands:
        for part in operand.parts:
            if operand.derived is not None:
                tables[operand.name, part.part] = _aligned(_table(operand, part, token_map), part)
            else:
                _check_scales(part, source)
            sums[part.layout] += part.bytes
    return BoundWeights(Parts(operands, source, tables), sums["as_stored"], sums["packed"])


def rotary_table(rotary: Rotary) -> NDArray[np.float32]:
    """float32 [positions, 2 * pairs], cosines then sines of the angle float32(position * omega), omega rounded to float32.

    The angle is a float32 product of float32 operands, as in the model (docs/model.md, 4.2); its sine and cosine are rounded once.
    """
    omega = np.array(rotary.frequencies, dtype=np.float64).astype(np.float32)
    table = np.empty((rotary.positions, 2 * len(omega)), dtype=np.float32)
    for first in range(0, rotary.positions, ROTARY_ROWS):
        rows = table[first : first + ROTARY_ROWS]
        positions = np.arange(first, first + len(rows)).astype(np.float32)
        angles = (positions[:, None] * omega).astype(np.float64)
        rows[:, : len(omega)] = np.cos(angles)
        rows[:, len(omega) :] = np.sin(angles)
    return table


# -- checks


def _check_tensors(operands: Sequence[WeightOperand], source: TensorSource) -> None:
    missing: list[str] = []
    for operand in operands:
        for part in operand.parts:
            shapes = [_shape(source, name, missing) for name in part.tensors]
            if part.tensors and None not in shapes:
                _check_part(operand, part, source, [shape for shape in shapes if shape is not None])
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise TensorMissing("checkpoint", ", ".join(missing[:5]) + more + " not there", "every tensor of weights.json")


def _shape(source: TensorSource, name: str, missing: list[str]) -> tuple[int, ...] | None:
    try:
        return source.tensor(name).shape
    except KeyError:
        missing.append(name)
        return None


def _check_part(operand: WeightOperand, part: WeightPart, source: TensorSource, shapes: list[tuple[int, ...]]) -> None:
    for i, name in enumerate(part.tensors if part.stored else ()):
        stored_shape = part.stored[i % len(part.stored)]
        if shapes[i] != stored_shape:
            raise TensorMismatch(f"{operand.name}.{part.part} of {name}", f"shape {list(shapes[i])}", f"{list(stored_shape)}")
    where = f"{operand.name}.{part.part} of {part.tensors[0]}"
    shape = transformed_shape(shapes, part.transforms, where)
    expected = (*part.shape[:-1], -(-part.shape[-1] // 2)) if part.dtype == "f4E2M1FN" else part.shape
    if shape != expected:
        raise TensorMismatch(where, f"shape {list(shape)}", f"{list(expected)}")
    for name in part.tensors[: max(1, len(part.stored))]:
        stored = source.tensor(name).dtype
        found = np.dtype(np.float32) if "f32" in part.transforms else stored
        if not _same(found, NUMPY[part.dtype]):
            raise TensorMismatch(f"{operand.name}.{part.part} of {name}", f"elements {stored}", part.dtype)


def _same(found: np.dtype[np.generic], wanted: np.dtype[np.generic]) -> bool:
    return found == wanted or (found in BYTES and wanted in BYTES)


def _check_scales(part: WeightPart, source: TensorSource) -> None:
    """Raises a WeightsError for scales that the artifact's kernels cannot multiply by, or that were never written."""
    if part.part != "scales":
        return
    arrays = [source.tensor(name) for name in part.tensors]
    if part.most_scale is not None:
        _refuse_large_scales(part, part.most_scale, arrays)
    if part.least_scale is not None:
        _refuse_small_scales(part, part.least_scale, arrays)
    _refuse_zero_scales(part, arrays)


def _refuse_zero_scales(part: WeightPart, arrays: Sequence[Array]) -> None:
    for name, array in zip(part.tensors, arrays, strict=True):
        if array.size and array.dtype in BYTES and _is_zero(array.view(np.uint8).reshape(-1)):
            raise ZeroScales(name, "byte 0 (2^-127) everywhere", "the exponents of its weight")


def _is_zero(cells: NDArray[np.uint8]) -> bool:
    """Says whether all bytes are 0; of a mapped table no more is read than shows that they are not."""
    return not any(cells[first : first + LOOK_BYTES].any() for first in range(0, cells.size, LOOK_BYTES))


def _refuse_large_scales(part: WeightPart, most: int, arrays: Sequence[Array]) -> None:
    for name, array in zip(part.tensors, arrays, strict=True):
        found = int(array.view(np.uint8).max(initial=0))
        if found > most:
            raise ScaleTooLarge(name, f"byte {found} (2^{found - 127})", f"at most byte {most} (2^{most - 127})")


def _refuse_small_scales(part: WeightPart, least: int, arrays: Sequence[Array]) -> None:
    """Byte 0 is let through: quantizers write it for groups of zeros."""
    for name, array in zip(part.tensors, arrays, strict=True):
        found = 1 + int((array.view(np.uint8) - np.uint8(1)).min(initial=255))  # byte 0 is the largest here
        if found < least:
            raise ScaleTooSmall(name, f"byte {found} (2^{found - 127})", f"byte 0 (a group of zeros) or at least byte {least} (2^{least - 127})")


# -- tables


def _table(operand: WeightOperand, part: WeightPart, token_map: Callable[[], NDArray[np.int32]] | None) -> Array:
    derived = operand.derived
    if derived is not None and derived.rotary is not None:
        table: Array = rotary_table(derived.rotary)
    elif token_map is not None:
        table = np.asarray(token_map(), dtype=np.int32)
    else:
        raise TableUnavailable(operand.name, "no tokenizer", "the tokenizer of the checkpoint")
    if table.shape != part.shape or table.dtype != NUMPY[part.dtype]:
        raise TableUnavailable(operand.name, f"{table.dtype} {list(table.shape)}", f"{part.dtype} {list(part.shape)}")
    return table


def _aligned(array: Array, part: WeightPart) -> Array:
    """A copy at a 64-byte boundary."""
    raw = zeroed(array.nbytes, part.part)
    copy = raw[: array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
