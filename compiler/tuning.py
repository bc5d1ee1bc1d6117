"""Tuned schedule rows: reviewed lines of text that come before a target's own rows (`tuning.json`).

The file maps a request's text to block sizes. It is read here and written by whoever tunes; an artifact carries the rows it was built with.
"""

import json
from pathlib import Path

from tapeout.compiler.errors import SettingsError

Rows = tuple[tuple[str, tuple[tuple[str, int], ...]], ...]


def read_tuning(path: Path | None) -> Rows:
    """The rows of a tuning file, none for None; raises `SettingsError` with every fault."""
    if path is None:
        return ()
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError([f"--tuning {path}: cannot be read as JSON ({error}); expected a tuning.json"]) from None
    if not isinstance(data, dict):
        raise SettingsError([f"--tuning {path}: found a JSON {type(data).__name__}, expected an object of requests"])
    wrong = [
        f"--tuning {path}: {key}: expected whole numbers by name, found {row}"
        for key, row in data.items()
        if not isinstance(row, dict) or not all(type(v) is int for v in row.values())
    ]
    if wrong:
        raise SettingsError(wrong)
    return tuple(sorted((key, tuple(sorted(row.items()))) for key, row in data.items()))
