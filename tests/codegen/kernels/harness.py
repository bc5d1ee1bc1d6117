"""One kernel at a time: a graph function is run by meaning and by its kernel, on the same values, and both results are handed to the test.

The kernel runs in the tile interpreter or compiled for this machine's CPU. Operand rows behind the count are poison, result rows behind it
a known pattern that must survive. Weights go through the loader's own transforms.
"""

import ctypes
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tapeout.codegen import tile_builder as t
from tapeout.codegen import tile_interpreter
from tapeout.codegen.cpu import linker, schedules, toolchain
from tapeout.codegen.kernel import Buffer, Family, Kernel, Request, request_of, select
from tapeout.codegen.row_values import KINDS
from tapeout.codegen.verify_tile import problems
from tapeout.dialects._mlir import func, ir
from tapeout.dialects.define import as_tuple, load_dialects
from tapeout.dialects.format import BF16, DTYPES, Array, Number, Scaled, encode
from tapeout.dialects.fused import fuse
from tapeout.dialects.interpreter import Interpreter
from tapeout.dialects.state import State
from tapeout.dialects.types import Blocks, Ring, Tensor, View, to_ir
from tapeout.runtime.transforms import transformed

BEHIND = 3  # rows of poison behind operands, rows that must stay untouched behind results
PATTERN = 0xA5
INTERPRETED, COMPILED = "interpreted", "compiled"
HOW = (INTERPRETED, COMPILED)
WORKERS = 2  # one after the other: how a grid is split must not show
_COMPILED: dict[str, Any] = {}


@dataclass(frozen=True)
class Target:
    """Another machine that runs the same cases: its schedule rows, and how it runs a kernel module on named arrays."""

    schedule: Callable[[str, Request], Any]
    run: Callable[[ir.Module, dict[str, Array]], None]
    rows: tuple[int, ...]


class _Rows:
    """Row counts that every kernel is run with; fewer where a target is simulated."""

    def __iter__(self) -> Iterator[int]:
        target = TARGET.get()
        return iter(target.rows if target else (0, 1, 2, 5, 17, 33))


ROWS = _Rows()
TARGET: ContextVar[Target | None] = ContextVar("TARGET", default=None)
NUMPY = {"i8": np.int8, "i16": np.int16, **DTYPES}


@dataclass(frozen=True)
class Found:
    """What one run left: results in order, and the states among the inputs after it."""

    results: list[Any]
    states: list[Any]

    def __iter__(self) -> Any:
        return iter((*self.results, *self.states))


class KernelCase:
    """A function of one op, or of a fused group (`kind`), its request, its family and the kernel of one schedule row.

    `build(*values)` makes the ops from the operands' values. `schedule` entries replace those of the CPU's row, so that small shapes reach
    several blocks.
    """

    def __init__(self, build: Callable[..., Any], operands: Sequence[View | None], kind: str | None = None, **schedule: int) -> None:
        self.operands = list(operands)
        self._context = ir.Context()
        load_dialects(self._context)
        with self._context, ir.Location.unknown():
            self._module = _graph(build, self.operands, kind)
            self._module.operation.verify()
            self._function = self._module.body.operations[0]
            self.request: Request = request_of(self._function.entry_block.operations[0].operation)
        self.family: Family = select(self.request)
        self.target = TARGET.get()
        rows = self.target.schedule if self.target else schedules.schedule
        self.row = {**rows(self.family.name, self.request), **schedule}
        self.kernel: Kernel = self.family.build(self.request, self.row)
        work = [Buffer(f"work{i}", w.element, "workspace") for i, w in enumerate(self.kernel.workspaces)]
        self.buffers = [*self.request.buffers(), *work, Buffer("count", "i32", "count")]
        arguments = {b.name: KINDS.get(b.element, b.element) for b in self.buffers}
        self.parts = [t.kernel("kernel", arguments, part.body, part.grid) for part in self.kernel.before]
        self.module = t.kernel("kernel", arguments, self.kernel.body, self.kernel.grid)
        assert not [found for module in (*self.parts, self.module) for found in problems(module)]

    def meaning(self, *inputs: Any) -> Found:
        """The graph's meaning; states among the inputs are copied first."""
        given = [_copied(x) for x in inputs if x is not None]
        with self._context:
            results = Interpreter(self._function).run(*given)
        return Found(list(results), [s.value for s in given if isinstance(s, State)])

    def run(self, how: str, *inputs: Any, rows: int | None = None) -> Found:
        """The kernel's results. `rows` where the count is not that of the first ragged operand."""
        count = _rows(self.operands, inputs) if rows is None else rows
        arrays = self._arrays(inputs, count)
        before = {name: a.view(np.uint8).copy() for name, a in arrays.items() if name.startswith("out")}
        self._execute(how, arrays)
        for view, name in ((v, f"out{i}") for i, v in enumerate(self.request.results)):
            _require_untouched(view, name, arrays, before, count)
        results = [_value(v, [a for n, a in arrays.items() if n.split("_")[0] == f"out{i}"], count)
                   for i, v in enumerate(self.request.results)]
        states = [(i, v) for i, v in enumerate(self.request.operands) if isinstance(v, Ring | Blocks)]
        return Found(results, [_state(arrays, i, v) for i, v in states])

    def _arrays(self, inputs: Sequence[Any], count: int) -> dict[str, Array]:
        arrays: list[Array] = []
        for i, (view, value) in enumerate(zip(self.request.operands, inputs, strict=True)):
            if view is not None:
                arrays += self._operand(i, view, value)
        for view in self.request.results:
            arrays += [_filled(shape, dtype) for shape, dtype in _parts(view, count + BEHIND)]
        for work in self.kernel.workspaces:
            arrays.append(_filled((work.elements(count),), NUMPY[work.element]))
        arrays.append(np.array([count], np.int32))
        return {b.name: a for b, a in zip(self.buffers, arrays, strict=True)}

    def _operand(self, number: int, view: View, value: Any) -> list[Array]:
        found = stored(value.value if isinstance(value, State) else value)
        layout = self.kernel.layouts.get(number)
        if layout is not None:
            return [transformed([a], steps, pad=pad) if steps else a
                    for a, steps, pad in zip(found, (layout.values, layout.scales), (0, 127), strict=False)]
        if isinstance(view, Tensor) and None in view.shape:
            return [np.concatenate([a, _poison((BEHIND, *a.shape[1:]), a.dtype)]) for a in found]
        return [np.array(a, order="C") for a in found]

    def _execute(self, how: str, arrays: dict[str, Array]) -> None:
        for module in (*self.parts, self.module):
            if self.target:
                self.target.run(module, arrays)
            elif how == INTERPRETED:
                tile_interpreter.run(module, arrays)
            else:
                compiled(module)(arrays)


def once(make: Callable[..., KernelCase]) -> Callable[..., KernelCase]:
    """Equal calls for one target give one case: its kernel is built once for all that is asked of it."""

    @lru_cache(maxsize=64)
    def made(target: Target | None, given: tuple[Any, ...], entries: tuple[tuple[str, Any], ...]) -> KernelCase:
        return make(*given, **dict(entries))

    return wraps(make)(lambda *given, **entries: made(TARGET.get(), given, tuple(sorted(entries.items()))))


def compiled(module: ir.Module) -> Callable[[dict[str, Array]], None]:
    """The kernel as native code, called on named arrays; equal kernels are compiled once."""
    with module.context:
        text = module.operation.get_asm(print_generic_op_form=True)
    if text not in _COMPILED:
        _COMPILED[text] = _native(module)
    native, names = _COMPILED[text], t.argument_names(module)

    def call(arrays: dict[str, Array]) -> None:
        table = (ctypes.c_void_p * len(names))(*(arrays[name].ctypes.data for name in names))
        for worker in range(WORKERS):
            native(table, worker, WORKERS)

    return call


def _native(module: ir.Module) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.so"
        linker.link({"kernel": toolchain.compile_object(module)}, path)
        native = ctypes.CDLL(str(path)).kernel
    native.argtypes, native.restype = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64], None
    return native


def _graph(build: Callable[..., Any], operands: Sequence[View | None], kind: str | None) -> ir.Module:
    types = [to_ir(v) for v in operands if v is not None]
    module = ir.Module.create()
    with ir.InsertionPoint(module.body):
        function = func.FuncOp("case", (types, []))
        values = iter(function.add_entry_block().arguments)
        with ir.InsertionPoint(function.entry_block):
            made = build(*[None if v is None else next(values) for v in operands])
            ending = func.ReturnOp([v for v in as_tuple(made) if isinstance(v, ir.Value)])
    if kind is not None:
        fuse([op.operation for op in function.entry_block.operations][:-1], kind)
    results = [v.type for v in ending.operands]
    function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(types, results))
    return module


def _copied(value: Any) -> Any:
    if not isinstance(value, State):
        return value
    held = value.value
    return State(Scaled(held.codes.copy(), held.scales.copy(), held.scaling) if isinstance(held, Scaled) else held.copy())


def _rows(operands: Sequence[View | None], inputs: Sequence[Any]) -> int:
    ragged = [x for v, x in zip(operands, inputs, strict=True) if isinstance(v, Tensor) and v.shape and v.shape[0] is None]
    return int(ragged[0].shape[0])


def stored(value: Any) -> list[Array]:
    """The arrays a device holds for a value: FP4 codes two to a byte, E8M0 scales as bytes."""
    if not isinstance(value, Scaled):
        return [np.ascontiguousarray(value)]
    codes = np.ascontiguousarray(value.codes)
    if codes.dtype == ml_dtypes.float4_e2m1fn:
        nibbles = codes.view(np.uint8) & 15
        codes = nibbles[..., ::2] | (nibbles[..., 1::2] << 4)
    return [codes, np.ascontiguousarray(value.scales)]


def _parts(view: View, rows: int) -> list[tuple[tuple[int, ...], Any]]:
    """Shapes and types of a value's arrays on a device."""
    assert isinstance(view, Tensor), view
    shape, number = view.sized(rows), view.number
    if number.scaling is None:
        return [(shape, NUMPY[number.element])]
    packed = (*shape[:-1], shape[-1] // 2) if number.element == "f4E2M1FN" else shape
    codes = np.uint8 if number.element == "f4E2M1FN" else NUMPY[number.element]
    scales = np.uint8 if number.scaling.scale == "e8m0" else NUMPY["f8E4M3FN"]
    return [(packed, codes), (tuple(n or 0 for n in number.scaling.blocks(shape)), scales)]


def _value(view: View, arrays: Sequence[Array], rows: int) -> Any:
    """A result as the meaning would hand it out."""
    assert isinstance(view, Tensor), view
    held = [a[:rows] if view.shape[0] is None else a for a in arrays]
    return _scaled(view.number, held)


def _scaled(number: Number, arrays: Sequence[Array]) -> Any:
    if number.scaling is None:
        return arrays[0]
    codes, scales = arrays
    if number.element == "f4E2M1FN":
        bytes_ = codes.view(np.uint8)
        codes = np.stack((bytes_ & 15, bytes_ >> 4), -1).reshape(*codes.shape[:-1], 2 * codes.shape[-1]).view(ml_dtypes.float4_e2m1fn)
    return Scaled(codes, scales, number.scaling)


def _state(arrays: dict[str, Array], number: int, view: Any) -> Any:
    return _scaled(view.entry.number, [a for n, a in arrays.items() if n.split("_")[0] == f"in{number}"])


def _poison(shape: tuple[int, ...], dtype: Any) -> Array:
    if np.issubdtype(dtype, np.signedinteger):
        return np.full(shape, np.iinfo(dtype).min, dtype)
    return np.full(shape, 255, np.uint8).astype(dtype) if dtype == np.uint8 else np.full(shape, np.nan, np.float32).astype(dtype)


def _filled(shape: tuple[int, ...], dtype: Any) -> Array:
    out = np.empty(shape, dtype)
    out.reshape(-1).view(np.uint8)[:] = PATTERN
    return out


def _require_untouched(view: View, name: str, after: dict[str, Array], before: dict[str, Array], rows: int) -> None:
    assert isinstance(view, Tensor), view
    if view.shape[0] is not None:
        return
    for part, array in after.items():
        if part.split("_")[0] == name:
            assert (array[rows:].reshape(-1).view(np.uint8) == PATTERN).all(), f"{part}: rows at or beyond {rows} were written"


# ---- comparisons -------------------------------------------------------------------------------------------------------


def assert_same(found: Found, wanted: Found) -> None:
    """Every result and state agrees to the last bit (both zeros count as one number)."""
    for f, w in zip(found, wanted, strict=True):
        if isinstance(w, Scaled):
            same_bits(f.scales, w.scales)
            same_bits(f.codes, w.codes)
        else:
            same_bits(f, w)


def same_bits(found: Array, wanted: Array) -> None:
    """Two arrays hold the same numbers in the same element type."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), (found.shape, found.dtype, wanted.shape, wanted.dtype)
    wide = np.float64 if found.dtype.kind in "fV" or (found.dtype.itemsize < 4 and found.dtype.kind not in "iu") else found.dtype
    np.testing.assert_array_equal(found.astype(wide), wanted.astype(wide))


def assert_close(found: Array, exact: Any, slack: Any, number: Number) -> None:
    """|found - exact| <= slack plus one rounding to `number`: `exact` is the unrounded result, `slack` bounds the kernel's own sums."""
    unit = {"bf16": 2.0**-7, "f32": 2.0**-23}[number.element]
    bound = slack + unit / 2 * (np.abs(exact) + slack) + 2.0**-130
    error = np.abs(found.astype(np.float64) - exact)
    assert np.isfinite(found.astype(np.float64)).all()
    assert (error <= bound).all(), f"largest excess {np.max(error - bound)} at {np.unravel_index(np.argmax(error - bound), error.shape)}"


def gamma(n: int) -> float:
    """The f32 factor of a sum of n products, each term rounded at most n + 2 times."""
    return (n + 2) * 2.0**-23


def row(value: Any, r: int) -> Any:
    """Row r alone, as a batch of one."""
    return value[slice(r, r + 1)]


# ---- values ------------------------------------------------------------------------------------------------------------


def numbers(seed: int, *shape: int, number: Number = BF16, scale: float = 1.0) -> Any:
    """Normal values rounded to `number`."""
    return encode(np.random.default_rng(seed).standard_normal(shape) * scale, number)


def uneven(seed: int, *shape: int, number: Number = BF16, block: int = 16) -> Any:
    """Values whose magnitude differs from row to row and from column block to column block, so that a misplaced scale shows."""
    x = np.random.default_rng(seed).standard_normal(shape)
    steps = np.array([0, 5, -3, 7, -6, 2, -1, 4])[(np.arange(shape[-1]) // block) % 8]
    lines = np.arange(shape[-2])[:, None] % 5 if len(shape) > 1 else 0
    return encode(x * 2.0 ** (steps + lines), number)


def whole(seed: int, *shape: int, number: Number = BF16, largest: int = 4) -> Any:
    """Small whole numbers: sums of their products are exact, so that bits must agree whatever the order."""
    return encode(np.random.default_rng(seed).integers(-largest, largest + 1, shape).astype(np.float64), number)
