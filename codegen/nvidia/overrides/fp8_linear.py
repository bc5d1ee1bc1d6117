"""What overrides of linear layers with FP8 weights ask of a request: its shape, and whether it is of their kind at all."""

from tapeout.codegen.kernel import Request
from tapeout.codegen.nvidia.facts import Chip
from tapeout.dialects.format import BF16, FP8_WEIGHT, Q8
from tapeout.dialects.types import Tensor

CAPABILITY = 90


def shape(request: Request) -> tuple[int, int]:
    """Rows and columns of the weight."""
    view = request.operands[1]
    assert isinstance(view, Tensor)
    n, k = view.sized(0)
    return n, k


def is_scaled(request: Request) -> bool:
    """Whether x is FP8 rows with scales, not BF16 rows."""
    view = request.operands[0]
    return isinstance(view, Tensor) and view.number == Q8


def why_not(request: Request, chip: Chip, rows: int, columns: int) -> str | None:
    """Why FP8 or BF16 rows times an FP8 weight, in groups of a multiple of `rows` rows and of `columns` columns, is not what a request asks."""
    if chip.capability != CAPABILITY:
        return f"{chip.name} multiplies codes by other instructions"
    if request.op != "nn.linear":
        return f"{request.op} is no linear layer"
    (x, weight), result = request.operands[:2], request.results[0]
    if not isinstance(weight, Tensor) or weight.number != FP8_WEIGHT:
        return f"the weight is {weight}, expected FP8 values with scales of 32x32"
    if not isinstance(x, Tensor) or x.number not in (Q8, BF16) or not isinstance(result, Tensor) or result.number != BF16:
        return f"x is {x} and the result {result}, expected FP8 or BF16 rows and a BF16 result"
    n, k = weight.sized(0)
    if n % (rows * request["groups"]) or k % columns:
        return f"the weight is {weight}, expected groups of a multiple of {rows} rows and a multiple of {columns} columns"
    return None
