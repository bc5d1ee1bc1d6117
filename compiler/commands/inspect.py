"""Show what a configuration, checkpoint folder or artifact holds."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tapeout.models.deepseek_v41.config import ModelConfig


def command(
    path: Annotated[Path, typer.Argument(help="config.json, a Hugging Face folder or an artifact")],
    allow_unknown_keys: Annotated[bool, typer.Option("--allow-unknown-keys", help="accept configuration keys that are not known")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Show what a configuration, checkpoint folder or artifact holds."""
    from tapeout.runtime.artifact import MANIFEST

    if (path / MANIFEST).is_file():
        _artifact(path, as_json)
    else:
        _model(path, allow_unknown_keys, as_json)


def _model(path: Path, allow_unknown_keys: bool, as_json: bool) -> None:
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
        "checkpoint": _checkpoint(path, config),
    }
    report.emit(data, as_json, lambda: _show(data, weights, active))


def _checkpoint(path: Path, config: "ModelConfig") -> dict[str, Any] | None:
    """What lies beside the configuration: None without shards."""
    if not path.is_dir() or not any(path.glob("*.safetensors*")):
        return None
    from tapeout.models.deepseek_v41.checkpoint import open_checkpoint

    found = open_checkpoint(path, config)
    return {
        "mapped": len(found.tensors),
        "unmapped": 0,
        "bytes": found.size_bytes,
        "shards": len(found.shards),
        "strays": list(found.strays),
    }


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
        )
    if data["ignored_keys"]:
        print(f"keys without effect: {', '.join(data['ignored_keys'])}")


def _artifact(path: Path, as_json: bool) -> None:
    from tapeout.compiler import report
    from tapeout.runtime.artifact import load_artifact
    from tapeout.runtime.artifact_set import members

    artifact = load_artifact(path, target=next(iter(members(path))))
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

    def show() -> None:
        print(
            f"artifact {m.identity[:16]} of {m.model.architecture} for {', '.join(m.targets)} ({m.cpu.level}); row buckets {list(m.row_buckets)}"
        )
        report.table(
            "kernels",
            ["family", "op", "schedule", "origin"],
            [(k.family, k.op, " ".join(f"{n}={v}" for n, v in k.schedule.items()), k.origin) for k in m.kernels],
        )
        report.table("launches", ["entry point", *map(str, m.row_buckets)], [(e, *per.values()) for e, per in launches.items()])

    report.emit(data, as_json, show)
