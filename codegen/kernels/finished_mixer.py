"""The mixer's last step with a row in every lane: coefficients of a block of rows from products and squares of segments (model spec 3.2).

A coefficient is a tile of its own, one number a row: sums over streams and the rounds of Sinkhorn's scaling are arithmetic of single lanes,
nothing waits for another lane. Sums over segments pass through a workspace, which turns them from a tile a row into a tile a coefficient; those
of a single row are picked out of their tile.
"""

from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.kernel import Request
from tapeout.codegen.row_values import Bound, Rows

Value = Any
Matrix = list[list[Value]]
"""S x S tiles of one shape."""


def finish_lanes(request: Request, sizes: tuple[int, int, int, int, int], count: int, b: Bound, first: Value) -> None:
    """Stores the coefficients of rows [first, first + count); `sizes`: streams, k, segments of a group, groups, columns of products. The
    last workspaces take a row's products and squares."""
    (s, k, grouped, groups, padded), last = sizes, t.minimum(t.add(first, count), b.rows)
    products, squares, sums, powers = b.workspaces
    base, scale = ([_everywhere(v, i, count) for i in range(n)] for v, n in ((b.operands[2], (2 + s) * s), (b.operands[3], 3)))

    def added(row: Value) -> tuple[Value, Value]:
        """A row's products [columns] and squares [1]."""
        first = t.mul(row, grouped)
        parts = [t.View(products, [None, padded]).load([t.mul(t.add(first, j), groups), 0], [groups, padded]) for j in range(grouped)]
        power = [t.View(squares, [None, groups]).load([t.add(first, j), 0], [1, groups]) for j in range(grouped)]
        return t.reduce(_in_order(parts), "add", 0), t.reduce(_in_order(power), "add", 1)

    def add_up(row: Value) -> None:
        products, power = added(row)
        t.View(sums, [None, padded]).store([row, 0], t.broadcast(products, 0, 1))
        t.View(powers, [None]).store([row], power)

    def of_one(number: int) -> Value:
        return t.broadcast(t.reduce(t.select(t.equal(t.iota(padded), number), one, 0.0), "add", 0), 0, 1)

    def of_each(number: int) -> Value:
        return t.merge_last(t.View(sums, [b.rows, padded]).load([first, number], [count, 1]))

    if count == 1:
        one, power = added(first)
    else:
        t.loop(first, last, 1, [], add_up)
        power = t.View(powers, [b.rows]).load([first], [count])
    factor, found = t.rsqrt(t.add(t.mul(power, 1.0 / k), request["norm_epsilon"])), of_one if count == 1 else of_each

    def mixed(number: int) -> Value:
        return t.add(t.mul(t.mul(found(number), factor), scale[min(number // s, 2)]), base[number])

    pre, post, comb = b.results
    for i in range(s):
        _store(pre, b.rows, first, i, t.add(t.sigmoid(mixed(i)), request["epsilon"]))
        _store(post, b.rows, first, i, t.mul(t.sigmoid(mixed(s + i)), 2.0))
    balanced = _balanced([[mixed((2 + i) * s + j) for j in range(s)] for i in range(s)], request["iterations"], request["epsilon"])
    for i, line in enumerate(balanced):
        for j, value in enumerate(line):
            _store(comb, b.rows, first, i * s + j, value)


def _in_order(parts: list[Value]) -> Value:
    total = parts[0]
    for part in parts[1:]:
        total = t.add(total, part)
    return total


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
