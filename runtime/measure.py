"""Times of decode steps and of drafted blocks, measured when an engine starts: what planning needs to know of a machine.

Rows of nobody run in free slots with the null block, so nothing that a request will see is written. Only the decoder of few rows is measured, at
the shortest contexts: what longer ones and other loads add is learned from steps as they run. docs/planning.md, costs.
"""

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import numpy as np

from tapeout.runtime.cost import DecodeTable, decode_table, measured_ms
from tapeout.runtime.program import DrawColumns, LoadedPrograms, StepRows

RUNS = 5  # of each size, the first of which warms up


class StepTimes(NamedTuple):
    """A table of decode steps, and ms of a drafted block: a fixed part and one for each sequence."""

    table: DecodeTable
    block_ms: tuple[float, float]


def step_times(programs: LoadedPrograms, sequences: int, block: int) -> StepTimes:
    """Measures steps of 1 to `sequences` x (1 + `block`) rows, and blocks behind 1 and all of the sequences."""
    options = programs.artifact.manifest.options
    most = min(options.max_rows, options.max_outputs, sequences * (1 + block))
    sizes = sorted({1 << i for i in range(0, most.bit_length(), 2) if 1 << i < most} | {most})
    table = decode_table(sizes, [_step_ms(programs, size, block) for size in sizes], is_padded=False)
    one, many = (_block_ms(programs, count) for count in (1, min(sequences, most)))
    each = max(0.0, (many - one) / max(1, min(sequences, most) - 1))
    return StepTimes(table, (max(0.0, one - each), each))


def _step_ms(programs: LoadedPrograms, size: int, block: int) -> float:
    rows = StepRows()
    for slot, first in enumerate(range(0, size, 1 + block)):
        rows.add(slot, 0, [0] * min(1 + block, size - first))
    rows.outputs = list(range(size))
    rows.draws = _greedy(rows.slots, rows.positions)
    return measured_ms([_timed(lambda: programs.step(rows, drafting=False)) for _ in range(RUNS)])


def _block_ms(programs: LoadedPrograms, count: int) -> float:
    rows = StepRows()
    for slot in range(count):
        rows.add(slot, 0, [0])
    rows.outputs = list(range(count))
    rows.draws = _greedy(rows.slots, rows.positions)
    programs.step(rows, drafting=False)
    draws, outputs = _greedy(rows.slots, rows.positions), np.arange(count)
    return measured_ms([_timed(lambda: programs.draft_behind(outputs, draws)) for _ in range(RUNS)])


def _greedy(slots: list[int], positions: list[int]) -> DrawColumns:
    count = len(slots)
    plain = np.zeros(count), np.full(count, -1), np.ones(count), np.zeros(count, np.int64)
    return DrawColumns(*plain, np.array(slots), np.array(positions) + 1)


def _timed(run: Callable[[], None]) -> float:
    started = perf_counter()
    run()
    return (perf_counter() - started) * 1e3
