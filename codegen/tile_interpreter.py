"""Runs a tile kernel on numpy buffers, instance by instance: the meaning that every target's code is compared with.

Arithmetic is done in each op's own type. Elements that a kernel may not rely on are poisoned (NaN, or the lowest integer), so that a
kernel that lets one through produces a visibly wrong store. Order inside one reduction or product is numpy's: targets agree up to rounding.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tapeout.dialects import tile
from tapeout.dialects._mlir import ir

DTYPES: dict[str, Any] = {
    "bf16": ml_dtypes.bfloat16, "f8E4M3FN": ml_dtypes.float8_e4m3fn, "f16": np.float16, "f32": np.float32, "f64": np.float64,
    "i1": np.bool_, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64, "index": np.int64,
}  # fmt: skip


class InterpreterError(ValueError):
    """Buffers that do not fit a kernel, or an access outside a buffer."""


def run(module: ir.Module, buffers: Mapping[str, np.ndarray], grid: Sequence[int] | None = None) -> None:
    """Executes every instance of the grid in order (last axis fastest), writing into `buffers`.

    `buffers` maps argument names to arrays of the argument's element type (unsigned integers stand for signed ones), any shape, contiguous.
    `grid` replaces the kernel's own grid. Raises `InterpreterError` for missing, wrong or too small buffers.
    """
    body, extents = list(module.body.operations)[:2]
    with module.context:
        flat = _bind(body, buffers)
        shape = grid if grid is not None else _Frame(extents, flat, (0, 0, 0), {}).results
        steps: _Steps = {}
        for instance in np.ndindex(*[int(n) for n in shape]):
            _Frame(body, flat, (*instance, 0, 0, 0)[:3], steps)


def grid_of(module: ir.Module, buffers: Mapping[str, np.ndarray]) -> tuple[int, ...]:
    """The grid that the kernel asks for, given its buffers."""
    extents = list(module.body.operations)[-1]
    with module.context:
        return tuple(int(n) for n in _Frame(extents, _bind(extents, buffers), (0, 0, 0), {}).results)


def _bind(function: Any, buffers: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    names = [name.value for name in function.attributes["tile.arguments"]]
    if set(names) != set(buffers):
        raise InterpreterError(f"kernel {function.name.value} takes buffers {names}, found {sorted(buffers)}; pass exactly those")
    return [
        _flat(name, buffers[name], _dtype(ir.MemRefType(a.type).element_type)) for name, a in zip(names, function.arguments, strict=True)
    ]


def _flat(name: str, array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    unsigned = array.dtype.kind == "u" and dtype.kind == "i" and array.dtype.itemsize == dtype.itemsize
    if array.dtype != dtype and not unsigned:
        raise InterpreterError(f"buffer {name} holds {array.dtype}, the kernel reads {dtype}; convert it first")
    if not array.flags.c_contiguous:
        raise InterpreterError(f"buffer {name} is not contiguous; pass a contiguous copy")
    return array.reshape(-1).view(dtype)


def _dtype(elem: Any) -> np.dtype[Any]:
    return np.dtype(DTYPES[str(elem)])


def _result_dtype(op: Any) -> np.dtype[Any]:
    kind = op.results[0].type
    return _dtype(kind.element_type if isinstance(kind, ir.RankedTensorType) else kind)


@dataclass(frozen=True, slots=True)
class _Step:
    """An op as it is executed; `act` is None for the one that ends a block."""

    operands: tuple[Any, ...]
    results: tuple[Any, ...]
    act: "Callable[[_Frame], list[Any]] | None"


_Steps = dict[Any, list[_Step]]
"""Blocks as steps: what an op is made of is asked once, however often it runs."""


class _Frame:
    """The values of one program instance. `steps` are those of its kernel, extended in place."""

    def __init__(self, function: Any, buffers: Sequence[np.ndarray], instance: tuple[int, ...], steps: _Steps) -> None:
        self.instance, self._steps = instance, steps
        self.values: dict[Any, Any] = dict(zip(function.arguments, buffers, strict=True))
        with np.errstate(all="ignore"):
            self.results = self.block(function.regions[0].blocks[0])

    def block(self, block: Any) -> list[Any]:
        """Runs a block, returns what its terminator passes on."""
        steps = self._steps.get(block)
        if steps is None:
            steps = self._steps[block] = [_step(op) for op in block.operations]
        for step in steps:
            if step.act is None:
                return self.of(step.operands)
            for result, value in zip(step.results, step.act(self), strict=True):
                self.values[result] = value
        return []

    def of(self, values: Any) -> list[Any]:
        """Known values of operands."""
        return [self.values[v] for v in values]


def _step(op: Any) -> _Step:
    act = None if op.name in ("func.return", "scf.yield") else _act(op, op.name)
    return _Step(tuple(op.operands), tuple(op.results), act)


def _act(op: Any, name: str) -> Callable[[_Frame], list[Any]]:
    """What gives the results of one op."""
    if name == "arith.constant":
        made = _constant(op)
        return lambda frame: made
    if name in _MEMORY:
        memory = _MEMORY[name]
        return lambda frame: _in_bounds(op, lambda: memory(frame, op))
    if name in _STRUCTURE:
        structure = _STRUCTURE[name]
        return lambda frame: structure(frame, op)
    if name in _ELEMENTWISE:
        function, dtype, operands = _ELEMENTWISE[name], _result_dtype(op), tuple(op.operands)
        return lambda frame: [_typed(function(*frame.of(operands)), dtype)]
    return lambda frame: _refuse(name)


def _refuse(name: str) -> list[Any]:
    raise InterpreterError(f"{name} is not an op of tile kernels; verify-tile lists those that are")


def _typed(value: Any, dtype: np.dtype[Any]) -> Any:
    return np.asarray(value).astype(dtype) if np.ndim(value) else dtype.type(value)


def _in_bounds(op: Any, act: Callable[[], list[Any]]) -> list[Any]:
    try:
        return act()
    except IndexError as error:
        raise InterpreterError(f"{op.name} reaches outside its buffer at {op.location}: {error}") from error


def _checked(base: np.ndarray) -> np.ndarray:
    # numpy accepts negative positions; a kernel that makes one reads a neighbour's memory on a device.
    return base.view(_Bounded)


class _Bounded(np.ndarray):
    def __getitem__(self, at: Any) -> Any:
        _refuse_negative(at)
        return np.asarray(super().__getitem__(at))

    def __setitem__(self, at: Any, value: Any) -> None:
        _refuse_negative(at)
        super().__setitem__(at, value)


def _refuse_negative(at: Any) -> None:
    if (not isinstance(at, slice | np.ndarray) and at < 0) or (isinstance(at, np.ndarray) and at.dtype != np.bool_ and (at < 0).any()):
        raise IndexError("negative position")


# ---- memory ------------------------------------------------------------------------------------------------------------


def _optional(values: list[Any]) -> Any:
    return int(values[0]) if values else None


def _box(result: Any) -> list[int]:
    return list(ir.RankedTensorType(result.type).shape)


def _load(frame: _Frame, op: Any) -> list[Any]:
    (base,) = frame.of([op.base])
    at, extent = [int(i) for i in frame.of(op.at)], _optional(frame.of(op.extent))
    return [tile.LoadOp.meaning(_checked(base), at, extent, _box(op.out), tile.integers(op.shape), op.panel.value)]


def _store(frame: _Frame, op: Any) -> list[Any]:
    value, base = frame.of([op.value, op.base])
    at, extent = [int(i) for i in frame.of(op.at)], _optional(frame.of(op.extent))
    tile.StoreOp.meaning(value, _checked(base), at, extent, tile.integers(op.shape))
    return []


def _gather(frame: _Frame, op: Any) -> list[Any]:
    base, ids, first, column = frame.of([op.base, op.ids, op.first, op.column])
    valid = _optional(frame.of(op.valid))
    arrays = _checked(base), _checked(ids)
    return [tile.GatherOp.meaning(*arrays, int(first), int(column), valid, _box(op.out), op.row_stride.value)]


def _scatter(frame: _Frame, op: Any) -> list[Any]:
    value, base, ids, first, column, valid = frame.of([op.value, op.base, op.ids, op.first, op.column, op.valid])
    tile.ScatterOp.meaning(value, _checked(base), _checked(ids), int(first), int(column), int(valid), op.row_stride.value)
    return []


def _compress_store(frame: _Frame, op: Any) -> list[Any]:
    values, mask, base, at, limit = frame.of([op.values, op.mask, op.base, op.at, op.limit])
    if min(int(limit), int(at) + int(mask.sum())) > len(base):
        raise IndexError(f"position {limit} of a buffer of {len(base)}")
    return [np.int64(tile.CompressStoreOp.meaning(values, mask, base, int(at), int(limit)))]


_MEMORY: dict[str, Callable[[_Frame, Any], list[Any]]] = {
    "tile.load": _load,
    "tile.store": _store,
    "tile.gather": _gather,
    "tile.scatter": _scatter,
    "tile.compress_store": _compress_store,
    "tile.scalar": lambda frame, op: [np.int64(tile.ScalarOp.meaning(_checked(frame.values[op.base]), int(frame.values[op.at])))],
}


# ---- structure ---------------------------------------------------------------------------------------------------------


def _constant(op: Any) -> list[Any]:
    attribute, kind = op.value, op.results[0].type
    if not isinstance(kind, ir.RankedTensorType):
        return [_dtype(kind).type(attribute.value)]
    dense = ir.DenseElementsAttr(attribute)
    number = dense.get_splat_value().value if dense.is_splat else np.array(dense)
    found = np.full(list(kind.shape), number, _dtype(kind.element_type)) if dense.is_splat else number
    found.flags.writeable = False  # every run of the op gives this array
    return [found]


def _fill(frame: _Frame, op: Any) -> list[Any]:
    shape = _box(op.results[0])
    return [np.full(shape, frame.values[op.operands[0]], _result_dtype(op))]


def _empty(frame: _Frame, op: Any) -> list[Any]:
    return [tile.unspecified(_box(op.results[0]), _result_dtype(op))]


def _broadcast(frame: _Frame, op: Any) -> list[Any]:
    (value,) = frame.of(op.operands[:1])
    for axis in op.attributes["dimensions"]:
        value = np.expand_dims(value, axis)
    return [np.broadcast_to(value, _box(op.results[0]))]


def _transpose(frame: _Frame, op: Any) -> list[Any]:
    (value,) = frame.of(op.operands[:1])
    return [value.transpose(list(op.attributes["permutation"]))]


def _reduce(frame: _Frame, op: Any) -> list[Any]:
    value, start = frame.of(op.operands)
    combine = next(iter(op.regions[0].blocks[0].operations)).name
    axis = next(iter(op.attributes["dimensions"]))
    by = {"arith.addf": np.add, "arith.addi": np.add, "arith.maxnumf": np.fmax, "arith.maxsi": np.maximum,
          "arith.minnumf": np.fmin, "arith.minsi": np.minimum}[combine]  # fmt: skip
    return [_typed(by(start, by.reduce(value, axis=axis, dtype=value.dtype)), value.dtype)]


def _matmul(frame: _Frame, op: Any) -> list[Any]:
    a, b, acc = frame.of(op.operands)
    return [np.asarray(acc + a.astype(np.float32) @ b.astype(np.float32), np.float32)]


def _dot_scaled(frame: _Frame, op: Any) -> list[Any]:
    return [tile.DotScaledOp.meaning(*frame.of(op.operands))]


def _for(frame: _Frame, op: Any) -> list[Any]:
    lo, hi, step, *carried = frame.of(op.operands)
    block = op.regions[0].blocks[0]
    counter, *slots = block.arguments
    for i in range(int(lo), int(hi), int(step)):
        frame.values[counter] = np.int64(i)
        frame.values.update(zip(slots, carried, strict=True))
        carried = frame.block(block)
    return carried


def _if(frame: _Frame, op: Any) -> list[Any]:
    (condition,) = frame.of(op.operands)
    region = op.regions[0 if condition else 1]
    return frame.block(region.blocks[0]) if len(region.blocks) else []


def _reshape(frame: _Frame, op: Any) -> list[Any]:
    return [np.reshape(frame.values[op.operands[0]], _box(op.results[0]))]


_STRUCTURE: dict[str, Callable[[_Frame, Any], list[Any]]] = {
    "arith.cmpf": lambda frame, op: [_FLOAT_ORDER[op.attributes["predicate"].value](*frame.of(op.operands))],
    "arith.cmpi": lambda frame, op: [_INTEGER_ORDER[op.attributes["predicate"].value](*frame.of(op.operands))],
    "arith.bitcast": lambda frame, op: [np.asarray(frame.values[op.operands[0]]).view(_result_dtype(op))],
    "linalg.fill": _fill,
    "linalg.broadcast": _broadcast,
    "linalg.transpose": _transpose,
    "linalg.reduce": _reduce,
    "linalg.matmul": _matmul,
    "tensor.empty": _empty,
    "tensor.expand_shape": _reshape,
    "tensor.collapse_shape": _reshape,
    "scf.for": _for,
    "scf.if": _if,
    "tile.dot_scaled": _dot_scaled,
    "tile.program_id": lambda frame, op: [np.int64(tile.ProgramIdOp.meaning(frame.instance, op.axis.value))],
    "tile.iota": lambda frame, op: [tile.IotaOp.meaning(_box(op.out)[0])],
}


# ---- elementwise -------------------------------------------------------------------------------------------------------


def _unsigned(value: Any) -> Any:
    array = np.asarray(value)
    return array if array.dtype == np.bool_ else array.view(np.dtype(f"u{array.dtype.itemsize}"))


def _by_unsigned(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: np.asarray(function(_unsigned(a), _unsigned(b))).view(np.asarray(a).dtype)


def _truncated_quotient(a: Any, b: Any) -> Any:
    return (np.abs(a) // np.abs(b)) * (np.sign(a) * np.sign(b))


def _compare(function: Callable[..., Any], ordered: bool = True) -> Callable[..., Any]:
    def by(a: Any, b: Any) -> Any:
        nan = np.isnan(np.asarray(a, np.float64)) | np.isnan(np.asarray(b, np.float64))
        return function(a, b) & ~nan if ordered else function(a, b) | nan

    return by


def _float_to_integer(x: Any) -> Any:
    return np.trunc(np.asarray(x, np.float64))


_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "arith.addf": np.add, "arith.subf": np.subtract, "arith.mulf": np.multiply, "arith.divf": np.divide,
    "arith.maxnumf": np.fmax, "arith.minnumf": np.fmin, "arith.negf": np.negative,
    "arith.addi": np.add, "arith.subi": np.subtract, "arith.muli": np.multiply,
    "arith.maxsi": np.maximum, "arith.minsi": np.minimum,
    "arith.divsi": _truncated_quotient, "arith.remsi": np.fmod,
    "arith.divui": _by_unsigned(np.floor_divide), "arith.remui": _by_unsigned(np.remainder),
    "arith.shli": np.left_shift, "arith.shrsi": np.right_shift, "arith.shrui": _by_unsigned(np.right_shift),
    "arith.andi": np.bitwise_and, "arith.ori": np.bitwise_or, "arith.xori": np.bitwise_xor,
    "arith.select": np.where,
    "arith.extf": lambda x: x, "arith.truncf": lambda x: x, "arith.trunci": lambda x: x, "arith.extsi": lambda x: x,
    "arith.extui": _unsigned, "arith.uitofp": _unsigned, "arith.sitofp": lambda x: x, "arith.fptosi": _float_to_integer,
    "arith.index_cast": lambda x: x,
    "math.exp": np.exp, "math.log": np.log, "math.log1p": np.log1p, "math.sqrt": np.sqrt,
    "math.rsqrt": lambda x: 1 / np.sqrt(x), "math.absf": np.abs,
}  # fmt: skip

_FLOAT_ORDER: dict[int, Callable[..., Any]] = {
    1: _compare(np.equal), 2: _compare(np.greater), 3: _compare(np.greater_equal), 4: _compare(np.less),
    5: _compare(np.less_equal), 6: _compare(np.not_equal), 13: _compare(np.not_equal, ordered=False),
}  # fmt: skip
_INTEGER_ORDER: dict[int, Callable[..., Any]] = {
    0: np.equal, 1: np.not_equal, 2: np.less, 3: np.less_equal, 4: np.greater, 5: np.greater_equal,
    6: lambda a, b: _unsigned(a) < _unsigned(b), 7: lambda a, b: _unsigned(a) <= _unsigned(b),
    8: lambda a, b: _unsigned(a) > _unsigned(b), 9: lambda a, b: _unsigned(a) >= _unsigned(b),
}  # fmt: skip
