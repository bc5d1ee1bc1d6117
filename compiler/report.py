"""How commands speak: JSON with --json, tables and progress bars on a terminal, plain lines when piped."""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from typing import Any


def emit(data: Any, as_json: bool, show: Callable[[], None]) -> None:
    """Prints `data` as one JSON document, or lets `show` print it for people."""
    if as_json:
        print(json.dumps(data, indent=1))
    else:
        show()


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table: numbers are grouped by thousands and aligned right, words left."""
    values = [list(row) for row in rows]
    cells = [[_cell(value) for value in row] for row in values]
    words = [any(isinstance(row[i], str) for row in values) for i in range(len(columns))]
    print(title)
    if sys.stdout.isatty():
        _rich_table(columns, cells, words)
        return
    widths = [max(len(r[i]) for r in [list(columns), *cells]) for i in range(len(columns))]
    for row in [list(columns), *cells]:
        placed = (c.ljust(w) if left else c.rjust(w) for c, w, left in zip(row, widths, words, strict=True))
        print(("  " + "  ".join(placed)).rstrip())


def _rich_table(columns: Sequence[str], cells: list[list[str]], words: Sequence[bool]) -> None:
    """Everything as `Text`: of a plain word in brackets, a path's say, rich would make a style."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    made = Table()
    for column, left in zip(columns, words, strict=True):
        made.add_column(Text(column), justify="left" if left else "right")
    for row in cells:
        made.add_row(*map(Text, row))
    Console().print(made)


def _cell(value: object) -> str:
    match value:
        case bool() | None:
            return "-" if value is None else str(value)
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.3f}"
    return str(value)


@contextmanager
def progress(title: str) -> Any:
    """Yields `update(done, total, what)`: a bar on a terminal, a line a tenth when piped; both on stderr."""
    if not sys.stderr.isatty():
        yield _plain(title)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(
        TextColumn(title, markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        transient=True,
        console=_stderr(),
    ) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


def _stderr() -> Any:
    from rich.console import Console

    return Console(stderr=True)


def _plain(title: str) -> Callable[[int, int, str], None]:
    last = [-1]

    def update(done: int, total: int, what: str) -> None:
        tenth = 10 * done // max(total, 1)
        if tenth != last[0]:
            last[0] = tenth
            print(f"{title}: {done} of {total}", file=sys.stderr)

    return update
