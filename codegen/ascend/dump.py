"""The compiler's dump of a kernel, right before vector code becomes intrinsics, read with our bindings; which of its ops are counted.

The dump is printed by an LLVM 19 tool; a few words are changed for ours, and no op is given a meaning here.
"""

import re
from dataclasses import dataclass
from typing import Any

from tapeout.dialects._mlir import ir

COLLAPSE = "tapeout.collapse_shape"
"""What `memref.collapse_shape` is called here: newer versions verify strides that theirs does not infer."""
UNCOUNTED = frozenset({
    "arith.constant", "arith.bitcast", "vector.constant_mask", "vector.create_mask", "vector.shape_cast", "builtin.unrealized_conversion_cast",
})  # fmt: skip
"""Predicates, constants and casts, which cost no vector operation."""


@dataclass(frozen=True)
class Dump:
    """A parsed dump. Its ops live as long as it does."""

    context: ir.Context
    module: ir.Module

    @property
    def functions(self) -> dict[str, Any]:
        """Functions by name, declarations included."""
        found = [op.operation for op in self.module.body.operations if op.operation.name == "func.func"]
        return {ir.StringAttr(op.attributes["sym_name"]).value: op for op in found}


def parsed(text: str) -> Dump:
    """A dump as ops; raises what the bindings raise for anything else."""
    context = ir.Context()
    context.allow_unregistered_dialects = True
    with context, ir.Location.unknown():
        return Dump(context, ir.Module.parse(_readable(text)))


def _readable(text: str) -> str:
    text = re.sub(r"#hivm\.address_space<(\w+)>", r'"\1"', text).replace('"memref.collapse_shape"(', f'"{COLLAPSE}"(')
    text = re.sub(r"\n\}\) \{dlti\.target_system_spec.*\} : \(\) -> \(\)", "\n}) : () -> ()", text)
    return re.sub(r"mask_dim_sizes = \[([-\d, ]*)\]", lambda m: f"mask_dim_sizes = array<i64{': ' if m[1] else ''}{m[1]}>", text)


def is_counted(op: Any) -> bool:
    """Whether an op is one executed vector operation."""
    if op.name in UNCOUNTED:
        return False
    return op.name in ("vector.transfer_write", "vector.reduction") or any(isinstance(v.type, ir.VectorType) for v in op.results)
