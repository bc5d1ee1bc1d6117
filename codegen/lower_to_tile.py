"""lower-to-tile: each kernel choice of a module becomes one tile module, named by what it does and a hash of what it is."""

import hashlib
from dataclasses import dataclass

from tapeout.codegen import tile_builder as t
from tapeout.codegen.kernel import EAGER, Buffer, Kernel, KernelError, Request
from tapeout.codegen.row_values import KINDS
from tapeout.codegen.select_kernels import Choice, build, choices_of, in_launches, launches
from tapeout.codegen.verify_tile import problems
from tapeout.dialects._mlir import ir


@dataclass(frozen=True)
class TileKernel:
    """One kernel of a target: its symbol, what was asked, and the text of its tile module (the unit of compiling and caching)."""

    symbol: str
    choice: Choice
    kernel: Kernel
    buffers: tuple[Buffer, ...]
    text: str


def tile_kernels(module: ir.Module) -> dict[Choice, TileKernel]:
    """Every distinct kernel of a module in which select-kernels has run, in program order; an op's launches side by side."""
    made: dict[Choice, TileKernel] = {}
    for op in launches(module):
        for choice in choices_of(op):
            if choice not in made:
                made.update((one, lower(one)) for one in in_launches(choice))
    return made


def lower(choice: Choice) -> TileKernel:
    """The tile module of one choice."""
    kernel = build(choice)
    buffers = (
        *choice.request.buffers(),
        *(Buffer(f"work{i}", w.element, "workspace") for i, w in enumerate(kernel.workspaces)),
        Buffer("count", "i32", "count"),
    )
    symbol = symbol_of(choice)
    module = t.kernel(symbol, {b.name: KINDS.get(b.element, b.element) for b in buffers}, kernel.body, kernel.grid)
    if dict(choice.schedule).get(EAGER):
        with module.context:
            next(iter(module.body.operations)).attributes[f"tile.{EAGER}"] = ir.UnitAttr.get()
    found = problems(module)
    if found:
        raise KernelError(f"kernel {symbol} for {choice.request} leaves the common op set: {'; '.join(found[:3])}")
    return TileKernel(symbol, choice, kernel, buffers, module.operation.get_asm())


def symbol_of(choice: Choice) -> str:
    """`<family>_<hash>`: the hash covers the request and the schedule, so two shapes never share a symbol."""
    digest = hashlib.sha256(repr((choice.request, choice.schedule)).encode()).hexdigest()[:10]
    return f"{choice.family}_{digest}"


__all__ = ["Request", "TileKernel", "lower", "symbol_of", "tile_kernels"]
