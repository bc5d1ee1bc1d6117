"""Passes on module text: what `tapeout opt` and the FileCheck tests run."""

from tapeout.compiler.errors import ModuleRefused
from tapeout.compiler.pipeline import diagnostics, parse_pipeline, run
from tapeout.dialects import cache, dspark, engram, fused, mhc, mla, moe, nn, sample, selection, step
from tapeout.dialects._mlir import ir
from tapeout.dialects.text import parse
from tapeout.passes.define import text

DIALECTS = (cache, dspark, engram, fused, mhc, mla, moe, nn, sample, selection, step)
"""Importing them is what makes their ops known."""

SEPARATOR = "// -----\n"


def run_passes(source: str, passes: str) -> list[str]:
    """Each module of `source` after the passes, in text form; raises `ModuleRefused` or `PipelineError`."""
    asked = parse_pipeline(passes) if passes.strip() else []
    out = []
    for number, chunk in enumerate(source.split(SEPARATOR)):
        with ir.Context(), ir.Location.unknown():
            try:
                module = parse(chunk)
            except ir.MLIRError as error:
                said = diagnostics(error)
                level = "; expected a module of the graph level: kernels are written for reading" if "unregistered dialect" in said else ""
                raise ModuleRefused(f"module {number}: {said}{level}") from None
            run(module, asked)
            out.append(text(module))
    return out
