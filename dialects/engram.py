"""Engram (docs/model.md 6): compressed token ids, the look-back over a sequence, table rows by hash, lookup, and the gate onto the streams.

Ids depend on tokens alone, so all of them are known before the first layer runs. Image spans are the caller's: no op here blocks them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapeout.dialects._mlir import ext, ir
from tapeout.dialects.define import READS, Cost, Group, Sizes, builder, declare, moved_once, require
from tapeout.dialects.format import INT32, Array, Number, decode, encode
from tapeout.dialects.nn import row_gather_cost
from tapeout.dialects.real import logistic, root_mean, select
from tapeout.dialects.rows import tables
from tapeout.dialects.rules import index, made, narrow, positive, ring, shaped
from tapeout.dialects.state import State
from tapeout.dialects.types import Tensor

Ids = NDArray[np.int32]


class Engram(ext.Dialect, name="engram"):
    """N-gram memory looked up by hash."""


@declare
class CompressOp(Engram.Operation, name="compress", traits=[ext.Pure]):
    """The compressed id of every token.

    ids [?] i32, token_map [V] i32 -> [?, 1] i32 (docs/model.md 6.1). An id outside the map is an IndexError of the meaning.
    """

    compressed: ext.Result[Any]
    ids: ext.Operand[Any]
    token_map: ext.Operand[Any]

    @staticmethod
    def infer(a: Any, ids: Group, token_map: Group, *, out: Sequence[Number | None]) -> Tensor:
        tables(ids=ids)
        index(token_map, "token_map", "V")
        return Tensor((None, 1), INT32)

    @staticmethod
    def meaning(a: Any, results: list[Tensor], ids: Ids, token_map: Ids) -> Ids:
        compressed: Ids = select(token_map, ids)[:, None]
        return compressed

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[Tensor], sizes: Sizes) -> Cost:
        return row_gather_cost(operands[0], operands[1], results, sizes)


@declare
class LookbackOp(Engram.Operation, name="lookback", traits=[READS]):
    """Column s is the compressed id s tokens back in the row's sequence, `pad` before the sequence starts.

    history: ring of [1] i32 with this step's ids staged; positions, slots, starts [?] i32 -> [?, depth] i32 (docs/model.md 6.2). Tokens of
    this step are read from their staged rows, older ones from the ring.
    """

    ids: ext.Result[Any]
    history: ext.Operand[Any]
    positions: ext.Operand[Any]
    slots: ext.Operand[Any]
    starts: ext.Operand[Any]
    depth: ir.IntegerAttr
    pad: ir.IntegerAttr
    length: ir.IntegerAttr
    sequences: ir.IntegerAttr

    @staticmethod
    def infer(a: Any, history: Group, positions: Group, slots: Group, starts: Group, *, out: Sequence[Number | None]) -> Tensor:
        found = ring(history, "history", a.length)
        require(found.entry == Tensor((1,), INT32), f"history is a {found}, expected entries of [1] i32")
        tables(positions=positions, slots=slots, starts=starts)
        positive(depth=a.depth, sequences=a.sequences)
        require(a.length >= a.depth - 1, f"a look-back of {a.depth} needs a history of {a.depth - 1} tokens, found {a.length}")
        return Tensor((None, a.depth), INT32)

    @staticmethod
    def meaning(a: Any, results: list[Tensor], history: State, positions: Ids, slots: Ids, starts: Ids) -> Ids:
        row, back = np.arange(len(positions))[:, None], np.arange(a.depth)
        wanted = positions[:, None] - back
        staged = wanted >= positions[starts][:, None]
        physical = np.where(staged, a.sequences * a.length + row - back, slots[:, None] * a.length + wanted % a.length)
        seen = wanted >= 0
        found = np.full(wanted.shape, a.pad, np.int32)
        found[seen] = np.asarray(history.read(physical[seen]))[:, 0]
        return found

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[Tensor], sizes: Sizes) -> Cost:
        return moved_once(a, operands, results, sizes) + Cost(read=4 * sizes.rows * a.depth)


@declare
class HashOp(Engram.Operation, name="hash", traits=[ext.Pure]):
    """Table rows of every order and head: the xor of multiplied look-backs modulo that column's prime, plus its offset.

    lookback [?, depth] i32 -> [?, (depth - 1) * heads] i32, columns by order 2 .. depth, then head (docs/model.md 6.2). Signed 64-bit
    arithmetic; multipliers are such that no product overflows. Offsets are the exclusive prefix sums of `primes`.
    """

    rows: ext.Result[Any]
    lookback: ext.Operand[Any]
    multipliers: ir.ArrayAttr
    primes: ir.ArrayAttr
    heads: ir.IntegerAttr

    @staticmethod
    def infer(a: Any, lookback: Group, *, out: Sequence[Number | None]) -> Tensor:
        depth = index(lookback, "lookback", None, "depth").sized(0)[1]
        positive(heads=a.heads)
        require(depth >= 2, f"lookback must have at least 2 columns, found {depth}")
        require(len(a.multipliers) == depth, f"multipliers must be one a column of lookback, {depth}, found {len(a.multipliers)}")
        columns = (depth - 1) * a.heads
        require(len(a.primes) == columns, f"primes must be one an order and head, {columns}, found {len(a.primes)}")
        require(min(a.primes) >= 1, f"primes must be at least 1, found {min(a.primes)}")
        require(sum(a.primes) <= 2**31, f"the table has {sum(a.primes)} rows, more than an i32 can number")
        return Tensor((None, columns), INT32)

    @staticmethod
    def meaning(a: Any, results: list[Tensor], lookback: Ids) -> Ids:
        products = lookback.astype(np.int64) * np.array(a.multipliers, np.int64)
        hashes = np.bitwise_xor.accumulate(products, axis=1)[:, 1:]
        primes = np.array(a.primes, np.int64)
        offsets = np.cumsum(primes) - primes
        return (np.repeat(hashes, a.heads, axis=1) % primes + offsets).astype(np.int32)

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[Tensor], sizes: Sizes) -> Cost:
        depth = operands[0].sized(0)[1]
        work = sizes.rows * (2 * depth - 1 + 2 * len(a.primes))
        return moved_once(a, operands, results, sizes) + Cost(operations={"integer": work})


@declare
class LookupOp(Engram.Operation, name="lookup", traits=[ext.Pure]):
    """Joins the decoded table rows of a row's ids.

    ids [?, C] i32, table [rows, w] -> [?, C*w] (docs/model.md 6.3); BF16 where the table is block scaled, which is exact. An id outside
    the table is an IndexError of the meaning.
    """

    found: ext.Result[Any]
    ids: ext.Operand[Any]
    table: ext.Operand[Any]

    reads_host = True

    @staticmethod
    def infer(a: Any, ids: Group, table: Group, *, out: Sequence[Number | None]) -> Tensor:
        columns = index(ids, "ids", None, "C").sized(0)[1]
        t = shaped(table, "table", "rows", "w")
        require(t.number.scaling is None or t.number.scaling.rows == 1, f"table must have one row a scale, found {t}")
        return made((None, columns * t.sized(0)[1]), out[0] or narrow(t.number))

    @staticmethod
    def meaning(a: Any, results: list[Tensor], ids: Ids, table: Any) -> Any:
        width = results[0].sized(0)[1]
        return encode(decode(select(table, ids)).reshape(len(ids), width), results[0].number)

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[Tensor], sizes: Sizes) -> Cost:
        return row_gather_cost(operands[0], operands[1], results, sizes)


@declare
class GateOp(Engram.Operation, name="gate", traits=[ext.Pure]):
    """X_i += gamma_i val: every stream opens its own gate for the one value, rounded once.

    X [?, S, H], kv [?, (S+1)*H] (S keys, then the value), q_weight, k_weight [S, H] -> [?, S, H] (docs/model.md 6.3).
    gamma_i = logistic(sign(d) sqrt(max(|d|, floor))), d = sum(X_i q_i k_i key_i) / (rms(X_i) rms(key_i) sqrt(H)); the sign of 0 is +.
    """

    streams: ext.Result[Any]
    x: ext.Operand[Any]
    kv: ext.Operand[Any]
    q_weight: ext.Operand[Any]
    k_weight: ext.Operand[Any]
    norm_epsilon: ir.FloatAttr
    floor: ir.FloatAttr

    @staticmethod
    def infer(a: Any, x: Group, kv: Group, q_weight: Group, k_weight: Group, *, out: Sequence[Number | None]) -> Tensor:
        v = shaped(x, "X", None, "S", "H")
        _, s, h = v.sized(0)
        shaped(kv, "kv", None, (s + 1) * h)
        shaped(q_weight, "q_weight", s, h)
        shaped(k_weight, "k_weight", s, h)
        require(a.norm_epsilon >= 0 and a.floor >= 0, f"norm_epsilon and floor must be at least 0, found {a.norm_epsilon} and {a.floor}")
        return made(v.shape, out[0] or narrow(v.number))

    @staticmethod
    def meaning(a: Any, results: list[Tensor], x: Array, kv: Any, q_weight: Array, k_weight: Array) -> Any:
        v = decode(x)
        rows, s, h = v.shape
        joined = decode(kv).reshape(rows, s + 1, h)
        keys, value = joined[:, :s], joined[:, s:]
        products = (v * decode(q_weight) * decode(k_weight) * keys).sum(axis=-1, keepdims=True)
        d = products * root_mean(v, a.norm_epsilon) * root_mean(keys, a.norm_epsilon) / np.sqrt(h)
        gamma = logistic(np.where(d < 0, -1.0, 1.0) * np.sqrt(np.maximum(np.abs(d), a.floor)))
        return encode(v + gamma * value, results[0].number)

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[Tensor], sizes: Sizes) -> Cost:
        elements = int(np.prod(operands[0].sized(sizes.rows), dtype=np.int64))
        return moved_once(a, operands, results, sizes) + Cost(operations={"f32": 10 * elements})


compress = builder(CompressOp)
lookback = builder(LookbackOp)
hash = builder(HashOp)
lookup = builder(LookupOp)
gate = builder(GateOp)

__all__ = ["Engram", "compress", "gate", "hash", "lookback", "lookup"]
