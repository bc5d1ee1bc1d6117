"""Single-pass hyper-connections: mixer coefficients, collapse and expand of the residual streams (model spec 3).

Promises: `pre` of a mixer is returned for the *next* sublayer and never applied at once (the shifted order of 3.3).
Leaves to others: the sublayers themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .arithmetic import Arithmetic, inverse_rms, sigmoid
from .formats import Array
from .parameters import Parameters


@dataclass(frozen=True)
class MixerSettings:
    """`hc_mult`, `hc_sinkhorn_iters`, `hc_eps` and the epsilon of the norms."""

    streams: int
    iterations: int
    epsilon: float
    norm_epsilon: float


@dataclass(frozen=True)
class Mixing:
    """Coefficients of one mixer: `pre` and `post` `[n, S]`, `comb` `[n, S source, S destination]`."""

    pre: Array
    post: Array
    comb: Array


def mixing(streams: Array, fn: Array, base: Array, scale: Array, settings: MixerSettings) -> Mixing:
    """Computes the coefficients of model spec 3.2 from streams `[n, S, H]`; nothing is rounded."""
    count = settings.streams
    flat = streams.reshape(streams.shape[0], -1)
    m = inverse_rms(flat, settings.norm_epsilon) * (flat @ fn.T)
    pre = sigmoid(m[:, :count] * scale[0] + base[:count]) + m.dtype.type(settings.epsilon)
    post = 2 * sigmoid(m[:, count : 2 * count] * scale[1] + base[count : 2 * count])
    logits = (m[:, 2 * count :] * scale[2] + base[2 * count :]).reshape(-1, count, count)
    return Mixing(pre, post, sinkhorn(logits, settings.iterations, settings.epsilon))


def sinkhorn(logits: Array, iterations: int, epsilon: float) -> Array:
    """Makes `[..., source, destination]` nearly doubly stochastic; columns first and last (model spec 3.2)."""
    eps = logits.dtype.type(epsilon)
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p = p / np.add.reduce(p, axis=-1, keepdims=True) + eps
    p = p / (np.add.reduce(p, axis=-2, keepdims=True) + eps)
    for _ in range(iterations - 1):
        p = p / (np.add.reduce(p, axis=-1, keepdims=True) + eps)
        p = p / (np.add.reduce(p, axis=-2, keepdims=True) + eps)
    result: Array = p
    return result


def start_streams(embedded: Array, count: int) -> tuple[Array, Array]:
    """Copies embeddings `[n, H]` to `count` streams with pre-mix (1, 0, 0, ...) (model spec 3.1)."""
    pre_mix = np.zeros((len(embedded), count), embedded.dtype)
    pre_mix[:, 0] = 1
    return np.repeat(embedded[:, None, :], count, axis=1), pre_mix


def collapse(streams: Array, pre_mix: Array, arithmetic: Arithmetic) -> Array:
    """`bf16(sum_i a_i X_i)`: `[n, S, H]` to `[n, H]`."""
    return arithmetic.bf16((pre_mix[:, None, :] @ streams)[:, 0])


def expand(output: Array, streams: Array, mix: Mixing, arithmetic: Arithmetic) -> Array:
    """`X'_j = bf16(post_j y + sum_i comb_ij X_i)`, one rounding (model spec 3.3)."""
    carried = np.swapaxes(mix.comb, 1, 2) @ streams
    return arithmetic.bf16(mix.post[:, :, None] * output[:, None, :] + carried)


def run_sublayer(
    block: Parameters,
    kind: str,
    streams: Array,
    pre_mix: Array,
    sublayer: Callable[[Array], Array],
    settings: MixerSettings,
    arithmetic: Arithmetic,
) -> tuple[Array, Array]:
    """Runs one sublayer (`kind` is `attn` or `ffn`) in the shifted order and returns the new streams and pre-mix."""
    fn, base, scale = (block.array(f"hc_{kind}_{part}") for part in ("fn", "base", "scale"))
    mix = mixing(streams, fn, base, scale, settings)
    collapsed = collapse(streams, pre_mix, arithmetic)
    output = sublayer(arithmetic.rms(collapsed, block.array(f"{kind}_norm.weight"), settings.norm_epsilon))
    return expand(output, streams, mix, arithmetic), mix.pre
