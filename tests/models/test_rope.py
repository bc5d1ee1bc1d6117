"""Rotary frequencies against model spec 4.2 and appendix C, and which layer uses which (R03, R04)."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tapeout.models.deepseek_v41.config import parse_config, shipped_config
from tapeout.models.deepseek_v41.reference import Reference
from tapeout.models.deepseek_v41.rope import yarn_corners
from tapeout.models.tiny import random_weights
from tapeout.models.tiny.tokenizer import token_map_json
from tests.models.tiny_configs import tiny_document

FLASH_GOLDEN = {
    0: 1.0,
    1: 6.876560219e-1,
    14: 5.286856317e-3,
    15: 3.635538584e-3,
    16: 2.265625e-3,
    20: 2.969777783e-4,
    24: 1.953125e-5,
    25: 5.372312671e-6,
    31: 5.680529037e-7,
}
TINY_GOLDEN = {1: 6.231882699e-1, 5: 8.168742304e-2, 9: 5.372312671e-3, 10: 1.477721264e-3}
TEN_DIGITS = 5e-10  # appendix C prints ten significant digits


@pytest.mark.parametrize(("name", "golden"), [("v4.1-flash", FLASH_GOLDEN), ("tiny", TINY_GOLDEN)])
def test_compressed_layers(name: str, golden: dict[int, float]) -> None:
    frequencies = shipped_config(name).rope_frequencies(2)
    assert frequencies.dtype == np.float64 and frequencies.shape == (32,)
    for pair, value in golden.items():
        assert frequencies[pair] == pytest.approx(value, rel=TEN_DIGITS)
    assert (frequencies == shipped_config(name).rope_frequencies(1)).all()


def test_sliding_layers_have_no_yarn() -> None:
    frequencies = shipped_config("v4.1-flash").rope_frequencies(0)
    assert frequencies[1] == pytest.approx(7.498942093e-1, rel=TEN_DIGITS)
    assert frequencies[31] == pytest.approx(1.333521432e-4, rel=TEN_DIGITS)
    np.testing.assert_allclose(frequencies, 10000.0 ** (-np.arange(32) / 32), rtol=1e-15)


def test_corners_of_the_blend() -> None:
    assert yarn_corners(64, 160000, 32, 1, 65536) == (15, 25)
    assert yarn_corners(64, 160000, 32, 1, 256) == (0, 10)


def test_base_and_scaling_by_layer() -> None:
    config = shipped_config("tiny")
    pairs = np.arange(32) / 32
    plain, other = 10000.0**-pairs, 160000.0**-pairs
    for layer in range(8):
        frequencies = config.rope_frequencies(config.ratio(layer))
        if layer in (0, 6, 7):  # the first layer and the draft stages
            np.testing.assert_allclose(frequencies, plain, rtol=1e-15)
        else:  # the other base: fast pairs as they are, slow ones divided by the factor, some between
            factor = other / frequencies
            assert factor[0] == pytest.approx(1) and factor[-1] == pytest.approx(16) and (np.diff(factor) > -1e-12).all(), layer


def test_swapping_the_bases_changes_the_logits() -> None:
    document = tiny_document()
    text = document["text_config"]
    text["rope_theta"], text["compress_rope_theta"] = text["compress_rope_theta"], text["rope_theta"]
    text["rope_scaling"]["original_max_position_embeddings"] = 300
    config = shipped_config("tiny")
    tensors = {spec.name: values for spec, values in random_weights(config)}
    token_map = np.array(json.loads(token_map_json(config)))
    ids = np.arange(3, 27)
    logits = []
    for one in (config, parse_config(document)):
        reference = Reference(one, tensors, numerics="exact", token_map=token_map)
        logits.append(reference.forward(reference.start(), ids).logits)
    assert np.abs(logits[0] - logits[1])[-1].max() > 0.05
