"""fuse-swiglu-quantize: SwiGLU and the quantization in front of the down projection share one pass over the row."""

from dataclasses import dataclass
from typing import ClassVar

from tapeout.dialects._mlir import ir
from tapeout.passes.define import Pass, Promise
from tapeout.passes.fuse import Chain, consumed, fuse_chains

CHAINS = [Chain("swiglu_quantize", ("moe.swiglu", "nn.quantize"), consumed)]


@dataclass(frozen=True)
class FuseSwigluQuantize(Pass):
    """SwiGLU and the quantization in front of the down projection share one pass over the row."""

    name: ClassVar[str] = "fuse-swiglu-quantize"
    keeps: ClassVar[Promise] = "bits"

    def run(self, module: ir.Module) -> None:
        fuse_chains(module, CHAINS)
