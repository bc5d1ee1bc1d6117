"""One backbone layer's attention for one position, restated row by row with its own rounding, for the reference's tests.

Promises: shares no code with the reference but the tensor decoding; every set is built with Python lists. Slow on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tapeout.models.deepseek_v41.config import ModelConfig
from tapeout.models.deepseek_v41.reference.parameters import Parameters

Array = NDArray[Any]
Rounding = Callable[[Array], Array]


@dataclass(frozen=True)
class Roundings:
    """The casts of model spec 9.6 that attention uses."""

    bf16: Rounding
    q8: Rounding
    q4main: Rounding
    q4idx: Rounding


def _keep(x: Array) -> Array:
    return x


def _bf16(x: Array) -> Array:
    return np.asarray(x).astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def _grouped(size: int, one: Callable[[Array], Array]) -> Rounding:
    return lambda x: np.concatenate([one(x[i : i + size]) for i in range(0, len(x), size)])


def _power(x: float) -> float:
    return float(2.0 ** math.ceil(math.log2(x)))


def _e4m3(x: Array) -> Array:
    return np.asarray(x).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def _e2m1(x: Array) -> Array:
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    distance = np.abs(np.abs(x)[:, None] - table)
    even_first = np.argsort(distance + np.array([0, 1e-12] * 4), axis=1, kind="stable")[:, 0]
    signed: Array = np.copysign(table[even_first], x)
    return signed


def _q8_group(g: Array) -> Array:
    scale = _power(max(float(np.abs(g).max()), 1e-4) / 448)
    return _e4m3(g / scale) * scale


def _q4main_group(g: Array) -> Array:
    scale = float(_e4m3(np.array(min(448.0, max(float(np.abs(g).max()), 6 * 2.0**-9) / 6))))
    return _e2m1(g / scale) * scale


def _q4idx_group(g: Array) -> Array:
    scale = _power(max(float(np.abs(g).max()), 6 * 2.0**-126) / 6)
    return _e2m1(g / scale) * scale


EXACT = Roundings(_keep, _keep, _keep, _keep)
FAITHFUL = Roundings(_bf16, _grouped(32, _q8_group), _grouped(16, _q4main_group), _grouped(32, _q4idx_group))


@dataclass(frozen=True)
class NaiveAttention:
    """`inputs[layer]` are the normed rows `[T, H]` that each layer's attention received."""

    config: ModelConfig
    parameters: Parameters
    rounding: Roundings
    inputs: dict[int, Array]
    fp32_tables: bool

    def output(self, layer: int, t: int) -> Array:
        """The attention output `[H]` of `layer` at position `t`."""
        text, p = self.config.text, self.parameters.under(f"layers.{layer}.attn")
        bf16, q8 = self.rounding.bf16, self.rounding.q8
        heads = bf16(p.matrix("wq_b") @ q8(self.latent(layer, t))).reshape(text.num_attention_heads, -1)
        keys = [self.window(layer, u) for u in range(max(0, t - text.sliding_window + 1), t + 1)]
        keys += [self.entry(layer, j) for j in self.selected(layer, t)]
        outs = []
        for h, head in enumerate(heads):
            q = self.turn(layer, head, t)
            weights = [math.exp(float(q @ v) * text.head_dim**-0.5) for v in keys]
            total = sum(weights) + math.exp(float(p.array("attn_sink")[h]))
            mixed = sum((w / total * v for w, v in zip(weights, keys, strict=True)), np.zeros(text.head_dim))
            outs.append(self.turn(layer, bf16(mixed), t, sign=-1.0))
        grouped = np.concatenate(outs).reshape(text.o_groups, -1)
        wo_a = p.matrix("wo_a").reshape(text.o_groups, text.o_lora_rank, -1)
        low = np.concatenate([bf16(w @ group) for w, group in zip(wo_a, grouped, strict=True)])
        return bf16(p.matrix("wo_b") @ q8(low))

    def latent(self, layer: int, t: int) -> Array:
        p = self.parameters.under(f"layers.{layer}.attn")
        x = self.rounding.bf16(p.matrix("wq_a") @ self.rounding.q8(self.inputs[layer][t]))
        return self.norm(x, p.array("q_norm.weight"))

    def window(self, layer: int, u: int) -> Array:
        p = self.parameters.under(f"layers.{layer}.attn")
        x = self.rounding.bf16(p.matrix("wkv") @ self.rounding.q8(self.inputs[layer][u]))
        return self.rounding.q8(self.turn(layer, self.norm(x, p.array("kv_norm.weight")), u))

    def compressed(self, layer: int, j: int) -> Array:
        """The latent `c_j` of the layer's KV source, from the source's own inputs."""
        source = max(s for s in self.config.text.kv_source_layer_ids if s <= layer)
        p, x = self.parameters.under(f"layers.{source}.attn.compressor"), self.inputs[source]
        if self.config.text.compress_ratios[source] == 1:
            pooled = p.matrix("wkv") @ x[j]
        else:
            gates = np.exp([p.matrix("wgate") @ x[2 * j], p.matrix("wgate") @ x[2 * j + 1]])
            alpha = gates / gates.sum(axis=0)
            pooled = alpha[0] * (p.matrix("wkv") @ x[2 * j]) + alpha[1] * (p.matrix("wkv") @ x[2 * j + 1])
        return self.norm(self.rounding.bf16(pooled), p.array("norm.weight"))

    def entry(self, layer: int, j: int) -> Array:
        ratio = self.config.text.compress_ratios[layer]
        return self.rounding.q4main(self.turn(layer, self.compressed(layer, j), j * ratio))

    def selected(self, layer: int, t: int) -> list[int]:
        """Entry ids that the layer reads at `t`, through its index source."""
        text = self.config.text
        if text.compress_ratios[layer] == 0:
            return []
        source = max(s for s in text.index_source_layer_ids if s <= layer)
        scores = self.scores(source, t)
        allowed = list(range(len(scores)))
        if source > text.candidate_source_layer_id:
            blocks = self.candidates(t)
            allowed = [j for j in allowed if j // text.candidate_block_size in blocks]
        return sorted(sorted(allowed, key=lambda j: (-scores[j], j))[: text.index_topk])

    def candidates(self, t: int) -> list[int]:
        text = self.config.text
        scores, size = self.scores(text.candidate_source_layer_id, t), text.candidate_block_size
        best = {b: max(scores[b * size : b * size + size]) for b in range(-(-len(scores) // size))}
        best[(len(scores) - 1) // size] = math.inf
        return sorted(sorted(best, key=lambda b: (-best[b], b))[: text.candidate_topk_blocks])

    def scores(self, source: int, t: int) -> list[float]:
        text, p = self.config.text, self.parameters.under(f"layers.{source}.attn.indexer")
        keys = self.parameters.under(f"layers.{max(s for s in text.kv_source_layer_ids if s <= source)}.attn.indexer")
        bf16, q4idx = self.rounding.bf16, self.rounding.q4idx
        heads = bf16(p.matrix("wq_b") @ self.rounding.q8(self.latent(source, t))).reshape(text.index_n_heads, -1)
        queries = [q4idx(self.turn(source, head, t)) for head in heads]
        weights = bf16(p.matrix("weights_proj") @ self.inputs[source][t])
        ratio, result = text.compress_ratios[source], []
        for j in range((t + 1) // ratio):
            normed = self.norm(bf16(keys.matrix("wk") @ self.compressed(source, j)), keys.array("k_norm.weight"))
            key = q4idx(self.turn(source, normed, j * ratio))
            total = sum(float(w) * max(0.0, float(q @ key)) for w, q in zip(weights, queries, strict=True))
            result.append(float(bf16(np.array([total]))[0]))
        return result

    def stage_window(self, stage: int, feature: Array, u: int) -> Array:
        """The window vector of a draft stage from the features `f` of position `u` (model spec 7.1)."""
        first, p = self.parameters.under("mtp.0"), self.parameters.under(f"mtp.{stage}.attn")
        projected = self.rounding.bf16(first.matrix("main_proj") @ self.rounding.q8(feature))
        shared = self.norm(projected, first.array("main_norm.weight"))
        x = self.norm(self.rounding.bf16(p.matrix("wkv") @ self.rounding.q8(shared)), p.array("kv_norm.weight"))
        return self.rounding.q8(self.turn(self.config.layers + stage, x, u))

    def norm(self, x: Array, weight: Array) -> Array:
        return self.rounding.bf16(weight * x / math.sqrt(float(np.mean(x * x)) + 1e-20))

    def turn(self, layer: int, x: Array, position: int, sign: float = 1.0) -> Array:
        omega = self.config.rope_frequencies(self.config.text.compress_ratios[layer]).astype(np.float32)
        angle = (np.float32(position) * omega).astype(np.float64)
        phase = np.cos(angle) + 1j * np.sin(angle)
        if self.fp32_tables:
            phase = phase.astype(np.complex64).astype(np.complex128)
        tail = x[-2 * len(omega) :]
        pairs = (tail[::2] + 1j * tail[1::2]) * (phase if sign > 0 else phase.conj())
        turned = np.stack((pairs.real, pairs.imag), axis=1).reshape(-1)
        return self.rounding.bf16(np.concatenate((x[: -len(turned)], turned)))
