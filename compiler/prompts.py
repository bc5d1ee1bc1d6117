"""Prompts from the command line and from files, each with its sampling parameters; every fault names file and line."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tapeout.compiler.errors import SettingsError
from tapeout.runtime.params import SamplingParams

FIELDS = tuple(field.name for field in fields(SamplingParams))


@dataclass(frozen=True)
class Asked:
    """One prompt: text or token ids."""

    id: str
    prompt: str | list[int]
    params: SamplingParams


def read_prompts(texts: list[str], lines: Path | None, ids: Path | None, defaults: dict[str, Any]) -> list[Asked]:
    """All prompts in order: --prompt, then --prompts, then --token-ids. Raises `SettingsError` or the parameter's own error."""
    found: list[tuple[str | None, Any, dict[str, Any]]] = [(None, text, {}) for text in texts]
    found += [] if lines is None else _json_lines(lines)
    found += [] if ids is None else [(None, _ids(line, f"{ids}:{n}"), {}) for n, line in _lines(ids)]
    if not found:
        raise SettingsError(["no prompt: expected --prompt TEXT, --prompts FILE.jsonl or --token-ids FILE"])
    return [
        Asked(str(i) if name is None else name, prompt, SamplingParams.from_mapping(defaults | own))
        for i, (name, prompt, own) in enumerate(found)
    ]


def _lines(path: Path) -> list[tuple[int, str]]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError([f"{path}: cannot be read ({error}); expected a text file"]) from None
    return [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]


def _json_lines(path: Path) -> list[tuple[str | None, Any, dict[str, Any]]]:
    found = []
    for n, line in _lines(path):
        where = f"{path}:{n}"
        try:
            item = json.loads(line)
        except ValueError as error:
            raise SettingsError([f"{where}: not JSON ({error}); expected one object a line"]) from None
        if not isinstance(item, dict) or ("prompt" in item) == ("token_ids" in item):
            raise SettingsError([f"{where}: expected an object with either `prompt` or `token_ids`"])
        unknown = sorted(set(item) - {"id", "prompt", "token_ids", *FIELDS})
        if unknown:
            raise SettingsError([f"{where}: unknown field {unknown[0]}; expected id, prompt, token_ids, {', '.join(FIELDS)}"])
        prompt = item.get("prompt", item.get("token_ids"))
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(type(t) is int for t in prompt)):
            raise SettingsError([f"{where}: found {type(prompt).__name__}, expected text in `prompt` or whole numbers in `token_ids`"])
        found.append((None if "id" not in item else str(item["id"]), prompt, {k: item[k] for k in FIELDS if k in item}))
    return found


def _ids(line: str, where: str) -> list[int]:
    try:
        return [int(word) for word in line.split()]
    except ValueError:
        raise SettingsError([f"{where}: found {line[:40]!r}, expected token ids separated by spaces"]) from None
