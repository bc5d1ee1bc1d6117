"""The override for heads, wide BF16 weights, of 65 to 320 rows: what it covers, how it is cut, that no product reads behind shared memory.

Its numbers come from a GPU (`python -m tests.bench.gpu`): Gluon has no interpreter.
"""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tapeout.codegen.kernel import Request
from tapeout.codegen.launch_grid import grid_at
from tapeout.codegen.lower_to_tile import TileKernel, lower
from tapeout.codegen.nvidia import overrides, toolchain
from tapeout.codegen.nvidia.emit import EmitError
from tapeout.codegen.nvidia.facts import SM90, SM100
from tapeout.codegen.nvidia.overrides import linear_many_ptx, linear_wide_sm90, source_for
from tapeout.codegen.nvidia.product_schedules import linear_for
from tapeout.codegen.select_kernels import Choice, build, in_launches
from tapeout.dialects.format import BF16, FP8_WEIGHT, FP32, Q8
from tapeout.dialects.types import Tensor
from tests.codegen.nvidia.compiling import compiled, jobs

HEAD = (129280, 5120)


def request(n: int, k: int, x=BF16, weight=BF16, out=FP32, groups: int = 1) -> Request:
    views = Tensor((None, k * groups), x), Tensor((n, k), weight)
    return Request("nn.linear", (("groups", groups), ("wide", True)), views, (Tensor((None, n), out),))


def kernels(one: Request, rows: int, **settings: int) -> list[TileKernel]:
    """One for each launch."""
    row = {**linear_for(one, SM90, rows), **settings}
    return [lower(part) for part in in_launches(Choice(one, "linear", tuple(sorted(row.items()))))]


@pytest.mark.parametrize(("rows", "tile"), [(64, None), (65, 80), (80, 80), (256, 256), (320, 320), (321, None), (4096, None)])
def test_a_block_has_all_rows_of_a_bucket(rows: int, tile: int | None):
    row = linear_for(request(*HEAD), SM90, rows)
    assert (row["block_m"] if row.get("override", 0) == 4 else None) == tile
    assert row["segments"] == linear_for(request(*HEAD), SM90, 1)["segments"] == 1  # one order of sums


def test_instances_are_at_most_one_for_each_multiprocessor():
    """1,010 blocks in turns of 8: the last of 127 instances has two."""
    front, product = kernels(request(*HEAD), 320)
    assert grid_at(front.text, 320) == (1, 1, 1)
    assert grid_at(product.text, 320) == grid_at(product.text, 5) == (127, 1, 1) and 1010 % 8 == 2
    (work,) = build(Choice(request(*HEAD), "linear", tuple(sorted(linear_for(request(*HEAD), SM90, 320).items())))).workspaces
    assert work.elements(320) * 2 >= 3 * 128  # two tensor maps, aligned to as many bytes


@pytest.mark.parametrize(("shape", "chip", "stages"), [((129280, 256), SM90, 2), (HEAD, SM90, 4), ((512, 256), SM90, 4), ((129280, 256), SM100, 4)])
def test_few_rows_have_no_more_buffers_than_steps(shape: tuple[int, int], chip, stages: int):
    """256 columns are two steps; of a small weight, and where nobody measured it, four buffers stay."""
    row = linear_for(request(*shape), chip, 1)
    assert (row["stages"], row["block_k"], row.get("override", 0)) == (stages, 128, 0)


@pytest.mark.parametrize(("one", "chip", "words"), [
    (request(*HEAD), SM100, "sm100 multiplies by other instructions"),
    (request(*HEAD, out=BF16), SM90, "expected BF16, BF16 and FP32"),
    (request(*HEAD, x=FP32), SM90, "expected BF16, BF16 and FP32"),
    (request(*HEAD, x=Q8, weight=FP8_WEIGHT), SM90, "expected BF16, BF16 and FP32"),
    (request(129344, 5120), SM90, "a multiple of 128 rows and 128 columns"),
    (request(129280, 5184), SM90, "a multiple of 128 rows and 128 columns"),
    (request(129280, 1280, groups=2), SM90, "no linear layer of one group"),
    (replace(request(*HEAD), op="nn.fused:linear"), SM90, "nn.fused:linear"),
])  # fmt: skip
def test_others_are_left_to_the_plain_form(one: Request, chip, words: str):
    assert words in linear_wide_sm90.why_not(one, chip)
    assert linear_wide_sm90.row(one, chip, 1, 320) is None


def test_narrow_and_short_weights_are_left_to_the_plain_form():
    for n, k in ((67456, 5120), (129280, 896)):
        assert linear_wide_sm90.why_not(request(n, k), SM90) is None and linear_wide_sm90.row(request(n, k), SM90, 1, 320) is None
    assert linear_wide_sm90.row(request(67584, 1024), SM90, 1, 320) is not None
    assert linear_wide_sm90.row(request(67584, 1024), SM90, 2, 320) is None


def test_the_tile_kernels_are_those_that_were_checked_on_a_gpu():
    """If this fails, the linear layer's definition changed: compare on a GPU (tests/bench/gpu_meaning.py) before MEANINGS is set anew."""
    assert overrides.meanings_of("linear", linear_wide_sm90) == linear_wide_sm90.MEANINGS


@pytest.mark.parametrize("settings", [
    {"block_m": 336}, {"block_m": 72}, {"block_n": 256}, {"rows_first": 1}, {"warps": 4}, {"stages": 9}, {"decoded": 2},
])  # fmt: skip
def test_a_row_that_cuts_otherwise_is_refused(settings: dict[str, int]):
    with pytest.raises(EmitError, match=r"the override for wide weights finds .*; set override to 0"):
        source_for(kernels(request(*HEAD), 320, **settings)[-1], SM90)


def _number(text: str, name: str) -> int:
    return int(re.search(rf"^{name} = gl\.constexpr\((\d+)\)", text, re.MULTILINE)[1])


@pytest.mark.parametrize("tile", range(16, 321, 16))
def test_products_never_read_behind_shared_memory(tile: int):
    """Of a bucket of `tile` rows, whatever their count: products are as wide as the rows are many, or wider, and what the last buffer's product reads
    lies inside of all buffers; enough of these are ahead."""
    text = source_for(kernels(request(*HEAD), 320, block_m=tile)[-1], SM90).text
    pieces, most = _number(text, "ATOMS"), _number(text, "STAGES")
    assert pieces * 1024 + 16 * most + 64 <= SM90.shared_bytes_per_block
    width_of = re.search(r"atoms, width = half // 4 \+ 16, (.*)  #", text)[1].replace(".to(gl.int32)", "")
    turns_of = re.findall(r"for turn in range\(\(width == (\d+)\)", text)
    for rows in range(1, tile + 1):
        half = (min(rows, tile) + 15) // 16 * 8
        atoms, width = half // 4 + 16, eval(width_of, {"half": half})  # the text is ours
        stages = min((pieces + half // 4 - width // 8) // atoms, most)
        assert turns_of.count(str(width)) == 1 and rows <= 2 * half <= width <= tile
        assert stages >= 4 and (stages - 1) * atoms + 16 + width // 8 <= pieces


def test_copies_bring_what_is_waited_for():
    """128 rows of the weight and twice `half` rows of x, 64 columns of two bytes each, to where products read them."""
    text = linear_many_ptx.copies(None, 128, False)
    assert "mad.lo.u32 b, $12, 256, 16384;" in text and "expect_tx.shared::cta.b64 _, [$4], b;" in text
    assert "mad.lo.u32 m, $12, 128, $6;" in text and "add.u32 n, $10, $12;" in text and text.count("cp.async.bulk.tensor.2d") == 3
    maps = linear_many_ptx.tensor_maps(5120, 320, 64, 5120, stored=True)
    assert "box_dim.global.b1024.b32 [$0], 1, 128;" in maps and "box_dim.global.b1024.b32 [zero], 1, rows;" in maps
    assert maps.count("elemtype.global.b1024.b32 [$0], 1;") == 1 and maps.count("swizzle_mode.global.b1024.b32 [$0], 3;") == 1
    assert "min.s32 rows, $4, 320; add.s32 rows, rows, 15; shr.s32 rows, rows, 4; shl.b32 rows, rows, 3;" in maps


@pytest.mark.parametrize("parts", [(80,), (256,), (160, 160)])
def test_products_take_every_column_of_every_sum_once(parts: tuple[int, ...]):
    """Of 64 columns: 16 at a time, ascending, 32 bytes apart; parts of the right factor lie one behind another, rows of 128 bytes."""
    text = linear_many_ptx.stored_products(parts)
    found = [(int(left) - 0x10000, int(right) - 0x10000, int(width)) for left, right, width in
             re.findall(r"add\.u32 a, l, (\d+);.*?add\.u32 a, r, (\d+);.*?m64n(\d+)k16", text, re.DOTALL)]  # fmt: skip
    firsts = np.cumsum([0, *parts])[:-1]
    assert found == [(2 * k, 2 * k + 8 * first, width) for k in range(4) for first, width in zip(firsts, parts, strict=True)]
    sums = [[int(n) for n in re.findall(r"\$(\d+)", one)] for one in re.findall(r"bf16\.bf16 \{(.*?)\}, d, e", text)]
    assert [n for one in sums[: len(parts)] for n in one] == list(range(sum(parts) // 2)) and sums[: len(parts)] * 4 == sums


def test_it_compiles_without_spills_to_products_of_both_factors_in_shared_memory(tmp_path: Path):
    found = list(compiled(jobs([*kernels(request(*HEAD), 320), *kernels(request(*HEAD), 80)], "sm90")))
    for _, made, problems in found:
        assert not isinstance(made, str), made
        assert (problems, made.report.spill_stores, made.report.stack_bytes, made.waits) == ([], 0, 0, True)
        assert "wgmma.mma_async instructions are serialized" not in toolchain._assembler_log(made.ptx, SM90, tmp_path)
    widths = [sorted({int(n) for n in re.findall(r"m64n(\d+)k16", made.ptx)}) for _, made, _ in found]
    assert widths == [[], [160, 208, 256], [], [80]]
    assert "tensormap.replace" in found[0][1].ptx and "cp.async.bulk.tensor.2d" in found[1][1].ptx
