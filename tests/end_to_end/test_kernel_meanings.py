"""The suite that compares kernels with meanings on a GPU host, run on the CPU's kernels: all agree, and what is wrong is found.

The meanings alone are imported once more where the MLIR bindings are not installed, as on such a host.
"""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tapeout.dialects.format import BF16, FP32, Q4_INDEX, Q8, encode
from tapeout.dialects.types import Tensor
from tapeout.runtime.artifact import load_artifact
from tapeout.runtime.device import open_device
from tests.bench import gpu, gpu_bits
from tests.bench.gpu_meaning import check, summary
from tests.bench.greedy import load_programs
from tests.bench.meanings import launch
from tests.bench.meanings.bounds import compared
from tests.bench.meanings.cases import Case, case_data, case_from, cases_of, load_cases
from tests.bench.meanings.choices import outranked
from tests.end_to_end.conftest import SETTINGS, Model

ROOT = Path(__file__).parents[2]
ROWS = (1, 17, 65)


@pytest.fixture(scope="module")
def cases(model: Model) -> dict[str, Case]:
    return {case.symbol: case_from(case_data(case)) for case in cases_of(model.config, SETTINGS)}


def verdicts(model: Model, cases: dict[str, Case], **how: Any) -> list[dict[str, Any]]:
    artifact = load_artifact(model.artifact)
    device = open_device(artifact, 1)
    try:
        return summary(check(artifact, device, cases, **{"rows": ROWS, **how}))
    finally:
        device.close()


def test_every_kernel_is_inside_its_bound(model: Model, cases: dict[str, Case]) -> None:
    table = verdicts(model, cases)
    assert {row["kernel"] for row in table} == {k.symbol for k in load_artifact(model.artifact).manifest.kernels}
    assert not [row for row in table if row["wrong"]]
    assert sum(row["same"] for row in table) > len(table) / 2


@pytest.mark.parametrize("family", ["linear", "expert_linear", "attend", "select_entries", "append", "dispatch", "rms_norm", "draw", "lookup"])
def test_a_wrong_result_is_found(model: Model, cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """What lies in memory is moved by one row, or changed, between the kernel and the comparison."""
    right = launch.part_of

    def wrong(case: Case, inputs: list[Any], found: list[Any], count: int) -> Any:
        case, inputs, found = right(case, inputs, found, count)
        first = found[0].value if hasattr(found[0], "value") else found[0]
        codes = first.codes if hasattr(first, "codes") else first
        codes.reshape(-1).view(np.uint8)[: codes.dtype.itemsize] ^= 0x15
        return case, inputs, found

    monkeypatch.setattr(launch, "part_of", wrong)
    table = verdicts(model, cases, rows=(17,), only=family)
    assert table and all(row["wrong"] for row in table)


def test_products_see_scales_far_apart_and_then_their_own_again(model: Model, cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[int, Any]] = []
    real = launch.Memory.write

    def watched(self: Any, start: int, array: Any) -> None:
        written.append((start, np.array(array, copy=True)))
        real(self, start, array)

    monkeypatch.setattr(launch.Memory, "write", watched)
    table = verdicts(model, cases, only="linear", rows=(1, 17, 33))
    assert table and not [row for row in table if row["wrong"]]
    scales = [(start, array) for start, array in written if array.dtype == np.uint8 and array.size < 1 << 16][-20:]
    pairs = [(a, b) for (at, a), (other, b) in pairwise(scales) if at == other and a.shape == b.shape]
    assert pairs and all(np.abs(a.astype(int) - b).max() > 16 for a, b in pairs)
    assert all(np.ptp(b.astype(int)) < np.ptp(a.astype(int)) for a, b in pairs)


@pytest.mark.parametrize(("seconds", "late"), [(60.0, False), (-60.0, True)])
def test_what_is_not_compared_in_time_is_wrong(model: Model, cases: dict[str, Case], seconds: float, late: bool) -> None:
    table = verdicts(model, cases, only="rope", rows=(1, 17), workers=2, seconds=seconds)
    assert table and all(bool(row["wrong"]) == late for row in table)
    assert not late or all("not compared in time" in row["wrong"][0] for row in table)


def test_rows_behind_the_count_are_watched(model: Model, cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch) -> None:
    real = launch.Memory.launch

    def wider(self: Any, calls: Any) -> None:
        """The launch believes in one row more."""
        cell = calls[0].buffers[-1]
        count = self.read(cell, 4).view(np.int32)
        self.write(cell, count + 1)
        real(self, calls)
        self.write(cell, count)

    monkeypatch.setattr(launch.Memory, "launch", wider)
    table = verdicts(model, cases, rows=(17,), only="rms_norm")
    assert table and all(f"row {n} was written, behind the {n} rows" in row["wrong"][-1] for row in table for n in row["rows"][:1])


def test_bounds_are_sharp() -> None:
    """One BF16 step beside the nearest is refused unless the slack allows it; NaN always is."""
    value, view = np.array([[1.0, -3.0]]), Tensor((None, 2), BF16)
    beside = np.array([[1.0, -3.0 - 2.0**-6]]).astype(ml_dtypes.bfloat16)
    exact = np.zeros_like(value)
    assert compared(encode(value, BF16), (value, exact), view)["ratio"] <= 0.01
    assert "found -3.015625, expected -3.0" in compared(beside, (value, exact), view)["wrong"]
    assert compared(beside, (value, exact + 2.0**-6), view)["wrong"] is None
    assert compared(np.array([[np.nan, -3.0]], np.float32), (value, exact + 1e9), replace(view, number=FP32))["wrong"]


@pytest.mark.parametrize("number", [Q8, Q4_INDEX])
def test_codes_and_scales_have_ranges(number: Any) -> None:
    value = np.random.default_rng(1).standard_normal((3, 64))
    view, none = Tensor((None, 64), number), np.zeros((3, 64))
    found = encode(value, number)
    assert compared(found, (value, none), view) == {"same": True, "ratio": 0.0, "flips": 0, "wrong": None}
    scales = found.scales.copy()
    scales[1, 1] += 1
    assert "1 scales outside" in compared(replace(found, scales=scales), (value, none), view)["wrong"]
    other = encode(value * (1 + 2.0**-9), number)
    if number == Q8:
        assert "codes outside" in compared(other, (value, none), view)["wrong"]
    assert compared(other, (value, np.abs(value) * 2.0**-8), view)["wrong"] is None


def test_choices_may_differ_where_scores_do_not() -> None:
    score = np.array([3.0, 1.0, 2.0, 1.0])
    taken = np.array([True, True, True, False])
    assert not outranked(score, score, taken)
    assert outranked(score, score, taken[[0, 3, 2, 1]]), "of equals the lowest number"
    assert not outranked(score - 0.1, score + 0.1, taken[[0, 3, 2, 1]]), "within the error either"
    assert outranked(score - 0.1, score + 0.1, np.array([True, True, False, False]))


def test_meanings_need_no_bindings(tmp_path: Path) -> None:
    """A process in which the bindings cannot be found imports the suite and reads a file of cases."""
    (tmp_path / "cases.json").write_text("[]")
    text = (
        "import sys, importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name.startswith('torch_mlir') else real(name, *rest)\n"
        "import tests.bench.gpu_meaning as suite\n"
        f"assert suite.load_cases(__import__('pathlib').Path({str(tmp_path / 'cases.json')!r})) == {{}}\n"
        "from tapeout.dialects.define import REGISTRY\n"
        "assert not any(name.startswith('torch_mlir') for name in sys.modules) and len(REGISTRY) > 30\n"
    )
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert load_cases(tmp_path / "cases.json") == {}


def test_a_row_has_the_same_bits_in_every_bucket(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = load_artifact(model.artifact)
    device = open_device(artifact, 1)
    try:
        programs = load_programs(artifact, model.weights, device)
        assert gpu.same_in_every_bucket(programs) == {"buckets": list(artifact.buckets), "different": [], "unsteady": []}
        right, last = gpu._among, artifact.buckets[-1]

        def another_token(programs: Any, count: int, position: int) -> Any:
            rows = right(programs, count, position)
            rows.tokens[rows.outputs[0]] += count == last
            return rows

        monkeypatch.setattr(gpu, "_among", another_token)
        assert gpu.same_in_every_bucket(programs)["different"] == [last]
        monkeypatch.setattr(gpu.Memory, "launch", lambda self, calls: None)
        assert gpu.same_in_every_bucket(programs)["unsteady"] == list(artifact.buckets), "results are overwritten before launches run alone"
    finally:
        device.close()


# -- the kernels of all buckets


def bits(model: Model, cases: dict[str, Case]) -> list[gpu_bits.Comparison]:
    """The CPU has one kernel for all buckets: it is run in pieces nevertheless."""
    artifact = load_artifact(model.artifact)
    device = open_device(artifact, 1)
    try:
        return gpu_bits.check(artifact, device, cases, every=True)
    finally:
        device.close()


def test_rows_in_pieces_have_the_bits_of_all_together(model: Model, cases: dict[str, Case]) -> None:
    """Every op but those that depend on a row's number or on other rows, of all rows in one smaller bucket and of some in the others."""
    found = bits(model, cases)
    assert not [one for one in found if one.wrong]
    buckets, kernels = load_artifact(model.artifact).buckets, load_artifact(model.artifact).manifest.kernels
    compared = {symbol for one in found for symbol in one.few}
    left = {kernel.op for kernel in kernels if kernel.symbol not in compared}
    assert left and all(op.startswith(launch.WHOLE) for op in left)
    rows = {one.bucket: one.rows for one in found if one.op == "nn.fused:norm_quantize"}
    assert rows == {bucket: buckets[-1] if bucket == buckets[-2] else -(-buckets[-1] // gpu_bits.SOME // bucket) * bucket for bucket in buckets[:-1]}


@pytest.mark.parametrize("family", ["linear", "expert_linear", "swiglu", "combine", "rms_norm", "draw", "select_entries", "take"])
def test_another_bit_in_one_piece_is_found(model: Model, cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """The last launch on a piece leaves a bit of its first row changed."""
    real = gpu_bits.Comparer._read

    def changed(self: Any, placed: gpu_bits.Placed, *how: int) -> Any:
        found = real(self, placed, *how)
        found[-1, -1] ^= 1
        return found

    right = gpu_bits.Comparer._op

    def only(self: Any, many: gpu_bits.Op, wanted: Any, end: float) -> Any:
        return right(self, many, wanted if many.symbols[-1].startswith(family) else [], end)

    monkeypatch.setattr(gpu_bits.Comparer, "_op", only)
    monkeypatch.setattr(gpu_bits.Comparer, "_read", changed)
    found = bits(model, cases)
    assert found and all("1 of " in one.wrong and " bytes in 1 rows differ, row " in one.wrong for one in found)
    assert gpu_bits.show(found) == len({(one.many, one.few) for one in found})


def test_pieces_have_operands_of_their_own(model: Model, cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece that reads the rows of the piece before it is found in every op that reads rows."""
    right = gpu_bits.Comparer._call

    def late(self: Any, one: Any, call: Any, placed: Any, piece: int) -> Any:
        moved, held = right(self, one, call, placed, piece), right(self, one, call, placed, max(0, piece - 1))
        return replace(moved, buffers=(held.buffers[0], *moved.buffers[1:]))

    monkeypatch.setattr(gpu_bits.Comparer, "_call", late)
    found = {one.op for one in bits(model, cases) if one.wrong}
    assert {"nn.linear", "moe.expert_linear", "mhc.mixer", "nn.rms_norm", "moe.gate", "sample.draw", "nn.rope"} <= found


def test_sorted_pairs_by_piece() -> None:
    """Six rows of two pairs each and three experts, in pieces of two rows: as if each piece had been dispatched by itself."""
    experts = np.array([[2, 0], [1, 2], [0, 2], [2, 1], [1, 0], [0, 1]])

    def dispatched(of: Any) -> tuple[Any, Any, Any]:
        order = np.argsort(of.reshape(-1), kind="stable")
        return order, np.argsort(order), np.searchsorted(of.reshape(-1)[order], np.arange(4))

    order, _, offsets = dispatched(experts)
    found = gpu_bits.sorted_by_piece(order, offsets, 4)
    for piece in range(3):
        part, expected = slice(4 * piece, 4 * piece + 4), dispatched(experts[2 * piece : 2 * piece + 2])
        assert [a.tolist() for a in expected] == [found.order[part].tolist(), found.places[part].tolist(), found.offsets[piece].tolist()]
        assert (order[found.place[part]] == 4 * piece + expected[0]).all()


def test_what_is_not_compared_in_time_is_no_equality(model: Model, cases: dict[str, Case], capsys: pytest.CaptureFixture[str]) -> None:
    artifact = load_artifact(model.artifact)
    device = open_device(artifact, 1)
    found = gpu_bits.check(artifact, device, cases, every=True, seconds=-1.0)
    device.close()
    assert {one.wrong for one in found} == {gpu_bits.NOT_IN_TIME} and gpu_bits.show(found) > 50
    assert f", {gpu_bits.show(found)} with other bits" in capsys.readouterr().out
