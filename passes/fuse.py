"""How the fuse passes work: chains of producer and single consumer become one `nn.fused`.

A fuse pass lists its chains; the first op of a chain is looked for, each next one must be the only user of its kind. Values of the chain that
are used elsewhere stay results of the group, so nothing is computed twice.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tapeout.dialects._mlir import ir
from tapeout.dialects.fused import fuse
from tapeout.passes.define import functions, only_user, operations


@dataclass(frozen=True)
class Chain:
    """`names` in order of dataflow become a group of `kind`; `holds` may refuse a found chain."""

    kind: str
    names: tuple[str, ...]
    holds: Callable[[list[ir.Operation]], bool] = lambda found: True


def fuse_chains(module: ir.Module, chains: list[Chain]) -> None:
    """Applies the chains in order to every function; an op belongs to at most one group."""
    for function in functions(module):
        for chain in chains:
            for found in _matches(operations(function), chain):
                fuse(found, chain.kind)


def _matches(ops: list[ir.Operation], chain: Chain) -> list[list[ir.Operation]]:
    """All found chains, disjoint. They are collected before any is fused: fusing erases the groups it opens."""
    out: list[list[ir.Operation]] = []
    taken: set[ir.Operation] = set()
    for op in ops:
        found = _match(op, chain) if _is(op, chain.names[0]) else None
        if found is not None and chain.holds(found) and taken.isdisjoint(found):
            out.append(found)
            taken.update(found)
    return out


def consumed(found: list[ir.Operation]) -> bool:
    """Whether the chain alone reads what its ops make but for the last one: those values then never need to exist in memory."""
    return all(len(list(r.uses)) == 1 for op in found[:-1] for r in op.results)


def _is(op: ir.Operation, name: str) -> bool:
    """Whether op is `name`, or a fused group named `fused:<kind>`."""
    if name.startswith("fused:"):
        return op.name == "nn.fused" and ir.StringAttr(op.attributes["kind"]).value == name.removeprefix("fused:")
    return op.name == name


def _match(first: ir.Operation, chain: Chain) -> list[ir.Operation] | None:
    found = [first]
    for name in chain.names[1:]:
        users = [_next(result, name) for result in found[-1].results]
        step = next((u for u in users if u is not None), None)
        if step is None or step.block != first.block:
            return None
        found.append(step)
    return found if _may_move(found) else None


def _next(value: ir.Value, name: str) -> ir.Operation | None:
    op = only_user(value, "nn.fused" if name.startswith("fused:") else name)
    return op if op is not None and _is(op, name) else None


def _may_move(found: list[ir.Operation]) -> bool:
    """Whether the group can stand where its first op stands: everything it reads from outside is there already."""
    made = {r for op in found for r in op.results}
    outside = [v.owner for op in found for v in op.operands if v not in made and not isinstance(v.owner, ir.Block)]
    return all(owner.operation.is_before_in_block(found[0]) for owner in outside)


__all__ = ["Chain", "consumed", "fuse_chains"]
