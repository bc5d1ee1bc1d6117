"""Prompts from the command line and from files, each with its sampling parameters; every fault names file and line.

A line ends at a line feed and nowhere else: other separators are part of the text. A field that is null is not given. What is wrong with one
line refuses that request and no other; what is wrong with an option refuses the run.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tapeout.compiler.errors import SettingsError
from tapeout.compiler.files import read_bytes
from tapeout.runtime.errors import ParameterError, PromptRefused, RequestError, RequestTaken
from tapeout.runtime.params import SamplingParams, request_seed

FIELDS = tuple(field.name for field in fields(SamplingParams))
KNOWN = ("id", "prompt", "token_ids", *FIELDS)
_BLANKS = b" \t\r"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_CORRECT = "correct the line: one JSON object, on one line"
_ID = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True)
class Asked:
    """One prompt: text or token ids; `where` says what it comes from, as `prompts.jsonl:3`."""

    id: str
    prompt: str | list[int]
    params: SamplingParams
    where: str


@dataclass(frozen=True)
class Refused:
    """A request of which nothing runs; `error` is the whole sentence, with the place."""

    id: str
    where: str
    error: str


@dataclass(frozen=True)
class _Found:
    """A prompt before its parameters are put together: `own` are those given with it; `error` is what is wrong with it, if anything."""

    where: str
    prompt: str | list[int]
    id: str | None
    own: dict[str, Any]
    error: RequestError | None = None


def read_prompts(texts: list[str], lines: Path | None, ids: Path | None, defaults: dict[str, Any]) -> list[Asked | Refused]:
    """All prompts in order: --prompt, then --prompts, then --token-ids. Raises SettingsError or FileRefused.

    `defaults` come from the command line. A seed among them is the run's: request i gets one derived from it and i (request 0 the seed
    itself), unless its line has a seed of its own. Refused requests count as well, so the others do not depend on them.
    """
    _check_defaults(defaults)
    found = [_Found(f"--prompt {n}", text, None, {}) for n, text in enumerate(texts, 1)]
    found += [] if lines is None else [_json_request(line, where) for where, line in _lines(lines, "--prompts")]
    found += [] if ids is None else [_ids_request(line, where) for where, line in _lines(ids, "--token-ids")]
    if not found:
        files = [f"{option} {path}: found no line with a prompt" for option, path in (("--prompts", lines), ("--token-ids", ids)) if path is not None]
        raise SettingsError(files or ["no prompt: expected --prompt TEXT, --prompts FILE.jsonl or --token-ids FILE"])
    places: dict[str, str] = {}
    return [_request(one, i, defaults, places) for i, one in enumerate(found)]


def _check_defaults(defaults: dict[str, Any]) -> None:
    try:
        SamplingParams.from_mapping(defaults)
    except ParameterError as error:
        raise SettingsError([f"--{error.field.replace('_', '-')}: found {error.value!r}, expected {error.allowed}"]) from None


def _request(found: _Found, index: int, defaults: dict[str, Any], places: dict[str, str]) -> Asked | Refused:
    """Request number `index` with its parameters, or why there is none. `places`: where each id was used first, extended in place."""
    name = str(index) if found.id is None else found.id
    try:
        if found.error is not None:
            raise found.error
        if name in places:
            raise RequestTaken(f"{found.where}, id", f"{name!r}, which {places[name]} has", "an id of its own")
        places[name] = found.where
        return Asked(name, found.prompt, _params(found, index, defaults), found.where)
    except ParameterError as error:
        return Refused(name, found.where, str(error.for_request(found.where)))
    except RequestError as error:
        return Refused(name, found.where, str(error))


def _params(found: _Found, index: int, defaults: dict[str, Any]) -> SamplingParams:
    seed = defaults.get("seed")
    shared = {} if seed is None else {"seed": request_seed(seed, index)}
    return SamplingParams.from_mapping(defaults | shared | found.own)


def _lines(path: Path, option: str) -> Iterator[tuple[str, bytes]]:
    """Lines with something on them, each with its place; blank are spaces, tabs and carriage returns."""
    for number, line in enumerate(read_bytes(path, option).removeprefix(_BYTE_ORDER_MARK).split(b"\n"), 1):
        if line.strip(_BLANKS):
            yield f"{path}:{number}", line


def _text(line: bytes, where: str) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        found = f"bytes that are not UTF-8 ({error.reason}, byte {error.start})"
        raise PromptRefused(where, found, "text in UTF-8", remedy="convert the file") from None


def _json_request(line: bytes, where: str) -> _Found:
    """One line of JSON. Of a line that is refused the id is kept, where it has a valid one."""
    name: str | None = None
    try:
        item = _object(_text(line, where), where)
        name = _own_id(item.get("id"), where)
        unknown = sorted(set(item) - set(KNOWN))
        if unknown:
            nearest = get_close_matches(unknown[0], KNOWN, 1)
            remedy = f"remove it, or write {nearest[0]}" if nearest else "remove it"
            raise PromptRefused(where, f"an unknown field {_shown(unknown[0])}", ", ".join(KNOWN), remedy=remedy)
        given = {key: value for key, value in item.items() if value is not None}
        if ("prompt" in given) == ("token_ids" in given):
            raise PromptRefused(where, "both" if "prompt" in given else "neither", "an object with either `prompt` or `token_ids`")
        return _Found(where, _prompt(given, where), name, {key: given[key] for key in FIELDS if key in given})
    except PromptRefused as error:
        return _Found(where, [], name, {}, error)


def _object(line: str, where: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise PromptRefused(where, f"key {_shown(twice)} twice", "each key once", remedy="remove one of the two")
        return made

    try:
        item = json.loads(line, object_pairs_hook=unique)
    except RecursionError:
        raise PromptRefused(where, "JSON that is nested too deeply", "one object a line", remedy=_CORRECT) from None
    except ValueError as error:
        raise PromptRefused(where, f"no JSON ({error})", "one object a line", remedy=_CORRECT) from None
    if not isinstance(item, dict):
        raise PromptRefused(where, type(item).__name__, "an object with either `prompt` or `token_ids`")
    return item


def _prompt(given: dict[str, Any], where: str) -> str | list[int]:
    if "prompt" in given:
        text = given["prompt"]
        if not isinstance(text, str):
            raise PromptRefused(f"{where}, prompt", type(text).__name__, "text")
        return text
    tokens = given["token_ids"]
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise PromptRefused(f"{where}, token_ids", _shown(tokens), "a list of whole numbers")
    return tokens


def _own_id(value: object, where: str) -> str | None:
    if value is not None and type(value) not in (str, int):
        raise PromptRefused(f"{where}, id", _shown(value), "text or a whole number", remedy="give such an id, or none")
    return None if value is None else str(value)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:39] + "…"


def _ids_request(line: bytes, where: str) -> _Found:
    try:
        text = _text(line, where)
        words = re.split("[ \t\r]+", text.strip(" \t\r"))
        if not all(_ID.fullmatch(word) for word in words):
            raise PromptRefused(where, f"{text[:40]!r}", "token ids separated by spaces")
        return _Found(where, [int(word) for word in words], None, {})
    except PromptRefused as error:
        return _Found(where, [], None, {}, error)
