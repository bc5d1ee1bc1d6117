"""Launches that begin before those in front of them have ended: which do, in a line and in branches, and that results do not depend on it."""

import ctypes
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tapeout.runtime.artifact import load_artifact, manifest_identity, write_artifact
from tapeout.runtime.artifact_kernels import GpuLevel
from tapeout.runtime.device import Call
from tapeout.runtime.device.cuda import CudaDevice
from tapeout.runtime.errors import FieldsRefused
from tapeout.runtime.program import LoadedPrograms
from tapeout.runtime.weights import bind_weights
from tests.runtime import toy as model
from tests.runtime.fake_cuda import FakeDriver
from tests.runtime.test_cuda_device import AFTER, PROMPT, gpu_data, opened, rows_of
from tests.runtime.toy import toy_logits


def test_kernels_that_wait_begin_early_behind_kernels_only(tmp_path: Path, native: ctypes.CDLL) -> None:
    """Behind the copy of inputs, at the start of a graph, and where a kernel does not wait by itself, a launch begins when all in front ended."""
    driver = FakeDriver(native)
    device = opened(write_artifact(tmp_path / "a", *gpu_data(toy_add={"waits": True})), driver)
    given, _ = device.memory(64, "in", "inputs"), device.memory(64, "out", "results")
    add, shift = device.kernel("toy_add"), device.kernel("toy_shift")
    line = [Call(kernel, (given.address,), (i + 1, 2, 3)) for i, kernel in enumerate((add, add, shift, add))]
    table = device.table(line)
    assert driver.early == [2, 4] and driver.follows == [[], [0], [1], [2], [3], [4]]
    assert table.executable[2] == ("launch", ("toy_add", (2, 2, 3), 128, 1024, (given.address, 0, 0)))
    device.table(line, copies=False)
    assert driver.early == [1, 3]
    device.table(line, early=False)
    assert not driver.early
    device.table([replace(call, grid=(2112 + i // 2, 1, 1)) for i, call in enumerate([line[0]] * 4)], copies=False)
    assert driver.early == [1], "132 multiprocessors hold 2,112 blocks of 4 warps"
    branches = [Call(add, (given.address,), (i + 1, 1, 1), after) for i, after in enumerate(AFTER)]
    device.table(branches)
    copies_in, *nodes, copy_out = driver.follows
    assert copies_in == [] and nodes == [[0], [1], [0], [2, 3], [2, 3], [5], [5, 4]] and sorted(copy_out) == [6, 7]
    assert driver.early == [2, 4, 5, 6, 7], "not those behind the copy: 1, and 3, which waits for no call"
    device.table([replace(call, kernel=shift if i in (1, 4) else add) for i, call in enumerate(branches)], copies=False)
    assert driver.early == [3, 5, 6], "without copies 0 and 2 begin the graph; 1 and 4 do not wait by themselves"


def test_an_artifact_s_tokens_do_not_depend_on_early_launches(tmp_path: Path, native: ctypes.CDLL) -> None:
    waiting = gpu_data(**{kernel.symbol: {"waits": True} for kernel in model.data().manifest.kernels})
    for number, data in enumerate((gpu_data(), waiting)):
        driver = FakeDriver(native)
        artifact = load_artifact(write_artifact(tmp_path / str(number), *data), target="sm90")
        device = CudaDevice(artifact, module=driver)
        programs = LoadedPrograms(artifact, bind_weights(artifact.weights, model.tensors()), device, cache_blocks=1 + model.MAX_BLOCKS)
        programs.array("block_table")[0] = 1 + np.arange(model.MAX_BLOCKS)
        programs.forward(rows_of(0, 0, PROMPT, list(range(7))))
        np.testing.assert_array_equal(programs.array("logits")[:7], toy_logits(PROMPT))
        assert ("cuLaunchKernelEx" in driver.names()) == bool(number)
        device.close()


def test_only_chips_that_begin_launches_early_have_kernels_that_wait(tmp_path: Path) -> None:
    old = GpuLevel(chip="sm_86", capability=(8, 6), cuda=(13, 0))
    load_artifact(write_artifact(tmp_path / "a", *gpu_data(chip=old)), target="sm90")
    with pytest.raises(FieldsRefused, match=r"binary.waits: found true for sm_86, expected false below compute capability 9.0"):
        load_artifact(write_artifact(tmp_path / "b", *gpu_data(chip=old, toy_add={"waits": True})), target="sm90")


def test_binaries_of_artifacts_that_do_not_say_so_do_not_wait(tmp_path: Path, native: ctypes.CDLL) -> None:
    driver = FakeDriver(native)
    folder = write_artifact(tmp_path / "a", *gpu_data())
    manifest = json.loads((folder / "manifest.json").read_text())
    for kernel in manifest["kernels"]:
        del kernel["binary"]["waits"]
    manifest["identity"] = manifest_identity(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    device = opened(folder, driver)
    device.table([Call(device.kernel("toy_add"), (), (1, 1, 1))] * 3)
    assert not driver.early and driver.names().count("cuLaunchKernel") == 3
