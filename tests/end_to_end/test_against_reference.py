"""The compiled tiny model against `reference faithful`: within twice the reference's own noise, greedy tokens equal where they can be told apart.

The noise floor is the distance between two runs of the reference that differ only in the dtype of their sums (docs/architecture.md, tolerances).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.end_to_end.conftest import Model, prompt
from tests.models.noise import NoiseFloor, noise_floor

LENGTH = 300
CHUNKS = (LENGTH, 1, 7, 16, 33)


@dataclass(frozen=True)
class Truth:
    """Prompts, what the reference makes of them (float64 sums), and its noise."""

    prompts: list[list[int]]
    logits: list[Any]
    floor: NoiseFloor

    @property
    def told_apart(self) -> Any:
        """Positions where the best token is further ahead than any noise."""
        return self.floor.gaps > self.floor.maximum


def _truth(model: Model, count: int) -> Truth:
    prompts = [prompt(LENGTH, seed) for seed in range(count)]
    reference = model.reference(numerics="faithful", accumulate="float64")
    logits = [reference.forward(reference.start(), ids).logits for ids in prompts]
    arrays = [np.asarray(p) for p in prompts]
    return Truth(prompts, logits, noise_floor(model.config, model.tensors, arrays, model.token_map))


@pytest.fixture(scope="module")
def truth(model: Model) -> Truth:
    return _truth(model, 2)


@pytest.fixture(scope="module")
def long_truth(model: Model) -> Truth:
    return _truth(model, 7)


def _pieces(tokens: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for at in range(0, len(tokens), size):
        yield tokens[at : at + size]


def _compiled(model: Model, prompts: list[list[int]], size: int) -> list[Any]:
    """Logits of every position, each prompt in a slot of its own, in chunks of `size`."""
    out = []
    with model.engine() as engine:
        for slot, tokens in enumerate(prompts):
            out.append(np.concatenate([engine.forward([(slot, list(piece))])[0] for piece in _pieces(tokens, size)]))
            engine.reset(slot)
    return out


def _check(truth: Truth, found: list[Any], what: str) -> None:
    difference = np.concatenate([f - t for f, t in zip(found, truth.logits, strict=True)])
    rms, maximum = float(np.sqrt(np.mean(difference**2))), float(np.abs(difference).max())
    best = [np.concatenate([x.argmax(axis=1) for x in side]) for side in (found, truth.logits)]
    wrong = np.flatnonzero((best[0] != best[1]) & truth.told_apart)
    print(
        f"{what}: rms {rms:.4f} (floor {truth.floor.rms:.4f}), maximum {maximum:.3f} (floor {truth.floor.maximum:.3f}), "
        f"told apart {truth.told_apart.mean():.3f} of {len(truth.told_apart)}"
    )
    assert rms <= 2 * truth.floor.rms, f"{what}: rms {rms} exceeds twice the floor {truth.floor.rms}"
    assert maximum <= 2 * truth.floor.maximum, f"{what}: maximum {maximum} exceeds twice the floor {truth.floor.maximum}"
    assert not len(wrong), f"{what}: greedy tokens differ at positions {wrong[:10].tolist()} of {len(best[0])}"


@pytest.mark.parametrize("size", CHUNKS)
def test_prefill_in_chunks(model: Model, truth: Truth, size: int) -> None:
    _check(truth, _compiled(model, truth.prompts, size), f"chunks of {size}")


@pytest.mark.full
@pytest.mark.parametrize("size", CHUNKS)
def test_prefill_in_chunks_at_two_thousand_positions(model: Model, long_truth: Truth, size: int) -> None:
    assert len(long_truth.told_apart) >= 2000
    assert long_truth.told_apart.mean() >= 0.9
    _check(long_truth, _compiled(model, long_truth.prompts, size), f"chunks of {size}")


def test_most_positions_can_be_told_apart(truth: Truth) -> None:
    assert truth.told_apart.mean() >= 0.9


def test_the_comparison_can_fail(truth: Truth) -> None:
    shifted = [np.roll(x, 1, axis=0) for x in truth.logits]
    with pytest.raises(AssertionError, match="exceeds twice the floor"):
        _check(truth, shifted, "shifted")


def test_greedy_decoding_follows_the_reference(model: Model) -> None:
    """Decoded one token at a time behind a prompt; compared up to the first position that noise could turn."""
    tokens = prompt(41, 100)
    reference = model.reference(numerics="faithful", accumulate="float64")
    with model.engine() as engine:
        made = [int(engine.forward([(0, tokens)], "last")[0][0].argmax())]
        for _ in range(60):
            made.append(int(engine.forward([(0, [made[-1]])], "last")[0][0].argmax()))
    truth = reference.forward(reference.start(), tokens + made).logits[len(tokens) - 1 : -1]
    order = np.sort(truth, axis=1)
    safe = order[:, -1] - order[:, -2] > 3.0
    assert safe.mean() > 0.9
    assert (truth.argmax(axis=1)[safe] == np.asarray(made)[safe]).all()


def test_drafts_follow_the_reference(model: Model) -> None:
    """The draft block behind several prompt lengths: tokens and confidence logits."""
    reference = model.reference(numerics="faithful", accumulate="float64")
    narrow = model.reference(numerics="faithful", accumulate="float32")
    equal, checked = 0, 0
    with model.engine() as engine:
        for slot, count in enumerate((1, 2, 15, 16, 17, 40, 70, 133)):
            tokens, golden = prompt(count, 200 + count), 65 + slot
            engine.forward([(slot, tokens)], "last")
            drafts, confidences = engine.draft([(slot, golden)])
            wanted, other = (r.draft(_after(r, tokens), golden) for r in (reference, narrow))
            noise = np.abs(wanted.confidences - other.confidences).max()
            agree = int(np.argmin([*(drafts[0] == wanted.tokens), False]))
            equal, checked = equal + agree, checked + len(wanted.tokens)
            if agree:
                close = np.abs(confidences[0] - wanted.confidences)[:agree]
                assert close.max() <= max(4 * noise, 0.05), (count, close, noise)
    assert equal >= 0.8 * checked, f"{equal} of {checked} drafted tokens agree"


def _after(reference: Any, tokens: list[int]) -> Any:
    state = reference.start()
    reference.forward(state, tokens)
    return state
