"""Reader of generic MLIR text, as the Ascend compiler prints it: ops with operands, types, regions, and attributes as text until one is asked for.

Reads one op a line, which is how modules are printed. Needs no MLIR bindings: a machine that runs an artifact has none.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

from tapeout.runtime.device.ascend_simulator.memory import SimulationError

DYNAMIC = -(2**63)
"""An extent, offset or stride that the run knows, as text and types print it in arrays; `?` in types."""

_TOKEN = re.compile(r'->|"(?:[^"\\]|\\.)*"|[\[({<]|[\])}>]|,')
_OP = re.compile(r'(?:(%[^=]*?) = )?"([\w.]+)"\(([^)]*)\)(.*)', re.DOTALL)
_DIMENSIONS = re.compile(r"(?:(?:\d+|\?)x)*")


@dataclass(frozen=True, slots=True)
class Kind:
    """A type: `form` is vector, memref or scalar; extents are DYNAMIC where the run knows them; `space` is where a memref lies."""

    form: str
    shape: tuple[int, ...]
    element: str
    space: str = ""


@dataclass(slots=True)
class Block:
    """A block: its arguments by name and type, and its ops."""

    arguments: list[tuple[str, Kind]] = field(default_factory=list)
    ops: list["Node"] = field(default_factory=list)


@dataclass(slots=True)
class Node:
    """One op. `attributes` are texts by name, empty where an attribute has no value."""

    name: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    operand_kinds: tuple[Kind, ...]
    result_kinds: tuple[Kind, ...]
    attributes: dict[str, str]
    regions: list[list[Block]]


@cache
def kind(text: str) -> Kind:
    """A type from its text."""
    form, _, rest = text.partition("<")
    if form not in ("vector", "memref"):
        return Kind("scalar", (), text)
    parts = split(rest[:-1])
    dimensions = _DIMENSIONS.match(parts[0])
    end = dimensions.end() if dimensions else 0
    shape = tuple(DYNAMIC if n == "?" else int(n) for n in parts[0][:end].split("x")[:-1])
    space = re.search(r"address_space<(\w+)>", rest)
    return Kind(form, shape, parts[0][end:], space[1] if space else "")


def split(text: str) -> list[str]:
    """Parts between the commas that no bracket encloses."""
    parts, depth, start = [], 0, 0
    for found in _TOKEN.finditer(text):
        word = found[0]
        if word in "[({<":
            depth += 1
        elif word in "])}>":
            depth -= 1
        elif word == "," and not depth:
            parts.append(text[start : found.start()].strip())
            start = found.end()
    last = text[start:].strip()
    return [*parts, last] if last else parts


def _closed(text: str, start: int) -> int:
    """The place behind the bracket that closes the one at `start`."""
    depth = 0
    for found in _TOKEN.finditer(text, start):
        if found[0] in "[({<":
            depth += 1
        elif found[0] in "])}>":
            depth -= 1
            if not depth:
                return found.end()
    raise SimulationError(f"the module's text ends inside a bracket: {text[start : start + 80]}")


@cache
def _signature(text: str) -> tuple[tuple[Kind, ...], tuple[Kind, ...]]:
    end = _closed(text, 0)
    after = text[end:].strip().removeprefix("->").strip()
    outs = split(after[1 : _closed(after, 0) - 1]) if after.startswith("(") else [after]
    return tuple(map(kind, split(text[1 : end - 1]))), tuple(map(kind, outs))


class _Reader:
    def __init__(self, text: str) -> None:
        self.lines = iter(line.strip() for line in text.splitlines())
        self.aliases: dict[str, str] = {}

    def module(self) -> list[Node]:
        """The ops of the module that the text holds."""
        for line in self.lines:
            if line.startswith("#"):
                name, _, value = line.partition(" = ")
                self.aliases[name] = value
            elif line.startswith('"builtin.module"'):
                block, _ = self._block()
                return block.ops
        raise SimulationError("the text holds no module in generic form")

    def _block(self) -> tuple[Block, str]:
        """Ops up to the line that ends a region, and that line."""
        block = Block()
        for line in self.lines:
            if line.startswith("}"):
                return block, line
            if line.startswith("^"):
                if block.ops:
                    raise SimulationError(f"a region of several blocks is not simulated: {line[:80]}")
                start = line.find("(")
                pairs = split(line[start + 1 : _closed(line, start) - 1]) if start >= 0 else []
                block.arguments = [(name, kind(text)) for name, _, text in (pair.partition(": ") for pair in pairs)]
            elif line and not line.startswith("//"):
                block.ops.append(self._op(line))
        raise SimulationError("the module's text ends inside a region")

    def _op(self, line: str) -> Node:
        found = _OP.match(line)
        if found is None:
            raise SimulationError(f"the simulator cannot read: {line[:120]}")
        results, name, operands, rest = found[1], found[2], found[3], found[4]
        attributes: dict[str, str] = {}
        rest = self._dictionary(rest.lstrip(), "<{", attributes)
        regions: list[list[Block]] = []
        if rest == "({":
            rest = self._regions(regions)
        rest = self._dictionary(rest.lstrip(), "{", attributes)
        takes, gives = _signature(rest.lstrip().removeprefix(":").strip())
        names = tuple(operands.split(", ")) if operands else ()
        return Node(name, names, tuple(_results(results)), takes, gives if results else (), attributes, regions)

    def _regions(self, regions: list[list[Block]]) -> str:
        """Reads regions up to their end; what follows on the last line."""
        while True:
            block, line = self._block()
            regions.append([block] if block.ops or block.arguments else [])
            if not line.startswith("}, {"):
                return line.removeprefix("})")

    def _dictionary(self, text: str, opening: str, into: dict[str, str]) -> str:
        """Adds the attributes of a dictionary that the text starts with; what follows it."""
        if not text.startswith(opening):
            return text
        end = _closed(text, 0)
        for part in split(text[len(opening) : end - len(opening)]):
            name, _, value = part.partition(" = ")
            into[name] = self.aliases.get(value, value)
        return text[end:].lstrip()


def _results(text: str | None) -> Iterator[str]:
    for word in (text or "").split(", "):
        name, _, count = word.partition(":")
        if count:
            yield from (f"{name}#{i}" for i in range(int(count)))
        elif name:
            yield name


def read_module(text: str) -> list[Node]:
    """The top-level ops of a module in generic form. Raises `SimulationError` where the text is not one."""
    return _Reader(text).module()
