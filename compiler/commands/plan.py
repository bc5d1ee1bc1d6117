"""Show what a compiled model would need: state, work, weights, memory, kernels."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tapeout.compiler import step_options as of

if TYPE_CHECKING:
    from tapeout.compiler.driver import Planned
    from tapeout.compiler.gpu_bounds import Bound
    from tapeout.compiler.kernel_report import StepPrograms
    from tapeout.compiler.settings import Settings
    from tapeout.models.deepseek_v41.config import ModelConfig


def command(
    path: Annotated[Path, typer.Argument(help="config.json or a Hugging Face folder")],
    target: Annotated[str, typer.Option(help="cpu, sm90, sm100, sm103 or ascend950; all but the first also give bounds of every kernel")] = "cpu",
    max_rows: of.Rows = of.ROWS,
    max_sequences: of.Sequences = of.SEQUENCES,
    max_outputs: of.Outputs = of.OUTPUTS,
    max_context: of.Context = of.CONTEXT,
    block_tokens: of.BlockTokens = of.BLOCK_TOKENS,
    workspace: of.Workspace = of.WORKSPACE,
    row_buckets: of.RowBuckets = "",
    tuning: of.Tuning = None,
    write_tuning: Annotated[Path | None, typer.Option(help="write the schedule rows of all kernels here, as --tuning reads them")] = None,
    kernel: Annotated[str | None, typer.Option(help="show only the kernels whose symbols begin so: request, row, launches, bound")] = None,
    allow_unknown_keys: of.UnknownKeys = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Show what a compiled model would need: state, work, weights, memory, kernels."""
    from dataclasses import asdict

    from tapeout.codegen.ascend.facts import TARGETS as ASCEND
    from tapeout.codegen.nvidia.facts import CHIPS
    from tapeout.compiler import report
    from tapeout.compiler.driver import Watch, plan
    from tapeout.compiler.errors import SettingsError
    from tapeout.compiler.files import check_apart, check_output, write_text
    from tapeout.compiler.kernel_report import show_details
    from tapeout.compiler.settings import MEBIBYTE, Settings, parse_buckets
    from tapeout.compiler.targets import target_of
    from tapeout.compiler.tuning import read_tuning
    from tapeout.models.deepseek_v41.config import load_config

    if write_tuning is not None:
        check_output(write_tuning, "--write-tuning")
        check_apart({"--write-tuning": write_tuning}, {"configuration": path / "config.json" if path.is_dir() else path})
    config = load_config(path, allow_unknown_keys=allow_unknown_keys)
    settings = Settings(
        target=target,
        max_rows=max_rows,
        max_sequences=max_sequences,
        max_outputs=max_outputs,
        max_context=max_context,
        block_tokens=block_tokens,
        workspace_bytes=workspace * MEBIBYTE,
        buckets=parse_buckets(row_buckets),
        tuned=read_tuning(tuning, target),
    )
    if len(settings.targets) > 1:
        raise SettingsError([f"--target: found {target}, expected one target, as every plan is of one"])
    if target in ASCEND:
        target_of(target).require()
    planned = plan(config, settings, Watch())
    assert planned is not None, "a plan without stop_after is whole"
    if write_tuning is not None:
        write_text(write_tuning, _rows(config, settings, planned), "--write-tuning")
    if kernel is not None:
        found = _details(kernel, config, settings, planned)
        report.emit({"kernels": found}, as_json, lambda: show_details(found))
        return
    data = facts(config, settings, planned)
    if target in ASCEND:
        data["ascend"] = _ascend(config, settings, planned)
    if target in CHIPS:
        data["gpu"] = {"bounds": [asdict(bound) for bound in _gpu_bounds(config, settings, planned, planned.programs)]}
    report.emit(data, as_json, lambda: _show(data))


def facts(config: "ModelConfig", settings: "Settings", planned: "Planned") -> dict[str, Any]:
    """The plan as data; byte counts are exact, operations are two per active parameter."""
    from tapeout.models.deepseek_v41.ledger import active_ledger, state_ledger

    state, active = state_ledger(config), active_ledger(config)
    parts = [part for operand in planned.weights.operands for part in operand.parts]
    largest = str(settings.row_buckets[-1])
    arena = max(programs[largest].arena_bytes for programs in planned.programs.values())
    exchange = _exchange(planned, settings, config.text.dspark_block_size)
    return {
        "state": {
            "bytes_per_token": state.bytes_per_token,
            "bytes_per_sequence": state.bytes_per_sequence,
            "bytes_stored": state.encoder_rings,
            "bytes": state.bytes_per_token * settings.max_context * settings.max_sequences
            + state.bytes_per_sequence * settings.max_sequences,
        },
        "flops": {"prefill": active.prefill_flops, "decode": active.decode_flops},
        "weights": {
            "mapped": sum(p.bytes for p in parts if p.layout == "as_stored"),
            "packed": sum(p.bytes for p in parts if p.layout == "packed"),
        },
        "arena_bytes": arena + sum(exchange.values()),
        "arena": {
            "scratch": arena,
            "exchange": exchange,
            "by_bucket": {b: max(p[b].arena_bytes for p in planned.programs.values()) for b in planned.programs["encoder"]},
        },
        "kernels": [
            {"symbol": k.symbol, "family": k.choice.family, "request": str(k.choice.request), "schedule": dict(k.choice.schedule)}
            for k in planned.kernels
        ],
        "launches": {name: len(programs[largest].launches) for name, programs in planned.programs.items()},
    }


def _ascend(config: "ModelConfig", settings: "Settings", planned: "Planned") -> dict[str, Any]:
    """Compiled facts of the kernels and static bounds of their launches, in microseconds."""
    from dataclasses import asdict

    from tapeout.compiler.ascend_bounds import bounds
    from tapeout.compiler.cache import Cache, default_root

    kernels, found = bounds(planned, config, settings, Cache(default_root()))
    return {"kernels": kernels, "bounds": [asdict(b) for b in found]}


def _gpu_bounds(config: "ModelConfig", settings: "Settings", planned: "Planned", programs: "StepPrograms") -> "list[Bound]":
    """What limits each launch of some of the programs, in microseconds; needs no compile."""
    from tapeout.codegen.nvidia.facts import chip
    from tapeout.compiler.gpu_bounds import bounds
    from tapeout.runtime.artifact import Options

    options = Options(max_rows=settings.max_rows, max_sequences=settings.max_sequences, max_outputs=settings.outputs,
                      max_context=settings.max_context, block_tokens=settings.block_tokens, workspace_bytes=settings.workspace_bytes,
                      cpu=settings.cpu)  # fmt: skip
    text: Any = config.canonical()["text_config"]
    symbols = [k.symbol for k in planned.kernels]
    return bounds(symbols, programs, chip(settings.target), text, options, config.text.dspark_block_size)


def _details(symbol: str, config: "ModelConfig", settings: "Settings", planned: "Planned") -> list[dict[str, Any]]:
    """Some kernels alone; bounds are those that need no compile."""
    from tapeout.codegen.nvidia.facts import CHIPS
    from tapeout.compiler.kernel_report import details, planned_kernel

    kernels = [planned_kernel(k) for k in planned.kernels]
    has_rates = settings.target in CHIPS
    return details(symbol, kernels, planned.programs, lambda some: _gpu_bounds(config, settings, planned, some) if has_rates else [])


def _rows(config: "ModelConfig", settings: "Settings", planned: "Planned") -> str:
    """The schedule rows that were chosen, as the text of a tuning file."""
    from tapeout.compiler.pipeline import graph_pipeline
    from tapeout.compiler.tuning import chosen_rows
    from tapeout.runtime.artifact import canonical_json

    return canonical_json(chosen_rows(planned.module_text, graph_pipeline(settings, config.text.dspark_block_size))).decode()


def _exchange(planned: "Planned", settings: "Settings", block: int) -> dict[str, int]:
    """Bytes of every value that passes between host and programs, for the largest bucket."""
    from tapeout.runtime.artifact import BITS, extent_bound

    largest, found = settings.row_buckets[-1], {}
    for programs in planned.programs.values():
        program = programs[str(largest)]
        for value in (*program.inputs, *program.results):
            count = 1
            for axis in value.shape:
                count *= axis if isinstance(axis, int) else extent_bound(axis, largest, settings.max_sequences, settings.outputs, block)
            found[value.name if value.part == "values" else f"{value.name}.{value.part}"] = count * BITS[value.dtype] // 8
    return dict(sorted(found.items()))


def _show(data: dict[str, Any]) -> None:
    from tapeout.compiler.report import table

    state, flops, weights = data["state"], data["flops"], data["weights"]
    print(
        f"state: {state['bytes_per_token']:,} B/token, {state['bytes_per_sequence']:,} B per sequence, {state['bytes_stored']:,} B of it kept for "
        f"prefix reuse; {state['bytes']:,} B in all"
    )
    print(f"work per token: prefill {flops['prefill'] / 1e9:.4g} GFLOP, decode {flops['decode'] / 1e9:.4g} GFLOP")
    print(f"weights: {weights['mapped']:,} B mapped as stored, {weights['packed']:,} B packed at load")
    print(f"arena: {data['arena_bytes']:,} B ({data['arena']['scratch']:,} scratch)")
    table("launches of the largest bucket", ["entry point", "launches"], list(data["launches"].items()))
    table(
        "kernels", ["symbol", "schedule"], [(k["symbol"], " ".join(f"{n}={v}" for n, v in k["schedule"].items())) for k in data["kernels"]]
    )
    if "ascend" in data:
        _show_ascend(data["ascend"])
    if "gpu" in data:
        from tapeout.compiler.gpu_bounds import COLUMNS, Bound, rows_of

        bounds = rows_of([Bound(**row) for row in data["gpu"]["bounds"]])
        table("bounds of a launch (microseconds), largest share of a program first", COLUMNS, bounds)


def _show_ascend(data: dict[str, Any]) -> None:
    from tapeout.compiler.ascend_bounds import Bound, rows_of
    from tapeout.compiler.report import table

    rows = [
        (
            k["symbol"], k["mode"], *k["memory"].values(), k["core_flags"], k["instance"].get("vector_operations", 0),
            k["step"].get("vector_operations", 0), sum(v for n, v in (*k["instance"].items(), *k["step"].items()) if n.startswith("products")),
        )
        for k in data["kernels"]
    ]  # fmt: skip
    table(
        "compiled kernels: bytes by memory; vector operations an instance and a step; multiply-adds of both",
        ["symbol", "mode", *data["kernels"][0]["memory"], "core flags", "vector", "a step", "multiply-adds"],
        rows,
    )
    table(
        "static bounds of a launch (microseconds), largest share of a program first",
        ["kernel", "program", "launches", "instances", "blocks", "bytes", "cube", "vector", "bound", "limit"],
        rows_of([Bound(**row) for row in data["bounds"]]),
    )
