"""Block sizes that divide an extent: tiles of the NVIDIA targets have powers of two, others are rounded up and their lanes idle."""

TURN = 256
"""What one more turn of a loop costs, in lanes."""


def padded(n: int) -> int:
    """The power of two that an extent is rounded up to."""
    return 1 << (n - 1).bit_length()


def fitting(n: int, limit: int, multiple: int = 1) -> int:
    """The divisor of n, a multiple of `multiple`, with the least idle lanes and turns; n where none is at most `limit`."""
    found = [d for d in range(multiple, min(n, limit) + 1, multiple) if n % d == 0]
    return min(found, key=lambda d: (n // d) * (padded(d) + TURN), default=n)


def power(n: int, limit: int, least: int = 1) -> int:
    """The largest power of two up to `limit` that divides n, or any fitting divisor where it is less than `least`."""
    found = min(n & -n, limit)
    return found if found >= least else fitting(n, limit)
