"""The places where a model of this kind goes wrong: each is shown to be reached, and right there."""

import numpy as np
import pytest

from tests.end_to_end.conftest import Model, prompt
from tests.models.noise import noise_floor


def _distance(model: Model, tokens: list[int], pieces: list[int]) -> tuple[float, float]:
    """Largest logit difference to the reference, and the reference's own noise on this prompt."""
    reference = model.reference(numerics="faithful", accumulate="float64")
    truth = reference.forward(reference.start(), tokens).logits
    with model.engine() as engine:
        ends = np.cumsum(pieces)
        found = np.concatenate([engine.forward([(3, tokens[end - size : end])])[0] for size, end in zip(pieces, ends, strict=True)])
    floor = noise_floor(model.config, model.tensors, [np.asarray(tokens)], model.token_map)
    return float(np.abs(found - truth).max()), floor.maximum


@pytest.mark.parametrize(("count", "pieces"), [
    (1, [1]),  # Engram looks back over the start; one odd token; no entry
    (2, [2]), (2, [1, 1]),  # the first pair, in one chunk and across two
    (3, [3]), (3, [2, 1]), (3, [1, 2]),  # an odd tail
    (15, [15]), (16, [16]), (17, [17]), (18, [9, 9]),  # window edges
    (22, [22]), (23, [23]), (60, [60]), (60, [22, 38]), (60, [23, 37]),  # the ring's length, and chunks beyond it
    (64, [64]), (65, [65]), (66, [33, 33]), (130, [130]), (131, [64, 67]),  # where candidates begin to restrict
], ids=str)
def test_edges(model: Model, count: int, pieces: list[int]) -> None:
    found, noise = _distance(model, prompt(count, 300 + count), pieces)
    assert found <= max(2 * noise, 0.25), (found, noise)


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
