"""Exact ranking without sorting: floats as integers of the same order, and the largest threshold that a count or a mass still reaches.

A threshold is found bit by bit, one pass over the values for each bit, in integers: the answer is exact and does not depend on the order in
which the values lie.
"""

from collections.abc import Callable
from typing import Any

from tapeout.codegen import tile_builder as t

Value = Any
SIGN = 31
WORD_BITS = 32
LOWEST_KEY = -(2**SIGN)


def ordered_f32(x: Value) -> Value:
    """f32 to i32 in the same order; both zeros are 0."""
    return _ordered(t.bitcast(x, "i32"), 0x7FFFFFFF)


def ordered_bf16(x: Value) -> Value:
    """f32, rounded to bf16, to i32 in the same order, -2^15 to 2^15 - 1; both zeros are 0."""
    return _ordered(t.cast(t.bitcast(t.cast(x, "bf16"), "i16"), "i32"), 0x7FFF)


def _ordered(bits: Value, magnitude: int) -> Value:
    # The magnitude of a negative number counts downwards: -0 would be -1.
    key = t.bit_xor(bits, t.bit_and(t.shr(bits, SIGN), magnitude))
    return t.select(t.equal(key, -1), 0, key)


def f32_of(key: Value) -> Value:
    """The number behind a key of `ordered_f32`."""
    return t.bitcast(t.bit_xor(key, t.bit_and(t.shr(key, SIGN), 0x7FFFFFFF)), "f32")


def largest(low: int, bits: int, holds: Callable[[Value], Value]) -> Value:
    """The largest of low, low + 1, ..., low + 2^bits - 1 for which `holds`, a rank 0 i32; `low` where it holds for none.

    `holds(candidate)` is a rank 0 mask that is false behind the first candidate for which it is false.
    """
    start, highest = t.full([], low, "i32"), 1 << (bits - 1)
    return largest_from(start, bits, t.full([], highest - (1 << WORD_BITS if bits == WORD_BITS else 0), "i32"), holds)


def largest_from(low: Value, bits: int | Value, unit: Value, holds: Callable[[Value], Value]) -> Value:
    """The same where `low`, how many bits are looked for, and the highest of them (`unit`, 2^(bits - 1)) are known when the kernel runs."""

    def step(_: Value, found: Value, bit: Value) -> list[Value]:
        candidate = t.add(found, bit)
        return [t.select(holds(candidate), candidate, found), t.shr_unsigned(bit, 1)]

    return t.loop(0, bits, 1, [low, unit], step)[0]
