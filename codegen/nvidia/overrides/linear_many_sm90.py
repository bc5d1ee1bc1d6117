"""The form of a linear layer for more than 128 rows on SM90 whose left factor is decoded in registers: coverage, schedule rows, source.

FP8 rows with scales of 32 columns, or BF16 rows (then in groups too), times an FP8 weight with scales of 32x32 elements. It computes what the tile
kernels of the same row compute: segments of K from zero on, 16 columns after another, added in order. A right factor of codes is decoded by a launch
in front, and lies as the tensor cores read it; BF16 rows stay where they are. Preconditions: scales of the left factor lie between 2^-92 and 2^39,
those of the right one below 2^86. Loaders hold weights to that; rows of x are not looked at: smaller groups of one are lost, as they would be beside
any other group of it in a sum of FP32, and sums of BF16 rows are kept times 2^-32.

What orders copies, reads and products:
  full   a buffer's bytes have come                                                    all wait before they read them
  empty  the products that read a buffer are done (a lane of every warp says so)       who starts copies into it waits
Triton orders its own accesses to shared memory by barriers of all warps; these waits and copies are text that it does not look into, so that no
such barrier stands in the loop. Copies, reads and products are ordered by `full` and `empty` alone.
"""

from collections.abc import Sequence

from tapeout.codegen.kernel import Buffer, Request, Schedule
from tapeout.codegen.nvidia.emit import POINTERS, EmitError, Source
from tapeout.codegen.nvidia.facts import Chip
from tapeout.codegen.nvidia.overrides import fp8_linear
from tapeout.codegen.nvidia.overrides import linear_many_ptx as ptx
from tapeout.codegen.nvidia.overrides.fp8_linear import is_scaled, shape
from tapeout.codegen.nvidia.overrides.templates import template
from tapeout.dialects.format import BF16, FP8_WEIGHT, Q8
from tapeout.dialects.types import Tensor

LEFT, STEP, WARPS, DECODE_COLUMNS, DECODE_ROWS = 128, 128, 8, 256, 16
WIDEST = 192
"""Rows of the right factor that registers hold sums and totals of; blocks of more have buffers of half a step, of which more are under way."""
PIECES = (64, 32, 16)
"""Columns that leave through shared memory at a time."""
LEAST_STAGES, MOST_STAGES = 2, 6
MOST_COLUMNS, MOST_ROWS = 8192, 512
"""A wider weight and more rows than these fill every multiprocessor with blocks of the plain form."""
FIRST_WAVE, LATER_WAVE, EACH_STEP, EACH_ROW, IN_HALVES, IN_PAIRS = 3.0, 6.0, 0.40, 0.003, 0.07, 0.12
DECODING, EACH_ELEMENT, SECOND_LAUNCH, EACH_TOTAL, SUM_BYTES = 1.2, 0.8e-6, 1.2, 4.9e-6, 5e6
PLAIN_STEP, PLAIN_WIDE_STEP, PLAIN_ALONE = 0.96, 1.63, 0.9
"""Microseconds, and bytes in one: of a first and of a later instance but for their steps, of a step, of each row of the right factor in it, and what
buffers of half a step and codes that are read two by two cost; of a launch that decodes, of each number, of a launch that adds up segments, of each
number of its result, and how many bytes of sums are written; of a step of the plain form, also in wide blocks, and what is left of it where half of
the chip has nothing to do. Measured on an H200."""
_Cut = tuple[float, int, Schedule]
BARRIER_BYTES = 256
LEAST_SCALE, MOST_SCALE = 35, 166  # 2^-92, 2^39
LAUNCHES, PLACE = (0, 1, None), 3
"""The launches it stands for; its place among the overrides of linear layers."""
_PLAIN = {"panel": 0, "weights_first": 1, "ahead": 1, "split": 0, "group": 0, "total_columns": 256, "part_columns": DECODE_COLUMNS,
          "part_rows": DECODE_ROWS, "segments": 8, "override": PLACE, "block_k": 64, "warps": WARPS, "stages": 3}  # fmt: skip
_GROUPED = Request("nn.linear", (("groups", 8), ("wide", False)), (Tensor((None, 32768), BF16), Tensor((8192, 4096), FP8_WEIGHT)),
                   (Tensor((None, 8192), BF16),))  # fmt: skip
_CASE = Request("nn.linear", (("groups", 1), ("wide", False)), (Tensor((None, 5120), Q8), Tensor((1280, 5120), FP8_WEIGHT)),
                (Tensor((None, 1280), BF16),))  # fmt: skip
CASES: tuple[tuple[Request, Schedule], ...] = (
    (_CASE, {**_PLAIN, "decoded": 4, "rows_first": 1, "block_m": LEFT, "block_n": 160, "turns": 2}),
    (_CASE, {**_PLAIN, "decoded": 2, "rows_first": 0, "block_m": 96, "block_n": LEFT, "turns": 1}),
    (_GROUPED, {**_PLAIN, "segments": 4, "decoded": 6, "rows_first": 0, "block_m": LEFT, "block_n": LEFT, "turns": 1}),
)
"""Rows of x on the left, the weight on the left, and BF16 rows."""
MEANINGS = ("5d6abe74f64f54d9", "dd2caa8c7133f1b7", "2ca833c85cb48e8b")
"""Digests of their tile kernels as they were when the source was checked on a GPU."""


def why_not(request: Request, chip: Chip) -> str | None:
    """Why a request is left to the plain form; None where it is covered."""
    reason = fp8_linear.why_not(request, chip, LEFT, DECODE_COLUMNS)
    if reason is None and is_scaled(request) and request["groups"] != 1:
        return f"FP8 rows in {request['groups']} groups: expected one group, or BF16 rows"
    return reason


def row(request: Request, chip: Chip, segments: int, rows: int) -> Schedule | None:
    """What the schedule row of a bucket of `rows` rows has instead of a plain row's entries; None where the plain form is as fast.

    Many rows lie on the left: their decoding costs no launch then, and each instance takes so many blocks of columns that one wave of instances
    is all. Of fewer rows the weight lies on the left: it is read once, as codes; segments are instances of their own where there are too few.
    """
    found = best(request, chip, segments, rows)
    if found is None or found[0] >= _plain_microseconds(*shape(request), rows, segments, chip, is_scaled(request)):
        return None
    return found[1]


def best(request: Request, chip: Chip, segments: int, rows: int) -> tuple[float, Schedule] | None:
    """The cheapest cut: microseconds, and the row's own entries; None where the request is left to other forms."""
    if why_not(request, chip) is not None or shape(request)[1] % (segments * STEP):
        return None
    n, k = shape(request)
    if n > MOST_COLUMNS and rows > MOST_ROWS:
        return None
    scaled = is_scaled(request)
    found = [*(_rows_left(n, k, rows, chip) if segments > 1 and scaled else []), *_weight_left(n, k, rows, segments, chip, scaled)]
    microseconds, _, settings = min(found, key=lambda cut: cut[:2])
    return microseconds, settings


def _rows_left(n: int, k: int, rows: int, chip: Chip) -> list[_Cut]:
    found: list[_Cut] = []
    for tile in (t for t in range(PIECES[-1], WIDEST + 1, PIECES[-1]) if n % t == 0):
        blocks = n // tile
        for turns in (t for t in range(1, blocks + 1) if blocks % t == 0):
            waves = -(-(-(-rows // LEFT) * blocks // turns) // chip.processors)
            time = _decoding_microseconds(n * k) + _microseconds(waves, turns * k // STEP, tile)
            settings = {**_settings(tile), "decoded": 4, "rows_first": 1, "block_m": LEFT, "block_n": tile, "turns": turns}
            found.append((time, -turns, settings))
    return found


def _weight_left(n: int, k: int, rows: int, segments: int, chip: Chip, scaled: bool) -> list[_Cut]:
    found: list[_Cut] = []
    for tile in range(PIECES[-1], 2 * LEFT + 1, PIECES[-1]):
        for split in (0, 1) if segments > 1 and scaled else (0,):
            parts = segments if split else 1
            waves = -(-(n // LEFT * -(-rows // tile) * parts) // chip.processors)
            time = _microseconds(waves, k // STEP // parts, tile, scaled) + _decoding_microseconds(rows * k if scaled else 0)
            if split:
                time += SECOND_LAUNCH + rows * n * EACH_TOTAL + 4 * rows * n * parts / SUM_BYTES
            if split or segments == 1 or tile <= WIDEST:
                settings = {**_settings(tile), "rows_first": 0, "block_m": tile, "block_n": LEFT, "turns": 1, "split": split}
                found.append((time, tile, settings | ({"decoded": 2} if scaled else {"decoded": 6, "part_warps": 1})))
    return found


def _microseconds(waves: int, steps: int, tile: int, scaled: bool = True) -> float:
    """Of the launch that multiplies."""
    step = EACH_STEP + tile * EACH_ROW + (IN_HALVES if _columns(tile) < STEP else 0) + (0 if scaled else IN_PAIRS)
    return FIRST_WAVE + (waves - 1) * LATER_WAVE + waves * steps * step


def _decoding_microseconds(elements: int) -> float:
    return DECODING + elements * EACH_ELEMENT


def _plain_microseconds(n: int, k: int, rows: int, segments: int, chip: Chip, scaled: bool) -> float:
    """Of the plain form for many rows: both factors decoded in front, blocks of 128 rows times 128 columns, or 256 without segments."""
    blocks = n / (LEFT if segments > 1 else 2 * LEFT) * -(-rows // LEFT)
    step = (PLAIN_STEP if segments > 1 else PLAIN_WIDE_STEP) * (1 if blocks > chip.processors // 2 else PLAIN_ALONE)
    front = _decoding_microseconds(n * k) + (_decoding_microseconds(rows * k) if scaled else 0)
    return front + max(1.0, blocks / chip.processors) * (k / STEP * step + DECODING)


def _settings(tile: int) -> Schedule:
    return {"split": 0, "group": 0, "ahead": 1, "override": PLACE, "block_k": 64, "part_columns": DECODE_COLUMNS, "part_rows": DECODE_ROWS,
            "warps": WARPS, "stages": _stages(tile)}  # fmt: skip


def _columns(tile: int) -> int:
    """Of K, in a buffer."""
    return STEP if tile <= WIDEST else STEP // 2


def _read_bytes(tile: int) -> int:
    """Of a buffer: codes of the left factor, BF16 numbers of the right one."""
    return (LEFT + 2 * tile) * _columns(tile)


def _pieces(tile: int) -> list[int]:
    """How the columns of a block leave: in widths that are powers of two."""
    return [PIECES[0]] * (tile // PIECES[0]) + [p for p in PIECES[1:] if tile & p]


def _staged_bytes(tile: int) -> int:
    return sum(2 * LEFT * p for p in set(_pieces(tile)))


def _stages(tile: int) -> int:
    """Buffers in shared memory."""
    room = 227 * 1024 - BARRIER_BYTES - _staged_bytes(tile)
    return min(MOST_STAGES, room // _read_bytes(tile))


def source(symbol: str, request: Request, buffers: Sequence[Buffer], row: Schedule) -> Source | None:
    """The source of a launch under its symbol, None for one that adds up segments; `buffers` in launch order. Raises `EmitError` where the
    row cuts otherwise than it can."""
    if row["split"] and row.get("part") is None:
        return None
    tile, reason = _tile(row), _cannot_cut(row, *shape(request), is_scaled(request))
    if reason is not None:
        raise EmitError(f"kernel {symbol}: the override for many rows finds {reason}; set override to 0")
    scaled, rows_left = is_scaled(request), row["decoded"] == 4
    arguments = ("x", *(("x_scales",) if scaled else ()), "codes", "scales", "out", "decoded", *(("sums",) if row["split"] else ()), "count")
    x, weight = ("x", "x_scales"), ("codes", "scales")
    (left, left_scales), (right, right_scales) = (x, weight) if rows_left else (weight, x)
    given = {"name": symbol, "constants": _constants(request, row, tile), "arguments": arguments, "rows_left": rows_left, "left": left,
             "left_scales": left_scales, "right": right, "right_scales": right_scales, "in_order": not scaled}  # fmt: skip
    if row.get("part") == 0:
        given["constants"] = decode_constants(row, shape(request)[1]) | {"N": shape(request)[0]}
        maps = ptx.tensor_maps(shape(request)[1], tile, _columns(tile), *(() if scaled else (shape(request)[1] * request["groups"],)))
        text = template("linear_many_sm90_decode").render(**given, ptx=ptx, scaled=True, turned=False, tensor_maps=maps)
    else:
        pieces = _pieces_left(tile, rows_left, bool(row["split"]))
        text = template("linear_many_sm90_products").render(**given, **pieces, **_words(tile, not scaled))
    parameters = tuple((name, POINTERS[b.element]) for name, b in zip(arguments, buffers, strict=True))
    return Source(symbol, text + "\n", parameters, LEFT * tile, 0, "gluon")


def decode_constants(row: Schedule, columns: int) -> dict[str, int]:
    """Of the launch that decodes the right factor, which has so many columns."""
    return {"K": columns, "PART_ROWS": row["part_rows"], "PART_COLUMNS": row["part_columns"], "WARPS": row["warps"]}


def _tile(row: Schedule) -> int:
    """Rows of the right factor that a block takes."""
    return row["block_n" if row["decoded"] == 4 else "block_m"]


def _cannot_cut(row: Schedule, n: int, k: int, scaled: bool) -> str | None:
    """Why a row is not one of this override's."""
    rows_left, tile = row["decoded"] == 4, _tile(row)
    other = row["block_m" if rows_left else "block_n"]
    asked = row["decoded"] in ((2, 4) if scaled else (6,)) and bool(row["rows_first"]) == rows_left
    if not asked or row["group"] or (rows_left and row["split"]):
        return f"decoded {row['decoded']}, rows_first {row['rows_first']}, group {row['group']}, split {row['split']}"
    if other != LEFT or tile % PIECES[-1] or not PIECES[-1] <= tile <= 2 * LEFT or n % (tile if rows_left else LEFT):
        return f"blocks of {row['block_m']} times {row['block_n']}"
    turns = max(row.get("turns", 1), 1)
    if turns > 1 and (not rows_left or n // tile % turns):
        return f"{turns} turns"
    if k % (STEP * row["segments"]) or k % row["part_columns"] or row["part_columns"] % DECODE_COLUMNS:
        return f"{row['segments']} segments, part_columns {row['part_columns']}"
    if (row["warps"] != WARPS and row.get("part") != 0) or not LEAST_STAGES <= row["stages"] <= _stages(tile):
        return f"{row['warps']} warps, {row['stages']} stages"
    return None


def _constants(request: Request, row: Schedule, tile: int) -> dict[str, int | bool]:
    n, k = shape(request)
    steps = k // STEP // row["segments"]
    return {"N": n, "K": k, "WIDTH": n // request["groups"], "TILE": tile, "COLUMNS": _columns(tile), "SEGMENTS": row["segments"], "STEPS": steps,
            "TURNS": max(row.get("turns", 1), 1), "STAGES": row["stages"], "ATOMS": tile * _columns(tile) * 2 // 1024,
            "SPLIT": bool(row["split"]), "ROWS_LEFT": row["decoded"] == 4, "TURN_STEPS": steps if row["split"] else k // STEP}  # fmt: skip


def _pieces_left(tile: int, rows_left: bool, split: bool) -> dict[str, object]:
    """How sums leave: pieces, their first columns, and shapes and swizzles of what they pass through."""
    pieces = _pieces(tile)
    shapes = {p: [LEFT, p] if rows_left else [p, LEFT] for p in sorted(set(pieces), reverse=True)}
    staged = {} if split else {p: (shape, min(128, 2 * shape[1])) for p, shape in shapes.items()}
    form = {"pieces": pieces, "firsts": [sum(pieces[:i]) for i in range(len(pieces))], "turns": "TURNS", "drain": ptx.drain(tile),
            "drain_operands": ptx.drain_operands(tile)}  # fmt: skip
    return {"stored": False, "pieces": pieces, "forms": [form], "staged": staged, "target": "sums" if split else "out"}


def _words(tile: int, in_order: bool) -> dict[str, object]:
    """The PTX of the launch that multiplies."""
    columns = _columns(tile)
    halves, quarters = columns * 2 // STEP, [q % (columns // 32) for q in range(4)]
    read = [ptx.read_pairs(q, columns) if in_order else ptx.read(q // 2) for q in quarters]
    return {"copies": ptx.copies(tile, columns, in_order), "read": read, "read_operands": ptx.READ_HALF_OPERANDS, "acquire": ptx.acquire(),
            "warp": ptx.WARP, "decode": [ptx.quarter(q, in_order) for q in range(4)], "decode_operands": ptx.QUARTER_OPERANDS, "wait": ptx.WAIT,
            "products": [ptx.quarter_products(tile, q, halves) for q in range(4)], "operands": ptx.product_operands(tile)}  # fmt: skip
