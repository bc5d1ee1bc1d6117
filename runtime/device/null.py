"""A device without a model: it takes steps and answers with tokens, drafts and confidences after a scripted time.

Its tokens are a function of the sequence's tokens as they stand in the cache blocks, of the seed and of the position, so a wrong block,
slot, position, copy or replay shows as wrong tokens; `null_answer` is the same function of a plain list. With rules it also keeps both
window rings and refuses to read an entry that was not written for the row. docs/runtime.md, 3.5.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tapeout.runtime.errors import StepLost
from tapeout.runtime.replay import ReplayRules, chunk_rows
from tapeout.runtime.step import Piece, Step, StepResult
from tapeout.runtime.verify import verified_widths

_MASK = 2**64 - 1
_EMPTY = -(2**31)


class Clock:
    """A clock that only a script moves. Seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True)
class NullModel:
    """What the device answers. `accepted` is the chance that a drafted token is the sequence's own, `confidence` what is said of one that is or
    is not (None: more than that chance, or less); `ms` gives a step's time from decode
    rows and prompt rows; `fails` names slots of a step whose rows come to nothing, `loses` steps that are lost whole."""

    vocabulary: int = 97
    drafts: int = 0
    accepted: float = 0.7
    ms: Callable[[int, int], float] = lambda decode, prompt: 1.0 + 0.01 * decode + 0.02 * prompt
    fails: Callable[[Step], Mapping[int, str]] = lambda step: {}
    loses: Callable[[Step], bool] = lambda step: False
    confidence: Callable[[bool], float] | None = None


class Prepared(NamedTuple):
    """A step with the table rows it needs, as they are when it is launched."""

    step: Step
    tables: dict[int, NDArray[np.int32]]


class NullDevice:
    """Runs steps for `Direct` or `Background`. `clock` is moved by each step's time."""

    def __init__(self, model: NullModel, table: NDArray[np.int32], blocks: int, block_tokens: int, rules: ReplayRules | None = None,
                 clock: Clock | None = None) -> None:  # fmt: skip
        self.model, self.rules, self.clock = model, rules, clock
        self.block_tokens, self._table = block_tokens, table
        self.steps = self.encoder_rows = self.decoder_prompt_rows = 0
        slots, self._limit = table.shape[0], min(table.shape[1], blocks - 1) * block_tokens
        self._cells = np.full((blocks, block_tokens), _EMPTY, np.int64)
        self._rings = np.full((2, slots, rules.ring if rules else 1, 2), _EMPTY, np.int64)  # encoder and decoder half: position, token
        self._floors = np.zeros((2, slots), np.int64)
        self._length = np.zeros(slots, np.int64)
        self._last = np.zeros(slots, np.int64)
        self._seeds = np.zeros(slots, np.uint64)
        self._drafts = np.zeros((slots, model.drafts), np.int64)
        self._confidences = np.zeros((slots, model.drafts))
        self._broken: set[tuple[int, int]] = set()  # slots and epochs of lost steps, and of what was built on them: those sequences have ended
        self._unloaded: set[int] = set()  # blocks whose load was lost

    # -- for Direct and Background

    def prepare(self, step: Step) -> Prepared:
        slots = [*step.slots.tolist(), *(piece.slot for piece in step.pieces)]
        return Prepared(step, {slot: self._table[slot].copy() for slot in slots})

    def read_block(self, block: int) -> bytes | None:
        return bytes(self._cells[block].tobytes())

    def execute(self, prepared: Prepared) -> StepResult:
        """Runs a step. Raises StepLost by script, RuntimeError where the scheduler broke a rule."""
        step, self._tables = prepared
        if self.model.loses(step):  # whole: its copies, loads and restores never came either
            self._broken |= {*zip(step.slots.tolist(), step.epochs.tolist(), strict=True), *((p.slot, p.epoch) for p in step.pieces)}
            self._unloaded |= {block for block, _ in step.loads}
            raise StepLost(f"step {step.number}", "a loss by script")
        early = [self._window(save.slot, save.end, is_checked=False) for save in step.early_saves]
        self._before(step)
        self._learn(step)
        widths = self._widths(step)
        decode = list(zip(step.slots.tolist(), step.epochs.tolist(), widths.tolist(), strict=True))
        answers = [self._decode(slot, width) if (slot, epoch) not in self._broken else [0] for slot, epoch, width in decode]
        for piece in step.pieces:
            cached = 0 if piece.plan is None else piece.plan.write_from // self.block_tokens
            if self._unloaded.intersection(self._tables[piece.slot][:cached].tolist()):
                self._broken.add((piece.slot, piece.epoch))
            is_whole = (piece.slot, piece.epoch) not in self._broken
            if is_whole:
                self._prompt(piece)
            if piece.yields:
                answers.append([self._next(piece.slot, int(self._length[piece.slot]))] if is_whole else [0])
        outputs = [*step.slots.tolist(), *(piece.slot for piece in step.pieces if piece.yields)]
        owners = [(s, e) for s, e, _ in decode] + [(p.slot, p.epoch) for p in step.pieces if p.yields]
        lengths = [self.model.drafts] * len(owners) if step.drafts is None else step.drafts.tolist()
        for owner, answer, length in zip(owners, answers, lengths, strict=True):
            if owner not in self._broken:
                self._settle(owner[0], answer, length)
        saved = early + [b"" if (save.slot, save.epoch) in self._broken else self._window(save.slot, save.end) for save in step.saves]
        if not len(step.slots) and not step.pieces:
            return self._result(step, widths, outputs, answers, saved, 0.0)
        self.steps += 1
        ms = self.model.ms(int(widths.sum()), step.prompt_rows)
        if self.clock is not None:
            self.clock.now_s += ms / 1e3
        return self._result(step, widths, outputs, answers, saved, ms)

    def _result(self, step: Step, widths: NDArray[np.int64], outputs: Sequence[int], answers: Sequence[list[int]], saved: list[bytes],
                ms: float) -> StepResult:  # fmt: skip
        flat = np.array([token for answer in answers for token in answer], np.int32)
        drafting = self.model.drafts > 0
        return StepResult(
            np.array([len(answer) for answer in answers], np.int64), flat, (-flat / 8).astype(np.float32), widths,
            self._drafts[outputs].astype(np.int32) if drafting else None, self._confidences[outputs] if drafting else None,
            saved, self.model.fails(step), ms,
        )  # fmt: skip

    # -- before the rows

    def _before(self, step: Step) -> None:
        for source, copy in step.block_copies:
            self._cells[copy] = self._cells[source]
        for parent, child in step.slot_copies:
            self._rings[:, child], self._floors[:, child] = self._rings[:, parent], self._floors[:, parent]
        for block, payload in step.loads:
            self._cells[block] = np.frombuffer(payload, np.int64)
            self._unloaded.discard(block)
        for restore in step.restores:
            entries = np.frombuffer(restore.payload, np.int64).reshape(-1, 2)
            self._rings[0, restore.slot][entries[:, 0] % self._rings.shape[2]] = entries

    def _learn(self, step: Step) -> None:
        """Takes known tokens and seeds from the host; following rows go on from what this device has."""
        known, draws = step.known, step.draws
        if ((known.tokens < 0) | (known.tokens >= self.model.vocabulary)).any():
            raise RuntimeError(f"internal: ids {known.tokens.tolist()} were packed for a device")
        self._length[known.slots], self._last[known.slots] = known.positions, known.tokens
        outputs = np.concatenate([step.slots, np.array([p.slot for p in step.pieces if p.yields], np.int64)])
        self._seeds[outputs] = np.where(draws.temperature > 0, draws.seeds.astype(np.uint64), np.uint64(0))

    def _widths(self, step: Step) -> NDArray[np.int64]:
        """Rows of each decode sequence: all it may have, or the step's total split by the newest confidences."""
        return verified_widths(step, self._confidences[step.slots])

    # -- rows

    def _decode(self, slot: int, width: int) -> list[int]:
        """Verifies drafts: the sequence's own tokens up to the first that was guessed wrong."""
        start = int(self._length[slot])
        rows = [int(self._last[slot]), *self._drafts[slot, : width - 1].tolist()]
        self._check_window(0, slot, start)
        self._check_window(1, slot, start)
        for place, token in enumerate(rows):
            self._write(slot, start + place, token)
            self._ring_write(0, slot, [start + place], [token])
            self._ring_write(1, slot, [start + place], [token])
        answer = []
        for place in range(width):
            answer.append(self._next(slot, start + place + 1))
            if place + 1 < width and rows[place + 1] != answer[-1]:
                break
        self._length[slot] = start + len(answer)
        return answer

    def _prompt(self, piece: Piece) -> None:
        slot, count = piece.slot, len(piece.tokens)
        tokens = np.array(piece.tokens, np.int64)
        if ((tokens < 0) | (tokens >= self.model.vocabulary)).any():
            raise RuntimeError("internal: a prompt token outside the vocabulary was packed for a device")
        end = piece.start + count
        self._store(slot, piece.start, tokens, 0 if piece.plan is None else piece.plan.write_from)
        self._length[slot] = end
        self.encoder_rows += count
        if piece.plan is None:
            self._whole(slot, piece.start, tokens)
            return
        rows = chunk_rows(piece.plan, piece.start, count)
        self.decoder_prompt_rows += len(rows.decoder_positions)
        self._floors[:, slot] = piece.plan.encoder_floor, piece.plan.decoder_floor
        if piece.start > piece.plan.first_row or piece.plan.restore_at is not None:
            self._check_window(0, slot, piece.start)
        kept = rows.ring_slot >= 0
        self._ring_write(0, slot, rows.positions[kept], tokens[kept])
        kept = rows.decoder_ring_slot >= 0
        if len(rows.decoder_positions) and int(rows.decoder_positions[0]) > piece.plan.decoder_floor:
            self._check_window(1, slot, int(rows.decoder_positions[0]))
        self._ring_write(1, slot, rows.decoder_positions[kept], tokens[rows.decoder_positions[kept] - piece.start])

    def _whole(self, slot: int, start: int, tokens: NDArray[np.int64]) -> None:
        """Rows of a prompt all of which go through both halves."""
        self.decoder_prompt_rows += len(tokens)
        self._floors[:, slot] = 0
        kept = min(len(tokens), self._rings.shape[2])
        for half in (0, 1):
            if start:
                self._check_window(half, slot, start)
            self._ring_write(half, slot, np.arange(start, start + len(tokens))[-kept:], tokens[-kept:])

    def _store(self, slot: int, start: int, tokens: NDArray[np.int64], write_from: int) -> None:
        """Writes rows into blocks; rows before `write_from` are cached, and must be what they were."""
        positions = np.arange(start, start + len(tokens))
        blocks = self._tables[slot][positions // self.block_tokens]
        if (blocks == 0).any():
            raise RuntimeError(f"internal: slot {slot} has no block for position {int(positions[blocks == 0][0])}")
        offsets, cached = positions % self.block_tokens, positions < write_from
        self._unloaded.difference_update(blocks[~cached].tolist())
        if (self._cells[blocks[cached], offsets[cached]] != tokens[cached]).any():
            raise RuntimeError(f"internal: a cached block of slot {slot} holds other tokens")
        self._cells[blocks[~cached], offsets[~cached]] = tokens[~cached]

    def _write(self, slot: int, position: int, token: int) -> None:
        """Writes one row; beyond what the table can address it goes nowhere, as its sequence has ended by then."""
        if position >= self._limit:
            return
        block = int(self._tables[slot][position // self.block_tokens])
        if not block:
            raise RuntimeError(f"internal: slot {slot} has no block for position {position}")
        self._cells[block, position % self.block_tokens] = token

    def _history(self, slot: int, length: int) -> NDArray[np.int64]:
        count = -(-length // self.block_tokens)
        return self._cells[self._tables[slot][:count]].reshape(-1)[:length]

    def _next(self, slot: int, length: int) -> int:
        """The token at position `length`."""
        return _token(_hashed(self._history(slot, min(length, self._limit))), int(self._seeds[slot]), length, self.model.vocabulary)

    def _settle(self, slot: int, answer: list[int], drafts: int) -> None:
        """Remembers the newest token and so many drafts behind it."""
        self._last[slot] = answer[-1]
        if not self.model.drafts:
            return
        length, seed = int(self._length[slot]), int(self._seeds[slot])
        state = _hashed(self._history(slot, min(length, self._limit)))
        token = answer[-1]
        self._drafts[slot], self._confidences[slot] = _EMPTY, 0.0
        for k in range(drafts):
            state = _extended(state, token, length + k)
            token = _token(state, seed, length + k + 1, self.model.vocabulary)
            luck = (_mix(state ^ 0xD1B54A32D192ED03) >> 11) / 2**53
            if luck >= self.model.accepted:
                token = (token + 1) % self.model.vocabulary
            self._drafts[slot, k] = token
            self._confidences[slot, k] = self._said(luck < self.model.accepted)

    def _said(self, is_right: bool) -> float:
        if self.model.confidence is not None:
            return self.model.confidence(is_right)
        return min(1.0, max(0.0, self.model.accepted + (0.25 if is_right else -0.25)))

    # -- rings

    def _ring_write(self, half: int, slot: int, positions: Sequence[int] | NDArray[np.int64],
                    tokens: Sequence[int] | NDArray[np.int64]) -> None:  # fmt: skip
        if self.rules is not None:
            ring, at = self._rings[half, slot], np.asarray(positions, np.int64)
            ring[at % len(ring), 0], ring[at % len(ring), 1] = at, tokens

    def _check_window(self, half: int, slot: int, position: int) -> None:
        """The window before a row must hold the tokens before it, from the floor on."""
        if self.rules is None or position > self._limit:
            return
        first = max(position - self.rules.window + 1, int(self._floors[half, slot]), 0)
        wanted = np.arange(first, position)
        ring = self._rings[half, slot]
        entries = ring[wanted % len(ring)]
        tokens = self._history(slot, position)[first:]
        if (entries[:, 0] != wanted).any() or (entries[:, 1] != tokens).any():
            raise RuntimeError(f"internal: slot {slot} reads a window before {position} that was not written for it")

    def _window(self, slot: int, end: int, *, is_checked: bool = True) -> bytes:
        """The encoder half's window that ends at `end`; of a slot that was given up its tokens cannot be checked any more."""
        if self.rules is None:
            return b""
        if is_checked:
            self._check_window(0, slot, end)
        ring = self._rings[0, slot]
        wanted = np.arange(max(end - self.rules.window, int(self._floors[0, slot]), 0), end)
        entries = ring[wanted % len(ring)]
        if (entries[:, 0] != wanted).any():
            raise RuntimeError(f"internal: slot {slot} no longer has the window that ends at {end}")
        return bytes(entries.tobytes())


# -- the model


def null_answer(prompt: Sequence[int], count: int, *, temperature: float = 0.0, seed: int = 0, vocabulary: int = 97,
                eos_id: int | None = None, max_context: int | None = None) -> list[int]:  # fmt: skip
    """Up to `count` tokens of the null model, ending with eos or one past the context."""
    state, tokens = _hashed(np.array(prompt, np.int64)), list(prompt)
    while len(tokens) - len(prompt) < count:
        token = _token(state, seed if temperature > 0 else 0, len(tokens), vocabulary)
        state = _extended(state, token, len(tokens))
        tokens.append(token)
        if token == eos_id or (max_context is not None and len(tokens) > max_context):
            break
    return tokens[len(prompt) :]


def _weights(count: int) -> NDArray[np.uint64]:
    """An odd weight for each of the first `count` positions."""
    return _weight_table(max(1024, 1 << count.bit_length()))[:count]


@cache
def _weight_table(count: int) -> NDArray[np.uint64]:
    return np.array([_mix(i + 1) | 1 for i in range(count)], np.uint64)


def _hashed(tokens: NDArray[np.int64]) -> int:
    return int(((tokens + 1).astype(np.uint64) * _weights(len(tokens))).sum(dtype=np.uint64))


def _extended(state: int, token: int, position: int) -> int:
    return (state + (token + 1) * int(_weights(position + 1)[position])) & _MASK


def _token(state: int, seed: int, position: int, vocabulary: int) -> int:
    return _mix(state ^ _mix((seed + position) & _MASK)) % vocabulary


def _mix(x: int) -> int:
    """The finaliser of splitmix64."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
