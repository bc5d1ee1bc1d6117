"""Primes, multipliers and offsets of the Engram hash against model spec 6.2 and appendix C; rows are those of `engram.hash`."""

from __future__ import annotations

import numpy as np

from tapeout.models.deepseek_v41.config import shipped_config
from tapeout.models.deepseek_v41.engram import multipliers
from tapeout.models.deepseek_v41.engram_primes import is_prime, layer_primes

FIRST = """16000057 16000079 16000081 16000097 16000121 16000129 16000133 16000183
16000189 16000207 16000211 16000253 16000277 16000289 16000307 16000321
16000339 16000381 16000393 16000399 16000403 16000409 16000447 16000463"""
SECOND = """16000477 16000487 16000499 16000507 16000511 16000573 16000609 16000627
16000667 16000669 16000693 16000697 16000711 16000729 16000759 16000769
16000781 16000799 16000813 16000819 16000841 16000877 16000879 16000889"""
def grid(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, line.split())) for line in text.splitlines())


def test_primes_of_the_released_tables() -> None:
    one, two = shipped_config("v4.1-flash").engram_tables
    assert (one.layer, one.primes, one.rows, one.columns) == (1, grid(FIRST), 384_006_168, 24)
    assert (two.layer, two.primes, two.rows, two.columns) == (14, grid(SECOND), 384_016_682, 24)
    assert one.offsets[:3] == (0, 16000057, 16000057 + 16000079)
    assert one.offsets[-1] + one.primes[-1][-1] == one.rows


def test_primes_of_the_tiny_tables() -> None:
    one, two = shipped_config("tiny").engram_tables
    assert (one.primes, two.primes) == (((257, 263), (269, 271)), ((277, 281), (283, 293)))


def test_multipliers() -> None:
    one, two = shipped_config("v4.1-flash").engram_tables
    assert one.multipliers == (76632096046245, 4839876093313, 35959672319349, 73987337458391)
    assert two.multipliers == (67716810739261, 51510806800915, 30921347202721, 82619226485591)
    tiny = shipped_config("tiny").engram_tables
    assert [table.multipliers for table in tiny] == [
        (15624748274515705, 986816876211159, 7331925616191283),
        (15599337840602443, 7563982961475545, 4617643475272425),
    ]


def test_products_stay_below_two_to_the_63() -> None:
    for layer, compressed in ((1, 99092), (14, 99092), (1, 486), (3, 1)):
        assert all(value % 2 == 1 and value * (compressed - 1) < 2**63 for value in multipliers(layer, 16, compressed))


def test_primality_by_a_sieve() -> None:
    sieve = np.ones(20_000, dtype=bool)
    sieve[:2] = False
    for number in range(2, 142):
        sieve[number * number :: number] = False
    assert [number for number in range(20_000) if is_prime(number)] == np.flatnonzero(sieve).tolist()
    assert not is_prime(3215031751) and is_prime(2**61 - 1)  # a strong pseudoprime to bases 2, 3, 5, 7
    assert layer_primes(2, 1, 2, 2) == (((2, 3),), ((5, 7),))
