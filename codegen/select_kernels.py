"""select-kernels: every op gets its kernel now, or the build fails and names what would have fitted.

The choice is written on the op: `tapeout.kernel` (family) and `tapeout.schedule` (its row, or one for each row bucket where they differ).
Nothing downstream chooses again. Rows of one op differ in how the work is cut, never in a sum's order or a weight's layout.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

from tapeout.codegen.ascend import schedules as ascend_schedules
from tapeout.codegen.ascend.facts import TARGETS as ASCEND
from tapeout.codegen.cpu import schedules as cpu_schedules
from tapeout.codegen.kernel import Kernel, KernelError, Request, Schedule, named, request_of, select
from tapeout.codegen.nvidia import schedules as nvidia_schedules
from tapeout.codegen.nvidia.facts import CHIPS
from tapeout.dialects._mlir import ir
from tapeout.passes.bucket_rows import BUCKETS, buckets_of
from tapeout.passes.define import Pass, PassError, Promise, functions, operations
from tapeout.passes.extents import extent_of, extents

SCHEDULES: dict[str, Callable[[str, Request], Schedule]] = {
    "cpu": cpu_schedules.schedule,
    **dict.fromkeys(ASCEND, ascend_schedules.schedule),
    **{chip.name: nvidia_schedules.schedule_for(chip) for chip in CHIPS.values()},
}
FOR_BUCKET: dict[str, Callable[[str, Request, Schedule, int], Schedule]] = {
    chip.name: nvidia_schedules.bucket_rows_for(chip) for chip in CHIPS.values()
}
"""Targets whose row depends on the bucket: family, request, the op's row and the bucket's rows to the bucket's row."""


@dataclass(frozen=True)
class Choice:
    """One kernel to be built: equal choices are one kernel."""

    request: Request
    family: str
    schedule: tuple[tuple[str, int], ...]


KERNEL, SCHEDULE = "tapeout.kernel", "tapeout.schedule"
PART, PART_WARPS = "part", "part_warps"
"""The entry of a schedule row that names a launch in front of the kernel's own, by number."""
WORKSPACE = "workspace_bytes"
"""A schedule row that has this key is given the compile's own limit (`--workspace`)."""


@dataclass(frozen=True)
class SelectKernels(Pass):
    """Marks each op with a family and a schedule row of `target`; `tuned` rows (by request text) come before the target's own. An op that counts
    drafts has `drafts_each` rows for every sequence, of which a step has at most `sequences`, or as many as rows where that is 0."""

    name: ClassVar[str] = "select-kernels"
    keeps: ClassVar[Promise] = "bits"
    target: str = "cpu"
    tuned: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = ()
    workspace_bytes: int = 256 << 20
    drafts_each: int = 1
    sequences: int = 0

    def run(self, module: ir.Module) -> None:
        if self.target not in SCHEDULES:
            raise PassError(f"select-kernels{{target}}: found {self.target}, expected one of {', '.join(sorted(SCHEDULES))}")
        rows, buckets = dict(self.tuned), _buckets(module)
        known: dict[tuple[Request, bool], tuple[str, ir.Attribute]] = {}
        for op, drafts in self._counted(module):
            request = request_of(op)
            if (request, drafts) not in known:
                most = [min(bucket, self.sequences or bucket) * self.drafts_each for bucket in buckets] if drafts else buckets
                known[request, drafts] = self._choose(request, rows, most, op)
            op.attributes[KERNEL], op.attributes[SCHEDULE] = ir.StringAttr.get(known[request, drafts][0]), known[request, drafts][1]

    def _counted(self, module: ir.Module) -> Iterator[tuple[ir.Operation, bool]]:
        """Every op that kernels execute, and whether it counts drafts that are more than rows."""
        if self.drafts_each == 1:
            yield from ((op, False) for op in launches(module))
            return
        for function in functions(module):
            found = extents(function)
            yield from ((op, extent_of(op, found) == "drafts") for op in _launches_of(function))

    def _choose(self, request: Request, rows: dict[str, Any], buckets: list[int], op: ir.Operation) -> tuple[str, ir.Attribute]:
        try:
            family = select(request)
        except KernelError as error:
            raise PassError(f"{op.name} at {op.location}: {error}") from None
        row, for_bucket = SCHEDULES[self.target](family.name, request), FOR_BUCKET.get(self.target, _one_for_all)
        if str(request) in rows:
            row, for_bucket = _tuned(dict(rows[str(request)]), row, op), _one_for_all
        if WORKSPACE in row:
            row = {**row, WORKSPACE: self.workspace_bytes}
        found = [dict(for_bucket(family.name, request, row, bucket)) for bucket in buckets] or [dict(row)]
        _require_one_meaning(family.name, request, found, op)
        written = [_attribute(one) for one in found]
        return family.name, written[0] if len(set(written)) == 1 else ir.ArrayAttr.get(written)


def _one_for_all(family: str, request: Request, row: Schedule, rows: int) -> Schedule:
    """The row of a bucket where rows do not depend on buckets."""
    return row


def _buckets(module: ir.Module) -> list[int]:
    """The module's buckets; none before bucket-rows has run."""
    return buckets_of(module) if any(BUCKETS in f.operation.attributes for f in functions(module)) else []


def _require_one_meaning(family: str, request: Request, rows: list[dict[str, int]], op: ir.Operation) -> None:
    """Every row builds, and all take sums in one order and weights in one layout."""
    made = []
    for row in rows:
        try:
            made.append(build(Choice(request, family, tuple(sorted(row.items())))))
        except KernelError as error:
            raise PassError(f"{op.name} at {op.location}: kernel {family} with {row}: {error}") from None
    for row, kernel in zip(rows, made, strict=True):
        if (kernel.order, kernel.layouts) != (made[0].order, made[0].layouts):
            raise PassError(f"{op.name} at {op.location}: kernel {family} with {rows[0]} has sums by {made[0].order} and weights as "
                            f"{dict(made[0].layouts)}, with {row} {kernel.order} and {dict(kernel.layouts)}; expected one for all buckets")


def _attribute(row: Schedule) -> ir.Attribute:
    i64 = ir.IntegerType.get_signless(64)
    return ir.DictAttr.get({k: ir.IntegerAttr.get(i64, v) for k, v in sorted(row.items())})


def _tuned(row: dict[str, int], own: Schedule, op: ir.Operation) -> Schedule:
    """A tuned row, which must set just what the target's own row sets."""
    if set(row) != set(own) or min(row.values(), default=1) < 0:
        raise PassError(
            f"{op.name} at {op.location}: the tuned row is {row}; expected {', '.join(sorted(own)) or 'no block sizes'}, each at least 0"
        )
    return row


def launches(module: ir.Module) -> Iterator[ir.Operation]:
    """The ops that kernels execute, in every function."""
    for function in functions(module):
        yield from _launches_of(function)


def _launches_of(function: Any) -> Iterator[ir.Operation]:
    return (op for op in operations(function) if op.name not in ("func.call", "func.return"))


def schedule_of(op: ir.Operation, bucket: int = -1) -> dict[str, int]:
    """The schedule row that select-kernels wrote for a bucket, by its place in the list; the last is that of the largest step."""
    written = op.attributes[SCHEDULE].maybe_downcast()
    # An index below 0 would crash the bindings.
    row = ir.DictAttr(written[bucket % len(written)]) if isinstance(written, ir.ArrayAttr) else ir.DictAttr(written)
    return {a.name: ir.IntegerAttr(a.attr).value for a in row}


def choice_of(op: ir.Operation, bucket: int = -1) -> Choice:
    """What select-kernels wrote on an op for a bucket, as data."""
    return Choice(request_of(op), ir.StringAttr(op.attributes[KERNEL]).value, tuple(sorted(schedule_of(op, bucket).items())))


def choices_of(op: ir.Operation) -> list[Choice]:
    """The distinct choices of an op, that of the largest bucket first."""
    written = op.attributes[SCHEDULE].maybe_downcast()
    count = len(written) if isinstance(written, ir.ArrayAttr) else 1
    return list(dict.fromkeys(choice_of(op, bucket) for bucket in reversed(range(count))))


def kernel_of(op: ir.Operation, bucket: int = -1) -> Kernel:
    """The kernel that select-kernels chose for an op in a bucket."""
    return build(choice_of(op, bucket))


def in_launches(choice: Choice) -> tuple[Choice, ...]:
    """One choice for each launch that a choice makes, in order; the last is the choice itself. `part_warps`: warps of the others."""
    row = dict(choice.schedule)
    if PART_WARPS in row:
        row["warps"] = row[PART_WARPS]
    parts = (row | {PART: number} for number in range(len(build(choice).before)))
    return (*(replace(choice, schedule=tuple(sorted(row.items()))) for row in parts), choice)


@lru_cache(maxsize=4096)
def build(choice: Choice) -> Kernel:
    """The kernel behind a choice; raises `KernelError` where the schedule does not fit the request."""
    row = dict(choice.schedule)
    part = row.pop(PART, None)
    kernel = named(choice.request.op, choice.family).build(choice.request, row)
    return kernel if part is None else replace(kernel, body=kernel.before[part].body, grid=kernel.before[part].grid, before=())
