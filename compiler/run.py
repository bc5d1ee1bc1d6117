"""One offline run: load, generate, measure; and its results as JSON lines.

Imports the runtime only: it works where no compiler is installed.
"""

import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapeout.compiler.prompts import Asked
from tapeout.runtime.artifact_set import DeviceName
from tapeout.runtime.llm import LLM
from tapeout.runtime.request import RequestOutput


@dataclass(frozen=True)
class Run:
    """Outputs in order, and how long loading and generating took (seconds)."""

    outputs: list[RequestOutput]
    load_seconds: float
    run_seconds: float

    @classmethod
    def of(
        cls, artifact: Path, weights: Path, asked: list[Asked], workers: int | None = None, device: DeviceName | None = None,
        trace: Path | None = None,
    ) -> "Run":  # fmt: skip
        """Loads an artifact, completes every prompt, and closes it; writes what happened to `trace`, if given."""
        started = time.perf_counter()
        llm = LLM(artifact, weights, workers=workers, device=device, trace=trace is not None)
        try:
            loaded = time.perf_counter()
            outputs = llm.generate([a.prompt for a in asked], [a.params for a in asked])
            if trace is not None and llm.engine.recorder is not None:
                llm.engine.recorder.write(trace)
            return cls(outputs, loaded - started, time.perf_counter() - loaded)
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
    """Writes JSON lines aside and renames: a reader never sees half a file."""
    handle, aside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    with os.fdopen(handle, "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    Path(aside).chmod(0o644)
    Path(aside).rename(path)
