"""Weight transforms: how stored tensors become the array a kernel reads. Each is an index map, written at its function.

A transform is text, `name` or `name:argument:...`, applied in order. `transformed` moves data; `transformed_shape` answers from
shapes alone, so that a misfit is refused before anything is allocated. Nothing is rounded: `f32` widens exactly.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapeout.runtime.device.memory import zeroed
from tapeout.runtime.errors import TransformRefused, TransformUnknown

Array = NDArray[np.generic]
Shape = tuple[int, ...]

FP4_TILE = 128  # columns that one group of 64 packed rows covers
NEUTRAL_SCALE = 127  # E8M0 byte of 2^0


@dataclass(frozen=True)
class Transform:
    """One step: the shape it yields from the shapes it is given, and the move itself. Both see all arrays of the list."""

    name: str
    arguments: int
    shape: Callable[[Sequence[Shape], tuple[int, ...]], list[Shape]]
    move: Callable[[Sequence[Array], tuple[int, ...], int], list[Array]]


def transformed_shape(shapes: Sequence[Shape], transforms: Sequence[str], where: str = "transforms") -> Shape:
    """The shape that tensors of `shapes` have after `transforms`; raises TransformUnknown or TransformRefused."""
    current = list(shapes)
    for text in transforms:
        transform, arguments = _parsed(text, where)
        try:
            current = transform.shape(current, arguments)
        except ValueError as error:
            raise TransformRefused(where, f"{text} on {[list(shape) for shape in current]}", str(error)) from None
    if len(current) != 1:
        raise TransformRefused(where, f"{len(current)} arrays at the end", "one array: stack or concat them")
    return current[0]


def transformed(arrays: Sequence[Array], transforms: Sequence[str], *, pad: int = 0, where: str = "transforms") -> Array:
    """Applies `transforms` to arrays and returns the one contiguous result. Padding cells hold `pad`."""
    transformed_shape([array.shape for array in arrays], transforms, where)
    current = list(arrays)
    for text in transforms:
        transform, arguments = _parsed(text, where)
        current = transform.move(current, arguments, pad)
    return np.ascontiguousarray(current[0])


def _parsed(text: str, where: str) -> tuple[Transform, tuple[int, ...]]:
    name, *rest = text.split(":")
    transform = TRANSFORMS.get(name)
    if transform is None:
        raise TransformUnknown(where, text, ", ".join(sorted(TRANSFORMS)))
    if len(rest) != transform.arguments or not all(word.isascii() and word.isdigit() and int(word) > 0 for word in rest):
        raise TransformUnknown(where, text, f"{name} with {transform.arguments} positive whole-number arguments")
    return transform, tuple(map(int, rest))


def _need(condition: bool, expected: str) -> None:
    if not condition:
        raise ValueError(expected)


# -- lists of arrays to one


def _empty(shape: Shape, dtype: np.dtype[Any]) -> Array:
    """Room at a 64-byte boundary, so that a part that is joined and no more is copied once."""
    size = math.prod(shape) * dtype.itemsize
    return zeroed(size, "packed weights")[:size].view(dtype).reshape(shape)


def _stack_shape(shapes: Sequence[Shape], arguments: tuple[int, ...]) -> list[Shape]:
    _need(len(shapes) > 0 and len(set(shapes)) == 1, "equal shapes")
    return [(len(shapes), *shapes[0])]


def _stack(arrays: Sequence[Array], arguments: tuple[int, ...], pad: int) -> list[Array]:
    """out[i, ...] = arrays[i][...]"""
    (shape,) = _stack_shape([array.shape for array in arrays], arguments)
    return [np.stack(arrays, out=_empty(shape, arrays[0].dtype))]


def _concat_shape(shapes: Sequence[Shape], arguments: tuple[int, ...]) -> list[Shape]:
    _need(len(shapes) > 0 and len(shapes[0]) > 0, "arrays of at least one axis")
    _need(len({shape[1:] for shape in shapes}) == 1, "equal shapes after the first axis")
    return [(sum(shape[0] for shape in shapes), *shapes[0][1:])]


def _concat(arrays: Sequence[Array], arguments: tuple[int, ...], pad: int) -> list[Array]:
    """out[sum of earlier rows + r, ...] = arrays[i][r, ...]"""
    (shape,) = _concat_shape([array.shape for array in arrays], arguments)
    return [np.concatenate(arrays, axis=0, out=_empty(shape, arrays[0].dtype))]


# -- each array by itself


def _each_shape(rule: Callable[..., Shape]) -> Callable[[Sequence[Shape], tuple[int, ...]], list[Shape]]:
    return lambda shapes, arguments: [rule(shape, *arguments) for shape in shapes]


def _each(move: Callable[..., Array]) -> Callable[[Sequence[Array], tuple[int, ...], int], list[Array]]:
    return lambda arrays, arguments, pad: [move(array, pad, *arguments) for array in arrays]


def _rows_together_shape(shape: Shape, count: int) -> Shape:
    _need(len(shape) >= 3, "at least three axes")
    _need(shape[0] % count == 0, f"a multiple of {count} matrices")
    return (shape[0] // count, count * shape[1], *shape[2:])


def _rows_together(array: Array, pad: int, count: int) -> Array:
    """[m*E, N, ..] to [E, m*N, ..]: out[e, N * i + n, ...] = array[m * e + i, n, ...]"""
    return array.reshape(_rows_together_shape(array.shape, count))


def _transpose_shape(shape: Shape) -> Shape:
    _need(len(shape) >= 2, "at least two axes")
    return (*shape[:-2], shape[-1], shape[-2])


def _transpose(array: Array, pad: int) -> Array:
    """out[..., k, n] = array[..., n, k]"""
    return np.swapaxes(array, -1, -2)


def _panels_shape(shape: Shape, width: int) -> Shape:
    _need(len(shape) >= 2, "at least two axes")
    return (*shape[:-2], -(-shape[-1] // width), shape[-2], width)


def _panels(array: Array, pad: int, width: int) -> Array:
    """[.., K, N] to [.., ceil(N/P), K, P]: out[..., n // P, k, n % P] = array[..., k, n]; the rest of the last panel is padding."""
    *lead, depth, columns = array.shape
    panels = -(-columns // width)
    out = np.full((*lead, depth, panels * width), pad, dtype=array.dtype)
    out[..., :columns] = array
    return np.ascontiguousarray(np.swapaxes(out.reshape(*lead, depth, panels, width), -3, -2))


def _fp4_split_shape(shape: Shape) -> Shape:
    _need(len(shape) >= 2, "at least two axes")
    _need(shape[-1] * 2 % FP4_TILE == 0, f"a multiple of {FP4_TILE} columns, two to a byte")
    return (*shape[:-2], shape[-1], shape[-2])


def _fp4_split(array: Array, pad: int) -> Array:
    """[.., N, K/2] to [.., K/2, N]. Stored byte (n, c) holds columns 2c (low) and 2c+1 (high) of row n.

    out[..., 64*t + r, n], r < 64, holds column 128*t + r of row n in its low nibble and column 128*t + 64 + r in its high one, so
    that one load of 64 byte rows yields two runs of 64 consecutive columns.
    """
    stored = np.ascontiguousarray(array).view(np.uint8)
    *lead, rows, half = stored.shape
    columns = np.stack((stored & 15, stored >> 4), axis=-1).reshape(*lead, rows, half * 2 // FP4_TILE, 2, FP4_TILE // 2)
    packed = (columns[..., 0, :] | (columns[..., 1, :] << 4)).reshape(*lead, rows, half)
    return np.ascontiguousarray(np.swapaxes(packed, -1, -2)).view(array.dtype)


def _expand_rows_shape(shape: Shape, block: int, rows: int) -> Shape:
    _need(len(shape) >= 2, "at least two axes")
    _need(shape[-2] == -(-rows // block), f"{-(-rows // block)} rows for {rows} rows in blocks of {block}")
    return (*shape[:-2], rows, shape[-1])


def _expand_rows(array: Array, pad: int, block: int, rows: int) -> Array:
    """[.., ceil(n/R), g] to [.., n, g]: out[..., i, :] = array[..., i // R, :]"""
    return np.repeat(array, block, axis=-2)[..., :rows, :]


def _f32_shape(shape: Shape) -> Shape:
    return shape


def _f32(array: Array, pad: int) -> Array:
    """out[...] = float32(array[...]), exact for every float of at most 32 bits."""
    return array.astype(np.float32)


TRANSFORMS: dict[str, Transform] = {
    transform.name: transform
    for transform in (
        Transform("stack", 0, _stack_shape, _stack),
        Transform("concat", 0, _concat_shape, _concat),
        Transform("rows_together", 1, _each_shape(_rows_together_shape), _each(_rows_together)),
        Transform("transpose", 0, _each_shape(_transpose_shape), _each(_transpose)),
        Transform("panels", 1, _each_shape(_panels_shape), _each(_panels)),
        Transform("fp4_split", 0, _each_shape(_fp4_split_shape), _each(_fp4_split)),
        Transform("expand_rows", 2, _each_shape(_expand_rows_shape), _each(_expand_rows)),
        Transform("f32", 0, _each_shape(_f32_shape), _each(_f32)),
    )
}
