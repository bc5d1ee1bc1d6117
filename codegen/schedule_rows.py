"""What the schedule rows of several targets share: how a row is looked up, and rules that differ by one number only.

The numbers are the targets' own (`codegen/<target>/schedules.py`).
"""

from collections.abc import Callable, Mapping

from tapeout.codegen.kernel import Request, Schedule, width
from tapeout.codegen.row_values import columns_of

Rule = Callable[[Request], Schedule]
Row = Schedule | Rule


def chosen(rows: Mapping[str, Row], family: str, request: Request) -> Schedule:
    """The row for a request; a family without block sizes has the empty row."""
    row = rows.get(family, {})
    return row(request) if callable(row) else row


def divisor(n: int, limit: int, multiple: int = 1) -> int:
    """The largest divisor of n up to `limit` that is a multiple of `multiple`; n itself where there is none, or only tiny ones."""
    if n <= limit and n % multiple == 0:
        return n
    found = max((d for d in range(multiple, min(n, limit) + 1, multiple) if n % d == 0), default=0)
    return found if found * 8 >= min(n, limit) else n


def moved(columns: int) -> Rule:
    """Row blocks of what is moved, `columns` at once: a result, the rows written to a state, or a state's own entries."""

    def rule(request: Request) -> Schedule:
        view = request.results[0] if request.results else request.operands[0]
        return {"block_rows": min(64, max(1, columns // columns_of(view))), "block_columns": columns}

    return rule


def confidence(limit: int) -> Rule:
    """Column blocks of the two parts of a confidence's operand."""

    def rule(request: Request) -> Schedule:
        hidden, embedded = (divisor(width(view), limit) for view in request.operands[:2])
        return {"block_hidden": hidden, "block_embedded": embedded}

    return rule
