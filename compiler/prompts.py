"""Prompts from the command line and from files, each with its sampling parameters; every fault names file and line.

A line ends at a line feed and nowhere else: other separators are part of the text. A field that is null is not given.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tapeout.compiler.errors import SettingsError
from tapeout.compiler.files import read_text
from tapeout.runtime.errors import ParameterError
from tapeout.runtime.params import SamplingParams, request_seed

FIELDS = tuple(field.name for field in fields(SamplingParams))
_BLANKS = " \t\r"
_ID = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True)
class Asked:
    """One prompt: text or token ids; `where` says what it comes from, as `prompts.jsonl:3`."""

    id: str
    prompt: str | list[int]
    params: SamplingParams
    where: str


@dataclass(frozen=True)
class _Found:
    """A prompt before its parameters are put together: `own` are those given with it."""

    where: str
    prompt: str | list[int]
    id: str | None
    own: dict[str, Any]


def read_prompts(texts: list[str], lines: Path | None, ids: Path | None, defaults: dict[str, Any]) -> list[Asked]:
    """All prompts in order: --prompt, then --prompts, then --token-ids. Raises SettingsError, FileRefused or the parameter's own error.

    `defaults` come from the command line. A seed among them is the run's: request i gets one derived from it and i (request 0 the seed
    itself), unless its line has a seed of its own.
    """
    found = [_Found(f"--prompt {n}", text, None, {}) for n, text in enumerate(texts, 1)]
    found += [] if lines is None else [_json_line(line, where) for where, line in _lines(lines, "--prompts")]
    found += [] if ids is None else [_Found(where, _ids(line, where), None, {}) for where, line in _lines(ids, "--token-ids")]
    if not found:
        raise SettingsError(["no prompt: expected --prompt TEXT, --prompts FILE.jsonl or --token-ids FILE"])
    names = _names(found)
    return [Asked(names[i], one.prompt, _params(one, i, defaults), one.where) for i, one in enumerate(found)]


def _names(found: list[_Found]) -> list[str]:
    """The id of each request: its own, or its number. Raises SettingsError where two are equal."""
    places: dict[str, str] = {}
    for i, one in enumerate(found):
        name = str(i) if one.id is None else one.id
        if name in places:
            raise SettingsError([f"{one.where}: id: found {name!r}, which {places[name]} has, expected an id of its own"])
        places[name] = one.where
    return list(places)


def _params(found: _Found, index: int, defaults: dict[str, Any]) -> SamplingParams:
    seed = defaults.get("seed")
    shared = {} if seed is None else {"seed": request_seed(seed, index)}
    try:
        return SamplingParams.from_mapping(defaults | shared | found.own)
    except ParameterError as error:
        if error.field in found.own:
            raise error.for_request(found.where) from None
        raise SettingsError([f"--{error.field.replace('_', '-')}: found {error.value!r}, expected {error.allowed}"]) from None


def _lines(path: Path, option: str) -> Iterator[tuple[str, str]]:
    """Lines with something on them, each with its place; blank are spaces, tabs and carriage returns."""
    for number, line in enumerate(read_text(path, option).split("\n"), 1):
        if line.strip(_BLANKS):
            yield f"{path}:{number}", line


def _json_line(line: str, where: str) -> _Found:
    item = _object(line, where)
    unknown = sorted(set(item) - {"id", "prompt", "token_ids", *FIELDS})
    if unknown:
        raise SettingsError([f"{where}: unknown field {unknown[0]}; expected id, prompt, token_ids, {', '.join(FIELDS)}"])
    given = {name: value for name, value in item.items() if value is not None}
    if ("prompt" in given) == ("token_ids" in given):
        raise SettingsError([f"{where}: expected an object with either `prompt` or `token_ids`"])
    return _Found(where, _prompt(given, where), _own_id(given.get("id"), where), {name: given[name] for name in FIELDS if name in given})


def _object(line: str, where: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise SettingsError([f"{where}: found key {twice!r} twice, expected each key once"])
        return made

    try:
        item = json.loads(line, object_pairs_hook=unique)
    except RecursionError:
        raise SettingsError([f"{where}: found JSON that is nested too deeply, expected one object a line"]) from None
    except ValueError as error:
        raise SettingsError([f"{where}: not JSON ({error}); expected one object a line"]) from None
    if not isinstance(item, dict):
        raise SettingsError([f"{where}: expected an object with either `prompt` or `token_ids`"])
    return item


def _prompt(given: dict[str, Any], where: str) -> str | list[int]:
    if "prompt" in given:
        text = given["prompt"]
        if not isinstance(text, str):
            raise SettingsError([f"{where}: prompt: found {type(text).__name__}, expected text"])
        return text
    tokens = given["token_ids"]
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise SettingsError([f"{where}: token_ids: found {_shown(tokens)}, expected a list of whole numbers"])
    return tokens


def _own_id(value: object, where: str) -> str | None:
    if value is not None and type(value) not in (str, int):
        raise SettingsError([f"{where}: id: found {_shown(value)}, expected text or a whole number"])
    return None if value is None else str(value)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:39] + "…"


def _ids(line: str, where: str) -> list[int]:
    words = re.split(f"[{_BLANKS}]+", line.strip(_BLANKS))
    if not all(_ID.fullmatch(word) for word in words):
        raise SettingsError([f"{where}: found {line[:40]!r}, expected token ids separated by spaces"])
    return [int(word) for word in words]
