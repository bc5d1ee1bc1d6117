"""The form of a linear layer for 17 to 64 rows in one launch on SM90: which requests it covers, its schedule rows and its source.

Weights in FP8 with scales of 32x32 elements, rows in FP8 with scales of 32 columns. It computes what the tile kernel of the same schedule row
computes, 16 columns of a segment after another, then segments in order. Preconditions: those of linear_some_sm90.py.

An instance is a block's rows of the weight times up to 64 rows of x, one segment of K. It decodes its columns of x into shared memory, where they
stay; then its warps run apart: each copies codes of 16 rows two steps of 128 columns ahead and decodes a quarter of one in registers while products
of the quarter before are under way. Sums of segments meet in memory: warps of the same rows count each other, and each adds up its share of the rows
of x. Instances of the same rows stand side by side in the grid and begin in their order, so of each launch on a chip at most one set has not begun
as a whole, and no set waits in vain. Counters lie in the kernel's own memory and only grow: launches of one such kernel must not run side by side
(toolchain.py).
"""

from collections.abc import Sequence

from tapeout.codegen.kernel import Buffer, Request, Schedule
from tapeout.codegen.kernels.linear import HANDED_ON
from tapeout.codegen.nvidia.emit import POINTERS, EmitError, Source
from tapeout.codegen.nvidia.facts import SM90, Chip
from tapeout.codegen.nvidia.overrides import fp8_linear
from tapeout.codegen.nvidia.overrides import linear_many_ptx as ptx
from tapeout.codegen.nvidia.overrides.fp8_linear import is_scaled, shape
from tapeout.codegen.nvidia.overrides.templates import template
from tapeout.dialects.format import BF16, FP8_WEIGHT, Q8
from tapeout.dialects.types import Tensor

PLACE = 5
"""`PLACE` is the override's number in a schedule row."""
TOKENS, PART, STEP, GROUP_WARPS, WARP_ROWS = 64, 64, 128, 4, 16
PARTS = {5: (4, 1), 3: (2, 1)}
"""Groups of four warps, which have 64 rows of the weight each, by parts that are programs of their own: a power of two in each."""
STAGES = 2
"""Buffers of a step's codes. None is asked for in front of the wait: with both, rows of x took 3.3 us to come where they take 1.1."""
KEPT_BYTES = 512
"""Of shared memory: for the barrier, and what the compiler keeps there."""
LEAST_SEGMENTS, MOST_SEGMENTS, LEAST_FILLED, LARGE = 4, 8, 0.7, 16 << 20
"""Fewer segments leave too few instances, more than rows of x that stand together cannot share them; the least share of the chip that instances
fill; elements of a weight below which three launches cost less (measured on an H200: 12.6 us for 10.6 at 12 MB)."""
LEAST_SCALE, MOST_SCALE = 35, 166  # 2^-92, 2^39
LAUNCHES = (None,)
CASES: tuple[tuple[Request, Schedule], ...] = (
    (Request("nn.linear", (("groups", 1), ("wide", False)), (Tensor((None, 8192), Q8), Tensor((5120, 8192), FP8_WEIGHT)),
             (Tensor((None, 5120), BF16),)),
     {"panel": 0, "weights_first": 1, "ahead": 0, "group": 0, "rows_first": 0, "override": PLACE, "block_m": TOKENS, "block_n": 40, "block_k": STEP,
      "segments": 8, "split": 0, "decoded": HANDED_ON, "warps": 20, "stages": STAGES}),
)  # fmt: skip
MEANINGS = ("46b58d99775e96aa",)
"""Digests of their tile kernels as they were when the source was checked on a GPU."""


def why_not(request: Request, chip: Chip) -> str | None:
    """Why a request is left to the plain form; None where it is covered."""
    if (words := fp8_linear.why_not(request, chip, PART, STEP)) is not None:
        return words
    if not is_scaled(request) or request["groups"] != 1:
        return f"x is {request.operands[0]} in {request['groups']} groups, expected FP8 rows of one group"
    return None


def row(request: Request, chip: Chip, segments: int) -> Schedule | None:
    """What the schedule row of a bucket of at most TOKENS rows has instead of a plain row's entries; None where others cost less.

    `block_n` counts a block's rows of the weight once for all its segments, so that instances are as many as blocks.
    """
    if why_not(request, chip) is not None:
        return None
    n, k = shape(request)
    if n * k < LARGE:
        return None
    for groups in PARTS:
        if _cuts(request, chip, groups, segments) and LEAST_FILLED <= n // (groups * PART) * segments / chip.processors <= 1:
            return {"block_m": TOKENS, "block_n": groups * PART // segments, "block_k": STEP, "decoded": HANDED_ON, "split": 0, "ahead": 0,
                    "override": PLACE, "warps": groups * GROUP_WARPS, "stages": STAGES}  # fmt: skip
    return None


def _cuts(request: Request, chip: Chip, groups: int, segments: int) -> bool:
    """Whether the weight is cut so into whole instances, and shared memory holds the columns of x of one in BF16 and two steps of codes."""
    n, k = shape(request)
    held = 2 * TOKENS * k // segments + STAGES * STEP * groups * PART + KEPT_BYTES
    whole = n % (groups * PART) == 0 and k % (segments * STEP) == 0 and k // segments // STEP <= 32
    return whole and LEAST_SEGMENTS <= segments <= MOST_SEGMENTS and segments & (segments - 1) == 0 and held <= chip.shared_bytes_per_block


def source(symbol: str, request: Request, buffers: Sequence[Buffer], row: Schedule) -> Source:
    """The kernel's source under its symbol; `buffers` in launch order. Raises `EmitError` where the row cuts otherwise than it can."""
    (n, k), segments = shape(request), max(row.get("segments", 1), 1)
    groups = row["warps"] // GROUP_WARPS
    if (groups not in PARTS or not _cuts(request, SM90, groups, segments) or row["block_n"] * segments != groups * PART or row["stages"] != STAGES
            or (row["block_m"], row["decoded"], row["split"]) != (TOKENS, HANDED_ON, 0)):  # fmt: skip
        raise EmitError(f"kernel {symbol}: the override for some rows in one launch cannot cut so: block_m {row['block_m']}, block_n "
                        f"{row['block_n']}, segments {segments}, warps {row['warps']}, stages {row['stages']}; set override to 0")  # fmt: skip
    arguments = ("x", "x_scales", "w", "w_scales", "y", "sums", "count")
    steps, warps, parts = k // segments // STEP, row["warps"], PARTS[groups]
    constants = {"N": n, "K": k, "SEGMENTS": segments, "STEPS": steps, "BLOCK_N": groups * PART, "STAGES": STAGES}
    text = template("linear_once_sm90").render(
        name=symbol, arguments=arguments, constants=constants, parts=parts, warps=warps, turns=-(-steps * WARP_ROWS // warps), ptx=ptx)  # fmt: skip
    parameters = tuple((role, POINTERS[b.element]) for role, b in zip(arguments, buffers, strict=True))
    return Source(symbol, text + "\n", parameters, TOKENS * STEP, 0, "gluon", GROUP_WARPS * parts[0])
