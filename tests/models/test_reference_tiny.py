"""The reference on the shipped tiny checkpoint, and its derived facts against those of the package."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tapeout.models.deepseek_v41.checkpoint import open_checkpoint
from tapeout.models.deepseek_v41.config import LayerKind, load_config, shipped_config
from tapeout.models.deepseek_v41.reference import Reference, engram, rope
from tapeout.models.deepseek_v41.reference.topology import LayerRole, settings_of
from tapeout.models.tiny import write_tiny
from tests.models.random_checkpoint import prompt, tiny_token_map


@pytest.mark.parametrize("numerics", ["exact", "faithful"])
def test_forward_and_draft_on_the_written_checkpoint(tmp_path: Path, numerics: str) -> None:
    config = load_config(write_tiny(tmp_path))
    checkpoint = open_checkpoint(tmp_path, config)
    token_map = np.array(json.loads((tmp_path / "engram_token_map.json").read_text()))
    np.testing.assert_array_equal(token_map, tiny_token_map())
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.tensors}
    reference = Reference(config, tensors, numerics=numerics, token_map=token_map)  # type: ignore[arg-type]
    state = reference.start()
    output = reference.forward(state, prompt(67, 0))
    assert output.logits.shape == (67, 512) and np.isfinite(output.logits).all()
    assert output.logits.std(axis=1).min() > 0.1
    draft = reference.draft(state, int(output.logits[-1].argmax()))
    assert np.isfinite(draft.logits).all() and np.isfinite(draft.confidences).all()


@pytest.mark.parametrize("name", ["tiny", "v4.1-flash"])
def test_roles_equal_those_of_the_config(name: str) -> None:
    config = shipped_config(name)
    for role in settings_of(config).roles:
        layer = role.number
        assert (role.kv_source, role.index_source) == (config.kv_source(layer), config.topk_source(layer))
        assert role.reads_candidates == config.uses_candidates(layer)
        assert config.layer_kind(layer) == _kind(role)


def _kind(role: LayerRole) -> LayerKind:
    if role.ratio == 0:
        return LayerKind.SWA
    if role.owns_entries:
        return LayerKind.FULL
    return LayerKind.REINDEX if role.selects else LayerKind.REUSE


def test_roles_of_the_released_model() -> None:
    roles = settings_of(shipped_config("v4.1-flash")).roles
    assert [role.number for role in roles if role.owns_entries] == [2, 8, 14, 20]
    assert [role.number for role in roles if role.selects] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [role.number for role in roles if role.reads_candidates] == [24, 28, 32, 36]
    assert [(roles[layer].kv_source, roles[layer].index_source) for layer in (0, 7, 19, 23, 39)] == [
        (None, None),
        (2, 2),
        (14, 14),
        (20, 20),
        (20, 36),
    ]


@pytest.mark.parametrize("name", ["tiny", "v4.1-flash"])
def test_hashes_and_frequencies_equal_those_of_the_config(name: str) -> None:
    config = shipped_config(name)
    text, settings = config.text, settings_of(config)
    arguments = text.engram_max_ngram_size, text.engram_n_heads, text.engram_vocab_size, text.engram_compressed_vocab_size
    for mine, theirs in zip(engram.engram_hashes(text.engram_layer_ids, *arguments), config.engram_tables, strict=True):
        assert mine.multipliers.tolist() == list(theirs.multipliers)
        assert mine.primes.tolist() == [list(order) for order in theirs.primes]
    for ratio, yarn, base in ((0, None, settings.plain_base), (1, settings.yarn, settings.compressed_base)):
        omega = rope.frequencies(settings.rotary_width, base, yarn)
        np.testing.assert_allclose(omega, config.rope_frequencies(ratio), rtol=1e-15)
