"""Compressed entries, index keys and scores, candidate blocks, selection (model spec 4.4 to 4.6).

Promises: every set is a function of the position alone, so chunking cannot change it; ties go to the lowest id.
Index scores leave out lambda (a constant factor that cannot change the order), as row 6 of model spec 13 recommends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .arithmetic import Arithmetic
from .attention import AttentionLayer, Keys
from .formats import Array

Carry = tuple[Array, Array]
"""The gate and latent `(g, e)`, each `[0 or 1, D]`, of a ratio-2 token whose partner has not arrived."""


@dataclass(frozen=True)
class IndexSettings:
    """Index heads, their width, entries selected, candidate blocks kept and entries per block."""

    heads: int
    width: int
    top: int
    blocks: int
    block_size: int


@dataclass(frozen=True)
class Selection:
    """Entry ids `[n, min(K, entries)]` per row, and which of these slots are filled."""

    ids: Array
    filled: Array

    def rows(self) -> list[Array]:
        """The selected ids of each row, ascending."""
        return [np.sort(ids[filled]) for ids, filled in zip(self.ids, self.filled, strict=True)]


def no_carry(width: int, arithmetic: Arithmetic) -> Carry:
    """The carry at the start of a sequence: no token waits."""
    empty = np.zeros((0, width), arithmetic.dtype)
    return empty, empty


def compress(x: Array, carry: Carry, ratio: int, layer: AttentionLayer) -> tuple[Array, Carry]:
    """Latents `c_j` `[groups completed, D]` of the rows `x` and the new carry (model spec 4.4)."""
    compressor = layer.block.under("attn.compressor")
    latents = x @ compressor.matrix("wkv").T
    if ratio == 1:
        return _normed_latents(latents, layer), carry
    gates = np.concatenate((carry[0], x @ compressor.matrix("wgate").T))
    latents = np.concatenate((carry[1], latents))
    paired = len(gates) // 2 * 2
    pooled = pool_pairs(gates[:paired], latents[:paired])
    return _normed_latents(pooled, layer), (gates[paired:], latents[paired:])


def pool_pairs(gates: Array, latents: Array) -> Array:
    """Softmax over the two tokens of each pair, per channel: `[2m, D]` to `[m, D]`, unrounded."""
    g = gates.reshape(-1, 2, gates.shape[1])
    alpha = np.exp(g - g.max(axis=1, keepdims=True))
    alpha = alpha / alpha.sum(axis=1, keepdims=True)
    result: Array = (alpha * latents.reshape(g.shape)).sum(axis=1)
    return result


def index_keys(latents: Array, positions: Array, layer: AttentionLayer) -> Array:
    """Index keys `[m, ID]` from the unrotated, unquantised latents (model spec 4.5)."""
    projected = layer.arithmetic.linear(latents, layer.block.matrix("attn.indexer.wk"))
    weight = layer.block.array("attn.indexer.k_norm.weight")
    normed = layer.arithmetic.rms(projected, weight, layer.settings.norm_epsilon)
    return layer.arithmetic.q4idx(layer.rotation.apply(normed, positions))


def entries(latents: Array, positions: Array, layer: AttentionLayer) -> Array:
    """Stored entries `[m, D]`: rotated at the first token of their group, then quantised (model spec 4.4)."""
    return layer.arithmetic.q4main(layer.rotation.apply(latents, positions))


def index_scores(x: Array, latent: Array, positions: Array, keys: Array, settings: IndexSettings, layer: AttentionLayer) -> Array:
    """Scores `[n, entries]` of all entries, one rounding of the final sum; visibility is not applied here."""
    indexer = layer.block.under("attn.indexer")
    projected = layer.arithmetic.quantised_linear(latent, indexer.matrix("wq_b"))
    heads = projected.reshape(-1, settings.heads, settings.width)
    queries = layer.arithmetic.q4idx(layer.rotation.apply(heads, positions))
    weights = layer.arithmetic.linear(x, indexer.matrix("weights_proj"))
    per_head = np.maximum(queries.reshape(-1, settings.width) @ keys.T, 0).reshape(len(x), settings.heads, len(keys))
    return layer.arithmetic.bf16((weights[:, None, :] @ per_head)[:, 0])


def within_visible(scores: Array, visible: Array) -> Array:
    """The scores with entries at and beyond `visible` `[n]` = n_t set to `-inf`."""
    return np.where(np.arange(scores.shape[1]) < visible[:, None], scores, -np.inf)


def candidate_blocks(scores: Array, visible: Array, settings: IndexSettings) -> Array:
    """Which blocks `[n, ceil(entries / CS)]` are candidates of each row (model spec 4.6)."""
    count = -(-scores.shape[1] // settings.block_size)
    padded = np.full((len(scores), count * settings.block_size), -np.inf, scores.dtype)
    padded[:, : scores.shape[1]] = scores
    best = padded.reshape(len(scores), count, settings.block_size).max(axis=2)
    rows = np.flatnonzero(visible)
    best[rows, (visible[rows] - 1) // settings.block_size] = np.inf
    order = np.argsort(-best, axis=1, kind="stable")[:, : settings.blocks]
    chosen = np.zeros(best.shape, bool)
    np.put_along_axis(chosen, order, True, axis=1)
    result: Array = chosen & (best > -np.inf)
    return result


def within_candidates(scores: Array, chosen: Array, settings: IndexSettings) -> Array:
    """The scores with everything outside the chosen blocks set to `-inf`."""
    allowed = np.repeat(chosen, settings.block_size, axis=1)[:, : scores.shape[1]]
    return np.where(allowed, scores, -np.inf)


def select(scores: Array, top: int) -> Selection:
    """The `min(top, finite scores)` largest scores of each row, lowest id first among equals."""
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :top]
    return Selection(ids, np.take_along_axis(scores, ids, axis=1) > -np.inf)


def entry_keys(stored: Array, selection: Selection) -> Keys:
    """The selected entries of each row as attention keys."""
    return Keys(stored[selection.ids], selection.filled)


def _normed_latents(latents: Array, layer: AttentionLayer) -> Array:
    weight = layer.block.array("attn.compressor.norm.weight")
    return layer.arithmetic.rms(layer.arithmetic.bf16(latents), weight, layer.settings.norm_epsilon)
