"""fuse-attention-output: The inverse rotation of the attention output happens where the output is made."""

from dataclasses import dataclass
from typing import ClassVar

from tapeout.dialects._mlir import ir
from tapeout.passes.define import Pass, Promise
from tapeout.passes.fuse import Chain, consumed, fuse_chains

CHAINS = [Chain("attend_rotate", ("mla.attend", "nn.rope"), consumed)]


@dataclass(frozen=True)
class FuseAttentionOutput(Pass):
    """The inverse rotation of the attention output happens where the output is made."""

    name: ClassVar[str] = "fuse-attention-output"
    keeps: ClassVar[Promise] = "bits"

    def run(self, module: ir.Module) -> None:
        fuse_chains(module, CHAINS)
