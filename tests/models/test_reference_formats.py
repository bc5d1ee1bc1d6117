"""Formats of the reference against model spec 9.2 to 9.4 and the golden values of appendix C."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from tapeout.models.deepseek_v41.reference import formats
from tapeout.models.deepseek_v41.reference.formats import Array


def _nearest_bf16(value: float) -> float:
    """Rounds to nearest even by exact rational arithmetic over the two neighbouring BF16 values."""
    exact = Fraction(value)
    guess = np.float32(value).astype(ml_dtypes.bfloat16)
    bits = int(guess.view(np.uint16))
    near = [np.uint16(b).view(ml_dtypes.bfloat16) for b in (bits - 1, bits, bits + 1) if 0 <= (b & 0x7FFF) <= 0x7F7F]
    return float(min(near, key=lambda v: (abs(Fraction(float(v)) - exact), int(v.view(np.uint16)) & 1)))


@pytest.mark.parametrize(
    "value",
    [1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-40, -(1 + 2**-8 + 2**-40), 3.3, -7e-39, 2**-133, 1.5 * 2**-133, 2.5e38],
)
def test_bf16_of_float64_rounds_once(value: float) -> None:
    assert formats.round_bf16(np.array([value]))[0] == _nearest_bf16(value)


def test_bf16_of_random_float64_and_float32() -> None:
    values = np.random.default_rng(3).standard_normal(500) * np.exp2(np.random.default_rng(4).integers(-20, 20, 500))
    np.testing.assert_array_equal(formats.round_bf16(values), [_nearest_bf16(v) for v in values])
    narrow = values.astype(np.float32)
    np.testing.assert_array_equal(formats.round_bf16(narrow), formats.round_bf16(narrow.astype(np.float64)))


def test_bf16_keeps_zero_and_overflows_to_infinity() -> None:
    assert formats.round_bf16(np.array([0.0, 3.4e38, 1e300, -1e300])).tolist() == [0.0, np.inf, np.inf, -np.inf]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_q8_golden(dtype: type) -> None:
    x: Array = np.full(64, 0.75, dtype)
    x[31], x[32] = 500, 448
    y = formats.q8(x)
    assert y.dtype == dtype
    assert y[:31].tolist() == [0.75] * 31 and y[31] == 512
    # the second group has scale 1: 0.75 is exact, 448 the largest code
    assert y[32] == 448 and y[33] == 0.75


def test_q8_floor_and_zero_group() -> None:
    x = np.zeros(64)
    x[32] = 3e-5  # below the floor 1e-4, whose scale is 2^-22
    y = formats.q8(x)
    assert not y[:32].any()
    assert y[32] == float(np.float32(3e-5 * 2**22).astype(ml_dtypes.float8_e4m3fn)) * 2**-22


def test_q8_scale_at_exact_power_of_two() -> None:
    x = np.zeros(32)
    x[:2] = 448 * 2.0**-3, 2.0**-3 * 17  # scale is 2^-3 and not 2^-2: 17 needs 5 bits and rounds to 16
    assert formats.q8(x)[:2].tolist() == [56.0, 2.0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_q4main_golden(dtype: type) -> None:
    codes = [-3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 3, 4, 4, 6, 6]
    x: Array = np.linspace(-1, 2, 16).astype(dtype)
    np.testing.assert_array_equal(formats.q4main(x), np.array(codes, dtype) * dtype(0.34375))


def test_q4main_divides_where_a_reciprocal_would_break_the_tie() -> None:
    x = np.zeros(16)
    x[:4] = 6 * 1.875, 1.25 * 1.875, -2.5 * 1.875, 5 * 1.875
    assert formats.q4main(x)[:4].tolist() == [6 * 1.875, 1.0 * 1.875, -2 * 1.875, 4 * 1.875]


def test_q4main_saturates_and_has_a_floor() -> None:
    x = np.zeros(32)
    x[0] = 6.25 * 2.0**-3  # A/6 = 0.1302 rounds down to 0.125: A/s = 6.25 saturates
    x[16] = 2.0**-9 * 0.75  # floor: the scale is 2^-9, 0.75 is a tie between codes 1 and 2
    y = formats.q4main(x)
    assert y[0] == 0.75 and y[16] == 2.0**-9
    big = np.full(16, 3000.0)  # scale saturates at 448
    assert formats.q4main(big)[0] == 448 * 6


def test_q4idx_golden_and_ties() -> None:
    x = np.zeros(64)
    x[:8] = 3.7, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, -0.25
    x[32] = 6.0 * 2.0**5
    y = formats.q4idx(x)
    assert y[:8].tolist() == [4.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, -0.0]
    assert y[32] == 192


def test_q4idx_quotient_five_goes_to_four() -> None:
    assert formats.round_e2m1(np.array([5.0, -5.0, 5.0001, 7.0])).tolist() == [4.0, -4.0, 6.0, 6.0]


def test_groups_are_independent() -> None:
    x = np.random.default_rng(0).standard_normal((3, 96)) * np.repeat([1.0, 64.0, 2.0**-9], 32)
    for quantise in (formats.q8, formats.q4idx, formats.q4main):
        parts = [quantise(x[:, start : start + 32]) for start in (0, 32, 64)]
        np.testing.assert_array_equal(quantise(x), np.concatenate(parts, axis=1))


def test_fp8_blocks_with_partial_last_block() -> None:
    draw = np.random.default_rng(1)
    weight = draw.standard_normal((65, 40)).astype(ml_dtypes.float8_e4m3fn)
    scale = draw.integers(120, 134, (3, 2)).astype(np.uint8)
    decoded = formats.decode_fp8_blocks(weight, scale, np.float64)
    for row, column in ((0, 0), (31, 31), (32, 0), (0, 32), (64, 39)):
        expected = float(weight[row, column]) * 2.0 ** (int(scale[row // 32, column // 32]) - 127)
        assert decoded[row, column] == expected


def test_fp4_nibble_order_sign_and_scale() -> None:
    packed = np.zeros((2, 32), np.int8)
    packed[1, :16] = np.arange(16, dtype=np.uint8).astype(np.int8) | (np.arange(16) << 4)[::-1].astype(np.uint8).view(np.int8)
    scale = np.array([[127, 127], [126, 129]], np.uint8)
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    decoded = formats.decode_fp4_rows(packed, scale, np.float64)
    assert decoded.shape == (2, 64) and not decoded[0].any()
    assert decoded[1, 0:32:2].tolist() == [v * 0.5 for v in table]
    assert decoded[1, 1:32:2].tolist() == [v * 0.5 for v in table[::-1]]


def test_fp8_rows_scale_by_row_and_32_columns() -> None:
    rows = np.ones((2, 64)).astype(ml_dtypes.float8_e4m3fn)
    scale = np.array([[127, 128], [129, 130]], np.uint8)
    np.testing.assert_array_equal(formats.decode_fp8_rows(rows, scale, np.float64)[:, ::32], [[1, 2], [4, 8]])


def test_every_decoded_weight_is_exact_in_bf16() -> None:
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(8, 32)
    finite = np.nan_to_num(codes.astype(np.float64)).astype(ml_dtypes.float8_e4m3fn)
    decoded = formats.decode_fp8_blocks(finite, np.array([[90]], np.uint8), np.float64)
    np.testing.assert_array_equal(formats.round_bf16(decoded), decoded)
