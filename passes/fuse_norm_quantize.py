"""fuse-norm-quantize: A norm and the quantization of its result share one pass over the row.

The columns that the norm takes of a wider row join them, if nothing else reads them; the normed rows may be read elsewhere.
"""

from dataclasses import dataclass
from typing import ClassVar

from tapeout.dialects._mlir import ir
from tapeout.passes.define import Pass, Promise
from tapeout.passes.fuse import Chain, consumed, fuse_chains

CHAINS = [
    Chain("columns_norm_quantize", ("nn.columns", "nn.rms_norm", "nn.quantize"), lambda found: consumed(found[:2])),
    Chain("norm_quantize", ("nn.rms_norm", "nn.quantize")),
]


@dataclass(frozen=True)
class FuseNormQuantize(Pass):
    """A norm and the quantization of its result share one pass over the row."""

    name: ClassVar[str] = "fuse-norm-quantize"
    keeps: ClassVar[Promise] = "bits"

    def run(self, module: ir.Module) -> None:
        fuse_chains(module, CHAINS)
