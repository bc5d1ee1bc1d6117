"""The CUDA device: cubins, memory and graphs through the driver API of cuda-bindings, and nothing else of CUDA.

A table is one CUDA graph: the input block goes up, the kernels run in order or in branches, the result block comes back; kernels that wait for
those in front by themselves begin early (early.py). Launch sizes are the artifact's upper bounds, so nothing is read back in between. A table
that is started behind another one has its copies around the graph, from and to host memory of its own. Chip, driver and every kernel are checked
when the device is opened.
"""

import ctypes
import importlib
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tapeout.runtime.artifact import MANIFEST, Artifact
from tapeout.runtime.artifact_kernels import Binary, GpuLevel
from tapeout.runtime.device import Call, Region, Use
from tapeout.runtime.device.branches import Branching, is_branching
from tapeout.runtime.device.early import fits, launch_early
from tapeout.runtime.device.host_side import host_side, locked_bytes, number_of
from tapeout.runtime.device.memory import address
from tapeout.runtime.errors import (
    BinaryRefused,
    ChipMismatch,
    DeviceClosed,
    DeviceFailed,
    DriverMissing,
    DriverOld,
    MemoryRefused,
    SymbolMissing,
)

WARP = 32  # threads
ALIGNMENT = 16  # bytes; kernels rely on it
STATIC_SHARED_BYTES = 48 << 10  # a block may ask for more only after its kernel says so
MOST_INSTANCES = (2**31 - 1, 2**16 - 1, 2**16 - 1)


class Driver:
    """The driver API: `driver("cuInit", 0)` returns what the call yields, or raises DeviceFailed."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, name: str, *arguments: Any) -> Any:
        error, *values = getattr(self.module, name)(*arguments)
        if error != self.module.CUresult.CUDA_SUCCESS:
            raise DeviceFailed(name, getattr(error, "name", str(error)), "CUDA_SUCCESS")
        return values[0] if len(values) == 1 else tuple(values)

    def attribute(self, name: str, device: Any) -> int:
        """A device attribute by the end of its name."""
        kind = getattr(self.module.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self("cuDeviceGetAttribute", kind, device))


def load_driver(module: Any = None) -> Driver:
    """The driver, started. Raises DriverMissing. `module` stands in for cuda-bindings."""
    if module is None:
        try:
            module = importlib.import_module("cuda.bindings.driver")
        except ImportError:
            raise DriverMissing("cuda-bindings", "no such package", "cuda-bindings 13 or later") from None
    driver = Driver(module)
    try:
        driver("cuInit", 0)
        if not driver("cuDeviceGetCount"):
            raise DriverMissing("GPUs", "none", "one")
    except DeviceFailed as error:
        raise DriverMissing("cuInit", error.found, "a driver that starts") from None
    except (OSError, RuntimeError) as error:
        raise DriverMissing("CUDA driver", str(error).splitlines()[0].rstrip("."), "libcuda.so.1") from None
    return driver


def capability(driver: Driver, ordinal: int = 0) -> tuple[int, int]:
    """Compute capability of a GPU."""
    device = driver("cuDeviceGet", ordinal)
    return driver.attribute("COMPUTE_CAPABILITY_MAJOR", device), driver.attribute("COMPUTE_CAPABILITY_MINOR", device)


def description(driver: Driver, ordinal: int = 0) -> tuple[str, tuple[int, int], tuple[int, int]]:
    """Name and compute capability of a GPU, and the CUDA version that its driver is for."""
    raw, number = driver("cuDeviceGetName", 128, driver("cuDeviceGet", ordinal)), int(driver("cuDriverGetVersion"))
    name = raw.split(b"\0")[0].decode(errors="replace").strip() if isinstance(raw, bytes) else str(raw)
    return name, capability(driver, ordinal), (number // 1000, number % 1000 // 10)


@dataclass(frozen=True)
class GraphTable:
    """A graph ready to be launched, and the calls it holds."""

    executable: Any
    calls: tuple[Call, ...]

    @property
    def count(self) -> int:
        return len(self.calls)


class Started(NamedTuple):
    """What a started table has of its own: page-locked host memory for each region of inputs and of results, and what says that it is through."""

    inputs: list[NDArray[np.uint8]]
    results: list[NDArray[np.uint8]]
    event: Any


@dataclass(frozen=True)
class Loaded:
    """A kernel on the GPU."""

    function: Any
    binary: Binary


class CudaDevice:
    """One GPU with an artifact's kernels. Runs take turns; each returns when the GPU is through."""

    def __init__(self, artifact: Artifact, *, tables: Literal["host", "device"] = "host", ordinal: int = 0, module: Any = None) -> None:
        self._place, self._tables_on = artifact.directory / MANIFEST, tables
        self._driver = driver = load_driver(module)
        self._device, self._ordinal = driver("cuDeviceGet", ordinal), ordinal
        self._check(artifact.manifest.gpu)
        self._processors = driver.attribute("MULTIPROCESSOR_COUNT", self._device)
        self._undo: list[tuple[Any, ...]] = []
        self._end = weakref.finalize(self, _undo_all, driver, self._undo)
        self._context = driver("cuDevicePrimaryCtxRetain", self._device)
        self._undo.append(("cuDevicePrimaryCtxRelease", self._device))
        driver("cuCtxSetCurrent", self._context)
        self._stream = driver("cuStreamCreate", driver.module.CUstream_flags.CU_STREAM_NON_BLOCKING.value)
        self._undo.append(("cuStreamDestroy", self._stream))
        self._lock = threading.Lock()
        self._copies: dict[str, list[tuple[Region, int]]] = {"inputs": [], "results": []}
        self._free: list[Started] = []
        self._scratch, self._scratch_bytes = 0, 0
        self._kernels: list[Loaded] = []
        self._numbers: dict[str, int] = {}
        for kernel in artifact.manifest.kernels:
            if kernel.binary is not None:
                self._numbers[kernel.symbol] = len(self._kernels)
                self._kernels.append(self._load(artifact.directory, kernel.symbol, kernel.binary))

    # -- what fits

    def _check(self, level: GpuLevel | None) -> None:
        """This chip exactly, and a driver that is new enough."""
        if level is None:
            raise ChipMismatch(f"{self._place}: gpu", "no chip", "the chip of its binaries")
        name, (major, minor), cuda = description(self._driver, self._ordinal)
        if (major, minor) != level.capability:
            wanted = f"{level.chip}, compute capability {level.capability[0]}.{level.capability[1]}"
            raise ChipMismatch(f"{self._place}: gpu", f"{name}, compute capability {major}.{minor}", wanted)
        if cuda < level.cuda:
            raise DriverOld(
                f"{self._place}: gpu.cuda", f"a driver for CUDA {cuda[0]}.{cuda[1]}", f"CUDA {level.cuda[0]}.{level.cuda[1]} or later"
            )

    def _load(self, folder: Path, symbol: str, binary: Binary) -> Loaded:
        """Loads one cubin and prepares its entry. Raises BinaryRefused or SymbolMissing."""
        driver, attributes, where = self._driver, self._driver.module.CUfunction_attribute, str(folder / binary.file)
        try:
            module = driver("cuModuleLoadData", (folder / binary.file).read_bytes())
        except DeviceFailed as error:
            raise BinaryRefused(where, error.found, f"a binary that this GPU loads, for {symbol}") from None
        self._undo.append(("cuModuleUnload", module))
        try:
            function = driver("cuModuleGetFunction", module, binary.function.encode())
        except DeviceFailed:
            raise SymbolMissing(where, f"no entry {binary.function}", "the entry that the manifest names") from None
        most = driver.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", self._device)
        if binary.shared_bytes > most:
            raise BinaryRefused(f"{self._place}: {symbol}", f"{binary.shared_bytes} bytes of shared memory", f"at most {most}")
        if binary.shared_bytes > STATIC_SHARED_BYTES:
            driver("cuFuncSetAttribute", function, attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, binary.shared_bytes)
        threads = int(driver("cuFuncGetAttribute", attributes.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function))
        if binary.warps * WARP > threads:
            raise BinaryRefused(f"{self._place}: {symbol}", f"{binary.warps} warps", f"at most {threads // WARP}, as compiled")
        return Loaded(function, binary)

    def kernel(self, symbol: str) -> int:
        """The number of a kernel. Raises SymbolMissing."""
        return number_of(symbol, self._numbers, self._place)

    # -- memory

    def memory(self, size: int, what: str, use: Use = "device") -> Region:
        """Zeroed memory of the GPU; with a page-locked twin on the host for inputs and results, a plain one where it is fetched."""
        self._enter()
        start = self._allocated(size, what)
        self._driver("cuMemsetD8Async", start, 0, max(size, 1), self._stream)
        self._driver("cuStreamSynchronize", self._stream)
        region = Region(start, host_side(size, what, use, self._pinned))
        if use in self._copies:
            self._copies[use].append((region, size))
        return region

    def _allocated(self, size: int, what: str) -> int:
        try:
            start = int(self._driver("cuMemAlloc", max(size, 1)))
        except DeviceFailed as error:
            free, _ = self._driver("cuMemGetInfo")
            raise MemoryRefused(what, f"a need of {size} bytes, {error.found}", f"at most the GPU's {free} free bytes") from None
        self._undo.append(("cuMemFree", start))
        return start

    def _pinned(self, size: int, what: str, flags: int = 0) -> NDArray[np.uint8]:
        """Zeroed page-locked host memory."""
        try:
            start = int(self._driver("cuMemHostAlloc", max(size, 1), flags))
        except DeviceFailed as error:
            raise MemoryRefused(
                what, f"a need of {size} bytes of page-locked host memory, {error.found}", "memory the system can lock"
            ) from None
        self._undo.append(("cuMemFreeHost", start))
        return locked_bytes(start, size)

    def place(self, array: NDArray[Any], what: str, *, by_rows: bool = False) -> int:
        """A copy on the GPU; a table read by rows stays in host memory, mapped, unless tables belong on the device."""
        self._enter()
        array = np.ascontiguousarray(array)
        if by_rows and self._tables_on == "host":
            return self._mapped(array, what)
        start = self._allocated(array.nbytes, what)
        self._copy_up(start, array, array.nbytes)
        return start

    def _copy_up(self, start: int, array: NDArray[Any], size: int) -> None:
        """On the stream of the kernels: a plain copy may return before its last bytes have arrived."""
        if size:
            self._driver("cuMemcpyHtoDAsync", start, address(array), size, self._stream)
            self._driver("cuStreamSynchronize", self._stream)

    def _mapped(self, array: NDArray[Any], what: str) -> int:
        """The address under which the GPU reads host memory: the array's own pages, or a page-locked copy where they cannot be mapped."""
        flags = self._driver.module
        mapped, read_only = flags.CU_MEMHOSTREGISTER_DEVICEMAP, flags.CU_MEMHOSTREGISTER_READ_ONLY
        start = address(array)
        try:
            if start % ALIGNMENT:
                raise DeviceFailed("address", start % ALIGNMENT, f"a multiple of {ALIGNMENT}")
            self._driver("cuMemHostRegister", start, array.nbytes, mapped if array.flags.writeable else mapped | read_only)
        except DeviceFailed:
            copy = self._pinned(array.nbytes, what, flags.CU_MEMHOSTALLOC_DEVICEMAP)
            copy[: array.nbytes] = array.reshape(-1).view(np.uint8)
            return int(self._driver("cuMemHostGetDevicePointer", address(copy), 0))
        self._undo.append(("cuMemHostUnregister", start, array))  # the last keeps the pages alive
        return int(self._driver("cuMemHostGetDevicePointer", start, 0))

    def upload(self, region: Region, size: int) -> None:
        """Copies the first bytes of the host's twin to the GPU."""
        self._enter()
        if region.host is not None:
            self._copy_up(region.address, region.host, size)

    def download(self, region: Region, size: int) -> None:
        """Copies the first bytes of a region to the host's twin."""
        self._enter()
        if region.host is not None and size:
            self._driver("cuMemcpyDtoH", address(region.host), region.address, size)

    def read(self, address: int, size: int) -> bytes:
        """Bytes of a region, as the last run that is through left them."""
        self._enter()
        found = np.empty(size, np.uint8)
        if size:
            self._driver("cuMemcpyDtoH", found.ctypes.data, address, size)
        return found.tobytes()

    def write(self, address: int, data: bytes) -> None:
        """Bytes into a region, in front of the next run."""
        self._enter()
        self._copy_up(address, np.frombuffer(data, np.uint8), len(data))

    # -- launches

    def table(self, calls: Sequence[Call], *, copies: bool = True, early: bool = True) -> GraphTable:
        """Calls as one graph, between the copies of inputs and results (left out without `copies`, to time kernels alone). Without `early`
        every launch begins when those in front have ended, whatever its kernel can."""
        self._enter()
        self._reserve_scratch(calls)
        driver = self._driver
        mode = driver.module.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        driver("cuStreamBeginCapture", self._stream, mode)
        try:
            for region, size in self._copies["inputs"] if copies else ():
                driver("cuMemcpyHtoDAsync", region.address, address(_host(region)), size, self._stream)
            self._capture(calls, early)
            for region, size in self._copies["results"] if copies else ():
                driver("cuMemcpyDtoHAsync", address(_host(region)), region.address, size, self._stream)
        finally:
            graph = driver("cuStreamEndCapture", self._stream)
        executable = driver("cuGraphInstantiate", graph, 0)
        driver("cuGraphDestroy", graph)
        self._undo.append(("cuGraphExecDestroy", executable))
        return GraphTable(executable, tuple(calls))

    def _capture(self, calls: Sequence[Call], early: bool) -> None:
        """Calls in one line, or in branches where they say what they wait for; those that share the scratch memory stay in line."""
        if not is_branching(calls):
            for number, call in enumerate(calls):
                self._launch(call, early=early and number > 0)
            return
        order, scratch = Branching(self._driver, self._stream), None
        for number, call in enumerate(calls):
            uses = bool(self._kernels[call.kernel].binary.scratch)
            behind_calls = order.follow(call.after, scratch if uses else None)
            self._launch(call, early=early and behind_calls)
            order.took()
            scratch = number if uses else scratch
        order.join()

    def _launch(self, call: Call, *, early: bool = False) -> None:
        """One kernel: its buffers in order, then the two scratch pointers. `early`: there are other kernels in front of it, and nothing else."""
        loaded = self._kernels[call.kernel]
        grid = _grid(call)
        if any(n > most for n, most in zip(grid, MOST_INSTANCES, strict=True)):
            raise BinaryRefused(f"{self._place}: {loaded.binary.function}", f"{grid} instances", f"at most {MOST_INSTANCES}")
        values = (*call.buffers, self._scratch if loaded.binary.scratch else 0, 0)
        arguments = (values, (ctypes.c_void_p,) * len(values))
        threads, shared = loaded.binary.warps * WARP, loaded.binary.shared_bytes
        if early and self.may_begin_early(call):
            launch_early(self._driver, loaded.function, grid, threads, shared, self._stream, arguments)
        else:
            self._driver("cuLaunchKernel", loaded.function, *grid, threads, 1, 1, shared, self._stream, arguments, 0)

    def may_begin_early(self, call: Call) -> bool:
        """Whether a launch behind another kernel need not wait for its end (early.py)."""
        binary = self._kernels[call.kernel].binary
        return binary.waits and fits(_grid(call), binary.warps, self._processors)

    def _reserve_scratch(self, calls: Sequence[Call]) -> None:
        """One scratch serves all launches, as they run one after the other; a larger one leaves the old to the graphs that know it."""
        needed = max((self._kernels[c.kernel].binary.scratch * int(np.prod(_grid(c))) for c in calls), default=0)
        if needed > self._scratch_bytes:
            self._scratch, self._scratch_bytes = self._allocated(needed, "scratch of kernels"), needed

    def run(self, table: GraphTable, *, alone: bool = False) -> None:
        """Launches a graph and waits for it. Raises DeviceFailed."""
        with self._lock:
            self._enter()
            self._driver("cuGraphLaunch", table.executable, self._stream)
            self._driver("cuStreamSynchronize", self._stream)

    def start(self, table: GraphTable) -> Started:
        """Launches a graph without copies behind those that were started before; its inputs are taken before it returns. Raises DeviceFailed."""
        with self._lock:
            self._enter()
            driver, started = self._driver, self._free.pop() if self._free else self._another()
            for (region, size), taken in zip(self._copies["inputs"], started.inputs, strict=True):
                np.copyto(taken, _host(region)[:size])
                driver("cuMemcpyHtoDAsync", region.address, address(taken), size, self._stream)
            driver("cuGraphLaunch", table.executable, self._stream)
            for (region, size), left in zip(self._copies["results"], started.results, strict=True):
                driver("cuMemcpyDtoHAsync", address(left), region.address, size, self._stream)
            driver("cuEventRecord", started.event, self._stream)
            return started

    def finish(self, started: Started) -> None:
        """Waits for a started graph and brings its results. Raises DeviceFailed."""
        with self._lock:
            self._enter()
            self._driver("cuEventSynchronize", started.event)
            for (region, size), left in zip(self._copies["results"], started.results, strict=True):
                np.copyto(_host(region)[:size], left)

    def release(self, started: Started) -> None:
        """What it has of its own may serve another one."""
        self._free.append(started)

    def _another(self) -> Started:
        """As many are made as are started and not released at a time, and one for each that an interrupt lost."""
        inputs, results = ([self._pinned(size, f"{use} of a started step")[:size] for _, size in self._copies[use]] for use in ("inputs", "results"))
        event = self._driver("cuEventCreate", 0)
        self._undo.append(("cuEventDestroy", event))
        return Started(inputs, results, event)

    def seconds(self, table: GraphTable, repeats: int) -> float:
        """Seconds of one launch of a graph, from events around `repeats` of them."""
        with self._lock:
            self._enter()
            driver = self._driver
            events = [driver("cuEventCreate", 0) for _ in range(2)]
            driver("cuEventRecord", events[0], self._stream)
            for _ in range(repeats):
                driver("cuGraphLaunch", table.executable, self._stream)
            driver("cuEventRecord", events[1], self._stream)
            driver("cuEventSynchronize", events[1])
            spent = float(driver("cuEventElapsedTime", *events))
            for event in events:
                driver("cuEventDestroy", event)
            return spent / 1e3 / repeats

    def check_open(self) -> None:
        """Raises DeviceClosed."""
        if not self._end.alive:
            raise DeviceClosed("device cuda")

    def _enter(self) -> None:
        """The context belongs to a thread; whoever calls takes it."""
        self.check_open()
        self._driver("cuCtxSetCurrent", self._context)

    def close(self) -> None:
        """Gives graphs, modules and memory back. May be called twice."""
        with self._lock:
            self._end()


def _host(region: Region) -> NDArray[np.uint8]:
    if region.host is None:
        raise RuntimeError("internal: a copied region without a host side")
    return region.host


def _grid(call: Call) -> tuple[int, int, int]:
    if call.grid is None:
        raise RuntimeError("internal: a GPU launch without a grid")
    return call.grid


def _undo_all(driver: Driver, actions: list[tuple[Any, ...]]) -> None:
    """Undoes in reverse order; what the driver refuses after a fault is left to the process's end."""
    while actions:
        name, what, *_ = actions.pop()
        try:
            driver(name, what)
        except DeviceFailed:
            continue
