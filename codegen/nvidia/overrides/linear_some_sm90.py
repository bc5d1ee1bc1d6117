"""The form of a linear layer for 17 to 128 rows on SM90: which requests it covers, its schedule rows and its source.

Weights in FP8 with scales of 32x32 elements, rows in FP8 with scales of 32 columns, or in BF16 (then in groups too). It computes what the tile
kernel of the same schedule row computes, 16 columns of a segment after another. Of a row that splits K it is the launch of the segments; the one
that adds them up is the plain one. Otherwise an instance adds its segments in order.
Preconditions: scales of the weight lie between 2^-92 and 2^39, rows between -2^95 and 2^95. Scales of 32 rows of a weight are equal, because they
are one scale, laid out for each row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tapeout.codegen.kernel import Buffer, Request, Schedule
from tapeout.codegen.nvidia.block_sizes import padded, power
from tapeout.codegen.nvidia.emit import POINTERS, EmitError, Source
from tapeout.codegen.nvidia.facts import SM90, Chip
from tapeout.codegen.nvidia.overrides import fp8_linear
from tapeout.codegen.nvidia.overrides.fp8_linear import is_scaled, shape
from tapeout.codegen.nvidia.overrides.templates import template
from tapeout.dialects.format import BF16, FP8_WEIGHT, Q8
from tapeout.dialects.types import Tensor

PLACE = 2
"""`PLACE` is the override's number in a schedule row."""
TOKENS, PART, STEP, GROUP_WARPS = 64, 64, 128, 4
FEWEST_TILES = 4
KEPT_BYTES = 512
"""Of shared memory, for barriers."""
FIXED, EACH_STEP, EACH_GROUP, SECOND_LAUNCH = 4.0, 0.5, 0.25, 2.0
"""Microseconds: of an instance, of a step, of a step for each group of weights, of the launch that adds segments up. Measured on an H200."""


@dataclass(frozen=True)
class _Groups:
    """Groups of four warps: how many have rows of the weight, one more brings x; stages of codes, tiles of x that are loaded at once, registers of
    a thread of a group of weights."""

    weights: int
    stages: int
    batch: int
    registers: int

    @property
    def warps(self) -> int:
        return GROUP_WARPS * (self.weights + 1)


KINDS = (_Groups(1, 4, 2, 128), _Groups(2, 3, 3, 128), _Groups(4, 3, 2, 96), _Groups(5, 3, 2, 80))
MOST_SCALE = 166  # 2^39
LAUNCHES = (None, 0)
_PLAIN = {"panel": 0, "weights_first": 1, "ahead": 0, "decoded": 1, "group": 0, "rows_first": 0, "total_columns": 256, "part_columns": 256,
          "part_rows": 1, "override": PLACE, "block_m": TOKENS, "block_k": STEP, "stages": 3}  # fmt: skip
CASES: tuple[tuple[Request, Schedule], ...] = (
    (Request("nn.linear", (("groups", 1), ("wide", False)), (Tensor((None, 2304), Q8), Tensor((5120, 2304), FP8_WEIGHT)),
             (Tensor((None, 5120), BF16),)), {**_PLAIN, "segments": 2, "block_n": 128, "split": 1, "warps": 4, "part_warps": 12, "part": 0}),
    (Request("nn.linear", (("groups", 8), ("wide", False)), (Tensor((None, 32768), BF16), Tensor((8192, 4096), FP8_WEIGHT)),
             (Tensor((None, 8192), BF16),)), {**_PLAIN, "segments": 4, "block_n": 256, "split": 1, "warps": 4, "part_warps": 20, "part": 0}),
    (Request("nn.linear", (("groups", 1), ("wide", False)), (Tensor((None, 6144), Q8), Tensor((25600, 6144), FP8_WEIGHT)),
             (Tensor((None, 25600), BF16),)), {**_PLAIN, "segments": 2, "block_n": 256, "split": 0, "warps": 20}),
)  # fmt: skip
"""Segments of FP8 rows, of BF16 rows in groups, and FP8 rows with all segments in an instance."""
MEANINGS = ("d753a2268d8e8bfe", "e7e78758c5d805c5", "dc9e1790998d77d5")
"""Digests of their tile kernels as they were when the source was checked on a GPU."""


@dataclass(frozen=True)
class _Plan:
    """How an instance is made: steps of 128 columns, tiles of x in shared memory, whether segments are added up there."""

    groups: _Groups
    steps: int
    tiles: int
    totals: bool

    @property
    def microseconds(self) -> float:
        """Of an instance alone, roughly."""
        return FIXED + self.steps * (EACH_STEP + EACH_GROUP * self.groups.weights)


def why_not(request: Request, chip: Chip) -> str | None:
    """Why a request is left to the plain form; None where it is covered."""
    return fp8_linear.why_not(request, chip, PART, STEP)


def row(request: Request, chip: Chip, segments: int) -> Schedule | None:
    """What the schedule row of a bucket of some rows has instead of a plain row's entries; None where it stays plain.

    The cheapest cut of those whose instances fill the chip in few turns.
    """
    n, k = shape(request)
    if why_not(request, chip) is not None or k % (segments * STEP):
        return None
    found = []
    for split in sorted({0, int(segments > 1)}):
        for place, groups in enumerate(KINDS):
            plan = _plan(request, chip, groups, segments, split)
            if plan is not None:
                turns = -(-n // (groups.weights * PART) * (segments if split else 1) // chip.processors)
                found.append((turns * plan.microseconds + split * SECOND_LAUNCH, place, split))
    if not found:
        return None
    _, place, split = min(found)
    warps = KINDS[place].warps
    own = {"warps": 4, "part_warps": warps, "total_columns": power(n, 512)} if split else {"warps": warps}
    return {"block_m": TOKENS, "block_n": KINDS[place].weights * PART, "block_k": STEP, "decoded": 1, "split": split, "ahead": 0,
            "override": PLACE, "stages": 3, **own}  # fmt: skip


def _plan(request: Request, chip: Chip, groups: _Groups, segments: int, split: int) -> _Plan | None:
    """The plan for an instance of these groups; None where the weight is not cut so or shared memory does not hold it."""
    n, k = shape(request)
    if n // request["groups"] % (groups.weights * PART) or k % (segments * STEP):
        return None
    steps, totals = k // (segments if split else 1) // STEP, segments > 1 and not split
    each = groups.stages * PART * STEP + padded(steps) * (PART // 32) * 4 + (PART * TOKENS * 4 if totals else 0)
    tiles = (chip.shared_bytes_per_block - KEPT_BYTES - groups.weights * each) // (TOKENS * STEP * 2)
    if tiles >= steps:
        return _Plan(groups, steps, steps, totals)
    return _Plan(groups, steps, 1 << (tiles.bit_length() - 1), totals) if tiles >= FEWEST_TILES else None


def source(symbol: str, request: Request, buffers: Sequence[Buffer], row: Schedule) -> Source | None:
    """The kernel's source under its symbol; `buffers` in launch order. None for the launch that adds segments up.

    Raises `EmitError` where the row cuts otherwise than it can.
    """
    segments = max(row["segments"], 1)
    split = int(row["split"] and segments > 1)
    if split and "part" not in row:
        return None
    groups = next((g for g in KINDS if g.weights * PART == row["block_n"] and g.warps == row["warps"]), None)
    plan = _plan(request, SM90, groups, segments, split) if groups else None
    if groups is None or plan is None or row["block_m"] != TOKENS:
        raise EmitError(f"kernel {symbol}: the override for some rows cannot cut so: block_m {row['block_m']}, block_n {row['block_n']}, segments "
                        f"{segments}, warps {row['warps']}; set override to 0")  # fmt: skip
    scaled, (n, k) = is_scaled(request), shape(request)
    arguments = ("x", *(("x_scales",) if scaled else ()), "w", "w_scales", "y", *(("sums",) if split else ()), "count")
    batch = groups.batch if scaled else 1  # BF16 takes twice the registers
    constants = {"N": n, "K": k, "WIDTH": n // request["groups"], "PITCH": k * request["groups"], "PITCH_OUT": n * (segments if split else 1),
                 "EACH": k // segments, "STEPS": plan.steps, "SPLIT": bool(split), "AXIS": 2 if split else 1, "BLOCK_N": row["block_n"],
                 "TILES": plan.tiles, "STAGES": groups.stages, "BATCH": batch, "WEIGHT_GROUPS": groups.weights}  # fmt: skip
    text = template("linear_some_sm90").render(
        name=symbol, constants=constants, arguments=arguments, scaled=scaled, split=split, totals=plan.totals, batch=batch, block_n=row["block_n"],
        places=padded(plan.steps), groups=groups.weights, registers=groups.registers,
    )  # fmt: skip
    parameters = tuple((role, POINTERS[b.element]) for role, b in zip(arguments, buffers, strict=True))
    return Source(symbol, text + "\n", parameters, TOKENS * STEP, 0, "gluon", GROUP_WARPS)
