"""Schedule rows of the CPU: block sizes per kernel family.

One row serves every row bucket: the lowering computes valid rows only, so a block of 192 rows costs one row where one is valid, and the
order of sums never depends on the batch. A reduction step (`block_k`) is part of that order.
"""

from collections.abc import Mapping

from tapeout.codegen.kernel import Request, Schedule, width
from tapeout.codegen.row_values import columns_of, scale_group
from tapeout.codegen.schedule_rows import Row, chosen, confidence, divisor, moved
from tapeout.dialects.types import Tensor

TILE_COLUMNS = 512  # columns of a row-wise tile: an f32 tile of them stays in the first-level cache
TILE_ELEMENTS = 1024  # elements of a row-wise tile of several narrow rows
MOVED_COLUMNS = 4096  # columns moved at once where nothing is computed
PRODUCT_ROWS, PRODUCT_COLUMNS, PRODUCT_STEP = 192, 64, 256
PANEL = 16  # columns of a weight panel: two AVX2 or one AVX-512 register of f32
SCALE_GROUP = 32
TABLE_ROWS: Schedule = {"block_rows": 32}


def _row_blocks(columns: int, multiple: int, limit: int = TILE_COLUMNS) -> Schedule:
    block = divisor(columns, limit, multiple)
    return {"block_rows": max(1, TILE_ELEMENTS // 2 // block), "block_columns": block}


def _rows(request: Request) -> Schedule:
    """Row blocks of the last axis of the first result."""
    return _row_blocks(width(request.results[0]), scale_group(request))


def _streams(request: Request) -> Schedule:
    """Column blocks of rows of S streams: one row at a time."""
    return {"block_columns": divisor(width(request.results[0]), TILE_COLUMNS, scale_group(request))}


def _linear(request: Request) -> Schedule:
    """Blocks of a linear layer: panels where the columns of a group are whole ones."""
    weight, x = request.operands[1], request.operands[0]
    assert isinstance(weight, Tensor) and isinstance(x, Tensor)
    (n, k), groups = weight.sized(0), request["groups"]
    width, scaled = n // groups, weight.number.scaling is not None
    panel = PANEL if width % PANEL == 0 else 0
    block_n = divisor(width, PRODUCT_COLUMNS, PANEL) if panel else min(width, PANEL)
    return {"block_m": PRODUCT_ROWS, "block_n": block_n, "block_k": divisor(k, PRODUCT_STEP, SCALE_GROUP if scaled else 1), "panel": panel}


def _expert_linear(request: Request) -> Schedule:
    """Blocks of an expert's pairs and columns; whole panels by the family's own rule."""
    return {"block_m": PRODUCT_ROWS, "block_n": divisor(width(request.results[0]), 2 * PRODUCT_COLUMNS, PANEL), "panel": PANEL}


def _rope(request: Request) -> Schedule:
    rope = request.of("nn.rope")
    return {"block_heads": divisor(rope["heads"], max(1, 4 * TILE_ELEMENTS // rope["width"]))}


def _attend(request: Request) -> Schedule:
    """Heads that share decoded keys, and keys a block."""
    settings = request.of("mla.attend")
    return {"block_heads": divisor(settings["heads"], 16), "block_keys": 16}


SELECTION: Schedule = {"workspace_bytes": 256 << 20, "chunk": 1024, "block_keys": 64, "block_places": 128}
"""Entries a chunk; entries scored at once; keys counted at once. The compile's own workspace limit replaces the first."""


def _columns(request: Request) -> Schedule:
    return {"block_columns": divisor(width(request.operands[-1]), 2 * TILE_ELEMENTS)}


ROWS: Mapping[str, Row] = {
    "linear": _linear,
    "expert_gate": lambda request: {"block_rows": 16, "block_k": divisor(width(request.operands[0]), PRODUCT_STEP), "panel": PANEL},
    "dispatch": {"block_experts": 16, "block_pairs": 64},
    "expert_linear": _expert_linear,
    "swiglu": _rows,
    "rms_norm": _rows,
    "norm_rope_quantize": _streams,
    "quantize": _rows,
    "rope": _rope,
    **dict.fromkeys(("start", "collapse", "collapse_norm", "expand", "mean", "engram_gate", "combine"), _streams),
    "mixer": lambda request: {"block_rows": 16, "block_k": divisor(columns_of(request.operands[0]), TILE_COLUMNS), "panel": PANEL},
    **dict.fromkeys(("embed", "take", "concat", "columns", "stack", "stage", "commit", "append"), moved(MOVED_COLUMNS)),
    **dict.fromkeys(("patch", "remember", "partners", "commits", "entries", "compress", "lookback", "hash_rows"), TABLE_ROWS),
    "window": {"block_rows": 8},
    "lookup": {"block_rows": 8},
    "attend": _attend,
    "pool": lambda request: {"block_columns": divisor(width(request.operands[0]) // 2, TILE_COLUMNS)},
    **dict.fromkeys(("select_entries", "select_within"), SELECTION),
    "correct": _columns,
    "confidence": confidence(TILE_COLUMNS),
    "draw": lambda request: {"block_columns": divisor(width(request.operands[0]), 2 * TILE_ELEMENTS, 16)},
}


def schedule(family: str, request: Request) -> Schedule:
    """The row for a request; a family without block sizes has the empty row."""
    return chosen(ROWS, family, request)
