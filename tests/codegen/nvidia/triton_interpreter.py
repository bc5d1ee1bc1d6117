"""Runs emitted Triton source on numpy arrays in Triton's own interpreter: no GPU, no compiler, no tensors of another library.

The source that is compiled is the source that is run. Functions of the interpreter are replaced by exact ones: conversions between floats (it
truncates where it narrows), products of BF16 (it multiplies their bits) and compares of overflow, which wrapping sums would trip. Inline
assembly, which it does not know, is run by ptx.py; instances run one after the other, so waits for other launches do nothing.
Triton decides when it is imported whether it interprets: this module must be first, and compiles run in other processes.
"""

import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tapeout.codegen.nvidia.emit import Source
from tests.codegen.nvidia import ptx

if "triton" in sys.modules:
    raise RuntimeError("Triton was imported before its interpreter was asked for; tests compile in processes of their own")
os.environ["TRITON_INTERPRET"] = "1"
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

del os.environ["TRITON_INTERPRET"]  # processes started from here compile

EXACT = {tl.bfloat16: ml_dtypes.bfloat16, tl.float8e4nv: ml_dtypes.float8_e4m3fn, tl.float16: np.float16, tl.float32: np.float32}


def _convert_exactly(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    out = np.frombuffer(data.tobytes(), EXACT[source]).astype(np.float32).astype(EXACT[target])
    return out.view(f"u{out.itemsize}").reshape(data.shape)


def _decoded(operand: Any) -> Any:
    return np.asarray(operand.data).view(EXACT[operand.dtype.scalar]).astype(np.float32)


def _dot_exactly(self: Any, a: Any, b: Any, acc: Any, precision: Any, imprecise: Any) -> Any:
    return interpreter.TensorHandle(np.matmul(_decoded(a), _decoded(b)) + acc.data, acc.dtype.scalar)


_PRODUCT = interpreter.InterpreterBuilder.create_fmul


def _multiply_exactly(self: Any, a: Any, b: Any) -> Any:
    if a.dtype.scalar != tl.bfloat16:
        return _PRODUCT(self, a, b)
    return interpreter.TensorHandle((_decoded(a) * _decoded(b)).astype(ml_dtypes.bfloat16).view(np.uint16), tl.bfloat16)


@dataclass(frozen=True)
class _Assembled:
    """What a piece of inline assembly leaves."""

    results: list[Any]

    def get_result(self, number: int) -> Any:
        return self.results[number]


def _run_assembly(self: Any, text: str, constraints: str, handles: Any, types: Any, pure: bool, pack: int) -> _Assembled:
    inputs = [np.asarray(h.data) for h in handles]
    kinds = [kind.scalar for kind in types]
    found = ptx.run(text, [np.ascontiguousarray(x) for x in inputs], [kind.primitive_bitwidth // 8 for kind in kinds], pack)
    typed = [x.view(np.float32) if kind == tl.float32 else x for x, kind in zip(found, kinds, strict=True)]
    return _Assembled([interpreter.TensorHandle(x.reshape(inputs[0].shape), kind) for x, kind in zip(typed, kinds, strict=True)])


def _called_in_a_kernel(self: Any, *arguments: Any, **named: Any) -> Any:
    """tl.sum and its like: the language is patched already, doing so again for every call takes most of the time."""
    return self.rewrite()(*arguments, **named)


interpreter._convert_float = _convert_exactly
interpreter.InterpretedFunction.__call__ = _called_in_a_kernel
interpreter.InterpreterBuilder.create_dot = _dot_exactly
interpreter.InterpreterBuilder.create_fmul = _multiply_exactly
interpreter.InterpreterBuilder.create_inline_asm = _run_assembly
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def _types() -> dict[str, Any]:
    return {"*bf16": tl.bfloat16, "*fp16": tl.float16, "*fp32": tl.float32, "*i8": tl.int8, "*i16": tl.int16, "*i32": tl.int32,
            "*i64": tl.int64, "*fp8e4nv": tl.float8e4nv}  # fmt: skip


@cache
def function(text: str, name: str) -> Callable[..., None]:
    """The kernel's function, rewritten by the interpreter for its own tensors."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(f"emitted_{name}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for order in ("gdc_wait", "gdc_launch_dependents"):
            setattr(module, order, lambda: None)
        for called in [key for key, value in vars(module).items() if isinstance(value, JITFunction) and key != name]:
            setattr(module, called, interpreter.InterpretedFunction(getattr(module, called).fn))
        kernel = interpreter.InterpretedFunction(getattr(module, name).fn).rewrite()
    _patch_language(kernel)
    return kernel


@cache
def _patched() -> list[Any]:
    return []


def _patch_language(kernel: Callable[..., None]) -> None:
    """Once for the process, with the first kernel: this process interprets and does nothing else with Triton."""
    if not _patched():
        _patched().append(interpreter._patch_lang(kernel))


def run(source: Source, arrays: Mapping[str, np.ndarray], grid: tuple[int, int, int]) -> None:
    """Runs every instance of the grid, writing into `arrays` (contiguous, by buffer name)."""
    kernel, types, arguments = function(source.text, source.name), _types(), []
    for name, kind in source.parameters:
        assert arrays[name].flags.c_contiguous, name
        pointer = tl.pointer_type(types[kind])
        arguments.append(tl.tensor(interpreter.TensorHandle(np.array([arrays[name].ctypes.data], np.uint64), pointer), pointer))
    interpreter.interpreter_builder.set_grid_dim(*grid)
    with np.errstate(all="ignore"):
        for instance in np.ndindex(*grid):
            interpreter.interpreter_builder.set_grid_idx(*instance)
            kernel(*arguments)
