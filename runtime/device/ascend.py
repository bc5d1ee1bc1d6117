"""The Ascend device: object files, memory and launches through the runtime API of CANN (libascendcl.so) by ctypes, and nothing else of CANN.

Written against the documented API (aclrt*, CANN 8.5 and later) and tested with a library that stands in for it: no NPU has run it. A table is a
list of launches between the copies of inputs and results, on one stream. The host's regions are page-locked.
"""

import ctypes
import struct
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapeout.runtime.artifact import ALIGNMENT, MANIFEST, Artifact
from tapeout.runtime.artifact_kernels import Kernel, Lowered
from tapeout.runtime.device import Call, Region, Use
from tapeout.runtime.device.host_side import host_side, locked_bytes, number_of
from tapeout.runtime.device.memory import address
from tapeout.runtime.errors import ChipMismatch, DeviceClosed, MemoryRefused, NpuFailed, NpuMissing, ObjectMissing, SymbolMissing

LIBRARY = "libascendcl.so"
FAMILY = "Ascend950"
HUGE_FIRST = 0  # aclrtMemMallocPolicy
TO_DEVICE, TO_HOST = 1, 2  # aclrtMemcpyKind
MAGIC_OPTION = 2  # aclrtBinaryLoadOptionType
MAGIC = {"aiv": 0x41415246, "aic": 0x43554245, "mix": None}
"""What kind of core an object is for; a mixed one says so itself."""


class _Value(ctypes.Union):
    _fields_ = (("magic", ctypes.c_uint32), ("reserved", ctypes.c_uint32 * 4))


class _Option(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("value", _Value))


class _Options(ctypes.Structure):
    _fields_ = (("options", ctypes.POINTER(_Option)), ("count", ctypes.c_size_t))


class Acl:
    """The runtime library: `acl("aclrtSetDevice", c_int(0))` calls it and raises NpuFailed for any answer but 0."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def __call__(self, name: str, *arguments: Any) -> None:
        found = getattr(self.library, name)(*arguments)
        if found:
            raise NpuFailed(name, f"error {found}", "0")

    def pointer(self, name: str, *arguments: Any) -> int:
        """The handle or address that a call writes to its first parameter."""
        made = ctypes.c_void_p()
        self(name, ctypes.pointer(made), *arguments)
        return made.value or 0


def load_acl(library: Any = None) -> Acl:
    """The library, started, with at least one NPU. Raises NpuMissing. `library` stands in for CANN's."""
    if library is None:
        try:
            library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise NpuMissing(LIBRARY, str(error).splitlines()[0], "the runtime library of CANN") from None
        library.aclrtGetSocName.restype = ctypes.c_char_p
    acl, count = Acl(library), ctypes.c_uint32()
    try:
        acl("aclInit", None)
        acl("aclrtGetDeviceCount", ctypes.pointer(count))
    except NpuFailed as error:
        raise NpuMissing(error.where, error.found, "a driver that starts") from None
    if not count.value:
        raise NpuMissing("NPUs", "none", "one")
    return acl


@dataclass(frozen=True)
class Loaded:
    """A kernel on the NPU."""

    function: int
    row: Lowered


@dataclass(frozen=True)
class AscendTable:
    """Launches ready to go: function, blocks, argument block."""

    launches: tuple[tuple[int, int, bytes], ...]

    @property
    def count(self) -> int:
        return len(self.launches)


class AscendDevice:
    """One NPU with an artifact's kernels. Runs take turns; each returns when the NPU is through."""

    def __init__(self, artifact: Artifact, *, ordinal: int = 0, library: Any = None) -> None:
        self._place, self._ordinal = artifact.directory / MANIFEST, ordinal
        objects = [(kernel, _object(artifact, kernel)) for kernel in artifact.manifest.kernels]
        self._acl = acl = load_acl(library)
        self._undo: list[tuple[str, Any]] = []
        self._end = weakref.finalize(self, _undo_all, acl, self._undo)
        acl("aclrtSetDevice", ctypes.c_int32(ordinal))
        self._undo.append(("aclrtResetDevice", ctypes.c_int32(ordinal)))
        self._check()
        self._stream = acl.pointer("aclrtCreateStream")
        self._undo.append(("aclrtDestroyStream", ctypes.c_void_p(self._stream)))
        self._sync = acl.pointer("aclrtGetHardwareSyncAddr")
        self._lock = threading.Lock()
        self._copies: dict[str, list[tuple[Region, int]]] = {"inputs": [], "results": []}
        self._kernels = [self._load(kernel, path) for kernel, path in objects]
        self._numbers = {kernel.symbol: number for number, (kernel, _) in enumerate(objects)}

    def _check(self) -> None:
        name = (self._acl.library.aclrtGetSocName() or b"no name").decode(errors="replace")
        if not name.startswith(FAMILY):
            raise ChipMismatch(f"{self._place}: npu", name, f"a chip of the {FAMILY} family", remedy="compile for another target")

    def _load(self, kernel: Kernel, path: Path) -> Loaded:
        """Loads one object file and finds its kernel. Raises ObjectMissing or SymbolMissing."""
        acl, row = self._acl, kernel.lowered
        if row is None:
            raise ObjectMissing(f"{self._place}: {kernel.symbol}", "no module", "a lowered kernel")
        magic = MAGIC[row.mode]
        option = _Option(MAGIC_OPTION, _Value(magic=magic or 0))
        options = ctypes.pointer(_Options(ctypes.pointer(option), 1)) if magic is not None else None
        handle = ctypes.c_void_p()
        try:
            acl("aclrtBinaryLoadFromFile", ctypes.c_char_p(str(path).encode()), options, ctypes.pointer(handle))
        except NpuFailed as error:
            raise ObjectMissing(str(path), error.found, f"an object that this NPU loads, for {kernel.symbol}") from None
        self._undo.append(("aclrtBinaryUnLoad", handle))
        function = ctypes.c_void_p()
        try:
            acl("aclrtBinaryGetFunction", handle, ctypes.c_char_p(kernel.symbol.encode()), ctypes.pointer(function))
        except NpuFailed:
            raise SymbolMissing(str(path), f"no kernel {kernel.symbol}", "the kernel that the manifest names") from None
        return Loaded(function.value or 0, row)

    def kernel(self, symbol: str) -> int:
        """The number of a kernel. Raises SymbolMissing."""
        return number_of(symbol, self._numbers, self._place)

    # -- memory

    def memory(self, size: int, what: str, use: Use = "device") -> Region:
        """Zeroed memory of the NPU; with a page-locked twin on the host for inputs and results, a plain one where it is fetched."""
        self._enter()
        start = self._allocated(size, what)
        self._acl("aclrtMemset", ctypes.c_void_p(start), ctypes.c_size_t(max(size, 1)), ctypes.c_int32(0), ctypes.c_size_t(max(size, 1)))
        region = Region(start, host_side(size, what, use, self._pinned))
        if use in self._copies:
            self._copies[use].append((region, size))
        return region

    def _allocated(self, size: int, what: str) -> int:
        try:
            start = self._acl.pointer("aclrtMalloc", ctypes.c_size_t(max(size, 1)), ctypes.c_int(HUGE_FIRST))
        except NpuFailed as error:
            raise MemoryRefused(what, f"a need of {size} bytes, {error.found}", "memory that the NPU has") from None
        self._undo.append(("aclrtFree", ctypes.c_void_p(start)))
        if start % ALIGNMENT:
            raise MemoryRefused(what, f"the address {start}", f"a multiple of {ALIGNMENT}")
        return start

    def _pinned(self, size: int, what: str) -> NDArray[np.uint8]:
        """Zeroed page-locked host memory."""
        try:
            start = self._acl.pointer("aclrtMallocHost", ctypes.c_size_t(max(size, 1)))
        except NpuFailed as error:
            raise MemoryRefused(what, f"a need of {size} bytes of page-locked host memory, {error.found}", "memory the system can lock") from None
        self._undo.append(("aclrtFreeHost", ctypes.c_void_p(start)))
        return locked_bytes(start, size)

    def place(self, array: NDArray[Any], what: str, *, by_rows: bool = False) -> int:
        """A copy on the NPU."""
        self._enter()
        array = np.ascontiguousarray(array)
        start = self._allocated(array.nbytes, what)
        self._copy(start, address(array), array.nbytes, TO_DEVICE)
        return start

    def _copy(self, target: int, source: int, size: int, kind: int) -> None:
        if size:
            self._acl("aclrtMemcpy", ctypes.c_void_p(target), ctypes.c_size_t(size), ctypes.c_void_p(source), ctypes.c_size_t(size),
                      ctypes.c_int(kind))  # fmt: skip

    def upload(self, region: Region, size: int) -> None:
        """Copies the first bytes of the host's twin to the NPU."""
        self._enter()
        if region.host is not None:
            self._copy(region.address, address(region.host), size, TO_DEVICE)

    def download(self, region: Region, size: int) -> None:
        """Copies the first bytes of a region to the host's twin."""
        self._enter()
        if region.host is not None:
            self._copy(address(region.host), region.address, size, TO_HOST)

    # -- launches

    def table(self, calls: Sequence[Call]) -> AscendTable:
        """Calls with their argument blocks packed."""
        self._enter()
        return AscendTable(tuple(self._launch(call) for call in calls))

    def _launch(self, call: Call) -> tuple[int, int, bytes]:
        loaded, blocks = self._kernels[call.kernel], call.grid[0] if call.grid else 1
        return loaded.function, blocks, argument_block(loaded.row.arguments, call.buffers, blocks, self._sync)

    def run(self, table: AscendTable, *, alone: bool = False) -> None:
        """Inputs up, every launch in order, results back. Raises NpuFailed."""
        with self._lock:
            self._enter()
            for region, size in self._copies["inputs"]:
                self.upload(region, size)
            for function, blocks, arguments in table.launches:
                self._acl("aclrtLaunchKernelWithHostArgs", ctypes.c_void_p(function), ctypes.c_uint32(blocks), ctypes.c_void_p(self._stream),
                          None, ctypes.c_char_p(arguments), ctypes.c_size_t(len(arguments)), None, ctypes.c_size_t(0))  # fmt: skip
            self._acl("aclrtSynchronizeStream", ctypes.c_void_p(self._stream))
            for region, size in self._copies["results"]:
                self.download(region, size)

    def check_open(self) -> None:
        """Raises DeviceClosed."""
        if not self._end.alive:
            raise DeviceClosed("device ascend")

    def _enter(self) -> None:
        """The device belongs to a thread; whoever calls takes it."""
        self.check_open()
        self._acl("aclrtSetDevice", ctypes.c_int32(self._ordinal))

    def close(self) -> None:
        """Gives modules and memory back. May be called twice."""
        with self._lock:
            self._end()


def argument_block(words: Sequence[str], buffers: Sequence[int], blocks: int, sync: int) -> bytes:
    """Arguments of a launch as they lie in memory: pointers of 8 bytes, then grid extents of 4; lock and workspace are null."""
    pointers = {"ffts": [sync], "lock": [0], "workspace": [0], "buffers": list(buffers)}
    extents = {"grid_x": blocks, "grid_y": 1, "grid_z": 1}
    packed = b"".join(struct.pack("<i", extents[word]) if word in extents else struct.pack(f"<{len(pointers[word])}Q", *pointers[word])
                      for word in words)  # fmt: skip
    return packed + bytes(-len(packed) % 8)


def _object(artifact: Artifact, kernel: Kernel) -> Path:
    if kernel.lowered is None or kernel.lowered.object is None:
        raise ObjectMissing(f"{artifact.directory / MANIFEST}: {kernel.symbol}", "no object file", "one for each kernel")
    return artifact.directory / kernel.lowered.object


def _undo_all(acl: Acl, actions: list[tuple[str, Any]]) -> None:
    """Undoes in reverse order; what the driver refuses after a fault is left to the process's end."""
    while actions:
        name, what = actions.pop()
        try:
            acl(name, what)
        except NpuFailed:
            continue
