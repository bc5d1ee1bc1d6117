"""Attention within the error of its FP32 sums, rows independent, the fused rotation equal to one behind it; unread rows are NaN."""

from functools import partial

import numpy as np
import pytest

from tapeout.dialects import mla, nn
from tapeout.dialects.format import BF16, FP32, INT32, Q4_INDEX, Q4_MAIN, Q8, decode
from tapeout.dialects.rows import TABLE
from tapeout.dialects.types import Blocks, Ring, Tensor
from tests.codegen.kernels.harness import HOW, ROWS, Found, KernelCase, assert_close, assert_same, numbers
from tests.dialects.harness import values
from tests.dialects.ragged import poisoned, store

RING = 50
PHYSICAL = 60


def views(heads, width, window, selected, ring=Q8, entries=Q4_MAIN):
    held = Ring(Tensor((width,), ring), RING)
    given = [Tensor((None, heads * width), BF16), held, Tensor((None, window), INT32), TABLE, Tensor((heads,), FP32)]
    if not selected:
        return [*given, None, None, None]
    return [*given, Blocks(Tensor((width,), entries), 2), Tensor((None, selected), INT32), TABLE]


def listed(seed, count, most, floor):
    """Ids [count, most] of distinct rows in no order, -1 behind a count between `floor` and `most`; every count occurs."""
    rng = np.random.default_rng(seed)
    counts = np.array([floor + r * 7 % (most - floor + 1) for r in range(count)], np.int32)
    ids = np.full((count, most), -1, np.int32)
    for r, n in enumerate(counts):
        ids[r, :n] = rng.permutation(PHYSICAL)[:n]
    return ids, counts


def state_of(number, width, ids, seed):
    """Only rows that ids name are written."""
    state, used = poisoned(Tensor((width,), number), PHYSICAL), np.unique(ids[ids >= 0])
    store(state, used, values(seed, len(used), width, block=8) / 8, number)
    return state


def inputs(count, heads, width, window, selected, ring=Q8, entries=Q4_MAIN):
    ids, counts = listed(1, count, window, 0)
    given = [numbers(2, count, heads * width), state_of(ring, width, ids, 3), ids, counts, numbers(4, heads, number=FP32)]
    if not selected:
        return [*given, None, None, None]
    ids, counts = listed(5, count, selected, 0)
    return [*given, state_of(entries, width, ids, 6), ids, counts]


def formula(given, heads, scale):
    """Rows [count, heads, D] in float64, and how far FP32 sums may be from them (model spec 4.7)."""
    q, sink = decode(given[0]), given[4]
    count, width = len(q), q.shape[1] // heads
    out, slack = np.zeros((count, heads, width)), np.zeros((count, heads, width))
    for r in range(count):
        sources = [(given[1], given[2], given[3]), (given[5], given[6], given[7])]
        keys = np.concatenate([decode(s.value)[i[r, : n[r]]] for s, i, n in sources if s is not None])
        for h in range(heads):
            part = q[r, h * width : (h + 1) * width]
            weights = np.exp(scale * keys @ part)
            weights /= weights.sum() + np.exp(float(sink[h]))
            out[r, h] = weights @ keys
            logit = (width + 4) * 2.0**-23 * scale * (np.abs(keys) @ np.abs(part)).max(initial=0)
            slack[r, h] = weights @ np.abs(keys) * (2 * logit + (len(keys) + 16) * 2.0**-22)
    return out.reshape(count, heads * width), slack.reshape(count, heads * width)


SHAPES = [
    (3, 32, 4, 5, {"block_heads": 3, "block_keys": 4}),
    (4, 128, 16, 16, {}),
    (2, 64, 21, 0, {"block_heads": 1, "block_keys": 8}),
    (6, 32, 17, 33, {"block_heads": 2, "block_keys": 16}),
    (4, 32, 5, 9, {"block_heads": 2, "block_keys": 8, "instances": 3}),
]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("heads", "width", "window", "selected", "schedule"), SHAPES)
def test_attend_is_the_formula(how, heads, width, window, selected, schedule):
    scale = width**-0.5
    case = KernelCase(partial(mla.attend, heads=heads, scale=scale), views(heads, width, window, selected), **schedule)
    for count in ROWS:
        given = inputs(count, heads, width, window, selected)
        found = case.run(how, *given).results[0]
        assert_close(found, *formula(given, heads, scale), BF16)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("ring", "entries"), [(BF16, BF16), (Q4_MAIN, Q8), (Q4_INDEX, Q4_INDEX)])
def test_attend_decodes_every_kind_of_row(how, ring, entries):
    case = KernelCase(partial(mla.attend, heads=2, scale=0.1), views(2, 64, 9, 6, ring, entries), block_heads=2, block_keys=4)
    given = inputs(5, 2, 64, 9, 6, ring, entries)
    assert_close(case.run(how, *given).results[0], *formula(given, 2, 0.1), BF16)


@pytest.mark.parametrize("how", HOW)
def test_real_heads(how):
    """64 heads of 512 columns."""
    case = KernelCase(partial(mla.attend, heads=64, scale=512**-0.5), views(64, 512, 48, 60))
    given = inputs(1, 64, 512, 48, 60)
    assert_close(case.run(how, *given).results[0], *formula(given, 64, 512**-0.5), BF16)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("heads", "width", "window", "selected", "schedule"), SHAPES)
def test_a_row_does_not_depend_on_the_others(how, heads, width, window, selected, schedule):
    case = KernelCase(partial(mla.attend, heads=heads, scale=0.125), views(heads, width, window, selected), **schedule)
    given = inputs(17, heads, width, window, selected)
    whole = case.run(how, *given).results[0]
    for r in (0, 1, 7, 16):
        alone = [x[r : r + 1] if i in (0, 2, 3, 6, 7) and x is not None else x for i, x in enumerate(given)]
        np.testing.assert_array_equal(case.run(how, *alone).results[0][0].view(np.uint16), whole[r].view(np.uint16))


@pytest.mark.parametrize("how", HOW)
def test_no_keys_and_extreme_sinks(how):
    """A row without keys is 0; a sink far above the logits takes everything, one far below nothing."""
    case = KernelCase(partial(mla.attend, heads=4, scale=0.125), views(4, 32, 4, 0), block_heads=4, block_keys=4)
    given = inputs(2, 4, 32, 4, 0)
    given[4] = np.array([-np.inf, -1e4, 0.0, 1e4], np.float32)
    given[2], given[3] = np.array([[-1] * 4, [7, -1, -1, -1]], np.int32), np.array([0, 1], np.int32)
    given[1] = state_of(Q8, 32, given[2], 8)
    found = decode(case.run(how, *given).results[0]).reshape(2, 4, 32)
    key = decode(given[1].value)[7]
    assert not found[0].any() and not found[1, 3].any()
    np.testing.assert_array_equal(found[1, :2], [key, key])


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("selected", "offset"), [(5, 0), (0, -1)])
def test_attend_rotate_is_attend_then_rotate(how, selected, offset):
    heads, width, turned = 4, 64, 32
    settings = {"heads": heads, "width": width, "offset": offset, "inverse": True}
    table = numbers(9, 40, turned, number=FP32)
    plain = views(heads, width, 6, selected)
    attend = partial(mla.attend, heads=heads, scale=0.125)
    turn = [TABLE, Tensor(table.shape, FP32)]
    given = [v for v in plain if v is not None]
    build = lambda *v: nn.rope(attend(*v[:-2], *[None] * (8 - len(given))), *v[-2:], out=BF16, **settings)  # noqa: E731
    fused = KernelCase(build, [*given, *turn], "attend_rotate", block_heads=2, block_keys=4)
    alone = KernelCase(attend, plain, block_heads=2, block_keys=4)
    rope = KernelCase(partial(nn.rope, out=BF16, **settings), [plain[0], *turn], block_heads=2)
    for count in ROWS:
        given = inputs(count, heads, width, 6, selected)
        positions = (np.arange(count) * 7 % 40).astype(np.int32)
        attended = alone.run(how, *given).results[0]
        found = fused.run(how, *(x for x in given if x is not None), positions, table)
        assert_same(Found(found.results, []), rope.run(how, attended, positions, table))
