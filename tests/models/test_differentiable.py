"""The torch model against the numpy reference: one function, with gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tests share their cores; waiting threads would take them

from tapeout.models.deepseek_v41.config import ModelConfig  # noqa: E402
from tapeout.models.deepseek_v41.reference import Reference, formats  # noqa: E402
from tapeout.models.deepseek_v41.reference.parameters import Parameters  # noqa: E402
from tapeout.models.tiny import export  # noqa: E402
from tapeout.models.tiny.differentiable import Differentiable, Numerics, casts, load_weights, stored_arrays  # noqa: E402
from tapeout.models.tiny.differentiable.draft import draft  # noqa: E402
from tapeout.models.tiny.differentiable.optimizer import learns  # noqa: E402
from tapeout.models.tiny.differentiable.sinkhorn import sinkhorn  # noqa: E402
from tapeout.models.tiny.differentiable.weights import Weights, formats_of, initial_weights, rounded, text_specs  # noqa: E402
from tests.models.random_checkpoint import prompt, random_tensors, tiny_config, tiny_token_map  # noqa: E402

LENGTH = 101  # candidates restrict from 64 on; odd, so a ratio-2 group stays open


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return tiny_config()


@pytest.fixture(scope="module")
def tensors(config: ModelConfig) -> dict[str, NDArray[Any]]:
    return random_tensors(config, 3)


@pytest.fixture(scope="module")
def weights(config: ModelConfig, tensors: dict[str, NDArray[Any]]) -> Weights:
    return load_weights(config, _decoded(config, tensors))


def _decoded(config: ModelConfig, tensors: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    parameters = Parameters(tensors, np.float64)
    arrays = {}
    for name, spec in text_specs(config).items():
        stem = name.removesuffix(".weight")
        if stem.endswith("engram.embed"):
            arrays[name] = parameters.fp8_rows(stem, np.arange(spec.shape[0]))
        else:
            arrays[name] = parameters.matrix(stem) if stem != name and len(spec.shape) == 2 else parameters.array(name)
    return arrays


def _model(config: ModelConfig, numerics: Numerics) -> Differentiable:
    return Differentiable(config, tiny_token_map(), numerics, 128)


def _reference(config: ModelConfig, tensors: dict[str, NDArray[Any]], numerics: Any, accumulate: Any = "float64") -> Reference:
    return Reference(config, tensors, numerics=numerics, accumulate=accumulate, token_map=tiny_token_map())


def test_without_roundings_it_is_the_exact_reference(config: ModelConfig, tensors: dict[str, NDArray[Any]], weights: Weights) -> None:
    reference, model = _reference(config, tensors, "exact"), _model(config, Numerics.exact())
    state, ids = reference.start(), prompt(LENGTH, 5)
    expected = reference.forward(state, ids)
    used = rounded(weights, formats_of(config), model.numerics)
    with torch.no_grad():
        found = model.forward(used, torch.from_numpy(ids)[None], keep_selections=True)
    np.testing.assert_allclose(found.logits[0].numpy(), expected.logits, atol=1e-10)
    np.testing.assert_allclose(found.features[0].numpy(), expected.features, atol=1e-10)
    for source, rows in expected.selected.items():
        assert [np.flatnonzero(row).tolist() for row in found.selected[source][0].numpy()] == [row.tolist() for row in rows]
    golden = int(expected.logits[-1].argmax())
    drafts = reference.draft(state, golden)
    with torch.no_grad():
        mine = draft(model, used, found.features, torch.tensor([[LENGTH - 1]]), torch.tensor([[golden]]))
    assert mine.tokens[0].tolist() == drafts.tokens.tolist()
    np.testing.assert_allclose(mine.logits[0].numpy(), drafts.logits, atol=1e-10)
    np.testing.assert_allclose(mine.confidences[0].numpy(), drafts.confidences, atol=1e-10)


def test_with_roundings_it_stays_at_the_noise_floor(config: ModelConfig, tensors: dict[str, NDArray[Any]], weights: Weights) -> None:
    """The floor is how far two orders of sums lie apart in the reference itself."""
    ids = prompt(LENGTH, 5)
    runs = [_reference(config, tensors, "faithful", accumulate) for accumulate in ("float64", "float32")]
    first, second = (run.forward(run.start(), ids).logits for run in runs)
    model = _model(config, Numerics.faithful())
    with torch.no_grad():
        found = model.forward(rounded(weights, formats_of(config), model.numerics), torch.from_numpy(ids)[None]).logits[0].numpy()
    floor = np.sqrt(np.mean((first - second) ** 2))
    assert 0 < floor < 0.3 and np.sqrt(np.mean((found - first) ** 2)) < 2 * floor


def test_replay_floors_forget_the_decoders_windows_and_nothing_else(
    config: ModelConfig, tensors: dict[str, NDArray[Any]], weights: Weights
) -> None:
    cut, reference, model = 70, _reference(config, tensors, "exact"), _model(config, Numerics.exact())
    state, ids = reference.start(), prompt(LENGTH, 6)
    whole = reference.forward(reference.start(), ids).logits
    reference.forward(state, ids[:cut])
    for layer in range(config.n_prefill, config.layers):
        state.windows[f"layers.{layer}"] = state.windows[f"layers.{layer}"][:0]
    expected = reference.forward(state, ids[cut:]).logits
    floors = torch.where(torch.arange(LENGTH) >= cut, cut, 0)[None]
    with torch.no_grad():
        found = model.forward(rounded(weights, formats_of(config), model.numerics), torch.from_numpy(ids)[None], floors=floors).logits[0]
    np.testing.assert_allclose(found[cut:].numpy(), expected, atol=1e-10)
    np.testing.assert_allclose(found[:cut].numpy(), whole[:cut], atol=1e-10)
    assert np.abs(expected - whole[cut:]).max() > 1e-3


@pytest.mark.parametrize("name", ["q8", "q4main", "q4idx"])
def test_activation_casts_equal_the_reference_bit_for_bit(name: str) -> None:
    draw = np.random.default_rng(7)
    spread = np.exp2(draw.integers(-20, 8, (257, 1))) * draw.standard_normal((257, 64))
    ties = np.tile(np.array([0.25, -0.75, 1.25, 1.75, 2.5, -3.5, 5.0, 6.0]), (3, 8)) * np.array([[1.0], [2.0**-9], [0.0]])
    x = formats.round_bf16(np.concatenate((spread, ties)))
    mine = getattr(casts, f"round_{name}")(torch.from_numpy(x).float()).double().numpy()
    np.testing.assert_array_equal(mine, getattr(formats, name)(x))


def test_weights_are_rounded_as_the_export_stores_them(config: ModelConfig) -> None:
    weights = initial_weights(config, 2)
    mine = stored_arrays(rounded(weights, formats_of(config), Numerics.faithful()))
    for name, expected in export.rounded(config, stored_arrays(weights)).items():
        np.testing.assert_array_equal(mine[name], expected, err_msg=name)


def test_rounding_again_changes_nothing(config: ModelConfig) -> None:
    once = rounded(initial_weights(config, 2), formats_of(config), Numerics.faithful())
    twice = rounded(once, formats_of(config), Numerics.faithful())
    assert all(torch.equal(once[name], twice[name]) for name in once)


def test_sinkhorn_gradient_is_that_of_its_iterations() -> None:
    logits = torch.from_numpy(np.random.default_rng(1).standard_normal((5, 4, 4))).requires_grad_(True)
    weight = torch.from_numpy(np.random.default_rng(2).standard_normal((5, 4, 4)))
    p = torch.softmax(logits, -1) + 1e-6
    p = p / (p.sum(-2, keepdim=True) + 1e-6)
    for _ in range(19):
        p = p / (p.sum(-1, keepdim=True) + 1e-6)
        p = p / (p.sum(-2, keepdim=True) + 1e-6)
    found = sinkhorn(logits, 20, 1e-6)
    torch.testing.assert_close(found, p)
    expected, mine = (torch.autograd.grad((weight * result).sum(), logits)[0] for result in (p, found))
    torch.testing.assert_close(mine, expected, atol=1e-4, rtol=1e-3)


def test_every_weight_that_learns_gets_a_gradient(config: ModelConfig) -> None:
    weights = {name: value.requires_grad_(True) for name, value in initial_weights(config, 2).items()}
    for value in weights.values():  # tensors that start at zero would hide what lies behind them
        value.data += 0.01 * torch.randn(value.shape, generator=torch.Generator().manual_seed(0))
    model = _model(config, Numerics.faithful())
    used = rounded(weights, formats_of(config), model.numerics)
    tokens = torch.from_numpy(np.stack([prompt(96, seed) for seed in (1, 2)]))
    output = model.forward(used, tokens)
    anchors = torch.tensor([[20, 60], [40, 80]])
    drafts = draft(model, used, output.features, anchors, tokens.gather(1, anchors + 1))
    loss = output.logits.square().mean() + output.index_loss + drafts.logits.square().mean() + drafts.confidences.square().mean()
    names = [name for name in weights if learns(name)]
    gradients = torch.autograd.grad(loss, [weights[name] for name in names], allow_unused=True)
    silent = [name for name, gradient in zip(names, gradients, strict=True) if gradient is None or not gradient.abs().max() > 0]
    assert silent == []
