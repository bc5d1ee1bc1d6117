"""Whole attention layers of the reference against a restatement, position by position, in both numerics."""

from __future__ import annotations

from functools import cache
from typing import Literal

import numpy as np
import pytest

from tapeout.models.deepseek_v41.reference import Output, Reference, SequenceState
from tapeout.models.deepseek_v41.reference.parameters import Parameters
from tests.models import naive_attention
from tests.models.random_checkpoint import Tensors, prompt, random_tensors, tiny_config, tiny_token_map

LENGTH = 83  # odd and prime: an open ratio-2 group at the end, and 83 entries against 64 candidates
CONFIG = tiny_config()
Numerics = Literal["exact", "faithful"]


@cache
def _tensors() -> Tensors:
    return random_tensors(CONFIG, seed=5)


@cache
def _state_and_output(numerics: Numerics) -> tuple[SequenceState, Output]:
    reference = Reference(CONFIG, _tensors(), numerics=numerics, token_map=tiny_token_map())
    state = reference.start()
    return state, reference.forward(state, prompt(LENGTH, 1), record=True)


def _run(numerics: Numerics) -> Output:
    return _state_and_output(numerics)[1]


@cache
def _naive(numerics: Numerics) -> naive_attention.NaiveAttention:
    rounding = naive_attention.EXACT if numerics == "exact" else naive_attention.FAITHFUL
    inputs = {layer: record.attention_input for layer, record in _run(numerics).layers.items()}
    parameters = Parameters(_tensors(), np.float64)
    return naive_attention.NaiveAttention(CONFIG, parameters, rounding, inputs, numerics == "faithful")


@pytest.mark.parametrize("numerics", ["exact", "faithful"])
@pytest.mark.parametrize("layer", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("position", [0, 1, 2, 37, 82])
def test_attention_output(numerics: Numerics, layer: int, position: int) -> None:
    got = _run(numerics).layers[layer].attention_output[position]
    np.testing.assert_allclose(got, _naive(numerics).output(layer, position), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("numerics", ["exact", "faithful"])
@pytest.mark.parametrize("layer", [1, 3, 4])
@pytest.mark.parametrize("position", [0, 1, 15, 16, 33, 63, 64, 82])
def test_selected_sets(numerics: Numerics, layer: int, position: int) -> None:
    assert _run(numerics).selected[layer][position].tolist() == _naive(numerics).selected(layer, position)


@pytest.mark.parametrize("position", [0, 7, 8, 63, 64, 71, 72, 82])
def test_candidate_blocks(position: int) -> None:
    assert _run("exact").candidates[position].tolist() == _naive("exact").candidates(position)


@pytest.mark.parametrize("numerics", ["exact", "faithful"])
@pytest.mark.parametrize("stage", [0, 1])
def test_stage_windows(numerics: Numerics, stage: int) -> None:
    state, output = _state_and_output(numerics)
    window = state.windows[f"mtp.{stage}"]
    for row in (0, 7, 15):
        position = LENGTH - 16 + row
        expected = _naive(numerics).stage_window(stage, output.features[position], position)
        np.testing.assert_allclose(window[row], expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("numerics", ["exact", "faithful"])
def test_logits_are_the_head_on_the_normed_rows(numerics: Numerics) -> None:
    output, tensors = _run(numerics), _tensors()
    for row in (0, LENGTH - 1):
        normed = _naive(numerics).norm(output.hidden[row], tensors["norm.weight"].astype(float))
        np.testing.assert_allclose(output.normed[row], normed, rtol=1e-13)
        np.testing.assert_allclose(output.logits[row], tensors["head.weight"].astype(float) @ normed, atol=1e-12)
