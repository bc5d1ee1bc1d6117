"""All kernels of a model for one target, by the same passes as a compile, without what a compile does besides."""

from dataclasses import replace
from functools import cache
from pathlib import Path

from tapeout.codegen.lower_to_tile import TileKernel, tile_kernels
from tapeout.codegen.select_kernels import SelectKernels
from tapeout.compiler.pipeline import graph_pipeline, run
from tapeout.compiler.settings import Settings
from tapeout.dialects._mlir import ir
from tapeout.models.deepseek_v41.config import load_config
from tapeout.models.deepseek_v41.graph import GraphOptions, build_graph


@cache
def kernels_of(folder: Path | str, target: str, max_context: int = 4096) -> tuple[TileKernel, ...]:
    """Distinct kernels in program order."""
    config, settings = load_config(folder), Settings(max_context=max_context)
    passes = [replace(p, target=target) if isinstance(p, SelectKernels) else p for p in graph_pipeline(settings, config.text.dspark_block_size)]
    with ir.Context(), ir.Location.unknown():
        module = build_graph(config, GraphOptions(settings.max_sequences, settings.max_context, settings.block_tokens))
        run(module, passes)
        return tuple(tile_kernels(module).values())
