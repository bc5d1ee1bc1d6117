"""Compile a configuration for a target and write the artifact."""

from pathlib import Path
from typing import Annotated

import typer

MEBIBYTE = 1 << 20


def command(
    path: Annotated[Path, typer.Argument(help="a Hugging Face folder or its config.json; weights are not needed")],
    output: Annotated[Path, typer.Option("-o", "--output", help="folder of the artifact")],
    target: Annotated[str, typer.Option(help="cpu, sm90, sm100, sm103 or ascend950; several as sm90,cpu: each gets a folder of its own")] = "cpu",
    max_rows: Annotated[int, typer.Option(help="rows of the largest step")] = 512,
    max_sequences: Annotated[int, typer.Option(help="sequences that run at once")] = 8,
    max_outputs: Annotated[int, typer.Option(help="rows of a step that may ask for logits")] = 512,
    max_context: Annotated[int, typer.Option(help="tokens of the longest sequence")] = 4096,
    block_tokens: Annotated[int, typer.Option(help="tokens of one cache block")] = 128,
    workspace: Annotated[int, typer.Option(help="MiB that index scoring may use")] = 256,
    cpu: Annotated[str, typer.Option(help="x86-64-v3 (same bytes on any host) or native")] = "x86-64-v3",
    row_buckets: Annotated[str, typer.Option(help="ascending row counts to plan for, as 16,128,512; the last is --max-rows")] = "",
    dump: Annotated[Path | None, typer.Option(help="write the IR after every pass, and every kernel, into this folder")] = None,
    print_ir_after: Annotated[list[str] | None, typer.Option(help="print the IR after this pass, `all`, or where it `changed`")] = None,
    stop_after: Annotated[str | None, typer.Option(help="stop after this pass; nothing is written")] = None,
    check_passes: Annotated[bool, typer.Option("--check-passes", help="run the module on toy data around every pass")] = False,
    tuning: Annotated[Path | None, typer.Option(help="tuned schedule rows (tuning.json of an artifact)")] = None,
    jobs: Annotated[int, typer.Option(help="compile processes")] = 2,
    allow_unknown_keys: Annotated[bool, typer.Option("--allow-unknown-keys", help="accept configuration keys that are not known")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON summary")] = False,
) -> None:
    """Compile a configuration for a target and write the artifact."""
    from tapeout.compiler import report
    from tapeout.compiler.api import compile_path
    from tapeout.compiler.driver import Watch
    from tapeout.compiler.settings import Settings, parse_buckets
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
        dump=dump,
        print_ir_after=tuple(print_ir_after or ()),
        stop_after=stop_after,
        check_passes=check_passes,
        tuned=read_tuning(tuning),
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
