"""Attention of a row over its window and its selected entries, alone and with the inverse rotation of its result behind it.

One instance is one row and a block of heads. Keys are values; they are read by physical row, decoded once per block of keys and used twice.
Softmax runs on line over blocks of keys whose borders count from the row's first key, so that chunks and batches change no bit.
"""

from dataclasses import dataclass
from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.kernel import Kernel, Request, Schedule, family, width
from tapeout.codegen.kernels import staged_attention
from tapeout.codegen.kernels.rope import angles, rotated, rotated_columns
from tapeout.codegen.row_values import Bound, Rows, bind, row_count
from tapeout.dialects.types import Blocks, Ring, Tensor

Value = Any
FP4 = "f4E2M1FN"
LOWEST = -1e30
"""What the running maximum starts from and what a masked logit is: exp of it is 0, and no difference with it is undefined."""
ORDER = "head: blocks of {block_keys} keys ascending, window before entries; logits over columns, even before odd where entries are FP4"


@dataclass(frozen=True)
class _Keys:
    """A row's keys of one source: cells [first, first + count) of `ids` name rows of `rows`."""

    rows: Rows
    ids: Value
    first: Value
    count: Value


@dataclass(frozen=True)
class _Form:
    """How a target multiplies: keys a block; whether the two halves of FP4 columns are joined again, so that all sources share one set of
    sums; whether a share is multiplied as two BF16 pieces (16 bits) instead of in f32; whether keys are the left factor of both products,
    so that tiles are [keys, heads] and sums [D, heads]."""

    block_keys: int
    joined: bool
    split: bool
    keys_first: bool

    @property
    def keys(self) -> int:
        """The axis of keys in logits, and of columns in sums."""
        return 0 if self.keys_first else 1

    def spread(self, by_head: Value, extent: int) -> Value:
        """Numbers of heads along that axis."""
        return t.broadcast(by_head, self.keys, extent)


def _cannot_attend(request: Request) -> str | None:
    q, ring = request.operands[:2]
    if not isinstance(q, Tensor) or q.number.element != "bf16":
        return f"q is {q}, this kernel takes BF16 queries"
    views = [ring, *(v for v in request.operands[5:6] if isinstance(v, Blocks))]
    wrong = [v for v in views if not isinstance(v, Ring | Blocks) or v.entry.number.element not in ("bf16", "f8E4M3FN", FP4)]
    return f"keys are {wrong[0]}, this kernel decodes BF16, FP8 and FP4 entries" if wrong else None


@family("mla.attend", "nn.fused:attend_rotate", refuses=_cannot_attend)
def attend(request: Request, schedule: Schedule) -> Kernel:
    """Rows [?, heads*D] of attention with a sink, rounded to BF16, then turned back and rounded again where fused.

    Grid: rows x blocks of heads (model spec 4.7, 4.9). With `instances` in the schedule no more than so many, which take rows in turns.
    """
    settings, fused = request.of("mla.attend"), request.op.startswith("nn.fused")
    heads, block = settings["heads"], schedule["block_heads"]
    columns = width(request.operands[0]) // heads
    form = _Form(schedule["block_keys"], *(bool(schedule.get(name)) for name in ("joined", "split", "keys_first")))
    staged, instances = bool(schedule.get("decoded_keys")), schedule.get("instances", 0)
    has_entries = isinstance(request.operands[5], Blocks) if len(request.operands) > 5 else False

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        row, head = t.program_id(0), t.mul(t.program_id(1), block)
        if instances:
            t.loop(row, b.rows, instances, [], lambda turn: one(b, turn, head))
        else:
            one(b, row, head)

    def one(b: Bound, row: Value, head: Value) -> None:
        first = t.add(t.mul(row, heads), head)
        q = b.operands[0].folded(columns).raw(None, [first, 0], [block, columns])
        sink = b.operands[4].vector(heads, head, block)
        window = _keys_of(request, b.operands[1:4], 2, row)
        entries = _keys_of(request, b.operands[5:8], 6, row) if has_entries else None
        result = b.results[0].folded(columns)
        if staged:
            out = staged_attention.attended(q, b, staged_attention.sources(request, form.block_keys), row, sink, settings["scale"], form.block_keys)
        else:
            out = _attended(q, window, entries, sink, settings["scale"], form)
        result.store(None, [first, 0], out)
        if fused:
            positions, table = b.operands[-2:]
            _turn(request.of("nn.rope"), result, b.rows, row, first, block, positions, table, rotated_columns(request.operands[-1]), staged)

    def grid(*buffers: Value) -> list[Value]:
        rows = row_count(buffers)
        return [t.minimum(rows, instances) if instances else rows, heads // block]

    if staged:
        parts, keys = staged_attention.decoded_keys(request, schedule, columns)
        return Kernel(body, grid, staged_attention.ORDER.format(**schedule), {}, (keys,), parts)
    return Kernel(body, grid, ORDER.format(**schedule))


def _keys_of(request: Request, operands: list[Any], ids: int, row: Value) -> _Keys:
    rows, listed, counts = operands
    return _Keys(rows, listed.values, t.mul(row, width(request.operands[ids])), t.scalar(counts.values, row))


def _turn(
    rope: dict[str, Any], result: Rows, rows: Value, row: Value, first: Value, block: int, positions: Rows, table: Rows, turned: int, by_product: bool
) -> None:
    """Turns the last columns of the stored heads; they are read back, so that they are turned as they were rounded."""
    cos, sin = angles(table, positions, rows, row, turned, rope["offset"])
    at = [first, result.columns - turned]
    if by_product:
        found = staged_attention.turned(result.raw(None, at, [block, turned]), cos, sin, rope["inverse"])
    else:
        found = rotated(result.load(None, at, [block, turned]), cos, sin, rope["inverse"])
    result.store(None, at, found)


def _attended(q: Value, window: _Keys, entries: _Keys | None, sink: Value, scale: float, form: _Form) -> Value:
    """[heads, D] f32: sums over both sources, then the sink's share of the denominator."""
    heads = t.shape_of(sink)
    peak, total, *sums = _over(_halves(q, window.rows, form), window, [t.full(heads, LOWEST), t.full(heads, 0.0)], scale, form)
    if entries is not None and form.joined:
        peak, total, *sums = _over([q], entries, [peak, total, *sums], scale, form)
    out = _whole(sums)
    if entries is not None and not form.joined:
        last, total, *sums = _over(_halves(q, entries.rows, form), entries, [peak, total], scale, form)
        out, peak = t.add(_by_head(out, t.exp(t.sub(peak, last)), form), _whole(sums)), last
    highest = t.maximum(peak, sink)
    kept = t.exp(t.sub(peak, highest))
    whole = t.add(t.mul(total, kept), t.exp(t.sub(sink, highest)))
    share = t.div(kept, t.select(t.greater(whole, 0.0), whole, 1.0))
    out = _by_head(out, share, form)
    return t.transpose(out) if form.keys_first else out


def _by_head(x: Value, factor: Value, form: _Form) -> Value:
    return t.mul(x, form.spread(factor, t.shape_of(x)[form.keys]))


Halves = list[Value]  # a head's columns in one tile, or its even and its odd ones


def _halves(q: Value, keys: Rows, form: _Form) -> Halves:
    """Queries in the form in which keys of this number are decoded."""
    return list(t.even_odd(q)) if keys.number.element == FP4 and not form.joined else [q]


def _whole(parts: Halves) -> Value:
    return parts[0] if len(parts) == 1 else t.interleave(*parts)


def _over(q: Halves, keys: _Keys, start: list[Value], scale: float, form: _Form) -> list[Value]:
    """Online softmax over one source from (peak, total) [heads], and sums if there are any: the new peak, total and sums, one for each of `q`."""
    heads, block = t.shape_of(q[0])[0], form.block_keys
    turned = [t.transpose(part) if form.keys_first else part for part in q]
    sums = start[2:] or [t.full(t.shape_of(part), 0.0) for part in turned]

    def step(at: Value, peak: Value, total: Value, *sums: Value) -> list[Value]:
        left = t.sub(keys.count, at)
        seen = t.less(t.iota(block), t.splat(left, [block]))
        values = _decoded(keys.rows, keys.ids, t.add(keys.first, at), block, t.minimum(left, block), seen)
        values = [t.interleave(*values)] if len(values) > len(q) else values
        logits = t.full([block, heads] if form.keys_first else [heads, block], 0.0)
        for part, value in zip(turned, values, strict=True):
            exact = t.exact_bf16(value)
            logits = t.dot(exact, part, logits) if form.keys_first else t.dot(part, t.transpose(exact), logits)
        logits = t.select(t.broadcast(seen, 1 - form.keys, heads), t.mul(logits, scale), LOWEST)
        grown = t.maximum(peak, t.reduce(logits, "max", form.keys))
        kept = t.exp(t.sub(peak, grown))
        shares = t.exp(t.sub(logits, form.spread(grown, block)))
        total = t.add(t.mul(total, kept), t.reduce(shares, "add", form.keys))
        return [grown, total, *(_weighed(shares, value, _by_head(s, kept, form), form) for s, value in zip(sums, values, strict=True))]

    return t.loop(0, keys.count, block, [*start[:2], *sums], step)


def _weighed(shares: Value, value: Value, acc: Value, form: _Form) -> Value:
    """acc + shares value; values are BF16 numbers, so that only the shares need two pieces."""
    if not form.split:
        return _summed(shares, value, acc, form)
    high, exact = t.cast(shares, "bf16"), t.exact_bf16(value)
    low = t.cast(t.sub(shares, t.cast(high, "f32")), "bf16")
    return _summed(low, exact, _summed(high, exact, acc, form), form)


def _summed(shares: Value, value: Value, acc: Value, form: _Form) -> Value:
    return t.dot(t.transpose(value), shares, acc) if form.keys_first else t.dot(shares, value, acc)


def _decoded(rows: Rows, ids: Value, first: Value, count: int, valid: Value, seen: Value) -> Halves:
    """The f32 keys [count, D] that ids name, or their even and odd columns where entries are FP4; zero behind the valid ones."""
    pieces = [t.gather(buffer, ids, first, count, columns, valid=valid) for buffer, columns in rows.buffers()]
    element = rows.number.element
    if element == FP4:
        factors = t.e8m0(pieces[1]) if t.kind_of(pieces[1]) == "i8" else t.decode_e4m3(pieces[1])
        values = list(t.decode_fp4_row(pieces[0], factors))
    else:
        values = [t.dequantize_q8(*pieces) if element == "f8E4M3FN" else t.cast(pieces[0], "f32")]
    return [t.select(t.broadcast(seen, 1, t.shape_of(v)[1]), v, 0.0) for v in values]
