"""Schedule rows of the NVIDIA targets: block sizes, warps and stages per kernel family.

A row serves all row buckets, products and selection have rows of their own for some; instances without rows leave. Weights lie row by row
([K, N], panel 0). Extents are powers of two where the shape allows: others are rounded up and their lanes idle. `warps` and `stages` are for
the compiler.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tapeout.codegen.kernel import EAGER, STREAMED, Request, Schedule, width
from tapeout.codegen.nvidia import product_schedules
from tapeout.codegen.nvidia.block_sizes import fitting, padded, power
from tapeout.codegen.nvidia.facts import Chip
from tapeout.codegen.nvidia.overrides import attend_sm90
from tapeout.codegen.row_values import columns_of
from tapeout.dialects.types import Tensor

Row = Callable[[Request, Chip], Schedule]

SCALE_GROUP = 32
ROW_COLUMNS = 1024  # columns of a row-wise tile: a few for each thread
SHORT_COLUMNS = 256  # the same where a block is several rows
HELD_COLUMNS = 8192  # columns of rows that four warps hold: 64 numbers a thread
HELD_STREAMS = 20480  # columns of all streams of a row that sixteen warps hold
ROW_ELEMENTS = 1024  # elements of a row-wise tile of several narrow rows
NARROW_COLUMNS, NARROW_ROWS = 256, 4  # columns of rows that come in blocks of so many: an instance takes longer to start than a warp works on one
WARP_COLUMNS, WARP_BLOCK = 1280, 256  # columns of rows that a warp holds, and what it reads at once: two warps would add up in another order than one
WARP_REGISTERS = 64  # of its threads: all rows of the largest launches are on a chip at once
FEW_ROWS = 64  # largest bucket in which rows are instances of their own
MOVED_COLUMNS = 4096
CODED_COLUMNS = 4096  # columns of heads that a warp rotates and encodes
LONG_COLUMNS = 4096  # columns of a tile of logits
PIECE_COLUMNS, LEVELS, LISTED = 2048, 17, 32768  # of a row of logits that is drawn from
SHARED, DRAWING_REGISTERS = 1024, 128  # instances that share all pieces of all rows: a chip holds them at once
LOOKED_UP, LOOKING_UP = 64, 8  # rows of a table that an instance asks for at once, and instances: PCIe has enough, launches beside them the chip
LANES_EACH = 8  # elements of a tile for each thread
GATE_SEGMENT = 512  # columns that one instance of the gate multiplies
FEW_EXPERTS, MOST_GATED = 64, 1024  # scores that a warp chooses from; rows up to which a gate's launch waits for its first bytes most of the time
FEWEST_GATED = 16  # rows of a gate whose blocks of experts are small: more instances read the weight at once
STREAMED_BLOCKS = 3  # of columns: what a sum over many streams reads ahead; four leave fewer instances room (measured)
TOGETHER = ("rms_norm", "quantize", "swiglu", "rope", "norm_rope_quantize")
"""Families whose rows come in blocks where there are many."""
ALONE = ("collapse", "collapse_norm", "expand", "mean", "engram_gate")
"""Families whose instances have one row."""
HELD_PLACES, MOST_HELD = 8192, 17 << 10  # keys that four warps hold at ease, 64 a thread, and with little else beside them
SELECTIONS = ("select_entries", "select_within")
MOST_IN_PIECES, PIECES_AT_ONCE, LEAST_PIECE, PLACE_BITS = 128, 1024, 256, 16
THREADS = 32


def _warps(elements: int, most: int = 8) -> int:
    return max(1, min(most, padded(-(-elements // (THREADS * LANES_EACH)))))


def _compiled(row: dict[str, int], warps: int = 4, stages: int = 2) -> Schedule:
    return {**row, "warps": warps, "stages": stages}


def _multiple(request: Request) -> int:
    views = [v for v in (*request.operands, *request.results) if isinstance(v, Tensor)]
    return SCALE_GROUP if any(v.number.scaling is not None for v in views) else 1


def _rows(request: Request, chip: Chip) -> Schedule:
    """Row blocks of the last axis of the first result."""
    block = fitting(width(request.results[0]), ROW_COLUMNS, _multiple(request))
    rows = max(1, ROW_ELEMENTS // padded(block))
    return _compiled({"block_rows": rows, "block_columns": block}, _warps(rows * padded(block)))


def _norms(request: Request, chip: Chip) -> Schedule:
    """Rows are read once and held, with the weights: narrow ones by a warp each, wide ones where the registers of four warps take them."""
    n = width(request.results[0])
    if n <= WARP_COLUMNS:
        return _compiled({"block_rows": 4, "block_columns": fitting(n, WARP_BLOCK, _multiple(request)), "held": 1, "ahead": 1}, 4)
    row = _rows(request, chip)
    held = int(row["block_rows"] * n <= HELD_COLUMNS)
    return {**row, "held": held, "ahead": held, "warps": min(row["warps"], 4)}


def _quantize(request: Request, chip: Chip) -> Schedule:
    """Every block of columns has its own instances: nothing is summed, and few rows keep more of the chip busy."""
    row = _rows(request, chip)
    rows = max(2, row["block_rows"])
    return {**row, "block_rows": rows, "parts": width(request.operands[0]) // row["block_columns"]}


def _swiglu(request: Request, chip: Chip) -> Schedule:
    """Blocks of a power of two where the width has one: no lane idles in the quotients that take most of the time."""
    n = width(request.results[0])
    block = fitting(n, SHORT_COLUMNS, _multiple(request))
    rows = max(1, ROW_ELEMENTS // padded(block))
    return _compiled({"block_rows": rows, "block_columns": block, "parts": n // block}, _warps(rows * padded(block)))


def _streams(request: Request, chip: Chip) -> Schedule:
    """Column blocks of rows of a few streams: one row at a time."""
    block = fitting(width(request.operands[0]), ROW_COLUMNS, _multiple(request))
    return _compiled({"block_columns": block}, _warps(2 * padded(block), 4))


def _summed_streams(request: Request, chip: Chip) -> Schedule:
    """Every block of columns has its own instances."""
    row = _streams(request, chip)
    return {**row, "parts": width(request.operands[0]) // row["block_columns"]}


def _held_streams(request: Request, chip: Chip) -> Schedule:
    """What the streams of a row collapse to stays in registers between the sum of squares and the norm."""
    row, held = _streams(request, chip), int(width(request.operands[0]) <= HELD_COLUMNS)
    return {**row, "held": held, "ahead": held, "warps": 2 * row["warps"]}


def _lines(family: str, request: Request) -> int:
    """Rows that one row of a step is to a kernel: a choice of experts each."""
    return columns_of(request.results[0]) // width(request.results[0]) if family == "swiglu" else 1


def _norm_rope(request: Request, chip: Chip) -> Schedule:
    """A warp holds a row, and very narrow rows come in blocks; two of them in a warp would be added up in another order than one alone is."""
    n = width(request.results[0])
    block = fitting(n, ROW_COLUMNS, _multiple(request))
    rows = NARROW_ROWS if n <= NARROW_COLUMNS and request.of("nn.rope")["heads"] == 1 else 0
    return _compiled({"block_columns": block, "held": int(n <= ROW_COLUMNS), "block_rows": rows}, max(1, rows))


def _expert_gate(request: Request, chip: Chip) -> Schedule:
    """Segments of the columns times blocks of experts: enough instances for few rows."""
    view, k = request.operands[1], width(request.operands[0])
    assert isinstance(view, Tensor)
    segments = k // GATE_SEGMENT if k % GATE_SEGMENT == 0 else 1
    warps = 1 if view.sized(0)[0] <= FEW_EXPERTS else 4
    return {**_compiled({**_gate_blocks(request, MOST_GATED + 1, segments, chip), "segments": segments, "panel": 0}, warps, 3), "part_warps": 4}


def _gate_blocks(request: Request, rows: int, segments: int, chip: Chip) -> dict[str, int]:
    """Rows, experts and columns of a block: of BF16 factors none of them shows in a score. A segment of few rows is read in two steps."""
    view, k = request.operands[1], width(request.operands[0])
    assert isinstance(view, Tensor)
    few = rows <= FEW_ROWS and product_schedules.few_alone(chip)
    block_rows, columns = (16, 256) if few else (64, 128) if rows <= MOST_GATED else (64, 64)
    if not all(isinstance(v, Tensor) and v.number.element == "bf16" for v in request.operands[:2]):
        columns = 64
    most = 32 if few and rows <= FEWEST_GATED else 64 if rows <= MOST_IN_PIECES else 128
    experts = power(view.sized(0)[0], most, 16)
    return {"block_rows": block_rows, "block_n": experts, "block_k": power(k // segments, columns, 16)}


def _rope(request: Request, chip: Chip) -> Schedule:
    """Codes of many heads take most of the time: one warp has all columns of a row, and eight of them next to each other a thread."""
    rope = request.of("nn.rope")
    if rope["heads"] == 1:
        return _compiled({"block_heads": 1, "block_rows": NARROW_ROWS}, 1)
    if request.op.startswith("nn.fused") and rope["heads"] * rope["width"] <= CODED_COLUMNS:
        return _compiled({"block_heads": power(rope["heads"], rope["heads"])}, 1)
    return _compiled(_heads(request))


def _heads(request: Request) -> dict[str, int]:
    """Heads of a block of four warps."""
    rope = request.of("nn.rope")
    return {"block_heads": power(rope["heads"], max(1, 2 * ROW_ELEMENTS // rope["width"]))}


def _moved(request: Request, chip: Chip) -> Schedule:
    """Pieces of rows, powers of two; narrow rows several at a time."""
    view = request.results[0] if request.results else request.operands[0]
    columns = columns_of(view)
    block = min(MOVED_COLUMNS, 1 << (columns.bit_length() - 1))
    rows = min(64, max(1, MOVED_COLUMNS // padded(columns)))
    return _compiled({"block_rows": rows, "block_columns": block}, _warps(rows * block))


def _attend(request: Request, chip: Chip) -> Schedule:
    """All heads share decoded keys. Sums lie in tensor memory; without it they fill the registers, and keys come first: the second product
    then reads both factors from shared memory."""
    if attend_sm90.why_not(request, chip) is None:
        return attend_sm90.ROW
    settings = request.of("mla.attend")
    keys, keys_first = (16, 0) if chip.tensor_memory_bytes else (32, 1)
    sizes = {"block_heads": power(settings["heads"], 64), "block_keys": keys}
    return _compiled({**sizes, "joined": 1, "split": 1, "keys_first": keys_first}, 8, 2)


def _pieces(request: Request, row: Schedule, rows: int) -> int:
    """Pieces of a row's entries in a bucket: fewer than the chip has places for, none where rows alone fill it, where the workspace does not
    hold every row's entries, or where keys have no bits for so many places."""
    within, entries = request.op == "mla.select_within", _entries(request)
    places = request["top_k"] + entries + 2 * row["block_places"]
    bytes_of_a_row = 2 * 4 * 2 * places * (1 if within else 2)
    if rows > MOST_IN_PIECES or rows * bytes_of_a_row > row["workspace_bytes"] or places.bit_length() > PLACE_BITS:
        return 0
    return max(1, min(PIECES_AT_ONCE // rows, entries // LEAST_PIECE))


def _pieces_row(request: Request, pieces: int) -> dict[str, int]:
    """What a cut into pieces changes: one list has all entries of a row, and more warps hold it."""
    if not pieces:
        return {"pieces": 0}
    wide = {} if request.op == "mla.select_candidates" else {"block_places": 2048}
    return {"pieces": pieces, "warps": 8, "part_warps": 4, "held_places": 4 * HELD_PLACES, **wide}


def _selection(request: Request, chip: Chip) -> Schedule:
    """Candidates hold a block's worth of keys for every lane, and products of few heads are no tensor-core products: smaller tiles. Left alone
    the assembler spills a little to fit one more instance: it is told that it may use what there is."""
    keys, places = (128 if request["heads"] >= 16 else 64), (512 if request.op == "mla.select_candidates" else 1024)
    chunk, within = HELD_PLACES - max(1024, request["top_k"]), request.op == "mla.select_within"
    held = min(max(HELD_PLACES, request["top_k"] + _entries(request)), MOST_HELD) if within else HELD_PLACES
    sizes = {"workspace_bytes": 256 << 20, "chunk": chunk, "held_places": held}
    return _compiled({**sizes, "block_keys": keys, "block_places": places, "pieces": 0, "registers": 255})


def _entries(request: Request) -> int:
    """Most entries that a row selects from."""
    if request.op == "mla.select_within":
        return int(width(request.operands[6]) * request["block"])
    return int(width(request.operands[5]) * request["block_tokens"] // request["ratio"])


def _logits(operand: int) -> Row:
    def row(request: Request, chip: Chip) -> Schedule:
        block = fitting(width(request.operands[operand]), LONG_COLUMNS)
        return _compiled({"block_columns": block}, _warps(padded(block), 16))

    return row


def _draw(request: Request, chip: Chip) -> Schedule:
    """Rows in pieces: a row of a large vocabulary alone has work for a whole chip. Levels must leave few tokens between two of them."""
    n = width(request.operands[0])
    piece = fitting(n, PIECE_COLUMNS)
    row = {"block_columns": piece, "row_columns": fitting(n, LONG_COLUMNS), "pieces": n // piece, "levels": LEVELS, "listed": LISTED,
           "instances": SHARED}
    return {**_compiled(row, 16), "part_warps": _warps(padded(piece), 4), "registers": DRAWING_REGISTERS}


def _confidence(request: Request, chip: Chip) -> Schedule:
    """A row is read at once: each block of it would be waited for by itself."""
    hidden, embedded = (fitting(width(view), HELD_COLUMNS) for view in request.operands[:2])
    return _compiled({"block_hidden": hidden, "block_embedded": embedded}, _warps(padded(hidden)))


def _pool(request: Request, chip: Chip) -> Schedule:
    return _compiled({"block_columns": fitting(width(request.operands[0]) // 2, ROW_COLUMNS)})


def _fixed(warps: int = 4, **sizes: int) -> Row:
    return lambda request, chip: _compiled(dict(sizes), warps)


ROWS: Mapping[str, Row] = {
    "linear": product_schedules.linear,
    "expert_gate": _expert_gate,
    "dispatch": _fixed(block_experts=1, block_pairs=1024),
    "expert_linear": product_schedules.expert_linear,
    "mixer": product_schedules.mixer,
    "swiglu": _swiglu,
    "rms_norm": _norms,
    "quantize": _quantize,
    "norm_rope_quantize": _norm_rope,
    **dict.fromkeys(("start", "engram_gate"), _streams),
    **dict.fromkeys(("collapse", "expand", "mean", "combine"), _summed_streams),
    "collapse_norm": _held_streams,
    "rope": _rope,
    **dict.fromkeys(("embed", "take", "concat", "columns", "stack", "stage", "commit", "append"), _moved),
    **dict.fromkeys(("patch", "partners", "commits", "compress", "hash_rows"), _fixed(1, block_rows=32)),
    **dict.fromkeys(("entries", "lookback"), _fixed(1, block_rows=1)),
    "remember": _fixed(block_rows=64),
    "window": _fixed(block_rows=8),
    "lookup": _fixed(8, block_rows=LOOKED_UP, instances=LOOKING_UP),
    "attend": _attend,
    "pool": _pool,
    **dict.fromkeys(SELECTIONS, _selection),
    "correct": _logits(1),
    "draw": _draw,
    "confidence": _confidence,
}
PLAIN = _fixed()


def schedule_for(chip: Chip) -> Callable[[str, Request], Schedule]:
    """The function that gives a chip's row for a family and a request."""
    return lambda family, request: ROWS.get(family, PLAIN)(request, chip)


def bucket_rows_for(chip: Chip) -> Callable[[str, Request, Schedule, int], Schedule]:
    """The function that gives a chip's row for a bucket: family, request, the row for all buckets, rows of the bucket."""

    def row_for(family: str, request: Request, row: Schedule, rows: int) -> Schedule:
        if family in SELECTIONS:
            return {**row, **_pieces_row(request, _pieces(request, row, rows))}
        if row == attend_sm90.ROW:
            return attend_sm90.for_bucket(rows)
        if rows * _lines(family, request) <= FEW_ROWS and family in TOGETHER:
            each = max(1, row.get("block_rows", 1))
            row = {**row, "block_rows": min(1, row.get("block_rows", 1)), "warps": max(1, row["warps"] // each)}
        elif family == "rms_norm" and width(request.results[0]) <= WARP_COLUMNS:
            row = {**row, "registers": WARP_REGISTERS}
        if rows <= FEW_ROWS and family == "rope" and row["block_heads"] > 1:
            row = {**row, **_compiled(_heads(request))}
        if rows <= FEW_ROWS and family == "engram_gate" and row["block_columns"] == ROW_COLUMNS and columns_of(request.operands[0]) <= HELD_STREAMS:
            row = {**row, "held": 1, "ahead": 1, "warps": 4 * row["warps"]}
        if rows <= FEW_ROWS and family in (*TOGETHER, *ALONE):
            return {**row, EAGER: 1}
        if family == "engram_gate" and width(request.operands[0]) >= STREAMED_BLOCKS * row["block_columns"]:
            return {**row, STREAMED: STREAMED_BLOCKS}
        if family == "expert_gate":
            return {**row, **_gate_blocks(request, rows, row["segments"], chip), **({EAGER: 1} if rows <= FEW_ROWS else {})}
        return product_schedules.for_bucket(family, request, row, rows, chip)

    return row_for


def launch_settings(schedule: Mapping[str, Any]) -> tuple[int, int]:
    """(warps, stages) of a row."""
    return int(schedule["warps"]), int(schedule["stages"])
