"""The mixer of the residual streams: pre, post and comb from X and fn (model spec 3.2).

Without segments an instance multiplies a block of rows and finishes its rows one by one. With them K is cut over instances, fn's f32 numbers are
three BF16 ones each, which tensor cores multiply exactly, and a second launch finishes (`finished_mixer.py`). A row's bits depend neither on the
rows beside it nor on how many segments one instance adds up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.kernel import Kernel, KernelError, Part, Request, Schedule, Workspace, family
from tapeout.codegen.kernels.finished_mixer import Sums, finish
from tapeout.codegen.kernels.linear import number_of, weight_layout
from tapeout.codegen.kernels.linear import padded as whole_panels
from tapeout.codegen.kernels.streams import stream_shape
from tapeout.codegen.row_values import Bound, bind, block, row_count
from tapeout.dialects.format import BF16, FP32

Value = Any
HIGH_HALF = -65536
"""Bits of an f32 number that are those of a BF16 one."""


@family("mhc.mixer")
def mixer(request: Request, schedule: Schedule) -> Kernel:
    """pre, post [?, S] and comb [?, S, S] from X [?, S, H] and fn [(2+S)S, S H]. Grid: row blocks; with `segments` in the schedule row
    blocks x segments, or groups of them where they are `joined`, then blocks of `finished_rows` rows.

    Squares are summed in `square_columns` places, then over those. `grouped` neighbouring segments are added up one after another, then the
    groups: where `joined`, by the instance that multiplies them, else by the launch that finishes. Where instances add up and fn is `decoded`, a
    launch in front makes its thirds.
    """
    return _in_segments(request, schedule) if schedule.get("segments", 0) else _whole(request, schedule)


def _whole(request: Request, schedule: Schedule) -> Kernel:
    streams, columns = stream_shape(request)
    k, count, panel, block_rows = streams * columns, (2 + streams) * streams, schedule["panel"], schedule["block_rows"]
    padded, block_k = whole_panels(count, panel), block(schedule, "block_k", k)

    def multiply(b: Bound, row: Value) -> None:
        (x, fn), (products, squares) = b.operands[:2], b.workspaces

        def step(k0: Value, acc: Value, squares: Value) -> list[Value]:
            u = x.load(b.rows, [row, k0], [block_rows, block_k])
            weights = t.View(fn.values, [k, padded], panel).load([k0, 0], [block_k, padded])
            return [t.dot(u, t.cast(weights, "f32"), acc), t.add(squares, t.reduce(t.mul(u, u), "add", 1))]

        acc, sums = t.loop(0, k, block_k, [t.full([block_rows, padded], 0.0), t.full([block_rows], 0.0)], step)
        t.View(products, [b.rows, padded]).store([row, 0], acc)
        t.View(squares, [b.rows, 1]).store([row, 0], t.split_last(sums, 1))

    def body(*buffers: Value) -> None:
        b, row = bind(request, buffers), t.mul(t.program_id(0), block_rows)
        multiply(b, row)
        last = t.minimum(t.add(row, block_rows), b.rows)
        t.loop(row, last, 1, [], lambda r: _finish(request, (streams, k, padded), b, r))

    work = Workspace("f32", lambda rows: rows * padded), Workspace("f32", lambda rows: rows)
    layouts = {1: weight_layout((count, k), number_of(request, 1), False, panel)}
    order = f"coefficient: sum over k in blocks of {block_k}, ascending"
    return Kernel(body, lambda *b: [t.ceil_div(row_count(b), block_rows)], order, layouts, work)


@dataclass(frozen=True)
class _Cut:
    """How the mixer is cut: `segments` of `each` columns of K, in steps of `block_k`; an instance adds `own` of them up. `places`: squares of a
    segment that are summed side by side. Squares take the column behind the `count` coefficients where `own` is 1."""

    k: int
    count: int
    padded: int
    panel: int
    segments: int
    own: int
    block_rows: int
    block_k: int
    places: int
    decoded: int

    @property
    def each(self) -> int:
        """Columns of a segment."""
        return self.k // self.segments

    def zeros(self) -> list[Value]:
        """Three sums of products and squares by place, before the first step."""
        return [*(t.full([self.block_rows, self.padded], 0.0) for _ in range(3)), t.full([self.block_rows, self.places], 0.0)]

    def weights(self, b: Bound, k0: Value, size: int) -> list[Value]:
        """Thirds of fn's columns [k0, k0 + size), from where a launch in front left them or made here."""
        if self.decoded:
            view = t.View(b.workspaces[-1], [None, self.padded])
            return [view.load([t.add(k0, part * self.k), 0], [size, self.padded]) for part in range(3)]
        return thirds(t.View(b.operands[1].values, [self.k, self.padded], self.panel).load([k0, 0], [size, self.padded]))

    def added(self, b: Bound, row: Value, k0: Value, state: Sequence[Value]) -> list[Value]:
        """The sums of one step more."""
        x, rows = b.operands[0], self.block_rows
        u = x.raw(b.rows, [row, k0], [rows, self.block_k])
        products = [t.dot(u, part, acc) for part, acc in zip(self.weights(b, k0, self.block_k), state[:3], strict=True)]
        squares = state[3]
        for first in range(0, self.block_k, self.places):
            part = u if self.block_k == self.places else x.raw(b.rows, [row, t.add(k0, first)], [rows, self.places])
            squares = t.add(squares, _square(part))
        return [*products, squares]

    def segment(self, b: Bound, row: Value, first: Value) -> list[Value]:
        """A segment's products [block_rows, padded] and squares [block_rows]."""
        step: Any = lambda k0, *state: self.added(b, row, k0, state)  # noqa: E731
        return _ended(t.loop(first, t.add(first, self.each), self.block_k, self.zeros(), step))

    def joined(self, b: Bound, row: Value, first: Value) -> list[Value]:
        """The same of a group, its segments added up one after another without a loop in a loop: copies of the next one go on where one ends."""

        def step(k0: Value, *state: Value) -> list[Value]:
            found, totals = self.added(b, row, k0, state[:4]), state[4:]
            ends = t.equal(t.remainder(t.add(k0, self.block_k), self.each), 0)

            def at_end() -> list[Value]:
                return [*self.zeros(), *(t.add(total, one) for total, one in zip(totals, _ended(found), strict=True))]

            return t.when(ends, at_end, lambda: [*found, *totals])

        start = [*self.zeros(), t.full([self.block_rows, self.padded], 0.0), t.full([self.block_rows], 0.0)]
        return t.loop(first, t.add(first, self.own * self.each), self.block_k, start, step)[-2:]

    def store_segment(self, b: Bound, number: Value, piece: Value) -> None:
        """One line a row: products, and squares behind them."""
        row = t.mul(number, self.block_rows)
        products, squares = self.segment(b, row, t.mul(piece, self.each))
        behind = t.broadcast(t.equal(t.iota(self.padded), self.count), 0, self.block_rows)
        line = t.select(behind, t.broadcast(squares, 1, self.padded), products)
        t.View(b.workspaces[0], [b.rows, self.segments * self.padded]).store([row, t.mul(piece, self.padded)], line)

    def store_group(self, b: Bound, number: Value, piece: Value) -> None:
        """Rows side by side. Squares have a workspace: mixed with products they would be summed as those lie in registers."""
        products, squares = self.joined(b, t.mul(number, self.block_rows), t.mul(piece, self.own * self.each))
        at = t.add(t.mul(number, self.segments // self.own), piece)
        t.View(b.workspaces[0], [None, self.block_rows]).store([t.mul(at, self.padded), 0], t.transpose(products))
        t.View(b.workspaces[1], [None]).store([t.mul(at, self.block_rows)], squares)

    def workspaces(self) -> tuple[Workspace, ...]:
        """Sums, squares of groups, and thirds of fn."""

        def room(columns: int) -> Workspace:
            return Workspace("f32", lambda rows: -(-rows // self.block_rows) * self.block_rows * (self.segments // self.own) * columns)

        thirds_of_fn = [Workspace("bf16", lambda rows: 3 * self.k * self.padded)] if self.decoded else []
        return (room(self.padded), *([room(1)] if self.own > 1 else []), *thirds_of_fn)


def _cut(request: Request, schedule: Schedule) -> _Cut:
    """Raises `KernelError` where a row does not fit."""
    streams, columns = stream_shape(request)
    k, count, segments = streams * columns, (2 + streams) * streams, schedule["segments"]
    each, padded = k // block(schedule, "segments", k), whole_panels(count, schedule["panel"])
    places = block({"square_columns": schedule.get("square_columns", schedule["block_k"])}, "square_columns", each)
    block_k = block(schedule, "block_k", each, places)
    if (number_of(request, 0), number_of(request, 1)) != (BF16, FP32) or padded == count or block_k == each > places:
        raise KernelError(f"the mixer in segments multiplies BF16 rows by FP32 numbers, has a column behind its {count}, and several steps where "
                          f"squares have fewer places than one: found {number_of(request, 0)}, {number_of(request, 1)}, {padded} columns of "
                          f"coefficients, segments of {each} in steps of {block_k}, {places} places")  # fmt: skip
    own = block({"grouped": schedule.get("grouped", 1)}, "grouped", segments) if schedule.get("joined") else 1
    decoded = schedule.get("decoded", 0) if own > 1 else 0
    return _Cut(k, count, padded, schedule["panel"], segments, own, schedule["block_rows"], block_k, places, decoded)


def _in_segments(request: Request, schedule: Schedule) -> Kernel:
    cut, streams = _cut(request, schedule), stream_shape(request)[0]
    grouped, finished = block({"grouped": schedule.get("grouped", 1)}, "grouped", cut.segments), schedule.get("finished_rows", 1)
    sums = Sums(streams, cut.k, grouped, cut.segments // grouped, cut.padded, cut.block_rows if cut.own > 1 else 0)

    def decode(*buffers: Value) -> None:
        b, k0 = bind(request, buffers), t.mul(t.program_id(0), cut.places)
        numbers = t.View(b.operands[1].values, [cut.k, cut.padded], cut.panel).load([k0, 0], [cut.places, cut.padded])
        for number, part in enumerate(thirds(numbers)):
            t.View(b.workspaces[-1], [None, cut.padded]).store([t.add(k0, number * cut.k), 0], part)

    def multiply(*buffers: Value) -> None:
        (cut.store_segment if cut.own == 1 else cut.store_group)(bind(request, buffers), t.program_id(0), t.program_id(1))

    def body(*buffers: Value) -> None:
        finish(request, sums, finished, bind(request, buffers), t.mul(t.program_id(0), finished))

    order = (f"coefficient: sum over k, ascending, for each third of fn; squares in {cut.places} places; then over {grouped} segments ascending, "
             f"then over {sums.groups} groups of them, halves together")  # fmt: skip
    layouts = {1: weight_layout((cut.count, cut.k), number_of(request, 1), False, cut.panel)}
    before = Part(multiply, lambda *b: [t.ceil_div(row_count(b), cut.block_rows), cut.segments // cut.own])
    parts = (*([Part(decode, lambda *b: [cut.k // cut.places])] if cut.decoded else []), before)
    return Kernel(body, lambda *b: [t.ceil_div(row_count(b), finished)], order, layouts, cut.workspaces(), parts)


def _ended(state: Sequence[Value]) -> list[Value]:
    """Products and squares of a segment whose last step is done."""
    return [t.add(t.add(state[0], state[1]), state[2]), t.reduce(state[3], "add", 1)]


def thirds(x: Value) -> list[Value]:
    """Three BF16 tiles whose sum is an f32 tile of normal numbers, the smallest first: each takes the next eight bits of the fraction."""
    found = []
    for _ in range(2):
        bits = t.bitcast(x, "i32")
        high = t.bitcast(t.bit_and(bits, t.like(HIGH_HALF, bits)), "f32")
        found.append(t.cast(high, "bf16"))
        x = t.sub(x, high)
    return [t.cast(x, "bf16"), *reversed(found)]


def _square(u: Value) -> Value:
    wide = t.cast(u, "f32")
    return t.mul(wide, wide)


def _finish(request: Request, sizes: tuple[int, int, int], b: Bound, row: Value) -> None:
    """Coefficients of one row from its products and squares; `sizes`: streams, k, columns of products."""
    (s, k, padded), (_, _, base, scale), (products, squares) = sizes, b.operands, b.workspaces
    epsilon, total = request["epsilon"], (2 + s) * s
    power = t.View(squares, [None]).load([row], [1])
    factor = t.rsqrt(t.add(t.mul(power, 1.0 / k), request["norm_epsilon"]))

    def part(number: int, first: int, count: int) -> Value:
        sums = t.merge_first(t.View(products, [None, padded]).load([row, first], [1, count]))
        weight = t.merge_last(t.broadcast(scale.vector(3, number, 1), 1, count))
        return t.add(t.mul(t.mul(sums, t.merge_last(t.broadcast(factor, 1, count))), weight), base.vector(total, first, count))

    pre, post, comb = b.results
    pre.store(None, [row, 0], t.broadcast(t.add(t.sigmoid(part(0, 0, s)), epsilon), 0, 1))
    post.store(None, [row, 0], t.broadcast(t.mul(t.sigmoid(part(1, s, s)), 2.0), 0, 1))
    mixed = _sinkhorn(t.split_last(part(2, 2 * s, s * s), s), s, request["iterations"], epsilon)
    comb.folded(s).store(None, [t.mul(row, s), 0], mixed)


def _sinkhorn(c: Value, s: int, iterations: int, epsilon: float) -> Value:
    """Softmax over destinations, then columns; then `iterations` - 1 rounds of rows and columns (model spec 3.2). c is [S, S]."""

    def over(p: Value, axis: int, floor: float) -> Value:
        return t.div(p, t.broadcast(t.add(t.reduce(p, "add", axis), floor), axis, s))

    grown = t.exp(t.sub(c, t.broadcast(t.reduce(c, "max", 1), 1, s)))
    p = over(t.add(over(grown, 1, 0.0), epsilon), 0, epsilon)
    (p,) = t.loop(1, iterations, 1, [p], lambda i, p: [over(over(p, 1, epsilon), 0, epsilon)])
    return p
