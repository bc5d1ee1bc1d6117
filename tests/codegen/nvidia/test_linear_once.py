"""The override for linear layers of some rows in one launch: what it covers, how it cuts, its inline instructions, what it compiles to.

Its numbers come from a GPU (`python -m tests.bench.gpu`): Gluon has no interpreter.
"""

import re
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tapeout.codegen.lower_to_tile import TileKernel, lower
from tapeout.codegen.nvidia import overrides, toolchain
from tapeout.codegen.nvidia.emit import EmitError
from tapeout.codegen.nvidia.facts import SM90, SM100
from tapeout.codegen.nvidia.overrides import linear_once_sm90, source_for
from tapeout.codegen.nvidia.product_schedules import linear_for
from tapeout.codegen.select_kernels import Choice, build, in_launches
from tapeout.dialects.format import BF16, FP32
from tests.codegen.nvidia import ptx
from tests.codegen.nvidia.compiling import compiled, jobs
from tests.codegen.nvidia.test_linear_some import request

SHAPES = {(5120, 8192): (320, 8), (4608, 5120): (192, 4)}
"""Rows of the weight in an instance, segments."""


def kernel(shape: tuple[int, int], **settings: int) -> TileKernel:
    """Its only launch."""
    one = request(*shape)
    (made,) = (lower(part) for part in in_launches(Choice(one, "linear", tuple(sorted({**linear_for(one, SM90, 64), **settings}.items())))))
    return made


@pytest.mark.parametrize(("shape", "cut"), SHAPES.items())
@pytest.mark.parametrize("rows", [17, 64])
def test_large_weights_of_short_segments_take_one_launch(shape: tuple[int, int], cut: tuple[int, int], rows: int):
    row, many = linear_for(request(*shape), SM90, rows), linear_for(request(*shape), SM90, 4096)
    assert (row["override"], row["block_n"] * row["segments"], row["segments"], row["warps"]) == (5, *cut, cut[0] // 16)
    assert many["segments"] == row["segments"] and linear_for(request(*shape), SM90, 65)["override"] != 5
    assert SM90.processors * 0.7 < shape[0] // row["block_n"] <= SM90.processors


@pytest.mark.parametrize("shape", [(5120, 15360), (25600, 6144), (5120, 2304), (1792, 5120), (4096, 1280), (32768, 1280), (16384, 8192)])
def test_others_take_other_forms(shape: tuple[int, int]):
    """Long segments, of which shared memory does not hold x; few segments; small weights, of which an instance takes longer than launches."""
    assert linear_for(request(*shape), SM90, 64)["override"] in (1, 2)


@pytest.mark.parametrize(("one", "chip", "words"), [
    (request(5120, 8192), SM100, "sm100 multiplies codes by other instructions"),
    (request(5120, 8192, out=FP32), SM90, "expected FP8 or BF16 rows and a BF16 result"),
    (request(5120, 8192, x=BF16), SM90, "expected FP8 rows of one group"),
    (request(8192, 4096, 8), SM90, "in 8 groups, expected FP8 rows of one group"),
    (replace(request(5120, 8192), op="nn.fused:linear"), SM90, "nn.fused:linear is no linear layer"),
])  # fmt: skip
def test_what_it_does_not_cover_has_a_reason(one, chip, words: str):
    assert words in linear_once_sm90.why_not(one, chip) and linear_once_sm90.row(one, chip, 8) is None


@pytest.mark.parametrize("segments", [1, 2, 16])
def test_it_needs_segments_that_rows_of_x_can_be_shared_by(segments: int):
    assert linear_once_sm90.row(request(5120, 8192), SM90, segments) is None


def test_the_tile_kernel_is_the_one_that_was_checked_on_a_gpu():
    """If this fails, the linear layer's definition changed: compare on a GPU (tests/bench/gpu_meaning.py) before MEANINGS is set anew."""
    assert overrides.meanings_of("linear", linear_once_sm90) == linear_once_sm90.MEANINGS


@pytest.mark.parametrize("settings", [{"block_n": 80}, {"warps": 12}, {"segments": 4}, {"stages": 3}, {"block_m": 32}, {"decoded": 1}])
def test_a_row_that_cuts_otherwise_is_refused(settings: dict[str, int]):
    with pytest.raises(EmitError, match=r"the override for some rows in one launch cannot cut so: block_m \d+, block_n \d+, segments"):
        source_for(kernel((5120, 8192), **settings), SM90)


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (17, 1), (64, 1), (65, 2)])
def test_sums_have_room_for_whole_blocks_of_rows(rows: int, blocks: int):
    one = request(4608, 5120)
    (sums,) = build(Choice(one, "linear", tuple(sorted(linear_for(one, SM90, 64).items())))).workspaces
    assert (sums.element, sums.elements(rows)) == ("f32", 64 * blocks * 4608 * 4)


def test_the_source_names_its_kernel_and_has_the_requests_numbers():
    made = kernel((4608, 5120))
    source = source_for(made, SM90)
    assert source is not None and (source.name, source.language, source.first_warps) == (made.symbol, "gluon", 8)
    assert f"def {made.symbol}(x, x_scales, w, w_scales, y, sums, count):" in source.text
    assert all(f"{name} = gl.constexpr({value})" in source.text for name, value in (("STEPS", 10), ("BLOCK_N", 192), ("SEGMENTS", 4)))
    assert [kind for _, kind in source.parameters] == ["*fp8e4nv", "*i8", "*fp8e4nv", "*i8", "*bf16", "*fp32", "*i32"]
    assert source == source_for(made, SM90) and "{{" not in source.text and source_for(kernel((4608, 5120), override=0), SM90) is None


@pytest.mark.parametrize(("shape", "turns"), [((5120, 8192), 7), ((4608, 5120), 14)])
def test_warps_share_all_of_x(shape: tuple[int, int], turns: int):
    """Of 4 rows times 128 columns at a time, each once; the last turn is not for all of them."""
    source, (rows, segments) = source_for(kernel(shape), SM90), SHAPES[shape]
    assert source is not None and source.text.count("ld.global.v4.b32") == turns
    warps, steps = rows // 16, shape[1] // segments // 128
    last = re.findall(r"there\d+ = \(warp \+ (\d+) < STEPS \* 16\)", source.text)
    assert last == [str((turns - 1) * warps)] and (turns - 1) * warps < 16 * steps <= turns * warps


@pytest.mark.parametrize("scale", [-80, 0, 86])
@pytest.mark.parametrize(("order", "first"), [("0x3210", (0, 2)), ("0x2301", (1, 3))])
def test_rows_are_decoded_exactly(scale: int, order: str, first: tuple[int, int]):
    """Even codes of a word and odd ones, or the other way round, times 2^32: for every code and at the ends of what scales may be."""
    codes = np.arange(256, dtype=np.uint8)
    codes[[0x7F, 0xFF]] = 0  # NaN: no encoder makes one
    source = source_for(kernel((5120, 8192)), SM90)
    assert source is not None
    text = re.search(r"(mov\.b32 up, .*?)xor\.b32 t, \$5", source.text, re.S)
    assert text is not None
    moved = re.sub(r"\$(\d)", lambda found: f"${int(found[1]) + 8}", text[1].replace("$6", order))
    results = "".join(f"mov.b32 ${i}, e{i}; mov.b32 ${i + 4}, o{i};" for i in range(4))
    words = [np.roll(codes, 4 * i).view(np.uint32).copy() for i in range(4)]
    found = ptx.run(moved + results, [*words, np.full(64, scale + 127, np.uint32)], [4] * 8, 1)
    second = (1, 3) if first == (0, 2) else (0, 2)
    for i, pairs in enumerate(found):
        wanted = words[i % 4].view(np.uint8).reshape(-1, 4)[:, first if i < 4 else second].copy().view(ml_dtypes.float8_e4m3fn)
        exact = wanted.astype(np.float64) * 2.0 ** (scale + 32)
        np.testing.assert_array_equal(pairs.view(ml_dtypes.bfloat16).astype(np.float64).reshape(-1, 2), exact)


@pytest.mark.parametrize("shape", SHAPES)
def test_warps_that_meet_have_a_counter_of_their_own(shape: tuple[int, int]):
    """A counter is 32 bytes: one for 16 rows of the weight. It says how many came since the start, so a turn ends at a multiple of the segments."""
    source = source_for(kernel(shape), SM90)
    assert source is not None
    (size,) = re.findall(r"\.global \.align 128 \.b32 count\[(\d+)\];", source.text)
    assert int(size) * 4 == shape[0] // 16 * 32 and "mul.wide.u32 a, $1, 32;" in source.text
    assert f"or.b32 all, v, {SHAPES[shape][1] - 1};" in source.text


def test_it_compiles_without_spills_and_its_launches_stay_in_line(tmp_path: Path):
    found = [(made, problems) for _, made, problems in compiled(jobs([kernel(shape) for shape in (*SHAPES, (5120, 8192))], "sm90"))]
    for made, problems in found:
        assert not isinstance(made, str), made
        assert (problems, made.report.spill_stores, made.report.spill_loads) == ([], 0, 0)
        assert dict(made.report.instructions)["wgmma.mma_async"] == 16 and made.waits and made.ptx.count("L2::evict_first") > 0
        assert made.ptx.index("griddepcontrol.wait") < made.ptx.index("cp.async.cg"), "weights would be in the way of x"
        assert made.global_scratch_bytes == 1, "it has counters of its own: two launches must not run side by side"
        assert "wgmma.mma_async instructions are serialized" not in toolchain._assembler_log(made.ptx, SM90, tmp_path)
    assert found[0][0].cubin == found[2][0].cubin


@pytest.mark.parametrize(("text", "own"), [
    (".param .u64 .ptr .global .align 1 a,", False), ("ld.acquire.gpu.global.u32 v, [c];", False), ("{ .global .align 128 .b32 count[2560]; }", True),
    (".extern .shared .align 16 .b8 global_smem[];", False), (".global .align 4 .b8 __cudart_i2opi_f[24] = {65, 144};", False),
])  # fmt: skip
def test_memory_of_a_kernels_own_is_known_by_its_declaration(text: str, own: bool):
    assert (toolchain.OWN_MEMORY.search(text) is not None) == own
