"""Ops on row tables: which token a row holds, which physical state rows it may read and where its own new rows go.

Everything is a function of positions (docs/model.md 4.3, 4.4, 11): a row reads position u from this step's staged rows where u lies
at or after its sequence's first row of the step, else from the ring. Values of the states are other dialects' business.
"""

from typing import Any

import numpy as np

from tapeout.dialects._mlir import ext, ir
from tapeout.dialects.define import READS, WRITES, Cost, Group, Sizes, builder, declare, moved_once, require
from tapeout.dialects.format import INT32, Array, Number
from tapeout.dialects.rows import TABLE, Ids, entry_rows, left_aligned, paged, tables
from tapeout.dialects.rules import ROWS, positive
from tapeout.dialects.state import State
from tapeout.dialects.types import Ring, Tensor, View

Numbers = tuple[Number | None, ...]


class Step(ext.Dialect, name="step"):
    """Row tables of one step."""


LAST = Ring(Tensor((1,), INT32), 1)


def _last(view: Group) -> None:
    require(view == LAST, f"last is {view}, expected a {LAST}")


def _token_cost(a: Any, operands: list[Any], results: list[View], sizes: Sizes) -> Cost:
    """The tables, and one i32 a row read from or written to the state."""
    token = Cost(read=4 * sizes.rows) if results else Cost(written=4 * sizes.rows)
    return moved_once(a, operands, results, sizes) + token


@declare
class PatchOp(Step.Operation, name="patch", traits=[READS]):
    """Replaces every negative token by the last token that its slot remembers.

    tokens [?], slots [?], last: one token a slot -> [?]. The host packs -1 for a token that the device has not drawn yet.
    """

    patched: ext.Result[Any]
    tokens: ext.Operand[Any]
    slots: ext.Operand[Any]
    last: ext.Operand[Any]

    @staticmethod
    def infer(a: Any, tokens: Group, slots: Group, last: Group, *, out: Numbers) -> Tensor:
        tables(tokens=tokens, slots=slots)
        _last(last)
        return TABLE

    @staticmethod
    def meaning(a: Any, results: list[View], tokens: Ids, slots: Ids, last: State) -> Array:
        missing = tokens < 0
        patched = np.array(tokens, np.int32)
        patched[missing] = np.asarray(last.read(slots[missing]))[:, 0]
        return patched

    cost = staticmethod(_token_cost)


patch = builder(PatchOp)


@declare
class RememberOp(Step.Operation, name="remember", traits=[WRITES]):
    """Keeps each row's token as the last one of its slot; a slot below 0 keeps nothing, of equal slots the last row wins.

    last: one token a slot, slots [?], tokens [?].
    """

    last: ext.Operand[Any]
    slots: ext.Operand[Any]
    tokens: ext.Operand[Any]

    @staticmethod
    def infer(a: Any, last: Group, slots: Group, tokens: Group, *, out: Numbers) -> None:
        _last(last)
        tables(slots=slots, tokens=tokens)

    @staticmethod
    def meaning(a: Any, results: list[View], last: State, slots: Ids, tokens: Ids) -> None:
        last.write(slots, np.asarray(tokens, np.int32)[:, None])

    cost = staticmethod(_token_cost)


remember = builder(RememberOp)


@declare
class WindowOp(Step.Operation, name="window", traits=[ext.Pure]):
    """Lists the physical ring rows of the window positions that each row sees, ascending.

    Row r at position t sees max(0, t - window + 1, floors[r]) ... t. positions, slots, starts, floors [?] -> ids [?, window], counts [?];
    ids are left aligned and padded with -1 (docs/model.md 4.3, 11.4).
    """

    ids: ext.Result[Any]
    counts: ext.Result[Any]
    positions: ext.Operand[Any]
    slots: ext.Operand[Any]
    starts: ext.Operand[Any]
    floors: ext.Operand[Any]
    window: ir.IntegerAttr
    ring: ir.IntegerAttr
    sequences: ir.IntegerAttr

    @staticmethod
    def infer(a: Any, positions: Group, slots: Group, starts: Group, floors: Group, *, out: Numbers) -> tuple[Tensor, Tensor]:
        tables(positions=positions, slots=slots, starts=starts, floors=floors)
        positive(window=a.window, sequences=a.sequences)
        require(a.ring >= a.window, f"a ring of {a.ring} positions cannot hold a window of {a.window}")
        return Tensor((ROWS, a.window), INT32), TABLE

    @staticmethod
    def meaning(a: Any, results: list[View], positions: Ids, slots: Ids, starts: Ids, floors: Ids) -> tuple[Array, Array]:
        lowest = np.maximum(np.maximum(positions - a.window + 1, floors), 0)
        counts = np.maximum(positions - lowest + 1, 0).astype(np.int32)
        seen = lowest[:, None] + np.arange(a.window, dtype=np.int32)
        first = positions[starts][:, None]
        staged = a.sequences * a.ring + starts[:, None] + seen - first
        kept = slots[:, None] * a.ring + seen % a.ring
        ids = np.where(seen >= first, staged, kept)
        return np.where(left_aligned(counts, a.window), ids, -1).astype(np.int32), counts


window = builder(WindowOp)


@declare
class PartnersOp(Step.Operation, name="partners", traits=[ext.Pure]):
    """Finds the physical ring row of the token before each row that completes a group of two; -1 for a row that completes none.

    Row at odd position t: token t - 1, staged in this step or kept in the ring. positions, slots, starts [?] -> [?] (docs/model.md 4.4).
    """

    partners: ext.Result[Any]
    positions: ext.Operand[Any]
    slots: ext.Operand[Any]
    starts: ext.Operand[Any]
    ring: ir.IntegerAttr
    sequences: ir.IntegerAttr

    @staticmethod
    def infer(a: Any, positions: Group, slots: Group, starts: Group, *, out: Numbers) -> Tensor:
        tables(positions=positions, slots=slots, starts=starts)
        positive(ring=a.ring, sequences=a.sequences)
        return TABLE

    @staticmethod
    def meaning(a: Any, results: list[View], positions: Ids, slots: Ids, starts: Ids) -> Array:
        before, row = positions - 1, np.arange(len(positions))
        kept = slots * a.ring + before % a.ring
        found = np.where(row > starts, a.sequences * a.ring + row - 1, kept)
        return np.where(positions % 2 == 1, found, -1).astype(np.int32)


partners = builder(PartnersOp)


@declare
class EntriesOp(Step.Operation, name="entries", traits=[ext.Pure]):
    """Finds the physical row of the compressed entry that each row completes; -1 for a row that completes none.

    Token t completes entry j = t // ratio where (t + 1) % ratio = 0. positions, slots [?], block_table [sequences, blocks] -> [?]
    (docs/model.md 4.4).
    """

    entries: ext.Result[Any]
    positions: ext.Operand[Any]
    slots: ext.Operand[Any]
    block_table: ext.Operand[Any]
    ratio: ir.IntegerAttr
    block_tokens: ir.IntegerAttr

    @staticmethod
    def infer(a: Any, positions: Group, slots: Group, block_table: Group, *, out: Numbers) -> Tensor:
        tables(positions=positions, slots=slots)
        paged(block_table, a.ratio, a.block_tokens)
        return TABLE

    @staticmethod
    def meaning(a: Any, results: list[View], positions: Ids, slots: Ids, block_table: Ids) -> Array:
        rows = entry_rows(block_table, slots, positions // a.ratio, a.block_tokens // a.ratio)
        return np.where((positions + 1) % a.ratio == 0, rows, -1).astype(np.int32)


entries = builder(EntriesOp)


@declare
class CommitsOp(Step.Operation, name="commits", traits=[ext.Pure]):
    """Says to which physical ring row each staged row goes after its last reader; -1 for a row that the ring need not keep.

    Kept are the last min(n, ring) rows of a sequence, so that no two rows go to one place. positions, slots, ends [?] -> [?].
    """

    commits: ext.Result[Any]
    positions: ext.Operand[Any]
    slots: ext.Operand[Any]
    ends: ext.Operand[Any]
    ring: ir.IntegerAttr

    @staticmethod
    def infer(a: Any, positions: Group, slots: Group, ends: Group, *, out: Numbers) -> Tensor:
        tables(positions=positions, slots=slots, ends=ends)
        positive(ring=a.ring)
        return TABLE

    @staticmethod
    def meaning(a: Any, results: list[View], positions: Ids, slots: Ids, ends: Ids) -> Array:
        remaining = ends - np.arange(len(positions))
        return np.where(remaining <= a.ring, slots * a.ring + positions % a.ring, -1).astype(np.int32)


commits = builder(CommitsOp)
