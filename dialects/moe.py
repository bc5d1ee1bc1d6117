"""The mixture of experts (docs/model.md 5): gate, permutation by expert, products with the experts' weights, activation, combination.

A pair is one (row, choice): pair number row * k + choice. Between dispatch and combine, values lie in sorted order: pairs by expert, those
of one expert by number. Arrays in sorted order keep the shape [?, k, ..], read as a flat list of pairs.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapeout.dialects._mlir import ext, ir
from tapeout.dialects.define import Cost, Group, Sizes, builder, declare, moved_once, require
from tapeout.dialects.format import INT32, Array, Number, decode, encode
from tapeout.dialects.real import Real, logistic
from tapeout.dialects.rules import facts, index, made, narrow, positive, product_kind, shaped, wide
from tapeout.dialects.types import Tensor


class Moe(ext.Dialect, name="moe"):
    """Routed and shared experts."""


@declare
class GateOp(Moe.Operation, name="gate", traits=[ext.Pure]):
    """Chooses the top_k experts of each row by score plus bias, ties to the lowest id, and weighs them by their scores alone.

    x [?, H], weight [E, H], bias [E] -> experts [?, k] i32, best first, weights [?, k] (docs/model.md 5). s = sqrt(softplus(x . weight_e));
    weights are scale * s over the chosen experts' sum.
    """

    experts: ext.Result[Any]
    weights: ext.Result[Any]
    x: ext.Operand[Any]
    weight: ext.Operand[Any]
    bias: ext.Operand[Any]
    top_k: ir.IntegerAttr
    scale: ir.FloatAttr

    @staticmethod
    def infer(a: Any, x: Group, weight: Group, bias: Group, *, out: Sequence[Number | None]) -> tuple[Tensor, Tensor]:
        v = shaped(x, "x", None, "H")
        w = shaped(weight, "weight", "E", v.shape[1])
        count = w.sized(0)[0]
        shaped(bias, "bias", count)
        require(1 <= a.top_k <= count, f"top_k must lie in 1 .. {count}, the number of experts, found {a.top_k}")
        return Tensor((None, a.top_k), INT32), made((None, a.top_k), out[1] or wide(v.number))

    @staticmethod
    def meaning(a: Any, results: list[Tensor], x: Array, weight: Array, bias: Array) -> tuple[Array, Any]:
        s = np.sqrt(softplus(decode(x) @ decode(weight).T))
        chosen = np.argsort(-(s + decode(bias)), axis=-1, kind="stable")[:, : a.top_k]
        picked = np.take_along_axis(s, chosen, axis=-1)
        weights = a.scale * picked / (picked.sum(axis=-1, keepdims=True) + 1e-20)
        return chosen.astype(np.int32), encode(weights, results[1].number)

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[Tensor], sizes: Sizes) -> Cost:
        x, weight, _ = operands
        experts, h = weight.shape
        work = Cost(operations={product_kind(x.number, weight.number): 2 * sizes.rows * experts * h})
        return moved_once(a, operands, results, sizes) + work + Cost(operations={"f32": 3 * sizes.rows * experts})


def softplus(z: Real) -> Real:
    """log(1 + exp z); the model takes z itself above 20 (docs/model.md 5)."""
    return np.where(z > 20, z, np.log1p(np.exp(np.minimum(z, 20.0))))


@declare
class DispatchOp(Moe.Operation, name="dispatch", traits=[ext.Pure]):
    """Sorts pairs by expert, stably: what each sorted position holds, where each pair went, where each expert starts.

    experts [?, k] i32 -> order [?, k] (sorted position -> pair), places [?, k] (pair -> sorted position), offsets [experts + 1], all i32.
    """

    order: ext.Result[Any]
    places: ext.Result[Any]
    offsets: ext.Result[Any]
    chosen: ext.Operand[Any]
    experts: ir.IntegerAttr

    @staticmethod
    def infer(a: Any, chosen: Group, *, out: Sequence[Number | None]) -> tuple[Tensor, ...]:
        c = index(chosen, "chosen", None, "k")
        positive(experts=a.experts)
        return c, c, Tensor((a.experts + 1,), INT32)

    @staticmethod
    def meaning(a: Any, results: list[Tensor], chosen: NDArray[np.int32]) -> tuple[Array, ...]:
        flat = chosen.reshape(-1)
        if flat.size and (flat.min() < 0 or flat.max() >= a.experts):
            raise IndexError(f"expert ids lie in {flat.min()} .. {flat.max()}, expected 0 .. {a.experts - 1}")
        order = np.argsort(flat, kind="stable").astype(np.int32)
        places = np.empty_like(order)
        places[order] = np.arange(flat.size, dtype=np.int32)
        offsets = np.concatenate([[0], np.cumsum(np.bincount(flat, minlength=a.experts))]).astype(np.int32)
        return order.reshape(chosen.shape), places.reshape(chosen.shape), offsets

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[Tensor], sizes: Sizes) -> Cost:
        pairs = sizes.rows * operands[0].shape[1]
        return moved_once(a, operands, results, sizes) + Cost(operations={"integer": 4 * pairs + a.experts})


@declare
class ExpertLinearOp(Moe.Operation, name="expert_linear", traits=[ext.Pure]):
    """Multiplies every pair with its expert's weight, in sorted order: y_i = weight[e] x_i for offsets[e] <= i < offsets[e + 1].

    weight [E, N, K], order [?, k] i32, offsets [E + 1] i32 -> [?, k, N]. `gathered`: x is [?, K] by row, and sorted position i reads row
    order_i // k; else x is [?, k, K] in sorted order.
    """

    y: ext.Result[Any]
    x: ext.Operand[Any]
    weight: ext.Operand[Any]
    order: ext.Operand[Any]
    offsets: ext.Operand[Any]
    gathered: ir.IntegerAttr

    @staticmethod
    def infer(a: Any, x: Group, weight: Group, order: Group, offsets: Group, *, out: Sequence[Number | None]) -> Tensor:
        w = shaped(weight, "weight", "E", "N", "K")
        experts, n, width = w.sized(0)
        k = index(order, "order", None, "k").shape[1]
        index(offsets, "offsets", experts + 1)
        facts(gathered=a.gathered)
        v = shaped(x, "x", None, width) if a.gathered else shaped(x, "x", None, k, width)
        return made((None, k, n), out[0] or narrow(v.number))

    @staticmethod
    def meaning(a: Any, results: list[Tensor], x: Any, weight: Any, order: NDArray[np.int32], offsets: NDArray[np.int32]) -> Any:
        (rows, k), (_, n, width) = order.shape, weight.shape
        v = decode(x)
        pairs = v[order.reshape(-1) // k] if a.gathered else v.reshape(rows * k, width)
        y = np.zeros((rows * k, n))
        for e in np.flatnonzero(np.diff(offsets)):
            span = slice(offsets[e], offsets[e + 1])
            y[span] = pairs[span] @ decode(weight[int(e)]).T
        return encode(y.reshape(rows, k, n), results[0].number)

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[Tensor], sizes: Sizes) -> Cost:
        """Reads the weights of the experts that are hit: `sizes.experts`, or at most one for each pair where that is 0."""
        x, weight, order, offsets = operands
        experts, n, width = weight.shape
        pairs = sizes.rows * order.shape[1]
        hit = min(experts, pairs, sizes.experts or experts)
        work = {product_kind(x.number, weight.number): 2 * pairs * n * width}
        return moved_once(a, [x, order, offsets], results, sizes) + Cost(weight.number.bytes((hit, n, width)), 0, work)


@declare
class SwigluOp(Moe.Operation, name="swiglu", traits=[ext.Pure]):
    """silu(min(gate, limit)) * clamp(up, -limit, limit) * factor, rounded once, of rows x that have F columns of gate, then F of up.

    Shared expert: x [?, 2F] -> [?, F], no weights, factor 1. Routed: x [?, k, 2F] -> [?, k, F] in sorted order, factor weights[order_i] of the
    pair, with weights [?, k] and order [?, k] i32 (docs/model.md 5).
    """

    y: ext.Result[Any]
    x: ext.Operand[Any]
    weights: ext.Operand[Any] | None
    order: ext.Operand[Any] | None
    limit: ir.FloatAttr

    @staticmethod
    def infer(a: Any, x: Group, weights: Group, order: Group, *, out: Sequence[Number | None]) -> Tensor:
        routed = weights is not None
        require(routed == (order is not None), "weights and order come together: one of them is absent")
        v = shaped(x, "x", None, "k", "2F") if routed else shaped(x, "x", None, "2F")
        rows, columns = v.shape[:-1], v.sized(0)[-1]
        require(columns % 2 == 0, f"x is {v}, expected an even number of columns: the gate's, then as many of up")
        if routed:
            shaped(weights, "weights", None, v.shape[1])
            index(order, "order", None, v.shape[1])
        require(a.limit > 0, f"limit must be above 0, found {a.limit}")
        return made((*rows, columns // 2), out[0] or narrow(v.number))

    @staticmethod
    def meaning(a: Any, results: list[Tensor], x: Any, weights: Any, order: NDArray[np.int32] | None) -> Any:
        gate, up = np.split(decode(x), 2, axis=-1)
        g = np.minimum(gate, a.limit)
        y = g * logistic(g) * np.clip(up, -a.limit, a.limit)
        if order is not None:
            y = y * decode(weights).reshape(-1)[order.reshape(-1)].reshape(*order.shape, 1)
        return encode(y, results[0].number)

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[Tensor], sizes: Sizes) -> Cost:
        elements = int(np.prod(results[0].sized(sizes.rows), dtype=np.int64))
        return moved_once(a, operands, results, sizes) + Cost(operations={"f32": 8 * elements})


@declare
class CombineOp(Moe.Operation, name="combine", traits=[ext.Pure]):
    """out = sum of the row's chosen experts in order of rank, the shared expert last, rounded once.

    y [?, k, H] in sorted order, places [?, k] i32 (pair -> sorted position), shared [?, H] -> [?, H] (docs/model.md 5).
    """

    sum: ext.Result[Any]
    y: ext.Operand[Any]
    places: ext.Operand[Any]
    shared: ext.Operand[Any]

    @staticmethod
    def infer(a: Any, y: Group, places: Group, shared: Group, *, out: Sequence[Number | None]) -> Tensor:
        v = shaped(y, "y", None, "k", "H")
        index(places, "places", None, v.shape[1])
        shaped(shared, "shared", None, v.shape[2])
        return made((None, v.shape[2]), out[0] or narrow(v.number))

    @staticmethod
    def meaning(a: Any, results: list[Tensor], y: Any, places: NDArray[np.int32], shared: Any) -> Any:
        rows, k, h = y.shape
        pairs = decode(y).reshape(rows * k, h)
        total = np.zeros((rows, h))
        for rank in range(k):
            total += pairs[places[:, rank]]
        return encode(total + decode(shared), results[0].number)

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[Tensor], sizes: Sizes) -> Cost:
        elements = int(np.prod(operands[0].sized(sizes.rows), dtype=np.int64))
        return moved_once(a, operands, results, sizes) + Cost(operations={"f32": elements})


gate = builder(GateOp)
dispatch = builder(DispatchOp)
expert_linear = builder(ExpertLinearOp)
swiglu = builder(SwigluOp)
combine = builder(CombineOp)

__all__ = ["Moe", "combine", "dispatch", "expert_linear", "gate", "softplus", "swiglu"]
