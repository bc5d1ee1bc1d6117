"""Exact top-k of index scores in bounded memory: `mla.select`, `mla.select_candidates`, `mla.select_within`.

An instance owns one slot of the workspace and takes rows slot, slot + slots, ... A row's entries come in chunks: their physical rows are
listed, scored, and the best of them and of those kept so far stay, in entry order (model spec 4.5, 4.6). A score is an FP32 sum rounded
once to BF16; with its place behind it in the low bits no two keys are equal: one bisection finds the border, ties go to the lowest entry.

Where the schedule cuts a row into `pieces`, all its entries are one chunk: a launch of its own lists and scores every piece, and few rows keep
a whole chip busy. What is selected does not depend on it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.kernel import Kernel, KernelError, Part, Request, Schedule, Workspace, family, width
from tapeout.codegen.kernels.key_lists import SCORE_BITS, KeyList, keep_best
from tapeout.codegen.kernels.ordered_bits import ordered_bf16
from tapeout.codegen.row_values import Bound, Rows, bind, row_count
from tapeout.dialects.types import Blocks, Tensor

Value = Any
WORD_BITS = 32
HIGHEST_SCORE, LOWEST_SCORE = 2**15 - 1, -(2**15)
"""Above every BF16 number, the newest block's worth; and below every one."""
ORDER = "score: columns of a head, even before odd; heads ascending; one rounding to BF16"


def _refuses(request: Request) -> str | None:
    iq, weights, keys = request.operands[:3]
    if request["score"] != "bf16":
        return f'score is "{request["score"]}", this kernel rounds FP32 sums to "bf16"; run assign-formats first'
    numbers = [v.number if isinstance(v, Tensor) else v.entry.number if isinstance(v, Blocks) else None for v in (iq, keys)]
    if any(n is None or n.element not in ("f4E2M1FN", "bf16") for n in numbers) or numbers[0] != numbers[1]:
        return f"iq is {iq} and keys is {keys}, this kernel takes both FP4 or both BF16"
    if not isinstance(weights, Tensor) or weights.number.element not in ("bf16", "f32"):
        return f"weights is {weights}, this kernel takes BF16 or FP32"
    return None


@dataclass(frozen=True)
class _Row:
    """One row of a request: where its entries lie and how they are scored."""

    request: Request
    bound: Bound
    row: Value
    tile: int

    @property
    def per_block(self) -> int:
        """Entries of one block of the block table."""
        return int(self.request["block_tokens"] // self.request["ratio"])

    def visible(self) -> Value:
        """How many entries the row sees."""
        return t.quotient(t.add(t.scalar(self.bound.operands[3].values, self.row), 1), self.request["ratio"])

    def physical(self, entry: Value) -> Value:
        """The physical row of an entry."""
        slot = t.scalar(self.bound.operands[4].values, self.row)
        cell = t.add(t.mul(slot, width(self.request.operands[5])), t.quotient(entry, self.per_block))
        block = t.scalar(self.bound.operands[5].values, cell)
        return t.add(t.mul(block, self.per_block), t.remainder(entry, self.per_block))

    def list_run(self, buffer: Value, at: Value, entry: Value, count: Value, most: int) -> None:
        """Writes the physical rows of entries [entry, entry + count), `most` at most, all of one block of the table, to cells at `at`."""
        rows = t.add(t.iota(most), t.splat(self.physical(entry), [most]))
        t.View(buffer, [None]).store([at], rows, extent=t.add(at, count))

    def list_range(self, buffer: Value, at: Value, first: Value, last: Value) -> None:
        """Writes the physical rows of entries [first, last), `first` a multiple of a run, to cells from `at` on."""
        run = self.per_block

        def step(entry: Value) -> None:
            self.list_run(buffer, t.add(at, t.sub(entry, first)), entry, t.minimum(t.sub(last, entry), run), run)

        t.loop(first, last, run, [], step)

    def queries(self) -> tuple[list[Value], Value]:
        """The heads' columns, transposed, in one tile or in even and odd ones, BF16; and the heads' weights, f32 [heads]."""
        heads = self.request["heads"]
        iq, weights = self.bound.operands[:2]
        by_head = iq.folded(iq.columns // heads)
        pieces = [t.View(b, [None, n]).load([t.mul(self.row, heads), 0], [heads, n]) for b, n in by_head.buffers()]
        columns = [t.transpose(t.exact_bf16(part)) for part in _decoded(by_head, pieces)]
        factors = t.cast(t.View(weights.values, [None, heads]).load([self.row, 0], [heads]), "f32")
        return columns, factors

    def score_listed(self, target: KeyList, half: Value, first: Value, last: Value) -> None:
        """Scores the entries whose physical rows lie in places [first, last) of a half and writes their keys there."""
        columns, factors = self.queries()
        keys, heads = self.bound.operands[2], t.shape_of(factors)[0]

        def step(place: Value) -> None:
            at, left = t.add(half, place), t.sub(last, place)
            pieces = [t.gather(b, target.values, at, self.tile, n, valid=t.minimum(left, self.tile)) for b, n in keys.buffers()]
            logits = t.full([self.tile, heads], 0.0)
            for part, query in zip(_decoded(keys, pieces), columns, strict=True):
                logits = t.dot(t.exact_bf16(part), query, logits)
            score = t.reduce(t.mul(t.maximum(logits, 0.0), t.broadcast(factors, 0, self.tile)), "add", 1)
            target.cells(target.keys).store([at], target.key(ordered_bf16(score), place), extent=t.add(half, last))

        t.loop(first, last, self.tile, [], step)


def _decoded(rows: Rows, pieces: list[Value]) -> list[Value]:
    """f32 tiles of loaded rows: one, or the even and the odd columns of FP4."""
    if rows.number.scaling is None:
        return [t.cast(pieces[0], "f32")]
    return list(t.decode_fp4_row(pieces[0], t.e8m0(pieces[1]) if t.kind_of(pieces[1]) == "i8" else t.decode_e4m3(pieces[1])))


def _write(source: Value, at: Value, count: Value, most: int, target: Value, to: Value, block: int) -> None:
    """Copies `count` cells to `to`, ..., and fills up to `most` with -1."""
    cells, result = t.View(source, [None]), t.View(target, [None])

    def copy(first: Value) -> None:
        result.store([t.add(to, first)], cells.load([t.add(at, first)], [block], extent=t.add(at, count)), extent=t.add(to, count))

    t.loop(0, count, block, [], copy)
    _pad(result, to, count, most, block)


def _pad(result: Any, to: Value, count: Value, most: int, block: int) -> None:
    fill = lambda first: result.store([t.add(to, first)], t.full([block], -1, "i32"), extent=t.add(to, most))  # noqa: E731
    t.loop(count, most, block, [], fill)


def _write_count(result: Rows, row: Value, count: Value) -> None:
    t.View(result.values, [None]).store([row], t.splat(count, [1]))


@dataclass(frozen=True)
class _Plan:
    """Sizes of one selection: best entries, entries a chunk, best blocks (0: no candidates are made), entries a block, lanes of a load of
    keys, entries of a piece that a launch of its own lists and scores (0: nothing is)."""

    top: int
    chunk: int
    blocks: int
    block: int
    lanes: int
    piece: int = 0
    held: int = 0

    def entries(self, bound: Bound, slot: Value) -> KeyList:
        keys, values = bound.workspaces
        return KeyList(keys, values, t.mul(slot, self.cells), self.top, self.chunk, self.lanes, self.held)

    def candidates(self, bound: Bound, slot: Value) -> KeyList:
        keys, values = bound.workspaces
        first = t.add(t.mul(slot, self.cells), 2 * _half(self.top, self.chunk, self.lanes))
        return KeyList(keys, values, first, self.blocks, self.chunk // self.block, self.lanes, self.held)

    @property
    def cells(self) -> int:
        """Cells of one slot in each of the two workspaces."""
        blocks = 2 * _half(self.blocks, self.chunk // self.block, self.lanes) if self.blocks else 0
        return 2 * _half(self.top, self.chunk, self.lanes) + blocks


def _half(kept: int, new: int, block: int) -> int:
    return KeyList(None, None, None, kept, new, block).half


OneRow = Callable[[_Row, _Plan, Value], None]
"""Selects for a row in a slot of the workspace."""
OnePiece = Callable[[_Row, _Plan, Value, Value], None]
"""Lists and scores entries from a place on, in a slot."""


def _kernel(request: Request, schedule: Schedule, plan: _Plan, one_row: OneRow, one_piece: OnePiece) -> Kernel:
    """The kernel whose instances run `one_row` on every row of their slot; with pieces every row has a slot."""
    if SCORE_BITS + max((plan.top + plan.chunk).bit_length(), (plan.blocks + plan.chunk // plan.block).bit_length()) > WORD_BITS:
        raise KernelError(f"{request}: {plan.top} kept and {plan.chunk} new entries need places of more than 16 bits; lower chunk")
    if plan.piece:
        return _in_pieces(request, schedule, plan, one_row, one_piece)
    slots = max(1, schedule["workspace_bytes"] // (2 * 4 * plan.cells))

    def body(*buffers: Value) -> None:
        bound, slot = bind(request, buffers), t.program_id(0)
        t.loop(slot, bound.rows, slots, [], lambda row: one_row(_Row(request, bound, row, schedule["block_keys"]), plan, slot))

    work = Workspace("i32", lambda rows: min(rows, slots) * plan.cells)
    return Kernel(body, lambda *b: [t.minimum(row_count(b), slots)], ORDER, workspaces=(work, work))


def _in_pieces(request: Request, schedule: Schedule, plan: _Plan, one_row: OneRow, one_piece: OnePiece) -> Kernel:
    def own(buffers: Any) -> _Row:
        return _Row(request, bind(request, buffers), t.program_id(0), schedule["block_keys"])

    def body(*buffers: Value) -> None:
        row = own(buffers)
        one_row(row, plan, row.row)

    def piece(*buffers: Value) -> None:
        row = own(buffers)
        one_piece(row, plan, row.row, t.mul(t.program_id(1), plan.piece))

    part = Part(piece, lambda *b: [row_count(b), -(-plan.chunk // plan.piece)])
    work = Workspace("i32", lambda rows: rows * plan.cells)
    return Kernel(body, lambda *b: [row_count(b)], ORDER, workspaces=(work, work), before=(part,))


def _piece(schedule: Schedule, entries: int, unit: int) -> int:
    """Entries of a piece, whole units; 0 where the schedule cuts nothing."""
    pieces = schedule.get("pieces", 0)
    return -(-entries // (pieces * unit)) * unit if pieces else 0


@family("mla.select", "mla.select_candidates", refuses=_refuses)
def select_entries(request: Request, schedule: Schedule) -> Kernel:
    """Ids [?, K] and counts of the best visible entries, and the candidate blocks where asked. Grid: slots of the workspace (4.5, 4.6)."""
    blocks, block = (request["blocks"], request["block"]) if request.op == "mla.select_candidates" else (0, 1)
    top, tokens = request["top_k"], request["block_tokens"]
    unit = block * tokens // gcd(block, tokens)  # a chunk is whole blocks and whole runs of the block table
    most = width(request.operands[5]) * tokens // request["ratio"]
    whole = most if schedule.get("pieces") else min(max(schedule["chunk"], top, blocks * block), most)
    chunk = -(-whole // unit) * unit
    plan = _Plan(top, chunk, blocks, block, schedule["block_places"], _piece(schedule, chunk, unit), schedule.get("held_places", 0))
    return _kernel(request, schedule, plan, _one_selection, _score_piece)


def _score_piece(row: _Row, plan: _Plan, slot: Value, first: Value) -> None:
    """Lists and scores entries from `first` on, where the row has more than it keeps."""
    entries, n = plan.entries(row.bound, slot), row.visible()
    half, last = _halves(entries, t.index(0))[0], t.minimum(t.add(first, plan.piece), n)

    def score() -> None:
        row.list_range(entries.values, t.add(half, first), first, last)
        row.score_listed(entries, half, first, last)

    t.when(t.greater(n, plan.top), score)


def _one_selection(row: _Row, plan: _Plan, slot: Value) -> None:
    results, n = row.bound.results, row.visible()
    to = t.mul(row.row, plan.top)
    _write_count(results[1], row.row, t.minimum(n, plan.top))
    if plan.blocks:
        _write_count(results[3], row.row, t.minimum(t.ceil_div(n, plan.block), plan.blocks))

    def everything() -> None:
        row.list_range(results[0].values, to, t.index(0), n)
        _pad(t.View(results[0].values, [None]), to, n, plan.top, plan.lanes)
        if plan.blocks:
            _all_blocks(row, plan, n)

    t.when(t.less_equal(n, plan.top), everything, lambda: _stream(row, plan, slot, n))


def _all_blocks(row: _Row, plan: _Plan, n: Value) -> None:
    """Candidates 0, 1, ... of a row that sees at most `blocks` blocks."""
    result, to, count = t.View(row.bound.results[2].values, [None]), t.mul(row.row, plan.blocks), t.ceil_div(n, plan.block)

    def step(first: Value) -> None:
        numbers = t.add(t.iota(plan.lanes), t.splat(first, [plan.lanes]))
        result.store([t.add(to, first)], numbers, extent=t.add(to, count))

    t.loop(0, count, plan.lanes, [], step)
    _pad(result, to, count, plan.blocks, plan.lanes)


def _stream(row: _Row, plan: _Plan, slot: Value, n: Value) -> None:
    """A row that sees more than top entries: chunk by chunk, the best so far in front."""
    entries, results = plan.entries(row.bound, slot), row.bound.results
    many = t.greater(n, plan.blocks * plan.block)

    def step(first: Value) -> None:
        turn = t.remainder(t.quotient(first, plan.chunk), 2)
        half, other = _halves(entries, turn)
        kept, last = t.minimum(first, plan.top), t.minimum(t.add(first, plan.chunk), n)
        total = t.add(kept, t.sub(last, first))
        if not plan.piece:
            row.list_range(entries.values, t.add(half, kept), first, last)
            row.score_listed(entries, half, kept, total)
        if plan.blocks:
            t.when(many, lambda: _stream_blocks(row, plan, slot, turn, t.add(half, kept), first, last, n))
        keep_best(entries, half, total, other)

    t.loop(0, n, plan.chunk, [], step)
    chunks = t.ceil_div(n, plan.chunk)
    done = _halves(entries, t.remainder(chunks, 2))[0]
    _write(entries.values, done, t.index(plan.top), plan.top, results[0].values, t.mul(row.row, plan.top), plan.lanes)
    if plan.blocks:
        blocks = plan.candidates(row.bound, slot)
        best = _halves(blocks, t.remainder(chunks, 2))[0]
        to = t.mul(row.row, plan.blocks)
        write = lambda: _write(blocks.values, best, t.index(plan.blocks), plan.blocks, results[2].values, to, plan.lanes)  # noqa: E731
        t.when(many, write, lambda: _all_blocks(row, plan, n))


def _halves(full: KeyList, turn: Value) -> tuple[Value, Value]:
    """Where the half of this turn and that of the next one start."""
    first = t.add(full.base, t.mul(turn, full.half))
    return first, t.add(full.base, t.mul(t.sub(1, turn), full.half))


def _stream_blocks(row: _Row, plan: _Plan, slot: Value, turn: Value, keys: Value, first: Value, last: Value, n: Value) -> None:
    """The blocks of entries [first, last), whose keys lie from `keys` on, join the best blocks so far."""
    blocks, entries = plan.candidates(row.bound, slot), plan.entries(row.bound, slot)
    half, other = _halves(blocks, turn)
    begin, new = t.quotient(first, plan.block), t.ceil_div(t.sub(last, first), plan.block)
    kept, lanes, size = t.minimum(begin, plan.blocks), plan.lanes, plan.block
    newest = t.quotient(t.sub(n, 1), size)

    def step(at: Value) -> None:
        place, count = t.mul(at, size), t.sub(last, first)
        inside = entries.cells(entries.keys).load([t.add(keys, place)], [lanes * size], extent=t.add(keys, count))
        seen = t.less(t.iota(lanes * size), t.splat(t.sub(count, place), [lanes * size]))
        worth = t.reduce(t.split_last(t.select(seen, entries.score(inside), LOWEST_SCORE), size), "max", 1)
        numbers = t.add(t.iota(lanes), t.splat(t.add(begin, at), [lanes]))
        worth = t.select(t.equal(numbers, t.splat(newest, [lanes])), HIGHEST_SCORE, worth)
        place = t.add(kept, at)
        end = t.add(half, t.add(kept, new))
        blocks.cells(blocks.keys).store([t.add(half, place)], blocks.key(worth, place), extent=end)
        blocks.cells(blocks.values).store([t.add(half, place)], numbers, extent=end)

    t.loop(0, new, lanes, [], step)
    keep_best(blocks, half, t.add(kept, new), other)


def _refuses_within(request: Request) -> str | None:
    entries = width(request.operands[6]) * request["block"]
    if (request["top_k"] + entries).bit_length() + SCORE_BITS > WORD_BITS:
        return f"candidates of {entries} entries are more than the 32-bit keys of this kernel number"
    return _refuses(request)


@family("mla.select_within", refuses=_refuses_within)
def select_within(request: Request, schedule: Schedule) -> Kernel:
    """Ids [?, K] and counts of the best entries of a row's candidate blocks. Grid: slots of the workspace (model spec 4.6)."""
    block, entries = request["block"], width(request.operands[6]) * request["block"]
    plan = _Plan(request["top_k"], entries, 0, block, schedule["block_places"], _piece(schedule, entries, block), schedule.get("held_places", 0))
    return _kernel(request, schedule, plan, _one_within, _score_candidates)


def _score_candidates(row: _Row, plan: _Plan, slot: Value, first: Value) -> None:
    """Lists the entries at places [first, first + piece), and scores them where there are more than are kept.

    Candidates ascend: all before one that is in sight are in sight as a whole.
    """
    entries, total = plan.entries(row.bound, slot), _candidate_entries(row, plan)
    half, last = _halves(entries, t.index(0))[0], t.minimum(t.add(first, plan.piece), total)
    begin, end = t.quotient(first, plan.block), t.ceil_div(last, plan.block)
    _list_candidates(row, plan, entries.values, t.add(half, first), begin, end)
    t.when(t.greater(total, plan.top), lambda: row.score_listed(entries, half, first, last))


def _candidate_entries(row: _Row, plan: _Plan) -> Value:
    """How many entries of a row's candidate blocks are in sight: those of whole blocks, and what the row sees of the last."""
    candidates, counts = row.bound.operands[6:8]
    most, n = width(row.request.operands[6]), row.visible()
    count, first = t.scalar(counts.values, row.row), t.mul(row.row, most)

    def begin(number: Value) -> Value:
        return t.mul(t.scalar(candidates.values, t.add(first, t.maximum(number, 0))), plan.block)

    def longer(_: Value, found: Value, step: Value) -> list[Value]:
        tried = t.minimum(t.add(found, step), count)
        return [t.select(t.less(begin(t.sub(tried, 1)), n), tried, found), t.quotient(step, 2)]

    def search() -> Value:
        bits = most.bit_length()
        return t.loop(0, bits, 1, [t.index(0), t.index(1 << (bits - 1))], longer)[0]

    (seen,) = t.when(t.less(begin(t.sub(count, 1)), n), lambda: [count], lambda: [search()])
    whole = t.mul(t.maximum(t.sub(seen, 1), 0), plan.block)
    last = t.minimum(t.sub(n, begin(t.sub(seen, 1))), plan.block)
    return t.select(t.greater(seen, 0), t.add(whole, last), t.index(0))


def _one_within(row: _Row, plan: _Plan, slot: Value) -> None:
    entries, results = plan.entries(row.bound, slot), row.bound.results
    half, other = _halves(entries, t.index(0))
    if plan.piece:
        total = _candidate_entries(row, plan)
    else:
        total = _list_candidates(row, plan, entries.values, half, t.index(0), t.scalar(row.bound.operands[7].values, row.row))
    to = t.mul(row.row, plan.top)
    _write_count(results[1], row.row, t.minimum(total, plan.top))

    def write(source: Value, count: Value) -> None:
        _write(entries.values, source, count, plan.top, results[0].values, to, plan.lanes)

    def best() -> None:
        if not plan.piece:
            row.score_listed(entries, half, t.index(0), total)
        keep_best(entries, half, total, other)
        write(other, t.index(plan.top))

    t.when(t.less_equal(total, plan.top), lambda: write(half, total), best)


def _list_candidates(row: _Row, plan: _Plan, target: Value, at: Value, begin: Value, end: Value) -> Value:
    """Lists the physical rows of the visible entries of candidate blocks [begin, end), ascending; returns how many there are."""
    candidates = row.bound.operands[6]
    n, run = row.visible(), gcd(plan.block, row.per_block)
    first = t.mul(row.row, width(row.request.operands[6]))

    def block(number: Value, total: Value) -> list[Value]:
        begin = t.mul(t.scalar(candidates.values, t.add(first, number)), plan.block)
        return t.loop(begin, t.minimum(t.add(begin, plan.block), n), run, [total], piece)

    def piece(entry: Value, total: Value) -> list[Value]:
        count = t.minimum(t.sub(n, entry), run)
        row.list_run(target, t.add(at, total), entry, count, run)
        return [t.add(total, count)]

    return t.loop(begin, end, 1, [t.index(0)], block)[0]
