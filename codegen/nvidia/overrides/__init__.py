"""Kernels written for one chip where the emitted form is far from it; chosen by the schedule row (`override`), like everything else.

An override says which requests it covers and replaces the source, not the tile kernel: grid, buffers, workspaces, order and meaning stay that
kernel's. Gluon has no interpreter, so each was compared with its tile kernel on a GPU, and names that kernel by a digest: where the definition
has changed since, the build stops.
"""

import hashlib
from typing import TYPE_CHECKING

from tapeout.codegen.nvidia.emit import EmitError, Source
from tapeout.codegen.nvidia.facts import Chip
from tapeout.codegen.nvidia.overrides import attend_sm90

if TYPE_CHECKING:
    from tapeout.codegen.lower_to_tile import TileKernel

OVERRIDE = "override"
BY_FAMILY = {"attend": attend_sm90}


def source_for(kernel: "TileKernel", chip: Chip) -> Source | None:
    """The source that stands in for the emitted one, None where the row asks for none.

    Raises `EmitError` where the row asks for an override that does not cover the request, or whose tile kernel is not the one it was checked
    against.
    """
    if not dict(kernel.choice.schedule).get(OVERRIDE):
        return None
    own = BY_FAMILY[kernel.choice.family]
    reason = own.why_not(kernel.choice.request, chip)
    if reason is not None:
        raise EmitError(f"kernel {kernel.symbol}: its schedule row asks for the override of {chip.name}: {reason}; set override to 0")
    found = meaning_of(kernel.choice.family)
    if found != own.MEANING:
        raise EmitError(
            f"kernel {kernel.symbol}: the override was checked against tile kernel {own.MEANING}, the definition now gives {found}; "
            "compare it on a GPU again (tests/bench/gpu.py attend), then set MEANING"
        )
    return own.source(kernel.symbol, kernel.choice.request, kernel.buffers)


def meaning_of(family: str) -> str:
    """Digest of the tile kernel of an override's case, its symbol left out."""
    from tapeout.codegen.lower_to_tile import lower
    from tapeout.codegen.select_kernels import Choice

    own = BY_FAMILY[family]
    made = lower(Choice(own.CASE, family, tuple(sorted(own.ROW.items()))))
    return hashlib.sha256(made.text.replace(made.symbol, family).encode()).hexdigest()[:16]
