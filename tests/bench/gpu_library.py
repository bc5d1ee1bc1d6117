"""What PyTorch's own copies and products take on this GPU: the ceilings, and products of a linear layer's shape. Nothing where it is not installed.

Products take turns on copies of their weights, as the suite's cold launches do. BF16 ones read twice the bytes. FP8 ones have one scale for all
of a factor and multiply codes as they are: not this model's arithmetic, whose weights have a scale for each 32 x 32 and whose rows have one for
each 32 columns, so they bound what a kernel that decodes can hope for.
"""

import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

MATRIX = 8192
FEWEST = 16  # rows that the library's FP8 products take
FP8_LINEAR = re.compile(r"^nn\.linear\(\[\?, \d+\] f8E4M3FN\*\S+, \[(\d+), (\d+)\] f8E4M3FN\*\S+ -> .*\{groups=1\b")
REPEATS, IN_A_GRAPH = 15, 24


def ceilings(copied: int) -> tuple[float, float | None]:
    """Bytes a second of a copy of so many bytes, read plus written (0 without PyTorch), and operations a second of a large BF16 product."""
    try:
        import torch
    except ImportError:
        return 0.0, None
    factors = [torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    moved = [torch.empty(copied, device="cuda", dtype=torch.uint8) for _ in range(2)]
    copy = 2 * copied / _seconds(lambda: moved[0].copy_(moved[1]), 10)
    return copy, 2 * MATRIX**3 / _seconds(lambda: factors[0] @ factors[1], 10)


def memory_back() -> None:
    """Gives PyTorch's free memory back to the driver."""
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


def product_us(kernel: Mapping[str, Any], turned: int) -> dict[str, float] | None:
    """Microseconds of the library's products of an FP8 linear's shape, `bf16` and `fp8`, weights in turns through `turned` bytes; None for other
    kernels and without PyTorch."""
    shape = FP8_LINEAR.match(str(kernel["variant"]))
    if shape is None:
        return None
    try:
        import torch
    except ImportError:
        return None
    n, k, rows = int(shape[1]), int(shape[2]), int(kernel["rows"])
    found = {"bf16": _bf16_us(torch, rows, n, k, turned)}
    if hasattr(torch.nn.functional, "scaled_mm"):
        found["fp8"] = _fp8_us(torch, max(rows, FEWEST), n, k, turned)
    memory_back()
    return found


def _bf16_us(torch: Any, rows: int, n: int, k: int, turned: int) -> float:
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(_turns(2 * n * k, turned))]
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    return _graph_us(torch, len(weights), lambda turn: torch.mm(x, weights[turn].t()))


def _fp8_us(torch: Any, rows: int, n: int, k: int, turned: int) -> float:
    weights = [torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn) for _ in range(_turns(n * k, turned))]
    x, one = torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn), torch.ones(1, device="cuda")
    scaled, whole = torch.nn.functional.scaled_mm, torch.nn.functional.ScalingType.TensorWise
    return _graph_us(torch, len(weights), lambda turn: scaled(x, weights[turn].t(), one, whole, one, whole, output_dtype=torch.bfloat16))


def _turns(each: int, turned: int) -> int:
    return max(2, -(-turned // each))


def _graph_us(torch: Any, turns: int, work: Callable[[int], Any]) -> float:
    """Of one call of `work`, in a graph that calls it for each turn as often."""
    rounds = max(1, IN_A_GRAPH // turns)
    with torch.cuda.stream(torch.cuda.Stream()):
        work(0)  # the library's own set-up must not be captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in range(rounds * turns):
            work(launch % turns)
    return 1e6 * _seconds(graph.replay, REPEATS) / rounds / turns


def _seconds(work: Callable[[], Any], repeats: int) -> float:
    """Of one call among several, behind three."""
    import torch

    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for _ in range(3):
        work()
    marks[0].record()
    for _ in range(repeats):
        work()
    marks[1].record()
    torch.cuda.synchronize()
    return float(marks[0].elapsed_time(marks[1])) / 1e3 / repeats
