"""split-pairs: even and odd elements of a tile by the instructions that part and join them, in place of arithmetic over axes of two lanes.

Kernels mark what they mean: `tile.pick` (one of each pair), `tile.join` (pairs of two tiles) and `tile.pack` (low and high nibble of a byte).
Vector kernels only: joining lanes in a mixed kernel breaks the division of rows between its vector cores.
"""

from collections.abc import Callable, Iterator
from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.dialects._mlir import ir

Value = Any
FEWEST = 2
"""Pairs of a row below which the instructions are not used."""


def split_pairs(function: Any, operations: Callable[[Any], Iterator[Any]]) -> None:
    """Rewrites the marked ops of a function in place; what they were made of is left without a use."""
    for op in list(operations(function)):
        rewrite = next((_REWRITES[mark] for mark in _REWRITES if mark in op.attributes), None)
        if rewrite is None:
            continue
        with ir.InsertionPoint(op):
            result = rewrite(op)
        if result is not None:
            op.results[0].replace_all_uses_with(result)


def _picked(op: Any) -> Value | None:
    """max(select(lane is mine, pairs, lowest)) over pairs."""
    chosen = op.operands[0].owner
    source = _unsplit(chosen.operands[1])
    return None if source is None else _part(source, ir.IntegerAttr(op.attributes["tile.pick"]).value)


def _packed(op: Any) -> Value | None:
    """sum(pairs * [1, 16]) over pairs."""
    source = _unsplit(op.operands[0].owner.operands[0])
    return None if source is None else t.bit_or(_part(source, 0), t.shl(_part(source, 1), 4))


def _joined(op: Any) -> Value | None:
    """select(lane is even, even, odd), a tile of pairs, which is read as one tile of their elements."""
    even, odd = (op.operands[i].owner.operands[0] for i in (1, 2))
    shape = t.shape_of(even)
    if not shape or shape[-1] < FEWEST:
        return None
    kind = ir.RankedTensorType(even.type).element_type
    wide = ir.RankedTensorType.get([*shape[:-1], 2 * shape[-1]], kind)
    made = ir.Operation.create("hfusion.interleave", results=[wide], operands=[even, odd]).result
    for use in [u.owner.operation for u in op.results[0].uses]:
        if use.name == "tensor.collapse_shape" and use.results[0].type == wide:
            use.results[0].replace_all_uses_with(made)
    return t.split_last(made, 2)


def _part(source: Value, which: int) -> Value:
    shape = t.shape_of(source)
    kind = ir.RankedTensorType.get([*shape[:-1], shape[-1] // 2], ir.RankedTensorType(source.type).element_type)
    number = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), which)
    return ir.Operation.create("hfusion.deinterleave", results=[kind], operands=[source], attributes={"channelIndex": number}).result


def _unsplit(pairs: Value) -> Value | None:
    """The tile behind a tile of pairs."""
    owner = pairs.owner
    if isinstance(owner, ir.Block) or owner.name != "tensor.expand_shape" or t.shape_of(pairs)[-2] < FEWEST:
        return None
    return owner.operands[0]


_REWRITES: dict[str, Callable[[Any], Value | None]] = {"tile.pick": _picked, "tile.join": _joined, "tile.pack": _packed}
