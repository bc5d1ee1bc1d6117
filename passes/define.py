"""What a pass is: a frozen dataclass whose fields are its options, with a name, a promise and `run`.

`keeps` is the promise that `--check-passes` holds a pass to: `bits` (every result equal), `sums` (equal up to the order of sums) or `formats`
(values may be rounded differently; only assign-formats may promise so little).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from tapeout.dialects._mlir import func, ir

Promise = Literal["bits", "sums", "formats"]


class PassError(Exception):
    """A module that a pass cannot take; the text says which op, what was found and what was expected."""


@dataclass(frozen=True)
class Pass:
    """Valid IR to valid IR, in place."""

    name: ClassVar[str]
    keeps: ClassVar[Promise]

    def run(self, module: ir.Module) -> None:
        raise NotImplementedError(f"pass {self.name} does not define run")


def functions(module: ir.Module) -> list[func.FuncOp]:
    """The module's functions in order."""
    return [op for op in module.body.operations if isinstance(op, func.FuncOp)]


def operations(function: func.FuncOp) -> list[ir.Operation]:
    """The function's own ops in program order, terminator included, regions not entered."""
    return [op.operation for op in function.entry_block.operations]


def only_user(value: ir.Value, name: str) -> ir.Operation | None:
    """The op called `name` among the users of `value`; None where there is none or more than one of that name."""
    found = {use.owner.operation for use in value.uses if use.owner.operation.name == name}
    return found.pop() if len(found) == 1 else None


def text(module: ir.Module) -> str:
    """The module as people read it: value names from locations, our op names without quotes."""
    from tapeout.dialects.text import sugar

    return sugar(module.operation.get_asm(use_name_loc_as_prefix=True, assume_verified=True))
