"""Lane numbers of more columns than a vector register holds: running sums of ones, made once at the start of a kernel.

Where the compiler fuses its own lane numbers into a loop that reduces, every register gets those of the first one (silent; found by the
simulator): right up to a register's width, wrong beyond. A running sum is a call of the device library, which is fused with nothing.
"""

from collections.abc import Callable, Iterator
from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.dialects._mlir import ir

Value = Any
ARANGE = "hfusion.arange"
REGISTER_LANES = 64
"""Lane numbers, i32, that fill a vector register."""


def sum_up_lanes(function: Any, operations: Callable[[Any], Iterator[Any]]) -> None:
    """Replaces wide lane numbers of a function in place; equal widths share one tile."""
    made: dict[int, Value] = {}
    for op in [op for op in operations(function) if is_wide(op)]:
        n = t.shape_of(op.results[0])[0]
        if n not in made:
            with ir.InsertionPoint.at_block_begin(function.regions[0].blocks[0]):
                made[n] = t.sub(running_sum(t.full([n], 1, "i32")), 1)
        op.results[0].replace_all_uses_with(made[n])
        op.erase()


def is_wide(op: Any) -> bool:
    """Whether an op makes more lane numbers than a register holds."""
    return bool(op.name == ARANGE and t.shape_of(op.results[0])[0] > REGISTER_LANES)


def running_sum(values: Value) -> Value:
    """The sums of a tile's elements up to each, itself included."""
    attributes = {"cum_dims": ir.DenseI64ArrayAttr.get([0]), "reverse": ir.BoolAttr.get(False)}
    return ir.Operation.create("hfusion.cumsum", results=[values.type], operands=[values], attributes=attributes).result
