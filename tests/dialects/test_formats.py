"""Number formats: every code is exact in BF16, golden values of docs/model.md appendix C, and scales that cannot be misplaced unseen."""

import ml_dtypes
import numpy as np
import pytest
from tests.dialects.harness import element, fp8_weight, same, tabulate, values

from tapeout.dialects._mlir import ir
from tapeout.dialects.define import load_dialects
from tapeout.dialects.format import (
    BF16,
    BITS,
    FP8_WEIGHT,
    FP32,
    INT32,
    LARGEST,
    Q4_INDEX,
    Q4_MAIN,
    Q8,
    REAL,
    Number,
    Scaled,
    Scaling,
    decode,
    encode,
    quantize,
)
from tapeout.dialects.types import Blocks, Ring, Tensor, from_ir, to_ir

E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
E2M1 = np.arange(16, dtype=np.uint8).astype(np.uint8).view(ml_dtypes.float4_e2m1fn)


def _every(codes: np.ndarray, scales: np.ndarray, scaling: Scaling) -> np.ndarray:
    """Every code under every scale, decoded: one row a scale."""
    row = np.resize(codes, -(-len(codes) // scaling.columns) * scaling.columns)
    each = np.repeat(scales[:, None], len(row) // scaling.columns, axis=1)
    return decode(Scaled(np.tile(row, (len(scales), 1)), each, scaling))


@pytest.mark.parametrize("number", [Q8, Q4_INDEX, Q4_MAIN], ids=str)
def test_every_decoded_value_is_exact_in_bf16(number: Number) -> None:
    codes = E4M3 if number.element == "f8E4M3FN" else E2M1
    codes = codes[np.isfinite(codes.astype(np.float32))]
    scales = E4M3[:127] if number == Q4_MAIN else np.arange(17, 240, dtype=np.uint8)  # what BF16's exponent range holds
    decoded = _every(codes, scales, number.scaling)
    assert decoded.shape[0] == len(scales)
    np.testing.assert_array_equal(decoded, decoded.astype(ml_dtypes.bfloat16).astype(np.float64))


def test_e2m1_codes_are_the_sixteen_of_the_specification() -> None:
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    np.testing.assert_array_equal(E2M1.astype(np.float64), magnitudes + [-m for m in magnitudes])


def test_q8_golden_group() -> None:
    x = np.full((1, 32), 0.75)
    x[0, 31] = 500.0
    q = quantize(x, Q8)
    assert q.scales.tolist() == [[128]]  # s = 2
    assert q.codes.astype(float)[0].tolist() == [0.375] * 31 + [256.0]
    assert decode(q)[0].tolist() == [0.75] * 31 + [512.0]


def test_q4_main_golden_group() -> None:
    q = quantize(np.linspace(-1.0, 2.0, 16)[None], Q4_MAIN)
    assert q.scales.astype(float).tolist() == [[0.34375]]
    assert q.codes.astype(float)[0].tolist() == [-3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 3, 4, 4, 6, 6]


def test_q4_index_golden_scale() -> None:
    x = np.zeros((1, 32))
    x[0, 7] = -3.7
    q = quantize(x, Q4_INDEX)
    assert q.scales.tolist() == [[127]]  # s = 1
    assert q.codes.astype(float)[0, 7] == -4.0


def test_floors_of_the_scales() -> None:
    zero = np.zeros((1, 32))
    assert quantize(zero, Q8).scales.tolist() == [[127 - 22]]  # 1e-4 / 448 lies just above 2^-23
    assert quantize(zero, Q4_INDEX).scales.tolist() == [[1]]  # 2^-126
    assert quantize(zero, Q4_MAIN).scales.astype(float).tolist() == [[2.0**-9, 2.0**-9]]


@pytest.mark.parametrize("number", [Q8, Q4_INDEX], ids=str)
def test_power_of_two_scale_is_the_least_that_holds_the_peak(number: Number) -> None:
    top = LARGEST[number.element]
    for exponent in range(-5, 6):
        for peak, wanted in ((top * 2.0**exponent, exponent), (top * 2.0**exponent * (1 + 2.0**-7), exponent + 1)):
            x = np.zeros((1, 32))
            x[0, 3] = peak
            assert int(quantize(x, number).scales[0, 0]) - 127 == wanted, (peak, number)


def test_q4_main_saturates_where_its_scale_rounds_down() -> None:
    x = np.zeros((1, 16))
    x[0, 0] = 6 * 1.0625  # the scale 1.0625 is a tie of E4M3 and goes to 1
    q = quantize(x, Q4_MAIN)
    assert (float(q.scales[0, 0]), float(q.codes[0, 0])) == (1.0, 6.0)


def test_ties_go_to_the_even_code() -> None:
    x = np.zeros((1, 32))
    x[0, :8] = [4.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    assert quantize(x, Q4_INDEX).codes.astype(float)[0, :8].tolist() == [4, 0, 1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize("number", [BF16, Number("f8E4M3FN"), Number("f4E2M1FN")], ids=str)
def test_numbers_are_rounded_once(number: Number) -> None:
    """Which way a number goes that is a hair beside a tie, float32 does not know any more."""
    step = {"bf16": 2.0**-7, "f8E4M3FN": 2.0**-3, "f4E2M1FN": 0.5}[number.element]
    for low, even in ((1.0, 1.0), (1.0 + step, 1.0 + 2 * step)):
        tie = low + step / 2
        found = decode(encode(np.array([tie - 2.0**-40, tie, tie + 2.0**-40]), number))
        assert found.tolist() == [low, even, low + step]
        assert decode(encode(-np.array([tie - 2.0**-40, tie, tie + 2.0**-40]), number)).tolist() == [-low, -even, -low - step]


@pytest.mark.parametrize("number", [Q8, Q4_INDEX, Q4_MAIN], ids=str)
def test_every_group_has_its_own_scale_and_misplacing_one_shows(number: Number) -> None:
    columns = number.scaling.columns
    groups = np.arange(15).reshape(3, 5)
    x = np.repeat(2.0 ** (groups - 7), columns, axis=1) * 1.5
    q = quantize(x, number)
    assert len(np.unique(q.scales.astype(np.float64))) == 15
    np.testing.assert_array_equal(decode(q), x)
    for a in range(15):
        wrong = q.scales.reshape(-1).copy()
        wrong[a], wrong[(a + 1) % 15] = wrong[(a + 1) % 15], wrong[a]
        moved = decode(Scaled(q.codes, wrong.reshape(q.scales.shape), q.scaling))
        assert int((moved != x).sum()) == 2 * columns


@pytest.mark.parametrize("shape", [(32, 32), (33, 65), (31, 1), (2, 40, 70)], ids=str)
def test_weight_blocks_cover_32_rows_and_columns(shape: tuple[int, ...]) -> None:
    w = fp8_weight(3, *shape)
    np.testing.assert_array_equal(decode(w), tabulate(shape, lambda *at: element(w, *at)))


@pytest.mark.parametrize("number", [Q8, Q4_INDEX], ids=str)
def test_quantizing_what_was_quantized_changes_nothing(number: Number) -> None:
    """The scale of a decoded group is never larger, and its codes stay exact (docs/model.md 6.3)."""
    once = decode(quantize(values(5, 7, 96, block=32), number))
    np.testing.assert_array_equal(decode(quantize(once, number)), once)


@pytest.mark.parametrize("number", [Q8, Q4_INDEX, Q4_MAIN, BF16, FP32, REAL], ids=str)
def test_no_rows(number: Number) -> None:
    assert decode(encode(np.zeros((0, 64)), number)).shape == (0, 64)


def test_selection_of_rows_takes_their_scales() -> None:
    q = quantize(values(1, 5, 64, block=32), Q8)
    same(q[np.array([3, 0])], Scaled(q.codes[[3, 0]], q.scales[[3, 0]], q.scaling))


def test_bytes_count_scales_and_pack_fp4() -> None:
    assert {n.element for n in (REAL, BF16, FP32, INT32)} <= set(BITS)
    assert (Q8.bytes((1, 512)), Q4_MAIN.bytes((1, 512)), Q4_INDEX.bytes((1, 128))) == (528, 288, 68)  # docs/model.md 9.5
    assert FP8_WEIGHT.bytes((33, 65)) == 33 * 65 + 2 * 3


def test_what_cannot_be_quantized_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot quantize an array of shape \(1, 33\)"):
        quantize(np.zeros((1, 33)), Q8)
    with pytest.raises(ValueError, match="blocks of one row"):
        quantize(np.zeros((32, 32)), FP8_WEIGHT)
    with pytest.raises(ValueError, match="no rule makes the scales"):
        quantize(np.zeros((1, 32)), Number("f8E4M3FN", Scaling("e4m3", 1, 32)))
    with pytest.raises(ValueError, match="unknown element type f7"):
        Number("f7")


VIEWS = [Tensor((None, 64), Q8), Tensor((4, 33, 64), FP8_WEIGHT), Tensor((None,), INT32), Ring(Tensor((512,), Q8), 134),
         Blocks(Tensor((512,), Q4_MAIN), 2), Ring(Tensor((1,), INT32), 1)]


@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_views_survive_the_ir(view: Tensor | Ring | Blocks) -> None:
    context = ir.Context()
    load_dialects(context)
    with context, ir.Location.unknown():
        assert from_ir(ir.Type.parse(str(to_ir(view)))) == view
