"""The toy artifact and the toy library, written once for all tests of the runtime that only read them."""

import ctypes
from pathlib import Path

import pytest

from tests.runtime.queueing import put_behind_engines
from tests.runtime.toy import library, write_toy


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy") / "artifact")


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The toy's kernels as machine code, which stand-ins for a driver call."""
    path = tmp_path_factory.mktemp("library") / "toy.so"
    path.write_bytes(library())
    return ctypes.CDLL(str(path))


@pytest.fixture
def queueing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines over the CPU find a device with a queue."""
    put_behind_engines(monkeypatch)
