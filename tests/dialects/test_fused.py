"""nn.fused: groups are what their ops are, opened and made anew where they meet, and nothing else may stand in one."""

from collections.abc import Callable

import numpy as np
import pytest

from tapeout.compiler.errors import ModuleRefused
from tapeout.compiler.opt import run_passes
from tapeout.dialects._mlir import ir
from tapeout.dialects.format import BF16, decode, encode
from tapeout.dialects.fused import MOST_INPUTS, MOST_RESULTS, fuse
from tapeout.dialects.interpreter import Interpreter
from tapeout.dialects.text import parse
from tapeout.passes.define import functions, operations, text

CHAIN = """
func.func @f(%x: tensor<?x64xbf16>, %w: tensor<64xbf16>, %v: tensor<64xbf16>) -> (tensor<?x64xbf16>, tensor<?x64xbf16>) {
  %0 = nn.rms_norm(%x, %w) {epsilon = 1.0e-6 : f64, tapeout.layer = "layers.4"} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  %1 = nn.rms_norm(%0, %v) {epsilon = 1.0e-6 : f64} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  %2 = nn.rms_norm(%1, %w) {epsilon = 1.0e-6 : f64} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  return %2, %1 : tensor<?x64xbf16>, tensor<?x64xbf16>
}
"""


def results(module: ir.Module) -> list[object]:
    x = encode(np.random.default_rng(1).standard_normal((3, 64)), BF16)
    w, v = (encode(np.random.default_rng(n).standard_normal(64), BF16) for n in (2, 3))
    return [decode(r) for r in Interpreter(functions(module)[0]).run(x, w, v)]


def after(change: Callable[[list[ir.Operation]], None]) -> tuple[str, list[object], list[object]]:
    with ir.Context(), ir.Location.unknown():
        module = parse(CHAIN)
        before = results(module)
        change(operations(functions(module)[0])[:-1])
        module.operation.verify()
        return text(module), before, results(module)


def test_a_group_means_its_ops() -> None:
    printed, before, found = after(lambda ops: fuse(ops, "all"))  # type: ignore[arg-type,return-value]
    np.testing.assert_array_equal(found, before)
    assert "%0:2 = nn.fused(%arg0, %arg1, %arg2) ({" in printed and 'kind = "all"' in printed
    assert "return %0#1, %0#0" in printed and 'tapeout.layer = "layers.4"}' in printed


def test_a_group_of_a_group_is_one_group() -> None:
    def twice(ops: list[ir.Operation]) -> None:
        inner = fuse(ops[1:], "inner")
        fuse([ops[0], inner], "outer")

    printed, before, found = after(twice)
    np.testing.assert_array_equal(found, before)
    assert printed.count("nn.fused(") == 1 and 'kind = "outer"' in printed and "inner" not in printed


def test_only_values_used_outside_are_results() -> None:
    printed, before, found = after(lambda ops: fuse(ops[:2], "two"))  # type: ignore[arg-type,return-value]
    np.testing.assert_array_equal(found, before)
    assert "%0 = nn.fused(" in printed


def test_too_wide_a_group_is_refused() -> None:
    with ir.Context(), ir.Location.unknown():
        norms = "\n".join(
            f"%n{i} = nn.rms_norm(%x, %w{i}) {{epsilon = 0.5 : f64}} : (tensor<?x8xbf16>, tensor<8xbf16>) -> tensor<?x8xbf16>"
            for i in range(MOST_RESULTS + 1)
        )
        arguments = ", ".join(f"%w{i}: tensor<8xbf16>" for i in range(MOST_RESULTS + 1))
        values, types = (", ".join(s.format(i) for i in range(MOST_RESULTS + 1)) for s in ("%n{}", "tensor<?x8xbf16>"))
        module = parse(f"func.func @f(%x: tensor<?x8xbf16>, {arguments}) -> ({types}) {{\n{norms}\nreturn {values} : {types}\n}}")
        with pytest.raises(ValueError, match=f"at most {MOST_INPUTS} inputs and {MOST_RESULTS} results, found {MOST_RESULTS + 1}"):
            fuse(operations(functions(module)[0])[:-1], "wide")


SEGMENTS = "operandSegmentSizes = array<i32: 1" + ", 0" * (MOST_INPUTS - 1) + ">, resultSegmentSizes = array<i32: 1, 0, 0, 0>"
GROUP = """
func.func @f(%x: tensor<?x8xbf16>, %w: tensor<8xbf16>) -> tensor<?x8xbf16> {
  %0 = "nn.fused"(%x) ({
    BODY
  }) {kind = "k", SEGMENTS} : (tensor<?x8xbf16>) -> tensor<?x8xbf16>
  return %0 : tensor<?x8xbf16>
}
""".replace("SEGMENTS", SEGMENTS)
YIELD = "nn.yield(%y) {operandSegmentSizes = array<i32: 1, 0, 0, 0>} : (tensor<?x8xbf16>) -> ()"
HEAD = "^bb0(%y: tensor<?x8xbf16>):"
INNER = GROUP.split("{\n", 1)[1].split("\n  return")[0].replace("%0", "%1").replace("%x", "%y")
NESTED = INNER.replace("BODY", f"{HEAD}\n{YIELD}".replace("%y", "%q"))


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("", "needs one block of ops, found 0 blocks, 0 ops"),
        (HEAD, "needs one block of ops, found 1 blocks, 0 ops"),
        (f"{HEAD}\n{YIELD}\n^bb1(%z: tensor<?x8xbf16>):\n{YIELD.replace('%y', '%z')}", "needs one block of ops, found 2 blocks, 2 ops"),
        (
            f"^bb0(%y: tensor<?x8xbf16>, %z: tensor<8xbf16>):\n{YIELD}",
            "passes tensor<?x8xbf16> to a region that takes tensor<?x8xbf16>, tensor<8xbf16>",
        ),
        (
            f"{HEAD}\nnn.yield() {{operandSegmentSizes = array<i32: 0, 0, 0, 0>}} : () -> ()",
            "ends with nn.yield of , promised tensor<?x8xbf16>",
        ),
        (f"{HEAD}\n{YIELD.replace('%y', '%x')}", "holds nn.yield that reads a value from outside, expected it as an input of the group"),
        (f"{HEAD}\n{NESTED}\n{YIELD}", "holds nn.fused, expected ops without regions: groups never nest"),
    ],
    ids=["no block", "empty block", "two blocks", "arguments", "results", "outside", "nested"],
)
def test_the_verifier_refuses(body: str, sentence: str) -> None:
    with pytest.raises(ModuleRefused) as caught:
        run_passes(GROUP.replace("BODY", body), "")
    assert str(caught.value).endswith(f": 'nn.fused' {sentence}"), caught.value


def test_a_group_needs_a_kind() -> None:
    source = GROUP.replace("BODY", f"^bb0(%y: tensor<?x8xbf16>):\n{YIELD}")
    assert run_passes(source, "")
    for wrong in ('kind = "k", ', 'kind = "k"'):
        with pytest.raises(ModuleRefused, match=r"'nn\.fused' has no attribute kind, expected the name of its pattern"):
            run_passes(source.replace(wrong, "" if wrong.endswith(" ") else "kind = 3 : i64"), "")
