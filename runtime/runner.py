"""Runs the scheduler's steps with an artifact's programs: rows in, tokens out, in the order of launch.

Programs verify no drafts yet: every decode sequence has one row. A token that was not known when the step was launched is the one that this
runner sampled for the slot before; it never leaves the device's side as anything but a row. docs/runtime.md, 3.2.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tapeout.runtime.program import Draw, LoadedPrograms, StepRows
from tapeout.runtime.step import Step, StepResult

LARGEST_TEMPERATURE = 3e38  # what float32 holds; every distribution is flat long before


class PreparedStep(NamedTuple):
    """A step with the table rows it needs, as they are when it is launched."""

    step: Step
    slots: NDArray[np.int64]
    tables: NDArray[np.int32]


class ProgramRunner:
    """Runs steps for `Direct` or `Background`; `table` is the scheduler's block table, of which programs see the launched rows."""

    def __init__(self, programs: LoadedPrograms, table: NDArray[np.int32], *, drafting: bool) -> None:
        self.programs, self.drafting = programs, drafting
        self.table = table
        self._seen = programs.array("block_table").view(np.int32)
        self._results = {name: programs.array(name) for name in ("sampled", "logprobs")}
        if drafting:
            self._results |= {name: programs.array(name) for name in ("drafts", "confidences")}
        self._last = np.zeros(len(table), np.int64)
        self._length = np.zeros(len(table), np.int64)

    def prepare(self, step: Step) -> PreparedStep:
        slots = np.concatenate([step.slots, np.array([piece.slot for piece in step.pieces], np.int64)])
        return PreparedStep(step, slots, self.table[slots])

    def read_block(self, block: int) -> bytes | None:
        return None

    def execute(self, prepared: PreparedStep) -> StepResult:
        """Runs a step and reads its results."""
        step = prepared.step
        self._seen[prepared.slots] = prepared.tables
        rows = self._rows(step)
        self.programs.step(rows, drafting=self.drafting)
        outputs = len(rows.outputs)
        sampled = np.array(self._results["sampled"][:outputs], np.int32)
        slots = [draw.slot for draw in rows.draws]
        self._last[slots], self._length[slots] = sampled, [draw.position for draw in rows.draws]
        logprobs = np.array(self._results["logprobs"][:outputs], np.float32)
        drafts = np.array(self._results["drafts"][:outputs], np.int32) if self.drafting else None
        confidences = np.array(self._results["confidences"][:outputs], np.float64) if self.drafting else None
        return StepResult(np.ones(outputs, np.int64), sampled, logprobs, np.ones(len(step.slots), np.int64), drafts, confidences)

    def _rows(self, step: Step) -> StepRows:
        known, following, count = step.known, step.following.slots, len(step.slots)
        tokens = [*known.tokens.tolist(), *self._last[following].tolist()]
        positions = [*known.positions.tolist(), *self._length[following].tolist()]
        rows = StepRows(tokens, positions, step.slots.tolist(), list(range(count)), list(range(1, count + 1)), list(range(count)))
        lengths = [position + 1 for position in positions]
        slots = step.slots.tolist()
        for piece in step.pieces:
            rows.add(piece.slot, piece.start, piece.tokens)
            if piece.yields:
                rows.outputs.append(len(rows.tokens) - 1)
                slots.append(piece.slot)
                lengths.append(piece.start + len(piece.tokens))
        draws = step.draws
        temperatures = np.minimum(draws.temperature, LARGEST_TEMPERATURE).tolist()
        columns = zip(temperatures, draws.top_k.tolist(), draws.top_p.tolist(), draws.seeds.tolist(), slots, lengths, strict=True)
        rows.draws = [Draw(*column) for column in columns]
        return rows
