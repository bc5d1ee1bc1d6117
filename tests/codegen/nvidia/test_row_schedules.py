"""Rows of row-wise kernels and of selections: whole blocks, what registers hold, and pieces only where they fit."""

import pytest

from tapeout.codegen.kernel import Request, Schedule
from tapeout.codegen.nvidia.facts import SM90, SM100
from tapeout.codegen.nvidia.schedules import bucket_rows_for, schedule_for
from tapeout.codegen.select_kernels import Choice, build
from tapeout.dialects.format import BF16, FP32, INT32, Q4_INDEX, Q8
from tapeout.dialects.rows import TABLE
from tapeout.dialects.types import Blocks, Tensor

SELECT = (("block_tokens", 128), ("heads", 32), ("ratio", 2), ("score", "bf16"), ("top_k", 512))


def selection(pages: int) -> Request:
    keys = Blocks(Tensor((128,), Q4_INDEX), 2)
    operands = (Tensor((None, 4096), Q4_INDEX), Tensor((None, 32), BF16), keys, TABLE, TABLE, Tensor((8, pages), INT32))
    return Request("mla.select", SELECT, operands, (Tensor((None, 512), INT32), TABLE))


def bucket(request: Request, rows: int, **settings: int) -> Schedule:
    row = {**schedule_for(SM90)("select_entries", request), **settings}
    return bucket_rows_for(SM90)("select_entries", request, row, rows)


@pytest.mark.parametrize(("rows", "pieces"), [(1, 64), (16, 64), (64, 16), (128, 8), (129, 0), (4096, 0)])
def test_few_rows_are_cut_into_pieces(rows, pieces):
    assert bucket(selection(256), rows)["pieces"] == pieces


def test_nothing_is_cut_that_does_not_fit():
    """A workspace that does not hold all rows; entries that keys have no bits for; lists shorter than a piece."""
    assert bucket(selection(256), 64, workspace_bytes=64 << 20)["pieces"] == 16
    assert bucket(selection(256), 64, workspace_bytes=16 << 20)["pieces"] == 0
    assert bucket(selection(1024), 1)["pieces"] == 0
    assert bucket(selection(3), 1)["pieces"] == 1


@pytest.mark.parametrize("rows", [1, 64, 128])
def test_the_workspace_is_what_the_row_says_at_most(rows):
    row = bucket(selection(256), rows)
    kernel = build(Choice(selection(256), "select_entries", tuple(sorted(row.items()))))
    assert len(kernel.before) == 1 and sum(4 * w.elements(rows) for w in kernel.workspaces) <= row["workspace_bytes"]
    whole = build(Choice(selection(256), "select_entries", tuple(sorted(bucket(selection(256), 4096).items()))))
    assert whole.order == kernel.order and not whole.before


@pytest.mark.parametrize("chip", [SM90, SM100])
@pytest.mark.parametrize("columns", [32, 512, 1280, 2304, 5120, 8192, 15360])
def test_blocks_divide_rows_and_parts_are_whole_blocks(chip, columns):
    x, weight = Tensor((None, columns), BF16), Tensor((columns,), BF16)
    streams = Tensor((None, 4, columns), BF16)
    requests = {
        "quantize": Request("nn.quantize", (), (x,), (Tensor((None, columns), Q8),)),
        "swiglu": Request("moe.swiglu", (("limit", 10.0),), (x, x), (x,)),
        "rms_norm": Request("nn.rms_norm", (("epsilon", 1e-6),), (x, weight), (x,)),
        "mean": Request("mhc.mean", (), (streams,), (x,)),
        "collapse": Request("mhc.collapse", (), (streams, Tensor((None, 4), FP32)), (x,)),
    }
    for family, request in requests.items():
        row = schedule_for(chip)(family, request)
        assert columns % (row["block_columns"] * row.get("parts", 1)) == 0, family
        if row.get("held"):
            assert row["block_rows"] * columns <= 8192 and row["warps"] <= 4
        build(Choice(request, family, tuple(sorted(row.items()))))
