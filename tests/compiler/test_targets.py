"""Compiling for several targets: one graph, one artifact a target, kernels through the cache; a pretend toolchain stands in for Triton.

The toolchain itself is tested beside the emitter; here it is asked for, its answers land in the artifact, and its absence is exit code 3.
"""

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tapeout.codegen.kernel import Request
from tapeout.codegen.lower_to_tile import TileKernel, lower
from tapeout.codegen.nvidia import facts as chip_facts
from tapeout.codegen.nvidia import toolchain
from tapeout.codegen.nvidia.emit import Source
from tapeout.codegen.select_kernels import Choice
from tapeout.compiler import cached_kernels, target_nvidia
from tapeout.compiler.api import Compiled, compile_path
from tapeout.compiler.cache import Cache, key_of
from tapeout.compiler.commands import main
from tapeout.compiler.driver import Watch
from tapeout.compiler.errors import ModuleRefused
from tapeout.compiler.settings import Settings
from tapeout.dialects.format import BF16
from tapeout.dialects.types import Tensor
from tapeout.models.deepseek_v41.config import shipped_config
from tapeout.runtime.artifact import load_artifact
from tapeout.runtime.artifact_set import members

SETTINGS = {"max_rows": 24, "max_sequences": 3, "max_context": 128, "block_tokens": 16, "buckets": (5, 24)}
KERNEL_BINARIES = target_nvidia.kernel_binaries
"""The real one, which a fixture replaces."""
VERSIONS = target_nvidia.Versions("3.9.9", "13.4.1", "e" * 64, (13, 4))


def pretended(kernels: Sequence[TileKernel], chip: str, store: Cache, jobs: int, progress: Any) -> tuple[dict[str, dict[str, Any]], int]:
    out = {}
    for kernel in kernels:
        facts = {"function": kernel.symbol, "warps": 4, "shared_bytes": 10, "registers": 77, "spills": 0, "local_bytes": 0, "occupancy": 0.25,
                 "scratch": 0}  # fmt: skip
        content = base64.b64encode(f"{chip} {kernel.symbol}".encode()).decode()
        out[kernel.symbol] = {"facts": facts, "cubin": content, "ptx": f".target {chip}", "source": f"# {kernel.symbol}\n"}
        progress(kernel.symbol)
    return out, len(out)


@pytest.fixture(scope="module")
def pretend() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target_nvidia, "kernel_binaries", pretended)
        patch.setattr(target_nvidia, "versions", lambda chip: VERSIONS)
        patch.setattr(toolchain, "probe", lambda: toolchain.Triton("3.9.9", Path("/nowhere")))
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(shipped_config("tiny").canonical()))
    return path


@dataclass
class Made:
    """What a compile for two chips wrote and said."""

    compiled: Compiled
    stages: list[str]
    kernels: list[tuple[int, int]]


@pytest.fixture(scope="module")
def made(config: Path, pretend: None, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder, stages, kernels = tmp_path_factory.mktemp("set"), [], []
    watch = Watch(stage=stages.append, kernel=lambda done, total, symbol: kernels.append((done, total)))
    settings = Settings(target="sm90,sm100", **SETTINGS)  # type: ignore[arg-type]
    compiled = compile_path(config, folder / "set", settings, watch, cache=folder / "cache")
    assert compiled is not None
    return Made(compiled, stages, kernels)


@pytest.fixture(scope="module")
def alone(config: Path, pretend: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact of one of the chips, compiled by itself."""
    folder = tmp_path_factory.mktemp("one")
    compile_path(config, folder / "one", Settings(target="sm90", **SETTINGS), cache=folder / "cache")  # type: ignore[arg-type]
    return folder / "one"


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_two_chips_share_the_graph_and_get_an_artifact_each(made: Made) -> None:
    compiled, stages = made.compiled, made.stages
    assert list(compiled.targets) == ["sm100", "sm90"] == list(members(compiled.directory))
    assert compiled.identity == key_of(*compiled.targets.values()), "the set's own"
    assert [stages.count(name) for name in ("graph", "assign-formats", "bucket-rows", "select-kernels", "plan-memory", "plan")] == [1, 1, 1, 2, 2, 2]
    assert made.kernels == [(i + 1, len(compiled.kernels)) for i in range(len(compiled.kernels))]
    for target, capability in (("sm90", (9, 0)), ("sm100", (10, 0))):
        artifact = load_artifact(compiled.directory / target, target=target)
        manifest = artifact.manifest
        assert manifest.gpu is not None and (manifest.gpu.capability, manifest.gpu.cuda) == (capability, (13, 0))
        assert manifest.gpu.chip == f"sm_{capability[0]}{capability[1]}a" and manifest.cpu.features == ()
        assert manifest.toolchain["triton"] == "3.9.9" and manifest.toolchain["ptxas"] == "13.4.1"
        assert {k.abi for k in manifest.kernels} == {"buffers-scratch-profile"} and {k.target for k in manifest.kernels} == {target}
        first = manifest.kernels[0]
        assert first.binary is not None and first.binary.file == f"kernels/{target}/{first.symbol}.cubin" and first.binary.registers == 77
        assert (artifact.directory / first.binary.file).read_bytes() == f"{target} {first.symbol}".encode()
        assert (artifact.directory / "source" / target / f"{first.symbol}.ptx").read_text() == f".target {target}"
        grids = [launch.grid for buckets in artifact.programs.values() for program in buckets.values() for launch in program.launches]
        assert grids and all(grid is not None and min(grid) >= 1 for grid in grids)


def test_one_target_alone_gives_the_bytes_it_gives_among_others(made: Made, alone: Path) -> None:
    assert list(members(alone)) == ["sm90"], "one target is the artifact itself"
    assert files(alone) == files(made.compiled.directory / "sm90")


def test_grids_grow_with_the_bucket_and_bound_every_count(alone: Path) -> None:
    """Kernels that two buckets share; products have kernels of their own for few rows."""
    artifact = load_artifact(alone, target="sm90")
    grew = shared = 0
    for buckets in artifact.programs.values():
        small, large = ({(launch.kernel, launch.buffers[-1]): launch.grid for launch in buckets[rows].launches} for rows in (5, 24))
        for key in small.keys() & large.keys():
            few, many = small[key], large[key]
            assert few is not None and many is not None and all(a <= b for a, b in zip(few, many, strict=True))
            grew, shared = grew + (few != many), shared + 1
    assert grew and shared > 50
    rows = {k.symbol: k.schedule for k in artifact.manifest.kernels if k.family == "rms_norm"}
    for launch in artifact.programs["encoder"][24].launches:
        symbol = artifact.manifest.kernels[launch.kernel].symbol
        if symbol in rows and launch.grid is not None:
            blocks = -(-artifact.bound(str(launch.buffers[-1][1]), 24) // int(str(rows[symbol]["block_rows"])))
            assert launch.grid[0] == blocks


@pytest.mark.usefixtures("pretend")
def test_stopping_early_writes_nothing(config: Path, tmp_path: Path) -> None:
    for stage in ("bucket-rows", "lower-to-tile"):
        settings = Settings(target="sm90,sm100", stop_after=stage, **SETTINGS)  # type: ignore[arg-type]
        assert compile_path(config, tmp_path / "set", settings, cache=tmp_path / "cache") is None
    assert not (tmp_path / "set").exists()


@pytest.mark.usefixtures("pretend")
def test_dumps_of_several_targets_do_not_mix(config: Path, tmp_path: Path) -> None:
    shown: list[str] = []
    asked = {"dump": tmp_path / "dump", "print_ir_after": ("select-kernels", "bucket-rows"), "stop_after": "select-kernels"}
    settings = Settings(target="sm90,sm100", **asked, **SETTINGS)  # type: ignore[arg-type]
    compile_path(config, tmp_path / "set", settings, Watch(ir=lambda name, text: shown.append(name)), cache=tmp_path / "cache")
    assert shown == ["bucket-rows", "select-kernels sm90", "select-kernels sm100"]
    names = [path.relative_to(tmp_path / "dump").as_posix() for path in (tmp_path / "dump").rglob("*select-kernels.mlir")]
    assert sorted(names) == ["sm100/13-select-kernels.mlir", "sm90/13-select-kernels.mlir"]


def test_no_triton_is_one_sentence_and_exit_code_3(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent() -> None:
        raise toolchain.ToolchainMissing("found no Triton; compiling for NVIDIA needs Triton 3.6 to 3.9: pip install 'tapeout[nvidia]'")

    monkeypatch.setattr(toolchain, "probe", absent)
    assert main(["compile", str(config), "-o", str(tmp_path / "a"), "--target", "sm90,cpu"]) == 3
    error = capsys.readouterr().err
    assert error == "tapeout: [C301] found no Triton; compiling for NVIDIA needs Triton 3.6 to 3.9: pip install 'tapeout[nvidia]'\n"
    assert not (tmp_path / "a").exists()


def test_running_without_a_driver_is_exit_code_3(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tapeout.models.tiny import write_tiny
    from tapeout.runtime.device import cuda
    from tapeout.runtime.errors import DriverMissing

    def none(module: Any = None) -> None:
        raise DriverMissing("CUDA driver", "none", "libcuda.so.1")

    monkeypatch.setattr(cuda, "load_driver", none)
    write_tiny(tmp_path / "tiny")
    assert main(["run", str(alone), "--weights", str(tmp_path / "tiny"), "--prompt", "a", "--device", "cuda"]) == 3
    assert "[D105] this machine has no usable GPU driver" in capsys.readouterr().err
    assert main(["run", str(alone), "--weights", str(tmp_path / "tiny"), "--prompt", "a", "--device", "cpu"]) == 1
    assert "found sm90, expected cpu" in capsys.readouterr().err


def test_refused_kernels_name_themselves_across_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(function: Any, tasks: Any, jobs: int, done: Any) -> None:
        raise target_nvidia.KernelRefused("kernel attend_1 for sm90: attend: spills 4 bytes")

    monkeypatch.setattr(target_nvidia, "versions", lambda chip: VERSIONS)
    monkeypatch.setattr(cached_kernels, "in_processes", refuse)
    kernel: Any = SimpleNamespace(symbol="attend_1", text="", choice=SimpleNamespace(schedule=(), family="attend"))
    with pytest.raises(ModuleRefused, match=r"^\[C103\] kernel attend_1 for sm90"):
        KERNEL_BINARIES([kernel], "sm90", Cache(tmp_path), 1, lambda symbol: None)


@pytest.mark.parametrize(("change", "sentence"), [
    ({"stages": 9}, "rms_norm: stages is 9; expected 1 to 8"),
    ({"warps": 3}, "rms_norm: warps is 3; expected 1, 2, 4, 8, 16 or 32"),
    ({"block_rows": 8192}, "rms_norm: a tile has 1048576 elements; expected at most 1048575"),
])  # fmt: skip
def test_what_a_chip_cannot_give_is_refused_before_anything_is_compiled(
    change: dict[str, int], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(*given: object) -> None:
        raise AssertionError("the compiler was asked")

    monkeypatch.setattr(toolchain, "compile_cubin", compiled)
    monkeypatch.setitem(chip_facts.CHIPS, "sm90", replace(chip_facts.SM90, tile_elements=(1 << 20) - 1))
    request = Request("nn.rms_norm", (("epsilon", 0.5),), (Tensor((None, 128), BF16), Tensor((128,), BF16)), (Tensor((None, 128), BF16),))
    row = {"block_rows": 4, "block_columns": 128, "held": 1, "ahead": 1, "warps": 4, "stages": 2, **change}
    kernel = lower(Choice(request, "rms_norm", tuple(sorted(row.items()))))
    with pytest.raises(target_nvidia.KernelRefused) as caught:
        target_nvidia._binary("rms_norm", kernel.text, row, "sm90", None)
    assert str(caught.value) == f"kernel {kernel.symbol} for sm90: {sentence}" + (": choose smaller blocks" if "tile" in sentence else "")


def test_a_kernel_is_keyed_by_everything_that_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_nvidia, "versions", lambda chip: VERSIONS)
    row = (("block_m", 16), ("warps", 4))
    given = Source("name", "source", (), 1, 0, "gluon", 4)
    keys = {target_nvidia._key("text", row, "sm90", None), target_nvidia._key("text ", row, "sm90", None),
            target_nvidia._key("text", row[:1], "sm90", None), target_nvidia._key("text", row, "sm100", None),
            target_nvidia._key("text", row, "sm90", given), target_nvidia._key("text", row, "sm90", replace(given, first_warps=8)),
            target_nvidia._key("text", row, "sm90", replace(given, text="another"))}  # fmt: skip
    for field in ("triton", "assembler", "emitter"):
        changed = target_nvidia.Versions(**{**VERSIONS.__dict__, field: "other"})
        monkeypatch.setattr(target_nvidia, "versions", lambda chip, changed=changed: changed)
        keys.add(target_nvidia._key("text", row, "sm90", None))
    assert len(keys) == 10
