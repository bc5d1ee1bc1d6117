"""`sample.draw`: greedy and filters exact, draws those of the meaning where FP32 can tell tokens apart, log-probabilities close."""

from functools import partial

import numpy as np
import pytest

from tapeout.codegen import tile_builder as t
from tapeout.codegen import tile_interpreter
from tapeout.codegen.kernels import draw_workspace, drawn_rows
from tapeout.dialects import dspark, sample
from tapeout.dialects.format import BF16, FP32, decode, encode
from tapeout.dialects.rows import TABLE
from tapeout.dialects.types import Tensor
from tests.codegen.kernels.harness import COMPILED, HOW, INTERPRETED, ROWS, KernelCase, compiled, once, same_bits

REALS, SEEDS = Tensor((None,), FP32), Tensor((None,), sample.INT64)
STREAM = 3


@once
def draw_case(tokens, number=FP32, **schedule):
    return KernelCase(partial(sample.draw, stream=STREAM), [Tensor((None, tokens), number), REALS, TABLE, REALS, SEEDS, TABLE], **schedule)


def given(logits, temperature=1.0, top_k=0, top_p=1.0, number=FP32):
    """Operands with settings for every row or for all; seeds of both signs, positions up to the largest."""
    n = len(logits)
    settings = (temperature, np.float32), (top_k, np.int32), (top_p, np.float32)
    column = [np.broadcast_to(np.asarray(x), (n,)).astype(kind) for x, kind in settings]
    seeds = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, n, dtype=np.int64)
    positions = np.resize(np.array([0, 1, 131071, 2**31 - 1, 77], np.int32), n)
    return [encode(np.asarray(logits, np.float64), number), *column, seeds, positions]


def normal(seed, *shape, scale=3.0):
    return np.random.default_rng(seed).standard_normal(shape) * scale


def assert_drawn(found, operands, share=0.9):
    """Each token has the largest noisy score among those that stay, up to FP32 errors of the score and of the mass at the top_p border.

    In at least `share` of the rows only one token can pass.
    """
    logits, temperature, top_k, top_p, seeds, positions = operands
    x, tokens, single = decode(logits), found.results[0], 0
    hot = np.where(temperature > 0, np.maximum(temperature.astype(np.float64), sample.COOLEST), 1.0)[:, None]
    scaled = x / hot
    scaled -= scaled.max(axis=1, keepdims=True)
    log_p = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
    score = log_p - np.log(-np.log(sample.uniform(seeds, positions, STREAM, x.shape[1])))
    slack = 2.0**-20 * (20 + np.abs(scaled))
    border = x.shape[1] * 2.0**-23
    wide, narrow = (sample.kept(log_p, top_k, np.where(top_p >= 1, top_p, top_p + side)) for side in (border, -border))
    for r, token in enumerate(tokens):
        if temperature[r] == 0:
            assert token == x[r].argmax()
            continue
        passes = wide[r] & (score[r] + slack[r] >= np.where(narrow[r], score[r] - slack[r], -np.inf).max())
        assert passes[token], (r, token, np.flatnonzero(passes))
        single += passes.sum() == 1
    assert single >= share * np.count_nonzero(temperature)
    raw = x - x.max(axis=1, keepdims=True)
    logprobs = (raw - np.log(np.exp(raw).sum(axis=1, keepdims=True)))[np.arange(len(x)), tokens]
    bound = 2.0**-22 * (np.abs(logprobs) + 4) + x.shape[1] * 2.0**-24
    assert (np.abs(found.results[1] - logprobs) <= bound).all()


def rows_for(how, count):
    """Few rows in the interpreter, which is slow; statements about many draws are made of the compiled kernel."""
    return count // 20 if how == INTERPRETED else count


def cut(tokens, pieces, listed, levels=4, instances=1000):
    """A schedule row that cuts rows into pieces; lists are short, so that both ways to the border are taken."""
    return {"block_columns": tokens // pieces, "row_columns": tokens // 2, "pieces": pieces, "levels": levels, "listed": listed,
            "instances": instances}


WHOLE = {"pieces": 0}
SIZES = [(512, WHOLE), (97, WHOLE), (1280, {**WHOLE, "block_columns": 128}), (96, {**WHOLE, "block_columns": 16}), (512, cut(512, 4, 64)),
         (96, cut(96, 6, 8, 16)), (1280, cut(1280, 1, 2048, 1))]  # fmt: skip
FORMS = {"whole": lambda tokens: {**WHOLE, "block_columns": tokens // 2}, "listed": lambda tokens: cut(tokens, 2, tokens, 3),
         "unlisted": lambda tokens: cut(tokens, 4, 4, 2), "shared": lambda tokens: cut(tokens, 4, tokens, 3, instances=5)}  # fmt: skip


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("tokens", "schedule"), SIZES)
def test_greedy_takes_the_largest_logit(how, tokens, schedule):
    case = draw_case(tokens, **schedule)
    for count in ROWS:
        operands = given(normal(count, count, tokens), temperature=0.0, top_k=1, top_p=0.1)
        assert_drawn(case.run(how, *operands), operands)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_greedy_takes_the_lowest_of_equals(how, form):
    x = np.full((4, 96), -5.0)
    x[0, [17, 30, 95]] = 2.0
    x[1, [95]] = 2.0
    x[2, 40], x[2, 50] = -0.0, 0.0
    case = draw_case(96, **form(96))
    assert case.run(how, *given(x, temperature=0.0)).results[0].tolist() == [17, 95, 40, 0]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("tokens", "schedule"), SIZES)
def test_draws_are_those_of_the_meaning(how, tokens, schedule):
    case = draw_case(tokens, **schedule)
    for count in (0, 1, 2, 17):
        operands = given(normal(count, count, tokens), temperature=np.resize([1.0, 0.0, 0.3, 2.0, 1e-9], count))
        assert_drawn(case.run(how, *operands), operands)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(("top_k", "top_p"), [
    (1, 1.0), (5, 1.0), (511, 1.0), (512, 1.0), (9999, 1.0), (-1, 1.0), (0, 0.0), (0, 0.3), (0, 0.95), (7, 0.9), (300, 0.5),
    (0, 0.9999999), (3, 2.0)])
def test_filters_keep_what_the_meaning_keeps(how, form, top_k, top_p):
    """A high temperature makes noise decide, so that a token too many or too few is drawn."""
    case = draw_case(512, **form(512))
    operands = given(normal(5, rows_for(how, 40), 512, scale=1.0), temperature=3.0, top_k=top_k, top_p=top_p)
    assert_drawn(case.run(how, *operands), operands)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(("top_k", "top_p", "kept"), [
    (37, 1.0, 37), (0, 0.5, 257), (0, 0.0, 1), (300, 0.25, 129), (1, 0.9, 1), (0, 1.0, 512)])
def test_equal_tokens_stay_from_the_lowest_on(how, form, top_k, top_p, kept):
    """With equal logits the masses are exact, and so is the border: the draws are those of the meaning, and lie below it."""
    case = draw_case(512, **form(512))
    operands = given(np.full((rows_for(how, 80), 512), 1.5), top_k=top_k, top_p=top_p)
    tokens = case.run(how, *operands).results[0]
    same_bits(tokens, case.meaning(*operands).results[0])
    assert tokens.max() < kept and (kept < 60 or len(tokens) < 80 or tokens.max() > 0.8 * kept)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_ties_at_the_border_are_cut_by_id(how, form):
    """Two levels of logits, the lower one cut in its middle by either filter."""
    x = np.zeros((rows_for(how, 240), 96))
    x[:, ::3] = np.log(2.0)
    case = draw_case(96, **form(96))
    for settings in ({"top_k": 50}, {"top_p": 0.75}):
        operands = given(x, **settings)
        found = case.run(how, *operands)
        assert_drawn(found, operands, share=0.5)
        low = found.results[0][found.results[0] % 3 != 0]
        assert low.size and low.max() < 96 * 0.55


def tied(tokens):
    """Rows in which thousands of logits are equal: all, a half, all but one that is far above or below them, all but those in the middle, some
    above and below others, some beside masked ones; and one of which a single token is not masked."""
    x = np.zeros((10, tokens))
    x[0] = 1.5
    x[1, ::2] = np.log(2.0)
    x[2, tokens // 3] = 20.0
    x[3, tokens // 3] = -20.0
    x[4] = normal(11, tokens)
    x[4, tokens // 8 : -tokens // 8] = 1.0
    x[5] = np.random.default_rng(12).choice([0.0, 0.5, 1.0], tokens)
    x[6] = np.where(np.arange(tokens) % 3, -np.inf, 2.0)
    x[7] = np.where(np.arange(tokens) % 3, 2.0, -1e30)
    x[8] = np.where(np.arange(tokens) == tokens // 2, 3.0, -np.inf)
    x[9, ::2] = -0.0
    return x


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_thousands_of_equal_logits(how, form):
    """The border lies among equals, in a list or not, and the least of their ids stay."""
    x = np.tile(tied(4096), (2 if how == INTERPRETED else 21, 1))  # every row with other settings in each turn
    settings = {"top_k": [1500, 0, 2500, 1, 0, 4095, 0], "top_p": [1.0, 0.7, 0.9, 1.0, 1e-6, 0.5, 0.9999999],
                "temperature": [1.0, 1.0, 100.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1e-9, 1.0, 3.0]}  # fmt: skip
    operands = given(x, **{name: np.resize(column, len(x)) for name, column in settings.items()})
    with np.errstate(invalid="ignore"):
        assert_drawn(draw_case(4096, **form(4096)).run(how, *operands), operands, share=0.5)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_logits_that_are_not_finite_harm_their_own_row_alone(how, form):
    """Such a row gives some token of the vocabulary, as others are read by it, and no log-probability."""
    x, turns = normal(13, 9, 512), 3 if how == INTERPRETED else 5
    x[1], x[3], x[4], x[5] = np.nan, -np.inf, np.inf, -np.nan
    x[6, 7] = x[7, 100:240] = np.nan
    x[8, 511] = np.inf
    case, bad = draw_case(512, **form(512)), np.tile(np.isin(np.arange(9), [0, 2], invert=True), turns)
    settings = {"temperature": [0.0, 1.0, 1.0, 1.0, 1.0], "top_k": [0, 0, 40, 40, 0], "top_p": [1.0, 1.0, 0.5, 1.0, 0.9]}
    operands = given(np.tile(x, (turns, 1)), **{name: np.repeat(column[:turns], 9) for name, column in settings.items()})
    with np.errstate(all="ignore"):
        tokens, logprobs = case.run(how, *operands).results
    assert (tokens >= 0).all() and (tokens < 512).all() and np.isnan(logprobs[bad]).all()
    alone = case.run(how, *(column[~bad] for column in operands)).results
    same_bits(tokens[~bad], alone[0])
    same_bits(logprobs[~bad], alone[1])


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_bf16_logits_and_extremes(how, form):
    x = normal(2, 12, 96)
    x[1] = 0.0
    x[2, 5:] = -1e30
    x[3, :] = -3e4
    x[4, 7] = 1e4
    case = draw_case(96, BF16, **form(96))
    operands = given(x, temperature=np.resize([1.0, 0.5], 12), top_p=np.resize([1.0, 0.9, 0.5], 12), number=BF16)
    assert_drawn(case.run(how, *operands), operands)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("listed", [8, 256])
def test_lists_longer_than_registers_hold(how, listed, monkeypatch):
    """Flat logits: most tokens lie between two levels. The list is read again for every pass, or the row where the list does not fit."""
    monkeypatch.setattr(draw_workspace, "LONGEST_HELD", 8)
    case = draw_case.__wrapped__(512, **cut(512, 4, listed, 3))  # not a kept one: it is built under this limit
    for settings in ({"top_p": 0.7}, {"top_k": 200}, {"top_k": 300, "top_p": 0.4}):
        operands = given(normal(6, rows_for(how, 40), 512, scale=1.0), temperature=3.0, **settings)
        assert_drawn(case.run(how, *operands), operands)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("hidden", [-1e30, -np.inf])
def test_nobody_looks_for_a_border_among_masked_tokens(how, hidden):
    """More tokens may stay than are not masked; one piece has none of those. A list of the masked ones would not fit."""
    x = np.full((rows_for(how, 40), 512), hidden)
    x[:, 3:380:9] = normal(8, len(x), 42)
    operands = given(x, temperature=1.5, top_k=100)
    with np.errstate(invalid="ignore"):
        assert_drawn(draw_case(512, **cut(512, 4, 16, 9)).run(how, *operands), operands)


@pytest.mark.parametrize("form", [{}, {"block_columns": 2020, "row_columns": 2020, "pieces": 64, "levels": 17, "listed": 32768, "instances": 100}])
@pytest.mark.parametrize("settings", [{}, {"top_k": 50}, {"top_p": 0.9}, {"top_p": 0.6, "temperature": 50.0}])
def test_the_real_vocabulary(settings, form):
    """129,280 tokens in the blocks of the CPU's schedule row, compiled; a masked token (-inf) is never drawn."""
    x = normal(4, 6, 129280)
    x[:, ::2] = -np.inf
    operands = given(x, **{"temperature": np.resize([1.0, 0.5, 0.0], 6), **settings})
    with np.errstate(invalid="ignore"):
        assert_drawn(draw_case(129280, **form).run(COMPILED, *operands), operands, share=0.5)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_row_draws_the_same_alone(how, form):
    case = draw_case(96, **form(96))
    settings = {"temperature": [1.0, 0.0, 0.7], "top_k": [0, 9], "top_p": [1.0, 0.8]}
    operands = given(normal(3, 17, 96), **{name: np.resize(column, 17) for name, column in settings.items()})
    tokens, logprobs = case.run(how, *operands).results
    for r in range(17):
        alone = case.run(how, *(x[r : r + 1] for x in operands)).results
        same_bits(alone[0], tokens[r : r + 1])
        same_bits(alone[1], logprobs[r : r + 1])


PLACE = {"size": 3, "step": 1}


@once
def corrected_case(tokens, number=FP32, results=2, **schedule):
    """A draw whose logits are the sum of a block's base logits and its bias; it hands out both results, or tokens alone."""

    def build(base, bias, *settings):
        return sample.draw(dspark.correct(base, bias, **PLACE), *settings, stream=STREAM)[:results]

    views = [Tensor((None, tokens), number), Tensor((None, tokens), FP32), REALS, TABLE, REALS, SEEDS, TABLE]
    return KernelCase(build, views, "correct_draw", **schedule)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("number", [FP32, BF16])
def test_corrected_logits_draw_as_those_of_their_own_would(how, form, number):
    """Bit for bit, whatever is asked: rows of other places hold NaN. Ties, masks and logits that are no numbers are among the rows."""
    x = np.concatenate([tied(96), normal(17, 5, 96, scale=1.0), np.full((1, 96), np.nan), np.full((1, 96), -np.inf)])
    count = len(x)
    bias = np.resize([0.0, -2.5, 1.0, 0.125], count)[:, None] + np.where(np.arange(count)[:, None] % 4, 0.0, normal(18, count, 96))
    base = np.full((count * PLACE["size"], 96), np.nan)
    base[PLACE["step"] :: PLACE["size"]] = x
    settings = {"temperature": [1.0, 0.0, 3.0, 1.0, 0.7], "top_k": [0, 5, 40, 0, 90, 1, 0], "top_p": [1.0, 0.9, 1.0, 0.6]}
    columns = given(x, **{name: np.resize(column, count) for name, column in settings.items()})[1:]
    parts = encode(base, number), encode(bias, FP32)
    with np.errstate(all="ignore"):
        sums = (decode(parts[0])[PLACE["step"] :: PLACE["size"]] + decode(parts[1])).astype(np.float32)
        wanted = draw_case(96, **form(96)).run(how, sums, *columns).results
        found = corrected_case(96, number, **form(96)).run(how, *parts, *columns, rows=count).results
        (alone,) = corrected_case(96, number, 1, **form(96)).run(how, *parts, *columns, rows=count).results
    same_bits(found[0], wanted[0])
    same_bits(found[1], wanted[1])
    same_bits(alone, wanted[0])


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_any_number_of_corrected_rows(how, form):
    for count in ROWS:
        x, bias = normal(count, count * PLACE["size"], 96), normal(count + 1, count, 96)
        columns = given(bias, temperature=np.resize([0.0, 1.0], count), top_k=np.resize([0, 0, 9], count))[1:]
        base, added = x.astype(np.float32), bias.astype(np.float32)
        found = corrected_case(96, **form(96)).run(how, base, added, *columns, rows=count)
        assert_drawn(found, [base[PLACE["step"] :: PLACE["size"]] + added, *columns])


@pytest.mark.parametrize("how", HOW)
def test_noise_is_exact_at_both_ends_of_the_unit_interval(how):
    """-log(-log u) of the smallest, the largest and the middle numbers; FP32 holds no u above one half."""
    n = np.array([0, 1, 2, 5, 2**22, 2**23 - 1, 2**23, 2**23 + 1, *range(2**24 - 4, 2**24), *range(10**6, 10**6 + 4)], np.int64)

    def body(words, out):
        t.View(out, [16]).store([0], drawn_rows.noise(t.View(words, [16]).load([0], [16])))

    module = t.kernel("kernel", {"words": "i64", "out": "f32"}, body, lambda *b: [1])
    arrays = {"words": (n << 40) | 12345, "out": np.zeros(16, np.float32)}
    (partial(tile_interpreter.run, module) if how == INTERPRETED else compiled(module))(arrays)
    exact = -np.log(-np.log((n + 0.5) * 2.0**-24))
    np.testing.assert_allclose(arrays["out"], exact, rtol=2.0**-20, atol=2.0**-20)
