"""The tiny model's kernels for a target, made once."""

from pathlib import Path

import pytest

from tapeout.codegen.lower_to_tile import TileKernel
from tapeout.models.tiny import write_tiny
from tests.codegen.nvidia.whole_model import kernels_of


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny checkpoint."""
    return Path(write_tiny(tmp_path_factory.mktemp("tiny"), 0))


@pytest.fixture(scope="session")
def tiny_kernels(tiny: Path) -> tuple[TileKernel, ...]:
    """Its kernels for sm90."""
    return kernels_of(tiny, "sm90")
