"""Hyper-connections in torch: coefficients, collapse and expand of the residual streams (docs/model.md, section 3).

`pre` of a mixer serves the next sublayer, never its own. Dropout, used in training only, falls on a sublayer's output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tapeout.models.deepseek_v41.reference.mixer import MixerSettings

from .casts import Numerics, inverse_rms
from .sinkhorn import sinkhorn
from .speed import fast


@dataclass(frozen=True)
class Mixed:
    """What enters a sublayer, `x` `[n, H]`, and what its output is expanded with: `pre`, `post` `[n, S]`, `comb` `[n, S, S]`."""

    x: Tensor
    pre: Tensor
    post: Tensor
    comb: Tensor


def start_streams(embedded: Tensor, settings: MixerSettings, numerics: Numerics) -> tuple[Tensor, Tensor]:
    """Copies embeddings `[n, H]` to all streams, with pre-mix (1, 0, 0, ...)."""
    count, width = embedded.shape
    streams = embedded[:, None, :].expand(count, settings.streams, width)
    first = (torch.arange(settings.streams, device=embedded.device) == 0).to(numerics.wide)
    return streams, first.expand(count, settings.streams)


def enter(
    weights: dict[str, Tensor], name: str, kind: str, streams: Tensor, pre_mix: Tensor, settings: MixerSettings, numerics: Numerics
) -> Mixed:
    """Mixer coefficients of one sublayer (`kind` is `attn` or `ffn`) and its normed input."""
    fn, base, scale = (weights[f"{name}.hc_{kind}_{part}"] for part in ("fn", "base", "scale"))
    norm = weights[f"{name}.{kind}_norm.weight"]
    return Mixed(*_enter(streams, pre_mix, fn, base, scale, norm, settings, numerics))


@fast
def _enter(
    streams: Tensor, pre_mix: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor, settings: MixerSettings, numerics: Numerics
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count = settings.streams
    flat = streams.to(numerics.wide).flatten(1)
    m = inverse_rms(flat, settings.norm_epsilon) * (flat @ fn.T)
    pre = torch.sigmoid(m[:, :count] * scale[0] + base[:count]) + settings.epsilon
    post = 2 * torch.sigmoid(m[:, count : 2 * count] * scale[1] + base[count : 2 * count])
    logits = (m[:, 2 * count :] * scale[2] + base[2 * count :]).unflatten(1, (count, count))
    comb = sinkhorn(logits, settings.iterations, settings.epsilon)
    x = numerics.rms(collapse(streams, pre_mix, numerics), norm, settings.norm_epsilon)
    return x, pre, post, comb


def collapse(streams: Tensor, pre_mix: Tensor, numerics: Numerics) -> Tensor:
    """`bf16(sum_i a_i X_i)`: `[n, S, H]` to `[n, H]`."""
    return numerics.bf16((pre_mix[:, :, None] * streams.to(numerics.wide)).sum(1))


@fast
def _expand(output: Tensor, streams: Tensor, post: Tensor, comb: Tensor, keep: Tensor | None, numerics: Numerics) -> Tensor:
    y = thinned(output.to(numerics.wide), keep)
    wide = streams.to(numerics.wide)
    carried = sum(comb[:, i, :, None] * wide[:, i, None, :] for i in range(streams.shape[1]))
    return numerics.bf16(post[:, :, None] * y[:, None, :] + carried)


def leave(output: Tensor, streams: Tensor, mixed: Mixed, keep: Tensor | None, numerics: Numerics) -> Tensor:
    """`X'_j = bf16(post_j y + sum_i comb_ij X_i)`, one rounding."""
    result: Tensor = _expand(output, streams, mixed.post, mixed.comb, keep, numerics)
    return result


def thinned(y: Tensor, keep: Tensor | None) -> Tensor:
    """Dropout that keeps a share `keep`, a scalar on the device so that it can change while a captured step runs; None keeps all."""
    return y if keep is None else y * (torch.rand_like(y) < keep) / keep
