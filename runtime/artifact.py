"""The artifact's schema, defined once: the compiler writes these classes, the runtime reads them (design, section 5). Rows about compiled
kernels are in `artifact_kernels.py`.

`write_artifact` seals and writes a folder, `load_artifact` reads one back or raises one typed error. Same data, same bytes: no
time, path or host enters. What the fields must agree on across files is in `artifact_check.py`; weights are bound in `weights.py`.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, Field, JsonValue, ValidationError

from tapeout.runtime.artifact_kernels import Count, CpuLevel, Element, GpuLevel, Kernel, Name, NpuLevel, Positive, Sha256, Strict
from tapeout.runtime.artifact_place import replacing
from tapeout.runtime.errors import (
    ArtifactFolderMissing,
    FieldsRefused,
    FileChanged,
    FileMissing,
    ManifestEdited,
    ManifestUnreadable,
    SchemaUnknown,
    TargetMissing,
)

SCHEMA = 1
ALIGNMENT = 64  # bytes; every arena offset and every buffer
LIBRARY = "kernels/cpu/libtapeout.so"
MANIFEST, PROGRAMS, WEIGHTS, TUNING = "manifest.json", "programs.json", "weights.json", "tuning.json"

EntryPoint = Literal["step", "encoder", "decoder", "sample", "draft"]
ORDER: tuple[EntryPoint, ...] = ("step", "encoder", "decoder", "sample", "draft")
"""Entry points in the order in which a step runs them."""
Extent = Literal["rows", "kept", "outputs", "sequences", "drafts"]
EXTENTS: tuple[Extent, ...] = ("rows", "kept", "outputs", "sequences", "drafts")

HOST_INPUTS: dict[str, tuple[str, ...]] = {
    "step": ("tokens", "positions", "slots", "starts", "ends", "floors", "block_table"),
    "encoder": (),
    "decoder": ("kept", "kept_starts", "kept_ends", "kept_floors", "outputs"),
    "sample": ("temperature", "top_k", "top_p", "seeds", "sample_slots", "sample_positions"),
    "draft": (
        "golden_rows",
        "draft_positions",
        "draft_slots",
        "draft_temperature",
        "draft_top_k",
        "draft_top_p",
        "draft_seeds",
    ),
}
"""Inputs that the engine fills; any other input of a program is a result of one that runs before it."""

HOST_RESULTS: dict[str, tuple[str, ...]] = {
    "decoder": ("logits",),
    "sample": ("sampled", "logprobs"),
    "draft": ("drafts", "confidences"),
}
"""Results that the engine reads."""

BITS: dict[str, int] = {
    "f64": 64, "f32": 32, "f16": 16, "bf16": 16, "f8E4M3FN": 8, "f8E8M0FNU": 8, "f4E2M1FN": 4,
    "i64": 64, "i32": 32, "i16": 16, "i8": 8, "ui8": 8, "i1": 8,
}  # fmt: skip
"""Element names of MLIR and their bits in memory."""


class ModelIdentity(Strict):
    """Which model: `config` is its canonical config.json, `fingerprint` what `config_fingerprint` makes of it."""

    architecture: Name
    config: dict[str, JsonValue]
    fingerprint: Sha256


class Options(Strict):
    """What was decided at compile time: rows of a step, slots, rows that may ask for logits, positions and tokens of a cache block."""

    max_rows: Positive
    max_sequences: Positive
    max_outputs: Positive
    max_context: Positive
    block_tokens: Positive
    workspace_bytes: Count
    cpu: Name


class StatePart(Strict):
    part: Name
    dtype: Element
    row_bytes: Positive


class StateSpec(Strict):
    """One state. A ring holds `length` positions a slot; blocks hold one entry for each `ratio` tokens of a cache block."""

    name: Name
    kind: Literal["ring", "blocks"]
    length: Positive | None = None
    ratio: Positive | None = None
    entry_shape: tuple[Positive, ...]
    parts: Annotated[tuple[StatePart, ...], Field(min_length=1)]
    bytes_per_entry: Positive


class Manifest(Strict):
    """The root. `identity` is the hash of everything else in it, and it hashes every other file: it names the artifact."""

    schema_number: Literal[1] = Field(alias="schema", default=1)
    identity: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""
    model: ModelIdentity
    targets: Annotated[tuple[Name, ...], Field(min_length=1)]
    options: Options
    cpu: CpuLevel
    gpu: GpuLevel | None = None
    npu: NpuLevel | None = None
    row_buckets: Annotated[tuple[Positive, ...], Field(min_length=1)]
    extents: tuple[Extent, ...] = EXTENTS
    states: tuple[StateSpec, ...]
    toolchain: dict[str, str]
    kernels: tuple[Kernel, ...]
    files: dict[str, Sha256] = Field(default_factory=dict)


class Value(Strict):
    """A named buffer outside the arena. The first axis of `shape` may be the name of an extent."""

    name: Name
    part: Name = "values"
    dtype: Element
    shape: tuple[Count | Extent, ...]
    extent: Extent | None = None


Ref = Annotated[
    tuple[Literal["arena"], Count]
    | tuple[Literal["io"], str, str]
    | tuple[Literal["weight"], str, str]
    | tuple[Literal["state"], str, str]
    | tuple[Literal["extent"], str],
    Field(union_mode="left_to_right"),
]
"""What a kernel argument points at: arena offset; io name, part; weight operand, part; state name, part; extent cell."""


class Launch(Strict):
    """One kernel call. `cost` gives, for each quantity (bytes, bf16, fp8, ...), coefficients of the terms of the cost model.

    `grid` is the most instances that the bucket can ask for; without it the kernel finds its own. `after` says how many launches back those lie
    that this one waits for, besides all of the programs before; without it, for every launch in front.
    """

    kernel: Count
    buffers: tuple[Ref, ...]
    cost: dict[str, dict[str, float]] = Field(default_factory=dict)
    grid: tuple[Positive, Positive, Positive] | None = None
    after: tuple[Positive, ...] | None = None


class Lifetime(Strict):
    """Bytes of the arena that launches `first` to `last` use for one value."""

    offset: Count
    bytes: Count
    first: Count
    last: Count


class Program(Strict):
    arena_bytes: Count
    inputs: tuple[Value, ...]
    results: tuple[Value, ...]
    launches: tuple[Launch, ...]
    lifetimes: tuple[Lifetime, ...] | None = None


class Programs(Strict):
    """Programs by entry point and row bucket (a decimal string in the file)."""

    programs: dict[EntryPoint, dict[str, Program]]


class Rotary(Strict):
    """A rotary table [positions, 2 * len(frequencies)] float32: cosines then sines. Frequencies in radians per position."""

    frequencies: Annotated[tuple[float, ...], Field(min_length=1)]
    positions: Annotated[int, Field(ge=1, le=2**24)]  # float32 counts exactly up to here


class TokenMap(Strict):
    """The map of token ids to compressed ids, int32 [vocabulary]; built from the checkpoint's tokenizer."""


class Derived(Strict):
    """A table that no tensor holds; exactly one rule is given."""

    rotary: Rotary | None = None
    token_map: TokenMap | None = None


class WeightPart(Strict):
    """One buffer of an operand: `bytes` in memory, `shape` after the transforms, made of `tensors` in order.

    `least_scale` and `most_scale` of a part of E8M0 scales are the smallest and the largest byte that its kernels multiply exactly by, None where
    they take all; byte 0 over a group of zeros is always fine. `stored` where tensors of several shapes or names make one matrix: the shapes that
    they have in turn, over and over.
    """

    part: Name
    dtype: Element
    shape: tuple[Count, ...]
    bytes: Count
    layout: Literal["as_stored", "packed"]
    tensors: tuple[Name, ...]
    transforms: tuple[str, ...] = ()
    least_scale: Count | None = None
    most_scale: Count | None = None
    stored: tuple[tuple[Count, ...], ...] = ()


class WeightOperand(Strict):
    name: Name
    kind: Literal["weight", "table"]
    parts: Annotated[tuple[WeightPart, ...], Field(min_length=1)]
    derived: Derived | None = None


class Weights(Strict):
    operands: tuple[WeightOperand, ...]


@dataclass(frozen=True)
class ArtifactData:
    """All that an artifact says, before it is sealed: `manifest.files` and `manifest.identity` are filled in by the writer."""

    manifest: Manifest
    programs: Programs
    weights: Weights
    tuning: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Artifact:
    """A checked artifact on disk. Programs are keyed by entry point, then bucket."""

    directory: Path
    manifest: Manifest
    programs: Mapping[str, Mapping[int, Program]]
    weights: tuple[WeightOperand, ...]

    @property
    def target(self) -> str:
        """The one target that the artifact is compiled for."""
        return self.manifest.targets[0]

    @property
    def library(self) -> Path:
        """The kernel library of the CPU target."""
        return self.directory / LIBRARY

    @property
    def buckets(self) -> tuple[int, ...]:
        """Row buckets, ascending."""
        return tuple(sorted(self.manifest.row_buckets))

    @property
    def draft_block(self) -> int:
        """Tokens that one draft proposes; 0 if the artifact has no draft program."""
        return draft_block(self.programs)

    def bound(self, extent: str, bucket: int) -> int:
        """The most that `extent` can count in a program of `bucket`."""
        options = self.manifest.options
        return extent_bound(extent, bucket, options.max_sequences, options.max_outputs, self.draft_block)


def extent_bound(extent: str, bucket: int, max_sequences: int, max_outputs: int, block: int) -> int:
    """Rows and kept rows are bounded by the bucket, outputs and sequences by their own limits too, drafts by `block` for each sequence."""
    sequences = min(bucket, max_sequences)
    return {"sequences": sequences, "drafts": sequences * block, "outputs": min(bucket, max_outputs)}.get(extent, bucket)


def draft_block(programs: Mapping[str, Mapping[int, Program]]) -> int:
    """The second axis of the result `drafts`, 0 without one."""
    for program in programs.get("draft", {}).values():
        for value in program.results:
            if value.name == "drafts" and len(value.shape) == 2 and isinstance(value.shape[1], int):
                return value.shape[1]
    return 0


def canonical_json(value: object) -> bytes:
    """JSON in its one form: sorted keys, indent 1, trailing newline, ASCII, no NaN."""
    return (json.dumps(value, sort_keys=True, indent=1, allow_nan=False) + "\n").encode("ascii")


def parsed_json(content: bytes) -> Any:
    """What JSON says. Raises ValueError for what `canonical_json` could not write, and for nesting beyond what can be read."""

    def refused(name: str) -> NoReturn:
        raise ValueError(f"{name} is no number of JSON")

    try:
        return json.loads(content, parse_constant=refused)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def config_fingerprint(config: Mapping[str, JsonValue]) -> str:
    """The identity of a configuration: SHA-256 of its canonical JSON."""
    return hashlib.sha256(canonical_json(config)).hexdigest()


def manifest_identity(manifest: Mapping[str, object]) -> str:
    """The hash of a manifest (as JSON data) without its own `identity`."""
    rest = {key: value for key, value in manifest.items() if key != "identity"}
    return hashlib.sha256(canonical_json(rest)).hexdigest()


def json_data(model: BaseModel) -> dict[str, Any]:
    """A schema object as JSON data with the file's own key names; absent optional fields are null."""
    return model.model_dump(mode="json", by_alias=True)


# -- writing


def write_artifact(directory: Path | str, data: ArtifactData, files: Mapping[str, bytes]) -> Path:
    """Writes an artifact aside and renames it into place; an artifact that is there already is replaced.

    `files` holds the rest by relative path (library, sources, IR). Raises ArtifactOccupied or ArtifactUnwritable (artifact_place.py).
    """
    with replacing(directory) as aside:
        for path, content in _sealed(data, files).items():
            target = aside / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    return Path(directory)


def _sealed(data: ArtifactData, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """All files of the artifact, the manifest last and with the hash of every other one."""
    content = {
        PROGRAMS: canonical_json(json_data(data.programs)),
        WEIGHTS: canonical_json(json_data(data.weights)),
        TUNING: canonical_json(data.tuning),
        **files,
    }
    manifest = json_data(data.manifest)
    manifest["files"] = {path: hashlib.sha256(content[path]).hexdigest() for path in sorted(content)}
    manifest["identity"] = manifest_identity(manifest)
    return {**content, MANIFEST: canonical_json(manifest)}


# -- loading


def load_artifact(directory: Path | str, *, target: str = "cpu", host_features: frozenset[str] | None = None) -> Artifact:
    """Reads and checks an artifact: folder, manifest, schema, fields, target, identity, files, weights, programs, processor.

    The first thing that is wrong is raised as an ArtifactError. `host_features` replaces what /proc/cpuinfo says.
    """
    from tapeout.runtime import artifact_check as check

    directory = Path(directory)
    if not directory.is_dir():
        raise ArtifactFolderMissing(str(directory), "a file" if directory.exists() else "nothing")
    manifest = _manifest(directory / MANIFEST, target)
    contents = {path: _intact(directory, path, manifest.files[path]) for path in sorted(manifest.files)}
    check.files(directory, manifest)
    operands = _parse(Weights, contents[WEIGHTS], directory / WEIGHTS).operands
    entries = _parse(Programs, contents[PROGRAMS], directory / PROGRAMS).programs
    check.manifest(directory, manifest)
    check.weights(directory, operands)
    artifact = Artifact(directory, manifest, check.by_bucket(directory, manifest, entries), operands)
    check.programs(artifact)
    check.processor(artifact, check.host_features() if host_features is None else host_features)
    return artifact


def _manifest(path: Path, target: str) -> Manifest:
    try:
        content = path.read_bytes()
        found = parsed_json(content)
    except OSError as error:
        raise ManifestUnreadable(str(path), error.strerror or str(error), "a readable file", remedy="check the path and its permissions") from None
    except ValueError as error:
        raise ManifestUnreadable(str(path), str(error), "a JSON object") from None
    if not isinstance(found, dict):
        raise ManifestUnreadable(str(path), f"a JSON {type(found).__name__}", "a JSON object")
    number = found.get("schema")
    if type(number) is not int or number != SCHEMA:
        raise SchemaUnknown(f"{path}: schema", json.dumps(number), SCHEMA)
    manifest = _parse(Manifest, content, path)
    if target not in manifest.targets:
        raise TargetMissing(f"{path}: targets", ", ".join(manifest.targets), target)
    if manifest_identity(found) != manifest.identity:
        raise ManifestEdited(f"{path}: identity", manifest.identity or "none", manifest_identity(found))
    return manifest


Model = TypeVar("Model", bound=BaseModel)


def _parse(model: type[Model], content: bytes, path: Path) -> Model:
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        raise FieldsRefused(str(path), [_problem(dict(item)) for item in error.errors(include_url=False)]) from None


def _problem(item: dict[str, Any]) -> str:
    place = ".".join(str(key) for key in item["loc"]) or "the whole file"
    shown = repr(item.get("input"))
    return f"{place}: {item['msg']} (found {shown if len(shown) <= 60 else shown[:59] + '…'})"


def _intact(directory: Path, path: str, expected: str) -> bytes:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or pure.as_posix() != path:
        raise FileMissing(f"{directory / MANIFEST}: files", path, "a plain relative path inside the artifact")
    try:
        content = (directory / path).read_bytes()
    except OSError as error:
        raise FileMissing(str(directory / path), error.strerror or str(error), "a readable file") from None
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise FileChanged(str(directory / path), f"SHA-256 {found}", expected)
    return content
