"""The mixer's last step with a row in every lane: coefficients of a block of rows from sums of segments (model spec 3.2).

A coefficient is a tile of its own, one number a row: sums over streams and the rounds of Sinkhorn's scaling are arithmetic of single lanes,
nothing waits for another lane. Sums that a group's instance has added up lie with rows side by side, so that a coefficient is read as a tile; of
a row alone all segments are read at once, a column in every lane, and numbers are picked out of the line that they add up to.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.kernel import KernelError, Request
from tapeout.codegen.row_values import Bound, Rows

Value = Any
Matrix = list[list[Value]]
"""S x S tiles of one shape."""


@dataclass(frozen=True)
class Sums:
    """Sums of segments as a launch in front left them. Where `lanes` is 0: [rows, groups of `grouped` segments, `padded` columns], squares behind
    the coefficients. Else sums of groups: [row blocks, groups, `padded` columns, `lanes` rows], and squares, without columns, in a workspace of
    their own. A row has `k` columns."""

    streams: int
    k: int
    grouped: int
    groups: int
    padded: int
    lanes: int

    @property
    def count(self) -> int:
        """Coefficients of a row."""
        return (2 + self.streams) * self.streams


def finish(request: Request, sums: Sums, count: int, b: Bound, first: Value) -> None:
    """Stores the coefficients of rows [first, first + count)."""
    if sums.lanes % count or (count > 1 and not sums.lanes):
        raise KernelError(f"schedule entry finished_rows is {count}: expected 1 where segments are not joined, else a divisor of block_rows")
    s, (pre, post, comb) = sums.streams, b.results
    mixed = (_of_each if sums.lanes else _of_one)(request, sums, count, b, first)
    for i in range(s):
        _store(pre, b.rows, first, i, t.add(t.sigmoid(mixed(i)), request["epsilon"]))
        _store(post, b.rows, first, i, t.mul(t.sigmoid(mixed(s + i)), 2.0))
    balanced = _balanced([[mixed((2 + i) * s + j) for j in range(s)] for i in range(s)], request["iterations"], request["epsilon"])
    for i, line in enumerate(balanced):
        for j, value in enumerate(line):
            _store(comb, b.rows, first, i * s + j, value)


def _of_each(request: Request, sums: Sums, count: int, b: Bound, first: Value) -> Callable[[int], Value]:
    """mixed(number): a coefficient in front of its last function, a row in every lane."""
    (products, squares), lanes, s = b.workspaces[:2], sums.lanes, sums.streams
    at, lane = t.mul(t.quotient(first, lanes), sums.groups), t.remainder(first, lanes)

    def found(work: Value, columns: int, number: int) -> Value:
        lines = [t.add(t.mul(at, columns), group * columns + number) for group in range(sums.groups)]
        return _in_halves([t.View(work, [None, lanes]).load([line, lane], [count]) for line in lines])

    factor = _factor(request, sums, found(squares, 1, 0))
    scale = [_everywhere(b.operands[3], i, count) for i in range(3)]

    def mixed(number: int) -> Value:
        product = t.mul(found(products, sums.padded, number), factor)
        return t.add(t.mul(product, scale[min(number // s, 2)]), _everywhere(b.operands[2], number, count))

    return mixed


def _of_one(request: Request, sums: Sums, count: int, b: Bound, row: Value) -> Callable[[int], Value]:
    """The same of a single row: all of a line at once, in columns."""
    padded, s, start = sums.padded, sums.streams, t.mul(row, sums.grouped * sums.groups)
    columns, scale = t.iota(padded), [_everywhere(b.operands[3], i, padded) for i in range(3)]
    base, view = t.View(b.operands[2].values, [sums.count]).load([0], [padded], sums.count), t.View(b.workspaces[0], [None, padded])

    def group(number: int) -> Value:
        total = t.full([padded], 0.0)
        for segment in range(sums.grouped):
            total = t.add(total, view.load([t.add(start, number * sums.grouped + segment), 0], [padded]))
        return total

    def picked(line: Value, number: int, size: int) -> Value:
        return t.broadcast(t.reduce(t.select(t.equal(columns, number), line, 0.0), "add", 0), 0, size)

    line = _in_halves([group(number) for number in range(sums.groups)])
    factor = _factor(request, sums, picked(line, sums.count, padded))
    scales = t.select(t.less(columns, s), scale[0], t.select(t.less(columns, 2 * s), scale[1], scale[2]))
    mixed = t.add(t.mul(t.mul(line, factor), scales), base)
    return lambda number: picked(mixed, number, count)


def _factor(request: Request, sums: Sums, squares: Value) -> Value:
    """What the products of a row are scaled by."""
    return t.rsqrt(t.add(t.mul(squares, 1.0 / sums.k), request["norm_epsilon"]))


def _in_halves(parts: list[Value]) -> Value:
    """Each of the first half plus its fellow of the second, until one is left."""
    while len(parts) > 1:
        half = -(-len(parts) // 2)
        parts = [t.add(*parts[i :: half]) if i + half < len(parts) else parts[i] for i in range(half)]
    return parts[0]


def _everywhere(x: Rows, number: int, count: int) -> Value:
    """One number of a vector for every row, [count]."""
    return t.broadcast(t.cast(t.View(x.values, [None]).load([number], []), "f32"), 0, count)


def _store(result: Rows, rows: Value, first: Value, column: int, value: Value) -> None:
    result.store(rows, [first, column], t.split_last(value, 1))


def _balanced(c: Matrix, iterations: int, epsilon: float) -> Matrix:
    """Softmax over destinations, then columns; then `iterations` - 1 rounds of rows and columns."""
    s = len(c)
    peaks = [_over(line, t.maximum) for line in c]
    grown = [[t.exp(t.sub(x, peak)) for x in line] for line, peak in zip(c, peaks, strict=True)]
    soft = [[t.add(x, epsilon) for x in line] for line in _scaled(grown, 0.0)]
    start = _turned(_scaled(_turned(soft), epsilon))

    def step(_: Value, *numbers: Value) -> list[Value]:
        p = [list(numbers[i * s : (i + 1) * s]) for i in range(s)]
        return [x for line in _turned(_scaled(_turned(_scaled(p, epsilon)), epsilon)) for x in line]

    found = t.loop(1, iterations, 1, [x for line in start for x in line], step)
    return [found[i * s : (i + 1) * s] for i in range(s)]


def _scaled(p: Matrix, epsilon: float) -> Matrix:
    """Every line over its sum plus epsilon."""
    inverse = [t.near_quotient(1.0, t.add(_over(line, t.add), epsilon)) for line in p]
    return [[t.mul(x, factor) for x in line] for line, factor in zip(p, inverse, strict=True)]


def _turned(p: Matrix) -> Matrix:
    return [list(column) for column in zip(*p, strict=True)]


def _over(line: list[Value], combine: Any) -> Value:
    """A line's numbers combined pairwise: half of the steps wait for another."""
    while len(line) > 1:
        line = [combine(*line[i : i + 2]) if i + 1 < len(line) else line[i] for i in range(0, len(line), 2)]
    return line[0]
