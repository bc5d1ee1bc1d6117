"""Plays the runtime over the graph with the interpreter: fills host inputs, runs step, encoder, decoder, sample and draft, keeps states.

Rings and blocks start as NaN and each sequence's blocks lie scattered, so that a read of a row nobody wrote shows in every logit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapeout.dialects._mlir import ir
from tapeout.dialects.format import DTYPES, Scaled
from tapeout.dialects.interpreter import Interpreter
from tapeout.dialects.state import State, block_rows, empty, ring_rows
from tapeout.dialects.types import Ring
from tapeout.models.deepseek_v41.config import ModelConfig
from tapeout.models.deepseek_v41.graph import GraphOptions
from tapeout.models.deepseek_v41.graph_states import state_sources
from tapeout.models.deepseek_v41.rope import rope_frequencies
from tapeout.models.deepseek_v41.weights import Rotary, TokenMap, WeightSource, weight_sources

Array = NDArray[Any]
FUNCTIONS = ("step", "encoder", "decoder", "sample", "draft")


@dataclass(frozen=True)
class Chunk:
    """Tokens that one sequence processes in one step; -1 stands for the token it sampled last.

    The decoder sees the last `keep` rows, of which the last `ask` get logits; None means all.
    """

    slot: int
    tokens: Sequence[int]
    keep: int | None = None
    ask: int | None = None

    @property
    def kept(self) -> int:
        return len(self.tokens) if self.keep is None else min(self.keep, len(self.tokens))

    @property
    def asked(self) -> int:
        return self.kept if self.ask is None else min(self.ask, self.kept)


@dataclass(frozen=True)
class Played:
    """Results of one chunk: logits [asked, V], the tokens sampled from them, the block drafted behind the last and its confidences."""

    logits: Array
    sampled: Array
    logprobs: Array
    drafts: Array
    confidences: Array


class Player:
    """An engine of `options.max_sequences` slots; `play` runs one step. `values` holds everything that passed between functions."""

    def __init__(self, module: ir.Module, config: ModelConfig, options: GraphOptions, tensor: Callable[[str], Array], token_map: Array,
                 staging: int = 256) -> None:
        self._options = options
        self._functions = {f.name.value: (Interpreter(f), _names(f.arg_attrs), _names(f.attributes["res_attrs"])) for f in module.body}
        sources = weight_sources(config, options.max_context + config.text.dspark_block_size)
        self._weights = {name: operand(config, source, tensor, token_map) for name, source in sources.items()}
        self.states = {name: self._state(source.view, staging) for name, source in state_sources(config).items()}
        self.lengths = np.zeros(options.max_sequences, np.int32)
        blocks = np.random.default_rng(5).permutation(options.max_sequences * options.max_blocks)
        self.values: dict[str, Any] = {"block_table": blocks.reshape(options.max_sequences, -1).astype(np.int32)}

    def _state(self, view: Any, staging: int) -> State:
        options = self._options
        count = options.max_sequences * options.max_blocks
        rows = ring_rows(view, options.max_sequences, staging) if isinstance(view, Ring) else block_rows(view, count, options.block_tokens)
        state = empty(view.entry, rows)
        if isinstance(state.value, np.ndarray) and state.value.dtype == np.float64:
            state.value.fill(np.nan)
        return state

    def play(self, chunks: Sequence[Chunk], functions: Sequence[str] = FUNCTIONS, **settings: Any) -> list[Played]:
        """Runs one step on `chunks` of different slots; `settings` are temperature, top_k, top_p, seeds for all rows alike."""
        self.values |= _rows(chunks, self.lengths) | _kept_rows(chunks, self.lengths) | _sampling(chunks, self.lengths, settings)
        for name in functions:
            self._run(name)
        for chunk in chunks:
            self.lengths[chunk.slot] += len(chunk.tokens)
        return self._played(chunks) if tuple(functions) == FUNCTIONS else []

    def _run(self, function: str) -> None:
        interpreter, taken, made = self._functions[function]
        results = interpreter.run(*(self._operand(kind, name) for kind, name in taken))
        self.values |= dict(zip((name for _, name in made), results, strict=True))

    def _operand(self, kind: str, name: str) -> Any:
        match kind:
            case "state":
                return self.states[name]
            case "input":
                return self.values[name]
        return self._weights[name]

    def _played(self, chunks: Sequence[Chunk]) -> list[Played]:
        ends = np.cumsum([chunk.asked for chunk in chunks])
        per_row = [np.split(self.values[name], ends[:-1]) for name in ("logits", "sampled", "logprobs")]
        return [Played(*rows, drafts, confidences) for *rows, drafts, confidences
                in zip(*per_row, self.values["drafts"], self.values["confidences"], strict=True)]


def _names(attributes: Any) -> list[tuple[str, str]]:
    """(kind, name) of arguments or results; results have no kind."""
    rows = [{a.name: ir.StringAttr(a.attr).value for a in ir.DictAttr(row)} for row in attributes]
    return [(row.get("tapeout.kind", ""), row["tapeout.name"]) for row in rows]


def _i32(values: Any) -> Array:
    return np.asarray(values, np.int32).reshape(-1)


def _bounds(counts: Sequence[int]) -> tuple[Array, Array]:
    """For every row, the first row of its sequence and the row after its last."""
    ends = np.cumsum(counts)
    return _i32(np.repeat(ends - counts, counts)), _i32(np.repeat(ends, counts))


def _rows(chunks: Sequence[Chunk], lengths: Array) -> dict[str, Array]:
    counts = [len(chunk.tokens) for chunk in chunks]
    starts, ends = _bounds(counts)
    return {
        "tokens": _i32(np.concatenate([chunk.tokens for chunk in chunks])),
        "positions": _i32(np.concatenate([lengths[c.slot] + np.arange(len(c.tokens)) for c in chunks])),
        "slots": _i32(np.repeat([chunk.slot for chunk in chunks], counts)),
        "starts": starts,
        "ends": ends,
        "floors": np.zeros(sum(counts), np.int32),
    }


def _kept_rows(chunks: Sequence[Chunk], lengths: Array) -> dict[str, Array]:
    """The last rows of every chunk, and which of them get logits. Where rows were dropped, windows start at the first kept position."""
    ends = np.cumsum([len(chunk.tokens) for chunk in chunks])
    counts = [chunk.kept for chunk in chunks]
    starts, kept_ends = _bounds(counts)
    floors = [0 if c.kept == len(c.tokens) else lengths[c.slot] + len(c.tokens) - c.kept for c in chunks]
    return {
        "kept": _i32(np.concatenate([np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])),
        "kept_starts": starts,
        "kept_ends": kept_ends,
        "kept_floors": _i32(np.repeat(floors, counts)),
        "outputs": _i32(np.concatenate([np.arange(e - c.asked, e) for e, c in zip(np.cumsum(counts), chunks, strict=True)])),
    }


def _sampling(chunks: Sequence[Chunk], lengths: Array, settings: Mapping[str, Any]) -> dict[str, Array]:
    counts = [chunk.asked for chunk in chunks]
    last = _i32([lengths[c.slot] + len(c.tokens) - 1 for c in chunks])
    slots = _i32([chunk.slot for chunk in chunks])
    given = {"temperature": (0.0, np.float32), "top_k": (-1, np.int32), "top_p": (1.0, np.float32), "seeds": (0, np.int64)}
    values = {name: dtype(settings.get(name, default)) for name, (default, dtype) in given.items()}
    backwards = np.concatenate([np.arange(count - 1, -1, -1) for count in counts])
    return {
        **{name: np.full(sum(counts), value) for name, value in values.items()},
        **{f"draft_{name}": np.full(len(chunks), value) for name, value in values.items()},
        "sample_slots": _i32(np.repeat(slots, counts)),
        "sample_positions": _i32(np.repeat(last, counts) - backwards + 1),
        "golden_rows": _i32(np.cumsum(counts) - 1),
        "draft_positions": last,
        "draft_slots": slots,
    }


# -- weights


def operand(config: ModelConfig, source: WeightSource, tensor: Callable[[str], Array], token_map: Array) -> Any:
    """The value of a weight operand as the interpreter takes it: checkpoint bytes in their storage format, or a derived table."""
    match source.derived:
        case Rotary(ratio=ratio, rows=rows):
            angles = np.arange(rows, dtype=np.float32)[:, None] * rope_frequencies(config.text, ratio).astype(np.float32)
            return np.concatenate((np.cos(angles.astype(np.float64)), np.sin(angles.astype(np.float64))), axis=1)
        case TokenMap():
            return np.asarray(token_map, np.int32)
    number = source.view.number
    stored = _joined(source, source.tensors, tensor)
    codes = _unpacked(stored) if number.element == "f4E2M1FN" else stored.view(DTYPES[number.element])
    if codes.shape != source.view.shape:
        raise ValueError(f"{source.tensors[0]} has shape {codes.shape}, expected {source.view.shape}")
    return codes if number.scaling is None else Scaled(codes, _joined(source, source.scales, tensor).view(np.uint8), number.scaling)


def _joined(source: WeightSource, names: Sequence[str], tensor: Callable[[str], Array]) -> Array:
    arrays, each = [np.asarray(tensor(name)) for name in names], max(1, len(source.rows))
    matrices = [np.concatenate(arrays[i : i + each]) for i in range(0, len(arrays), each)]
    return np.stack(matrices) if len(source.view.shape) == 3 else matrices[0]


def _unpacked(packed: Array) -> Array:
    """Two E2M1 codes of a byte, the low nibble first (docs/model.md 9.2)."""
    nibbles = np.stack((packed.view(np.uint8) & 15, packed.view(np.uint8) >> 4), axis=-1)
    return nibbles.reshape(*packed.shape[:-1], -1).view(DTYPES["f4E2M1FN"])
