"""A CANN runtime library for tests: its memory is host memory, its kernels are the toy library's, and it writes down what it is asked.

Device addresses are those of arrays that only copies fill, so a value that was not copied is not there. Arguments are read as C would read
them: pointers are written through, an argument block is taken apart by its layout.
"""

import ctypes
import struct
from typing import Any

import numpy as np

from tapeout.runtime.device.memory import address

FAILED, NO_MEMORY = 507899, 207001
LEAD, TRAIL = 3, 3
"""FFTS address, lock and workspace in front of the buffers; grid extents behind."""


def plain(argument: Any) -> Any:
    """The value behind a ctypes argument; pointers stay what they are."""
    return argument.value if isinstance(argument, ctypes._SimpleCData) else argument


class FakeAcl:
    """Stands in for libascendcl.so. `library` holds the functions that kernels name; `refuses` are calls that fail."""

    SYNC = 0xF00

    def __init__(self, library: ctypes.CDLL | None = None, *, name: bytes = b"Ascend950PR_9589", devices: int = 1) -> None:
        self.library, self.name, self.devices = library, name, devices
        self.log: list[tuple[str, tuple[Any, ...]]] = []
        self.memory: dict[int, np.ndarray] = {}
        self.binaries: dict[int, str] = {}
        self.magics: list[int | None] = []
        self.functions: dict[int, str] = {}
        self.launched: list[tuple[str, int, bytes]] = []
        self.refuses: set[str] = set()
        self.limit = 1 << 40

    def names(self) -> list[str]:
        return [name for name, _ in self.log]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("acl"):
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            self.log.append((name, tuple(map(plain, arguments))))
            if name in self.refuses:
                return FAILED
            return getattr(self, f"_{name}", lambda *_: 0)(*arguments)

        return call

    def _aclrtGetDeviceCount(self, count: Any) -> int:
        count.contents.value = self.devices
        return 0

    def _aclrtGetSocName(self) -> bytes:
        return self.name

    def _aclrtCreateStream(self, stream: Any) -> int:
        stream.contents.value = 77
        return 0

    def _aclrtGetHardwareSyncAddr(self, place: Any) -> int:
        place.contents.value = self.SYNC
        return 0

    def _aclrtBinaryLoadFromFile(self, path: Any, options: Any, handle: Any) -> int:
        with open(path.value, "rb") as file:  # noqa: PTH123
            content = file.read()
        if not content.startswith(b"object"):
            return FAILED
        self.magics.append(None if options is None else options.contents.options.contents.value.magic)
        handle.contents.value = len(self.binaries) + 1000
        self.binaries[handle.contents.value] = content.decode().split()[1]
        return 0

    def _aclrtBinaryGetFunction(self, handle: Any, name: Any, function: Any) -> int:
        if self.binaries[handle.value] != name.value.decode():
            return FAILED
        function.contents.value = handle.value + 1000
        self.functions[function.contents.value] = name.value.decode()
        return 0

    def _new(self, place: Any, size: int) -> int:
        if size > self.limit:
            return NO_MEMORY
        raw = np.full(size + 512, 0xA5, dtype=np.uint8)  # nobody may count on zeros
        found = raw[-address(raw) % 512 :][:size]
        self.memory[address(found)] = found
        place.contents.value = address(found)
        return 0

    def _aclrtMalloc(self, place: Any, size: Any, policy: Any) -> int:
        return self._new(place, size.value)

    def _aclrtMallocHost(self, place: Any, size: Any) -> int:
        return self._new(place, size.value)

    def _aclrtFree(self, start: Any) -> int:
        del self.memory[start.value]
        return 0

    _aclrtFreeHost = _aclrtFree

    def _aclrtMemset(self, start: Any, most: Any, value: Any, count: Any) -> int:
        assert count.value <= most.value
        ctypes.memset(start.value, value.value, count.value)
        return 0

    def _aclrtMemcpy(self, to: Any, most: Any, source: Any, count: Any, kind: Any) -> int:
        assert count.value <= most.value and kind.value in (1, 2)
        ctypes.memmove(to.value, source.value, count.value)
        return 0

    def _aclrtLaunchKernelWithHostArgs(self, function: Any, blocks: Any, stream: Any, config: Any, block: Any, size: Any, *rest: Any) -> int:
        assert stream.value == 77 and config is None
        raw = ctypes.string_at(block, size.value)
        name = self.functions[function.value]
        self.launched.append((name, blocks.value, raw))
        count = (len(raw) - 4 * TRAIL) // 8 - LEAD
        sync, lock, work, *buffers = struct.unpack_from(f"<{LEAD + count}Q", raw)
        assert (sync, lock, work) == (self.SYNC, 0, 0) and struct.unpack_from("<3i", raw, 8 * (LEAD + count)) == (blocks.value, 1, 1)
        if self.library is not None:
            native = getattr(self.library, name)
            native.argtypes, native.restype = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64], None
            native(ctypes.cast((ctypes.c_void_p * count)(*buffers), ctypes.c_void_p), 0, 1)
        return 0
