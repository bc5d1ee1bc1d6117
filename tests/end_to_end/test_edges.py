"""The places where a model of this kind goes wrong: each is shown to be reached, and right there."""

import numpy as np
import pytest

from tapeout.models.deepseek_v41.config import parse_config
from tapeout.models.deepseek_v41.reference import Reference
from tapeout.runtime.errors import PromptRefused
from tests.end_to_end.conftest import Model, prompt
from tests.models.noise import noise_floor

SEEDS = 12
EXACT = 0.01
"""Logit distance of a row that no rounding has flipped: sums in another order give 1e-5, one flipped code 0.1."""


@pytest.fixture(scope="module")
def noise(model: Model) -> float:
    """Largest logit difference between two orders of sums, over two long prompts: what one flipped selection can do."""
    return noise_floor(model.config, model.tensors, [np.asarray(prompt(300, seed)) for seed in range(2)], model.token_map).maximum


def _distances(model: Model, tokens: list[int], pieces: list[int]) -> np.ndarray:
    """Largest logit difference to the reference, row by row."""
    reference = model.reference(numerics="faithful", accumulate="float64")
    truth = reference.forward(reference.start(), tokens).logits
    with model.engine() as engine:
        ends = np.cumsum(pieces)
        found = np.concatenate([engine.forward([(3, tokens[end - size : end])])[0] for size, end in zip(pieces, ends, strict=True)])
    return np.abs(found - truth).max(axis=1)


@pytest.mark.parametrize(
    ("count", "pieces"),
    [
        (1, [1]),  # Engram looks back over the start; one odd token; no entry
        (2, [2]),
        (2, [1, 1]),  # the first pair, in one chunk and across two
        (3, [3]),
        (3, [2, 1]),
        (3, [1, 2]),  # an odd tail
        (15, [15]),
        (16, [16]),
        (17, [17]),
        (18, [9, 9]),  # window edges
        (22, [22]),
        (23, [23]),
        (60, [60]),
        (60, [22, 38]),
        (60, [23, 37]),  # the ring's length, and chunks beyond it
        (64, [64]),
        (65, [65]),
        (66, [33, 33]),
        (130, [130]),
        (131, [64, 67]),  # where candidates begin to restrict
    ],
    ids=str,
)
def test_edges(model: Model, noise: float, count: int, pieces: list[int]) -> None:
    """Every prompt stays within twice the noise, and some prompt is exact: a wrong edge would move all of them.

    One flipped FP4 code moves every row behind it, so exactness is asked of a quarter of the later rows of one prompt in twelve.
    """
    for seed in range(SEEDS):
        found = _distances(model, prompt(count, 1000 * seed + count), pieces)
        assert found.max() <= 2 * noise, (seed, found.max(), noise)
        if np.quantile(found[count // 2 :], 0.25) <= EXACT:
            return
    pytest.fail(f"none of {SEEDS} prompts is exact: {found}")


def test_exactness_shows_a_window_that_is_one_too_short(model: Model) -> None:
    """The control: the criterion above tells the smallest wrong edge from the right one, for every prompt."""
    data = model.config.canonical()
    data["text_config"]["sliding_window"] -= 1
    wrong = Reference(parse_config(data), model.tensors, token_map=model.token_map, numerics="faithful")
    right = model.reference(numerics="faithful")
    for seed in range(3):
        tokens = prompt(30, 1000 * seed + 30)
        rows = np.abs(wrong.forward(wrong.start(), tokens).logits - right.forward(right.start(), tokens).logits).max(axis=1)
        assert np.quantile(rows[15:], 0.25) > 2 * EXACT


def test_candidates_restrict_beyond_sixty_four_entries(model: Model) -> None:
    """The prompts above do reach the restriction: the reference sees candidate blocks fewer than the visible ones."""
    reference = model.reference(numerics="faithful")
    out = reference.forward(reference.start(), prompt(131, 431))
    blocks = [len(c) for c in out.candidates]
    assert max(blocks) == model.config.text.candidate_topk_blocks
    assert -(-131 // model.config.text.candidate_block_size) > max(blocks)


def test_the_image_token_is_refused(model: Model) -> None:
    """The artifact runs the text path; an image position would be wrong, not slow."""
    with model.engine() as engine, pytest.raises(PromptRefused, match="509, the image token"):
        engine.forward([(0, [65, model.config.image_token_id])])


def test_a_slot_that_was_used_before_makes_no_difference(model: Model) -> None:
    """Same prompt in a fresh slot and in one that another sequence left (stale rings and blocks)."""
    tokens = prompt(50, 7)
    with model.engine(workers=1) as engine:
        fresh = engine.forward([(0, tokens)])[0]
        engine.forward([(1, prompt(200, 8))])
        engine.reset(1)
        again = engine.forward([(1, tokens)])[0]
    assert fresh.tobytes() == again.tobytes()
