"""Several artifacts of one compile: a folder that holds one artifact for each target, named after it; and which of them a device runs.

A set is written whole or not at all. What is inside each folder is `artifact.py`'s business.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from tapeout.runtime.artifact import MANIFEST, Artifact, ArtifactData, load_artifact, parsed_json, write_artifact
from tapeout.runtime.artifact_place import member_folders, replacing
from tapeout.runtime.device_names import CHIPS, DEVICES, NPU, DeviceName
from tapeout.runtime.errors import ArtifactFolderMissing, OptionRefused, TapeoutError, TargetMissing, shown

Capability = Callable[[], tuple[int, int] | None]


def write_set(directory: Path | str, parts: Mapping[str, tuple[ArtifactData, Mapping[str, bytes]]]) -> Path:
    """Writes one artifact a target into `directory`/target; a set that is there already is replaced. Raises ArtifactOccupied."""
    with replacing(directory) as aside:
        for target, (data, files) in parts.items():
            write_artifact(aside / target, data, files)
    return Path(directory)


def members(directory: Path | str) -> dict[str, Path]:
    """Artifact folders by target: those of a set, or the one that `directory` itself is. Raises ArtifactFolderMissing."""
    directory = Path(directory)
    if not directory.is_dir():
        raise ArtifactFolderMissing(str(directory), "a file" if directory.exists() else "nothing")
    if (directory / MANIFEST).exists():
        return {_target(directory): directory}
    found = member_folders(directory)
    if not found:
        inside = sorted(path.name for path in directory.iterdir() if (path / MANIFEST).is_file())
        raise ArtifactFolderMissing(str(directory), f"a folder without {MANIFEST}" + (f", artifacts in it: {', '.join(inside)}" if inside else ""))
    return found


def _target(directory: Path) -> str:
    """What a manifest says of its target; what is wrong with it is said when it is loaded."""
    try:
        targets = parsed_json((directory / MANIFEST).read_bytes())["targets"]
        return str(targets[0])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return "cpu"


def open_artifact(directory: Path | str, device: DeviceName | None = None, capability: Capability | None = None) -> Artifact:
    """Loads the artifact of a folder that fits `device`; without one, a GPU's where this machine has that GPU, else the CPU's.

    Raises ArtifactError, or OptionRefused for a device that is none of DEVICES. `capability` replaces what the GPU driver says.
    """
    if device is not None and device not in DEVICES:
        raise OptionRefused("device", shown(device), ", ".join(DEVICES))
    found = members(directory)
    target = _chosen(found, device, capability or _present)
    if target is None:
        gpus = " or ".join(CHIPS)
        wanted, example = {"cpu": ("cpu", "cpu"), "cuda": (gpus, "sm90"), None: (f"cpu or {gpus} or {NPU}", "cpu")}.get(device, (NPU, NPU))
        remedy = f"compile for it: `tapeout compile --target {example}`, or give another --device"
        raise TargetMissing(str(directory), ", ".join(found), wanted, remedy=remedy)
    return load_artifact(found[target], target=target)


def _chosen(found: Mapping[str, Path], device: DeviceName | None, capability: Capability) -> str | None:
    """The target to run; of several GPUs' the one of this machine, else the first, which the device then refuses with what it found."""
    gpus = [target for target in found if target in CHIPS]
    here = capability() if len(found) > 1 and gpus and device != "cpu" else None
    fitting = [target for target in gpus if CHIPS[target] == here]
    if device == "cuda":
        return next(iter([*fitting, *gpus]), None)
    processors, npus = [t for t in found if t == "cpu"], [t for t in found if t.startswith(NPU)]
    if device is not None:
        return next(iter(processors if device == "cpu" else npus), None)
    return next(iter([*fitting, *processors, *gpus, *npus]), None)


def _present() -> tuple[int, int] | None:
    """The compute capability of this machine's first GPU; None without GPU or driver."""
    from tapeout.runtime.device.cuda import capability, load_driver

    try:
        return capability(load_driver())
    except TapeoutError:
        return None
