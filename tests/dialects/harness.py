"""One op at a time: a function of one op is built from views, verified, printed, parsed back and run by meaning on plain arrays.

`element` decodes one element without the code under test; `agree` compares a result with a naive formula's real values.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np

from tapeout.dialects._mlir import func, ir
from tapeout.dialects.define import Cost, Mismatch, Sizes, as_tuple, cost_of, load_dialects
from tapeout.dialects.format import DTYPES, FP8_WEIGHT, REAL, Array, Number, Scaled, encode
from tapeout.dialects.interpreter import Interpreter
from tapeout.dialects.types import Tensor, View, from_ir, to_ir

Operands = Sequence[View | list[View] | None]


class Case:
    """A function of one op. `text` is its printed module, which was parsed back and printed the same."""

    def __init__(self, build: Callable[..., Any], operands: Operands, out: Any = None, **attributes: Any) -> None:
        self.operands = operands
        with _context() as self._context:
            self._module = _module(build, operands, out, attributes)
            self._module.operation.verify()
            self.text = str(self._module)
            self._again = ir.Module.parse(self.text)
            self._again.operation.verify()
            assert str(self._again) == self.text
            self._function = self._again.body.operations[0]
            self.results: list[View] = [from_ir(t) for t in self._function.type.results]

    def run(self, *inputs: Any) -> Any:
        """The op's results for its operands (a variadic group is a list, an absent operand None); one result comes alone."""
        with self._context:
            found = Interpreter(self._function).run(*_flat(inputs))
        for view, value in zip(self.results, found, strict=True):
            _check(view, value)
        return found if len(found) != 1 else found[0]

    def cost(self, rows: int, **sizes: int) -> Cost:
        with self._context:
            return cost_of(self._function.entry_block.operations[0], Sizes(rows, **sizes))


@contextmanager
def _context() -> Iterator[ir.Context]:
    context = ir.Context()
    load_dialects(context)
    with context, ir.Location.unknown():
        yield context


def _flat(groups: Sequence[Any]) -> list[Any]:
    return [x for g in groups for x in (g if isinstance(g, list) else [] if g is None else [g])]


def _module(build: Callable[..., Any], operands: Operands, out: Any, attributes: dict[str, Any]) -> ir.Module:
    types = [to_ir(v) for v in _flat(operands)]
    module = ir.Module.create()
    with ir.InsertionPoint(module.body):
        function = func.FuncOp("case", (types, []))
        values = iter(function.add_entry_block().arguments)
        with ir.InsertionPoint(function.entry_block):
            groups = [None if g is None else [next(values) for _ in g] if isinstance(g, list) else next(values) for g in operands]
            results = [v for v in as_tuple(build(*groups, out=out, **attributes)) if isinstance(v, ir.Value)]
            func.ReturnOp(results)
    function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(types, [v.type for v in results]))
    return module


def _check(view: View, value: Any) -> None:
    """A result has the static shape and the storage that its type promises."""
    assert isinstance(view, Tensor), view
    assert all(n is None or n == m for n, m in zip(view.shape, value.shape, strict=True)), (view, value.shape)
    assert isinstance(value, Scaled) == (view.number.scaling is not None), view
    if isinstance(value, Scaled):
        scales = {"e8m0": np.dtype(np.uint8), "e4m3": np.dtype(ml_dtypes.float8_e4m3fn)}[value.scaling.scale]
        assert (value.scaling, value.scales.dtype) == (view.number.scaling, scales)
        assert value.scales.shape == value.scaling.blocks(value.shape)
        value = value.codes
    assert value.dtype == DTYPES[view.number.element], (view, value.dtype)


def refusal(build: Callable[..., Any], operands: Operands, out: Any = None, **attributes: Any) -> str:
    """The sentence with which the builder refuses these operands."""
    with _context():
        try:
            _module(build, operands, out, attributes)
        except Mismatch as error:
            return str(error)
    raise AssertionError("the builder refused nothing")


def complaint(case: Case, old: str, new: str) -> str:
    """What the verifier says of `case`'s text once `old` is replaced by `new` wherever it stands."""
    assert old in case.text, case.text
    with _context():
        try:
            ir.Module.parse(case.text.replace(old, new))
        except ir.MLIRError as error:
            return str(error.error_diagnostics[0].message)
    raise AssertionError("the verifier accepted the text")


def element(value: Any, *at: int) -> float:
    """One decoded element (docs/model.md 9.2), by its own scale."""
    if not isinstance(value, Scaled):
        return float(value[at])
    s = value.scaling
    row = (at[-2] // s.rows,) if len(at) > 1 else ()
    scale = value.scales[(*at[:-2], *row, at[-1] // s.columns)]
    return float(value.codes[at]) * (2.0 ** (int(scale) - 127) if s.scale == "e8m0" else float(scale))


def tabulate(shape: Sequence[int], formula: Callable[..., float]) -> Array:
    """The array whose element at each index is formula(*index), computed one by one."""
    out = np.zeros(shape)
    for at in itertools.product(*map(range, shape)):
        out[at] = formula(*at)
    return out


def agree(found: Any, naive: Array, number: Number) -> None:
    """`found` is the naive real values rounded once to `number`, bit for bit; for real results equal up to the order of a float64 sum."""
    if number == REAL:
        np.testing.assert_allclose(found, naive, rtol=1e-12, atol=1e-14 * max(1.0, float(np.abs(naive).max(initial=0.0))))
        return
    same(found, encode(naive, number))


def same(found: Any, wanted: Any) -> None:
    """Equal bit for bit, codes and scales."""
    assert isinstance(found, Scaled) == isinstance(wanted, Scaled)
    if isinstance(found, Scaled):
        assert found.scaling == wanted.scaling
        same(found.codes, wanted.codes)
        same(found.scales, wanted.scales)
        return
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_array_equal(found.astype(np.float64), wanted.astype(np.float64))


def values(seed: int, *shape: int, number: Number = REAL, block: int = 16) -> Any:
    """Normal values rounded to `number`; the magnitude changes from block to block of the last axis, so that a misplaced scale shows."""
    x = np.random.default_rng(seed).standard_normal(shape)
    steps = np.array([0, 3, -2, 5, -4, 1, -1, 2])[(np.arange(shape[-1]) // block) % 8]
    if number == FP8_WEIGHT:
        return fp8_weight(seed, *shape)
    return encode(x * 2.0**steps, number)


def fp8_weight(seed: int, *shape: int) -> Scaled:
    """A weight as checkpoints store it: E4M3 codes of every size, one power of two for each 32 x 32 block, neighbours never alike."""
    rng = np.random.default_rng(seed)
    codes = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    assert FP8_WEIGHT.scaling is not None
    blocks = tuple(n or 0 for n in FP8_WEIGHT.scaling.blocks(shape))
    scales = (120 + np.arange(int(np.prod(blocks))).reshape(blocks) * 3 % 11).astype(np.uint8)
    return Scaled(codes, scales, FP8_WEIGHT.scaling)
