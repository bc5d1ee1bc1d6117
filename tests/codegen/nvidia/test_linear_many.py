"""The override for linear layers of many rows: what it covers, how shapes of the slice are cut, its inline instructions, what it compiles to.

Its numbers come from a GPU (`python -m tests.bench.gpu`): Gluon has no interpreter.
"""

import re
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tapeout.codegen.kernel import KernelError, Request
from tapeout.codegen.launch_grid import grid_at
from tapeout.codegen.lower_to_tile import TileKernel, lower
from tapeout.codegen.nvidia import overrides, toolchain
from tapeout.codegen.nvidia.emit import EmitError
from tapeout.codegen.nvidia.facts import SM90, SM100
from tapeout.codegen.nvidia.overrides import linear_many_ptx, linear_many_sm90, source_for
from tapeout.codegen.nvidia.product_schedules import linear_for
from tapeout.codegen.select_kernels import Choice, build, in_launches
from tapeout.dialects.format import BF16, FP8_WEIGHT, FP32, Q8
from tapeout.dialects.types import Tensor
from tests.codegen.nvidia import ptx
from tests.codegen.nvidia.compiling import compiled, jobs

SHAPES = {(512, 5120): (128, 1), (1280, 5120): (160, 2), (4096, 1280): (128, 8), (2304, 5120): (192, 3), (5120, 2304): (160, 8),
          (5120, 8192): (160, 8)}  # fmt: skip
"""Columns of a block, blocks that an instance takes one after another, at 4,096 rows."""


def request(n: int, k: int, x=Q8, out=BF16, groups: int = 1) -> Request:
    views = Tensor((None, k * groups), x), Tensor((n, k), FP8_WEIGHT)
    return Request("nn.linear", (("groups", groups), ("wide", False)), views, (Tensor((None, n), out),))


def kernels(one: Request, rows: int, **settings: int) -> list[TileKernel]:
    """One for each launch."""
    row = {**linear_for(one, SM90, rows), **settings}
    return [lower(part) for part in in_launches(Choice(one, "linear", tuple(sorted(row.items()))))]


@pytest.mark.parametrize(("shape", "cut"), SHAPES.items())
def test_many_rows_are_one_wave_of_instances(shape: tuple[int, int], cut: tuple[int, int]):
    row = linear_for(request(*shape), SM90, 4096)
    assert (row["block_n"], row["turns"], row["block_m"], row["decoded"], row["override"]) == (*cut, 128, 4, 3)
    decoding, product = kernels(request(*shape), 4096)
    assert np.prod(grid_at(product.text, 4096)) <= SM90.processors < 2 * np.prod(grid_at(product.text, 4096))
    assert np.prod(grid_at(decoding.text, 4096)) * row["part_rows"] * row["part_columns"] == shape[0] * shape[1]


@pytest.mark.parametrize(("shape", "rows", "decoded", "split"), [
    ((1280, 5120), 256, 2, 1), ((512, 5120), 256, 2, 1), ((5120, 8192), 256, 2, 0), ((25600, 6144), 129, 2, 0), ((5120, 8192), 1024, 2, 0),
])  # fmt: skip
def test_fewer_rows_have_the_weight_on_the_left(shape: tuple[int, int], rows: int, decoded: int, split: int):
    """Segments are instances of their own where there are too few blocks."""
    row = linear_for(request(*shape), SM90, rows)
    assert (row["override"], row["decoded"], row["split"]) == (3, decoded, split)


def test_wide_weights_keep_the_plain_form_for_many_rows():
    for shape, wanted in (((25600, 6144), [3, 3, 0, 0]), ((32768, 1280), [3, 3, 0, 0])):
        assert [linear_for(request(*shape), SM90, rows).get("override", 0) for rows in (256, 512, 513, 4096)] == wanted


@pytest.mark.parametrize(("one", "chip", "words"), [
    (request(256, 512), SM100, "sm100 multiplies codes by other instructions"),
    (request(256, 512, out=FP32), SM90, "expected FP8 or BF16 rows and a BF16 result"),
    (request(256, 512, x=FP32), SM90, "expected FP8 or BF16 rows and a BF16 result"),
    (request(256, 384), SM90, "groups of a multiple of 128 rows and a multiple of 256 columns"),
    (request(192, 512), SM90, "groups of a multiple of 128 rows and a multiple of 256 columns"),
    (request(384, 512, x=BF16, groups=2), SM90, "groups of a multiple of 128 rows"),
    (request(256, 512, groups=2), SM90, "FP8 rows in 2 groups: expected one group, or BF16 rows"),
    (replace(request(256, 512), op="nn.fused:linear"), SM90, "nn.fused:linear is no linear layer"),
])  # fmt: skip
def test_others_are_left_to_the_plain_form(one: Request, chip, words: str):
    assert words in linear_many_sm90.why_not(one, chip)
    assert linear_many_sm90.row(one, chip, 2, 4096) is None


def test_the_tile_kernels_are_those_that_were_checked_on_a_gpu():
    """If this fails, the linear layer's definition changed: compare on a GPU (tests/bench/gpu_meaning.py) before MEANINGS is set anew."""
    assert overrides.meanings_of("linear", linear_many_sm90) == linear_many_sm90.MEANINGS


@pytest.mark.parametrize("settings", [{"block_m": 64}, {"block_n": 40}, {"warps": 4}, {"stages": 7}, {"rows_first": 0}, {"part_columns": 128}])
def test_a_row_that_cuts_otherwise_is_refused(settings: dict[str, int]):
    with pytest.raises(EmitError, match=r"the override for many rows finds .*; set override to 0"):
        source_for(kernels(request(1280, 5120), 4096, **{"turns": 1, **settings})[-1], SM90)


def test_turns_that_leave_blocks_over_are_refused():
    with pytest.raises(EmitError, match="the override for many rows finds 3 turns"):
        source_for(kernels(request(1280, 5120), 4096, turns=3)[-1], SM90)
    with pytest.raises(EmitError, match="the override for many rows finds 2 turns"):
        source_for(kernels(request(1280, 5120), 256, turns=2)[1], SM90)
    with pytest.raises(KernelError, match="2 turns of an instance, group 8: expected one turn or no group"):
        kernels(request(1280, 5120), 4096, turns=2, group=8)


def test_the_launch_that_adds_up_is_emitted():
    found = [source_for(k, SM90) for k in kernels(request(1280, 5120), 256)]
    assert [source is not None for source in found] == [True, True, False]
    assert [source_for(k, SM90) for k in kernels(request(1280, 5120), 4096, override=0)] == [None, None]


@pytest.mark.parametrize(("shape", "tile", "columns"), [((2304, 5120), 256, 64), ((32768, 1280), 256, 64), ((5120, 2304), 96, 128)])
def test_blocks_of_all_rows_have_buffers_of_half_a_step(shape: tuple[int, int], tile: int, columns: int):
    """They hold no totals besides sums, so 256 rows fit; the weight is decoded once."""
    row = linear_for(request(*shape), SM90, 256)
    source = source_for(kernels(request(*shape), 256)[1], SM90)
    assert (row["block_m"], row["stages"]) == (tile, 5)
    assert source is not None and f"COLUMNS = gl.constexpr({columns})" in source.text


@pytest.mark.parametrize(("rows", "tile"), [(256, 128), (320, 160), (4096, 192)])
def test_bf16_rows_stay_where_they_are(rows: int, tile: int):
    """One warp in front says how they are copied; a group's columns begin behind those of the groups before."""
    one = request(8192, 4096, x=BF16, groups=8)
    front, product = kernels(one, rows)
    row = linear_for(one, SM90, rows)
    assert (row["override"], row["decoded"], row["block_m"], row["split"]) == (3, 6, tile, 0)
    assert grid_at(front.text, rows) == (1, 1, 1) and grid_at(product.text, rows) == (64, -(-rows // tile), 1)
    first, second = source_for(front, SM90), source_for(product, SM90)
    assert first is not None and "gl.store" not in first.text and "x.to(gl.int64), rows, thread" in first.text
    assert second is not None and "left0 // WIDTH * K + step * COLUMNS, right0" in second.text and "WIDTH = gl.constexpr(1024)" in second.text
    assert " * 4294967296.0" in second.text and "ldmatrix" not in second.text
    (work,) = build(Choice(one, "linear", tuple(sorted(row.items())))).workspaces
    assert work.elements(rows) * 2 >= 3 * 128


def test_there_is_room_for_tensor_maps_behind_the_decoded_factor():
    """Two of 128 bytes, aligned to as many."""
    for rows, elements in ((4096, 1280 * 5120), (256, 256 * 5120)):
        row = linear_for(request(1280, 5120), SM90, rows)
        (work, *_) = build(Choice(request(1280, 5120), "linear", tuple(sorted(row.items())))).workspaces
        assert work.elements(rows) * 2 >= elements * 2 + 3 * 128


def test_sources_name_their_kernels_and_have_the_requests_numbers():
    decoding, product = kernels(request(4096, 1280), 4096)
    first, second = source_for(decoding, SM90), source_for(product, SM90)
    arguments = "(x, x_scales, codes, scales, out, decoded, count)"
    for made, source in ((decoding, first), (product, second)):
        assert source is not None and f"def {made.symbol}{arguments}:" in source.text and source == source_for(made, SM90)
        assert "{{" not in source.text and "K = gl.constexpr(1280)" in source.text
        assert [kind for _, kind in source.parameters] == ["*fp8e4nv", "*i8", "*fp8e4nv", "*i8", "*bf16", "*bf16", "*i32"]
    assert "m64n128k16" in second.text and "total1 += sums1" in second.text and "out + " in second.text
    segments = source_for(kernels(request(1280, 5120), 256)[1], SM90)
    assert segments is not None and "total1 = sums1" in segments.text and "(x, x_scales, codes, scales, out, decoded, sums, count)" in segments.text


def _words() -> np.ndarray:
    codes = np.arange(256, dtype=np.uint8)
    codes[[0x7F, 0xFF]] = 0  # NaN: no encoder makes one
    return codes.view(np.uint32)


def _numbers(words: np.ndarray, places: tuple[int, ...]) -> np.ndarray:
    return words.view(ml_dtypes.float8_e4m3fn).astype(np.float64).reshape(-1, 4)[:, places]


def _pairs(register: np.ndarray) -> np.ndarray:
    return register.view(ml_dtypes.bfloat16).astype(np.float64).reshape(-1, 2)


@pytest.mark.parametrize("scale", [-92, 0, 39])
@pytest.mark.parametrize("quarter", range(4))
@pytest.mark.parametrize("pairs", [False, True])
def test_the_left_factor_is_exact_and_lies_as_products_read_it(quarter: int, scale: int, pairs: bool):
    """Words of the half's other quarter are not read; every scale stands where its 32 columns and row are. Read two by two, codes are in order."""
    words, steps = _words(), np.arange(4)
    scales = [np.full(64, sum(int(scale + 127 - 3 * (scale > 0) * i - r) << (8 * i) for i in steps), np.uint32) for r in (0, 1)]
    unread = np.full(64, 0x7F7F7F7F, np.uint32)
    mine = [np.roll(words, i) for i in range(4)]
    halves = [half for word in mine for half in (word & 0xFFFF, word >> 16)]
    given = halves if pairs else [*mine, *[unread] * 4] if quarter % 2 == 0 else [*[unread] * 4, *mine]
    if scale == -92:
        scales = [np.full(64, (scale + 127) * 0x01010101, np.uint32)] * 2
    found = ptx.run(linear_many_ptx.quarter(quarter, pairs), [*given, *scales], [4] * 8, 1)
    for word in range(4):
        row, column = word % 2, word // 2
        exponent = int(scales[row][0]) >> 8 * quarter & 255
        for pair, places in ((0, (0, 1)), (2, (2, 3))) if pairs else ((0, (0, 2)), (2, (1, 3))):  # even columns, then odd ones
            wanted = _numbers(mine[word], places) * 2.0 ** (exponent - 127 - 32)
            np.testing.assert_array_equal(_pairs(found[4 * column + row + pair]), wanted)


@pytest.mark.parametrize("columns", [64, 128])
def test_pairs_are_read_where_copies_put_them(columns: int):
    """Of a row r of eight and the one eight behind it, 16 bytes after another, turned by the row's number; a lane j of four has 2j and 2j + 8."""
    swizzled = {64: lambda r, chunk: chunk ^ (r >> 1 & 3), 128: lambda r, chunk: chunk ^ (r & 7)}[columns]
    for quarter in range(columns // 32):
        text = linear_many_ptx.read_pairs(quarter, columns)
        moved = dict(re.findall(r"xor\.b32 (a\d), at, (\d+)", text))
        places = [(int(moved[name]), int(more)) for name, more in re.findall(r"\[(a\d)\+(\d+)\]", text)]
        for r in range(8):
            start = r * columns + (swizzled(r, 0) << 4)
            found = [(start ^ chunk) + more for chunk, more in places]
            wanted = [(r + 8 * row) * columns + (swizzled(r + 8 * row, 2 * quarter + piece) << 4) + 8 * pair
                      for piece in (0, 1) for row in (0, 1) for pair in (0, 1)]  # fmt: skip
            assert found == wanted


@pytest.mark.parametrize("scale", [-127, 0, 86])
def test_the_right_factor_is_exact(scale: int):
    factor = np.full(64, (scale + 127 + 32) * 0x00800080, np.uint32)
    for shift, places in ((8, (0, 2)), (0, (1, 3))):
        (found,) = ptx.run(linear_many_ptx.decoded_pair(), [_words(), np.full(64, shift, np.uint32), factor], [4], 1)
        np.testing.assert_array_equal(_pairs(found), _numbers(_words(), places) * 2.0 ** (scale + 32))


def test_they_compile_without_spills_to_wgmma_twice_the_same(tmp_path: Path):
    cases = [((1280, 5120), 4096), ((1280, 5120), 4096), ((4096, 1280), 4096), ((1280, 5120), 256), ((5120, 8192), 256), ((32768, 1280), 256)]
    grouped = kernels(request(8192, 4096, x=BF16, groups=8), 320)
    work = [k for shape, rows in cases for k in kernels(request(*shape), rows) if source_for(k, SM90) is not None] + grouped
    found = [(made, problems) for _, made, problems in compiled(jobs(work, "sm90"))]
    for made, problems in found:
        assert not isinstance(made, str), made
        assert (problems, made.report.spill_stores, made.report.stack_bytes) == ([], 0, 0)
        assert "wgmma.mma_async instructions are serialized" not in toolchain._assembler_log(made.ptx, SM90, tmp_path)
        assert "cp.async.bulk.tensor.2d" in made.ptx or "tensormap.replace" in made.ptx
    assert found[0][0].cubin == found[2][0].cubin and found[1][0].cubin == found[3][0].cubin
