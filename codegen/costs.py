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
PAIR = 2
"""Rows of a sample: enough of them that two experts can be hit."""


def launch_cost(op: ir.Operation, extent: str | None) -> Coefficients:
    """Coefficients of one launch; `extent` names the run-time row count of the op."""
    unit = extent or "rows"

    def at(count: int, entries: int, experts: int) -> dict[str, int]:
        return _quantities(op_cost(op, Sizes(count, entries, count if unit == "sequences" else 1, experts)))

    base, rows, longer, experts = at(PAIR, LONG, 1), at(2 * PAIR, LONG, 1), at(PAIR, LONGER, 1), at(PAIR, LONG, 2)
    out: Coefficients = {}
    for quantity in sorted({*base, *rows, *longer, *experts}):
        start, more, long, hit = (sample.get(quantity, 0) for sample in (base, rows, longer, experts))
        row, expert = (more - start) / PAIR, float(hit - start)
        slope = (long - start) / (LONGER - LONG) / PAIR
        terms = {"fixed": start - PAIR * row - expert, unit: row - slope * LONG, f"{unit}*entries": slope, "experts": expert}
        kept = {term: value for term, value in terms.items() if value}
        if kept:
            out[quantity] = kept
    return out


def op_cost(op: ir.Operation, sizes: Sizes) -> Cost:
    """The cost of a graph op; a fused group does its ops' work and reads what they read, but values made inside move neither in nor out."""
    if op.name != "nn.fused":
        return cost_of(op.opview, sizes)
    inner = [o.operation for o in op.regions[0].blocks[0].operations if o.operation.name != "nn.yield"]
    made = {r for one in inner for r in one.results}
    total = Cost(written=_bytes(op.results, sizes))
    for one in inner:
        cost = cost_of(one.opview, sizes)
        total = total + Cost(cost.read - _bytes([v for v in one.operands if v in made], sizes), 0, cost.operations)
    return total


def _bytes(values: list[ir.Value], sizes: Sizes) -> int:
    views = [from_ir(v.type) for v in values]
    return sum(v.bytes(sizes.rows) for v in views if isinstance(v, Tensor))


def _quantities(cost: Cost) -> dict[str, int]:
    return {"read": cost.read, "written": cost.written, **cost.operations}
