"""Ops that any layer uses: embedding, linear, norm, rotation, quantization, and movement of rows.

`nn.fused` is declared in fused.py. Shapes below write ? for the ragged row axis; formulas are those of docs/model.md.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from tapeout.dialects._mlir import ext, ir
from tapeout.dialects.define import Cost, Group, Sizes, builder, declare, moved_once, require
from tapeout.dialects.format import Array, Number, Scaled, decode, encode
from tapeout.dialects.real import Ids, root_mean, select
from tapeout.dialects.rows import tables
from tapeout.dialects.rules import facts, made, narrow, positive, product_kind, rows, shaped, wide
from tapeout.dialects.types import Tensor, View

Value = Array | Scaled


class Nn(ext.Dialect, name="nn"):
    """Layer arithmetic on ragged rows."""


@declare
class EmbedOp(Nn.Operation, name="embed", traits=[ext.Pure]):
    """y = table[id], one table row for each token id.

    ids [?] i32, table [V, H] -> [?, H] (docs/model.md 3.1). An id outside the table is an IndexError of the meaning.
    """

    y: ext.Result[Any]
    ids: ext.Operand[Any]
    table: ext.Operand[Any]

    @staticmethod
    def infer(a: Any, ids: Group, table: Group, *, out: Sequence[Number | None]) -> Tensor:
        tables(ids=ids)
        t = shaped(table, "table", "V", "H")
        return made((None, t.shape[1]), out[0] or narrow(t.number))

    @staticmethod
    def meaning(a: Any, results: list[Tensor], ids: Ids, table: Value) -> Value:
        return encode(decode(select(table, ids)), results[0].number)

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[Tensor], sizes: Sizes) -> Cost:
        return row_gather_cost(operands[0], operands[1], results, sizes)


def row_gather_cost(ids: Tensor, table: Tensor, results: Sequence[View], sizes: Sizes) -> Cost:
    """Reads the ids and one table row per id, whatever the table's length; writes the results."""
    count = int(np.prod(ids.sized(sizes.rows), dtype=np.int64))
    return moved_once(None, [ids], results, sizes) + Cost(read=table.number.bytes((count, *table.sized(0)[1:])))


@declare
class LinearOp(Nn.Operation, name="linear", traits=[ext.Pure]):
    """y_o = sum_i weight[o, i] x_i; with groups, group g maps its own columns of x to its own rows of the weight.

    x [?, K*groups], weight [N, K] -> [?, N] (docs/model.md 4.1, 4.8). `wide`: the model documents an FP32 result (9.6, rule 5).
    """

    y: ext.Result[Any]
    x: ext.Operand[Any]
    weight: ext.Operand[Any]
    groups: ir.IntegerAttr
    wide: ir.IntegerAttr

    @staticmethod
    def infer(a: Any, x: Group, weight: Group, *, out: Sequence[Number | None]) -> Tensor:
        v, w = shaped(x, "x", None, "K"), shaped(weight, "weight", "N", "K")
        (n, k), g = w.sized(0), a.groups
        facts(wide=a.wide)
        require(g >= 1 and n % g == 0, f"groups is {g}, which does not divide the {n} rows of the weight")
        require(v.shape[1] == k * g, f"x is {v}, expected {k * g} columns: {g} group(s) of the weight's {k}")
        block = 1 if v.number.scaling is None else v.number.scaling.columns
        require(g == 1 or k % block == 0, f"x is {v}: a group of {k} columns cuts a scale block of {block}")
        return made((None, n), out[0] or (wide(v.number) if a.wide else narrow(v.number)))

    @staticmethod
    def meaning(a: Any, results: list[Tensor], x: Value, weight: Value) -> Value:
        v, w = decode(x), decode(weight)
        (n, k), g = w.shape, a.groups
        y = v.reshape(-1, g, k).transpose(1, 0, 2) @ w.reshape(g, n // g, k).transpose(0, 2, 1)
        return encode(y.transpose(1, 0, 2).reshape(-1, n), results[0].number)

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[Tensor], sizes: Sizes) -> Cost:
        x, weight = operands
        n, k = weight.shape
        work = {product_kind(x.number, weight.number): 2 * sizes.rows * n * k}
        return moved_once(a, operands, results, sizes) + Cost(operations=work)


@declare
class RmsNormOp(Nn.Operation, name="rms_norm", traits=[ext.Pure]):
    """y = weight * x * (mean(x^2) + epsilon)^(-1/2), rounded once.

    x [?, n], weight [n] -> [?, n] (docs/model.md 0.1).
    """

    y: ext.Result[Any]
    x: ext.Operand[Any]
    weight: ext.Operand[Any]
    epsilon: ir.FloatAttr

    @staticmethod
    def infer(a: Any, x: Group, weight: Group, *, out: Sequence[Number | None]) -> Tensor:
        v = shaped(x, "x", None, "n")
        shaped(weight, "weight", v.shape[1])
        require(a.epsilon >= 0, f"epsilon is {a.epsilon}, expected a number at or above 0")
        return made(v.shape, out[0] or narrow(v.number))

    @staticmethod
    def meaning(a: Any, results: list[Tensor], x: Value, weight: Value) -> Value:
        v = decode(x)
        return encode(decode(weight) * v * root_mean(v, a.epsilon), results[0].number)

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[Tensor], sizes: Sizes) -> Cost:
        return moved_once(a, operands, results, sizes) + Cost(operations={"f32": 4 * sizes.rows * results[0].sized(0)[1]})


@declare
class RopeOp(Nn.Operation, name="rope", traits=[ext.Pure]):
    """Rotates adjacent pairs of the last R columns of every head by the angles of its row's position.

    x [?, heads*width], positions [?] i32, table [M, R] (R/2 cosines, then R/2 sines) -> like x (docs/model.md 4.2). The angle row is
    max(position + offset, 0); `inverse` rotates back. A position beyond the table is an IndexError of the meaning.
    """

    y: ext.Result[Any]
    x: ext.Operand[Any]
    positions: ext.Operand[Any]
    table: ext.Operand[Any]
    heads: ir.IntegerAttr
    width: ir.IntegerAttr
    offset: ir.IntegerAttr
    inverse: ir.IntegerAttr

    @staticmethod
    def infer(a: Any, x: Group, positions: Group, table: Group, *, out: Sequence[Number | None]) -> Tensor:
        v, t = shaped(x, "x", None, "heads*width"), shaped(table, "table", "M", "R")
        tables(positions=positions)
        positive(heads=a.heads, width=a.width)
        facts(inverse=a.inverse)
        require(v.shape[1] == a.heads * a.width, f"x is {v}, expected {a.heads} heads of {a.width} columns")
        rotated = t.sized(0)[1]
        require(rotated % 2 == 0 and rotated <= a.width, f"table is {t}: it rotates {rotated} of {a.width} columns, expected an even part")
        return made(v.shape, out[0] or narrow(v.number))

    @staticmethod
    def meaning(a: Any, results: list[Tensor], x: Value, positions: Ids, table: Value) -> Value:
        v = decode(x)
        angles = decode(select(table, np.maximum(positions + a.offset, 0)))[:, None, :]
        half = angles.shape[-1] // 2
        cos, sin = angles[..., :half], angles[..., half:] * (-1.0 if a.inverse else 1.0)
        y = v.reshape(-1, a.heads, a.width).copy()
        even, odd = y[..., a.width - 2 * half :: 2].copy(), y[..., a.width - 2 * half + 1 :: 2].copy()
        y[..., a.width - 2 * half :: 2] = even * cos - odd * sin
        y[..., a.width - 2 * half + 1 :: 2] = even * sin + odd * cos
        return encode(y.reshape(v.shape), results[0].number)

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[Tensor], sizes: Sizes) -> Cost:
        x, positions, table = operands
        work = {"f32": 3 * sizes.rows * a.heads * table.shape[1]}
        return row_gather_cost(positions, table, results, sizes) + Cost(x.bytes(sizes.rows), 0, work)


@declare
class QuantizeOp(Nn.Operation, name="quantize", traits=[ext.Pure]):
    """Block-scales every row: one scale per group of columns, codes rounded to nearest even and saturated.

    x [?, n] or [?, m, n] -> the same shape in the block-scaled number asked for with `out` (docs/model.md 9.3, 9.4).
    """

    y: ext.Result[Any]
    x: ext.Operand[Any]

    @staticmethod
    def infer(a: Any, x: Group, *, out: Sequence[Number | None]) -> Tensor:
        v = rows(x, "x", 2, 3)
        require(v.number.scaling is None, f"x is {v}, which is block scaled already")
        number = out[0]
        require(number is not None and number.scaling is not None,
                f"the result is {'not chosen' if number is None else number}; ask for a block-scaled number with out=")
        assert number is not None
        return made(v.shape, number)

    @staticmethod
    def meaning(a: Any, results: list[Tensor], x: Array) -> Value:
        return encode(decode(x), results[0].number)

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[Tensor], sizes: Sizes) -> Cost:
        return moved_once(a, operands, results, sizes) + Cost(operations={"f32": 3 * prod(results[0].sized(sizes.rows))})


@declare
class TakeOp(Nn.Operation, name="take", traits=[ext.Pure]):
    """y_r = x[rows_r]: rows in another order or number, their format unchanged.

    x [?a, ...] of any number, rows [?b] i32 -> [?b, ...]. A row that does not exist is an IndexError of the meaning.
    """

    y: ext.Result[Any]
    x: ext.Operand[Any]
    rows: ext.Operand[Any]

    @staticmethod
    def infer(a: Any, x: Group, rows: Group, *, out: Sequence[Number | None]) -> Tensor:
        require(isinstance(x, Tensor), f"x is {x}, expected a tensor")
        assert isinstance(x, Tensor), x
        v = x
        require(len(v.shape) > 0, f"x is {v}, expected at least one axis")
        tables(rows=rows)
        scaling = v.number.scaling
        require(scaling is None or len(v.shape) > 1 + (scaling.rows > 1), f"x is {v}: one scale covers several of its rows")
        return Tensor((None, *v.shape[1:]), v.number)

    @staticmethod
    def meaning(a: Any, results: list[Tensor], x: Value, rows: Ids) -> Value:
        taken: Value = select(x, rows)
        return taken

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[Tensor], sizes: Sizes) -> Cost:
        return row_gather_cost(operands[1], operands[0], results, sizes)

    @staticmethod
    def extent(a: Any, operand_extents: list[str | None]) -> str | None:
        return operand_extents[1]


@declare
class ConcatOp(Nn.Operation, name="concat", traits=[ext.Pure]):
    """Joins the columns of its parts, row by row, their format unchanged.

    parts [?, n], all of one type -> [?, n * number of parts]. Block-scaled parts hold whole scale blocks.
    """

    y: ext.Result[Any]
    parts: Sequence[ext.Operand[Any]]

    @staticmethod
    def infer(a: Any, parts: Group, *, out: Sequence[Number | None]) -> Tensor:
        found = same_parts(parts, 2)
        (_, n), number = found[0].sized(0), found[0].number
        block = 1 if number.scaling is None else number.scaling.columns
        require(n % block == 0, f"a part is {found[0]}: its columns are not whole scale blocks of {block}")
        return Tensor((None, n * len(found)), number)

    @staticmethod
    def meaning(a: Any, results: list[Tensor], parts: list[Value]) -> Value:
        first = parts[0]
        if isinstance(first, Scaled):
            scaled = [p for p in parts if isinstance(p, Scaled)]
            return Scaled(np.concatenate([p.codes for p in scaled], -1), np.concatenate([p.scales for p in scaled], -1), first.scaling)
        return np.concatenate([p for p in parts if not isinstance(p, Scaled)], -1)


@declare
class ColumnsOp(Nn.Operation, name="columns", traits=[ext.Pure]):
    """Some of the columns: y = x[:, first : first + count].

    x [?, n] -> [?, count] of its number, which is not block scaled. One product's result is so read as those of several (docs/model.md 4.1).
    """

    y: ext.Result[Any]
    x: ext.Operand[Any]
    first: ir.IntegerAttr
    count: ir.IntegerAttr

    @staticmethod
    def infer(a: Any, x: Group, *, out: Sequence[Number | None]) -> Tensor:
        v = shaped(x, "x", None, "n")
        require(v.number.scaling is None, f"x is {v}, expected rows that are not block scaled")
        positive(count=a.count)
        require(0 <= a.first <= v.shape[1] - a.count, f"columns {a.first} to {a.first + a.count - 1} asked for, x is {v}")
        return Tensor((None, a.count), v.number)

    @staticmethod
    def meaning(a: Any, results: list[Tensor], x: Array) -> Array:
        return x[:, a.first : a.first + a.count]

    @staticmethod
    def cost(a: Any, operands: list[Any], results: list[Tensor], sizes: Sizes) -> Cost:
        """Reads and writes those columns alone."""
        size = results[0].bytes(sizes.rows)
        return Cost(size, size)


@declare
class StackOp(Nn.Operation, name="stack", traits=[ext.Pure]):
    """Makes each part one column: y[r, i] = part_i[r].

    parts [?], all of one type -> [?, number of parts].
    """

    y: ext.Result[Any]
    parts: Sequence[ext.Operand[Any]]

    @staticmethod
    def infer(a: Any, parts: Group, *, out: Sequence[Number | None]) -> Tensor:
        found = same_parts(parts, 1)
        return Tensor((None, len(found)), found[0].number)

    @staticmethod
    def meaning(a: Any, results: list[Tensor], parts: list[Array]) -> Array:
        return np.stack(parts, -1)


def same_parts(parts: Group, rank: int) -> list[Tensor]:
    """The parts of a join: at least one, ragged in rows, all of one type (which IRDL asks of any variadic group)."""
    require(isinstance(parts, list) and len(parts) > 0, "there are no parts, expected at least one")
    assert isinstance(parts, list), parts
    found = [p for p in parts if isinstance(p, Tensor) and len(p.shape) == rank and p.shape[0] is None]
    require(len(found) == len(parts), f"parts are {', '.join(map(str, parts))}, expected tensors {'[?]' if rank == 1 else '[?, n]'}")
    require(len(set(found)) == 1, f"parts are {', '.join(map(str, parts))}, expected one type")
    return found


embed = builder(EmbedOp)
linear = builder(LinearOp)
rms_norm = builder(RmsNormOp)
rope = builder(RopeOp)
quantize = builder(QuantizeOp)
take = builder(TakeOp)
concat = builder(ConcatOp)
columns = builder(ColumnsOp)
stack = builder(StackOp)

__all__ = ["Nn", "columns", "concat", "embed", "linear", "quantize", "rms_norm", "rope", "row_gather_cost", "stack", "take"]
