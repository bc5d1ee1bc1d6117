"""The grid of a launch, known when it is compiled: `@NAME_grid` of a tile module with the row count at its bucket's bound.

On a GPU nothing is read back for a launch: the grid is that of the largest count a bucket may have, and instances behind the true grid leave.
"""

import re
from functools import partial
from typing import Any

import numpy as np

from tapeout.codegen import tile_interpreter
from tapeout.codegen.kernel import KernelError
from tapeout.dialects import tile
from tapeout.dialects._mlir import ir

Grid = tuple[int, int, int]


def grid_at(text: str, rows: int) -> Grid:
    """Extents for a row count of at most `rows`; `text` is a tile module. Raises `KernelError` where the grid reads more than the count."""
    context = ir.Context()
    tile.load_into(context)
    with context, ir.Location.unknown():
        return module_grid_at(ir.Module.parse(grid_part(text)), rows)


def grid_part(text: str) -> str:
    """The text of a tile module without its kernel: what a grid is computed from is small."""
    kernel, grid = (match.start() for match in re.finditer(r"^ *func\.func @", text, re.MULTILINE))
    return text[:kernel] + text[grid:]


def module_grid_at(module: ir.Module, rows: int) -> Grid:
    """`grid_at` of a parsed module, whole or its `grid_part`."""
    grid = list(module.body.operations)[-1]
    buffers = {name.value: partial(np.zeros, 1, tile_interpreter.DTYPES[str(ir.MemRefType(a.type).element_type)])()
               for name, a in zip(grid.attributes["tile.arguments"], grid.arguments, strict=True)}
    _require_only_the_count(grid)
    buffers[list(buffers)[-1]] = np.array([rows], np.int32)
    x, y, z = tile_interpreter.grid_of(module, buffers)
    return x, y, z


def _require_only_the_count(grid: Any) -> None:
    count = list(grid.arguments)[-1]
    wrong = [op for op in grid.entry_block.operations if op.operation.name == "tile.scalar" and op.base != count]
    if wrong:
        raise KernelError(f"@{grid.name.value} reads a buffer besides the row count; its extents are not known when a launch is compiled")
