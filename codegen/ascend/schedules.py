"""Schedule rows of Ascend 950: block sizes per kernel family, and the compiler flags that a family needs.

Row kernels take whole rows where a unified buffer holds them; products take the cube's tiles; weights lie row by row ([K, N], no panels).
A row is accepted only after its kernel's memory, link and numbers were checked (`toolchain`, `link_check`, `simulator`).
"""

from collections.abc import Mapping

from tapeout.codegen.ascend.facts import CHIPS
from tapeout.codegen.kernel import Request, Schedule, width
from tapeout.codegen.row_values import columns_of
from tapeout.codegen.schedule_rows import Row, chosen, confidence, divisor, moved
from tapeout.dialects.types import Tensor

TILE_COLUMNS = 2048  # columns of a row-wise tile
TILE_ELEMENTS = 2048  # elements of an f32 tile of a row-wise kernel: 8 KiB, some ten of them live
MOVED_COLUMNS = 8192  # columns moved at once where nothing is computed
PRODUCT_ROWS, PRODUCT_COLUMNS, PRODUCT_STEP = 128, 256, 64
SCALED_STEP = 512  # of a block-scaled product: two of its tiles on each side fill three quarters of L1
DECODED_COLUMNS = 128  # columns of a product whose weights a vector core decodes
SCALE_GROUP = 32
WORKERS = max(chip.cube_cores for chip in CHIPS.values())
TABLE_ROWS: Schedule = {"block_rows": 64}


def _multiple(request: Request) -> int:
    """Columns that a block of a row-wise kernel must hold whole: a scale group where a value is block scaled."""
    views = [v for v in (*request.operands, *request.results) if isinstance(v, Tensor)]
    return SCALE_GROUP if any(v.number.scaling is not None for v in views) else 1


def _rows(request: Request) -> Schedule:
    """Row blocks of the last axis of the first result."""
    block = divisor(width(request.results[0]), TILE_COLUMNS, _multiple(request))
    return {"block_rows": max(1, TILE_ELEMENTS // block), "block_columns": block}


def _streams(request: Request) -> Schedule:
    """Column blocks of rows of S streams: one row at a time."""
    return {"block_columns": divisor(width(request.results[0]), TILE_COLUMNS // 4, _multiple(request))}


def _linear(request: Request) -> Schedule:
    """The cube's tiles: steps of K are long where both sides are block scaled, as a vector core adds their sums."""
    weight, x = request.operands[1], request.operands[0]
    assert isinstance(weight, Tensor) and isinstance(x, Tensor)
    (n, k), groups = weight.sized(0), request["groups"]
    columns = n // groups
    decoded = weight.number.scaling is not None and x.number.scaling is None
    most = DECODED_COLUMNS if decoded else PRODUCT_COLUMNS
    step = SCALED_STEP if x.number.scaling is not None else PRODUCT_STEP
    block_n = divisor(columns, most, 16)
    return {"block_m": PRODUCT_ROWS, "block_n": min(block_n, most, columns), "panel": 0,
            "block_k": divisor(k, step, SCALE_GROUP if weight.number.scaling is not None else 1)}


def _expert_linear(request: Request) -> Schedule:
    """By staging: a weight tile of all K and these columns is unpacked once for all rows of its expert."""
    weight = request.operands[1]
    assert isinstance(weight, Tensor)
    _, n, k = weight.sized(0)
    return {"block_m": 32, "block_n": divisor(n, PRODUCT_COLUMNS, 32), "block_k": divisor(k, 8 * PRODUCT_STEP, 2 * SCALE_GROUP), "panel": 0,
            "workers": WORKERS}


def _rope(request: Request) -> Schedule:
    rope = request.of("nn.rope")
    return {"block_heads": divisor(rope["heads"], max(1, TILE_ELEMENTS // rope["width"]))}


def _attend(request: Request) -> Schedule:
    """Heads of an instance, keys a block, and keys that a launch in front decodes at once."""
    settings = request.of("mla.attend")
    return {"block_heads": divisor(settings["heads"], 32), "block_keys": 128, "decoded_keys": 32}


SELECTION: Schedule = {"workspace_bytes": 256 << 20, "chunk": 4096, "block_keys": 32, "block_places": 512}
"""Entries a chunk; entries scored at once; keys counted at once. The compile's own workspace limit replaces the first."""


def _columns(request: Request) -> Schedule:
    return {"block_columns": divisor(width(request.operands[-1]), TILE_COLUMNS)}


ROWS: Mapping[str, Row] = {
    "linear": _linear,
    "expert_gate": lambda request: {"block_rows": 16, "block_k": divisor(width(request.operands[0]), PRODUCT_STEP), "panel": 0},
    "dispatch": {"block_experts": 16, "block_pairs": 128},
    "expert_linear": _expert_linear,
    "swiglu": _rows,
    "rms_norm": _rows,
    "norm_rope_quantize": _streams,
    "quantize": _rows,
    "rope": _rope,
    **dict.fromkeys(("start", "collapse", "collapse_norm", "expand", "mean", "engram_gate", "combine"), _streams),
    "mixer": lambda request: {"block_rows": 16, "block_k": divisor(columns_of(request.operands[0]), 128), "panel": 0},
    **dict.fromkeys(("embed", "take", "concat", "columns", "stack", "stage", "commit", "append"), moved(MOVED_COLUMNS)),
    **dict.fromkeys(("patch", "remember", "partners", "commits", "entries", "compress", "lookback", "hash_rows"), TABLE_ROWS),
    "window": {"block_rows": 8},
    "lookup": {"block_rows": 8},
    "attend": _attend,
    "pool": lambda request: {"block_columns": divisor(width(request.operands[0]) // 2, TILE_COLUMNS)},
    **dict.fromkeys(("select_entries", "select_within"), SELECTION),
    "correct": _columns,
    "confidence": confidence(TILE_COLUMNS),
    "draw": lambda request: {"block_columns": divisor(width(request.operands[0]), TILE_COLUMNS, 16)},
}


def schedule(family: str, request: Request) -> Schedule:
    """The row for a request; a family without block sizes has the empty row."""
    return chosen(ROWS, family, request)
