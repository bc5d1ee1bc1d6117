"""One offline run: load, generate, measure; and its results as JSON lines.

A request that is refused has a line and a sentence like any other, and harms nobody. Imports the runtime only: it works where no compiler is
installed.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapeout.compiler.errors import FileRefused
from tapeout.compiler.files import write_text
from tapeout.compiler.prompts import Asked, Refused
from tapeout.compiler.run_settings import Settings
from tapeout.runtime.engine import Engine
from tapeout.runtime.errors import PromptRefused, RequestError
from tapeout.runtime.llm import LLM
from tapeout.runtime.request import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from tapeout.models.deepseek_v41.tokenizer import Tokenizer

GOOD_ENDS = ("stop", "length")
LINE_STEPS = 100  # between two lines of statistics


@dataclass(frozen=True)
class Run:
    """What came of each request, in order, how long loading and generating took (seconds), and the most positions of a sequence here and as compiled.

    `statistics` is the engine's line of counters and quantiles, empty where nothing ran; `unwritten` says which file about the run was not written.
    """

    results: list[RequestOutput | Refused]
    load_seconds: float
    run_seconds: float
    context: int
    max_context: int
    statistics: dict[str, Any] = field(default_factory=dict)
    unwritten: Sequence[str] = ()

    @classmethod
    def of(cls, artifact: Path, weights: Path, asked: Sequence[Asked | Refused], settings: Settings) -> "Run":
        """Loads an artifact, completes every prompt that is not refused, and closes it; writes trace and metrics where asked for.

        Where every request is refused nothing is loaded.
        """
        settings.check_files()
        refused = [one for one in asked if isinstance(one, Refused)]
        if len(refused) == len(asked):
            return cls([*refused], 0.0, 0.0, 0, 0)
        started = time.perf_counter()
        llm = settings.loaded(artifact, weights)
        try:
            checked = [_checked(llm, one) for one in asked]
            loaded, log = time.perf_counter(), _Log()
            results = _completed(llm, checked, log)
            ran = time.perf_counter() - loaded
            unwritten = _write_files(settings, llm.engine, log)
            limits = (llm.engine.context, llm.engine.artifact.manifest.options.max_context)
            return cls(results, loaded - started, ran, *limits, llm.engine.statistics.line(**llm.engine.scheduler.gauges()), unwritten)
        finally:
            llm.close()

    @property
    def outputs(self) -> list[RequestOutput]:
        """Results of the requests that were not refused."""
        return [result for result in self.results if isinstance(result, RequestOutput)]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(o.prompt_token_ids) for o in self.outputs)

    @property
    def output_tokens(self) -> int:
        return sum(len(answer.token_ids) for o in self.outputs for answer in o.outputs)

    @property
    def summary(self) -> str:
        """One line for people."""
        return (
            f"{len(self.results)} requests, {self.prompt_tokens} prompt tokens, {self.output_tokens} output tokens in {self.run_seconds:.2f} s "
            f"({_rate(self.output_tokens, self.run_seconds):.0f} tokens/s); loaded in {self.load_seconds:.2f} s"
        )


def _write_files(settings: Settings, engine: Engine, log: "_Log") -> list[str]:
    """What is told about the run; a sentence for each file that cannot be written, as the tokens are worth more than it."""
    files: list[tuple[Path | None, str, Callable[[Path], str]]] = [
        (settings.trace, "--trace", lambda _: json.dumps(engine.recorder.document() if engine.recorder else {})),
        (settings.metrics, "--metrics", lambda path: log.text(engine, path)),
        (settings.record, "--record", lambda _: "".join(json.dumps(line) + "\n" for line in engine.scheduler.drafting.records or [])),
    ]
    unwritten = []
    for path, option, content in files:
        try:
            if path is not None:
                write_text(path, content(path), option)
        except FileRefused as error:
            unwritten.append(str(error))
    return unwritten


class _Log:
    """A line of statistics every LINE_STEPS steps."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._next = LINE_STEPS

    def __call__(self, engine: Engine) -> None:
        if engine.statistics.counts.steps >= self._next:
            self._lines.append(engine.statistics.json_line(**engine.scheduler.gauges()))
            self._next += LINE_STEPS

    def text(self, engine: Engine, path: Path) -> str:
        """What to write at the end: for `.prom` the Prometheus text, else all lines and a last one."""
        gauges = engine.scheduler.gauges()
        if path.suffix == ".prom":
            return engine.statistics.prometheus(**gauges)
        return "".join(f"{line}\n" for line in [*self._lines, engine.statistics.json_line(**gauges)])


def _completed(llm: LLM, checked: Sequence[Asked | Refused], watch: Callable[[Engine], None]) -> list[RequestOutput | Refused]:
    """One result for each request, in order; text prompts are token ids by now."""
    accepted = [one for one in checked if isinstance(one, Asked)]
    prompts, params, ids = ([getattr(one, name) for one in accepted] for name in ("prompt", "params", "id"))
    outputs = iter(llm.generate(prompts, params, ids=ids, watch=watch))
    return [one if isinstance(one, Refused) else next(outputs) for one in checked]


def _checked(llm: LLM, one: Asked | Refused) -> Asked | Refused:
    """The request with its prompt as token ids, or why the engine refuses it."""
    if isinstance(one, Refused):
        return one
    try:
        llm.engine.check_params(one.params, one.where)
        if not isinstance(one.prompt, str):
            tokens = one.prompt
        elif llm.tokenizer is not None:
            tokens = _tokens(llm.tokenizer, llm.fitting(one.prompt), one.where)
        else:
            raise PromptRefused(one.where, "text, without a tokenizer", "token ids")
        return replace(one, prompt=llm.engine.checked_prompt(tokens, one.where))
    except RequestError as error:
        return Refused(one.id, one.where, str(error))


def _tokens(tokenizer: "Tokenizer", text: str, where: str) -> list[int]:
    from tapeout.models.deepseek_v41.errors import TokenizerError

    try:
        return list(tokenizer.encode(text))
    except TokenizerError as error:
        problem = error.problems[0]
        raise PromptRefused(where, problem.found, problem.expected) from None


# -- what is written


def result_lines(run: Run, asked: Sequence[Asked | Refused]) -> list[dict[str, Any]]:
    """One object a request in input order, then one with totals."""
    lines = [_line(one.id, result) for one, result in zip(asked, run.results, strict=True)]
    return [*lines, {"totals": _totals(run)}]


def _line(name: str, result: RequestOutput | Refused) -> dict[str, Any]:
    """The first answer and what is known of the request; all answers where several were asked for."""
    if isinstance(result, Refused):
        nothing = {"prompt_tokens": 0, "text": "", "token_ids": [], "finish_reason": "error", "stop_reason": None}
        return {"id": name, **nothing, "error": result.error}
    line = {"id": name, "prompt_tokens": len(result.prompt_token_ids), **_answer(result.outputs[0]), "seed": result.seed}
    line |= {"timing": asdict(result.timing), "spec": asdict(result.speculation), "cache": asdict(result.cache)}
    if len(result.outputs) > 1:
        line["outputs"] = [{"index": answer.index, **_answer(answer)} for answer in result.outputs]
    return line


def _answer(answer: CompletionOutput) -> dict[str, Any]:
    found: dict[str, Any] = {"text": answer.text, "token_ids": list(answer.token_ids)}
    found |= {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}
    found |= {} if answer.logprobs is None else {"logprobs": list(answer.logprobs)}
    return found | ({} if answer.error is None else {"error": answer.error})


def _totals(run: Run) -> dict[str, Any]:
    steps, verified, accepted = (sum(getattr(o.speculation, name) for o in run.outputs) for name in ("steps", "verified", "accepted"))
    return {
        "requests": len(run.results),
        "failed": sum(isinstance(r, Refused) or any(a.finish_reason not in GOOD_ENDS for a in r.outputs) for r in run.results),
        "prompt_tokens": run.prompt_tokens,
        "output_tokens": run.output_tokens,
        "load_seconds": run.load_seconds,
        "run_seconds": run.run_seconds,
        "prompt_tokens_per_second": _rate(run.prompt_tokens, run.run_seconds),
        "output_tokens_per_second": _rate(run.output_tokens, run.run_seconds),
        "accepted_length": _rate(steps + accepted, steps),
        "verified_per_step": _rate(verified, steps),
        "verified_at": run.statistics.get("verified_at", []),
        "accepted_at": run.statistics.get("accepted_at", []),
        "hit_tokens": sum(o.cache.hit_tokens for o in run.outputs),
        "peak_memory_bytes": peak_memory_bytes(),
    }


def draft_rows(run: Run) -> list[tuple[int, int, int, float]]:
    """For each place of a drafted block: its number, drafts verified there, accepted, and their share in percent."""
    places = zip(run.statistics.get("verified_at", []), run.statistics.get("accepted_at", []), strict=True)
    return [(n, verified, won, round(100 * _rate(won, verified), 1)) for n, (verified, won) in enumerate(places, 1)]


def statistic_lines(run: Run) -> list[str]:
    """What the engine's mechanisms did, a sentence each; nothing of those that did nothing."""
    totals, stats = _totals(run), run.statistics
    found = []
    if stats.get("drafts_verified"):
        found.append(f"speculation: {totals['accepted_length']:.2f} tokens a step, {totals['verified_per_step']:.2f} drafts verified, "
                     f"{100 * stats['acceptance']:.1f} % of them accepted; {stats['decode_steps'] + stats['mixed_steps']} decode steps")  # fmt: skip
    if totals["hit_tokens"]:
        found.append(f"cache: {totals['hit_tokens']} of {totals['prompt_tokens']} prompt tokens reused, "
                     f"{stats['snapshots_restored']} windows restored, {stats['blocks_loaded']} blocks read from the folder")  # fmt: skip
    if stats.get("decoder_prompt_rows", 0) < stats.get("prompt_rows", 0):
        found.append(f"replay: {stats['decoder_prompt_rows']} of {stats['prompt_rows']} prompt rows ran through the decoder half")
    if stats.get("preemptions"):
        found.append(f"memory: {stats['preemptions']} preemptions, {stats['recomputed_rows']} rows computed again")
    return found


def _rate(amount: float, per: float) -> float:
    return amount / per if per else 0.0


def peak_memory_bytes() -> int:
    """The most memory that this process has held at a time, mapped weights included as far as they were read."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """Writes JSON lines: a reader never sees half a file. Raises FileRefused."""
    write_text(path, "".join(json.dumps(line) + "\n" for line in lines), "--out")


def shortfalls(run: Run, asked: Sequence[Asked | Refused]) -> list[str]:
    """A sentence for each request that did not come to its end: place, id, finish reason, found and limit, what to do; files not written before."""
    found = list(run.unwritten)
    for one, result in zip(asked, run.results, strict=True):
        if isinstance(one, Refused) or isinstance(result, Refused):
            refused = one if isinstance(one, Refused) else result
            found.append(f"request {one.id}: {refused.error}")  # type: ignore[union-attr]
            continue
        reasons = dict.fromkeys(answer.finish_reason for answer in result.outputs if answer.finish_reason not in GOOD_ENDS)
        for reason in reasons:
            facts, remedy = _why(reason, result, one, run)
            found.append(f"{one.where}: request {one.id} ended with {reason}: {facts}; {remedy}")
    return found


def _why(reason: str, output: RequestOutput, asked: Asked, run: Run) -> tuple[str, str]:
    """What was found and expected where a request ended early, and what to do."""
    ended = next(answer for answer in output.outputs if answer.finish_reason == reason)
    prompt, made = len(output.prompt_token_ids), len(ended.token_ids)
    match reason:
        case "prompt_length_exceeded":
            least = "at least " if isinstance(asked.prompt, str) else ""  # of a text only as much was read as settles it (`LLM.fitting`)
            remedy = "compile with a larger --max-context" if run.context >= run.max_context else "allow more cache_blocks"
            return f"found {least}{prompt} prompt tokens, expected at most {run.context}", f"shorten the prompt, or {remedy}"
        case "insufficient_system_resource":
            return f"found too little memory for {prompt + made} tokens", "shorten the prompt, or run fewer or shorter requests at a time"
        case "deadline":
            return f"found {made} tokens after {asked.params.deadline_ms} ms, expected its end by then", "give a larger deadline_ms"
    return f"found {made} tokens{f' and {ended.error}' if ended.error else ''}, expected its end", "run it again"
