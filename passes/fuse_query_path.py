"""fuse-query-path: rotation joins what stands around it.

Norm, rotate, quantize of window KV and index keys, with the columns that the norm takes; rotate, quantize of entries and index queries.
"""

from dataclasses import dataclass
from typing import ClassVar

from tapeout.dialects._mlir import ir
from tapeout.passes.define import Pass, Promise
from tapeout.passes.fuse import Chain, consumed, fuse_chains

CHAINS = [
    Chain("columns_norm_rope_quantize", ("nn.columns", "nn.rms_norm", "nn.rope", "nn.quantize"), consumed),
    Chain("norm_rope_quantize", ("nn.rms_norm", "nn.rope", "nn.quantize"), consumed),
    Chain("rope_quantize", ("nn.rope", "nn.quantize"), consumed),
]


@dataclass(frozen=True)
class FuseQueryPath(Pass):
    """Norm, rotate, quantize become one group; rotate, quantize another."""

    name: ClassVar[str] = "fuse-query-path"
    keeps: ClassVar[Promise] = "bits"

    def run(self, module: ir.Module) -> None:
        fuse_chains(module, CHAINS)
