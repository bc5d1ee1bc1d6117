"""The manifest's facts: states, kernels, processor, tool versions; and the linked library.

Everything here is a function of the configuration, the settings and the compiler's own versions: no time, path or host.
"""

import hashlib
import importlib.metadata
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from tapeout.codegen.kernel import parts
from tapeout.codegen.lower_to_tile import TileKernel
from tapeout.codegen.plan_memory import part_bytes
from tapeout.codegen.tuned_rows import is_tuned
from tapeout.compiler.cache import Cache, key_of
from tapeout.compiler.errors import ToolchainMissing
from tapeout.compiler.objects import lowering_fingerprint, processor
from tapeout.compiler.programs import NAMES, is_entry_point
from tapeout.compiler.settings import Settings
from tapeout.compiler.targets import Built, target_of
from tapeout.dialects._mlir import ir
from tapeout.dialects.types import Blocks, Ring, from_ir
from tapeout.models.deepseek_v41.config import ModelConfig
from tapeout.passes.define import functions
from tapeout.passes.extents import argument_attribute
from tapeout.runtime.artifact import Manifest, ModelIdentity, Options, StatePart, StateSpec, config_fingerprint
from tapeout.runtime.artifact_kernels import Abi, Binary, Element, GpuLevel, Kernel, Lowered, NpuLevel

__all__ = ["StateSpec", "library", "manifest", "states"]


def states(module: ir.Module) -> tuple[StateSpec, ...]:
    """Every state that the module's functions take, by name."""
    found: dict[str, StateSpec] = {}
    for function in functions(module):
        for i, kind in enumerate(function.type.inputs):
            view = from_ir(kind)
            if is_entry_point(function) and isinstance(view, Ring | Blocks):
                name = str(argument_attribute(function, i, "tapeout.name"))
                found[name] = _state(name, view)
    return tuple(found[name] for name in sorted(found))


def _state(name: str, view: Ring | Blocks) -> StateSpec:
    sizes = part_bytes(view.entry, 0)
    made = tuple(
        StatePart(part=NAMES[suffix], dtype=cast(Element, element), row_bytes=size)
        for (suffix, element), size in zip(parts(view), sizes, strict=True)
    )
    return StateSpec(
        name=name,
        kind="ring" if isinstance(view, Ring) else "blocks",
        length=view.length if isinstance(view, Ring) else None,
        ratio=view.ratio if isinstance(view, Blocks) else None,
        entry_shape=view.entry.sized(0),
        parts=made,
        bytes_per_entry=sum(sizes),
    )


def manifest(
    config: ModelConfig, settings: Settings, kernels: Sequence[TileKernel], found: tuple[StateSpec, ...], built: Built
) -> Manifest:
    """The manifest of one target before it is sealed."""
    canonical = config.canonical()
    cpu, chip = target_of(settings.target).levels(settings)
    return Manifest(
        model=ModelIdentity(architecture=config.architectures[0], config=canonical, fingerprint=config_fingerprint(canonical)),
        targets=(settings.target,),
        options=Options(
            max_rows=settings.max_rows,
            max_sequences=settings.max_sequences,
            max_outputs=settings.outputs,
            max_context=settings.max_context,
            block_tokens=settings.block_tokens,
            workspace_bytes=settings.workspace_bytes,
            cpu=settings.cpu,
        ),
        cpu=cpu,
        gpu=chip if isinstance(chip, GpuLevel) else None,
        npu=chip if isinstance(chip, NpuLevel) else None,
        row_buckets=settings.row_buckets,
        states=found,
        toolchain={"tapeout": importlib.metadata.version("tapeout"), **built.toolchain},
        kernels=tuple(_kernel(k, settings, built.binaries.get(k.symbol)) for k in kernels),
    )


def _abi(binary: Binary | Lowered | None) -> Abi:
    if isinstance(binary, Lowered):
        return "lock-workspace-buffers-grid"
    return "buffers-worker-workers" if binary is None else "buffers-scratch-profile"


def _kernel(kernel: TileKernel, settings: Settings, binary: Binary | Lowered | None) -> Kernel:
    tuned = is_tuned(settings.tuned, str(kernel.choice.request), dict(kernel.choice.schedule))
    return Kernel(
        id=kernel.symbol,
        target=settings.target,
        symbol=kernel.symbol,
        op=kernel.choice.request.op,
        family=kernel.choice.family,
        variant=str(kernel.choice.request),
        source_sha256=hashlib.sha256(kernel.text.encode()).hexdigest(),
        abi=_abi(binary),
        schedule=dict(kernel.choice.schedule),
        origin="tuned" if tuned else "override" if dict(kernel.choice.schedule).get("override") else "default",
        reduction_order=kernel.kernel.order,
        parameters=tuple(cast(Element, b.element) for b in kernel.buffers),
        binary=binary if isinstance(binary, Binary) else None,
        lowered=binary if isinstance(binary, Lowered) else None,
    )


def library(objects: Mapping[str, bytes], cpu: str, store: Cache) -> bytes:
    """The shared library of all kernels and the executor; linked once for one set of objects and one linker."""
    made_by = (processor(cpu), lowering_fingerprint(), importlib.metadata.version("torch-mlir"), linker_here())
    key = key_of("library", *made_by, *(part for symbol in sorted(objects) for part in (symbol, objects[symbol])))
    return store.get_or_make(key, lambda: _linked(objects, cpu))


def linker_here() -> str:
    """The linker of this machine. Raises ToolchainMissing."""
    from tapeout.codegen.cpu.linker import ToolMissing, linker

    try:
        return linker()
    except ToolMissing as error:
        raise ToolchainMissing(str(error)) from None


def _linked(objects: Mapping[str, bytes], cpu: str) -> bytes:
    from tapeout.codegen.cpu.executor import NAME
    from tapeout.codegen.cpu.facts import cpu as target
    from tapeout.codegen.cpu.linker import ToolchainError, link
    from tapeout.codegen.cpu.toolchain import executor_object

    executor = executor_object(target(cpu))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "library.so"
        try:
            link({**objects, NAME: executor}, path)
        except ToolchainError as error:
            raise ToolchainMissing(f"{error}; linking kernels for the CPU needs a working `cc`") from None
        return path.read_bytes()
