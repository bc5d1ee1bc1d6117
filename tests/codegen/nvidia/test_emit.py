"""The printed text: golden kernels, the same text every time, early exit, barriers, and what is refused.

`TAPEOUT_GOLDEN=write pytest tests/codegen/nvidia/test_emit.py` writes the golden texts anew; they are reviewed as code.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from tapeout.codegen import tile_builder as t
from tapeout.codegen import tile_interpreter
from tapeout.codegen.kernel import KernelError
from tapeout.codegen.launch_grid import grid_at, grid_part, module_grid_at
from tapeout.codegen.lower_to_tile import TileKernel
from tapeout.codegen.nvidia.block_sizes import fitting, power
from tapeout.codegen.nvidia.emit import EmitError, emit, emit_module
from tapeout.codegen.nvidia.facts import SM90
from tapeout.codegen.nvidia.schedules import bucket_rows_for, schedule_for
from tests.codegen.nvidia import triton_interpreter

GOLDEN = Path(__file__).parent / "golden"


def norm(width=96, block_rows=4):
    def body(x, weight, y, count):
        rows, row = t.scalar(count, 0), t.mul(t.program_id(0), block_rows)
        v = t.cast(t.View(x, [rows, width]).load([row, 0], [block_rows, width]), "f32")
        factor = t.rsqrt(t.add(t.mul(t.reduce(t.mul(v, v), "add", 1), 1.0 / width), 1e-6))
        w = t.cast(t.View(weight, [width]).load([0], [width]), "f32")
        y_ = t.mul(t.mul(v, t.broadcast(factor, 1, width)), t.broadcast(w, 0, block_rows))
        t.View(y, [rows, width]).store([row, 0], t.cast(y_, "bf16"))

    return t.kernel("norm", {"x": "bf16", "weight": "bf16", "y": "bf16", "count": "i32"}, body,
                    lambda *b: [t.ceil_div(t.scalar(b[3], 0), block_rows)])


def product(n=64, k=128, block=64):
    def body(x, xs, w, ws, y, count):
        rows, m0, n0 = t.scalar(count, 0), t.mul(t.program_id(0), 128), t.mul(t.program_id(1), block)

        def step(k0, acc):
            g0 = t.quotient(k0, 32)
            a = t.View(x, [rows, k]).load([m0, k0], [128, block])
            sa = t.View(xs, [rows, k // 32]).load([m0, g0], [128, block // 32])
            b = t.View(w, [k, n]).load([k0, n0], [block, block])
            return [t.dot_scaled(a, sa, b, t.View(ws, [n, k // 32]).load([n0, g0], [block, block // 32]), acc)]

        (acc,) = t.loop(0, k, block, [t.full([128, block], 0.0)], step)
        t.View(y, [rows, n]).store([m0, n0], t.cast(acc, "bf16"))

    arguments = {"x": "e4m3", "xs": "i8", "w": "e4m3", "ws": "i8", "y": "bf16", "count": "i32"}
    return t.kernel("product", arguments, body, lambda *b: [t.ceil_div(t.scalar(b[5], 0), 128), n // block])


def chosen(block=16):
    """Positive numbers side by side, then their double where a flag that was just written says so."""

    def body(x, out, flag, count):
        n = t.scalar(count, 0)

        def step(first, at):
            v = t.View(x, [n]).load([first], [block])
            inside = t.less(t.iota(block), t.splat(t.sub(n, first), [block]))
            return [t.add(at, t.compress_store(v, t.bit_and(t.greater(v, 0), inside), out, at, n))]

        (total,) = t.loop(0, n, block, [t.index(0)], step)
        t.View(flag, [None]).store([0], t.splat(total, [1]))

        def double():
            t.loop(0, total, block, [], lambda at: twice(at))

        def twice(at):
            v = t.View(out, [None]).load([at], [block], extent=total)
            t.View(out, [None]).store([at], t.mul(v, 2), extent=total)

        t.when(t.greater(t.scalar(flag, 0), 1), double)

    return t.kernel("chosen", {"x": "i32", "out": "i32", "flag": "i32", "count": "i32"}, body, lambda *b: [1])


KERNELS = {"norm": norm, "product": product, "chosen": chosen}


@pytest.mark.parametrize("name", KERNELS)
def test_text_is_golden(name: str):
    text, path = emit_module(KERNELS[name]()).text, GOLDEN / f"{name}.txt"
    if os.environ.get("TAPEOUT_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


def test_two_emissions_are_equal(tiny_kernels: tuple[TileKernel, ...]):
    """Every kernel of the tiny model has a source, and the same one each time."""
    assert len(tiny_kernels) > 50
    for kernel in tiny_kernels:
        one, other = emit(kernel.text), emit(kernel.text)
        assert one == other and one.name == kernel.symbol and [p for p, _ in one.parameters] == [b.name for b in kernel.buffers]
        compile(one.text, kernel.symbol, "exec")


def test_every_row_has_warps_and_stages_and_is_a_bucket_s_own(tiny_kernels: tuple[TileKernel, ...]):
    for kernel in tiny_kernels:
        row, choice = dict(kernel.choice.schedule), kernel.choice
        assert row["warps"] in (1, 2, 4, 8, 16) and 1 <= row["stages"] <= (8 if row.get("override") else 4)
        own = schedule_for(SM90)(choice.family, choice.request)
        wanted = [bucket_rows_for(SM90)(choice.family, choice.request, own, rows) for rows in (16, 128, 512)]
        if row.pop("part", None) is not None:
            row["warps"] = own["warps"]  # a part may have its own
            wanted = [{**one, "warps": own["warps"]} for one in wanted]
        assert {**row, "workspace_bytes": 0} in [{**one, "workspace_bytes": 0} for one in wanted]


def test_instances_behind_the_grid_leave():
    source, module = emit_module(norm()), norm()
    arrays = {"x": np.zeros((2, 96), np.uint16).view(np.dtype("V2")), "count": np.array([2], np.int32)}
    assert source.text.index("return") < source.text.index("tl.store")
    assert module_grid_at(module, 9) == (3, 1, 1) and module_grid_at(module, 0) == (0, 1, 1)
    assert "count" in arrays


def test_a_grid_needs_its_own_part_of_the_text_only():
    text = norm().operation.get_asm()
    part = grid_part(text)
    assert grid_at(text, 9) == (3, 1, 1) and len(part) < len(text) / 2 and part.count("func.func @") == 1
    assert "tile.load" in text and "tile.load" not in part


def test_grids_of_other_buffers_are_refused():
    module = t.kernel("k", {"sizes": "i32", "count": "i32"}, lambda sizes, count: None, lambda sizes, count: [t.scalar(sizes, 0)])
    with pytest.raises(KernelError, match="@k_grid reads a buffer besides the row count"):
        module_grid_at(module, 4)


def test_written_data_is_read_behind_a_barrier():
    """The flag and the list are read after the instance wrote them: on a GPU other threads did. Loops that only read have no barrier."""
    lines = [line.strip() for line in emit_module(chosen()).text.splitlines()]
    flag = next(i for i, line in enumerate(lines) if "tl.load(flag" in line)
    assert lines[flag - 1] == "tl.debug_barrier()"
    assert lines.count("tl.debug_barrier()") >= 3
    assert "tl.debug_barrier()" not in emit_module(norm()).text and "tl.debug_barrier()" not in emit_module(product()).text


@pytest.mark.parametrize("n", [0, 1, 2, 15, 33])
def test_control_flow_and_compressed_stores(n: int):
    x = np.random.default_rng(n).integers(-5, 9, max(n, 1)).astype(np.int32)
    found, wanted = ({"x": x, "out": np.full(40, -7, np.int32), "flag": np.zeros(1, np.int32), "count": np.array([n], np.int32)} for _ in range(2))
    tile_interpreter.run(chosen(), wanted)
    triton_interpreter.run(emit_module(chosen()), found, (1, 1, 1))
    for name in ("out", "flag"):
        np.testing.assert_array_equal(found[name], wanted[name])


def test_the_last_of_equal_rows_wins():
    def body(x, ids, y, count):
        t.scatter(t.View(x, [t.scalar(count, 0), 4]).load([0, 0], [16, 4]), y, ids, 0, t.scalar(count, 0))

    module = t.kernel("rows", {"x": "i32", "ids": "i32", "y": "i32", "count": "i32"}, body, lambda *b: [1])
    x, ids = np.arange(40, dtype=np.int32).reshape(10, 4), np.array([3, 1, 3, -1, 1, 3, 0, 7, 0, -1, 3], np.int32)
    y = np.full((8, 4), -1, np.int32)
    triton_interpreter.run(emit_module(module), {"x": x, "ids": ids, "y": y, "count": np.array([9], np.int32)}, (1, 1, 1))
    np.testing.assert_array_equal(y[[0, 1, 3, 7]], x[[8, 4, 5, 7]])
    assert (y[[2, 4, 5, 6]] == -1).all()


def test_what_has_no_form_is_refused():
    doubles = t.kernel("k", {"x": "f64", "count": "i32"}, lambda x, count: None, lambda *b: [1])
    with pytest.raises(EmitError, match="kernel k: buffers of f64 have no Triton form"):
        emit_module(doubles)

    def body(x, y, count):
        v = t.View(x, [4, 3, 5]).load([0, 0, 0], [4, 3, 5])
        t.View(y, [4, 15]).store([0, 0], t.merge_last(v))

    with pytest.raises(EmitError, match=r"kernel k: tensor.collapse_shape .* the inner one of joined extents must be a power of two"):
        emit_module(t.kernel("k", {"x": "f32", "y": "f32", "count": "i32"}, body, lambda *b: [1]))


@pytest.mark.parametrize(("n", "limit", "multiple", "wanted"), [(5120, 1024, 1, 1024), (2304, 1024, 32, 768), (37, 64, 1, 37), (7, 4, 1, 1)])
def test_blocks_fit_the_width(n: int, limit: int, multiple: int, wanted: int):
    assert fitting(n, limit, multiple) == wanted


def test_products_have_a_row_for_each_class_of_buckets(tiny_kernels: tuple[TileKernel, ...]):
    for kernel in tiny_kernels:
        choice, own = kernel.choice, schedule_for(SM90)(kernel.choice.family, kernel.choice.request)
        found = [bucket_rows_for(SM90)(choice.family, choice.request, own, rows) for rows in (1, 16, 17, 128, 129, 4096)]
        if choice.family in ("linear", "expert_linear"):
            assert found[0]["block_m"] == 16
        if choice.family == "linear":
            narrow = found[-1].get("override") == 1  # one row serves all
            cut = found[4] != found[5]  # an override cuts each bucket of many rows by itself
            assert not cut or [f["override"] for f in found[4:]] == [3, 3]
            assert found[0] == found[1] and len({str(f) for f in found}) == 1 if narrow else found[0] not in found[3:] and found[3] != found[5]


def test_powers_divide():
    assert [power(5120, 64, 32), power(96, 64, 32), power(33, 64, 32)] == [64, 32, 33]
