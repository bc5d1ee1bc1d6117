"""Number formats in kernels against ml_dtypes and the model's formulas: every code, every bf16 number, bit for bit, interpreted and compiled."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tapeout.codegen import tile_builder as t
from tests.codegen.both import Arrays, agree, kernel

BF16, E4M3, E8M0, FP4 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, ml_dtypes.float4_e2m1fn
WIDTH, ROWS = 32, 16
FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def every_bf16() -> np.ndarray:
    """All finite bf16 numbers, [rows, 32], neighbours in one row and, in the second half, mixed magnitudes."""
    numbers = np.arange(1 << 16, dtype=np.uint16).view(BF16)
    numbers = numbers[np.isfinite(numbers.astype(np.float32))]
    shuffled = np.random.default_rng(3).permutation(numbers)
    return np.concatenate([numbers, shuffled])[: len(numbers) * 2 // WIDTH * WIDTH].reshape(-1, WIDTH)


def rowwise(arguments: dict[str, str], widths: dict[str, int], rows: int, map_rows: Any) -> Any:
    """A kernel that maps row blocks of the first argument to row blocks of the others."""
    names = list(arguments)

    def body(*buffers: Any) -> None:
        row = t.mul(t.program_id(0), ROWS)
        views = [t.View(b, [rows, widths[n]]) for n, b in zip(names, buffers, strict=True)]
        results = map_rows(views[0].load([row, 0], [ROWS, widths[names[0]]]))
        for view, name, result in zip(views[1:], names[1:], results, strict=True):
            assert t.shape_of(result) == [ROWS, widths[name]]
            view.store([row, 0], result)

    return kernel(arguments, body, lambda *b: [-(-rows // ROWS)])


def run_rows(x: np.ndarray, outputs: dict[str, tuple[str, int, Any]], kind: str, map_rows: Any) -> Arrays:
    rows, width = x.shape
    arguments = {"x": kind} | {name: element for name, (element, _, _) in outputs.items()}
    widths = {"x": width} | {name: w for name, (_, w, _) in outputs.items()}
    buffers = {"x": x} | {name: np.zeros((rows, w), dtype) for name, (_, w, dtype) in outputs.items()}
    return agree(rowwise(arguments, widths, rows, map_rows), buffers)


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def test_e4m3_decode_is_exact_for_every_code() -> None:
    codes = np.resize(np.setdiff1d(np.arange(256), [0x7F, 0xFF]), 256).astype(np.uint8).view(E4M3).reshape(8, 32)  # all but NaN
    found = run_rows(codes, {"y": ("f32", 32, np.float32)}, "e4m3", lambda x: [t.decode_e4m3(x)])["y"]
    np.testing.assert_array_equal(found, codes.astype(np.float32))


def test_e4m3_encode_rounds_to_even_and_saturates() -> None:
    x = every_bf16()
    found = run_rows(x, {"y": ("e4m3", 32, E4M3)}, "bf16", lambda v: [t.encode_e4m3(t.cast(v, "f32"))])["y"]
    np.testing.assert_array_equal(bits(found), bits(np.clip(x.astype(np.float32), -448, 448).astype(E4M3)))


def test_e4m3_encode_of_f32_ties() -> None:
    codes = np.arange(0x7E, dtype=np.uint8).view(E4M3).astype(np.float32)
    middles = (codes[1:] + codes[:-1]) / 2
    near = np.concatenate([middles, np.nextafter(middles, np.float32(np.inf)), np.nextafter(middles, np.float32(0)), codes])
    x = np.resize(np.concatenate([near, -near]), (32, 32)).astype(np.float32)
    found = run_rows(x, {"y": ("e4m3", 32, E4M3)}, "f32", lambda v: [t.encode_e4m3(v)])["y"]
    np.testing.assert_array_equal(bits(found), bits(x.astype(E4M3)))


def test_e8m0_decode_is_exact() -> None:
    codes = np.resize(np.arange(255, dtype=np.uint8), (8, 32))
    found = run_rows(codes.view(np.int8), {"y": ("f32", 32, np.float32)}, "i8", lambda x: [t.e8m0(x)])["y"]
    np.testing.assert_array_equal(found, codes.view(E8M0).astype(np.float32))


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", BF16), ("f16", np.float16)])
def test_half_conversions_are_exact_and_round_to_even(kind: str, dtype: Any) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype).reshape(-1, 32)
    numbers = np.where(np.isnan(every.astype(np.float32)), np.zeros_like(every), every)
    found = run_rows(numbers, {"y": ("f32", 32, np.float32)}, kind, lambda x: [t.cast(x, "f32")])["y"]
    np.testing.assert_array_equal(bits(found), bits(numbers.astype(np.float32)))
    random = np.random.default_rng(5).integers(0, 1 << 32, (512, 32), dtype=np.uint32).view(np.float32)
    x = np.where(np.isnan(random), np.float32(0.1), random)
    back = run_rows(x, {"y": (kind, 32, dtype)}, "f32", lambda v: [t.cast(v, kind)])["y"]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(bits(back), bits(x.astype(dtype)))


def test_bf16_keeps_nan() -> None:
    x = np.full((16, 32), np.nan, np.float32)
    x.view(np.uint32)[:] = 0x7FFFFFFF
    assert np.isnan(run_rows(x, {"y": ("bf16", 32, BF16)}, "f32", lambda v: [t.cast(v, "bf16")])["y"].astype(np.float32)).all()


def test_q8_is_the_models_formula() -> None:
    x = every_bf16()
    found = run_rows(x, {"q": ("e4m3", 32, E4M3), "s": ("i8", 1, np.int8)}, "bf16", lambda v: t.quantize_q8(t.cast(v, "f32")))
    wide = x.astype(np.float64)
    peak = np.maximum(np.abs(wide).max(1), np.float32(1e-4))
    exponent = np.ceil(np.log2(peak / 448))
    np.testing.assert_array_equal(found["s"][:, 0].view(np.uint8), exponent + 127)
    scaled = np.clip(wide / 2.0 ** exponent[:, None], -448, 448).astype(np.float32)
    np.testing.assert_array_equal(bits(found["q"]), bits(scaled.astype(E4M3)))


def fp4_nearest(x: np.ndarray) -> np.ndarray:
    """Codes by search: nearest value, ties to the even code, saturating."""
    size = np.minimum(np.abs(x), 6)[..., None]
    distance = np.abs(size - FP4_VALUES)
    ties = distance == distance.min(-1, keepdims=True)
    even_first = np.where(ties, np.arange(8) % 2, 2)
    return (even_first.argmin(-1) + 8 * np.signbit(x)).astype(np.uint8)


def packed(codes: np.ndarray) -> np.ndarray:
    return (codes[:, 0::2] | codes[:, 1::2] << 4).view(np.int8)


def test_fp4_index_is_the_models_formula() -> None:
    x = every_bf16()
    found = run_rows(x, {"q": ("i8", 16, np.int8), "s": ("i8", 1, np.int8)}, "bf16", lambda v: t.quantize_fp4_index(t.cast(v, "f32")))
    wide = x.astype(np.float64)
    exponent = np.ceil(np.log2(np.maximum(np.abs(wide).max(1), 6 * 2.0**-126) / 6))
    np.testing.assert_array_equal(found["s"][:, 0].view(np.uint8), exponent + 127)
    np.testing.assert_array_equal(found["q"], packed(fp4_nearest(wide / 2.0 ** exponent[:, None])))


def test_fp4_main_is_the_models_formula() -> None:
    x = every_bf16()
    found = run_rows(x, {"q": ("i8", 16, np.int8), "s": ("e4m3", 2, E4M3)}, "bf16", lambda v: t.quantize_fp4_main(t.cast(v, "f32")))
    wide = x.astype(np.float64)
    peak = np.maximum(np.abs(wide).reshape(-1, 2, 16).max(2), 6 * 2.0**-9)
    scale = np.minimum(448, peak / 6).astype(np.float32).astype(E4M3)
    np.testing.assert_array_equal(bits(found["s"]), bits(scale))
    np.testing.assert_array_equal(found["q"], packed(fp4_nearest(wide / scale.astype(np.float64).repeat(16, axis=1))))


def near_borders() -> tuple[np.ndarray, np.ndarray]:
    """Rows of 32 numbers: under every scale, each of the seven borders between two codes times it and the BF16 numbers next to those, of both
    signs; and the scale of every number."""
    scales = np.arange(1, 0x7F, dtype=np.uint8).view(E4M3).astype(np.float32)
    borders = (np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32) * scales[:, None]).astype(ml_dtypes.bfloat16).view(np.uint16)
    near = np.concatenate([borders - 1, borders, borders + 1], axis=1).view(ml_dtypes.bfloat16).astype(np.float32)
    peak = np.broadcast_to((6 * scales)[:, None, None], (len(scales), 2, 1))
    x = np.concatenate([peak, np.pad(near, ((0, 0), (0, 9))).reshape(-1, 2, 15)], axis=2)
    return np.concatenate([x, -x]).reshape(-1, 32).astype(ml_dtypes.bfloat16), np.concatenate([scales, scales]).repeat(32).reshape(-1, 32)


def test_fp4_main_takes_quotients_on_a_border_to_the_even_code() -> None:
    x, scale = near_borders()
    found = run_rows(x, {"q": ("i8", 16, np.int8), "s": ("e4m3", 2, E4M3)}, "bf16", lambda v: t.quantize_fp4_main(t.cast(v, "f32")))
    np.testing.assert_array_equal(found["s"].astype(np.float32), scale[:, ::16])
    np.testing.assert_array_equal(found["q"], packed(fp4_nearest(x.astype(np.float64) / scale)))


def test_fp4_row_decodes_every_byte_under_distinct_factors() -> None:
    codes = np.resize(np.random.default_rng(1).permutation(256).astype(np.uint8), (64, 32))
    factors = (2.0 ** np.arange(-60, 68).reshape(64, 2) * 1.25).astype(np.float32)

    def body(c: Any, f: Any, even: Any, odd: Any) -> None:
        row = t.mul(t.program_id(0), ROWS)
        tiles = t.decode_fp4_row(t.View(c, [64, 32]).load([row, 0], [ROWS, 32]), t.View(f, [64, 2]).load([row, 0], [ROWS, 2]))
        for out, half in zip((even, odd), tiles, strict=True):
            t.View(out, [64, 32]).store([row, 0], half)

    arguments = {"c": "i8", "f": "f32", "even": "f32", "odd": "f32"}
    buffers = {
        "c": codes.view(np.int8),
        "f": factors,
        "even": np.zeros((64, 32), np.float32),
        "odd": np.zeros((64, 32), np.float32),
    }
    found = agree(kernel(arguments, body, lambda *b: [4]), buffers)
    wide = factors.repeat(16, axis=1)
    np.testing.assert_array_equal(found["even"], (codes & 15).view(FP4).astype(np.float32) * wide)
    np.testing.assert_array_equal(found["odd"], (codes >> 4).view(FP4).astype(np.float32) * wide)


def test_fp4_weights_decode_exactly_with_every_scale() -> None:
    n = 16
    codes = np.resize(np.arange(256, dtype=np.uint8), (64, n))
    scales = np.linspace(2, 250, 4 * n).astype(np.uint8).reshape(4, n)

    def body(c: Any, s: Any, y: Any) -> None:
        low, high = (t.View(s, [4, n]).load([first, 0], [2, n]) for first in (0, 2))
        for half, tile in enumerate(t.decode_fp4_weight(t.View(c, [64, n]).load([0, 0], [64, n]), low, high)):
            t.View(y, [128, n]).store([64 * half, 0], tile)

    buffers = {"c": codes.view(np.int8), "s": scales.view(np.int8), "y": np.zeros((128, n), BF16)}
    found = agree(kernel({"c": "i8", "s": "i8", "y": "bf16"}, body), buffers)["y"].astype(np.float32)
    values = np.concatenate([codes & 15, codes >> 4]).view(FP4).astype(np.float32)
    np.testing.assert_array_equal(found, values * scales.view(E8M0).astype(np.float32).repeat(32, axis=0))


def test_even_odd_and_interleave_are_inverse() -> None:
    x = every_bf16()[:64]
    outputs = {"e": ("bf16", 16, BF16), "o": ("bf16", 16, BF16), "y": ("bf16", 32, BF16)}
    found = run_rows(x, outputs, "bf16", lambda v: [*t.even_odd(v), t.interleave(*t.even_odd(v))])
    np.testing.assert_array_equal(bits(found["e"]), bits(np.ascontiguousarray(x[:, 0::2])))
    np.testing.assert_array_equal(bits(found["o"]), bits(np.ascontiguousarray(x[:, 1::2])))
    np.testing.assert_array_equal(bits(found["y"]), bits(x))
