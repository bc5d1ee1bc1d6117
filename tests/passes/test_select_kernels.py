"""select-kernels: the choice is on the op, tuned rows come first, what does not fit is refused here (text cases in tests/ir)."""

import pytest

from tapeout.codegen.kernel import KernelError, Request, request_of
from tapeout.codegen.select_kernels import KERNEL, SelectKernels, choice_of, kernel_of, launches, schedule_of
from tapeout.codegen.tuned_rows import TunedRow, is_tuned
from tapeout.compiler.errors import ModuleRefused
from tapeout.compiler.pipeline import run
from tapeout.compiler.tuning import from_rows
from tapeout.dialects.format import BF16
from tapeout.dialects.types import Tensor
from tapeout.passes.bucket_rows import BucketRows
from tests.passes.modules import DRAFTS, REAL, TINY, graph, keeps_meaning


def test_keeps_meaning() -> None:
    keeps_meaning(SelectKernels())


@pytest.mark.parametrize("config", [TINY, REAL], ids=["tiny", "real"])
def test_equal_requests_have_equal_choices(config: object) -> None:
    with graph("plan-memory", config) as module:  # type: ignore[arg-type]
        ops = list(launches(module))
        assert all(KERNEL in op.attributes for op in ops)
        choices = {request_of(op): choice_of(op) for op in ops}
        assert all(choice_of(op) == choices[request_of(op)] for op in ops)
        assert len(set(choices.values())) == len(choices) < len(ops)


def norm_row(module: object) -> tuple[str, dict[str, int]]:
    """The text of a request for a norm, and its own row."""
    op = next(o for o in launches(module) if o.name == "nn.rms_norm")  # type: ignore[arg-type]
    return str(request_of(op)), schedule_of(op)


def row_of(request: str, row: dict[str, int], rows: int | None = None) -> TunedRow:
    return TunedRow(request, tuple(sorted(row.items())), rows)


def test_tuned_rows_come_first() -> None:
    with graph("plan-memory") as module:
        request, own = norm_row(module)
        tuned = own | {"block_rows": own["block_rows"] + 1}
        SelectKernels(tuned=(row_of(request, tuned),)).run(module)
        found = [(str(request_of(op)) == request, schedule_of(op)) for op in launches(module) if op.name == "nn.rms_norm"]
        assert all((row == tuned) == is_tuned for is_tuned, row in found) and any(is_tuned for is_tuned, _ in found)
        assert kernel_of(next(launches(module))).order


def test_a_tuned_row_may_be_of_one_number_of_rows() -> None:
    """Buckets are 1, 7 and 33; drafts are 5 for each of at most 3 sequences."""
    with graph("plan-memory") as module:
        request, own = norm_row(module)
        tuned = own | {"block_rows": own["block_rows"] + 1}
        one = SelectKernels(tuned=(row_of(request, tuned, 7),), drafts_each=DRAFTS, sequences=3)
        one.run(module)
        assert one.rows_of(module)[request] == {1: own, 7: tuned, 33: own, 5: own, 15: own}


@pytest.mark.parametrize(("change", "problem"), [
    ({"block_rows": -1}, "block_rows is -1, expected 1 to 16384"),
    ({"block_rows": 0}, "block_rows is 0, expected 1 to 16384"),
    ({"block_rows": 1 << 70}, f"block_rows is {1 << 70}, expected 1 to 16384"),
    ({"warps": 4}, "warps is not among block_columns, block_rows"),
    (None, "block_columns is missing; block_rows is missing"),
], ids=["negative", "zero", "huge", "unknown", "missing"])  # fmt: skip
def test_a_tuned_row_that_does_not_fit_is_refused(change: dict[str, int] | None, problem: str) -> None:
    with graph("plan-memory") as module:
        request, own = norm_row(module)
        row = own | change if change else {}
        with pytest.raises(ModuleRefused) as caught:
            run(module, [SelectKernels(tuned=(row_of(request, row),))])
        assert f": the tuned row {row} does not fit: {problem}" in str(caught.value)
        assert "pass select-kernels: nn.rms_norm at " in str(caught.value)


def test_a_tuned_row_that_nothing_asks_for_is_refused() -> None:
    with graph("plan-memory") as module:
        request, own = norm_row(module)
        with pytest.raises(ModuleRefused) as caught:
            run(module, [SelectKernels(tuned=(row_of(request.replace("bf16", "bf61"), own),))])
        assert str(caught.value) == (f"[C103] pass select-kernels: no op asks for the tuned row of {request.replace('bf16', 'bf61')}; "
                                     f"expected the text of a request, as {request}")  # fmt: skip
        with pytest.raises(ModuleRefused, match=r"the tuned row of nn.rms_norm.* is of launches of at most 8 rows; expected one of 1, 7, 33"):
            run(module, [SelectKernels(tuned=(row_of(request, own, 8),))])


def test_a_kernel_is_known_as_tuned_by_its_row() -> None:
    """A launch in front of an op's last one is of that row with warps of its own; the workspace limit is the compile's."""
    row = {"block_k": 64, "warps": 4, "workspace_bytes": 1}
    given = (row_of("request", row, 7),)
    assert is_tuned(given, "request", row) and is_tuned(given, "request", row | {"workspace_bytes": 9})
    assert is_tuned(given, "request", row | {"part": 0, "warps": 8})
    assert not is_tuned(given, "request", row | {"warps": 8}) and not is_tuned(given, "request", row | {"part": 0, "block_k": 32})
    assert not is_tuned(given, "another", row)


def test_rows_whose_sums_have_two_orders_are_refused() -> None:
    with graph("plan-memory") as module:
        op = next(o for o in launches(module) if o.name == "nn.linear" and schedule_of(o)["block_k"] > 32)
        own, request = schedule_of(op), str(request_of(op))
        half = own | {"block_k": own["block_k"] // 2}
        with pytest.raises(ModuleRefused) as caught:
            run(module, [SelectKernels(tuned=(row_of(request, half, 7),))])
        assert (f"kernel linear has sums by column: sum over k in blocks of {own['block_k']}, ascending in launches of at most 1 rows, and sums by "
                f"column: sum over k in blocks of {half['block_k']}, ascending in those of 7; expected one for all") in str(caught.value)
        SelectKernels(tuned=(row_of(request, half),)).run(module)
        assert schedule_of(op) == half


def test_rows_whose_weights_lie_in_two_ways_are_refused() -> None:
    with graph("plan-memory") as module:
        op = next(o for o in launches(module) if o.name == "nn.linear" and schedule_of(o)["panel"])
        own = schedule_of(op)
        with pytest.raises(ModuleRefused) as caught:
            run(module, [SelectKernels(tuned=(row_of(str(request_of(op)), own | {"panel": own["panel"] // 2}, 33),))])
        said = str(caught.value)
        assert ": kernel linear has weights as {1: Layout(values=('transpose', 'panels:16')" in said
        assert "in launches of at most 1 rows, and weights as {1: Layout(values=('transpose', 'panels:8')" in said
        assert "in those of 33; expected one for all, as a row's bits do not depend on the others" in said


@pytest.mark.parametrize(("target", "classes"), [("cpu", 1), ("sm90", 3), ("ascend950", 1)])
def test_rows_that_were_chosen_choose_the_same_again(target: str, classes: int) -> None:
    """All of them in a tuning file; some requests are those of drafts too, which are 5 for each of 8 sequences."""
    with graph("select-kernels") as module:
        BucketRows((16, 128, 512)).run(module)
        one = SelectKernels(target, drafts_each=DRAFTS, sequences=8)
        one.run(module)
        rows = one.rows_of(module)
        again = SelectKernels(target, from_rows(rows), drafts_each=DRAFTS, sequences=8)
        again.run(module)
        assert again.rows_of(module) == rows and len(rows) > 30
        linear = max((found for request, found in rows.items() if request.startswith("nn.linear")), key=len)
        assert set(linear) == {16, 128, 512, 40} and len({tuple(row.items()) for row in linear.values()}) == classes


def test_workspace_is_the_compile_s_own() -> None:
    with graph("plan-memory") as module:
        SelectKernels(workspace_bytes=7 << 20).run(module)
        rows = [schedule_of(op) for op in launches(module)]
        limited = [row["workspace_bytes"] for row in rows if "workspace_bytes" in row]
        assert limited and set(limited) == {7 << 20}


def test_attributes_of_an_op_are_those_of_the_request_or_of_its_group() -> None:
    own, none = (("heads", 2),), (Tensor((None, 8), BF16),)
    plain = Request("nn.rope", own, none, none)
    group = Request("nn.fused:rope_quantize", (), none, none, (("nn.rope", own), ("nn.quantize", ())))
    assert plain.of("nn.rope") == group.of("nn.rope") == {"heads": 2}
    with pytest.raises(KernelError, match=r"nn.rope holds 0 ops called nn.rms_norm, expected one"):
        plain.of("nn.rms_norm")
