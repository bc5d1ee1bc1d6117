"""Tuned schedule rows: lines of a tuning file that stand in front of a target's own rows.

A row is of one request, named by its text, for launches of any number of rows or of at most one number. It sets what the target's rows set. Here
names and sizes are checked; the family that builds with it checks the rest. The file itself is read by the compiler.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from tapeout.codegen.kernel import EAGER, STREAMED, KernelError, Schedule

PART, PART_WARPS = "part", "part_warps"
"""The entry of a schedule row that names a launch in front of the kernel's own, by number; warps of such launches."""
WORKSPACE = "workspace_bytes"
"""A schedule row that has this key is given the compile's own limit (`--workspace`)."""
SIZES = re.compile(r"block_\w+|part_\w+|\w+_(rows|columns)|warps|stages|chunk|parts|grouped|levels|listed|workers")
"""Entries that count something: a row that sets them to 0 could only divide by it. All others may be 0, which turns them off."""
MOST = 1 << 14
"""Of every entry whose own value is not larger."""
Rows = Mapping[int, Schedule]
"""A schedule row for each number of rows that a launch may have at most."""


@dataclass(frozen=True)
class TunedRow:
    """One row of a request, for launches of at most `rows` rows, or for all of its launches."""

    request: str
    row: tuple[tuple[str, int], ...]
    rows: int | None = None


def tuned(given: Sequence[TunedRow], request: str, own: Rows) -> Rows:
    """The target's rows for a request, with tuned ones in their places; raises `KernelError` for one that names or counts something else."""
    found = dict(own)
    for one in (one for one in given if one.request == request):
        counts = [count for count in own if one.rows in (None, count)]
        if counts:
            _require_fit(dict(one.row), list(own.values()))
        found |= {count: dict(one.row) for count in counts}
    return found


def _require_fit(row: Schedule, own: Sequence[Schedule]) -> None:
    """The row sets what all of the target's rows set (`eager` and `streamed` or not), and nothing that none of them sets; sizes are sizes."""
    known = {name for one in own for name in one}
    needed = {name for name in own[0] if name not in (EAGER, STREAMED) and all(name in one for one in own)}
    found = [f"{name} is missing" for name in sorted(needed - set(row))]
    found += [f"{name} is not among {', '.join(sorted(known)) or 'them, as there are none'}" for name in sorted(set(row) - known)]
    for name in sorted(known & set(row)):
        values = [one[name] for one in own if name in one]
        least, most = int(SIZES.fullmatch(name) is not None and min(values) > 0), max(MOST, *values)
        if not least <= row[name] <= most:
            found.append(f"{name} is {row[name]}, expected {least} to {most}")
    if found:
        raise KernelError(f"the tuned row {dict(row)} does not fit: {'; '.join(found)}")


def unused(given: Iterable[TunedRow], asked: Collection[tuple[str, int]]) -> str | None:
    """The sentence that names the first row that nothing asked for, with what it should have said; None where all were asked for.

    `asked`: the text of a request, and how many rows a launch of it may have at most.
    """
    requests = {request for request, _ in asked}
    for one in given:
        if one.request not in requests:
            near = get_close_matches(one.request, requests, 1, 0.0)
            return f"no op asks for the tuned row of {one.request}; expected the text of a request" + (f", as {near[0]}" if near else "")
        if one.rows is not None and (one.request, one.rows) not in asked:
            counts = ", ".join(str(count) for request, count in sorted(asked) if request == one.request)
            return f"the tuned row of {one.request} is of launches of at most {one.rows} rows; expected one of {counts}"
    return None


def is_tuned(given: Iterable[TunedRow], request: str, schedule: Schedule) -> bool:
    """Whether a kernel's schedule is that of a tuned row: of one of its launches in front too, and whatever the workspace limit."""
    own = {"warps", PART, WORKSPACE} if PART in schedule else {WORKSPACE}

    def kept(row: Schedule) -> dict[str, int]:
        return {name: value for name, value in row.items() if name not in own}

    return any(one.request == request and kept(dict(one.row)) == kept(schedule) for one in given)
