"""From the text of a lowered module to functions of Python closures: each op is turned into `run(env)` by the handler registered for its name."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tapeout.codegen.ascend.simulator.memory import Core, SimulationError
from tapeout.dialects._mlir import ir

Env = list[Any]
Run = Callable[[Env], Any]
CORE_SLOT = 0
DYNAMIC = ir.ShapedType.get_dynamic_size()
DYNAMIC_STRIDE = ir.ShapedType.get_dynamic_stride_or_offset()

NUMPY = {
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


@dataclass(frozen=True)
class Op:
    """One op while its function is compiled: slots of its operands and results, and what handlers ask of it."""

    op: Any
    function: "Function"
    operands: list[int]
    results: list[int]

    @property
    def name(self) -> str:
        return str(self.op.name)

    def shape(self, value: Any) -> tuple[int | None, ...]:
        """Extents of a vector or memref; None where the run knows it."""
        kind = value.type
        return tuple(None if n == DYNAMIC else n for n in kind.shape)

    def dtype(self, value: Any) -> Any:
        """The numpy type of a scalar, or of a vector's or memref's elements."""
        kind = value.type
        text = str(kind.element_type if isinstance(kind, ir.VectorType | ir.MemRefType) else kind)
        return NUMPY.get(text)

    def is_vector(self, value: Any) -> bool:
        return isinstance(value.type, ir.VectorType)

    def attribute(self, name: str) -> Any:
        """An attribute, or None."""
        return self.op.attributes.get(name)

    def word(self, name: str) -> str:
        """An attribute as text without its wrapping `#dialect.kind<...>`; empty where it is absent."""
        found = self.attribute(name)
        return "" if found is None else str(found).split("<")[-1].rstrip(">")

    def integer(self, name: str) -> int | None:
        found = self.attribute(name)
        return None if found is None else int(ir.IntegerAttr(found).value)

    def integers(self, name: str) -> list[int]:
        return integers_of(self.op.attributes[name])

    def segments(self) -> list[list[int]]:
        """Operand slots by group."""
        groups, at = [], 0
        for n in ir.DenseI32ArrayAttr(self.op.attributes["operandSegmentSizes"]):
            groups.append(self.operands[at : at + n])
            at += n
        return groups

    def block(self, region: int) -> tuple[list[int], list[Run]]:
        """Argument slots and code of the one block of a region; none for an empty region."""
        regions = list(self.op.regions)
        if region >= len(regions) or not list(regions[region].blocks):
            return [], []
        return self.function.block(regions[region].blocks[0])


def integers_of(attribute: Any) -> list[int]:
    """Numbers of a dense or plain array attribute."""
    return [entry if isinstance(entry, int) else int(ir.IntegerAttr(entry).value) for entry in attribute]


class Function:
    """One function, compiled when it is first called."""

    def __init__(self, op: Any, program: "Program") -> None:
        self.op, self.program = op, program
        self.slots: dict[Any, int] = {}
        self.code: list[Run] | None = None
        self.arguments: list[int] = []

    def slot(self, value: Any) -> int:
        return self.slots.setdefault(value, len(self.slots) + 1)

    def compiled(self) -> list[Run]:
        """The code of the body."""
        if self.code is None:
            with self.program.context:
                self.arguments, self.code = self.block(self.op.regions[0].blocks[0])
        return self.code

    def block(self, block: Any) -> tuple[list[int], list[Run]]:
        """Argument slots and code of a block; the code starts by counting the block's vector operations."""
        arguments = [self.slot(a) for a in block.arguments]
        code: list[Run] = []
        counted = 0
        for op in block.operations:
            run = self._op(op.operation)
            counted += _is_counted(op.operation)
            if run is not None:
                code.append(run)
        return arguments, [_counter(counted), *code] if counted else code

    def _op(self, op: Any) -> Run | None:
        if op.name in IGNORED:
            return None
        handler = HANDLERS.get(op.name)
        if handler is None:
            raise SimulationError(f"the simulator has no meaning for {op.name}: {str(op)[:200]}")
        return handler(Op(op, self, [self.slot(v) for v in op.operands], [self.slot(v) for v in op.results]))

    def call(self, values: Sequence[Any], core: Core) -> list[Any]:
        """Runs the function on one core."""
        code = self.compiled()
        env: Env = [None] * (len(self.slots) + 1)
        env[CORE_SLOT] = core
        for slot, value in zip(self.arguments, values, strict=True):
            env[slot] = value
        result = execute(code, env)
        return [] if result is None else list(result)


def _is_counted(op: Any) -> bool:
    if op.name in UNCOUNTED:
        return False
    return op.name in ("vector.transfer_write", "vector.reduction") or any(isinstance(v.type, ir.VectorType) for v in op.results)


def _counter(number: int) -> Run:
    def run(env: Env) -> None:
        env[CORE_SLOT].vector_operations += number

    return run


def execute(code: Sequence[Run], env: Env) -> Any:
    """Runs closures in order; a terminator returns its operands, which end the block."""
    for run in code:
        result = run(env)
        if result is not None:
            return result
    return None


class Program:
    """A parsed module and its functions."""

    def __init__(self, text: str) -> None:
        self.context = ir.Context()
        self.context.allow_unregistered_dialects = True
        with self.context, ir.Location.unknown():
            self.module = ir.Module.parse(readable(text))
            found = [op.operation for op in self.module.body.operations if op.operation.name == "func.func"]
            self.functions = {ir.StringAttr(op.attributes["sym_name"]).value: Function(op, self) for op in found}


def readable(text: str) -> str:
    """The text of an LLVM 19 based tool in the words of our bindings: address spaces, mask extents, no target facts."""
    text = re.sub(r"#hivm\.address_space<(\w+)>", r'"\1"', text)
    text = re.sub(r"\n\}\) \{dlti\.target_system_spec.*\} : \(\) -> \(\)", "\n}) : () -> ()", text)
    return re.sub(r"mask_dim_sizes = \[([-\d, ]*)\]", lambda m: f"mask_dim_sizes = array<i64{': ' if m[1] else ''}{m[1]}>", text)
