"""Selections bit-equal to their meaning where scores are exact, ties and all; near the border of FP32 sums where they are not.

Entries that no row sees are poison. Chunks are small, so that rows of the same step end in the first, in a later and at the end of a chunk.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from tapeout.codegen.kernel import KernelError
from tapeout.dialects import selection
from tapeout.dialects.format import BF16, FP32, INT32, Q4_INDEX, Scaled, decode, encode
from tapeout.dialects.rows import TABLE
from tapeout.dialects.types import Blocks, Tensor
from tests.codegen.kernels.harness import HOW, KernelCase, once, same_bits
from tests.dialects.ragged import poisoned

SLOTS = 4
SMALL = {"chunk": 16, "block_keys": 8, "block_places": 16, "held_places": 0}
"""Schedule entries with which a few dozen entries make several chunks."""


@dataclass(frozen=True)
class Shape:
    """Sizes of one selection; `pages` blocks of the block table a slot."""

    heads: int = 3
    width: int = 32
    top: int = 5
    ratio: int = 1
    tokens: int = 4
    pages: int = 24
    blocks: int = 4
    block: int = 2
    number: object = Q4_INDEX

    @property
    def per(self):
        return self.tokens // self.ratio

    @property
    def entries(self):
        return self.pages * self.per

    def views(self):
        keys = Blocks(Tensor((self.width,), self.number), self.ratio)
        return [Tensor((None, self.heads * self.width), self.number), Tensor((None, self.heads), BF16), keys, TABLE, TABLE,
                Tensor((SLOTS, self.pages), INT32)]

    def attributes(self):
        return {"heads": self.heads, "top_k": self.top, "ratio": self.ratio, "block_tokens": self.tokens, "score": "bf16"}

    @once
    def plain(self, **schedule):
        return KernelCase(partial(selection.select, **self.attributes()), self.views(), **{**SMALL, **schedule})

    @once
    def producing(self, **schedule):
        build = partial(selection.select_candidates, **self.attributes(), blocks=self.blocks, block=self.block)
        return KernelCase(build, self.views(), **{**SMALL, **schedule})

    @once
    def within(self, **schedule):
        build = partial(selection.select_within, **self.attributes(), block=self.block)
        return KernelCase(build, [*self.views(), Tensor((None, self.blocks), INT32), TABLE], **{**SMALL, **schedule})


def whole(seed, *shape):
    """FP4 values whose products sum exactly in FP32; scales differ from group to group."""
    rng = np.random.default_rng(seed)
    steps = np.array([0, 1, -1, 2])[np.arange(shape[-1]) // 32 % 4]
    return rng.choice([-6, -3, -2, -1, 0, 0, 1, 2, 4, 6], shape) * 2.0**steps


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def scene(s, seen, values=whole, factors=None):
    """Operands of rows that see seen[r] entries each, in slot r % SLOTS; every entry that its slot's longest row sees is written."""
    count = len(seen)
    positions = np.maximum(np.asarray(seen, np.int32) * s.ratio - 1 + np.arange(count, dtype=np.int32) % s.ratio, 0)
    slots = (np.arange(count) % SLOTS).astype(np.int32)
    table = np.random.default_rng(7).permutation(SLOTS * s.pages).astype(np.int32).reshape(SLOTS, s.pages)
    state = poisoned(Tensor((s.width,), s.number), SLOTS * s.entries)
    for slot in range(SLOTS):
        longest = max([n for n, own in zip(seen, slots, strict=True) if own == slot], default=0)
        numbers = np.arange(longest)
        rows = table[slot, numbers // s.per] * s.per + numbers % s.per
        state.write(rows.astype(np.int32), encode(values(slot, longest, s.width), s.number))
    factors = np.random.default_rng(5).integers(-2, 4, (count, s.heads)).astype(float) if factors is None else factors
    return [encode(values(11, count, s.heads * s.width), s.number), encode(factors, BF16), state, positions, slots, table]


def seen_by(s):
    """No entry, fewer than top, top, one more, and counts around chunks and at the end of the table."""
    counts = [0, 1, s.top - 1, s.top, s.top + 1, 15, 16, 17, 33, 48, s.entries - 1, s.entries]
    return [n for n in counts if n > 0 or s.ratio > 1]


SHAPES = [
    Shape(),
    Shape(ratio=2, pages=48),
    Shape(heads=2, width=128, top=16, tokens=8, pages=14, blocks=8, block=8),
    Shape(heads=1, top=1, blocks=1, block=1),
    Shape(top=7, tokens=8, ratio=2, pages=26, blocks=3, block=8),
    Shape(top=20, blocks=21, block=1, number=BF16),
]


def agree(found, wanted):
    for f, w in zip(found.results, wanted.results, strict=True):
        same_bits(f, w)


def shapes_and_cuts():
    """Every shape with every cut of its entries into pieces and held places; each shape and each cut twice or more in every run."""
    cuts = [(0, 0), (0, 64), (1, 0), (3, 1000), (50, 0)]
    for i, s in enumerate(SHAPES):
        for j, (pieces, held) in enumerate(cuts):
            always = (i + 2 * j) % len(cuts) < 2
            yield pytest.param(s, pieces, held, id=f"{i}-{pieces}-{held}", marks=() if always else pytest.mark.full)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("s", "pieces", "held"), list(shapes_and_cuts()))
def test_selections_are_those_of_the_meaning(how, s, pieces, held):
    plain, producing, within = (make(pieces=pieces, held_places=held) for make in (s.plain, s.producing, s.within))
    for seen in ([], [s.entries], seen_by(s)):
        given = scene(s, seen)
        agree(plain.run(how, *given), plain.meaning(*given))
        produced = producing.meaning(*given)
        agree(producing.run(how, *given), produced)
        inside = [*given, *produced.results[2:]]
        agree(within.run(how, *inside), within.meaning(*inside))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("factors", [0.0, -1.0])
def test_equal_scores_go_to_the_lowest_entry(how, factors):
    """Zero factors make equal scores, some of them -0; equal keys make equal scores everywhere."""
    s = Shape()
    seen = seen_by(s)
    same = lambda seed, *shape: whole(3, 1, shape[-1]).repeat(shape[0], 0)  # noqa: E731
    given = scene(s, seen, same, np.full((len(seen), s.heads), factors))
    for case in (s.plain(), s.producing()):
        agree(case.run(how, *given), case.meaning(*given))


@pytest.mark.parametrize("how", HOW)
def test_the_newest_block_is_a_candidate_even_with_the_worst_score(how):
    s = Shape(heads=1, top=3, blocks=3, block=2)
    falling = lambda seed, *shape: np.minimum(6, np.maximum(1, 7 - np.arange(shape[0])))[:, None] * np.ones(shape)  # noqa: E731
    given = scene(s, [11, 40], falling, np.ones((2, 1)))
    case = s.producing()
    found = case.run(how, *given)
    agree(found, case.meaning(*given))
    assert found.results[2].tolist() == [[0, 1, 5], [0, 1, 19]]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("pieces", [0, 2])
def test_places_behind_the_candidate_count_and_blocks_out_of_sight_add_nothing(how, pieces):
    s = Shape(heads=1, top=5, blocks=4)
    given = [*scene(s, [7, 1]), np.array([[0, 40, 2, -9], [0, 1, 2, 3]], np.int32), np.array([2, 4], np.int32)]
    case = s.within(pieces=pieces)
    agree(case.run(how, *given), case.meaning(*given))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("slots", [1, 2, 5])
def test_slots_of_the_workspace_do_not_change_a_row(how, slots):
    s = Shape()  # in no pieces: those need a slot a row
    seen = seen_by(s)
    given = scene(s, seen)
    one = s.producing(workspace_bytes=1)
    bytes_of_a_slot = 8 * one.kernel.workspaces[0].elements(1)
    case = s.producing(workspace_bytes=slots * bytes_of_a_slot)
    assert case.kernel.workspaces[0].elements(100) == slots * one.kernel.workspaces[0].elements(1)
    agree(case.run(how, *given), case.meaning(*given))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("s", [
    Shape(heads=2, width=128, top=16, tokens=128, pages=3), Shape(heads=32, width=128, top=64, tokens=64, pages=3)])
def test_any_values_are_selected_within_the_error_of_the_scores(how, s):
    """A selected entry's real score is at most a BF16 step plus the sums' error below any left out; a row alone selects the same."""
    seen = [s.entries, s.entries - 7, s.top + 1]
    given = scene(s, seen, normal, normal(5, len(seen), s.heads))
    case = s.plain(chunk=64)
    ids, counts = case.run(how, *given).results
    assert counts.tolist() == [s.top] * len(seen)
    keys, queries, factors = decode(given[2].value), decode(given[0]).reshape(len(seen), s.heads, s.width), decode(given[1])
    for r, n in enumerate(seen):
        numbers = np.arange(n)
        physical = given[5][given[4][r], numbers // s.per] * s.per + numbers % s.per
        products = queries[r] @ keys[physical].T
        score = factors[r] @ np.maximum(products, 0)
        size = np.abs(factors[r]) @ (np.abs(queries[r]) @ np.abs(keys[physical]).T)
        chosen = np.isin(physical, ids[r])
        assert chosen.sum() == s.top
        np.testing.assert_array_equal(physical[chosen], ids[r])
        slack = 2.0**-8 * np.abs(score).max() + (s.width + s.heads) * 2.0**-23 * size.max()
        assert score[chosen].min() >= score[~chosen].max() - 2 * slack
        alone = [x[r : r + 1] if i in (0, 1, 3, 4) else x for i, x in enumerate(given)]
        same_bits(case.run(how, *alone).results[0], ids[r : r + 1])


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("pieces", [0, 8])
def test_real_sizes(how, pieces):
    """512 of 3,000 entries in two chunks, 256 candidate blocks of 8."""
    s = Shape(heads=32, width=128, top=512, tokens=64, pages=47, blocks=256, block=8)
    row = {"chunk": 2048, "block_keys": 64, "block_places": 128, "pieces": pieces}
    given = scene(s, [3000, 700])
    producing, within = s.producing(**row), s.within(**row)
    produced = producing.meaning(*given)
    agree(producing.run(how, *given), produced)
    inside = [*given, *produced.results[2:]]
    agree(within.run(how, *inside), within.meaning(*inside))


def test_refusals():
    s = Shape()
    with pytest.raises(KernelError, match='score is "f64", this kernel rounds FP32 sums to "bf16"'):
        KernelCase(partial(selection.select, **{**s.attributes(), "score": "f64"}), s.views())
    with pytest.raises(KernelError, match=r"this kernel takes both FP4 or both BF16"):
        Shape(number=FP32).plain()
    with pytest.raises(KernelError, match="candidates of 80000 entries are more than the 32-bit keys of this kernel number"):
        Shape(blocks=10000, block=8).within()
    with pytest.raises(KernelError, match="need places of more than 16 bits; lower chunk"):
        Shape(pages=30000).plain(chunk=70000)


def test_scenes_hold_ties_and_negative_scores():
    s = Shape()
    given = scene(s, [s.entries])
    assert isinstance(given[0], Scaled)
    slot = given[5][0]
    keys = decode(given[2].value)[slot.repeat(s.per) * s.per + np.tile(np.arange(s.per), s.pages)]
    score = decode(given[1])[0] @ np.maximum(decode(given[0]).reshape(s.heads, s.width) @ keys.T, 0)
    assert len(np.unique(encode(score, BF16))) < s.entries and score.min() < 0 < score.max()
