"""The residual streams of the single-pass hyper-connection (docs/model.md 3): start, mixer coefficients, collapse, expand, mean.

X is [?, S, H]: S streams of each row. `comb` is [?, S, S], source stream first: the sum that makes destination j runs over the first index.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tapeout.dialects._mlir import ext, ir
from tapeout.dialects.define import Cost, Group, Sizes, builder, declare, moved_once, require
from tapeout.dialects.format import Array, Number, decode, encode
from tapeout.dialects.real import Real, logistic, root_mean, softmax
from tapeout.dialects.rules import made, narrow, positive, shaped, wide
from tapeout.dialects.types import Tensor


class Mhc(ext.Dialect, name="mhc"):
    """Residual streams and the coefficients that mix them."""


@declare
class StartOp(Mhc.Operation, name="start", traits=[ext.Pure]):
    """Copies x to every stream and makes the first pre-mix, which reads stream 0 alone.

    x [?, H] -> X [?, streams, H], a [?, streams] = (1, 0, ..) (docs/model.md 3.1).
    """

    streams_out: ext.Result[Any]
    premix: ext.Result[Any]
    x: ext.Operand[Any]
    streams: ir.IntegerAttr

    @staticmethod
    def infer(a: Any, x: Group, *, out: Sequence[Number | None]) -> tuple[Tensor, Tensor]:
        v = shaped(x, "x", None, "H")
        positive(streams=a.streams)
        return made((None, a.streams, v.shape[1]), out[0] or narrow(v.number)), made((None, a.streams), out[1] or wide(v.number))

    @staticmethod
    def meaning(a: Any, results: list[Tensor], x: Array) -> tuple[Any, Any]:
        v = decode(x)
        premix = np.zeros((len(v), a.streams))
        premix[:, 0] = 1.0
        return encode(np.repeat(v[:, None, :], a.streams, axis=1), results[0].number), encode(premix, results[1].number)


@declare
class MixerOp(Mhc.Operation, name="mixer", traits=[ext.Pure]):
    """Coefficients of one sublayer from the streams before it: pre of the next collapse, post and comb of this expand.

    X [?, S, H], fn [(2+S)*S, S*H], base [(2+S)*S], scale [3] -> pre [?, S], post [?, S], comb [?, S, S] (docs/model.md 3.2). The
    norm's weight is folded into fn. comb is made nearly doubly stochastic by `iterations` rounds, columns last. Real arithmetic throughout.
    """

    pre: ext.Result[Any]
    post: ext.Result[Any]
    comb: ext.Result[Any]
    x: ext.Operand[Any]
    fn: ext.Operand[Any]
    base: ext.Operand[Any]
    scale: ext.Operand[Any]
    iterations: ir.IntegerAttr
    epsilon: ir.FloatAttr
    norm_epsilon: ir.FloatAttr

    @staticmethod
    def infer(a: Any, x: Group, fn: Group, base: Group, scale: Group, *, out: Sequence[Number | None]) -> tuple[Tensor, ...]:
        v = shaped(x, "X", None, "S", "H")
        _, s, h = v.sized(0)
        shaped(fn, "fn", (2 + s) * s, s * h)
        shaped(base, "base", (2 + s) * s)
        shaped(scale, "scale", 3)
        positive(iterations=a.iterations)
        require(a.epsilon > 0 and a.norm_epsilon >= 0,
                f"epsilon must be above 0 and norm_epsilon at least 0, found {a.epsilon} and {a.norm_epsilon}")
        shapes = ((None, s), (None, s), (None, s, s))
        return tuple(made(shape, number or wide(v.number)) for shape, number in zip(shapes, out, strict=True))

    @staticmethod
    def meaning(a: Any, results: list[Tensor], x: Array, fn: Array, base: Array, scale: Array) -> tuple[Any, ...]:
        rows, s, h = x.shape
        u = decode(x).reshape(rows, s * h)
        m = root_mean(u, a.norm_epsilon) * (u @ decode(fn).T)
        m = m * np.repeat(decode(scale), [s, s, s * s]) + decode(base)
        pre, post = logistic(m[:, :s]) + a.epsilon, 2.0 * logistic(m[:, s : 2 * s])
        comb = sinkhorn(m[:, 2 * s :].reshape(-1, s, s), a.iterations, a.epsilon)
        return tuple(encode(y, r.number) for y, r in zip((pre, post, comb), results, strict=True))

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[Tensor], sizes: Sizes) -> Cost:
        coefficients, width = operands[1].shape
        s = results[2].sized(0)[1]
        work = 2 * coefficients * width + 3 * width + 4 * s * s * a.iterations
        return moved_once(a, operands, results, sizes) + Cost(operations={"f32": sizes.rows * work})


def sinkhorn(c: Real, iterations: int, epsilon: float) -> Real:
    """Softmax over destinations, then columns; then `iterations` - 1 rounds of rows and columns (docs/model.md 3.2). c is [?, S, S]."""
    p: Real = softmax(c) + epsilon
    p = p / (p.sum(axis=1, keepdims=True) + epsilon)
    for _ in range(iterations - 1):
        p = p / (p.sum(axis=2, keepdims=True) + epsilon)
        p = p / (p.sum(axis=1, keepdims=True) + epsilon)
    return p


@declare
class CollapseOp(Mhc.Operation, name="collapse", traits=[ext.Pure]):
    """z = sum_i a_i X_i, rounded once: the input of a sublayer.

    X [?, S, H], a [?, S] -> [?, H] (docs/model.md 3.3).
    """

    z: ext.Result[Any]
    x: ext.Operand[Any]
    premix: ext.Operand[Any]

    @staticmethod
    def infer(a: Any, x: Group, premix: Group, *, out: Sequence[Number | None]) -> Tensor:
        v = shaped(x, "X", None, "S", "H")
        shaped(premix, "premix", None, v.shape[1])
        return made((None, v.shape[2]), out[0] or narrow(v.number))

    @staticmethod
    def meaning(a: Any, results: list[Tensor], x: Array, premix: Array) -> Any:
        return encode(np.einsum("rs,rsh->rh", decode(premix), decode(x)), results[0].number)

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[Tensor], sizes: Sizes) -> Cost:
        return moved_once(a, operands, results, sizes) + Cost(operations={"f32": 2 * _elements(operands[0], sizes)})


@declare
class ExpandOp(Mhc.Operation, name="expand", traits=[ext.Pure]):
    """X'_j = post_j y + sum_i comb_ij X_i, rounded once: the streams behind a sublayer.

    X [?, S, H], y [?, H], post [?, S], comb [?, S, S] -> [?, S, H] (docs/model.md 3.3).
    """

    streams: ext.Result[Any]
    x: ext.Operand[Any]
    y: ext.Operand[Any]
    post: ext.Operand[Any]
    comb: ext.Operand[Any]

    @staticmethod
    def infer(a: Any, x: Group, y: Group, post: Group, comb: Group, *, out: Sequence[Number | None]) -> Tensor:
        v = shaped(x, "X", None, "S", "H")
        _, s, h = v.shape
        shaped(y, "y", None, h)
        shaped(post, "post", None, s)
        shaped(comb, "comb", None, s, s)
        return made(v.shape, out[0] or narrow(v.number))

    @staticmethod
    def meaning(a: Any, results: list[Tensor], x: Array, y: Array, post: Array, comb: Array) -> Any:
        mixed = np.einsum("rij,rih->rjh", decode(comb), decode(x))
        return encode(decode(post)[:, :, None] * decode(y)[:, None, :] + mixed, results[0].number)

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[Tensor], sizes: Sizes) -> Cost:
        work = 2 * (operands[0].shape[1] + 1) * _elements(operands[0], sizes)
        return moved_once(a, operands, results, sizes) + Cost(operations={"f32": work})


@declare
class MeanOp(Mhc.Operation, name="mean", traits=[ext.Pure]):
    """The mean of the streams, rounded once: what the draft model sees of a layer.

    X [?, S, H] -> [?, H] (docs/model.md 7.1).
    """

    y: ext.Result[Any]
    x: ext.Operand[Any]

    @staticmethod
    def infer(a: Any, x: Group, *, out: Sequence[Number | None]) -> Tensor:
        v = shaped(x, "X", None, "S", "H")
        return made((None, v.shape[2]), out[0] or narrow(v.number))

    @staticmethod
    def meaning(a: Any, results: list[Tensor], x: Array) -> Any:
        return encode(decode(x).mean(axis=1), results[0].number)

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[Tensor], sizes: Sizes) -> Cost:
        return moved_once(a, operands, results, sizes) + Cost(operations={"f32": _elements(operands[0], sizes)})


def _elements(x: Tensor, sizes: Sizes) -> int:
    return int(np.prod(x.sized(sizes.rows), dtype=np.int64))


start = builder(StartOp)
mixer = builder(MixerOp)
collapse = builder(CollapseOp)
expand = builder(ExpandOp)
mean = builder(MeanOp)

__all__ = ["Mhc", "collapse", "expand", "mean", "mixer", "sinkhorn", "start"]
