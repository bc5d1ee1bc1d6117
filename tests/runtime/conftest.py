"""The toy artifact, written once for all tests of the runtime that only read it."""

from pathlib import Path

import pytest

from tests.runtime.toy import write_toy


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy") / "artifact")
