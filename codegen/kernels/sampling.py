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
    POSITION,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    Block,
    Cells,
    Line,
    Settings,
    base_of,
    border,
    given_logits,
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
    logits = request.operands[:TEMPERATURE]
    if any(not isinstance(v, Tensor) or v.number.element not in ("bf16", "f32") for v in logits):
        return f"logits is {' plus '.join(map(str, logits))}, this kernel draws from BF16 or FP32 logits"
    return None


@family("sample.draw", "nn.fused:correct_draw", refuses=_cannot_draw)
def draw(request: Request, schedule: Schedule) -> Kernel:
    """Tokens [?] and their log-probabilities under the plain softmax of logits [?, V]. Grid: rows (model spec 8.2).

    Logits that are a sum (`correct_draw`) are added up once, by the first pass over a row; a group that hands out tokens alone has no
    log-probabilities.
    """
    if schedule.get("pieces"):
        return in_pieces(request, schedule)
    n, base = width(request.operands[0]), base_of(request)
    size = block(schedule, "block_columns", n)

    def body(*buffers: Value) -> None:
        b = bind(request, buffers)
        at = t.program_id(0)
        held = b.operands[0].values if base is None else b.workspaces[1]
        load: Block = lambda first: t.cast(t.View(held, [None, n]).load([at, first], [size]), "f32")  # noqa: E731

        def summed(first: Value) -> Value:
            """The first to ask leaves what all others load."""
            x = given_logits(b, base, at, first, size)
            t.View(held, [None, n]).store([at, first], x)
            return x

        line = whole_line(n, size, load)
        peak, greedy = line.largest(load if base is None else summed)
        cells, token = Cells(b.workspaces[0], t.mul(at, CELLS)), t.View(b.results[0].values, [None])
        token.store([at], greedy)
        temperature = number_at(b.operands[TEMPERATURE].values, at)

        def drawn() -> None:
            top_k, top_p, seed, position = (number_at(b.operands[place].values, at) for place in (TOP_K, TOP_P, SEED, POSITION))
            settings = settings_of(temperature, top_k, top_p, peak, n)
            token.store([at], _drawn(line, cells, settings, noise_key(seed, position, request.of("sample.draw")["stream"])))

        cells.when(t.greater(temperature, 0.0), FLAG, drawn)
        if b.results[1:]:
            chosen = t.cast(number_at(held, t.add(t.mul(at, n), t.scalar(b.results[0].values, at))), "f32")
            total = line.sum(lambda first: t.exp(t.sub(load(first), line.across(peak))))
            t.View(b.results[1].values, [None]).store([at], t.sub(t.sub(chosen, peak), t.log(total)))

    order = f"row: blocks of {size} tokens ascending, each place by itself, then the places"
    work = (Workspace("i32", lambda rows: CELLS * rows), *([] if base is None else [Workspace("f32", lambda rows: n * rows)]))
    return Kernel(body, lambda *b: [row_count(b)], order, workspaces=work)


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
