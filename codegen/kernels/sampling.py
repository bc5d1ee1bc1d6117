"""`sample.draw`: greedy, or nucleus and top-k with keyed noise, on rows of logits in memory.

Ranks are exact (`drawn_rows`); masses are FP32 sums in one order: a token stands on the other side of the top_p border than in real
arithmetic only where the mass before it is within V * 2^-23 of top_p. Where the schedule cuts rows into `pieces`, `draw_pieces` builds the
kernel; here one instance has a whole row.
"""

from typing import Any

from tapeout.codegen import tile_builder as t
from tapeout.codegen.kernel import Kernel, Request, Schedule, Workspace, family, width
from tapeout.codegen.kernels.draw_pieces import in_pieces
from tapeout.codegen.kernels.drawn_rows import (
    HIGHEST_ID,
    Block,
    Cells,
    Line,
    Settings,
    border,
    last_of,
    noise_key,
    noisy,
    number_at,
    settings_of,
    whole_line,
)
from tapeout.codegen.kernels.ordered_bits import LOWEST_KEY
from tapeout.codegen.row_values import bind, block, row_count
from tapeout.dialects.types import Tensor

Value = Any
CELLS = 4
FLAG, STAY, FLOOR, LAST = range(CELLS)
"""Scratch of a row: a condition; how many tokens stay at the least key that does; that key, and the last id that stays at it."""


def _cannot_draw(request: Request) -> str | None:
    logits = request.operands[0]
    if not isinstance(logits, Tensor) or logits.number.element not in ("bf16", "f32"):
        return f"logits is {logits}, this kernel draws from BF16 or FP32 logits"
    return None


@family("sample.draw", refuses=_cannot_draw)
def draw(request: Request, schedule: Schedule) -> Kernel:
    """Tokens [?] and their log-probabilities under the plain softmax of logits [?, V]. Grid: rows (model spec 8.2)."""
    if schedule.get("pieces"):
        return in_pieces(request, schedule)
    n = width(request.operands[0])
    size = block(schedule, "block_columns", n)

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        at, logits = t.program_id(0), b.operands[0]
        load: Block = lambda first: t.cast(t.View(logits.values, [None, n]).load([at, first], [size]), "f32")  # noqa: E731
        line = whole_line(n, size, load)
        peak, greedy = line.largest(load)
        cells, token = Cells(b.workspaces[0], t.mul(at, CELLS)), t.View(b.results[0].values, [None])
        token.store([at], greedy)
        temperature = number_at(b.operands[1].values, at)

        def drawn() -> None:
            top_k, top_p, seed, position = (number_at(x.values, at) for x in b.operands[2:])
            settings = settings_of(temperature, top_k, top_p, peak, n)
            token.store([at], _drawn(line, cells, settings, noise_key(seed, position, request["stream"])))

        cells.when(t.greater(temperature, 0.0), FLAG, drawn)
        chosen = t.cast(number_at(logits.values, t.add(t.mul(at, n), t.scalar(b.results[0].values, at))), "f32")
        total = line.sum(lambda first: t.exp(t.sub(load(first), line.across(peak))))
        t.View(b.results[1].values, [None]).store([at], t.sub(t.sub(chosen, peak), t.log(total)))

    order = f"row: blocks of {size} tokens ascending, each place by itself, then the places"
    return Kernel(body, lambda *b: [row_count(b)], order, workspaces=(Workspace("i32", lambda rows: CELLS * rows),))


def _drawn(line: Line, cells: Cells, settings: Settings, key: Value) -> Value:
    """The token with the largest scaled logit plus noise, of those that both filters leave."""
    cells.put(FLOOR, t.full([], LOWEST_KEY, "i32"))
    cells.put(LAST, t.full([], HIGHEST_ID, "i32"))

    def cut(allowed: Value | None) -> None:
        floor, stay, tied = border(line, settings, allowed)
        cells.put(FLOOR, floor)
        cells.put(STAY, t.maximum(stay, 1))
        last = lambda: cells.put(LAST, last_of(line, floor, cells.get(STAY), line.places.bit_length()))  # noqa: E731
        cells.when(t.less(t.maximum(stay, 1), tied), FLAG, last)

    def by_mass() -> None:
        total = line.sum(lambda first: settings.weight(line.load(first)))
        cut(t.mul(total, settings.top_p))

    heavy = t.less(settings.top_p, 1.0)
    cells.when(heavy, FLAG, by_mass)
    cells.when(t.bit_and(t.logical_not(heavy), t.less(settings.top_k, line.places)), FLAG, lambda: cut(None))
    floor, last = cells.get(FLOOR), cells.get(LAST)

    def score(first: Value) -> Value:
        keys, ids = line.keys(first), line.ids(first)
        tied = t.bit_and(t.equal(keys, line.across(floor)), t.less_equal(ids, line.across(last)))
        return noisy(settings, line.load(first), ids, key, t.bit_or(t.greater(keys, line.across(floor)), tied))

    return line.largest(score)[1]
