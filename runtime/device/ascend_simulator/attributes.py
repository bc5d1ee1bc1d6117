"""Values of attributes from their text: numbers, lists of numbers, words, dense constants, affine maps."""

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from tapeout.runtime.device.ascend_simulator.memory import SimulationError


def integers(text: str) -> list[int]:
    """Numbers of `array<i64: 1, 2>`, `[1 : i64, 2]` or `[1, 2]`."""
    inner = text[text.find(":") + 1 :] if text.startswith("array<") and ":" in text else "" if text.startswith("array<") else text
    return [int(n) for n in re.findall(r"(?<![\w.])-?\d+", re.sub(r" : \w+", "", inner))]


def groups(text: str) -> list[list[int]]:
    """Lists of a list of lists."""
    return [integers(part) for part in re.findall(r"\[[^\[\]]*\]", text[1:-1])]


def word(text: str) -> str:
    """The text inside `#dialect.kind<...>`, or the text itself."""
    return text.split("<")[-1].rstrip(">")


def number(text: str, dtype: Any) -> Any:
    """A number of an integer or floating type: `5 : i64`, `true`, `1.0e-3 : f32`, `0xFF800000 : f32`."""
    value, _, element = text.partition(" : ")
    if dtype.kind == "b":
        return value == "true" or value not in ("false", "0")
    if dtype.kind in "iu":
        return int(value, 0)
    return _float(value, element, dtype)


def _float(value: str, element: str, dtype: Any) -> Any:
    if value.startswith("0x"):
        digits = int(value, 16)
        wide = np.dtype(f"u{dtype.itemsize}")
        return np.array(digits, wide).view(dtype)[()]
    return dtype.type(float(value))


def dense(text: str, dtype: Any, shape: Sequence[int]) -> Any:
    """The array behind `dense<...> : type`: one number for all, or all of them in brackets or as bytes."""
    inner = text[len("dense<") : text.rindex("> : ")]
    if inner.startswith('"0x'):
        return np.frombuffer(bytes.fromhex(inner[3:-1]), dtype).reshape(shape).copy()
    values = [number(v, dtype) for v in re.findall(r"[^\s\[\],]+", inner)]
    if len(values) == 1:
        return np.full(shape, values[0], dtype)
    return np.array(values, dtype).reshape(shape)


# ---- affine maps -------------------------------------------------------------------------------------------------------

Affine = Callable[[Sequence[Any]], Any]
"""An affine expression as a function of dimensions and symbols in one list."""

_WORDS = re.compile(r"[ds]\d+|-?\d+|floordiv|ceildiv|mod|[-+*()]")


class Map:
    """An affine map. `positions` are dimensions where a result is just one, None where it is a constant; `is_linear` without divisions."""

    def __init__(self, text: str) -> None:
        head, _, body = text.removeprefix("affine_map<").removesuffix(">").partition("->")
        dims = re.findall(r"\bd\d+\b", head)
        self.names = {name: place for place, name in enumerate([*dims, *re.findall(r"\bs\d+\b", head)])}
        inner = body.strip()[1:-1]
        parts = [part.strip() for part in _commas(inner)]
        self.is_linear = not re.search(r"floordiv|ceildiv|mod", inner)
        self.results: list[Affine] = [_Expression(_WORDS.findall(part), self.names).whole() for part in parts]
        self.positions = [self.names.get(part) for part in parts]


def _commas(text: str) -> list[str]:
    return text.split(",") if text.strip() else []


class _Expression:
    """Recursive descent over the words of one affine expression."""

    def __init__(self, words: list[str], names: dict[str, int]) -> None:
        self.words, self.names, self.at = words, names, 0

    def whole(self) -> Affine:
        found = self._sum()
        if self.at != len(self.words):
            raise SimulationError(f"the simulator cannot read the affine expression {' '.join(self.words)}")
        return found

    def _next(self) -> str:
        return self.words[self.at] if self.at < len(self.words) else ""

    def _sum(self) -> Affine:
        left = self._product()
        while self._next() in _SUMS:
            operator = self._next()
            self.at += 1
            left = _combined(left, self._product(), _SUMS[operator])
        return left

    def _product(self) -> Affine:
        left = self._atom()
        while self._next() in _PRODUCTS:
            operator = self._next()
            self.at += 1
            left = _combined(left, self._atom(), _PRODUCTS[operator])
        return left

    def _atom(self) -> Affine:
        found = self._next()
        self.at += 1
        if found == "(":
            inner = self._sum()
            self.at += 1
            return inner
        if found == "-":
            of = self._atom()
            return lambda values: of(values) * -1
        if found in self.names:
            place = self.names[found]
            return lambda values: values[place]
        value = int(found)
        return lambda values: value


_SUMS: dict[str, Callable[[Any, Any], Any]] = {"+": lambda a, b: a + b, "-": lambda a, b: a - b}
_PRODUCTS: dict[str, Callable[[Any, Any], Any]] = {
    "*": lambda a, b: a * b, "floordiv": lambda a, b: a // b, "ceildiv": lambda a, b: -(-a // b), "mod": lambda a, b: a % b,
}  # fmt: skip


def _combined(left: Affine, right: Affine, operation: Callable[[Any, Any], Any]) -> Affine:
    return lambda values: operation(left(values), right(values))


@cache
def affine_map(text: str) -> Map:
    """A map from `affine_map<(d0)[s0] -> (d0 + s0)>`."""
    return Map(text)
