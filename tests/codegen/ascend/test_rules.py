"""Verifier rules of the tile contract: each miscompile and refusal that they stand for, as the smallest module that has it."""

import pytest

from tapeout.codegen.ascend import rules
from tapeout.codegen.ascend.emit import lowered
from tapeout.dialects._mlir import ir
from tests.codegen.ascend.sample_kernels import sums_of_blocks

HEAD = """func.func @k(%lock: memref<?xi8>, %work: memref<?xi8>, %x: memref<?xf32>, %ids: memref<?xi32>,
    %gx: i32, %gy: i32, %gz: i32, %px: i32, %py: i32, %pz: i32)
    attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, global_kernel = "local", mix_mode = "MODE", parallel_mode = "simd"} {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %c8 = arith.constant 8 : index
"""


def problems(body: str, mode: str = "aiv", head: str = HEAD) -> list[str]:
    context = ir.Context()
    context.allow_unregistered_dialects = True
    with context:
        return rules.problems(ir.Module.parse(head.replace("MODE", mode) + body + "  return\n}"))


ROWS = """
  %l = memref.alloc() : memref<8x16xf32>
  scf.for %i = %c0 to %c8 step %c1 {
    %from = memref.reinterpret_cast %x to offset: [%i], sizes: [1, WIDTH], strides: [16, 1]
      : memref<?xf32> to memref<1xWIDTHxf32, strided<[16, 1], offset: ?>>
    %to = memref.subview %l[%i, 0] [1, WIDTH] [1, 1] : memref<8x16xf32> to memref<1xWIDTHxf32, strided<[16, 1], offset: ?>>
    memref.copy %from, %to : memref<1xWIDTHxf32, strided<[16, 1], offset: ?>> to memref<1xWIDTHxf32, strided<[16, 1], offset: ?>>
    AGAIN
  } {ExtractedLoadOrStore}
"""
COPY = "memref.copy %from, %to : memref<1x16xf32, strided<[16, 1], offset: ?>> to memref<1x16xf32, strided<[16, 1], offset: ?>>"


def test_a_sound_row_loop():
    assert problems(ROWS.replace("WIDTH", "16").replace("AGAIN", "")) == []


def test_two_copies_into_one_buffer():
    (found,) = problems(ROWS.replace("WIDTH", "16").replace("AGAIN", COPY))
    assert found.startswith("a loop over rows copies twice into one buffer")


def test_rows_between_aligned_addresses():
    (found,) = problems(ROWS.replace("WIDTH", "15").replace("AGAIN", ""))
    assert found == "a loop over rows copies rows of 60 bytes; they start at multiples of 32 bytes only"


def test_a_run_time_allocation():
    (found,) = problems("  %l = memref.alloc(%c8) : memref<?xf32>\n")
    assert "'memref.alloc' has a run-time size" in found


def test_elements_that_the_compiler_does_not_parse():
    (found,) = problems("  %l = memref.alloc() : memref<8xf8E8M0FNU>\n")
    assert "has elements f8E8M0FNU" in found


def test_a_rounding_that_would_be_dropped():
    (found,) = problems("""
  %t = tensor.empty() : tensor<8xf32>
  %q = arith.truncf %t : tensor<8xf32> to tensor<8xf8E4M3FN>
  %w = arith.extf %q : tensor<8xf8E4M3FN> to tensor<8xf32>
""")
    assert "round by arithmetic" in found


MX = """
  %la = memref.alloc() : memref<16xKxf8E4M3FN>
  %ta = bufferization.to_tensor %la restrict writable : memref<16xKxf8E4M3FN> to tensor<16xKxf8E4M3FN>
  %lb = memref.alloc() : memref<Kx16xf8E4M3FN>
  %tb = bufferization.to_tensor %lb restrict writable : memref<Kx16xf8E4M3FN> to tensor<Kx16xf8E4M3FN>
  %ls = memref.alloc() : memref<16xGxi8>
  %ts = bufferization.to_tensor %ls restrict writable : memref<16xGxi8> to tensor<16xGxi8>
  %e = tensor.empty() : tensor<16x16xf32>
  TURN
  %y = "hfusion.matmul_mx"(%ta, B, %ts, %ts, %e)
    : (tensor<16xKxf8E4M3FN>, tensor<Kx16xf8E4M3FN>, tensor<16xGxi8>, tensor<16xGxi8>, tensor<16x16xf32>) -> tensor<16x16xf32>
"""
TURN = """%en = tensor.empty() : tensor<64x16xf8E4M3FN>
  %bt = arith.select %cond, %tb, %en : tensor<64x16xf8E4M3FN>"""


@pytest.mark.parametrize(("k", "sentence"), [(64, None), (32, "'hfusion.matmul_mx' steps by 32 of K")])
def test_scales_come_in_pairs(k, sentence):
    found = problems(MX.replace("K", str(k)).replace("G", str(k // 32)).replace("TURN", "").replace("B,", "%tb,"), "aic")
    assert found == [] if sentence is None else found[0].startswith(sentence)


def test_a_computed_operand_of_a_scaled_product():
    text = MX.replace("TURN", "%cond = arith.constant true\n  " + TURN).replace("B,", "%bt,").replace("K", "64").replace("G", "2")
    (found,) = problems(text, "mix")
    assert found.startswith("'hfusion.matmul_mx' multiplies a computed or gathered operand")


def test_a_wrong_mode_and_signature():
    found = problems("", "aic", HEAD.replace("%lock: memref<?xi8>, ", ""))
    assert found[0].startswith("takes ['memref<?xi8>', 'memref<?xf32>'")
    assert found[1] == 'has mix_mode = "aic"; its ops ask for "aiv"'


@pytest.mark.parametrize(("n", "is_sound"), [(64, True), (128, False)])
def test_lane_numbers_of_several_registers(n, is_sound):
    found = problems(f"""
  %e = tensor.empty() : tensor<{n}xi32>
  %l = "hfusion.arange"(%c0, %c1, %e) : (index, index, tensor<{n}xi32>) -> tensor<{n}xi32>
""")
    assert found == [] if is_sound else "lane numbers of 128 columns, a register holds 64" in found[0]


@pytest.mark.parametrize(("scale", "is_sound"), [(1.5, True), (None, False)])
def test_a_box_that_is_carried_to_the_next_turn(scale, is_sound):
    """The compiler puts this kernel's first two boxes at one place: block 0 got the sum of block 1."""
    found = rules.problems(lowered(sums_of_blocks(scale)))
    assert found == [] if is_sound else found == ["'scf.for' carries a box straight from memory to its next turn; load it in the turn that uses it"]
