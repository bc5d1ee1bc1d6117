"""Lowered kernels are kept between runs, in pytest's own cache folder: the same kernel, compiler and emitter give the same bytes."""

import pytest

from tests.codegen.ascend import harness


@pytest.fixture(scope="session", autouse=True)
def kept_kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    harness.STORE = harness.kept(request.config, tmp_path_factory.mktemp("ascend"))
