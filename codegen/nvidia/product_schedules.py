"""Schedule rows of matrix products: linear layers, expert products, the mixer; one row for each class of row buckets.

Classes differ in how the work is cut and where factors are decoded, never in the order of sums: K has the same segments in all of them. Few rows:
the bytes of the weight are all that counts, so its segments are instances of their own and many copies are under way. Many rows: products count,
so factors are decoded once, by launches in front, or in registers (overrides). A chip with block-scaled products multiplies codes as they are.
"""

from tapeout.codegen.kernel import Request, Schedule
from tapeout.codegen.nvidia.block_sizes import fitting, padded, power
from tapeout.codegen.nvidia.facts import Chip
from tapeout.codegen.nvidia.overrides import (
    expert_linear_sm90,
    linear_few_sm90,
    linear_many_sm90,
    linear_once_sm90,
    linear_some_sm90,
    linear_wide_sm90,
)
from tapeout.codegen.row_values import columns_of
from tapeout.dialects.types import Tensor

SCALE_GROUP = 32
FEW, SOME, MIDDLE = 16, 128, 384
"""Largest buckets of the first two classes of rows, and of narrow layers' blocks for some rows."""
NARROW = 64
"""Columns of a group without which products are no wgmma, and the plain forms of codes then sum 16 columns that are not next to each other, unlike
forms that decode in front: one row serves all buckets of such a layer, so that they have the same bits."""
STEP = 64
"""A segment of K is a multiple of twice as many columns."""
LARGE = 8 << 20
READ_ONCE = LARGE // 2
"""Elements of a weight that more rows than a block of some rows are worth reading it once for. Of smaller ones it is launches that cost."""
LEAST_SEGMENT, LEAST_OF_SMALL = 1024, 512
"""Columns of K that a segment of a weight of at least LARGE elements has, and of a smaller one."""
BLOCKS_EACH = 4
"""Instances that a launch for few rows should give every multiprocessor."""
HEAD_COLUMNS = 1 << 16
"""Columns of a weight that blocks of 128 and more cut into enough instances for every multiprocessor."""
FEW_RESULTS = MIDDLE << 9
"""Of a narrow layer: so many are cut into blocks of 64, or there were too few instances."""
MIXER_STEP, MIXER_SEGMENTS, MIXER_GROUP, MIXER_JOINED = 64, 80, 10, 1024


def _weight(request: Request) -> tuple[int, int, bool]:
    """Rows and columns of the weight; whether it has scales."""
    view = request.operands[1]
    assert isinstance(view, Tensor)
    n, k = view.sized(0)[-2:]
    return n, k, view.number.scaling is not None


def _scaled_rows(request: Request) -> bool:
    view = request.operands[0]
    return isinstance(view, Tensor) and view.number.scaling is not None


def _is_bf16(request: Request) -> bool:
    return all(isinstance(v, Tensor) and v.number.scaling is None and v.number.element == "bf16" for v in request.operands[:2])


def segments(n: int, k: int, blocks: int, chip: Chip) -> int:
    """The least power of two that gives the chip enough instances, each long enough that many rows lose little by it."""
    least = LEAST_SEGMENT if n * k >= LARGE else LEAST_OF_SMALL
    found = [s for s in (1, 2, 4, 8, 16) if s <= k // least and k % (s * 2 * STEP) == 0]
    return next((s for s in found if s * blocks >= BLOCKS_EACH * chip.processors), found[-1] if found else 1)


def linear(request: Request, chip: Chip) -> Schedule:
    """The row for the largest bucket."""
    return linear_for(request, chip, SOME + 1)


def linear_for(request: Request, chip: Chip, rows: int) -> Schedule:
    """The row for launches of at most `rows` rows."""
    n, k, scaled = _weight(request)
    columns = n // request["groups"]
    least = 128 if chip.scaled_products and scaled and _scaled_rows(request) else 64
    block_n = min(least, 1 << (columns.bit_length() - 1))
    count = segments(n, k, request["groups"] * -(-columns // block_n), chip) if columns % block_n == 0 else 1
    row = {"block_n": block_n, "panel": 0, "weights_first": 1, "segments": count, "ahead": 0, "decoded": 0, "split": 0, "group": 0, "rows_first": 0,
           "total_columns": power(n, 256), "part_columns": power(k, 256), "part_rows": 1}  # fmt: skip
    if chip.scaled_products and scaled and _scaled_rows(request):
        return {**row, **_scaled_linear(k, rows, count)}
    return {**row, **_decoded_linear(request, chip, rows, count, block_n)}


def _scaled_linear(k: int, rows: int, count: int) -> Schedule:
    """Codes multiplied as they are: tokens fill the columns of the product."""
    block_k = power(k // count, 128, SCALE_GROUP) if k % STEP == 0 else fitting(k, 128, SCALE_GROUP)
    tokens = max(16, min(128, padded(rows)))
    return {"block_m": tokens, "block_k": block_k, "split": int(rows <= SOME and count > 1), "warps": 8, "stages": 3}


def _decoded_linear(request: Request, chip: Chip, rows: int, count: int, block_n: int) -> Schedule:
    """Factors decoded to BF16."""
    n, k, scaled = _weight(request)
    width = n // request["groups"]

    def step(limit: int) -> int:
        return power(k // count, limit, SCALE_GROUP) if not scaled or k % STEP == 0 else fitting(k, limit, SCALE_GROUP)

    found = {"split": int(rows <= SOME and count > 1), "ahead": int(scaled or _scaled_rows(request))}
    if rows <= FEW or (width < NARROW and (scaled or _scaled_rows(request))):
        few = linear_few_sm90.row(request, chip, count)
        return {**found, **(few or {"block_m": 16, "block_k": step(2 * STEP), "decoded": 1, "warps": 4, "stages": _few_stages(n, k // count, chip)})}
    if (head := linear_wide_sm90.row(request, chip, count, rows)) is not None:
        return {**found, **head}
    if rows <= SOME and _is_bf16(request):
        return {**_bf16_linear(width, k, count, block_n), **found}
    if rows <= SOME:
        own = _some_rows(request, chip, count, rows)
        return {**found, **(own or {"block_m": 64, "block_k": step(2 * STEP), "decoded": 2, "warps": 4, "stages": 3})}
    own = linear_many_sm90.row(request, chip, count, rows)
    if own is not None:
        return {**found, **own}
    if _is_bf16(request) and count > 1 and _leaves_room(n, k, count, rows, chip):
        return {**found, **_narrow_linear(width, k, count, rows), "split": 1}
    if width % 128:
        return {**found, "block_m": 64, "block_k": step(STEP), "decoded": 3, "group": 8, "part_rows": 16, "warps": 4, "stages": 4}
    wide = 256 if count == 1 and width % 256 == 0 else 128
    return {**found, "block_m": 128, "block_n": wide, "block_k": step(STEP), "decoded": 3, "group": 8, "rows_first": 1, "part_rows": 16,
            "warps": 8, "stages": 3 if wide > 128 else 4}  # fmt: skip


def _some_rows(request: Request, chip: Chip, count: int, rows: int) -> Schedule | None:
    """An override's entries: blocks of few rows side by side where the weight is small; one launch where the weight is large and its segments are
    short; blocks of 64 rows; or, for more rows, those that read the weight once where that costs less."""
    if rows <= linear_some_sm90.TOKENS:
        beside = linear_few_sm90.row(request, chip, count, rows) if _scaled_rows(request) else None
        return beside or linear_once_sm90.row(request, chip, count) or linear_some_sm90.row(request, chip, count, rows)
    some, many = linear_some_sm90.best(request, chip, count, rows), linear_many_sm90.best(request, chip, count, rows)
    n, k, _ = _weight(request)
    if some is None or many is None or n * k < READ_ONCE:
        return None if some is None else some[1]
    return min(some, many, key=lambda cut: cut[0])[1]


def _few_stages(n: int, each: int, chip: Chip) -> int:
    """Of a large weight no more buffers than a segment of `each` columns has steps: the room is for more instances (measured on an H200)."""
    return min(4, max(2, each // (2 * STEP))) if n * each >= LARGE and not chip.tensor_memory_bytes else 4


def _bf16_linear(width: int, k: int, count: int, block_n: int) -> Schedule:
    """Some BF16 rows times a BF16 weight. Heads are wide and are asked for several rows of every sequence: row blocks share what a cache
    holds of the weight. Of small weights narrow blocks make enough instances.
    """
    row = {"decoded": 2, "block_m": 64, "block_n": block_n, "warps": 4, "stages": 4}
    if width >= HEAD_COLUMNS and width % 256 == 0 and k >= LEAST_SEGMENT:
        return {**row, "block_n": 256, "block_k": power(k, STEP), "rows_first": 1, "group": 8, "warps": 8}
    if width >= HEAD_COLUMNS and width % 128 == 0:
        return {**row, "block_n": 128, "block_k": power(k, STEP), "warps": 8, "stages": 3}
    if count > 1:
        return {**row, "block_m": 32, "block_n": block_n if block_n >= 64 else min(block_n, 16), "block_k": power(k // count, 2 * STEP)}
    return {**row, "block_k": power(k // count, 2 * STEP), "stages": 3}


def _leaves_room(n: int, k: int, count: int, rows: int, chip: Chip) -> bool:
    """Whether segments of a layer should be instances of their own for many rows too: what they hand on is little beside x, or blocks of 128 rows
    and columns are instances for less than half of the chip."""
    return 4 * count * n <= k or 2 * -(-n // 128) * -(-rows // 128) < chip.processors


def _narrow_linear(width: int, k: int, count: int, rows: int) -> Schedule:
    """Blocks of a BF16 layer of few columns: enough for the whole chip, and copies of whole segments under way."""
    row = {"decoded": 2, "warps": 4, "stages": 4}
    if width < NARROW:
        few = {"block_m": 32, "block_n": 16} if rows <= MIDDLE else {"block_m": 32} if rows <= 2 * MIDDLE else {"block_m": 64, "stages": 3}
        return {**row, "block_k": power(k // count, 2 * STEP), "total_rows": 8, "warps": 1, "part_warps": 4, **few}
    if rows * width <= FEW_RESULTS or width % 128:
        return {**row, "block_m": 64, "block_k": power(k // count, STEP)}
    return {**row, "block_m": 128, "block_n": 128, "block_k": power(k // count, STEP), "rows_first": 1, "part_warps": 8}


def expert_linear(request: Request, chip: Chip) -> Schedule:
    """The row for the largest bucket."""
    return expert_linear_for(request, chip, SOME + 1)


def expert_linear_for(request: Request, chip: Chip, rows: int) -> Schedule:
    """Packed weights as stored on the left. The mean of an expert's pairs and a third make one block: they are not spread evenly."""
    if expert_linear_sm90.why_not(request, chip) is None:
        return expert_linear_sm90.row(request, rows)
    n, k, _ = _weight(request)
    view = request.operands[1]
    assert isinstance(view, Tensor)
    pairs = padded(max(1, 4 * rows * columns_of(request.operands[2]) // (3 * view.sized(0)[0])))
    piece = power(k, 512, 2 * SCALE_GROUP)
    row = {"panel": 0, "weights_first": 1, "decoded": 0, "part_columns": piece, "part_turns": k // piece if rows > SOME else 1}
    if chip.scaled_products:
        return {**row, "block_m": max(16, min(64, pairs)), "block_n": power(n, 128), "block_k": 128, "warps": 8, "stages": 3}
    if rows > SOME and n % 128 == 0:
        return {**row, "decoded": 1, "block_m": 128, "block_n": 128, "block_k": 128, "warps": 8, "stages": 4}
    tokens = max(16, min(64, pairs))
    return {**row, "decoded": 1, "block_m": tokens, "block_n": power(n, 64), "block_k": 128, "warps": 4, "stages": 3,
            "registers": 96 if tokens <= 16 else 0}  # fmt: skip


def mixer(request: Request, chip: Chip) -> Schedule:
    """The row for the largest bucket."""
    return mixer_for(request, chip, MIXER_JOINED + 1)


def mixer_for(request: Request, chip: Chip, rows: int) -> Schedule:
    """One panel holds all coefficients: rounded up to a power of two they lie row by row. K in segments keeps the chip busy with few rows, whose
    instances read a segment in two steps (of one Triton makes a single sum of all thirds); with many, an instance adds a group of segments up (Triton
    3.9 falls over sums in tensor memory that start anew), two instances on a multiprocessor, which the registers allow if fn is decoded in front."""
    count, k, _ = _weight(request)
    whole = k // MIXER_STEP if k % MIXER_STEP == 0 else 1
    cut = max((s for s in range(1, MIXER_SEGMENTS + 1) if whole % s == 0 and whole > s), default=1)
    step = power(k // cut, MIXER_STEP, 16)
    row = {"panel": padded(count + 1), "segments": cut, "square_columns": step, "block_k": step, "warps": 1,
           "grouped": max(d for d in range(1, MIXER_GROUP + 1) if cut % d == 0)}  # fmt: skip
    if rows > MIXER_JOINED:
        joined = {"joined": 1, "finished_rows": 32, "decoded": 1, "part0_warps": 4, "registers": 128}
        found = joined if row["grouped"] > 1 and not chip.tensor_memory_bytes else {"finished_rows": 1}
        return {**row, "block_rows": 128, "stages": 3, "part_warps": 8, **found}
    apart = {**row, "joined": 0, "finished_rows": 1, "stages": 3 if rows <= MIDDLE else 4, "part_warps": 4}
    if rows > NARROW or not few_alone(chip):
        fourth = 3 * chip.processors < cut * -(-rows // 64) <= 4 * chip.processors  # that a multiprocessor holds only if it is told to
        return {**apart, "block_rows": 64, "registers": 128 if fourth and not chip.tensor_memory_bytes else 0}
    return {**apart, "block_rows": 16, "block_k": 2 * step if (k // cut) % (2 * step) == 0 and k // cut > 2 * step else step}


def few_alone(chip: Chip) -> bool:
    """Whether few rows on the left of a product may be a block of 16, which takes another instruction than one of 64. On SM90 both give the same
    bits, measured on an H200; where nobody has compared them, all row buckets take the one."""
    return not chip.tensor_memory_bytes


def for_bucket(family: str, request: Request, row: Schedule, rows: int, chip: Chip) -> Schedule:
    """The row of a bucket of `rows` rows; `row` where the family has one for all."""
    if family == "linear":
        return linear_for(request, chip, rows)
    if family == "mixer":
        return mixer_for(request, chip, rows)
    return expert_linear_for(request, chip, rows) if family == "expert_linear" else row
