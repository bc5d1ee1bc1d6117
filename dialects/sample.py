"""Drawing of a token from logits: greedy, or nucleus and top-k with randomness that is a function of (seed, position, stream, token) only.

The random number of a candidate does not depend on the row, the step or the other rows, so a request draws the same tokens however it is
scheduled. Penalties, masks and acceptance of drafts are not here (docs/model.md 8.2).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapeout.dialects._mlir import ext, ir
from tapeout.dialects.define import Cost, Group, Sizes, builder, declare, moved_once, require
from tapeout.dialects.format import FP32, Array, Number, Scaled, decode, encode
from tapeout.dialects.rows import TABLE, Ids, Real, tables
from tapeout.dialects.rules import ROWS, made, ranked, rows, shaped
from tapeout.dialects.types import Tensor, View

Numbers = tuple[Number | None, ...]
Value = Array | Scaled
Words = NDArray[np.uint64]
INT64 = Number("i64")
COOLEST = 1e-5
"""Temperatures between 0 and this one draw as this one does."""


class Sample(ext.Dialect, name="sample"):
    """Tokens from logits."""


@declare
class DrawOp(Sample.Operation, name="draw", traits=[ext.Pure]):
    """Draws one token a row and gives its log-probability under the unfiltered, unscaled softmax of the logits.

    temperature 0: the largest logit, lowest id on ties. Else p = softmax(logits / max(temperature, 1e-5)). Of the tokens by descending p,
    lowest id first on ties, those stay before which at most top_p of the mass lies, and of these the first top_k (all where top_k < 1).
    Drawn is the argmax of log p_i - log E_i, with E_i = -log(u_i) exponential, u_i from `uniform`. logits [?, V], temperature, top_p [?]
    real, top_k, positions [?] i32, seeds [?] i64 -> tokens [?] i32, logprobs [?] FP32 (docs/model.md 8.2).
    """

    tokens: ext.Result[Any]
    logprobs: ext.Result[Any]
    logits: ext.Operand[Any]
    temperature: ext.Operand[Any]
    top_k: ext.Operand[Any]
    top_p: ext.Operand[Any]
    seeds: ext.Operand[Any]
    positions: ext.Operand[Any]
    stream: ir.IntegerAttr

    @staticmethod
    def infer(a: Any, logits: Group, temperature: Group, top_k: Group, top_p: Group, seeds: Group, positions: Group, *,
              out: Numbers) -> tuple[Tensor, Tensor]:
        found = rows(logits, "logits", 2)
        require(found.sized(0)[1] >= 1, f"logits is {found}, expected at least one token")
        shaped(temperature, "temperature", ROWS)
        shaped(top_p, "top_p", ROWS)
        tables(top_k=top_k, positions=positions)
        require(ranked(seeds, "seeds", 1) == Tensor((ROWS,), INT64), f"seeds is {seeds}, expected [?] i64")
        require(a.stream >= 0, f"attribute stream is {a.stream}, expected a number at or above 0")
        number = out[1] if len(out) > 1 and out[1] is not None else FP32
        require(number.scaling is None, f"the result logprobs is {number}, expected one unscaled number a row")
        return TABLE, made((ROWS,), number)

    @staticmethod
    def meaning(a: Any, results: list[Tensor], logits: Value, temperature: Array, top_k: Ids, top_p: Array, seeds: Array,
                positions: Ids) -> tuple[Array, Value]:
        x = decode(logits)
        tokens = x.argmax(axis=1).astype(np.int32) if len(x) else np.zeros(0, np.int32)
        drawn = np.flatnonzero(decode(temperature) > 0)
        if drawn.size:
            scaled = _log_softmax(x[drawn] / np.maximum(decode(temperature)[drawn], COOLEST)[:, None])
            stays = kept(scaled, top_k[drawn], decode(top_p)[drawn])
            noise = -np.log(-np.log(uniform(seeds[drawn], positions[drawn], a.stream, x.shape[1])))
            tokens[drawn] = np.where(stays, scaled + noise, -np.inf).argmax(axis=1)
        logprobs = _log_softmax(x)[np.arange(len(x)), tokens]
        return tokens, encode(logprobs, results[1].number)

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[View], sizes: Sizes) -> Cost:
        """The logits are read once; each needs two exponentials with their sums, two logarithms and the two mixes of one random word."""
        count = sizes.rows * operands[0].shape[1]
        return moved_once(a, operands, results, sizes) + Cost(operations={"f32": 8 * count, "integer": 9 * count})


draw = builder(DrawOp)


def kept(log_p: Real, top_k: Ids, top_p: Real) -> NDArray[np.bool_]:
    """Which tokens nucleus and top-k leave, [rows, V], from log-probabilities: the first by rank, so never none.

    top_p at or above 1 keeps every token whatever the rounding of the sum.
    """
    order = np.argsort(-log_p, axis=1, kind="stable")
    mass = np.exp(np.take_along_axis(log_p, order, axis=1))
    before = np.zeros_like(mass)
    before[:, 1:] = np.cumsum(mass[:, :-1], axis=1)
    rank = np.arange(log_p.shape[1])
    stays = (before <= top_p[:, None]) | (top_p[:, None] >= 1)
    stays &= (rank < top_k[:, None]) | (top_k[:, None] < 1)
    stays[:, 0] = True
    out = np.zeros_like(stays)
    np.put_along_axis(out, order, stays, axis=1)
    return out


def uniform(seeds: Array, positions: Ids, stream: int, tokens: int) -> Real:
    """Numbers in (0, 1) for tokens 0 ... tokens - 1 of each row, multiples of 2^-25: 24 bits of a SplitMix64 counter hash."""
    at = positions.astype(np.int64).astype(np.uint64) * np.uint64(0xD1342543DE82EF95) + np.uint64(stream)
    key = _mix(seeds.astype(np.int64).astype(np.uint64) ^ _mix(at))
    word = _mix(key[:, None] + np.arange(tokens, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return ((word >> np.uint64(40)).astype(np.float64) + 0.5) * 2.0**-24


def _mix(x: Words) -> Words:
    """The finaliser of SplitMix64, modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _log_softmax(x: Real) -> Real:
    shifted = x - x.max(axis=1, keepdims=True)
    logs: Real = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return logs
