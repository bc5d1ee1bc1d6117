"""One offline run: load, generate, measure, and what is told about it.

A request that is refused has a result and a sentence like any other, and harms nobody. Each result goes where results go (`result_files.py`) as soon
as it is there. Imports the runtime only: it works where no compiler is installed.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapeout.compiler.errors import FileRefused
from tapeout.compiler.files import read_bytes, write_text
from tapeout.compiler.prompts import Asked, Refused
from tapeout.compiler.result_files import Results
from tapeout.compiler.result_lines import GOOD_ENDS, Earlier, Ended, Line, rate, result_line, totals_line
from tapeout.compiler.run_settings import Settings
from tapeout.runtime.artifact_set import open_artifact
from tapeout.runtime.engine import Engine
from tapeout.runtime.errors import PromptRefused, RequestError
from tapeout.runtime.llm import LLM
from tapeout.runtime.planner import Reason
from tapeout.runtime.request import RequestOutput

if TYPE_CHECKING:
    from tapeout.models.deepseek_v41.tokenizer import Tokenizer

LINE_STEPS = 100  # between two lines of statistics
MOST_TOLD = 50  # sentences about requests


@dataclass(frozen=True)
class Run:
    """What came of each request, in order, how long loading and generating took (seconds), and the most positions of a sequence here and as compiled.

    `name` stands for all that decides the tokens. `statistics` is the engine's line of counters and quantiles, empty where nothing ran; `unwritten`
    says which file about the run was not written, `warnings` what else surprises and costs no result.
    """

    results: Sequence[Ended]
    load_seconds: float = 0.0
    run_seconds: float = 0.0
    context: int = 0
    max_context: int = 0
    name: str = ""
    statistics: dict[str, Any] = field(default_factory=dict)
    unwritten: Sequence[str] = ()
    warnings: Sequence[str] = ()

    @classmethod
    def of(cls, artifact: Path, weights: Path, asked: Sequence[Asked | Refused], settings: Settings, into: Results) -> "Run":
        """Loads an artifact, completes every prompt that is neither refused nor done already, and closes it; results go `into` as they come.

        Writes trace and metrics where asked for, of a run that fails as well. Where every request is refused, or has its result already, nothing is
        loaded.
        """
        settings.check_files()
        refused = [one for one in asked if isinstance(one, Refused)]
        if len(refused) == len(asked):
            for place, one in enumerate(refused):
                into.add(place, one)
            return cls([*refused])
        name = cache(lambda: _name(*_stamps(artifact, weights, settings), weights, asked, settings))
        if (found := into.whole(name)) is not None:
            kept = [one if isinstance(one, Refused) else Earlier(found[one.id]) for one in asked]
            return cls(kept, name=name(), warnings=[f"{option} {path}: not written, as nothing was run" for option, path in settings.files])
        started = time.perf_counter()
        llm = settings.loaded(artifact, weights)
        try:
            checked = [_checked(llm, one) for one in asked]
            own = _name(llm.engine.artifact.manifest.identity, llm.engine.weights_stamp, weights, asked, settings)
            loaded, log = time.perf_counter(), _Log()
            try:
                results = _completed(llm, checked, log, into.begin(own), into)
            except BaseException:
                with suppress(Exception):  # what ended the run is worth more
                    _write_files(settings, llm.engine, log)
                raise
            ran = time.perf_counter() - loaded
            unwritten = _write_files(settings, llm.engine, log)
            limits = (llm.engine.context, llm.engine.artifact.manifest.options.max_context)
            made = cls(results, loaded - started, ran, *limits, own, llm.engine.statistics.line(**llm.engine.scheduler.gauges()), unwritten)
        finally:
            llm.close()
        return replace(made, warnings=_unsaved(llm.engine))

    @property
    def outputs(self) -> list[RequestOutput]:
        """Results of the requests that ran."""
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
        if self._resumed and not self.context:
            return f"{len(self.results)} requests{self._resumed}: every result is there already, nothing was run"
        return (
            f"{len(self.results)} requests{self._resumed}, {self.prompt_tokens} prompt tokens, "
            f"{self.output_tokens} output tokens in {self.run_seconds:.2f} s "
            f"({rate(self.output_tokens, self.run_seconds):.0f} tokens/s); loaded in {self.load_seconds:.2f} s"
        )

    @property
    def _resumed(self) -> str:
        found = sum(isinstance(result, Earlier) for result in self.results)
        return f" ({found} of an earlier run)" if found else ""

    def totals(self, asked: Sequence[Asked | Refused]) -> Line:
        """The line with totals, which follows those of all requests."""
        return totals_line(self, [result_line(one.id, result) for one, result in zip(asked, self.results, strict=True)])


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


def _unsaved(engine: Engine) -> list[str]:
    """What the folder of a cache did not take, once the engine is closed: a run with it works, and the next one finds nothing there."""
    disk = None if engine.scheduler.prefix is None else engine.scheduler.prefix.disk
    if disk is None or not disk.unsaved:
        return []
    return [f"--cache-dir {disk.folder}: found {disk.unsaved} entries that were not saved ({disk.reason}), expected a folder that can be written; "
            "make room, or give another folder"]  # fmt: skip


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


def _completed(
    llm: LLM, checked: Sequence[Asked | Refused], watch: Callable[[Engine], None], earlier: Mapping[str, Line], into: Results
) -> list[Ended]:
    """One result for each request, in order, each given away as it comes; text prompts are token ids by now, `earlier` results are there."""
    found: dict[int, Ended] = {}
    for place, one in enumerate(checked):
        if isinstance(one, Refused) or one.id in earlier:
            found[place] = one if isinstance(one, Refused) else Earlier(earlier[one.id])
            into.add(place, found[place])
    left = [(place, one) for place, one in enumerate(checked) if isinstance(one, Asked) and place not in found]

    def done(number: int, output: RequestOutput) -> None:
        place = left[number][0]
        found[place] = output
        into.add(place, output)

    prompts, params, ids = ([getattr(one, name) for _, one in left] for name in ("prompt", "params", "id"))
    llm.generate(prompts, params, ids=ids, watch=watch, done=done)
    return [found[place] for place in range(len(checked))]


def _stamps(artifact: Path, weights: Path, settings: Settings) -> tuple[str, str]:
    """What an engine would say of its artifact and its checkpoint, from their headers alone."""
    from tapeout.models.deepseek_v41.checkpoint import open_checkpoint
    from tapeout.models.deepseek_v41.config import parse_config

    manifest = open_artifact(artifact, settings.values["device"]).manifest
    return manifest.identity, open_checkpoint(weights, parse_config(manifest.model.config), ("text", "draft")).stamp


def _name(identity: str, stamp: str, weights: Path, asked: Sequence[Asked | Refused], settings: Settings) -> str:
    """A name for what decides the tokens of a run: model, checkpoint, requests and replay; not the device's settings, batching or drafts."""
    from tapeout.models.deepseek_v41.tokenizer import FILE

    digest = blake2b(digest_size=16)
    tokenizer = blake2b(read_bytes(weights / FILE, "--weights")).hexdigest()
    for fact in (identity, stamp, tokenizer, settings.values["replay"], settings.values["keep"]):
        digest.update(f"{fact}\n".encode())
    for one in asked:
        digest.update(f"{(one.id, one.prompt, one.params) if isinstance(one, Asked) else one.error}\n".encode("utf-8", "backslashreplace"))
    return digest.hexdigest()


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


# -- what is told


def draft_rows(run: Run) -> list[tuple[int, int, int, float]]:
    """For each place of a drafted block: its number, drafts verified there, accepted, and their share in percent."""
    places = zip(run.statistics.get("verified_at", []), run.statistics.get("accepted_at", []), strict=True)
    return [(n, verified, won, round(100 * rate(won, verified), 1)) for n, (verified, won) in enumerate(places, 1)]


def statistic_lines(run: Run, totals: Line) -> list[str]:
    """What the engine's mechanisms did, a sentence each; nothing of those that did nothing."""
    totals, stats = totals["totals"], run.statistics
    found = []
    if stats.get("drafts_verified"):
        found.append(f"speculation: {totals['accepted_length']:.2f} tokens a step, {totals['verified_per_step']:.2f} drafts verified, "
                     f"{100 * stats['acceptance']:.1f} % of them accepted; {stats['decode_steps'] + stats['mixed_steps']} decode steps")  # fmt: skip
    for reason in Reason:
        if steps := stats.get(f"plans_{reason.name.lower()}"):
            found.append(f"plan of {steps:.0f} steps: {reason.value}")
    if totals["hit_tokens"]:
        found.append(f"cache: {totals['hit_tokens']} of {totals['prompt_tokens']} prompt tokens reused, "
                     f"{stats['snapshots_restored']} windows restored, {stats['blocks_loaded']} blocks read from the folder")  # fmt: skip
    if stats.get("decoder_prompt_rows", 0) < stats.get("prompt_rows", 0):
        found.append(f"replay: {stats['decoder_prompt_rows']} of {stats['prompt_rows']} prompt rows ran through the decoder half")
    if stats.get("preemptions"):
        found.append(f"memory: {stats['preemptions']} preemptions, {stats['recomputed_rows']} rows computed again")
    return found


def shortfalls(run: Run, asked: Sequence[Asked | Refused]) -> list[str]:
    """A sentence for each request that did not come to its end: place, id, finish reason, found and limit, what to do; files not written before.

    Of very many (a file that holds no prompts at all) the first ones, and how many more there are.
    """
    found = list(run.unwritten)
    for one, result in zip(asked, run.results, strict=True):
        if isinstance(result, Earlier):
            continue
        if isinstance(one, Refused) or isinstance(result, Refused):
            refused = one if isinstance(one, Refused) else result
            found.append(f"request {one.id}: {refused.error}")  # type: ignore[union-attr]
            continue
        reasons = dict.fromkeys(answer.finish_reason for answer in result.outputs if answer.finish_reason not in GOOD_ENDS)
        for reason in reasons:
            facts, remedy = _why(reason, result, one, run)
            found.append(f"{one.where}: request {one.id} ended with {reason}: {facts}; {remedy}")
    if (more := len(found) - MOST_TOLD) > 1:
        found[MOST_TOLD:] = [f"and {more} requests more; with --json or --out FILE each one's line says how it ended"]
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
    return f"found {made} tokens, expected its end", ended.error or "run it again"
