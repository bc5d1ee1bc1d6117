"""Costs: what a fit learns and keeps, chunks against brute force, tables against the rule read aloud, launch costs at run-time sizes."""

import numpy as np
import pytest

from tapeout.runtime.cost import (
    Chunk,
    RowSlope,
    chunk,
    corrected,
    decode_observed,
    decode_table,
    evaluated,
    experts_touched,
    measured_ms,
    new_decode_fit,
    new_fit,
    new_prefill_fit,
    observed,
    prefill_features,
    prefill_ms,
    step_times,
)
from tapeout.runtime.errors import OptionRefused, ProgramsInconsistent

TRUE = np.array([1.7, 0.011, 3e-7, 0.23, 0.004])  # constant, token, key, sequence, kept row


SWEEP = [
    *[[Chunk(q, p)] for q in (1024, 4096, 8192) for p in (0, 100_000)],
    *[[Chunk(q, 50_000, 140)] for q in (1024, 4096, 8192)],
    *[[Chunk(q, 0)] * n for q, n in ((512, 2), (1024, 4), (1024, 8))],
]
"""Twelve steps that tell the coefficients apart."""


def fitted(rounds=3, values=TRUE):
    fit = new_prefill_fit()
    for _ in range(rounds):
        for pieces in SWEEP:
            fit = observed(fit, prefill_features(pieces), float(values @ prefill_features(pieces)))
    return fit


def test_features_are_the_formula() -> None:
    pieces = [Chunk(7, 100, 3), Chunk(1, 0), Chunk(128, 5, 2)]
    assert prefill_features(pieces).tolist() == [1, 136, 7 * (100 + 4) + 1 * 1 + 128 * (5 + 64.5), 3, 5]
    visible = sum(prefix + i + 1 for tokens, prefix, _ in pieces for i in range(tokens))
    assert prefill_features(pieces)[2] == visible


def test_steps_that_differ_enough_tell_all_coefficients_apart() -> None:
    np.testing.assert_allclose(fitted().values, TRUE, rtol=2e-3)


def test_a_fit_predicts_what_it_has_not_seen() -> None:
    mix = [Chunk(640, 12_000, 140), Chunk(3, 7), Chunk(2048, 0)]
    assert prefill_ms(fitted(), mix) == pytest.approx(float(TRUE @ prefill_features(mix)), rel=1e-3)
    assert prefill_ms(new_prefill_fit(), mix) == 0


@pytest.mark.parametrize("seed", range(8))
def test_bounded_fits_are_the_best_of_all_non_negative_ones(seed) -> None:
    """The conditions of Kuhn and Tucker: values >= 0, slopes >= 0, and one of the two is 0."""
    random = np.random.default_rng(seed)
    fit = new_fit(np.ones(4))
    for _ in range(30):
        x = np.array([1.0, *random.random(3)])
        fit = observed(fit, x, float(x @ [8, -3, 1, -2]) + random.normal(scale=0.2))
    slope = fit.information @ fit.values - fit.moment
    assert (fit.values >= 0).all() and (fit.values == 0).any()
    assert (slope > -1e-3).all()
    np.testing.assert_allclose(fit.values * slope, 0, atol=1e-2)


def driven(fit, truth, steps=4000):
    """One kind of load for long: one prompt a step, no prefix, nothing kept."""
    random = np.random.default_rng(0)
    for _ in range(steps):
        features = prefill_features([Chunk(int(random.integers(100, 4000)), 0)])
        fit = observed(fit, features, float(truth @ features))
    return fit


def test_what_the_load_no_longer_shows_is_kept() -> None:
    np.testing.assert_allclose(driven(fitted(), TRUE).values, TRUE, rtol=0.01)


def test_forgetting_follows_a_change() -> None:
    slower = TRUE * [1, 2, 1, 1, 1]
    after = driven(fitted(), slower)
    assert prefill_ms(after, [Chunk(1000, 0)]) == pytest.approx(float(slower @ prefill_features([Chunk(1000, 0)])), rel=0.01)
    assert after.values[1] == pytest.approx(slower[1], rel=0.02)
    assert (after.values >= 0).all()


@pytest.mark.parametrize("ms", [float("nan"), float("inf"), -1.0])
def test_impossible_measurements_are_ignored(ms) -> None:
    fit = fitted(rounds=1)
    assert observed(fit, prefill_features([Chunk(5, 5)]), ms) is fit


def brute_chunk(fit, prefix, todo, left_ms, used_tokens, keep):
    """The rule read aloud: the largest q within time, room and prompt; whole blocks unless it finishes."""
    def ms(q):
        kept = max(0, prefix + q - max(prefix, prefix + todo - keep))
        return float(fit.values[1:] @ [q, q * (prefix + (q + 1) / 2), 1, kept])

    most = max((q for q in range(todo + 1) if ms(q) <= left_ms + 1e-9 and q <= 32_768 - used_tokens), default=0)
    return most if most == todo else most // 128 * 128


def test_chunks_equal_brute_force() -> None:
    random = np.random.default_rng(1)
    fit, sizes = fitted(), set()
    for _ in range(150):
        prefix, todo = int(random.integers(0, 200_000)), int(random.integers(1, 3000))
        left, used, keep = float(random.uniform(-2, 60)), int(random.choice([0, 31_000, 32_768])), int(random.choice([0, 140]))
        found = chunk(fit, prefix, todo, left_ms=left, used_tokens=used, keep=keep)
        assert found == brute_chunk(fit, prefix, todo, left, used, keep), (prefix, todo, left, used, keep)
        sizes.add((found == 0, found == todo))
    assert sizes == {(True, False), (False, True), (False, False)}


def test_chunk_edges() -> None:
    fit = fitted()
    assert chunk(fit, 0, 1_000_000, left_ms=1e9) == 32_768
    assert chunk(fit, 0, 127, left_ms=1e9) == 127
    assert chunk(fit, 0, 300, left_ms=1e9, used_tokens=32_768 - 200) == 128
    assert chunk(fit, 0, 300, left_ms=1e9, used_tokens=32_768 - 127) == 0
    assert chunk(fit, 0, 300, left_ms=-1) == 0
    assert chunk(new_prefill_fit(), 0, 500, left_ms=0) == 500  # nothing is known yet: nothing holds it back


def test_step_times_of_padded_sizes() -> None:
    table = decode_table([1, 2, 4, 8, 16], [1, 2, 3, 5, 9])
    assert step_times(table, 2, 8).tolist() == [2, 3, 3, 5, 5, 5, 5, 9, 9]
    assert step_times(table, 3, 2, row_slope=0.5, extra_ms=0.25).tolist() == [3 + 2 + 0.25, 3 + 2 + 0.25, 5 + 4 + 0.25]
    assert step_times(table, 15, 3).tolist() == [9, 9, np.inf, np.inf]
    assert step_times(table, 17, 1).tolist() == [np.inf, np.inf]
    assert step_times(decode_table([], []), 4, 4).size == 0


def test_step_times_between_sizes_and_contexts() -> None:
    table = decode_table([1, 5], [[1, 3], [9, 19]], [0, 1000], is_padded=False)
    assert step_times(table, 1, 4).tolist() == [1, 3, 5, 7, 9]
    assert step_times(table, 1, 4, context=500).tolist() == [2, 5, 8, 11, 14]
    assert step_times(table, 5, 0, context=2000).tolist() == [29]  # extended beyond the last


@pytest.mark.parametrize(("rows", "ms", "contexts", "found"), [
    ([2, 2], [1, 1], [0.0], "strictly increasing"), ([1, 2], [1], [0.0], "shape"), ([1], [0.0], [0.0], "above 0"),
    ([1], [float("nan")], [0.0], "finite"), ([1], [[1, 2]], [5.0, 4.0], "strictly increasing"),
])
def test_tables_that_are_refused(rows, ms, contexts, found) -> None:
    with pytest.raises(OptionRefused, match=found):
        decode_table(rows, ms, contexts)


def test_measured_time_drops_warm_up_best_and_worst() -> None:
    assert measured_ms([900.0, 5.0, 1.0, 6.0, 7.0, 100.0]) == 6.0
    with pytest.raises(OptionRefused):
        measured_ms([1.0, 2.0, 3.0])


def test_the_decode_correction_learns_context() -> None:
    table = decode_table([8, 16, 32, 64], [10, 11, 13, 17])
    truth = lambda size, context: 10 + size / 8 + 0.4 + 0.01 * size + 2e-6 * size * context  # noqa: E731
    fit, random = new_decode_fit(), np.random.default_rng(3)
    for _ in range(400):
        rows, context = int(random.integers(1, 65)), float(random.uniform(0, 50_000))
        size = next(s for s in (8, 16, 32, 64) if s >= rows)
        base = {8: 10, 16: 11, 32: 13, 64: 17}[size]
        fit = decode_observed(fit, table, rows, context, truth(size, context) - (10 + size / 8) + base)
    after = corrected(decode_table(table.rows, np.repeat(table.ms, 2, axis=1), [0, 50_000]), fit)
    np.testing.assert_allclose(after.ms[:, 0], table.ms[:, 0] + 0.4 + 0.01 * table.rows, rtol=1e-3)
    np.testing.assert_allclose(after.ms[:, 1], after.ms[:, 0] + 0.1 * table.rows, rtol=1e-3)
    assert corrected(table, new_decode_fit()) is table
    assert decode_observed(fit, table, 65, 0, 5) is fit


def test_row_slope_is_a_median_of_medians() -> None:
    slope = RowSlope(window=40, least=10)
    for i in range(9):
        slope.observe(8, 10, 10 + 8 * i)
    assert slope.value == 0  # nine samples do not count
    slope.observe(8, 10, 10 + 8 * 100)
    assert slope.value == 4.5
    for _ in range(10):
        slope.observe(16, 10, 10 + 16 * 2)
    assert slope.value == (4.5 + 2) / 2
    for _ in range(40):
        slope.observe(32, 10, 5)  # pushes all others out; a negative slope counts as none
    assert slope.value == 0


COST = {"read": {"fixed": 1000.0, "rows": 10.0, "experts": 500.0}, "written": {"rows": 6.0}, "bf16": {"rows": 64.0, "rows*entries": 2.0}}


def test_launch_costs_at_run_time_sizes() -> None:
    sizes = {"rows": 3.0, "entries": 100.0, "experts": 2.0}
    assert evaluated(COST, sizes) == {"read": 2030.0, "written": 18.0, "bf16": 192.0 + 600.0}
    with pytest.raises(ProgramsInconsistent, match="term of 'experts'"):
        evaluated(COST, {"rows": 1.0, "entries": 1.0})


def test_experts_that_a_step_touches() -> None:
    assert experts_touched(384, 6)(1) == pytest.approx(6)
    assert experts_touched(384, 6)(2) == pytest.approx(12 - 36 / 384)  # the second six, less those that the first has chosen
    assert experts_touched(384, 6)(10_000) == pytest.approx(384)
