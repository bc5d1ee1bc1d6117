"""verify (text cases in tests/ir): the graphs it accepts, and that it looks into groups and calls."""

import pytest

from tapeout.compiler.errors import ModuleRefused
from tapeout.compiler.opt import run_passes
from tapeout.passes.define import text
from tapeout.passes.verify import Verify
from tests.passes.modules import REAL, TINY, graph, keeps_meaning


def test_keeps_meaning() -> None:
    keeps_meaning(Verify())


@pytest.mark.parametrize("before", [None, "assign-formats", "outline-layers", "bucket-rows"])
@pytest.mark.parametrize("config", [TINY, REAL], ids=["tiny", "real"])
def test_accepts_the_model_at_every_level_and_changes_nothing(before: str | None, config: object) -> None:
    with graph(before, config) as module:  # type: ignore[arg-type]
        old = text(module)
        Verify().run(module)
        assert text(module) == old


GROUP = """
func.func @f(%x: tensor<?x64xf32> {tapeout.extent = "rows"}) -> tensor<?x64xf32> {
  %0 = "nn.fused"(%x) ({
  ^bb0(%y: tensor<?x64xf32>):
    %1 = math.exp %y : tensor<?x64xf32>
    nn.yield(%1) {operandSegmentSizes = array<i32: 1, 0, 0, 0>} : (tensor<?x64xf32>) -> ()
  }) {kind = "k", operandSegmentSizes = array<i32: 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0>, resultSegmentSizes = array<i32: 1, 0, 0, 0>}
    : (tensor<?x64xf32>) -> tensor<?x64xf32>
  return %0 : tensor<?x64xf32>
}
"""
CALLED = """
func.func private @g(%x: tensor<?xi32> {tapeout.extent = "kept"}) { return }
func.func @f(%x: tensor<?xi32> {tapeout.extent = "rows"}) { call @g(%x) : (tensor<?xi32>) -> () return }
"""


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (GROUP, 'math.exp at loc("-":5:10) in @f is no op of the graph level; expected one of our dialects'),
        (CALLED, 'func.call at loc("-":3:61) passes rows rows as argument 0 of @g; expected kept'),
        ("func.func @f() { call @f() : () -> () return }", 'func.call at loc("-":1:18) in @f calls @f; expected a function in front of @f'),
        (
            "func.func @f() { call @g() : () -> () return }\nfunc.func private @g() { return }",
            'func.call at loc("-":1:18) in @f calls @g; expected a function in front of @f',
        ),
        ("func.func private @f()", '@f at loc("-":1:1) has 0 blocks; expected one: the graph level has no declarations and no branches'),
        (
            "func.func @f(%x: i32) { return }",
            "type 0 of @f: i32 is neither a ranked tensor nor a state handle; expected a tensor or a state handle of the graph level",
        ),
        (
            "func.func @f(%x: tensor<4xi8>) { return }",
            "type 0 of @f: unknown element type i8; known: f64, f32, bf16, f8E4M3FN, f4E2M1FN, i32, i64; expected a tensor or a state handle "
            "of the graph level",
        ),
        ("module @inner { }", 'builtin.module at loc("-":1:1) stands beside functions; expected func.func only'),
        ("func.func @f(%x: tensor<?xi32>) { return }", "argument 0 of @f has a run-time row count and no tapeout.extent"),
        (
            "func.func @f(%x: tensor<?xi32> {tapeout.extent = 3 : i64}) { return }",
            "argument 0 of @f has tapeout.extent = 3 : i64; expected a string",
        ),
    ],
    ids=["group", "extents of a call", "itself", "behind", "declaration", "type", "element", "module", "extent", "kind"],
)
def test_refuses(source: str, sentence: str) -> None:
    if source.startswith("module"):
        source = f"module {{ {source} }}"
        sentence = sentence.replace("1:1", "1:10")
    with pytest.raises(ModuleRefused) as caught:
        run_passes(source, "verify")
    assert str(caught.value) == f"[C103] pass verify: {sentence}"
