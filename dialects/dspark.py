"""The draft block around the layers it shares with the backbone: its rows, their keys, the Markov correction and the confidence.

p is the position of the last token whose features are in the windows; the block's rows stand at p+1 ... p+size, sequence after sequence
(docs/model.md 7.2). Drawing is `sample.draw`; layers, head and Markov products are ops of other dialects.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tapeout.dialects._mlir import ext, ir
from tapeout.dialects.define import Cost, Group, Sizes, builder, declare, require
from tapeout.dialects.format import INT32, REAL, Array, Number, Scaled, decode, encode
from tapeout.dialects.nn import same_parts
from tapeout.dialects.rows import TABLE, Ids, left_aligned, tables
from tapeout.dialects.rules import ROWS, made, positive, rows, shaped, wide
from tapeout.dialects.types import Tensor, View

Numbers = tuple[Number | None, ...]
Value = Array | Scaled


class Dspark(ext.Dialect, name="dspark"):
    """The parallel draft model."""


def _drafts(a: Any, operand_extents: list[str | None]) -> str:
    """Results have `size` rows for each sequence."""
    return "drafts"


def _sequences(a: Any, operand_extents: list[str | None]) -> str:
    """Results have one row for each sequence."""
    return "sequences"


@declare
class BlockOp(Dspark.Operation, name="block", traits=[ext.Pure]):
    """Makes the draft rows of each sequence: its golden token, then noise tokens, at the `size` positions behind the last one.

    golden, positions, slots [?], one a sequence -> tokens, positions, slots [?], `size` a sequence (docs/model.md 7.2).
    """

    tokens: ext.Result[Any]
    draft_positions: ext.Result[Any]
    draft_slots: ext.Result[Any]
    golden: ext.Operand[Any]
    positions: ext.Operand[Any]
    slots: ext.Operand[Any]
    noise: ir.IntegerAttr
    size: ir.IntegerAttr

    extent = staticmethod(_drafts)

    @staticmethod
    def infer(a: Any, golden: Group, positions: Group, slots: Group, *, out: Numbers) -> tuple[Tensor, Tensor, Tensor]:
        tables(golden=golden, positions=positions, slots=slots)
        positive(size=a.size)
        require(a.noise >= 0, f"attribute noise is {a.noise}, expected a token id")
        return TABLE, TABLE, TABLE

    @staticmethod
    def meaning(a: Any, results: list[View], golden: Ids, positions: Ids, slots: Ids) -> tuple[Array, Array, Array]:
        tokens = np.full((len(golden), a.size), a.noise, np.int32)
        tokens[:, 0] = golden
        places = positions[:, None] + 1 + np.arange(a.size)
        return tokens.reshape(-1), places.reshape(-1).astype(np.int32), np.repeat(slots, a.size).astype(np.int32)

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[View], sizes: Sizes) -> Cost:
        return Cost(read=12 * sizes.sequences, written=12 * sizes.sequences * a.size)


block = builder(BlockOp)


@declare
class WindowOp(Dspark.Operation, name="window", traits=[ext.Pure]):
    """Lists the ring rows that each draft row sees: the window of the last token, then all rows of its own block.

    Sequence s at position p: ring rows of max(0, p - window + 1) ... p, then staged rows s*size ... s*size + size - 1, in no causal order.
    positions, slots [?], one a sequence -> ids [?, window + size], counts [?], `size` rows a sequence, left aligned, -1 padded
    (docs/model.md 7.2).
    """

    ids: ext.Result[Any]
    counts: ext.Result[Any]
    positions: ext.Operand[Any]
    slots: ext.Operand[Any]
    window: ir.IntegerAttr
    ring: ir.IntegerAttr
    sequences: ir.IntegerAttr
    size: ir.IntegerAttr

    extent = staticmethod(_drafts)

    @staticmethod
    def infer(a: Any, positions: Group, slots: Group, *, out: Numbers) -> tuple[Tensor, Tensor]:
        tables(positions=positions, slots=slots)
        positive(window=a.window, sequences=a.sequences, size=a.size)
        require(a.ring >= a.window, f"a ring of {a.ring} positions cannot hold a window of {a.window}")
        return Tensor((ROWS, a.window + a.size), INT32), TABLE

    @staticmethod
    def meaning(a: Any, results: list[View], positions: Ids, slots: Ids) -> tuple[Array, Array]:
        kept = np.clip(positions + 1, 0, a.window)
        column = np.arange(a.window + a.size)
        seen = (positions - kept + 1)[:, None] + column
        staged = a.sequences * a.ring + np.arange(len(slots))[:, None] * a.size + column - kept[:, None]
        ids = np.where(left_aligned(kept, len(column)), slots[:, None] * a.ring + seen % a.ring, staged)
        ids = np.where(left_aligned(kept + a.size, len(column)), ids, -1).astype(np.int32)
        return np.repeat(ids, a.size, axis=0), np.repeat(kept + a.size, a.size).astype(np.int32)

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[View], sizes: Sizes) -> Cost:
        return Cost(read=8 * sizes.sequences, written=4 * sizes.sequences * a.size * (a.window + a.size + 1))


window = builder(WindowOp)


@declare
class CorrectOp(Dspark.Operation, name="correct", traits=[ext.Pure]):
    """logits = base + bias for one place of every block: the block's base logits and the Markov head's product for the token before.

    base [?, V], `size` rows a sequence; bias [?, V], one a sequence -> [?, V], row s from base row s*size + step, FP32 (docs/model.md 7.2).
    """

    logits: ext.Result[Any]
    base: ext.Operand[Any]
    bias: ext.Operand[Any]
    step: ir.IntegerAttr
    size: ir.IntegerAttr

    extent = staticmethod(_sequences)

    @staticmethod
    def infer(a: Any, base: Group, bias: Group, *, out: Numbers) -> Tensor:
        found = rows(base, "base", 2)
        shaped(bias, "bias", *found.shape)
        _place(a)
        return made(found.shape, out[0] or _wide(found, bias))

    @staticmethod
    def meaning(a: Any, results: list[Tensor], base: Value, bias: Value) -> Value:
        return encode(decode(base[a.step :: a.size]) + decode(bias), results[0].number)

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[Tensor], sizes: Sizes) -> Cost:
        return _sequence_cost(operands, results, sizes, operands[0].shape[1])


correct = builder(CorrectOp)


@declare
class ConfidenceOp(Dspark.Operation, name="confidence", traits=[ext.Pure]):
    """confidence = projection . [x ; e] for every place of every block, from the un-normed hidden row and the embedding of the token before.

    x [?, H], one row a place; embedded: e [?, Rk] of each place of a block, one row a sequence; projection [1, H + Rk] -> [?, places], one row a
    sequence, FP32: column n of row s from x row s*places + n and row s of the n-th e (docs/model.md 7.2).
    """

    confidences: ext.Result[Any]
    x: ext.Operand[Any]
    embedded: Sequence[ext.Operand[Any]]
    projection: ext.Operand[Any]

    extent = staticmethod(_sequences)

    @staticmethod
    def infer(a: Any, x: Group, embedded: Group, projection: Group, *, out: Numbers) -> Tensor:
        hidden, places = rows(x, "x", 2), same_parts(embedded, 2)
        e = rows(places[0], "embedded", 2)
        shaped(projection, "projection", 1, hidden.sized(0)[1] + e.sized(0)[1])
        number = out[0] or _wide(hidden, e, projection)
        require(number.scaling is None, f"the result is {number}, expected one unscaled number a place")
        return made((ROWS, len(places)), number)

    @staticmethod
    def meaning(a: Any, results: list[Tensor], x: Value, embedded: list[Value], projection: Value) -> Value:
        count = len(embedded)
        places = [np.concatenate([decode(x[n::count]), decode(e)], axis=1) for n, e in enumerate(embedded)]
        return encode((np.stack(places, 1) * decode(projection)).sum(axis=2), results[0].number)

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[Tensor], sizes: Sizes) -> Cost:
        x, embedded, projection = operands
        places, width = sizes.sequences * len(embedded), projection.shape[1]
        read = x.bytes(places) + embedded[0].bytes(places) + projection.bytes(0)
        return Cost(read, results[0].bytes(sizes.sequences), {"f32": 2 * places * width})


confidence = builder(ConfidenceOp)


def _place(a: Any) -> None:
    positive(size=a.size)
    require(0 <= a.step < a.size, f"attribute step is {a.step}, expected a place in a block of {a.size}")


def _wide(*operands: Any) -> Number:
    """FP32, or real in the exact graph, where every float is."""
    return REAL if any(o.number == REAL for o in operands) else wide(operands[0].number)


def _sequence_cost(operands: list[Any], results: list[Tensor], sizes: Sizes, work: int) -> Cost:
    """One row of every operand a sequence, `work` operations on it."""
    count = sizes.sequences
    return Cost(sum(o.bytes(count) for o in operands), sum(r.bytes(count) for r in results), {"f32": work * count})
