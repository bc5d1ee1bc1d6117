"""`tapeout finish`: makes object files of an Ascend artifact's lowered modules, where the closed back end of CANN is, and stores them in it.

Runs each kernel's own command (`Lowered.finish`) with the paths of this machine; what is written names none of them. The artifact is replaced
whole, with new hashes and identity, or stays as it was.
"""

import hashlib
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tapeout.codegen.ascend.facts import TARGETS
from tapeout.codegen.ascend.toolchain import BACKEND, LIBRARY_WORD, PACKAGE, VERSION, PackageMissing, Tools, find_tools
from tapeout.compiler.errors import FinishRefused, ToolchainMissing
from tapeout.runtime.artifact import (
    PROGRAMS,
    WEIGHTS,
    Artifact,
    ArtifactData,
    Programs,
    Weights,
    load_artifact,
    write_artifact,
)
from tapeout.runtime.artifact_kernels import Kernel, Lowered
from tapeout.runtime.artifact_set import members

TIMEOUT_S = 600
MODULE, OBJECT = "MODULE", "OBJECT"


@dataclass(frozen=True)
class Finished:
    """What was made: folder, identity of the new artifact, kernels, bytes of objects."""

    directory: Path
    identity: str
    kernels: int
    object_bytes: int


def finish(
    directory: Path, search: str, install: str | None, jobs: int = 2, progress: Callable[[int, int, str], None] = lambda done, total, name: None
) -> list[Finished]:
    """Finishes every Ascend artifact of a folder. `search` is a PATH, `install` $BISHENG_INSTALL_PATH.

    Raises `FinishRefused` (no Ascend artifact, a kernel that the back end refuses), `ToolchainMissing`, and what loading and writing raise.
    """
    found = {target: folder for target, folder in members(directory).items() if target in TARGETS}
    if not found:
        raise FinishRefused(f"{directory}: found artifacts for {', '.join(members(directory))}, expected one for {' or '.join(TARGETS)}; "
                            f"compile with --target {next(iter(TARGETS))}")
    tools = back_end(search, install)
    return [_finished(load_artifact(folder, target=target), tools, jobs, progress) for target, folder in found.items()]


def back_end(search: str, install: str | None) -> Tools:
    """The compiler's package with a back end; raises `ToolchainMissing` where either is absent."""
    try:
        tools = find_tools(search, install)
    except PackageMissing as error:
        raise ToolchainMissing(f"{error}; its device libraries are linked into every object") from None
    if tools.backend is None:
        raise ToolchainMissing(f"found no {BACKEND} in PATH or BISHENG_INSTALL_PATH; finishing an Ascend artifact needs the back end of CANN 9.2: "
                               "install CANN and source its environment script")
    return tools


def _finished(artifact: Artifact, tools: Tools, jobs: int, progress: Callable[[int, int, str], None]) -> Finished:
    rows = [kernel for kernel in artifact.manifest.kernels if kernel.lowered is not None]
    objects: dict[str, bytes] = {}
    with ThreadPoolExecutor(jobs) as pool:
        for kernel, content in zip(rows, pool.map(lambda k: _object(artifact.directory, k, tools), rows), strict=True):
            objects[kernel.symbol] = content
            progress(len(objects), len(rows), kernel.symbol)
    _write(artifact, objects, tools)
    identity = load_artifact(artifact.directory, target=artifact.target).manifest.identity
    return Finished(artifact.directory, identity, len(objects), sum(map(len, objects.values())))


def _object(directory: Path, kernel: Kernel, tools: Tools) -> bytes:
    """The object file of one kernel."""
    assert kernel.lowered is not None and tools.backend is not None, "both were looked for"
    with tempfile.TemporaryDirectory() as place:
        module, target = Path(place) / "kernel.mlir", Path(place) / "kernel.o"
        text = (directory / kernel.lowered.file).read_text(encoding="utf-8")
        module.write_text(text.replace(LIBRARY_WORD, f"{tools.folder}/lib/"), encoding="utf-8")
        try:
            done = subprocess.run(
                command(kernel, {MODULE: str(module), OBJECT: str(target), BACKEND: str(tools.backend)}),
                capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise FinishRefused(f"kernel {kernel.symbol}: {BACKEND} did not end within {TIMEOUT_S} s") from None
        except OSError as error:
            raise ToolchainMissing(f"{tools.backend} cannot be started ({error.strerror}); install CANN 9.2 again") from None
        if done.returncode or not target.is_file():
            said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[0][:200]
            ended = f"returned {done.returncode}" if done.returncode else "wrote no object"
            raise FinishRefused(f"kernel {kernel.symbol}: {BACKEND} {ended} and says: {said}; its module was lowered by {PACKAGE} {VERSION}")
        return target.read_bytes()


def command(kernel: Kernel, paths: Mapping[str, str]) -> list[str]:
    """A kernel's finishing command with `paths` in place of its words; raises `FinishRefused` for any program but the back end."""
    lowered: Lowered | None = kernel.lowered
    words = list(lowered.finish) if lowered is not None else []
    if words[:1] != [BACKEND] or not {MODULE, OBJECT} <= set(words):
        raise FinishRefused(f"kernel {kernel.symbol}: found the command {' '.join(words) or 'nothing'!r}, expected {BACKEND} {MODULE} … -o {OBJECT}")
    return [paths.get(word, word) for word in words]


def _write(artifact: Artifact, objects: Mapping[str, bytes], tools: Tools) -> None:
    assert tools.backend is not None, "it made the objects"
    manifest, folder = artifact.manifest, artifact.directory
    kernels, files = [], {path: (folder / path).read_bytes() for path in manifest.files}
    for kernel in manifest.kernels:
        if kernel.symbol in objects and kernel.lowered is not None:
            path = str(Path(kernel.lowered.file).with_suffix(".o"))
            files[path] = objects[kernel.symbol]
            kernel = kernel.model_copy(update={"lowered": kernel.lowered.model_copy(update={"object": path})})
        kernels.append(kernel)
    version = hashlib.sha256(tools.backend.read_bytes()).hexdigest()
    changed = manifest.model_copy(update={"kernels": tuple(kernels), "toolchain": {**manifest.toolchain, BACKEND: version}})
    data = ArtifactData(changed, Programs.model_validate_json(files.pop(PROGRAMS)), Weights.model_validate_json(files.pop(WEIGHTS)))
    write_artifact(folder, data, files)

