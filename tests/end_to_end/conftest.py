"""One tiny checkpoint and one artifact of it for the whole session, however many test processes ask; engines are made per test."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

from tapeout.compiler.api import compile_path
from tapeout.compiler.settings import Settings
from tapeout.models.deepseek_v41.checkpoint import open_checkpoint
from tapeout.models.deepseek_v41.config import ModelConfig, shipped_config
from tapeout.models.deepseek_v41.reference import Reference
from tapeout.models.deepseek_v41.token_map import load_token_map
from tapeout.models.deepseek_v41.tokenizer import load_tokenizer
from tapeout.models.tiny import write_tiny
from tapeout.runtime.artifact import load_artifact
from tapeout.runtime.engine import Engine, EngineOptions
from tapeout.runtime.llm import open_engine

SETTINGS = Settings(max_rows=512, max_sequences=64, max_context=1024, block_tokens=16)


@dataclass(frozen=True)
class Model:
    """The tiny checkpoint, its artifact, and the reference over the same tensors."""

    config: ModelConfig
    weights: Path
    artifact: Path

    @cached_property
    def tensors(self) -> dict[str, Any]:
        checkpoint = open_checkpoint(self.weights, self.config)
        return {name: checkpoint.tensor(name) for name in checkpoint.tensors}

    @cached_property
    def token_map(self) -> Any:
        return load_token_map(self.weights, self.config, load_tokenizer(self.weights, self.config))

    def reference(self, **how: Any) -> Reference:
        return Reference(self.config, self.tensors, token_map=self.token_map, **how)

    @contextmanager
    def engine(self, **options: Any) -> Iterator[Engine]:
        engine, _ = open_engine(load_artifact(self.artifact), self.weights, EngineOptions(**options))
        try:
            yield engine
        finally:
            engine.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tapeout-model"
    shared.mkdir(exist_ok=True)
    weights, artifact = shared / "tiny", shared / "artifact"
    with FileLock(shared / "lock"):
        if not artifact.exists():
            write_tiny(weights, seed=0)
            compile_path(weights, artifact, SETTINGS, cache=shared / "cache")
    return Model(shipped_config("tiny"), weights, artifact)


def prompt(count: int, seed: int) -> list[int]:
    """Random text tokens."""
    return [int(t) for t in np.random.default_rng(seed).integers(3, 259, count)]
