"""How good a checkpoint is, measured through its compiled programs: bits per byte, bounded replay, drafts and their confidences.

Needs the runtime only. Every figure says in its docstring what it counts; tests hold the arithmetic against naive formulas.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tapeout.runtime.calibration import calibration_error, no_outcomes, with_outcomes
from tapeout.runtime.program import Draw, LoadedPrograms, StepRows

Floats = NDArray[np.float64]
Logits = NDArray[np.float32]
Ints = NDArray[np.int64]
LN2 = float(np.log(2.0))


class Window(NamedTuple):
    """Rows of a document that are run together; the tokens behind rows `first` and later are scored."""

    tokens: list[int]
    following: list[int]
    first: int


class Divergence(NamedTuple):
    """Over `rows` rows: mean KL of the replayed from the exact distribution in nats, and mean loss of both in nats."""

    rows: int
    kl: float
    exact_loss: float
    replayed_loss: float

    @property
    def loss_change(self) -> float:
        """Relative change of the loss."""
        return self.replayed_loss / self.exact_loss - 1


class Drafting(NamedTuple):
    """Blocks drafted while greedy text is made, as a speculative engine meets them; per position, of all blocks behind every token, how
    often a draft was right when those before it were, what its confidence claimed, and the calibration error."""

    blocks: int
    mean_accepted: float
    reached: list[int]
    accepted_share: list[float]
    claimed: list[float]
    calibration_error: list[float]


Forward = Callable[[Sequence[int]], Logits]
"""Logits of every row of one sequence that begins with these tokens."""


def windows(ids: Sequence[int], bos: int, rows: int, stride: int) -> Iterator[Window]:
    """Cuts a document, BOS before it, into windows of at most `rows` rows, `stride` apart; every token of it is scored once, by the first
    window that holds its row. A later window begins in mid-text and runs at positions from 0."""
    text, scored = [bos, *ids], 0
    for start in range(0, len(ids), stride):
        tokens = text[start : start + rows]
        following = text[start + 1 : start + rows + 1]
        tokens = tokens[: len(following)]
        if start + len(tokens) > scored:
            yield Window(tokens, following, scored - start)
            scored = start + len(tokens)


def code_length(forward: Forward, cut: Sequence[Window]) -> float:
    """Bits that the model needs for the scored tokens."""
    nats = 0.0
    for window in cut:
        logits = forward(window.tokens)
        nats += float(losses(logits[window.first :], window.following[window.first :]).sum())
    return nats / LN2


def losses(logits: Logits, tokens: Sequence[int]) -> Floats:
    """-log p of a token in each row of logits [rows, V], in nats."""
    return -_log_softmax(logits)[np.arange(len(tokens)), np.asarray(tokens, np.int64)]


def divergence(exact: Sequence[Logits], replayed: Sequence[Logits], tokens: Sequence[Sequence[int]]) -> Divergence:
    """Compares rows of logits that came from both; `tokens` really followed."""
    right, other = (_log_softmax(np.concatenate(list(some))) for some in (exact, replayed))
    follow = np.concatenate([np.asarray(some, np.int64) for some in tokens])
    row = np.arange(len(follow))
    kl = (np.exp(right) * (right - other)).sum(axis=1)
    return Divergence(len(row), float(kl.mean()), float(-right[row, follow].mean()), float(-other[row, follow].mean()))


def drafting(texts: Sequence[Sequence[int]], drafts: Sequence[NDArray[np.int64]], confidences: Sequence[Floats]) -> Drafting:
    """Judges drafts. `texts` are greedy tokens; `drafts[i][n]` and `confidences[i][n]`, [blocks, B], were made behind token n of text i.

    A block counts where B tokens are known behind it. Speculation steps from a block to the token behind its last right draft and the one
    that verification adds; the mean is over the blocks that are met that way. That additional token is not counted.
    """
    size = drafts[0].shape[1]
    right = [_right(np.asarray(text), made) for text, made in zip(texts, drafts, strict=True)]
    met = [accepted[at] for accepted in right for at in _steps(accepted)]
    accepted = np.concatenate(right)
    claims = np.concatenate([_chance(some[: len(own)]) for some, own in zip(confidences, right, strict=True)])
    outcomes = with_outcomes(no_outcomes(size), claims, np.full(len(claims), size + 1), accepted)
    seen = np.maximum(outcomes.seen.sum(axis=1), 1)
    return Drafting(
        len(met),
        float(np.mean(met)),
        [int(n) for n in outcomes.seen.sum(axis=1)],
        (outcomes.accepted.sum(axis=1) / seen).tolist(),
        (outcomes.claimed.sum(axis=1) / seen).tolist(),
        calibration_error(outcomes).tolist(),
    )


@dataclass(frozen=True)
class Compiled:
    """The programs of a CPU artifact, one sequence a pass, in slot 0."""

    programs: LoadedPrograms

    def logits(self, tokens: Sequence[int], *, first: int = 0, keep_from: int = 0) -> Logits:
        """Logits [rows, V] of rows `first` and later of a sequence that begins here. The decoder runs rows from `keep_from` on and its
        windows, the draft's too, begin there: bounded replay, compact (docs/model.md 11.4)."""
        return self.logits_of_kept(tokens, range(keep_from, len(tokens)), [keep_from] * (len(tokens) - keep_from), first - keep_from)

    def logits_of_kept(self, tokens: Sequence[int], kept: Sequence[int], floors: Sequence[int], first: int = 0) -> Logits:
        """Logits of kept rows `first` and later, each kept row with its own window floor."""
        programs, count = self.programs, len(kept)
        rows = StepRows()
        rows.add(0, 0, tokens)
        rows.outputs += range(first, count)
        rows.kept, rows.kept_starts, rows.kept_ends, rows.kept_floors = list(kept), [0] * count, [count] * count, list(floors)
        programs.load(rows)
        bucket = programs.bucket(len(tokens))
        programs.run(("encoder", bucket), ("decoder", bucket), rows=len(tokens))
        return np.array(programs.array("logits")[: count - first], np.float32)

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> tuple[list[list[int]], list[NDArray[np.int64]], list[Floats]]:
        """`count` greedy tokens of each prompt, one prompt a slot, with the block drafted behind each token and its confidence logits."""
        made: list[list[int]] = [[] for _ in prompts]
        drafts: list[list[Ints]] = [[] for _ in prompts]
        confidences: list[list[Floats]] = [[] for _ in prompts]
        for slot, prompt in enumerate(prompts):
            rows = StepRows()
            rows.add(slot, 0, prompt)
            self._step(rows, [(slot, len(prompt))], made, drafts, confidences)
        for _ in range(count - 1):
            rows = StepRows()
            for slot, prompt in enumerate(prompts):
                rows.add(slot, len(prompt) + len(made[slot]) - 1, [made[slot][-1]])
            self._step(rows, [(s, len(p) + len(made[s])) for s, p in enumerate(prompts)], made, drafts, confidences)
        return made, [np.array(some) for some in drafts], [np.array(some) for some in confidences]

    def _step(
        self, rows: StepRows, wanted: list[tuple[int, int]], made: list[list[int]], drafts: list[list[Ints]], confidences: list[list[Floats]]
    ) -> None:
        """One step; `wanted` is slot and position of each token to be made, behind the last row of its slot."""
        ends = {slot: row for row, slot in enumerate(rows.slots)}
        rows.outputs += [ends[slot] for slot, _ in wanted]
        rows.draws += [Draw(0.0, -1, 1.0, 0, slot, position) for slot, position in wanted]
        self.programs.step(rows, drafting=True)
        found = {name: self.programs.array(name) for name in ("sampled", "drafts", "confidences")}
        for row, (slot, _) in enumerate(wanted):
            made[slot].append(int(found["sampled"][row]))
            drafts[slot].append(np.array(found["drafts"][row], np.int64))
            confidences[slot].append(np.array(found["confidences"][row], np.float64))


def _log_softmax(logits: Logits) -> Floats:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    found: Floats = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return found


def _right(text: Ints, drafts: Ints) -> Ints:
    """How many leading drafts of each block are the tokens that follow; blocks whose tokens are all known."""
    size = drafts.shape[1]
    blocks = max(0, len(text) - size)
    truth = np.array([text[n + 1 : n + 1 + size] for n in range(blocks)]).reshape(blocks, size)
    return np.cumprod(drafts[:blocks] == truth, axis=1).sum(axis=1)


def _steps(accepted: Ints) -> Iterator[int]:
    at = 0
    while at < len(accepted):
        yield at
        at += int(accepted[at]) + 1


def _chance(logits: Floats) -> Floats:
    return 1 / (1 + np.exp(-np.clip(logits, -60, 60)))
