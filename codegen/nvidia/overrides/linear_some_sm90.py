"""The form of a linear layer for 17 to 128 rows on SM90: which requests it covers, its schedule rows and its source.

Weights in FP8 with scales of 32x32 elements, rows in FP8 with scales of 32 columns, or in BF16 (then in groups too). It computes what the tile
kernels of the same schedule row compute, 16 columns of a segment after another. A launch in front brings rows into BF16; the launch that adds
segments up, of a row that splits K, is the plain one. Otherwise an instance adds its segments in order.
Preconditions: scales of the weight lie between 2^-92 and 2^39, rows between 2^-95 and 2^95. Scales of 32 rows of a weight are equal, because they
are one scale, laid out for each row.

What orders copies, reads and products, of each buffer of a step:
  full   all threads' codes and the block of x have come             all wait before they read them
  empty  the products that read it are done (a lane of every warp)   all wait before they copy codes into it, and the warp whose turn x is
Triton would order accesses to shared memory by barriers of all warps; these copies and waits are text that it does not look into, so that no
such barrier stands in the loop. Codes are read by ldmatrix, x by the products alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tapeout.codegen.kernel import Buffer, Request, Schedule
from tapeout.codegen.nvidia.block_sizes import power
from tapeout.codegen.nvidia.emit import POINTERS, EmitError, Source
from tapeout.codegen.nvidia.facts import SM90, Chip
from tapeout.codegen.nvidia.overrides import fp8_linear
from tapeout.codegen.nvidia.overrides import linear_many_ptx as ptx
from tapeout.codegen.nvidia.overrides.fp8_linear import is_scaled, shape
from tapeout.codegen.nvidia.overrides.linear_many_sm90 import decode_constants
from tapeout.codegen.nvidia.overrides.templates import template
from tapeout.dialects.format import BF16, FP8_WEIGHT, Q8
from tapeout.dialects.types import Tensor

PLACE = 2
"""`PLACE` is the override's number in a schedule row."""
TOKENS, PART, STEP, GROUP_WARPS = 64, 64, 128, 4
ROW_COLUMNS, ROW_ROWS, ROW_WARPS = 256, 16, 8
"""Of an instance that brings rows into BF16; columns are fewer where K is no multiple."""
MANY_SEGMENTS = 8
"""Of so many, the launch that adds them up takes blocks of half as many columns."""
KEPT_BYTES, SYSTEM_BYTES = 512, 1024
"""Of shared memory: for barriers; what each instance on a multiprocessor costs besides."""
FIXED, EACH_STEP, EACH_GROUP, SECOND_LAUNCH = 4.0, 0.5, 0.25, 2.0
"""Microseconds: of an instance, of a step, of a step for each group of weights, of the launch that adds segments up. Measured on an H200."""


@dataclass(frozen=True)
class _Groups:
    """Groups of four warps, which have 64 rows of the weight each, by parts that are programs of their own: a power of two in each. Buffers of
    a step in shared memory, and how many steps copies are ahead."""

    parts: tuple[int, ...]
    stages: int
    ahead: int

    @property
    def number(self) -> int:
        return sum(self.parts)

    @property
    def rows(self) -> int:
        """Of the weight."""
        return self.number * PART

    @property
    def warps(self) -> int:
        return self.number * GROUP_WARPS

    @property
    def bytes(self) -> int:
        """Of shared memory. Results of a single part leave through it."""
        return self.stages * STEP * (self.rows + 2 * TOKENS) + (2 * TOKENS * self.rows if len(self.parts) == 1 else 0) + KEPT_BYTES


KINDS = (_Groups((1,), 8, 5), _Groups((1,), 4, 2), _Groups((2,), 6, 5), _Groups((2, 1), 5, 3), _Groups((4,), 4, 3), _Groups((4, 1), 4, 2))
"""Of equally cheap ones the first is taken: two small instances on a multiprocessor do better than one of twice the size."""
LEAST_SCALE, MOST_SCALE = 35, 166  # 2^-92, 2^39
LAUNCHES = (None, 0, 1)
_PLAIN = {"panel": 0, "weights_first": 1, "ahead": 0, "group": 0, "rows_first": 0, "total_columns": 256, "part_columns": ROW_COLUMNS,
          "part_rows": ROW_ROWS, "part_warps": ROW_WARPS, "override": PLACE, "block_m": TOKENS, "block_k": STEP, "stages": 4}  # fmt: skip
CASES: tuple[tuple[Request, Schedule], ...] = (
    (Request("nn.linear", (("groups", 1), ("wide", False)), (Tensor((None, 2304), Q8), Tensor((5120, 2304), FP8_WEIGHT)),
             (Tensor((None, 5120), BF16),)), {**_PLAIN, "segments": 2, "block_n": 128, "split": 1, "decoded": 2, "warps": 8, "part": 1}),
    (Request("nn.linear", (("groups", 8), ("wide", False)), (Tensor((None, 32768), BF16), Tensor((8192, 4096), FP8_WEIGHT)),
             (Tensor((None, 8192), BF16),)), {**_PLAIN, "segments": 4, "block_n": 256, "split": 1, "decoded": 5, "warps": 8, "part": 0}),
    (Request("nn.linear", (("groups", 1), ("wide", False)), (Tensor((None, 6144), Q8), Tensor((25600, 6144), FP8_WEIGHT)),
             (Tensor((None, 25600), BF16),)), {**_PLAIN, "segments": 2, "block_n": 256, "split": 0, "decoded": 2, "warps": 16}),
)  # fmt: skip
"""Segments of FP8 rows, BF16 rows in groups as they are brought, and FP8 rows with all segments in an instance."""
MEANINGS = ("685444a2cb018ad1", "f2feb2e6a759e396", "afbc6e620f9e9eb6")
"""Digests of their tile kernels as they were when the source was checked on a GPU."""


def why_not(request: Request, chip: Chip) -> str | None:
    """Why a request is left to the plain form; None where it is covered."""
    return fp8_linear.why_not(request, chip, PART, STEP)


def row(request: Request, chip: Chip, segments: int, rows: int = TOKENS) -> Schedule | None:
    """What the schedule row of a bucket of some rows has instead of a plain row's entries; None where it stays plain."""
    found = best(request, chip, segments, rows)
    return None if found is None else found[1]


def best(request: Request, chip: Chip, segments: int, rows: int) -> tuple[float, Schedule] | None:
    """The cheapest cut of those whose instances fill the chip in few turns: microseconds, and the row's own entries."""
    n, k = shape(request)
    if why_not(request, chip) is not None:
        return None
    found = []
    for split in sorted({0, int(segments > 1)}):
        for place, groups in enumerate(KINDS):
            if _cuts(request, chip, groups, segments):
                parts = segments if split else 1
                instances = n // groups.rows * parts * -(-rows // TOKENS)
                together = (chip.shared_bytes_per_block + SYSTEM_BYTES) // (groups.bytes + SYSTEM_BYTES)
                turns = -(-instances // (chip.processors * together))
                crowd = groups.number * min(together, -(-instances // chip.processors))
                microseconds = FIXED + k // parts // STEP * (EACH_STEP + EACH_GROUP * crowd)
                found.append((turns * microseconds + split * SECOND_LAUNCH, place, split))
    if not found:
        return None
    microseconds, place, split = min(found)
    warps = KINDS[place].warps
    own = {"warps": 4, "part1_warps": warps, "total_columns": power(n, 512 if segments < MANY_SEGMENTS else 256)} if split else {"warps": warps}
    return microseconds, {"block_m": TOKENS, "block_n": KINDS[place].rows, "block_k": STEP, "decoded": _decoded(request), "split": split, "ahead": 0,
                          "override": PLACE, "stages": KINDS[place].stages, "part_columns": power(k, ROW_COLUMNS), "part_rows": ROW_ROWS,
                          "part_warps": ROW_WARPS, **own}  # fmt: skip


def _decoded(request: Request) -> int:
    """The schedule entry of rows that a launch in front brings into BF16, or into order."""
    return 2 if is_scaled(request) else 5


def _cuts(request: Request, chip: Chip, groups: _Groups, segments: int) -> bool:
    """Whether the weight is cut so into whole instances, and shared memory holds one."""
    n, k = shape(request)
    return n // request["groups"] % groups.rows == 0 and k % (segments * STEP) == 0 and groups.bytes <= chip.shared_bytes_per_block


def source(symbol: str, request: Request, buffers: Sequence[Buffer], row: Schedule) -> Source | None:
    """The source of a launch under its symbol, None for the one that adds segments up; `buffers` in launch order.

    Raises `EmitError` where the row cuts otherwise than it can.
    """
    segments = max(row["segments"], 1)
    split, brings = int(row["split"] and segments > 1), row.get("part") == 0
    if split and "part" not in row:
        return None
    groups = next((g for g in KINDS if g.rows == row["block_n"] and (brings or (g.warps, g.stages) == (row["warps"], row["stages"]))), None)
    if groups is None or not _cuts(request, SM90, groups, segments) or _brings_otherwise(request, row):
        raise EmitError(f"kernel {symbol}: the override for some rows cannot cut so: block_m {row['block_m']}, block_n {row['block_n']}, segments "
                        f"{segments}, warps {row['warps']}, stages {row['stages']}, rows in {row['part_rows']} x {row['part_columns']}; "
                        "set override to 0")  # fmt: skip
    scaled = is_scaled(request)
    arguments = ("x", *(("x_scales",) if scaled else ()), "w", "w_scales", "y", "decoded", *(("sums",) if split else ()), "count")
    parameters = tuple((role, POINTERS[b.element]) for role, b in zip(arguments, buffers, strict=True))
    given = {"name": symbol, "arguments": arguments, "scaled": scaled, "split": split, "ptx": ptx, "wait": ptx.WAIT}
    if brings:
        constants = decode_constants(row, shape(request)[1] * request["groups"])
        text = template("linear_many_sm90_decode").render(
            constants=constants, turned=True, rows_left=False, in_order=False, right="x", right_scales="x_scales", **given)  # fmt: skip
        return Source(symbol, text + "\n", parameters, row["part_rows"] * row["part_columns"], 0, "gluon")
    text = template("linear_some_sm90").render(
        constants=_constants(request, groups, segments, bool(split)), parts=groups.parts, block_n=groups.rows, ahead=groups.ahead,
        out="sums" if split else "y", whole=not split and len(groups.parts) == 1, **given,
    )  # fmt: skip
    return Source(symbol, text + "\n", parameters, TOKENS * STEP, 0, "gluon", GROUP_WARPS * groups.parts[0] if len(groups.parts) > 1 else 0)


def _brings_otherwise(request: Request, row: Schedule) -> bool:
    """Whether the launch in front is not asked to bring rows in instances of whole warps."""
    whole = row["part_columns"] % STEP == 0 and row["part_rows"] % row["part_warps"] == 0
    return row["block_m"] != TOKENS or row["decoded"] != _decoded(request) or not whole


def _constants(request: Request, groups: _Groups, segments: int, split: bool) -> dict[str, int | bool]:
    n, k = shape(request)
    steps = k // segments // STEP
    return {"N": n, "K": k, "WIDTH": n // request["groups"], "PITCH_OUT": n * (segments if split else 1), "STEPS": steps,
            "SEGMENTS": 1 if split else segments, "SPLIT": split, "AXIS": 2 if split else 1, "BLOCK_N": groups.rows, "STAGES": groups.stages,
            "AHEAD": min(groups.ahead, steps if split else steps * segments), "TURNS": GROUP_WARPS * groups.parts[0]}  # fmt: skip
