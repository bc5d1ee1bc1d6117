"""gzip and the five-gram model against naive statements of both."""

import gzip
from collections import Counter, defaultdict

import numpy as np
import pytest

from tapeout.models.tiny.baselines import ORDER, START, FiveGrams, count_five_grams, gzip_bits

TEXTS = [b"def f(x):\n    return x\n" * 3, b"for x in f(1, 2):\n    print(x)\n", b"", b"a", bytes(range(250, 256)) + b"banana bandana" * 2]


@pytest.fixture(scope="module")
def model() -> FiveGrams:
    return count_five_grams(TEXTS)


def _naive(context: bytes, byte: int) -> float:
    """Modified Kneser-Ney by the book: dictionaries, one order after the other."""
    grams = Counter((START + text)[i : i + ORDER] for text in TEXTS for i in range(len(text)))
    chance = 1 / 256
    tables = {ORDER: grams}
    for order in range(ORDER - 1, 0, -1):
        tables[order] = Counter(gram[1:] for gram in tables[order + 1])  # distinct bytes before
    for order in range(1, ORDER + 1):
        counts = tables[order]
        n = [sum(c == k for c in counts.values()) for k in range(5)]
        taken = [0.0, 0.5, 0.5, 0.5]
        if all(n[1:5]):
            y = n[1] / (n[1] + 2 * n[2])
            better = [k - (k + 1) * y * n[k + 1] / n[k] for k in (1, 2, 3)]
            taken = [0.0, *better] if min(better) > 0 else taken
        own = context[len(context) - order + 1 :] if order > 1 else b""
        followers: dict[int, int] = defaultdict(int)
        for gram, count in counts.items():
            if gram[:-1] == own:
                followers[gram[-1]] += count
        total = sum(followers.values())
        if total:
            freed = sum(taken[min(c, 3)] for c in followers.values())
            seen = followers.get(byte, 0)
            chance = (seen - taken[min(seen, 3)]) / total + freed / total * chance
    return chance


@pytest.mark.parametrize("text", [b"return x", b"bananas", b"\xff\x00zz", b"x"])
def test_probabilities_are_those_of_the_book(model: FiveGrams, text: bytes) -> None:
    found = model.probabilities(text)
    expected = [_naive((START + text)[i : i + 4], text[i]) for i in range(len(text))]
    assert np.allclose(found, expected, rtol=1e-12, atol=0)
    assert model.bits(text) == pytest.approx(-np.log2(expected).sum())


@pytest.mark.parametrize("context", [b"    ", b"anan", b"\n\n\n\n", b"\x01\x02\x03\x04"])
def test_probabilities_of_all_bytes_sum_to_one(model: FiveGrams, context: bytes) -> None:
    chances = [float(model.probabilities(context + bytes([byte]))[-1]) for byte in range(256)]
    assert sum(chances) == pytest.approx(1, abs=1e-12)
    assert min(chances) > 0


def test_an_empty_document_costs_nothing(model: FiveGrams) -> None:
    assert model.bits(b"") == 0


def test_gzip_counts_whole_files() -> None:
    found = gzip_bits(TEXTS)
    assert found.apart == 8 * sum(len(gzip.compress(text, 9, mtime=0)) for text in TEXTS)
    assert found.together == 8 * len(gzip.compress(b"".join(TEXTS), 9, mtime=0))
