"""`tapeout finish` with a pretend back end: the command that runs, what lands in the artifact, and each way in which it can be refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tapeout.codegen.ascend.toolchain import find_tools
from tapeout.compiler.api import compile_path
from tapeout.compiler.commands import main
from tapeout.compiler.errors import FinishRefused
from tapeout.compiler.finish import command, finish
from tapeout.compiler.settings import Settings
from tapeout.models.deepseek_v41.config import shipped_config
from tapeout.runtime.artifact import MANIFEST, load_artifact
from tapeout.runtime.artifact_set import members
from tests.codegen.ascend.harness import tools
from tests.compiler.test_target_ascend import FINISH, SETTINGS, pretending

BACK_END = """#!/bin/sh
# the object is the module, without its place, behind the options
for word in "$@"; do [ "$before" = "-o" ] && object="$word"; before="$word"; done
echo "$2" > "$object"
sed -e 's| /.*/lib/| LIB/|' "$1" >> "$object"
"""


def back_end(folder: Path, text: str = BACK_END) -> str:
    """A folder that holds a back end, as a PATH."""
    folder.mkdir(exist_ok=True)
    (folder / "hivmc-a5").write_text(text)
    (folder / "hivmc-a5").chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _compiled(tmp_path_factory.mktemp("compiled"), "ascend950")


@pytest.fixture
def artifact(compiled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(compiled, tmp_path / "artifact"))


def _compiled(folder: Path, target: str) -> Path:
    (folder / "config.json").write_text(json.dumps(shipped_config("tiny").canonical()))
    with pretending():
        compile_path(folder / "config.json", folder / "artifact", Settings(target=target, **{**SETTINGS, "buckets": (24,)}), cache=folder / "cache")
    return folder / "artifact"


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_objects_hashes_and_identity(artifact: Path, tmp_path: Path) -> None:
    tools()
    before, old = files(artifact), load_artifact(artifact, target="ascend950").manifest
    seen: list[tuple[int, int, str]] = []
    (made,) = finish(artifact, back_end(tmp_path / "bin"), None, progress=lambda *facts: seen.append(facts))
    after = load_artifact(artifact, target="ascend950")
    assert [facts[:2] for facts in seen] == [(i + 1, len(old.kernels)) for i in range(len(old.kernels))]
    for kernel in after.manifest.kernels:
        assert kernel.lowered is not None and kernel.lowered.object == f"kernels/ascend950/{kernel.symbol}.o"
        content = (artifact / kernel.lowered.object).read_text()
        assert content == f"--target=Ascend950PR_9589\n// ascend950 {kernel.symbol} LIB/meta_op.aiv.c310.bc\n"
        assert kernel.lowered.object in kernel.files and kernel.lowered.object in after.manifest.files
    assert (made.identity, made.kernels) == (after.manifest.identity, len(old.kernels)) and made.identity != old.identity
    assert len(after.manifest.toolchain["hivmc-a5"]) == 64
    now = files(artifact)
    assert {path: now[path] for path in before if path != MANIFEST} == {path: before[path] for path in before if path != MANIFEST}
    assert not [path for path, content in now.items() if str(tmp_path).encode() in content or str(find_tools().folder).encode() in content]


def test_finishing_twice_changes_nothing(artifact: Path, tmp_path: Path) -> None:
    tools()
    path = back_end(tmp_path / "bin")
    finish(artifact, path, None)
    once = files(artifact)
    finish(artifact, path, None, jobs=1)
    assert files(artifact) == once


def test_a_set_is_finished_where_it_is_ascend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tools()
    artifact = _compiled(tmp_path, "ascend950,ascend950-28")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("BISHENG_INSTALL_PATH", back_end(tmp_path / "bin").split(":")[0])
    assert main(["finish", str(artifact), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [Path(row["artifact"]).name for row in rows] == ["ascend950", "ascend950-28"]
    assert all(row["kernels"] > 50 and row["object_bytes"] > 0 for row in rows)
    assert set(members(artifact)) == {"ascend950", "ascend950-28"}


@pytest.mark.parametrize(("text", "words"), [
    ("#!/bin/sh\necho 'out of registers in @f' >&2\nexit 3\n", "hivmc-a5 returned 3 and says: out of registers in @f"),
    ("#!/bin/sh\nexit 0\n", "hivmc-a5 wrote no object and says: nothing"),
])
def test_what_the_back_end_refuses_is_a_sentence_and_changes_nothing(artifact: Path, tmp_path: Path, text: str, words: str) -> None:
    tools()
    before = files(artifact)
    with pytest.raises(FinishRefused, match=rf"^\[C108\] kernel \w+: {words}"):
        finish(artifact, back_end(tmp_path / "bin", text), None)
    assert files(artifact) == before


def test_without_a_back_end_one_sentence_and_exit_code_3(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tools()
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.delenv("BISHENG_INSTALL_PATH", raising=False)
    assert main(["finish", str(artifact)]) == 3
    assert capsys.readouterr().err == (
        "tapeout: [C301] found no hivmc-a5 in PATH or BISHENG_INSTALL_PATH; finishing an Ascend artifact needs the back end of CANN 9.2: "
        "install CANN and source its environment script\n")


def test_an_artifact_of_another_target_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / MANIFEST).write_text('{"targets": ["cpu"]}')
    assert main(["finish", str(tmp_path)]) == 1
    assert f"[C108] {tmp_path}: found artifacts for cpu, expected one for ascend950" in capsys.readouterr().err


def test_only_the_back_end_is_ever_run(artifact: Path) -> None:
    kernel = load_artifact(artifact, target="ascend950").manifest.kernels[0]
    assert kernel.lowered is not None
    assert command(kernel, {"MODULE": "m", "OBJECT": "o", "hivmc-a5": "/b/hivmc-a5"}) == ["/b/hivmc-a5", "m", *FINISH[2:4], "o"]
    for words in (("sh", "MODULE", "OBJECT"), ("hivmc-a5", "-o", "OBJECT"), ("hivmc-a5", "MODULE")):
        other: Any = kernel.model_copy(update={"lowered": kernel.lowered.model_copy(update={"finish": words})})
        with pytest.raises(FinishRefused, match="expected hivmc-a5 MODULE"):
            command(other, {})


def test_modules_are_given_with_the_libraries_of_this_machine(artifact: Path, tmp_path: Path) -> None:
    tools()
    kept = tmp_path / "kept"
    finish(artifact, back_end(tmp_path / "bin", BACK_END + f'cp "$1" {kept}\n'), None, jobs=1)
    assert f"{find_tools().folder}/lib/meta_op.aiv.c310.bc" in kept.read_text() and "${ASCENDNPUIR}" not in kept.read_text()
