"""The draft stages in torch: many drafting steps of a batch of sequences at once (docs/model.md, section 7).

An anchor is the last processed position of a drafting step; its block starts with the token behind it. Tokens inside the block
come from the caller (the text, when training) or from the drafts themselves (`greedy`). The backbone gets no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import output, project, window_vectors
from .casts import Numerics
from .mixer import collapse, enter, leave, start_streams
from .model import Differentiable
from .moe import moe
from .speed import fast


@dataclass(frozen=True)
class Drafts:
    """For `R` steps of `D` drafts: `logits` `[R, D, V]`, raw `confidences` `[R, D]`, `tokens` `[R, D]` that were drafted (greedy).

    `observed` `[R, D, H + rank]` is what the confidence head looks at.
    """

    logits: Tensor
    confidences: Tensor
    tokens: Tensor
    observed: Tensor
    loads: dict[str, Tensor]


def stage_name(stage: int) -> str:
    return f"mtp.{stage}"


def draft(
    model: Differentiable,
    weights: dict[str, Tensor],
    features: Tensor,
    anchors: Tensor,
    golden: Tensor,
    following: Tensor | None = None,
    *,
    floors: Tensor | None = None,
    keep: Tensor | None = None,
) -> Drafts:
    """Drafts behind every anchor `[B, M]`; `R = B * M`.

    `features` `[B, T, targets * H]` of the backbone, `golden` `[B, M]` the tokens at `anchor + 1`, `following` `[B, M, D - 1]` the
    tokens at `anchor + 2 ...` that the Markov head sees (None: its own greedy drafts), `floors` `[B, M]` the first usable feature.
    """
    settings = model.settings
    last = stage_name(settings.stages - 1)
    hidden, loads = _hidden(model, weights, features.detach(), anchors, golden, floors, keep)
    normed = model.numerics.rms(hidden, weights[f"{last}.norm.weight"], settings.attention.norm_epsilon)
    base = (normed @ weights["head.weight"].detach().T).unflatten(0, (-1, settings.drafts))
    hidden = hidden.unflatten(0, (-1, settings.drafts))
    first = golden.reshape(-1, 1)
    if following is None:
        logits, confidences, observed, tokens = _greedy(model.numerics, weights, last, base, hidden, first)
    else:
        previous = torch.cat((first, following.flatten(0, 1)), dim=1)
        logits, confidences, observed = _heads(model.numerics, weights, last, base, hidden, previous)
        tokens = logits.argmax(-1)
    return Drafts(logits, confidences, tokens, observed, loads)


def _hidden(
    model: Differentiable,
    weights: dict[str, Tensor],
    features: Tensor,
    anchors: Tensor,
    golden: Tensor,
    floors: Tensor | None,
    keep: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The collapsed rows `[R * D, H]` behind the last stage."""
    settings, numerics = model.settings, model.numerics
    length = features.shape[1]
    projected = main_features(model, weights, features)
    positions = (anchors[:, :, None] + 1 + torch.arange(settings.drafts, device=anchors.device)).flatten(1)
    seen = _seen(anchors, floors, length, settings.attention.window)
    streams, pre_mix = start_streams(_inputs(model, weights, golden), settings.mixer, numerics)
    loads: dict[str, Tensor] = {}
    for stage in range(settings.stages):
        name = stage_name(stage)
        kept = window_vectors(weights, name, projected, model.plain.at(slice(length)), settings.attention, numerics)
        mixed = enter(weights, name, "attn", streams, pre_mix, settings.mixer, numerics)
        x = mixed.x.unflatten(0, (len(anchors), -1))
        tables = model.plain.at(positions)
        _, queries, own = project(weights, name, x, tables, settings.attention, numerics)
        sink = weights[f"{name}.attn.attn_sink"]
        heads = _attend(queries, kept, own, seen, sink, settings.drafts, settings.attention.width**-0.5, numerics)
        y = output(weights, name, heads, tables, settings.attention, numerics).flatten(0, 1)
        streams = leave(y, streams, mixed, keep, numerics)
        second = enter(weights, name, "ffn", streams, mixed.pre, settings.mixer, numerics)
        y, loads[name] = moe(weights, name, second.x, settings.draft_moe, numerics)
        streams, pre_mix = leave(y, streams, second, keep, numerics), second.pre
    return collapse(streams, pre_mix, numerics), loads


def main_features(model: Differentiable, weights: dict[str, Tensor], features: Tensor) -> Tensor:
    """Projected and normed features `[B, T, H]` that all stages see."""
    first = stage_name(0)
    projected = model.numerics.quantised_linear(features, weights[f"{first}.main_proj.weight"])
    return model.numerics.rms(projected, weights[f"{first}.main_norm.weight"], model.settings.attention.norm_epsilon)


def _inputs(model: Differentiable, weights: dict[str, Tensor], golden: Tensor) -> Tensor:
    """Embeddings `[R * D, H]` of golden token and noise; only the noise row learns."""
    known = F.embedding(golden.flatten(), weights["embed.weight"].detach())
    noise = weights["embed.weight"][model.settings.noise_token].expand(len(known), model.settings.drafts - 1, -1)
    return torch.cat((known[:, None], noise), dim=1).flatten(0, 1)


def _seen(anchors: Tensor, floors: Tensor | None, length: int, window: int) -> Tensor:
    """Which features `[B, M, T]` a step sees: the last W positions up to its anchor."""
    position = torch.arange(length, device=anchors.device)
    seen = (position <= anchors[..., None]) & (position > anchors[..., None] - window)
    return seen if floors is None else seen & (position >= floors[..., None])


@fast
def _attend(
    queries: Tensor, kept: Tensor, own: Tensor, seen: Tensor, sink: Tensor, drafts: int, scale: float, numerics: Numerics
) -> Tensor:
    """Attention `[B, M * D, A, W']`: every row of a block sees the window and all rows of the block."""
    batch, rows, heads, width = queries.shape
    steps = rows // drafts
    before = (numerics.product(queries.flatten(1, 2), kept.transpose(1, 2)) * scale).reshape(batch, steps, drafts * heads, -1)
    before = before.masked_fill(~seen[:, :, None, :], -torch.inf)
    blocks = own.unflatten(1, (steps, drafts))
    inside = numerics.product(queries.reshape(batch, steps, drafts * heads, width), blocks.transpose(-1, -2)) * scale
    sinks = sink.repeat(drafts)[:, None]
    largest = torch.maximum(before.detach().amax(-1, keepdim=True), inside.detach().amax(-1, keepdim=True))
    largest = torch.maximum(largest, sinks.detach())
    before, inside = torch.exp(before - largest), torch.exp(inside - largest)
    total = before.sum(-1, keepdim=True) + inside.sum(-1, keepdim=True) + torch.exp(sinks - largest)
    out = numerics.product(before.flatten(1, 2), kept).reshape(batch, steps, drafts * heads, width) + numerics.product(inside, blocks)
    return numerics.bf16(out / total).reshape(queries.shape)


def _heads(
    numerics: Numerics, weights: dict[str, Tensor], last: str, base: Tensor, hidden: Tensor, previous: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Markov-corrected logits `[R, D, V]`, confidences `[R, D]` and what they see, for the tokens `[R, D]` before each draft."""
    embedded = F.embedding(previous, weights[f"{last}.markov_head.embed.weight"])
    logits = base + embedded @ weights[f"{last}.markov_head.head.weight"].T
    proj = weights[f"{last}.confidence_head.proj.weight"][0].to(numerics.wide)
    # Confidence is an observer: it does not shape what it observes.
    observed = torch.cat((hidden, embedded), dim=-1).detach().to(numerics.wide)
    return logits, observed @ proj, observed


def _greedy(
    numerics: Numerics, weights: dict[str, Tensor], last: str, base: Tensor, hidden: Tensor, golden: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    parts, previous = [], golden
    for row in range(base.shape[1]):
        found = _heads(numerics, weights, last, base[:, row : row + 1], hidden[:, row : row + 1], previous)
        previous = found[0].argmax(-1)
        parts.append((*found, previous))
    logits, confidences, observed, tokens = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
    return logits, confidences, observed, tokens
