"""Show what a configuration, checkpoint folder or artifact holds."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tapeout.compiler.gpu_bounds import Bound
    from tapeout.compiler.kernel_report import StepPrograms
    from tapeout.models.deepseek_v41.config import ModelConfig
    from tapeout.runtime.artifact import Artifact


def command(
    path: Annotated[Path, typer.Argument(help="config.json, a Hugging Face folder, an artifact or several of one compile")],
    kernel: Annotated[str | None, typer.Option(help="show only an artifact's kernels whose symbols begin so: row, report, bound")] = None,
    scales: Annotated[bool, typer.Option("--scales", help="read a checkpoint's scales, and refuse those that are all zero or hold NaN")] = False,
    allow_unknown_keys: Annotated[bool, typer.Option("--allow-unknown-keys", help="accept configuration keys that are not known")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Show what a configuration, checkpoint folder or artifact holds."""
    found = _members(path)
    if scales and (found or kernel is not None):
        raise _no_scales(path, "an artifact" if found else "--kernel beside it")
    if kernel is not None:
        _kernels(path, found, kernel, as_json)
    elif found:
        _artifacts(found, as_json)
    else:
        _model(path, allow_unknown_keys, scales, as_json)


def _model(path: Path, allow_unknown_keys: bool, scales: bool, as_json: bool) -> None:
    from tapeout.compiler import report
    from tapeout.models.deepseek_v41.config import load_config
    from tapeout.models.deepseek_v41.ledger import active_ledger, weight_ledger

    config = load_config(path, allow_unknown_keys=allow_unknown_keys)
    weights, active = weight_ledger(config), active_ledger(config)
    data: dict[str, Any] = {
        "tensors": weights.total.tensors,
        "bytes": weights.total.size_bytes,
        "bytes_by_dtype": {dtype.value: size for dtype, size in weights.bytes_by_dtype},
        "parameters": {
            "total": weights.total.parameters,
            "backbone": weights.backbone.parameters,
            "active_prefill": active.prefill,
            "active_decode": active.decode,
            "head": active.head,
            "draft": weights.draft.parameters,
            "vision": weights.vision.parameters,
            "engram_tables": weights.engram_tables.parameters,
        },
        "groups": {
            row.name: {"tensors": row.tensors, "parameters": row.parameters, "bytes": row.size_bytes}
            for row in (*weights.groups, *weights.draft_groups)
        },
        "ignored_keys": list(config.ignored),
        "checkpoint": _checkpoint(path, config, scales),
    }
    report.emit(data, as_json, lambda: _show(data, weights, active))


def _checkpoint(path: Path, config: "ModelConfig", scales: bool) -> dict[str, Any] | None:
    """What lies beside the configuration: None without shards. Only `scales` reads tensors."""
    if not path.is_dir() or not any(path.glob("*.safetensors*")):
        if scales:
            raise _no_scales(path, "no shards of a checkpoint")
        return None
    from tapeout.models.deepseek_v41.checkpoint import open_checkpoint

    found = open_checkpoint(path, config)
    read = found.check_scales() if scales else None
    return {
        "mapped": len(found.tensors),
        "unmapped": 0,
        "bytes": found.size_bytes,
        "shards": len(found.shards),
        "strays": list(found.strays),
        "scales": read,
    }


def _no_scales(path: Path, found: str) -> Exception:
    from tapeout.compiler.errors import SettingsError

    return SettingsError([f"--scales: {path}: found {found}, expected a Hugging Face folder with its checkpoint"])


def _show(data: dict[str, Any], weights: Any, active: Any) -> None:
    from tapeout.compiler.report import table

    rows = [*weights.groups, *weights.draft_groups]
    sums = [weights.backbone, weights.engram_tables, weights.draft, weights.vision, weights.total]
    table("weights", ["group", "tensors", "parameters", "bytes"], [(r.name, r.tensors, r.parameters, r.size_bytes) for r in (*rows, *sums)])
    table("bytes by dtype", ["dtype", "bytes"], list(data["bytes_by_dtype"].items()))
    table("active parameters per token", ["component", "encoder", "decoder"], [(c.name, c.encoder, c.decoder) for c in active.components])
    print(f"active: prefill {active.prefill:,}, decode {active.decode:,}, lm head {active.head:,}")
    if data["checkpoint"]:
        found = data["checkpoint"]
        print(
            f"checkpoint: {found['mapped']:,} tensors mapped, {found['unmapped']} unmapped, {found['bytes']:,} bytes in {found['shards']} shards"
            + (f"; not read: {', '.join(found['strays'])}" if found["strays"] else "")
            + (f"; {found['scales']:,} scale tensors read, all good" if found["scales"] is not None else "")
        )
    if data["ignored_keys"]:
        print(f"keys without effect: {', '.join(data['ignored_keys'])}")


def _members(path: Path) -> dict[str, Path]:
    """Artifacts by target, of a set or of a folder that is one; none for anything else."""
    from tapeout.runtime.artifact_set import members
    from tapeout.runtime.errors import ArtifactFolderMissing

    try:
        return members(path)
    except ArtifactFolderMissing:
        return {}


def _artifacts(found: dict[str, Path], as_json: bool) -> None:
    from tapeout.compiler import report
    from tapeout.runtime.artifact import load_artifact

    artifacts = {target: load_artifact(path, target=target) for target, path in found.items()}
    data = {target: _data(artifact) for target, artifact in artifacts.items()}

    def show() -> None:
        for target, artifact in artifacts.items():
            _show_artifact(artifact, data[target])

    report.emit(data if len(data) > 1 else next(iter(data.values())), as_json, show)


def _kernels(path: Path, found: dict[str, Path], symbol: str, as_json: bool) -> None:
    """Some kernels of artifacts alone."""
    from tapeout.compiler import report
    from tapeout.compiler.errors import SettingsError
    from tapeout.compiler.kernel_report import compiled_kernel, details, show_details
    from tapeout.runtime.artifact import load_artifact

    if not found:
        raise SettingsError([f"--kernel: {path} is no artifact; its kernels are shown by tapeout plan --kernel"])
    kernels: list[dict[str, Any]] = []
    for target, folder in found.items():
        artifact = load_artifact(folder, target=target)
        facts = [compiled_kernel(k, artifact) for k in artifact.manifest.kernels]
        kernels += details(symbol, facts, artifact.programs, partial(_bounds, artifact))
    report.emit({"kernels": kernels}, as_json, lambda: show_details(kernels))


def _data(artifact: "Artifact") -> dict[str, Any]:
    from dataclasses import asdict

    m = artifact.manifest
    launches = {entry: {str(b): len(p.launches) for b, p in programs.items()} for entry, programs in artifact.programs.items()}
    data = {
        "identity": m.identity,
        "architecture": m.model.architecture,
        "fingerprint": m.model.fingerprint,
        "targets": list(m.targets),
        "options": m.options.model_dump(),
        "row_buckets": list(m.row_buckets),
        "launches": launches,
        "toolchain": m.toolchain,
        "kernels": [k.model_dump() for k in m.kernels],
        "states": [s.model_dump(mode="json") for s in m.states],
    }
    return data | ({"bounds": [asdict(b) for b in _bounds(artifact, artifact.programs)]} if m.gpu else {})


def _bounds(artifact: "Artifact", programs: "StepPrograms") -> "list[Bound]":
    """What limits each launch of some of an artifact's programs; nothing where the target has no rates."""
    from tapeout.codegen.nvidia.facts import chip
    from tapeout.compiler.gpu_bounds import bounds

    m = artifact.manifest
    if m.gpu is None:
        return []
    config: Any = m.model.config["text_config"]
    return bounds([k.symbol for k in m.kernels], programs, chip(artifact.target), config, m.options, artifact.draft_block)


def _show_artifact(artifact: "Artifact", data: dict[str, Any]) -> None:
    from tapeout.compiler.gpu_bounds import BINARY_COLUMNS, COLUMNS, Bound, binary_rows, rows_of
    from tapeout.compiler.report import table

    m, launches = artifact.manifest, data["launches"]
    level = m.cpu.level if m.gpu is None else f"{m.gpu.chip}, driver of CUDA {m.gpu.cuda[0]}.{m.gpu.cuda[1]}"
    print(f"artifact {m.identity[:16]} of {m.model.architecture} for {', '.join(m.targets)} ({level}); row buckets {list(m.row_buckets)}")
    table(
        "kernels",
        ["symbol", "op", "origin", "schedule"],
        [(k.symbol, k.op, k.origin, " ".join(f"{n}={v}" for n, v in k.schedule.items())) for k in m.kernels],
    )
    if m.gpu:
        table("binaries: bytes of shared memory a block, of spills and local memory a thread", BINARY_COLUMNS, binary_rows(m.kernels))
        bounds = rows_of([Bound(**row) for row in data["bounds"]])
        table("bounds of a launch (microseconds), largest share of a program first", COLUMNS, bounds)
    table("launches", ["entry point", *map(str, m.row_buckets)], [(e, *per.values()) for e, per in launches.items()])
