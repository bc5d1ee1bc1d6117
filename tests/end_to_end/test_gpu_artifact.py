"""The real configuration for two NVIDIA chips, built on a machine without one: how long it takes, what every kernel reports, which matrix
instructions it has, and that a second build gives the same bytes.

Times are of two cores that nobody else uses (`--jobs 2`); another factor can be given in TAPEOUT_TIME_FACTOR.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tapeout.codegen.nvidia.facts import chip
from tapeout.codegen.nvidia.report import SPILL_FREE
from tapeout.models import deepseek_v41

REAL = Path(deepseek_v41.__file__).parent / "config-v4.1-flash.json"
TARGETS = ("sm100", "sm90")
COLD_SECONDS, WARM_SECONDS = 300, 10
FACTOR = float(os.environ.get("TAPEOUT_TIME_FACTOR", "1"))
MATRIX = {"sm90": "wgmma.mma_async", "sm100": "tcgen05.mma"}
FEW, FEW_ROWS = 16, "mma.sync"
"""Overrides for so few rows or pairs split K over warps, each with products of its own."""
PRODUCTS = ("linear", "expert_linear", "attend", "select_entries", "select_within")
SMALLEST = 64  # rows of a weight below which the tensor cores' large forms do not fit
SCALED = ("f8E4M3FN*", "f4E2M1FN*")


def _compile(output: Path, cache: Path) -> float:
    """Seconds of `tapeout compile` in a process of its own."""
    arguments = ["compile", str(REAL), "--target", ",".join(TARGETS), "-o", str(output), "--jobs", "2"]
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "tapeout.compiler", *arguments],
        env={**os.environ, "TAPEOUT_CACHE_DIR": str(cache)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return time.perf_counter() - started


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    folder = tmp_path_factory.mktemp("real")
    cold = _compile(folder / "artifact", folder / "cache")
    warm = _compile(folder / "again", folder / "cache")
    print(f"cold {cold:.1f} s, warm {warm:.1f} s")
    return folder, {"cold": cold, "warm": warm}


def _kernels(folder: Path, target: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "artifact" / target / "manifest.json").read_text())["kernels"]
    return found


def _ptx(folder: Path, target: str, kernel: dict[str, Any]) -> str:
    return (folder / "artifact" / target / "source" / target / f"{kernel['symbol']}.ptx").read_text()


def _operands(kernel: dict[str, Any]) -> list[str]:
    """Operands of a request as its text says them: what stands between the op and its arrow."""
    return str(kernel["variant"]).split("(", 1)[1].rsplit(") ->", 1)[0].split(", [")


@pytest.mark.full
def test_two_cores_build_it_in_time(built: tuple[Path, dict[str, float]]) -> None:
    _, seconds = built
    assert seconds["cold"] <= COLD_SECONDS * FACTOR, seconds
    assert seconds["warm"] <= WARM_SECONDS * FACTOR, seconds


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_reports_and_the_hot_ones_do_not_spill(built: tuple[Path, dict[str, float]], target: str) -> None:
    kernels, limits = _kernels(built[0], target), chip(target)
    assert len(kernels) > 90
    for kernel in kernels:
        binary = kernel["binary"]
        assert 0 < binary["registers"] <= limits.registers_per_thread and binary["shared_bytes"] <= limits.shared_bytes_per_block, kernel["symbol"]
        assert 0 < binary["occupancy"] <= 1 and {"spills", "local_bytes", "warps"} <= set(binary)
        assert binary["waits"], f"{kernel['symbol']} does not wait for the launch in front by itself, so none of its launches begins early"
        assert f".target {limits.architecture}" in _ptx(built[0], target, kernel)
    assert {k["symbol"]: k["binary"]["spills"] for k in kernels if k["family"] in SPILL_FREE and k["binary"]["spills"]} == {}


@pytest.mark.full
def test_matrix_kernels_use_the_tensor_cores_of_their_chip(built: tuple[Path, dict[str, float]]) -> None:
    """tcgen05 in every product on SM100, with block scales where both factors have them; wgmma in those on SM90, but for overrides for few
    rows. A product may be cut into launches: one decodes, one multiplies, one adds up."""
    lacking = []
    for target, instruction in MATRIX.items():
        for launches in _products(_kernels(built[0], target)):
            ptx = "".join(_ptx(built[0], target, kernel) for kernel in launches)
            linear, factors = launches[0]["family"] in ("linear", "expert_linear"), _operands(launches[0])[:2]
            scaled = target == "sm100" and linear and all(any(kind in factor for kind in SCALED) for factor in factors)
            few = target == "sm90" and linear and launches[0]["schedule"].get("override") == 1 and launches[0]["schedule"]["block_m"] <= FEW
            if (FEW_ROWS if few else instruction) not in ptx or (scaled and "block_scale" not in ptx):
                lacking.append((target, [kernel["symbol"] for kernel in launches], launches[0]["schedule"]))
    assert lacking == []


def _products(kernels: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The launches of every product of FP8, FP4 or BF16 rows with at least 64 rows of a weight or key."""
    found: dict[str, list[dict[str, Any]]] = {}
    for kernel in kernels:
        if kernel["family"] in PRODUCTS and "f32" not in _operands(kernel)[0] and _rows(kernel) >= SMALLEST:
            row = {name: value for name, value in kernel["schedule"].items() if name not in ("part", "warps")}  # launches may differ in warps
            found.setdefault(f"{kernel['variant']} {sorted(row.items())}", []).append(kernel)
    return list(found.values())


def _rows(kernel: dict[str, Any]) -> int:
    """Rows of a weight; keys are always enough."""
    if kernel["family"] not in ("linear", "expert_linear"):
        return SMALLEST
    return int(re.findall(r"\[([\d?, ]+)\]", "[" + _operands(kernel)[1])[0].split(", ")[-2])


@pytest.mark.full
def test_all_row_buckets_of_sm100_multiply_by_one_instruction(built: tuple[Path, dict[str, float]]) -> None:
    """Whether two kinds add products up alike was measured on SM90 only."""
    found: dict[str, set[str]] = {}
    for kernel in _kernels(built[0], "sm100"):
        found.setdefault(kernel["variant"], set()).update(re.findall(r"tcgen05\.mma\S*kind::\w+|mma\.sync", _ptx(built[0], "sm100", kernel)))
    assert {variant: kinds for variant, kinds in found.items() if len(kinds) > 1} == {}


@pytest.mark.full
def test_another_build_gives_the_same_bytes(built: tuple[Path, dict[str, float]]) -> None:
    folder, _ = built
    _compile(folder / "other", folder / "other-cache")
    files = [{p.relative_to(folder / name): p.read_bytes() for p in sorted((folder / name).rglob("*")) if p.is_file()}
             for name in ("artifact", "other", "again")]  # fmt: skip
    assert files[0] == files[1] == files[2] and len(files[0]) > 4 * 90
