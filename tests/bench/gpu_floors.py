"""The first performance floors of GPU kernels (issue 3), as microseconds that a launch may take with the ceilings of the same run.

FP8 products: at 4,096 rows 60 % of the matrix ceiling, at 64 rows and fewer an empty launch and 60 % of the copy ceiling on the bytes it
moves. Products of experts at 64 rows: 50 % of copy on the bytes of the experts hit. Attention with full lists at 256 rows: 150 TFLOP/s.
Row-wise kernels at 4,096 rows: 70 % of copy. Rows are those of the launch; other kernels and row counts have no floor.
"""

from collections.abc import Mapping, Sequence
from typing import Any

FEW, MANY, ATTENDED = 64, 4096, 256
PRODUCT, EXPERTS, ROW_WISE, STREAMED = 0.6, 0.5, 0.7, 0.6
ATTENTION_FLOPS = 150e12
ELEMENTWISE = ("rope", "rms_norm", "norm_rope_quantize", "quantize", "swiglu", "combine", "expand", "collapse", "collapse_norm", "mean",
               "start", "engram_gate", "embed", "take", "concat", "pool")  # fmt: skip


def floor_us(kernel: Mapping[str, Any], rows: int, tops: Mapping[str, float | None], empty_us: float) -> float | None:
    """Microseconds allowed to a launch of `rows` rows; None where it has no floor."""
    copy, matmul, moved, work = tops["copy"], tops["matmul"], kernel["bytes"], kernel["operations"]
    family, scaled = kernel["family"], str(kernel["variant"]).count("f8E4M3FN*") >= 2
    if family == "linear" and scaled and rows >= MANY and matmul:
        return 1e6 * float(work) / (PRODUCT * matmul)
    if family == "linear" and scaled and rows <= FEW and copy:
        return empty_us + 1e6 * float(moved) / (STREAMED * copy)
    if family == "expert_linear" and rows == FEW and copy:
        return 1e6 * float(moved) / (EXPERTS * copy)
    if family in ELEMENTWISE and rows >= MANY and copy:
        return 1e6 * float(moved) / (ROW_WISE * copy)
    return None


def attention_floors(found: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Attention kernels with full lists at `ATTENDED` rows that have FP4 entries, and what they reach of their floor."""
    return [(str(r["kernel"]), 1e12 * float(r["tflops"]) / ATTENTION_FLOPS) for r in found if r["rows"] == ATTENDED and r["selected"]]


def summary(step: Mapping[str, Any]) -> str:
    """How many kernels of a step reach their floors, which do not, and of how many no launch could: one that only moves their bytes takes longer."""
    held: Sequence[Mapping[str, Any]] = [k for k in step["kernels"] if k["floor"] is not None]
    missed = sorted((k for k in held if k["floor"] < 1), key=lambda k: float(k["floor"]))
    names = ", ".join(f"{k['kernel']} {100 * k['floor']:.0f} %" + (" (below a plain kernel)" if is_below_a_plain_one(k) else "") for k in missed)
    below = sum(map(is_below_a_plain_one, missed))
    return (f"floors: {len(held) - len(missed)} of {len(held)} kernels that have one reach it, {below} have one below a plain kernel that moves "
            "their bytes" + (f"; not {names}" if missed else ""))  # fmt: skip


def is_below_a_plain_one(kernel: Mapping[str, Any]) -> bool:
    """Whether a floor asks for less time than reading and writing the bytes and nothing else takes."""
    return bool(kernel["floor_us"] < kernel["plain_us"])


def show_floors(steps: Sequence[Mapping[str, Any]]) -> None:
    """Every kernel that has a floor: its time, the floor, what bounds it, and, in the same run, what a plain kernel that moves its bytes needs and
    what a library's products of its shape do, in BF16 and in FP8 with a single scale."""
    print(f"\n{'kernel':34} {'rows':>5} {'MB':>8} {'Gop':>8} {'cold us':>8} {'floor us':>8} {'bound us':>8} {'plain us':>8} {'reached %':>9} "
          f"{'bf16 us':>8} {'fp8 us':>8}")  # fmt: skip
    for step in steps:
        for k in sorted((k for k in step["kernels"] if k["floor"] is not None), key=lambda k: (str(k["family"]), float(k["bytes"]))):
            below = "  floor below a plain kernel" if is_below_a_plain_one(k) else ""
            if pairs := [n for n in k.get("pairs", ()) if n]:
                below += f"  {len(pairs)} experts hit by {min(pairs)} to {max(pairs)} rows"
            library = k.get("library_us") or {}
            others = " ".join(f"{library[kind]:8.2f}" if kind in library else f"{'-':>8}" for kind in ("bf16", "fp8"))
            print(f"{k['kernel']:34} {k['rows']:5} {k['bytes'] / 1e6:8.2f} {k['operations'] / 1e9:8.2f} {k['cold_us']:8.2f} {k['floor_us']:8.2f} "
                  f"{k['bound_us']:8.2f} {k['plain_us']:8.2f} {100 * k['floor']:9.0f} {others}{below}")  # fmt: skip
        print(f"step of {step['rows']} rows, {summary(step)}")
