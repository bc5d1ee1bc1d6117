"""The slice maker: layers are numbered anew with everything that names them, the strict rules hold, tensors are in their true formats."""

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tapeout.models.deepseek_v41 import slice as maker
from tapeout.models.deepseek_v41.checkpoint import open_checkpoint
from tapeout.models.deepseek_v41.config import ConfigError, LayerKind, load_config, shipped_config
from tapeout.models.deepseek_v41.tensors import Dtype, TensorSpec, tensor_table
from tapeout.models.deepseek_v41.token_map import load_token_map
from tapeout.models.deepseek_v41.tokenizer import load_tokenizer

CHOSEN = [0, 1, 2, 8, 14, 20, 21, 24]


def test_the_released_model_in_eight_layers() -> None:
    whole = shipped_config("v4.1-flash")
    config = maker.sliced(whole, CHOSEN, experts=16)
    text, old = config.text, whole.text
    assert text.compress_ratios == (0, 0, 2, 2, 2, 1, 1, 1, 0, 0, 0) and config.layers == 8
    assert (text.kv_source_layer_ids, text.index_source_layer_ids) == ((2, 3, 4, 5), (2, 3, 4, 5, 7))
    assert (text.candidate_source_layer_id, text.engram_layer_ids, text.dspark_target_layer_ids) == (5, (1, 4), (5, 6, 7))
    assert [config.layer_kind(new) for new in range(8)] == [whole.layer_kind(layer) for layer in CHOSEN]
    assert config.layer_kind(6) is LayerKind.REUSE
    assert (text.n_routed_experts, text.num_experts_per_tok, text.dspark_n_routed_experts, text.dspark_num_experts_per_tok) == (16, 6, 16, 3)
    for width in ("hidden_size", "head_dim", "num_attention_heads", "q_lora_rank", "o_lora_rank", "moe_intermediate_size", "vocab_size"):
        assert getattr(text, width) == getattr(old, width), width
    tensors = tensor_table(config)
    assert tensors["layers.4.attn.wq_b.weight"].shape == tensor_table(whole)["layers.14.attn.wq_b.weight"].shape
    assert tensors["layers.1.engram.embed.weight"].shape[0] == text.engram_num_embeddings[0] > 24 * maker.ENGRAM_VOCABULARY
    assert sum(spec.size_bytes for spec in tensors.values()) < 10e9


def test_few_experts_are_all_used() -> None:
    text = maker.sliced(shipped_config("v4.1-flash"), CHOSEN, experts=2).text
    assert (text.num_experts_per_tok, text.dspark_num_experts_per_tok) == (2, 2)


@pytest.mark.parametrize(("layers", "code"), [([0, 1, 2, 9, 20, 21], None), ([0, 1, 3, 20], "M111"), ([0, 1, 2], "M111")])
def test_choices_that_break_a_rule(layers: list[int], code: str | None) -> None:
    """Layer 9 reads the entries of the nearest source kept; layer 3 without one, or a model without decoder, is refused."""
    whole = shipped_config("v4.1-flash")
    if code is None:
        assert maker.sliced(whole, layers, 4).kv_source(3) == 2
        return
    with pytest.raises(ConfigError, match=code):
        maker.sliced(whole, layers, 4)


def test_a_layer_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert maker.main(["--layers", "0-40", "-o", str(tmp_path)]) == 1
    assert "found [0, 1," in (error := capsys.readouterr().err) and "expected layers from 0 to 39" in error


@pytest.mark.parametrize(("arguments", "said"), [
    (["--layers", "a"], "found 'a'; expected layers as 0-2,8,14"), (["--layers", ""], "found ''; expected layers as 0-2,8,14"),
    (["--layers", "5-1"], "found '5-1'; expected layers up to 4095, the smaller first"),
    (["--layers", "0-999999999"], "found '0-999999999'; expected layers up to 4095"), (["--layers", f"0-{'9' * 30}"], "expected layers as 0-2,8,14"),
    (["--layers", "0-5", "--seed", "-1"], "found '-1'; expected a whole number of at most 18 digits"),
    (["--layers", "0-5", "-o", ""], "found an empty name; expected a folder"),
])  # fmt: skip
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as end:
        maker.main(["-o", str(tmp_path), *arguments])
    assert end.value.code == 2 and said in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_full_disk_leaves_no_half_file(tmp_path: Path) -> None:
    program = "import resource, sys\nresource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
    command = [sys.executable, "-c", program + "from tapeout.models.deepseek_v41.slice import main\nsys.exit(main())", "--layers", "0-5"]
    done = subprocess.run([*command, "--config", "tiny", "-o", str(tmp_path / "a")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, f"error: {tmp_path}/a: cannot write: File too large; choose another folder\n")
    assert not list((tmp_path / "a").glob("*.partial"))


def test_a_written_slice_opens_and_is_the_same_every_time(tmp_path: Path) -> None:
    arguments = ["--layers", "0,1,3,4", "--experts", "4", "--config", "tiny", "--engram-vocab", "128"]
    for name in ("a", "b"):
        assert maker.main([*arguments, "-o", str(tmp_path / name)]) == 0
    assert maker.main([*arguments, "--config-only", "-o", str(tmp_path / "c")]) == 0
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert len(files) == 13 and all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)
    config = load_config(tmp_path / "a")
    assert config == load_config(tmp_path / "c") and [p.name for p in (tmp_path / "c").iterdir()] == ["config.json"]
    checkpoint = open_checkpoint(tmp_path / "a", config)
    assert set(checkpoint.tensors) == set(tensor_table(config))
    token_map = load_token_map(tmp_path / "a", config, load_tokenizer(tmp_path / "a", config))
    assert token_map.max() + 1 == config.text.engram_compressed_vocab_size == json.loads((tmp_path / "a" / "config.json").read_text())[
        "text_config"]["engram_compressed_vocab_size"]  # fmt: skip


@pytest.mark.parametrize(("name", "deviation"), [("embed.weight", 2.0), ("head.weight", 4 / 1024**0.5), ("layers.0.attn.wq_b.weight", 12.0)])
def test_large_tensors_have_the_spread_of_their_kind(name: str, deviation: float) -> None:
    kind = Dtype.F8_E4M3 if "wq_b" in name else Dtype.BF16
    spec = TensorSpec(name, kind, (1031, 1024), tensor_table(shipped_config("tiny"))["embed.weight"].group)
    found = maker.slice_values(shipped_config("tiny"), spec, 5)
    assert found.dtype == (ml_dtypes.float8_e4m3fn if kind is Dtype.F8_E4M3 else ml_dtypes.bfloat16) and found.shape == spec.shape
    wide = found.astype(np.float32)
    assert wide.std() == pytest.approx(deviation, rel=0.02) and abs(wide.mean()) < 0.01 * deviation and np.isfinite(wide).all()
    assert (maker.slice_values(shipped_config("tiny"), spec, 6) != found).any()
