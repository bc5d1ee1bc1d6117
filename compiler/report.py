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
    """A table: numbers are grouped by thousands and aligned right."""
    cells = [[_cell(value) for value in row] for row in rows]
    if sys.stdout.isatty():
        _rich_table(title, columns, cells)
        return
    widths = [max(len(r[i]) for r in [list(columns), *cells]) for i in range(len(columns))]
    print(title)
    for row in [list(columns), *cells]:
        print("  " + "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))))


def _rich_table(title: str, columns: Sequence[str], cells: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    made = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i == 0 else "right")
    for row in cells:
        made.add_row(*row)
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
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
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
