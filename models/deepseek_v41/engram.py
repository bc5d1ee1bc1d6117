"""The Engram hash of each Engram layer: primes, multipliers, offsets and row numbers (docs/model.md, section 6.2).

Everything follows from the configuration. Tokens enter as compressed ids (`token_map.py`); blocking of image spans and of the
sequence start is the caller's, who puts the pad id into blocked places.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tapeout.models.deepseek_v41.engram_primes import layer_primes

if TYPE_CHECKING:
    from tapeout.models.deepseek_v41.schema import TextConfig

SEED_STEP = 10007  # the multipliers of layer l are drawn from a PCG64 seeded with 10007 * l


@dataclass(frozen=True)
class EngramTable:
    """The hash of one layer. Column `(n - 2) * heads + head` holds order `n`, n = 2 … orders + 1."""

    layer: int
    primes: tuple[tuple[int, ...], ...]  # [orders][heads], rows of each column's part of the table
    multipliers: tuple[int, ...]  # odd, one for each look-back 0 … orders
    offsets: tuple[int, ...]  # [orders * heads], first row of each column's part

    @property
    def rows(self) -> int:
        """Rows of the whole table."""
        return sum(map(sum, self.primes))

    @property
    def columns(self) -> int:
        """Rows looked up for each token."""
        return len(self.offsets)


def engram_tables(text: "TextConfig") -> tuple[EngramTable, ...]:
    """Returns the hash of every Engram layer, in the order of `engram_layer_ids`."""
    orders = text.engram_max_ngram_size - 1
    primes = layer_primes(len(text.engram_layer_ids), orders, text.engram_n_heads, text.engram_vocab_size)
    return tuple(
        EngramTable(layer, own, multipliers(layer, orders + 1, text.engram_compressed_vocab_size), _offsets(own))
        for layer, own in zip(text.engram_layer_ids, primes, strict=True)
    )


def multipliers(layer: int, count: int, compressed_vocabulary: int) -> tuple[int, ...]:
    """Returns `count` odd multipliers, small enough that multiplier times compressed id stays below 2^63."""
    bound = max(1, ((2**63 - 1) // compressed_vocabulary) // 2)
    drawn = np.random.default_rng(SEED_STEP * layer).integers(0, bound, size=count, dtype=np.int64)
    return tuple(int(value) * 2 + 1 for value in drawn)


def _offsets(primes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    flat = [prime for order in primes for prime in order]
    return tuple(sum(flat[:i]) for i in range(len(flat)))
