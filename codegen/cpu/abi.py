"""The native interface of a kernel: `void NAME(void **buffers, int64_t worker, int64_t workers)`.

A worker runs the linear instances [G worker / workers, G (worker + 1) / workers) of the grid, last axis fastest. Buffers arrive as
addresses and become flat memrefs; their lengths are the caller's promise.
"""

from collections.abc import Sequence
from typing import Any

from tapeout.codegen.cpu.emitter import Emitter
from tapeout.codegen.cpu.registers import rep_of
from tapeout.dialects._mlir import arith, func, ir

_DESCRIPTOR = "!llvm.struct<(ptr, ptr, i64, array<1 x i64>, array<1 x i64>)>"


def declare(module: ir.Module, name: str) -> Any:
    """The empty native function."""
    pointer, i64 = ir.Type.parse("!llvm.ptr"), ir.IntegerType.get_signless(64)
    with ir.InsertionPoint(module.body):
        return func.FuncOp(name, ([pointer, i64, i64], []))


def buffers(table: Any, elements: Sequence[Any]) -> list[Any]:
    """The kernel's buffers as flat memrefs of the registers that hold their elements."""
    return [_memref(_address(table, i), elem) for i, elem in enumerate(elements)]


def _address(table: Any, i: int) -> Any:
    pointer = ir.Type.parse("!llvm.ptr")
    attributes = {"rawConstantIndices": ir.DenseI32ArrayAttr.get([i]), "elem_type": ir.TypeAttr.get(pointer)}
    slot = ir.Operation.create("llvm.getelementptr", results=[pointer], operands=[table], attributes=attributes).result
    return ir.Operation.create("llvm.load", results=[pointer], operands=[slot]).result


def _memref(address: Any, elem: Any) -> Any:
    struct, i64 = ir.Type.parse(_DESCRIPTOR), ir.IntegerType.get_signless(64)
    zero, one = (arith.constant(i64, n) for n in (0, 1))
    value = ir.Operation.create("llvm.mlir.poison", results=[struct]).result
    for part, where in ((address, [0]), (address, [1]), (zero, [2]), (zero, [3, 0]), (one, [4, 0])):
        attributes = {"position": ir.DenseI64ArrayAttr.get(where)}
        value = ir.Operation.create("llvm.insertvalue", results=[struct], operands=[value, part], attributes=attributes).result
    flat = ir.MemRefType.get([ir.ShapedType.get_dynamic_size()], ir.Type.parse(rep_of(elem)))
    return ir.Operation.create("builtin.unrealized_conversion_cast", results=[flat], operands=[value]).result


def share(e: Emitter, grid: Sequence[Any], worker: Any, workers: Any) -> tuple[Any, Any]:
    """The first and the end of this worker's linear instances."""
    with e.here():
        total = arith.muli(arith.muli(grid[0], grid[1]), grid[2])
        worker, workers = (arith.index_cast(ir.IndexType.get(), v) for v in (worker, workers))
        after = arith.addi(worker, e.constant("index", 1))
        return tuple(arith.divui(arith.muli(total, w), workers) for w in (worker, after))


def coordinates(e: Emitter, instance: Any, grid: Sequence[Any]) -> list[Any]:
    """The three coordinates of a linear instance."""
    with e.here():
        row, last = arith.divui(instance, grid[2]), arith.remui(instance, grid[2])
        return [arith.divui(row, grid[1]), arith.remui(row, grid[1]), last]
