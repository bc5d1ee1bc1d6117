"""Rows of row-wise kernels and of selections: whole blocks, what registers hold, and pieces only where they fit."""

import pytest

from tapeout.codegen.kernel import Request, Schedule
from tapeout.codegen.nvidia.facts import SM90, SM100
from tapeout.codegen.nvidia.schedules import bucket_rows_for, schedule_for
from tapeout.codegen.select_kernels import Choice, build
from tapeout.dialects.format import BF16, FP32, INT32, Q4_INDEX, Q8
from tapeout.dialects.rows import TABLE
from tapeout.dialects.sample import INT64
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
        "swiglu": Request("moe.swiglu", (("limit", 10.0),), (Tensor((None, 2 * columns), BF16),), (x,)),
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


MIXED = (("epsilon", 1e-6), ("iterations", 20), ("norm_epsilon", 1e-20))
STREAMS = Tensor((None, 4, 5120), BF16)
BUCKETED = {
    "rms_norm": Request("nn.rms_norm", (("epsilon", 1e-6),), (Tensor((None, 1280), BF16), Tensor((1280,), BF16)), (Tensor((None, 1280), BF16),)),
    "quantize": Request("nn.quantize", (), (Tensor((None, 8192), BF16),), (Tensor((None, 8192), Q8),)),
    "mixer": Request("mhc.mixer", MIXED, (STREAMS, Tensor((24, 20480), FP32), Tensor((24,), FP32), Tensor((3,), FP32)),
                     (Tensor((None, 4), FP32), Tensor((None, 4), FP32), Tensor((None, 4, 4), FP32))),
    "swiglu": Request("moe.swiglu", (("limit", 10.0),), (Tensor((None, 6, 4608), BF16), Tensor((None, 6), FP32), Tensor((None, 6), INT32)),
                      (Tensor((None, 6, 2304), BF16),)),
    "select_entries": selection(256),
}  # fmt: skip


@pytest.mark.parametrize("chip", [SM90, SM100])
@pytest.mark.parametrize("family", BUCKETED)
def test_buckets_differ_in_how_work_is_cut_and_not_in_sums(family, chip):
    request = BUCKETED[family]
    row = schedule_for(chip)(family, request)
    rows = {bucket: bucket_rows_for(chip)(family, request, row, bucket) for bucket in (1, 16, 64, 65, 256, 1280, 4096)}
    orders = {build(Choice(request, family, tuple(sorted(one.items())))).order for one in rows.values()}
    assert len(orders) == 1 and len({tuple(sorted(one.items())) for one in rows.values()}) > 1
    if family in ("rms_norm", "quantize"):
        assert [one["block_rows"] for one in rows.values()][:3] == [1, 1, 1] and rows[65]["block_rows"] > 1
        assert [one.get("eager", 0) for one in rows.values()] == [1, 1, 1, 0, 0, 0, 0]
    if family == "swiglu":
        assert [one["block_rows"] for one in rows.values()] == [1, 4, 4, 4, 4, 4, 4], "a row is six lines"


@pytest.mark.parametrize("chip", [SM90, SM100])
def test_a_norm_of_some_columns_is_cut_as_one_of_rows_that_have_no_others(chip):
    """Width decides which instances add up in which order, and of wider rows it is the columns' own."""
    turn = ("nn.rope", (("heads", 1), ("inverse", False), ("offset", 0), ("width", 512)))
    tables = Tensor((None,), INT32), Tensor((8192, 64), FP32)
    for family, n, first, kind, more, operands in (("rms_norm", 1280, 0, "norm_quantize", (), ()),
                                                   ("norm_rope_quantize", 512, 1280, "norm_rope_quantize", (turn,), tables)):  # fmt: skip
        body, taken = (("nn.rms_norm", (("epsilon", 1e-6),)), *more, ("nn.quantize", ())), ("nn.columns", (("count", n), ("first", first)))
        alone, beside = (
            Request(f"nn.fused:{name}", (), (Tensor((None, wide), BF16), Tensor((n,), BF16), *operands), (Tensor((None, n), Q8),), ops)
            for name, wide, ops in ((kind, n, body), (f"columns_{kind}", 1792, (taken, *body)))
        )
        for bucket in (1, 16, 64, 256, 4096):
            rows = [bucket_rows_for(chip)(family, one, schedule_for(chip)(family, one), bucket) for one in (alone, beside)]
            assert rows[0] == rows[1]


def test_lists_that_are_held_fit_the_registers_of_their_warps():
    """128 numbers a thread at most."""
    for pages in (3, 256, 1024):
        for rows in (1, 64, 256):
            row = bucket(selection(pages), rows)
            assert row["held_places"] <= 128 * 32 * row["warps"] and row["warps"] <= 8


def test_a_row_of_logits_is_whole_pieces():
    for tokens in (129280, 512, 97):
        request = Request("sample.draw", (("stream", 0),), (Tensor((None, tokens), FP32), Tensor((None,), FP32), TABLE, Tensor((None,), FP32),
                                                            Tensor((None,), INT64), TABLE), (TABLE, Tensor((None,), FP32)))  # fmt: skip
        row = schedule_for(SM90)("draw", request)
        assert tokens == row["pieces"] * row["block_columns"] and tokens % row["row_columns"] == 0 and row["instances"] >= row["pieces"]
        assert len(build(Choice(request, "draw", tuple(sorted(row.items())))).before) == 3


@pytest.mark.parametrize(("chip", "blocks"), [(SM90, {16, 64}), (SM100, {64})])
def test_blocks_of_few_rows_are_for_chips_on_which_their_instruction_was_compared(chip, blocks):
    """A block of 16 rows is multiplied by mma.sync, one of 64 by the tensor cores' large form; a row's bits may not depend on its bucket."""
    gate = Request("moe.gate", (("scale", 1.5), ("top_k", 6)), (Tensor((None, 5120), BF16), Tensor((256, 5120), BF16), Tensor((256,), FP32)),
                   (Tensor((None, 6), INT32), Tensor((None, 6), FP32)))  # fmt: skip
    streams, out = Tensor((None, 4, 5120), BF16), tuple(Tensor((None, *shape), FP32) for shape in ((4,), (4,), (4, 4)))
    mixer = Request("mhc.mixer", (("iterations", 20),), (streams, Tensor((24, 20480), FP32), Tensor((24,), FP32), Tensor((3,), FP32)), out)
    for family, request in (("expert_gate", gate), ("mixer", mixer)):
        row = schedule_for(chip)(family, request)
        rows = [bucket_rows_for(chip)(family, request, row, bucket) for bucket in (1, 16, 64, 256, 1024)]
        assert {r["block_rows"] for r in rows} == blocks, family
