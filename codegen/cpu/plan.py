"""What a kernel keeps on the stack, what it computes where it is used, and how many rows of each tile anybody needs.

Read from the kernel before any code is written. Three facts per tile value:
* demand: the rows of axis 0 that its users read: all, or those below a store's extent (so one kernel is fast at one row and at its full
block);
* sinks: the traversals that evaluate it (stores, reductions, products, loop results), and how often each of its elements is computed in
them;
* kept: whether it is materialised, because it is worth more than recomputing, or because memory it reads changes before a sink.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tapeout.codegen.cpu import elementwise
from tapeout.dialects import tile
from tapeout.dialects._mlir import ir

SHAPING = frozenset({"linalg.broadcast", "linalg.transpose", "tensor.expand_shape", "tensor.collapse_shape"})
LOADS = frozenset({"tile.load", "tile.gather"})
CONSTANTS = frozenset({"arith.constant", "linalg.fill", "tile.iota"})
WRITES = frozenset({"tile.store", "tile.scatter", "tile.compress_store"})
PRODUCTS = frozenset({"linalg.matmul", "tile.dot_scaled"})
KEEP_ABOVE = 6  # instructions per 8 lanes saved that pay for a store and a load
LOOP_WEIGHT = 8  # turns assumed of a loop whose count is not known


@dataclass(frozen=True)
class Rows:
    """Rows of axis 0 that are asked for: below `bound` counted from `start` (None: a count), of a box of `height`."""

    bound: Any
    start: Any
    height: int


ALL = "all"
Demand = Rows | str | None


def is_tile(value: Any) -> bool:
    """Whether a value is a tensor."""
    return isinstance(value.type, ir.RankedTensorType)


def is_lazy(op: Any) -> bool:
    """Whether an op makes a tile that may stay uncomputed until it is used."""
    named = op.name in SHAPING or op.name in LOADS or op.name in CONSTANTS or op.name in elementwise.NAMES
    return named and is_tile(op.results[0])


def sources_of(op: Any) -> list[Any]:
    """The tiles a lazy op computes from (not the destinations that linalg ops carry)."""
    if op.name in CONSTANTS or op.name in LOADS:
        return []
    if op.name in ("linalg.broadcast", "linalg.transpose", "tensor.expand_shape", "tensor.collapse_shape"):
        return [op.operands[0]]
    return [v for v in op.operands if is_tile(v)]


def rows_of_box(op: Any, box: list[int]) -> Demand:
    """The rows that a load or store with an extent touches."""
    extent = list(op.extent)
    if not extent:
        return ALL
    return Rows(extent[0], list(op.at)[len(tile.integers(op.shape)) - len(box)], box[0])


@dataclass
class Plan:
    """The facts, by value (or by op for numbers)."""

    demand: dict[Any, Demand] = field(default_factory=dict)
    kept: set[Any] = field(default_factory=set)
    order: dict[Any, tuple[int, int]] = field(default_factory=dict)  # op -> (own number, number of its last inner op)
    writes: list[tuple[int, Any]] = field(default_factory=list)  # (number, buffer)
    cost: dict[Any, int] = field(default_factory=dict)
    sinks: dict[Any, dict[Any, int]] = field(default_factory=dict)


def make_plan(function: Any) -> Plan:
    """Reads a kernel body."""
    plan = Plan()
    block = function.regions[0].blocks[0]
    _number(plan, block, 0)
    _demand_block(plan, block)
    for op in _in_order(block):
        if is_lazy(op):
            inner = [plan.cost.get(v, 1) for v in sources_of(op)]
            known = op.name not in LOADS and not any(inner)  # made of constants: the code generator folds it
            plan.cost[op.results[0]] = 0 if known else _own_cost(op) + sum(inner)
    for op in reversed(list(_in_order(block))):
        if is_lazy(op):
            _decide(plan, op)
    return plan


def _in_order(block: Any) -> Iterator[Any]:
    for op in block.operations:
        yield op.operation
        for region in op.regions:
            for inner in region.blocks:
                if op.name != "linalg.reduce" and not op.name.startswith("linalg."):
                    yield from _in_order(inner)


def _number(plan: Plan, block: Any, count: int) -> int:
    for op in block.operations:
        first = count = count + 1
        if not op.name.startswith("linalg."):
            for region in op.regions:
                for inner in region.blocks:
                    count = _number(plan, inner, count)
        plan.order[op.operation] = (first, count)
        if op.name in WRITES:
            plan.writes.append((first, op.base))
    return count


# ---- demand ------------------------------------------------------------------------------------------------------------


def _join(a: Demand, b: Demand) -> Demand:
    if a is None or b is None:
        return b if a is None else a
    return a if a == b else ALL


def _ask(plan: Plan, value: Any, demand: Demand) -> None:
    if is_tile(value):
        plan.demand[value] = _join(plan.demand.get(value), demand)


def _demand_block(plan: Plan, block: Any) -> None:
    for op in reversed(list(block.operations)):
        _DEMANDS.get(op.name, _demand_lazy)(plan, op.operation)


def _shape(value: Any) -> list[int]:
    return list(ir.RankedTensorType(value.type).shape)


def _demand_lazy(plan: Plan, op: Any) -> None:
    if not len(op.results) or not is_tile(op.results[0]):
        return
    result = op.results[0]
    wanted = plan.demand.get(result)
    for value in op.operands:
        if is_tile(value):
            same = len(_shape(value)) > 0 and _shape(value)[:1] == _shape(result)[:1]
            _ask(plan, value, wanted if same else ALL)


def _demand_broadcast(plan: Plan, op: Any) -> None:
    inserted = next(iter(op.attributes["dimensions"]))
    _ask(plan, op.operands[0], plan.demand.get(op.results[0]) if inserted else ALL)


def _demand_reduce(plan: Plan, op: Any) -> None:
    axis = next(iter(op.attributes["dimensions"]))
    _ask(plan, op.operands[0], plan.demand.get(op.results[0]) if axis else ALL)


def _demand_product(plan: Plan, op: Any) -> None:
    wanted = plan.demand.get(op.results[0])
    by_row = (True, False, True) if op.name == "linalg.matmul" else (True, True, False, False, True)
    for value, follows in zip(op.operands, by_row, strict=True):
        _ask(plan, value, wanted if follows else ALL)


def _demand_store(plan: Plan, op: Any) -> None:
    _ask(plan, op.opview.value, rows_of_box(op.opview, _shape(op.opview.value)))


def _demand_scatter(plan: Plan, op: Any) -> None:
    _ask(plan, op.opview.value, Rows(op.opview.valid, None, _shape(op.opview.value)[0]))


def _demand_everything(plan: Plan, op: Any) -> None:
    for value in op.operands:
        _ask(plan, value, ALL)


def _demand_for(plan: Plan, op: Any) -> None:
    body = op.regions[0].blocks[0]
    slots, yields = list(body.arguments)[1:], list(list(body.operations)[-1].operands)
    for slot, result in zip(slots, op.results, strict=True):
        _ask(plan, slot, plan.demand.get(result))
    while True:
        before = [plan.demand.get(s) for s in slots]
        for slot, value in zip(slots, yields, strict=True):
            plan.demand[slot] = _lasting(plan, slot, op)
            _ask(plan, value, plan.demand[slot])
        _demand_block(plan, body)
        for slot in slots:
            plan.demand[slot] = _lasting(plan, slot, op)
        if before == [plan.demand.get(s) for s in slots]:
            break
    for slot, start in zip(slots, list(op.operands)[3:], strict=True):
        _ask(plan, start, plan.demand.get(slot))


def _lasting(plan: Plan, slot: Any, op: Any) -> Demand:
    """The demand of a carried tile; rows counted inside the loop differ from turn to turn, so they stand for all."""
    demand = plan.demand.get(slot)
    if isinstance(demand, Rows) and any(v is not None and _is_inside(v, op) for v in (demand.bound, demand.start)):
        return ALL
    return demand


def _is_inside(value: Any, op: Any) -> bool:
    block = value.owner if isinstance(value.owner, ir.Block) else value.owner.operation.block
    while True:
        parent = block.owner.operation
        if parent == op:
            return True
        if parent.name == "func.func":
            return False
        block = parent.block


def _demand_if(plan: Plan, op: Any) -> None:
    for region in op.regions:
        for block in region.blocks:
            for value, result in zip(list(block.operations)[-1].operands, op.results, strict=True):
                _ask(plan, value, plan.demand.get(result))
            _demand_block(plan, block)


def _demand_nothing(plan: Plan, op: Any) -> None:
    return


_DEMANDS = {
    "tile.store": _demand_store, "tile.scatter": _demand_scatter, "tile.compress_store": _demand_everything,
    "linalg.broadcast": _demand_broadcast, "linalg.transpose": _demand_everything, "linalg.reduce": _demand_reduce,
    "linalg.matmul": _demand_product, "tile.dot_scaled": _demand_product, "scf.for": _demand_for, "scf.if": _demand_if,
    "scf.yield": _demand_nothing, "func.return": _demand_nothing,
}  # fmt: skip


# ---- sinks and what is kept --------------------------------------------------------------------------------------------


def _own_cost(op: Any) -> int:
    if op.name in LOADS:
        return 1
    return elementwise.cost(op) if op.name in elementwise.NAMES and op.name != "arith.constant" else 0


def _repeats(op: Any) -> int:
    """How often an element of the operand is computed for one traversal of the result."""
    if op.name != "linalg.broadcast":
        return 1
    shape, axis = _shape(op.results[0]), next(iter(op.attributes["dimensions"]))
    return shape[axis] if axis < len(shape) - 1 else 1


def sinks_of(plan: Plan, value: Any) -> dict[Any, int]:
    """(op, operand) that evaluates a value, directly or through lazy values -> how often each of its elements is computed there."""
    if value in plan.sinks:
        return plan.sinks[value]
    found: dict[Any, int] = {}
    for use in value.uses:
        user = use.owner.operation
        if is_lazy(user) and user.results[0] not in plan.kept:
            inner = {sink: count * _repeats(user) for sink, count in sinks_of(plan, user.results[0]).items()}
        elif is_lazy(user):
            inner = {(user, 0): 1}
        else:
            inner = {(user, use.operand_number): 1}
        for sink, count in inner.items():
            found[sink] = max(found.get(sink, 0), count)
    plan.sinks[value] = found
    return found


def _loops_between(value: Any, sink: Any) -> list[Any]:
    """The region ops that hold the sink but not the value, innermost first."""
    home = value.owner.operation.block
    out, block = [], sink.block
    while block != home:
        parent = block.owner.operation
        out.append(parent)
        block = parent.block
    return out


def _decide(plan: Plan, op: Any) -> None:
    result = op.results[0]
    sinks = sinks_of(plan, result)
    if op.name in CONSTANTS or not sinks:
        return
    weight = 0
    for (sink, _), count in sinks.items():
        loops = sum(o.name == "scf.for" for o in _loops_between(result, sink))
        weight += count * LOOP_WEIGHT**loops
    expensive = (weight - 1) * plan.cost[result] > KEEP_ABOVE and op.name not in SHAPING
    if expensive or _is_overwritten(plan, op, sinks) or _reaches_too_far(plan, op):
        plan.kept.add(result)


def _is_overwritten(plan: Plan, op: Any, sinks: dict[Any, int]) -> bool:
    """Whether the buffer a load reads changes before a sink reads it."""
    if op.name not in LOADS:
        return False
    buffers = [op.opview.base, op.opview.ids] if op.name == "tile.gather" else [op.opview.base]
    first = plan.order[op][0]
    for sink, _ in sinks:
        loops = _loops_between(op.results[0], sink)
        last = plan.order[loops[-1]][1] if loops else plan.order[sink][0]
        if any(first < at <= last and base in buffers for at, base in plan.writes):
            return True
    return False


def _reaches_too_far(plan: Plan, op: Any) -> bool:
    """Whether a ragged load is asked for rows that may not exist: then only the real ones are copied."""
    result = op.results[0]
    if op.name == "tile.load":
        own = rows_of_box(op.opview, _shape(result))
    elif op.name == "tile.gather" and list(op.opview.valid):
        own = Rows(next(iter(op.opview.valid)), None, _shape(result)[0])
    else:
        return False
    return own != ALL and plan.demand.get(result) != own
