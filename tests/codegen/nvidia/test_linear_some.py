"""The override for linear layers of some rows: what it covers, how rows of the slice's shapes are cut, its inline instructions, what it compiles to.

Its numbers come from a GPU (`python -m tests.bench.gpu`): Gluon has no interpreter.
"""

import re
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tapeout.codegen.kernel import Request
from tapeout.codegen.lower_to_tile import TileKernel, lower
from tapeout.codegen.nvidia import overrides, toolchain
from tapeout.codegen.nvidia.emit import EmitError
from tapeout.codegen.nvidia.facts import SM90, SM100
from tapeout.codegen.nvidia.overrides import linear_many_sm90, linear_some_sm90, source_for
from tapeout.codegen.nvidia.product_schedules import linear_for
from tapeout.codegen.select_kernels import Choice, in_launches
from tapeout.dialects.format import BF16, FP8_WEIGHT, FP32, Q8
from tapeout.dialects.types import Tensor
from tests.codegen.nvidia import ptx
from tests.codegen.nvidia.compiling import compiled, jobs

SHAPES = {
    (25600, 6144, 1): (256, 0), (5120, 15360, 1): (320, 1), (32768, 1280, 1): (256, 0),
    (5120, 2304, 1): (64, 1), (1280, 5120, 1): (64, 1), (1792, 5120, 1): (64, 1), (8192, 4096, 8): (256, 1),
}  # fmt: skip
"""Rows of the weight in an instance, whether K is split."""


def request(n: int, k: int, groups: int = 1, x=None, out=BF16, weight=FP8_WEIGHT) -> Request:
    number = x or (Q8 if groups == 1 else BF16)
    return Request("nn.linear", (("groups", groups), ("wide", False)), (Tensor((None, k * groups), number), Tensor((n, k), weight)),
                   (Tensor((None, n), out),))  # fmt: skip


def kernels(one: Request, **settings: int) -> list[TileKernel]:
    """One for each launch, also of layers that are so small that others take them."""
    row = linear_for(one, SM90, 64)
    row = {**row, **(linear_some_sm90.row(one, SM90, row["segments"]) or {}), **settings}
    return [lower(part) for part in in_launches(Choice(one, "linear", tuple(sorted(row.items()))))]


@pytest.mark.parametrize(("shape", "cut"), SHAPES.items())
def test_shapes_of_the_slice_are_cut_to_fill_the_chip(shape: tuple[int, int, int], cut: tuple[int, int]):
    row, many = linear_for(request(*shape), SM90, 64), linear_for(request(*shape), SM90, 4096)
    assert (row["block_n"], row["split"], row["override"]) == (*cut, 2) and row["segments"] == many["segments"]
    instances = shape[0] // row["block_n"] * (row["segments"] if row["split"] else 1)
    assert SM90.processors * 0.45 < instances <= SM90.processors * (2 if row["stages"] == 4 and row["block_n"] == 64 else 1)


@pytest.mark.parametrize(("rows", "place"), [(16, 1), (17, 5), (64, 5), (65, 3), (128, 2), (129, 3)])
def test_few_rows_have_rows_of_their_own(rows: int, place: int):
    assert linear_for(request(5120, 8192), SM90, rows)["override"] == place


@pytest.mark.parametrize(("shape", "block"), [((25600, 6144), (128, 0)), ((32768, 1280), (128, 0)), ((5120, 15360), (128, 1)),
                                              ((1792, 5120), (64, 1))])  # fmt: skip
def test_more_than_a_block_of_rows_reads_the_weight_once_where_that_costs_less(shape: tuple[int, int], block: tuple[int, int]):
    one = request(*shape)
    few, many = linear_for(one, SM90, 64), linear_for(one, SM90, 128)
    assert (few["override"], many["override"], many["block_m"], many["split"]) == (2, 3, *block) and few["segments"] == many["segments"]
    costs = [form.best(one, SM90, few["segments"], 128) for form in (linear_some_sm90, linear_many_sm90)]
    assert costs[1][0] < costs[0][0] < 2.2 * linear_some_sm90.best(one, SM90, few["segments"], 64)[0]


@pytest.mark.parametrize("shape", [(512, 5120), (5120, 8192), (128, 256)])
def test_others_are_read_by_each_block_of_64_rows(shape: tuple[int, int]):
    """Small ones, and those whose blocks of more rows would be too few for the chip."""
    assert linear_for(request(*shape), SM90, 128)["override"] == 2


@pytest.mark.parametrize(("one", "chip", "words"), [
    (request(256, 512), SM100, "sm100 multiplies codes by other instructions"),
    (request(256, 512, out=FP32), SM90, "expected FP8 or BF16 rows and a BF16 result"),
    (request(256, 512, weight=BF16), SM90, "expected FP8 values with scales of 32x32"),
    (request(256, 96), SM90, "a multiple of 128 columns"),
    (request(192, 512, 6), SM90, "expected groups of a multiple of 64 rows"),
    (replace(request(256, 512), op="nn.fused:linear"), SM90, "nn.fused:linear is no linear layer"),
])  # fmt: skip
def test_others_are_left_to_the_plain_form(one: Request, chip, words: str):
    assert words in linear_some_sm90.why_not(one, chip)
    assert linear_some_sm90.row(one, chip, 1) is None


def test_segments_of_odd_steps_are_left_to_the_plain_form():
    assert linear_some_sm90.row(request(256, 384), SM90, 2) is None and linear_some_sm90.row(request(256, 384), SM90, 3) is not None


def test_the_tile_kernels_are_those_that_were_checked_on_a_gpu():
    """If this fails, the linear layer's definition changed: compare on a GPU (tests/bench/gpu_meaning.py) before MEANINGS is set anew."""
    assert overrides.meanings_of("linear", linear_some_sm90) == linear_some_sm90.MEANINGS


def test_another_definition_stops_the_build(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linear_some_sm90, "MEANINGS", ("0" * 16, *linear_some_sm90.MEANINGS[1:]))
    with pytest.raises(EmitError, match="the override was checked against tile kernel 0000000000000000, the definition now gives"):
        source_for(kernels(request(1280, 5120))[0], SM90)


@pytest.mark.parametrize("settings", [{"block_n": 96}, {"block_n": 128}, {"part1_warps": 8}, {"block_m": 32}, {"part_rows": 4}, {"stages": 3}])
def test_a_row_that_cuts_otherwise_is_refused(settings: dict[str, int]):
    with pytest.raises(EmitError, match=r"the override for some rows cannot cut so: block_m \d+, block_n \d+, segments 8"):
        source_for(kernels(request(1280, 5120), **settings)[1], SM90)


def test_the_launch_that_adds_up_is_emitted():
    rows, segments, total = kernels(request(1280, 5120))
    assert source_for(rows, SM90) is not None and source_for(segments, SM90) is not None and source_for(total, SM90) is None
    assert [source_for(k, SM90) for k in kernels(request(1280, 5120), override=0)] == [None, None, None]


def test_the_source_names_its_kernel_and_has_the_requests_numbers():
    made = kernels(request(5120, 8192))[1]
    source = source_for(made, SM90)
    assert source is not None and (source.name, source.language, source.first_warps) == (made.symbol, "gluon", 16)
    assert f"def {made.symbol}(x, x_scales, w, w_scales, y, decoded, sums, count):" in source.text and "STEPS = gl.constexpr(8)" in source.text
    assert [kind for _, kind in source.parameters] == ["*fp8e4nv", "*i8", "*fp8e4nv", "*i8", "*bf16", "*bf16", "*fp32", "*i32"]
    assert source == source_for(made, SM90) and "{{" not in source.text
    rows, grouped, _ = (source_for(k, SM90) for k in kernels(request(8192, 4096, 8)))
    assert rows is not None and "K = gl.constexpr(32768)" in rows.text and "(x, w, w_scales, y, decoded, sums, count)" in rows.text
    assert grouped is not None and "WIDTH = gl.constexpr(1024)" in grouped.text and grouped.first_warps == 0
    _, whole = kernels(request(25600, 6144))
    source = source_for(whole, SM90)
    assert source is not None and "total += sums" in source.text and "staged" in source.text and "PITCH_OUT = gl.constexpr(25600)" in source.text


@pytest.mark.parametrize(("shape", "columns"), [((128, 128, 1), 128), ((192, 384, 1), 128), ((320, 256, 1), 256)])
def test_small_layers_have_launches_of_whole_pieces_and_no_copies_behind_the_last_step(shape: tuple[int, int, int], columns: int):
    rows, products = kernels(request(*shape))
    assert dict(rows.choice.schedule)["part_columns"] == columns
    source = source_for(products, SM90)
    assert source is not None and f"AHEAD = gl.constexpr({min(5, shape[1] // 128)})" in source.text


def _inline(shape: tuple[int, int, int], launch: int, outputs: str) -> str:
    """The inline text of a launch with such operands."""
    source = source_for(kernels(request(*shape))[launch], SM90)
    assert source is not None
    end = rf'",\s*"{re.escape(outputs)}"'
    found = re.search(rf'"""((?:(?!""").)*?)""{end}', source.text, re.S) or re.search(rf'"(.*?){end}', source.text)
    assert found is not None
    return found[1]


def _codes() -> np.ndarray:
    codes = np.arange(256, dtype=np.uint8)
    codes[[0x7F, 0xFF]] = 0  # NaN: no encoder makes one
    return codes


@pytest.mark.parametrize("scale", [-80, 0, 86])
def test_rows_are_decoded_exactly(scale: int):
    """Even codes of a word, then odd ones, times 2^32: for every code and at the ends of what scales may be."""
    codes = _codes()
    factor = np.full(64, (scale + 127 + 32) * 0x00800080, np.uint32)
    for shift, places in ((8, (0, 2)), (0, (1, 3))):
        (pairs,) = ptx.run(_inline((1280, 5120, 1), 0, "=r,r,r,r"), [codes.view(np.uint32), np.full(64, shift, np.uint32), factor], [4], 1)
        wanted = codes.reshape(-1, 4)[:, places].copy().view(ml_dtypes.float8_e4m3fn).astype(np.float64) * 2.0 ** (scale + 32)
        np.testing.assert_array_equal(pairs.view(ml_dtypes.bfloat16).astype(np.float64).reshape(-1, 2), wanted)


@pytest.mark.parametrize("scale", [-92, 0, 39])
def test_weights_are_decoded_exactly(scale: int):
    """Quarters of a step, words of two rows: even codes of a word before its odd ones, times 2^-32. A quarter has words and a scale of its own."""
    codes = _codes()
    words = [np.resize(np.roll(codes, 4 * i).view(np.uint32), 64) for i in range(8)]
    each = -1 if scale > 0 else 1
    exponents = [[scale + each * (number + 4 * row) for number in range(4)] for row in (0, 1)]
    scales = [np.full(64, sum((e + 127) << 8 * number for number, e in enumerate(of)), np.uint32) for of in exponents]
    for number in range(4):
        found = ptx.run(linear_some_sm90.ptx.quarter(number), [*words, *scales], [4] * 8, 1)
        for register, pairs in enumerate(found):
            word, row = 4 * (number % 2) + 2 * (register // 4) + register % 2, register % 2
            wanted = words[word].view(np.uint8).reshape(-1, 4)[:, (0, 2) if register % 4 < 2 else (1, 3)].copy().view(ml_dtypes.float8_e4m3fn)
            exact = wanted.astype(np.float64) * 2.0 ** (exponents[row][number] - 32)
            np.testing.assert_array_equal(pairs.view(ml_dtypes.bfloat16).astype(np.float64).reshape(-1, 2), exact)


def test_rows_in_bf16_are_put_in_the_same_order():
    numbers = (np.random.default_rng(1).standard_normal(256) * 2.0 ** np.arange(-128, 128).clip(-60, 90)).astype(ml_dtypes.bfloat16)
    words = numbers.view(np.uint32).reshape(-1, 2)
    for which, places in ((0x5410, (0, 2)), (0x7632, (1, 3))):
        text = _inline((8192, 4096, 8), 0, "=r,r,r,r").replace("$3", str(which))
        (pairs,) = ptx.run(text, [words[:, 0].copy(), words[:, 1].copy()], [4], 1)
        wanted = numbers.reshape(-1, 4)[:, places].astype(np.float64) * 2.0**32
        np.testing.assert_array_equal(pairs.view(ml_dtypes.bfloat16).astype(np.float64).reshape(-1, 2), wanted)


def test_halves_of_a_step_are_read_from_their_own_places():
    def places(text: str) -> list[str]:
        moved = dict(re.findall(r"xor\.b32 (a\d), at, (\d+)", text))
        return [moved.get(name, "0") for name in re.findall(r"ldmatrix[^;]*\[(a\d)\]", text)]

    read = linear_some_sm90.ptx.read
    assert places(read(0)) + places(read(1)) == ["0", "32", "64", "96"]
    assert "$9, $8" in read(1) and re.findall(r"\{(\$\d+), ", read(1)) == ["$0", "$4"]


@pytest.mark.parametrize("halves", [1, 2])
def test_quarters_are_the_products_of_a_step_in_order(halves: int):
    """Sixteen columns after another, onto the same sums; the buffer before is given back once in each buffer."""
    texts = [linear_some_sm90.ptx.quarter_products(64, quarter, halves) for quarter in range(4)]
    places = [int(place) for text in texts for place in re.findall(r"add\.u32 a, q, (\d+);", text)]
    assert places == [2 * part + (half * 64 * 64 * 2 // 16 if halves > 1 else 0) for half in (0, 1) for part in range(4)]
    assert {sums for text in texts for sums in re.findall(r"mma_async\S+\s+({[^}]*})", text)} == {"{" + ", ".join(f"${i}" for i in range(32)) + "}"}
    assert [text.count("mbarrier.arrive") for text in texts] == [1, 0, 2 - halves, 0]
    assert all(re.search(r"{\$64, .*{\$68, .*commit_group\S+ wgmma\.wait_group\.sync\.aligned 1;", text, re.S) for text in texts)


def test_it_compiles_without_spills_to_wgmma_twice_the_same(tmp_path: Path):
    shapes = [(1280, 5120, 1), (1280, 5120, 1), (8192, 4096, 8), (25600, 6144, 1), (5120, 8192, 1), (128, 128, 1), (4608, 5120, 1)]
    found = [(made, problems) for _, made, problems in compiled(jobs([kernels(request(*shape))[1] for shape in shapes], "sm90"))]
    for (made, problems), copies in zip(found, (1, 1, 1, 1, 2, 1, 2), strict=True):  # programs
        assert not isinstance(made, str), made
        assert (problems, made.report.spill_stores, made.report.spill_loads) == ([], 0, 0)
        assert dict(made.report.instructions)["wgmma.mma_async"] == 8 * copies and "ldmatrix" in made.ptx and "cp.async.cg" in made.ptx
        assert made.ptx.index("cp.async.cg") < made.ptx.index("griddepcontrol.wait") < made.ptx.index("cp.async.bulk")
        assert made.ptx.count("L2::evict_first") == made.ptx.count("cp.async.cg") // 4 == made.ptx.count("L2::cache_hint") // 4
        assert "wgmma.mma_async instructions are serialized" not in toolchain._assembler_log(made.ptx, SM90, tmp_path)
    assert found[0][0].cubin == found[1][0].cubin
