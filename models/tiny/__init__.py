"""A small checkpoint of the same architecture, written on demand: six layers, 5.8 million random parameters.

`write_tiny` is deterministic: same seed, same bytes. It leaves a Hugging Face folder that every reader here takes as it takes
the released one.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from tapeout.models.deepseek_v41.config import ModelConfig, shipped_config
from tapeout.models.deepseek_v41.safetensors_header import pack_header
from tapeout.models.deepseek_v41.tensors import TensorSpec
from tapeout.models.tiny.tokenizer import SPECIALS, token_map_json, tokenizer_json
from tapeout.models.tiny.weights import Array, Values, random_weights

__all__ = ["random_weights", "write_checkpoint", "write_shards", "write_tiny", "write_tokenizer"]

SHARDS = 3
CONFIG = Path(__file__).parent.parent / "deepseek_v41" / "config-tiny.json"


def write_tiny(directory: str | Path, seed: int = 0) -> Path:
    """Writes config, tokenizer, token map, three shards and their index; returns the folder. Raises OSError."""
    folder, config = Path(directory), shipped_config("tiny")
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "config.json", [CONFIG.read_bytes()])
    write_tokenizer(folder, config)
    write_checkpoint(folder, config, seed)
    return folder


def write_tokenizer(folder: Path, config: ModelConfig) -> None:
    """Writes tokenizer and token map of any configuration. Raises OSError."""
    _write(folder / "tokenizer.json", [tokenizer_json(config).encode()])
    names = dict(zip(("bos_token", "eos_token", "pad_token"), SPECIALS, strict=True))
    names |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    _write(folder / "tokenizer_config.json", [_json(names)])
    _write(folder / "engram_token_map.json", [token_map_json(config).encode()])


def write_checkpoint(folder: Path, config: ModelConfig, seed: int = 0, shards: int = SHARDS, values: Values | None = None) -> None:
    """Writes random weights of any configuration as `shards` safetensors files and an index; `values` as in `random_weights`. Raises OSError."""
    write_shards(folder, list(random_weights(config, seed, values)), shards)


def write_shards(folder: Path, stored: list[tuple[TensorSpec, Array]], shards: int) -> None:
    """Writes tensors, in order and of about equal bytes, as `shards` safetensors files with an index. Raises OSError."""
    weight_map: dict[str, str] = {}
    for i, unsorted in enumerate(_parts(stored, shards), 1):
        part = sorted(unsorted, key=lambda pair: -pair[0].dtype.width)  # wide elements first keeps all aligned
        name = f"model-{i:05}-of-{shards:05}.safetensors"
        header = pack_header(((s.name, s.dtype.value, s.shape, s.size_bytes) for s, _ in part), {"format": "pt"})
        _write(folder / name, [header, *(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for _, array in part)])
        weight_map |= {spec.name: name for spec, _ in part}
    index = {"metadata": {"total_size": sum(spec.size_bytes for spec, _ in stored)}, "weight_map": weight_map}
    _write(folder / "model.safetensors.index.json", [_json(index)])


def _parts(stored: list[tuple[TensorSpec, Array]], count: int) -> list[list[tuple[TensorSpec, Array]]]:
    """Splits the tensors, in order, into `count` runs of about equal bytes."""
    total = sum(spec.size_bytes for spec, _ in stored)
    parts: list[list[tuple[TensorSpec, Array]]] = [[] for _ in range(count)]
    before = 0
    for spec, values in stored:
        parts[min(before * count // total, count - 1)].append((spec, values))
        before += spec.size_bytes
    return parts


def _write(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Writes aside and renames, so that a reader never sees half a file; what does not fit leaves nothing."""
    aside = path.with_name(f"{path.name}.partial")
    try:
        with aside.open("wb") as file:
            file.writelines(chunks)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()
