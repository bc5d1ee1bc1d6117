"""From the text of a lowered module to functions of Python closures: each op is turned into `run(env)` by the handler registered for its name.

A block is compiled for a `Scope`: how many enclosing loops run all their iterations at once (its level), and in which of them each value was
made. Values of such loops are arrays with one leading axis for each; extent 1 where a loop does not change them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from tapeout.runtime.device.ascend_simulator import attributes
from tapeout.runtime.device.ascend_simulator.memory import Core, SimulationError
from tapeout.runtime.device.ascend_simulator.text import Block, Kind, Node, read_module

Env = list[Any]
Run = Callable[[Env], Any]
CORE_SLOT, TIMES_SLOT = 0, 1
"""The running core, and how many iterations an op stands for."""

NUMPY: dict[str, Any] = {
    "f32": np.dtype(np.float32), "f64": np.dtype(np.float64), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16),
    "f8E4M3FN": np.dtype(ml_dtypes.float8_e4m3fn), "f8E5M2": np.dtype(ml_dtypes.float8_e5m2), "i1": np.dtype(np.bool_),
    "i8": np.dtype(np.int8), "ui8": np.dtype(np.uint8), "i16": np.dtype(np.int16), "i32": np.dtype(np.int32), "i64": np.dtype(np.int64),
    "index": np.dtype(np.int64),
}  # fmt: skip
IGNORED = frozenset({
    "annotation.mark", "hivm.hir.set_ctrl", "hivm.hir.set_flag", "hivm.hir.wait_flag", "hivm.hir.pipe_barrier", "hivm.hir.dcci",
    "hivm.hir.set_ffts_base_addr", "hivm.hir.set_mask_norm", "memref.dealloc",
})  # fmt: skip
"""Hints, and order inside one core, which program order already gives."""
UNCOUNTED = frozenset({
    "arith.constant", "arith.bitcast", "vector.constant_mask", "vector.create_mask", "vector.shape_cast", "builtin.unrealized_conversion_cast",
})  # fmt: skip

HANDLERS: dict[str, Callable[["Op"], Run | None]] = {}


def meaning(*names: str) -> Callable[[Callable[["Op"], Run | None]], Callable[["Op"], Run | None]]:
    """Decorator: registers the handler of ops by name."""

    def register(handler: Callable[["Op"], Run | None]) -> Callable[["Op"], Run | None]:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


def is_data(kind: Kind) -> bool:
    """Whether values of a type may be numbers of a computation; others are views and the indices that lead to them."""
    return kind.form == "vector" or (kind.form == "scalar" and kind.element != "index")


class Op:
    """One op while its function is compiled: slots of its operands and results, and what handlers ask of it."""

    def __init__(self, node: Node, scope: "Scope") -> None:
        self.node, self.scope, self.level = node, scope, scope.level
        self.operands = [scope.operand(name, kind) for name, kind in zip(node.operands, node.operand_kinds, strict=True)]
        self.results = [scope.result(name) for name in node.results]

    @property
    def name(self) -> str:
        return self.node.name

    def dtype(self, number: int = 0) -> Any:
        """The numpy type of an operand's elements."""
        return NUMPY.get(self.node.operand_kinds[number].element)

    @property
    def result_dtype(self) -> Any:
        """The numpy type of the first result's elements."""
        return NUMPY.get(self.node.result_kinds[0].element)

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the first result."""
        return self.node.result_kinds[0].shape

    def rank(self, number: int = 0) -> int:
        """Axes of an operand."""
        return len(self.node.operand_kinds[number].shape)

    def attribute(self, name: str) -> str | None:
        """An attribute's text, or None."""
        return self.node.attributes.get(name)

    def word(self, name: str) -> str:
        """An attribute as text without its wrapping `#dialect.kind<...>`; empty where it is absent."""
        return attributes.word(self.node.attributes.get(name, ""))

    def integer(self, name: str) -> int | None:
        found = self.attribute(name)
        return None if found is None else int(found.partition(" : ")[0])

    def integers(self, name: str) -> list[int]:
        return attributes.integers(self.node.attributes[name])

    def map(self, *names: str) -> attributes.Map:
        """An affine map, under the first of the names that there is."""
        return attributes.affine_map(next(text for name in names if (text := self.attribute(name)) is not None))

    def segments(self) -> list[list[int]]:
        """Operand slots by group."""
        groups, at = [], 0
        for n in self.integers("operandSegmentSizes"):
            groups.append(self.operands[at : at + n])
            at += n
        return groups

    def block(self, region: int, scope: "Scope | None" = None) -> tuple[list[int], list[Run]]:
        """Argument slots and code of the one block of a region; none for an empty region."""
        if region >= len(self.node.regions) or not self.node.regions[region]:
            return [], []
        return (scope or self.scope).block(self.node.regions[region][0])


class Scope:
    """How ops are compiled at one place: their level, and who turns an op into code."""

    def __init__(self, function: "Function", level: int = 0, compile_op: Callable[[Op], Run | None] | None = None) -> None:
        self.function, self.level, self.compile_op = function, level, compile_op or _compiled
        self.lifted: dict[int, tuple[int, int, int]] = {}
        """For slots of outer loops that are read here: the slot of the same value with all leading axes, how many it had, and its own rank."""

    def inner(self, levels: int = 0) -> "Scope":
        """A scope inside `levels` more loops at once."""
        return Scope(self.function, self.level + levels, self.compile_op)

    def operand(self, name: str, kind: Kind) -> int:
        """The slot of a value that is read here."""
        slot = self.function.slot(name)
        made = self.function.levels.get(slot, 0)
        if not 0 < made < self.level or not is_data(kind):
            return slot
        if slot not in self.lifted:
            self.lifted[slot] = (self.function.slot(f"{name} at {id(self)}"), made, len(kind.shape))
        return self.lifted[slot][0]

    def result(self, name: str) -> int:
        """The slot of a value that is made here."""
        slot = self.function.slot(name)
        self.function.levels[slot] = self.level
        return slot

    def lift(self, env: Env) -> None:
        """Gives values of outer loops the axes of this scope; where a loop is entered."""
        for slot, (target, made, rank) in self.lifted.items():
            value = env[slot]
            if isinstance(value, np.ndarray) and value.ndim > rank:
                lead = value.shape[: value.ndim - rank]
                value = value.reshape(lead + (1,) * (self.level - made) + value.shape[value.ndim - rank :])
            env[target] = value

    def block(self, block: Block) -> tuple[list[int], list[Run]]:
        """Argument slots and code of a block; the code starts by counting the block's vector operations."""
        arguments = [self.result(name) for name, _ in block.arguments]
        code: list[Run] = []
        counted = 0
        for node in block.ops:
            if node.name in IGNORED:
                continue
            run = self.compile_op(Op(node, self))
            counted += _is_counted(node)
            if run is not None:
                code.append(run)
        return arguments, [_counter(counted), *code] if counted else code


def _compiled(op: Op) -> Run | None:
    handler = HANDLERS.get(op.name)
    if handler is None:
        raise SimulationError(f"the simulator has no meaning for {op.name}({', '.join(op.node.operands)})")
    return handler(op)


class Function:
    """One function, compiled when it is first called."""

    def __init__(self, node: Node, program: "Program") -> None:
        self.node, self.program = node, program
        self.name = node.attributes["sym_name"].strip('"')
        self.slots: dict[str, int] = {}
        self.levels: dict[int, int] = {}
        self.code: list[Run] | None = None
        self.arguments: list[int] = []

    @property
    def parameters(self) -> list[Kind]:
        """Types of its arguments."""
        return [kind for _, kind in self.node.regions[0][0].arguments] if self.node.regions and self.node.regions[0] else []

    def slot(self, name: str) -> int:
        return self.slots.setdefault(name, len(self.slots) + TIMES_SLOT + 1)

    def compiled(self) -> list[Run]:
        """The code of the body."""
        if self.code is None:
            self.arguments, self.code = Scope(self).block(self.node.regions[0][0])
        return self.code

    def room(self, env: Env) -> None:
        """Makes place for slots that code compiled meanwhile has added."""
        env.extend([None] * (len(self.slots) + TIMES_SLOT + 1 - len(env)))

    def call(self, values: Sequence[Any], core: Core) -> list[Any]:
        """Runs the function on one core."""
        code = self.compiled()
        env: Env = [None] * (len(self.slots) + TIMES_SLOT + 1)
        env[CORE_SLOT], env[TIMES_SLOT] = core, 1
        for slot, value in zip(self.arguments, values, strict=True):
            env[slot] = value
        result = execute(code, env)
        return [] if result is None else list(result)


def _is_counted(node: Node) -> bool:
    if node.name in UNCOUNTED:
        return False
    return node.name in ("vector.transfer_write", "vector.reduction") or any(kind.form == "vector" for kind in node.result_kinds)


def _counter(number: int) -> Run:
    def run(env: Env) -> None:
        env[CORE_SLOT].vector_operations += number * env[TIMES_SLOT]

    return run


def execute(code: Sequence[Run], env: Env) -> Any:
    """Runs closures in order; a terminator returns its operands, which end the block."""
    for run in code:
        result = run(env)
        if result is not None:
            return result
    return None


class Program:
    """A module and its functions; `at_once` lets independent iterations of loops run at once."""

    def __init__(self, text: str, at_once: bool = True) -> None:
        self.at_once = at_once
        found = [Function(node, self) for node in read_module(text) if node.name == "func.func"]
        self.functions = {function.name: function for function in found}
