"""Run an artifact offline: prompts in, tokens out."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tapeout.compiler.prompts import Asked, Refused
    from tapeout.compiler.run import Run


class Spec(StrEnum):
    """How many drafted tokens a step verifies."""

    off = "off"
    auto = "auto"
    one = "1"
    two = "2"
    three = "3"
    four = "4"
    five = "5"


class Replay(StrEnum):
    """Which rows of a prompt run through the decoder half."""

    off = "off"
    mask = "mask"
    compact = "compact"


class Device(StrEnum):
    """Kinds of devices."""

    cpu = "cpu"
    cuda = "cuda"
    ascend = "ascend"
    ascend_sim = "ascend-sim"


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
    device: Annotated[Device | None, typer.Option(help="which of the artifact's targets; default: this machine's GPU, else its processors")] = None,
    asynchronous: Annotated[bool | None, typer.Option("--asynchronous", help="plan a step while the device runs the one before")] = None,
    spec: Annotated[Spec | None, typer.Option(help="drafts that a step verifies: at most so many, or as many as pay; default: off")] = None,
    replay: Annotated[
        Replay | None, typer.Option(help="bounded replay: the decoder half runs the last rows of a prompt only; default: off")
    ] = None,
    keep: Annotated[int | None, typer.Option(help="rows that bounded replay keeps; default: the fewest")] = None,
    cache: Annotated[bool | None, typer.Option("--cache", help="reuse what prompts have in common with earlier ones")] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="keep it in this folder too, for later runs")] = None,
    settings: Annotated[
        Path | None, typer.Option(help="JSON object with these and further settings of the engine; flags win, then this, then TAPEOUT_RUN_*")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="write JSON lines here")] = None,
    metrics: Annotated[Path | None, typer.Option(help="write statistics here: JSON lines, or Prometheus text if it ends in .prom")] = None,
    trace: Annotated[Path | None, typer.Option(help="write what happened in each step here, as Trace Event JSON for Perfetto")] = None,
    record: Annotated[Path | None, typer.Option(help="write what was drafted in each step here, for `tapeout sim speculation --trace`")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="print totals")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON lines")] = False,
) -> None:
    """Run an artifact offline: prompts in, tokens out."""
    import json
    import os
    import sys

    from tapeout.compiler.files import check_output
    from tapeout.compiler.prompts import read_prompts
    from tapeout.compiler.run import Run, draft_rows, result_lines, shortfalls, statistic_lines, write_lines
    from tapeout.compiler.run_settings import resolved

    defaults = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    flags = {"workers": workers, "device": device, "asynchronous": asynchronous, "spec": spec, "replay": replay, "keep": keep, "cache": cache,
             "cache_dir": cache_dir}  # fmt: skip
    chosen = resolved(flags, settings, os.environ, trace=trace, metrics=metrics, record=record)
    if chosen.values["spec"] not in ("off", "auto"):
        defaults["spec"] = int(chosen.values["spec"])
    asked = read_prompts(prompt or [], prompts, token_ids, defaults)
    if out is not None:
        check_output(out, "--out")
    run = Run.of(artifact, weights, asked, chosen)
    lines = result_lines(run, asked)
    if out is not None:
        write_lines(out, lines)
    if as_json:
        print("\n".join(json.dumps(line) for line in (lines if out is None else lines[-1:])))
    else:
        if out is None:
            _show(run, asked)
        if stats or out is not None:
            print(run.summary)
        if stats:
            _show_statistics([chosen.sentence, *statistic_lines(run)], draft_rows(run))
    unfinished = shortfalls(run, asked)
    for sentence in unfinished:
        print(f"tapeout: {sentence}", file=sys.stderr)
    if unfinished:
        raise typer.Exit(1)


def _show_statistics(sentences: "list[str]", drafts: "list[tuple[int, int, int, float]]") -> None:
    from tapeout.compiler import report

    for sentence in sentences:
        print(sentence)
    if drafts:
        report.table("drafts by their place in the block", ["place", "verified", "accepted", "percent"], drafts)


def _show(run: "Run", asked: "list[Asked | Refused]") -> None:
    """Each answer behind its prompt; nothing for a request that was refused."""
    from tapeout.compiler.prompts import Asked
    from tapeout.runtime.request import RequestOutput

    for one, result in zip(asked, run.results, strict=True):
        if isinstance(one, Asked) and isinstance(result, RequestOutput):
            prompt = one.prompt if isinstance(one.prompt, str) else ""
            for answer in result.outputs:
                print(f"{prompt}{answer.text}")
