"""Forms that the printer chooses by what surrounds an op: loops that read ahead, sums of squares, lines that stand in several rows."""

import ml_dtypes
import numpy as np
import pytest

from tapeout.codegen import tile_builder as t
from tapeout.codegen import tile_interpreter
from tapeout.codegen.kernel import EAGER, STREAMED, Request
from tapeout.codegen.launch_grid import module_grid_at
from tapeout.codegen.lower_to_tile import lower
from tapeout.codegen.nvidia.block_sizes import padded
from tapeout.codegen.nvidia.emit import emit, emit_module
from tapeout.codegen.nvidia.facts import SM90, SM100
from tapeout.codegen.nvidia.schedules import bucket_rows_for, schedule_for
from tapeout.codegen.select_kernels import Choice
from tapeout.dialects._mlir import ir
from tapeout.dialects.format import BF16, FP32, INT32, Q4_INDEX, Q8
from tapeout.dialects.types import Tensor
from tests.codegen.nvidia import triton_interpreter

COLUMNS, BLOCK, ROWS = 192, 64, 5


def same_in_both(module, arrays):
    """Runs the printed kernel and the tile kernel itself; the arrays afterwards, of the printed one."""
    found, wanted = ({name: array.copy() for name, array in arrays.items()} for _ in range(2))
    tile_interpreter.run(module, wanted)
    triton_interpreter.run(emit_module(module), found, module_grid_at(module, int(arrays["count"][0])))
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    return found


def doubled():
    """y = x + sum of x's row, block by block; then every block of y in place, times two."""

    def body(x, y, count):
        rows, row = t.scalar(count, 0), t.program_id(0)
        source, target = t.View(x, [rows, COLUMNS]), t.View(y, [rows, COLUMNS])

        def block(view, c):
            return view.load([row, c], [1, BLOCK])

        (total,) = t.loop(0, COLUMNS, BLOCK, [t.full([1], 0.0)], lambda c, s: [t.add(s, t.reduce(block(source, c), "add", 1))])
        t.loop(0, COLUMNS, BLOCK, [], lambda c: target.store([row, c], t.add(block(source, c), t.broadcast(total, 1, BLOCK))))
        t.loop(0, COLUMNS, BLOCK, [], lambda c: target.store([row, c], t.mul(block(target, c), 2.0)))

    return t.kernel("doubled", {"x": "f32", "y": "f32", "count": "i32"}, body, lambda *b: [t.scalar(b[2], 0)])


def test_streamed_loops_read_ahead_where_they_do_not_write_what_they_read():
    module = doubled()
    arrays = {"x": np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS) % 17, "y": np.zeros((ROWS, COLUMNS), np.float32),
              "count": np.array([ROWS], np.int32)}  # fmt: skip
    plain = [line.strip() for line in emit_module(module).text.splitlines() if line.strip().startswith("for ")]
    with module.context:
        next(iter(module.body.operations)).attributes["tile.streamed"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), 3)
    loops = [line.strip() for line in emit_module(module).text.splitlines() if line.strip().startswith("for ")]
    assert ["num_stages=3" in line for line in loops] == [True, True, False]
    assert not any("num_stages" in line for line in plain) and len(plain) == 3
    found = same_in_both(module, arrays)
    np.testing.assert_array_equal(found["y"], 2 * (arrays["x"] + arrays["x"].sum(1, keepdims=True)))


GATE = Request("engram.gate", (("floor", 1e-6), ("norm_epsilon", 1e-20)),
               (Tensor((None, 4, 5120), BF16), Tensor((None, 25600), BF16), Tensor((4, 5120), BF16), Tensor((4, 5120), BF16)),
               (Tensor((None, 4, 5120), BF16),))  # fmt: skip


@pytest.mark.parametrize("chip", [SM90, SM100])
def test_the_gate_of_many_rows_is_streamed(chip):
    """Few rows are held, and rows of a block or two have nothing to read ahead."""
    row = schedule_for(chip)("engram_gate", GATE)
    rows = {count: bucket_rows_for(chip)("engram_gate", GATE, row, count) for count in (1, 64, 65, 4096)}
    assert [one.get(STREAMED, 0) for one in rows.values()] == [0, 0, 3, 3] and [one.get(EAGER, 0) for one in rows.values()] == [1, 1, 0, 0]
    made = lower(Choice(GATE, "engram_gate", tuple(sorted(rows[4096].items()))))
    few = lower(Choice(GATE, "engram_gate", tuple(sorted(rows[1].items()))))
    assert "tile.eager" in few.text and "tile.streamed" not in few.text and "tile.eager" not in made.text
    assert "tile.streamed = 3" in made.text and emit(made.text).text.count("num_stages=3") == 2
    narrow = Request(GATE.op, GATE.attributes, tuple(Tensor((*v.shape[:-1], v.shape[-1] // 5), BF16) for v in GATE.operands), ())
    assert STREAMED not in bucket_rows_for(chip)("engram_gate", narrow, schedule_for(chip)("engram_gate", narrow), 4096)


def normed(n, block_rows, result):
    views = Tensor((None, n), BF16), Tensor((n,), BF16)
    body = (("nn.rms_norm", (("epsilon", 1e-6),)), ("nn.quantize", ())) if result == Q8 else ()
    name, attributes = ("nn.fused:norm_quantize", ()) if body else ("nn.rms_norm", (("epsilon", 1e-6),))
    request = Request(name, attributes, views, (Tensor((None, n), result),), body)
    row = bucket_rows_for(SM90)("rms_norm", request, schedule_for(SM90)("rms_norm", request), 4096 if block_rows > 1 else 1)
    assert row["block_rows"] == block_rows
    return row, emit(lower(Choice(request, "rms_norm", tuple(sorted(row.items())))).text)


@pytest.mark.parametrize(("n", "block", "result"), [(1280, 256, Q8), (512, 256, BF16), (128, 128, BF16)])
def test_a_warp_reads_a_line_for_itself_and_sums_squares_in_one_op(n, block, result):
    _, source = normed(n, 4, result)
    assert source.text.count("tl.fma(") == n // block and f"lane_4_n1 * 0 + lane_{block}_1n" in source.text
    assert "broadcast_to(extf" not in source.text
    _, alone = normed(n, 1, result)
    assert alone.text.count("tl.fma(") == n // block and "_n1 * 0 +" not in alone.text  # one row needs a line once


@pytest.mark.parametrize("n", [64, 96, 128, 320, 512, 768, 1024, 1280])
def test_one_warp_has_a_row_of_a_narrow_norm_in_every_bucket(n):
    """So that its columns are added up in one order: 256 of them are what a warp reads at once, more would go to two."""
    many, few = (normed(n, block_rows, BF16)[0] for block_rows in (4, 1))
    assert many["warps"] == many["block_rows"] and few["warps"] == 1 and many["block_columns"] == few["block_columns"]
    assert padded(many["block_columns"]) <= 256 and many["registers"] == 64 and "registers" not in few


def test_one_warp_has_a_row_that_is_normed_and_rotated_in_every_bucket():
    rope = (("heads", 1), ("inverse", False), ("offset", 0), ("width", 128))
    body = (("nn.rms_norm", (("epsilon", 1e-6),)), ("nn.rope", rope), ("nn.quantize", ()))
    views = Tensor((None, 128), BF16), Tensor((128,), BF16), Tensor((None,), INT32), Tensor((64, 64), FP32)
    request = Request("nn.fused:norm_rope_quantize", (), views, (Tensor((None, 128), Q4_INDEX),), body)
    row = schedule_for(SM90)("norm_rope_quantize", request)
    rows = [bucket_rows_for(SM90)("norm_rope_quantize", request, row, count) for count in (1, 64, 65, 4096)]
    assert [(one["block_rows"], one["warps"]) for one in rows] == [(1, 1), (1, 1), (4, 4), (4, 4)]


def test_a_square_of_a_bf16_number_is_an_f32_number():
    significands = (128 + np.arange(128, dtype=np.float64)) / 128
    for exponent in (-63, -1, 0, 1, 63):
        x = significands * 2.0**exponent
        np.testing.assert_array_equal((x.astype(np.float32) * x.astype(np.float32)).astype(np.float64), x * x)


def test_lines_and_squares_change_no_result():
    """Rows behind the count stay as they are. A line that something else reads too is dealt out to all threads as ever."""

    def body(x, weight, other, z, y, count):
        rows, row = t.scalar(count, 0), t.mul(t.program_id(0), 4)
        v = t.cast(t.View(x, [rows, BLOCK]).load([row, 0], [4, BLOCK]), "f32")
        line = t.cast(t.View(weight, [BLOCK]).load([0], [BLOCK]), "f32")
        twice_read = t.cast(t.View(other, [BLOCK]).load([0], [BLOCK]), "f32")
        factor = t.reduce(t.add(t.full([4, BLOCK], 0.5), t.mul(v, v)), "add", 1)
        t.View(z, [BLOCK]).store([0], t.mul(twice_read, 2.0))
        lines = t.mul(t.broadcast(line, 0, 4), t.broadcast(twice_read, 0, 4))
        t.View(y, [rows, BLOCK]).store([row, 0], t.mul(t.mul(v, t.broadcast(factor, 1, BLOCK)), lines))

    module = t.kernel("lines", {"x": "bf16", "weight": "bf16", "other": "bf16", "z": "f32", "y": "f32", "count": "i32"}, body,
                      lambda *b: [t.ceil_div(t.scalar(b[5], 0), 4)])  # fmt: skip
    text = emit_module(module).text
    assert "tl.fma(" in text and text.count("lane_4_n1 * 0 + lane_64_1n") == 1 and "other + (lane_64))" in text
    bits = np.random.default_rng(1).integers(0x3E00, 0x4080, (8, BLOCK)).astype(np.uint16).view(ml_dtypes.bfloat16)
    arrays = {"x": bits, "weight": bits[0], "other": bits[1], "z": np.zeros(BLOCK, np.float32), "y": np.full((8, BLOCK), -7, np.float32),
              "count": np.array([ROWS], np.int32)}  # fmt: skip
    found = same_in_both(module, arrays)
    assert (found["y"][ROWS:] == -7).all() and np.isfinite(found["y"]).all() and (found["y"][:ROWS] != -7).all()
