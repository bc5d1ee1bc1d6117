"""Corrupted artifacts: every field changed, one at a time, is one typed error that names what is wrong; R51 to the letter.

Two corpora. Edits of the files as an attacker of luck would make them (hashes stay as they were), and lies that are sealed again, so
that only the consistency checks can see them.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tapeout.runtime import errors
from tapeout.runtime.artifact import canonical_json, load_artifact, manifest_identity
from tapeout.runtime.artifact_set import open_artifact
from tapeout.runtime.errors import ArtifactError

Json = Any


def leaves(tree: Json, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all scalars."""
    if isinstance(tree, dict | list):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            yield from leaves(tree[key], (*path, key))
    else:
        yield path


def changed(value: Json) -> Json:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return ("0" if value[:1] != "0" else "1") + value[1:]
    return "something"


def edit(tree: Json, path: tuple[Any, ...], change: Callable[[Json], Json]) -> None:
    for key in path[:-1]:
        tree = tree[key]
    tree[path[-1]] = change(tree[path[-1]])


@pytest.fixture
def copy(toy: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(toy, tmp_path / "artifact"))


def read(directory: Path, name: str) -> Json:
    return json.loads((directory / name).read_bytes())


def refusal(directory: Path) -> ArtifactError:
    with pytest.raises(ArtifactError) as refused:
        load_artifact(directory)
    message = str(refused.value)
    assert message.startswith(f"[{refused.value.code}] {refused.value.sentence} - "), message
    assert str(directory) in message and "\n" not in message, message
    return refused.value


# -- edits: every scalar of every file, with another value and with a value of another type


def test_every_field_of_the_manifest(toy: Path, copy: Path) -> None:
    original = read(toy, "manifest.json")
    paths = list(leaves(original))
    assert len(paths) > 120
    for path in paths:
        for change in (changed, lambda _: {"an": "object"}):
            manifest = json.loads(json.dumps(original))
            edit(manifest, path, change)
            (copy / "manifest.json").write_bytes(canonical_json(manifest))
            refusal(copy)


def test_every_key_of_the_manifest_missing_or_added(toy: Path, copy: Path) -> None:
    original = read(toy, "manifest.json")
    for key in original:
        manifest = {name: value for name, value in original.items() if name != key}
        (copy / "manifest.json").write_bytes(canonical_json(manifest))
        refusal(copy)
    for section in ("model", "options", "cpu"):
        manifest = json.loads(json.dumps(original))
        manifest[section]["extra"] = 1
        (copy / "manifest.json").write_bytes(canonical_json(manifest))
        assert refusal(copy).code == "A104"


@pytest.mark.parametrize("name", ["programs.json", "weights.json", "tuning.json", "kernels/cpu/libtapeout.so", "source/cpu/toy.mlir"])
def test_every_file_changed_or_gone(copy: Path, name: str) -> None:
    content = (copy / name).read_bytes()
    for position in (0, len(content) // 2, len(content) - 1):
        (copy / name).write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        assert refusal(copy).code == "A108"
    (copy / name).write_bytes(content + b"\n")
    assert refusal(copy).code == "A108"
    (copy / name).unlink()
    assert refusal(copy).code == "A107"
    (copy / name).mkdir()
    assert refusal(copy).code == "A107"


def test_a_manifest_that_may_not_be_read_says_so(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refused)
    assert str(refusal(copy)).endswith("manifest.json - found Permission denied, expected a readable file - check the path and its permissions")


NONE = [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"schema": 1}', b'{"schema": 1, "schema": 1}', b"[" * 100_000, b'{"schema":' * 100_000]


@pytest.mark.parametrize("content", NONE, ids=lambda content: repr(content[:24]))
def test_a_manifest_that_is_none(copy: Path, content: bytes) -> None:
    (copy / "manifest.json").write_bytes(content)
    assert refusal(copy).code in ("A102", "A104")
    with pytest.raises(ArtifactError):
        open_artifact(copy)
    (copy / "manifest.json").unlink()
    assert refusal(copy).code == "A102"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_does_not_have(copy: Path, number: str) -> None:
    content = (copy / "manifest.json").read_text()
    assert '"ratio": 0.5' in content
    (copy / "manifest.json").write_text(content.replace('"ratio": 0.5', f'"ratio": {number}'))
    assert f"[A102] the artifact has no readable manifest - {copy / 'manifest.json'} - found {number} is no number of JSON" in str(refusal(copy))


# -- lies: sealed again after the change, so only what they say is wrong


def seal(directory: Path, name: str, tree: Json) -> None:
    """Writes a changed file and repairs hashes and identity."""
    (directory / name).write_bytes(canonical_json(tree))
    manifest = tree if name == "manifest.json" else read(directory, "manifest.json")
    if name != "manifest.json":
        manifest["files"][name] = hashlib.sha256(canonical_json(tree)).hexdigest()
    manifest["identity"] = manifest_identity(manifest)
    (directory / "manifest.json").write_bytes(canonical_json(manifest))


def put(*path: Any) -> Callable[[Json], None]:
    """An edit: all but the last item lead to the place, the last one is put there."""
    return lambda tree: edit(tree, path[:-1], lambda _: path[-1])


def drop(*path: Any) -> Callable[[Json], None]:
    def change(tree: Json) -> None:
        for key in path[:-1]:
            tree = tree[key]
        del tree[path[-1]]

    return change


def double(*path: Any) -> Callable[[Json], None]:
    """Repeats the first item of a list."""
    return lambda tree: edit(tree, path, lambda items: [items[0], *items])


P, W, M = "programs.json", "weights.json", "manifest.json"
STEP, ENCODER, DECODER = ("programs", "step", "4"), ("programs", "encoder", "16"), ("programs", "decoder", "32")
EMBED, ROTARY, PACKED = ("operands", 0), ("operands", 1), ("operands", 2)

LIES: dict[str, tuple[str, Callable[[Json], None], str, str]] = {
    # name: file, change, code, words
    "kernel out of range": (P, put(*STEP, "launches", 0, "kernel", 8), "A109", "found 8, expected below 8"),
    "kernel negative": (P, put(*STEP, "launches", 0, "kernel", -1), "A104", "launches.0.kernel"),
    "kernel a float": (P, put(*STEP, "launches", 0, "kernel", 1.0), "A104", "valid integer"),
    "arena past the end": (P, put(*ENCODER, "launches", 0, "buffers", 2, ["arena", 3136]), "A109", "arena offset 3136"),
    "arena unaligned": (P, put(*ENCODER, "launches", 0, "buffers", 2, ["arena", 32]), "A109", "a multiple of 64 below 3136"),
    "arena negative": (P, put(*ENCODER, "launches", 0, "buffers", 2, ["arena", -64]), "A104", "buffers.2"),
    "arena too small": (P, put(*ENCODER, "arena_bytes", 64), "A109", "arena offset 64"),
    "io unknown": (P, put(*ENCODER, "launches", 0, "buffers", 0, ["io", "patchd", "values"]), "A109", "such as patched.values"),
    "io of another program": (P, put(*ENCODER, "launches", 0, "buffers", 0, ["io", "logits", "values"]), "A109", "io logits.values"),
    "io part unknown": (P, put(*ENCODER, "launches", 0, "buffers", 0, ["io", "patched", "codes"]), "A109", "io patched.codes"),
    "io without part": (P, put(*ENCODER, "launches", 0, "buffers", 0, ["io", "patched"]), "A104", "buffers.0"),
    "weight unknown": (P, put(*ENCODER, "launches", 0, "buffers", 1, ["weight", "embd", "values"]), "A109", "such as embed.values"),
    "weight part unknown": (P, put(*ENCODER, "launches", 0, "buffers", 1, ["weight", "embed", "codes"]), "A109", "weight embed.codes"),
    "state unknown": (P, put(*ENCODER, "launches", 3, "buffers", 2, ["state", "entry", "values"]), "A109", "such as entries.values"),
    "state part unknown": (P, put(*ENCODER, "launches", 3, "buffers", 2, ["state", "entries", "scales"]), "A109", "state entries.scales"),
    "extent unknown": (P, put(*ENCODER, "launches", 3, "buffers", 4, ["extent", "columns"]), "A109", "extent columns"),
    "reference of no kind": (P, put(*ENCODER, "launches", 3, "buffers", 4, ["disk", "x"]), "A104", "buffers.4"),
    "reference empty": (P, put(*ENCODER, "launches", 3, "buffers", 4, []), "A104", "buffers.4"),
    "entry point missing": (P, drop("programs", "encoder"), "A109", "no entry point encoder"),
    "entry point unknown": (P, put("programs", "verify", {}), "A104", "verify"),
    "bucket missing": (P, drop("programs", "sample", "16"), "A109", "buckets"),
    "bucket unknown": (P, put("programs", "sample", "17", {"arena_bytes": 0, "inputs": [], "results": [], "launches": []}), "A109", "'17'"),
    "bucket in another spelling": (
        P, lambda t: t["programs"]["sample"].update({"016": t["programs"]["sample"].pop("16")}), "A109", "'016'"),
    "input nobody fills": (P, put(*DECODER, "inputs", 0, "name", "stream"), "A109", "found stream"),
    "input filled too late": (P, put(*STEP, "inputs", 0, "name", "kept"), "A109", "found kept"),
    "result missing": (P, put("programs", "sample", "4", "results", []), "A109", "no logprobs"),
    "value of unknown element": (P, put(*STEP, "inputs", 0, "dtype", "int32"), "A104", "inputs.0.dtype"),
    "value shape negative": (P, put(*STEP, "inputs", 6, "shape", 0, -5), "A104", "inputs.6.shape.0"),
    "value extent without axis": (P, put(*STEP, "inputs", 6, "extent", "rows"), "A109", "block_table"),
    "value axis without extent": (P, put(*STEP, "inputs", 0, "extent", None), "A109", "found shape ['rows'], extent None"),
    "value with two extents": (P, put(*STEP, "inputs", 0, "shape", ["rows", "rows"]), "A109", "names the first axis"),
    "value of two shapes": (P, put(*DECODER, "inputs", 8, "shape", 1, 15), "A109", "block_table"),
    "value of two elements": (P, put(*DECODER, "inputs", 0, "dtype", "f32"), "A109", "streams"),
    "launch without buffers": (P, drop(*STEP, "launches", 0, "buffers"), "A104", "Field required"),
    "launch behind one before the first": (P, put(*STEP, "launches", 0, "after", [1]), "A109", "distances to the 0 launches in front"),
    "launch with more": (P, put(*STEP, "launches", 0, "grid", 4), "A104", "launches.0.grid"),
    "cost a word": (P, put(*STEP, "launches", 0, "cost", "bytes", "rows", "four"), "A104", "cost.bytes.rows"),
    "lifetime past the arena": (
        P, put(*ENCODER, "lifetimes", [{"offset": 64, "bytes": 3073, "first": 0, "last": 1}]), "A109", "lifetimes"),
    "lifetime past the launches": (P, put(*ENCODER, "lifetimes", [{"offset": 64, "bytes": 8, "first": 0, "last": 4}]), "A109", "lifetimes"),
    "programs a list": (P, put("programs", []), "A104", "programs"),
    "operand twice": (W, double("operands"), "A110", "the name twice"),
    "operand without parts": (W, put(*EMBED, "parts", []), "A104", "operands.0.parts"),
    "operand of no kind": (W, put(*EMBED, "kind", "bias"), "A104", "operands.0.kind"),
    "part twice": (W, double(*EMBED, "parts"), "A110", "a part twice"),
    "part bytes": (W, put(*EMBED, "parts", 0, "bytes", 147), "A110", "found 147, expected 148, from shape [37] of i32"),
    "part shape": (W, put(*EMBED, "parts", 0, "shape", 0, 38), "A110", "expected 152"),
    "part element": (W, put(*EMBED, "parts", 0, "dtype", "i16"), "A110", "expected 74"),
    "part layout": (W, put(*EMBED, "parts", 0, "layout", "tiled"), "A104", "layout"),
    "as stored of two tensors": (W, put(*EMBED, "parts", 0, "tensors", ["a", "b"]), "A110", "one tensor and no transform"),
    "as stored with a transform": (W, put(*EMBED, "parts", 0, "transforms", ["transpose"]), "A110", "one tensor and no transform"),
    "packed of no tensor": (W, put(*PACKED, "parts", 0, "tensors", []), "A110", "no tensor"),
    "derived from tensors": (W, put(*ROTARY, "parts", 0, "tensors", ["x"]), "A110", "in a derived table"),
    "derived by two rules": (W, put(*ROTARY, "derived", "token_map", {}), "A110", "rotary or token_map"),
    "derived by no rule": (W, put(*ROTARY, "derived", "rotary", None), "A110", "rotary or token_map"),
    "rotary without frequencies": (W, put(*ROTARY, "derived", "rotary", "frequencies", []), "A104", "frequencies"),
    "rotary past exact counting": (W, put(*ROTARY, "derived", "rotary", "positions", 2**24 + 1), "A104", "positions"),
    "fingerprint": (M, put("model", "fingerprint", "0" * 64), "A104", "model.fingerprint"),
    "config changed": (M, put("model", "config", "ratio", 0.75), "A104", "model.fingerprint"),
    "buckets descending": (M, put("row_buckets", [16, 4, 32]), "A104", "row_buckets"),
    "buckets twice": (M, put("row_buckets", [4, 4, 32]), "A104", "row_buckets"),
    "buckets others": (M, put("row_buckets", [4, 16, 64]), "A109", "buckets"),
    "bucket zero": (M, put("row_buckets", 0, 0), "A104", "row_buckets.0"),
    "more rows than buckets": (M, put("options", "max_rows", 33), "A104", "options.max_rows"),
    "more sequences than rows": (M, put("options", "max_sequences", 25), "A104", "options.max_sequences"),
    "fewer outputs than sequences": (M, put("options", "max_outputs", 1), "A104", "options.max_outputs"),
    "extent no longer known": (M, put("extents", ["rows"]), "A109", "extent outputs"),
    "state twice": (M, double("states"), "A104", "states"),
    "state a ring without length": (M, put("states", 1, "length", None), "A104", "length for a ring"),
    "state blocks with length": (M, put("states", 0, "length", 4), "A104", "ratio for blocks"),
    "state ratio": (M, put("states", 0, "ratio", 3), "A104", "a divisor of block_tokens = 4"),
    "state bytes": (M, put("states", 0, "bytes_per_entry", 5), "A104", "found 5, expected 4"),
    "state gone": (M, drop("states", 1), "A109", "state last.values"),
    "kernel twice": (M, double("kernels"), "A104", "kernels"),
    "kernel gone": (M, lambda t: t.update(kernels=t["kernels"][:4]), "A109", "found 6, expected below 4"),
    "kernel of another target": (M, put("kernels", 0, "target", "sm90"), "A104", "kernels.step.target"),
    "kernel symbol": (M, put("kernels", 0, "symbol", "rm -rf"), "A104", "kernels.0.symbol"),
    "kernel ABI": (M, put("kernels", 0, "abi", "registers"), "A104", "kernels.0.abi"),
    "program file not listed": (M, drop("files", "programs.json"), "A107", "no entry programs.json"),
    "library not listed": (M, drop("files", "kernels/cpu/libtapeout.so"), "A107", "no entry kernels/cpu/libtapeout.so"),
    "file outside": (M, put("files", "../secret", "0" * 64), "A107", "inside the artifact"),
    "file absolute": (M, put("files", "/etc/hostname", "0" * 64), "A107", "inside the artifact"),
    "processor": (M, put("cpu", "features", ["fpu", "quantum"]), "A111", "a processor without quantum"),
}  # fmt: skip


def test_the_corpus_is_large() -> None:
    assert len(LIES) >= 60


@pytest.mark.parametrize("lie", list(LIES))
def test_a_sealed_lie_is_refused(copy: Path, lie: str) -> None:
    name, change, code, words = LIES[lie]
    tree = read(copy, name)
    try:
        change(tree)
    except KeyError:  # `put` into a place that is not there yet adds it
        adding(tree, change)
    seal(copy, name, tree)
    refused = refusal(copy)
    assert refused.code == code, refused
    assert words in str(refused), refused


def adding(tree: Json, change: Callable[[Json], None]) -> None:
    cells = change.__closure__ or ()
    path = next(cell.cell_contents for cell in cells if isinstance(cell.cell_contents, tuple))
    *lead, key, value = path
    for step in lead:
        tree = tree[step]
    tree[key] = value


@pytest.mark.parametrize("change", [-1, 1])
def test_a_kernel_takes_as_many_buffers_as_its_launches_give(copy: Path, change: int) -> None:
    launch, manifest = read(copy, P)["programs"]["step"]["4"]["launches"][0], read(copy, M)
    kernel, count = manifest["kernels"][launch["kernel"]], len(launch["buffers"])
    kernel["parameters"] = ["i32"] * (count + change)
    seal(copy, M, manifest)
    refused = refusal(copy)
    assert refused.code == "A109" and f"found {count} buffers, expected {count + change}, what {kernel['symbol']} takes" in str(refused)


# -- R51: four messages, whole


def test_another_chip(copy: Path) -> None:
    manifest = read(copy, "manifest.json")
    manifest["targets"] = ["sm90"]
    seal(copy, "manifest.json", manifest)
    assert str(refusal(copy)) == (
        f"[A105] the artifact holds no code for this device - {copy}/manifest.json: targets - found sm90, expected cpu - "
        "compile for it: `tapeout compile --target cpu`"
    )


def test_another_schema(copy: Path) -> None:
    manifest = read(copy, "manifest.json")
    for number, shown in ((2, "2"), (True, "true"), ("1", '"1"'), (1.0, "1.0"), (None, "null")):
        manifest["schema"] = number
        seal(copy, "manifest.json", manifest)
        assert str(refusal(copy)) == (
            "[A103] the artifact was written in a schema that this runtime does not read - "
            f"{copy}/manifest.json: schema - found {shown}, expected 1 - compile it again with the installed version: `tapeout compile`"
        )


def test_another_kernel_library(copy: Path) -> None:
    library = copy / "kernels/cpu/libtapeout.so"
    expected = hashlib.sha256(library.read_bytes()).hexdigest()
    library.write_bytes(b"other")
    found = hashlib.sha256(b"other").hexdigest()
    assert str(refusal(copy)) == (
        f"[A108] a file of the artifact is not the one that was written - {library} - found SHA-256 {found}, expected {expected} - "
        "compile the artifact again with `tapeout compile`"
    )


def test_another_weights_file(copy: Path) -> None:
    expected = hashlib.sha256((copy / "weights.json").read_bytes()).hexdigest()
    (copy / "weights.json").write_bytes(b"{}")
    found = hashlib.sha256(b"{}").hexdigest()
    assert str(refusal(copy)) == (
        f"[A108] a file of the artifact is not the one that was written - {copy}/weights.json - found SHA-256 {found}, "
        f"expected {expected} - compile the artifact again with `tapeout compile`"
    )


def test_another_processor(toy: Path) -> None:
    with pytest.raises(errors.CpuFeatureMissing) as refused:
        load_artifact(toy, host_features=frozenset({"sse2"}))
    assert str(refused.value) == (
        f"[A111] the artifact needs processor features that this machine does not have - {toy}/manifest.json: cpu.features - "
        "found a processor without fpu, expected x86-64 - compile for a lower level: `tapeout compile --cpu x86-64-v3`"
    )
