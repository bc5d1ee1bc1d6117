"""Results of a run as JSON objects: one a request, and one with totals. docs/runtime.md, 11.6.

Totals are counted from the lines, so that results which an earlier run left behind count like any other. Where lines go is `result_files.py`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tapeout.compiler.prompts import Refused
from tapeout.runtime.request import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from tapeout.compiler.run import Run

GOOD_ENDS = ("stop", "length")
Line = dict[str, Any]


@dataclass(frozen=True)
class Earlier:
    """A result that a run before this one left behind, as its line."""

    line: Line


Ended = RequestOutput | Refused | Earlier
"""What may have become of a request."""


def result_line(name: str, result: Ended) -> Line:
    """The first answer and what is known of the request `name`; all answers where several were asked for."""
    if isinstance(result, Earlier):
        return result.line
    if isinstance(result, Refused):
        nothing = {"prompt_tokens": 0, "text": "", "token_ids": [], "finish_reason": "error", "stop_reason": None}
        return {"id": name, **nothing, "error": result.error}
    line = {"id": name, "prompt_tokens": len(result.prompt_token_ids), **_answer(result.outputs[0]), "seed": result.seed}
    line |= {"timing": asdict(result.timing), "spec": asdict(result.speculation), "cache": asdict(result.cache)}
    if len(result.outputs) > 1:
        line["outputs"] = [{"index": answer.index, **_answer(answer)} for answer in result.outputs]
    return line


def _answer(answer: CompletionOutput) -> Line:
    found: Line = {"text": answer.text, "token_ids": list(answer.token_ids)}
    found |= {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}
    found |= {} if answer.logprobs is None else {"logprobs": list(answer.logprobs)}
    return found | ({} if answer.error is None else {"error": answer.error})


def totals_line(run: "Run", lines: Sequence[Line]) -> Line:
    """What stands behind the lines of all requests. Rates, and what speculation did by place, are this run's own."""
    steps, verified, accepted = (sum(line.get("spec", {}).get(name, 0) for line in lines) for name in ("steps", "verified", "accepted"))
    totals = {
        "run": run.name,
        "requests": len(lines),
        "failed": sum(not is_good(line) for line in lines),
        "resumed": sum(isinstance(result, Earlier) for result in run.results),
        "prompt_tokens": sum(line["prompt_tokens"] for line in lines),
        "output_tokens": sum(len(answer["token_ids"]) for line in lines for answer in _answers(line)),
        "load_seconds": run.load_seconds,
        "run_seconds": run.run_seconds,
        "prompt_tokens_per_second": rate(run.prompt_tokens, run.run_seconds),
        "output_tokens_per_second": rate(run.output_tokens, run.run_seconds),
        "accepted_length": rate(steps + accepted, steps),
        "verified_per_step": rate(verified, steps),
        "verified_at": run.statistics.get("verified_at", []),
        "accepted_at": run.statistics.get("accepted_at", []),
        "hit_tokens": sum(line.get("cache", {}).get("hit_tokens", 0) for line in lines),
        "peak_memory_bytes": peak_memory_bytes(),
    }
    return {"totals": totals}


def is_good(line: Line) -> bool:
    """Whether every answer of a request came to its end."""
    return all(answer["finish_reason"] in GOOD_ENDS for answer in _answers(line))


def is_result(line: object) -> bool:
    """Whether something read from a file has what a result's line has, as far as anybody here looks at it."""
    if not isinstance(line, dict) or type(line.get("id")) is not str or type(line.get("prompt_tokens")) is not int:
        return False
    answers = line.get("outputs", [line])
    return _counts(line, "spec", ("steps", "verified", "accepted")) and _counts(line, "cache", ("hit_tokens",)) and (
        isinstance(answers, list) and all(_is_answer(answer) for answer in [line, *answers])
    )  # fmt: skip


def _is_answer(answer: object) -> bool:
    if not isinstance(answer, dict):
        return False
    kinds = {"text": str, "token_ids": list, "finish_reason": str}
    return all(isinstance(answer.get(name), kind) for name, kind in kinds.items())


def _counts(line: Mapping[str, Any], part: str, names: Sequence[str]) -> bool:
    found = line.get(part)
    return isinstance(found, dict) and all(type(found.get(name)) is int for name in names)


def _answers(line: Line) -> Sequence[Line]:
    found: Sequence[Line] = line.get("outputs", [line])
    return found


def json_text(lines: Sequence[Line]) -> str:
    """JSON lines, each with its line feed."""
    return "".join(json.dumps(line) + "\n" for line in lines)


def rate(amount: float, per: float) -> float:
    """The quotient, 0 where nothing was measured."""
    return amount / per if per else 0.0


def peak_memory_bytes() -> int:
    """The most memory that this process has held at a time, mapped weights included as far as they were read."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
