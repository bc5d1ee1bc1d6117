"""One kernel from tile module to checked Ascend module: budget, emission, rules, compiler, memory plan, link check. Every refusal is a sentence.

The numbers of a kernel are checked by running `Built.compiled.dump` in the simulator, which tests do for every family.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tapeout.codegen.ascend import rules
from tapeout.codegen.ascend.emit import lowered, operations, text_of
from tapeout.codegen.ascend.facts import CORE, DEFAULT_CHIP
from tapeout.codegen.ascend.link_check import require_linked
from tapeout.codegen.ascend.resources import Resources, require_fits, resources
from tapeout.codegen.ascend.toolchain import Compiled, CompileError, CompilerCrash, Tools, compile_kernel
from tapeout.codegen.tile_memory import kernel_name
from tapeout.dialects._mlir import ir

UNDIVIDED = "--enable-auto-bind-sub-block=false"
"""Rows are not divided between the two vector cores: slower, and what is left where the compiler ends by a signal."""


UNPIPELINED = "--set-cv-pipeline-mode=off"
"""Steps of cube and vector cores are not overlapped: the overlapping pass drops the points where vector cores meet."""
MEETING = '"hivm.hir.sync_block"'


@dataclass(frozen=True)
class Built:
    """A kernel that keeps the rules, lowers, fits and links. `text` is its tile contract."""

    name: str
    text: str
    compiled: Compiled
    resources: Resources


def build(module: ir.Module, tools: Tools, flags: Sequence[str] = (), target: str = DEFAULT_CHIP) -> Built:
    """Builds one kernel module (not changed); raises `CompileError`, or `LinkError` for one that compiles and would not link."""
    name = kernel_name(module)
    contract = lowered(module)
    require_sound(name, contract)
    text = text_of(contract)
    meetings = text.count(MEETING)
    compiled = _compiled(text, name, tools, (*flags, *([UNPIPELINED] if meetings else [])), target)
    if compiled.dump.count("INTER_SUBBLOCK") != 2 * meetings:
        raise CompileError(f"kernel {name} has {meetings} points where its vector cores meet, and the compiler kept "
                           f"{compiled.dump.count('INTER_SUBBLOCK') // 2}: its cores would race")
    function = next(iter(contract.body.operations)).operation
    used = resources(compiled.dump, ir.StringAttr(function.attributes["mix_mode"]).value)
    require_fits(name, used)
    require_linked(name, compiled.module, tools)
    return Built(name, text, compiled, used)


def require_sound(name: str, contract: ir.Module) -> None:
    """Raises `CompileError` with every broken rule and with tiles that no unified buffer holds."""
    found = [*rules.problems(contract), *_too_large(contract)]
    if found:
        raise CompileError(f"kernel {name} is not on the tile contract: {'; '.join(dict.fromkeys(found))}")


def _too_large(contract: ir.Module) -> list[str]:
    """Local buffers that alone are larger than the memory they must lie in."""
    found = []
    for op in operations(next(iter(contract.body.operations)).operation):
        if op.name == "memref.alloc":
            kind = op.results[0].type
            count = 1
            for n in kind.shape:
                count *= n
            size = count * rules.WIDTHS[str(kind.element_type)]
            if size > CORE.l1_bytes:
                found.append(f"a tile {kind} takes {size} bytes, the largest local memory has {CORE.l1_bytes}: take smaller blocks")
    return found


def _compiled(text: str, name: str, tools: Tools, flags: Sequence[str], target: str) -> Compiled:
    try:
        return compile_kernel(text, name, tools, flags, target)
    except CompilerCrash:
        return compile_kernel(text, name, tools, (*flags, UNDIVIDED), target)
