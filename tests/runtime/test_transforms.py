"""Every weight transform puts every cell where its index map says; misfits are refused from shapes alone."""

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tapeout.runtime.errors import TransformRefused, TransformUnknown
from tapeout.runtime.transforms import TRANSFORMS, transformed, transformed_shape

Array = NDArray[Any]


def distinct(*shape: int) -> Array:
    """A different value in every cell, none of them 0."""
    return np.arange(1, 1 + int(np.prod(shape)), dtype=np.int32).reshape(shape)


def cells(array: Array) -> "itertools.product[tuple[int, ...]]":
    return itertools.product(*map(range, array.shape))


def test_stack() -> None:
    parts = [distinct(2, 3), distinct(2, 3) + 10, distinct(2, 3) + 20]
    out = transformed(parts, ["stack"])
    assert all(out[e, i, j] == parts[e][i, j] for e, i, j in cells(out))


def test_concat() -> None:
    first, second = distinct(3, 2), distinct(5, 2) + 100
    out = transformed([first, second], ["concat"])
    assert out.shape == (8, 2)
    assert all(out[r, c] == (first[r, c] if r < 3 else second[r - 3, c]) for r, c in cells(out))
    assert transformed([distinct(2), distinct(3)], ["concat"]).tolist() == [1, 2, 1, 2, 3]


@pytest.mark.parametrize(("experts", "count", "rows"), [(3, 2, 5), (1, 3, 1), (2, 1, 4), (0, 2, 3)])
def test_rows_together(experts: int, count: int, rows: int) -> None:
    parts = [distinct(rows, 7) + 1000 * i for i in range(experts * count)]
    if experts:
        out = transformed(parts, ["stack", f"rows_together:{count}"])
        assert out.shape == (experts, count * rows, 7)
        assert all(out[e, r, c] == parts[count * e + r // rows][r % rows, c] for e, r, c in cells(out))
    assert transformed_shape([(experts * count, rows, 7)], [f"rows_together:{count}"]) == (experts, count * rows, 7)


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 5), (1, 1), (2, 0, 3)])
def test_transpose(shape: tuple[int, ...]) -> None:
    array = distinct(*shape)
    out = transformed([array], ["transpose"])
    assert out.shape == (*shape[:-2], shape[-1], shape[-2]) and out.flags.c_contiguous
    assert all(out[(*lead, k, n)] == array[(*lead, n, k)] for *lead, k, n in cells(out))


@pytest.mark.parametrize("width", [1, 4, 16])
@pytest.mark.parametrize("shape", [(3, 8), (5, 7), (2, 3, 17), (1, 1)])
def test_panels(shape: tuple[int, ...], width: int) -> None:
    array = distinct(*shape)
    out = transformed([array], [f"panels:{width}"], pad=-9)
    assert out.shape == (*shape[:-2], -(-shape[-1] // width), shape[-2], width)
    for *lead, panel, k, column in cells(out):
        n = panel * width + column
        assert out[(*lead, panel, k, column)] == (array[(*lead, k, n)] if n < shape[-1] else -9)


@pytest.mark.parametrize("shape", [(3, 64), (2, 5, 128), (1, 192)])
def test_fp4_split(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    *_, rows, half = shape
    nibbles = rng.integers(0, 16, size=(*shape[:-1], half * 2), dtype=np.uint8)
    stored = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    out = transformed([stored], ["fp4_split"])
    assert out.shape == (*shape[:-2], half, rows) and out.dtype == np.uint8
    for *lead, byte_row, n in cells(out):
        tile, r = divmod(byte_row, 64)
        low, high = nibbles[(*lead, n, 128 * tile + r)], nibbles[(*lead, n, 128 * tile + 64 + r)]
        assert out[(*lead, byte_row, n)] == low | (high << 4)


def test_fp4_split_keeps_the_element_type() -> None:
    stored = np.arange(-64, 64, dtype=np.int8).reshape(2, 64)
    out = transformed([stored], ["fp4_split"])
    assert out.dtype == np.int8
    assert np.array_equal(out.view(np.uint8), transformed([stored.view(np.uint8)], ["fp4_split"]))


@pytest.mark.parametrize(("block", "rows"), [(32, 64), (32, 33), (4, 5), (1, 3)])
def test_expand_rows(block: int, rows: int) -> None:
    array = distinct(2, -(-rows // block), 3)
    out = transformed([array], [f"expand_rows:{block}:{rows}"])
    assert out.shape == (2, rows, 3)
    assert all(out[e, i, g] == array[e, i // block, g] for e, i, g in cells(out))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float16])
def test_f32_widens_every_value_exactly(dtype: Any) -> None:
    bits = np.dtype(dtype).itemsize * 8
    every = np.arange(2**bits, dtype=f"u{bits // 8}").view(dtype)
    finite = np.array([value for value in every if np.isfinite(float(value))], dtype=dtype)
    out = transformed([finite], ["f32"])
    assert out.dtype == np.float32 and len(finite) > 2**bits * 0.9
    assert np.array_equal(out.astype(dtype).view(f"u{bits // 8}"), finite.view(f"u{bits // 8}"))
    assert np.array_equal(out, finite.astype(np.float64))


def test_a_chain_is_applied_in_order() -> None:
    experts = [distinct(5, 6) + 100 * e for e in range(3)]
    out = transformed(experts, ["stack", "transpose", "panels:4"])
    assert out.shape == (3, 2, 6, 4)
    assert all(out[e, p, k, c] == (experts[e][p * 4 + c, k] if p * 4 + c < 5 else 0) for e, p, k, c in cells(out))
    assert np.array_equal(transformed(experts, ["transpose", "panels:4", "stack"]), out), "each array by itself gives the same"


@pytest.mark.parametrize("transforms", [["stack"], ["stack", "transpose"], ["stack", "panels:16"], ["concat", "expand_rows:2:8"]])
def test_shapes_are_known_before_data_moves(transforms: list[str]) -> None:
    arrays = [distinct(2, 3), distinct(2, 3)]
    assert transformed_shape([(2, 3), (2, 3)], transforms) == transformed(arrays, transforms).shape


@pytest.mark.parametrize("name", sorted(TRANSFORMS))
def test_every_transform_promises_the_shape_it_gives(name: str) -> None:
    text = {"panels": "panels:16", "expand_rows": "expand_rows:32:100", "rows_together": "rows_together:2"}.get(name, name)
    array = np.zeros((2, 4, 64), dtype=np.uint8)
    out = transformed([array], [text])
    assert transformed_shape([array.shape], [text]) == out.shape and out.flags.c_contiguous


@pytest.mark.parametrize(
    ("shapes", "transforms", "error", "words"),
    [
        ([(2, 3)], ["rotate"], TransformUnknown, "found rotate, expected concat"),
        ([(2, 3)], ["panels"], TransformUnknown, "panels with 1 positive"),
        ([(2, 3)], ["panels:0"], TransformUnknown, "panels:0"),
        ([(2, 3)], ["panels:-4"], TransformUnknown, "panels:-4"),
        ([(2, 3)], ["panels:4:4"], TransformUnknown, "panels:4:4"),
        ([(2, 3)], ["stack:2"], TransformUnknown, "stack with 0"),
        ([(2, 3)], ["panels:x"], TransformUnknown, "panels:x"),
        ([(3,)], ["transpose"], TransformRefused, "at least two axes"),
        ([(3,)], ["panels:4"], TransformRefused, "at least two axes"),
        ([(3, 4)], ["rows_together:3"], TransformRefused, "at least three axes"),
        ([(3, 4, 5)], ["rows_together:2"], TransformRefused, "a multiple of 2 matrices"),
        ([(3, 63)], ["fp4_split"], TransformRefused, "a multiple of 128 columns"),
        ([(3, 4)], ["expand_rows:2:9"], TransformRefused, "5 rows for 9 rows in blocks of 2"),
        ([(2, 3), (3, 2)], ["stack"], TransformRefused, "equal shapes"),
        ([(2, 3), (2, 4)], ["concat"], TransformRefused, "after the first axis"),
        ([(), ()], ["concat"], TransformRefused, "at least one axis"),
        ([(2, 3), (2, 3)], ["transpose"], TransformRefused, "found 2 arrays at the end"),
        ([], ["stack"], TransformRefused, "equal shapes"),
        ([], [], TransformRefused, "found 0 arrays"),
    ],
)
def test_misfits_are_refused(shapes: list[tuple[int, ...]], transforms: list[str], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as refused:
        transformed_shape(shapes, transforms, "layers.0.w1.codes")
    assert words in str(refused.value) and "layers.0.w1.codes" in str(refused.value)
