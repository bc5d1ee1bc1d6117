"""Writes to a sequence's states (docs/model.md 11): stage this step's rows, commit them to the ring, append paged entries.

Reading is an operand of the ops that use a state. A ring keeps its rows as slot * length + position % length and this step's new rows
behind all slots; a row becomes part of the ring by commit, after the layer's last read.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapeout.dialects import rules
from tapeout.dialects._mlir import ext, ir
from tapeout.dialects.define import UPDATES, WRITES, Cost, Group, Sizes, builder, declare, require
from tapeout.dialects.format import Array, Number, Scaled
from tapeout.dialects.rows import tables
from tapeout.dialects.rules import positive
from tapeout.dialects.state import State
from tapeout.dialects.types import Cache, Tensor

Ids = NDArray[np.int32]


def _expect_entries(rows: Group, entry: Tensor) -> None:
    """Rows of exactly the state's entry, number included: storing rounds nothing."""
    wanted = Tensor((None, *entry.shape), entry.number)
    require(rows == wanted, f"rows is {rows}, expected {wanted}, entries of the state")


@declare
class StageOp(Cache.Operation, name="stage", traits=[WRITES]):
    """Puts row r of this step behind the ring's slots, where ops of this step read it.

    ring, rows [?, entry ..] of the entry's number: row r -> physical row sequences * length + r.
    """

    ring: ext.Operand[Any]
    rows: ext.Operand[Any]
    length: ir.IntegerAttr
    sequences: ir.IntegerAttr

    @staticmethod
    def infer(a: Any, ring: Group, rows: Group, *, out: Sequence[Number | None]) -> None:
        positive(sequences=a.sequences)
        _expect_entries(rows, rules.ring(ring, "ring", a.length).entry)

    @staticmethod
    def meaning(a: Any, results: list[Tensor], ring: State, rows: Array | Scaled) -> None:
        ring.write(a.sequences * a.length + np.arange(rows.shape[0], dtype=np.int32), rows)

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[Tensor], sizes: Sizes) -> Cost:
        size = operands[1].bytes(sizes.rows)
        return Cost(size, size)


@declare
class CommitOp(Cache.Operation, name="commit", traits=[UPDATES]):
    """Copies staged row r to physical row ids[r] of the ring; a negative id leaves it out.

    ring, ids [?] i32. The ids of one step are distinct: step.commits keeps at most `length` rows of a sequence.
    """

    ring: ext.Operand[Any]
    ids: ext.Operand[Any]
    length: ir.IntegerAttr
    sequences: ir.IntegerAttr

    @staticmethod
    def infer(a: Any, ring: Group, ids: Group, *, out: Sequence[Number | None]) -> None:
        positive(sequences=a.sequences)
        rules.ring(ring, "ring", a.length)
        tables(ids=ids)

    @staticmethod
    def meaning(a: Any, results: list[Tensor], ring: State, ids: Ids) -> None:
        kept = np.flatnonzero(ids >= 0).astype(np.int32)
        ring.write(ids[kept], ring.read(a.sequences * a.length + kept))

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[Tensor], sizes: Sizes) -> Cost:
        ring, ids = operands
        size = ring.entry.number.bytes((sizes.rows, *ring.entry.sized(0)))
        return Cost(size + ids.bytes(sizes.rows), size)


@declare
class AppendOp(Cache.Operation, name="append", traits=[WRITES]):
    """Stores row r as the paged entry at physical row ids[r]; a negative id leaves it out.

    blocks, rows [?, entry ..] of the entry's number, ids [?] i32.
    """

    blocks: ext.Operand[Any]
    rows: ext.Operand[Any]
    ids: ext.Operand[Any]

    @staticmethod
    def infer(a: Any, blocks: Group, rows: Group, ids: Group, *, out: Sequence[Number | None]) -> None:
        _expect_entries(rows, rules.blocks(blocks, "blocks").entry)
        tables(ids=ids)

    @staticmethod
    def meaning(a: Any, results: list[Tensor], blocks: State, rows: Array | Scaled, ids: Ids) -> None:
        blocks.write(ids, rows)

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[Tensor], sizes: Sizes) -> Cost:
        """One row in `ratio` completes an entry."""
        blocks, rows, ids = operands
        kept = -(-sizes.rows // blocks.ratio)
        return Cost(rows.bytes(kept) + ids.bytes(sizes.rows), rows.bytes(kept))


stage = builder(StageOp)
commit = builder(CommitOp)
append = builder(AppendOp)

__all__ = ["append", "commit", "stage"]
