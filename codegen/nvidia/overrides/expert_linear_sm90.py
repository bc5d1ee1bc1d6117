"""The forms of expert products for SM90, FP4 weights and FP8 rows: which requests they cover, their schedule rows and their sources.

They compute what the tile kernel of the same schedule row computes, in the same order: blocks of 128 columns, the even ones first, 16 at a time.
Few pairs an expert: an instance decodes their rows itself, whole, while its copies of weights are under way (a template of its own,
expert_few_sm90). More: a launch in front decodes them once, in the order of the fragments that the second launch makes. Up to 32 experts: one
instance a processor, each as much of all blocks of up to 64, 128 or 256 pairs, so that a weight is read and decoded once for them however
experts are chosen (expert_some_sm90); else instances take turns.
Preconditions: scales of weights lie between 2^-116 and 2^17, those of rows do not exceed 2^111, counts are those of `order`, and an expert has
at most one pair of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tapeout.codegen.kernel import Buffer, Request, Schedule
from tapeout.codegen.nvidia.block_sizes import padded
from tapeout.codegen.nvidia.emit import POINTERS, EmitError, Source
from tapeout.codegen.nvidia.facts import SM90, Chip
from tapeout.codegen.nvidia.overrides.templates import template
from tapeout.codegen.row_values import columns_of
from tapeout.dialects.format import BF16, FP4_WEIGHT, INT32, Q8
from tapeout.dialects.types import Tensor

CAPABILITY = 90
ROWS, STEP, WARP_COLUMNS = 64, 128, 256
"""Rows of a weight that a group of four warps multiplies; columns of a step, and those that a warp decodes of a row at a time."""
HELD, FRONT = 8, 3
"""Rows of pairs that an instance holds at most where it decodes them itself (the row's `part_rows`), and steps whose copies begin before these are
read: those of all steps would be in their way."""
FEW_PAIRS, LONG = (4, 2.5), 4096
"""A third more than the mean of an expert's pairs up to which instances decode rows themselves, where all experts are few: of short rows, of long
ones, of which they hold more bytes."""
ALIKE = 4
"""Rows from which a wide instance, alone on a multiprocessor, is best for long ones: rows of a block of drafts choose few experts (measured)."""
MANY_PARTS = 4
"""Groups of rows of weight that an instance multiplies one after another where instances are many: it asks for rows of pairs once."""
ROOM = 60 << 10
"""Bytes of rows and copies of an instance of which three are resident at once; rows alone never have more than twice as many."""
SHORT, CROWDED = 512, 32
"""Rows up to which blocks of many experts are small ones; experts up to which one may have many times the mean, a lane of a warp each."""
IN_FRONT, HERE = 1, 2
"""Where rows are decoded: the row's `decoded`."""


@dataclass(frozen=True)
class Shared:
    """Of instances that share all blocks: rows of weight are 16 a warp, steps of codes that are held, columns of a turn, turns of rows that are held.
    Then what a turn of products of so many columns costs, and the block besides, as measured: shares are equal in these."""

    warps: int
    stages: int
    turn: int
    places: int
    costs: dict[int, tuple[int, int]]


SHARED = {
    64: Shared(16, 4, 256, 3, {16: (26, 73), 24: (28, 73), 32: (31, 73), 40: (33, 73), 48: (35, 73), 56: (38, 73), 64: (40, 73)}),
    128: Shared(8, 4, 128, 5, {16: (24, 80), 32: (26, 90), 48: (28, 100), 64: (31, 115), 80: (34, 140), 96: (36, 160), 112: (39, 175),
                               128: (42, 185)}),
    256: Shared(8, 2, 128, 3, {32: (31, 60), 64: (36, 70), 96: (38, 110), 128: (42, 130), 160: (48, 140), 192: (58, 140), 224: (66, 140),
                               256: (82, 140)}),
}  # fmt: skip
"""By the pairs of a whole block. The register file bounds them: other instructions run at 0.6 of their pace beside products from registers, so what
counts is how often weights are decoded, how many columns are multiplied for nothing, and from 1,024 rows on, tensor cores."""
WHOLE = ((128, 64), (513, 128))
"""A third more than the mean of an expert's pairs below which blocks have so many, as measured; 256 from there on."""
LEAST_SCALE, MOST_SCALE = 11, 144  # 2^-116, 2^17
LAUNCHES = (None, 0)
ROLES = ("x", "x_scales", "w", "w_scales", "order", "offsets", "out")


def why_not(request: Request, chip: Chip) -> str | None:
    """Why a request is left to the plain form; None where it is covered."""
    if chip.capability != CAPABILITY:
        return f"{chip.name} multiplies codes by other instructions"
    if request.op != "moe.expert_linear":
        return f"{request.op} is no product of experts"
    (x, weight), result = request.operands[:2], request.results[0]
    if not isinstance(x, Tensor) or x.number != Q8 or not isinstance(weight, Tensor) or weight.number != FP4_WEIGHT:
        return f"x is {x} and the weight {weight}, expected FP8 rows and packed FP4"
    if not isinstance(result, Tensor) or result.number != BF16:
        return f"the result is {result}, expected BF16"
    _, n, k = weight.sized(0)
    return f"the weight is {weight}, expected rows in groups of 256 and columns in groups of {WARP_COLUMNS}" if n % 256 or k % WARP_COLUMNS else None


def row(request: Request, rows: int) -> Schedule:
    """The schedule row of a covered request's bucket of `rows` rows: a third more than the mean of an expert's pairs make one block, and several
    instances share the pairs of an expert that more choose: it may have a pair of every row."""
    view = request.operands[1]
    assert isinstance(view, Tensor)
    experts, _, k = view.sized(0)
    pairs = 4 * rows * columns_of(request.operands[2]) / (3 * experts)
    piece = max(p for p in (256, 512, 1024) if k % p == 0)
    plain = {"panel": 0, "weights_first": 1, "block_k": STEP, "part_columns": piece, "part_turns": 1, "part_warps": 4, "part_rows": 4,
             "override": 1, "spread": 1, "instances": 0, "registers": 0}  # fmt: skip
    if pairs <= (FEW_PAIRS[k > LONG] if experts <= CROWDED else 12):
        most = HELD if pairs > 2 or experts <= CROWDED else HELD // 2
        warps = 8 if rows == 1 else 16 if k > LONG and experts <= CROWDED and rows >= ALIKE else 4
        held = max(1, min(padded(rows), most, ROOM // k))
        stages = 6 if warps > 4 else max(5, min(8 if k > LONG else 5, (ROOM - held * 2 * k) // (ROWS * STEP // 2)))
        parts = MANY_PARTS if experts > CROWDED and rows > HELD and k >= stages * STEP else 1
        return {**plain, "decoded": HERE, "block_m": HELD, "block_n": 16 * warps * parts, "part_rows": held, "warps": warps, "stages": stages}
    if experts <= CROWDED:
        tokens = next((whole for least, whole in WHOLE if pairs < least), max(SHARED))
        form = SHARED[tokens]
        return {**plain, "decoded": IN_FRONT, "block_m": tokens, "block_n": 16 * form.warps, "instances": SM90.processors, "warps": form.warps,
                "stages": form.stages, "registers": 128 if form.warps == 16 else 0}  # fmt: skip
    if pairs <= 64 or rows <= SHORT:
        tokens = min(64, padded(int(pairs)))
        return {**plain, "decoded": IN_FRONT, "block_m": tokens, "block_n": 64, "spread": min(2, -(-rows // tokens)), "warps": 4,
                "stages": 5 if tokens <= 32 else 3}  # fmt: skip
    if pairs <= 128:
        return {**plain, "decoded": IN_FRONT, "block_m": 128, "block_n": 256, "spread": 2, "warps": 8, "stages": 4}
    return {**plain, "decoded": IN_FRONT, "block_m": 256, "block_n": 128, "spread": 6, "warps": 8, "stages": 3}


def source(symbol: str, request: Request, buffers: Sequence[Buffer], row: Schedule) -> Source:
    """The kernel's source under its symbol; `buffers` in launch order. Raises `EmitError` where the row cuts otherwise than it can."""
    view = request.operands[1]
    assert isinstance(view, Tensor)
    experts, n, k = view.sized(0)
    rows, tokens, part, some = row["block_n"], row["block_m"], row.get("part"), row.get("instances", 0)
    if not _cuts(row, n, k, experts):
        raise EmitError(f"kernel {symbol}: the override of expert products cannot cut so: {dict(row)}; set override to 0")
    constants = {"K": k, "ROWS": n, "M": rows, "N": tokens, "STAGES": row["stages"], "WARPS": row["warps"],
                 "CHOICES": columns_of(request.operands[2]), "EXPERTS": experts}  # fmt: skip
    arguments = (*ROLES, *(("rows",) if len(buffers) == len(ROLES) + 2 else ()), "count")
    if some and part is None:
        form = SHARED[tokens]
        text = template("expert_some_sm90").render(
            name=symbol, constants=constants | {"INSTANCES": some}, arguments=arguments, turn=form.turn, sides=form.places, costs=form.costs,
            widths=sorted(form.costs), pieces=_powers,
        )  # fmt: skip
    elif row["decoded"] == HERE:
        constants |= {"GATHERED": bool(request["gathered"]), "HELD": row["part_rows"], "FRONT": min(FRONT, row["stages"]), "M": 16 * row["warps"],
                      "PARTS": rows // (16 * row["warps"])}  # fmt: skip
        text = template("expert_few_sm90").render(name=symbol, constants=constants, arguments=arguments, listed=max(32, padded(experts)))
    else:
        constants |= {"GATHERED": bool(request["gathered"]), "STEP": STEP, "CHUNK": 4 if tokens > 64 else 8, "PIECE": row["part_columns"]}
        text = template("expert_linear_sm90").render(
            name=symbol, constants=constants, arguments=arguments, part=part, spread=row["spread"], flags=some * rows // 16,
            halved=tokens == 128, listed=max(32, padded(experts)),
        )  # fmt: skip
    parameters = tuple((role, POINTERS[b.element]) for role, b in zip(arguments, buffers, strict=True))
    return Source(symbol, text + "\n", parameters, rows * tokens, 0, "gluon", row["warps"])


def _powers(width: int) -> list[int]:
    """The powers of two whose sum it is, the largest first."""
    return [1 << i for i in reversed(range(width.bit_length())) if width >> i & 1]


def _cuts(row: Schedule, n: int, k: int, experts: int) -> bool:
    """Whether the templates have a form for what a row says."""
    rows, warps = row["block_n"], row["warps"]
    if row["block_k"] != STEP or row["stages"] < 2 or row["decoded"] not in (IN_FRONT, HERE):
        return False
    if row.get("part") == 0:
        return warps == row["part_rows"] and row["part_turns"] == 1 and row["part_columns"] % WARP_COLUMNS == 0
    if row["decoded"] == HERE:
        parts = rows // (16 * warps)
        return rows % (16 * warps) == 0 and row["block_m"] == HELD and 1 <= row["part_rows"] <= HELD and (parts == 1 or k >= row["stages"] * STEP)
    if row.get("instances", 0):
        form = SHARED.get(row["block_m"])
        wanted = form and (16 * form.warps, form.warps, form.stages, IN_FRONT)
        return (rows, warps, row["stages"], row["decoded"]) == wanted and n % rows == 0 and experts <= CROWDED
    return rows in (ROWS * warps // 4, ROWS * warps // 2) and row["stages"] > 2


def _case(rows: int, gathered: bool) -> tuple[Request, Schedule]:
    """A small request of the kind, with the row that its tile kernel was compared with."""
    x = Tensor((None, 5120), Q8) if gathered else Tensor((None, 6, 5120), Q8)
    views = (x, Tensor((16, 2304, 5120), FP4_WEIGHT), Tensor((None, 6), INT32), Tensor((17,), INT32))
    request = Request("moe.expert_linear", (("gathered", gathered),), views, (Tensor((None, 6, 2304), BF16),))
    return request, row(request, rows)


CASES = (_case(1, True), _case(128, False), _case(512, False), _case(4096, True))
MEANINGS = ("28f75cf76d9036ec", "7d3c0fb8118e589d", "0e1a5f389f8088d8", "a714757058a5231a")
"""Digests of their tile kernels as they were when the source was checked on a GPU."""
