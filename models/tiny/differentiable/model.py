"""The backbone in torch: tokens to logits and draft features, with what training needs beside them (docs/model.md, 1 to 6, 8).

A pure function of a dictionary of weights (checkpoint names, experts stacked, already rounded: `weights.py`). Whole sequences from
position 0, no state. `floors` simulate bounded replay: the decoder's windows end at a row's floor, its entries do not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tapeout.models.deepseek_v41.reference.engram import engram_hashes
from tapeout.models.deepseek_v41.reference.rope import frequencies
from tapeout.models.deepseek_v41.reference.topology import LayerRole, settings_of

from . import attention as attend_
from . import engram, selection
from .attention import Rotation
from .casts import Numerics
from .mixer import collapse, enter, leave, start_streams
from .moe import moe

if TYPE_CHECKING:
    from tapeout.models.deepseek_v41.config import ModelConfig


@dataclass
class Output:
    """`logits` `[B, T, V]`; `features` `[B, T, targets * H]`; `index_loss`, a scalar; `loads` per layer, `[E]` rows per expert.

    `selected` per index source, masks `[B, T, n]`, kept only when asked for.
    """

    logits: Tensor
    features: Tensor
    index_loss: Tensor
    loads: dict[str, Tensor]
    selected: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class _Pass:
    """Values that travel down the stack."""

    batch: int
    length: int
    floors: Tensor | None
    keep: Tensor | None
    entries: dict[int, Tensor] = field(default_factory=dict)
    index_keys: dict[int, Tensor] = field(default_factory=dict)
    selected: dict[int, Tensor] = field(default_factory=dict)
    candidates: Tensor | None = None
    index_losses: list[Tensor] = field(default_factory=list)
    loads: dict[str, Tensor] = field(default_factory=dict)


class Differentiable:
    """The text model under one numerics, for sequences of at most `positions` tokens."""

    def __init__(
        self, config: ModelConfig, token_map: np.ndarray, numerics: Numerics, positions: int, device: torch.device | str = "cpu"
    ) -> None:
        text = config.text
        self.settings = settings_of(config)
        self.numerics = numerics
        self.device = torch.device(device)
        self.boundary = config.n_prefill
        self.vocabulary = text.vocab_size
        self._orders = text.engram_max_ngram_size
        self._token_map = torch.from_numpy(np.asarray(token_map, np.int64)).to(self.device)
        self._pad = int(token_map[text.engram_pad_token_id])
        arguments = text.engram_max_ngram_size, text.engram_n_heads, text.engram_vocab_size, text.engram_compressed_vocab_size
        self._hashes = [engram.Hash.of(found, self.device) for found in engram_hashes(tuple(text.engram_layer_ids), *arguments)]
        longest = positions + self.settings.attention.window + self.settings.drafts + 1
        self.plain = self._rotation(self.settings.plain_base, False, longest)
        self.compressed = self._rotation(self.settings.compressed_base, True, longest)

    def forward(
        self,
        weights: dict[str, Tensor],
        tokens: Tensor,
        *,
        floors: Tensor | None = None,
        keep: Tensor | None = None,
        keep_selections: bool = False,
    ) -> Output:
        """Runs sequences `[B, T]` of token ids. `floors` `[B, T]`: the first window position a row of the decoder sees; `keep`:
        the share that dropout keeps."""
        length, window = tokens.shape[1], self.settings.attention.window
        missing = -length % (2 * window)
        padded = F.pad(tokens, (0, missing))
        if floors is not None and missing:
            floors = F.pad(floors, (0, missing))
        run = _Pass(len(tokens), length + missing, floors, keep)
        tau = engram.look_back(self._token_map[padded], self._orders, self._pad).flatten(0, 1)
        embedded = F.embedding(padded.flatten(), weights["embed.weight"])
        streams, pre_mix = start_streams(embedded, self.settings.mixer, self.numerics)
        taps: dict[int, Tensor] = {}
        for role in self.settings.roles:
            if role.engram is not None:
                streams = self._engram(weights, streams, role, tau, run)
            if role.number in self.settings.targets:
                taps[role.number] = self.numerics.bf16(streams.to(self.numerics.wide).mean(1))
            streams, pre_mix = self._layer(weights, streams, pre_mix, role, run)
        features = torch.cat([taps[target] for target in self.settings.targets], dim=1)
        hidden = collapse(streams, pre_mix, self.numerics)
        return Output(
            logits=self._rows(self.logits(weights, hidden, "norm.weight"), run)[:, :length],
            features=self._rows(features, run)[:, :length],
            index_loss=torch.stack(run.index_losses).mean(),
            loads=run.loads,
            selected=self._cut(run, length) if keep_selections else {},
        )

    def logits(self, weights: dict[str, Tensor], hidden: Tensor, norm: str) -> Tensor:
        """`head * rms(h)`: collapsed rows `[n, H]` to `[n, V]`; BF16 while training, wide otherwise."""
        normed = self.numerics.rms(hidden, weights[norm], self.settings.attention.norm_epsilon)
        return normed @ weights["head.weight"].T

    def _layer(self, weights: dict[str, Tensor], streams: Tensor, pre_mix: Tensor, role: LayerRole, run: _Pass) -> tuple[Tensor, Tensor]:
        name, mixer, numerics = f"layers.{role.number}", self.settings.mixer, self.numerics
        mixed = enter(weights, name, "attn", streams, pre_mix, mixer, numerics)
        y = self._attention(weights, self._rows(mixed.x, run), role, run).flatten(0, 1)
        streams = leave(y, streams, mixed, run.keep, numerics)
        second = enter(weights, name, "ffn", streams, mixed.pre, mixer, numerics)
        y, run.loads[name] = moe(weights, name, second.x, self.settings.moe, numerics)
        return leave(y, streams, second, run.keep, numerics), second.pre

    def _engram(self, weights: dict[str, Tensor], streams: Tensor, role: LayerRole, tau: Tensor, run: _Pass) -> Tensor:
        assert role.engram is not None, role
        rows = engram.hash_rows(tau, self._hashes[role.engram])
        epsilon = self.settings.attention.norm_epsilon
        return engram.engram(weights, f"layers.{role.number}", streams, rows, epsilon, run.keep, self.numerics)

    def _attention(self, weights: dict[str, Tensor], x: Tensor, role: LayerRole, run: _Pass) -> Tensor:
        """The steps of docs/model.md, section 4.9, in its order; `x` `[B, T, H]`."""
        name, settings, numerics = f"layers.{role.number}", self.settings.attention, self.numerics
        rotation = self.compressed if role.ratio else self.plain
        tables = rotation.at(slice(run.length))
        latent, queries, window = attend_.project(weights, name, x, tables, settings, numerics)
        if role.owns_entries:
            groups = rotation.at(slice(0, run.length, role.ratio))
            run.entries[role.number], run.index_keys[role.number] = attend_.compress(weights, name, x, groups, settings, numerics)
        if role.selects:
            self._select(weights, x, latent, queries, role, run)
        stored = run.entries[role.kv_source] if role.kv_source is not None else None
        selected = run.selected[role.index_source] if role.index_source is not None else None
        floors = run.floors if role.number >= self.boundary else None
        heads = attend_.attend(queries, window, floors, stored, selected, weights[f"{name}.attn.attn_sink"], settings, numerics)
        return attend_.output(weights, name, heads, tables, settings, numerics)

    def _select(self, weights: dict[str, Tensor], x: Tensor, latent: Tensor, queries: Tensor, role: LayerRole, run: _Pass) -> None:
        assert role.kv_source is not None, role
        name, settings, numerics = f"layers.{role.number}", self.settings.index, self.numerics
        tables = self.compressed.at(slice(run.length))
        scores = selection.index_scores(weights, name, x, latent, run.index_keys[role.kv_source], tables, settings, numerics)
        if role.is_candidate_source:
            run.candidates = selection.candidate_blocks(scores, role.ratio, settings)
        candidates = run.candidates if role.reads_candidates else None
        allowed, run.selected[role.number] = selection.choose(scores, role.ratio, candidates, settings)
        if torch.is_grad_enabled():
            stored = run.entries[role.kv_source].detach()
            divergence = selection.index_divergence(queries.detach(), stored, scores, allowed, self.settings.attention, settings, numerics)
            run.index_losses.append(divergence)
        else:
            run.index_losses.append(torch.zeros((), device=x.device))

    def _rows(self, x: Tensor, run: _Pass) -> Tensor:
        return x.unflatten(0, (run.batch, run.length))

    def _cut(self, run: _Pass, length: int) -> dict[int, Tensor]:
        ratios = {role.number: role.ratio for role in self.settings.roles}
        return {number: mask.expand(run.batch, -1, -1)[:, :length, : length // ratios[number]] for number, mask in run.selected.items()}

    def _rotation(self, base: float, scaled: bool, longest: int) -> Rotation:
        omega = frequencies(self.settings.rotary_width, base, self.settings.yarn if scaled else None)
        return Rotation.of(torch.from_numpy(omega).to(self.device), longest, self.numerics)
