"""The CUDA device over a driver that is not there: what it asks, in which order, what travels in a graph, and what it refuses.

The toy model runs through it from prompt to drafts; kernels see device addresses only, so a copy that is missing shows in every logit.
"""

import ctypes
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tapeout.runtime.artifact import (
    ArtifactData,
    Programs,
    load_artifact,
    manifest_identity,
    write_artifact,
)
from tapeout.runtime.artifact_kernels import Binary, CpuLevel, GpuLevel
from tapeout.runtime.device import Call, Readable, cuda
from tapeout.runtime.device.cuda import CudaDevice, load_driver
from tapeout.runtime.device.memory import address, zeroed
from tapeout.runtime.engine import Engine, EngineOptions
from tapeout.runtime.errors import (
    BinaryRefused,
    ChipMismatch,
    DeviceClosed,
    DriverMissing,
    DriverOld,
    FieldsRefused,
    ManifestEdited,
    MemoryRefused,
    ProgramsInconsistent,
    SymbolMissing,
)
from tapeout.runtime.params import SamplingParams
from tapeout.runtime.program import Draw, LoadedPrograms, StepRows
from tapeout.runtime.reuse import CacheOptions
from tapeout.runtime.weights import bind_weights
from tests.runtime import toy as model
from tests.runtime.fake_cuda import FakeDriver
from tests.runtime.test_interrupts import RUNNING, survives
from tests.runtime.toy import toy_answer, toy_logits, toy_token

CHIP = GpuLevel(chip="sm_90a", capability=(9, 0), cuda=(13, 0))
BINARY = {"warps": 4, "shared_bytes": 1024, "registers": 32, "spills": 0, "local_bytes": 0, "occupancy": 0.5, "scratch": 0}
GRID = (7, 3, 1)


def gpu_data(target: str = "sm90", chip: GpuLevel = CHIP, **facts: dict[str, Any]) -> tuple[ArtifactData, dict[str, bytes]]:
    """The toy artifact as one of a GPU; `facts` replaces facts of a kernel's binary."""
    data = model.data()
    kernels = tuple(
        k.model_copy(
            update={
                "target": target,
                "abi": "buffers-scratch-profile",
                "binary": Binary(**{"file": f"kernels/{target}/{k.symbol}.cubin", "function": k.symbol, **BINARY, **facts.get(k.symbol, {})}),
            }
        )
        for k in data.manifest.kernels
    )
    levels = {"targets": (target,), "cpu": CpuLevel(level="any", features=()), "gpu": chip, "kernels": kernels}
    programs = {
        entry: {
            bucket: program.model_copy(update={"launches": tuple(launch.model_copy(update={"grid": GRID}) for launch in program.launches)})
            for bucket, program in buckets.items()
        }
        for entry, buckets in data.programs.programs.items()
    }
    made = ArtifactData(data.manifest.model_copy(update=levels), Programs(programs=programs), data.weights, {})
    return made, {f"kernels/{target}/{k.symbol}.cubin": f"cubin {k.symbol}".encode() for k in kernels}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_artifact(tmp_path_factory.mktemp("gpu") / "artifact", *gpu_data())


@pytest.fixture
def driver(native: ctypes.CDLL) -> FakeDriver:
    return FakeDriver(native)


@pytest.fixture
def programs(folder: Path, driver: FakeDriver) -> Iterator[LoadedPrograms]:
    artifact = load_artifact(folder, target="sm90")
    device = CudaDevice(artifact, module=driver)
    bound = bind_weights(artifact.weights, model.tensors())
    made = LoadedPrograms(artifact, bound, device, cache_blocks=1 + model.MAX_SEQUENCES * model.MAX_BLOCKS)
    table = made.array("block_table")
    table[:] = 1 + np.random.default_rng(3).permutation(table.size).reshape(table.shape)
    yield made
    device.close()


def opened(folder: Path, driver: FakeDriver) -> CudaDevice:
    return CudaDevice(load_artifact(folder, target="sm90"), module=driver)


# -- the toy model


PROMPT = [5, 9, 2, 30, 11, 7, 3]


def rows_of(slot: int, start: int, tokens: list[int], outputs: list[int]) -> StepRows:
    rows = StepRows()
    rows.add(slot, start, tokens)
    rows.outputs += outputs
    return rows


@pytest.mark.parametrize("cuts", [[7], [1] * 7, [4, 3], [2, 1, 4]])
def test_the_toy_model_runs(programs: LoadedPrograms, cuts: list[int]) -> None:
    expected, start = toy_logits(PROMPT), 0
    for count in cuts:
        programs.forward(rows_of(2, start, PROMPT[start : start + count], list(range(count))))
        found = programs.array("logits")[:count]
        np.testing.assert_array_equal(found, expected[start : start + count])
        start += count


def test_steps_sample_and_draft(programs: LoadedPrograms) -> None:
    rows = rows_of(1, 0, PROMPT, [len(PROMPT) - 1])
    tokens, start = list(PROMPT), 0
    for _ in range(9):
        rows = rows_of(1, start, tokens[start:], [len(tokens) - start - 1])
        rows.draws.append(Draw(0.7, -1, 1.0, 99, 1, len(tokens)))
        programs.step(rows, drafting=True)
        start = len(tokens)
        tokens.append(toy_token(tokens, 0.7, 99))
        assert int(programs.array("sampled")[0]) == tokens[-1]
        assert programs.array("drafts")[0].any()
    before = programs.array("drafts")[0].tolist()
    programs.draft([tokens[-1]], [Draw(0.0, -1, 1.0, 0, 1, len(tokens) - 1)])
    assert programs.array("drafts")[0].tolist() == before, "the draft alone starts from the golden token that the host wrote"


def test_logits_of_a_step_come_on_request(programs: LoadedPrograms) -> None:
    rows = rows_of(0, 0, PROMPT, [6])
    rows.draws.append(Draw(0.0, -1, 1.0, 0, 0, 7))
    programs.array("logits")[:] = -1
    programs.step(rows, drafting=False)
    assert (programs.array("logits")[0] == -1).all()
    programs.step(rows, drafting=False, logits=True)
    np.testing.assert_array_equal(programs.array("logits")[0], toy_logits(PROMPT)[-1])


def test_values_of_the_device_stay_there(programs: LoadedPrograms) -> None:
    assert programs.has("streams")
    with pytest.raises(ProgramsInconsistent, match="a value of the device"):
        programs.array("streams")


def test_one_graph_for_each_tuple_of_programs_and_nothing_is_read_for_a_launch(programs: LoadedPrograms, driver: FakeDriver) -> None:
    for _ in range(3):
        programs.forward(rows_of(0, 0, PROMPT, [6]))
    assert driver.names().count("cuGraphInstantiate") == 1
    driver.log.clear()
    programs.forward(rows_of(0, 0, PROMPT, [6]))
    assert driver.names() == [
        "cuCtxSetCurrent", "cuGraphLaunch", "cuStreamSynchronize", "cuCtxSetCurrent", "cuMemcpyDtoH"]  # the last: logits of one row  # fmt: skip
    assert driver.log[-1][1][2] == 4 * model.VOCABULARY
    programs.forward(rows_of(1, 0, PROMPT[:3], [2]))
    assert driver.names().count("cuGraphInstantiate") == 1, "the smaller bucket is another graph"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_engine_runs_on_it(folder: Path, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, asynchronous: bool) -> None:
    """Requests of several lengths at once, through the engine and, where it is asynchronous, from its own thread."""
    monkeypatch.setattr(cuda, "load_driver", lambda module=None: cuda.Driver(driver))
    artifact = load_artifact(folder, target="sm90")
    engine = Engine(artifact, bind_weights(artifact.weights, model.tensors()), EngineOptions(asynchronous=asynchronous, chunk_tokens=5))
    prompts = [PROMPT, PROMPT[:1], PROMPT * 2, [4, 8]]
    names = [engine.submit(prompt, SamplingParams(temperature=0, max_tokens=6)) for prompt in prompts]
    while engine.has_work:
        engine.step()
    for name, prompt in zip(names, prompts, strict=True):
        assert list(engine.take(name).outputs[0].token_ids) == toy_answer(prompt, 6)
    engine.close()
    assert not driver.memory


@pytest.mark.parametrize("asynchronous", [False, True])
def test_windows_are_restored_and_shared(folder: Path, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, asynchronous: bool) -> None:
    """A prompt that goes on from a restored window, one whose three answers share it: tokens of the plain run, and fewer rows."""
    monkeypatch.setattr(cuda, "load_driver", lambda module=None: cuda.Driver(driver))
    artifact = load_artifact(folder, target="sm90")
    options = EngineOptions(asynchronous=asynchronous, cache=CacheOptions())
    engine = Engine(artifact, bind_weights(artifact.weights, model.tensors()), options)
    counts = engine.statistics.counts
    for prompt, answers in ((PROMPT * 3, 1), ([*PROMPT, *PROMPT, 8], 1), ([*PROMPT, *PROMPT, 8, 4, 9, 2], 3)):
        before, name = counts.prompt_rows, engine.submit(prompt, SamplingParams(temperature=0, max_tokens=6, n=answers))
        while engine.has_work:
            engine.step()
        result = engine.take(name)
        assert [list(answer.token_ids) for answer in result.outputs] == [toy_answer(prompt, 6)] * answers
    assert 0 < result.cache.hit_tokens == 18 + 2 - (counts.prompt_rows - before), "further answers run the last row of the prompt only"
    engine.close()


def test_memory_is_read_and_written_on_the_stream_of_the_kernels(folder: Path, driver: FakeDriver) -> None:
    device = opened(folder, driver)
    region = device.memory(64, "a state")
    device.write(region.address + 3, b"\x07tapeout")
    assert driver.names()[-2:] == ["cuMemcpyHtoDAsync", "cuStreamSynchronize"], "through before the next run"
    assert isinstance(device, Readable) and device.read(region.address, 12) + device.read(region.address, 0) == b"\0\0\0\x07tapeout\0"


# -- graphs, arguments, memory


def test_a_graph_copies_in_launches_in_order_and_copies_out(folder: Path, driver: FakeDriver) -> None:
    device = opened(folder, driver)
    given, read, inner = device.memory(64, "in", "inputs"), device.memory(128, "out", "results"), device.memory(0, "none")
    calls = [Call(device.kernel("toy_add"), (given.address, given.address + 16, read.address, given.address + 32), (2, 1, 1)),
             Call(device.kernel("toy_shift"), (inner.address, read.address + 64, given.address + 32), (5, 6, 7))]  # fmt: skip
    driver.log.clear()
    table = device.table(calls)
    assert driver.names() == [
        "cuCtxSetCurrent", "cuStreamBeginCapture", "cuMemcpyHtoDAsync", "cuLaunchKernel", "cuLaunchKernel", "cuMemcpyDtoHAsync",
        "cuStreamEndCapture", "cuGraphInstantiate", "cuGraphDestroy"]  # fmt: skip
    copy_in, add, shift, copy_out = table.executable
    assert given.host is not None and read.host is not None
    assert copy_in == ("copy", (given.address, address(given.host), 64)) and copy_out == ("copy", (address(read.host), read.address, 128))
    assert add == ("launch", ("toy_add", (2, 1, 1), 128, 1024, (*calls[0].buffers, 0, 0)))
    assert shift[1][1] == (5, 6, 7) and table.count == 2
    bare = device.table(calls, copies=False)
    assert [kind for kind, _ in bare.executable] == ["launch", "launch"]
    given.host[:36].view(np.int32)[:] = [1, 2, 3, 4, 10, 20, 30, 40, 2]
    device.run(table)
    assert read.host[:16].view(np.int32).tolist() == [11, 22, 0, 0]


AFTER = [None, (1,), (), None, (), (1,), (2, 3)]
"""Two programs: the second begins at call 3, behind calls 1 and 2."""


def test_calls_follow_what_they_wait_for_and_nothing_else(tmp_path: Path, driver: FakeDriver) -> None:
    folder = write_artifact(tmp_path / "a", *gpu_data(toy_shift={"scratch": 96}))
    device = opened(folder, driver)
    given, _ = device.memory(64, "in", "inputs"), device.memory(64, "out", "results")
    add, shift = device.kernel("toy_add"), device.kernel("toy_shift")
    calls = [Call(add, (given.address,), (i + 1, 1, 1), after) for i, after in enumerate(AFTER)]
    device.table(calls)
    copies_in, *nodes, copy_out = driver.follows
    assert copies_in == [] and nodes == [[0], [1], [0], [2, 3], [2, 3], [5], [5, 4]] and sorted(copy_out) == [6, 7]
    device.table([replace(call, kernel=shift if i in (1, 2, 5) else add) for i, call in enumerate(calls)], copies=False)
    assert driver.follows == [[], [0], [1], [2], [2], [4, 2], [4, 3]], "those with scratch memory run one after the other"
    device.table([replace(call, after=None) for call in calls])
    assert driver.follows == [[], [0], [1], [2], [3], [4], [5], [6], [7]]


def shifting(device: CudaDevice) -> tuple[Any, Any, Any]:
    """Inputs, results, and a table that writes inputs + 1, in turn, as results."""
    inputs, results = device.memory(8, "numbers", "inputs"), device.memory(4, "sums", "results")
    count = device.memory(4, "count", "device")
    device.write(count.address, np.int32(1).tobytes())
    table = device.table([Call(device.kernel("toy_shift"), (inputs.address, results.address, count.address), (1, 1, 1))], copies=False)
    assert inputs.host is not None and results.host is not None
    return inputs.host.view(np.int32), results.host.view(np.int32), table


def test_inputs_are_those_of_the_start_and_results_those_of_the_table(folder: Path, driver: FakeDriver) -> None:
    device = opened(folder, driver)
    inputs, results, table = shifting(device)
    started = []
    for number in (10, 20):
        inputs[0] = number
        started.append(device.start(table))
    inputs[0], results[0] = 99, -1
    assert driver.done < len(driver.work), "nobody has waited yet"
    device.finish(started[0])
    assert results[0] == 11
    device.release(started[0])
    inputs[0] = 30
    started.append(device.start(table))
    inputs[0] = 99
    for one, found in (*zip(started[1:], (21, 31), strict=True), *zip(started[1:], (21, 31), strict=True)):
        device.finish(one)  # again as often as one likes
        assert results[0] == found
    device.close()
    assert not driver.memory and driver.names().count("cuEventCreate") == driver.names().count("cuEventDestroy") == 2


def test_a_closed_device_starts_nothing(folder: Path, driver: FakeDriver) -> None:
    device = opened(folder, driver)
    _, _, table = shifting(device)
    started = device.start(table)
    device.close()
    for call in (lambda: device.start(table), lambda: device.finish(started)):
        with pytest.raises(DeviceClosed):
            call()


@pytest.mark.parametrize("drafts", [False, True])
def test_an_interrupt_at_any_line_of_the_queue(folder: Path, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, drafts: bool) -> None:
    monkeypatch.setattr(cuda, "load_driver", lambda module=None: cuda.Driver(driver))
    artifact = load_artifact(folder, target="sm90")
    engine = Engine(artifact, bind_weights(artifact.weights, model.tensors()), EngineOptions(drafts=drafts))
    survives(engine, ("device/cuda", *RUNNING), 1000)
    assert not driver.memory


def test_memory_is_zero_whatever_it_was(folder: Path, driver: FakeDriver) -> None:
    device = opened(folder, driver)
    for use in ("device", "inputs", "results", "fetched"):
        region = device.memory(48, "x", use)  # type: ignore[arg-type]
        assert not driver.memory[region.address].any() and (region.host is None) == (use == "device")
        assert region.host is None or not region.host.any()


def test_weights_are_copied_and_tables_are_mapped(folder: Path, driver: FakeDriver) -> None:
    device, weight = opened(folder, driver), np.arange(24, dtype=np.int32)[:20].reshape(4, 5).T
    start = device.place(weight, "w")
    assert driver.memory[start].view(np.int32).tolist() == weight.reshape(-1).tolist()
    table = zeroed(128, "test")
    table[:] = np.arange(len(table))
    assert device.place(table, "t", by_rows=True) == address(table)
    assert driver.log[-2][0] == "cuMemHostRegister" and driver.log[-2][1][2] == driver.CU_MEMHOSTREGISTER_DEVICEMAP
    table.flags.writeable = False
    device.place(table, "t", by_rows=True)
    assert driver.log[-2][1][2] == driver.CU_MEMHOSTREGISTER_DEVICEMAP | driver.CU_MEMHOSTREGISTER_READ_ONLY
    odd = table[1:]
    assert device.place(odd, "odd", by_rows=True) % 16 == 0, "kernels rely on the alignment"
    driver.maps = False
    copy = device.place(table, "t", by_rows=True)
    assert copy != address(table) and driver.memory[copy].tolist() == table.tolist()
    elsewhere = CudaDevice(load_artifact(folder, target="sm90"), tables="device", module=driver)
    assert driver.memory[elsewhere.place(table, "t", by_rows=True)].tolist() == table.tolist()
    assert driver.log[-2][0] == "cuMemcpyHtoDAsync"


def test_scratch_covers_every_instance_of_the_largest_launch(tmp_path: Path, driver: FakeDriver) -> None:
    folder = write_artifact(tmp_path / "a", *gpu_data(toy_shift={"scratch": 96}))
    device = opened(folder, driver)
    region = device.memory(64, "x")
    add, shift = device.kernel("toy_add"), device.kernel("toy_shift")
    grids = [(add, (9, 9, 9)), (shift, (2, 3, 4)), (shift, (1, 1, 5))]
    table = device.table([Call(kernel, (region.address,), grid) for kernel, grid in grids])
    values = [what[4] for kind, what in table.executable if kind == "launch"]
    assert values[0] == (region.address, 0, 0) and values[1] == values[2] == (region.address, values[1][1], 0)
    assert len(driver.memory[values[1][1]]) == 96 * 24
    larger = device.table([Call(shift, (region.address,), (30, 1, 1))]).executable[-1][1][4][1]
    assert len(driver.memory[larger]) == 96 * 30 and values[1][1] in driver.memory, "the first graph still uses the old one"


def test_kernels_with_much_shared_memory_ask_for_it(tmp_path: Path, driver: FakeDriver) -> None:
    opened(write_artifact(tmp_path / "a", *gpu_data(toy_add={"shared_bytes": 49152}, toy_shift={"shared_bytes": 49153})), driver)
    asked = [what for name, what in driver.log if name == "cuFuncSetAttribute"]
    assert [(what[0], what[2]) for what in asked] == [("toy_shift", 49153)]


def test_time_comes_from_events(folder: Path, driver: FakeDriver) -> None:
    device = opened(folder, driver)
    table = device.table([])
    driver.log.clear()
    assert device.seconds(table, 3) == pytest.approx(0.002)
    names = driver.names()
    assert names[1:4] == ["cuEventCreate", "cuEventCreate", "cuEventRecord"] and names.count("cuGraphLaunch") == 3
    assert names[7:10] == ["cuEventRecord", "cuEventSynchronize", "cuEventElapsedTime"]


def test_closing_gives_everything_back_once(folder: Path, driver: FakeDriver) -> None:
    device = opened(folder, driver)
    device.memory(10, "a", "inputs")
    device.place(np.arange(16, dtype=np.int64), "t", by_rows=True)
    device.table([])
    driver.log.clear()
    device.close()
    device.close()
    names = driver.names()
    assert not driver.memory and names[0] == "cuGraphExecDestroy" and names[-2:] == ["cuStreamDestroy", "cuDevicePrimaryCtxRelease"]
    assert names.count("cuModuleUnload") == len(model.KERNELS) and names.count("cuMemHostUnregister") <= 1


# -- refusals


def test_no_driver_is_exit_code_3(driver: FakeDriver) -> None:
    driver.devices = 0
    with pytest.raises(DriverMissing, match=r"\[D105\].*cuInit.*found CUDA_ERROR_NO_DEVICE") as refused:
        load_driver(driver)
    assert refused.value.exit_code == 3

    class Absent(FakeDriver):
        def _cuInit(self, flags: int) -> Any:
            raise RuntimeError('Failed to dlopen "libcuda.so.1"\nmore')

    with pytest.raises(DriverMissing, match=r"found Failed to dlopen .libcuda.so.1., expected libcuda.so.1") as refused:
        load_driver(Absent())
    assert "\n" not in str(refused.value)


def test_this_machine_has_no_driver_or_has_one() -> None:
    """With cuda-bindings and without a GPU: one sentence. On a GPU host: a driver."""
    try:
        load_driver()
    except DriverMissing as error:
        assert "\n" not in str(error)


def test_another_chip_is_refused(folder: Path, native: ctypes.CDLL) -> None:
    with pytest.raises(ChipMismatch, match=r"found Pretend GPU, compute capability 10.0, expected sm_90a, compute capability 9.0"):
        opened(folder, FakeDriver(native, capability=(10, 0)))


def test_an_old_driver_is_refused(folder: Path, native: ctypes.CDLL) -> None:
    with pytest.raises(DriverOld, match=r"found a driver for CUDA 12.9, expected CUDA 13.0 or later"):
        opened(folder, FakeDriver(native, version=12090))
    opened(folder, FakeDriver(native, version=13020))


def test_binaries_are_checked(tmp_path: Path, folder: Path, driver: FakeDriver) -> None:
    data, files = gpu_data()
    files["kernels/sm90/toy_add.cubin"] = b"text"
    with pytest.raises(BinaryRefused, match=r"toy_add\.cubin - found CUDA_ERROR_INVALID_IMAGE"):
        opened(write_artifact(tmp_path / "a", data, files), driver)
    big = write_artifact(tmp_path / "b", *gpu_data(toy_add={"shared_bytes": 232449}))
    with pytest.raises(BinaryRefused, match="found 232449 bytes of shared memory, expected at most 232448"):
        opened(big, driver)
    driver.threads = 96
    with pytest.raises(BinaryRefused, match="found 4 warps, expected at most 3, as compiled"):
        opened(folder, driver)
    driver.threads, driver.unknown = 1024, {"toy_draft"}
    with pytest.raises(SymbolMissing, match="no entry toy_draft"):
        opened(folder, driver)
    driver.unknown = set()
    device = opened(folder, driver)
    with pytest.raises(SymbolMissing, match="no kernel toy_nothing"):
        device.kernel("toy_nothing")
    with pytest.raises(BinaryRefused, match=r"\(1, 65536, 1\) instances"):
        device.table([Call(0, (), (1, 65536, 1))])
    assert driver.capturing is None, "a failed table leaves no capture behind"


def test_memory_that_is_not_there_is_refused(folder: Path, driver: FakeDriver) -> None:
    device = opened(folder, driver)
    driver.limit = 1000
    with pytest.raises(MemoryRefused, match=r"state x - found a need of 1001 bytes, CUDA_ERROR_OUT_OF_MEMORY, expected at most the GPU's 1000 free"):
        device.memory(1001, "state x")


def test_edited_manifests_are_refused(folder: Path, tmp_path: Path) -> None:
    for number, (change, kind, words) in enumerate(EDITS):
        copy = tmp_path / str(number)
        write_artifact(copy, *gpu_data())
        manifest = json.loads((copy / "manifest.json").read_text())
        change(manifest)
        if kind is not ManifestEdited:
            manifest["identity"] = manifest_identity(manifest)
        (copy / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(kind, match=words):
            load_artifact(copy, target="sm90")


def _set(path: str, value: Any) -> Any:
    def change(manifest: dict[str, Any]) -> None:
        *keys, last = path.split(".")
        at: Any = manifest
        for key in keys:
            at = at[int(key)] if key.isdigit() else at[key]
        at[last] = value

    return change


EDITS = [
    (_set("kernels.0.binary.warps", 8), ManifestEdited, "A106"),
    (_set("gpu.capability", [10, 0]), ManifestEdited, "A106"),
    (_set("kernels.0.binary", None), FieldsRefused, r"kernels.step.binary: found no binary"),
    (_set("gpu", None), FieldsRefused, r"kernels.step.binary: found no binary, or no gpu"),
    (_set("kernels.0.abi", "buffers-worker-workers"), FieldsRefused, "expected none for abi"),
    (_set("kernels.0.binary.occupancy", 1.5), FieldsRefused, "occupancy"),
    (_set("kernels.0.binary.waits", 1), FieldsRefused, "waits"),
]


def test_a_launch_that_waits_for_one_in_front_of_the_program_is_refused(tmp_path: Path) -> None:
    data, files = gpu_data()
    step = data.programs.programs["encoder"]
    bucket = next(iter(step))
    first, *rest = step[bucket].launches
    wrong = step[bucket].model_copy(update={"launches": (first.model_copy(update={"after": (1,)}), *rest)})
    programs = Programs(programs={**data.programs.programs, "encoder": {**step, bucket: wrong}})
    with pytest.raises(ProgramsInconsistent, match=r"launches\[0\].after - found \[1\], expected distances to the 0 launches in front"):
        load_artifact(write_artifact(tmp_path / "a", ArtifactData(data.manifest, programs, data.weights, {}), files), target="sm90")


def test_a_launch_without_a_grid_is_refused(tmp_path: Path) -> None:
    data, files = gpu_data()
    bare = ArtifactData(data.manifest, model.programs(), data.weights, {})
    with pytest.raises(ProgramsInconsistent, match=r"launches\[0\].grid - found none"):
        load_artifact(write_artifact(tmp_path / "a", bare, files), target="sm90")
