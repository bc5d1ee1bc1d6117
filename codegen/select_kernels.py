"""select-kernels: every op gets its kernel now, or the build fails and names what would have fitted.

The choice is written on the op: `tapeout.kernel` (family) and `tapeout.schedule` (its row). Nothing downstream chooses again.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from tapeout.codegen.ascend import schedules as ascend_schedules
from tapeout.codegen.cpu import schedules as cpu_schedules
from tapeout.codegen.kernel import Kernel, KernelError, Request, Schedule, named, request_of, select
from tapeout.codegen.nvidia import schedules as nvidia_schedules
from tapeout.codegen.nvidia.facts import CHIPS
from tapeout.dialects._mlir import ir
from tapeout.passes.define import Pass, PassError, Promise, functions, operations

SCHEDULES: dict[str, Callable[[str, Request], Schedule]] = {
    "cpu": cpu_schedules.schedule,
    "ascend950": ascend_schedules.schedule,
    **{chip.name: nvidia_schedules.schedule_for(chip) for chip in CHIPS.values()},
}


@dataclass(frozen=True)
class Choice:
    """One kernel to be built: equal choices are one kernel."""

    request: Request
    family: str
    schedule: tuple[tuple[str, int], ...]


KERNEL, SCHEDULE = "tapeout.kernel", "tapeout.schedule"
WORKSPACE = "workspace_bytes"
"""A schedule row that has this key is given the compile's own limit (`--workspace`)."""


@dataclass(frozen=True)
class SelectKernels(Pass):
    """Marks each op with a family and a schedule row of `target`; `tuned` rows (by request text) come before the target's own."""

    name: ClassVar[str] = "select-kernels"
    keeps: ClassVar[Promise] = "bits"
    target: str = "cpu"
    tuned: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = ()
    workspace_bytes: int = 256 << 20

    def run(self, module: ir.Module) -> None:
        if self.target not in SCHEDULES:
            raise PassError(f"select-kernels{{target}}: found {self.target}, expected one of {', '.join(sorted(SCHEDULES))}")
        rows = dict(self.tuned)
        known: dict[Request, tuple[str, ir.Attribute]] = {}
        for op in launches(module):
            request = request_of(op)
            if request not in known:
                known[request] = self._choose(request, rows, op)
            op.attributes[KERNEL], op.attributes[SCHEDULE] = ir.StringAttr.get(known[request][0]), known[request][1]

    def _choose(self, request: Request, rows: dict[str, Any], op: ir.Operation) -> tuple[str, ir.Attribute]:
        try:
            family = select(request)
        except KernelError as error:
            raise PassError(f"{op.name} at {op.location}: {error}") from None
        row = SCHEDULES[self.target](family.name, request)
        if str(request) in rows:
            row = _tuned(dict(rows[str(request)]), row, op)
        if WORKSPACE in row:
            row = {**row, WORKSPACE: self.workspace_bytes}
        choice = Choice(request, family.name, tuple(sorted(row.items())))
        try:
            build(choice)
        except KernelError as error:
            raise PassError(f"{op.name} at {op.location}: kernel {family.name} with {dict(choice.schedule)}: {error}") from None
        i64 = ir.IntegerType.get_signless(64)
        return family.name, ir.DictAttr.get({k: ir.IntegerAttr.get(i64, v) for k, v in sorted(row.items())})


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
        yield from (op for op in operations(function) if op.name not in ("func.call", "func.return"))


def schedule_of(op: ir.Operation) -> dict[str, int]:
    """The schedule row that select-kernels wrote."""
    return {a.name: ir.IntegerAttr(a.attr).value for a in ir.DictAttr(op.attributes[SCHEDULE])}


def choice_of(op: ir.Operation) -> Choice:
    """What select-kernels wrote on an op, as data."""
    return Choice(request_of(op), ir.StringAttr(op.attributes[KERNEL]).value, tuple(sorted(schedule_of(op).items())))


def kernel_of(op: ir.Operation) -> Kernel:
    """The kernel that select-kernels chose for an op."""
    return build(choice_of(op))


@lru_cache(maxsize=4096)
def build(choice: Choice) -> Kernel:
    """The kernel behind a choice; raises `KernelError` where the schedule does not fit the request."""
    return named(choice.request.op, choice.family).build(choice.request, dict(choice.schedule))
