"""Table sizes of the Engram hash: consecutive primes, handed out layer by layer (docs/model.md, section 6.2).

Plain integers, no numpy, since the configuration's rules need them. Multipliers and row numbers are in `engram.py`.
"""

from collections.abc import Iterator

_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def layer_primes(layers: int, orders: int, heads: int, floor: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Returns primes [layers][orders][heads], ascending over all of them, from the first prime at or above `floor`.

    The released code restarts its search for every order and skips used primes, which is the same sequence.
    """
    source = _primes_from(floor)
    return tuple(tuple(tuple(next(source) for _ in range(heads)) for _ in range(orders)) for _ in range(layers))


def is_prime(number: int) -> bool:
    """Says whether `number` is prime; exact below 3.3e24 (Miller-Rabin with the first twelve primes)."""
    if number < 2:
        return False
    if any(number % witness == 0 for witness in _WITNESSES):
        return number in _WITNESSES
    twos = ((number - 1) & -(number - 1)).bit_length() - 1
    return all(_passes(number, witness, (number - 1) >> twos, twos) for witness in _WITNESSES)


def _passes(number: int, witness: int, odd: int, twos: int) -> bool:
    power = pow(witness, odd, number)
    if power in (1, number - 1):
        return True
    for _ in range(twos - 1):
        power = power * power % number
        if power == number - 1:
            return True
    return False


def _primes_from(floor: int) -> Iterator[int]:
    number = floor
    while True:
        if is_prime(number):
            yield number
        number += 1
