"""What is said where a tool of the NVIDIA targets is absent or too old, what limits a launch, and how several targets are inspected.

No GPU, and nothing is compiled for one: binaries are stand-ins with the facts of the artifact of the processor.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tapeout.codegen.nvidia.facts import CHIPS, SM90, SM100, SM103, Chip
from tapeout.compiler import nvidia_assembler
from tapeout.compiler.errors import ToolchainMissing
from tapeout.compiler.gpu_bounds import bounds, experts_hit, rows_of
from tapeout.compiler.nvidia_assembler import assembler
from tapeout.models.deepseek_v41.config import shipped_config
from tapeout.runtime.artifact import ArtifactData, Program, Programs, Weights, load_artifact
from tapeout.runtime.artifact_kernels import Binary, CpuLevel, GpuLevel
from tapeout.runtime.artifact_set import write_set
from tests.compiler.test_commands import TINY, Tapeout, blocked, tapeout  # noqa: F401 (the fixture)
from tests.end_to_end.conftest import Model, model  # noqa: F401 (the fixture)

OLD_RULE = "def get_ptxas(arch: int):\n    return new if arch >= 100 else old\n"
NEW_RULE = "def get_ptxas(arch: int):\n    if arch < 90:\n        return old\n    return new\n"


def triton_with(folder: Path, rule: str, **releases: str) -> Path:
    """A folder as Triton's, with assemblers that say a release."""
    bin_ = folder / "backends" / "nvidia" / "bin"
    bin_.mkdir(parents=True)
    (bin_.parent / "compiler.py").write_text(rule)
    for name, release in releases.items():
        tool = bin_ / name.replace("_", "-")
        tool.write_text(f"#!/bin/sh\necho '{release}'\n")
        tool.chmod(0o755)
    return folder


def said(major: int, minor: int) -> str:
    return f"Cuda compilation tools, release {major}.{minor}, V{major}.{minor}.7"


@pytest.mark.parametrize(("rule", "chip", "release"), [
    (OLD_RULE, SM90, (12, 5)), (OLD_RULE, SM100, (13, 1)), (NEW_RULE, SM90, (13, 1)), (NEW_RULE, SM103, (13, 1)), ("", SM90, (13, 1))])
def test_the_assembler_is_the_one_that_triton_uses(tmp_path: Path, rule: str, chip: Chip, release: tuple[int, int]) -> None:
    found = assembler(triton_with(tmp_path, rule, ptxas=said(12, 5), ptxas_blackwell=said(13, 1)), chip, {})
    assert found.release == release and found.version == f"{release[0]}.{release[1]}.7"


def test_another_path_counts(tmp_path: Path) -> None:
    folder = triton_with(tmp_path / "a", NEW_RULE, ptxas_blackwell=said(13, 1))
    other = triton_with(tmp_path / "b", NEW_RULE, ptxas_blackwell=said(12, 9)) / "backends/nvidia/bin/ptxas-blackwell"
    assert assembler(folder, SM103, {"TRITON_PTXAS_BLACKWELL_PATH": str(other)}).release == (12, 9)


@pytest.mark.parametrize(("chip", "tools", "words"), [
    (SM90, {}, r"found no assembler at .*ptxas-blackwell; compiling for sm90 needs the assembler of CUDA 12\.0 or later"),
    (SM100, {"ptxas_blackwell": said(12, 7)}, r"found the assembler of CUDA 12\.7 at .*; compiling for sm100 needs the assembler of CUDA 12\.8"),
    (SM103, {"ptxas_blackwell": said(12, 8)}, r"found the assembler of CUDA 12\.8 at .*; compiling for sm103 needs the assembler of CUDA 12\.9"),
    (SM90, {"ptxas_blackwell": "hello"}, r"found an assembler that tells no version at"),
])  # fmt: skip
def test_a_missing_or_old_assembler_is_one_sentence(tmp_path: Path, chip: Chip, tools: dict[str, str], words: str) -> None:
    with pytest.raises(ToolchainMissing, match=words) as refused:
        assembler(triton_with(tmp_path, NEW_RULE, **tools), chip, {})
    assert refused.value.exit_code == 3 and "\n" not in str(refused.value)


def test_an_assembler_that_does_not_run_is_one_sentence(tmp_path: Path) -> None:
    folder = triton_with(tmp_path, NEW_RULE, ptxas_blackwell="x")
    (folder / "backends/nvidia/bin/ptxas-blackwell").write_bytes(b"\x7fELF")
    with pytest.raises(ToolchainMissing, match="found an assembler that does not run at"):
        assembler(folder, SM90, {})
    assert set(nvidia_assembler.LEAST) == {chip.capability for chip in CHIPS.values()}


@pytest.mark.parametrize("target", ["sm90", "sm100,sm90", "cpu,sm103"])
def test_compiling_without_triton_is_3(target: str, tmp_path: Path) -> None:
    """One sentence, before a kernel is compiled or a file written."""
    done = blocked("compile", TINY, "--target", target, "-o", str(tmp_path / "out"), without=("triton",))
    assert done.returncode == 3, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert re.search(r"found no Triton; compiling for NVIDIA needs Triton 3\.6 to 3\.9: pip install 'tapeout\[nvidia\]'", line)
    assert not (tmp_path / "out").exists()


# -- several targets


def gpu_twin(path: Path, target: str = "sm90") -> tuple[ArtifactData, dict[str, bytes]]:
    """The artifact of a processor as one of a GPU: stand-in binaries, one instance a launch."""
    artifact = load_artifact(path)
    chip = CHIPS[target]
    level = GpuLevel(chip=chip.architecture, capability=divmod(chip.capability, 10), cuda=(13, 0))
    kernels = tuple(
        k.model_copy(update={"target": target, "abi": "buffers-scratch-profile", "binary": Binary(
            file=f"kernels/{target}/{k.symbol}.cubin", function=k.symbol, warps=4, shared_bytes=1024, registers=32, spills=0, local_bytes=0,
            occupancy=0.25, scratch=0)})
        for k in artifact.manifest.kernels
    )  # fmt: skip

    def launched(program: Program) -> Program:
        return program.model_copy(update={"launches": tuple(one.model_copy(update={"grid": (1, 1, 1)}) for one in program.launches)})

    programs = {entry: {str(b): launched(p) for b, p in buckets.items()} for entry, buckets in artifact.programs.items()}
    changes = {"targets": (target,), "cpu": CpuLevel(level="any", features=()), "gpu": level, "kernels": kernels, "files": {}, "identity": ""}
    manifest = artifact.manifest.model_copy(update=changes)
    data = ArtifactData(manifest, Programs(programs=programs), Weights(operands=artifact.weights), {})
    return data, {f"kernels/{target}/{k.symbol}.cubin": b"cubin" for k in kernels}


@pytest.fixture
def several(model: Model, tmp_path: Path) -> Path:  # noqa: F811
    return write_set(tmp_path / "set", {target: gpu_twin(model.artifact, target) for target in ("sm90", "sm100")})


def test_all_members_of_a_set_are_inspected(tapeout: Tapeout, several: Path) -> None:  # noqa: F811
    data = tapeout.json("inspect", several)
    assert list(data) == ["sm100", "sm90"] and [data[t]["targets"] for t in data] == [["sm100"], ["sm90"]]
    assert all(len(one["bounds"]) > 100 and {"kernel", "bound_us", "limit", "launches"} <= set(one["bounds"][0]) for one in data.values())
    assert tapeout("inspect", several) == 0
    assert tapeout.out.count("artifact ") == 2 and "for sm90 (sm_90a, driver of CUDA 13.0)" in tapeout.out
    assert tapeout.out.count("25 %") == 2 * len(data["sm90"]["kernels"]), "occupancy of every kernel"
    (several / "sm90" / "weights.json").write_text("{}")
    assert tapeout("inspect", several) == 1 and "A108" in tapeout.err


def test_running_without_a_gpu_is_3_or_names_the_cpu(tapeout: Tapeout, several: Path, model: Model) -> None:  # noqa: F811
    program = "import sys, tapeout.runtime.device.cuda as c; from tapeout.runtime.errors import DriverMissing\n"
    program += "def load_driver(module=None): raise DriverMissing('GPUs', 'none', 'one')\nc.load_driver = load_driver\n"
    program += "from tapeout.compiler.commands import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "run", str(several), "--weights", str(model.weights), "--prompt", "a", "--device", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3 and "[D105]" in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert tapeout("run", several, "--weights", model.weights, "--prompt", "a", "--device", "cpu") == 1
    assert "found sm100, sm90, expected cpu" in tapeout.err


# -- bounds


def test_a_bound_is_the_slower_of_bytes_and_operations(model: Model) -> None:  # noqa: F811
    artifact = load_artifact(model.artifact)
    config: Any = artifact.manifest.model.config["text_config"]

    def found(chip: Chip) -> dict[tuple[str, str, int], Any]:
        symbols = [k.symbol for k in artifact.manifest.kernels]
        made = bounds(symbols, artifact.programs, chip, config, artifact.manifest.options, artifact.draft_block)
        return {(b.entry, b.kernel, b.bucket): b for b in made}

    old, new = found(SM90), found(SM100)
    assert {bucket for _, _, bucket in old} == {artifact.buckets[0], artifact.buckets[-1]}
    assert sum(b.launches for b in old.values() if b.bucket == artifact.buckets[0]) == sum(
        len(p[artifact.buckets[0]].launches) for p in artifact.programs.values())  # fmt: skip
    for key, b in old.items():
        assert b.bound_us == max(b.bytes_us, b.work_us) and (b.limit == "memory") == (b.bytes_us >= b.work_us)
        assert new[key].bytes_us == pytest.approx(b.bytes_us * 4.8 / 8)
    rows = rows_of(list(old.values()))
    assert len(rows) == len(old) and rows[0][1].endswith(str(artifact.buckets[0]))  # type: ignore[attr-defined]


@pytest.mark.parametrize(("kind", "rate"), [("bf16", 989.5e12), ("fp8", 989.5e12), ("fp4", 989.5e12), ("f32", 67e12), ("integer", 33.5e12)])
def test_without_scaled_products_fp8_is_done_in_bf16(kind: str, rate: float) -> None:
    assert SM90.operations(kind) == rate
    assert (SM100.operations("fp8"), SM100.operations("fp4")) == (4500e12, 4500e12)


def test_a_plan_for_a_gpu_has_bounds(tapeout: Tapeout) -> None:  # noqa: F811
    arguments = ["plan", TINY, "--max-context", 256, "--max-sequences", 2, "--max-rows", 16, "--block-tokens", 16, "--target", "sm90"]
    data = tapeout.json(*arguments)
    kernels = {k["symbol"] for k in data["kernels"]}
    assert data["gpu"]["bounds"] and {b["kernel"] for b in data["gpu"]["bounds"]} <= kernels
    assert tapeout(*arguments) == 0 and "bounds of a launch (microseconds)" in tapeout.out


def test_draft_stages_have_experts_of_their_own(tapeout: Tapeout) -> None:  # noqa: F811
    config: Any = shipped_config("v4.1-flash").canonical()["text_config"]
    counts = {"rows": 64.0, "drafts": 40.0}
    assert experts_hit("decoder", config, counts) == pytest.approx((384 * (1 - (1 - 6 / 384) ** 64), 1 - (1 - 6 / 384) ** 64))
    assert experts_hit("draft", config, counts) == pytest.approx((128 * (1 - (1 - 3 / 128) ** 40), 1 - (1 - 3 / 128) ** 40))
    data = tapeout.json("plan", TINY, "--max-sequences", 1, "--target", "sm90", "--kernel", "expert_linear")
    drafts = [(k, b) for k in data["kernels"] for b in k["bounds"] if b["entry"] == "draft"]
    for kernel, bound in drafts:
        experts, n, width = map(int, re.findall(r"\[(\d+), (\d+), (\d+)\] f4E2M1FN", kernel["request"])[0])
        assert bound["bytes_us"] * SM90.bandwidth / 1e6 < 1.25 * experts * n * width * 17 / 32, "all weights and a few rows"
    assert len(drafts) > 2


Loader = Callable[[Path], Any]


def test_an_edited_member_is_refused(several: Path) -> None:
    manifest = json.loads((several / "sm100" / "manifest.json").read_text())
    manifest["gpu"]["capability"] = [9, 0]
    (several / "sm100" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(Exception, match="A106"):
        load_artifact(several / "sm100", target="sm100")
