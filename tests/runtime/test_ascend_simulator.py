"""The simulator by itself, on modules written by hand: its reader, its numbers of loops, and loops at once against one step after the other."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from tapeout.runtime.device.ascend_simulator import SimulationError, Simulator
from tapeout.runtime.device.ascend_simulator import attributes as attribute
from tapeout.runtime.device.ascend_simulator.batch import BatchedLoop
from tapeout.runtime.device.ascend_simulator.memory import Linear
from tapeout.runtime.device.ascend_simulator.text import DYNAMIC, Kind, kind, read_module, split

# -- reading


@pytest.mark.parametrize(("text", "wanted"), [
    ("f32", Kind("scalar", (), "f32")),
    ("vector<1x64xbf16>", Kind("vector", (1, 64), "bf16")),
    ("vector<f32>", Kind("vector", (), "f32")),
    ("memref<?xi8, #hivm.address_space<gm>>", Kind("memref", (DYNAMIC,), "i8", "gm")),
    ("memref<4x?x32xf8E4M3FN, strided<[4096, 32, 1], offset: ?>, #hivm.address_space<cbuf>>", Kind("memref", (4, DYNAMIC, 32), "f8E4M3FN", "cbuf")),
    ("memref<i32>", Kind("memref", (), "i32"))])
def test_types(text, wanted):
    assert kind(text) == wanted


def test_an_op_with_everything():
    (function,) = read_module("""// a remark
#map = affine_map<(d0) -> (d0 * 2)>
"builtin.module"() ({
  "func.func"() <{sym_name = "f", text = "a, {b} -> c"}> ({
  ^bb0(%x: i32, %v: vector<4xf32>):
    %r:2 = "op.two"(%x, %v) <{map = #map, flags = array<i64: 1, -2>}> ({
    ^bb0(%i: index):
      "op.end"(%i) : (index) -> ()
    }, {
    }) {unit, kind = #d.kind<add>} : (i32, vector<4xf32>) -> (i32, vector<4xf32>)
    "func.return"(%r#0) : (i32) -> ()
  }) {hivm.vector_function} : () -> ()
}) {dlti.spec = #dlti.spec<"a" = 1 : i32>} : () -> ()
""")
    assert function.attributes == {"sym_name": '"f"', "text": '"a, {b} -> c"', "hivm.vector_function": ""}
    two, end = function.regions[0][0].ops
    assert (two.name, two.operands, two.results) == ("op.two", ("%x", "%v"), ("%r#0", "%r#1"))
    assert two.attributes == {"map": "affine_map<(d0) -> (d0 * 2)>", "flags": "array<i64: 1, -2>", "unit": "", "kind": "#d.kind<add>"}
    assert [[op.name for block in region for op in block.ops] for region in two.regions] == [["op.end"], []]
    assert two.result_kinds[1] == kind("vector<4xf32>") and end.operands == ("%r#0",)
    assert attribute.word(two.attributes["kind"]) == "add" and attribute.integers(two.attributes["flags"]) == [1, -2]


@pytest.mark.parametrize(("text", "sentence"), [
    ("", "holds no module"), ('"builtin.module"() ({\n', "ends inside a region"),
    ('"builtin.module"() ({\n%x = what\n}) : () -> ()', "cannot read: %x = what"),
    ('"builtin.module"() ({\n"a.b"() <{x = [1}> : () -> ()', "ends inside")])
def test_what_is_no_module(text, sentence):
    with pytest.raises(SimulationError, match=sentence):
        read_module(text)


def test_lists_and_constants():
    assert split("a, b<c, d>, {e, f}, \"g, h\"") == ["a", "b<c, d>", "{e, f}", '"g, h"']
    assert attribute.integers("array<i32>") == [] and attribute.integers("[1 : i64, 2 : i64]") == [1, 2]
    assert attribute.groups("[[0, 1], [2]]") == [[0, 1], [2]] and attribute.groups("[]") == []
    f32, i32 = np.dtype(np.float32), np.dtype(np.int32)
    assert attribute.number("0xFF800000 : f32", f32) == -np.inf and attribute.number("-7 : i32", i32) == -7
    assert attribute.number("0x3F80 : bf16", np.dtype(ml_dtypes.bfloat16)) == 1
    np.testing.assert_array_equal(attribute.dense("dense<[1, 2]> : vector<2xi32>", i32, (2,)), [1, 2])
    np.testing.assert_array_equal(attribute.dense("dense<1.5> : vector<2x2xf32>", f32, (2, 2)), np.full((2, 2), 1.5))
    np.testing.assert_array_equal(attribute.dense('dense<"0x0100000002000000"> : vector<2xi32>', i32, (2,)), [1, 2])
    assert attribute.number("true", np.dtype(bool)) is True and attribute.dense("dense<false> : vector<2xi1>", np.dtype(bool), (2,)).sum() == 0


@pytest.mark.parametrize(("text", "function"), [
    ("affine_map<(d0)[s0] -> (d0 * 3 - s0 + 7)>", lambda d, s: d * 3 - s + 7),
    ("affine_map<(d0)[s0] -> ((-d0 + s0 * 128 + 128) ceildiv 32)>", lambda d, s: -((d - s * 128 - 128) // 32)),
    ("affine_map<(d0)[s0] -> ((d0 floordiv 4) mod 3 + s0 * (d0 + 1))>", lambda d, s: d // 4 % 3 + s * (d + 1)),
    ("affine_map<(d0, d1) -> (d0 - d1 * -2)>", lambda d, s: d + 2 * s)])
def test_affine_maps(text, function):
    found = attribute.affine_map(text)
    assert found.is_linear == ("div" not in text)
    for d, s in itertools.product(range(-5, 40, 7), range(-3, 4)):
        assert found.results[0]([d, s]) == function(d, s)


def test_positions_of_a_permutation():
    assert attribute.affine_map("affine_map<(d0, d1) -> (d1, 0, d0)>").positions == [1, None, 0]


# -- numbers of loops


def test_linear_numbers_are_those_of_all_iterations():
    i, j = Linear(5, (3,), (4,)), Linear(0, (0, 2), (1, 6))
    found = 100 - (i * 2 + j) + 7 - i
    grid = np.array([[107 - (5 + 3 * a) * 3 - 2 * b for b in range(6)] for a in range(4)])
    np.testing.assert_array_equal(found.values(2), grid)
    assert found.bounds == (grid.min(), grid.max()) and found.counts == (4, 6)
    assert (i + 1).axes(2) == ([4, 1], [3, 0])


# -- loops at once

HEAD = """"builtin.module"() ({
  "func.func"() <{function_type = (), sym_name = "k"}> ({
  ^bb0(%lock: memref<?xi8>, %work: memref<?xi8>, %x: memref<?xf32>, %gx: i32, %gy: i32, %gz: i32):
    %zero = "arith.constant"() <{value = 0 : index}> : () -> index
    %one = "arith.constant"() <{value = 1 : index}> : () -> index
    %rows = "arith.constant"() <{value = 8 : index}> : () -> index
    %pad = "arith.constant"() <{value = 0.000000e+00 : f32}> : () -> f32
    %at = "arith.constant"() <{value = 64 : i64}> : () -> i64
    %u = "hivm.hir.pointer_cast"(%at) <{operandSegmentSizes = array<i32: 1, 0>}> : (i64) -> memref<640xf32, #hivm.address_space<ub>>
    %g = "memref.reinterpret_cast"(%x) <{operandSegmentSizes = array<i32: 1, 0, 0, 0>, static_offsets = array<i64: 0>, static_sizes = array<i64: 640>, static_strides = array<i64: 1>}> : (memref<?xf32>) -> memref<640xf32>
    "hivm.hir.load"(%g, %u) <{operandSegmentSizes = array<i32: 1, 1, 0, 0, 0, 0>}> : (memref<640xf32>, memref<640xf32, #hivm.address_space<ub>>) -> ()
"""  # noqa: E501
TAIL = """    "hivm.hir.store"(%u, %g) : (memref<640xf32, #hivm.address_space<ub>>, memref<640xf32>) -> ()
    "func.return"() : () -> ()
  }) {hivm.func_core_type = #hivm.func_core_type<AIV>} : () -> ()
}) : () -> ()
"""
LOOP = """    "scf.for"(%zero, %rows, %one) ({
    ^bb0(%i: index):
BODY      "scf.yield"() : () -> ()
    }) : (index, index, index) -> ()
"""


def row(name: str, first: int, step: int, lanes: int = 64) -> str:
    """A view of `lanes` numbers from `first + step * i` on."""
    return (f'      %{name}o = "affine.apply"(%i) <{{map = affine_map<(d0) -> (d0 * {step} + {first})>}}> : (index) -> index\n'
            f'      %{name} = "memref.subview"(%u, %{name}o) <{{operandSegmentSizes = array<i32: 1, 1, 0, 0>, static_offsets = array<i64: {DYNAMIC}>'
            f', static_sizes = array<i64: {lanes}>, static_strides = array<i64: 1>}}> : (memref<640xf32, #hivm.address_space<ub>>, index) -> '
            f'memref<{lanes}xf32, strided<[1], offset: ?>, #hivm.address_space<ub>>\n')  # fmt: skip


def read(name: str, view: str, lanes: int = 64) -> str:
    return (f'      %{name} = "vector.transfer_read"(%{view}, %zero, %pad) <{{in_bounds = [true], operandSegmentSizes = array<i32: 1, 1, 1, 0>, '
            f'permutation_map = affine_map<(d0) -> (d0)>}}> : (memref<{lanes}xf32, #hivm.address_space<ub>>, index, f32) -> vector<{lanes}xf32>\n')


def write(value: str, view: str, lanes: int = 64) -> str:
    return (f'      "vector.transfer_write"(%{value}, %{view}, %zero) <{{in_bounds = [true], operandSegmentSizes = array<i32: 1, 1, 1, 0>, '
            f'permutation_map = affine_map<(d0) -> (d0)>}}> : (vector<{lanes}xf32>, memref<{lanes}xf32, #hivm.address_space<ub>>, index) -> ()\n')


def twice(name: str, of: str, lanes: int = 64) -> str:
    return f'      %{name} = "arith.addf"(%{of}, %{of}) : (vector<{lanes}xf32>, vector<{lanes}xf32>) -> vector<{lanes}xf32>\n'


COUNTED = """      %h = "arith.index_cast"(%i) : (index) -> i32
      %hv = "vector.broadcast"(%h) : (i32) -> vector<64xi32>
      %hf = "arith.sitofp"(%hv) : (vector<64xi32>) -> vector<64xf32>
"""
SUMMED = """      %s = "vector.reduction"(%v) <{kind = #vector.kind<add>}> : (vector<64xf32>) -> f32
      %sv = "vector.broadcast"(%s) : (f32) -> vector<64xf32>
"""
BODIES = {
    "in place": (row("a", 0, 64) + read("v", "a") + twice("w", "v") + write("w", "a"), True),
    "elsewhere": (row("a", 0, 8, 8) + row("b", 320, 16, 8) + read("v", "a", 8) + twice("w", "v", 8) + write("w", "b", 8), True),
    "number of the iteration": (row("a", 0, 64) + COUNTED + write("hf", "a"), True),
    "a sum of each row": (row("a", 0, 64) + read("v", "a") + SUMMED + write("sv", "a"), True),
    "behind what was read": (row("a", 64, 64) + row("b", 0, 64) + read("v", "a") + write("v", "b"), True),
    "what the next one reads": (row("a", 0, 64) + row("b", 64, 64) + read("v", "a") + twice("w", "v") + write("w", "b"), False),
    "one place": (row("a", 0, 64) + row("b", 512, 0) + read("v", "a") + read("p", "b") + twice("w", "v") + write("w", "b"), False),
    "overlapping rows": (row("a", 0, 32) + read("v", "a") + twice("w", "v") + write("w", "a"), False),
    "written, then read by an earlier one": (
        row("a", 64, 64) + row("b", 0, 64) + COUNTED + write("hf", "a") + read("v", "b") + write("v", "a"), False),
}


@pytest.mark.parametrize("name", BODIES)
def test_at_once_and_one_by_one_leave_the_same(name):
    body, is_independent = BODIES[name]
    text = HEAD + LOOP.replace("BODY", body) + TAIL
    found = [np.random.default_rng(1).standard_normal(640).astype(np.float32) for _ in range(2)]
    counts = []
    for at_once, x in zip((True, False), found, strict=True):
        simulator = Simulator(text, at_once)
        counts.append(simulator.launch("k", [x]))
        loops = [run for run in simulator.program.functions["k"].compiled() if isinstance(run, BatchedLoop)]
        assert [known for loop in loops for known in loop.known.values()] == ([is_independent] if at_once else [])
    np.testing.assert_array_equal(found[0].view(np.uint32), found[1].view(np.uint32))
    assert counts[0] == counts[1] and counts[0].vector_operations >= 8


def test_nested_loops_run_at_once():
    """Rows of eight groups: each element is its row's first number plus the group's number."""
    inner = """      "scf.for"(%zero, %rows, %one) ({
      ^bb0(%j: index):
        %p = "affine.apply"(%i, %j) <{map = affine_map<(d0, d1) -> (d0 * 64 + d1 * 8)>}> : (index, index) -> index
        %q = "memref.subview"(%u, %p) <{operandSegmentSizes = array<i32: 1, 1, 0, 0>, static_offsets = array<i64: DYNAMIC>, static_sizes = array<i64: 8>, static_strides = array<i64: 1>}> : (memref<640xf32, #hivm.address_space<ub>>, index) -> memref<8xf32, strided<[1], offset: ?>, #hivm.address_space<ub>>
        %n = "arith.index_cast"(%j) : (index) -> i32
        %nv = "vector.broadcast"(%n) : (i32) -> vector<8xi32>
        %nf = "arith.sitofp"(%nv) : (vector<8xi32>) -> vector<8xf32>
        %m = "arith.addf"(%nf, %f) : (vector<8xf32>, vector<8xf32>) -> vector<8xf32>
        "vector.transfer_write"(%m, %q, %zero) <{in_bounds = [true], operandSegmentSizes = array<i32: 1, 1, 1, 0>, permutation_map = affine_map<(d0) -> (d0)>}> : (vector<8xf32>, memref<8xf32, #hivm.address_space<ub>>, index) -> ()
        "scf.yield"() : () -> ()
      }) : (index, index, index) -> ()
"""  # noqa: E501
    first = row("a", 0, 64, 8) + read("v", "a", 8) + """      %f0 = "vector.reduction"(%v) <{kind = #vector.kind<maximumf>}> : (vector<8xf32>) -> f32
      %f = "vector.broadcast"(%f0) : (f32) -> vector<8xf32>
"""
    text = HEAD + LOOP.replace("BODY", first + inner.replace("DYNAMIC", str(DYNAMIC))) + TAIL
    x = np.arange(640, dtype=np.float32)
    wanted = x.copy()
    wanted[:512] = (np.arange(8)[:, None] * 64 + 7 + np.arange(64)[None] // 8).reshape(-1)
    again = x.copy()
    for at_once, array in ((True, x), (False, again)):
        Simulator(text, at_once).launch("k", [array])
        np.testing.assert_array_equal(array, wanted)


def test_a_row_outside_its_buffer_is_refused_at_once_too():
    body = row("a", 200, 64) + read("v", "a") + twice("w", "v") + write("w", "a")
    for at_once in (True, False):
        with pytest.raises(SimulationError, match="access outside its buffer in ub"):
            Simulator(HEAD + LOOP.replace("BODY", body) + TAIL, at_once).launch("k", [np.zeros(640, np.float32)])


def test_blocks_that_are_chosen_run_alone():
    """What a launch of all blocks leaves at the rows of one."""
    body = """    %b = "hivm.hir.get_block_idx"() : () -> i64
    %bi = "arith.index_cast"(%b) : (i64) -> index
    %bn = "arith.sitofp"(%b) : (i64) -> f32
    "memref.store"(%bn, %x, %bi) : (f32, memref<?xf32>, index) -> ()
"""
    text = HEAD.split('    %at = ')[0] + body + TAIL[TAIL.index('    "func.return"'):]
    x = np.full(8, -1, np.float32)
    Simulator(text).launch("k", [x], instances=8, blocks=(0, 4, 7))
    np.testing.assert_array_equal(x, [0, -1, -1, -1, 4, -1, -1, 7])
