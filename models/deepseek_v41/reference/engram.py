"""Engram: hashed n-gram rows added to the streams with one gate per stream (model spec 6).

Promises: rows depend on token ids alone; the look-back is blocked at the start of the sequence only (text, so no image
spans; EOS does not reset it). Leaves to others: the map from token ids to compressed ids, which is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .arithmetic import Arithmetic, inverse_rms, sigmoid
from .formats import Array
from .parameters import Parameters

_LARGEST_INT64 = 2**63 - 1
_GATE_FLOOR = 1e-6


@dataclass(frozen=True)
class EngramHash:
    """Hash of one layer: `multipliers` `[N]`, `primes` and `offsets` `[N-1, heads]`, all int64."""

    multipliers: Array
    primes: Array
    offsets: Array


def engram_hashes(
    layer_ids: tuple[int, ...], orders: int, heads: int, vocabulary: int, compressed_vocabulary: int
) -> tuple[EngramHash, ...]:
    """Builds the hash of every Engram layer; `orders` is the longest n-gram N (model spec 6.2)."""
    bound = max(1, (_LARGEST_INT64 // compressed_vocabulary) // 2)
    used: set[int] = set()
    hashes = []
    for layer in layer_ids:
        primes = np.array([_unused_prime(vocabulary - 1, used) for _ in range((orders - 1) * heads)], np.int64)
        offsets = np.cumsum(primes) - primes
        drawn = np.random.default_rng(10007 * layer).integers(0, bound, size=orders, dtype=np.int64)
        shape = (orders - 1, heads)
        hashes.append(EngramHash(drawn * 2 + 1, primes.reshape(shape), offsets.reshape(shape)))
    return tuple(hashes)


def look_back(compressed: Array, count: int, orders: int, pad: int) -> Array:
    """`tau` `[count, N]` of the last `count` tokens of a sequence of compressed ids; `pad` before its start."""
    padded = np.concatenate((np.full(orders - 1, pad, np.int64), compressed))
    ends = len(padded) - count + np.arange(count)
    result: Array = padded[ends[:, None] - np.arange(orders)]
    return result


def hash_rows(tau: Array, engram_hash: EngramHash) -> Array:
    """Table rows `[n, (N-1) * heads]`, orders ascending, heads inside (model spec 6.2)."""
    mixed = np.bitwise_xor.accumulate(tau * engram_hash.multipliers, axis=1)[:, 1:, None]
    return (mixed % engram_hash.primes + engram_hash.offsets).reshape(len(tau), -1)


def engram(streams: Array, rows: Array, block: Parameters, norm_epsilon: float, arithmetic: Arithmetic) -> Array:
    """Adds the gated value of the looked-up rows to streams `[n, S, H]`; one rounding (model spec 6.3)."""
    count, copies, hidden = streams.shape
    looked_up = block.fp8_rows("engram.embed", rows.reshape(-1)).reshape(count, -1)
    projected = arithmetic.quantised_linear(arithmetic.bf16(looked_up), block.matrix("engram.wkv"))
    keys, value = np.split(projected, [copies * hidden], axis=1)
    keys = keys.reshape(streams.shape)
    weights = block.array("engram.q_weight") * block.array("engram.k_weight")
    products = np.add.reduce(streams * weights * keys, axis=-1, keepdims=True)
    scale = streams.dtype.type(hidden**-0.5)
    delta = products * inverse_rms(streams, norm_epsilon) * inverse_rms(keys, norm_epsilon) * scale
    # copysign rather than sign: at delta = 0 the gate is sigma(+-1e-3), as in the released code (model spec 13, row 13).
    gamma = sigmoid(np.copysign(np.sqrt(np.maximum(np.abs(delta), _GATE_FLOOR)), delta))
    return arithmetic.bf16(streams + gamma * value[:, None, :])


def _unused_prime(after: int, used: set[int]) -> int:
    """Returns the smallest prime above `after` that no earlier table took, and marks it as taken."""
    candidate = after + 1
    while candidate in used or not _is_prime(candidate):
        candidate += 1
    used.add(candidate)
    return candidate


def _is_prime(number: int) -> bool:
    if number < 4:
        return number > 1
    divisors = np.arange(2, int(number**0.5) + 2)
    return bool((number % divisors != 0).all())
