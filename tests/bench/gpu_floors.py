"""The first performance floors of GPU kernels (issue 3), as microseconds that a launch may take with the ceilings of the same run.

FP8 products: at 4,096 rows 60 % of the matrix ceiling, at 64 rows and fewer an empty launch and 60 % of the copy ceiling on the bytes it
moves. Products of experts at 64 rows: 50 % of copy on the bytes of the experts hit. Attention at 256 rows: 150 TFLOP/s. Row-wise kernels at
4,096 rows: 70 % of copy. Other kernels and row counts have no floor.
"""

from collections.abc import Mapping, Sequence
from typing import Any

FEW, MANY, ATTENDED = 64, 4096, 256
PRODUCT, EXPERTS, ROW_WISE, STREAMED = 0.6, 0.5, 0.7, 0.6
ATTENTION_FLOPS = 150e12
ELEMENTWISE = ("rope", "rms_norm", "norm_rope_quantize", "quantize", "swiglu", "combine", "expand", "collapse", "collapse_norm", "mean",
               "start", "engram_gate", "embed", "take", "concat", "pool")  # fmt: skip


def floor_us(kernel: Mapping[str, Any], rows: int, tops: Mapping[str, float | None], empty_us: float) -> float | None:
    """Microseconds allowed to a kernel's row of the suite's table at `rows` rows of a step; None where it has no floor."""
    copy, matmul, moved, work = tops["copy"], tops["matmul"], kernel["bytes"], kernel["operations"]
    family, scaled = kernel["family"], str(kernel["variant"]).count("f8E4M3FN*") >= 2
    if family == "linear" and scaled and rows >= MANY and matmul:
        return 1e6 * float(work) / (PRODUCT * matmul)
    if family == "linear" and scaled and rows <= FEW and copy:
        return empty_us + 1e6 * float(moved) / (STREAMED * copy)
    if family == "expert_linear" and rows == FEW and copy:
        return 1e6 * float(moved) / (EXPERTS * copy)
    if family == "attend" and rows == ATTENDED:
        return 1e6 * float(work) / ATTENTION_FLOPS
    if family in ELEMENTWISE and rows >= MANY and copy:
        return 1e6 * float(moved) / (ROW_WISE * copy)
    return None


def reached(kernel: Mapping[str, Any], rows: int, tops: Mapping[str, float | None], empty_us: float) -> float | None:
    """The floor's time over the kernel's, with cold caches: 1 and more is reached."""
    allowed = floor_us(kernel, rows, tops, empty_us)
    return None if allowed is None or kernel["cold_us"] <= 0 else allowed / float(kernel["cold_us"])


def summary(step: Mapping[str, Any]) -> str:
    """How many kernels of a step reach their floors, and which do not."""
    held: Sequence[Mapping[str, Any]] = [k for k in step["kernels"] if k["floor"] is not None]
    missed = sorted((k for k in held if k["floor"] < 1), key=lambda k: float(k["floor"]))
    names = ", ".join(f"{k['kernel']} {100 * k['floor']:.0f} %" for k in missed)
    return f"floors: {len(held) - len(missed)} of {len(held)} kernels that have one reach it" + (f"; not {names}" if missed else "")
