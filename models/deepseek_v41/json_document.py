"""Reads one JSON object from a file without losing what plain `json` hides.

Duplicate keys are reported with their key path; NaN and infinities pass as floats, for the caller to refuse by name. What the
keys mean is left to the caller.
"""

import json
from pathlib import Path

from tapeout.models.deepseek_v41.errors import Problem, shown

LIMIT_BYTES = 256 << 20  # the index of a 96,085-tensor checkpoint takes about 10 MB


class _Pairs(list[tuple[str, object]]):
    """The members of one object in file order, duplicates kept."""


def read_object(path: Path, unreadable: str = "M101", malformed: str = "M102") -> tuple[dict[str, object], list[Problem]]:
    """Returns the object in `path` (empty when there is none) and the problems met; the codes are the caller's."""
    try:
        if path.stat().st_size > LIMIT_BYTES:
            return {}, [Problem(unreadable, str(path), "a file above 256 MiB", "a small JSON file", "check the path")]
        text = path.read_bytes().decode("utf-8")
    except (OSError, ValueError) as error:
        code = malformed if isinstance(error, UnicodeDecodeError) else unreadable
        found = getattr(error, "strerror", None) or str(error)
        return {}, [Problem(code, str(path), found, "a readable UTF-8 JSON file", "check the path and its permissions")]
    return parse_object(text, str(path), malformed)


def parse_object(text: str, where: str, malformed: str = "M102") -> tuple[dict[str, object], list[Problem]]:
    """Returns the object in `text` and the problems met; `where` names the text in them."""
    try:
        tree = json.loads(text, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        found = str(error) or type(error).__name__
        return {}, [Problem(malformed, where, found, "one JSON object", "repair or download the file again")]
    if not isinstance(tree, _Pairs):
        return {}, [Problem("M103", where, shown(tree), "a JSON object", "repair or download the file again")]
    problems: list[Problem] = []
    plain = _plain(tree, "", problems)
    assert isinstance(plain, dict), type(plain)
    return plain, problems


def _plain(node: object, path: str, problems: list[Problem]) -> object:
    if isinstance(node, _Pairs):
        return _plain_object(node, path, problems)
    if isinstance(node, list):
        return [_plain(item, f"{path}[{i}]", problems) for i, item in enumerate(node)]
    return node


def _plain_object(pairs: _Pairs, path: str, problems: list[Problem]) -> dict[str, object]:
    members: dict[str, object] = {}
    for key, value in pairs:
        where = f"{path}.{key}" if path else key
        if key in members:
            problems.append(Problem("M104", where, "the key twice", "the key once", "delete one of the two"))
        members[key] = _plain(value, where, problems)
    return members
