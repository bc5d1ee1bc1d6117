"""What a launch costs, as coefficients: the planner, scheduler and allocator of the runtime read nothing else about a kernel.

An op's declared cost is a function of run-time sizes. Here it is evaluated at a few sizes and written as
`fixed + extent * a + extent*entries * b + experts * c` for every quantity (bytes read and written, operations by kind). Entries are taken in
the long-context regime, where attention reads its full selection and only scoring still grows.
"""

from tapeout.dialects._mlir import ir
from tapeout.dialects.define import Cost, Sizes, cost_of
from tapeout.dialects.types import Tensor, from_ir

Coefficients = dict[str, dict[str, float]]

LONG, LONGER = 1 << 20, 1 << 21
"""Visible entries at which the slope is taken: beyond every selection width of the model."""


def launch_cost(op: ir.Operation, extent: str | None) -> Coefficients:
    """Coefficients of one launch; `extent` names the run-time row count of the op."""
    unit = extent or "rows"
    samples = {
        name: _quantities(op_cost(op, sizes))
        for name, sizes in {"none": Sizes(0), "row": Sizes(1, LONG), "more": Sizes(1, LONGER), "expert": Sizes(0, experts=1)}.items()
    }
    out: Coefficients = {}
    for quantity in sorted({q for s in samples.values() for q in s}):
        fixed, row, more, expert = (samples[s].get(quantity, 0) for s in ("none", "row", "more", "expert"))
        slope = (more - row) / (LONGER - LONG)
        terms = {"fixed": float(fixed), unit: row - fixed - slope * LONG, f"{unit}*entries": slope, "experts": float(expert - fixed)}
        kept = {term: value for term, value in terms.items() if value}
        if kept:
            out[quantity] = kept
    return out


def op_cost(op: ir.Operation, sizes: Sizes) -> Cost:
    """The cost of a graph op; a fused group does its ops' work but moves only what it takes and hands out, and what its ops read of states."""
    if op.name != "nn.fused":
        return cost_of(op.opview, sizes)
    inner = [o.operation for o in op.regions[0].blocks[0].operations if o.operation.name != "nn.yield"]
    total = Cost(_bytes(op.operands, sizes), _bytes(op.results, sizes))
    for one in inner:
        cost = cost_of(one.opview, sizes)
        from_states = max(0, cost.read - _bytes(one.operands, sizes))
        total = total + Cost(from_states, 0, cost.operations)
    return total


def _bytes(values: list[ir.Value], sizes: Sizes) -> int:
    views = [from_ir(v.type) for v in values]
    return sum(v.bytes(sizes.rows) for v in views if isinstance(v, Tensor))


def _quantities(cost: Cost) -> dict[str, int]:
    return {"read": cost.read, "written": cost.written, **cost.operations}
