"""verify: what no single op can check: a ring is committed after its last read, and ragged extents agree.

Types and shapes are the ops' own verifiers' business; MLIR runs those before and after every pass.
"""

from dataclasses import dataclass
from typing import ClassVar

from tapeout.dialects._mlir import func, ir
from tapeout.dialects.define import REGISTRY
from tapeout.passes.define import Pass, PassError, Promise, functions, operations
from tapeout.passes.extents import extents


@dataclass(frozen=True)
class Verify(Pass):
    """Refuses a module that is well typed and yet cannot be run. Changes nothing."""

    name: ClassVar[str] = "verify"
    keeps: ClassVar[Promise] = "bits"

    def run(self, module: ir.Module) -> None:
        for function in functions(module):
            _known_ops(function)
            _rings_are_committed_last(function)
            extents(function)


def _known_ops(function: func.FuncOp) -> None:
    for op in operations(function):
        if op.name not in REGISTRY and op.name not in ("func.call", "func.return", "nn.fused"):
            raise PassError(f"{op.name} at {op.location} in @{function.name.value} is no op of the graph level; "
                            "expected one of our dialects")


def _rings_are_committed_last(function: func.FuncOp) -> None:
    committed: dict[ir.Value, ir.Operation] = {}
    for op in operations(function):
        for value in op.operands:
            if value in committed:
                raise PassError(
                    f"{op.name} at {op.location} uses a ring that cache.commit at {committed[value].location} has already written; expected "
                    "every read and stage of a step in front of its commit (docs/architecture.md, rings): move the commit behind it")
        if op.name == "cache.commit":
            committed[op.operands[0]] = op
