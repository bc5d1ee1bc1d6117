"""The override for linear layers of few rows: what it covers, how rows of the slice's shapes are cut, its windows of scales, what it compiles to.

Its numbers come from a GPU (`python -m tests.bench.gpu`): Gluon has no interpreter. What can be checked without one is: codes by the inline
instructions, on numpy; the windows, over all bytes; that sums in units of scales are exact inside them.
"""

import itertools
import os
import re
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tapeout.codegen.kernel import Request
from tapeout.codegen.lower_to_tile import TileKernel, lower
from tapeout.codegen.nvidia import overrides
from tapeout.codegen.nvidia.emit import EmitError
from tapeout.codegen.nvidia.facts import SM90, SM100
from tapeout.codegen.nvidia.overrides import linear_few_sm90, source_for
from tapeout.codegen.nvidia.product_schedules import linear_for
from tapeout.codegen.select_kernels import Choice
from tapeout.dialects.format import BF16, FP8_WEIGHT, FP32, Q8
from tapeout.dialects.types import Tensor
from tests.codegen.nvidia import ptx
from tests.codegen.nvidia.compiling import compiled, jobs

TILE = 8
GOLDEN = Path(__file__).parent / "golden" / "linear_few.txt"
SHAPES = [(25600, 6144, 1), (5120, 15360, 1), (5120, 8192, 1), (32768, 1280, 1), (2304, 5120, 1), (5120, 2304, 1), (1280, 5120, 1), (4096, 1280, 1),
          (512, 5120, 1), (8192, 4096, 8)]  # fmt: skip


def request(n: int, k: int, groups: int = 1, x=None, out=BF16, weight=FP8_WEIGHT) -> Request:
    number = x or (Q8 if groups == 1 else BF16)
    return Request("nn.linear", (("groups", groups), ("wide", False)), (Tensor((None, k * groups), number), Tensor((n, k), weight)),
                   (Tensor((None, n), out),))  # fmt: skip


def kernel(one: Request, **settings: int) -> TileKernel:
    row = {**linear_for(one, SM90, 16), **settings}
    return lower(Choice(one, "linear", tuple(sorted(row.items()))))


@pytest.mark.parametrize(("n", "k", "groups"), SHAPES)
def test_shapes_of_the_slice_are_cut_in_whole_steps_and_keep_the_chip_busy(n: int, k: int, groups: int):
    row = linear_for(request(n, k, groups), SM90, 16)
    many = linear_for(request(n, k, groups), SM90, 4096)
    split = row["warps"] // row["segments"]
    assert row["override"] == 1 and row["split"] == 0 and row["segments"] == many["segments"]
    assert row["warps"] == split * row["segments"] <= 16 and row["block_n"] % (8 * split) == 0 and k % (128 * row["segments"]) == 0
    assert n // groups % row["block_n"] == 0 or groups == 1
    assert row["stages"] * row["warps"] * (row["block_n"] // split * 128 + 16 * 128) <= SM90.shared_bytes_per_block
    blocks = -(-n // row["block_n"])
    assert blocks >= SM90.processors // 2 or row["block_n"] == TILE  # half the chip at least, or as many blocks as there are
    assert -(-blocks // SM90.processors) * SM90.processors * row["block_n"] < 1.5 * n + SM90.processors * row["block_n"] // 2  # no turn for a few


@pytest.mark.parametrize(("one", "chip", "words"), [
    (request(256, 512), SM100, "sm100 multiplies codes by other instructions"),
    (request(256, 512, out=FP32), SM90, "expected FP8 or BF16 rows and a BF16 result"),
    (request(256, 512, weight=BF16), SM90, "expected FP8 values with scales of 32x32"),
    (request(256, 96), SM90, "a multiple of 128 columns"),
    (request(72, 512, 6), SM90, "expected groups of a multiple of 8 rows"),
    (replace(request(256, 512), op="nn.fused:linear"), SM90, "nn.fused:linear is no linear layer"),
])  # fmt: skip
def test_others_are_left_to_the_plain_form(one: Request, chip, words: str):
    assert words in linear_few_sm90.why_not(one, chip)
    assert linear_few_sm90.row(one, chip, 1) is None


def test_segments_of_odd_steps_are_left_to_the_plain_form():
    assert linear_few_sm90.row(request(256, 384), SM90, 2) is None and linear_few_sm90.row(request(256, 384), SM90, 1) is not None


def test_more_rows_have_rows_of_their_own():
    assert linear_for(request(1280, 5120), SM90, 64).get("override", 0) != 1 and linear_for(request(1280, 5120), SM90, 16)["override"] == 1


@pytest.mark.parametrize(("shape", "rows", "cut"), [
    ((512, 5120), 64, (16, 8, 6)), ((4096, 1280), 64, (32, 2, 4)), ((4096, 1280), 128, None), ((1792, 5120), 64, None), ((5120, 2304), 64, None),
    ((1280, 5120), 64, None), ((1280, 5120), 32, (24, 8, 5)), ((8192, 4096, 8), 64, None)])  # fmt: skip
def test_blocks_of_rows_stand_side_by_side_where_the_busiest_multiprocessor_reads_little(shape, rows: int, cut: tuple[int, int, int] | None):
    row = linear_for(request(*shape), SM90, rows)
    assert (row["override"] == 1) == (cut is not None) and row["segments"] == linear_for(request(*shape), SM90, 16)["segments"]
    if cut is not None:
        assert (row["block_n"], row["warps"], row["stages"], row["block_m"], row["split"]) == (*cut, 16, 0)
        turns = -(-(-(-shape[0] // row["block_n"]) * -(-rows // 16)) // SM90.processors)
        tiles, split = row["block_n"] // 8 * row["segments"] // row["warps"], row["warps"] // row["segments"]
        assert turns * (row["block_n"] + 16 * split) * shape[1] <= linear_few_sm90.MOST_READ
        assert turns * row["stages"] * row["warps"] * (tiles * 8 + 17) * 128 <= SM90.shared_bytes_per_block  # all are resident


@pytest.mark.parametrize("number", [Q8, BF16])
def test_narrow_layers_have_one_row_for_all_buckets(number):
    """Their plain forms would add other 16 columns at a time than decoded ones do (seen on a GPU: two numbers of 768 in the last bit). So it is for
    those that the override leaves alone, of 96, 160 and 224 columns or in groups of 12 rows."""
    for chip, n, k, groups in itertools.product((SM90, SM100), (12, 32, 48, 60), (96, 128, 160, 224, 512), (1, 4)):
        asked = request(n * groups, k, x=number, groups=groups)
        rows = [linear_for(asked, chip, rows) for rows in (1, 16, 17, 128, 129, 4096)]
        if not (chip.scaled_products and number == Q8):  # codes are multiplied as they are
            assert all(row == {**rows[0], "split": row["split"]} for row in rows), (chip.name, n, k, groups)
    narrow = [linear_for(request(48, 128, x=number), SM90, rows) for rows in (1, 16, 64, 128, 129, 4096)]
    assert narrow[0]["override"] == 1 and all(row == {**narrow[0], "split": row["split"]} for row in narrow)
    assert linear_for(request(64, 128, x=number), SM90, 4096) != linear_for(request(64, 128, x=number), SM90, 16)


def test_the_tile_kernels_are_those_that_were_checked_on_a_gpu():
    """If this fails, the linear layer's definition changed: compare on a GPU (tests/bench/gpu_meaning.py) before MEANINGS is set anew."""
    assert overrides.meanings_of("linear", linear_few_sm90) == linear_few_sm90.MEANINGS


def test_another_definition_stops_the_build(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linear_few_sm90, "MEANINGS", (linear_few_sm90.MEANINGS[0], "0" * 16))
    with pytest.raises(EmitError, match="the override was checked against tile kernel 0000000000000000, the definition now gives"):
        source_for(kernel(request(1280, 5120)), SM90)


@pytest.mark.parametrize(("shape", "front", "at_once"), [
    ((512, 5120), 5, True), ((4096, 1280), 5, True), ((5120, 2304), 2, False), ((5120, 8192), 1, False)])  # fmt: skip
def test_the_first_weights_are_copied_before_the_launch_in_front_has_ended(shape: tuple[int, int], front: int, at_once: bool):
    """All of them where all steps are under way at once: then nothing is copied in the loop, and it is written out."""
    source = source_for(kernel(request(*shape)), SM90)
    assert source is not None and f"FRONT = gl.constexpr({front})" in source.text
    before, behind = source.text.split("    gdc_wait()")
    body = before[before.rindex("\ndef ") :]
    assert "_copy_weights(i, i" in body and "_copy_x(" not in body and body.count("gl.load(") == body.count("gl.load(count)") == 1
    assert ("for i in gl.static_range(EACH // STEP):" in behind) is at_once


@pytest.mark.parametrize("settings", [{"block_n": 12}, {"warps": 4}, {"block_m": 32}, {"stages": 1}, {"block_n": 160, "warps": 8}])
def test_a_row_that_cuts_otherwise_is_refused(settings: dict[str, int]):
    with pytest.raises(EmitError, match=r"the override for few rows cannot cut so: block_m \d+, block_n \d+, segments 8"):
        source_for(kernel(request(1280, 5120), **settings), SM90)


def test_without_the_entry_the_plain_form_is_emitted():
    assert source_for(kernel(request(1280, 5120), override=0), SM90) is None


def test_the_source_names_its_kernel_and_has_the_requests_numbers():
    made = kernel(request(5120, 8192))
    source = source_for(made, SM90)
    assert source is not None and (source.name, source.language, source.first_warps) == (made.symbol, "gluon", 8)
    assert f"def {made.symbol}(x, x_scales, w, w_scales, y, count):" in source.text and "SEGMENTS = gl.constexpr(8)" in source.text
    assert [kind for _, kind in source.parameters] == ["*fp8e4nv", "*i8", "*fp8e4nv", "*i8", "*bf16", "*i32"]
    assert source == source_for(made, SM90) and "{{" not in source.text
    grouped = source_for(kernel(request(8192, 4096, 8)), SM90)
    assert grouped is not None and "PITCH = gl.constexpr(32768)" in grouped.text and "x_scales" not in grouped.text


def test_the_text_of_a_small_layer_is_golden():
    """`TAPEOUT_GOLDEN=write pytest` writes it anew; it is reviewed as code."""
    one = request(64, 128)
    made = linear_few_sm90.source("linear_few", one, kernel(one).buffers, linear_for(one, SM90, 16))
    if os.environ.get("TAPEOUT_GOLDEN") == "write":
        GOLDEN.write_text(made.text)
    assert made.text == GOLDEN.read_text()


def _text(groups: int) -> str:
    source = source_for(kernel(request(8192, 4096, 8) if groups > 1 else request(1280, 5120)), SM90)
    assert source is not None
    return source.text


def _inline(text: str, function: str) -> str:
    found = re.search(rf'def {function}\(.*?inline_asm_elementwise\(\s*"""(.*?)"""', text, re.S)
    assert found is not None
    return found[1]


@pytest.mark.parametrize(("function", "scale"), [("_decoded", -100), ("_decoded", 0), ("_decoded", 100), ("_once", -119), ("_once", 0), ("_once", 7)])
def test_decoded_codes_are_exact(function: str, scale: int):
    codes = np.arange(256, dtype=np.uint8)
    codes[[0x7F, 0xFF]] = 0  # NaN: no encoder makes one
    words = codes.view(np.uint32)
    factor = np.full(64, (scale + 127 << 7 if function == "_decoded" else scale + 247 << 7) * 0x10001, np.uint32)
    up = [np.full(64, 0x7B807B80, np.uint32)] if function == "_decoded" else []
    body = _inline(_text(8), function)
    pairs = re.findall(r"mov\.b32 \{\$(\d), \$(\d)\}, (\w+);", body)
    assert [p[:2] for p in pairs] == [("0", "1"), ("2", "3")]
    for (_, _, register), places in zip(pairs, ((0, 2), (1, 3)), strict=True):
        plain = re.sub(r"mov\.b32 \{.*?\}, \w+;", "", body).replace("$6", "$3").replace("$5", "$2").replace("$4", "$1") + f"mov.b32 $0, {register};"
        (found,) = ptx.run(plain, [words, *up, factor], [4], 1)
        wanted = codes.reshape(-1, 4)[:, places].copy().view(ml_dtypes.float8_e4m3fn).astype(np.float64) * 2.0**scale
        np.testing.assert_array_equal(found.view(ml_dtypes.bfloat16).astype(np.float64).reshape(-1, 2), wanted)


@pytest.mark.parametrize(("groups", "low", "mask", "first", "last"), [
    (1, "X_LOW", "X_MASK", 88, 151), (1, "LOW", "MASK", 99, 130), (8, "LOW", "MASK", 7, 134)])  # fmt: skip
def test_a_window_is_left_exactly_when_a_scale_is_outside(groups: int, low: str, mask: str, first: int, last: int):
    found = re.search(rf"\b{low}, {mask} = gl\.constexpr\((0x\w+)\), gl\.constexpr\((-0x\w+)\)", _text(groups))
    assert found is not None
    base, kept = np.uint32(int(found[1], 16)), np.uint32(int(found[2], 16) & 0xFFFFFFFF)
    byte, rest = np.meshgrid(np.arange(256), np.arange(256))
    for place in range(4):
        for other in (rest, np.full_like(rest, first), np.full_like(rest, last)):
            word = sum((byte if i == place else other).astype(np.uint32) << np.uint32(8 * i) for i in range(4)).astype(np.uint32)
            inside = (byte >= first) & (byte <= last) & (other >= first) & (other <= last)
            np.testing.assert_array_equal(((word - base) & kept) == 0, inside)


def test_sums_in_units_of_scales_are_exact_inside_the_windows():
    """The largest sum in the smallest unit, and the smallest code's square in the largest, are f32 numbers, so no rescaling rounds."""
    largest, smallest = 15360 * 448.0**2, 2.0**-18
    span = (151 - 88) + (130 - 99)
    assert largest * 2.0**span < float(np.finfo(np.float32).max) and smallest * 2.0**-span > float(np.finfo(np.float32).tiny)


def test_it_compiles_without_spills_twice_the_same():
    shapes = [(5120, 8192, 1), (5120, 8192, 1), (8192, 4096, 8), (512, 5120, 1), (4096, 1280, 1)]
    found = [(made, problems) for _, made, problems in compiled(jobs([kernel(request(*shape)) for shape in shapes], "sm90"))]
    for made, problems in found:
        assert not isinstance(made, str), made
        assert (problems, made.report.spill_stores, made.report.stack_bytes) == ([], 0, 0)
        assert dict(made.report.instructions)["mma.sync"] > 0 and "ldmatrix" in made.ptx and "cp.async.cg.shared.global" in made.ptx
    assert "cvt.rn.f16x2.e4m3x2" in found[0][0].ptx and "cvt.rn.f16x2.e4m3x2" not in found[2][0].ptx
    assert found[0][0].cubin == found[1][0].cubin
