"""Checkpoints: views of mapped files, and R06, R07, R09, R10 and corruption refused before any payload is read."""

from __future__ import annotations

import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tapeout.models.deepseek_v41.checkpoint import open_checkpoint
from tapeout.models.deepseek_v41.config import parse_config, shipped_config
from tapeout.models.deepseek_v41.errors import CheckpointError
from tapeout.models.deepseek_v41.safetensors_header import pack_header, read_header
from tapeout.models.tiny import random_weights, write_checkpoint, write_tiny
from tests.models.shards import (
    SHARDS,
    copied,
    read_index,
    read_shard,
    renamed_tensors,
    without_tensor,
    write_index,
    write_shard,
)
from tests.models.tiny_configs import tiny_document

CONFIG = shipped_config("tiny")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    return copied(source, tmp_path / "copy")


def refused(folder: Path, **options: object) -> list[tuple[str, str, str]]:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder, CONFIG, **options)  # type: ignore[arg-type]
    return [(problem.code, problem.path, problem.found) for problem in caught.value.problems]


def test_views_have_the_stored_values_and_no_copies(source: Path) -> None:
    checkpoint = open_checkpoint(source, CONFIG)
    for spec, values in random_weights(CONFIG):
        view = checkpoint.tensor(spec.name)
        assert view.tobytes() == values.tobytes() and view.shape == spec.shape
        assert not view.flags.owndata and not view.flags.writeable
    assert checkpoint.tensor("embed.weight").dtype == ml_dtypes.bfloat16
    assert checkpoint.tensor("layers.0.attn.wkv.weight").dtype == ml_dtypes.float8_e4m3fn
    assert checkpoint.tensor("layers.0.attn.wkv.scale").dtype == np.uint8
    assert checkpoint.tensor("layers.0.ffn.experts.1.w2.weight").dtype == np.uint8
    assert checkpoint.tensor("layers.0.attn.attn_sink").dtype == np.float32
    assert (checkpoint.shards, checkpoint.strays) == (SHARDS, ())
    one, two = checkpoint.tensor("norm.weight"), checkpoint.tensor("norm.weight")
    assert np.shares_memory(one, two)


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, shards=1)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model-00001-of-00001.safetensors").rename(tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path, CONFIG)
    assert checkpoint.shards == ("model.safetensors",) and len(checkpoint.tensors) == 642


def test_shards_without_index_are_not_guessed_together(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    assert refused(folder) == [("M201", str(folder), "3 safetensors files and no index")]


@pytest.mark.parametrize("absent", ["x", "config.json"])
def test_not_a_folder(folder: Path, absent: str) -> None:
    assert [code for code, _, _ in refused(folder / absent)] == ["M201"]


def test_missing_shards_are_listed_with_their_tensors(folder: Path) -> None:  # R06
    counts = [list(read_index(folder)["weight_map"].values()).count(shard) for shard in SHARDS]
    for shard in SHARDS[:2]:
        (folder / shard).unlink()
    assert refused(folder) == [
        ("M203", SHARDS[0], f"no file; it holds {counts[0]} tensors"),
        ("M203", SHARDS[1], f"no file; it holds {counts[1]} tensors"),
    ]


def test_index_row_without_tensor(folder: Path) -> None:  # R07
    home = read_index(folder)["weight_map"]["layers.1.attn.wq_a.scale"]
    without_tensor(folder / home, "layers.1.attn.wq_a.scale")
    assert refused(folder) == [("M205", "layers.1.attn.wq_a.scale", f"no such tensor in {home}")]


def test_tensor_without_index_row(folder: Path) -> None:  # R07
    weight_map = read_index(folder)["weight_map"]
    home = weight_map.pop("layers.1.attn.wq_a.scale")
    write_index(folder, weight_map)
    assert [entry[:2] for entry in refused(folder)] == [
        ("M206", "layers.1.attn.wq_a.scale"),
        ("M210", "layers.1.attn.wq_a.scale"),
    ]
    weight_map["layers.1.attn.wq_a.scale"] = next(shard for shard in SHARDS if shard != home)
    write_index(folder, weight_map)
    assert {entry[:2] for entry in refused(folder)} == {
        ("M205", "layers.1.attn.wq_a.scale"),
        ("M208", "layers.1.attn.wq_a.scale"),
    }


def test_strays_are_reported_and_never_merged(folder: Path) -> None:  # R09
    header = pack_header([("norm.weight", "BF16", (128,), 256)], {})
    (folder / "a-stray.safetensors").write_bytes(header + bytes(256))
    (folder / "broken.safetensors").write_bytes(b"?")
    checkpoint = open_checkpoint(folder, CONFIG)
    assert checkpoint.strays == ("a-stray.safetensors", "broken.safetensors")
    assert checkpoint.tensor("norm.weight").any()


def test_prefix_is_optional(folder: Path, source: Path) -> None:  # R10
    renamed_tensors(folder, lambda name: f"model.{name}" if name.startswith("layers.") else name)
    checkpoint, plain = open_checkpoint(folder, CONFIG), open_checkpoint(source, CONFIG)
    assert set(checkpoint.tensors) == set(plain.tensors)
    name = "layers.0.attn.wq_a.weight"
    assert checkpoint.tensor(name).tobytes() == plain.tensor(name).tobytes()


def test_both_prefixes_at_once_are_ambiguous(folder: Path) -> None:  # R10
    home = read_index(folder)["weight_map"]["norm.weight"]
    header, payload = read_shard(folder / home)
    size = len(payload)
    header["model.norm.weight"] = {"dtype": "BF16", "shape": [128], "data_offsets": [size, size + 256]}
    write_shard(folder / home, header, payload + bytes(256))
    write_index(folder, {**read_index(folder)["weight_map"], "model.norm.weight": home})
    assert refused(folder) == [("M207", "norm.weight", "norm.weight and model.norm.weight")]


def test_a_doubled_prefix_is_not_the_tensor(folder: Path) -> None:  # R10
    renamed_tensors(folder, lambda name: f"model.model.{name}" if name == "norm.weight" else name)
    assert [entry[:2] for entry in refused(folder)] == [("M211", "model.model.norm.weight"), ("M209", "norm.weight")]


def test_wrong_dtype_and_shape_name_the_shard(folder: Path) -> None:
    home = read_index(folder)["weight_map"]["layers.0.attn.attn_sink"]
    header, payload = read_shard(folder / home)
    header["layers.0.attn.attn_sink"] |= {"dtype": "BF16", "shape": [8]}
    header["layers.0.attn.wq_b.weight"]["shape"] = [128, 512]
    header["layers.0.attn.wkv.scale"]["dtype"] = "U8"
    write_shard(folder / home, header, payload)
    assert refused(folder) == [
        ("M212", f"layers.0.attn.attn_sink in {home}", "BF16"),
        ("M213", f"layers.0.attn.attn_sink in {home}", "[8]"),
        ("M213", f"layers.0.attn.wq_b.weight in {home}", "[128, 512]"),
        ("M212", f"layers.0.attn.wkv.scale in {home}", "U8"),
    ]


def test_another_configuration_is_refused_in_few_lines(folder: Path) -> None:
    document = tiny_document()
    document["text_config"] |= {"hidden_size": 256, "n_routed_experts": 16}
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder, parse_config(document))
    problems = caught.value.problems
    assert {problem.code for problem in problems} == {"M209", "M213"} and len(problems) == 42
    assert problems[-1].path == "…" and problems[-1].found.endswith("more of this kind")


def test_parts_that_are_not_required_may_be_absent(folder: Path) -> None:
    for shard in SHARDS:
        for name in [name for name in read_shard(folder / shard)[0] if name.startswith(("vision.", "aligner.", "image_"))]:
            without_tensor(folder / shard, name)
    weight_map = read_index(folder)["weight_map"]
    kept = {n: s for n, s in weight_map.items() if not n.startswith(("vision.", "aligner.", "image_"))}
    write_index(folder, kept)
    checkpoint = open_checkpoint(folder, CONFIG, require=("text", "draft"))
    assert len(checkpoint.tensors) == 642 - 26
    found = refused(folder)
    assert len(found) == 21 and {code for code, _, _ in found} == {"M209"}
    assert len(open_checkpoint(folder, CONFIG, require=["text"]).tensors) == 642 - 26  # the draft is known and taken


def test_zero_scales_are_diagnosed_on_request(folder: Path) -> None:
    name = "layers.3.ffn.experts.5.w2.scale"
    home = read_index(folder)["weight_map"][name]
    header, payload = read_shard(folder / home)
    start, stop = header[name]["data_offsets"]
    nan = header["layers.3.attn.wkv.scale"]["data_offsets"][0]
    content = bytearray(payload)
    content[start:stop] = bytes(stop - start)
    content[nan] = 255
    write_shard(folder / home, header, bytes(content))
    checkpoint = open_checkpoint(folder, CONFIG)
    assert checkpoint.check_scales(["layers.3.attn.wq_a.scale", "norm.weight"]) == 1
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check_scales()
    found = {(problem.code, problem.path) for problem in caught.value.problems}
    assert found == {("M214", f"{name} in {home}"), ("M215", f"layers.3.attn.wkv.scale in {home}")}


def test_broken_header_beside_a_missing_shard_are_one_report(folder: Path) -> None:
    (folder / SHARDS[0]).unlink()
    (folder / SHARDS[2]).write_bytes((folder / SHARDS[2]).read_bytes()[:-1])
    assert [code for code, _, _ in refused(folder)] == ["M203", "M204"]


def test_a_packed_header_reads_back(tmp_path: Path) -> None:
    tensors = [("b", "F32", (2, 0), 0), ("é", "BF16", (3,), 6), ("c", "F8_E8M0", (), 1)]
    path = tmp_path / "x.safetensors"
    path.write_bytes(pack_header(tensors, {"format": "pt"}) + bytes(7))
    entries, problems = read_header(path)
    assert problems == [] and [entries[name].shape for name, *_ in tensors] == [(2, 0), (3,), ()]
    start = path.stat().st_size - 7
    assert [(entries[n].start - start, entries[n].stop - start) for n, *_ in tensors] == [(0, 0), (0, 6), (6, 7)]
    assert start % 8 == 0


def test_opening_does_not_follow_a_shard_out_of_the_folder(folder: Path) -> None:
    shutil.move(folder / SHARDS[0], folder.parent / "outside.safetensors")
    weight_map = read_index(folder)["weight_map"]
    moved = {n: "../outside.safetensors" if s == SHARDS[0] else s for n, s in weight_map.items()}
    write_index(folder, moved)
    assert {code for code, _, _ in refused(folder)} >= {"M202"}
