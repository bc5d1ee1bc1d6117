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
from tapeout.codegen.tuned_rows import PART, PART_WARPS, WORKSPACE, Rows, TunedRow, tuned, unused
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


@dataclass(frozen=True)
class SelectKernels(Pass):
    """Marks each op with a family and a schedule row of `target`; `tuned` rows come before the target's own. An op that counts drafts has
    `drafts_each` rows for every sequence, of which a step has at most `sequences`, or as many as rows where that is 0."""

    name: ClassVar[str] = "select-kernels"
    keeps: ClassVar[Promise] = "bits"
    target: str = "cpu"
    tuned: tuple[TunedRow, ...] = ()
    workspace_bytes: int = 256 << 20
    drafts_each: int = 1
    sequences: int = 0

    def run(self, module: ir.Module) -> None:
        if self.target not in SCHEDULES:
            raise PassError(f"select-kernels{{target}}: found {self.target}, expected one of {', '.join(sorted(SCHEDULES))}")
        known: dict[tuple[Request, tuple[int, ...]], tuple[str, ir.Attribute]] = {}
        for op, most in self._counted(module):
            request = request_of(op)
            if (request, most) not in known:
                known[request, most] = self._choose(request, most, op)
            op.attributes[KERNEL], op.attributes[SCHEDULE] = ir.StringAttr.get(known[request, most][0]), known[request, most][1]
        lost = unused(self.tuned, {(str(request), count) for request, most in known for count in most})
        if lost is not None:
            raise PassError(lost)

    def rows_of(self, module: ir.Module) -> dict[str, Rows]:
        """What this pass wrote, by request text: a row for each number of rows that launches of the request may have at most."""
        found: dict[str, Rows] = {}
        for op, most in self._counted(module):
            request = str(request_of(op))
            found[request] = {**found.get(request, {}), **{count: schedule_of(op, i) for i, count in enumerate(most)}}
        return found

    def _counted(self, module: ir.Module) -> Iterator[tuple[ir.Operation, tuple[int, ...]]]:
        """Every op that kernels execute, and how many rows it may have at most in each bucket; 0 before there are buckets."""
        buckets = _buckets(module)
        drafts = tuple(min(bucket, self.sequences or bucket) * self.drafts_each for bucket in buckets)
        if self.drafts_each == 1:
            yield from ((op, tuple(buckets) or (0,)) for op in launches(module))
            return
        for function in functions(module):
            found = extents(function)
            yield from ((op, tuple(drafts if extent_of(op, found) == "drafts" else buckets) or (0,)) for op in _launches_of(function))

    def _choose(self, request: Request, most: tuple[int, ...], op: ir.Operation) -> tuple[str, ir.Attribute]:
        try:
            family = select(request)
            rows = tuned(self.tuned, str(request), self._own(family.name, request, most))
        except KernelError as error:
            raise PassError(f"{op.name} at {op.location}: {error}") from None
        found = [dict(self._limited(rows[count])) for count in most]
        _require_one_meaning(family.name, request, found, most, op)
        written = [_attribute(one) for one in found]
        return family.name, written[0] if len(set(written)) == 1 else ir.ArrayAttr.get(written)

    def _own(self, family: str, request: Request, most: tuple[int, ...]) -> Rows:
        """The target's rows for launches of at most so many rows."""
        row, for_bucket = self._limited(SCHEDULES[self.target](family, request)), FOR_BUCKET.get(self.target, _one_for_all)
        return {count: for_bucket(family, request, row, count) if count else row for count in most}

    def _limited(self, row: Schedule) -> Schedule:
        """The row with the compile's own limit of the workspace."""
        return {**row, WORKSPACE: self.workspace_bytes} if WORKSPACE in row else row


def _one_for_all(family: str, request: Request, row: Schedule, rows: int) -> Schedule:
    """The row of a bucket where rows do not depend on buckets."""
    return row


def _buckets(module: ir.Module) -> list[int]:
    """The module's buckets; none before bucket-rows has run."""
    return buckets_of(module) if any(BUCKETS in f.operation.attributes for f in functions(module)) else []


def _require_one_meaning(family: str, request: Request, rows: list[dict[str, int]], most: tuple[int, ...], op: ir.Operation) -> None:
    """Every row builds, and all take sums in one order and weights in one layout."""
    made = []
    for row in rows:
        try:
            made.append(build(Choice(request, family, tuple(sorted(row.items())))))
        except KernelError as error:
            raise PassError(f"{op.name} at {op.location}: kernel {family} with {row}: {error}") from None
    for count, kernel in zip(most, made, strict=True):
        for what, first, other in (("sums by", made[0].order, kernel.order), ("weights as", dict(made[0].layouts), dict(kernel.layouts))):
            if first != other:
                raise PassError(f"{op.name} at {op.location}: kernel {family} has {what} {first} in launches of at most {most[0]} rows, "
                                f"and {what} {other} in those of {count}; expected one for all, as a row's bits do not depend on the others")


def _attribute(row: Schedule) -> ir.Attribute:
    i64 = ir.IntegerType.get_signless(64)
    return ir.DictAttr.get({k: ir.IntegerAttr.get(i64, v) for k, v in sorted(row.items())})


def launches(module: ir.Module) -> Iterator[ir.Operation]:
    """The ops that kernels execute, in every function."""
    for function in functions(module):
        yield from _launches_of(function)


def _launches_of(function: Any) -> Iterator[ir.Operation]:
    return (op for op in operations(function) if op.name not in ("func.call", "func.return"))


def schedule_of(op: ir.Operation, bucket: int = -1) -> dict[str, int]:
    """The schedule row that select-kernels wrote for a bucket, by its place in the list; the last is that of the largest step."""
    rows = _rows_on(op)
    try:
        # An index below 0 would crash the bindings.
        return {a.name: ir.IntegerAttr(a.attr).value for a in ir.DictAttr(rows[bucket % len(rows)])}
    except ValueError:
        raise PassError(f"{op.name} at {op.location} has {SCHEDULE} {op.attributes[SCHEDULE]}, expected whole numbers by name, "
                        "or a list of such rows") from None


def _rows_on(op: ir.Operation) -> Any:
    """The rows on an op, as attributes: one for each bucket where there are several."""
    written = op.attributes[SCHEDULE].maybe_downcast() if SCHEDULE in op.attributes else None
    rows = written if isinstance(written, ir.ArrayAttr) else [written]
    if written is None or not len(rows):
        raise PassError(f"{op.name} at {op.location} has {'an empty' if written is not None else 'no'} {SCHEDULE}; "
                        "expected pass select-kernels in front of this one")
    return rows


def choice_of(op: ir.Operation, bucket: int = -1) -> Choice:
    """What select-kernels wrote on an op for a bucket, as data; raises `PassError` where text says something else."""
    family = op.attributes[KERNEL].maybe_downcast() if KERNEL in op.attributes else None
    if not isinstance(family, ir.StringAttr):
        raise PassError(f"{op.name} at {op.location} has {KERNEL} {family}, expected the name of a family: run select-kernels in front of this")
    return Choice(request_of(op), family.value, tuple(sorted(schedule_of(op, bucket).items())))


def choices_of(op: ir.Operation) -> list[Choice]:
    """The distinct choices of an op, that of the largest bucket first."""
    return list(dict.fromkeys(choice_of(op, bucket) for bucket in reversed(range(len(_rows_on(op))))))


def kernel_of(op: ir.Operation, bucket: int = -1) -> Kernel:
    """The kernel that select-kernels chose for an op in a bucket; raises `PassError` where text says what builds none."""
    try:
        return build(choice_of(op, bucket))
    except KernelError as error:
        raise PassError(f"{op.name} at {op.location}: {error}") from None


def in_launches(choice: Choice) -> tuple[Choice, ...]:
    """One choice for each launch that a choice makes, in order; the last is the choice itself. `part_warps`: warps of the others, `part1_warps`
    of one of them, by its number."""
    row = dict(choice.schedule)
    parts = []
    for number in range(len(build(choice).before)):
        warps = row.get(f"{PART}{number}_warps", row.get(PART_WARPS, row.get("warps")))
        own = row | {PART: number} | ({} if warps is None else {"warps": warps})
        parts.append(replace(choice, schedule=tuple(sorted(own.items()))))
    return (*parts, choice)


@lru_cache(maxsize=4096)
def build(choice: Choice) -> Kernel:
    """The kernel behind a choice; raises `KernelError` where the schedule does not fit the request."""
    row = dict(choice.schedule)
    part = row.pop(PART, None)
    family = named(choice.request.op, choice.family)
    try:
        kernel = family.build(choice.request, row)
    except KeyError as error:
        if error.args[0] in row:
            raise
        raise KernelError(f"the row {row} of kernel {choice.family} has no entry {error.args[0]}") from None
    return kernel if part is None else replace(kernel, body=kernel.before[part].body, grid=kernel.before[part].grid, before=())
