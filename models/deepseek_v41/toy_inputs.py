"""Seeded inputs for a module of the text model: what a step of two short sequences would give it, with random weights.

For running a graph where no checkpoint is: checks between passes, tests of lowerings. Values passed between functions are the functions' own.
"""

import hashlib
from typing import Any

import numpy as np

from tapeout.dialects.format import Number, Scaled, Scaling, encode, scale_values
from tapeout.dialects.state import State, block_rows, empty, ring_rows
from tapeout.dialects.types import Blocks, Ring, Tensor, View
from tapeout.models.deepseek_v41.config import ModelConfig
from tapeout.models.deepseek_v41.graph import GraphOptions

LENGTHS = (5, 3)
"""Rows of the two sequences of the toy step."""


def toy_input(name: str, view: Tensor, config: ModelConfig, options: GraphOptions) -> Any:
    """A host-filled input of a step of `LENGTHS` rows; raises KeyError for a name that no host fills."""
    i32, lengths = np.int32, LENGTHS[: options.max_sequences]
    ends = np.cumsum(lengths)
    rows, sequences = int(ends[-1]), len(lengths)
    positions = np.concatenate([np.arange(n) for n in lengths]).astype(i32)
    slots = np.repeat(np.arange(sequences), lengths).astype(i32)
    starts, all_ends = (np.repeat(v, lengths).astype(i32) for v in (ends - lengths, ends))
    tokens = _random("tokens").integers(3, config.text.vocab_size // 2, rows).astype(i32)
    tables = np.arange(options.max_sequences * options.max_blocks, dtype=i32).reshape(-1, options.max_blocks)
    last = (ends - 1).astype(i32)
    given: dict[str, Any] = {
        "tokens": tokens,
        "positions": positions,
        "slots": slots,
        "starts": starts,
        "ends": all_ends,
        "floors": np.zeros(rows, i32),
        "block_table": tables,
        "kept": np.arange(rows, dtype=i32),
        "kept_starts": starts,
        "kept_ends": all_ends,
        "kept_floors": np.zeros(rows, i32),
        "outputs": last,
        "temperature": np.array([0.0, 0.8], np.float32)[:sequences],
        "top_k": np.full(sequences, -1, i32),
        "top_p": np.full(sequences, 0.9, np.float32),
        "seeds": np.arange(sequences, dtype=np.int64) + 7,
        "sample_slots": np.arange(sequences, dtype=i32),
        "sample_positions": positions[last],
        "golden_rows": np.arange(sequences, dtype=i32),
        "draft_positions": positions[last],
        "draft_slots": np.arange(sequences, dtype=i32),
    }
    given |= {f"draft_{key}": given[key] for key in ("temperature", "top_k", "top_p", "seeds")}
    return given[name]


def toy_weight(name: str, view: Tensor) -> Any:
    """Random numbers of a weight's format, every block with an exponent of its own; the same for a name every time."""
    random, shape = _random(name), view.sized(0)
    if not view.number.is_float:
        return random.integers(0, 100, shape).astype(np.int32)
    values = random.normal(0.0, shape[-1] ** -0.5 if len(shape) > 1 else 1.0, shape)
    scaling = view.number.scaling
    return encode(values, view.number) if scaling is None else _scaled(values, view.number, scaling, random)


def _scaled(values: Any, number: Number, scaling: Scaling, random: np.random.Generator) -> Scaled:
    """Codes under random scales; blocks of 32 x 32 have no quantizer of their own."""
    scales = random.integers(118, 124, [n or 0 for n in scaling.blocks(values.shape)]).astype(np.uint8)
    factors = np.repeat(scale_values(scales, scaling.scale), scaling.columns, axis=-1)
    factors = np.repeat(factors, scaling.rows, axis=-2) if scaling.rows > 1 else factors
    codes = encode(np.clip(values / factors[..., : values.shape[-2], : values.shape[-1]], -4.0, 4.0), Number(number.element))
    assert not isinstance(codes, Scaled), number
    return Scaled(codes, scales, scaling)


def toy_state(view: View, options: GraphOptions) -> State:
    """An empty state with room for one toy step."""
    match view:
        case Ring():
            return empty(view.entry, ring_rows(view, options.max_sequences, options.max_sequences * 8))
        case Blocks():
            return empty(view.entry, block_rows(view, options.max_sequences * options.max_blocks, options.block_tokens))
    raise TypeError(f"{view} is no state handle")


def _random(name: str) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))
