"""`nn.fused`: a group of ops that one kernel executes. Its meaning is its region's, so fusing can neither add nor lose a rounding."""

from collections.abc import Callable, Sequence
from typing import Any, Optional

from tapeout.dialects._mlir import ext, ir
from tapeout.dialects.define import REGISTRY
from tapeout.dialects.nn import Nn

MOST_INPUTS, MOST_RESULTS = 16, 4
"""Widest group that can be written. IRDL gives all values of one variadic field one type, so each value is an optional field of its own."""


def _optional(prefix: str, count: int, kind: Any) -> dict[str, Any]:
    return {f"{prefix}{i}": Optional[kind[Any]] for i in range(count)}  # noqa: UP045 (the bindings read typing.Optional)


class YieldOp(Nn.Operation, name="yield", traits=[ir.IsTerminatorTrait]):
    """Ends the region of `nn.fused` with its results."""

    __annotations__ = _optional("value", MOST_RESULTS, ext.Operand)


class FusedOp(Nn.Operation, name="fused"):
    """Runs its region on its inputs; `kind` names the pattern, by which a kernel is found."""

    __annotations__ = {
        **_optional("out", MOST_RESULTS, ext.Result),
        **_optional("input", MOST_INPUTS, ext.Operand),
        "kind": ir.StringAttr,
        "body": ext.Region,
    }

    def verify_invariants(self) -> bool:
        problem = _problem(self)
        if problem is not None:
            self.location.emit_error(f"'nn.fused' {problem}")
        return problem is None


def _filled(values: Sequence[Any], count: int) -> list[Any]:
    if len(values) > count:
        raise ValueError(f"a fused group has at most {MOST_INPUTS} inputs and {MOST_RESULTS} results, found {len(values)} of them")
    return [*values, *[None] * (count - len(values))]


def _problem(op: Any) -> str | None:
    if "kind" not in op.operation.attributes or not isinstance(op.operation.attributes["kind"], ir.StringAttr):
        return "has no attribute kind, expected the name of its pattern"
    blocks = list(op.operation.regions[0].blocks)
    if len(blocks) != 1 or not list(blocks[0].operations):
        return f"needs one block of ops, found {len(blocks)} blocks, {sum(len(list(b.operations)) for b in blocks)} ops"
    given, taken = [v.type for v in op.operation.operands], [a.type for a in blocks[0].arguments]
    if given != taken:
        return f"passes {', '.join(map(str, given))} to a region that takes {', '.join(map(str, taken))}"
    *inner, last = [o.operation for o in blocks[0].operations]
    made, promised = [v.type for v in last.operands], [r.type for r in op.operation.results]
    if last.name != "nn.yield" or made != promised:
        return f"ends with {last.name} of {', '.join(map(str, made))}, promised {', '.join(map(str, promised))}"
    nested = next((o.name for o in inner if list(o.regions)), None)
    if nested is not None:
        return f"holds {nested}, expected ops without regions: groups never nest"
    stray = next((o.name for o in (*inner, last) if any(_home(v) != blocks[0] for v in o.operands)), None)
    return None if stray is None else f"holds {stray} that reads a value from outside, expected it as an input of the group"


def _home(value: ir.Value) -> ir.Block:
    """The block that makes a value."""
    return value.owner if isinstance(value.owner, ir.Block) else value.owner.operation.block


def fuse(ops: Sequence[ir.Operation], kind: str) -> ir.Operation:
    """Moves `ops` (program order, one block) into a new `nn.fused` placed where the first of them stands; returns it.

    Inputs are the values the group reads from outside in order of first use, results those that are used outside. A fused op among `ops` is
    opened first, so groups never nest. The caller knows that all inputs exist there.
    """
    group = [inner for op in ops for inner in (_open(op) if op.name == "nn.fused" else [op])]
    made = [r for op in group for r in op.results]
    inputs = list(dict.fromkeys(v for op in group for v in op.operands if v not in made))
    results = [r for r in made if any(use.owner.operation not in group for use in r.uses)]
    with ir.InsertionPoint(group[0]), group[-1].location:
        fused = FusedOp(*_filled([r.type for r in results], MOST_RESULTS), *_filled(inputs, MOST_INPUTS), ir.StringAttr.get(kind)).operation
    block = fused.regions[0].blocks.append(*[v.type for v in inputs])
    for op in group:
        block.append(op)
    for value, argument in zip(inputs, block.arguments, strict=True):
        _replace(value, argument, lambda user: user in group)
    for old, new in zip(results, fused.results, strict=True):
        _replace(old, new, lambda user: user not in group)
    with ir.InsertionPoint(block), fused.location:
        YieldOp(*_filled(results, MOST_RESULTS))
    _keep_layer(group[0], fused)
    return fused


def reads_host(op: ir.Operation) -> bool:
    """Whether an op, or one of a group, reads rows that a chip may leave in host memory."""
    if op.name == "nn.fused":
        return any(reads_host(inner.operation) for inner in op.regions[0].blocks[0].operations)
    return op.name in REGISTRY and REGISTRY[op.name].reads_host


def _replace(old: ir.Value, new: ir.Value, where: Callable[[ir.Operation], bool]) -> None:
    for use in list(old.uses):
        if where(use.owner.operation):
            use.owner.operation.operands[use.operand_number] = new


def _keep_layer(source: ir.Operation, fused: ir.Operation) -> None:
    if "tapeout.layer" in source.attributes:
        fused.attributes["tapeout.layer"] = source.attributes["tapeout.layer"]


def _open(fused: ir.Operation) -> list[ir.Operation]:
    """Dissolves a fused op in place; returns the ops it held."""
    block = fused.regions[0].blocks[0]
    for argument, value in zip(block.arguments, fused.operands, strict=True):
        argument.replace_all_uses_with(value)
    *inner, ending = [op.operation for op in block.operations]
    for result, value in zip(fused.results, list(ending.operands), strict=True):
        result.replace_all_uses_with(value)
    for op in inner:
        op.move_before(fused)
    ending.erase()
    fused.erase()
    return inner
