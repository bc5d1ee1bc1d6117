"""Writing and reading artifacts: same data, same bytes; whole or not at all; quick (docs/runtime.md, artifact)."""

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tapeout.runtime.artifact import (
    LIBRARY,
    ArtifactData,
    Program,
    Programs,
    Ref,
    Value,
    canonical_json,
    config_fingerprint,
    load_artifact,
    manifest_identity,
    write_artifact,
)
from tapeout.runtime.artifact_place import replacing
from tapeout.runtime.errors import ArtifactFolderMissing, ArtifactOccupied, ArtifactUnwritable
from tests.runtime import toy as model
from tests.runtime.toy import write_toy


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def test_what_is_written_is_read_back(toy: Path) -> None:
    artifact, data = load_artifact(toy), model.data()
    assert artifact.programs == {
        name: {int(bucket): program for bucket, program in buckets.items()} for name, buckets in data.programs.programs.items()
    }
    assert artifact.weights == data.weights.operands
    sealed = artifact.manifest
    assert sealed.model_copy(update={"files": {}, "identity": ""}) == data.manifest
    assert set(sealed.files) == {"programs.json", "weights.json", "tuning.json", LIBRARY, "source/cpu/toy.mlir"}
    assert artifact.library.read_bytes() == model.library()
    assert (artifact.buckets, artifact.draft_block) == ((4, 16, 32), 3)
    assert [artifact.bound(name, 16) for name in ("rows", "kept", "outputs", "sequences", "drafts")] == [16, 16, 16, 5, 15]
    assert artifact.bound("drafts", 4) == 12


def test_same_data_gives_same_bytes(tmp_path: Path, toy: Path) -> None:
    assert contents(write_toy(tmp_path / "other name")) == contents(toy)


def test_files_are_canonical_json(toy: Path) -> None:
    for name in ("manifest.json", "programs.json", "weights.json", "tuning.json"):
        text = (toy / name).read_bytes()
        assert text == canonical_json(json.loads(text)), name
    manifest = json.loads((toy / "manifest.json").read_bytes())
    assert manifest["schema"] == 1 and manifest["identity"] == manifest_identity(manifest)
    assert manifest["model"]["fingerprint"] == config_fingerprint(manifest["model"]["config"])
    assert manifest["model"]["config"]["nothing"] is None
    assert [state["length"] for state in manifest["states"]] == [None, 1]


def test_an_artifact_is_replaced_and_nothing_stays_beside_it(tmp_path: Path) -> None:
    place = tmp_path / "artifact"
    place.mkdir()
    write_toy(place)
    write_toy(place)
    before = contents(place)
    write_toy(place)
    assert contents(place) == before
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]
    load_artifact(place)


def test_something_else_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "site" / "src").mkdir(parents=True)
    (tmp_path / "site" / "manifest.json").write_text("{}")
    (tmp_path / "site" / "src" / "thesis.txt").write_text("mine")
    write_toy(tmp_path / "added to")
    (tmp_path / "added to" / "notes.txt").write_text("mine")
    for name in ("folder", "file", "site", "added to"):
        with pytest.raises(ArtifactOccupied, match=r"\[A112\].*empty this one"):
            write_toy(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["added to", "file", "folder", "site"]
    assert (tmp_path / "site" / "src" / "thesis.txt").read_text() == (tmp_path / "added to" / "notes.txt").read_text() == "mine"


def test_a_link_is_followed_and_a_place_below_a_file_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("behind")
    write_toy(tmp_path / "link")
    write_toy(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "behind" / "manifest.json").is_file()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "circle").symlink_to("circle")
    for place in (tmp_path / "file" / "artifact", Path("/proc/artifact"), tmp_path / "circle", tmp_path / "circle" / "artifact"):
        with pytest.raises(ArtifactUnwritable, match=r"\[A113\]"):
            write_toy(place)


def test_the_folder_that_we_are_in_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever works in it would be left in a folder that is gone, an empty one or an earlier artifact."""
    write_toy(tmp_path / "a")
    (tmp_path / "empty" / "below").mkdir(parents=True)
    for inside, place in (("empty/below", "."), ("empty/below", ".."), ("a", "."), ("a/kernels", "..")):
        monkeypatch.chdir(tmp_path / inside)
        with pytest.raises(ArtifactUnwritable, match=rf"\[A113\] .* - {place} - found the folder that the command runs in, or one above it,"):
            write_toy(Path(place))
    write_toy(Path("../../beside"))
    assert Path("../../beside/manifest.json").is_file() and Path.cwd().is_dir()


NO_PATHS = [("a\0b", "embedded null byte"), ("\ud800", "surrogates not allowed"), ("x" * 5000, "File name too long")]


@pytest.mark.parametrize(("name", "found"), NO_PATHS, ids=["null", "surrogate", "long"])
def test_what_is_no_path_is_refused(name: str, found: str) -> None:
    with pytest.raises(ArtifactUnwritable, match=rf"\[A113\] .* - found .*{found}, expected the path of a folder"):
        write_toy(name)  # type: ignore[arg-type]


def test_writers_of_one_folder_take_turns(tmp_path: Path) -> None:
    """Eight at once: every one succeeds, one whole artifact stays, and nothing beside it."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: write_toy(tmp_path / "artifact"), range(8)))
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]
    load_artifact(tmp_path / "artifact")


KILLED = """
import os, signal, sys
from tapeout.runtime.artifact_place import replacing
with replacing(sys.argv[1]) as aside:
    (aside / "kernels").mkdir()
    (aside / "kernels" / "half").write_bytes(b"x")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_writer_left_goes_with_the_next_one(tmp_path: Path) -> None:
    for name in ("artifact", "artifact-2", "arte.act"):
        assert subprocess.run([sys.executable, "-c", KILLED, tmp_path / name], check=False).returncode == -signal.SIGKILL
    left = sorted(path.name for path in tmp_path.iterdir())
    assert len(left) == 3 and all(name.startswith(".tapeout-art") and name.endswith(".part") for name in left)
    theirs = [tmp_path / ".tapeout-artifact-notes.part", tmp_path / ".tapeout-artifact-a1b2c3d4.part.txt", tmp_path / ".artifact.a1b2c3d4"]
    for path in theirs:
        path.mkdir()
    (tmp_path / ".tapeout-artifact-abcdefgh.part").symlink_to(theirs[0])
    write_toy(tmp_path / "artifact")
    others = [name for name in left if name.startswith((".tapeout-artifact-2-", ".tapeout-arte.act-"))]
    found = {path.name for path in tmp_path.iterdir()}
    assert len(others) == 2 and found == {"artifact", *others, *(path.name for path in theirs), ".tapeout-artifact-abcdefgh.part"}
    load_artifact(tmp_path / "artifact")


def test_a_writer_that_lives_keeps_what_it_has_aside(tmp_path: Path) -> None:
    started, inside = threading.Event(), threading.Event()
    toy = write_toy(tmp_path / "toys" / "toy")

    def slow() -> None:
        with replacing(tmp_path / "artifact") as aside:
            (aside / "half").write_bytes(b"x")
            started.set()
            inside.wait(20)
            (aside / "half").unlink()  # raises where another writer has removed it
            shutil.copytree(toy, aside, dirs_exist_ok=True)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(slow)
        assert started.wait(20)
        second = pool.submit(write_toy, tmp_path / "artifact")
        inside.set()
        first.result(), second.result()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["artifact", "toys"]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    broken = ArtifactData(model.manifest(), model.programs(), model.weights(), {"bad": float("nan")})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_artifact(tmp_path / "artifact", broken, {LIBRARY: b""})
    assert list(tmp_path.iterdir()) == []


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ArtifactFolderMissing) as refused:
        load_artifact(tmp_path / "none")
    assert str(refused.value) == (
        f"[A101] there is no artifact folder - {tmp_path / 'none'} - found nothing - give the folder that `tapeout compile` wrote"
    )


def test_a_large_artifact_loads_quickly(tmp_path: Path) -> None:
    """Five programs, three buckets, 400 launches of six buffers each, in less than 150 ms (the best of three)."""
    directory = write_artifact(tmp_path / "large", large(), {LIBRARY: model.library()})
    times = []
    for _ in range(3):
        start = time.process_time()
        artifact = load_artifact(directory)
        times.append(time.process_time() - start)
    assert sum(len(p.launches) for buckets in artifact.programs.values() for p in buckets.values()) == 5 * 3 * 400
    assert min(times) < 0.150, times


def large() -> ArtifactData:
    refs: list[Ref] = [("arena", 64), ("arena", 128), ("weight", "embed", "values"), ("state", "entries", "values"), ("extent", "rows")]
    programs = {}
    for entry, buckets in model.programs().programs.items():
        io: Ref = ("io", buckets["4"].results[0].name, "values")
        launches = tuple(model.launch("toy_add", *refs, io) for _ in range(400))
        larger = {"launches": launches, "arena_bytes": 4096}
        programs[entry] = {bucket: program.model_copy(update=larger) for bucket, program in buckets.items()}
    return ArtifactData(model.manifest(), Programs(programs=programs), model.weights())


def test_schema_classes_refuse_wrong_types() -> None:
    for wrong in ({"name": 1}, {"dtype": "f31"}, {"shape": (1.5,)}, {"shape": ("row",)}, {"extra": 1}):
        with pytest.raises(ValueError, match="validation error"):
            Value(**{"name": "x", "dtype": "f32", "shape": (1,), **wrong})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="validation error"):
        Program(arena_bytes=-1, inputs=(), results=(), launches=())
