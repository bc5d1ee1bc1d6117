"""Rows in blocks of columns: how often a block is read, and which instance reads it.

A schedule row may say `held` (1: a row's blocks are read once and stay in registers, and are summed place by place), `ahead` (1: what a walk
over held rows needs besides them is read with them) and `parts` (instances that share a row's columns where no sum runs over them).
"""

from collections.abc import Callable, Sequence
from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.kernel import KernelError, Schedule

Value = Any
Load = Callable[[Any], Value]
Over = Callable[[Sequence[Value], Callable[..., Any]], list[Value]]
"""over(carried, step): step(column, block, *carried) for every block, ascending; the last carried values."""
COLUMN_AXIS = 1


def blocks(load: Load, n: int, size: int, schedule: Schedule) -> Over:
    """Walks over the blocks of `size` columns that `load(column)` gives, read again for every walk, or once where the row says `held`."""
    if not schedule.get("held"):
        return lambda carried, step: t.loop(0, n, size, carried, lambda c, *state: step(c, load(c), *state))
    kept = [(column, load(column)) for column in range(0, n, size)]

    def over(carried: Sequence[Value], step: Callable[..., Any]) -> list[Value]:
        state = list(carried)
        for column, block in kept:
            state = list(step(column, block, *state) or [])
        return state

    return over


def ahead(load: Load, n: int, size: int, schedule: Schedule) -> Load:
    """`load` as it is, or, where the row says so, with all blocks loaded here: a sum in between does not keep them waiting."""
    if not (schedule.get("held") and schedule.get("ahead")):
        return load
    kept = {column: load(column) for column in range(0, n, size)}
    return lambda column: kept[column]


def summed(over: Over, rows: int, size: int, schedule: Schedule, term: Callable[[Value], Value]) -> Value:
    """The sum of term(block) over a row's columns, [rows]: blocks ascending; of held rows each place by itself, then the places."""
    if schedule.get("held"):
        (places,) = over([t.full([rows, size], 0.0)], lambda column, x, total: [t.add(total, term(x))])
        return t.reduce(places, "add", 1)
    (total,) = over([t.full([rows], 0.0)], lambda column, x, total: [t.add(total, t.reduce(term(x), "add", 1))])
    return total


def parts(schedule: Schedule, n: int, size: int) -> list[int]:
    """The extra extent of the grid, none where one instance has all columns; raises `KernelError` unless parts are whole blocks."""
    count = schedule.get("parts", 1)
    if count < 1 or n % (count * size):
        raise KernelError(f"schedule entry parts is {count}, expected a number of parts of {n} columns that are whole blocks of {size}")
    return [count] if count > 1 else []


def own_columns(schedule: Schedule, n: int, size: int, step: Callable[[Any], Any]) -> None:
    """Runs step(column) for every block of the columns that are this instance's."""
    count = schedule.get("parts", 1)
    each = n // count
    if count == 1:
        t.loop(0, n, size, [], step)
    elif each == size:
        step(t.mul(t.program_id(COLUMN_AXIS), size))
    else:
        first = t.mul(t.program_id(COLUMN_AXIS), each)
        t.loop(first, t.add(first, each), size, [], step)
