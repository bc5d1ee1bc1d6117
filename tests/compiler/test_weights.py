"""What the kernels of a module want of one weight operand that several of them read: one layout, and the scales that all multiply exactly by."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tapeout.codegen.select_kernels import SelectKernels
from tapeout.compiler.weights import operand_wants
from tapeout.dialects._mlir import ir
from tapeout.dialects.text import parse
from tapeout.passes.define import PassError

MODULE = """
#q8 = #format.scaled<"e8m0", 1 : i64, 32 : i64>
#weight = #format.scaled<"e8m0", 32 : i64, 32 : i64>
func.func @f(%x: X {tapeout.extent = "rows"}, %q: Q8 {tapeout.extent = "rows"}, %w: W {tapeout.kind = "weight", tapeout.name = "w"})
    -> (tensor<?x32xbf16>, tensor<?x32xf32>) {
  %0 = nn.linear(%x, %w) {groups = 1 : i64, wide = false} : (X, W) -> tensor<?x32xbf16>
  %1 = nn.linear(%q, %w) {groups = 1 : i64, wide = true} : (Q8, W) -> tensor<?x32xf32>
  return %0, %1 : tensor<?x32xbf16>, tensor<?x32xf32>
}
"""
Q8, WEIGHT = "tensor<?x64xf8E4M3FN, #q8>", "tensor<32x64xf8E4M3FN, #weight>"


@contextmanager
def selected(x: str) -> Iterator[ir.Module]:
    """Two products with one weight, of rows in `x` and of rows in FP8, with their kernels."""
    with ir.Context(), ir.Location.unknown():
        module = parse(MODULE.replace("X", x).replace("Q8", Q8).replace("W", WEIGHT))
        SelectKernels().run(module)
        yield module


def test_of_all_limits_the_tightest_are_the_operand_s() -> None:
    with selected(Q8) as module:
        wants = operand_wants(module, lambda choice: (100, 140) if "wide=True" in str(choice.request) else (90, 130))
        assert wants.limits == {"w": (100, 130)}
        assert wants.layouts["w"].values == ("transpose", "panels:16")


def test_two_layouts_of_one_operand_are_refused() -> None:
    with selected("tensor<?x64xbf16>") as module, pytest.raises(PassError) as caught:
        operand_wants(module, lambda choice: (0, 254))
    one, other = "('expand_rows:32:32',)", "('expand_rows:32:32', 'transpose')"
    assert str(caught.value) == (
        f"nn.linear at loc(\"-\":7:8) wants w as Layout(values=('transpose', 'panels:16'), scales={one}), another kernel as "
        f"Layout(values=('transpose', 'panels:16'), scales={other}); expected one layout an operand: align the schedule rows"
    )
