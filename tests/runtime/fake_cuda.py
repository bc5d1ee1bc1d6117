"""A CUDA driver module for tests: its memory is host memory, its kernels are the toy library's, and it writes down what it is asked.

Device addresses are those of arrays that only copies fill, so a value that was not copied is not there. Work on the stream is done when somebody
waits for it, not before; work on a stream that is captured is kept in the graph and done when the graph runs, as late steps first as the graph's
edges allow. Arguments are read as the driver would.
`early` names the steps of the last capture that may begin before those in front have ended.
"""

import ctypes
from collections.abc import Callable
from enum import Enum, IntEnum
from functools import partial
from typing import Any

import numpy as np

from tapeout.runtime.device.memory import address


class CUresult(Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_IMAGE = 200
    CUDA_ERROR_NOT_FOUND = 500
    CUDA_ERROR_NOT_SUPPORTED = 801


class CUdevice_attribute(Enum):
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97


class CUfunction_attribute(Enum):
    CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


class CUstream_flags(Enum):
    CU_STREAM_NON_BLOCKING = 1


class CUstreamCaptureMode(Enum):
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1


class CUstreamUpdateCaptureDependencies_flags(IntEnum):
    CU_STREAM_SET_CAPTURE_DEPENDENCIES = 1


class CUlaunchAttributeID(IntEnum):
    CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class CUlaunchAttributeValue:
    programmaticStreamSerializationAllowed = 0


class CUlaunchAttribute:
    id, value = None, CUlaunchAttributeValue()


class CUlaunchConfig:
    gridDimX = gridDimY = gridDimZ = blockDimX = blockDimY = blockDimZ = sharedMemBytes = numAttrs = 0
    hStream, attrs = None, ()


OK = CUresult.CUDA_SUCCESS
Step = tuple[str, tuple[Any, ...]]


class FakeDriver:
    """Stands in for `cuda.bindings.driver`. `log` holds the calls in order, `library` the functions that cubins name."""

    CUresult, CUdevice_attribute, CUfunction_attribute = CUresult, CUdevice_attribute, CUfunction_attribute
    CUstream_flags, CUstreamCaptureMode = CUstream_flags, CUstreamCaptureMode
    CUstreamUpdateCaptureDependencies_flags = CUstreamUpdateCaptureDependencies_flags
    CUlaunchAttributeID, CUlaunchAttributeValue = CUlaunchAttributeID, CUlaunchAttributeValue
    CUlaunchAttribute, CUlaunchConfig = CUlaunchAttribute, CUlaunchConfig
    CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_READ_ONLY, CU_MEMHOSTALLOC_DEVICEMAP = 2, 8, 2

    def __init__(self, library: ctypes.CDLL | None = None, *, capability: tuple[int, int] = (9, 0), version: int = 13000) -> None:
        self.library, self.capability, self.version = library, capability, version
        self.log: list[Step] = []
        self.memory: dict[int, np.ndarray] = {}
        self.launched: list[tuple[str, tuple[int, ...], int, tuple[int, ...]]] = []
        self.capturing: list[Step] | None = None
        self.line: list[int] = []
        self.follows: list[list[int]] = []
        self.early: list[int] = []
        self.limit, self.devices, self.threads, self.maps = 1 << 40, 1, 1024, True
        self.unknown: set[str] = set()
        self.entries = 0
        self.work: list[Callable[[], Any]] = []
        self.done = 0
        self.recorded: dict[int, int] = {}  # work in front of an event

    def names(self) -> list[str]:
        return [name for name, _ in self.log]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            self.log.append((name, arguments))
            return getattr(self, f"_{name}", lambda *_: (OK,))(*arguments)

        return call

    # -- start

    def _cuInit(self, flags: int) -> Any:
        return (OK if self.devices else CUresult.CUDA_ERROR_NO_DEVICE,)

    def _cuDeviceGetCount(self) -> Any:
        return OK, self.devices

    def _cuDeviceGet(self, ordinal: int) -> Any:
        return OK, ("device", ordinal)

    def _cuDeviceGetName(self, size: int, device: Any) -> Any:
        return OK, b"Pretend GPU\0" + b"\0" * (size - 12)

    def _cuDriverGetVersion(self) -> Any:
        return OK, self.version

    def _cuDeviceGetAttribute(self, kind: CUdevice_attribute, device: Any) -> Any:
        return OK, {16: 132, 75: self.capability[0], 76: self.capability[1], 97: 232448}[kind.value]

    def _cuDevicePrimaryCtxRetain(self, device: Any) -> Any:
        return OK, "context"

    def _cuStreamCreate(self, flags: int) -> Any:
        return OK, "stream"

    def _cuModuleLoadData(self, content: bytes) -> Any:
        return (OK, content) if content.startswith(b"cubin") else (CUresult.CUDA_ERROR_INVALID_IMAGE, None)

    def _cuModuleGetFunction(self, module: bytes, name: bytes) -> Any:
        return (CUresult.CUDA_ERROR_NOT_FOUND, None) if name.decode() in self.unknown else (OK, name.decode())

    def _cuFuncGetAttribute(self, kind: Any, function: str) -> Any:
        return OK, self.threads

    # -- memory

    def _new(self, size: int) -> int:
        raw = np.full(size + 256, 0xA5, dtype=np.uint8)  # nobody may count on zeros
        start = -address(raw) % 256
        found = raw[start : start + size]
        self.memory[address(found)] = found
        return address(found)

    def _cuMemGetInfo(self) -> Any:
        return OK, self.limit, self.limit

    def _cuMemAlloc(self, size: int) -> Any:
        return (OK, self._new(size)) if size <= self.limit else (CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0)

    def _cuMemHostAlloc(self, size: int, flags: int) -> Any:
        return OK, self._new(size)

    def _cuMemFree(self, start: int) -> Any:
        del self.memory[start]
        return (OK,)

    _cuMemFreeHost = _cuMemFree

    def _cuMemHostRegister(self, start: int, size: int, flags: int) -> Any:
        return (OK if self.maps else CUresult.CUDA_ERROR_NOT_SUPPORTED,)

    def _cuMemHostGetDevicePointer(self, start: int, flags: int) -> Any:
        return OK, start

    def _cuMemsetD8Async(self, start: int, value: int, size: int, stream: Any) -> Any:
        self.work.append(partial(ctypes.memset, start, value, size))
        return (OK,)

    def _copy(self, to: int, start: int, size: int, stream: Any) -> Any:
        if self.capturing is not None:
            self._capture(("copy", (to, start, size)))
        else:
            self.work.append(partial(ctypes.memmove, to, start, size))
        return (OK,)

    _cuMemcpyHtoDAsync = _cuMemcpyDtoHAsync = _copy

    def _cuMemcpyDtoH(self, to: int, start: int, size: int) -> Any:
        """On a stream that does not wait for the other one."""
        ctypes.memmove(to, start, size)
        return (OK,)

    # -- the stream

    def _through(self, count: int) -> None:
        while self.done < count:
            self.done += 1
            self.work[self.done - 1]()

    def _cuStreamSynchronize(self, stream: Any) -> Any:
        self._through(len(self.work))
        return (OK,)

    def _cuEventRecord(self, event: int, stream: Any) -> Any:
        self.recorded[event] = len(self.work)
        return (OK,)

    def _cuEventSynchronize(self, event: int) -> Any:
        self._through(self.recorded.get(event, 0))
        return (OK,)

    # -- graphs

    def _cuStreamBeginCapture(self, stream: Any, mode: Any) -> Any:
        self.capturing, self.line, self.follows, self.early = [], [], [], []
        return (OK,)

    def _capture(self, step: Step) -> None:
        assert self.capturing is not None
        self.follows.append(self.line)
        self.capturing.append(step)
        self.line = [len(self.follows) - 1]

    def _cuStreamGetCaptureInfo(self, stream: Any) -> Any:
        return OK, 1, 1, "graph", list(self.line), None, len(self.line)

    def _cuStreamUpdateCaptureDependencies(self, stream: Any, nodes: list[int], data: Any, count: int, flags: int) -> Any:
        assert (data, count, flags) == (None, len(nodes), 1)
        self.line = list(nodes)
        return (OK,)

    def _cuStreamEndCapture(self, stream: Any) -> Any:
        graph, self.capturing = self.capturing, None
        return OK, graph

    def _cuGraphInstantiate(self, graph: list[Step], flags: int) -> Any:
        """The steps in the order in which they run: of those that may, the one that was captured last."""
        done: list[int] = []
        while len(done) < len(graph):
            ready = [i for i in range(len(graph)) if i not in done and set(self.follows[i]) <= set(done)]
            done.append(max(ready))
        return OK, tuple(graph[i] for i in done)

    def _cuLaunchKernel(self, function: str, gx: int, gy: int, gz: int, threads: int, ty: int, tz: int, shared: int, *rest: Any) -> Any:
        stream, (values, kinds), extra = rest
        assert (ty, tz, extra, stream) == (1, 1, 0, "stream") and all(kind is ctypes.c_void_p for kind in kinds)
        assert self.capturing is not None and len(values) == len(kinds)
        self._capture(("launch", (function, (gx, gy, gz), threads, shared, tuple(values))))
        return (OK,)

    def _cuLaunchKernelEx(self, config: CUlaunchConfig, function: str, arguments: Any, extra: int) -> Any:
        """A launch that begins early, which only what follows kernels and nothing else may."""
        (attribute,) = config.attrs
        assert config.numAttrs == 1 and attribute.id == 6 and attribute.value.programmaticStreamSerializationAllowed == 1
        assert self.capturing is not None and self.line and all(self.capturing[i][0] == "launch" for i in self.line)
        self.early.append(len(self.capturing))
        grid, block = ([getattr(config, f"{stem}Dim{axis}") for axis in "XYZ"] for stem in ("grid", "block"))
        return self._cuLaunchKernel(function, *grid, *block, config.sharedMemBytes, config.hStream, arguments, extra)

    def _cuGraphLaunch(self, graph: tuple[Step, ...], stream: Any) -> Any:
        self.work += [partial(ctypes.memmove, *what) if kind == "copy" else partial(self._execute, *what) for kind, what in graph]
        return (OK,)

    def _execute(self, function: str, grid: tuple[int, ...], threads: int, shared: int, values: tuple[int, ...]) -> None:
        """Calls a kernel of the library; the two scratch pointers behind the buffers are not the kernel's."""
        self.launched.append((function, grid, threads, values))
        if self.library is not None:
            buffers = (ctypes.c_void_p * len(values[:-2]))(*values[:-2])
            native = getattr(self.library, function)
            native.argtypes, native.restype = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64], None
            native(ctypes.cast(buffers, ctypes.c_void_p), 0, 1)

    def _cuEventCreate(self, flags: int) -> Any:
        self.entries += 1
        return OK, self.entries

    def _cuEventElapsedTime(self, start: int, end: int) -> Any:
        return OK, 6.0
