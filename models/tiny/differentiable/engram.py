"""Engram in torch: hashed n-gram rows added to the streams with one gate per stream (docs/model.md, section 6)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tapeout.models.deepseek_v41.reference.engram import EngramHash

from .casts import Numerics, inverse_rms
from .mixer import thinned
from .speed import fast

_GATE_FLOOR = 1e-6


@dataclass(frozen=True)
class Hash:
    """`EngramHash` as tensors: `multipliers` `[N]`, `primes` and `offsets` `[N-1, heads]`, int64."""

    multipliers: Tensor
    primes: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, found: EngramHash, device: torch.device) -> Hash:
        return cls(*(torch.from_numpy(a).to(device) for a in (found.multipliers, found.primes, found.offsets)))


def look_back(compressed: Tensor, orders: int, pad: int) -> Tensor:
    """`tau` `[B, T, N]` of sequences `[B, T]` of compressed ids; `pad` before their start."""
    padded = F.pad(compressed, (orders - 1, 0), value=pad)
    length = compressed.shape[1]
    return torch.stack([padded[:, orders - 1 - s : orders - 1 - s + length] for s in range(orders)], dim=-1)


def hash_rows(tau: Tensor, table: Hash) -> Tensor:
    """Table rows `[n, (N-1) * heads]` of `tau` `[n, N]`, orders ascending, heads inside."""
    products = tau * table.multipliers
    mixed, hashes = products[:, 0], []
    for order in range(1, tau.shape[1]):
        mixed = mixed ^ products[:, order]
        hashes.append(mixed)
    return (torch.stack(hashes, dim=1)[:, :, None] % table.primes + table.offsets).flatten(1)


def engram(
    weights: dict[str, Tensor], name: str, streams: Tensor, rows: Tensor, epsilon: float, keep: Tensor | None, numerics: Numerics
) -> Tensor:
    """Streams `[n, S, H]` with the gated value of table rows `[n, columns]` added."""
    p = f"{name}.engram."
    looked_up = F.embedding(rows, weights[f"{p}embed.weight"]).flatten(1)
    result: Tensor = _add(
        streams, looked_up, weights[f"{p}wkv.weight"], weights[f"{p}q_weight"], weights[f"{p}k_weight"], epsilon, keep, numerics
    )
    return result


@fast
def _add(
    streams: Tensor, looked_up: Tensor, wkv: Tensor, q: Tensor, k: Tensor, epsilon: float, keep: Tensor | None, numerics: Numerics
) -> Tensor:
    count, copies, hidden = streams.shape
    projected = numerics.quantised_linear(numerics.bf16(looked_up), wkv).to(numerics.wide)
    keys = projected[:, : copies * hidden].reshape(count, copies, hidden)
    value = thinned(projected[:, copies * hidden :], keep)
    wide = streams.to(numerics.wide)
    products = (wide * (q.to(numerics.wide) * k.to(numerics.wide)) * keys).sum(-1, keepdim=True)
    delta = products * inverse_rms(wide, epsilon) * inverse_rms(keys, epsilon) * hidden**-0.5
    gamma = torch.sigmoid(torch.copysign(torch.sqrt(delta.abs().clamp(min=_GATE_FLOOR)), delta))
    return numerics.bf16(wide + gamma * value[:, None, :])
