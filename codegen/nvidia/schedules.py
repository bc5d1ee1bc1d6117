"""Schedule rows of the NVIDIA targets: block sizes, warps and stages per kernel family.

Every row serves all row buckets: a launch's grid covers the bucket and instances without rows leave. Weights lie row by row ([K, N], panel 0).
Extents are powers of two where the shape allows: others are rounded up and their lanes idle. `warps` and `stages` are for the compiler.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tapeout.codegen.kernel import Request, Schedule, width
from tapeout.codegen.nvidia.facts import Chip
from tapeout.codegen.row_values import columns_of
from tapeout.dialects.types import Tensor

Row = Callable[[Request, Chip], Schedule]

SCALE_GROUP = 32
ROW_COLUMNS = 1024  # columns of a row-wise tile: a few for each thread
ROW_ELEMENTS = 1024  # elements of a row-wise tile of several narrow rows
MOVED_COLUMNS = 4096
LONG_COLUMNS = 4096  # columns of a tile of logits
TURN = 256  # what one more turn of a loop costs, in lanes
LANES_EACH = 8  # elements of a tile for each thread
THREADS = 32


def _padded(n: int) -> int:
    return 1 << (n - 1).bit_length()


def fitting(n: int, limit: int, multiple: int = 1) -> int:
    """The divisor of n, a multiple of `multiple`, with the least idle lanes and turns; n where none is at most `limit`."""
    found = [d for d in range(multiple, min(n, limit) + 1, multiple) if n % d == 0]
    return min(found, key=lambda d: (n // d) * (_padded(d) + TURN), default=n)


def power(n: int, limit: int, least: int = 1) -> int:
    """The largest power of two up to `limit` that divides n, or any fitting divisor where it is less than `least`."""
    found = min(n & -n, limit)
    return found if found >= least else fitting(n, limit)


def _warps(elements: int, most: int = 8) -> int:
    return max(1, min(most, _padded(-(-elements // (THREADS * LANES_EACH)))))


def _compiled(row: dict[str, int], warps: int = 4, stages: int = 2) -> Schedule:
    return {**row, "warps": warps, "stages": stages}


def _multiple(request: Request) -> int:
    views = [v for v in (*request.operands, *request.results) if isinstance(v, Tensor)]
    return SCALE_GROUP if any(v.number.scaling is not None for v in views) else 1


def _rows(request: Request, chip: Chip) -> Schedule:
    """Row blocks of the last axis of the first operand."""
    block = fitting(width(request.operands[0]), ROW_COLUMNS, _multiple(request))
    rows = max(1, ROW_ELEMENTS // _padded(block))
    return _compiled({"block_rows": rows, "block_columns": block}, _warps(rows * _padded(block)))


def _streams(request: Request, chip: Chip) -> Schedule:
    """Column blocks of rows of a few streams: one row at a time."""
    block = fitting(width(request.operands[0]), ROW_COLUMNS, _multiple(request))
    return _compiled({"block_columns": block}, _warps(2 * _padded(block)))


def _linear(request: Request, chip: Chip) -> Schedule:
    weight = request.operands[1]
    assert isinstance(weight, Tensor)
    (n, k), groups = weight.sized(0), request["groups"]
    scaled = weight.number.scaling is not None
    width = n // groups
    block_n = min(128, 1 << (width.bit_length() - 1))
    step = 128 if scaled else 64
    block_k = power(k, step, 32) if not scaled or k % 64 == 0 else fitting(k, step, SCALE_GROUP)
    return _compiled({"block_m": 64, "block_n": block_n, "block_k": block_k, "panel": 0, "weights_first": 1}, 8, 3)


def _expert_linear(request: Request, chip: Chip) -> Schedule:
    """Packed weights as stored on the left; K is a multiple of 128."""
    block_n = power(width(request.results[0]), 128, 16)
    return _compiled({"block_m": 64, "block_n": block_n, "block_k": 128, "panel": 0, "weights_first": 1}, 8, 3)


def _expert_gate(request: Request, chip: Chip) -> Schedule:
    return _compiled({"block_rows": 16, "block_k": power(width(request.operands[0]), 32, 16), "panel": 0}, 4, 3)


def _mixer(request: Request, chip: Chip) -> Schedule:
    """One panel holds all coefficients: rounded up to a power of two they lie row by row."""
    weight = request.operands[1]
    assert isinstance(weight, Tensor)
    return _compiled({"block_rows": 16, "block_k": power(columns_of(request.operands[0]), 64, 16), "panel": _padded(weight.sized(0)[0])}, 4, 3)


def _rope(request: Request, chip: Chip) -> Schedule:
    rope = request.of("nn.rope") if request.op.startswith("nn.fused") else dict(request.attributes)
    return _compiled({"block_heads": power(rope["heads"], max(1, 2 * ROW_ELEMENTS // rope["width"]))})


def _moved(request: Request, chip: Chip) -> Schedule:
    """Pieces of rows, powers of two; narrow rows several at a time."""
    view = request.results[0] if request.results else request.operands[0]
    columns = columns_of(view)
    block = min(MOVED_COLUMNS, 1 << (columns.bit_length() - 1))
    rows = min(64, max(1, MOVED_COLUMNS // _padded(columns)))
    return _compiled({"block_rows": rows, "block_columns": block}, _warps(rows * block))


def _attend(request: Request, chip: Chip) -> Schedule:
    """All heads share decoded keys. Sums lie in tensor memory; without it they fill the registers, and keys come first: the second product
    then reads both factors from shared memory."""
    settings = request.of("mla.attend") if request.op.startswith("nn.fused") else dict(request.attributes)
    keys, keys_first = (16, 0) if chip.tensor_memory_bytes else (32, 1)
    sizes = {"block_heads": power(settings["heads"], 64), "block_keys": keys}
    return _compiled({**sizes, "joined": 1, "split": 1, "keys_first": keys_first}, 8, 2)


def _selection(request: Request, chip: Chip) -> Schedule:
    return _compiled({"workspace_bytes": 256 << 20, "chunk": 4096, "block_keys": 64, "block_places": 1024}, 8, 2)


def _logits(operand: int) -> Row:
    def row(request: Request, chip: Chip) -> Schedule:
        block = fitting(width(request.operands[operand]), LONG_COLUMNS)
        return _compiled({"block_columns": block}, _warps(_padded(block), 16))

    return row


def _confidence(request: Request, chip: Chip) -> Schedule:
    hidden, embedded = (fitting(width(view), ROW_COLUMNS) for view in request.operands[:2])
    return _compiled({"block_hidden": hidden, "block_embedded": embedded})


def _pool(request: Request, chip: Chip) -> Schedule:
    return _compiled({"block_columns": fitting(width(request.operands[0]) // 2, ROW_COLUMNS)})


def _fixed(warps: int = 4, **sizes: int) -> Row:
    return lambda request, chip: _compiled(dict(sizes), warps)


ROWS: Mapping[str, Row] = {
    "linear": _linear,
    "expert_gate": _expert_gate,
    "dispatch": _fixed(block_experts=4, block_pairs=128),
    "expert_linear": _expert_linear,
    "mixer": _mixer,
    **dict.fromkeys(("swiglu", "rms_norm", "quantize"), _rows),
    **dict.fromkeys(("norm_rope_quantize", "start", "collapse", "collapse_norm", "expand", "mean", "engram_gate", "combine"), _streams),
    "rope": _rope,
    **dict.fromkeys(("embed", "take", "concat", "stack", "stage", "commit", "append"), _moved),
    **dict.fromkeys(("patch", "partners", "commits", "compress", "hash_rows"), _fixed(1, block_rows=32)),
    **dict.fromkeys(("entries", "lookback"), _fixed(1, block_rows=1)),
    "remember": _fixed(block_rows=64),
    "window": _fixed(block_rows=8),
    "lookup": _fixed(block_rows=8),
    "attend": _attend,
    "pool": _pool,
    **dict.fromkeys(("select_entries", "select_within"), _selection),
    "correct": _logits(1),
    "draw": _logits(0),
    "confidence": _confidence,
}
PLAIN = _fixed()


def schedule_for(chip: Chip) -> Callable[[str, Request], Schedule]:
    """The function that gives a chip's row for a family and a request."""
    return lambda family, request: ROWS.get(family, PLAIN)(request, chip)


def for_bucket(family: str, request: Request, row: Schedule, rows: int) -> Schedule:
    """The row for a launch of at most `rows` rows: fewer tokens a block, all else as it is, so that a row's sums keep their order and bits."""
    if not row.get("weights_first"):
        return row
    share = 1.0
    if family == "expert_linear":
        experts = request.operands[1]
        assert isinstance(experts, Tensor)
        share = 2 * columns_of(request.operands[2]) / experts.sized(0)[0]  # twice the mean: pairs are not spread evenly
    most = 64 if family == "expert_linear" else 128
    return {**row, "block_m": max(16, min(most, _padded(max(1, int(rows * share)))))}


def launch_settings(schedule: Mapping[str, Any]) -> tuple[int, int]:
    """(warps, stages) of a row."""
    return int(schedule["warps"]), int(schedule["stages"])
