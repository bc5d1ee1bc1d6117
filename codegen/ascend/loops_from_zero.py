"""Loops over products start at 0.

Where the compiler overlaps cube and vector steps of a loop it numbers the steps anew, and takes the upper bound alone to the new numbers: with a
start other than 0 the vector cores make too few steps, and the cube waits for ever (silent; found by the simulator).
"""

from collections.abc import Callable, Iterator
from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.dialects._mlir import ir

Value = Any
PRODUCTS = frozenset({"linalg.matmul", "tile.dot_scaled"})
Operations = Callable[[Any], Iterator[Any]]


def start_at_zero(function: Any, operations: Operations) -> None:
    """Rewrites, in place, each loop around a product whose start is not 0."""
    for loop in list(operations(function)):
        if loop.name == "scf.for" and _constant(loop.operands[0]) != 0 and any(op.name in PRODUCTS for op in operations(loop)):
            _shifted(loop)


def _shifted(loop: Any) -> None:
    low, high = loop.operands[0], loop.operands[1]
    block = loop.regions[0].blocks[0]
    counter = block.arguments[0]
    with ir.InsertionPoint(loop):
        loop.operands[1] = _difference(high, low)
        loop.operands[0] = t.index(0)
    with ir.InsertionPoint.at_block_begin(block):
        place = t.add(counter, low)
    counter.replace_all_uses_except(place, place.owner.operation)


def _difference(high: Value, low: Value) -> Value:
    """high - low, a constant where high is low and a constant: only then is the number of steps known to the compiler."""
    if not isinstance(high.owner, ir.Block) and high.owner.name == "arith.addi":
        a, b = high.owner.operands
        steps = _constant(b) if a == low else _constant(a) if b == low else None
        if steps is not None:
            return t.index(steps)
    return t.sub(high, low)


def _constant(value: Value) -> int | None:
    if isinstance(value.owner, ir.Block) or value.owner.name != "arith.constant":
        return None
    return int(ir.IntegerAttr(value.owner.attributes["value"]).value)
