"""Run an artifact offline: prompts in, tokens out."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tapeout.compiler.run_settings import RULES

if TYPE_CHECKING:
    from tapeout.compiler.result_lines import Line
    from tapeout.compiler.run import Run


def command(
    artifact: Annotated[Path, typer.Argument(help="folder that `tapeout compile` wrote")],
    weights: Annotated[Path, typer.Option(help="Hugging Face folder with the checkpoint")],
    prompt: Annotated[list[str] | None, typer.Option(help="a prompt; may be given again")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with `prompt` or `token_ids`, optionally `id` and sampling fields")
    ] = None,
    token_ids: Annotated[Path | None, typer.Option(help="one prompt a line, as token ids separated by spaces")] = None,
    max_tokens: Annotated[int, typer.Option(help="tokens to emit")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_p: Annotated[float, typer.Option(help="nucleus mass")] = 1.0,
    top_k: Annotated[int, typer.Option(help="-1 is all")] = -1,
    seed: Annotated[int | None, typer.Option(help="of the random numbers; drawn and reported if absent")] = None,
    workers: Annotated[int | None, typer.Option(help="threads; default: the processors")] = None,
    device: Annotated[
        str | None, typer.Option(help=f"{RULES['device'].expected}; default: this machine's GPU where the artifact has it, else its processors")
    ] = None,
    asynchronous: Annotated[
        bool | None,
        typer.Option("--asynchronous/--synchronous", help="plan a step while the device runs the one before (default on a GPU), or after it"),
    ] = None,
    spec: Annotated[
        str | None, typer.Option(help=f"drafts that a step verifies, {RULES['spec'].expected}: as many as pay, or at most so many; default: off")
    ] = None,
    replay: Annotated[
        str | None,
        typer.Option(help=f"bounded replay, {RULES['replay'].expected}: the decoder half runs the last rows of a prompt only; default: off"),
    ] = None,
    keep: Annotated[int | None, typer.Option(help="rows that bounded replay keeps; default: the fewest")] = None,
    cache: Annotated[bool | None, typer.Option("--cache", help="reuse what prompts have in common with earlier ones")] = None,
    cache_dir: Annotated[str | None, typer.Option(help="keep it in this folder too, for later runs")] = None,
    settings: Annotated[
        Path | None, typer.Option(help="JSON object with these and further settings of the engine; flags win, then this, then TAPEOUT_RUN_*")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="write JSON lines here; until all have ended, each into FILE.partial as it ends")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="keep what an interrupted run left in FILE.partial, and run the rest")] = False,
    metrics: Annotated[Path | None, typer.Option(help="write statistics here: JSON lines, or Prometheus text if it ends in .prom")] = None,
    trace: Annotated[Path | None, typer.Option(help="write what happened in each step here, as Trace Event JSON for Perfetto")] = None,
    record: Annotated[Path | None, typer.Option(help="write what was drafted in each step here, for `tapeout sim speculation --trace`")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="print totals")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON lines")] = False,
) -> None:
    """Run an artifact offline: prompts in, tokens out."""
    import os

    from tapeout.compiler.files import check_apart
    from tapeout.compiler.prompts import read_prompts
    from tapeout.compiler.result_files import results_to
    from tapeout.compiler.result_lines import json_text
    from tapeout.compiler.run import Run, shortfalls
    from tapeout.compiler.run_settings import resolved

    check_apart({"--out": out, "--trace": trace, "--metrics": metrics, "--record": record},
                {"--settings": settings, "--prompts": prompts, "--token-ids": token_ids})  # fmt: skip
    defaults = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    flags = {"workers": workers, "device": device, "asynchronous": asynchronous, "spec": spec, "replay": replay, "keep": keep, "cache": cache,
             "cache_dir": cache_dir}  # fmt: skip
    chosen = resolved(flags, settings, os.environ, trace=trace, metrics=metrics, record=record)
    if chosen.values["spec"] not in ("off", "auto"):
        defaults["spec"] = int(chosen.values["spec"])
    asked = read_prompts(prompt or [], prompts, token_ids, defaults)
    into, run = results_to(out, asked, as_json=as_json, resume=resume), None
    try:
        run = Run.of(artifact, weights, asked, chosen, into)
        totals = run.totals(asked)
        into.end(totals)
    except BaseException:
        _tell([*([] if run is None else shortfalls(run, asked)), *into.give_up()])
        raise
    if as_json and out is not None:
        print(json_text([totals]), end="")
    elif not as_json and (stats or out is not None):
        print(run.summary)
    if stats and not as_json:
        _show_statistics(run, chosen.sentence, totals)
    unfinished = shortfalls(run, asked)
    _tell([*(f"warning: {sentence}" for sentence in run.warnings), *unfinished])
    if unfinished:
        raise typer.Exit(1)


def _tell(sentences: list[str]) -> None:
    import sys

    for sentence in sentences:
        print(f"tapeout: {sentence}", file=sys.stderr)


def _show_statistics(run: "Run", settings: str, totals: "Line") -> None:
    from tapeout.compiler import report
    from tapeout.compiler.run import draft_rows, statistic_lines

    for sentence in (settings, *statistic_lines(run, totals)):
        print(sentence)
    if drafts := draft_rows(run):
        report.table("drafts by their place in the block", ["place", "verified", "accepted", "percent"], drafts)
