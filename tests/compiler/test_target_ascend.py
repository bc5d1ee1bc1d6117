"""The Ascend target: what its artifact says, kernels through the cache, refusals as sentences; the real configuration under `full`.

Most tests pretend the kernels' texts, so that they say something where the Ascend compiler is not installed.
"""

import importlib.util
import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tapeout.codegen import tile_builder
from tapeout.codegen.ascend import build, link_check, toolchain
from tapeout.codegen.ascend.facts import TARGETS, chip
from tapeout.codegen.lower_to_tile import TileKernel
from tapeout.compiler import target_ascend
from tapeout.compiler.api import Compiled, compile_path
from tapeout.compiler.cache import Cache
from tapeout.compiler.commands import main
from tapeout.compiler.errors import ModuleRefused
from tapeout.compiler.settings import Settings
from tapeout.models import deepseek_v41
from tapeout.models.deepseek_v41.config import shipped_config
from tapeout.runtime.artifact import MANIFEST, canonical_json, load_artifact, manifest_identity
from tapeout.runtime.artifact_set import members
from tapeout.runtime.errors import FieldsRefused, FileMissing, ProgramsInconsistent
from tests.codegen.ascend import sample_kernels
from tests.codegen.ascend.harness import tools

REAL = Path(deepseek_v41.__file__).parent / "config-v4.1-flash.json"
SETTINGS: dict[str, Any] = {"max_rows": 24, "max_sequences": 3, "max_context": 128, "block_tokens": 16, "buckets": (5, 24)}
VERSIONS = target_ascend.Versions("1.2.0", "e" * 64)
FINISH = ("hivmc-a5", "MODULE", "--target=Ascend950PR_9589", "-o", "OBJECT")


def pretended(kernels: Sequence[TileKernel], name: str, store: Cache, jobs: int, progress: Any) -> tuple[dict[str, dict[str, Any]], int]:
    out = {}
    for kernel in kernels:
        mode = "mix" if target_ascend.has_products(kernel.text) else "aiv"
        functions = [kernel.symbol + end for end in (("_mix_aic", "_mix_aiv") if mode == "mix" else ("",))]
        facts = {"mode": mode, "functions": functions, "arguments": ["ffts", "lock", "workspace", "buffers", "grid_x", "grid_y", "grid_z"],
                 "flags": [], "finish": FINISH, "memory": {"ub": 64, "cbuf": 0, "cc": 0}, "pipes": {"V": 3}, "pipe_flags": 2, "core_flags": 0,
                 "barriers": 1, "vector_functions": 1, "instance": {"vector_operations": 5}, "step": {}}  # fmt: skip
        module = f"// {name} {kernel.symbol} ${{ASCENDNPUIR}}/lib/meta_op.aiv.c310.bc\n"
        out[kernel.symbol] = {"facts": facts, "file": module, "simulated": f"// dump of {kernel.symbol}\n", "source": "// contract\n"}
        progress(kernel.symbol)
    return out, len(out)


@contextmanager
def pretending() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target_ascend, "lowered_kernels", pretended)
        patch.setattr(target_ascend, "versions", lambda: VERSIONS)
        patch.setattr(target_ascend, "_require_compiler", lambda: None)
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(shipped_config("tiny").canonical()))
    return path


@pytest.fixture(scope="module")
def made(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    folder = tmp_path_factory.mktemp("set")
    with pretending():
        compiled = compile_path(config, folder / "set", Settings(target="ascend950,ascend950-4", **SETTINGS), cache=folder / "cache")
    assert compiled is not None
    return compiled


def artifact_of(made: Compiled, target: str = "ascend950") -> Any:
    return load_artifact(made.directory / target, target=target)


def test_rows_say_where_texts_lie_and_how_they_are_launched(made: Compiled) -> None:
    assert set(members(made.directory)) == {"ascend950", "ascend950-4"}
    artifact = artifact_of(made)
    manifest = artifact.manifest
    assert (manifest.npu.chip, manifest.npu.cube_cores, manifest.npu.vector_cores) == ("Ascend950PR_9589", 32, 64)
    assert manifest.gpu is None and manifest.toolchain["ascendnpu-ir"] == "1.2.0"
    for kernel in manifest.kernels:
        row = kernel.lowered
        assert kernel.abi == "lock-workspace-buffers-grid" and kernel.binary is None and row.object is None
        assert (artifact.directory / row.file).read_text().startswith(f"// ascend950 {kernel.symbol} ${{ASCENDNPUIR}}/lib")
        assert (artifact.directory / row.simulated).read_text() == f"// dump of {kernel.symbol}\n"
        assert (artifact.directory / row.source).read_text() == "// contract\n"
        assert row.finish == FINISH and kernel.files == (row.file, row.simulated)


def test_blocks_are_bounded_by_instances_and_cores(made: Compiled) -> None:
    large, small = artifact_of(made), artifact_of(made, "ascend950-4")
    most: dict[str, int] = {}
    for entry, buckets in large.programs.items():
        for few, many, fewer_cores in zip(buckets[5].launches, buckets[24].launches, small.programs[entry][24].launches, strict=True):
            kernel = large.manifest.kernels[many.kernel]
            cores = 32 if kernel.lowered.mode == "mix" else 64
            assert few.grid[0] <= many.grid[0] <= cores and many.grid[1:] == (1, 1)
            assert fewer_cores.grid[0] == min(many.grid[0], cores // 8)
            most[kernel.lowered.mode] = max(most.get(kernel.lowered.mode, 0), many.grid[0])
    assert most["aiv"] > 4 and most["mix"] > 4, "some launch is larger than the small chip"


def test_every_variant_is_a_chip_with_its_own_cores() -> None:
    assert sorted(chip(name).cube_cores for name in TARGETS.values()) == [4, 8, 28, 32, 36]
    assert {f"ascend950-{chip(name).cube_cores}" for name in TARGETS.values()} - set(TARGETS) == {"ascend950-32"}


@pytest.mark.parametrize(("key", "value", "error", "words"), [
    ("kernels.0.lowered", None, FieldsRefused, "found no lowered, or no npu in the manifest"),
    ("npu", None, FieldsRefused, "found no lowered, or no npu in the manifest"),
    ("kernels.0.abi", "buffers-worker-workers", FieldsRefused, "expected none for abi"),
    ("kernels.0.lowered.mode", "simt", FieldsRefused, "kernels.0.lowered.mode"),
    ("kernels.0.lowered.finish", [], FieldsRefused, "kernels.0.lowered.finish"),
    ("kernels.0.lowered.object", "kernels/ascend950/none.o", FileMissing, "no entry kernels/ascend950/none.o"),
])  # fmt: skip
def test_a_manifest_that_contradicts_itself_is_refused(made: Compiled, tmp_path: Path, key: str, value: Any, error: Any, words: str) -> None:
    folder = _copied(made.directory / "ascend950", tmp_path)
    data = json.loads((folder / MANIFEST).read_text())
    at: Any = data
    *path, last = [int(w) if w.isdigit() else w for w in key.split(".")]
    for step in path:
        at = at[step]
    at[last] = value
    data["identity"] = manifest_identity(data)
    (folder / MANIFEST).write_bytes(canonical_json(data))
    with pytest.raises(error, match=words):
        load_artifact(folder, target="ascend950")


def test_a_launch_without_blocks_is_refused(made: Compiled, tmp_path: Path) -> None:
    from hashlib import sha256

    folder = _copied(made.directory / "ascend950", tmp_path)
    programs = json.loads((folder / "programs.json").read_text())
    programs["programs"]["step"]["5"]["launches"][0]["grid"] = None
    (folder / "programs.json").write_bytes(canonical_json(programs))
    data = json.loads((folder / MANIFEST).read_text())
    data["files"]["programs.json"] = sha256((folder / "programs.json").read_bytes()).hexdigest()
    data["identity"] = manifest_identity(data)
    (folder / MANIFEST).write_bytes(canonical_json(data))
    with pytest.raises(ProgramsInconsistent, match=r"launches\[0\].grid - found none"):
        load_artifact(folder, target="ascend950")


def _copied(folder: Path, to: Path) -> Path:
    import shutil

    return Path(shutil.copytree(folder, to / "copy"))


@pytest.mark.parametrize("command", [["compile", "-o", "a", "--target", "ascend950,cpu"], ["plan", "--target", "ascend950"]])
def test_without_the_package_one_sentence_and_exit_code_3(
    command: list[str], config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == toolchain.MODULE else found(name, *rest))
    monkeypatch.chdir(tmp_path)
    assert main([command[0], str(config), *command[1:]]) == 3
    assert capsys.readouterr().err == (
        "tapeout: [C301] the Ascend compiler is not installed: found no package ascendnpu-ir, needed ascendnpu-ir==1.2.0; "
        "pip install ascendnpu-ir==1.2.0 (x86-64 Linux)\n")
    assert not list(tmp_path.iterdir())


# -- real kernels


def sample(module: Any) -> Any:
    return SimpleNamespace(symbol=toolchain_name(module), text=module.operation.get_asm())


def toolchain_name(module: Any) -> str:
    return str(build.kernel_name(module))


def test_two_caches_in_two_processes_hold_the_same_bytes(tmp_path: Path) -> None:
    tools()
    kernels = [sample(make()) for make in (sample_kernels.scale, sample_kernels.product, sample_kernels.handed_over)]
    said: list[str] = []
    answers = [target_ascend.lowered_kernels(kernels, "ascend950", Cache(tmp_path / name), 2, said.append) for name in ("one", "two", "one")]
    assert [number for _, number in answers] == [3, 3, 0], "the third finds all in the first one's cache"
    assert answers[0][0] == answers[1][0] == answers[2][0]
    assert sorted(said) == sorted([k.symbol for k in kernels] * 3)
    product = answers[0][0]["product"]
    assert product["facts"]["mode"] == "aic" and product["facts"]["finish"][0] == "hivmc-a5"
    assert "/lib/" not in product["file"].replace(toolchain.LIBRARY_WORD, "")


def test_a_kernel_over_budget_names_itself_across_processes(tmp_path: Path) -> None:
    tools()
    with pytest.raises(ModuleRefused, match=r"kernel scale is not on the tile contract: a tile .* take smaller blocks \(--target ascend950\)$"):
        target_ascend.lowered_kernels([sample(sample_kernels.scale(rows=512, columns=512))], "ascend950", Cache(tmp_path), 1, lambda name: None)


def test_a_kernel_that_would_not_link_fails_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    tools()
    monkeypatch.setattr(link_check, "_symbols", lambda path: frozenset())
    with pytest.raises(target_ascend.KernelRefused, match=r"kernel product would not link: it calls .*mma_tile_bfloat16_t_to_float \(AIC\)"):
        target_ascend._lowered(sample_kernels.product().operation.get_asm(), "ascend950")


def test_a_broken_rule_fails_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    tools()
    monkeypatch.setattr(build.rules, "RULES", (lambda function: iter(["breaks a rule"]),))
    with pytest.raises(target_ascend.KernelRefused, match=r"^kernel product is not on the tile contract: breaks a rule \(--target ascend950\)$"):
        target_ascend._lowered(sample_kernels.product().operation.get_asm(), "ascend950")


def test_a_kernel_is_keyed_by_everything_that_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_ascend, "versions", lambda: VERSIONS)
    keys = {target_ascend._key("text", "ascend950"), target_ascend._key("text ", "ascend950"), target_ascend._key("text", "ascend950-4")}
    for versions in (target_ascend.Versions("1.2.1", "e" * 64), target_ascend.Versions("1.2.0", "f" * 64)):
        monkeypatch.setattr(target_ascend, "versions", lambda versions=versions: versions)
        keys.add(target_ascend._key("text", "ascend950"))
    assert len(keys) == 5


def test_builder_functions_that_lowering_calls_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """What becomes of a kernel hangs on the file that a function is written in, not on the one that gathers the names."""
    hashed: list[Any] = []
    monkeypatch.setattr(target_ascend, "_require_compiler", lambda: SimpleNamespace(version="1.2.0"))
    monkeypatch.setattr(target_ascend, "fingerprint", lambda package, others: hashed.extend(others) or "f" * 64)
    target_ascend.versions.__wrapped__()
    sources = [path.read_text() for path in Path(build.__file__).parent.glob("*.py")]
    called = {name for text in sources if "tile_builder as t" in text for name in re.findall(r"\bt\.(\w+)\(", text)}
    homes = {home for name in called if (home := getattr(tile_builder, name).__module__).startswith("tapeout.")}  # others have a version
    assert len(called) > 20 and homes <= {module.__name__ for module in hashed}


@pytest.mark.full
def test_the_real_configuration_twice_from_nothing(tmp_path: Path) -> None:
    """Every kernel lowers, links and fits; at most 300 s on two cores from an empty cache, 10 s from a full one; the same bytes from both."""
    tools()
    settings, seconds = Settings(target="ascend950"), []
    for output, cache in (("one", "cache1"), ("two", "cache2"), ("three", "cache2")):
        started = time.perf_counter()
        made = compile_path(REAL, tmp_path / output, settings, cache=tmp_path / cache)
        seconds.append(time.perf_counter() - started)
        assert made is not None and made.kernels_compiled == (0 if output == "three" else len(made.kernels)) and len(made.kernels) > 100
    assert max(seconds[:2]) <= 300 and seconds[2] <= 10, seconds
    first, second, third = ({p.relative_to(tmp_path / name): p.read_bytes() for p in sorted((tmp_path / name).rglob("*")) if p.is_file()}
                            for name in ("one", "two", "three"))
    assert first == second == third
