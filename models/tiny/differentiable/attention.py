"""Queries, window keys, compressed entries, attention with a sink, output projection (docs/model.md, sections 4.1 to 4.8).

Dense and masked: a row's selection is a mask over all entries, its window lies in two neighbouring blocks of W rows. Lengths are
multiples of W (`model.py` pads). Leaves to others: which entries a row selects (`selection.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tapeout.models.deepseek_v41.reference.attention import AttentionSettings

from .casts import Numerics
from .speed import fast


@dataclass(frozen=True)
class Rotation:
    """Cosine and sine `[positions, R/2]` of one rotary kind."""

    cosine: Tensor
    sine: Tensor

    def at(self, positions: Tensor | slice) -> tuple[Tensor, Tensor]:
        return self.cosine[positions], self.sine[positions]

    @classmethod
    def of(cls, omega: Tensor, positions: int, numerics: Numerics) -> Rotation:
        """FP32 angles from FP32 operands, as the reference forms them; `omega` is float64."""
        angles = (torch.arange(positions, dtype=torch.float32, device=omega.device)[:, None] * omega.float()).double()
        return cls(angles.cos().to(numerics.wide), angles.sin().to(numerics.wide))


def turn(x: Tensor, cosine: Tensor, sine: Tensor, numerics: Numerics) -> Tensor:
    """Rotates adjacent pairs of the last `R` dims of `x` `[..., D]`; one rounding. Tables broadcast to `[..., R/2]`."""
    rotary = 2 * cosine.shape[-1]
    wide = x.to(numerics.wide)
    pairs = wide[..., -rotary:].unflatten(-1, (-1, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), dim=-1).flatten(-2)
    return numerics.bf16(torch.cat((wide[..., :-rotary], turned), dim=-1))


def project(
    weights: dict[str, Tensor], name: str, x: Tensor, tables: tuple[Tensor, Tensor], settings: AttentionSettings, numerics: Numerics
) -> tuple[Tensor, Tensor, Tensor]:
    """Query latent `[B, T, QL]`, rotated query heads `[B, T, A, D]` and window vectors `[B, T, D]` of `x` `[B, T, H]`."""
    names = ("wq_a.weight", "q_norm.weight", "wq_b.weight", "wkv.weight", "kv_norm.weight")
    wq_a, q_norm, wq_b, wkv, kv_norm = (weights[f"{name}.attn.{part}"] for part in names)
    result: tuple[Tensor, Tensor, Tensor] = _project(x, wq_a, q_norm, wq_b, wkv, kv_norm, *tables, settings, numerics)
    return result


@fast
def _project(
    x: Tensor,
    wq_a: Tensor,
    q_norm: Tensor,
    wq_b: Tensor,
    wkv: Tensor,
    kv_norm: Tensor,
    cosine: Tensor,
    sine: Tensor,
    settings: AttentionSettings,
    numerics: Numerics,
) -> tuple[Tensor, Tensor, Tensor]:
    latent = numerics.rms(numerics.quantised_linear(x, wq_a), q_norm, settings.norm_epsilon)
    heads = numerics.quantised_linear(latent, wq_b).unflatten(-1, (settings.heads, settings.width))
    queries = turn(heads, cosine.unsqueeze(-2), sine.unsqueeze(-2), numerics)
    return latent, queries, _window(x, wkv, kv_norm, cosine, sine, settings, numerics)


def window_vectors(
    weights: dict[str, Tensor], name: str, x: Tensor, tables: tuple[Tensor, Tensor], settings: AttentionSettings, numerics: Numerics
) -> Tensor:
    """Window vectors `[B, T, D]` alone, for the features that draft stages look at."""
    norm = weights[f"{name}.attn.kv_norm.weight"]
    result: Tensor = _features_window(x, weights[f"{name}.attn.wkv.weight"], norm, *tables, settings, numerics)
    return result


def _window(x: Tensor, wkv: Tensor, norm: Tensor, cosine: Tensor, sine: Tensor, settings: AttentionSettings, numerics: Numerics) -> Tensor:
    normed = numerics.rms(numerics.quantised_linear(x, wkv), norm, settings.norm_epsilon)
    return numerics.q8(turn(normed, cosine, sine, numerics))


_features_window = fast(_window)


def compress(
    weights: dict[str, Tensor], name: str, x: Tensor, tables: tuple[Tensor, Tensor], settings: AttentionSettings, numerics: Numerics
) -> tuple[Tensor, Tensor]:
    """Stored entries `[B, n, D]` and index keys `[B, n, ID]` of `x` `[B, T, H]`; `tables` are those of the groups' first tokens."""
    p = f"{name}.attn."
    names = ("compressor.wkv.weight", "compressor.norm.weight", "indexer.wk.weight", "indexer.k_norm.weight")
    wkv, norm, wk, k_norm = (weights[p + part] for part in names)
    gate = weights.get(f"{p}compressor.wgate.weight")
    result: tuple[Tensor, Tensor] = _compress(x, gate, wkv, norm, wk, k_norm, *tables, settings, numerics)
    return result


@fast
def _compress(
    x: Tensor,
    wgate: Tensor | None,
    wkv: Tensor,
    norm: Tensor,
    wk: Tensor,
    k_norm: Tensor,
    cosine: Tensor,
    sine: Tensor,
    settings: AttentionSettings,
    numerics: Numerics,
) -> tuple[Tensor, Tensor]:
    latents = numerics.product(x, wkv.T)
    if wgate is not None:
        alpha = torch.softmax(numerics.product(x, wgate.T).unflatten(1, (-1, 2)), dim=2)
        latents = (alpha * latents.unflatten(1, (-1, 2))).sum(2)
    c = numerics.rms(numerics.bf16(latents), norm, settings.norm_epsilon)
    # The index learns from its own target: its gradient stays out of the latents.
    keys = numerics.rms(numerics.linear(c.detach(), wk), k_norm, settings.norm_epsilon)
    return numerics.q4main(turn(c, cosine, sine, numerics)), numerics.q4idx(turn(keys, cosine, sine, numerics))


@fast
def attend(
    queries: Tensor,
    window: Tensor,
    floors: Tensor | None,
    stored: Tensor | None,
    selected: Tensor | None,
    sink: Tensor,
    settings: AttentionSettings,
    numerics: Numerics,
) -> Tensor:
    """Attention `[B, T, A, D]` over the window and the selected entries.

    `queries` `[B, T, A, D]`, `window` `[B, T, D]`, `stored` `[B, n, D]`, `selected` `[B, T, n]`; a row sees no window position below
    its floor `[B, T]`. The result is rounded once; probabilities are not.
    """
    batch, length, heads, width = queries.shape
    scale, size = settings.width**-0.5, settings.window
    blocks = length // size
    keys = _two_blocks(window, blocks, size)
    q = queries.reshape(batch, blocks, size * heads, width)
    near = (numerics.product(q, keys.transpose(-1, -2)) * scale).unflatten(2, (size, heads))
    near = near.masked_fill(~window_mask(floors, batch, blocks, size, queries.device)[:, :, :, None, :], -torch.inf)
    near = near.reshape(batch, length, heads, 2 * size)
    largest = torch.maximum(near.detach().amax(-1, keepdim=True), sink[:, None].detach())
    if stored is not None and selected is not None:
        far = (numerics.product(queries.flatten(1, 2), stored.transpose(1, 2)) * scale).unflatten(1, (length, heads))
        far = far.masked_fill(~selected[:, :, None, :], -torch.inf)
        largest = torch.maximum(largest, far.detach().amax(-1, keepdim=True))
        far = torch.exp(far - largest)
    near = torch.exp(near - largest)
    total = near.sum(-1, keepdim=True) + torch.exp(sink[:, None] - largest)
    out = numerics.product(near.reshape(batch, blocks, size * heads, 2 * size), keys).reshape(batch, length, heads, width)
    if stored is not None and selected is not None:
        total = total + far.sum(-1, keepdim=True)
        out = out + numerics.product(far.flatten(1, 2), stored).unflatten(1, (length, heads))
    return numerics.bf16(out / total)


def _two_blocks(window: Tensor, blocks: int, size: int) -> Tensor:
    """`[B, blocks, 2 W, D]`: the block before, then the block itself; nothing but zeros before the first."""
    own = window.unflatten(1, (blocks, size))
    before = F.pad(own, (0, 0, 0, 0, 1, 0))[:, :-1]
    return torch.cat((before, own), dim=2)


def window_mask(floors: Tensor | None, batch: int, blocks: int, size: int, device: torch.device) -> Tensor:
    """Which of the `2 W` keys of its two blocks a row sees, `[B or 1, blocks, W, 2 W]`."""
    row = torch.arange(size, device=device)[:, None]
    key = torch.arange(2 * size, device=device)[None, :]
    position = torch.arange(blocks, device=device)[:, None, None] * size + key - size
    seen = ((key > row) & (key <= row + size))[None] & (position >= 0)
    if floors is None:
        return seen[None]
    return seen[None] & (position[None] >= floors.reshape(batch, blocks, size)[:, :, :, None])


def output(
    weights: dict[str, Tensor], name: str, heads: Tensor, tables: tuple[Tensor, Tensor], settings: AttentionSettings, numerics: Numerics
) -> Tensor:
    """Inverse rotation, `wo_a` per group, `wo_b`: `[..., A, D]` to `[..., H]`."""
    result: Tensor = _output(heads, weights[f"{name}.attn.wo_a.weight"], weights[f"{name}.attn.wo_b.weight"], *tables, settings, numerics)
    return result


@fast
def _output(
    heads: Tensor, wo_a: Tensor, wo_b: Tensor, cosine: Tensor, sine: Tensor, settings: AttentionSettings, numerics: Numerics
) -> Tensor:
    groups = settings.groups
    back = turn(heads, cosine.unsqueeze(-2), -sine.unsqueeze(-2), numerics)
    by_group = back.reshape(-1, groups, settings.heads // groups * settings.width).transpose(0, 1)
    low_rank = numerics.linear(by_group, wo_a.unflatten(0, (groups, -1)))
    return numerics.quantised_linear(low_rank.transpose(0, 1).reshape(*heads.shape[:-2], -1), wo_b)
