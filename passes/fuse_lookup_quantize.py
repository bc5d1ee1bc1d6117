"""fuse-lookup-quantize: rows of an Engram table are quantized as they arrive: decoded rows that nothing else reads are never in memory."""

from dataclasses import dataclass
from typing import ClassVar

from tapeout.dialects._mlir import ir
from tapeout.passes.define import Pass, Promise
from tapeout.passes.fuse import Chain, consumed, fuse_chains

CHAINS = [Chain("lookup_quantize", ("engram.lookup", "nn.quantize"), consumed)]


@dataclass(frozen=True)
class FuseLookupQuantize(Pass):
    """Rows of an Engram table are quantized as they arrive."""

    name: ClassVar[str] = "fuse-lookup-quantize"
    keeps: ClassVar[Promise] = "bits"

    def run(self, module: ir.Module) -> None:
        fuse_chains(module, CHAINS)
