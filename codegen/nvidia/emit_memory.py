"""Triton forms of the tile dialect: boxes, rows by number, compressed stores, run-time counts.

Coordinates are i64 scalars, folded into one scalar offset a box; lanes are i32. Lanes that rounding up to a power of two added, and rows at or
beyond a run-time extent, are masked: never read (0 stands in) and never written.
"""

from collections.abc import Callable
from math import prod
from typing import Any

from tapeout.codegen.nvidia.hazards import nested
from tapeout.codegen.nvidia.printer import Printer, as_number, element, extents, padded
from tapeout.dialects import tile

INT32_LIMIT = 2**31
WARP_LINE = 256
"""BF16 numbers that a warp reads at once, 16 bytes a lane."""


def program_id(p: Printer, op: Any) -> None:
    """This instance's coordinate; instances behind the grid's extents have left already."""
    p.names[op.out] = p.instance(op.axis.value)


def iota(p: Printer, op: Any) -> None:
    """[0, n)."""
    p.names[op.out] = p.lane(op.out, 0)


def read(p: Printer, op: Any) -> str:
    """What a `tile.scalar` is printed as."""
    return f"tl.load({p.names[op.base]} + {p.names[op.at]}).to(tl.int64)"


def scalar(p: Printer, op: Any) -> None:
    """One run-time count; the launch's own, which the grid is made of, is read once."""
    text = read(p, op)
    if text in p.held:
        p.names[op.out] = p.held[text]
    else:
        p.assign(op.out, "scalar", text)


def _sum(terms: list[str]) -> str:
    return " + ".join(t for t in terms if t != "0") or "0"


def _times(at: str, stride: int) -> str:
    number = as_number(at)
    if number is not None:
        return str(number * stride)
    return at if stride == 1 else f"{at} * {stride}"


def _strides(shape: list[int], panel: int) -> list[int]:
    """Elements between neighbours on each axis; of a panelled array, for boxes that start at a panel."""
    steps = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return [*steps[:-2], panel, shape[-2]] if panel else steps


def _lane_offsets(p: Printer, value: Any, strides: list[int], panel: int, rows: int) -> list[str]:
    """Offsets of a box's lanes from its first element, one term an axis."""
    box = extents(value)
    reach = sum((padded(n) - 1) * s for n, s in zip(box, strides, strict=True))
    terms = []
    for axis, stride in enumerate(strides):
        lane = p.lane(value, axis)
        if panel and axis == len(box) - 1:
            terms.append(f"{lane} // {panel} * {rows * panel} + {lane} % {panel}" if box[-1] > panel else lane)
        elif padded(box[axis]) > 1:
            terms.append(_times(f"{lane}.to(tl.int64)" if reach >= INT32_LIMIT else lane, stride))
    return terms


def _masks(p: Printer, value: Any, left: str | None) -> list[str]:
    """Conditions on lanes: below the rows that are left, inside the true extents."""
    box = extents(value)
    found = [] if left is None or not box else [f"({p.lane(value, 0)} < {left})"]
    return found + [f"({p.lane(value, axis)} < {n})" for axis, n in enumerate(box) if n != padded(n)]


def rows_left(p: Printer, extent: str, first: str, count: int) -> str | None:
    """An i32 scalar, or a number: rows of `count` that lie below `extent`. None where all of them do."""
    known = as_number(extent), as_number(first)
    if known[0] is not None and known[1] is not None:
        return None if known[0] - known[1] >= count else str(known[0] - known[1])
    room = extent if first == "0" else f"{extent} - {first}"
    return p.fresh_line("left", f"tl.minimum({room}, {count}).to(tl.int32)")


def _box(p: Printer, op: Any, value: Any, panel: int) -> tuple[str, str]:
    """(addresses, mask or "")."""
    shape, box, at = tile.integers(op.shape), extents(value), [p.names[i] for i in op.at]
    strides, lead = _strides(shape, panel), len(shape) - len(box)
    start = _sum([_times(i, s) for i, s in zip(at, strides, strict=True)])
    first = p.names[op.base] if start == "0" else p.fresh_line("first", f"{p.names[op.base]} + ({start})")
    lanes = _lane_offsets(p, value, strides[lead:], panel, shape[-2] if panel else 0)
    bound = [p.names[e] for e in op.extent]
    left = rows_left(p, bound[0], at[lead], box[0]) if bound and box else None
    if box and not lanes:
        lanes = [p.zeros(value)]
    return (f"{first} + ({_sum(lanes)})" if box else first), " & ".join(_masks(p, value, left))


def spread_values(function: Any) -> dict[Any, int]:
    """Short BF16 lines that are read only to stand in each of some rows, as loaded and as widened, with the number of rows. Every warp reads such a
    line for itself, as it has the rows' columns: dealt out to all threads it would go through shared memory first."""
    found: dict[Any, int] = {}
    for op in nested(function.operation):
        if op.name == "tile.load" and not len(op.extent) and not op.panel.value and len(extents(op.out)) == 1:
            n, values = extents(op.out)[0], [op.out]
            if all(use.owner.name == "arith.extf" for use in op.out.uses):
                values += [use.owner.results[0] for use in op.out.uses]
            readers = [use.owner for value in values[1:] or values for use in value.uses]
            rows = {extents(r.results[0])[0] if _stands_in_rows(r) else 0 for r in readers}
            if element(op.out) == "bf16" and n == padded(n) and n <= WARP_LINE and len(rows) == 1 and max(rows) > 1:
                found |= dict.fromkeys(values, max(rows))
    return found


def _stands_in_rows(op: Any) -> bool:
    return op.name == "linalg.broadcast" and list(op.operation.attributes["dimensions"]) == [0] and len(extents(op.results[0])) == 2


def load(p: Printer, op: Any) -> None:
    """A box; 0 where nothing may be read."""
    if op.out in p.spread:
        box = [p.spread[op.out], *extents(op.out)]
        start = _sum([_times(p.names[i], s) for i, s in zip(op.at, _strides(tile.integers(op.shape), 0), strict=True)])
        first = p.names[op.base] if start == "0" else p.fresh_line("first", f"{p.names[op.base]} + ({start})")
        return p.assign(op.out, "load", f"tl.load({first} + ({p.lanes(box, 0)} * 0 + {p.lanes(box, 1)}))")
    at, mask = _box(p, op, op.out, op.panel.value)
    return p.assign(op.out, "load", f"tl.load({at}, mask={mask}, other={p.zero(op.out)})" if mask else f"tl.load({at})")


def store(p: Printer, op: Any) -> None:
    """A box's valid elements."""
    at, mask = _box(p, op, op.value, 0)
    p.line(f"tl.store({at}, {p.names[op.value]}{', mask=' + mask if mask else ''})")


def _ids(p: Printer, op: Any, count: int, left: str | None) -> tuple[str, str]:
    """Row numbers of a gather or scatter, rank 1, and the condition under which they are real."""
    lane = p.lanes([count], 0)
    conditions = ([f"({lane} < {left})"] if left is not None else []) + ([f"({lane} < {count})"] if count != padded(count) else [])
    valid = p.fresh_line("valid", " & ".join(conditions)) if conditions else ""
    first = _sum([p.names[op.first]])
    start = p.names[op.ids] if first == "0" else f"{p.names[op.ids]} + {first}"
    mask = f", mask={valid}, other=0" if valid else ""
    return p.fresh_line("ids", f"tl.load({start} + {lane}{mask})"), valid


def _rows(p: Printer, op: Any, value: Any, ids: str, condition: str) -> tuple[str, str]:
    """Addresses and mask of rows by number."""
    columns, column = extents(value)[1], p.names[op.column]
    base = p.names[op.base] if column == "0" else p.fresh_line("first", f"{p.names[op.base]} + {column}")
    rows = p.fresh_line("rows", f"{base} + {ids}.to(tl.int64) * {op.row_stride.value}")
    at = f"{rows}[:, None] + {p.lane(value, 1)}"
    masks = ([f"{condition}[:, None]"] if condition else []) + ([f"({p.lane(value, 1)} < {columns})"] if columns != padded(columns) else [])
    return at, " & ".join(masks)


def gather(p: Printer, op: Any) -> None:
    """Rows by number; a negative number reads row 0."""
    count, bound = extents(op.out)[0], [p.names[v] for v in op.valid]
    ids, valid = _ids(p, op, count, rows_left(p, bound[0], "0", count) if bound else None)
    at, mask = _rows(p, op, op.out, f"tl.maximum({ids}, 0)", valid)
    p.assign(op.out, "gather", f"tl.load({at}, mask={mask}, other={p.zero(op.out)})" if mask else f"tl.load({at})")


def scatter(p: Printer, op: Any) -> None:
    """Rows to numbered rows; of rows with one number the last wins, so that the result does not depend on which thread is first. Where the
    numbers are said to be distinct nobody looks."""
    count = extents(op.value)[0]
    ids, valid = _ids(p, op, count, rows_left(p, p.names[op.valid], "0", count))
    real = p.fresh_line("real", f"{valid} & ({ids} >= 0)" if valid else f"{ids} >= 0")
    if count > 1 and "tile.distinct" not in op.operation.attributes:
        row, other = p.lanes([count, count], 0), p.lanes([count, count], 1)
        marked = p.fresh_line("marked", f"tl.where({real}, {ids}, -1)")
        again = f"({other} > {row}) & ({marked}[None, :] == {marked}[:, None])"
        real = p.fresh_line("last", f"{real} & (tl.max(({again}).to(tl.int32), 1) == 0)")
    at, mask = _rows(p, op, op.value, ids, real)
    p.line(f"tl.store({at}, {p.names[op.value]}, mask={mask})")


def compress_store(p: Printer, op: Any) -> None:
    """Chosen values side by side: positions are running counts."""
    (count,), lane = extents(op.values), p.lane(op.values, 0)
    mask = p.names[op.mask] if count == padded(count) else p.fresh_line("chosen", f"{p.names[op.mask]} & ({lane} < {count})")
    ones = p.fresh_line("ones", f"{mask}.to(tl.int32)")
    at, limit = p.names[op.at], p.names[op.limit]
    room = p.fresh_line("room", f"tl.cast(tl.maximum(tl.minimum({limit} - {at}, {count}), 0), tl.int32)")
    place = p.fresh_line("place", f"tl.cumsum({ones}, 0) - 1")
    p.line(f"tl.store({p.names[op.base]} + {at} + {place}, {p.names[op.values]}, mask={mask} & ({place} < {room}))")
    p.assign(op.count, "count", f"tl.minimum(tl.sum({ones}, 0), {room}).to(tl.int64)")


FORMS: dict[str, Callable[[Printer, Any], None]] = {
    "tile.program_id": program_id,
    "tile.iota": iota,
    "tile.scalar": scalar,
    "tile.load": load,
    "tile.store": store,
    "tile.gather": gather,
    "tile.scatter": scatter,
    "tile.compress_store": compress_store,
}
