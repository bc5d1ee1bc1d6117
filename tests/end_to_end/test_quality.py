"""What judges a checkpoint, held against naive statements of the same figures and against the engine."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tapeout.runtime.artifact import load_artifact
from tapeout.runtime.device import open_device
from tapeout.runtime.params import SamplingParams
from tests.bench.greedy import load_programs
from tests.bench.quality import Compiled, Divergence, Drafting, code_length, divergence, drafting, losses, windows
from tests.bench.trained import Measured, Precision, _store, kept
from tests.end_to_end.conftest import Model, prompt

BOS = 0


@pytest.fixture(scope="module")
def compiled(model: Model) -> Iterator[Compiled]:
    artifact = load_artifact(model.artifact)
    device = open_device(artifact, 2)
    yield Compiled(load_programs(artifact, model.weights, device))
    device.close()


@pytest.mark.parametrize("count", [0, 1, 2, 6, 7, 8, 9, 13, 14, 15, 31])
@pytest.mark.parametrize(("rows", "stride"), [(7, 3), (7, 7), (1, 1), (8, 4), (100, 50)])
def test_windows_score_every_token_once_with_the_most_context(count: int, rows: int, stride: int) -> None:
    ids = list(range(10, 10 + count))
    text, scored = [BOS, *ids], []
    for window in windows(ids, BOS, rows, stride):
        assert len(window.tokens) == len(window.following) <= rows
        start = text.index(window.tokens[0])
        assert window.tokens == text[start : start + len(window.tokens)]
        assert window.following == text[start + 1 : start + len(window.tokens) + 1]
        scored += window.following[window.first :]
        assert start == 0 or window.first >= rows - stride
    assert scored == ids


def test_code_length_is_the_sum_of_its_tokens() -> None:
    draw = np.random.default_rng(0)
    table = draw.standard_normal((40, 40)).astype(np.float32) * 3  # logits by the newest token alone
    ids = [int(t) for t in draw.integers(1, 40, 23)]
    naive = 0.0
    for before, token in zip([BOS, *ids], ids, strict=False):
        row = table[before].astype(np.float64)
        naive -= np.log2(np.exp(row[token]) / np.exp(row).sum())
    found = code_length(lambda tokens: table[np.asarray(tokens)], list(windows(ids, BOS, 8, 3)))
    assert found == pytest.approx(naive, rel=1e-12)


def test_losses_survive_large_logits() -> None:
    logits = np.array([[1000.0, 0.0, -1000.0], [0.0, 0.0, 0.0]], np.float32)
    assert losses(logits, [1, 2]).tolist() == [1000.0, pytest.approx(np.log(3))]


def test_divergence_is_the_formula() -> None:
    draw = np.random.default_rng(1)
    exact, other = ([draw.standard_normal((n, 5)).astype(np.float32) for n in (3, 1)] for _ in range(2))
    tokens = [[4, 0, 2], [1]]
    kl = losses_p = losses_q = 0.0
    for p, q, followed in zip(exact, other, tokens, strict=True):
        for a, b, token in zip(p.astype(float), q.astype(float), followed, strict=True):
            pa, pb = np.exp(a) / np.exp(a).sum(), np.exp(b) / np.exp(b).sum()
            kl += sum(x * np.log(x / y) for x, y in zip(pa, pb, strict=True)) / 4
            losses_p -= np.log(pa[token]) / 4
            losses_q -= np.log(pb[token]) / 4
    found = divergence(exact, other, tokens)
    assert found[0] == 4
    assert found[1:] == pytest.approx((kl, losses_p, losses_q), rel=1e-9)
    assert divergence(exact, exact, tokens).kl == 0


def test_drafting_walks_as_a_speculative_engine_does() -> None:
    """A text of 12 tokens, drafts of 2. Blocks count behind tokens 0 to 9."""
    text = list(range(12))
    hits = [2, 0, 1, 2, 1, 0, 2, 2, 0, 0]
    drafts = np.array([[n + 1 if h > 0 else 99, n + 2 if h > 1 else 99] for n, h in enumerate(hits)] + [[99, 99]] * 2)
    confidences = np.where(np.arange(2) == 0, np.log(3.0), 0.0) * np.ones((12, 1))  # 0.75 and 0.5
    found = drafting([text], [drafts], [confidences])
    # 0: two right, so 3: two right, so 6: two right, so 9: none.
    assert (found.blocks, found.mean_accepted) == (4, 1.5)
    assert found.reached == [10, 6]
    assert found.accepted_share == pytest.approx([0.6, 4 / 6])
    assert found.claimed == pytest.approx([0.75, 0.5])
    assert found.calibration_error == pytest.approx([0.15, 4 / 6 - 0.5])


def test_a_text_too_short_for_a_block_counts_nothing() -> None:
    whole = (list(range(9)), np.zeros((9, 3), np.int64), np.zeros((9, 3)))
    short = ([5, 6], np.zeros((2, 3), np.int64), np.zeros((2, 3)))
    both = [list(pair) for pair in zip(whole, short, strict=True)]
    assert drafting(*both) == drafting(*([part] for part in whole))  # type: ignore[arg-type]


def test_logits_are_the_engines(model: Model, compiled: Compiled) -> None:
    tokens = prompt(131, 5)
    whole = compiled.logits(tokens)
    assert whole.shape == (131, model.config.text.vocab_size)
    assert compiled.logits(tokens, first=130).tobytes() == whole[130:].tobytes()
    with model.engine(workers=2) as engine:
        assert engine.forward([(0, tokens)])[0].tobytes() == whole.tobytes()


@pytest.mark.parametrize("cut", [1, 28, 60, 100])
def test_replay_is_the_mask_of_the_rows_it_leaves_out(compiled: Compiled, cut: int) -> None:
    """Rows left out, or run with windows that later rows do not look into: the same bits."""
    tokens = prompt(101, 6)
    exact, replayed = compiled.logits(tokens), compiled.logits(tokens, first=cut, keep_from=cut)
    masked = compiled.logits_of_kept(tokens, range(101), [0] * cut + [cut] * (101 - cut))
    assert replayed.tobytes() == masked[cut:].tobytes()
    assert exact[:cut].tobytes() == masked[:cut].tobytes()
    assert cut == 100 or np.abs(replayed - exact[cut:]).max() > 1e-3
    assert compiled.logits(tokens).tobytes() == exact.tobytes()


def test_greedy_text_and_drafts_are_the_engines(model: Model, compiled: Compiled) -> None:
    prompts = [prompt(n, n) for n in (3, 40, 17)]
    made, drafts, confidences = compiled.greedy(prompts, 12)
    with model.engine(workers=2) as engine:
        names = [engine.submit(tokens, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)) for tokens in prompts]
        while engine.has_work:
            engine.step()
        texts = [list(engine.take(name).outputs[0].token_ids) for name in names]
    assert made == texts
    assert [some.shape for some in drafts] == [some.shape for some in confidences] == [(12, 5)] * 3
    reference = model.reference(numerics="faithful")
    state = reference.start()
    reference.forward(state, [*prompts[1], *made[1][:4]])
    found = reference.draft(state, made[1][4])
    assert [int(t) for t in found.tokens] == drafts[1][4].tolist()
    assert np.allclose(found.confidences, confidences[1][4], atol=0.05)


def test_figures_are_stored_and_read_back(tmp_path: Path) -> None:
    measured = Measured(1, 10, 4, 2.0, 1.9, 1.8, 0.9, Precision(4, 1.0, 0.99, None), 76, Divergence(64, 0.001, 2.0, 2.001),
                        Drafting(3, 2.5, [3, 2], [0.9, 0.5], [0.8, 0.6], [0.1, 0.1]))  # fmt: skip
    _store(tmp_path / "figures.json", "one", measured)
    without = replace(measured, drafts=None)
    _store(tmp_path / "figures.json", "two", without)
    assert kept(tmp_path / "figures.json") == {"one": measured, "two": without}
    assert [*measured.lines][: len([*without.lines])] == [*without.lines]
    text = "\n".join(measured.lines)
    assert "50.0% below" in text
    assert "+0.050%" in text
    assert kept(tmp_path / "none") == {}
