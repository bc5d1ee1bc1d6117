"""DSpark: features of the main model, the stages' windows, and one drafting step (model spec 7).

Promises: drafting reads the state and never changes it; all rows of the draft block see each other. Leaves to others:
which layers are tapped, verification.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .arithmetic import Arithmetic
from .attention import (
    AttentionLayer,
    Keys,
    attend,
    output_projection,
    query_heads,
    query_latent,
    window_vectors,
)
from .formats import Array
from .mixer import collapse, run_sublayer, start_streams
from .moe import moe
from .parameters import Parameters
from .state import DraftOutput
from .topology import Settings


def stage_name(stage: int) -> str:
    """The name of a draft stage's tensors and of its window."""
    return f"mtp.{stage}"


def main_features(features: Array, parameters: Parameters, norm_epsilon: float, arithmetic: Arithmetic) -> Array:
    """Projected and normed features `[n, H]` that all stages see (model spec 7.1)."""
    first = parameters.under(stage_name(0))
    projected = arithmetic.quantised_linear(features, first.matrix("main_proj"))
    return arithmetic.rms(projected, first.array("main_norm.weight"), norm_epsilon)


def draft(
    windows: list[Array],
    length: int,
    golden_token: int,
    sample: Callable[[Array], int],
    parameters: Parameters,
    layers: list[AttentionLayer],
    settings: Settings,
    arithmetic: Arithmetic,
) -> DraftOutput:
    """Drafts B tokens behind `golden_token`, which sits at position `length`."""
    hidden = _draft_hidden(windows, length, golden_token, parameters, layers, settings, arithmetic)
    last = parameters.under(stage_name(settings.stages - 1))
    normed = arithmetic.rms(hidden, last.array("norm.weight"), settings.attention.norm_epsilon)
    base = normed @ parameters.matrix("head").T
    markov, confidence = last.matrix("markov_head.head"), last.matrix("confidence_head.proj")[0]
    tokens, logits, confidences = [], [], []
    previous = golden_token
    for row in range(settings.drafts):
        embedded = last.rows("markov_head.embed", np.array([previous]))[0]
        logits.append(base[row] + markov @ embedded)
        confidences.append(confidence @ np.concatenate((hidden[row], embedded)))
        previous = int(sample(logits[-1]))
        tokens.append(previous)
    return DraftOutput(np.array(tokens, np.int64), np.stack(logits), np.array(confidences), hidden)


def _draft_hidden(
    windows: list[Array],
    length: int,
    golden_token: int,
    parameters: Parameters,
    layers: list[AttentionLayer],
    settings: Settings,
    arithmetic: Arithmetic,
) -> Array:
    """The collapsed rows `[B, H]` behind the last stage."""
    inputs = np.full(settings.drafts, settings.noise_token, np.int64)
    inputs[0] = golden_token
    positions = length + np.arange(settings.drafts)
    streams, pre_mix = start_streams(parameters.rows("embed", inputs), settings.mixer.streams)
    for layer, window in zip(layers, windows, strict=True):

        def attention(x: Array, layer: AttentionLayer = layer, window: Array = window) -> Array:
            return _draft_attention(x, positions, window, layer)

        def experts(x: Array, layer: AttentionLayer = layer) -> Array:
            return moe(x, layer.block, settings.draft_moe, arithmetic)

        for kind, sublayer in (("attn", attention), ("ffn", experts)):
            streams, pre_mix = run_sublayer(layer.block, kind, streams, pre_mix, sublayer, settings.mixer, arithmetic)
    return collapse(streams, pre_mix, arithmetic)


def _draft_attention(x: Array, positions: Array, window: Array, layer: AttentionLayer) -> Array:
    """Every row sees the stage's window and all rows of the block: no causal mask (model spec 7.2)."""
    queries = query_heads(query_latent(x, layer), positions, layer)
    vectors = np.concatenate((window, window_vectors(x, positions, layer)))[None]
    keys = Keys(vectors, np.ones(vectors.shape[:2], bool))
    heads = attend(queries, keys, layer.block.array("attn.attn_sink"), layer.arithmetic)
    return output_projection(heads, positions, layer)
