"""Compile a configuration for a target and write the artifact."""

from pathlib import Path
from typing import Annotated

import typer

from tapeout.compiler import step_options as of


def command(
    path: Annotated[Path, typer.Argument(help="a Hugging Face folder or its config.json; weights are not needed")],
    output: Annotated[Path, typer.Option("-o", "--output", help="folder of the artifact")],
    target: Annotated[str, typer.Option(help="cpu, sm90, sm100, sm103 or ascend950; several as sm90,cpu: each gets a folder of its own")] = "cpu",
    max_rows: of.Rows = of.ROWS,
    max_sequences: of.Sequences = of.SEQUENCES,
    max_outputs: of.Outputs = of.OUTPUTS,
    max_context: of.Context = of.CONTEXT,
    block_tokens: of.BlockTokens = of.BLOCK_TOKENS,
    workspace: of.Workspace = of.WORKSPACE,
    cpu: Annotated[str, typer.Option(help="x86-64-v3 (same bytes on any host) or native")] = "x86-64-v3",
    row_buckets: of.RowBuckets = "",
    dump: Annotated[str | None, typer.Option(metavar="<path>", help="write the IR after every pass, and every kernel, into this folder")] = None,
    print_ir_after: Annotated[list[str] | None, typer.Option(help="print the IR after this pass, `all`, or where it `changed`; repeat")] = None,
    stop_after: Annotated[str | None, typer.Option(help="stop after this pass; no artifact is written")] = None,
    check_passes: Annotated[bool, typer.Option("--check-passes", help="run the module on toy data around every pass")] = False,
    tuning: of.Tuning = None,
    jobs: Annotated[int, typer.Option(help="compile processes")] = 2,
    allow_unknown_keys: of.UnknownKeys = False,
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON summary")] = False,
) -> None:
    """Compile a configuration for a target and write the artifact."""
    from tapeout.compiler import report
    from tapeout.compiler.api import compile_path
    from tapeout.compiler.driver import Watch
    from tapeout.compiler.settings import MEBIBYTE, Settings, parse_buckets, parse_dump
    from tapeout.compiler.tuning import read_tuning

    settings = Settings(
        target=target,
        max_rows=max_rows,
        max_sequences=max_sequences,
        max_outputs=max_outputs,
        max_context=max_context,
        block_tokens=block_tokens,
        workspace_bytes=workspace * MEBIBYTE,
        cpu=cpu,
        buckets=parse_buckets(row_buckets),
        jobs=jobs,
        dump=parse_dump(dump),
        print_ir_after=tuple(print_ir_after or ()),
        stop_after=stop_after,
        check_passes=check_passes,
        tuned=read_tuning(tuning, target),
    )
    with report.progress("kernels") as update:
        watch = Watch(ir=_print_ir, kernel=update)
        made = compile_path(path, output, settings, watch, allow_unknown_keys=allow_unknown_keys)
    if made is None:
        return
    facts = {
        "artifact": str(output),
        "identity": made.identity,
        "targets": made.targets,
        "kernels": len(made.kernels),
        "kernels_compiled": made.kernels_compiled,
        "bytes": made.size_bytes,
        "seconds": made.seconds,
    }
    report.emit(
        facts,
        as_json,
        lambda: print(
            f"{output}: {len(made.kernels)} kernels, {made.size_bytes:,} bytes, identity {made.identity[:16]}, {made.seconds:.1f} s"
        ),
    )


def _print_ir(stage: str, content: str) -> None:
    print(f"// ---- after {stage}\n{content}")
