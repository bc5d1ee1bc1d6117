"""Index scores, visible entries, candidate blocks, selection, and what index scores learn from (docs/model.md, sections 4.5, 4.6).

Selections are hard and carry no gradient. Scores learn to rank entries by the attention they would get: a divergence between the
layer's own attention over all entries that may be selected, without gradient, and the softmax of the scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tapeout.models.deepseek_v41.reference.attention import AttentionSettings
from tapeout.models.deepseek_v41.reference.sparse import IndexSettings

from .attention import turn
from .casts import Numerics
from .speed import fast


def index_scores(
    weights: dict[str, Tensor],
    name: str,
    x: Tensor,
    latent: Tensor,
    keys: Tensor,
    tables: tuple[Tensor, Tensor],
    settings: IndexSettings,
    numerics: Numerics,
) -> Tensor:
    """Scores `[B, T, n]` of all entries, rounded once; `x` and `latent` get no gradient from them."""
    p = f"{name}.attn.indexer."
    result: Tensor = _scores(
        x.detach(), latent.detach(), keys, weights[f"{p}wq_b.weight"], weights[f"{p}weights_proj.weight"], *tables, settings, numerics
    )
    return result


@fast
def _scores(
    x: Tensor,
    latent: Tensor,
    keys: Tensor,
    wq_b: Tensor,
    weights_proj: Tensor,
    cosine: Tensor,
    sine: Tensor,
    settings: IndexSettings,
    numerics: Numerics,
) -> Tensor:
    heads = numerics.quantised_linear(latent, wq_b).unflatten(-1, (settings.heads, settings.width))
    queries = numerics.q4idx(turn(heads, cosine.unsqueeze(-2), sine.unsqueeze(-2), numerics))
    weight = numerics.linear(x, weights_proj).to(numerics.wide)
    per_head = torch.relu(numerics.product(queries.flatten(1, 2), keys.transpose(1, 2))).unflatten(1, (-1, settings.heads))
    return numerics.bf16((weight[..., None] * per_head).sum(2)).to(numerics.wide)


@fast
def choose(scores: Tensor, ratio: int, candidates: Tensor | None, settings: IndexSettings) -> tuple[Tensor, Tensor]:
    """Which entries a row may select and which it selects, both `[B, T, n]`; `candidates` `[B, T, blocks]` restrict it."""
    entries = scores.shape[2]
    allowed = _visible(scores, ratio)
    if candidates is not None:
        allowed = allowed & candidates.repeat_interleave(settings.block_size, dim=2)[:, :, :entries]
    return allowed, _best(scores.detach(), allowed, settings.top)


@fast
def candidate_blocks(scores: Tensor, ratio: int, settings: IndexSettings) -> Tensor:
    """Which blocks `[B, T, ceil(n / CS)]` are candidates of each row; the newest visible block always is."""
    length, entries = scores.shape[1:]
    size = settings.block_size
    count = -(-entries // size)
    seen = scores.detach().masked_fill(~_visible(scores, ratio), -torch.inf)
    best = torch.nn.functional.pad(seen, (0, count * size - entries), value=-torch.inf).unflatten(2, (count, size)).amax(3)
    newest = (torch.arange(1, length + 1, device=scores.device) // ratio - 1).div(size, rounding_mode="floor")
    forced = newest[:, None] == torch.arange(count, device=scores.device)
    best = best.masked_fill(forced, torch.inf)
    return _best(best, best > -torch.inf, settings.blocks)


def _visible(scores: Tensor, ratio: int) -> Tensor:
    """`[1, T, n]`: entry `j` is there for row `t` when `j < (t + 1) // ratio`."""
    length, entries = scores.shape[1:]
    visible = torch.arange(1, length + 1, device=scores.device) // ratio
    return (torch.arange(entries, device=scores.device) < visible[:, None])[None]


def _best(scores: Tensor, allowed: Tensor, most: int) -> Tensor:
    """The `most` largest allowed scores of each row as a mask; the lowest index wins a tie."""
    if scores.shape[-1] <= most:
        return allowed.expand(scores.shape)
    ranked = scores.masked_fill(~allowed, -torch.inf)
    if scores.dtype == torch.float64:
        order = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[..., :most]
        return torch.zeros_like(ranked, dtype=torch.bool).scatter(-1, order, True) & allowed
    keys = _ranks(ranked)
    least = torch.topk(keys, most, dim=-1, sorted=True).values[..., -1:]
    return (keys >= least) & allowed


def _ranks(scores: Tensor) -> Tensor:
    """Distinct integers in the order of BF16 scores, the lower index first among equals."""
    bits = (scores + 0.0).to(torch.bfloat16).view(torch.int16).to(torch.int32)
    ordered = torch.where(bits < 0, -(bits & 0x7FFF), bits)
    count = scores.shape[-1]
    return (ordered << 14) + (count - 1 - torch.arange(count, device=scores.device, dtype=torch.int32))


@fast
def index_divergence(
    queries: Tensor,
    stored: Tensor,
    scores: Tensor,
    allowed: Tensor,
    attention: AttentionSettings,
    index: IndexSettings,
    numerics: Numerics,
) -> Tensor:
    """Mean over rows of the divergence of scores from attention over the allowed entries (a scalar)."""
    length, heads = queries.shape[1:3]
    with torch.no_grad():
        logits = numerics.product(queries.flatten(1, 2), stored.transpose(1, 2)).unflatten(1, (length, heads)) * attention.width**-0.5
        target = torch.softmax(logits.masked_fill(~allowed[:, :, None, :], -1e30), dim=-1).mean(2)
    # Lambda of section 4.5: it cannot change the order, but it sets how sharp the scores are.
    scaled = scores * (index.width * index.heads) ** -0.5
    guess = torch.log_softmax(scaled.masked_fill(~allowed, -1e30), dim=-1)
    gaps = target * (torch.log(target.clamp(min=1e-20)) - guess)
    return torch.where(allowed, gaps, 0.0).sum(-1).mean()
