"""What ops ask of their operands, each as one sentence, and the result numbers they choose where the caller leaves the choice to them.

Used by the `infer` rules of every dialect; raises `Mismatch` only. Shape rules of one op stay in that op.
"""

from tapeout.dialects.define import Group, Mismatch, require
from tapeout.dialects.format import BF16, FP32, INT32, Q4_INDEX, Q4_MAIN, Q8, REAL, Number
from tapeout.dialects.types import Blocks, Ring, Tensor

Axis = int | str | None
"""An expected axis: None the ragged rows, a name any static size, a number that size."""
ROWS = None
"""The ragged row axis of a shape."""
QUANTIZED = (Q8, Q4_MAIN, Q4_INDEX)
"""Numbers that rows can be quantized to (docs/model.md 9.3, 9.4)."""


def ranked(view: Group, name: str, *ranks: int) -> Tensor:
    """The view as a tensor of one of `ranks`."""
    if isinstance(view, Tensor) and len(view.shape) in ranks:
        return view  # verifiers come here very often: no sentence is made where none is needed
    found = "absent" if view is None else str(view)
    require(isinstance(view, Tensor), f"{name} is {found}, expected a tensor")
    assert isinstance(view, Tensor), view
    require(len(view.shape) in ranks, f"{name} is {view}, expected rank {' or '.join(map(str, ranks))}")
    return view


def rows(view: Group, name: str, *ranks: int) -> Tensor:
    """A real tensor of one of `ranks` whose first axis, and no other, is the ragged row axis."""
    found = ranked(view, name, *ranks)
    if not found.number.is_float:
        raise Mismatch(f"{name} is {found}, expected real elements")
    if not (found.shape[0] is ROWS and ROWS not in found.shape[1:]):
        raise Mismatch(f"{name} is {found}, expected a ragged first axis and static others")
    return found


def shaped(view: Group, name: str, *axes: Axis) -> Tensor:
    """A real tensor of these axes."""
    found = ranked(view, name, len(axes))
    if not (found.number.is_float and _fits(found, axes)):
        raise Mismatch(f"{name} is {found}, expected [{_written(axes)}] of real elements")
    return found


def index(view: Group, name: str, *axes: Axis) -> Tensor:
    """An i32 tensor of these axes."""
    found = ranked(view, name, len(axes))
    require(found.number == INT32 and _fits(found, axes), f"{name} is {found}, expected [{_written(axes)}] i32")
    return found


def _fits(view: Tensor, axes: tuple[Axis, ...]) -> bool:
    return all(n is not ROWS if isinstance(axis, str) else n == axis for n, axis in zip(view.shape, axes, strict=True))


def _written(axes: tuple[Axis, ...]) -> str:
    return ", ".join("?" if n is ROWS else str(n) for n in axes)


def ring(view: Group, name: str, length: int) -> Ring:
    """A ring of this length, which the op carries as an attribute."""
    require(isinstance(view, Ring), f"{name} is {view}, expected a ring")
    assert isinstance(view, Ring), view
    require(view.length == length, f"the op addresses a ring of {length} rows, but {name} is a {view}")
    return view


def blocks(view: Group, name: str) -> Blocks:
    """Paged entries."""
    require(isinstance(view, Blocks), f"{name} is {view}, expected blocks")
    assert isinstance(view, Blocks), view
    return view


def positive(**values: int) -> None:
    """Every named attribute is at least 1."""
    for name, value in values.items():
        require(value >= 1, f"attribute {name} is {value}, expected at least 1")


def facts(**values: bool) -> None:
    """Every named attribute is a boolean."""
    for name, value in values.items():
        require(isinstance(value, bool), f"attribute {name} is {value!r}, expected true or false")


def made(shape: tuple[int | None, ...], number: Number) -> Tensor:
    """A real result of this number, which must be one that rounding can produce."""
    result, scaling = Tensor(shape, number), number.scaling
    require(number.is_float, f"the result is {result}, expected real elements")
    if scaling is not None:
        require(number in QUANTIZED, f"the result is {result}; rows can be quantized to {', '.join(map(str, QUANTIZED))}")
        whole = (shape[-1] or 0) % scaling.columns == 0
        require(whole, f"the result is {result}: its last axis is not a multiple of the {scaling.columns} columns of one scale")
    return result


def narrow(number: Number) -> Number:
    """The number of a result whose operand's is `number`: the same, BF16 where that is block scaled."""
    return BF16 if number.scaling is not None else number


def wide(number: Number) -> Number:
    """The number of a result that the model keeps in FP32 (docs/model.md 9.6, rule 5): FP32, real in the exact graph."""
    return REAL if number == REAL else FP32


def product_kind(x: Number, weight: Number) -> str:
    """The kind under which `Cost` counts products of x with weight: block scaled where both are, else that of the wider one."""
    match (x.element, weight.element):
        case ("f8E4M3FN" | "f4E2M1FN", "f4E2M1FN"):
            return "fp4"
        case ("f8E4M3FN", "f8E4M3FN"):
            return "fp8"
        case ("f32" | "f64", _) | (_, "f32" | "f64"):
            return "f32"
    return "bf16"
