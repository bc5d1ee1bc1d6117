"""Overrides: which requests they take, that they stand for the tile kernel they were checked against, and what they compile to.

Numbers come from a GPU (`python -m tests.bench.gpu attend`): Gluon has no interpreter.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from tapeout.codegen.kernel import KernelError
from tapeout.codegen.lower_to_tile import TileKernel, lower
from tapeout.codegen.nvidia import overrides
from tapeout.codegen.nvidia.emit import EmitError
from tapeout.codegen.nvidia.facts import SM90, SM100
from tapeout.codegen.nvidia.overrides import attend_sm90, linear_few_sm90, source_for
from tapeout.codegen.nvidia.schedules import bucket_rows_for, schedule_for
from tapeout.codegen.select_kernels import Choice
from tapeout.dialects.format import BF16, Q4_INDEX
from tapeout.dialects.types import Blocks, Ring, Tensor
from tests.codegen.nvidia.compiling import compiled, jobs

CASE = attend_sm90.CASE
WINDOW_ONLY = replace(CASE, operands=CASE.operands[:5] + CASE.operands[8:])


def kernel(request=CASE, **settings: int) -> TileKernel:
    row = {**schedule_for(SM90)("attend", request), **settings}
    return lower(Choice(request, "attend", tuple(sorted(row.items()))))


def with_operand(number: int, view) -> object:
    return replace(CASE, operands=(*CASE.operands[:number], view, *CASE.operands[number + 1 :]))


@pytest.mark.parametrize("request_", [CASE, WINDOW_ONLY, with_operand(2, Tensor((None, 133), CASE.operands[2].number))])
def test_real_requests_are_covered(request_):
    assert attend_sm90.why_not(request_, SM90) is None and schedule_for(SM90)("attend", request_)["override"] == 1


def test_few_rows_have_two_instances_each_and_many_take_turns():
    row = schedule_for(SM90)("attend", CASE)
    found = {rows: bucket_rows_for(SM90)("attend", CASE, row, rows) for rows in (1, 64, 66, 67, 128, 132, 133, 4096)}
    forms = {rows: (64 // one["block_heads"], one["instances"]) for rows, one in found.items()}
    assert forms == {1: (2, 0), 64: (2, 0), 66: (2, 0), 67: (1, 0), 128: (1, 0), 132: (1, 0), 133: (1, 132), 4096: (1, 132)}
    other = {**row, "warps": 8}
    assert bucket_rows_for(SM90)("attend", CASE, other, 1) == other


@pytest.mark.parametrize(
    ("request_", "chip", "words"),
    [
        (CASE, SM100, "sm100 has no wgmma"),
        (replace(CASE, op="mla.attend"), SM90, "mla.attend is not attention with the rotation behind it"),
        (with_operand(0, Tensor((None, 64 * 256), BF16)), SM90, "expected 64 heads of 512 BF16 columns"),
        (with_operand(1, Ring(Tensor((512,), BF16), 134)), SM90, "expected FP8 keys"),
        (with_operand(5, Blocks(Tensor((512,), Q4_INDEX), 2)), SM90, "expected FP4 keys with E4M3 scales"),
        (with_operand(9, Tensor((32773, 32), CASE.operands[9].number)), SM90, "that turn 64 columns back"),
    ],
)
def test_others_are_left_to_the_plain_form(request_, chip, words):
    assert words in attend_sm90.why_not(request_, chip)
    if request_.op != "mla.attend":
        assert "override" not in schedule_for(chip)("attend", request_)


def test_the_tile_kernel_is_the_one_that_was_checked_on_a_gpu():
    """If this fails, attention's definition changed: compare the override with it on a GPU again before MEANINGS is set anew."""
    assert overrides.meanings_of("attend", attend_sm90) == attend_sm90.MEANINGS


def test_another_definition_stops_the_build(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attend_sm90, "MEANINGS", ("0" * 16,))
    with pytest.raises(EmitError, match="the override was checked against tile kernel 0000000000000000, the definition now gives"):
        source_for(kernel(), SM90)


def test_a_row_cannot_force_it_on_a_request_that_it_does_not_cover():
    wrong = with_operand(1, Ring(Tensor((512,), BF16), 134))
    with pytest.raises(EmitError, match=r"asks for the override of sm90: the window is .*, expected FP8 keys; set override to 0"):
        source_for(kernel(wrong, **attend_sm90.ROW), SM90)


def test_a_row_that_an_override_has_no_form_for_is_refused():
    request, row = linear_few_sm90.CASES[0]
    made = lower(Choice(request, "linear", tuple(sorted({**row, "decoded": 2}.items()))))
    with pytest.raises(EmitError, match=r"the override of sm90 has no form for {.*'decoded': 2.*}.*; set override to 0"):
        source_for(made, SM90)
    with pytest.raises(KernelError, match="schedule entry override of linear is 9, expected 0 to 5"):
        source_for(lower(Choice(request, "linear", tuple(sorted({**row, "override": 9}.items())))), SM90)


def test_without_the_entry_the_plain_form_is_emitted():
    assert source_for(kernel(override=0), SM90) is None


def test_the_source_names_its_kernel_and_has_the_requests_numbers():
    made = kernel()
    source = source_for(made, SM90)
    assert source is not None and (source.name, source.language, source.first_warps) == (made.symbol, "gluon", 4)
    assert f"def {made.symbol}(q, ring_codes," in source.text and "SELECTED = gl.constexpr(512)" in source.text
    assert [kind for _, kind in source.parameters[:4]] == ["*bf16", "*fp8e4nv", "*i8", "*i32"]
    assert source == source_for(made, SM90)
    window = source_for(kernel(WINDOW_ONLY), SM90)
    assert window is not None and "SELECTED = gl.constexpr(0)" in window.text and len(window.parameters) == 10


def test_it_compiles_without_spills_to_wgmma_twice_the_same():
    work = jobs([kernel()], "sm90") * 2 + jobs([kernel(WINDOW_ONLY), *(kernel(**row) for row in (attend_sm90.ALONE, attend_sm90.FEW))], "sm90")
    found = [(made, problems) for _, made, problems in compiled(work)]
    for (made, problems), (warps, products) in zip(found, [(16, 64)] * 4 + [(20, 48)], strict=True):
        assert not isinstance(made, str), made
        assert (problems, made.report.spill_stores, made.report.stack_bytes, made.warps) == ([], 0, 0, warps)
        assert dict(made.report.instructions)["wgmma.mma_async"] == products and "setmaxnreg" in made.ptx
    assert found[0][0].cubin == found[1][0].cubin


def test_at_most_a_third_of_kernel_text_is_for_one_chip():
    """Kernel text: definitions and what they are made of, against templates and inline assembly of overrides; blank lines left out."""
    codegen = Path(overrides.__file__).parents[2]
    shared = [*codegen.glob("kernels/*.py"), *(codegen / name for name in ("tile_arithmetic.py", "tile_formats.py"))]
    own = [*codegen.glob("nvidia/overrides/*.jinja"), *codegen.glob("nvidia/overrides/*_ptx.py")]
    lines = [sum(bool(line.strip()) for path in paths for line in path.read_text().splitlines()) for paths in (own, shared)]
    assert 3 * lines[0] <= sum(lines), f"{lines[0]} of {sum(lines)} lines are for one chip"


ALL, LINEAR, EXPERTS = (0, 254), (127 - 92, 127 + 39), (127 - 116, 127 + 17)


@pytest.mark.parametrize(("family", "limits"), [("attend", [ALL]), ("linear", [ALL, LINEAR, LINEAR, ALL, LINEAR]), ("expert_linear", [EXPERTS])])
def test_each_says_what_scales_it_takes(family: str, limits: list[tuple[int, int]]):
    for own, wanted in zip(overrides.BY_FAMILY[family], limits, strict=True):
        for request, row in own.CASES:
            choices = [Choice(request, family, tuple(sorted({**row, "override": used}.items()))) for used in (row["override"], 0)]
            assert [overrides.scale_limits(choice) for choice in choices] == [wanted, ALL]
