"""fuse-collapse-norm: Collapsing the streams, the sublayer's norm and its quantization share one pass over the streams."""

from dataclasses import dataclass
from typing import ClassVar

from tapeout.dialects._mlir import ir
from tapeout.passes.define import Pass, Promise
from tapeout.passes.fuse import Chain, consumed, fuse_chains

CHAINS = [
    Chain("collapse_norm_quantize", ("mhc.collapse", "fused:norm_quantize"), consumed),
    Chain("collapse_norm", ("mhc.collapse", "nn.rms_norm"), consumed),
]


@dataclass(frozen=True)
class FuseCollapseNorm(Pass):
    """Collapsing the streams, the sublayer's norm and its quantization share one pass over the streams."""

    name: ClassVar[str] = "fuse-collapse-norm"
    keeps: ClassVar[Promise] = "bits"

    def run(self, module: ir.Module) -> None:
        fuse_chains(module, CHAINS)
