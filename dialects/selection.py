"""Index scores and exact top-k selection of compressed entries: `mla.select`, `mla.select_candidates`, `mla.select_within`.

Scores are real numbers rounded once; selection on them is exact, ties go to the lowest entry, and the order of sums does not depend on how
many rows or entries a step has: a selection is a function of the sequence and the position alone (docs/model.md 4.5, 4.6).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tapeout.dialects._mlir import ext, ir
from tapeout.dialects.define import READS, Cost, Group, Sizes, builder, declare, moved_once, require
from tapeout.dialects.format import BF16, INT32, Array, Number, Scaled, decode, encode
from tapeout.dialects.mla import Mla
from tapeout.dialects.rows import TABLE, Ids, Mask, Real, entry_rows, left_aligned, paged, tables, visible_entries
from tapeout.dialects.rules import ROWS, blocks, index, positive, product_kind, rows, shaped
from tapeout.dialects.state import State
from tapeout.dialects.types import Tensor, View

Numbers = tuple[Number | None, ...]
Value = Array | Scaled
SCORES = ("f64", "bf16")


@dataclass(frozen=True)
class _Scored:
    """The rows of one sequence: their places in the step, physical rows of entries 0 ... n-1, score [rows, n], -inf where invisible."""

    places: Array
    physical: Ids
    score: Real


@declare
class SelectOp(Mla.Operation, name="select", traits=[READS]):
    """Selects the min(top_k, n_t) visible entries with the largest index score, ties to the lowest entry.

    score(t, j) = sum_h w_h max(0, iq_h . ik_j), rounded once to `score`; n_t = (t + 1) // ratio. iq [?, heads*ID], weights [?, heads],
    keys: blocks of [ID], positions, slots [?], block_table [sequences, blocks] -> ids [?, top_k] physical rows in ascending entry order,
    left aligned, -1 padded; counts [?] (docs/model.md 4.5).
    """

    ids: ext.Result[Any]
    counts: ext.Result[Any]
    iq: ext.Operand[Any]
    weights: ext.Operand[Any]
    keys: ext.Operand[Any]
    positions: ext.Operand[Any]
    slots: ext.Operand[Any]
    block_table: ext.Operand[Any]
    heads: ir.IntegerAttr
    top_k: ir.IntegerAttr
    ratio: ir.IntegerAttr
    block_tokens: ir.IntegerAttr
    score: ir.StringAttr

    @staticmethod
    def infer(a: Any, iq: Group, weights: Group, keys: Group, positions: Group, slots: Group, block_table: Group, *,
              out: Numbers) -> tuple[Tensor, Tensor]:
        _expect_scored(a, iq, weights, keys, positions, slots, block_table)
        return Tensor((ROWS, a.top_k), INT32), TABLE

    @staticmethod
    def meaning(a: Any, results: list[View], iq: Value, weights: Value, keys: State, positions: Ids, slots: Ids,
                block_table: Ids) -> tuple[Array, Array]:
        selected = _Selected(len(slots), a.top_k)
        for part in _scores(a, iq, weights, keys, positions, slots, block_table):
            selected.put(part, part.score)
        return selected.ids, selected.counts

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[View], sizes: Sizes) -> Cost:
        return _score_cost(a, operands, results, sizes, sizes.entries)


select = builder(SelectOp)


@declare
class SelectCandidatesOp(Mla.Operation, name="select_candidates", traits=[READS]):
    """Selects as `mla.select` does and, from the same scores, the candidate blocks that later layers may select within.

    Block b covers entries block*b ... block*b + block - 1 and is worth its best visible score; the newest, which may be partial, is always
    in, then the best, ties to the lowest block, `blocks` in all. Operands as `mla.select` -> ids, counts, candidates [?, blocks] block
    numbers ascending, left aligned, -1 padded; candidate_counts [?] (docs/model.md 4.6).
    """

    ids: ext.Result[Any]
    counts: ext.Result[Any]
    candidates: ext.Result[Any]
    candidate_counts: ext.Result[Any]
    iq: ext.Operand[Any]
    weights: ext.Operand[Any]
    keys: ext.Operand[Any]
    positions: ext.Operand[Any]
    slots: ext.Operand[Any]
    block_table: ext.Operand[Any]
    heads: ir.IntegerAttr
    top_k: ir.IntegerAttr
    ratio: ir.IntegerAttr
    block_tokens: ir.IntegerAttr
    score: ir.StringAttr
    blocks: ir.IntegerAttr
    block: ir.IntegerAttr

    @staticmethod
    def infer(a: Any, iq: Group, weights: Group, keys: Group, positions: Group, slots: Group, block_table: Group, *,
              out: Numbers) -> tuple[Tensor, ...]:
        _expect_scored(a, iq, weights, keys, positions, slots, block_table)
        positive(blocks=a.blocks, block=a.block)
        _expect_room(a, a.blocks)
        return Tensor((ROWS, a.top_k), INT32), TABLE, Tensor((ROWS, a.blocks), INT32), TABLE

    @staticmethod
    def meaning(a: Any, results: list[View], iq: Value, weights: Value, keys: State, positions: Ids, slots: Ids,
                block_table: Ids) -> tuple[Array, ...]:
        selected, chosen = _Selected(len(slots), a.top_k), _Selected(len(slots), a.blocks)
        for part in _scores(a, iq, weights, keys, positions, slots, block_table):
            selected.put(part, part.score)
            worth = _block_worth(part.score, a.block)
            chosen.put(_Scored(part.places, np.arange(worth.shape[1], dtype=np.int32), worth), worth)
        return selected.ids, selected.counts, chosen.ids, chosen.counts

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[View], sizes: Sizes) -> Cost:
        return _score_cost(a, operands, results, sizes, sizes.entries)


select_candidates = builder(SelectCandidatesOp)


@declare
class SelectWithinOp(Mla.Operation, name="select_within", traits=[READS]):
    """Selects as `mla.select` does, among the entries of the row's candidate blocks only.

    Operands as `mla.select`, then candidates [?, blocks] and candidate_counts [?] as `mla.select_candidates` makes them
    -> ids [?, top_k], counts [?] (docs/model.md 4.6).
    """

    ids: ext.Result[Any]
    counts: ext.Result[Any]
    iq: ext.Operand[Any]
    weights: ext.Operand[Any]
    keys: ext.Operand[Any]
    positions: ext.Operand[Any]
    slots: ext.Operand[Any]
    block_table: ext.Operand[Any]
    candidates: ext.Operand[Any]
    candidate_counts: ext.Operand[Any]
    heads: ir.IntegerAttr
    top_k: ir.IntegerAttr
    ratio: ir.IntegerAttr
    block_tokens: ir.IntegerAttr
    score: ir.StringAttr
    block: ir.IntegerAttr

    @staticmethod
    def infer(a: Any, iq: Group, weights: Group, keys: Group, positions: Group, slots: Group, block_table: Group, candidates: Group,
              candidate_counts: Group, *, out: Numbers) -> tuple[Tensor, Tensor]:
        _expect_scored(a, iq, weights, keys, positions, slots, block_table)
        positive(block=a.block)
        _expect_room(a, index(candidates, "candidates", ROWS, "blocks").sized(0)[1])
        tables(candidate_counts=candidate_counts)
        return Tensor((ROWS, a.top_k), INT32), TABLE

    @staticmethod
    def meaning(a: Any, results: list[View], iq: Value, weights: Value, keys: State, positions: Ids, slots: Ids, block_table: Ids,
                candidates: Ids, candidate_counts: Ids) -> tuple[Array, Array]:
        selected = _Selected(len(slots), a.top_k)
        for part in _scores(a, iq, weights, keys, positions, slots, block_table):
            inside = _inside(candidates[part.places], candidate_counts[part.places], part.score.shape[1], a.block)
            selected.put(part, np.where(inside, part.score, -np.inf))
        return selected.ids, selected.counts

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[View], sizes: Sizes) -> Cost:
        return _score_cost(a, operands, results, sizes, min(sizes.entries, operands[6].shape[1] * a.block))


select_within = builder(SelectWithinOp)


def _expect_scored(a: Any, iq: Group, weights: Group, keys: Group, positions: Group, slots: Group, block_table: Group) -> None:
    """What the three ops ask of the operands they share."""
    positive(heads=a.heads, top_k=a.top_k)
    require(a.score in SCORES, f'attribute score is "{a.score}", expected one of {", ".join(SCORES)}')
    found, entries = rows(iq, "iq", 2), blocks(keys, "keys")
    width = entries.entry.sized(0)
    require(len(width) == 1 and entries.entry.number.is_float, f"keys is {entries}, expected entries of one real vector")
    require(found.shape[1] == a.heads * width[0], f"iq is {found}, expected {a.heads} heads of {width[0]} columns")
    shaped(weights, "weights", ROWS, a.heads)
    require(entries.ratio == a.ratio, f"attribute ratio is {a.ratio}, but keys is {entries}")
    tables(positions=positions, slots=slots)
    paged(block_table, a.ratio, a.block_tokens)


def _expect_room(a: Any, count: int) -> None:
    """Candidates must hold top_k visible entries even where the newest block holds one (docs/model.md 4.6)."""
    room = (count - 1) * a.block + 1
    require(room >= a.top_k, f"{count} candidate blocks of {a.block} may hold only {room} visible entries, expected top_k = {a.top_k}")


def _scores(a: Any, iq: Value, weights: Value, keys: State, positions: Ids, slots: Ids, block_table: Ids) -> Iterator[_Scored]:
    """Sequence by sequence, the scores of every row against the entries that its newest row sees."""
    queries, factors = decode(iq).reshape(len(slots), a.heads, -1 if len(slots) else 1), decode(weights)
    counts = visible_entries(positions, a.ratio)
    for slot in np.unique(slots):
        places = np.flatnonzero(slots == slot)
        numbers = np.arange(counts[places].max(), dtype=np.int32)
        physical = entry_rows(block_table, slot, numbers, a.block_tokens // a.ratio)
        score = _score(queries[places], factors[places], decode(keys.read(physical)), a.score)
        yield _Scored(places, physical, np.where(left_aligned(counts[places], len(numbers)), score, -np.inf))


def _score(queries: Real, factors: Real, keys: Real, score: str) -> Real:
    """sum_h factors[r, h] max(0, queries[r, h] . keys[j]) for every r and j, rounded to `score`.

    `einsum` sums each product along its row in an order that depends on the width alone; a matrix product would not promise that.
    """
    total = np.zeros((len(queries), len(keys)))
    for head in range(queries.shape[1]):
        products = np.einsum("rd,nd->rn", np.ascontiguousarray(queries[:, head]), keys)
        total += factors[:, head, None] * np.maximum(products, 0.0)
    return total if score == "f64" else decode(encode(total, BF16))


def _block_worth(score: Real, block: int) -> Real:
    """The best score of each block of entries, +inf for each row's newest visible one, -inf where nothing is visible."""
    rows_, n = score.shape
    count = -(-n // block)
    padded = np.full((rows_, count * block), -np.inf)
    padded[:, :n] = score
    worth: Real = padded.reshape(rows_, count, block).max(axis=2)
    seen = (score > -np.inf).sum(axis=1)
    row = np.flatnonzero(seen)
    worth[row, (seen[row] - 1) // block] = np.inf
    return worth


def _inside(candidates: Ids, counts: Ids, entries: int, block: int) -> Mask:
    """Which of `entries` entries lie in a row's candidate blocks."""
    row, column = np.nonzero(left_aligned(counts, candidates.shape[1]))
    chosen = np.zeros((len(candidates), -(-entries // block)), bool)
    numbers = candidates[row, column]
    exists = numbers < chosen.shape[1]
    chosen[row[exists], numbers[exists]] = True
    return np.repeat(chosen, block, axis=1)[:, :entries]


class _Selected:
    """The result being filled, one sequence at a time: `ids` [rows, width], -1 where nothing is selected, and `counts`."""

    def __init__(self, count: int, width: int) -> None:
        self.ids = np.full((count, width), -1, np.int32)
        self.counts = np.zeros(count, np.int32)

    def put(self, part: _Scored, score: Real) -> None:
        """Writes, for the rows of `part`, the `width` best columns of `score` above -inf, in ascending order."""
        width = min(self.ids.shape[1], score.shape[1])
        best = np.argsort(-score, axis=1, kind="stable")[:, :width]
        counts = np.minimum((score > -np.inf).sum(axis=1), width)
        ascending = np.sort(np.where(left_aligned(counts, width), best, score.shape[1]), axis=1)
        physical = np.append(part.physical, -1)
        self.ids[part.places, :width] = physical[ascending]
        self.counts[part.places] = counts


def _score_cost(a: Any, operands: list[Any], results: list[View], sizes: Sizes, visible: int) -> Cost:
    """2*heads*ID operations and one key read for each entry that a row scores (docs/model.md 12.2)."""
    iq, keys = operands[0], operands[2]
    kind = product_kind(iq.number, keys.entry.number)
    scored = sizes.rows * visible
    return moved_once(a, operands, results, sizes) + Cost(read=scored * keys.entry.bytes(), operations={kind: 2 * scored * iq.shape[1]})

