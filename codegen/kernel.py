"""Kernels by request: what a graph op asks for, which family of tile kernels answers, and with which schedule.

A `Request` is everything static about one op (attributes, operand and result views); equal requests share one kernel. A `Family` is one file of
`codegen/kernels`: the op it covers, what it accepts, and how a kernel is built from a request and a schedule row. The definition holds no block
sizes: those are the schedule row's, and the rows are the target's (`codegen/<target>/schedules.py`).
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tapeout.dialects._mlir import ir
from tapeout.dialects.define import attributes_of, declaration_of, views_of
from tapeout.dialects.types import Blocks, Ring, Tensor, View, from_ir

Attributes = tuple[tuple[str, Any], ...]
Schedule = Mapping[str, int]
EAGER = "eager"
"""Entry of a schedule row that any family may have: instances read their rows before they know whether those are there (0)."""
STREAMED = "streamed"
"""Another: what so many turns of a loop read is under way at once, where the loop reads only what it does not write (0: as the compiler does it)."""


class KernelError(Exception):
    """No kernel answers a request, or a schedule does not fit; the text names the nearest that would."""


@dataclass(frozen=True)
class Buffer:
    """One flat buffer of a kernel: `role` operand, result, workspace or count; `element` as tile code writes it."""

    name: str
    element: str
    role: str


@dataclass(frozen=True)
class Request:
    """`op` is an op name, or `nn.fused:<kind>` with `body` = (op name, attributes) of the group in order."""

    op: str
    attributes: Attributes
    operands: tuple[View | None, ...]
    results: tuple[View, ...]
    body: tuple[tuple[str, Attributes], ...] = ()

    def __getitem__(self, name: str) -> Any:
        """An attribute of the op."""
        return dict(self.attributes)[name]

    def of(self, op: str) -> dict[str, Any]:
        """Attributes of the op called `op`: the request's own, or those of the only one of a fused group."""
        if self.op == op:
            return dict(self.attributes)
        found = [dict(attributes) for name, attributes in self.body if name == op]
        if len(found) != 1:
            raise KernelError(f"{self.op} holds {len(found)} ops called {op}, expected one")
        return found[0]

    def buffers(self) -> list[Buffer]:
        """Operand buffers in order (absent ones skipped), then result buffers: one for a plain view, codes and scales for a scaled one."""
        named = [(f"in{i}", v, "operand") for i, v in enumerate(self.operands)] + [
            (f"out{i}", v, "result") for i, v in enumerate(self.results)
        ]
        return [Buffer(name + suffix, element, role) for name, view, role in named if view is not None for suffix, element in parts(view)]

    def __str__(self) -> str:
        shown = ", ".join("-" if v is None else str(v) for v in self.operands)
        settings = ", ".join(f"{k}={v}" for k, v in self.attributes if not isinstance(v, list | tuple))
        return f"{self.op}({shown}) -> {', '.join(map(str, self.results))}" + (f" {{{settings}}}" if settings else "")


def parts(view: View) -> list[tuple[str, str]]:
    """Buffers behind a view as (suffix, element): FP4 codes and E8M0 bytes are i8, E4M3 scales are f8E4M3FN."""
    tensor = view if isinstance(view, Tensor) else view.entry
    element = "i8" if tensor.number.element == "f4E2M1FN" else tensor.number.element
    if tensor.number.scaling is None:
        return [("", element)]
    return [("_codes", element), ("_scales", "i8" if tensor.number.scaling.scale == "e8m0" else "f8E4M3FN")]


@dataclass(frozen=True)
class Workspace:
    """Scratch behind the results: `elements(rows)` of `element` for a bucket of `rows`."""

    element: str
    elements: Callable[[int], int]


EVERY_SCALE = (0, 254)
"""The smallest and the largest E8M0 byte that is a number: 2^-127, which quantizers write where all of a group is 0, and 2^127."""


@dataclass(frozen=True)
class Layout:
    """How a weight operand lies in memory: transforms of the loader for its codes (or values) and for its scales; () is as stored."""

    values: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()


@dataclass(frozen=True)
class Part:
    """A launch in front of a kernel's own, on the same buffers: it fills workspaces that the next ones read."""

    body: Callable[..., None]
    grid: Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class Kernel:
    """What a family builds: `body(*buffers)` of one program instance and `grid(*buffers)`, on operand, result, workspace buffers, then `count`.

    `count` is an i32 buffer whose cell 0 is the op's run-time row count. `layouts` maps operand numbers to weight layouts. `order` says in
    words which sums are taken in which order: equal words, equal bits. Launches in `before` come first, in order.
    """

    body: Callable[..., None]
    grid: Callable[..., Sequence[Any]]
    order: str
    layouts: Mapping[int, Layout] = field(default_factory=dict)
    workspaces: tuple[Workspace, ...] = ()
    before: tuple[Part, ...] = ()


@dataclass(frozen=True)
class Family:
    """One tile kernel family. `refuses(request)` is None, or the sentence that says why it does not fit."""

    name: str
    covers: tuple[str, ...]
    build: Callable[[Request, Schedule], Kernel]
    refuses: Callable[[Request], str | None]


_FAMILIES: dict[str, list[Family]] = {}


def family(*covers: str, refuses: Callable[[Request], str | None] = lambda request: None) -> Callable[[Any], Family]:
    """Decorator: registers `build(request, schedule) -> Kernel` under its function name for the ops it covers."""

    def register(build: Callable[[Request, Schedule], Kernel]) -> Family:
        made = Family(build.__name__, covers, build, refuses)
        for op in covers:
            known = _FAMILIES.setdefault(op, [])
            known[:] = [f for f in known if f.name != made.name] + [made]
        return made

    return register


@cache
def load_families() -> None:
    """Imports every file of `codegen/kernels`; each registers what it covers."""
    package = importlib.import_module("tapeout.codegen.kernels")
    for module in sorted(m.name for m in pkgutil.iter_modules(package.__path__)):
        importlib.import_module(f"tapeout.codegen.kernels.{module}")


def select(request: Request) -> Family:
    """The family that answers a request: the first registered one that accepts it; raises `KernelError` naming what was tried."""
    load_families()
    tried = _FAMILIES.get(request.op, [])
    for candidate in tried:
        if candidate.refuses(request) is None:
            return candidate
    reasons = "; ".join(f"{f.name}: {f.refuses(request)}" for f in tried) or f"no family covers {request.op}"
    raise KernelError(f"no kernel for {request}: {reasons}. Add a family to codegen/kernels or change the pass that made this op")


def named(op: str, name: str) -> Family:
    """The family called `name` that covers `op`."""
    load_families()
    found = next((f for f in _FAMILIES.get(op, []) if f.name == name), None)
    if found is None:
        raise KernelError(f"no family called {name} covers {op}; known: {', '.join(f.name for f in _FAMILIES.get(op, [])) or 'none'}")
    return found


def request_of(op: ir.Operation) -> Request:
    """The request behind one graph op."""
    if op.name == "nn.fused":
        kind = ir.StringAttr(op.attributes["kind"]).value
        body = tuple(
            (inner.operation.name, _attributes(inner)) for inner in op.regions[0].blocks[0].operations if inner.operation.name != "nn.yield"
        )
        return Request(
            f"nn.fused:{kind}", (), tuple(from_ir(v.type) for v in op.operands), tuple(from_ir(r.type) for r in op.results), body
        )
    operands, results = views_of(op)
    flat = [v for g in operands for v in (g if isinstance(g, list) else [g])]
    return Request(op.name, _attributes(op), tuple(flat), tuple(results))


def _attributes(op: Any) -> Attributes:
    declaration_of(op)
    return tuple(sorted((k, _frozen(v)) for k, v in vars(attributes_of(op)).items()))


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def width(view: View | None) -> int:
    """The static extent of a view's last axis."""
    tensor = view.entry if isinstance(view, Ring | Blocks) else view
    last = tensor.shape[-1] if tensor is not None else None
    if last is None:
        raise KernelError(f"{view} has no static last axis")
    return last
