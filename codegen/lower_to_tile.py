"""lower-to-tile: each kernel choice of a module becomes one tile module, named by what it does and a hash of what it is."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.kernel import EAGER, STREAMED, Buffer, Kernel, KernelError, Request, Schedule
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


Texts = Callable[[Choice, Callable[[], str]], str]
"""The text of a choice's tile module: what the function makes, or the same from where it is kept."""


def made_now(choice: Choice, make: Callable[[], str]) -> str:
    """Texts that nobody keeps."""
    return make()


def tile_kernels(module: ir.Module, texts: Texts = made_now) -> dict[Choice, TileKernel]:
    """Every distinct kernel of a module in which select-kernels has run, in program order; an op's launches side by side."""
    made: dict[Choice, TileKernel] = {}
    for op in launches(module):
        for choice in choices_of(op):
            if choice not in made:
                made.update((one, lower(one, texts)) for one in in_launches(choice))
    return made


def lower(choice: Choice, texts: Texts = made_now) -> TileKernel:
    """The tile module of one choice; raises `KernelError` where the ops that the schedule row leads to refuse each other."""
    kernel = build(choice)
    buffers = (
        *choice.request.buffers(),
        *(Buffer(f"work{i}", w.element, "workspace") for i, w in enumerate(kernel.workspaces)),
        Buffer("count", "i32", "count"),
    )
    symbol = symbol_of(choice)
    return TileKernel(symbol, choice, kernel, buffers, texts(choice, lambda: _text(symbol, choice, kernel, buffers)))


def _text(symbol: str, choice: Choice, kernel: Kernel, buffers: tuple[Buffer, ...]) -> str:
    try:
        module = t.kernel(symbol, {b.name: KINDS.get(b.element, b.element) for b in buffers}, kernel.body, kernel.grid)
    except ir.MLIRError as error:
        reasons = "; ".join(d.message for d in error.error_diagnostics) or str(error)
        raise KernelError(f"{choice.request}: kernel {choice.family} with {dict(choice.schedule)} is no tile kernel: {reasons}") from None
    with module.context:
        _mark(next(iter(module.body.operations)).attributes, dict(choice.schedule))
    found = problems(module)
    if found:
        raise KernelError(f"kernel {symbol} for {choice.request} leaves the common op set: {'; '.join(found[:3])}")
    return str(module.operation.get_asm())


def _mark(attributes: Any, row: Schedule) -> None:
    """What a row asks of the target's own lowering stands on the kernel's body."""
    if row.get(EAGER):
        attributes[f"tile.{EAGER}"] = ir.UnitAttr.get()
    if row.get(STREAMED):
        attributes[f"tile.{STREAMED}"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), row[STREAMED])


def symbol_of(choice: Choice) -> str:
    """`<family>_<hash>`: the hash covers the request and the schedule, so two shapes never share a symbol."""
    digest = hashlib.sha256(repr((choice.request, choice.schedule)).encode()).hexdigest()[:10]
    return f"{choice.family}_{digest}"


__all__ = ["Request", "Texts", "TileKernel", "lower", "made_now", "symbol_of", "tile_kernels"]
