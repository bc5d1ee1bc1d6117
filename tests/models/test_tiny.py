"""The tiny checkpoint: same bytes for a seed, readable by the public libraries, and lively."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors

from tapeout.models.deepseek_v41.checkpoint import Checkpoint, open_checkpoint
from tapeout.models.deepseek_v41.config import load_config, shipped_config
from tapeout.models.deepseek_v41.reference import Reference
from tapeout.models.deepseek_v41.tensors import Dtype, tensor_table
from tapeout.models.tiny import random_weights, write_tiny

CONFIG = shipped_config("tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Checkpoint:
    return open_checkpoint(folder, CONFIG)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_same_seed_same_bytes(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tapeout.models.tiny", "--seed", "0", "-o", str(tmp_path / "new" / "tiny")]
    output = subprocess.run(command, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == str(tmp_path / "new" / "tiny")
    assert digests(tmp_path / "new" / "tiny") == digests(folder)
    other = digests(write_tiny(tmp_path / "other", seed=1))
    changed = {name for name, digest in digests(folder).items() if other[name] != digest}
    assert changed == {f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}


def test_the_command_refuses_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for arguments, code in ((["--seed", "-1"], 2), (["--seed", "x"], 2), ([], 1)):
        command = [sys.executable, "-m", "tapeout.models.tiny", "-o", str(tmp_path / "file"), *arguments]
        output = subprocess.run(command, capture_output=True, text=True, check=False)
        assert output.returncode == code and "Traceback" not in output.stderr and output.stderr


def test_the_config_is_the_shipped_one(folder: Path) -> None:
    assert load_config(folder) == CONFIG


def test_shards_open_with_the_library(folder: Path, checkpoint: Checkpoint) -> None:
    seen = 0
    for shard in checkpoint.shards:
        for name, stored in safetensors.deserialize((folder / shard).read_bytes()):
            assert bytes(stored["data"]) == checkpoint.tensor(name).tobytes()
            assert stored["dtype"] == checkpoint.tensors[name].spec.dtype.value
            assert tuple(stored["shape"]) == checkpoint.tensors[name].spec.shape
            seen += 1
    assert seen == 642 and len(checkpoint.shards) == 3
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == checkpoint.size_bytes == 5_596_888


def test_views_are_aligned_to_their_elements(checkpoint: Checkpoint) -> None:
    for name, stored in checkpoint.tensors.items():
        assert stored.start % stored.spec.dtype.width == 0, name
        assert checkpoint.tensor(name).flags.aligned


def test_generated_weights_cover_the_table() -> None:
    table = tensor_table(CONFIG)
    made = {spec.name: values for spec, values in random_weights(CONFIG, seed=5)}
    assert set(made) == set(table)
    assert all(made[name].shape == spec.shape for name, spec in table.items())
    assert all(np.isfinite(values.astype(np.float32)).all() for values in made.values())


def test_neighbouring_blocks_differ_in_exponent(checkpoint: Checkpoint) -> None:
    scales = [name for name, stored in checkpoint.tensors.items() if stored.spec.dtype is Dtype.F8_E8M0]
    assert len(scales) == 240  # attention 40, experts 168, shared 24, indexers 3, Engram 4, main_proj 1
    for name in scales:
        scale = checkpoint.tensor(name).astype(int)
        assert (np.diff(scale, axis=1) != 0).all(), name
        assert scale.min() > 100 and scale.max() < 135
    wide = checkpoint.tensor("layers.0.attn.wq_b.scale")
    assert len(np.unique(wide)) == 5
    assert (wide != wide[::-1]).any() and (wide[:4, :4] != wide[:4, :4].T).any()


def test_no_mechanism_is_idle(checkpoint: Checkpoint) -> None:
    weights = checkpoint.tensor("layers.4.attn.indexer.weights_proj.weight").astype(float)
    assert (weights > 0).any(axis=1).all() and (weights < 0).any(axis=1).all()
    for layer in range(CONFIG.layers):
        for name in ("attn.attn_sink", "ffn.gate.bias", "ffn.gate.bias_vl", "hc_attn_base", "hc_ffn_scale"):
            values = checkpoint.tensor(f"layers.{layer}.{name}")
            assert len(np.unique(values)) == values.size and (values != 0).all()


def test_logits_are_spread_and_rarely_close(folder: Path, checkpoint: Checkpoint) -> None:
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.tensors}
    token_map = np.array(json.loads((folder / "engram_token_map.json").read_text()))
    reference = Reference(CONFIG, tensors, numerics="faithful", token_map=token_map)
    state = reference.start()
    output = reference.forward(state, np.random.default_rng(3).integers(3, 259, 90))
    best = np.sort(output.logits, axis=1)[:, -2:]
    assert 2.5 < output.logits.std(axis=1).mean() < 10
    assert np.median(best[:, 1] - best[:, 0]) > 1.0
    assert len(set(output.logits.argmax(axis=1).tolist())) > 20
    draft = reference.draft(state, int(output.logits[-1].argmax()))
    assert (np.sort(draft.logits, axis=1)[:, -1] > 3).all()
