"""From a kernel module to machine code: standard lowering to LLVM, an object file for a fixed CPU. Libraries of them are `linker.py`'s.

Same module and CPU, same bytes: the target's features stand on every function, so the host does not matter.
"""

import tempfile
from pathlib import Path
from typing import Any

from tapeout.codegen.cpu.executor import NAME as EXECUTOR
from tapeout.codegen.cpu.executor import executor_module
from tapeout.codegen.cpu.facts import Cpu, cpu
from tapeout.codegen.cpu.linker import ToolchainError
from tapeout.codegen.cpu.lower_tile_to_loops import lower_tile_to_loops
from tapeout.codegen.cpu.products import Blocks
from tapeout.codegen.tile_memory import kernel_name
from tapeout.dialects._mlir import ir, load, passmanager

TO_LLVM = (
    "builtin.module(cse,convert-scf-to-cf,convert-vector-to-llvm,finalize-memref-to-llvm,convert-func-to-llvm,convert-math-to-llvm,"
    "convert-arith-to-llvm,convert-index-to-llvm,convert-cf-to-llvm,reconcile-unrealized-casts)"
)
KEPT_SECTION = ".text.tapeout"  # the engine adds entry points of its own, built for the host; the linker drops their section
BLOCKS = {16: Blocks(), 32: Blocks(tall=12, short=8, panels=8)}


class StackExceeded(ToolchainError):
    """Tiles of a kernel that do not fit on the stack: its schedule row is too large."""


def compile_object(module: ir.Module, target: Cpu | None = None) -> bytes:
    """A relocatable object with one kernel (`void NAME(void **, int64_t, int64_t)`). `module` is not changed.

    Raises `StackExceeded` where its tiles do not fit on the stack.
    """
    target, name = target or cpu(), kernel_name(module)
    copy = _copy(module)
    _require_stack(name, lower_tile_to_loops(copy, BLOCKS[target.vector_registers]), target)
    return object_of(copy, name, target)


def _require_stack(name: str, sizes: list[int], target: Cpu) -> None:
    if sum(sizes) > target.stack_bytes:
        largest = ", ".join(map(str, sizes[:4]))
        raise StackExceeded(f"kernel {name} keeps {sum(sizes)} bytes of tiles on the stack, {target.name} allows {target.stack_bytes} "
                            f"(the largest are {largest}); make its blocks smaller")  # fmt: skip


def _copy(module: ir.Module) -> ir.Module:
    with module.context:
        return ir.Module.parse(module.operation.get_asm(print_generic_op_form=True))


def object_of(module: ir.Module, name: str, target: Cpu) -> bytes:
    """The object of a module of loops (consumed) that defines `name`."""
    with module.context, ir.Location.name(name):
        passmanager.PassManager.parse(TO_LLVM).run(module.operation)
        _refuse_leftovers(module, name)
        _pin_features(module, target)
        return _emit(module, name)


def _refuse_leftovers(module: ir.Module, name: str) -> None:
    foreign: set[str] = set()

    def visit(op: Any) -> Any:
        if not op.name.startswith("llvm.") and op.name != "builtin.module":
            foreign.add(op.name)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    if foreign:
        raise ToolchainError(
            f"kernel {name} still holds {', '.join(sorted(foreign))} after lowering to LLVM; this is a fault of the compiler"
        )


def _pin_features(module: ir.Module, target: Cpu) -> None:
    features = ", ".join(f'"+{feature}"' for feature in target.features)
    for function in module.body.operations:
        if function.operation.name == "llvm.func":
            function.attributes["target_cpu"] = ir.StringAttr.get(target.target_cpu)
            function.attributes["target_features"] = ir.Attribute.parse(f"#llvm.target_features<[{features}]>")
            function.attributes["section"] = ir.StringAttr.get(KEPT_SECTION)
            function.attributes["passthrough"] = ir.ArrayAttr.get([ir.StringAttr.get(a) for a in ("noinline", "nounwind")])


def _emit(module: ir.Module, name: str) -> bytes:
    engine = load("execution_engine").ExecutionEngine(module, opt_level=3, enable_object_dump=True, enable_pic=True)
    engine.raw_lookup(name)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.o"
        engine.dump_to_object_file(str(path))
        return path.read_bytes()


def executor_object(target: Cpu | None = None) -> bytes:
    """The object with `tapeout_execute`, which runs a list of launches."""
    with ir.Context():
        return object_of(executor_module(), EXECUTOR, target or cpu())
