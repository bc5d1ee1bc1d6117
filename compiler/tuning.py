"""Tuning files: reviewed schedule rows that come before a target's own (`tuning.json`, docs/tuning.md).

`{"target": name, request: row, …}`; a row may be `{rows: row, …}`, one for launches of at most so many rows. It is read and written here; what a
row may set is checked where kernels are chosen (codegen/tuned_rows.py). An artifact carries the rows that it was built with.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tapeout.codegen.select_kernels import SelectKernels
from tapeout.codegen.tuned_rows import Rows, TunedRow
from tapeout.compiler.errors import SettingsError
from tapeout.compiler.files import read_bytes
from tapeout.dialects._mlir import ir
from tapeout.dialects.text import parse
from tapeout.passes.define import Pass

TARGET = "target"
"""The entry of a tuning file that says what its rows are of."""
_COUNT = re.compile(r"[1-9][0-9]{0,8}")
EXPECTED = "expected whole numbers by name, or such rows by how many rows a launch has at most"


def read_tuning(path: Path | None, target: str) -> tuple[TunedRow, ...]:
    """The rows of a tuning file, none for None; raises `FileRefused`, or `SettingsError` with every fault. Rows of another target than `target`
    are refused: what pays on one chip may be nothing on the next."""
    if path is None:
        return ()
    try:
        data = json.loads(read_bytes(path, "--tuning"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise SettingsError([f"--tuning {path}: cannot be read as JSON ({error}); expected a tuning.json"]) from None
    if not isinstance(data, dict):
        raise SettingsError([f"--tuning {path}: found a JSON {type(data).__name__}, expected an object of requests"])
    if data and data.get(TARGET) != target:
        raise SettingsError([f'--tuning {path}: "{TARGET}" is {json.dumps(data.get(TARGET))}, expected "{target}", for which --target asks'])
    found = {request: _rows(request, given) for request, given in sorted(data.items()) if request != TARGET}
    wrong = [f"--tuning {path}: {request}: {EXPECTED}, found {data[request]}" for request, rows in found.items() if rows is None]
    if wrong:
        raise SettingsError(wrong)
    return tuple(row for rows in found.values() for row in rows or ())


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of two rows that one file gives a request, none would be the reviewed one."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key} appears twice")
        found[key] = value
    return found


def _rows(request: str, given: Any) -> list[TunedRow] | None:
    """The rows of one request; None where it has none that can be read."""
    if _is_row(given):
        return [TunedRow(request, tuple(sorted(given.items())))]
    if not isinstance(given, dict) or not all(_COUNT.fullmatch(rows) and _is_row(row) for rows, row in given.items()):
        return None
    return [TunedRow(request, tuple(sorted(row.items())), int(rows)) for rows, row in sorted(given.items(), key=lambda item: int(item[0]))]


def _is_row(given: Any) -> bool:
    return isinstance(given, dict) and all(type(value) is int for value in given.values())


def as_data(given: Sequence[TunedRow], target: str) -> dict[str, Any]:
    """Tuned rows of a target as a tuning file says them; of none, nothing."""
    data: dict[str, Any] = {TARGET: target} if given else {}
    for one in given:
        if one.rows is None:
            data[one.request] = dict(one.row)
        else:
            data.setdefault(one.request, {})[str(one.rows)] = dict(one.row)
    return data


def chosen_rows(module_text: str, passes: Iterable[Pass]) -> dict[str, Any]:
    """The rows of a planned module as a tuning file says them; `passes` are those that planned it."""
    (one,) = (p for p in passes if isinstance(p, SelectKernels))
    with ir.Context(), ir.Location.unknown():
        return as_data(from_rows(one.rows_of(parse(module_text))), one.target)


def from_rows(found: Mapping[str, Rows]) -> tuple[TunedRow, ...]:
    """What select-kernels chose, as tuned rows that would choose it again: one of a request where all its launches have the same."""
    made: list[TunedRow] = []
    for request, rows in sorted(found.items()):
        same = len({tuple(sorted(row.items())) for row in rows.values()}) == 1
        chosen = [(None, next(iter(rows.values())))] if same else sorted(rows.items())
        made += [TunedRow(request, tuple(sorted(row.items())), count) for count, row in chosen]
    return tuple(made)
