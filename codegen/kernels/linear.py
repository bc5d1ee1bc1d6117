"""Linear layers: BF16 or FP32 rows with BF16 weights, FP8 rows with FP8 weights, BF16 rows with FP8 weights decoded exactly.

One definition for all: a block of rows times a block of weight columns, over K in blocks of `block_k`. Weights lie as [K, N], in panels of
`panel` columns where the width of a group is a multiple of it, else row by row. With `weights_first` in the schedule they lie as stored,
[N, K], and are the left factor: the product is transposed, and few rows of x fill its columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.kernel import Kernel, KernelError, Layout, Part, Request, Schedule, Workspace, family
from tapeout.codegen.row_values import Bound, Rows, bind, block, by, kind, row_count
from tapeout.dialects.format import BF16, FP8_WEIGHT, FP32, Q8, Number
from tapeout.dialects.types import Tensor

Value = Any
SCALE_GROUP, ROOM, HOW_COPIED, HANDED_ON = 32, 256, 6, 7
Product = Callable[[Value, Value, Value, Value, Value], Value]
"""acc + x[row .., column ..] weight[k .., n ..]: (row, column of x, k, n, acc) to acc."""


def number_of(request: Request, operand: int) -> Number:
    """The number of a tensor operand."""
    view = request.operands[operand]
    if not isinstance(view, Tensor):
        raise KernelError(f"operand {operand} of {request} is not a tensor")
    return view.number


def stored_layout(shape: tuple[int, ...], number: Number) -> Layout:
    """Values or codes as they are, [N, K]; 32x32 scales as [N, K/32]."""
    return Layout() if number.scaling is None else Layout((), (f"expand_rows:{number.scaling.rows}:{shape[-2]}",))


def weight_layout(shape: tuple[int, ...], number: Number, scaled_rows: bool, panel: int) -> Layout:
    """Codes as [K, N]; 32x32 scales as [N, K/32] beside block-scaled rows, as [K/32, N] where the kernel decodes the weight."""
    codes = ("transpose", *([f"panels:{panel}"] if panel else []))
    if number.scaling is None:
        return Layout(codes)
    expand = f"expand_rows:{number.scaling.rows}:{shape[-2]}"
    return Layout(codes, (expand,) if scaled_rows else (expand, "transpose"))


def _cannot_multiply(request: Request) -> str | None:
    x, weight = number_of(request, 0), number_of(request, 1)
    plain = x.scaling is None and x.element in ("bf16", "f32")
    if plain and (weight == FP8_WEIGHT or (weight.scaling is None and weight.element in ("bf16", "f32"))):
        return None
    if x == Q8 and weight == FP8_WEIGHT:
        return None
    return f"x is {x} and the weight {weight}; known are BF16 or FP32 rows with BF16, FP32 or FP8 weights, and FP8 rows with FP8 weights"


@dataclass(frozen=True)
class Cut:
    """How a linear layer is cut: columns of a group into blocks of `block_n`, K into segments whose sums are added in ascending order.

    Entries of the schedule row that a target may leave out: `segments` (1); `split` (0), the segments of a block are instances of a launch
    of their own, whose f32 sums a second launch adds up: few rows then keep a whole chip busy; `decoded` (0), factors with scales are decoded
    to BF16 before they are multiplied: 1 where they are loaded, 2 rows of x once, by a launch of their own, 3 the weight too, which pays for
    many rows, 4 the weight once and x where it is loaded, 5 as 2, rows in BF16 too, for a chip's own source that wants them in another order,
    6 as 1, behind a launch that does nothing, where a chip's own source says how both are to be copied, 7 as 1, with room for sums of
    segments in whole blocks, which instances of a chip's own source hand on to each other;
    `group` (0), so many row blocks take one block of columns after another and share what
    a cache holds of it; `turns` (1), so many blocks of columns an instance takes one after another, the last instance those that are left;
    `ahead` (0), scales, which are too small for a target's pipeline of copies, are loaded one step ahead; `rows_first` (0), x is the left factor
    after all, weights lie as they do.
    `part_rows` and `part_columns` are the block of a launch that decodes, `total_rows` (1) and `total_columns` that of one that adds up.
    """

    n: int
    k: int
    groups: int
    schedule: Schedule

    def __getitem__(self, name: str) -> int:
        """An entry of the schedule row, 0 where there is none."""
        return self.schedule.get(name, 0)

    @property
    def segments(self) -> int:
        return max(self["segments"], 1)

    @property
    def turns(self) -> int:
        return max(self["turns"], 1)

    @property
    def width(self) -> int:
        """Columns of a group."""
        return self.n // self.groups

    @property
    def blocks(self) -> int:
        """Blocks of columns. The last one of a group overlaps the one before where its width is no multiple; both store the same bits."""
        return self.groups * -(-self.width // self["block_n"])

    @property
    def shape(self) -> list[int]:
        """Of a block's sums: rows x columns, or columns x rows where the weight is the left factor."""
        found = [self["block_m"], self["block_n"]]
        return found[::-1] if self["weights_first"] and not self["rows_first"] else found

    def rows_by_columns(self, sums: Value) -> Value:
        """A block's sums as y has them."""
        return t.transpose(sums) if self["weights_first"] and not self["rows_first"] else sums

    def place(self, number: Value) -> tuple[Value, Value]:
        """Group and first column of a block of columns."""
        each, size = self.blocks // self.groups, self["block_n"]
        group, part = (t.index(0), number) if self.groups == 1 else (t.quotient(number, each), t.remainder(number, each))
        inside = t.mul(part, size) if self.width % size == 0 else t.minimum(t.mul(part, size), self.width - size)
        return group, inside if self.groups == 1 else t.add(t.mul(group, self.width), inside)


@family("nn.linear", refuses=_cannot_multiply)
def linear(request: Request, schedule: Schedule) -> Kernel:
    """y [?, N] = x [?, K*groups] weight [N, K]; group g has columns K*g.. of x and rows N/G*g.. of the weight. Grid: columns x rows; of the
    launch for segments columns x segments x rows.
    """
    view = request.operands[1]
    assert isinstance(view, Tensor)
    (n, k), number = view.sized(0), number_of(request, 1)
    cut = Cut(n, k, request["groups"], schedule)
    if cut["decoded"] and not cut["weights_first"]:
        raise KernelError(f"schedule entry decoded is {cut['decoded']}, expected 0 where weights_first is 0: weights lie as [K, N] then")
    if cut["panel"]:
        block(schedule, "block_n", cut.width, cut["panel"])
    each = k // block({"segments": cut.segments}, "segments", k)
    block_k = block(schedule, "block_k", each, SCALE_GROUP if number.scaling else 1)
    steps = "sum over k" if cut["decoded"] else f"sum over k in blocks of {block_k}"  # products of decoded factors go on one after another
    order = f"column: {steps}, ascending" + (f", then over {cut.segments} segments" if cut.segments > 1 else "")
    layout = stored_layout((n, k), number) if cut["weights_first"] else weight_layout((n, k), number, number_of(request, 0) == Q8, cut["panel"])
    before: list[Part] = []
    work: list[Workspace] = []
    for operand, size in ((0, lambda rows: rows * k * cut.groups), (1, lambda rows: n * k)):
        if _is_decoded(request, cut, operand):
            before.append(_decoding(request, cut, operand, len(work)))
            work.append(Workspace("bf16", _with_room(size) if cut["override"] else size))
    if cut["decoded"] == HOW_COPIED:
        before.append(Part(lambda *_: None, lambda *_: [1]))
        work.append(Workspace("bf16", _with_room(lambda _: 0)))
    if cut["decoded"] == HANDED_ON:
        work.append(Workspace("f32", lambda rows: -(-rows // cut["block_m"]) * cut["block_m"] * n * cut.segments))
    if cut.turns > 1 and cut["group"]:
        raise KernelError(f"{cut.turns} turns of an instance, group {cut['group']}: expected one turn or no group")
    body, grid = _whole(request, cut)
    if cut["split"] and cut.segments > 1:
        before.append(_segments(request, cut))
        work.append(Workspace("f32", lambda rows: rows * n * cut.segments))
        body, grid = _total(request, cut)
    return Kernel(body, grid, order, {1: layout}, tuple(work), tuple(before))


def _with_room(size: Callable[[int], int]) -> Callable[[int], int]:
    """Elements behind a decoded factor for what a chip's own source keeps there: how factors are to be copied."""
    return lambda rows: size(rows) + ROOM


def _is_decoded(request: Request, cut: Cut, operand: int) -> bool:
    """Whether a launch of its own decodes a factor."""
    return cut["decoded"] in ((2, 3, 5), (3, 4))[operand] and (number_of(request, operand).scaling is not None or cut["decoded"] == 5)


def _bound(request: Request, cut: Cut, buffers: Sequence[Value]) -> tuple[Rows, Rows, Bound]:
    """x and the weight, decoded where a launch did so, and everything."""
    b = bind(request, buffers)
    work = iter(b.workspaces)
    x, weight = (Rows(BF16, v.columns, next(work)) if _is_decoded(request, cut, i) else v for i, v in enumerate(b.operands))
    return x, weight, b


def _segment(x: Rows, weight: Rows, rows: Value, cut: Cut, place: tuple[Value, Value, Value], segment: Value) -> Value:
    """One segment's sum of a block, f32 of `cut.shape`; `place`: group, first column and row."""
    (group, n0, m0), each = place, cut.k // cut.segments
    column, first = t.mul(group, cut.k), t.mul(segment, each) if cut.segments > 1 else 0
    last, final = (t.add(first, each), t.add(first, each - cut["block_k"])) if cut.segments > 1 else (each, each - cut["block_k"])
    if not cut["weights_first"]:
        product = _product(x, weight, rows, cut)
        start = t.full(cut.shape, 0.0)
        return t.loop(first, last, cut["block_k"], [start], lambda k0, acc: [product(m0, t.add(column, k0), k0, n0, acc)])[0]
    factors = _Factors(x, weight, rows, cut, (column, n0, m0))

    def step(k0: Value, acc: Value, *scales: Value) -> list[Value]:
        product = factors.product(k0, scales, acc)
        return [product, *factors.scales(t.minimum(t.add(k0, cut["block_k"]), final))]

    start = t.full(cut.shape, 0.0)
    if cut["ahead"]:
        return t.loop(first, last, cut["block_k"], [start, *factors.scales(first)], step)[0]
    return t.loop(first, last, cut["block_k"], [start], lambda k0, acc: [factors.product(k0, factors.scales(k0), acc)])[0]


def _whole(request: Request, cut: Cut) -> tuple[Any, Any]:
    """Body and grid of instances that sum a block's segments one after another."""

    def body(*buffers: Value) -> None:
        x, weight, b = _bound(request, cut, buffers)
        number, m0 = t.program_id(1 if cut["group"] else 0), t.mul(_row_block(cut), cut["block_m"])

        def multiply(number: Value) -> None:
            (group, n0) = cut.place(number)
            place = group, n0, m0
            if cut.segments == 1:
                total = _segment(x, weight, b.rows, cut, place, t.index(0))
            else:
                one = partial(_segment, x, weight, b.rows, cut, place)
                (total,) = t.loop(0, cut.segments, 1, [t.full(cut.shape, 0.0)], lambda s, total: [t.add(total, one(s))])
            b.results[0].store(b.rows, [m0, n0], cut.rows_by_columns(total))

        if cut["group"]:
            t.when(t.less(m0, b.rows), partial(multiply, number))
        elif cut.turns > 1:
            first = t.mul(number, cut.turns)
            last = t.add(first, cut.turns)
            t.loop(first, last if cut.blocks % cut.turns == 0 else t.minimum(last, cut.blocks), 1, [], multiply)
        else:
            multiply(number)

    def grid(*buffers: Value) -> list[Value]:
        if cut["group"]:
            return [cut["group"], cut.blocks, t.ceil_div(row_count(buffers), cut["block_m"] * cut["group"])]
        return [-(-cut.blocks // cut.turns), t.ceil_div(row_count(buffers), cut["block_m"])]

    return body, grid


def _row_block(cut: Cut) -> Value:
    return t.add(t.mul(t.program_id(2), cut["group"]), t.program_id(0)) if cut["group"] else t.program_id(1)


def _segments(request: Request, cut: Cut) -> Part:
    """The launch that sums every segment of every block by itself, to f32 [?, segments, N]."""

    def body(*buffers: Value) -> None:
        x, weight, b = _bound(request, cut, buffers)
        segment, m0 = t.program_id(1), t.mul(t.program_id(2), cut["block_m"])
        (group, n0) = cut.place(t.program_id(0))
        acc = _segment(x, weight, b.rows, cut, (group, n0, m0), segment)
        sums = t.View(b.workspaces[-1], [b.rows, cut.segments * cut.n])
        sums.store([m0, t.add(t.mul(segment, cut.n), n0)], cut.rows_by_columns(acc))

    return Part(body, lambda *b: [cut.blocks, cut.segments, t.ceil_div(row_count(b), cut["block_m"])])


def _total(request: Request, cut: Cut) -> tuple[Any, Any]:
    """Body and grid of the launch that adds segments, ascending: as `_whole` does. Grid: column blocks x blocks of rows."""
    size, height = block(cut.schedule, "total_columns", cut.n), max(cut["total_rows"], 1)

    def row_by_row(*buffers: Value) -> None:
        _, _, b = _bound(request, cut, buffers)
        column, row = t.mul(t.program_id(0), size), t.program_id(1)
        sums, total = Rows(FP32, cut.segments * cut.n, b.workspaces[-1]), t.full([size], 0.0)
        for segment in range(cut.segments):
            total = t.add(total, sums.line(row, t.add(column, segment * cut.n), size))
        b.results[0].store(b.rows, [row, column], t.broadcast(total, 0, 1))

    def several(*buffers: Value) -> None:
        _, _, b = _bound(request, cut, buffers)
        column, row = t.mul(t.program_id(0), size), t.mul(t.program_id(1), height)
        sums, total = Rows(FP32, cut.segments * cut.n, b.workspaces[-1]), t.full([height, size], 0.0)
        for segment in range(cut.segments):
            total = t.add(total, sums.load(b.rows, [row, t.add(column, segment * cut.n)], [height, size]))
        b.results[0].store(b.rows, [row, column], total)

    return (several if height > 1 else row_by_row), lambda *b: [cut.n // size, t.ceil_div(row_count(b), height) if height > 1 else row_count(b)]


def _decoding(request: Request, cut: Cut, operand: int, work: int) -> Part:
    """The launch that decodes x or the weight to BF16, exactly, into a workspace. Grid: column blocks x row blocks."""
    columns = cut.k if operand else cut.k * cut.groups
    size, height = block(cut.schedule, "part_columns", columns, SCALE_GROUP), cut["part_rows"]

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        rows, source = cut.n if operand else b.rows, b.operands[operand]
        at = [t.mul(t.program_id(1), height), t.mul(t.program_id(0), size)]
        if source.number.scaling is not None:
            scales = t.View(source.scales, [rows, columns // SCALE_GROUP]).load([at[0], by(at[1], SCALE_GROUP)], [height, size // SCALE_GROUP])
            codes = t.View(source.values, [rows, columns]).load(at, [height, size])
            values = t.exact_bf16(t.dequantize_q8(codes, scales))
        else:
            values = source.raw(rows, at, [height, size])
        t.View(b.workspaces[work], [rows, columns]).store(at, values)

    return Part(body, lambda *b: [columns // size, -(-cut.n // height) if operand else t.ceil_div(row_count(b), height)])


def _product(x: Rows, weight: Rows, rows: Value, cut: Cut) -> Product:
    """How one block of K is multiplied, by the numbers of x and the weight."""
    n, k = cut.n, cut.k
    block_m, block_n, block_k, panel = (cut[name] for name in ("block_m", "block_n", "block_k", "panel"))

    def codes(k0: Value, n0: Value) -> Value:
        return t.View(weight.values, [k, padded(n, panel)], panel).load([k0, n0], [block_k, block_n])

    def scaled(m0: Value, column: Value, k0: Value, n0: Value, acc: Value) -> Value:
        (values, width), (scales, groups) = x.buffers()
        a = t.View(values, [rows, width]).load([m0, column], [block_m, block_k])
        sa = t.View(scales, [rows, groups]).load([m0, by(column, SCALE_GROUP)], [block_m, block_k // SCALE_GROUP])
        sb = t.View(weight.scales, [n, k // SCALE_GROUP]).load([n0, by(k0, SCALE_GROUP)], [block_n, block_k // SCALE_GROUP], n)
        return t.dot_scaled(a, sa, codes(k0, n0), sb, acc)

    def decoded(m0: Value, column: Value, k0: Value, n0: Value, acc: Value) -> Value:
        scales = t.View(weight.scales, [k // SCALE_GROUP, n]).load([by(k0, SCALE_GROUP), n0], [block_k // SCALE_GROUP, block_n])
        factors = t.merge_first(t.broadcast(t.e8m0(scales), 1, SCALE_GROUP))
        b = t.mul(t.decode_e4m3(codes(k0, n0)), factors)
        a = x.raw(rows, [m0, column], [block_m, block_k])
        return t.dot(a, b if kind(x.number) == "f32" else t.exact_bf16(b), acc)

    def plain(m0: Value, column: Value, k0: Value, n0: Value, acc: Value) -> Value:
        a, b = x.raw(rows, [m0, column], [block_m, block_k]), codes(k0, n0)
        wide = {kind(x.number), kind(weight.number)} != {"bf16"}
        return t.dot(t.cast(a, "f32"), t.cast(b, "f32"), acc) if wide else t.dot(a, b, acc)

    if x.number.scaling is not None:
        return scaled
    return plain if weight.number.scaling is None else decoded


@dataclass(frozen=True)
class _Factors:
    """The two factors of one block of weights as stored: weight [n .., k ..] times x [row .., column ..] transposed, or the other way round;
    `place`: the first column of the group in x, the first column of y, the first row."""

    x: Rows
    weight: Rows
    rows: Value
    cut: Cut
    place: tuple[Value, Value, Value]

    def scales(self, k0: Value) -> list[Value]:
        """Scales of the weight, then of x, of those that have some."""
        (column, n0, m0), groups, found = self.place, self.cut["block_k"] // SCALE_GROUP, []
        if self.weight.number.scaling is not None:
            each = self.cut.k // SCALE_GROUP
            found.append(t.View(self.weight.scales, [None, each]).load([n0, by(k0, SCALE_GROUP)], [self.cut["block_n"], groups]))
        if self.x.number.scaling is not None:
            scales, each = self.x.buffers()[1]
            at = [m0, by(t.add(column, k0), SCALE_GROUP)]
            found.append(t.View(scales, [self.rows, each]).load(at, [self.cut["block_m"], groups]))
        return found

    def product(self, k0: Value, scales: Sequence[Value], acc: Value) -> Value:
        """acc + the product of one block of K."""
        (column, n0, m0), cut = self.place, self.cut
        w = t.View(self.weight.values, [None, cut.k]).load([n0, k0], [cut["block_n"], cut["block_k"]])
        a = self.x.raw(self.rows, [m0, t.add(column, k0)], [cut["block_m"], cut["block_k"]])
        if self.x.number.scaling is not None and not cut["decoded"]:
            return t.dot_scaled(w, scales[0], t.transpose(a), scales[1], acc)
        a = a if self.x.number.scaling is None else t.exact_bf16(t.dequantize_q8(a, scales[-1]))
        plain = self.weight.number.scaling is None
        if t.kind_of(a) == "f32" or t.kind_of(w) == "f32":
            wide = t.cast(w, "f32") if plain else t.dequantize_q8(w, scales[0])
            return self._multiply(wide, t.cast(a, "f32"), acc)
        return self._multiply(w if plain else t.exact_bf16(t.dequantize_q8(w, scales[0])), a, acc)

    def _multiply(self, w: Value, a: Value, acc: Value) -> Value:
        return t.dot(a, t.transpose(w), acc) if self.cut["rows_first"] else t.dot(w, t.transpose(a), acc)


def padded(n: int, panel: int) -> int:
    """Columns in memory: whole panels."""
    return -(-n // panel) * panel if panel else n
