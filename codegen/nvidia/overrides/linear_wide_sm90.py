"""The form of a linear layer with a wide BF16 weight, a head, for 65 to 320 BF16 rows on SM90: coverage, schedule rows, source.

It computes what the tile kernels of the same row compute: one sum over K, 16 columns after another, from zero on. Both factors lie in shared memory
as they are stored, brought by copies that a launch in front describes (tensor maps). 128 rows of the weight meet all rows of x in one instance, so
that the weight comes from memory once; instances are fewer than multiprocessors and take several blocks one after another. How wide products are
follows from how many rows there are, not only from the bucket. Preconditions: none on values.
"""

from collections.abc import Sequence
from itertools import pairwise

from tapeout.codegen.kernel import EVERY_SCALE, Buffer, Request, Schedule
from tapeout.codegen.kernels.linear import HOW_COPIED
from tapeout.codegen.nvidia.emit import POINTERS, EmitError, Source
from tapeout.codegen.nvidia.facts import Chip
from tapeout.codegen.nvidia.overrides import linear_many_ptx as ptx
from tapeout.codegen.nvidia.overrides import linear_many_sm90 as many
from tapeout.codegen.nvidia.overrides.fp8_linear import CAPABILITY, shape
from tapeout.codegen.nvidia.overrides.templates import template
from tapeout.dialects.format import BF16, FP32
from tapeout.dialects.types import Tensor

LEFT, STEP, WARPS, MOST_STAGES, ATOMS = 128, 64, 8, 8, 224
"""Rows of the weight in a block, columns and most buffers of what comes at a time; shared memory of the buffers in pieces of 1,024 bytes."""
LEAST_ROWS, MOST_ROWS, LEAST_COLUMNS, LEAST_BLOCKS = 65, 320, 1024, 4
"""Fewer rows are bound by memory in the plain form too, and what a group of warps has registers for; below so many columns of x, and blocks of a
multiprocessor, the plain form is as fast."""
WIDTHS, WIDEST = (160, 208, 256), 256
"""Widths of products for fewer rows than a bucket has (measured), and of one product: wider ones are two halves."""
PIECES = (256, 128, 64, 32, 16)
LEAST_SCALE, MOST_SCALE = EVERY_SCALE
LAUNCHES, PLACE = (0, None), 4
"""The launches it stands for; its place among the overrides of linear layers."""
CASES: tuple[tuple[Request, Schedule], ...] = (
    (Request("nn.linear", (("groups", 1), ("wide", True)), (Tensor((None, 5120), BF16), Tensor((129280, 5120), BF16)),
             (Tensor((None, 129280), FP32),)),
     {"panel": 0, "weights_first": 1, "rows_first": 0, "segments": 1, "split": 0, "group": 0, "ahead": 0, "decoded": HOW_COPIED, "override": PLACE,
      "block_m": MOST_ROWS, "block_n": LEFT, "block_k": STEP, "turns": 8, "part_rows": 1, "part_columns": 256, "total_columns": 256,
      "warps": WARPS, "stages": MOST_STAGES}),
)  # fmt: skip
MEANINGS = ("56e8f538aa1dd14c",)
"""Digests of their tile kernels as they were when the source was checked on a GPU."""


def why_not(request: Request, chip: Chip) -> str | None:
    """Why a request is left to the plain form; None where it is covered."""
    if chip.capability != CAPABILITY:
        return f"{chip.name} multiplies by other instructions"
    if request.op != "nn.linear" or request["groups"] != 1:
        return f"{request.op} in {request['groups'] if request.op == 'nn.linear' else 0} groups is no linear layer of one group"
    (x, weight), result = request.operands[:2], request.results[0]
    if not all(isinstance(view, Tensor) and view.number == BF16 for view in (x, weight)) or not isinstance(result, Tensor) or result.number != FP32:
        return f"x is {x}, the weight {weight} and the result {result}, expected BF16, BF16 and FP32"
    n, k = shape(request)
    return f"the weight is {weight}, expected a multiple of {LEFT} rows and {2 * STEP} columns" if n % LEFT or k % (2 * STEP) else None


def row(request: Request, chip: Chip, segments: int, rows: int) -> Schedule | None:
    """What the schedule row of a bucket of `rows` rows has instead of a plain row's entries; None where the plain form is as fast."""
    if not LEAST_ROWS <= rows <= MOST_ROWS or segments > 1 or why_not(request, chip) is not None:
        return None
    n, k = shape(request)
    if k < LEAST_COLUMNS or n < LEAST_BLOCKS * LEFT * chip.processors:
        return None
    return {"split": 0, "group": 0, "rows_first": 0, "decoded": HOW_COPIED, "override": PLACE, "block_m": -(-rows // PIECES[-1]) * PIECES[-1],
            "block_n": LEFT, "block_k": STEP, "turns": -(-n // LEFT // chip.processors), "warps": WARPS, "part_warps": 1,
            "stages": MOST_STAGES}  # fmt: skip


def source(symbol: str, request: Request, buffers: Sequence[Buffer], row: Schedule) -> Source:
    """The source of a launch under its symbol; `buffers` in launch order. Raises `EmitError` where the row cuts otherwise than it can."""
    reason, (n, k), tile = _cannot_cut(row), shape(request), row["block_m"]
    if reason is not None:
        raise EmitError(f"kernel {symbol}: the override for wide weights finds {reason}; set override to 0")
    arguments = ("x", "weight", "out", "decoded", "count")
    given = {"name": symbol, "arguments": arguments, "rows_left": False, "left": "weight", "right": "x", "in_order": True}
    if row.get("part") == 0:
        constants = many.decode_constants(row, k) | {"N": n}
        maps = ptx.tensor_maps(k, tile, STEP, k, stored=True)
        text = template("linear_many_sm90_decode").render(**given, constants=constants, ptx=ptx, scaled=False, turned=False, tensor_maps=maps)
    else:
        constants = {"N": n, "K": k, "WIDTH": n, "TILE": tile, "COLUMNS": STEP, "SEGMENTS": 1, "STEPS": k // 128, "TURN_STEPS": k // 128,
                     "TURNS": max(row.get("turns", 1), 1), "STAGES": row["stages"], "ATOMS": ATOMS, "SPLIT": False, "ROWS_LEFT": False}  # fmt: skip
        widths = [*(w for w in WIDTHS if w < tile), tile]
        width = " + ".join([str(widths[0]), *(f"(2 * half > {less}).to(gl.int32) * {w - less}" for less, w in pairwise(widths))])
        words = {"copies": ptx.copies(None, 2 * STEP, in_order=False), "acquire": ptx.acquire(), "warp": ptx.WARP, "wait": ptx.WAIT}
        text = template("linear_many_sm90_products").render(
            **given, **words, constants=constants, stored=True, forms=[_form(w) for w in widths], width=width, pieces=PIECES, staged={}, target="out",
        )  # fmt: skip
    parameters = tuple((name, POINTERS[b.element]) for name, b in zip(arguments, buffers, strict=True))
    return Source(symbol, text + "\n", parameters, LEFT * tile, 0, "gluon")


def _form(width: int) -> dict[str, object]:
    """How so many rows of x are multiplied: PTX, sums as tensors, whose widths are powers of two, and turns, none where the rows are others."""
    pieces = [p for p in PIECES if width & p]
    parts = (width,) if width <= WIDEST else (width // 2, width // 2)
    return {"pieces": pieces, "firsts": [sum(pieces[:i]) for i in range(len(pieces))], "products": ptx.stored_products(parts),
            "operands": ptx.product_operands(width, 1), "drain": ptx.drain(width, 0), "drain_operands": ptx.drain_operands(width, 0),
            "turns": f"(width == {width}).to(gl.int32) * turns"}  # fmt: skip


def _cannot_cut(row: Schedule) -> str | None:
    """Why a row is not one of this override's."""
    if row["decoded"] != HOW_COPIED or row["rows_first"] or row["group"] or row["split"] or row["segments"] > 1:
        return f"decoded {row['decoded']}, rows_first {row['rows_first']}, group {row['group']}, split {row['split']}, {row['segments']} segments"
    if row["block_n"] != LEFT or row["block_m"] % PIECES[-1] or not PIECES[-1] <= row["block_m"] <= MOST_ROWS:
        return f"blocks of {row['block_m']} times {row['block_n']}"
    return None if row.get("part") == 0 or (row["warps"] == WARPS and 2 <= row["stages"] <= MOST_STAGES) else f"{row['warps']} warps"
