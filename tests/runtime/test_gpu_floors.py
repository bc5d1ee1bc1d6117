"""Floors as the issue words them: which kernels and row counts have one, and how a time is held against it."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.bench import gpu_library
from tests.bench.gpu_floors import attention_floors, floor_us, show_floors, summary

TOPS = {"copy": 4e12, "matmul": 800e12}
EMPTY = 1.0


def kernel(family: str, **facts: Any) -> dict[str, Any]:
    fp8 = "nn.linear([?, 64] f8E4M3FN*e8m0[1x32], [64, 64] f8E4M3FN*e8m0[32x32]) -> [?, 64] bf16"
    return {"kernel": family, "family": family, "variant": fp8, "bytes": 24e6, "operations": 48e9, "cold_us": 100.0, **facts}


@pytest.mark.parametrize(("family", "rows", "allowed"), [
    ("linear", 4096, 48e9 / 480e12 * 1e6), ("linear", 64, 1 + 10.0), ("linear", 1, 11.0), ("linear", 512, None),
    ("expert_linear", 64, 12.0), ("expert_linear", 1, None), ("attend", 256, None),
    ("rope", 4096, 24e6 / 2.8e12 * 1e6), ("rope", 64, None), ("draw", 4096, None),
])  # fmt: skip
def test_floors_are_those_of_the_issue(family: str, rows: int, allowed: float | None) -> None:
    assert floor_us(kernel(family), rows, TOPS, EMPTY) == (None if allowed is None else pytest.approx(allowed))


def test_products_of_other_numbers_have_no_floor() -> None:
    assert floor_us(kernel("linear", variant="nn.linear([?, 64] bf16, [64, 64] bf16) -> [?, 64] bf16"), 4096, TOPS, EMPTY) is None
    assert floor_us(kernel("linear"), 4096, {"copy": 4e12, "matmul": None}, EMPTY) is None


def test_what_is_reached_and_what_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    found = [kernel("linear", cold_us=t, rows=64, bound_us=6.0, plain_us=r) for t, r in ((5.5, 9.0), (11.0, 12.0), (22.0, 9.0))] + [kernel("draw")]
    for one in found:
        one["floor_us"] = floor_us(one, 64, TOPS, EMPTY)
        one["floor"] = None if one["floor_us"] is None else one["floor_us"] / one["cold_us"]
    assert [one["floor"] for one in found] == [pytest.approx(2), pytest.approx(1), pytest.approx(0.5), None]
    assert summary({"kernels": found}) == (
        "floors: 2 of 3 kernels that have one reach it, 0 have one below a plain kernel that moves their bytes; not linear 50 %"
    )
    found[2]["plain_us"] = 20.0
    assert summary({"kernels": found}).endswith("1 have one below a plain kernel that moves their bytes; not linear 50 % (below a plain kernel)")
    found[2]["plain_us"] = 9.0
    found[1]["library_us"] = {"bf16": 30.5, "fp8": 12.25}
    show_floors([{"rows": 64, "kernels": found}])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:6] for line in lines if line.startswith("linear")] == [
        ["linear", "64", "24.00", "48.00", f"{cold:.2f}", "11.00"] for cold in (5.5, 11.0, 22.0)
    ]
    assert [line.endswith("floor below a plain kernel") for line in lines if line.startswith("linear")] == [False, True, False]
    assert [line.split()[9:11] for line in lines if line.startswith("linear")] == [["-", "-"], ["30.50", "12.25"], ["-", "-"]]


def test_a_library_is_asked_for_products_of_fp8_linears_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the shape that the variant names; without PyTorch, nobody."""
    asked: list[tuple[int, ...]] = []
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(nn=SimpleNamespace(functional=SimpleNamespace(scaled_mm=None)),
                                                              cuda=SimpleNamespace(empty_cache=lambda: None)))  # fmt: skip
    for name in ("_bf16_us", "_fp8_us"):
        monkeypatch.setattr(gpu_library, name, lambda _torch, *shape: asked.append(shape) or 1.0)
    variant = "nn.linear([?, 2304] f8E4M3FN*e8m0[1x32], [5120, 2304] f8E4M3FN*e8m0[32x32]) -> [?, 5120] bf16 {groups=1, wide=False}"
    assert gpu_library.product_us(kernel("linear", variant=variant, rows=1), 99) == {"bf16": 1.0, "fp8": 1.0}
    assert asked == [(1, 5120, 2304, 99), (16, 5120, 2304, 99)]
    for other in (variant.replace("[?, 2304] f8E4M3FN*e8m0[1x32]", "[?, 2304] bf16"), variant.replace("groups=1", "groups=8"), "mhc.mixer(..)"):
        assert gpu_library.product_us(kernel("linear", variant=other, rows=1), 99) is None
    monkeypatch.setitem(sys.modules, "torch", None)
    assert gpu_library.product_us(kernel("linear", variant=variant, rows=1), 99) is None
    assert len(asked) == 2


def test_attention_counts_with_full_lists_only() -> None:
    found = (("a", 256, 512), ("b", 64, 512), ("c", 256, 0))
    rows = [{"kernel": name, "rows": count, "selected": selected, "tflops": 300.0} for name, count, selected in found]
    assert attention_floors(rows) == [("a", pytest.approx(2.0))]
