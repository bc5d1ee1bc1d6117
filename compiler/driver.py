"""From a configuration to an artifact: the stages in order, with the places to print, stop, check and report.

The work is done by the stages; this file only connects them. Nothing is written until everything is made.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tapeout.codegen.kernel import KernelError
from tapeout.codegen.lower_to_tile import Texts, TileKernel, made_now, tile_kernels
from tapeout.codegen.nvidia.facts import CHIPS
from tapeout.compiler import manifest as facts
from tapeout.compiler.cache import Cache
from tapeout.compiler.check_passes import Checker
from tapeout.compiler.errors import ModuleRefused, PipelineError, SettingsError
from tapeout.compiler.files import write_in_folder
from tapeout.compiler.pipeline import KERNEL_STAGES, OWN, PASSES, graph_pipeline, run
from tapeout.compiler.programs import Bound, Grids, step_programs
from tapeout.compiler.settings import Settings
from tapeout.compiler.targets import target_of
from tapeout.compiler.tile_texts import cached_texts
from tapeout.compiler.tuning import as_data
from tapeout.compiler.weights import weights_of
from tapeout.dialects._mlir import ir
from tapeout.models.deepseek_v41.config import ModelConfig
from tapeout.models.deepseek_v41.graph import GraphError, GraphOptions, build_graph
from tapeout.models.deepseek_v41.weights import weight_sources
from tapeout.passes.define import Pass, PassError, text
from tapeout.runtime.artifact import ArtifactData, Program, Programs, Weights, extent_bound, write_artifact
from tapeout.runtime.artifact_place import check_output
from tapeout.runtime.artifact_set import write_set

KERNELS, LOOPS = KERNEL_STAGES
CPU = "cpu"


@dataclass(frozen=True)
class Watch:
    """What a compile tells its caller: `ir(stage, text)` where printing was asked for, `stage(name)` and `kernel(done, total, symbol)`.

    `compiled(count)` says of each target how many kernels were compiled now; the others came from the cache.
    """

    ir: Callable[[str, str], None] = lambda stage, content: None
    stage: Callable[[str], None] = lambda name: None
    kernel: Callable[[int, int, str], None] = lambda done, total, symbol: None
    compiled: Callable[[int], None] = lambda count: None


@dataclass(frozen=True)
class Planned:
    """Everything about a compile that needs no processor: module text, kernels, programs, weights."""

    module_text: str
    kernels: tuple[TileKernel, ...]
    programs: dict[str, dict[str, Program]]
    weights: Weights
    states: tuple[facts.StateSpec, ...]


def compile_model(config: ModelConfig, settings: Settings, output: Path, store: Cache, watch: Watch | None = None) -> Path | None:
    """Compiles for `settings.target` and writes the artifact, or one a target into folders of `output`; None where `stop_after` ended it.

    Raises `CompilerError` (input, settings, modules, tools) and `InputError` (configuration).
    """
    watch = watch or Watch()
    _require_known("--print-ir-after", settings.print_ir_after, {*PASSES, "graph", KERNELS, "all", "changed"})
    _require_known("--stop-after", [] if settings.stop_after is None else [settings.stop_after], {*PASSES, *KERNEL_STAGES})
    if settings.stop_after == LOOPS and settings.targets != (CPU,):
        raise PipelineError(f"--stop-after: {LOOPS} is a stage of --target {CPU}, found --target {settings.target}; expected {KERNELS} or a pass")
    _require_reached(settings, config.text.dspark_block_size)
    if settings.stop_after is None:
        _check_dump(settings.dump, check_output(output))
        for target in settings.targets:
            target_of(target).require()
    planned = plans(config, settings, watch, cached_texts(store))
    if planned is None or settings.stop_after == KERNELS:
        return None
    watch.stage("kernels")
    total, done = sum(len(one.kernels) for one in planned.values()), [0]

    def progress(symbol: str) -> None:
        done[0] += 1
        watch.kernel(done[0], total, symbol)

    made: dict[str, tuple[ArtifactData, Mapping[str, bytes]]] = {}
    for target, one in planned.items():
        own = settings.for_target(target)
        built = target_of(target).build(one.kernels, own, store, progress)
        if built is not None:
            watch.compiled(built.compiled)
            manifest = facts.manifest(config, own, one.kernels, one.states, built)
            made[target] = (
                ArtifactData(manifest, Programs(programs=one.programs), one.weights, as_data(own.tuned, target)),  # type: ignore[arg-type]
                built.files,
            )
    if settings.stop_after is not None:
        return None
    watch.stage("write")
    return write_set(output, made) if len(made) > 1 else write_artifact(output, *next(iter(made.values())))


def _check_dump(dump: Path | None, place: Path) -> None:
    """Raises SettingsError where dumped files would stand in the way of the artifact."""
    if dump is not None and Path(os.path.realpath(dump)).is_relative_to(place):
        raise SettingsError([f"--dump: found {dump}, which is inside the artifact's folder, expected another one"])


def _require_known(option: str, names: Iterable[str], known: set[str]) -> None:
    wrong = [name for name in names if name not in known]
    if wrong:
        raise PipelineError(f"{option}: unknown pass {', '.join(wrong)}; expected one of {', '.join(sorted(known))}")


def _require_reached(settings: Settings, drafts_each: int) -> None:
    """Raises PipelineError where a pass whose IR is asked for comes behind the last one that runs."""
    names = ["graph", *(one.name for one in graph_pipeline(settings, drafts_each)), *KERNEL_STAGES]
    reached = names[: len(names) - names[::-1].index(settings.stop_after)] if settings.stop_after is not None else names
    behind = [name for name in settings.print_ir_after if name in names and name not in reached]
    if behind:
        raise PipelineError(f"--print-ir-after: {', '.join(behind)} comes behind --stop-after {settings.stop_after}; expected a pass that runs")


def plan(config: ModelConfig, settings: Settings, watch: Watch) -> Planned | None:
    """The graph, its passes, kernels and programs for one target; None where `stop_after` names a graph pass."""
    found = plans(config, settings, watch)
    return None if found is None else found[settings.target]


def plans(config: ModelConfig, settings: Settings, watch: Watch, texts: Texts = made_now) -> dict[str, Planned] | None:
    """What `plan` finds, for every target; they share one graph up to kernel selection. None where `stop_after` names a graph pass."""
    longest = config.text.max_position_embeddings
    if settings.max_context > longest:
        raise SettingsError([f"--max-context: found {settings.max_context}, expected at most the model's {longest} positions"])
    options = GraphOptions(settings.max_sequences, settings.max_context, settings.block_tokens)
    with ir.Context(), ir.Location.unknown():
        watch.stage("graph")
        try:
            module = build_graph(config, options)
        except GraphError as error:
            raise ModuleRefused(str(error)) from None
        observer = _Observer(settings, watch, Checker(module, config, options) if settings.check_passes else None)
        observer.show("graph", module, number=0)
        passes = graph_pipeline(settings, config.text.dspark_block_size)
        if not _run_passes(module, [p for p in passes if not isinstance(p, OWN)], settings, observer):
            return None
        found: dict[str, Planned] = {}
        for target in settings.targets:
            own = module if target == settings.targets[-1] else ir.Module.parse(module.operation.get_asm(print_generic_op_form=True))
            one = _plan_target(own, config, settings.for_target(target), watch, observer, texts)
            if one is not None:
                found[target] = one
        return found or None


def _plan_target(
    module: ir.Module, config: ModelConfig, settings: Settings, watch: Watch, observer: "_Observer", texts: Texts
) -> Planned | None:
    """The target's own passes, its kernels and programs; None where `stop_after` names one of the passes."""
    passes = graph_pipeline(settings, config.text.dspark_block_size)
    if not _run_passes(module, [p for p in passes if isinstance(p, OWN)], settings, observer.for_target(settings)):
        return None
    watch.stage("plan")
    try:
        kernels = tile_kernels(module, texts)
        numbers = {choice: i for i, choice in enumerate(kernels)}
        sources = weight_sources(config, settings.max_context + config.text.dspark_block_size)
        made = tuple(kernels.values())
        planned = Planned(
            text(module),
            made,
            step_programs(module, numbers, _grids(made, settings, config.text.dspark_block_size), _bound(settings, config)),
            weights_of(module, config, sources, target_of(settings.target).scale_limits),
            facts.states(module),
        )
    except (PassError, KernelError) as error:
        raise ModuleRefused(str(error)) from None
    _show_kernels(planned, settings, watch)
    return planned


def _grids(kernels: tuple[TileKernel, ...], settings: Settings, block: int) -> Grids:
    """Instances of a launch in a bucket, each kernel asked once for each bound."""
    target = target_of(settings.target)

    @cache
    def at(kernel: int, rows: int) -> tuple[int, int, int] | None:
        return target.grid(kernels[kernel], rows)

    return lambda kernel, extent, bucket: at(kernel, extent_bound(extent, bucket, settings.max_sequences, settings.outputs, block))


def _bound(settings: Settings, config: ModelConfig) -> Bound | None:
    """The most of an extent in a bucket, for targets that run launches side by side."""
    if settings.target not in CHIPS:
        return None
    return lambda extent, bucket: extent_bound(extent, bucket, settings.max_sequences, settings.outputs, config.text.dspark_block_size)


def _run_passes(module: ir.Module, passes: list[Pass], settings: Settings, observer: "_Observer") -> bool:
    """Runs passes up to `stop_after`; whether the compile goes on."""
    last = max((i for i, p in enumerate(passes) if p.name == settings.stop_after), default=None)
    run(module, passes if last is None else passes[: last + 1], observer.before, observer.after)
    return last is None


class _Observer:
    """Prints, dumps and checks around each pass."""

    def __init__(self, settings: Settings, watch: Watch, checker: Checker | None) -> None:
        self._settings, self._watch, self._checker = settings, watch, checker
        self._last, self._number, self._suffix = "", 0, ""

    def for_target(self, settings: Settings) -> "_Observer":
        """An observer of one target's own passes, which goes on where this one stands."""
        found = copy(self)
        found._suffix = f" {settings.target}" if settings is not self._settings else ""
        found._settings, found._checker = settings, copy(self._checker)
        return found

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
            self._watch.ir(name + self._suffix, content)
        if self._settings.dump is not None:
            write_in_folder(self._settings.dump, f"{number:02d}-{name}.mlir", content, "--dump")
        self._last = content


def _show_kernels(planned: Planned, settings: Settings, watch: Watch) -> None:
    if {KERNELS, "all"} & set(settings.print_ir_after):
        for kernel in planned.kernels:
            watch.ir(f"{KERNELS} {kernel.symbol}", kernel.text)
    if settings.dump is not None:
        for kernel in planned.kernels:
            write_in_folder(settings.dump / "kernels", f"{kernel.symbol}.mlir", kernel.text, "--dump")
