"""Runs the scheduler's steps with an artifact's programs: rows in, tokens out, in the order of launch.

A token that was not known when the step was launched is the one that this runner sampled for the slot before; so are the drafts behind it.
Drafts are rows like any other: each row yields a token by itself, and those that agree are accepted (`verify.py`). A step may also be put behind
one that still runs: the device then takes newest tokens from where it remembers them. docs/runtime.md, 3.2, 4.
"""

from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tapeout.runtime.errors import LogitsNotFinite, StepFault
from tapeout.runtime.program import DrawColumns, LoadedPrograms, StepRows
from tapeout.runtime.replay import Mode, ReplayRules
from tapeout.runtime.step import Piece, Step, StepResult
from tapeout.runtime.verify import accepted, flat, verified_widths

LARGEST_TEMPERATURE = 3e38  # what float32 holds; every distribution is flat long before
UNKNOWN = -1  # stands for the newest token of a slot where the host has not read it: the device puts in what it remembers
Int64 = NDArray[np.int64]


class PreparedStep(NamedTuple):
    """A step with the table rows it needs, as they are when it is launched."""

    step: Step
    slots: Int64
    tables: NDArray[np.int32]


@dataclass
class StartedStep:
    """A step that the device has, or had, and what came of it: `found` or `fault` once it was read.

    `slots` and `before` [outputs]: whose outputs these are, and the position of the newest token that each has in front of them. `begun`: what
    the programs wait for, None where the step has no rows.
    """

    step: Step
    widths: Int64
    slots: Int64
    before: Int64
    rows_out: int
    saved: list[bytes]
    since: float
    begun: Any = None
    found: StepResult | None = None
    fault: StepFault | None = None


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
    """Runs steps for `Direct`, `Background` or `Queued`; `table` is the scheduler's block table, of which programs see the launched rows.

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
        self._newest = np.full(len(table), -1)  # the last step with an output of each slot
        self._started: deque[StartedStep] = deque()  # and not read
        self._read_at = 0.0  # when the last one was
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
        started, rows = self._made(prepared)
        if rows.tokens:
            self.programs.step(rows, drafting=False)
        return self._read(started)

    # -- steps behind one another

    def start(self, prepared: PreparedStep) -> StartedStep:
        """Puts a step behind those that run, and returns before it has run.

        Where its rows follow from drafts of the step in front, it needs states as that one leaves them, or that one's are to be kept before others
        change them, it waits for the end of that one. Faults of those in front are theirs.
        """
        if self.drafting or _needs_states(prepared.step) or any(one.step.saves for one in self._started):
            self.settle()
        started, rows = self._made(prepared)
        if rows.tokens:
            started.begun = self.programs.begin(rows)
        self._started.append(started)
        runs = np.concatenate([started.widths > 0, np.ones(len(started.slots) - len(started.widths), bool)])
        slots = started.slots[runs]
        self._last[slots], self._length[slots] = UNKNOWN, started.before[runs] + 1
        return started

    def finish(self, started: StartedStep) -> StepResult:
        """What a started step gave; those in front of it are read first. Raises StepFault."""
        while started.found is None and started.fault is None:
            self._read_oldest()
        if started.fault is not None:
            raise started.fault
        assert started.found is not None
        return started.found

    def settle(self) -> None:
        """Reads all steps that were started."""
        while self._started:
            self._read_oldest()

    def _read_oldest(self) -> None:
        """An interrupt leaves it to be read again."""
        oldest = self._started[0]
        try:
            if oldest.begun is not None:
                self.programs.end(oldest.begun)
            oldest.found = self._read(oldest)
        except StepFault as error:
            oldest.fault = error
        self._started.popleft()
        if oldest.begun is not None:
            self.programs.release(oldest.begun)

    # -- parts of a step

    def _made(self, prepared: PreparedStep) -> tuple[StartedStep, StepRows]:
        """Everything in front of a step's rows, and these."""
        since, step = perf_counter(), prepared.step
        self._seen[prepared.slots] = prepared.tables
        saved = [self._window(save.slot) for save in step.early_saves]
        self._prepare_states(step)
        self._length[step.known.slots], self._last[step.known.slots] = step.known.positions, step.known.tokens
        widths = self._widths(step)
        rows = self._rows(step, widths)
        ends = np.array([piece.start + len(piece.tokens) - 1 for piece in step.pieces if piece.yields], np.int64)
        slots = self._owners(step)
        self._newest[slots] = step.number
        return StartedStep(step, widths, slots, np.concatenate([self._length[step.slots], ends]), len(rows.outputs), saved, since), rows

    def _read(self, started: StartedStep) -> StepResult:
        """Results of a step that is through, and what comes behind its rows."""
        step, widths = started.step, started.widths
        sampled = self._sampled(started)
        drafts, confidences = self._drafted(step, sampled) if self.drafting else (None, None)
        saved = started.saved + [self._window(save.slot) for save in step.saves]
        now, since = perf_counter(), max(started.since, self._read_at)
        self._read_at = now
        taken = flat(sampled.first, sampled.counts)
        logprobs = sampled.logprobs[taken]
        return StepResult(sampled.counts, sampled.tokens[taken], logprobs, np.maximum(widths, 1), drafts, confidences, saved,
                          _failed(started, sampled.counts, logprobs), ms=(now - since) * 1e3)  # fmt: skip

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

    def _sampled(self, started: StartedStep) -> Sampled:
        """Reads the outputs, accepts drafts, and remembers the newest token of every slot of which no later step has one."""
        step, widths, outputs = started.step, started.widths, started.rows_out
        tokens = np.append(self._results["sampled"][:outputs], 0).astype(np.int32)  # the last one stands for rows that were not run
        logprobs = np.append(self._results["logprobs"][:outputs], 0).astype(np.float32)
        runs, counts, newest = widths > 0, np.ones(step.outputs, np.int64), np.full(step.outputs, outputs, np.int64)
        ran = np.flatnonzero(runs)
        found = accepted(tokens, self._drafts[step.slots[runs]], widths[runs])
        counts[ran], newest[ran] = found.counts, found.newest
        decoded = int(widths.sum())
        newest[len(widths) :] = np.arange(decoded, outputs)
        known = (newest < outputs) & (self._newest[started.slots] == step.number)
        self._last[started.slots[known]] = tokens[newest[known]]
        self._length[started.slots[known]] = (started.before + counts)[known]
        return Sampled(tokens, logprobs, counts, newest - counts + 1, newest)

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


def _needs_states(step: Step) -> bool:
    """Whether the host reads or writes states in front of the step's rows."""
    return bool(step.early_saves or step.block_copies or step.slot_copies or step.loads or step.restores)


def _failed(started: StartedStep, counts: Int64, logprobs: NDArray[np.float32]) -> dict[int, str]:
    """Slots with an output [counts of each] whose logits cannot be ranked, and why: a NaN or an infinity among them leaves no log-probability."""
    bad = ~np.isfinite(logprobs)
    if not bad.any():
        return {}
    output = np.repeat(np.arange(len(counts)), counts)
    drawn = started.before[output] + flat(np.zeros(len(counts), np.int64), counts) + 1
    found = zip(started.slots[output][bad].tolist(), drawn[bad].tolist(), strict=True)
    return {slot: str(LogitsNotFinite(f"behind {n} tokens", "no log-probability", "a number")) for slot, n in reversed(list(found))}
