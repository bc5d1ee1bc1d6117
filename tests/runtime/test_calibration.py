"""Calibration: outcomes are counted where something was told, temperatures and monotone maps recover a known distortion, errors fall."""

import numpy as np
import pytest

from tapeout.runtime.calibration import (
    BINS,
    FADING,
    Outcomes,
    calibration_error,
    mapped,
    monotone_map,
    no_outcomes,
    temperatures,
    with_outcomes,
)


def test_only_reached_and_verified_drafts_count() -> None:
    confidences = np.array([[0.01, 0.11, 0.21], [0.31, 0.41, 0.51], [0.61, 0.71, 0.81]])
    counts = with_outcomes(no_outcomes(3), confidences, np.array([4, 3, 1]), np.array([1, 2, 0]))
    assert [np.flatnonzero(row).tolist() for row in counts.seen] == [[0, 6], [2, 8], []]  # of 20 bins
    assert counts.accepted.sum(axis=1).tolist() == [2, 1, 0]
    assert counts.claimed.sum(axis=1) == pytest.approx([0.32, 0.52, 0])
    again = with_outcomes(counts, confidences, np.array([1, 1, 1]), np.array([0, 0, 0]))
    np.testing.assert_allclose(again.seen, FADING * counts.seen)


def test_certain_confidences_stay_in_range() -> None:
    counts = with_outcomes(no_outcomes(2), np.array([[1.0, 0.0]]), np.array([3]), np.array([1]))
    assert counts.seen[0, BINS - 1] == counts.seen[1, 0] == 1
    assert np.isfinite(temperatures(counts)).all()


def observed(distort, steps=400, sequences=64, seed=0):
    """Confidences that are a distortion of the true chances, and what came of them."""
    random, counts = np.random.default_rng(seed), no_outcomes(3)
    for _ in range(steps):
        chance = random.uniform(0.02, 0.98, (sequences, 3))
        passed = random.random((sequences, 3)) < chance
        accepted = np.where(passed.all(axis=1), 3, np.argmin(passed, axis=1))
        counts = with_outcomes(counts, distort(chance), np.full(sequences, 4), accepted)
    return counts


def sharpened(chance, factors=(2.0, 1.0, 0.5)):
    return 1 / (1 + ((1 - chance) / chance) ** np.array(factors))


def test_temperatures_recover_overconfidence() -> None:
    np.testing.assert_allclose(temperatures(observed(sharpened)), [2.0, 1.0, 0.5], rtol=0.12)
    np.testing.assert_allclose(temperatures(no_outcomes(4)), 1.0)


def test_both_maps_lower_the_error() -> None:
    counts, chance = observed(sharpened), np.random.default_rng(9).uniform(0.02, 0.98, (500, 3))
    before = np.abs(sharpened(chance) - chance).mean(axis=0)
    for after in (sharpened(sharpened(chance), 1 / temperatures(counts)), mapped(sharpened(chance), monotone_map(counts))):
        errors = np.abs(after - chance).mean(axis=0)
        assert errors[0] < 0.35 * before[0] and errors[2] < 0.35 * before[2] and errors[1] < 0.03
    own = calibration_error(counts)
    assert own[0] > 0.08 and own[2] > 0.05 and own[1] < 0.03


def test_monotone_maps_are_monotone_and_pool_violators() -> None:
    seen = np.zeros((1, BINS))
    seen[0, 4:7] = 1e9, 1e9, 2e9
    accepted = np.zeros((1, BINS))
    accepted[0, 4:7] = 0.5e9, 0.2e9, 0.2e9  # rates 0.5, 0.2, 0.1: all three pool to 0.9 / 4
    curve = monotone_map(Outcomes(seen, seen * 0.3, accepted))
    assert (np.diff(curve[0]) >= 0).all()
    assert curve[0, 4:7] == pytest.approx([0.225] * 3, abs=1e-6)


def test_without_outcomes_maps_change_nothing() -> None:
    middles = (np.arange(BINS) + 0.5)[None, :].T / BINS
    np.testing.assert_allclose(mapped(np.repeat(middles, 2, axis=1), monotone_map(no_outcomes(2))), np.repeat(middles, 2, axis=1))
    np.testing.assert_allclose(calibration_error(no_outcomes(2)), 0)
