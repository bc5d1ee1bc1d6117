"""A corpus of broken configurations, indexes and shards: each gives one typed error that names the place, nothing else.

The cases are generated: every key of a configuration is removed and set to values of wrong kinds; indexes and shards are
broken one way at a time; and random edits of whole files must either be read or be refused.
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tapeout.models.deepseek_v41.checkpoint import open_checkpoint
from tapeout.models.deepseek_v41.config import ConfigError, load_config, parse_config, shipped_config
from tapeout.models.deepseek_v41.errors import CODES, CheckpointError, InputError
from tapeout.models.deepseek_v41.spelling import BOOKKEEPING
from tapeout.models.deepseek_v41.tokenizer import load_tokenizer
from tapeout.models.tiny import write_tiny
from tests.models.shards import INDEX, SHARDS, copied, read_index, read_shard, write_index, write_shard
from tests.models.tiny_configs import respelled, tiny_document

CONFIG = shipped_config("tiny")
IGNORED = {*BOOKKEEPING, "model_type", "tie_word_embeddings"}
WRONG: dict[str, Any] = {
    "null": None,
    "text": "1",
    "true": True,
    "nan": math.nan,
    "infinity": math.inf,
    "negative": -1,
    "half": 0.5,
    "list": [],
    "object": {},
    "huge": 10**30,
}

# -- configurations


def leaves(node: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in node.items():
        if isinstance(value, dict) and key != "compress_rates":
            yield from leaves(value, (*path, key))
        elif key not in IGNORED or (path == () and key == "model_type"):
            yield (*path, key)


def container(document: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for key in path[:-1]:
        document = document[key]
    return document


def is_allowed(key: str, new: object) -> bool:
    """Says whether a wrong-looking value is right after all at this key."""
    if key == "max_wh_ratio":
        return new is None
    if key == "norm_topk_prob":
        return new is True
    return new == 0.5 and key in ("swiglu_limit", "routed_scaling_factor", "beta_slow")


def config_cases() -> list[tuple[str, Callable[[], dict[str, Any]], tuple[str, ...], str]]:
    cases = []
    for spelling, make in (("first", tiny_document), ("second", lambda: respelled(tiny_document()))):
        for path in leaves(make()):
            second_only = any(key in ("layer_types", "compress_rates", "rope_parameters") for key in path)
            if spelling == "second" and not second_only:
                continue
            for name in ("absent", *WRONG):
                if name != "absent" and is_allowed(path[-1], WRONG[name]):
                    continue
                if path[-2:] == ("main", "rope_type") and name in ("absent", "null"):
                    continue  # the main role needs no type
                cases.append((f"{'.'.join(path)}-{name}", make, path, name))
    return cases


CASES = config_cases()


@pytest.mark.parametrize(("make", "path", "name"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_wrong_value_is_one_problem_at_its_key(make: Any, path: tuple[str, ...], name: str) -> None:
    document = make()
    if name == "absent":
        del container(document, path)[path[-1]]
    else:
        container(document, path)[path[-1]] = copy.deepcopy(WRONG[name])
    with pytest.raises(ConfigError) as caught:
        parse_config(document, "toy.json")
    paths = {problem.path for problem in caught.value.problems}
    assert any(found == ".".join(path) or found.startswith(".".join(path) + "[") for found in paths), paths
    assert str(caught.value).startswith("toy.json: model configuration refused, ")
    assert len(caught.value.problems) == 1, caught.value


def test_the_corpus_is_large_enough() -> None:
    assert len(CASES) > 900


@pytest.mark.parametrize("section", ["text_config", "vision_config", "quantization_config"])
@pytest.mark.parametrize("value", [None, [], 3, "x", "absent"])
def test_a_section_that_is_no_object(section: str, value: Any) -> None:
    document = tiny_document()
    document[section] = value
    if value == "absent":
        del document[section]
    with pytest.raises(ConfigError) as caught:
        parse_config(document)
    assert [problem.path for problem in caught.value.problems] == [section]


@pytest.mark.parametrize("path", list(leaves(tiny_document())), ids=".".join)
def test_a_misspelled_key_is_named_with_the_right_one(path: tuple[str, ...]) -> None:
    document = tiny_document()
    home, key = container(document, path), path[-1]
    home[f"{key}s"] = home.pop(key)
    with pytest.raises(ConfigError) as caught:
        parse_config(document)
    by_code = {problem.code: problem for problem in caught.value.problems}
    assert set(by_code) == {"M105", "M106"} and len(caught.value.problems) == 2
    assert by_code["M106"].path == ".".join(path) + "s" and by_code["M106"].expected.endswith(key)
    assert by_code["M105"].path == ".".join(path)


# -- indexes


def repointed(value: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        write_index(folder, {**read_index(folder)["weight_map"], "norm.weight": value})

    return edit


def index_text(text: str | bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / INDEX).write_bytes(text if isinstance(text, bytes) else text.encode()) and None


def duplicated_row(folder: Path) -> None:
    text = (folder / INDEX).read_text()
    row = f'"norm.weight": "{read_index(folder)["weight_map"]["norm.weight"]}"'
    (folder / INDEX).write_text(text.replace(row, f"{row}, {row}"))


def index_directory(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / INDEX).mkdir()


INDEXES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "empty": (index_text(""), "M202", INDEX),
    "not JSON": (index_text("weight_map"), "M202", INDEX),
    "not UTF-8": (index_text(b'{"weight_map": {"\xff": 1}}'), "M202", INDEX),
    "deep": (index_text("[" * 100_000), "M202", INDEX),
    "a list": (index_text("[]"), "M202", INDEX),
    "no map": (index_text("{}"), "M202", f"{INDEX}: weight_map"),
    "null map": (index_text('{"weight_map": null}'), "M202", f"{INDEX}: weight_map"),
    "list map": (index_text('{"weight_map": []}'), "M202", f"{INDEX}: weight_map"),
    "text map": (index_text('{"weight_map": "x"}'), "M202", f"{INDEX}: weight_map"),
    "a directory": (index_directory, "M202", INDEX),
    "a row twice": (duplicated_row, "M202", "weight_map.norm.weight"),
    "number as shard": (repointed(3), "M202", f"{INDEX}: weight_map.norm.weight"),
    "null as shard": (repointed(None), "M202", f"{INDEX}: weight_map.norm.weight"),
    "list as shard": (repointed([SHARDS[0]]), "M202", f"{INDEX}: weight_map.norm.weight"),
    "empty shard name": (repointed(""), "M202", f"{INDEX}: weight_map.norm.weight"),
    "shard outside": (repointed("../model.safetensors"), "M202", f"{INDEX}: weight_map.norm.weight"),
    "absolute shard": (repointed("/model.safetensors"), "M202", f"{INDEX}: weight_map.norm.weight"),
    "nested shard": (repointed("a/model.safetensors"), "M202", f"{INDEX}: weight_map.norm.weight"),
    "NUL in the name": (repointed("a\0.safetensors"), "M202", f"{INDEX}: weight_map.norm.weight"),
    "another kind of file": (repointed("model.bin"), "M202", f"{INDEX}: weight_map.norm.weight"),
    "absent shard": (repointed("model-00004.safetensors"), "M203", "model-00004.safetensors"),
    "wrong shard": (repointed(SHARDS[1]), "M205", "norm.weight"),
    "very long name": (repointed("a" * 300 + ".safetensors"), "M203", "a" * 300 + ".safetensors"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def refused(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder, CONFIG)
    assert str(caught.value).startswith(f"{folder}: checkpoint refused, ")
    return caught.value


@pytest.mark.parametrize("name", INDEXES)
def test_index(source: Path, tmp_path: Path, name: str) -> None:
    edit, code, path = INDEXES[name]
    folder = copied(source, tmp_path / "copy")
    edit(folder)
    found = [(problem.code, problem.path) for problem in refused(folder).problems]
    assert any(kind == code and where.endswith(path) for kind, where in found), found


# -- shards

NAME = "norm.weight"
Header = dict[str, Any]


def member(**values: object) -> Callable[[Header, bytes], tuple[Any, bytes]]:
    return lambda header, payload: (header[NAME].update(values) or header, payload)


def shifted(by: int) -> Callable[[Header, bytes], tuple[Any, bytes]]:
    def edit(header: Header, payload: bytes) -> tuple[Any, bytes]:
        header[NAME]["data_offsets"] = [offset + by for offset in header[NAME]["data_offsets"]]
        return header, payload

    return edit


SHARD_EDITS: dict[str, Callable[[Header, bytes], tuple[Any, bytes]]] = {
    "unknown dtype": member(dtype="BF17"),
    "dtype in lower case": member(dtype="bf16"),
    "dtype a number": member(dtype=2),
    "dtype null": member(dtype=None),
    "shape a number": member(shape=128),
    "shape null": member(shape=None),
    "shape of texts": member(shape=["128"]),
    "shape of floats": member(shape=[128.0]),
    "shape with true": member(shape=[128, True]),
    "negative shape": member(shape=[-128]),
    "huge shape": member(shape=[2**62, 2**62]),
    "shape beyond 64 bits": member(shape=[2**64]),
    "shape of more elements": member(shape=[129]),
    "shape of no elements": member(shape=[0]),
    "scalar shape": member(shape=[]),
    "offsets null": member(data_offsets=None),
    "one offset": member(data_offsets=[0]),
    "three offsets": member(data_offsets=[0, 256, 256]),
    "offsets reversed": member(data_offsets=[256, 0]),
    "negative offset": member(data_offsets=[-256, 0]),
    "float offsets": member(data_offsets=[0.0, 256.0]),
    "offsets as text": member(data_offsets="0 256"),
    "offsets out of range": member(data_offsets=[2**40, 2**40 + 256]),
    "one byte early": shifted(-1),
    "one byte late": shifted(1),
    "overlap": member(data_offsets=[0, 256]),
    "extra field": member(strides=[1]),
    "no dtype": lambda header, payload: (header[NAME].pop("dtype") and header, payload),
    "no shape": lambda header, payload: (header[NAME].pop("shape") and header, payload),
    "no offsets": lambda header, payload: (header[NAME].pop("data_offsets") and header, payload),
    "entry null": lambda header, payload: ({**header, NAME: None}, payload),
    "entry a list": lambda header, payload: ({**header, NAME: []}, payload),
    "metadata a list": lambda header, payload: ({**header, "__metadata__": []}, payload),
    "metadata of numbers": lambda header, payload: ({**header, "__metadata__": {"a": 1}}, payload),
    "header a list": lambda header, payload: ("[]", payload),
    "header empty": lambda header, payload: ("", payload),
    "header cut": lambda header, payload: (json.dumps(header)[:-1], payload),
    "header deep": lambda header, payload: ("[" * 50_000, payload),
    "payload cut": lambda header, payload: (header, payload[:-1]),
    "payload longer": lambda header, payload: (header, payload + b"\0"),
    "payload absent": lambda header, payload: (header, b""),
    "tensor twice": lambda header, payload: (
        json.dumps(header)[:-1] + f', "{NAME}": {json.dumps(header[NAME])}' + "}",
        payload,
    ),
}


def home_of(folder: Path) -> Path:
    return folder / read_index(folder)["weight_map"][NAME]


@pytest.mark.parametrize("name", SHARD_EDITS)
def test_shard(source: Path, tmp_path: Path, name: str) -> None:
    folder = copied(source, tmp_path / "copy")
    shard = home_of(folder)
    write_shard(shard, *SHARD_EDITS[name](*read_shard(shard)))
    problems = refused(folder).problems
    assert [problem.code for problem in problems] == ["M204"]
    assert problems[0].path.startswith(shard.name)


RAW: dict[str, bytes] = {
    "empty": b"",
    "seven bytes": b"\2\0\0\0\0\0\0",
    "length only": b"\2\0\0\0\0\0\0\0",
    "length beyond the file": (10**6).to_bytes(8, "little") + b"{}",
    "length of 2^64 - 1": b"\xff" * 8 + b"{}",
    "length of 2^63": (2**63).to_bytes(8, "little") + b"{}",
    "header not UTF-8": b"\2\0\0\0\0\0\0\0\xff\xfe",
    "header a number": b"\1\0\0\0\0\0\0\0003",
    "header NaN": b"\3\0\0\0\0\0\0\0NaN",
    "a zip file": b"PK\3\4" + bytes(100),
}


@pytest.mark.parametrize("name", RAW)
def test_raw_shard(source: Path, tmp_path: Path, name: str) -> None:
    folder = copied(source, tmp_path / "copy")
    home_of(folder).write_bytes(RAW[name])
    assert [(p.code, p.path) for p in refused(folder).problems] == [("M204", home_of(folder).name)]


def test_a_shard_that_is_a_directory(source: Path, tmp_path: Path) -> None:
    folder = copied(source, tmp_path / "copy")
    shard = home_of(folder)
    shard.unlink()
    shard.mkdir()
    assert [(p.code, p.path) for p in refused(folder).problems] == [("M203", shard.name)]


# -- random edits of whole files: read or refused, never anything else


def scrambled(content: bytes, draw: random.Random) -> bytes:
    """One to three random edits: a changed byte, a removed run, a doubled run."""
    edited = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        at, size = draw.randrange(len(edited)), draw.randint(1, 12)
        match draw.randrange(3):
            case 0:
                edited[at] = draw.randrange(256)
            case 1:
                del edited[at : at + size]
            case _:
                edited[at:at] = edited[at : at + size]
    return bytes(edited)


def attempt(read: Callable[[], object]) -> bool:
    """Says whether the input was read; a typed refusal counts as not read, anything else fails the test."""
    try:
        read()
    except InputError as error:
        assert error.problems and set(error.codes) <= set(CODES)
        assert all(problem.path and problem.found and problem.expected and problem.fix for problem in error.problems)
        return False
    return True


def test_scrambled_configurations(tmp_path: Path) -> None:
    draw, content = random.Random(1), json.dumps(tiny_document()).encode()
    file = tmp_path / "config.json"
    outcomes = []
    for _ in range(400):
        file.write_bytes(scrambled(content, draw))
        outcomes.append(attempt(lambda: load_config(file)))
    assert outcomes.count(False) > 300


def test_scrambled_indexes_and_headers(source: Path, tmp_path: Path) -> None:
    draw, folder = random.Random(2), copied(source, tmp_path / "copy")
    index, shard = (folder / INDEX).read_bytes(), home_of(folder)
    content = shard.read_bytes()
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    refusals = 0
    for _ in range(60):
        (folder / INDEX).write_bytes(scrambled(index, draw))
        refusals += not attempt(lambda: open_checkpoint(folder, CONFIG))
        (folder / INDEX).write_bytes(index)
        shard.write_bytes(scrambled(content[:header_bytes], draw) + content[header_bytes:])
        refusals += not attempt(lambda: open_checkpoint(folder, CONFIG))
        shard.write_bytes(content)
    assert refusals > 100


def test_scrambled_tokenizers(source: Path, tmp_path: Path) -> None:
    draw, content = random.Random(3), (source / "tokenizer.json").read_bytes()
    file = tmp_path / "tokenizer.json"
    for _ in range(150):
        file.write_bytes(scrambled(content, draw))
        attempt(lambda: load_tokenizer(file, CONFIG))
