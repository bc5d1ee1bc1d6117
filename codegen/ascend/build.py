"""One kernel from tile module to checked Ascend module: budget, emission, rules, compiler, memory plan, link check. Every refusal is a sentence.

The numbers of a kernel are checked by running `Built.compiled.dump` in the simulator, which tests do for every family.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tapeout.codegen.ascend import rules
from tapeout.codegen.ascend.emit import lowered, mix_mode, operations, text_of
from tapeout.codegen.ascend.facts import CORE, DEFAULT_CHIP
from tapeout.codegen.ascend.link_check import require_linked
from tapeout.codegen.ascend.resources import Resources, require_fits, resources
from tapeout.codegen.ascend.signature import Signature, signature
from tapeout.codegen.ascend.toolchain import Compiled, CompileError, CompilerCrash, CompileTimeout, Tools, compile_kernel
from tapeout.codegen.ascend.work import VECTOR, Work, work
from tapeout.codegen.tile_memory import kernel_name
from tapeout.dialects._mlir import ir

UNDIVIDED = "--enable-auto-bind-sub-block=false"
"""Rows are not divided between the two vector cores: slower, and what is left where the compiler ends by a signal."""


UNPIPELINED = "--set-cv-pipeline-mode=off"
"""Steps of cube and vector cores are not overlapped: the overlapping pass drops the points where vector cores meet."""
BUFFERED = ("--enable-auto-multi-buffer=true",)
"""Loads of the next step run beside the products of this one; the compiler gives it up where a memory is too small."""
OLDER = ("--enable-auto-vectorize-v2=false",)
"""The older vectorizer: often fewer operations, but it loses nibbles of FP4 groups of 16 that are parted by lanes (the simulator shows it)."""
FUSIONS: tuple[tuple[str, ...], ...] = ((), ("--vf-fusion-mode=all-op",), OLDER)
"""How ops are gathered in vector functions; none is best for all kernels, and the newer vectorizer ends by an assertion on some."""
LANE_FUSIONS = ((), ("--vf-fusion-mode=all-op",), ("--vf-fusion-mode=n-most-op",), OLDER)
"""The same where lanes are parted or joined: the last is taken where nothing else compiles."""
FEW = 512
"""Vector operations of an instance below which no other way is looked for."""
COUNTING = ("hfusion.cumsum", "hfusion.indirect_store")
"""Ops of kernels that count and compact: gathered in other ways, some of them lose stores (the simulator shows it)."""
MIXED = 'mix_mode = "mix"'
MEETING = '"hivm.hir.sync_block"'


@dataclass(frozen=True)
class Built:
    """A kernel that keeps the rules, lowers, fits and links. `text` is its tile contract."""

    name: str
    text: str
    compiled: Compiled
    resources: Resources
    signature: Signature
    work: Work

    def facts(self) -> dict[str, Any]:
        """What an artifact says of it, besides where its texts lie: a row of plain data."""
        used, shape = self.resources, self.signature
        return {
            "mode": used.mode, "functions": shape.functions, "arguments": shape.arguments, "flags": self.compiled.flags,
            "finish": tuple(self.compiled.command.split()), "memory": dict(used.memory), "pipes": dict(used.pipes), "pipe_flags": used.flags,
            "core_flags": used.cross_core_flags, "barriers": used.barriers, "vector_functions": used.vector_functions,
            "instance": dict(self.work.instance), "step": dict(self.work.step),
        }  # fmt: skip


def build(module: ir.Module, tools: Tools, flags: Sequence[str] = (), target: str = DEFAULT_CHIP) -> Built:
    """Builds one kernel module (not changed); raises `CompileError`, or `LinkError` for one that compiles and would not link.

    Loads are double-buffered. Of several ways to compile a kernel the first that is right is taken, among vector kernels the one that
    executes the fewest vector operations.
    """
    name = kernel_name(module)
    contract = lowered(module)
    require_sound(name, contract)
    if mix_mode(next(iter(contract.body.operations)).operation) == "aiv":
        return _fastest(name, contract, tools, flags, target)
    try:
        return _built(name, contract, tools, flags, target)
    except MeetingsLost:
        return _built(name, lowered(module, drops_nan=True), tools, flags, target)


def _fastest(name: str, contract: ir.Module, tools: Tools, flags: Sequence[str], target: str) -> Built:
    """A vector kernel in the way that executes the fewest vector operations; raises what the first way raises where none is right."""
    ways: list[Built] = []
    errors: list[CompileError] = []
    text = text_of(contract)
    fusions = FUSIONS[:1] if any(op in text for op in COUNTING) else LANE_FUSIONS if "interleave" in text else FUSIONS
    for fusion in fusions:
        if ways and (ways[0].work.instance.get(VECTOR, 0) <= FEW or (fusion == OLDER and fusions == LANE_FUSIONS)):
            break
        try:
            ways.append(_built(name, contract, tools, (*flags, *fusion), target))
        except CompileTimeout:
            raise
        except CompileError as error:
            errors.append(error)
    if not ways:
        raise errors[0]
    return min(ways, key=lambda built: built.work.instance.get(VECTOR, 0))


class MeetingsLost(CompileError):
    """The compiler dropped or repeated points where vector cores meet."""


def _built(name: str, contract: ir.Module, tools: Tools, flags: Sequence[str], target: str) -> Built:
    """One way of compiling a contract."""
    text = text_of(contract)
    meetings = text.count(MEETING)
    ordered = (*flags, *([UNPIPELINED] if meetings else []))
    try:
        compiled = _compiled(text, name, tools, (*BUFFERED, *ordered), target)
    except CompileTimeout:
        raise
    except CompileError:  # too large twice, and the compiler did not give it up by itself
        compiled = _compiled(text, name, tools, ordered, target)
    if compiled.dump.count("INTER_SUBBLOCK") != 2 * meetings:
        raise MeetingsLost(f"kernel {name} has {meetings} points where its vector cores meet, and the compiler kept "
                           f"{compiled.dump.count('INTER_SUBBLOCK') // 2}: its cores would race")
    function = next(iter(contract.body.operations)).operation
    used = resources(compiled.dump, ir.StringAttr(function.attributes["mix_mode"]).value)
    require_fits(name, used)
    require_linked(name, compiled.module, tools)
    return Built(name, text, compiled, used, signature(name, compiled.module), work(compiled.dump))


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
        if MIXED not in text:
            raise
        return compile_kernel(text, name, tools, (*flags, UNDIVIDED), target)
