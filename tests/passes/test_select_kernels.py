"""select-kernels: the choice is on the op, tuned rows come first, what does not fit is refused here (text cases in tests/ir)."""

import pytest

from tapeout.codegen.kernel import request_of
from tapeout.codegen.select_kernels import KERNEL, SelectKernels, choice_of, kernel_of, launches, schedule_of
from tapeout.compiler.errors import ModuleRefused
from tapeout.compiler.pipeline import run
from tests.passes.modules import REAL, TINY, graph, keeps_meaning


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


def test_tuned_rows_come_first() -> None:
    with graph("plan-memory") as module:
        request, own = norm_row(module)
        tuned = own | {"block_rows": own["block_rows"] + 1}
        SelectKernels(tuned=((request, tuple(tuned.items())),)).run(module)
        found = [(str(request_of(op)) == request, schedule_of(op)) for op in launches(module) if op.name == "nn.rms_norm"]
        assert all((row == tuned) == is_tuned for is_tuned, row in found) and any(is_tuned for is_tuned, _ in found)
        assert kernel_of(next(launches(module))).order


@pytest.mark.parametrize("change", [{"block_rows": -1}, {"warps": 4}, None], ids=["negative", "unknown", "missing"])
def test_a_tuned_row_that_does_not_fit_is_refused(change: dict[str, int] | None) -> None:
    with graph("plan-memory") as module:
        request, own = norm_row(module)
        row = own | change if change else {}
        with pytest.raises(
            ModuleRefused, match=r"pass select-kernels: nn.rms_norm at .*: the tuned row is .*; expected block_columns, block_rows"
        ):
            run(module, [SelectKernels(tuned=((request, tuple(row.items())),))])


def test_workspace_is_the_compile_s_own() -> None:
    with graph("plan-memory") as module:
        SelectKernels(workspace_bytes=7 << 20).run(module)
        rows = [schedule_of(op) for op in launches(module)]
        limited = [row["workspace_bytes"] for row in rows if "workspace_bytes" in row]
        assert limited and set(limited) == {7 << 20}
