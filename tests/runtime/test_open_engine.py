"""An artifact and a checkpoint folder come together: the tiny checkpoint under toy programs (docs/runtime.md, weights)."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tapeout.models.deepseek_v41.config import shipped_config
from tapeout.models.deepseek_v41.errors import CheckpointError
from tapeout.models.tiny import write_tiny
from tapeout.runtime.artifact import (
    LIBRARY,
    ArtifactData,
    Derived,
    ModelIdentity,
    TokenMap,
    WeightOperand,
    WeightPart,
    Weights,
    config_fingerprint,
    write_artifact,
)
from tapeout.runtime.errors import OtherModel, TensorMissing
from tapeout.runtime.llm import LLM
from tapeout.runtime.params import SamplingParams
from tests.runtime import toy as model

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "checkpoint")


def operands(norm: str = "norm.weight") -> Weights:
    """The toy's embedding is the token map; beside it a mapped norm and a packed stack of experts."""
    ids = WeightPart(part="values", dtype="i32", shape=(512,), bytes=2048, layout="packed", tensors=())
    mapped = WeightPart(part="values", dtype="bf16", shape=(128,), bytes=256, layout="as_stored", tensors=(norm,))
    experts = tuple(f"layers.0.ffn.experts.{e}.w1.weight" for e in range(8))
    packed = WeightPart(
        part="codes",
        dtype="i8",
        shape=(8, 8, 64, 16),
        bytes=8 * 128 * 64,
        layout="packed",
        tensors=experts,
        transforms=("stack", "fp4_split", "panels:16"),
    )
    return Weights(
        operands=(
            WeightOperand(name="embed", kind="table", parts=(ids,), derived=Derived(token_map=TokenMap())),
            WeightOperand(name="norm", kind="weight", parts=(mapped,)),
            WeightOperand(name="experts", kind="weight", parts=(packed,)),
        )
    )


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> ArtifactData:
    monkeypatch.setattr(model, "VOCABULARY", 512)
    config = shipped_config("tiny").canonical()
    identity = ModelIdentity(architecture="DeepseekV41ForCausalLM", config=config, fingerprint=config_fingerprint(config))
    toy = model.data()
    return replace(toy, manifest=toy.manifest.model_copy(update={"model": identity}), weights=operands())


def test_prompts_in_text_out(data: ArtifactData, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(write_artifact(tmp_path / "a", data, {LIBRARY: model.library(512)}), checkpoint, workers=1)
    (result,) = llm.generate("Hé", GREEDY)
    assert result.prompt_token_ids == (0, 3 + 0x48, 3 + 0xC3, 3 + 0xA9), "BOS, then bytes"
    pinned = json.loads((checkpoint / "engram_token_map.json").read_text())
    token_map = np.array(pinned if isinstance(pinned, list) else next(v for v in pinned.values() if isinstance(v, list)))
    monkeypatch.setattr(model, "EMBED", token_map)
    assert list(result.outputs[0].token_ids) == model.toy_answer(result.prompt_token_ids, 6)
    assert llm.tokenizer is not None
    assert result.outputs[0].text == llm.tokenizer.decode(result.outputs[0].token_ids)
    assert llm.engine.eos_id == 1 and llm.engine.vocabulary == 512
    llm.close()


def test_another_models_checkpoint(data: ArtifactData, checkpoint: Path, tmp_path: Path) -> None:
    artifact = write_artifact(tmp_path / "a", data, {LIBRARY: model.library(512)})
    other = tmp_path / "other"
    other.mkdir()
    for path in checkpoint.iterdir():
        (other / path.name).symlink_to(path)
    config = json.loads((checkpoint / "config.json").read_text())
    config["text_config"]["rope_theta"] = 20000
    (other / "config.json").unlink()
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(OtherModel) as refused:
        LLM(artifact, other)
    assert str(refused.value) == (
        f"[W107] the checkpoint is of another model than the artifact - {other} - found text.rope_theta = 20000.0, "
        f"expected the model of {artifact} - give the checkpoint that the artifact was compiled for"
    )


def test_a_missing_shard_is_refused_before_anything_is_packed(data: ArtifactData, checkpoint: Path, tmp_path: Path) -> None:
    artifact = write_artifact(tmp_path / "a", data, {LIBRARY: model.library(512)})
    partial = tmp_path / "partial"
    partial.mkdir()
    for path in checkpoint.iterdir():
        if "00002" not in path.name:
            (partial / path.name).symlink_to(path)
    with pytest.raises(CheckpointError, match=r"M203.*model-00002-of-00003\.safetensors"):
        LLM(artifact, partial)


def test_an_operand_of_no_tensor(data: ArtifactData, checkpoint: Path, tmp_path: Path) -> None:
    wrong = replace(data, weights=operands("nrom.weight"))
    artifact = write_artifact(tmp_path / "a", wrong, {LIBRARY: model.library(512)})
    with pytest.raises(TensorMissing, match=r"nrom\.weight not there"):
        LLM(artifact, checkpoint)
