"""Meanings of arith and math ops on scalars and vectors. Integers wrap; signless integers are held signed; floats round once, to nearest even."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tapeout.runtime.device.ascend_simulator import attributes
from tapeout.runtime.device.ascend_simulator.memory import Linear
from tapeout.runtime.device.ascend_simulator.program import Env, Op, Run, meaning

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def wrapped(x: Any, dtype: Any) -> Any:
    """An integer result in `dtype`."""
    if isinstance(x, np.ndarray):
        return x.astype(dtype, copy=False)
    if isinstance(x, Linear):  # an index of loops that run at once: far from where integers wrap
        return x
    if dtype.kind == "b":
        return bool(int(x) & 1)
    bits = dtype.itemsize * 8
    low = int(x) & ((1 << bits) - 1)
    return low - (1 << bits) if low >> (bits - 1) else low


def unsigned(x: Any, dtype: Any) -> Any:
    """The same bits read as unsigned."""
    if isinstance(x, np.ndarray):
        return x.view(UNSIGNED[x.dtype.itemsize]) if x.dtype.kind == "i" else x
    return int(x) if dtype.kind == "b" else int(x) & ((1 << (dtype.itemsize * 8)) - 1)


def rounded(x: Any, dtype: Any) -> Any:
    """A float result in `dtype`."""
    return x.astype(dtype) if isinstance(x, np.ndarray) else dtype.type(x)


def _quotient(a: Any, b: Any) -> Any:
    if isinstance(a, np.ndarray):
        size = np.floor_divide(np.abs(a), np.abs(b))
        return np.where((a < 0) == (b < 0), size, -size)
    size = abs(a) // abs(b)
    return size if (a < 0) == (b < 0) else -size


def _shift(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    # A distance of the width or more is undefined in the source; lanes that a select drops may still hold one.
    def shifted(a: Any, b: Any) -> Any:
        return function(a, np.clip(b, 0, a.dtype.itemsize * 8 - 1)) if isinstance(a, np.ndarray) else function(a, b)

    return shifted


def _pick(array_form: Any, scalar_form: Any) -> Callable[[Any, Any], Any]:
    return lambda a, b: array_form(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else scalar_form(a, b)


SIGNED: dict[str, Callable[[Any, Any], Any]] = {
    "addi": lambda a, b: a + b, "subi": lambda a, b: a - b, "muli": lambda a, b: a * b, "andi": lambda a, b: a & b,
    "ori": lambda a, b: a | b, "xori": lambda a, b: a ^ b, "divsi": _quotient, "remsi": lambda a, b: a - b * _quotient(a, b),
    "floordivsi": lambda a, b: a // b, "ceildivsi": lambda a, b: -((-a) // b), "minsi": _pick(np.minimum, min), "maxsi": _pick(np.maximum, max),
    "shli": _shift(lambda a, b: a << b), "shrsi": _shift(lambda a, b: a >> b),
}  # fmt: skip
OF_UNSIGNED: dict[str, Callable[[Any, Any], Any]] = {
    "divui": lambda a, b: a // b, "remui": lambda a, b: a % b, "minui": _pick(np.minimum, min), "maxui": _pick(np.maximum, max),
    "shrui": _shift(lambda a, b: a >> b),
}  # fmt: skip
FLOATS: dict[str, Callable[[Any, Any], Any]] = {
    "addf": lambda a, b: a + b, "subf": lambda a, b: a - b, "mulf": lambda a, b: a * b, "divf": lambda a, b: np.divide(a, b),
    "maximumf": np.maximum, "minimumf": np.minimum, "maxnumf": np.fmax, "minnumf": np.fmin,
}  # fmt: skip
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "exp": np.exp, "log": np.log, "log1p": np.log1p, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "absf": np.abs, "absi": np.abs,
    "floor": np.floor, "ceil": np.ceil, "roundeven": np.rint, "trunc": np.trunc, "exp2": np.exp2, "log2": np.log2, "tanh": np.tanh,
}  # fmt: skip


def _binary(op: Op, function: Callable[[Any, Any], Any], finish: Callable[[Any, Any], Any], read: Callable[[Any, Any], Any]) -> Run:
    (a, b), (out,), dtype = op.operands, op.results, op.result_dtype

    def run(env: Env) -> None:
        env[out] = finish(function(read(env[a], dtype), read(env[b], dtype)), dtype)

    return run


def _as_is(x: Any, dtype: Any) -> Any:
    return x


@meaning(*(f"arith.{name}" for name in SIGNED))
def _signed(op: Op) -> Run:
    return _binary(op, SIGNED[op.name.split(".")[1]], wrapped, _as_is)


@meaning(*(f"arith.{name}" for name in OF_UNSIGNED))
def _of_unsigned(op: Op) -> Run:
    return _binary(op, OF_UNSIGNED[op.name.split(".")[1]], wrapped, unsigned)


@meaning(*(f"arith.{name}" for name in FLOATS))
def _floats(op: Op) -> Run:
    return _binary(op, FLOATS[op.name.split(".")[1]], rounded, _as_is)


@meaning(*(f"math.{name}" for name in FUNCTIONS))
def _function(op: Op) -> Run:
    function, (x,), (out,), dtype = FUNCTIONS[op.name.split(".")[1]], op.operands, op.results, op.result_dtype

    def run(env: Env) -> None:
        wide = env[x] if dtype.kind == "i" else np.asarray(env[x], np.float64 if dtype.itemsize == 8 else np.float32)
        env[out] = rounded(np.asarray(function(wide)), dtype)

    return run


@meaning("math.fma")
def _fused(op: Op) -> Run:
    (a, b, c), (out,), dtype = op.operands, op.results, op.result_dtype

    def run(env: Env) -> None:
        env[out] = rounded(np.asarray(env[a], np.float64) * env[b] + env[c], dtype)

    return run


@meaning("arith.constant")
def _constant(op: Op) -> Run:
    (out,), value = op.results, _constant_value(op)

    def run(env: Env) -> None:
        env[out] = value

    return run


def _constant_value(op: Op) -> Any:
    text, dtype = op.attribute("value") or "", op.result_dtype
    if op.node.result_kinds[0].form != "vector":
        return attributes.number(text, dtype)
    return attributes.dense(text, dtype, op.shape)


@meaning("arith.index_cast", "arith.extsi", "arith.trunci")
def _convert_signed(op: Op) -> Run:
    (x,), (out,), dtype = op.operands, op.results, op.result_dtype

    def run(env: Env) -> None:
        env[out] = wrapped(env[x], dtype)

    return run


@meaning("arith.extui", "arith.index_castui")
def _convert_unsigned(op: Op) -> Run:
    (x,), (out,), source, dtype = op.operands, op.results, op.dtype(), op.result_dtype

    def run(env: Env) -> None:
        env[out] = wrapped(unsigned(env[x], source), dtype)

    return run


@meaning("arith.extf", "arith.truncf", "arith.sitofp")
def _convert_float(op: Op) -> Run:
    (x,), (out,), dtype = op.operands, op.results, op.result_dtype

    def run(env: Env) -> None:
        env[out] = rounded(env[x], dtype)

    return run


@meaning("arith.uitofp")
def _unsigned_to_float(op: Op) -> Run:
    (x,), (out,), source, dtype = op.operands, op.results, op.dtype(), op.result_dtype

    def run(env: Env) -> None:
        env[out] = rounded(unsigned(env[x], source), dtype)

    return run


@meaning("arith.fptosi")
def _float_to_signed(op: Op) -> Run:
    (x,), (out,), dtype = op.operands, op.results, op.result_dtype

    def run(env: Env) -> None:
        whole = np.trunc(np.asarray(env[x], np.float64))
        bits = dtype.itemsize * 8 - 1
        limited = np.clip(np.nan_to_num(whole, nan=0.0, posinf=2.0**62, neginf=-(2.0**62)), -(2.0**bits), 2.0**bits - 1).astype(dtype)
        env[out] = limited if isinstance(env[x], np.ndarray) else int(limited)

    return run


@meaning("arith.negf")
def _negate(op: Op) -> Run:
    (x,), (out,) = op.operands, op.results

    def run(env: Env) -> None:
        env[out] = -env[x]

    return run


@meaning("arith.bitcast")
def _bitcast(op: Op) -> Run:
    (x,), (out,), source, dtype = op.operands, op.results, op.dtype(), op.result_dtype

    def run(env: Env) -> None:
        bits = np.ascontiguousarray(np.asarray(env[x], source)).view(dtype)
        env[out] = bits if isinstance(env[x], np.ndarray) else (int(bits.reshape(())) if dtype.kind in "iu" else bits.reshape(())[()])

    return run


ORDERS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}  # fmt: skip
INTEGER_ORDERS = ("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge")
FLOAT_ORDERS = ("false", "oeq", "ogt", "oge", "olt", "ole", "one", "ord", "ueq", "ugt", "uge", "ult", "ule", "une", "uno", "true")


@meaning("arith.cmpi")
def _compare_integers(op: Op) -> Run:
    word, (a, b), (out,) = INTEGER_ORDERS[op.integer("predicate") or 0], op.operands, op.results
    order, dtype = ORDERS[word if word in ("eq", "ne") else word[1:]], op.dtype()
    read = unsigned if word[0] == "u" else _as_is

    def run(env: Env) -> None:
        env[out] = order(read(env[a], dtype), read(env[b], dtype))

    return run


@meaning("arith.cmpf")
def _compare_floats(op: Op) -> Run:
    word, (a, b), (out,) = FLOAT_ORDERS[op.integer("predicate") or 0], op.operands, op.results

    def run(env: Env) -> None:
        env[out] = _float_order(word, env[a], env[b])

    return run


def _float_order(word: str, a: Any, b: Any) -> Any:
    lost = np.isnan(np.asarray(a, np.float64)) | np.isnan(np.asarray(b, np.float64))
    if word in ("false", "true", "ord", "uno"):
        return {"false": np.zeros_like(lost), "true": np.ones_like(lost), "ord": ~lost, "uno": lost}[word]
    found = ORDERS[word[1:]](a, b)
    result = (found & ~lost) if word[0] == "o" else (found | lost)
    return result if np.ndim(result) else bool(result)


@meaning("arith.select")
def _select(op: Op) -> Run:
    (mask, a, b), (out,) = op.operands, op.results

    def run(env: Env) -> None:
        chosen = env[mask]
        if isinstance(chosen, np.ndarray) and chosen.ndim:
            env[out] = np.where(chosen, env[a], env[b])
        else:
            env[out] = env[a] if chosen else env[b]

    return run
