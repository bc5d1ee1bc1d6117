"""From a configuration to an artifact: the stages in order, with the places to print, stop, check and report.

The work is done by the stages; this file only connects them. Nothing is written until everything is made.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tapeout.codegen.kernel import KernelError
from tapeout.codegen.lower_to_tile import TileKernel, tile_kernels
from tapeout.compiler import manifest as facts
from tapeout.compiler.cache import Cache
from tapeout.compiler.check_passes import Checker
from tapeout.compiler.errors import ModuleRefused, PipelineError
from tapeout.compiler.objects import kernel_objects
from tapeout.compiler.pipeline import KERNEL_STAGES, PASSES, graph_pipeline, run
from tapeout.compiler.programs import step_programs
from tapeout.compiler.settings import Settings
from tapeout.compiler.weights import weights_of
from tapeout.dialects._mlir import ir
from tapeout.models.deepseek_v41.config import ModelConfig
from tapeout.models.deepseek_v41.graph import GraphError, GraphOptions, build_graph
from tapeout.models.deepseek_v41.weights import weight_sources
from tapeout.passes.define import Pass, PassError, text
from tapeout.runtime.artifact import LIBRARY, ArtifactData, Program, Programs, Weights, write_artifact

KERNELS = KERNEL_STAGES[0]


@dataclass(frozen=True)
class Watch:
    """What a compile tells its caller: `ir(stage, text)` where printing was asked for, `stage(name)` and `kernel(done, total, symbol)`."""

    ir: Callable[[str, str], None] = lambda stage, content: None
    stage: Callable[[str], None] = lambda name: None
    kernel: Callable[[int, int, str], None] = lambda done, total, symbol: None


@dataclass(frozen=True)
class Planned:
    """Everything about a compile that needs no processor: module text, kernels, programs, weights."""

    module_text: str
    kernels: tuple[TileKernel, ...]
    programs: dict[str, dict[str, Program]]
    weights: Weights
    states: tuple[facts.StateSpec, ...]


def compile_model(config: ModelConfig, settings: Settings, output: Path, store: Cache, watch: Watch | None = None) -> Path | None:
    """Compiles for `settings.target` and writes the artifact; None where `stop_after` ended the compile earlier.

    Raises `CompilerError` (input, settings, modules) and `InputError` (configuration).
    """
    watch = watch or Watch()
    _require_known("--print-ir-after", settings.print_ir_after, {*PASSES, "graph", KERNELS, "all", "changed"})
    _require_known("--stop-after", filter(None, [settings.stop_after]), {*PASSES, *KERNEL_STAGES})
    planned = plan(config, settings, watch)
    if planned is None or settings.stop_after == KERNELS:
        return None
    watch.stage("kernels")
    total, done = len(planned.kernels), [0]

    def progress(symbol: str) -> None:
        done[0] += 1
        watch.kernel(done[0], total, symbol)

    objects = kernel_objects(planned.kernels, settings.cpu, store, settings.jobs, progress)
    if settings.stop_after == "lower-tile-to-loops":
        return None
    watch.stage("link")
    library = facts.library(objects, settings.cpu, store)
    data = ArtifactData(
        facts.manifest(config, settings, planned.kernels, planned.states),
        Programs(programs=planned.programs),  # type: ignore[arg-type]
        planned.weights,
    )
    sources = {f"source/cpu/{k.symbol}.mlir": k.text.encode() for k in planned.kernels}
    return write_artifact(output, data, {LIBRARY: library, **sources})


def _require_known(option: str, names: Iterable[str], known: set[str]) -> None:
    wrong = [name for name in names if name not in known]
    if wrong:
        raise PipelineError(f"{option}: unknown pass {', '.join(wrong)}; expected one of {', '.join(sorted(known))}")


def plan(config: ModelConfig, settings: Settings, watch: Watch) -> Planned | None:
    """The graph, its passes, kernels and programs; None where `stop_after` names a graph pass."""
    options = GraphOptions(settings.max_sequences, settings.max_context, settings.block_tokens)
    with ir.Context(), ir.Location.unknown():
        watch.stage("graph")
        try:
            module = build_graph(config, options)
        except GraphError as error:
            raise ModuleRefused(str(error)) from None
        if not _run_passes(module, config, options, settings, watch):
            return None
        watch.stage("plan")
        try:
            kernels = tile_kernels(module)
            numbers = {choice: i for i, choice in enumerate(kernels)}
            sources = weight_sources(config, settings.max_context + config.text.dspark_block_size)
            planned = Planned(
                text(module),
                tuple(kernels.values()),
                step_programs(module, numbers),
                weights_of(module, config, sources),
                facts.states(module),
            )
        except (PassError, KernelError) as error:
            raise ModuleRefused(str(error)) from None
        _show_kernels(planned, settings, watch)
        return planned


def _run_passes(module: ir.Module, config: ModelConfig, options: GraphOptions, settings: Settings, watch: Watch) -> bool:
    """Runs the graph passes up to `stop_after`; whether the compile goes on."""
    passes = graph_pipeline(settings, config.text.dspark_block_size)
    last = max((i for i, p in enumerate(passes) if p.name == settings.stop_after), default=None)
    observer = _Observer(settings, watch, Checker(module, config, options) if settings.check_passes else None)
    observer.show("graph", module, number=0)
    run(module, passes if last is None else passes[: last + 1], observer.before, observer.after)
    return last is None


class _Observer:
    """Prints, dumps and checks around each pass."""

    def __init__(self, settings: Settings, watch: Watch, checker: Checker | None) -> None:
        self._settings, self._watch, self._checker = settings, watch, checker
        self._last, self._number = "", 0

    def before(self, one: Pass, module: ir.Module) -> None:
        self._watch.stage(one.name)
        if self._checker is not None:
            self._checker.before(one, module)

    def after(self, one: Pass, module: ir.Module) -> None:
        self._number += 1
        if self._checker is not None:
            self._checker.after(one, module)
        self.show(one.name, module, self._number)

    def show(self, name: str, module: ir.Module, number: int) -> None:
        asked = self._settings.print_ir_after
        wanted = name in asked or "all" in asked or "changed" in asked
        if not wanted and self._settings.dump is None:
            return
        content = text(module)
        if name in asked or "all" in asked or ("changed" in asked and content != self._last):
            self._watch.ir(name, content)
        if self._settings.dump is not None:
            self._settings.dump.mkdir(parents=True, exist_ok=True)
            (self._settings.dump / f"{number:02d}-{name}.mlir").write_text(content)
        self._last = content


def _show_kernels(planned: Planned, settings: Settings, watch: Watch) -> None:
    if {KERNELS, "all"} & set(settings.print_ir_after):
        for kernel in planned.kernels:
            watch.ir(f"{KERNELS} {kernel.symbol}", kernel.text)
    if settings.dump is not None:
        folder = settings.dump / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        for kernel in planned.kernels:
            (folder / f"{kernel.symbol}.mlir").write_text(kernel.text)
