"""The offline interface: `LLM(artifact, weights).generate(prompts, params)`, names as in vLLM.

Promises: one result for each prompt, in order, or an error before anything runs. Text comes from the incremental detokeniser, so it
never holds half a character. Scheduling is `engine.py`; reading the checkpoint is `models`.
"""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from tapeout.runtime.artifact import Artifact
from tapeout.runtime.artifact_set import open_artifact
from tapeout.runtime.device_names import DeviceName
from tapeout.runtime.engine import Engine, EngineOptions
from tapeout.runtime.errors import DeviceClosed, OptionRefused, OtherModel, PromptRefused, RequestsMismatched, RequestTaken, shown
from tapeout.runtime.params import SamplingParams, request_seed
from tapeout.runtime.request import FinishedEvent, RequestOutput
from tapeout.runtime.reuse import CacheOptions
from tapeout.runtime.weights import bind_weights

if TYPE_CHECKING:
    from tapeout.models.deepseek_v41.config import ModelConfig
    from tapeout.models.deepseek_v41.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Prompts = Prompt | Sequence[Prompt]


class LLM:
    """A compiled model with its weights, ready for prompts; several may live in one process. Calls of `generate` from several threads take turns;
    all else is one thread's at a time. A forked process has to make its own."""

    def __init__(
        self,
        artifact: str | Path,
        weights: str | Path,
        *,
        workers: int | None = None,
        cache_blocks: int | None = None,
        chunk_tokens: int | None = None,
        drafts: bool = False,
        device: DeviceName | None = None,
        asynchronous: bool | None = None,
        step_ms: float | None = None,
        trace: bool = False,
        plan: str = "all",
        cache: CacheOptions | None = None,
        replay: str = "exact",
        keep: int | None = None,
        record_drafts: bool = False,
    ) -> None:
        """Loads an artifact and maps the checkpoint folder `weights`. Raises TapeoutError or an InputError of `models`.

        `device` picks one of several targets, "cpu", "cuda", "ascend", or "ascend-sim", which simulates the NPU; without it a GPU where the
        artifact has binaries for this machine's. `workers`, `cache_blocks`, `chunk_tokens`, `step_ms`: as in EngineOptions.
        `asynchronous` plans a step while the device runs the one before, and is chosen for a GPU; `trace` keeps what happens in `engine.recorder`.
        `drafts` and `plan`: speculation; `cache`: reuse of earlier prompts; `replay` and `keep`: bounded replay; `record_drafts`: what the
        planner's simulator reads.
        """
        for name, place in (("artifact", artifact), ("weights", weights)):
            if not isinstance(place, str | Path):
                raise OptionRefused(f"LLM: {name}", f"{place!r} ({type(place).__name__})", "the path of a folder")
        options = EngineOptions(workers, cache_blocks, chunk_tokens, drafts, asynchronous, step_ms, trace=trace, simulated=device == "ascend-sim",
                                plan=plan, cache=cache, replay=replay, keep=keep, record_drafts=record_drafts)  # fmt: skip
        self.tokenizer: Tokenizer | None
        self.engine, self.tokenizer = open_engine(open_artifact(artifact, device), Path(weights), options)
        self.engine.detokenizer = self.tokenizer.detokenizer
        self._begin()

    @classmethod
    def over(cls, engine: Engine, tokenizer: "Tokenizer | None") -> "LLM":
        """The same interface over an engine that is there already; without a tokenizer prompts are token ids."""
        llm = cls.__new__(cls)
        llm.engine, llm.tokenizer = engine, tokenizer
        engine.detokenizer = None if tokenizer is None else tokenizer.detokenizer
        llm._begin()
        return llm

    def _begin(self) -> None:
        self._submitted, self._turn, self._process = 0, threading.RLock(), os.getpid()

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        ids: Sequence[str] | None = None,
        watch: Callable[[Engine], None] | None = None,
        done: Callable[[int, RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Completes every prompt (text, or token ids) and returns the results in order.

        One parameter object serves all prompts; if it has a seed, request i uses a seed derived from it and i, and request 0 the seed
        itself. Raises before anything runs if a prompt, a parameter or an id is refused. Of a text that is far too long for the context the result
        has the beginning only. `ids` are the requests' names in messages and traces, numbers without. `watch` sees the engine after every step,
        `done` each result as soon as it is there, with the prompt's place: those are not lost if the call fails later. Both may call `generate`.
        """
        if os.getpid() != self._process:  # its threads, and whatever drives a GPU, are not here
            raise DeviceClosed("LLM.generate", f"process {os.getpid()}, forked from the one that loaded it", f"process {self._process}")
        with self._turn:
            return self._generated(prompts, params, ids, watch, done)

    def _generated(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None,
        ids: Sequence[str] | None,
        watch: Callable[[Engine], None] | None,
        done: Callable[[int, RequestOutput], None] | None,
    ) -> list[RequestOutput]:
        for name, called in (("watch", watch), ("done", done)):
            if called is not None and not callable(called):
                raise OptionRefused(f"LLM.generate: {name}", shown(called), "a function, or None")
        asked = _listed(prompts)
        tokens = [self._tokens(prompt, i) for i, prompt in enumerate(asked)]
        names = [str(self._submitted + i) for i in range(len(asked))] if ids is None else _ids(ids, len(asked))
        taken = set(self.engine.scheduler.roster.requests)
        for name in names:  # before anything is submitted: what a failed call drops must be its own
            if name in taken:
                raise RequestTaken(f"request {name}", "the id of another request")
            taken.add(name)
        each = _for_each(params, names)
        for name, own in zip(names, each, strict=True):
            self.engine.check_params(own, name)
        self._submitted += len(asked)
        try:
            for name, prompt, own in zip(names, tokens, each, strict=True):
                self.engine.submit(prompt, own, name)
            return self._followed(names, asked, watch, done)
        except BaseException:
            self._drop(names)
            raise

    def _followed(
        self,
        names: Sequence[str],
        asked: Sequence[Prompt],
        watch: Callable[[Engine], None] | None,
        done: Callable[[int, RequestOutput], None] | None,
    ) -> list[RequestOutput]:
        """Steps until all is done; results in order."""
        places = {name: place for place, name in enumerate(names)}
        found: dict[int, RequestOutput] = {}

        def end(place: int) -> None:
            found[place] = self._result(names[place], asked[place])
            if done is not None:
                done(place, found[place])

        while self.engine.has_work:
            for event in self.engine.step():
                if isinstance(event, FinishedEvent) and event.request_id in places:
                    end(places[event.request_id])
            if watch is not None:
                watch(self.engine)
        for place in sorted({*places.values()} - {*found}):
            end(place)  # while `done` or `watch` called `generate`, which steps the engine too
        return [found[place] for place in range(len(names))]

    def close(self) -> None:
        """Ends the worker threads. May be called twice."""
        self.engine.close()

    def fitting(self, text: str) -> str:
        """The text, or so much of its beginning as is surely more tokens than the context holds: the rest need not be looked at."""
        return text if self.tokenizer is None else text[: (self.engine.context + 1) * self._longest_token]

    @cached_property
    def _longest_token(self) -> int:
        """Bytes of the longest token, at least 1."""
        tokens = () if self.tokenizer is None else self.tokenizer.token_bytes
        return max(1, max(map(len, tokens), default=1))

    def _tokens(self, prompt: Prompt, index: int) -> list[int]:
        if not isinstance(prompt, str):
            return self.engine.checked_prompt(prompt, f"prompt {index}")
        if self.tokenizer is None:
            raise PromptRefused(f"prompt {index}", "text, without a tokenizer", "a list of token ids")
        return self.engine.checked_prompt(self.tokenizer.encode(self.fitting(prompt)), f"prompt {index}")

    def _result(self, name: str, prompt: Prompt) -> RequestOutput:
        has_text = self.engine.scheduler.roster.branches(name)[0].text is not None  # it was followed as it came, for its stop strings
        result = self.engine.take(name, prompt if isinstance(prompt, str) else None)
        if self.tokenizer is None or has_text:
            return result
        return replace(result, outputs=tuple(replace(output, text=self._text(output.token_ids)) for output in result.outputs))

    def _text(self, tokens: Sequence[int]) -> str:
        if self.tokenizer is None:
            return ""
        stream = self.tokenizer.detokenizer()
        return "".join(stream.push(token) for token in tokens) + stream.finish()

    def _drop(self, names: Sequence[str]) -> None:
        """Ends and forgets the requests of a call that failed."""
        for name in names:
            self.engine.abort(name)
        self.engine.forget(*names)


def open_engine(artifact: Artifact, weights: Path, options: EngineOptions) -> "tuple[Engine, Tokenizer]":
    """Binds an artifact to a checkpoint folder. Raises OtherModel if their configurations differ."""
    from tapeout.models.deepseek_v41.checkpoint import open_checkpoint
    from tapeout.models.deepseek_v41.config import load_config, parse_config
    from tapeout.models.deepseek_v41.token_map import load_token_map
    from tapeout.models.deepseek_v41.tokenizer import load_tokenizer

    config, stored = parse_config(artifact.manifest.model.config), load_config(weights)
    if config != stored:
        raise OtherModel(str(weights), _difference(stored, config), f"the model of {artifact.directory}")
    checkpoint = open_checkpoint(weights, config, ("text", "draft"))
    tokenizer = load_tokenizer(weights, config)
    bound = bind_weights(artifact.weights, checkpoint, lambda: load_token_map(weights, config, tokenizer))
    return Engine(artifact, replace(bound, stamp=checkpoint.stamp), options), tokenizer


def _difference(found: "ModelConfig", expected: "ModelConfig") -> str:
    """Key paths in which two configurations differ, the first few."""
    ours, theirs = found.model_dump(exclude={"ignored"}), expected.model_dump(exclude={"ignored"})
    keys = [path for path in _leaves(ours) | _leaves(theirs) if _leaves(ours).get(path) != _leaves(theirs).get(path)]
    return ", ".join(f"{path} = {_leaves(ours).get(path)}" for path in sorted(keys)[:5])


def _leaves(tree: object, path: str = "") -> dict[str, object]:
    if not isinstance(tree, dict):
        return {path: tree}
    return {key: value for name, branch in tree.items() for key, value in _leaves(branch, f"{path}.{name}".strip(".")).items()}


def _listed(prompts: Prompts) -> list[Prompt]:
    """A list of prompts; one text or one list of ids counts as a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, np.ndarray) and prompts.ndim == 1:
        return [cast(Prompt, prompts)]
    if not isinstance(prompts, Sequence | np.ndarray) or (isinstance(prompts, np.ndarray) and not prompts.ndim):
        raise PromptRefused("prompts", type(prompts).__name__, "text, a list of texts, or lists of token ids")
    if len(prompts) and isinstance(prompts[0], int | np.integer):
        return [cast(Prompt, prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def _ids(ids: Sequence[str], count: int) -> list[str]:
    """The ids, one for each of `count` prompts. Raises RequestsMismatched."""
    if isinstance(ids, str) or not isinstance(ids, Sequence) or not all(isinstance(name, str) for name in ids):
        raise RequestsMismatched("ids", shown(ids), "a list of texts", remedy="give each prompt an id, or none")
    if len(ids) != count:
        raise RequestsMismatched("ids", f"{len(ids)} for {count} prompts", count, remedy="give each prompt an id, or none")
    return list(ids)


def _for_each(params: SamplingParams | Sequence[SamplingParams] | None, names: Sequence[str]) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        shared = params or SamplingParams()
        seed = shared.seed
        return [shared if seed is None else shared.with_seed(request_seed(seed, i)) for i in range(len(names))]
    if not isinstance(params, Sequence) or not all(isinstance(own, SamplingParams) for own in params):
        raise RequestsMismatched("params", type(params).__name__, "SamplingParams, or a list of them")
    if len(params) != len(names):
        raise RequestsMismatched("params", f"{len(params)} for {len(names)} prompts", f"1 or {len(names)}")
    return list(params)
