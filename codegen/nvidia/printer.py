"""The state of printing one kernel: lines, names of values, lanes; what every Triton form is written with.

Triton tiles have power-of-two extents: every extent is rounded up, and what the added lanes hold must not show (the forms see to it).
Values of type index are i64, constants of that type are written as numbers.
"""

from typing import Any

from tapeout.dialects._mlir import ir

KINDS = {
    "bf16": "tl.bfloat16", "f16": "tl.float16", "f32": "tl.float32", "f64": "tl.float64", "f8E4M3FN": "tl.float8e4nv", "i1": "tl.int1",
    "i8": "tl.int8", "i16": "tl.int16", "i32": "tl.int32", "i64": "tl.int64", "index": "tl.int64",
}  # fmt: skip


class EmitError(Exception):
    """An op, or a form of one, that Triton has no words for."""


def padded(extent: int) -> int:
    """The power of two that a tile extent is rounded up to."""
    return 1 << (extent - 1).bit_length()


def extents(value: Any) -> list[int]:
    """True extents of a tile; [] for a scalar."""
    return list(ir.RankedTensorType(value.type).shape) if isinstance(value.type, ir.RankedTensorType) else []


def element(value: Any) -> str:
    """Element type of a tile, type of a scalar."""
    return str(value.type.element_type if isinstance(value.type, ir.RankedTensorType) else value.type)


def as_number(text: str) -> int | None:
    """The value of a name that is a whole number."""
    return int(text) if text.lstrip("-").isdigit() else None


def literal(number: float) -> str:
    """A number as Python writes it."""
    if isinstance(number, float) and (number != number or number in (float("inf"), float("-inf"))):
        return f'float("{number}")'
    return repr(number)


class Printer:
    """Lines and names of one kernel. `head` holds what is computed once in front: instance numbers and lanes; `narrow` values are held as BF16,
    `spread` ones in each of so many rows; `helpers` are the functions that the lines call; `held` are counts that have been read, by how they are."""

    def __init__(self) -> None:
        self.names: dict[Any, str] = {}
        self.head: list[str] = []
        self.lines: list[str] = []
        self.depth = 0
        self._count = 0
        self._known: dict[str, str] = {}
        self.narrow: set[Any] = set()
        self.spread: dict[Any, int] = {}
        self.helpers: dict[str, None] = {}
        self.held: dict[str, str] = {}

    def line(self, text: str) -> None:
        """One line at the present depth."""
        self.lines.append("    " * self.depth + text)

    def fresh(self, stem: str) -> str:
        """A name that is used once."""
        self._count += 1
        return f"{stem}_{self._count}"

    def fresh_line(self, stem: str, text: str) -> str:
        """Gives an expression a name."""
        name = self.fresh(stem)
        self.line(f"{name} = {text}")
        return name

    def assign(self, value: Any, stem: str, text: str) -> None:
        """Gives a value a name and a line."""
        self.names[value] = self.fresh_line(stem, text)

    def of(self, values: Any) -> list[str]:
        """Names of values."""
        return [self.names[v] for v in values]

    def helper(self, name: str) -> str:
        """The name of a function that the source then brings along."""
        self.helpers[name] = None
        return name

    # ---- shapes --------------------------------------------------------------------------------------------------------

    def shape(self, value: Any) -> list[int]:
        """Extents as Triton has them."""
        return [padded(n) for n in extents(value)]

    def _in_front(self, name: str, text: str) -> str:
        if self._known.setdefault(name, text) == text and f"{name} = {text}" not in self.head:
            self.head.append(f"{name} = {text}")
        return name

    def instance(self, axis: int) -> str:
        """The instance number on a grid axis."""
        return self._in_front(f"instance_{axis}", f"tl.program_id({axis}).to(tl.int64)")

    def lanes(self, box: list[int], axis: int) -> str:
        """Positions along an axis of a tile, of its rank."""
        n = padded(box[axis])
        pick = ", ".join(":" if d == axis else "None" for d in range(len(box)))
        rank = "" if len(box) == 1 else "_" + "".join("n" if d == axis else "1" for d in range(len(box)))
        return self._in_front(f"lane_{n}{rank}", f"tl.arange(0, {n})" + ("" if len(box) == 1 else f"[{pick}]"))

    def lane(self, value: Any, axis: int) -> str:
        """Positions along an axis of a value."""
        return self.lanes(extents(value), axis)

    def zeros(self, value: Any) -> str:
        """Offsets of a tile of one element."""
        return self._in_front("zero_" + "_".join(map(str, self.shape(value))), f"tl.full({self.shape(value)}, 0, tl.int32)")

    def full(self, value: Any, number: str, kind: str | None = None) -> str:
        """A tile, or a scalar, of one number in a value's own type or another `kind`."""
        return f"tl.full({self.shape(value)}, {number}, {KINDS[kind or element(value)]})"

    def typed(self, value: Any) -> str:
        """A value where its type must show: a number of type index is cast."""
        name = self.names[value]
        return f"tl.cast({name}, tl.int64)" if element(value) == "index" else name

    def zero(self, value: Any) -> str:
        """What stands in for elements that are not read."""
        return "0" if element(value).startswith("i") else "0.0"
