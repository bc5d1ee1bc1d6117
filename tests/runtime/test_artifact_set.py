"""Sets: one artifact a target in a folder, what is a member, and which one a device runs."""

from pathlib import Path
from typing import Any

import pytest

from tapeout.runtime.artifact import LIBRARY, load_artifact, write_artifact
from tapeout.runtime.artifact_kernels import GpuLevel
from tapeout.runtime.artifact_set import members, open_artifact, write_set
from tapeout.runtime.errors import ArtifactFolderMissing, ArtifactOccupied, TargetMissing
from tests.runtime import toy as model
from tests.runtime.test_cuda_device import gpu_data
from tests.runtime.toy import library


def whole_set(directory: Path) -> Path:
    sm100 = gpu_data("sm100", GpuLevel(chip="sm_100a", capability=(10, 0), cuda=(13, 0)))
    return write_set(directory, {"sm90": gpu_data(), "sm100": sm100, "cpu": (model.data(), {LIBRARY: library()})})


def test_a_set_holds_one_artifact_a_target(tmp_path: Path, toy: Path) -> None:
    directory = whole_set(tmp_path / "set")
    whole_set(directory)  # replaces it
    assert sorted(path.name for path in directory.iterdir()) == ["cpu", "sm100", "sm90"] == sorted(members(directory))
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
    assert members(toy) == {"cpu": toy}
    (directory / ".tapeout-sm90-a1b2c3d4.part" / "kernels").mkdir(parents=True)  # of a `tapeout finish` that was killed
    whole_set(directory)
    assert sorted(path.name for path in directory.iterdir()) == ["cpu", "sm100", "sm90"]
    (directory / "notes").mkdir()
    with pytest.raises(ArtifactOccupied):
        whole_set(directory)


def test_what_is_a_member_is_one_rule(tmp_path: Path) -> None:
    """A folder that is read as a set may be written over as one: names are targets, manifests theirs, and nothing else lies there."""
    directory = whole_set(tmp_path / "set")
    (directory / "sm90").rename(directory / "sm91")
    assert sorted(members(directory)) == ["cpu", "sm100"]
    with pytest.raises(ArtifactOccupied):
        whole_set(directory)
    (directory / "sm91").rename(directory / "sm103")
    assert sorted(members(directory)) == ["cpu", "sm100", "sm103"]
    with pytest.raises(TargetMissing, match="found sm90, expected sm103"):
        open_artifact(directory, "cuda", lambda: (10, 3))
    with pytest.raises(ArtifactOccupied):
        whole_set(directory)


def test_artifacts_that_happen_to_lie_in_one_folder_are_no_set(tmp_path: Path) -> None:
    """They are not replaced by an artifact that is written to their folder, and their names are no targets."""
    for name in ("small", "large"):
        write_artifact(tmp_path / "all" / name, *gpu_data())
    for write in (whole_set, lambda place: write_artifact(place, *gpu_data())):
        with pytest.raises(ArtifactOccupied):
            write(tmp_path / "all")
    with pytest.raises(ArtifactFolderMissing, match=r"found a folder without manifest.json, artifacts in it: large, small - give the folder"):
        open_artifact(tmp_path / "all")
    assert load_artifact(tmp_path / "all" / "small", target="sm90").target == "sm90"


@pytest.mark.parametrize(
    ("device", "here", "target"),
    [(None, (9, 0), "sm90"), (None, (10, 0), "sm100"), (None, (8, 0), "cpu"), (None, None, "cpu"), ("cpu", (9, 0), "cpu"),
     ("cuda", (10, 0), "sm100"), ("cuda", None, "sm100")],
)  # fmt: skip
def test_the_device_picks_the_artifact(tmp_path: Path, device: Any, here: tuple[int, int] | None, target: str) -> None:
    assert open_artifact(whole_set(tmp_path / "set"), device, lambda: here).target == target


def test_one_artifact_is_what_it_is(toy: Path, tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "artifact", *gpu_data())
    assert open_artifact(toy).target == "cpu" and open_artifact(folder).target == "sm90"
    with pytest.raises(TargetMissing, match="found cpu, expected sm90 or sm100"):
        open_artifact(toy, "cuda")
    with pytest.raises(TargetMissing, match=r"found sm90, expected cpu - compile for it: `tapeout compile --target cpu`"):
        open_artifact(folder, "cpu")
    for device in ("cpu", "cuda", None):
        with pytest.raises(ArtifactFolderMissing, match="found nothing"):
            open_artifact(folder / "none", device)  # type: ignore[arg-type]
