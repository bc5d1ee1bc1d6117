"""Runs the scheduler's steps with an artifact's programs: rows in, tokens out, in the order of launch.

A token that was not known when the step was launched is the one that this runner sampled for the slot before; so are the drafts behind it.
Drafts are rows like any other: each row yields a token by itself, and those that agree are accepted (`verify.py`). docs/runtime.md, 3.2, 4.
"""

from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tapeout.runtime.errors import LogitsNotFinite
from tapeout.runtime.program import DrawColumns, LoadedPrograms, StepRows
from tapeout.runtime.replay import Mode, ReplayRules
from tapeout.runtime.step import Piece, Step, StepResult
from tapeout.runtime.verify import accepted, flat, verified_widths

LARGEST_TEMPERATURE = 3e38  # what float32 holds; every distribution is flat long before
Int64 = NDArray[np.int64]


class PreparedStep(NamedTuple):
    """A step with the table rows it needs, as they are when it is launched."""

    step: Step
    slots: Int64
    tables: NDArray[np.int32]


class Sampled(NamedTuple):
    """What the rows of a step gave: tokens and log-probabilities of all outputs [rows that ask], and which outputs count.

    `counts` tokens of each [outputs of the step], from output `first` on; the newest of each is output `newest`.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    counts: Int64
    first: Int64
    newest: Int64


class ProgramRunner:
    """Runs steps for `Direct` or `Background`; `table` is the scheduler's block table, of which programs see the launched rows.

    `limit`: positions that a sequence may have. Rows beyond, of a sequence that has ended by then, are not run.
    """

    def __init__(self, programs: LoadedPrograms, table: NDArray[np.int32], *, drafting: bool, limit: int, rules: ReplayRules | None = None) -> None:
        self.programs, self.drafting, self.limit = programs, drafting, limit
        self.rules = rules
        self.table = table
        self._seen = programs.array("block_table").view(np.int32)
        self._results = {name: programs.array(name) for name in ("sampled", "logprobs")}
        self._block = programs.artifact.draft_block if drafting else 0
        if drafting:
            self._results |= {name: programs.array(name) for name in ("drafts", "confidences")}
        self._last = np.zeros(len(table), np.int64)
        self._length = np.zeros(len(table), np.int64)
        self._floors = np.zeros((2, len(table)), np.int64)  # of the encoder's and the decoder's windows
        self._drafts = np.zeros((len(table), self._block), np.int32)
        self._confidences = np.zeros((len(table), self._block), np.float64)

    def prepare(self, step: Step) -> PreparedStep:
        """What the step needs of the host's tables. Raises DeviceClosed, before anything is written for the step."""
        self.programs.device.check_open()
        slots = np.concatenate([step.slots, np.array([piece.slot for piece in step.pieces], np.int64)])
        return PreparedStep(step, slots, self.table[slots])

    def read_block(self, block: int) -> bytes | None:
        return self.programs.states.block(block) if self.programs.states.is_readable else None

    def execute(self, prepared: PreparedStep) -> StepResult:
        """Runs a step and reads its results."""
        started, step = perf_counter(), prepared.step
        self._seen[prepared.slots] = prepared.tables
        saved = [self._window(save.slot) for save in step.early_saves]
        self._prepare_states(step)
        self._length[step.known.slots], self._last[step.known.slots] = step.known.positions, step.known.tokens
        widths = self._widths(step)
        rows = self._rows(step, widths)
        if rows.tokens:
            self.programs.step(rows, drafting=False)
        sampled = self._sampled(step, widths, len(rows.outputs))
        drafts, confidences = self._drafted(step, sampled) if self.drafting else (None, None)
        saved += [self._window(save.slot) for save in step.saves]
        ms = (perf_counter() - started) * 1e3
        taken = flat(sampled.first, sampled.counts)
        logprobs = sampled.logprobs[taken]
        return StepResult(sampled.counts, sampled.tokens[taken], logprobs, np.maximum(widths, 1), drafts, confidences, saved,
                          self._failed(step, sampled.counts, logprobs), ms=ms)  # fmt: skip

    # -- states

    @property
    def _is_whole(self) -> bool:
        return self.rules is None or self.rules.is_whole

    def _window(self, slot: int) -> bytes:
        return self.programs.states.window(slot, is_whole=self._is_whole)

    def _prepare_states(self, step: Step) -> None:
        """Copies, loads and restores, before any row."""
        states = self.programs.states
        for source, copy in step.block_copies:
            states.put_block(copy, states.block(source))
        for parent, child in step.slot_copies:
            states.put_window(child, states.window(parent, is_whole=True), is_whole=True)
            self._floors[:, child] = self._floors[:, parent]
        for block, payload in step.loads:
            states.put_block(block, payload)
        for restore in step.restores:
            states.put_window(restore.slot, restore.payload, is_whole=self._is_whole)

    # -- rows

    def _widths(self, step: Step) -> Int64:
        """Rows of each decode sequence; none where it has reached the limit."""
        widths = verified_widths(step, self._confidences[step.slots])
        room: Int64 = self.limit - self._length[step.slots]
        return np.clip(widths, 0, np.maximum(room, 0))

    def _rows(self, step: Step, widths: Int64) -> StepRows:
        """Decode sequences first, the newest token of each with drafts behind it, then pieces of prompts."""
        ends, slots = np.cumsum(widths), np.repeat(step.slots, widths)
        place = flat(np.zeros(len(widths), np.int64), widths)
        tokens = self._last[slots]
        if self._block:
            tokens = np.where(place > 0, self._drafts[slots, np.maximum(place - 1, 0)], tokens)
        positions = self._length[slots] + place
        starts, count = np.repeat(ends - widths, widths), len(slots)
        rows = StepRows(tokens.tolist(), positions.tolist(), slots.tolist(), starts.tolist(), np.repeat(ends, widths).tolist(),
                        list(range(count)))  # fmt: skip
        if self.rules is not None and self.rules.mode is not Mode.EXACT:
            rows.floors, rows.kept_floors = self._floors[0, slots].tolist(), self._floors[1, slots].tolist()
            rows.kept, rows.kept_starts, rows.kept_ends = list(range(count)), list(rows.starts), list(rows.ends)
        drawn = [np.repeat(np.arange(len(widths)), widths)]
        for piece in step.pieces:
            self._add_piece(rows, piece)
        drawn.append(np.arange(len(widths), step.outputs))
        yielding = [piece for piece in step.pieces if piece.yields]
        drawn_slots = np.concatenate([slots, np.array([piece.slot for piece in yielding], np.int64)])
        drawn_positions = np.concatenate([positions + 1, np.array([piece.start + len(piece.tokens) for piece in yielding], np.int64)])
        rows.draws = self._draws(step, np.concatenate(drawn), drawn_slots, drawn_positions)
        return rows

    def _add_piece(self, rows: StepRows, piece: Piece) -> None:
        """Rows of a prompt, and of these the ones that the decoder half runs."""
        first = len(rows.tokens)
        rows.add(piece.slot, piece.start, piece.tokens)
        if rows.kept is None:
            if piece.yields:
                rows.outputs.append(len(rows.tokens) - 1)
            return
        plan, count, start = piece.plan, piece.decoder_rows, len(rows.kept)
        floors = (0, 0) if plan is None else (plan.encoder_floor, plan.decoder_floor)
        self._floors[:, piece.slot] = floors
        rows.floors += [floors[0]] * len(piece.tokens)
        rows.kept += range(first + len(piece.tokens) - count, first + len(piece.tokens))
        rows.kept_starts += [start] * count
        rows.kept_ends += [start + count] * count
        rows.kept_floors += [floors[1]] * count
        if piece.yields:
            rows.outputs.append(start + count - 1)

    def _draws(self, step: Step, outputs: Int64, slots: Int64, positions: Int64) -> DrawColumns:
        """How rows are drawn that belong to these outputs of the step: seed and position are all the randomness there is."""
        draws = step.draws
        temperature = np.minimum(draws.temperature[outputs], LARGEST_TEMPERATURE)
        return DrawColumns(temperature, draws.top_k[outputs], draws.top_p[outputs], draws.seeds[outputs], slots, positions)

    # -- results

    def _sampled(self, step: Step, widths: Int64, outputs: int) -> Sampled:
        """Reads the outputs, accepts drafts, and remembers the newest token of every slot."""
        tokens = np.append(self._results["sampled"][:outputs], 0).astype(np.int32)  # the last one stands for rows that were not run
        logprobs = np.append(self._results["logprobs"][:outputs], 0).astype(np.float32)
        runs, counts, newest = widths > 0, np.ones(step.outputs, np.int64), np.full(step.outputs, outputs, np.int64)
        ran = np.flatnonzero(runs)
        found = accepted(tokens, self._drafts[step.slots[runs]], widths[runs])
        counts[ran], newest[ran] = found.counts, found.newest
        decoded = int(widths.sum())
        newest[len(widths) :] = np.arange(decoded, outputs)
        slots = self._owners(step)
        lengths = np.array([piece.start + len(piece.tokens) - 1 for piece in step.pieces if piece.yields], np.int64)
        before = np.concatenate([self._length[step.slots], lengths])
        has_rows = newest < outputs
        self._last[slots[has_rows]] = tokens[newest[has_rows]]
        self._length[slots[has_rows]] = (before + counts)[has_rows]
        return Sampled(tokens, logprobs, counts, newest - counts + 1, newest)

    def _failed(self, step: Step, counts: Int64, logprobs: NDArray[np.float32]) -> dict[int, str]:
        """Slots with an output [counts of each] whose logits cannot be ranked, and why: a NaN or an infinity among them leaves no log-probability."""
        bad = ~np.isfinite(logprobs)
        if not bad.any():
            return {}
        output = np.repeat(np.arange(len(counts)), counts)
        drawn = self._length[slots := self._owners(step)][output] - counts[output] + flat(np.zeros(len(counts), np.int64), counts) + 1
        found = zip(slots[output][bad].tolist(), drawn[bad].tolist(), strict=True)
        return {slot: str(LogitsNotFinite(f"behind {n} tokens", "no log-probability", "a number")) for slot, n in reversed(list(found))}

    def _owners(self, step: Step) -> Int64:
        """The slot of each output of the step."""
        return np.concatenate([step.slots, np.array([piece.slot for piece in step.pieces if piece.yields], np.int64)])

    def _drafted(self, step: Step, sampled: Sampled) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """Drafts behind the newest tokens, for outputs that ask for them, and the chance that each is accepted [outputs, block].

        Drafts are the likeliest tokens, whatever the temperature: of all guesses these agree most often with a draw.
        """
        wanted = np.full(step.outputs, self._block) if step.drafts is None else step.drafts
        chosen = np.flatnonzero((wanted > 0) & (sampled.newest < len(sampled.tokens) - 1))
        slots = self._owners(step)
        drafts, confidences = np.zeros((step.outputs, self._block), np.int32), np.zeros((step.outputs, self._block))
        if len(chosen):
            draws = self._draws(step, chosen, slots[chosen], self._length[slots[chosen]])
            self.programs.draft_behind(sampled.newest[chosen], draws._replace(temperature=np.zeros(len(chosen))))
            drafts[chosen] = self._results["drafts"][: len(chosen)]
            confidences[chosen] = 1 / (1 + np.exp(-self._results["confidences"][: len(chosen)].astype(np.float64)))
        self._drafts[slots], self._confidences[slots] = drafts, confidences
        return drafts, confidences
