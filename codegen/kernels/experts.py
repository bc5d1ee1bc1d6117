"""The mixture of experts (model spec 5): gate, permutation by expert, products with packed FP4 weights, activation, combination.

Pairs are (row, choice), numbered row * k + choice. Everything is deterministic: pairs of one expert stay in order of their number.
"""

from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.kernel import Kernel, Layout, Part, Request, Schedule, Workspace, family, width
from tapeout.codegen.kernels.column_blocks import own_columns, parts
from tapeout.codegen.kernels.linear import padded, weight_layout
from tapeout.codegen.kernels.staged_experts import staged_product
from tapeout.codegen.row_values import Bound, Rows, bind, block, by, columns_of, row_count, scale_group
from tapeout.dialects.format import FP4_WEIGHT, Q8
from tapeout.dialects.types import Tensor

Value = Any
LOWEST = -1e30  # below every score; finite, so that no masked lane makes a NaN
FP4_STEP, FP4_HALF, SCALE_GROUP = 128, 64, 32
IN_FRONT, HERE = 1, 2
"""`decoded` of a schedule: a launch in front decodes rows, or instances decode those that they multiply, and are of experts with pairs only."""


def _cannot_gate(request: Request) -> str | None:
    x, weight = request.operands[:2]
    known = all(isinstance(v, Tensor) and v.number.scaling is None and v.number.element in ("bf16", "f32") for v in (x, weight))
    return None if known else f"x is {x} and the weight {weight}, this kernel scores BF16 or FP32 rows"


@family("moe.gate", refuses=_cannot_gate)
def expert_gate(request: Request, schedule: Schedule) -> Kernel:
    """experts, weights [?, k] from x [?, H], weight [E, H], bias [E]. Grid: row blocks (model spec 5).

    The scores of a block of rows pass through a workspace: the choice is then made for each valid row alone. With `segments` in the schedule
    H is cut in as many, and a launch of its own multiplies them with blocks of `block_n` experts: grid row blocks x segments x columns; the
    second launch adds segments up and chooses: grid rows.
    """
    view = request.operands[1]
    assert isinstance(view, Tensor)
    (experts, k), panel, segments = view.sized(0), schedule["panel"], schedule.get("segments", 0)
    columns, block_rows, pieces = padded(experts, panel), schedule["block_rows"], segments or 1
    block_k, block_n = block(schedule, "block_k", k // block({"segments": pieces}, "segments", k)), schedule.get("block_n", columns)

    def multiply(b: Bound, row: Value, piece: Value, column: Value) -> None:
        x, weight = b.operands[:2]
        first = t.mul(piece, k // pieces)

        def step(k0: Value, acc: Value) -> list[Value]:
            a = x.raw(b.rows, [row, k0], [block_rows, block_k])
            w = t.View(weight.values, [k, columns], panel).load([k0, column], [block_k, block_n])
            same = t.kind_of(a) == t.kind_of(w)
            return [t.dot(a, w, acc) if same else t.dot(t.cast(a, "f32"), t.cast(w, "f32"), acc)]

        (acc,) = t.loop(first, t.add(first, k // pieces), block_k, [t.full([block_rows, block_n], 0.0)], step)
        t.View(b.workspaces[0], [b.rows, pieces * columns]).store([row, t.add(t.mul(piece, columns), column)], acc)

    def whole(*buffers: Value) -> None:
        b, row = bind(request, buffers), t.mul(t.program_id(0), block_rows)
        multiply(b, row, t.index(0), t.index(0))
        last = t.minimum(t.add(row, block_rows), b.rows)
        t.loop(row, last, 1, [], lambda r: _choose(request, _scores(b, r, 1, columns), b.operands[2], experts, b.results, r))

    def part(*buffers: Value) -> None:
        multiply(bind(request, buffers), t.mul(t.program_id(0), block_rows), t.program_id(1), t.mul(t.program_id(2), block_n))

    def choose(*buffers: Value) -> None:
        b, row = bind(request, buffers), t.program_id(0)
        _choose(request, _scores(b, row, pieces, columns), b.operands[2], experts, b.results, row)

    def blocks(*buffers: Value) -> list[Value]:
        return [t.ceil_div(row_count(buffers), block_rows)]

    one_kind = segments and all(isinstance(v, Tensor) and v.number.element == "bf16" for v in request.operands[:2])
    steps = "sum over k" if one_kind else f"sum over k in blocks of {block_k}"  # products of BF16 factors go on one after another
    order = f"expert: {steps}, ascending" + (f", then over {segments} segments" if segments else "")
    layouts, work = {1: weight_layout((experts, k), view.number, False, panel)}, (Workspace("f32", lambda rows: rows * pieces * columns),)
    if not segments:
        return Kernel(whole, blocks, order, layouts, work)
    block({"block_n": block_n}, "block_n", columns)
    grid = Part(part, lambda *b: [*blocks(*b), segments, columns // block_n])
    return Kernel(choose, lambda *b: [row_count(b)], order, layouts, work, (grid,))


def _scores(b: Bound, row: Value, pieces: int, columns: int) -> Value:
    """A row's scores before the square root, f32 [1, columns], segments added up."""
    parts = t.View(b.workspaces[0], [None, columns]).load([t.mul(row, pieces), 0], [pieces, columns])
    return parts if pieces == 1 else t.broadcast(t.reduce(parts, "add", 0), 0, 1)


def _choose(request: Request, logits: Value, bias: Rows, experts: int, results: list[Rows], row: Value) -> None:
    """The best `top_k` of one row by repeated maximum, the lowest id of equals; a chosen one falls below every score."""
    top, columns = request["top_k"], t.shape_of(logits)[1]
    number, place = t.broadcast(t.iota(columns), 0, 1), t.broadcast(t.iota(top), 0, 1)
    scores = t.sqrt(t.softplus(logits))
    biased = t.add(scores, t.broadcast(t.View(bias.values, [experts]).load([0], [columns], experts), 0, 1))
    left = t.select(t.less(number, experts), biased, LOWEST)

    def pick(c: int, left: Value, ids: Value, picked: Value) -> list[Value]:
        best = t.broadcast(t.reduce(left, "max", 1), 1, columns)
        first = t.minimum(t.reduce(t.select(t.equal(left, best), number, columns), "min", 1), experts - 1)
        chosen, here = t.equal(number, t.broadcast(first, 1, columns)), t.equal(place, c)
        score = t.reduce(t.select(chosen, scores, 0.0), "add", 1)
        return [t.select(chosen, 2 * LOWEST, left), t.select(here, t.broadcast(first, 1, top), ids),
                t.select(here, t.broadcast(score, 1, top), picked)]

    ids, picked = t.full([1, top], 0, "i32"), t.full([1, top], 0.0)
    for c in range(top):  # no loop: the score of a choice is summed up while the next one is looked for
        left, ids, picked = pick(c, left, ids, picked)
    total = t.broadcast(t.add(t.reduce(picked, "add", 1), 1e-20), 1, top)
    results[0].write(None, [row, 0], ids)
    results[1].store(None, [row, 0], t.div(t.mul(picked, request["scale"]), total))


@family("moe.dispatch")
def dispatch(request: Request, schedule: Schedule) -> Kernel:
    """order, places [?, k], offsets [E + 1] from chosen [?, k]. Grid: blocks of experts.

    Each instance counts the pairs before its experts, then lists each one's pairs in order: no instance waits for another.
    """
    k, experts = columns_of(request.operands[0]), request["experts"]
    some, pairs_block = schedule["block_experts"], schedule["block_pairs"]

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        chosen, (order, places, offsets) = b.operands[0].folded(1), b.results
        pairs, first = t.mul(b.rows, k), t.mul(t.program_id(0), some)

        def load(at: Value) -> tuple[Value, Value]:
            valid = t.less(t.iota(pairs_block), t.splat(t.sub(pairs, at), [pairs_block]))
            return chosen.table(pairs, at, pairs_block), valid

        before = _counted_before(load, pairs, first, some, pairs_block)
        t.View(offsets.values, [experts + 1]).store([first], before, experts + 1)
        last = t.minimum(t.add(first, some), experts)
        t.loop(first, last, 1, [], lambda e: _list_pairs(load, order, places, offsets, pairs, e, pairs_block))

    return Kernel(body, lambda *b: [-(-(experts + 1) // some)], "pairs ascending")


def _counted_before(load: Any, pairs: Value, first: Value, some: int, pairs_block: int) -> Value:
    """How many pairs chose an expert below first + i, [some] i32."""
    number = t.broadcast(t.add(t.iota(some), t.splat(first, [some])), 1, pairs_block)

    def step(at: Value, counts: Value) -> list[Value]:
        ids, valid = load(at)
        below = t.bit_and(t.less(t.broadcast(ids, 0, some), number), t.broadcast(valid, 0, some))
        return [t.add(counts, t.reduce(t.cast(below, "i32"), "add", 1))]

    (counts,) = t.loop(0, pairs, pairs_block, [t.full([some], 0, "i32")], step)
    return counts


def _list_pairs(load: Any, order: Rows, places: Rows, offsets: Rows, pairs: Value, expert: Value, pairs_block: int) -> None:
    """Writes the pairs of one expert to `order` behind offsets[expert], and their sorted positions to `places`."""
    start = t.scalar(offsets.values, expert)

    def step(at: Value, end: Value) -> list[Value]:
        ids, valid = load(at)
        mine = t.bit_and(t.equal(ids, t.splat(expert, [pairs_block])), valid)
        numbers = t.add(t.iota(pairs_block), t.splat(at, [pairs_block]))
        return [t.add(end, t.compress_store(numbers, mine, order.values, end, pairs))]

    (end,) = t.loop(0, pairs, pairs_block, [start], step)

    def place(i: Value) -> None:
        positions = t.add(t.iota(pairs_block), t.splat(i, [pairs_block]))
        t.scatter(t.split_last(positions, 1), places.values, order.values, i, t.sub(end, i), distinct=True)

    t.loop(start, end, pairs_block, [], place)


def _cannot_multiply(request: Request) -> str | None:
    x, weight = request.operands[:2]
    if not isinstance(x, Tensor) or x.number != Q8:
        return f"x is {x}, this kernel multiplies FP8 rows"
    if not isinstance(weight, Tensor) or weight.number != FP4_WEIGHT:
        return f"the weight is {weight}, this kernel reads packed FP4"
    _, n, k = weight.sized(0)
    if k % FP4_STEP or n % SCALE_GROUP:
        return f"the weight is {weight}, expected columns in groups of {FP4_STEP} and rows in groups of {SCALE_GROUP}"
    return None


@family("moe.expert_linear", refuses=_cannot_multiply)
def expert_linear(request: Request, schedule: Schedule) -> Kernel:
    """y_i = weight[e] x_i of the sorted pairs i of every expert. Grid: experts x column blocks, with `spread` in the schedule x as many
    instances that take turns; an instance without pairs leaves at once. With 2 as `decoded` only experts that have pairs are counted. With
    `instances` in the schedule it is so many: they share the blocks, of which every expert has as many as a pair of each row would fill, and
    have room to hand sums on, and a word for each 16 columns of them.

    FP8 rows and FP4 weights are decoded to BF16, which is exact. Gathered rows: pair to row numbers go through a workspace slice of the
    column block, which no other instance writes. `decoded` in the schedule: 1, a launch in front gathers and decodes the rows of pairs; 2, an
    instance decodes those that it multiplies; sums have one order in both.
    """
    if schedule.get("workers"):
        return staged_product(request, schedule)
    view = request.operands[1]
    assert isinstance(view, Tensor)
    (experts, n, k), choices, gathered = view.sized(0), columns_of(request.operands[2]), request["gathered"]
    block_m, block_n = schedule["block_m"], block(schedule, "block_n", n, schedule["panel"] or 1)
    first_weights, decoded, spread = bool(schedule.get("weights_first")), schedule.get("decoded", 0), schedule.get("spread", 1)
    instances = schedule.get("instances", 0)
    product = _block_of_pairs if decoded else _block_of_weights if first_weights else _expert_block
    numbered = gathered and decoded != IN_FRONT

    def products(b: Bound, expert: Value, part: Value, turn: Value = None) -> None:
        first, end = t.scalar(b.operands[3].values, expert), t.scalar(b.operands[3].values, t.add(expert, 1))
        base = t.mul(part, t.mul(b.rows, choices))

        def rows(m0: Value) -> None:
            if numbered:
                numbers = t.quotient(t.View(b.operands[2].values, [end]).load([m0], [block_m]), choices)
                t.View(b.workspaces[0], [t.add(base, end)]).store([t.add(base, m0)], numbers)
            acc = product(request, schedule, b, expert, t.mul(part, block_n), m0, end, base)
            b.results[0].folded(n).store(end, [m0, t.mul(part, block_n)], acc)

        start = first if spread == 1 and turn is None else t.add(first, t.mul(t.program_id(2) if turn is None else turn, block_m))
        t.loop(start, end if turn is None else t.minimum(end, t.add(start, block_m)), spread * block_m, [], rows)

    def body(*buffers: Value) -> None:
        b, parts = bind(request, buffers), n // block_n

        def chosen(expert: Value, before: Value) -> list[Value]:
            there = t.less(t.scalar(b.operands[3].values, expert), t.scalar(b.operands[3].values, t.add(expert, 1)))
            t.when(t.bit_and(there, t.equal(before, t.program_id(0))), lambda: products(b, expert, t.program_id(1)))
            return [t.select(there, t.add(before, 1), before)]

        if decoded == HERE:
            t.loop(0, experts, 1, [0], chosen)
            return
        if not instances:
            products(b, t.program_id(0), t.program_id(1))
            return
        blocks = t.mul(t.ceil_div(b.rows, block_m), parts)

        def one(number: Value) -> None:
            inner = t.remainder(number, blocks)
            products(b, t.quotient(number, blocks), t.remainder(inner, parts), t.quotient(inner, parts))

        t.loop(t.program_id(0), t.mul(blocks, experts), instances, [], one)

    def grid(*buffers: Value) -> list[Value]:
        most = t.minimum(experts, t.mul(row_count(buffers), choices)) if decoded == HERE else experts
        return [instances] if instances else [most, n // block_n, *([spread] if spread > 1 else [])]

    kept = instances * (2 * block_m * block_n + block_n // 8)  # as BF16
    work = (Workspace("i32", lambda rows: rows * choices * (n // block_n)),) if numbered else ()
    if decoded:
        order = f"column: sum over k in blocks of {block(schedule, 'block_k', k, 2 * SCALE_GROUP)}, ascending, even ones of a block first"
        if decoded != IN_FRONT:
            return Kernel(body, grid, order, {1: Layout()}, work)
        return Kernel(body, grid, order, {1: Layout()}, (Workspace("bf16", lambda rows: rows * choices * k + kept),),
                      (_pairs(request, schedule),))
    codes = ("fp4_split", *([f"panels:{schedule['panel']}"] if schedule["panel"] else []))
    layout, step = (Layout(), schedule["block_k"]) if first_weights else (Layout(codes, ("transpose",)), FP4_HALF)
    return Kernel(body, grid, f"column: sum over k in blocks of {step}, ascending", {1: layout}, work)


def _pairs(request: Request, schedule: Schedule) -> Part:
    """The launch that decodes the row of every sorted pair to BF16: its even columns, then its odd ones. Grid: column blocks, each of so many
    turns, x pairs, `part_rows` an instance."""
    view, choices = request.operands[1], columns_of(request.operands[2])
    assert isinstance(view, Tensor)
    k = view.sized(0)[2]
    size = block(schedule, "part_columns", k, 2 * SCALE_GROUP)
    each, rows = size * block(schedule, "part_turns", k // size), schedule.get("part_rows", 1)

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        first, number, x = t.mul(t.program_id(0), each), t.program_id(1), b.operands[0].folded(k)

        def one(pair: Value) -> None:
            row = t.quotient(t.scalar(b.operands[2].values, pair), choices) if request["gathered"] else pair

            def step(column: Value) -> None:
                half = by(column, 2)
                for at, value in zip((half, t.add(half, k // 2)), t.even_odd(x.load(None, [row, column], [1, size])), strict=True):
                    t.View(b.workspaces[0], [None, k]).store([pair, at], t.exact_bf16(value))

            t.loop(first, t.add(first, each), size, [], step)

        if rows == 1:
            one(number)
        else:
            start = t.mul(number, rows)
            t.loop(start, t.minimum(t.add(start, rows), t.mul(b.rows, choices)), 1, [], one)

    def grid(*buffers: Value) -> list[Value]:
        pairs = t.mul(row_count(buffers), choices)
        return [k // each, pairs if rows == 1 else t.ceil_div(pairs, rows)]

    return Part(body, grid)


def _block_of_pairs(request: Request, schedule: Schedule, b: Bound, expert: Value, n0: Value, m0: Value, end: Value, base: Value) -> Value:
    """A block of pairs' rows with the packed weights as stored, [E, N, K/2], as the left factor: low nibbles are even columns."""
    weight, view = b.operands[1], request.operands[1]
    assert isinstance(view, Tensor)
    experts, n, k = view.sized(0)
    block_m, block_n, block_k = schedule["block_m"], schedule["block_n"], schedule["block_k"]
    groups = block_k // SCALE_GROUP

    def scales(k0: Value) -> Value:
        each = t.View(weight.scales, [experts, n, k // SCALE_GROUP])
        return each.load([expert, n0, by(k0, SCALE_GROUP)], [block_n, groups])

    def halves(k0: Value) -> tuple[Value, ...]:
        if schedule["decoded"] == IN_FRONT:
            pairs, half = t.View(b.workspaces[0], [end, k]), by(k0, 2)
            return tuple(pairs.load([m0, at], [block_m, block_k // 2]) for at in (half, t.add(half, k // 2)))
        found = t.dequantize_q8(*_pair_rows(request, b.operands[0].folded(k), b, k0, block_k, block_m, m0, end, base))
        return tuple(t.exact_bf16(half) for half in t.even_odd(found))

    def step(k0: Value, acc: Value, bytes_: Value) -> list[Value]:
        codes = t.View(weight.values, [experts, n, k // 2]).load([expert, n0, by(k0, 2)], [block_n, block_k // 2])
        for factor, rows in zip(t.decode_fp4_row(codes, t.e8m0(bytes_)), halves(k0), strict=True):
            acc = t.dot(t.exact_bf16(factor), t.transpose(rows), acc)
        return [acc, scales(t.minimum(t.add(k0, block_k), k - block_k))]  # too small for a target's pipeline of copies: one step ahead

    acc, _ = t.loop(0, k, block_k, [t.full([block_n, block_m], 0.0), scales(t.index(0))], step)
    return t.transpose(acc)


def _expert_block(request: Request, schedule: Schedule, b: Bound, expert: Value, n0: Value, m0: Value, end: Value, base: Value) -> Value:
    """The product of one block of an expert's pairs with one block of its columns, f32 [block_m, block_n]."""
    x, weight, view = b.operands[0], b.operands[1], request.operands[1]
    assert isinstance(view, Tensor)
    experts, n, k = view.sized(0)
    block_m, block_n = schedule["block_m"], schedule["block_n"]

    def row_half(k0: Value) -> Value:
        return t.exact_bf16(t.dequantize_q8(*_pair_rows(request, x.folded(k), b, k0, FP4_HALF, block_m, m0, end, base)))

    def step(k0: Value, acc: Value) -> list[Value]:
        codes = t.View(weight.values, [experts, k // 2, n], schedule["panel"]).load([expert, by(k0, 2), n0], [FP4_HALF, block_n])
        scales = t.View(weight.scales, [experts, k // SCALE_GROUP, n])
        group = by(k0, SCALE_GROUP)
        low, high = t.decode_fp4_weight(codes, scales.load([expert, group, n0], [2, block_n]),
                                        scales.load([expert, t.add(group, 2), n0], [2, block_n]))
        acc = t.dot(row_half(k0), low, acc)
        return [t.dot(row_half(t.add(k0, FP4_HALF)), high, acc)]

    (acc,) = t.loop(0, k, FP4_STEP, [t.full([block_m, block_n], 0.0)], step)
    return acc


def _pair_rows(
    request: Request, x: Rows, b: Bound, k0: Value, size: int, block_m: int, m0: Value, end: Value, base: Value
) -> list[Value]:  # fmt: skip
    """Codes [block_m, size] and scales of the rows of sorted pairs from m0 on: gathered by number, or in the pairs' own order."""
    boxes = [(buffer, stride, column, count) for (buffer, stride), column, count in
             zip(x.buffers(), (k0, by(k0, SCALE_GROUP)), (size, size // SCALE_GROUP), strict=True)]
    if not request["gathered"]:
        return [t.View(buffer, [end, stride]).load([m0, column], [block_m, count]) for buffer, stride, column, count in boxes]
    ids, valid = (b.workspaces[0], t.add(base, m0)), t.sub(end, m0)
    return [t.gather(buffer, *ids, block_m, count, row_stride=stride, column=column, valid=valid) for buffer, stride, column, count in boxes]


def _block_of_weights(request: Request, schedule: Schedule, b: Bound, expert: Value, n0: Value, m0: Value, end: Value, base: Value) -> Value:
    """The same with the packed weights as stored, [E, N, K/2], as the left factor of a block-scaled product."""
    x, weight, view = b.operands[0], b.operands[1], request.operands[1]
    assert isinstance(view, Tensor)
    experts, n, k = view.sized(0)
    block_m, block_n, block_k = schedule["block_m"], schedule["block_n"], schedule["block_k"]

    def step(k0: Value, acc: Value) -> list[Value]:
        group = by(k0, SCALE_GROUP)
        w = t.View(weight.values, [experts, n, k // 2]).load([expert, n0, by(k0, 2)], [block_n, block_k // 2])
        scales = t.View(weight.scales, [experts, n, k // SCALE_GROUP]).load([expert, n0, group], [block_n, block_k // SCALE_GROUP])
        codes, bytes_ = _pair_rows(request, x.folded(k), b, k0, block_k, block_m, m0, end, base)
        return [t.dot_scaled(w, scales, t.transpose(codes), bytes_, acc)]

    (acc,) = t.loop(0, k, block_k, [t.full([block_n, block_m], 0.0)], step)
    return t.transpose(acc)


@family("moe.swiglu", "nn.fused:swiglu_quantize")
def swiglu(request: Request, schedule: Schedule) -> Kernel:
    """silu(min(gate, limit)) clamp(up) factor of [?, 2F] or sorted [?, k, 2F], F columns of gate, then of up, quantized where fused. Grid: row
    blocks (model spec 5)."""
    fused, columns = request.op.startswith("nn.fused"), width(request.results[0])
    limit = request.of("moe.swiglu")["limit"] if fused else request["limit"]
    routed = len([v for v in request.operands if v is not None]) == 3
    block_rows, each = schedule["block_rows"], columns_of(request.results[0]) // columns
    size = block(schedule, "block_columns", columns, scale_group(request))

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        x, result = b.operands[0].folded(2 * columns), b.results[0].folded(columns)
        rows, row = t.mul(b.rows, each), t.mul(t.program_id(0), block_rows)
        factor = None
        if routed:
            weights, order = b.operands[1:]
            factor = t.cast(t.merge_last(t.gather(weights.values, order.values, row, block_rows, 1, valid=t.sub(rows, row))), "f32")

        def step(column: Value) -> None:
            g, u = (x.load(rows, [row, at], [block_rows, size]) for at in (column, t.add(column, columns)))
            y = t.mul(t.silu(t.minimum(g, limit)), t.clamp(u, -limit, limit))
            y = y if factor is None else t.mul(y, t.broadcast(factor, 1, size))
            result.store(rows, [row, column], t.round_bf16(y) if fused else y)

        own_columns(schedule, columns, size, step)

    def grid(*buffers: Value) -> list[Any]:
        return [t.ceil_div(t.mul(row_count(buffers), each), block_rows), *parts(schedule, columns, size)]

    return Kernel(body, grid, "no sums")


@family("moe.combine")
def combine(request: Request, schedule: Schedule) -> Kernel:
    """Sum of a row's sorted outputs [?, k, H] by rank, the shared expert's [?, H] last, one rounding. Grid: rows (model spec 5)."""
    k, columns = columns_of(request.operands[1]), width(request.operands[0])
    size = block(schedule, "block_columns", columns)

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        (y, places, shared), row = b.operands, t.program_id(0)

        def step(column: Value) -> None:
            found = t.gather(y.values, places.values, t.mul(row, k), k, size, row_stride=columns, column=column)
            routed = t.broadcast(t.reduce(t.cast(found, "f32"), "add", 0), 0, 1)
            b.results[0].store(b.rows, [row, column], t.add(routed, shared.load(b.rows, [row, column], [1, size])))

        own_columns(schedule, columns, size, step)

    return Kernel(body, lambda *b: [row_count(b), *parts(schedule, columns, size)], "choices by rank, shared expert last")
