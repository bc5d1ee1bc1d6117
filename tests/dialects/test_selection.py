"""`mla.select`, `mla.select_candidates` and `mla.select_within` against a loop over entries; rows that no query sees are poison."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tests.dialects.harness import Case, complaint, refusal
from tests.dialects.ragged import BLOCK_TOKENS, MIXED, NOTHING, SLOTS, Step, block_table, normal, poisoned, step_of, store

from tapeout.dialects import selection
from tapeout.dialects.format import BF16, FP32, INT32, Q4_INDEX, REAL, Array, Number, decode, encode
from tapeout.dialects.rows import TABLE
from tapeout.dialects.state import State
from tapeout.dialects.types import Blocks, Ring, Tensor

HEADS, WIDTH, PAGES = 3, 32, 12
LONGEST = PAGES * BLOCK_TOKENS
TOP, BLOCKS, BLOCK = 5, 3, 2
DEEP = step_of((2, 0, 1), (0, 9, 11), (4, 30, 2), (1, 0, 14), (3, LONGEST - 1, 1))
"""From one entry to all of them: far more than TOP entries and more than BLOCKS blocks in most rows."""


@dataclass(frozen=True)
class Scene:
    """Queries, factors and keys of one step, with every entry's value by slot and number."""

    step: Step
    ratio: int
    iq: Array
    weights: Array
    keys: Array
    table: Array
    state: State
    number: Number

    def inputs(self, rows: slice = slice(None)) -> list[Any]:
        iq, weights = encode(self.iq[rows], self.number), encode(self.weights[rows], BF16)
        return [iq, weights, self.state, self.step.positions[rows], self.step.slots[rows], self.table]

    def visible(self, r: int) -> int:
        return (int(self.step.positions[r]) + 1) // self.ratio

    def score(self, r: int, j: int, kind: str) -> float:
        """docs/model.md 4.5, one entry of one row."""
        total, key = 0.0, self.keys[self.step.slots[r], j]
        for h in range(HEADS):
            product = sum(float(a) * float(b) for a, b in zip(self.iq[r, h * WIDTH :][:WIDTH], key, strict=True))
            total += float(self.weights[r, h]) * max(0.0, product)
        return total if kind == "f64" else float(decode(encode(np.array(total), BF16)))

    def physical(self, r: int, entries: list[int]) -> list[int]:
        per = BLOCK_TOKENS // self.ratio
        return [int(self.table[self.step.slots[r], j // per]) * per + j % per for j in entries]


def scene(step: Step, ratio: int = 1, number: Number = Q4_INDEX, keys: Array | None = None, weights: Array | None = None) -> Scene:
    """Only entries that some row sees are written. Of the factors some are negative, so a score may be."""
    count, per, table = LONGEST // ratio, BLOCK_TOKENS // ratio, block_table(PAGES, seed=ratio)
    keys = normal(1, SLOTS, count, WIDTH) if keys is None else keys
    state = poisoned(Tensor((WIDTH,), number), SLOTS * PAGES * per)
    stored = np.full_like(keys, np.nan)
    for slot in range(SLOTS):
        seen = max([(int(t) + 1) // ratio for t, s in zip(step.positions, step.slots, strict=True) if s == slot], default=0)
        ids = [table[slot, j // per] * per + j % per for j in range(seen)]
        stored[slot, :seen] = store(state, np.array(ids), keys[slot, :seen], number)
    iq = decode(encode(normal(2, step.rows, HEADS * WIDTH), number))
    factors = normal(3, step.rows, HEADS) if weights is None else weights
    return Scene(step, ratio, iq, decode(encode(factors, BF16)), stored, table, state, number)


def operands(ratio: int, number: Number) -> list[Any]:
    return [Tensor((None, HEADS * WIDTH), number), Tensor((None, HEADS), BF16), Blocks(Tensor((WIDTH,), number), ratio), TABLE, TABLE,
            Tensor((SLOTS, PAGES), INT32)]


def attributes(ratio: int, score: str = "f64", top: int = TOP) -> dict[str, Any]:
    return {"heads": HEADS, "top_k": top, "ratio": ratio, "block_tokens": BLOCK_TOKENS, "score": score}


CANDIDATES = [Tensor((None, BLOCKS), INT32), TABLE]


def plain(s: Scene, score: str = "f64", top: int = TOP) -> Case:
    return Case(selection.select, operands(s.ratio, s.number), **attributes(s.ratio, score, top))


def producing(s: Scene, score: str = "f64", top: int = TOP, blocks: int = BLOCKS) -> Case:
    return Case(selection.select_candidates, operands(s.ratio, s.number), **attributes(s.ratio, score, top), blocks=blocks, block=BLOCK)


def within(s: Scene, score: str = "f64", top: int = TOP, blocks: int = BLOCKS) -> Case:
    given = [Tensor((None, blocks), INT32), TABLE]
    return Case(selection.select_within, [*operands(s.ratio, s.number), *given], **attributes(s.ratio, score, top), block=BLOCK)


def best(entries: list[int], scores: dict[int, float], count: int) -> list[int]:
    """The `count` entries with the largest score, the lowest first among equals, in ascending order."""
    return sorted(sorted(entries, key=lambda j: (-scores[j], j))[:count])


def best_blocks(scores: dict[int, float], count: int) -> list[int]:
    """docs/model.md 4.6."""
    if not scores:
        return []
    worth: dict[int, float] = {}
    for j, score in scores.items():
        worth[j // BLOCK] = max(worth.get(j // BLOCK, -np.inf), score)
    worth[(len(scores) - 1) // BLOCK] = np.inf
    return best(list(worth), worth, count)


def expect(ids: Array, counts: Array, rows: list[list[int]]) -> None:
    assert counts.tolist() == [len(row) for row in rows]
    assert ids.tolist() == [row + [-1] * (ids.shape[1] - len(row)) for row in rows]


def naive(s: Scene, score: str, top: int = TOP, blocks: int = BLOCKS) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Physical rows selected, candidate blocks, physical rows selected within them."""
    selected, chosen, inside = [], [], []
    for r in range(s.step.rows):
        scores = {j: s.score(r, j, score) for j in range(s.visible(r))}
        chosen.append(best_blocks(scores, blocks))
        selected.append(s.physical(r, best(list(scores), scores, top)))
        inside.append(s.physical(r, best([j for j in scores if j // BLOCK in chosen[-1]], scores, top)))
    return selected, chosen, inside


@pytest.mark.parametrize("score", ["f64", "bf16"])
@pytest.mark.parametrize("number", [Q4_INDEX, REAL])
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("step", [MIXED, DEEP])
def test_all_three_are_the_loop_over_entries(step: Step, ratio: int, number: Number, score: str) -> None:
    s = scene(step, ratio, number)
    selected, chosen, inside = naive(s, score)
    ids, counts = plain(s, score).run(*s.inputs())
    expect(ids, counts, selected)
    ids, counts, blocks, block_counts = producing(s, score).run(*s.inputs())
    expect(ids, counts, selected)
    expect(blocks, block_counts, chosen)
    expect(*within(s, score).run(*s.inputs(), blocks, block_counts), inside)
    assert {min(TOP, s.visible(r)) for r in range(step.rows)} >= {1, TOP}


def test_the_scenes_reach_every_case() -> None:
    """No entry, fewer than top_k, exactly top_k, more; restrictions that bite and that do not."""
    seen = [s.visible(r) for s in (scene(DEEP, 1), scene(DEEP, 2), scene(MIXED, 2)) for r in range(s.step.rows)]
    assert {0, 1, TOP - 1, TOP, TOP + 1, LONGEST} <= set(seen)
    s = scene(DEEP)
    selected, _, inside = naive(s, "f64")
    assert 3 < sum(a != b for a, b in zip(selected, inside, strict=True)) < s.step.rows
    assert any(s.score(r, j, "f64") < 0 for r in range(4) for j in range(s.visible(r))), "negative scores occur"


def test_selection_within_candidates_is_a_masked_selection() -> None:
    """Scores outside the candidates at minus infinity, then the plain top_k: docs/model.md 4.6."""
    s = scene(DEEP)
    _, _, blocks, counts = producing(s).run(*s.inputs())
    ids, _ = within(s).run(*s.inputs(), blocks, counts)
    for r in range(s.step.rows):
        masked = {j: s.score(r, j, "f64") if j // BLOCK in blocks[r, : counts[r]] else -np.inf for j in range(s.visible(r))}
        kept = [j for j in best(list(masked), masked, TOP) if masked[j] > -np.inf]
        assert [i for i in ids[r] if i >= 0] == s.physical(r, kept)


def test_candidates_that_hold_everything_restrict_nothing() -> None:
    s, enough = scene(DEEP), LONGEST // BLOCK
    ids, counts, blocks, block_counts = producing(s, blocks=enough).run(*s.inputs())
    np.testing.assert_array_equal(block_counts, [-(-s.visible(r) // BLOCK) for r in range(s.step.rows)])
    for found, wanted in zip(within(s, blocks=enough).run(*s.inputs(), blocks, block_counts), (ids, counts), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_the_newest_block_is_a_candidate_even_with_the_worst_score() -> None:
    keys = np.ones((SLOTS, LONGEST, WIDTH))
    keys[:, 10] = -1.0
    s = scene(step_of((1, 10, 1)), keys=keys, weights=np.ones((1, HEADS)))
    s.iq[...] = 1.0
    _, _, blocks, counts = producing(s).run(*s.inputs())
    assert s.score(0, 10, "f64") < s.score(0, 9, "f64")
    expect(blocks, counts, [[0, 1, 5]])


def test_stale_candidate_places_are_not_read() -> None:
    """Only the first candidate_counts places count; blocks beyond what a row sees add nothing."""
    s = scene(step_of((1, 6, 1)))
    ids, counts = within(s).run(*s.inputs(), np.array([[0, 9, 2]], np.int32), np.array([2], np.int32))
    expect(ids, counts, [s.physical(0, [0, 1])])


@pytest.mark.parametrize("score", ["f64", "bf16"])
def test_ties_go_to_the_lowest_entry(score: str) -> None:
    """Factors of zero: all scores are equal. Equal keys: equal scores, wherever in the step they stand."""
    s = scene(DEEP, weights=np.zeros((DEEP.rows, HEADS)))
    expect(*plain(s, score).run(*s.inputs()), [s.physical(r, list(range(min(TOP, s.visible(r))))) for r in range(DEEP.rows)])
    _, _, blocks, counts = producing(s, score).run(*s.inputs())
    lowest = [sorted({*range(BLOCKS - 1), (s.visible(r) - 1) // BLOCK}) if s.visible(r) > BLOCK * BLOCKS else
              list(range(-(-s.visible(r) // BLOCK))) for r in range(DEEP.rows)]
    expect(blocks, counts, lowest)
    repeated = normal(1, SLOTS, 3, WIDTH)[:, np.arange(LONGEST) % 3]
    s = scene(DEEP, number=REAL, keys=repeated)
    expect(*plain(s, score).run(*s.inputs()), naive(s, score)[0])


def test_rounding_the_score_makes_ties() -> None:
    keys = np.zeros((SLOTS, LONGEST, WIDTH))
    keys[1, :4, 0] = [1.0, 1.0 + 2**-9, 1.0 + 2**-10, 0.5]
    s = scene(step_of((1, 3, 1)), number=REAL, keys=keys, weights=np.array([[1.0, 0.0, 0.0]]))
    s.iq[...] = 1.0
    expect(*plain(s, "f64", top=2).run(*s.inputs()), [s.physical(0, [1, 2])])
    expect(*plain(s, "bf16", top=2).run(*s.inputs()), [s.physical(0, [0, 1])])


def test_a_row_selects_the_same_alone() -> None:
    s = scene(DEEP, number=REAL)
    ids, counts = plain(s).run(*s.inputs())
    case = plain(s)
    for r in range(s.step.rows):
        alone, count = case.run(*s.inputs(slice(r, r + 1)))
        assert (alone[0].tolist(), count[0]) == (ids[r].tolist(), counts[r])


def test_no_rows() -> None:
    s = scene(NOTHING)
    assert [x.shape for x in plain(s).run(*s.inputs())] == [(0, TOP), (0,)]
    found = producing(s).run(*s.inputs())
    assert [x.shape for x in found] == [(0, TOP), (0,), (0, BLOCKS), (0,)]
    assert [x.shape for x in within(s).run(*s.inputs(), found[2], found[3])] == [(0, TOP), (0,)]


def test_cost_is_that_of_the_model_page() -> None:
    """docs/model.md 12.2: 2*32*128 operations and 68 bytes for each visible entry; reindex layers see at most 16384."""
    shapes = [Tensor((None, 32 * 128), Q4_INDEX), Tensor((None, 32), BF16), Blocks(Tensor((128,), Q4_INDEX), 1), TABLE, TABLE,
              Tensor((4, 100), INT32)]
    given = {"heads": 32, "top_k": 512, "ratio": 1, "block_tokens": 128, "score": "bf16"}
    small = 32 * 68 + 64 + 4 + 4 + 1600
    select = Case(selection.select, shapes, **given).cost(rows=1, entries=50_000)
    assert (select.operations, select.read, select.written) == ({"fp4": 50_000 * 8192}, 50_000 * 68 + small, 512 * 4 + 4)
    produce = Case(selection.select_candidates, shapes, **given, blocks=2048, block=8).cost(rows=3, entries=50_000)
    assert produce.operations == {"fp4": 3 * 50_000 * 8192}
    reindex = Case(selection.select_within, [*shapes, Tensor((None, 2048), INT32), TABLE], **given, block=8)
    assert reindex.cost(rows=1, entries=50_000).operations == {"fp4": 16384 * 8192}
    assert reindex.cost(rows=1, entries=50_000).read == 1_114_112 + small + 2048 * 4 + 4
    assert reindex.cost(rows=1, entries=100).operations == {"fp4": 100 * 8192}


@pytest.mark.parametrize(("place", "view", "sentence"), [
    (0, Tensor((None, 95), BF16), "iq is [?, 95] bf16, expected 3 heads of 32 columns"),
    (0, Tensor((None, 96), INT32), "iq is [?, 96] i32, expected real elements"),
    (1, Tensor((None, 4), BF16), "weights is [?, 4] bf16, expected [?, 3] of real elements"),
    (2, Ring(Tensor((32,), BF16), 4), "keys is ring of 4 x [32] bf16, expected blocks"),
    (2, Blocks(Tensor((32,), INT32), 2), "keys is blocks of [32] i32, one for 2 tokens, expected entries of one real vector"),
    (2, Blocks(Tensor((32,), BF16), 1), "attribute ratio is 2, but keys is blocks of [32] bf16, one for 1 tokens"),
    (3, Tensor((None,), FP32), "positions is [?] f32, expected [?] i32"),
    (4, Tensor((None, 1), INT32), "slots is [?, 1] i32, expected rank 1"),
    (5, Tensor((None, 4), INT32), "block_table is [?, 4] i32, expected [sequences, blocks] i32"),
])
def test_refusals_of_operands(place: int, view: object, sentence: str) -> None:
    views = [view if i == place else v for i, v in enumerate(operands(2, Q4_INDEX))]
    assert refusal(selection.select, views, **attributes(2)) == f"mla.select: {sentence}"
    assert refusal(selection.select_candidates, views, **attributes(2), blocks=3, block=2) == f"mla.select_candidates: {sentence}"
    assert refusal(selection.select_within, [*views, *CANDIDATES], **attributes(2), block=2) == f"mla.select_within: {sentence}"


@pytest.mark.parametrize(("wrong", "sentence"), [
    ({"heads": 0}, "attribute heads is 0, expected at least 1"),
    ({"top_k": 0}, "attribute top_k is 0, expected at least 1"),
    ({"score": "f32"}, 'attribute score is "f32", expected one of f64, bf16'),
    ({"block_tokens": 3}, "attribute block_tokens is 3, expected a multiple of ratio 2"),
])
def test_refusals_of_attributes(wrong: dict[str, Any], sentence: str) -> None:
    assert refusal(selection.select, operands(2, Q4_INDEX), **{**attributes(2), **wrong}) == f"mla.select: {sentence}"


def test_refusals_of_candidates() -> None:
    views, given = operands(2, Q4_INDEX), attributes(2)
    assert refusal(selection.select_candidates, views, **given, blocks=0, block=2) == (
        "mla.select_candidates: attribute blocks is 0, expected at least 1")
    assert refusal(selection.select_candidates, views, **given, blocks=2, block=2) == (
        "mla.select_candidates: 2 candidate blocks of 2 may hold only 3 visible entries, expected top_k = 5")
    assert refusal(selection.select_within, [*views, *CANDIDATES], **given, block=1) == (
        "mla.select_within: 3 candidate blocks of 1 may hold only 3 visible entries, expected top_k = 5")
    assert refusal(selection.select_within, [*views, TABLE, TABLE], **given, block=2) == (
        "mla.select_within: candidates is [?] i32, expected rank 2")
    assert refusal(selection.select_within, [*views, CANDIDATES[0], CANDIDATES[0]], **given, block=2) == (
        "mla.select_within: candidate_counts is [?, 3] i32, expected rank 1")


def test_the_verifier_says_the_same_of_text() -> None:
    s = scene(MIXED, 2)
    assert 'attribute score is "f32", expected one of f64, bf16' in complaint(plain(s), 'score = "f64"', 'score = "f32"')
