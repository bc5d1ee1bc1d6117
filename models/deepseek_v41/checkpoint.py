"""A checkpoint in a folder: index and headers checked against the tensor table, tensors as views of mapped files.

Promises: all problems of a folder are reported together before any payload is touched; only indexed shards are read; a view
copies nothing. Torch is not needed. Packing for a device is the loader's business.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tapeout.models.deepseek_v41.config import ModelConfig
from tapeout.models.deepseek_v41.errors import CheckpointError, Problem, shown
from tapeout.models.deepseek_v41.json_document import read_object
from tapeout.models.deepseek_v41.paths import is_file, is_folder
from tapeout.models.deepseek_v41.safetensors_header import Entry, read_header
from tapeout.models.deepseek_v41.tensors import Dtype, Part, TensorSpec, scale_name, tensor_table

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PREFIX = "model."
SHOWN_PER_CODE = 20  # a wrong configuration makes thousands of like problems; the rest is counted
ARRAY_DTYPES: dict[Dtype, np.dtype[np.generic]] = {
    Dtype.BF16: np.dtype(ml_dtypes.bfloat16),
    Dtype.F32: np.dtype("<f4"),
    Dtype.F8_E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    Dtype.F8_E8M0: np.dtype(np.uint8),
    Dtype.I8: np.dtype(np.uint8),
}
ALL_PARTS = (Part.TEXT, Part.DRAFT, Part.VISION)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the model and where its bytes lie: `start` to `stop` of file `shard`."""

    spec: TensorSpec
    shard: str
    start: int
    stop: int


@dataclass(frozen=True)
class Checkpoint:
    """A checked checkpoint. Names are those of the tensor table, whatever prefix the files use."""

    directory: Path
    tensors: Mapping[str, StoredTensor]
    shards: tuple[str, ...]
    strays: tuple[str, ...]  # *.safetensors beside the checkpoint that no index names; never read

    def tensor(self, name: str) -> NDArray[np.generic]:
        """Returns a read-only view of a tensor, zero-copy. E8M0 scales and packed FP4 come as uint8.

        Raises KeyError for a name that is not in `tensors`.
        """
        stored = self.tensors[name]
        raw = self._maps[stored.shard][stored.start : stored.stop]
        return raw.view(ARRAY_DTYPES[stored.spec.dtype]).reshape(stored.spec.shape)

    @property
    def stamp(self) -> str:
        """Name, size and time of the last change of each file: what tells a checkpoint from itself before it was edited, without reading it."""
        facts = [(shard, (self.directory / shard).stat()) for shard in sorted(self.shards)]
        return " ".join(f"{shard} {fact.st_size} {fact.st_mtime_ns}" for shard, fact in facts)

    @property
    def size_bytes(self) -> int:
        """Payload bytes of the tensors of this model."""
        return sum(stored.spec.size_bytes for stored in self.tensors.values())

    def check_scales(self, names: Iterable[str] | None = None) -> int:
        """Reads scale tensors and returns how many. Raises `CheckpointError` for those that are all zero bytes, or hold the NaN byte 255."""
        chosen = self.tensors if names is None else names
        scales = [name for name in chosen if self.tensors[name].spec.dtype is Dtype.F8_E8M0]
        problems = [problem for name in scales for problem in self._scale_problems(name)]
        if problems:
            raise CheckpointError(str(self.directory), _capped(problems))
        return len(scales)

    def _scale_problems(self, name: str) -> Iterator[Problem]:
        scale, where = self.tensor(name), f"{name} in {self.tensors[name].shard}"
        if scale.size and not scale.any():
            yield Problem("M214", where, "byte 0 (2^-127) everywhere", "exponents of the weight", "convert it again")
        if (scale == 255).any():
            yield Problem("M215", where, "byte 255", "bytes 0 to 254", "convert it again")

    @cached_property
    def _maps(self) -> dict[str, NDArray[np.uint8]]:
        return {name: np.asarray(np.memmap(self.directory / name, mode="r")) for name in self.shards}


def open_checkpoint(directory: str | Path, config: ModelConfig, require: Iterable[str] = ALL_PARTS) -> Checkpoint:
    """Checks index, headers and coverage of a folder and returns it as a `Checkpoint`.

    Every tensor of the parts in `require` ("text", "draft", "vision") must be there; tensors of other parts may be.
    Raises `CheckpointError` with all problems found.
    """
    folder, parts = Path(directory), frozenset(Part(part) for part in require)
    found = _Found(folder)
    weight_map = _weight_map(found)
    headers = _headers(found, weight_map)
    _agree(found, weight_map, headers)
    names = _unprefixed(found, weight_map)
    table = tensor_table(config)
    tensors = _match(found, names, weight_map, headers, table)
    _cover(found, names, table, parts)
    if found.problems:
        raise CheckpointError(str(folder), _capped(found.problems))
    return Checkpoint(folder, tensors, tuple(sorted(headers)), _strays(folder, headers))


class _Found:
    """The folder being checked and the problems so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[Problem] = []

    def refuse(self, code: str, path: str, found: str, expected: str, fix: str) -> None:
        self.problems.append(Problem(code, path, found, expected, fix))


def _capped(problems: list[Problem]) -> list[Problem]:
    kept: list[Problem] = []
    seen: Counter[str] = Counter()
    for problem in problems:
        seen[problem.code] += 1
        if seen[problem.code] <= SHOWN_PER_CODE:
            kept.append(problem)
    for code, count in seen.items():
        if count > SHOWN_PER_CODE:
            kept.append(Problem(code, "…", f"{count - SHOWN_PER_CODE} more of this kind", "none", "repair the first ones"))
    return kept


def _weight_map(found: _Found) -> dict[str, str]:
    """Returns tensor name to shard, as the index says, or as the only file does."""
    folder = found.folder
    if not is_folder(folder):
        found.refuse("M201", str(folder), "no folder", "a folder with safetensors files", "check the path")
        return {}
    if (folder / INDEX).exists():
        return _indexed(found)
    if is_file(folder / SINGLE):
        entries, problems = read_header(folder / SINGLE)
        found.problems += problems
        return {} if problems else dict.fromkeys(entries, SINGLE)
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    words = f"{len(shards)} safetensors files and no index" if shards else "no safetensors files"
    found.refuse("M201", str(folder), words, f"{INDEX} or {SINGLE}", "download the checkpoint again")
    return {}


def _indexed(found: _Found) -> dict[str, str]:
    data, problems = read_object(found.folder / INDEX, "M202", "M202")
    found.problems += [Problem("M202", p.path, p.found, p.expected, p.fix) for p in problems]
    weight_map = data.get("weight_map")
    if not isinstance(weight_map, dict):
        if not problems:
            expected = "an object from tensor name to shard"
            found.refuse("M202", f"{INDEX}: weight_map", shown(weight_map), expected, "download the index again")
        return {}
    good: dict[str, str] = {}
    for name, shard in weight_map.items():
        if isinstance(shard, str) and shard.endswith(".safetensors") and Path(shard).name == shard and "\0" not in shard:
            good[name] = shard
        else:
            where, expected = f"{INDEX}: weight_map.{name}", "the name of a .safetensors file beside the index"
            found.refuse("M202", where, shown(shard), expected, "correct the index")
    return good


def _headers(found: _Found, weight_map: Mapping[str, str]) -> dict[str, dict[str, Entry]]:
    """Returns the readable shards that the index names; missing ones are reported with what each held."""
    headers: dict[str, dict[str, Entry]] = {}
    for shard, count in sorted(Counter(weight_map.values()).items()):
        if not is_file(found.folder / shard):
            words = f"no file; it holds {count} tensor{'s' if count != 1 else ''}"
            found.refuse("M203", shard, words, "every shard of the index", "download it again")
            continue
        entries, problems = read_header(found.folder / shard)
        found.problems += problems
        if not problems:
            headers[shard] = entries
    return headers


def _agree(found: _Found, weight_map: Mapping[str, str], headers: Mapping[str, Mapping[str, Entry]]) -> None:
    """Checks that index and headers say the same, both ways."""
    for name, shard in weight_map.items():
        if shard in headers and name not in headers[shard]:
            found.refuse("M205", name, f"no such tensor in {shard}", "the tensor", "download index and shard again")
    for shard, entries in headers.items():
        for name in entries:
            home = weight_map.get(name)
            if home == shard:
                continue
            if home is None:
                found.refuse("M206", name, f"in {shard} only", "a row of the index", "download index and shard again")
            else:
                found.refuse("M208", name, f"in {shard} too", f"{home} alone, as indexed", "remove the stale shard")


def _unprefixed(found: _Found, weight_map: Mapping[str, str]) -> dict[str, str]:
    """Returns plain name to name in the files; a name with and without prefix is ambiguous."""
    names: dict[str, str] = {}
    for full in weight_map:
        plain = full.removeprefix(PREFIX)
        if plain in names:
            found.refuse("M207", plain, f"{names[plain]} and {full}", "one of them", "remove one spelling")
        names[plain] = full
    return names


def _match(
    found: _Found,
    names: Mapping[str, str],
    weight_map: Mapping[str, str],
    headers: Mapping[str, Mapping[str, Entry]],
    table: Mapping[str, TensorSpec],
) -> dict[str, StoredTensor]:
    """Returns the stored tensors that fit the table; reports unknown names and wrong dtypes and shapes."""
    tensors: dict[str, StoredTensor] = {}
    for plain, full in names.items():
        spec, shard = table.get(plain), weight_map[full]
        if spec is None:
            fix = "use a checkpoint that fits the configuration"
            found.refuse("M211", full, f"a tensor in {shard}", "tensors of the model only", fix)
            continue
        entry = headers.get(shard, {}).get(full)
        if entry is None:
            continue
        where, before = f"{full} in {shard}", len(found.problems)
        if entry.dtype != spec.dtype.value:
            found.refuse("M212", where, entry.dtype, spec.dtype.value, "convert the checkpoint again")
        if entry.shape != spec.shape:
            fix = "check that checkpoint and config.json belong together"
            found.refuse("M213", where, str(list(entry.shape)), str(list(spec.shape)), fix)
        if len(found.problems) == before:
            tensors[plain] = StoredTensor(spec, shard, entry.start, entry.stop)
    return tensors


def _cover(found: _Found, names: Mapping[str, str], table: Mapping[str, TensorSpec], parts: frozenset[Part]) -> None:
    """Reports required tensors that no index row names; shards that are missing have been reported already."""
    if not names and found.problems:
        return
    for name, spec in table.items():
        if spec.part not in parts or name in names:
            continue
        weight = name.removesuffix(".scale") + ".weight"
        if name.endswith(".scale") and weight in names and scale_name(weight) == name:
            found.refuse("M210", name, f"{weight} alone", "its E8M0 scale beside it", "convert the checkpoint again")
        else:
            expected = f"{spec.dtype.value} {list(spec.shape)}"
            found.refuse("M209", name, "nothing", expected, "use a complete checkpoint of this configuration")


def _strays(folder: Path, headers: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in folder.glob("*.safetensors") if path.name not in headers))
