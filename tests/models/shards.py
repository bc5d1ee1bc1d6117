"""Edits to a tiny checkpoint folder: headers, index and whole shards, for tests of refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
SHARDS = tuple(f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3))


def copied(source: Path, target: Path) -> Path:
    """A fresh copy of a checkpoint folder."""
    shutil.copytree(source, target)
    return target


def read_index(folder: Path) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((folder / INDEX).read_text())
    return index


def write_index(folder: Path, weight_map: dict[str, Any]) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def read_shard(path: Path) -> tuple[dict[str, Any], bytes]:
    """The header as a document and the payload."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_shard(path: Path, header: dict[str, Any] | str, payload: bytes) -> None:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + payload)


def without_tensor(path: Path, name: str) -> None:
    """Removes one tensor from a shard and closes the hole."""
    header, payload = read_shard(path)
    start, stop = header.pop(name)["data_offsets"]
    for key, member in header.items():
        if key != "__metadata__" and member["data_offsets"][0] >= stop:
            member["data_offsets"] = [offset - (stop - start) for offset in member["data_offsets"]]
    write_shard(path, header, payload[:start] + payload[stop:])


def renamed_tensors(folder: Path, rename: Any) -> None:
    """Renames tensors in shards and index alike; `rename` maps a name to a name."""
    for shard in SHARDS:
        header, payload = read_shard(folder / shard)
        write_shard(folder / shard, {key if key == "__metadata__" else rename(key): value for key, value in header.items()}, payload)
    write_index(folder, {rename(name): shard for name, shard in read_index(folder)["weight_map"].items()})
