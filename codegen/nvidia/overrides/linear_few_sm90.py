"""The form of a linear layer for at most 16 rows on SM90: which requests it covers, its schedule rows and its source.

Weights in FP8 with scales of 32x32 elements, rows in FP8 with scales of 32 columns, or in BF16 (then in groups too). It computes what the tile
kernel of the same schedule row computes: a segment of K is summed by one warp, 16 columns after another, and segments are added in order.
Preconditions: none on values. Scales of 32 rows of a weight are equal, because they are one scale, laid out for each row.

FP8 rows: codes are multiplied as they are, as f16, and sums are kept in units of the group's two scales: at every group of 32 columns they are
multiplied by the power of two that lies between it and the one before. That is exact while scales lie in windows, which is looked at on the way;
where one lies outside, everything is computed once more with decoded factors. BF16 rows: codes are decoded to BF16 by one multiplication, exact
while scales are at most 2^7; where one is larger, everything is computed once more with two.
"""

from collections.abc import Sequence

from tapeout.codegen.kernel import EVERY_SCALE, Buffer, Request, Schedule
from tapeout.codegen.nvidia.block_sizes import padded
from tapeout.codegen.nvidia.emit import POINTERS, EmitError, Source
from tapeout.codegen.nvidia.facts import Chip
from tapeout.codegen.nvidia.overrides import fp8_linear
from tapeout.codegen.nvidia.overrides.fp8_linear import is_scaled, shape
from tapeout.codegen.nvidia.overrides.templates import template
from tapeout.dialects.format import BF16, FP8_WEIGHT, Q8
from tapeout.dialects.types import Tensor

TOKENS, TILE, STEP = 16, 8, 128
MOST_TILES, MOST_WARPS, SPLITS, LEAST_STAGES = 5, 16, (1, 2, 4, 8), 3
FEW_STEPS = 5
"""So many steps are all under way at once where a multiprocessor has at most two blocks. Of blocks of rows side by side as many are as fit."""
FRONT = 2
"""Steps whose weights are copied before the launch in front has ended, where not all are under way at once: copies end in order, so the first
product waits for all of these. Of the widest tiles one step's (measured)."""
EARLY_TILES = 3
"""Tiles of a warp whose words are fetched from shared memory a step early: more do not fit in registers, fewer gain nothing (measured)."""
LEAST_WARPS = 2.5
"""Warps of a multiprocessor, on average, without which it waits more than it works."""
MOST_READ = 256 << 10
"""Bytes of the weight and of x that instances of blocks side by side may read for one multiprocessor: some 6 microseconds on an H200."""
LEAST_SCALE, MOST_SCALE = EVERY_SCALE  # it looks at scales itself
LAUNCHES = (None,)
_PLAIN = {"panel": 0, "weights_first": 1, "ahead": 0, "decoded": 1, "split": 0, "group": 0, "rows_first": 0, "total_columns": 256,
          "part_columns": 256, "part_rows": 1, "override": 1, "block_m": TOKENS, "block_k": STEP, "warps": 8, "stages": 3}  # fmt: skip
CASES: tuple[tuple[Request, Schedule], ...] = (
    (Request("nn.linear", (("groups", 1), ("wide", False)), (Tensor((None, 8192), Q8), Tensor((5120, 8192), FP8_WEIGHT)),
             (Tensor((None, 5120), BF16),)), {**_PLAIN, "segments": 8, "block_n": 40}),
    (Request("nn.linear", (("groups", 8), ("wide", False)), (Tensor((None, 32768), BF16), Tensor((8192, 4096), FP8_WEIGHT)),
             (Tensor((None, 8192), BF16),)), {**_PLAIN, "segments": 4, "block_n": 64}),
)  # fmt: skip
"""FP8 rows and BF16 rows in groups."""
MEANINGS = ("91f3177e2ee16986", "ab3739c6744f896b")
"""Digests of their tile kernels as they were when the source was checked on a GPU."""


def why_not(request: Request, chip: Chip) -> str | None:
    """Why a request is left to the plain form; None where it is covered."""
    return fp8_linear.why_not(request, chip, TILE, STEP)


def row(request: Request, chip: Chip, segments: int, rows: int = TOKENS) -> Schedule | None:
    """What the schedule row of a bucket of few rows has instead of a plain row's entries; None where it stays plain.

    Of more rows than a block, blocks stand side by side and read the weight again, as x, from the second-level cache: only where the busiest
    multiprocessor reads little.
    """
    if why_not(request, chip) is not None or shape(request)[1] % (segments * STEP):
        return None
    beside = -(-rows // TOKENS)
    cuts = _cuts(request, chip, segments, beside)
    if not cuts:
        return None
    *_, columns, warps, stages, turns = cuts[0]
    if beside > 1 and turns * (columns + TOKENS * warps // segments) * shape(request)[1] > MOST_READ:
        return None
    return {"block_m": TOKENS, "block_n": columns, "block_k": STEP, "decoded": 1, "split": 0, "ahead": 0, "override": 1, "warps": warps,
            "stages": stages}  # fmt: skip


def _stage_bytes(request: Request, tiles: int, warps: int) -> int:
    """Of a step of all warps: codes of the weight, x and scales."""
    return warps * (tiles * TILE * STEP + TOKENS * STEP * (1 if is_scaled(request) else 2) + STEP)


def _cuts(request: Request, chip: Chip, segments: int, beside: int) -> list[tuple[bool, int, int, int, int, int]]:
    """Ways to cut, for so many blocks of rows: (whether warps are too few, cost, rows of the weight in a block, warps, stages, blocks of a
    multiprocessor), best first.

    The cost is the busiest multiprocessor's: tiles of its blocks, and x once more for each warp. All blocks of a multiprocessor are resident,
    because bytes under way are what a memory is fast by. Small blocks first: their warps wait for each other least. The widest tiles, all of whose
    steps are written out, do not fit in registers.
    """
    (n, k), groups, found = shape(request), request["groups"], []
    for tiles, split in ((t, s) for t in range(1, MOST_TILES + (beside == 1)) for s in SPLITS):
        rows, warps = tiles * split * TILE, segments * split
        if rows > n // groups or warps > MOST_WARPS or (groups > 1 and n // groups % rows):
            continue
        blocks = -(-n // rows) * beside
        turns = -(-blocks // chip.processors)
        stages = chip.shared_bytes_per_block // (min(turns, MOST_WARPS // warps) * _stage_bytes(request, tiles, warps))
        if stages >= LEAST_STAGES:
            steps = k // segments // STEP
            more = 0 if turns * warps * tiles >= 2 * MOST_WARPS else 3 if turns == 1 else 2
            most = steps + 1 if beside > 1 or (turns <= 2 and steps <= FEW_STEPS) else LEAST_STAGES + more
            cost, stages = turns * split * (tiles + 1), min(stages, most, steps + 1)
            found.append((blocks * warps < LEAST_WARPS * chip.processors, cost, rows, warps, stages, turns))
    return sorted(found)


def _front(ahead: int, steps: int, tiles: int) -> int:
    """Steps whose weights are copied in front of the wait, of those that are copied ahead."""
    return steps if steps <= ahead else min(ahead, FRONT if tiles < MOST_TILES else 1)


def source(symbol: str, request: Request, buffers: Sequence[Buffer], row: Schedule) -> Source:
    """The kernel's source under its symbol; `buffers` in launch order. Raises `EmitError` where the row cuts otherwise than it can."""
    (n, k), segments, groups = shape(request), max(row.get("segments", 1), 1), request["groups"]
    split, warps = row["warps"] // segments, row["warps"]
    tiles = row["block_n"] // (TILE * max(split, 1))
    bytes_ = row["stages"] * _stage_bytes(request, tiles, warps)
    if (warps != split * segments or k % (segments * STEP) or tiles * split * TILE != row["block_n"] or row["block_m"] != TOKENS or row["split"]
            or row["stages"] < 2 or tiles > MOST_TILES or (groups > 1 and n // groups % row["block_n"])):  # fmt: skip
        raise EmitError(f"kernel {symbol}: the override for few rows cannot cut so: block_m {row['block_m']}, block_n {row['block_n']}, segments "
                        f"{segments}, warps {warps}, {bytes_} bytes; set override to 0")  # fmt: skip
    scaled = is_scaled(request)
    arguments = ("x", *(("x_scales",) if scaled else ()), "w", "w_scales", "y", "count")
    constants = {"N": n, "K": k, "GROUPS": groups, "PITCH": k * groups, "SEGMENTS": segments, "SPLIT": split, "WARPS": warps, "TILES": tiles,
                 "STAGES": row["stages"], "EACH": k // segments, "BLOCK_N": row["block_n"], "WIDTH": padded(tiles * TILE),
                 "FRONT": _front(row["stages"] - 1, k // segments // STEP, tiles)}  # fmt: skip
    at_once = k // segments // STEP < row["stages"]
    pieces = ["x_words", *(["x_word"] if scaled else []), *(f"{part}{j}" for j in range(tiles) for part in ("words", "word"))]
    text = template("linear_few_sm90").render(
        name=symbol, constants=constants, arguments=arguments, scaled=scaled, block_n=row["block_n"], pieces=pieces,
        sums=[f"sum{j}" for j in range(tiles)], early=tiles == EARLY_TILES and not at_once, at_once=at_once,
        rings="ring, x_ring, scale_ring" + (", x_scale_ring" if scaled else ""),
        x_copies="x_ring, x_scale_ring, x_at, x_scale_at, x_mask, x_scale_mask" if scaled else "x_ring, x_at, x_mask",
    )  # fmt: skip
    parameters = tuple((role, POINTERS[b.element]) for role, b in zip(arguments, buffers, strict=True))
    return Source(symbol, text + "\n", parameters, warps * TOKENS * STEP, 0, "gluon", warps)
