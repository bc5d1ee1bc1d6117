"""Programs that the Ascend compiler accepts and miscompiles, or that no linker would take, and those that it refuses: each is caught here.

A rule names them before any text leaves; where a rule stands for a miscompile, the simulator shows what it keeps kernels from. What the
compiler says of the rest becomes a sentence (test_toolchain.py).
"""

from typing import Any

import numpy as np
import pytest

from tapeout.codegen.ascend import build as building
from tapeout.codegen.ascend import toolchain
from tapeout.codegen.ascend.build import MeetingsLost, build
from tapeout.codegen.ascend.link_check import missing
from tapeout.codegen.ascend.toolchain import compile_kernel
from tapeout.runtime.device.ascend_simulator import SimulationError, Simulator
from tests.codegen.ascend import sample_kernels
from tests.codegen.ascend.harness import tools
from tests.codegen.ascend.test_rules import problems

LOADED = """
  %l = memref.alloc() : memref<8x16xf32>
  %g = memref.reinterpret_cast %x to offset: [0], sizes: [8, 16], strides: [STRIDE, 1] : memref<?xf32> to memref<8x16xf32, strided<[STRIDE, 1]>>
  memref.copy %g, %l : memref<8x16xf32, strided<[STRIDE, 1]>> to memref<8x16xf32>
  %t = bufferization.to_tensor %l restrict writable : memref<8x16xf32> to tensor<8x16xf32>
"""
PRODUCT = """
  %e = tensor.empty() : tensor<8x8xf32>
  %b = tensor.empty() : tensor<16x8xf32>
  %p = linalg.matmul ins(%t, %b : tensor<8x16xf32>, tensor<16x8xf32>) outs(%e : tensor<8x8xf32>) -> tensor<8x8xf32>
"""


def loaded(stride: int = 16) -> str:
    return LOADED.replace("STRIDE", str(stride))


# -- rules


def test_a_generic_elementwise_op() -> None:
    (found,) = problems(loaded() + """
  %y = linalg.generic {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i, j)>], iterator_types = ["parallel", "parallel"]}
    ins(%t : tensor<8x16xf32>) outs(%t : tensor<8x16xf32>) { ^bb0(%a: f32, %b: f32): linalg.yield %a : f32 } -> tensor<8x16xf32>
""")
    assert found == "'linalg.generic' is not taken; use arith and math ops on tensors"


def test_a_part_of_a_loaded_tile_that_is_computed_with() -> None:
    part = loaded() + "  %s = tensor.extract_slice %t[0, 0] [4, 16] [1, 1] : tensor<8x16xf32> to tensor<4x16xf32>\n"
    stored = """
  %o = memref.reinterpret_cast %x to offset: [0], sizes: [4, 16], strides: [16, 1] : memref<?xf32> to memref<4x16xf32, strided<[16, 1]>>
  bufferization.materialize_in_destination %s in writable %o : (tensor<4x16xf32>, memref<4x16xf32, strided<[16, 1]>>) -> ()
"""
    assert problems(part + stored) == []
    (found,) = problems(part + "  %y = arith.addf %s, %s : tensor<4x16xf32>\n")
    assert found == "'tensor.extract_slice' of a loaded tile is computed with; load that part by itself"


def test_a_view_of_stride_0() -> None:
    assert problems(loaded()) == []
    (found,) = problems(loaded(0))
    assert found == "'memref.reinterpret_cast' has a stride of 0; copy the rows instead"


def test_a_tile_of_rank_0() -> None:
    (found,) = problems("  %n = tensor.empty() : tensor<i32>\n")
    assert found == "'tensor.empty' makes a tile of rank 0; take a tile of one number"


@pytest.mark.parametrize(("body", "sentence"), [
    ("  %m = memref.alloc() : memref<8x16xf32>\n  memref.copy %l, %m : memref<8x16xf32> to memref<8x16xf32>\n",
     "'memref.copy' between local buffers of a mixed kernel; only vector kernels copy inside the unified buffer"),
    ('  %j = "hfusion.interleave"(%t, %t) : (tensor<8x16xf32>, tensor<8x16xf32>) -> tensor<8x32xf32>\n',
     "'hfusion.interleave' in a mixed kernel undoes the division of rows between its vector cores; keep even columns before odd ones"),
])
def test_what_only_vector_kernels_may_do(body: str, sentence: str) -> None:
    assert problems(loaded() + body, "aiv") == []
    doubled = "  %q = arith.addf %p, %p : tensor<8x8xf32>\n"
    assert problems(loaded() + PRODUCT + doubled, "mix") == []
    assert problems(loaded() + PRODUCT + doubled + body, "mix") == [sentence]


def test_a_product_of_fp8_with_packed_fp4() -> None:
    """It compiles, links and takes the bytes for e4m3."""
    (found,) = problems("""
  %la = memref.alloc() : memref<16x64xf8E4M3FN>
  %ta = bufferization.to_tensor %la restrict writable : memref<16x64xf8E4M3FN> to tensor<16x64xf8E4M3FN>
  %lb = memref.alloc() : memref<64x16xi8>
  %tb = bufferization.to_tensor %lb restrict writable : memref<64x16xi8> to tensor<64x16xi8>
  %ls = memref.alloc() : memref<16x2xi8>
  %ts = bufferization.to_tensor %ls restrict writable : memref<16x2xi8> to tensor<16x2xi8>
  %e = tensor.empty() : tensor<16x16xf32>
  %y = "hfusion.matmul_mx"(%ta, %tb, %ts, %ts, %e)
    : (tensor<16x64xf8E4M3FN>, tensor<64x16xi8>, tensor<16x2xi8>, tensor<16x2xi8>, tensor<16x16xf32>) -> tensor<16x16xf32>
""", "aic")
    assert found == "'hfusion.matmul_mx' multiplies f8E4M3FN with i8; decode one side, both must hold one kind of number"


# -- silent miscompiles, shown

TWICE = """func.func @twice(%lock: memref<?xi8>, %work: memref<?xi8>, %x: memref<?xbf16>, %ids: memref<?xi32>, %y: memref<?xf32>,
    %gx: i32, %gy: i32, %gz: i32, %px: i32, %py: i32, %pz: i32)
    attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, global_kernel = "local", mix_mode = "mix", parallel_mode = "simd"} {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %c32 = arith.constant 32 : index
  %c64 = arith.constant 64 : index
  %rows = memref.alloc() : memref<32x64xbf16>
  scf.for %i = %c0 to %c32 step %c1 {
    %cell = memref.reinterpret_cast %ids to offset: [%i], sizes: [1], strides: [1] : memref<?xi32> to memref<1xi32, strided<[1], offset: ?>>
    %id32 = memref.load %cell[%c0] : memref<1xi32, strided<[1], offset: ?>>
    %id = arith.index_cast %id32 : i32 to index
    %first = arith.muli %id, %c64 : index
    %second = arith.addi %first, %c32 : index
COPIES
  } {ExtractedLoadOrStore}
  %once = bufferization.to_tensor %rows restrict writable : memref<32x64xbf16>
  %t = arith.addf %once, %once : tensor<32x64xbf16>
  %e = tensor.empty() : tensor<64x32xbf16>
  %turned = linalg.transpose ins(%t : tensor<32x64xbf16>) outs(%e : tensor<64x32xbf16>) permutation = [1, 0]
  %zero = arith.constant 0.0 : f32
  %s = tensor.empty() : tensor<32x32xf32>
  %init = linalg.fill ins(%zero : f32) outs(%s : tensor<32x32xf32>) -> tensor<32x32xf32>
  %p = linalg.matmul ins(%t, %turned : tensor<32x64xbf16>, tensor<64x32xbf16>) outs(%init : tensor<32x32xf32>) -> tensor<32x32xf32>
  %q = arith.addf %p, %p : tensor<32x32xf32>
  %gy0 = memref.reinterpret_cast %y to offset: [0], sizes: [32, 32], strides: [32, 1] : memref<?xf32> to memref<32x32xf32, strided<[32, 1]>>
  bufferization.materialize_in_destination %q in writable %gy0 : (tensor<32x32xf32>, memref<32x32xf32, strided<[32, 1]>>) -> ()
  return
}
"""
ONE_COPY = [("first", 0, 64)]
TWO_COPIES = [("first", 0, 32), ("second", 32, 32)]


def copies(parts: list[tuple[str, int, int]]) -> str:
    lines = []
    for name, column, width in parts:
        kind = f"memref<1x{width}xbf16, strided<[64, 1], offset: ?>>"
        lines += [f"    %f{column} = memref.reinterpret_cast %x to offset: [%{name}], sizes: [1, {width}], strides: [64, 1]",
                  f"      : memref<?xbf16> to {kind}",
                  f"    %t{column} = memref.subview %rows[%i, {column}] [1, {width}] [1, 1] : memref<32x64xbf16> to {kind}",
                  f"    memref.copy %f{column}, %t{column} : {kind} to {kind}"]
    return TWICE.replace("COPIES", "\n".join(lines))


def _gathered(parts: list[tuple[str, int, int]]) -> tuple[Any, Any]:
    import ml_dtypes

    rng = np.random.default_rng(5)
    x = rng.integers(-3, 4, (40, 64)).astype(ml_dtypes.bfloat16)
    ids, y = rng.permutation(40)[:32].astype(np.int32), np.zeros((32, 32), np.float32)
    Simulator(compile_kernel(copies(parts), "twice", tools()).dump).launch("twice", [x, ids, y], 1)
    rows = x[ids].astype(np.float32)
    return y, 8 * rows @ rows.T


def test_rows_copied_once_into_their_buffer_are_right() -> None:
    found, wanted = _gathered(ONE_COPY)
    np.testing.assert_array_equal(found, wanted)


def test_rows_copied_in_two_parts_are_miscompiled_and_seen() -> None:
    """It compiles with code 0; the row loop is divided between the vector cores, and only its last copy gets the right rows."""
    with pytest.raises(SimulationError, match="vector core 1: access outside its buffer in ub: elements 1024 to 1055 of bfloat16"):
        _gathered(TWO_COPIES)


def test_a_dropped_meeting_point_fails_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass that overlaps cube and vector steps drops the points where vector cores meet, without a word."""
    tools()
    monkeypatch.setattr(building, "UNPIPELINED", "--enable-code-motion=true")
    with pytest.raises(MeetingsLost, match="kernel handed_over has 2 points where its vector cores meet, and the compiler kept 0"):
        build(sample_kernels.handed_over(), tools())


# -- programs that compile and do not link

VADD = """module { func.func @add(%a: memref<64xf32, #hivm.address_space<gm>>, %c: memref<64xf32, #hivm.address_space<gm>>)
    attributes {hacc.entry, hacc.function_kind = #hacc.function_kind<DEVICE>, hivm.func_core_type = #hivm.func_core_type<AIV>} {
  %u = memref.alloc() : memref<64xf32, #hivm.address_space<ub>>
  hivm.hir.load ins(%a : memref<64xf32, #hivm.address_space<gm>>) outs(%u : memref<64xf32, #hivm.address_space<ub>>)
  hivm.hir.vadd ins(%u, %u : memref<64xf32, #hivm.address_space<ub>>, memref<64xf32, #hivm.address_space<ub>>)
    outs(%u : memref<64xf32, #hivm.address_space<ub>>)
  hivm.hir.store ins(%u : memref<64xf32, #hivm.address_space<ub>>) outs(%c : memref<64xf32, #hivm.address_space<gm>>)
  return
}}
"""


def test_raw_vector_ops_compile_and_do_not_link(monkeypatch: pytest.MonkeyPatch) -> None:
    tools()
    monkeypatch.setattr(toolchain, "CONTRACT_FLAGS", ("--enable-hivm-compile=true",))
    monkeypatch.setattr(toolchain, "DUMP_POINT", "hivm-plan-memory")
    module = compile_kernel(VADD, "add", tools()).module
    assert missing(module, tools()) == {"vadd_1d_float": "AIV"}


@pytest.mark.parametrize(("name", "core"), [
    ("matmul_bfloat16_t_bfloat16_t_float_TTint64_t", "AIC"), ("embedding_gather_bfloat16_t", "AIV"),
    ("mmadmxL1_float8_e4m3_t_float4_e2m1x2_t_to_float", "AIC"),
])
def test_functions_that_only_the_compiler_knows(name: str, core: str) -> None:
    text = ('"func.func"() <{function_type = () -> (), sym_name = "NAME", sym_visibility = "private"}> ({\n}) '
            "{hivm.func_core_type = #hivm.func_core_type<CORE>} : () -> ()").replace("NAME", name).replace("CORE", core)
    assert missing(text, tools()) == {name: core}


# -- what looks like a refusal and is none


def test_a_first_attempt_that_overflows_is_no_error() -> None:
    """The driver gives up double buffering by itself; its messages stay, its return code is what counts."""
    built = build(sample_kernels.scale(rows=40, columns=512), tools())
    assert 40 * 512 * 4 <= built.resources.memory["ub"] <= 253_952
    assert built.compiled.flags[:1] == building.BUFFERED


@pytest.mark.parametrize(("messages", "words"), [
    ("error: cbuf overflow, requires 9 bits while 8 bits available!", "needs 9 bits of cbuf and has 8"),
    ("failed to legalize operation 'linalg.generic' that was explicitly marked illegal", "holds an elementwise linalg.generic"),
    ("Failed to obtain op buffer shape size which should be static", "allocates a buffer of run-time size"),
    ("error: strides must not be zero", "reads a view of stride 0"),
    ("error: 'hivm.hir.vinterleave' op expected type of operand #2", "interleaves lanes in a mixed kernel"),
    ("for the --target option: Cannot find option named 'x'", "was compiled for a chip that the compiler does not know"),
    ("error: failed to satisfy constraint: Microscaling format", "names a block-scaled format that does not exist"),
    ("x.mlir:3:4: error: redefinition of SSA value '%0'", "is refused: redefinition of SSA value '%0'"),
])
def test_every_cause_becomes_its_own_sentence(messages: str, words: str) -> None:
    assert toolchain._cause(messages).startswith(words)
