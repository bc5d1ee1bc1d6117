"""verify: what no single op can check: a module of the graph level, rings committed after their last read, ragged extents that agree.

Types and shapes are the ops' own verifiers' business; MLIR runs those before and after every pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from tapeout.dialects._mlir import func, ir
from tapeout.dialects.define import REGISTRY
from tapeout.dialects.types import from_ir
from tapeout.passes.define import Pass, PassError, Promise, functions, operations
from tapeout.passes.extents import callee, extents


@dataclass(frozen=True)
class Verify(Pass):
    """Refuses a module that is well typed and yet cannot be run. Changes nothing."""

    name: ClassVar[str] = "verify"
    keeps: ClassVar[Promise] = "bits"

    def run(self, module: ir.Module) -> None:
        require_graph_level(module)
        committed: dict[str, set[int]] = {}
        for function in functions(module):
            committed[function.name.value] = _rings_are_committed_last(function, committed)
            extents(function)


def require_graph_level(module: ir.Module) -> None:
    """What every pass relies on: functions of one block, of our ops and types, which call only functions in front of them."""
    for op in module.body.operations:
        if not isinstance(op, func.FuncOp):
            raise PassError(f"{op.operation.name} at {op.operation.location} stands beside functions; expected func.func only")
        if len(op.operation.regions[0].blocks) != 1:
            raise PassError(
                f"@{op.name.value} at {op.operation.location} has {len(op.operation.regions[0].blocks)} blocks; "
                "expected one: the graph level has no declarations and no branches"
            )
        for i, kind in enumerate((*op.type.inputs, *op.type.results)):
            _require_known(kind, f"type {i} of @{op.name.value}")
        _known_ops(op)


def _known_ops(function: func.FuncOp) -> None:
    for op in _every_op(operations(function)):
        if op.name not in REGISTRY and op.name not in ("func.call", "func.return", "nn.fused"):
            raise PassError(
                f"{op.name} at {op.location} in @{function.name.value} is no op of the graph level; expected one of our dialects"
            )
        if op.name == "func.call":
            callee(function, op)
        for result in op.results:
            _require_known(result.type, f"{op.name} at {op.location}")


def _every_op(ops: list[ir.Operation]) -> Iterator[ir.Operation]:
    """Ops and those inside fused groups, without the groups' terminators."""
    for op in ops:
        yield op
        if op.name == "nn.fused":
            yield from [inner.operation for inner in op.regions[0].blocks[0].operations][:-1]


def _require_known(kind: ir.Type, where: str) -> None:
    try:
        from_ir(kind)
    except (TypeError, ValueError) as error:
        raise PassError(f"{where}: {error}; expected a tensor or a state handle of the graph level") from None


def _rings_are_committed_last(function: func.FuncOp, callees: dict[str, set[int]]) -> set[int]:
    """Checks the order of reads and commits; returns the numbers of the arguments that the function commits."""
    committed: dict[ir.Value, ir.Operation] = {}
    for op in operations(function):
        for value in op.operands:
            if value in committed:
                raise PassError(
                    f"{op.name} at {op.location} uses a ring that {committed[value].name} at {committed[value].location} has already written; "
                    "expected every read and stage of a step in front of its commit (docs/architecture.md, rings): move the commit behind it"
                )
        if op.name == "cache.commit":
            committed[op.operands[0]] = op
        if op.name == "func.call":
            target = callees[ir.FlatSymbolRefAttr(op.attributes["callee"]).value]
            committed.update({op.operands[i]: op for i in target})
    return {i for i, argument in enumerate(function.entry_block.arguments) if argument in committed}
