"""Queries, window keys, attention with a sink, grouped output projection (model spec 4.1, 4.3, 4.7, 4.8).

Promises: keys are values (one shared head); window and entries are concatenated, never deduplicated; the sink adds to
the denominator only; a row without keys yields zero. Leaves to others: which entries a row reads (`sparse.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .arithmetic import Arithmetic
from .formats import Array
from .parameters import Parameters
from .rope import Rotation


@dataclass(frozen=True)
class AttentionSettings:
    """Heads A, head width D, output groups G, window W and the epsilon of the norms."""

    heads: int
    width: int
    groups: int
    window: int
    norm_epsilon: float


@dataclass(frozen=True)
class AttentionLayer:
    """What the formulas of one layer's attention need besides rows: its tensors, rotation, widths and roundings."""

    block: Parameters
    rotation: Rotation
    settings: AttentionSettings
    arithmetic: Arithmetic


@dataclass(frozen=True)
class Keys:
    """BF16 keys `[n or 1, keys, D]`, which are also the values, and which of them each row sees `[n or 1, keys]`."""

    vectors: Array
    visible: Array


def query_latent(x: Array, layer: AttentionLayer) -> Array:
    """`c^q = rms(bf16(wq_a q8(x)); q_norm)`: `[n, QL]`."""
    latent = layer.arithmetic.quantised_linear(x, layer.block.matrix("attn.wq_a"))
    return layer.arithmetic.rms(latent, layer.block.array("attn.q_norm.weight"), layer.settings.norm_epsilon)


def query_heads(latent: Array, positions: Array, layer: AttentionLayer) -> Array:
    """Rotated query heads `[n, A, D]`; neither normed nor quantised."""
    heads = layer.arithmetic.quantised_linear(latent, layer.block.matrix("attn.wq_b"))
    return layer.rotation.apply(heads.reshape(-1, layer.settings.heads, layer.settings.width), positions)


def window_vectors(x: Array, positions: Array, layer: AttentionLayer) -> Array:
    """`s = q8(RoPE(rms(bf16(wkv q8(x)); kv_norm)))`: `[n, D]`, quantised over the rotated tail too."""
    latent = layer.arithmetic.quantised_linear(x, layer.block.matrix("attn.wkv"))
    normed = layer.arithmetic.rms(latent, layer.block.array("attn.kv_norm.weight"), layer.settings.norm_epsilon)
    return layer.arithmetic.q8(layer.rotation.apply(normed, positions))


def window_keys(kept: Array, new: Array, window: int) -> Keys:
    """Keys of positions `t-W+1 ... t` for each new row, from kept rows just before and the new rows themselves."""
    vectors = np.concatenate((kept, new))
    own = len(kept) + np.arange(len(new))
    index = own[:, None] - np.arange(window - 1, -1, -1)
    return Keys(vectors[np.maximum(index, 0)], index >= 0)


def joined(first: Keys, second: Keys) -> Keys:
    """Both sets of keys, side by side."""
    vectors = np.concatenate((first.vectors, second.vectors), axis=1)
    return Keys(vectors, np.concatenate((first.visible, second.visible), axis=1))


def attend(queries: Array, keys: Keys, sink: Array, arithmetic: Arithmetic) -> Array:
    """Attention with sink `[A]` for queries `[n, A, D]`; probabilities stay unrounded, the result is BF16."""
    scale = queries.dtype.type(queries.shape[-1] ** -0.5)
    logits = queries @ np.swapaxes(keys.vectors, 1, 2) * scale
    logits = np.where(keys.visible[:, None, :], logits, -np.inf)
    sinks = sink[None, :, None]
    largest = np.maximum(logits.max(axis=-1, keepdims=True, initial=-np.inf), sinks)
    unnormed = np.exp(logits - largest)
    total = np.add.reduce(unnormed, axis=-1, keepdims=True) + np.exp(sinks - largest)
    return arithmetic.bf16((unnormed / total) @ keys.vectors)


def output_projection(heads: Array, positions: Array, layer: AttentionLayer) -> Array:
    """Inverse rotation at the query position, `wo_a` per group on BF16, `wo_b`: `[n, A, D]` to `[n, H]`."""
    rows, groups = len(heads), layer.settings.groups
    by_group = np.swapaxes(layer.rotation.undo(heads, positions).reshape(rows, groups, -1), 0, 1)
    wo_a = layer.block.matrix("attn.wo_a").reshape(groups, -1, by_group.shape[-1])
    low_rank = layer.arithmetic.bf16(by_group @ np.swapaxes(wo_a, 1, 2))
    flat = np.swapaxes(low_rank, 0, 1).reshape(rows, -1)
    return layer.arithmetic.quantised_linear(flat, layer.block.matrix("attn.wo_b"))
