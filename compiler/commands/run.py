"""Run an artifact offline: prompts in, tokens out."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tapeout.runtime.request import RequestOutput


class Device(StrEnum):
    """Kinds of devices."""

    cpu = "cpu"
    cuda = "cuda"


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
    out: Annotated[Path | None, typer.Option(help="write JSON lines here")] = None,
    trace: Annotated[Path | None, typer.Option(help="write what happened in each step here, as Trace Event JSON for Perfetto")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="print totals")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON lines")] = False,
) -> None:
    """Run an artifact offline: prompts in, tokens out."""
    import json
    import sys

    from tapeout.compiler.files import check_output
    from tapeout.compiler.prompts import read_prompts
    from tapeout.compiler.run import Run, result_lines, shortfalls, write_lines

    defaults = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    asked = read_prompts(prompt or [], prompts, token_ids, defaults)
    if out is not None:
        check_output(out, "--out")
    run = Run.of(artifact, weights, asked, workers, None if device is None else device.value, trace)
    lines = result_lines(run, asked)
    if out is not None:
        write_lines(out, lines)
    if as_json:
        print("\n".join(json.dumps(line) for line in (lines if out is None else lines[-1:])))
    else:
        if out is None:
            _show(run.outputs)
        if stats or out is not None:
            print(run.summary)
    unfinished = shortfalls(run, asked)
    for sentence in unfinished:
        print(f"tapeout: {sentence}", file=sys.stderr)
    if unfinished:
        raise typer.Exit(1)


def _show(outputs: "list[RequestOutput]") -> None:
    for output in outputs:
        print(f"{output.prompt or ''}{output.outputs[0].text}")
