"""The draft block's rows and window ids bit-equal to their meaning; pooling, correction and confidence within their FP32 sums."""

from functools import partial

import numpy as np
import pytest

from tapeout.dialects import dspark, mla
from tapeout.dialects.format import BF16, FP32, decode
from tapeout.dialects.rows import TABLE
from tapeout.dialects.types import Ring, Tensor
from tests.codegen.kernels.harness import HOW, ROWS, KernelCase, assert_close, assert_same, gamma, numbers, row, same_bits, uneven, whole
from tests.dialects.ragged import poisoned, store

SEQUENCES = 40


def sequences(count, positions=None):
    """Last positions from -1 on (a sequence without a window) and slots in no order."""
    last = (np.arange(count) * 7 - 1).astype(np.int32) if positions is None else positions
    return last, np.random.default_rng(count).permutation(SEQUENCES)[:count].astype(np.int32)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("size", [1, 3, 5, 16])
def test_block_lists_golden_and_noise(how, size):
    case = KernelCase(partial(dspark.block, noise=510, size=size), [TABLE] * 3)
    for count in ROWS:
        last, slots = sequences(count)
        given = (np.arange(count) * 3 + 100).astype(np.int32), last, slots
        assert_same(case.run(how, *given, rows=count * size), case.meaning(*given))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("window", "ring", "size"), [(16, 22, 5), (128, 134, 5), (5, 5, 1), (7, 11, 3)])
def test_window_lists_ring_rows_then_the_block(how, window, ring, size):
    case = KernelCase(partial(dspark.window, window=window, ring=ring, sequences=SEQUENCES, size=size), [TABLE] * 2)
    for count in ROWS:
        given = sequences(count)
        assert_same(case.run(how, *given, rows=count * size), case.meaning(*given))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("n", "size", "schedule"), [(512, 5, {}), (37, 3, {}), (96, 2, {"block_columns": 32})])
def test_correct_adds_one_place_of_every_block(how, n, size, schedule):
    views = [Tensor((None, n), FP32), Tensor((None, n), FP32)]
    for step in (0, size - 1):
        case = KernelCase(partial(dspark.correct, step=step, size=size), views, **schedule)
        for count in ROWS:
            given = uneven(1, count * size, n, number=FP32), uneven(2, count, n, number=FP32)
            assert_same(case.run(how, *given, rows=count), case.meaning(*given))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("hidden", "embedded", "number"), [(128, 32, BF16), (37, 11, BF16), (1024, 256, BF16), (96, 64, FP32)])
@pytest.mark.parametrize("places", [1, 3])
def test_confidence_is_the_formula(how, hidden, embedded, number, places):
    case = confidences(hidden, embedded, places, number)
    for count in ROWS:
        x, *parts = uneven(1, count * places, hidden), *(uneven(2 + n, count, embedded) for n in range(places))
        projection = numbers(9, 1, hidden + embedded, number=number)
        terms = np.stack([np.concatenate([decode(x)[n::places], decode(e)], axis=1) for n, e in enumerate(parts)], 1) * decode(projection)
        (found,) = case.run(how, x, *parts, projection, rows=count)
        assert_close(found, terms.sum(axis=2), gamma(hidden + embedded) * np.abs(terms).sum(axis=2), FP32)
    exact = whole(4, 5 * places, hidden), *(whole(5 + n, 5, embedded) for n in range(places)), whole(9, 1, hidden + embedded, number=number)
    assert_same(case.run(how, *exact, rows=5), case.meaning(*exact))


def confidences(hidden, embedded, places, number=BF16):
    views = [Tensor((None, hidden), BF16), *[Tensor((None, embedded), BF16)] * places, Tensor((1, hidden + embedded), number)]
    return KernelCase(lambda x, *rest: dspark.confidence(x, list(rest[:-1]), rest[-1]), views)


LENGTH, SLOTS = 7, 3


def pairs(count, width, number):
    """A ring in which only partner rows and staged rows are written."""
    partners = np.where(np.arange(count) % 3 == 1, -1, np.arange(count) * 5 % (LENGTH * SLOTS)).astype(np.int32)
    state = poisoned(Tensor((2 * width,), number), LENGTH * SLOTS + count)
    used = np.concatenate([np.unique(partners[partners >= 0]), LENGTH * SLOTS + np.arange(count)])
    store(state, used, decode(uneven(count, len(used), 2 * width, number=number, block=3)), number)
    return state, partners


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("width", "number", "schedule"), [(128, FP32, {}), (37, FP32, {}), (48, BF16, {"block_columns": 16})])
def test_pool_is_the_formula(how, width, number, schedule):
    build = partial(mla.pool, length=LENGTH, sequences=SLOTS, out=BF16)
    case = KernelCase(build, [Ring(Tensor((2 * width,), number), LENGTH), TABLE], **schedule)
    real = KernelCase(partial(build, out=FP32), [Ring(Tensor((2 * width,), number), LENGTH), TABLE], **schedule)
    for count in ROWS:
        given = pairs(count, width, number)
        held = decode(given[0].value)
        exact = decode(real.meaning(*given).results[0])
        own = np.abs(held[LENGTH * SLOTS :, width:])
        other = np.where(given[1][:, None] < 0, own, np.abs(held[given[1], width:]))
        found = case.run(how, *given, rows=count).results[0]
        assert_close(found, exact, (own + other) * 2.0**-20, BF16)


@pytest.mark.parametrize("how", HOW)
def test_rows_do_not_depend_on_each_other(how):
    case = confidences(96, 32, 1)
    given = uneven(1, 17, 96), uneven(2, 17, 32), numbers(3, 1, 128)
    (found,) = case.run(how, *given)
    for r in range(17):
        (alone,) = case.run(how, row(given[0], r), row(given[1], r), given[2])
        same_bits(alone, row(found, r))


@pytest.mark.parametrize("how", HOW)
def test_pool_stays_finite_where_gates_are_far_apart(how):
    state = poisoned(Tensor((4,), FP32), 1 + 2)
    store(state, [1, 2], np.array([[-3e4, 3e4, 1.0, 2.0], [3e4, -3e4, 4.0, 8.0]]), FP32)
    case = KernelCase(partial(mla.pool, length=1, sequences=1), [Ring(Tensor((4,), FP32), 1), TABLE])
    found = case.run(how, state, np.array([-1, 1], np.int32), rows=2).results[0]
    assert decode(found).tolist() == [[1.0, 2.0], [4.0, 2.0]]
