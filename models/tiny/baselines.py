"""What the trained model is measured against: gzip, and a five-gram model of bytes counted on the same train split.

Both code the same bytes that the model codes. Nothing here is tuned on held-out text.
"""

import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.uint64]
Floats = NDArray[np.float64]
ORDER = 5
START = b"\n" * (ORDER - 1)
"""Stands before every document: the context of its first bytes."""


class GzipBits(NamedTuple):
    """Bits of gzip -9: each document alone, and all of them as one stream, which lets later ones repeat earlier ones."""

    apart: int
    together: int


def gzip_bits(documents: Sequence[bytes]) -> GzipBits:
    """Sizes of `gzip -9`, header and checksum counted, without a file name."""
    sizes = [len(gzip.compress(text, 9, mtime=0)) for text in (*documents, b"".join(documents))]
    return GzipBits(8 * sum(sizes[:-1]), 8 * sizes[-1])


@dataclass(frozen=True)
class _Level:
    """One order of the model: every n-gram seen, sorted, with its probability before the lower order is mixed in; for every context, how
    much of the lower order is mixed in."""

    grams: Codes
    shares: Floats
    contexts: Codes
    backing: Floats


@dataclass(frozen=True)
class FiveGrams:
    """An interpolated Kneser-Ney model of bytes, order 5, three discounts an order (Chen and Goodman 1998, "modified").

    The highest order counts occurrences, lower ones count distinct bytes before an n-gram; discounts come from the counts of counts;
    below the unigrams lies the uniform distribution over 256 bytes.
    """

    levels: tuple[_Level, ...]

    def bits(self, document: bytes) -> float:
        """Code length of a document, its first bytes in the context `START`."""
        return float(-np.log2(self.probabilities(document)).sum())

    def probabilities(self, document: bytes) -> Floats:
        """Probability of every byte given the four before it [bytes]."""
        data = np.frombuffer(START + document, np.uint8)
        chance: Floats = np.full(len(document), 1 / 256)
        for order, level in enumerate(self.levels, 1):
            grams = _grams(data[ORDER - order :], order)
            chance = (
                _found(level.grams, level.shares, grams, 0.0) + _found(level.contexts, level.backing, grams >> np.uint64(8), 1.0) * chance
            )
        return chance


def count_five_grams(documents: Sequence[bytes]) -> FiveGrams:
    """Counts the model on documents, each behind `START`."""
    data = [np.frombuffer(START + text, np.uint8) for text in documents]
    grams, counts = np.unique(np.concatenate([_grams(text, ORDER) for text in data]), return_counts=True)
    levels = [_level(grams, counts)]
    for order in range(ORDER - 1, 0, -1):
        mask = np.uint64((1 << 8 * order) - 1)  # an n-gram without its first byte: each larger one counts once
        grams, counts = np.unique(grams & mask, return_counts=True)
        levels.insert(0, _level(grams, counts))
    return FiveGrams(tuple(levels))


def _grams(data: NDArray[np.uint8], order: int) -> Codes:
    """Every run of `order` bytes as one number, the newest byte lowest."""
    count = len(data) - order + 1
    codes = np.zeros(max(count, 0), np.uint64)
    for i in range(order):
        codes = (codes << np.uint64(8)) | data[i : i + count].astype(np.uint64)
    return codes


def _level(grams: Codes, counts: NDArray[np.int64]) -> _Level:
    discounts = _discounts(counts)
    taken = discounts[np.minimum(counts, 3)]
    contexts, first = np.unique(grams >> np.uint64(8), return_index=True)
    totals = np.add.reduceat(counts, first).astype(np.float64)
    freed = np.add.reduceat(taken, first)
    owner = np.repeat(np.arange(len(contexts)), np.diff(np.append(first, len(grams))))
    return _Level(grams, (counts - taken) / totals[owner], contexts, freed / totals)


def _discounts(counts: NDArray[np.int64]) -> Floats:
    """What is taken from an n-gram seen 0, 1, 2 and 3 or more times; 0.5 of everything where the counts are too few to say."""
    n1, n2, n3, n4 = (int(np.count_nonzero(counts == k)) for k in (1, 2, 3, 4))
    if n1 and n2 and n3 and n4:
        y = n1 / (n1 + 2 * n2)
        found = np.array([1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
        if (found > 0).all():
            return np.array([0.0, *found])
    return np.array([0.0, 0.5, 0.5, 0.5])


def _found(keys: Codes, values: Floats, wanted: Codes, otherwise: float) -> Floats:
    """Values of `wanted` in a sorted table."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], otherwise)
