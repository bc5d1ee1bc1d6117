"""The Ascend device over a CANN library that is not there: what it asks, what an argument block holds, what travels, and what it refuses.

The toy model runs through it from prompt to drafts; kernels see device addresses only, so a copy that is missing shows in every logit.
"""

import ctypes
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tapeout.runtime.artifact import ArtifactData, Programs, load_artifact, write_artifact
from tapeout.runtime.artifact_kernels import CpuLevel, Lowered, NpuLevel
from tapeout.runtime.artifact_set import members, open_artifact
from tapeout.runtime.device import ascend, open_device
from tapeout.runtime.device.ascend import AscendDevice, argument_block, load_acl
from tapeout.runtime.device.ascend_sim import AscendSimDevice
from tapeout.runtime.engine import Engine, EngineOptions
from tapeout.runtime.errors import (
    ChipMismatch,
    MemoryRefused,
    NpuFailed,
    NpuMissing,
    ObjectMissing,
    OptionRefused,
    SymbolMissing,
    TargetMissing,
)
from tapeout.runtime.params import SamplingParams
from tapeout.runtime.weights import bind_weights
from tests.runtime import toy as model
from tests.runtime.fake_acl import FakeAcl
from tests.runtime.toy import toy_answer

CHIP = NpuLevel(chip="Ascend950PR_9589", cube_cores=32, vector_cores=64)
WORDS = ("ffts", "lock", "workspace", "buffers", "grid_x", "grid_y", "grid_z")
MODES = ("aiv", "aic", "mix")


def lowered(symbol: str, number: int, has_object: bool) -> Lowered:
    mode = MODES[number % 3]
    functions = (symbol,) if mode != "mix" else (f"{symbol}_mix_aic", f"{symbol}_mix_aiv")
    facts: dict[str, Any] = {"memory": {}, "pipes": {}, "pipe_flags": 0, "core_flags": 0, "barriers": 0, "vector_functions": 0}
    return Lowered(
        file=f"kernels/ascend950/{symbol}.mlir", simulated=f"kernels/ascend950/{symbol}.dump.mlir", source=f"source/ascend950/{symbol}.mlir",
        object=f"kernels/ascend950/{symbol}.o" if has_object else None, mode=mode, functions=functions, arguments=WORDS, flags=(),
        finish=("hivmc-a5", "MODULE", "OBJECT"), instance={}, step={}, **facts,
    )  # fmt: skip


def npu_data(has_object: bool = True) -> tuple[ArtifactData, dict[str, bytes]]:
    """The toy artifact as one of an NPU."""
    data = model.data()
    kernels = tuple(
        k.model_copy(update={"target": "ascend950", "abi": "lock-workspace-buffers-grid", "lowered": lowered(k.symbol, number, has_object)})
        for number, k in enumerate(data.manifest.kernels)
    )
    levels = {"targets": ("ascend950",), "cpu": CpuLevel(level="any", features=()), "npu": CHIP, "kernels": kernels}
    programs = {
        entry: {
            bucket: program.model_copy(update={"launches": tuple(one.model_copy(update={"grid": (3, 1, 1)}) for one in program.launches)})
            for bucket, program in buckets.items()
        }
        for entry, buckets in data.programs.programs.items()
    }
    files = {path: f"object {k.symbol}".encode() for k in kernels for path in (*k.files, k.lowered.source)}  # type: ignore[union-attr]
    return ArtifactData(data.manifest.model_copy(update=levels), Programs(programs=programs), data.weights, {}), files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_artifact(tmp_path_factory.mktemp("npu") / "artifact", *npu_data())


@pytest.fixture
def acl(native: ctypes.CDLL) -> Iterator[FakeAcl]:
    yield FakeAcl(native)


def opened(folder: Path, acl: FakeAcl) -> AscendDevice:
    return AscendDevice(load_artifact(folder, target="ascend950"), library=acl)


PROMPT = [5, 9, 2, 30, 11, 7, 3]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_engine_runs_on_it(folder: Path, acl: FakeAcl, monkeypatch: pytest.MonkeyPatch, asynchronous: bool) -> None:
    monkeypatch.setattr(ascend, "load_acl", lambda library=None: ascend.Acl(acl))
    artifact = load_artifact(folder, target="ascend950")
    engine = Engine(artifact, bind_weights(artifact.weights, model.tensors()), EngineOptions(asynchronous=asynchronous, chunk_tokens=5))
    prompts = [PROMPT, PROMPT[:1], PROMPT * 2, [4, 8]]
    names = [engine.submit(prompt, SamplingParams(temperature=0, max_tokens=6)) for prompt in prompts]
    while engine.has_work:
        engine.step()
    for name, prompt in zip(names, prompts, strict=True):
        assert list(engine.take(name).outputs[0].token_ids) == toy_answer(prompt, 6)
    engine.close()
    engine.close()
    assert not acl.memory, "all memory was given back"
    assert {blocks for _, blocks, _ in acl.launched} == {3}
    assert set(acl.magics) == {0x41415246, 0x43554245, None}, "vector core, AI core, and none for mixed kernels"


def test_an_argument_block_is_laid_out_as_the_kernel_reads_it() -> None:
    found = argument_block(WORDS, [0x1000, 0x2000], 7, 0xF00)
    assert struct.unpack("<5Q3i4x", found) == (0xF00, 0, 0, 0x1000, 0x2000, 7, 1, 1)
    assert struct.unpack("<3Q3i4x", argument_block(WORDS[1:], [0x1000], 2, 0xF00)) == (0, 0, 0x1000, 2, 1, 1)


def test_order_of_calls_of_a_run(folder: Path, acl: FakeAcl) -> None:
    device = opened(folder, acl)
    inputs, results = device.memory(64, "inputs", "inputs"), device.memory(64, "results", "results")
    hidden = device.memory(64, "arena")
    assert hidden.host is None and (acl.memory[hidden.address] == 0).all(), "zeroed"
    assert inputs.host is not None and results.host is not None
    inputs.host[:] = 9
    acl.log.clear()
    device.run(device.table([]))
    copies = [arguments for name, arguments in acl.log if name == "aclrtMemcpy"]
    assert [arguments[4] for arguments in copies] == [1, 2] and (acl.memory[inputs.address] == 9).all()
    device.close()


def test_what_is_missing_is_said(folder: Path, tmp_path: Path, acl: FakeAcl) -> None:
    artifact = load_artifact(folder, target="ascend950")
    with pytest.raises(NpuMissing, match="give --device ascend-sim") as caught:
        open_device(artifact)
    assert caught.value.exit_code == 3
    with pytest.raises(NpuMissing, match="found none, expected one"):
        load_acl(FakeAcl(devices=0))
    acl.refuses = {"aclInit"}
    with pytest.raises(NpuMissing, match="found error 507899"):
        load_acl(acl)
    other = load_artifact(write_artifact(tmp_path / "lowered", *npu_data(has_object=False)), target="ascend950")
    with pytest.raises(ObjectMissing, match="tapeout finish"):
        AscendDevice(other, library=acl)


def test_refusals(folder: Path, acl: FakeAcl) -> None:
    with pytest.raises(ChipMismatch, match="Ascend910B"):
        opened(folder, FakeAcl(name=b"Ascend910B1"))
    device = opened(folder, acl)
    with pytest.raises(SymbolMissing, match="no kernel nothing"):
        device.kernel("nothing")
    acl.limit = 100
    with pytest.raises(MemoryRefused, match="arena"):
        device.memory(101, "arena")
    acl.refuses = {"aclrtSynchronizeStream"}
    with pytest.raises(NpuFailed, match="error 507899"):
        device.run(device.table([]))
    acl.refuses = set()
    device.close()
    acl.refuses = {"aclrtBinaryLoadFromFile"}
    with pytest.raises(ObjectMissing, match="an object that this NPU loads"):
        opened(folder, acl)
    acl.refuses = {"aclrtBinaryGetFunction"}
    with pytest.raises(SymbolMissing, match="the kernel that the manifest names"):
        opened(folder, acl)


def test_which_device_takes_the_artifact(folder: Path) -> None:
    assert list(members(folder)) == ["ascend950"]
    assert open_artifact(folder, "ascend").target == open_artifact(folder, "ascend-sim").target == open_artifact(folder).target == "ascend950"
    device = open_device(open_artifact(folder), simulated=True)
    assert isinstance(device, AscendSimDevice)
    device.close()
    for name in ("cpu", "cuda"):
        with pytest.raises(TargetMissing, match="found ascend950"):
            open_artifact(folder, name)  # type: ignore[arg-type]
    with pytest.raises(OptionRefused, match=r"\[Q105\] .* - device - found 'gpu', expected cpu, cuda, ascend, ascend-sim"):
        open_artifact(folder, "gpu")  # type: ignore[arg-type]
