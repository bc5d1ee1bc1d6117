"""The warp-specialised form of sparse attention for SM90: which requests it covers, and its source.

It computes what the tile kernel of the same schedule row computes, in the same order: blocks of 64 keys, window before entries, shares in
two BF16 pieces. Two instances that share a row share its heads in the tile kernel, the columns of its sums here.
Precondition: scales of FP8 keys lie between 2^-120 and 2^127 (the quantizer's do), counts within the lists' widths.
"""

from collections.abc import Sequence

from tapeout.codegen.kernel import EVERY_SCALE, Buffer, Request, Schedule, width
from tapeout.codegen.nvidia.emit import POINTERS, Source
from tapeout.codegen.nvidia.facts import SM90, Chip
from tapeout.codegen.nvidia.overrides.templates import template
from tapeout.dialects.format import BF16, FP32, INT32, Q4_MAIN, Q8
from tapeout.dialects.rows import TABLE
from tapeout.dialects.types import Blocks, Ring, Tensor

CAPABILITY = 90
HEADS, COLUMNS, BLOCK, TURNED = 64, 512, 64, 64
GROUP_WARPS = 4
REGISTERS = {1: (160, 160, 72), 2: (104, 104, 72, 72)}
"""By instances of a row: of a thread of the groups of sums and of keys; the scores' group keeps the rest: 120, 128. Fewer spill."""
WINDOW_ROLES = ("q", "ring_codes", "ring_scales", "window_ids", "window_counts", "sink")
ENTRY_ROLES = ("entry_codes", "entry_scales", "ids", "counts")
LAST_ROLES = ("positions", "table", "out", "count")
ROW: Schedule = {"block_heads": HEADS, "block_keys": BLOCK, "joined": 1, "keys_first": 0, "split": 1, "override": 1,
                 "instances": SM90.processors, "warps": 4 * GROUP_WARPS, "stages": 1}  # fmt: skip
ALONE: Schedule = {**ROW, "instances": 0}
FEW: Schedule = {**ALONE, "block_heads": HEADS // 2, "warps": 5 * GROUP_WARPS}
"""Many rows take turns; where a chip has room for an instance of each row they need none, and where it has for two, two share a row."""
CASE = Request(
    "nn.fused:attend_rotate", (),
    (Tensor((None, HEADS * COLUMNS), BF16), Ring(Tensor((COLUMNS,), Q8), 134), Tensor((None, 128), INT32), TABLE, Tensor((HEADS,), FP32),
     Blocks(Tensor((COLUMNS,), Q4_MAIN), 2), Tensor((None, 512), INT32), TABLE, TABLE, Tensor((32773, TURNED), FP32)),
    (Tensor((None, HEADS * COLUMNS), BF16),),
    (("mla.attend", (("heads", HEADS), ("scale", COLUMNS**-0.5))),
     ("nn.rope", (("heads", HEADS), ("inverse", True), ("offset", 0), ("width", COLUMNS)))),
)  # fmt: skip
CASES = ((CASE, ROW), (CASE, ALONE), (CASE, FEW))
MEANINGS = ("1f1c50c0ba5e6076", "f0cbed7985b90f3e", "783119cd038a0ce5")
LEAST_SCALE, MOST_SCALE = EVERY_SCALE  # its scales are those of keys, not of a weight
LAUNCHES = (None,)


def why_not(request: Request, chip: Chip) -> str | None:
    """Why a request is left to the plain form; None where it is covered."""
    if chip.capability != CAPABILITY:
        return f"{chip.name} has no wgmma"
    if request.op != "nn.fused:attend_rotate":
        return f"{request.op} is not attention with the rotation behind it"
    attend, rope = request.of("mla.attend"), request.of("nn.rope")
    q, ring, _, _, sink, *entries, _, table = request.operands
    if attend["heads"] != HEADS or not isinstance(q, Tensor) or q.number != BF16 or width(q) != HEADS * COLUMNS:
        return f"q is {q}, expected {HEADS} heads of {COLUMNS} BF16 columns"
    if not isinstance(ring, Ring) or ring.entry.number != Q8:
        return f"the window is {ring}, expected FP8 keys"
    if entries and (not isinstance(entries[0], Blocks) or entries[0].entry.number != Q4_MAIN):
        return f"entries are {entries[0]}, expected FP4 keys with E4M3 scales"
    if not isinstance(table, Tensor) or table.number != FP32 or width(table) != TURNED or not rope["inverse"]:
        return f"the angles are {table}, expected FP32 ones that turn {TURNED} columns back"
    if not isinstance(sink, Tensor) or sink.number != FP32 or request.results[0] != q:
        return f"the sink is {sink} and the result {request.results[0]}, expected FP32 and {q}"
    return None


def for_bucket(rows: int) -> Schedule:
    """The row of a covered request's bucket of `rows` rows."""
    return FEW if 2 * rows <= SM90.processors else ALONE if rows <= SM90.processors else ROW


def source(symbol: str, request: Request, buffers: Sequence[Buffer], row: Schedule) -> Source:
    """The kernel's source under its symbol; `buffers` in launch order, the row is `ROW`, `ALONE` or `FEW`."""
    entries, parts = isinstance(request.operands[5], Blocks), HEADS // row["block_heads"]
    roles = (*WINDOW_ROLES, *(ENTRY_ROLES if entries else ()), *LAST_ROLES)
    constants = {
        "HEADS": HEADS, "COLUMNS": COLUMNS, "BLOCK": BLOCK, "TURNED": TURNED, "WINDOW": width(request.operands[2]),
        "SELECTED": width(request.operands[6]) if entries else 0, "OFFSET": request.of("nn.rope")["offset"],
        "SCALE": request.of("mla.attend")["scale"], "PARTS": parts,
    }  # fmt: skip
    given = ENTRY_ROLES if entries else ("ring_codes", "ring_scales", "window_ids", "window_counts")  # stand-ins that nothing reads
    text = template("attend_sm90").render(
        name=symbol, constants=constants, arguments=roles, entries=given[:3], counts=given[3], registers=REGISTERS[parts],
        end="rows, gl.num_programs(0)" if row.get("instances") else "gl.program_id(0) + 1",
    )  # fmt: skip
    parameters = tuple((role, POINTERS[b.element]) for role, b in zip(roles, buffers, strict=True))
    return Source(symbol, text + "\n", parameters, HEADS * COLUMNS, 0, "gluon", GROUP_WARPS)
