"""`sample.draw` against a loop over tokens in Python integers, its filters at their corners, and the distribution it draws from."""

from collections.abc import Sequence
from math import exp, log
from typing import Any

import numpy as np
import pytest
from tests.dialects.harness import Case, complaint, refusal
from tests.dialects.ragged import normal

from tapeout.dialects import sample
from tapeout.dialects.format import BF16, FP32, INT32, Q8, REAL, Array, encode
from tapeout.dialects.rows import TABLE
from tapeout.dialects.types import Tensor

WORD = 2**64
REALS, SEEDS = Tensor((None,), FP32), Tensor((None,), sample.INT64)


def operands(tokens: int, logits: Any = FP32) -> list[Tensor]:
    return [Tensor((None, tokens), logits), REALS, TABLE, REALS, SEEDS, TABLE]


def draw(logits: Array, temperature: Any = 1.0, top_k: Any = -1, top_p: Any = 1.0, seeds: Any = 0, positions: Any = None,
         stream: int = 0) -> tuple[Array, Array]:
    """Draws with parameters given for every row or for all."""
    n, v = logits.shape
    column = [np.broadcast_to(np.asarray(x), (n,)).astype(t) for x, t in (
        (temperature, np.float32), (top_k, np.int32), (top_p, np.float32), (seeds, np.int64))]
    places = np.arange(n) if positions is None else np.broadcast_to(np.asarray(positions), (n,))
    found = Case(sample.draw, operands(v), stream=stream).run(logits.astype(np.float32), *column, places.astype(np.int32))
    return found[0], found[1]


def mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


def naive_uniform(seed: int, position: int, stream: int, token: int) -> float:
    key = mix(seed % WORD ^ mix((position * 0xD1342543DE82EF95 + stream) % WORD))
    return ((mix((key + token * 0x9E3779B97F4A7C15) % WORD) >> 40) + 0.5) * 2.0**-24


def naive_kept(p: Sequence[float], top_k: int, top_p: float) -> set[int]:
    before, kept = 0.0, set()
    for rank, i in enumerate(sorted(range(len(p)), key=lambda i: (-p[i], i))):
        if (before <= top_p or top_p >= 1) and (top_k < 1 or rank < top_k):
            kept.add(i)
        before += p[i]
    return kept


def naive_softmax(x: Sequence[float], temperature: float) -> list[float]:
    grown = [exp((v - max(x)) / temperature) for v in x]
    return [g / sum(grown) for g in grown]


def naive_draw(x: Sequence[float], temperature: float, top_k: int, top_p: float, seed: int, position: int, stream: int) -> int:
    if temperature == 0:
        return min(i for i in range(len(x)) if x[i] == max(x))
    p = naive_softmax(x, max(temperature, 1e-5))
    score = {i: log(p[i]) - log(-log(naive_uniform(seed, position, stream, i))) for i in naive_kept(p, top_k, top_p)}
    return max(score, key=lambda i: (score[i], -i))


def test_the_naive_mix_is_splitmix64() -> None:
    """The first outputs of SplitMix64 from state 0."""
    assert [mix(i * 0x9E3779B97F4A7C15 % WORD) for i in (1, 2, 3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_uniform_numbers_are_the_loop_in_python_integers(seed: int) -> None:
    positions = np.array([0, 1, 131071, 2**31 - 1], np.int32)
    found = sample.uniform(np.full(4, seed, np.int64), positions, 3, 7)
    assert found.tolist() == [[naive_uniform(seed, int(p), 3, i) for i in range(7)] for p in positions]
    assert (found > 0).all() and (found < 1).all()


@pytest.mark.parametrize("stream", [0, 1, 5])
def test_draw_is_the_loop_over_tokens(stream: int) -> None:
    n = 60
    rng, logits = np.random.default_rng(4), encode(normal(5, n, 13) * 2, FP32)
    temperature, top_p = rng.choice([0.0, 0.3, 1.0, 2.5], n).astype(np.float32), rng.choice([0.0, 0.4, 0.9, 1.0], n).astype(np.float32)
    top_k, seeds, positions = rng.choice([-1, 1, 3, 13, 99], n), rng.integers(-(2**63), 2**63, n), rng.integers(0, 2**20, n)
    tokens, logprobs = draw(logits, temperature, top_k, top_p, seeds, positions, stream)
    rows = zip(logits.tolist(), temperature.tolist(), top_k.tolist(), top_p.tolist(), seeds.tolist(), positions.tolist(), strict=True)
    assert tokens.tolist() == [naive_draw(*row, stream) for row in rows]
    assert len(set(tokens.tolist())) == 13
    raw = [log(naive_softmax(x, 1.0)[t]) for x, t in zip(logits.tolist(), tokens.tolist(), strict=True)]
    np.testing.assert_allclose(logprobs, raw, rtol=2**-23, atol=1e-15)


def test_greedy_takes_the_lowest_of_the_largest() -> None:
    logits = np.array([[1, 3, 3, 2], [5, 5, 5, 5], [-2, -1, -3, -1], [0, -np.inf, 0.5, 0.5]], float)
    tokens, logprobs = draw(logits, temperature=0.0, top_k=1, top_p=0.0)
    assert tokens.tolist() == [1, 0, 1, 2]
    assert logprobs[1] == np.float32(log(0.25))


def test_a_cold_temperature_is_greedy_but_for_ties() -> None:
    tokens, _ = draw(np.tile([0.0, 1.0, 0.99, -5.0], (50, 1)), temperature=1e-30)
    assert set(tokens.tolist()) == {1}
    tied, _ = draw(np.tile([0.0, 1.0, 1.0, -5.0], (50, 1)), temperature=1e-30)
    assert set(tied.tolist()) == {1, 2}


QUARTERS = np.log(np.full(4, 0.25))
UNEVEN = np.log(np.array([0.125, 0.5, 0.25, 0.125]))


@pytest.mark.parametrize(("log_p", "top_k", "top_p", "expected"), [
    (QUARTERS, -1, 0.5, [0, 1, 2]),
    (QUARTERS, -1, 0.4999, [0, 1]),
    (QUARTERS, 2, 0.5, [0, 1]),
    (QUARTERS, 0, 1.0, [0, 1, 2, 3]),
    (QUARTERS, 9, 1.0, [0, 1, 2, 3]),
    (UNEVEN, -1, 0.0, [1]),
    (UNEVEN, -1, 0.49, [1]),
    (UNEVEN, -1, 0.5, [1, 2]),
    (UNEVEN, -1, 0.75, [0, 1, 2]),
    (UNEVEN, -1, 0.875, [0, 1, 2, 3]),
    (UNEVEN, 1, 1.0, [1]),
    (UNEVEN, 3, 1.0, [0, 1, 2]),
    (UNEVEN, 3, 0.5, [1, 2]),
])
def test_filters_at_their_corners(log_p: Array, top_k: int, top_p: float, expected: list[int]) -> None:
    stays = sample.kept(log_p[None], np.array([top_k], np.int32), np.array([top_p]))
    assert np.flatnonzero(stays[0]).tolist() == expected == sorted(naive_kept(np.exp(log_p).tolist(), top_k, top_p))


def test_top_p_of_one_keeps_tokens_that_rounding_puts_beyond_the_whole_mass() -> None:
    log_p = np.array([[2.0**-52, np.log(1e-18), np.log(1e-19)]])
    assert np.exp(log_p[0, 0]) > 1
    assert sample.kept(log_p, np.array([-1], np.int32), np.array([1.0])).all()
    assert sample.kept(log_p, np.array([-1], np.int32), np.array([0.999])).tolist() == [[True, False, False]]


def test_filtered_tokens_are_never_drawn() -> None:
    logits = np.tile(np.log([0.125, 0.5, 0.25, 0.125]), (400, 1))
    assert set(draw(logits, top_k=2)[0].tolist()) == {1, 2}
    assert set(draw(logits, top_p=0.75 - 1e-3)[0].tolist()) == {1, 2}
    assert set(draw(logits, top_k=1)[0].tolist()) == {1}
    assert set(draw(logits)[0].tolist()) == {0, 1, 2, 3}


def test_a_draw_depends_on_seed_position_and_stream_only() -> None:
    n = 64
    logits, rng = normal(7, n, 20), np.random.default_rng(8)
    seeds, positions = rng.integers(0, 2**62, n), rng.integers(0, 1000, n)
    tokens, logprobs = draw(logits, 1.5, seeds=seeds, positions=positions)
    order = rng.permutation(n)
    again, logprobs_again = draw(logits[order], 1.5, seeds=seeds[order], positions=positions[order])
    assert (again.tolist(), logprobs_again.tolist()) == (tokens[order].tolist(), logprobs[order].tolist())
    alone, _ = draw(logits[5:6], 1.5, seeds=seeds[5:6], positions=positions[5:6])
    assert alone[0] == tokens[5]
    for other in ({"seeds": seeds + 1}, {"positions": positions + 1}, {"seeds": seeds, "positions": positions, "stream": 1}):
        changed, _ = draw(logits, 1.5, **{"seeds": seeds, "positions": positions, **other})
        assert (changed != tokens).sum() > n // 2


def chi_square(tokens: Array, p: Array) -> float:
    wanted = p * len(tokens)
    return float((np.square(np.bincount(tokens, minlength=len(p)) - wanted) / wanted).sum())


CRITICAL = {3: 16.27, 4: 18.47, 24: 51.18}
"""The 0.999 quantile of chi-square by degrees of freedom; seeds are fixed, so the test gives one answer."""
DRAWS = 20_000
FIVE = np.array([0.4, 0.3, 0.15, 0.1, 0.05])


@pytest.mark.parametrize("vary", ["positions", "seeds"])
@pytest.mark.parametrize("stream", [0, 1])
def test_draws_follow_the_softmax(vary: str, stream: int) -> None:
    logits = np.tile(np.log(FIVE), (DRAWS, 1))
    tokens, _ = draw(logits, stream=stream, **({"seeds": np.arange(DRAWS), "positions": 17} if vary == "seeds" else {"seeds": 17}))
    assert chi_square(tokens, FIVE) < CRITICAL[4]


def test_draws_follow_temperature_and_filters_renormalised() -> None:
    logits = np.tile(np.log(FIVE), (DRAWS, 1))
    warm = FIVE ** (1 / 2.0)
    assert chi_square(draw(logits, temperature=2.0, seeds=3)[0], warm / warm.sum()) < CRITICAL[4]
    assert chi_square(draw(logits, top_k=4, seeds=4)[0], FIVE[:4] / FIVE[:4].sum()) < CRITICAL[3]


def test_neighbouring_positions_are_independent() -> None:
    tokens, _ = draw(np.tile(np.log(FIVE), (2 * DRAWS, 1)), seeds=11)
    pairs = tokens[::2] * 5 + tokens[1::2]
    assert chi_square(pairs, np.outer(FIVE, FIVE).reshape(-1)) < CRITICAL[24]


def test_log_probability_is_that_of_the_raw_logits() -> None:
    logits = np.tile(np.log(FIVE), (30, 1))
    tokens, logprobs = draw(logits, temperature=0.25, top_k=2, top_p=0.9)
    np.testing.assert_allclose(logprobs, np.log(FIVE)[tokens], rtol=3e-7)


def test_real_results_are_not_rounded() -> None:
    real = Tensor((None,), REAL)
    case = Case(sample.draw, [Tensor((None, 5), REAL), real, TABLE, real, SEEDS, TABLE], REAL, stream=0)
    zero, one = np.zeros(1, np.int32), np.ones(1)
    tokens, logprobs = case.run(np.log(FIVE)[None], one, zero, one, np.array([1]), zero)
    assert case.results == [TABLE, real]
    np.testing.assert_allclose(logprobs, np.log(FIVE)[tokens], rtol=1e-15)


def test_no_rows_and_one_token() -> None:
    tokens, logprobs = draw(np.zeros((0, 5)))
    assert (tokens.shape, logprobs.shape) == ((0,), (0,))
    tokens, logprobs = draw(np.array([[3.0]] * 2), temperature=[0.0, 1.0], top_p=0.0)
    assert (tokens.tolist(), logprobs.tolist()) == ([0, 0], [0.0, 0.0])


def test_cost_reads_the_logits_once() -> None:
    found = Case(sample.draw, operands(1000), stream=0).cost(rows=3)
    assert (found.read, found.written) == (3 * (4000 + 4 * 4 + 8), 3 * 8)
    assert set(found.operations) == {"f32", "integer"}


@pytest.mark.parametrize(("place", "view", "sentence"), [
    (0, TABLE, "logits is [?] i32, expected rank 2"),
    (0, Tensor((None, 0), FP32), "logits is [?, 0] f32, expected at least one token"),
    (1, TABLE, "temperature is [?] i32, expected [?] of real elements"),
    (2, REALS, "top_k is [?] f32, expected [?] i32"),
    (3, Tensor((None, 1), FP32), "top_p is [?, 1] f32, expected rank 1"),
    (4, TABLE, "seeds is [?] i32, expected [?] i64"),
    (5, SEEDS, "positions is [?] i64, expected [?] i32"),
])
def test_refusals_of_operands(place: int, view: Tensor, sentence: str) -> None:
    views = [view if i == place else v for i, v in enumerate(operands(5))]
    assert refusal(sample.draw, views, stream=0) == f"sample.draw: {sentence}"


def test_refusals_of_results_and_attributes() -> None:
    assert refusal(sample.draw, operands(5), stream=-1) == "sample.draw: attribute stream is -1, expected a number at or above 0"
    assert refusal(sample.draw, operands(5), [None, INT32], stream=0) == "sample.draw: the result is [?] i32, expected real elements"
    assert refusal(sample.draw, operands(5), [None, Q8], stream=0) == (
        "sample.draw: the result logprobs is f8E4M3FN*e8m0[1x32], expected one unscaled number a row")


def test_the_verifier_says_the_same_of_text() -> None:
    case = Case(sample.draw, operands(5, BF16), stream=2)
    assert "'sample.draw' attribute stream is -2, expected a number at or above 0" in complaint(case, "stream = 2", "stream = -2")
