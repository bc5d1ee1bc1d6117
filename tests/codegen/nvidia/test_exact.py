"""Codes in 16-bit arithmetic: every code of both formats times every usual scale is decoded exactly, every BF16 number is encoded as the model
says; a value that something else reads stays f32."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tapeout.codegen import tile_builder as t
from tapeout.codegen.nvidia.emit import emit_module
from tests.codegen.nvidia import triton_interpreter
from tests.codegen.test_tile_formats import every_bf16, fp4_nearest, near_borders, packed

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def emitted(module: Any) -> Any:
    with module.context:
        return emit_module(module)


def decode_codes(watched: bool = False) -> Any:
    def body(codes, scales, out, seen, count):
        v = t.dequantize_q8(t.View(codes, [8, 32]).load([0, 0], [8, 32]), t.View(scales, [8, 1]).load([0, 0], [8, 1]))
        t.View(out, [8, 32]).store([0, 0], t.exact_bf16(v))
        if watched:
            t.View(seen, [8, 32]).store([0, 0], v)

    return t.kernel("decode", {"codes": "e4m3", "scales": "i8", "out": "bf16", "seen": "f32", "count": "i32"}, body, lambda *b: [1])


def decode_bytes() -> Any:
    def body(codes, scales, out, count):
        factors = t.e8m0(t.View(scales, [8, 4]).load([0, 0], [8, 4]))
        halves = t.decode_fp4_row(t.View(codes, [8, 64]).load([0, 0], [8, 64]), factors)
        for column, half in zip((0, 64), halves, strict=True):
            t.View(out, [8, 128]).store([0, column], t.exact_bf16(half))

    return t.kernel("decode", {"codes": "i8", "scales": "i8", "out": "bf16", "count": "i32"}, body, lambda *b: [1])


@pytest.mark.parametrize("exponent", [-100, -9, 0, 7, 100])
def test_every_e4m3_code(exponent: int):
    codes = np.arange(256, dtype=np.uint8)
    codes[[0x7F, 0xFF]] = 0  # NaN: no encoder makes one
    source = emitted(decode_codes())
    assert "e4m3_to_bf16" in source.text
    arrays = {"codes": codes.reshape(8, 32).view(ml_dtypes.float8_e4m3fn), "scales": np.full((8, 1), 127 + exponent, np.uint8).view(np.int8),
              "out": np.zeros((8, 32), ml_dtypes.bfloat16), "seen": np.zeros((8, 32), np.float32), "count": np.ones(1, np.int32)}  # fmt: skip
    triton_interpreter.run(source, arrays, (1, 1, 1))
    wanted = arrays["codes"].astype(np.float64) * 2.0**exponent
    np.testing.assert_array_equal(arrays["out"].astype(np.float64), wanted)
    np.testing.assert_array_equal(np.signbit(arrays["out"].astype(np.float64)), np.signbit(wanted))


@pytest.mark.parametrize("exponent", [-100, -9, 0, 2, 100])
def test_every_pair_of_e2m1_codes(exponent: int):
    codes = np.arange(512).astype(np.uint8).reshape(8, 64)
    source = emitted(decode_bytes())
    assert source.text.count("e2m1_to_bf16(load") == 1
    arrays = {"codes": codes.view(np.int8), "scales": np.full((8, 4), 127 + exponent, np.uint8).view(np.int8),
              "out": np.zeros((8, 128), ml_dtypes.bfloat16), "count": np.ones(1, np.int32)}  # fmt: skip
    triton_interpreter.run(source, arrays, (1, 1, 1))
    wanted = np.concatenate([FP4[codes & 15], FP4[codes >> 4]], 1) * 2.0**exponent
    np.testing.assert_array_equal(arrays["out"].astype(np.float64), wanted)


def test_what_something_else_reads_stays_f32():
    assert "e4m3_to_bf16" not in emitted(decode_codes(watched=True)).text


def encode_rows(rows: int, quantize: Any, scale: str, groups: int) -> Any:
    def body(x, codes, scales, count):
        found = quantize(t.cast(t.View(x, [rows, 32]).load([0, 0], [rows, 32]), "f32"))
        for buffer, width, value in zip((codes, scales), (16, groups), found, strict=True):
            t.View(buffer, [rows, width]).store([0, 0], value)

    return t.kernel("encode", {"x": "bf16", "codes": "i8", "scales": scale, "count": "i32"}, body, lambda *b: [1])


def encoded(x: np.ndarray, *how: Any) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of rows [rows, 32]."""
    rows, (quantize, scale, kind, groups) = 1 << (len(x) - 1).bit_length(), how
    source = emitted(encode_rows(rows, quantize, scale, groups))
    assert source.text.count("pairs_to_e2m1(") == 2 and "4194304" not in source.text
    arrays = {"x": np.pad(x, ((0, rows - len(x)), (0, 0))), "codes": np.zeros((rows, 16), np.int8), "scales": np.zeros((rows, groups), kind),
              "count": np.ones(1, np.int32)}  # fmt: skip
    triton_interpreter.run(source, arrays, (1, 1, 1))
    return arrays["codes"][: len(x)], arrays["scales"][: len(x)]


INDEX, MAIN = (t.quantize_fp4_index, "i8", np.int8, 1), (t.quantize_fp4_main, "e4m3", ml_dtypes.float8_e4m3fn, 2)


def test_every_bf16_number_under_the_scale_of_its_row():
    x = every_bf16()
    codes, scales = encoded(x, *INDEX)
    factors = 2.0 ** (scales.view(np.uint8).astype(np.float64) - 127)
    np.testing.assert_array_equal(codes, packed(fp4_nearest(x.astype(np.float64) / factors)))
    codes, scales = encoded(x, *MAIN)
    np.testing.assert_array_equal(codes, packed(fp4_nearest(x.astype(np.float64) / scales.astype(np.float64).repeat(16, 1))))


def test_numbers_on_and_next_to_the_borders_between_codes():
    x, scales = near_borders()
    codes, found = encoded(x, *MAIN)
    np.testing.assert_array_equal(found.astype(np.float32), scales[:, ::16])
    np.testing.assert_array_equal(codes, packed(fp4_nearest(x.astype(np.float64) / scales)))
