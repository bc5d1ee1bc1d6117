"""What passes and people wrote, edited by hand and read again: refused with the op and what was expected, never a traceback."""

import pytest

from tapeout.codegen.lower_to_tile import tile_kernels
from tapeout.codegen.plan_memory import PlanMemory
from tapeout.codegen.select_kernels import SelectKernels
from tapeout.compiler.errors import ModuleRefused
from tapeout.compiler.opt import run_passes
from tapeout.compiler.programs import step_programs
from tapeout.dialects._mlir import ir
from tapeout.dialects.text import parse
from tapeout.passes.bucket_rows import BucketRows
from tapeout.passes.define import PassError

NORM = """func.func @f(%x: tensor<?x64xbf16> {tapeout.extent = "rows"}, %w: tensor<64xbf16>) -> tensor<?x64xbf16> {
  %0 = nn.rms_norm(%x, %w) {epsilon = 0.5 : f64} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  return %0 : tensor<?x64xbf16>
}
"""
SCHEDULE = "tapeout.schedule = {block_columns = 64 : i64, block_rows = 8 : i64}"
PLANNED = run_passes(NORM, "bucket-rows{buckets=[1 7]},select-kernels")[0]


@pytest.mark.parametrize(("old", "new", "sentence"), [
    ("tapeout.buckets = [1, 7]", "tapeout.buckets = false", "tapeout.buckets is false, expected a list of ascending row counts from 1 to 65536"),
    ("tapeout.buckets = [1, 7]", "tapeout.buckets = @f", "tapeout.buckets is @f, expected a list of ascending row counts"),
    ("tapeout.buckets = [1, 7]", "tapeout.buckets = [7, 1]", "tapeout.buckets is [7, 1], expected a list of ascending row counts"),
    ('tapeout.kernel = "rms_norm"', "tapeout.kernel = 3 : i64", "has tapeout.kernel 3 : i64, expected the name of a family"),
    ('tapeout.kernel = "rms_norm"', 'tapeout.kernel = "norm"', "no family called norm covers nn.rms_norm; known: rms_norm"),
    (f", {SCHEDULE}", "", "has no tapeout.schedule; expected pass select-kernels in front of this one"),
    (SCHEDULE, "tapeout.schedule = []", "has an empty tapeout.schedule; expected pass select-kernels"),
    (SCHEDULE, "tapeout.schedule = [1, 2]", "has tapeout.schedule [1, 2], expected whole numbers by name, or a list of such rows"),
    ("block_rows = 8 : i64", 'block_rows = "8"', "expected whole numbers by name"),
    (", block_rows = 8 : i64", "", "the row {'block_columns': 64} of kernel rms_norm has no entry block_rows"),
    ("block_columns = 64", "block_columns = 48", "schedule entry block_columns is 48, expected a divisor of 64"),
])  # fmt: skip
def test_what_a_pass_wrote_is_checked_when_it_is_read(old: str, new: str, sentence: str) -> None:
    text = PLANNED.replace("[1 : i64, 7 : i64]", "[1, 7]")
    assert old in text, text
    with pytest.raises(ModuleRefused) as caught:
        run_passes(text.replace(old, new), "plan-memory")
    assert str(caught.value).startswith("[C103] pass plan-memory: ") and sentence in str(caught.value)
    assert "buckets" in old or "nn.rms_norm at loc(" in str(caught.value)


def test_a_row_by_hand_is_planned_with() -> None:
    assert "tapeout.frame" in run_passes(PLANNED.replace("block_rows = 8", "block_rows = 3"), "plan-memory")[0]


@pytest.mark.parametrize("returned", ["%0, %0", "%0, %x"], ids=["twice", "argument"])
def test_a_result_is_made_by_an_op_of_its_own(returned: str) -> None:
    """Every result of a program is a buffer of its own, which the op that makes it writes."""
    kind = "tensor<?x64xbf16>"
    text = NORM.replace(f"-> {kind} {{", f'-> ({kind} {{tapeout.name = "a"}}, {kind} {{tapeout.name = "b"}}) {{', 1)
    text = text.replace(f"return %0 : {kind}", f"return {returned} : {kind}, {kind}")
    with ir.Context(), ir.Location.unknown():
        module = parse(text)
        for one in (BucketRows((7,)), SelectKernels(), PlanMemory()):
            one.run(module)
        with pytest.raises(PassError, match=r"^func.return at .* hands out a value twice or an argument; expected each result made by one op$"):
            step_programs(module, dict.fromkeys(tile_kernels(module), 0))
