"""fuse-draft-draw: A drafted token is drawn where its logits are made: corrected logits that nothing else reads are never in memory twice."""

from dataclasses import dataclass
from typing import ClassVar

from tapeout.dialects._mlir import ir
from tapeout.dialects.format import FP32
from tapeout.dialects.types import Tensor, from_ir
from tapeout.passes.define import Pass, Promise
from tapeout.passes.fuse import Chain, consumed, fuse_chains


def _is_f32(found: list[ir.Operation]) -> bool:
    """Whether the logits between the two are FP32: a kernel holds its sum in that number."""
    logits = from_ir(found[0].results[0].type)
    return isinstance(logits, Tensor) and logits.number == FP32


CHAINS = [Chain("correct_draw", ("dspark.correct", "sample.draw"), lambda found: consumed(found) and _is_f32(found))]


@dataclass(frozen=True)
class FuseDraftDraw(Pass):
    """A drafted token is drawn where its logits are made."""

    name: ClassVar[str] = "fuse-draft-draw"
    keeps: ClassVar[Promise] = "bits"

    def run(self, module: ir.Module) -> None:
        fuse_chains(module, CHAINS)
