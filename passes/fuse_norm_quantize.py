"""fuse-norm-quantize: A norm and the quantization of its result share one pass over the row."""

from dataclasses import dataclass
from typing import ClassVar

from tapeout.dialects._mlir import ir
from tapeout.passes.define import Pass, Promise
from tapeout.passes.fuse import Chain, fuse_chains

CHAINS = [Chain("norm_quantize", ("nn.rms_norm", "nn.quantize"))]


@dataclass(frozen=True)
class FuseNormQuantize(Pass):
    """A norm and the quantization of its result share one pass over the row."""

    name: ClassVar[str] = "fuse-norm-quantize"
    keeps: ClassVar[Promise] = "bits"

    def run(self, module: ir.Module) -> None:
        fuse_chains(module, CHAINS)
