"""The places where a model of this kind goes wrong: each is shown to be reached, and right there."""

import numpy as np
import pytest

from tests.end_to_end.conftest import Model, prompt
from tests.models.noise import noise_floor


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
    """A wrong edge moves every row behind it; rounding moves single rows, and never by more than twice what it moves in the reference."""
    found = _distances(model, prompt(count, 300 + count), pieces)
    assert np.median(found) <= 0.05, found
    assert found.max() <= 2 * noise, (found.max(), noise)


def test_candidates_restrict_beyond_sixty_four_entries(model: Model) -> None:
    """The prompts above do reach the restriction: the reference sees candidate blocks fewer than the visible ones."""
    reference = model.reference(numerics="faithful")
    out = reference.forward(reference.start(), prompt(131, 431))
    blocks = [len(c) for c in out.candidates]
    assert max(blocks) == model.config.text.candidate_topk_blocks
    assert -(-131 // model.config.text.candidate_block_size) > max(blocks)


def test_a_slot_that_was_used_before_makes_no_difference(model: Model) -> None:
    """Same prompt in a fresh slot and in one that another sequence left (stale rings and blocks)."""
    tokens = prompt(50, 7)
    with model.engine(workers=1) as engine:
        fresh = engine.forward([(0, tokens)])[0]
        engine.forward([(1, prompt(200, 8))])
        engine.reset(1)
        again = engine.forward([(1, tokens)])[0]
    assert fresh.tobytes() == again.tobytes()
