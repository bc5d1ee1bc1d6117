"""Attention for a target whose cube takes operands from memory and whose vector cores are the scarce ones: keys are decoded once a row.

A launch in front gathers and decodes a row's keys to BF16 in a workspace, window before entries; the keys behind the last one of a block are
zero. Then an instance, one row and a block of heads, loads them straight into its products. Shares are multiplied as two BF16 pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.kernel import Part, Request, Schedule, Workspace, width
from tapeout.codegen.row_values import Bound, Rows, bind, row_count
from tapeout.dialects.types import Blocks

Value = Any
LOWEST = -1e30
"""What the running maximum starts from and what a masked logit is."""
FP4 = "f4E2M1FN"
ORDER = "head: blocks of {block_keys} keys ascending, window before entries; logits over columns; shares in two pieces, the high one first"


@dataclass(frozen=True)
class _Source:
    """One source of keys: operand numbers of its rows, ids and counts, and its first key and room in a row's part of the workspace."""

    rows: int
    ids: int
    counts: int
    first: int
    room: int


def sources(request: Request, block: int) -> list[_Source]:
    """Window, then entries where there are some; each has room for whole blocks of keys."""
    has_entries = len(request.operands) > 5 and isinstance(request.operands[5], Blocks)
    found: list[_Source] = []
    for rows in (1, 5) if has_entries else (1,):
        room = -(-width(request.operands[rows + 1]) // block) * block
        found.append(_Source(rows, rows + 1, rows + 2, sum(s.room for s in found), room))
    return found


def decoded_keys(request: Request, schedule: Schedule, columns: int) -> tuple[tuple[Part, ...], Workspace]:
    """The launches that decode the keys of a row, one a source, and where they go. Grid: rows x blocks of keys."""
    block = schedule["block_keys"]
    each = max(n for n in range(1, schedule["decoded_keys"] + 1) if block % n == 0)
    found = sources(request, block)
    room = sum(s.room for s in found)

    def part(source: _Source) -> Part:
        def body(*buffers: Value) -> None:
            b = bind(request, buffers)
            row, at = t.program_id(0), t.mul(t.program_id(1), each)
            count = t.scalar(b.operands[source.counts].values, row)
            needed = t.mul(t.ceil_div(count, block), block)
            t.when(t.less(at, needed), lambda: _decode(request, b, source, row, at, count, each, columns, room))

        return Part(body, lambda *buffers: [row_count(buffers), source.room // each])

    return tuple(part(source) for source in found), Workspace("bf16", lambda rows: rows * room * columns)


def _decode(request: Request, b: Bound, source: _Source, row: Value, at: Value, count: Value, each: int, columns: int, room: int) -> None:
    """Keys [at, at + each) of a source to their place; those behind `count` become zero: all are cleared, then the others are written."""
    rows, ids = b.operands[source.rows], b.operands[source.ids]
    left = t.sub(count, at)
    first = t.add(t.mul(row, width(request.operands[source.ids])), at)
    pieces = [t.gather(buffer, ids.values, first, each, wide, valid=t.minimum(left, each)) for buffer, wide in rows.buffers()]
    place = t.add(t.mul(row, room), t.add(at, source.first))
    keys = t.View(b.workspaces[0], [None, columns])
    keys.store([place, 0], t.full([each, columns], 0.0, "bf16"), t.add(place, each))
    keys.store([place, 0], _values(rows, pieces), t.add(place, left))


def _values(rows: Rows, pieces: Sequence[Value]) -> Value:
    """The BF16 numbers [keys, D] of gathered codes and scales; every product of a code and its scale is one."""
    element = rows.number.element
    if element == FP4:
        return _fp4_values(*pieces)
    return t.exact_bf16(t.dequantize_q8(*pieces)) if element == "f8E4M3FN" else pieces[0]


def _fp4_values(codes: Value, scales: Value) -> Value:
    """FP4 rows in their own order of columns: factors are repeated, and halves joined, by joining lanes."""
    factors = t.mul(t.e8m0(scales) if t.kind_of(scales) == "i8" else t.decode_e4m3(scales), t.FP4_BIAS)
    repeats = t.shape_of(codes)[-1] // t.shape_of(factors)[-1]
    while repeats > 1:
        factors, repeats = t.interleave(factors, factors), repeats // 2
    wide = t.widen_unsigned(codes, "i16")
    even, odd = (t.exact_bf16(t.mul(_fp4_half(wide, left), factors)) for left in (12, 8))
    return t.interleave(even, odd)


def _fp4_half(wide: Value, left: int) -> Value:
    """The codes whose sign lies `left` bits below bit 15 of i16 lanes, as f32 values times 2^-14: exponent and mantissa bit put into an f16."""
    return t.cast(t.bitcast(t.bit_and(t.shr(t.shl(wide, left), 3), -0x7200), "f16"), "f32")


def attended(q: Value, b: Bound, found: Sequence[_Source], row: Value, sink: Value, scale: float, block: int) -> Value:
    """[heads, D] f32: sums over all sources, then the sink's share of the denominator."""
    heads, columns = t.shape_of(q)
    room = sum(s.room for s in found)
    keys = t.View(b.workspaces[0], [None, columns])
    state = [t.full([heads], LOWEST), t.full([heads], 0.0), t.full([heads, columns], 0.0)]
    for source in found:
        count = t.scalar(b.operands[source.counts].values, row)
        start = t.add(t.mul(row, room), source.first)

        def step(at: Value, peak: Value, total: Value, sums: Value, count: Value = count, start: Value = start) -> list[Value]:
            values = keys.load([t.add(start, at), 0], [block, columns])
            seen = t.less(t.iota(block), t.splat(t.sub(count, at), [block]))
            logits = t.dot(q, t.transpose(values), t.full([heads, block], 0.0))
            logits = t.select(t.broadcast(seen, 0, heads), t.mul(logits, scale), LOWEST)
            grown = t.maximum(peak, t.reduce(logits, "max", 1))
            kept = t.exp(t.sub(peak, grown))
            shares = t.exp(t.sub(logits, t.broadcast(grown, 1, block)))
            total = t.add(t.mul(total, kept), t.reduce(shares, "add", 1))
            high = t.bitcast(t.bit_and(t.bitcast(shares, "i32"), -0x10000), "f32")  # cut off, not rounded: compilers drop a rounding pair
            low = t.cast(t.sub(shares, high), "bf16")
            new = t.dot(low, values, t.dot(t.exact_bf16(high), values, t.full([heads, columns], 0.0)))
            return [grown, total, t.add(t.mul(sums, t.broadcast(kept, 1, columns)), new)]

        state = t.loop(0, count, block, state, step)
    peak, total, sums = state
    highest = t.maximum(peak, sink)
    kept = t.exp(t.sub(peak, highest))
    whole = t.add(t.mul(total, kept), t.exp(t.sub(sink, highest)))
    share = t.div(kept, t.select(t.greater(whole, 0.0), whole, 1.0))
    return t.mul(sums, t.broadcast(share, 1, columns))


def turned(x: Value, cos: Value, sin: Value, inverse: bool) -> Value:
    """Pairs of the BF16 tile x [heads, n] turned by angles [n / 2], or turned back, in f32: neighbours change places in an exact product."""
    heads, n = t.shape_of(x)
    cos, sin = (t.broadcast(t.interleave(a, a), 0, heads) for a in (cos, sin))
    return t.add(t.mul(t.cast(x, "f32"), cos), t.mul(t.dot(x, _neighbours(n, inverse), t.full([heads, n], 0.0)), sin))


def _neighbours(n: int, inverse: bool) -> Value:
    """[n, n] BF16: a row times it is -odd, even, -odd, even, ... of its pairs; for turning back, odd, -even, ..."""
    row, column = t.broadcast(t.iota(n), 1, n), t.broadcast(t.iota(n), 0, n)
    sign = t.mul(t.sub(t.mul(t.bit_and(column, 1), 2), 1), -1 if inverse else 1)
    return t.exact_bf16(t.cast(t.select(t.equal(t.bit_xor(row, 1), column), sign, 0), "f32"))


__all__ = ["ORDER", "attended", "decoded_keys", "sources", "turned"]
