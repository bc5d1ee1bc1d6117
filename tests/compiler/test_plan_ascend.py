"""`tapeout plan --target ascend950`: the bounds are the arithmetic that they claim, and every launch of the smallest and largest step has one."""

import json
from pathlib import Path
from typing import Any

import pytest

from tapeout.codegen.ascend.facts import CORE, chip
from tapeout.codegen.ascend.work import work
from tapeout.compiler import ascend_bounds
from tapeout.compiler.commands import main
from tapeout.models.deepseek_v41.config import shipped_config
from tapeout.runtime.artifact import Launch
from tests.codegen.ascend import sample_kernels
from tests.codegen.ascend.harness import tools
from tests.compiler.test_target_ascend import pretended

CHIP = chip()


def bound(facts: dict[str, Any], cost: dict[str, dict[str, float]], instances: int = 64, blocks: int = 32, on: Any = CHIP) -> ascend_bounds.Bound:
    launch = Launch(kernel=0, buffers=(("extent", "rows"),), cost=cost, grid=(blocks, 1, 1))
    sizes = {"rows": 16.0, "entries": 100.0, "experts": 3.0, ascend_bounds.SHARE: 0.25}
    return ascend_bounds._bound("encoder", 16, launch, "k", instances, {"step": {}, **facts}, sizes, on)


def test_bytes_cube_and_vector_each_at_its_rate() -> None:
    found = bound({"instance": {"vector_operations": 1650, "products.bf16": 10**6}}, {"read": {"rows": 10**6}, "written": {"fixed": 16 * 10**6}})
    assert found.bytes_us == pytest.approx(32e6 / 1.6e12 * 1e6)
    assert found.cube_us == pytest.approx(2 * 64 * 1e6 / 432e12 * 1e6)
    assert found.vector_us == pytest.approx(64 * 1650 / 32 / CORE.clock_hz * 1e6)
    assert (found.bound_us, found.limit) == (found.bytes_us, "bytes")


def test_few_blocks_use_few_cores() -> None:
    facts = {"instance": {"vector_operations": 1000, "products.f8E4M3FN": 10**6}}
    few, many = bound(facts, {}, instances=4, blocks=4), bound(facts, {}, instances=32, blocks=32)
    assert few.vector_us == pytest.approx(many.vector_us) and few.cube_us == pytest.approx(many.cube_us)
    assert few.cube_us == pytest.approx(2e6 / (865e12 / 32) * 1e6)


def test_steps_are_as_many_as_the_products_ask_for() -> None:
    facts = {"instance": {"vector_operations": 10}, "step": {"vector_operations": 100, "products.bf16": 1000}}
    long = bound(facts, {"fp4": {"rows": 2 * 1000 * 40}}, instances=64)  # 640 steps
    short = bound(facts, {"fp4": {"rows": 2}}, instances=64)  # one an instance
    assert long.vector_us == pytest.approx((64 * 10 + 640 * 100) / 32 / CORE.clock_hz * 1e6)
    assert short.vector_us == pytest.approx((64 * 10 + 64 * 100) / 32 / CORE.clock_hz * 1e6)


def test_experts_without_rows_do_nothing() -> None:
    facts = {"instance": {"vector_operations": 100}}
    all_of_them, touched = bound(facts, {}), bound(facts, {"read": {"experts": 1.0}})
    assert touched.vector_us == pytest.approx(all_of_them.vector_us / 4)


def test_a_rate_that_no_source_gives_is_no_bound() -> None:
    found = bound({"instance": {"vector_operations": 5, "products.bf16": 9}}, {"read": {"fixed": 10}}, on=chip("Ascend950PR_950z"))
    assert found.bytes_us is None and found.cube_us is None and found.limit == "vector" and found.bound_us == found.vector_us


def test_work_of_a_product_and_of_rows() -> None:
    """Counted by hand: one block of 16 x 64 by 64 x 32, and 4 x 32 numbers doubled in registers of 64."""
    from tapeout.codegen.ascend.build import build

    product = build(sample_kernels.product(), tools()).work
    assert product.instance == {"products.bf16": 16 * 64 * 32, "read": 2 * (16 * 64 + 64 * 32), "written": 2 * 16 * 32} and product.step == {}
    rows = build(sample_kernels.scale(), tools()).work
    assert rows.instance == {"read": 4 * 32 * 4, "vector_operations": 2 * 3, "written": 4 * 32 * 4} and rows.step == {}


def test_work_is_what_the_simulator_executes() -> None:
    import numpy as np

    from tapeout.codegen.ascend.build import build
    from tapeout.runtime.device.ascend_simulator import Simulator

    built = build(sample_kernels.scale(), tools())
    x, y = np.arange(4 * 32, dtype=np.float32), np.zeros(4 * 32, np.float32)
    counts = Simulator(built.compiled.dump).launch("scale", [x, y, np.array([4], np.int32)], 1)
    assert counts.vector_operations == built.work.instance["vector_operations"] == work(built.compiled.dump).instance["vector_operations"]


def test_the_command_lists_every_kernel_and_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tools()
    monkeypatch.setattr(ascend_bounds, "lowered_kernels", pretended)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(shipped_config("tiny").canonical()))
    asked = ["plan", str(config), "--target", "ascend950", "--max-rows", "24", "--max-context", "256", "--block-tokens", "16"]
    assert main([*asked, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [k["symbol"] for k in data["ascend"]["kernels"]] == [k["symbol"] for k in data["kernels"]]
    rows = data["ascend"]["bounds"]
    assert {row["bucket"] for row in rows} == {16, 24}
    assert sum(row["launches"] for row in rows if row["bucket"] == 24) == sum(data["launches"].values())
    assert all(row["bound_us"] > 0 and row["limit"] in ("bytes", "cube", "vector") and 1 <= row["blocks"] <= 64 for row in rows)
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert "static bounds of a launch (microseconds)" in out and "multiply-adds" in out
