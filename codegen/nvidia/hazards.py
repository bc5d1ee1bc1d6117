"""Where a kernel needs a barrier: threads of one instance share its memory, and a tile is spread over all of them.

The contract of tile kernels is program order: a load sees what an earlier store of the same instance wrote. On a GPU another thread may have
written it, so a barrier stands between an access and every earlier one that it conflicts with. Buffers that are only read, or only written
by plain stores (whose boxes are disjoint), need none.
"""

from collections.abc import Iterator
from typing import Any

READ, WRITE = "read", "write"
Access = tuple[Any, str]
"""(buffer, READ or WRITE)."""


def accesses(op: Any) -> list[Access]:
    """What one op itself does to buffers."""
    match op.name:
        case "tile.load" | "tile.scalar":
            return [(op.base, READ)]
        case "tile.gather":
            return [(op.base, READ), (op.ids, READ)]
        case "tile.store" | "tile.compress_store":
            return [(op.base, WRITE)]
        case "tile.scatter":
            return [(op.ids, READ), (op.base, WRITE)]
    return []


def inside(op: Any) -> Iterator[Access]:
    """What an op and everything nested in it do."""
    yield from accesses(op)
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from inside(inner)


def shared_buffers(function: Any) -> set[Any]:
    """Buffers on which accesses of one instance can conflict: read and written, or written by row numbers, which may repeat."""
    found = list(inside(function.operation))
    scattered = {op.base for op in nested(function.operation) if op.name == "tile.scatter"}
    return ({b for b, kind in found if kind == READ} & {b for b, kind in found if kind == WRITE}) | scattered


def nested(op: Any) -> Iterator[Any]:
    """Every op inside an op, outer before inner."""
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner
                yield from nested(inner)


class Order:
    """The accesses since the last barrier; tells when the next one is due."""

    def __init__(self, shared: set[Any]) -> None:
        self._shared = shared
        self.pending: set[Access] = set()

    def needs_barrier(self, new: list[Access]) -> bool:
        """Whether one of `new` conflicts with a pending access; if so the pending ones are forgotten: the caller prints the barrier."""
        due = any((b, WRITE) in self.pending or (kind == WRITE and (b, READ) in self.pending) for b, kind in new)
        if due:
            self.pending = set()
        return due

    def add(self, new: list[Access]) -> None:
        """Marks accesses as done."""
        self.pending |= {(b, kind) for b, kind in new if b in self._shared}
