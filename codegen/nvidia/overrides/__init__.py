"""Kernels written for one chip where the emitted form is far from it; chosen by the schedule row (`override`), like everything else.

An override says which requests and which launches of a kernel it covers and replaces the source, not the tile kernel: grid, buffers, workspaces,
order and meaning stay that kernel's. Gluon has no interpreter, so each was compared with its tile kernels on a GPU, and names some of them by
digests: where the definition has changed since, the build stops.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Protocol

from tapeout.codegen.kernel import EVERY_SCALE, Buffer, KernelError, Request, Schedule
from tapeout.codegen.nvidia.emit import EmitError, Source
from tapeout.codegen.nvidia.facts import Chip
from tapeout.codegen.nvidia.overrides import (
    attend_sm90,
    expert_linear_sm90,
    linear_few_sm90,
    linear_many_sm90,
    linear_once_sm90,
    linear_some_sm90,
    linear_wide_sm90,
)

if TYPE_CHECKING:
    from tapeout.codegen.lower_to_tile import TileKernel
    from tapeout.codegen.select_kernels import Choice

OVERRIDE = "override"


class Override(Protocol):
    """What a module of this folder has."""

    @property
    def LAUNCHES(self) -> tuple[int | None, ...]:
        """The launches it stands for: None the last one (or the only one), numbers those before it. Others are emitted."""

    @property
    def CASES(self) -> tuple[tuple[Request, Schedule], ...]:
        """Requests and rows whose tile kernels stand for the meaning."""

    @property
    def MEANINGS(self) -> tuple[str, ...]:
        """Digests of those tile kernels as they were when the source was checked on a GPU."""

    @property
    def LEAST_SCALE(self) -> int:
        """The smallest E8M0 byte of a weight's scales, but for byte 0 over a group of zeros, that it multiplies by exactly; loaders refuse smaller
        ones."""

    @property
    def MOST_SCALE(self) -> int:
        """The largest E8M0 byte of a weight's scales that it multiplies by exactly; loaders refuse larger ones."""

    def why_not(self, request: Request, chip: Chip) -> str | None:
        """Why a request is left to the plain form; None where it is covered."""

    def source(self, symbol: str, request: Request, buffers: Sequence[Buffer], row: Schedule) -> Source | None:
        """The source under a kernel's symbol; `buffers` in launch order. None where it leaves the row's launch alone after all."""


BY_FAMILY: Mapping[str, tuple[Override, ...]] = {
    "attend": (attend_sm90,), "linear": (linear_few_sm90, linear_some_sm90, linear_many_sm90, linear_wide_sm90,
                                 linear_once_sm90),
    "expert_linear": (expert_linear_sm90,),
}  # fmt: skip
"""The overrides of a family. A row's `override` is the place of one, from 1 on; 0 is the plain form."""


def source_for(kernel: "TileKernel", chip: Chip) -> Source | None:
    """The source that stands in for the emitted one, None where the row asks for none or the override leaves this launch alone.

    Raises `EmitError` where the row asks for an override that does not cover the request, or whose tile kernels are not those it was checked
    against.
    """
    from tapeout.codegen.tuned_rows import PART

    row = dict(kernel.choice.schedule)
    if not row.get(OVERRIDE):
        return None
    own = _at(kernel.choice.family, row[OVERRIDE])
    if row.get(PART) not in own.LAUNCHES:
        return None
    reason = own.why_not(kernel.choice.request, chip)
    if reason is not None:
        raise EmitError(f"kernel {kernel.symbol}: its schedule row asks for the override of {chip.name}: {reason}; set override to 0")
    for found, checked in zip(meanings_of(kernel.choice.family, own), own.MEANINGS, strict=True):
        if found != checked:
            raise EmitError(
                f"kernel {kernel.symbol}: the override was checked against tile kernel {checked}, the definition now gives {found}; "
                "compare it on a GPU again (python -m tests.bench.gpu), then set MEANINGS"
            )
    try:
        return own.source(kernel.symbol, kernel.choice.request, kernel.buffers, row)
    except (ArithmeticError, LookupError, ValueError) as error:  # what its arithmetic says of entries that are not its own row's
        raise EmitError(f"kernel {kernel.symbol}: the override of {chip.name} has no form for {row} ({error}); set override to 0") from None


def scale_limits(choice: "Choice") -> tuple[int, int]:
    """The smallest and the largest E8M0 byte of its weight's scales that a choice's kernel multiplies by exactly."""
    place = dict(choice.schedule).get(OVERRIDE)
    own = _at(choice.family, place) if place else None
    return EVERY_SCALE if own is None else (own.LEAST_SCALE, own.MOST_SCALE)


def _at(family: str, place: int) -> Override:
    """The override that a row names; raises `KernelError` where the family has none there."""
    known = BY_FAMILY.get(family, ())
    if place > len(known):
        raise KernelError(f"schedule entry {OVERRIDE} of {family} is {place}, expected 0 to {len(known)}")
    return known[place - 1]


def meanings_of(family: str, own: Override) -> tuple[str, ...]:
    """Digests of the tile kernels of an override's cases, their symbols left out."""
    return tuple(_digest(family, request, tuple(sorted(row.items()))) for request, row in own.CASES)


@cache
def _digest(family: str, request: Request, row: tuple[tuple[str, int], ...]) -> str:
    from tapeout.codegen.lower_to_tile import lower
    from tapeout.codegen.select_kernels import Choice

    made = lower(Choice(request, family, row))
    return hashlib.sha256(made.text.replace(made.symbol, family).encode()).hexdigest()[:16]
