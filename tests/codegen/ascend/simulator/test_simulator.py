"""The simulator as the judge: programs that compile, link and are wrong, and hand-written ones for each thing it must notice."""

import ml_dtypes
import numpy as np
import pytest

from tapeout.codegen.ascend.toolchain import compile_kernel
from tapeout.runtime.device.ascend_simulator import SimulationError, Simulator
from tests.codegen.ascend.harness import tools
from tests.codegen.ascend.sample_kernels import MX

COMPUTED = """%bits = arith.bitcast %tb : tensor<64x64xf8E4M3FN> to tensor<64x64xi8>
  %magnitude = arith.constant dense<127> : tensor<64x64xi8>
  %size = arith.andi %bits, %magnitude : tensor<64x64xi8>
  %abs = arith.bitcast %size : tensor<64x64xi8> to tensor<64x64xf8E4M3FN>"""


def _scaled_product(computed: bool) -> tuple[np.ndarray, np.ndarray]:
    """(simulated, exact) of a block-scaled product whose second operand is loaded, or its absolute value made by a vector core."""
    words = {"MODE": "mix" if computed else "aic", "BROWS": "64, 64", "BSTEP": "64", "BSHAPE": "64x64", "TURN": COMPUTED if computed else "",
             "OPERAND": "%abs" if computed else "%tb"}
    text = MX
    for word, value in words.items():
        text = text.replace(word, value)
    random = np.random.default_rng(5)
    a, b = (random.integers(-4, 5, shape).astype(ml_dtypes.float8_e4m3fn) for shape in ((16, 64), (64, 64)))
    sa, sb = (random.integers(125, 130, shape).astype(np.uint8) for shape in ((16, 2), (64, 2)))
    c = np.zeros((16, 64), np.float32)
    Simulator(compile_kernel(text, "mx", tools()).dump).launch("mx", [a, b, sa, sb, c])
    by_row, by_column = (np.exp2(s.astype(np.float64) - 127).repeat(32, 1) for s in (sa, sb))
    right = b.astype(np.float64)
    return c, (a.astype(np.float64) * by_row) @ ((np.abs(right) if computed else right) * by_column.T)


def test_a_scaled_product_of_loaded_operands_is_right():
    found, wanted = _scaled_product(computed=False)
    np.testing.assert_array_equal(found, wanted)


def test_a_scaled_product_of_a_computed_operand_is_miscompiled_and_seen():
    """It compiles with code 0; a verifier rule keeps kernels from it, and here is why."""
    found, wanted = _scaled_product(computed=True)
    assert not np.allclose(found, wanted, rtol=1e-2)


MODULE = """"builtin.module"() ({{
  "func.func"() <{{function_type = (memref<?xi8>, memref<?xi8>, memref<?xf32>, i32, i32, i32) -> (), sym_name = "{name}"}}> ({{
  ^bb0(%lock: memref<?xi8>, %work: memref<?xi8>, %x: memref<?xf32>, %gx: i32, %gy: i32, %gz: i32):
    {body}
    "func.return"() : () -> ()
  }}) {{hivm.func_core_type = #hivm.func_core_type<{core}>}} : () -> ()
{more}}}) : () -> ()
"""
VIEW = ('%n = "arith.constant"() <{{value = {address} : i64}}> : () -> i64\n    %u = "hivm.hir.pointer_cast"(%n) : (i64) -> memref<8xf32, '
        '#hivm.address_space<ub>>\n    %g = "memref.reinterpret_cast"(%x) <{{operandSegmentSizes = array<i32: 1, 0, 0, 0>, static_offsets = '
        'array<i64: {first}>, static_sizes = array<i64: 8>, static_strides = array<i64: 1>}}> : (memref<?xf32>) -> memref<8xf32, strided<[1], '
        'offset: {first}>>\n    "hivm.hir.load"(%g, %u) <{{operandSegmentSizes = array<i32: 1, 1, 0, 0, 0, 0>}}> : (memref<8xf32, strided<[1], '
        'offset: {first}>>, memref<8xf32, #hivm.address_space<ub>>) -> ()')  # fmt: skip


def launched(body: str, name: str = "k", core: str = "AIV", more: str = "", size: int = 16) -> None:
    Simulator(MODULE.format(name=name, body=body, core=core, more=more)).launch("k", [np.zeros(size, np.float32)])


def test_a_load_inside_its_buffers():
    launched(VIEW.format(address=64, first=8))


@pytest.mark.parametrize(("address", "first", "sentence"), [
    (64, 12, r"access outside its buffer in gm: elements 12 to 19 of float32, the buffer holds 0 to 15"),
    (72, 0, "rows there start at multiples of 32 bytes"),
    (253952 - 16, 0, r"ends behind the 253952 bytes of ub")])
def test_a_load_outside_is_refused(address, first, sentence):
    with pytest.raises(SimulationError, match=sentence) as caught:
        launched(VIEW.format(address=address, first=first))
    assert str(caught.value).startswith("k instance 0, vector core 0: ")


def test_an_op_without_a_meaning_is_named():
    with pytest.raises(SimulationError, match=r"no meaning for hivm\.hir\.unheard_of"):
        launched('"hivm.hir.unheard_of"() : () -> ()')


WAIT = '"hivm.hir.sync_block_wait"() <{static_flag_id = 3 : i64}> : () -> ()'
OTHER = """  "func.func"() <{function_type = (memref<?xi8>, memref<?xi8>, memref<?xf32>, i32, i32, i32) -> (), sym_name = "k_mix_aiv"}> ({
  ^bb0(%lock: memref<?xi8>, %work: memref<?xi8>, %x: memref<?xf32>, %gx: i32, %gy: i32, %gz: i32):
    BODY
    "func.return"() : () -> ()
  }) {hivm.func_core_type = #hivm.func_core_type<AIV>} : () -> ()
"""


def test_a_deadlock_is_reported_with_who_waits():
    with pytest.raises(SimulationError) as caught:
        launched(WAIT, "k_mix_aic", "AIC", OTHER.replace("BODY", WAIT))
    assert str(caught.value) == ("k instance 0 cannot go on: cube core 0 waits for flag 3, vector core 0 waits for flag 3, "
                                 "vector core 1 waits for flag 3")


def test_a_signal_of_both_vector_cores_lets_the_cube_go_on():
    launched(WAIT, "k_mix_aic", "AIC", OTHER.replace("BODY", WAIT.replace("_wait", "_set")))


def test_unwritten_local_memory_is_not_a_number():
    body = VIEW.format(address=64, first=0).replace('"hivm.hir.load"(%g, %u)', '"hivm.hir.store"(%u, %g)').replace(
        "(memref<8xf32, strided<[1], offset: 0>>, memref<8xf32, #hivm.address_space<ub>>)",
        "(memref<8xf32, #hivm.address_space<ub>>, memref<8xf32, strided<[1], offset: 0>>)")
    x = np.zeros(8, np.float32)
    Simulator(MODULE.format(name="k", body=body, core="AIV", more="")).launch("k", [x])
    assert np.isnan(x).all()
