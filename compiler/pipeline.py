"""The pipeline is a list: reading it is reading the compiler.

Graph passes run on one module, in this order; then kernels are lowered one by one (`lower-to-tile`, `lower-tile-to-loops`) and programs are read
off the planned module. Any pass can be stopped at, printed, checked and run by `tapeout opt`.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, get_type_hints

from tapeout.codegen.nvidia.facts import CHIPS
from tapeout.codegen.plan_memory import PlanMemory
from tapeout.codegen.select_kernels import SelectKernels
from tapeout.compiler.errors import ModuleRefused, PipelineError
from tapeout.compiler.settings import MEBIBYTE, MOST_WORKSPACE, Settings
from tapeout.dialects._mlir import ir
from tapeout.dialects.define import Mismatch
from tapeout.passes.assign_formats import AssignFormats
from tapeout.passes.bucket_rows import MOST_ROWS, BucketRows
from tapeout.passes.define import Pass, PassError
from tapeout.passes.fuse_attention_output import FuseAttentionOutput
from tapeout.passes.fuse_collapse_norm import FuseCollapseNorm
from tapeout.passes.fuse_draft_draw import FuseDraftDraw
from tapeout.passes.fuse_lookup_quantize import FuseLookupQuantize
from tapeout.passes.fuse_norm_quantize import FuseNormQuantize
from tapeout.passes.fuse_query_path import FuseQueryPath
from tapeout.passes.fuse_swiglu_quantize import FuseSwigluQuantize
from tapeout.passes.outline_layers import OutlineLayers
from tapeout.passes.verify import Verify, require_graph_level

Observer = Callable[[Pass, ir.Module], None]

PASSES: dict[str, type[Pass]] = {
    p.name: p
    for p in (
        Verify,
        AssignFormats,
        FuseNormQuantize,
        FuseQueryPath,
        FuseAttentionOutput,
        FuseSwigluQuantize,
        FuseLookupQuantize,
        FuseCollapseNorm,
        FuseDraftDraw,
        OutlineLayers,
        BucketRows,
        SelectKernels,
        PlanMemory,
    )
}

KERNEL_STAGES = ("lower-to-tile", "lower-tile-to-loops")


def graph_pipeline(settings: Settings, drafts_each: int) -> list[Pass]:
    """The passes of a compile, in order."""
    drafts = (drafts_each, settings.max_sequences) if settings.target in CHIPS else ()
    return [
        Verify(),
        AssignFormats(),
        FuseQueryPath(),
        FuseNormQuantize(),
        FuseAttentionOutput(),
        FuseSwigluQuantize(),
        FuseLookupQuantize(),
        FuseCollapseNorm(),
        FuseDraftDraw(),
        Verify(),
        OutlineLayers(),
        BucketRows(settings.row_buckets),
        SelectKernels(settings.target, settings.tuned, settings.workspace_bytes, *drafts),
        PlanMemory(settings.max_sequences, settings.outputs, drafts_each, settings.target in CHIPS),
    ]


OWN = (SelectKernels, PlanMemory)
"""Passes that each target runs for itself; all before them serve every target of a compile."""


def run(module: ir.Module, passes: Iterable[Pass], before: Observer = lambda p, m: None, after: Observer = lambda p, m: None) -> None:
    """Runs passes in order on a module; verifies after each. Raises `ModuleRefused` with pass, op and sentence."""
    for number, one in enumerate(passes):
        before(one, module)
        try:
            if number == 0:
                require_graph_level(module)
            one.run(module)
            module.operation.verify()
        except (PassError, Mismatch) as error:
            raise ModuleRefused(f"pass {one.name}: {error}") from None
        except ir.MLIRError as error:
            raise ModuleRefused(f"pass {one.name} left an invalid module: {diagnostics(error)}") from None
        after(one, module)


def diagnostics(error: ir.MLIRError) -> str:
    """The diagnostics behind an MLIR error as one line each."""
    return "; ".join(f"{d.location}: {d.message}" for d in error.error_diagnostics) or str(error)


def parse_pipeline(text: str) -> list[Pass]:
    """`"pass{opt=v, opt2=[a b]},…"` as passes; raises `PipelineError` with column and nearest name."""
    from difflib import get_close_matches

    out: list[Pass] = []
    column = 1
    for item in re.split(r",(?![^{]*\})", text):
        match = re.fullmatch(r"\s*([a-z-]+)\s*(?:\{([^{}]*)\})?\s*", item)
        if match is None:
            raise PipelineError(f"pass text {item!r} at column {column}: expected name or name{{option=value,…}}")
        if match[1] not in PASSES:
            near = get_close_matches(match[1], PASSES, 1)
            raise PipelineError(
                f"unknown pass {match[1]} at column {column + match.start(1)}: expected one of {', '.join(PASSES)}"
                + (f"; nearest: {near[0]}" if near else "")
            )
        out.append(_with_options(PASSES[match[1]], match[2] or ""))
        column += len(item) + 1
    return out


def _with_options(kind: type[Pass], text: str) -> Pass:
    hints: dict[str, Any] = {
        name: hint
        for name, hint in get_type_hints(kind).items()
        if name in {f.name for f in fields(kind)} and hint in (int, str, tuple[int, ...])
    }
    values: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or name not in hints:
            raise PipelineError(f"{kind.name}{{{item}}}: expected options {', '.join(hints) or 'none'}")
        if name in values:
            raise PipelineError(f"{kind.name}{{{item}}}: {name} is given twice")
        values[name] = _option(kind, name, value, hints[name])
    return kind(**values)


def _option(kind: type[Pass], name: str, text: str, hint: Any) -> Any:
    most = MOST_WORKSPACE * MEBIBYTE if name == "workspace_bytes" else MOST_ROWS
    try:
        if hint is int:
            return _bounded(int(text), most)
        if hint is str:
            return text
        return tuple(int(word) for word in text.removeprefix("[").removesuffix("]").split())
    except ValueError:
        raise PipelineError(
            f"{kind.name}{{{name}={text}}}: expected {f'a whole number of at most {most}' if hint is int else 'numbers, as [16 128]'}"
        ) from None


def _bounded(number: int, most: int) -> int:
    if abs(number) > most:
        raise ValueError(number)
    return number
