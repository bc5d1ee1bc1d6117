"""One offline run: load, generate, measure; and its results as JSON lines.

Imports the runtime only: it works where no compiler is installed.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapeout.compiler.files import check_output, write_text
from tapeout.compiler.prompts import Asked
from tapeout.runtime.artifact_set import DeviceName
from tapeout.runtime.errors import PromptRefused
from tapeout.runtime.llm import LLM
from tapeout.runtime.request import RequestOutput

if TYPE_CHECKING:
    from tapeout.models.deepseek_v41.tokenizer import Tokenizer


@dataclass(frozen=True)
class Run:
    """Outputs in order, how long loading and generating took (seconds), and the most positions of a sequence."""

    outputs: list[RequestOutput]
    load_seconds: float
    run_seconds: float
    max_context: int

    @classmethod
    def of(
        cls, artifact: Path, weights: Path, asked: list[Asked], workers: int | None = None, device: DeviceName | None = None,
        trace: Path | None = None,
    ) -> "Run":  # fmt: skip
        """Loads an artifact, completes every prompt, and closes it; writes what happened to `trace`, if given.

        What is wrong with a prompt is raised with its place, before anything runs.
        """
        if trace is not None:
            check_output(trace, "--trace")
        started = time.perf_counter()
        llm = LLM(artifact, weights, workers=workers, device=device, trace=trace is not None)
        try:
            _check(llm, asked)
            loaded = time.perf_counter()
            outputs = llm.generate([a.prompt for a in asked], [a.params for a in asked])
            if trace is not None and llm.engine.recorder is not None:
                write_text(trace, json.dumps(llm.engine.recorder.document()), "--trace")
            most = llm.engine.artifact.manifest.options.max_context
            return cls(outputs, loaded - started, time.perf_counter() - loaded, most)
        finally:
            llm.close()

    @property
    def prompt_tokens(self) -> int:
        return sum(len(o.prompt_token_ids) for o in self.outputs)

    @property
    def output_tokens(self) -> int:
        return sum(len(o.outputs[0].token_ids) for o in self.outputs)

    @property
    def summary(self) -> str:
        """One line for people."""
        rate = self.output_tokens / self.run_seconds if self.run_seconds else 0.0
        return (
            f"{len(self.outputs)} requests, {self.prompt_tokens} prompt tokens, {self.output_tokens} output tokens in {self.run_seconds:.2f} s "
            f"({rate:.0f} tokens/s); loaded in {self.load_seconds:.2f} s"
        )


def result_lines(run: Run, asked: list[Asked]) -> list[dict[str, Any]]:
    """One object a request in input order, then one with totals."""
    lines = [
        {
            "id": a.id,
            "prompt_tokens": len(o.prompt_token_ids),
            "text": o.outputs[0].text,
            "token_ids": list(o.outputs[0].token_ids),
            "finish_reason": o.outputs[0].finish_reason,
            "stop_reason": o.outputs[0].stop_reason,
            "seed": o.seed,
        }
        for a, o in zip(asked, run.outputs, strict=True)
    ]
    totals = {
        "requests": len(lines),
        "prompt_tokens": run.prompt_tokens,
        "output_tokens": run.output_tokens,
        "load_seconds": run.load_seconds,
        "run_seconds": run.run_seconds,
        "output_tokens_per_second": run.output_tokens / run.run_seconds if run.run_seconds else 0.0,
    }
    return [*lines, {"totals": totals}]


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """Writes JSON lines: a reader never sees half a file. Raises FileRefused."""
    write_text(path, "".join(json.dumps(line) + "\n" for line in lines), "--out")


def shortfalls(run: Run, asked: list[Asked]) -> list[str]:
    """A sentence for each request that did not come to its end: place, id, finish reason, found and limit, what to do."""
    found = []
    for a, o in zip(asked, run.outputs, strict=True):
        reason = o.outputs[0].finish_reason
        if reason not in ("stop", "length"):
            facts, remedy = _why(reason, o, a, run.max_context)
            found.append(f"{a.where}: request {a.id} ended with {reason}: {facts}; {remedy}")
    return found


def _why(reason: str, output: RequestOutput, asked: Asked, limit: int) -> tuple[str, str]:
    """What was found and expected where a request ended early, and what to do."""
    prompt, made = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
    match reason:
        case "prompt_length_exceeded":
            return f"found {prompt} prompt tokens, expected at most {limit}", "shorten the prompt, or compile with a larger --max-context"
        case "insufficient_system_resource":
            return f"found too little memory for {prompt + made} tokens", "shorten the prompt, or run fewer or shorter requests at a time"
        case "deadline":
            return f"found {made} tokens after {asked.params.deadline_ms} ms, expected its end by then", "give a larger deadline_ms"
    fault = output.outputs[0].error
    return f"found {made} tokens{f' and {fault}' if fault else ''}, expected its end", "run it again"


def _check(llm: LLM, asked: list[Asked]) -> None:
    """Raises for the first prompt or parameter that the engine refuses, naming the line it comes from."""
    for one in asked:
        llm.engine.check_params(one.params, one.where)
        if not isinstance(one.prompt, str):
            llm.engine.checked_prompt(one.prompt, one.where)
        elif llm.tokenizer is not None:
            llm.engine.checked_prompt(_tokens(llm.tokenizer, one.prompt, one.where), one.where)


def _tokens(tokenizer: "Tokenizer", text: str, where: str) -> list[int]:
    from tapeout.models.deepseek_v41.errors import TokenizerError

    try:
        return list(tokenizer.encode(text))
    except TokenizerError as error:
        problem = error.problems[0]
        raise PromptRefused(where, problem.found, problem.expected) from None
