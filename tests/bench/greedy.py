"""Greedy tokens of an artifact on whatever device it is for, straight over its programs: prompts in waves of slots, decode all at once.

Needs the runtime only. What two devices made of the same prompts is compared by the gap rule: tokens must agree while the best logit leads
by more than the model's own noise; behind an allowed difference a prompt is not followed further.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapeout.models.deepseek_v41.checkpoint import open_checkpoint
from tapeout.models.deepseek_v41.config import ModelConfig, parse_config
from tapeout.models.deepseek_v41.slice import SliceTensors
from tapeout.models.deepseek_v41.token_map import load_token_map
from tapeout.models.deepseek_v41.tokenizer import load_tokenizer
from tapeout.runtime.artifact import Artifact
from tapeout.runtime.device import Device
from tapeout.runtime.program import Draw, LoadedPrograms, StepRows
from tapeout.runtime.weights import BoundWeights, bind_weights

FIRST_TEXT, LAST_TEXT = 3, 259  # ids of the tiny tokenizer's bytes; ordinary ids of any vocabulary


@dataclass(frozen=True)
class Answer:
    """Tokens, and for each the lead of its logit over the next best."""

    tokens: list[int]
    leads: list[float]


RANDOM = Path("random")
"""Stands for a checkpoint of random weights that is never written (models/deepseek_v41/slice.py)."""


def bound_weights(artifact: Artifact, weights: Path) -> BoundWeights:
    """The weights of a checkpoint folder, or of none."""
    config = parse_config(artifact.manifest.model.config)
    if weights == RANDOM:
        return bind_weights(artifact.weights, SliceTensors(config), partial(any_token_map, config))
    checkpoint = open_checkpoint(weights, config, ("text", "draft"))
    tokenizer = load_tokenizer(weights, config)
    return bind_weights(artifact.weights, checkpoint, lambda: load_token_map(weights, config, tokenizer))


def any_token_map(config: ModelConfig) -> NDArray[np.int32]:
    """A map of token ids that reaches every compressed id."""
    ids = np.arange(config.text.vocab_size, dtype=np.int64)
    return (ids * 7919 % config.text.engram_compressed_vocab_size).astype(np.int32)


def load_programs(artifact: Artifact, weights: Path | BoundWeights, device: Device) -> LoadedPrograms:
    """The artifact's programs with every slot's blocks in place."""
    bound = bound_weights(artifact, weights) if isinstance(weights, Path) else weights
    options = artifact.manifest.options
    blocks = -(-options.max_context // options.block_tokens)
    programs = LoadedPrograms(artifact, bound, device, 1 + options.max_sequences * blocks)
    table = programs.array("block_table")
    table[:, :blocks] = 1 + np.arange(options.max_sequences * blocks).reshape(-1, blocks)
    return programs


def prompts_of(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Random text of 1 to `longest` tokens."""
    random = np.random.default_rng(seed)
    return [[int(t) for t in random.integers(FIRST_TEXT, LAST_TEXT, random.integers(1, longest + 1))] for _ in range(count)]


def answers(
    programs: LoadedPrograms, prompts: Sequence[Sequence[int]], count: int, chunk: int | None = None, *, leads: bool = True
) -> list[Answer]:
    """`count` greedy tokens of every prompt; prompts are read whole, or in chunks of `chunk` rows. Leads need every step's logits."""
    left, out = iter(prompts), []
    while wave := list(islice(left, programs.artifact.manifest.options.max_sequences)):
        out += _wave(programs, [list(prompt) for prompt in wave], count, chunk or programs.artifact.buckets[-1], leads)
    return out


def _wave(programs: LoadedPrograms, texts: list[list[int]], count: int, chunk: int, leads: bool) -> list[Answer]:
    made = [Answer([], []) for _ in texts]
    for slot, prompt in enumerate(texts):
        for first in range(0, len(prompt), chunk):
            piece = prompt[first : first + chunk]
            rows = StepRows()
            rows.add(slot, first, piece)
            last = first + len(piece) == len(prompt)
            _run(programs, rows, [(made[slot], slot, len(prompt))] if last else [], leads)
    for _ in range(count - 1):
        rows, wanted = StepRows(), []
        for slot, (prompt, answer) in enumerate(zip(texts, made, strict=True)):
            position = len(prompt) + len(answer.tokens) - 1
            rows.add(slot, position, [answer.tokens[-1]])
            wanted.append((answer, slot, position + 1))
        _run(programs, rows, wanted, leads)
    return made


def _run(programs: LoadedPrograms, rows: StepRows, wanted: list[tuple[Answer, int, int]], leads: bool) -> None:
    """One step; each wanted row, the last of its sequence, adds a token to its answer."""
    ends = {slot: number for number, slot in enumerate(rows.slots)}
    rows.outputs += [ends[slot] for _, slot, _ in wanted]
    rows.draws += [Draw(0.0, -1, 1.0, 0, slot, position) for _, slot, position in wanted]
    programs.step(rows, drafting=False, logits=leads)
    logits, sampled = programs.array("logits"), programs.array("sampled")
    for number, (answer, _, _) in enumerate(wanted):
        answer.tokens.append(int(sampled[number]))
        if leads:
            best = np.partition(logits[number].astype(np.float64), -2)[-2:]
            answer.leads.append(float(best[1] - best[0]))


def last_logits(programs: LoadedPrograms, prompts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
    """Logits [prompts, V] behind each prompt, read whole in slot 0."""
    out = []
    for prompt in prompts:
        rows = StepRows()
        rows.add(0, 0, list(prompt))
        rows.outputs.append(len(prompt) - 1)
        programs.forward(rows)
        out.append(programs.array("logits")[0].astype(np.float32))
    return np.array(out)


def compared(found: Sequence[Answer], expected: Sequence[Answer], noise: float) -> dict[str, Any]:
    """Counts of tokens equal before a first difference, of whole prompts equal, and every difference where the lead exceeds `noise`."""
    same = whole = total = 0
    wrong = []
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        total += len(other.tokens)
        agree = next((i for i, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=True)) if a != b), len(other.tokens))
        same += agree
        whole += agree == len(other.tokens)
        if agree < len(other.tokens) and other.leads[agree] > noise:
            tokens = {"found": one.tokens[agree], "expected": other.tokens[agree]}
            wrong.append({"prompt": number, "token": agree, **tokens, "lead": other.leads[agree]})
    return {"prompts": len(expected), "prompts_equal": whole, "tokens": total, "tokens_equal": same, "wrong": wrong, "noise": noise}
