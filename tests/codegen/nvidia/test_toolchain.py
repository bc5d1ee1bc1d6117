"""Cubins without a GPU: what is in them, that they are the same every time, what the checks say, and what is said where Triton is missing."""

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from tapeout.codegen.lower_to_tile import TileKernel
from tapeout.codegen.nvidia.emit import emit
from tapeout.codegen.nvidia.facts import SM90, SM100, ChipError, chip, occupancy
from tapeout.codegen.nvidia.report import TENSOR_CORE, Report, after, before, report
from tapeout.codegen.nvidia.toolchain import CHANGING, ToolchainMissing, probe
from tests.codegen.nvidia.compiling import compiled, jobs
from tests.codegen.nvidia.whole_model import kernels_of

HANDFUL = ("linear", "expert_linear", "rms_norm", "select_within", "dispatch")


def first_of(kernels: tuple[TileKernel, ...], families: tuple[str, ...]) -> list[TileKernel]:
    """A family's first kernel; of products the first that multiplies."""
    return [next(k for k in kernels if k.choice.family == family and (family not in TENSOR_CORE or _multiplies(k))) for family in families]


def _multiplies(kernel: TileKernel) -> bool:
    return "linalg.matmul" in kernel.text or "tile.dot_scaled" in kernel.text


def test_a_handful_compiles_for_both_chips(tiny: Path, tiny_kernels: tuple[TileKernel, ...]):
    """Tensor cores of the chip are used, block-scaled ones on SM100, nothing spills; twice the same bytes, which name no folder."""
    work = jobs(first_of(tiny_kernels, HANDFUL), "sm90") + jobs(first_of(kernels_of(tiny, "sm100"), HANDFUL), "sm100")
    found = {(job[0], job[3]): (made, problems) for job, made, problems in compiled([*work, work[0]])}
    for (family, name), (made, problems) in found.items():
        assert not isinstance(made, str), made
        assert (problems, made.report.spill_stores) == ([], 0), (family, name)
        assert made.cubin[:4] == b"\x7fELF" and f".entry {made.name}(" in made.ptx and f".target {chip(name).architecture}" in made.ptx
        assert b"/tmp" not in made.cubin and "/tmp" not in made.ptx and ".py" not in made.ptx
        assert (made.global_scratch_bytes, made.profile_scratch_bytes) == (0, 0)
        assert made.ptx.count(".param .u64") == len(made.parameters) + 2
        assert made.waits or family in TENSOR_CORE  # what is emitted waits for the launch in front by itself
    kinds = {key: dict(made.report.instructions) for key, (made, _) in found.items()}
    assert all(kinds[family, "sm90"].get("wgmma.mma_async") for family in ("linear", "expert_linear"))
    assert all(kinds[family, "sm100"].get("tcgen05.mma") for family in ("linear", "expert_linear"))
    assert kinds["linear", "sm100"].get("block_scale") and not kinds["linear", "sm90"].get("block_scale")


def test_two_compiles_give_the_same_bytes(tiny_kernels: tuple[TileKernel, ...]):
    work = jobs(first_of(tiny_kernels, ("rms_norm",)), "sm90")
    (_, one, _), (_, other, _) = compiled(work * 2)
    assert (one.cubin, one.ptx) == (other.cubin, other.ptx)


@pytest.mark.full
@pytest.mark.parametrize("name", ["sm90", "sm100"])
def test_all_kernels_of_the_tiny_model_compile(name: str, tiny: Path):
    wrong = [(job[0], made if isinstance(made, str) else problems) for job, made, problems in compiled(jobs(kernels_of(tiny, name), name))
             if isinstance(made, str) or problems or not (made.waits or job[4])]
    assert wrong == []


LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
    16 bytes stack frame, 24 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 16 bytes stack size, 512 bytes smem
"""


def test_the_log_is_read():
    found = report(LOG, "wgmma.mma_async x;\n// mma.sync in a comment\nmma.sync y;\n", SM90, 8, 1024, 0, 0)
    assert found == Report(168, 24, 20, 16, 512, 1024, 256, 0.125, (("wgmma.mma_async", 1), ("mma.sync", 1)), 0, 0)


def test_checks_after_compiling_name_what_is_wrong():
    bad = Report(255, 8, 8, 16, 0, 263 << 10, 256, 0.1, (("mma.sync", 4),), 2, 576)
    sentences = after("linear", bad, SM100)
    assert [s.split(":")[0] for s in sentences] == ["linear"] * len(sentences)
    assert "269312 bytes of shared memory; sm100 gives a block 232448" in sentences[0]
    assert "576 columns of tensor memory; sm100 has 512" in sentences[1] and "spills 8 bytes" in sentences[2]
    assert "block-scaled products became BF16 ones" in sentences[3] and "tcgen05.mma" in sentences[4]
    assert after("rms_norm", Report(32, 8, 8, 0, 0, 0, 128, 1.0, (), 0, 0), SM90) == []


def test_checks_before_compiling_name_what_is_wrong(tiny_kernels: tuple[TileKernel, ...]):
    source = emit(tiny_kernels[0].text)
    assert before("take", {"warps": 4, "stages": 2}, source, SM90) == []
    assert before("take", {"warps": 3, "stages": 0}, source, SM90) == [
        "take: warps is 3; expected 1, 2, 4, 8, 16 or 32", "take: stages is 0; expected 1 to 8"]


def test_occupancy_is_what_fits():
    assert occupancy(SM90, 256, 128, 0) == 2 * 256 / 2048
    assert occupancy(SM90, 128, 32, 100 << 10) == 2 * 128 / 2048
    assert occupancy(SM100, 128, 32, 0, 256) == 2 * 128 / 2048
    with pytest.raises(ChipError, match="no NVIDIA target is called 'sm80'; there are sm90, sm100, sm103"):
        chip("sm80")


def _installed(folder: Path, version: str) -> ModuleSpec:
    (folder / "triton").mkdir()
    (folder / "triton" / "__init__.py").write_text(f"__version__ = '{version}'\n")
    return ModuleSpec("triton", None, origin=str(folder / "triton" / "__init__.py"))


def test_a_missing_triton_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ToolchainMissing) as caught:
        probe()
    assert str(caught.value) == "found no Triton; compiling for NVIDIA needs Triton 3.6 to 3.9: pip install 'tapeout[nvidia]'"
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(("version", "fits"), [("3.5.1", False), ("3.6.0", True), ("3.9.0", True), ("3.10.0", False), ("nightly", False)])
def test_only_tried_versions_are_used(version: str, fits: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    spec = _installed(tmp_path, version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    if fits:
        assert probe().version == version
        return
    with pytest.raises(ToolchainMissing, match=f"found Triton {version}; compiling for NVIDIA needs Triton 3.6 to 3.9"):
        probe()


def test_an_interpreting_triton_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    spec = _installed(tmp_path, "3.9.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ToolchainMissing, match="with TRITON_INTERPRET=1, under which it compiles nothing"):
        probe()


@pytest.mark.parametrize("name", CHANGING)
def test_a_triton_that_is_told_to_make_other_code_is_refused(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Its binaries would lie in the cache for everyone who compiles without the variable."""
    spec = _installed(tmp_path, "3.9.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setenv(name, "1")
    with pytest.raises(ToolchainMissing, match=f"^found Triton 3.9.0 with {name} set, by which it makes other code; .*: unset the variable$"):
        probe()
