"""A closed device says so, whichever it is: every call but `kernel` and `close` raises DeviceClosed, in the same words."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from tapeout.runtime.artifact import load_artifact, write_artifact
from tapeout.runtime.device import Device, Readable
from tapeout.runtime.device.ascend import AscendDevice
from tapeout.runtime.device.ascend_sim import AscendSimDevice
from tapeout.runtime.device.cpu import CpuDevice
from tapeout.runtime.device.cuda import CudaDevice
from tapeout.runtime.device_names import DEVICES
from tapeout.runtime.engine import Engine
from tapeout.runtime.errors import DeviceClosed
from tapeout.runtime.weights import bind_weights
from tests.runtime import toy as model
from tests.runtime.fake_acl import FakeAcl
from tests.runtime.fake_cuda import FakeDriver
from tests.runtime.test_ascend_device import npu_data
from tests.runtime.test_cuda_device import gpu_data
from tests.runtime.test_engine import GREEDY, prompt


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, tmp_path: Path, native: ctypes.CDLL) -> Device:
    """An open device of each kind, over a driver that stands in where this machine has none."""
    match request.param:
        case "cpu":
            return CpuDevice(load_artifact(model.write_toy(tmp_path / "a")).library, 2)
        case "cuda":
            return CudaDevice(load_artifact(write_artifact(tmp_path / "a", *gpu_data()), target="sm90"), module=FakeDriver(native))
    artifact = load_artifact(write_artifact(tmp_path / "a", *npu_data()), target="ascend950")
    return AscendDevice(artifact, library=FakeAcl(native)) if request.param == "ascend" else AscendSimDevice(artifact)


def test_a_closed_device_says_so(device: Device, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["device"]
    region, hidden, table = device.memory(64, "results", "results"), device.memory(64, "arena"), device.table([])
    device.run(table)
    device.check_open()
    device.close()
    device.close()
    calls = {
        "check_open": device.check_open, "memory": lambda: device.memory(1, "late"), "place": lambda: device.place(np.arange(3), "late"),
        "table": lambda: device.table([]),
        "run": lambda: device.run(table), "upload": lambda: device.upload(region, 1), "download": lambda: device.download(region, 1),
        "upload of what the host cannot see": lambda: device.upload(hidden, 1),
        "download of what the host cannot see": lambda: device.download(hidden, 1),
    }  # fmt: skip
    if isinstance(device, Readable):
        calls |= {"read": lambda: device.read(region.address, 1), "write": lambda: device.write(region.address, b"x")}
    for call in calls.values():
        with pytest.raises(DeviceClosed) as caught:
            call()
        assert str(caught.value) == f"[D114] the device is closed - device {name} - make another engine"


def test_a_request_of_a_closed_engine_meets_the_same_sentence(
    device: Device, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a loss of the step: nothing that is submitted later could ever run. It is refused before anything is written into memory that is free."""
    name = request.node.callspec.params["device"]
    monkeypatch.setattr("tapeout.runtime.engine.open_device", lambda *_, **__: device)
    artifact = load_artifact(tmp_path / "a", target={"cpu": "cpu", "cuda": "sm90"}.get(name, "ascend950"))
    engine = Engine(artifact, bind_weights(artifact.weights, model.tensors()))
    engine.submit(prompt(9), GREEDY, "r")
    engine.close()
    monkeypatch.setattr(engine.programs, "_hosted", {})
    for step in (engine.step, lambda: engine.forward([(0, [1])]), lambda: engine.draft([(0, 1)])):
        with pytest.raises(DeviceClosed) as caught:
            step()
        assert str(caught.value) == f"[D114] the device is closed - device {name} - make another engine"
