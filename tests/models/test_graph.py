"""The graph means the model: interpreted in real numbers it equals the plain reference, in any chunking, batch, rollback and replay."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tapeout.dialects._mlir import ir
from tapeout.models.deepseek_v41 import config as config_module
from tapeout.models.deepseek_v41.checkpoint import open_checkpoint
from tapeout.models.deepseek_v41.config import ModelConfig, parse_config, shipped_config
from tapeout.models.deepseek_v41.graph import GraphOptions, build_graph
from tapeout.models.deepseek_v41.reference import DraftOutput, Output, Reference
from tapeout.models.tiny import random_weights, write_tiny
from tapeout.models.tiny.tokenizer import token_map_json
from tests.models.run_graph import Chunk, Played, Player

CONFIG: ModelConfig = shipped_config("tiny")
OPTIONS = GraphOptions(max_sequences=3, max_context=160, block_tokens=16)
BLOCK = CONFIG.text.dspark_block_size
# Both sides sum in float64 in different orders: relative rounding 1e-16 times reduction lengths of 512 and 12 sublayers, on logits near 15.
TOLERANCE = 1e-9
PROMPT = np.random.default_rng(11).integers(3, 259, 109)
OTHERS = [np.random.default_rng(seed).integers(3, 259, length) for seed, length in ((12, 83), (13, 1))]


@pytest.fixture(scope="session")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, NDArray[Any]], NDArray[Any]]:
    """Checkpoint tensors by name, and the token map."""
    folder: Path = write_tiny(tmp_path_factory.mktemp("tiny"))
    checkpoint = open_checkpoint(folder, CONFIG)
    token_map = np.array(json.loads((folder / "engram_token_map.json").read_text()))
    return {name: checkpoint.tensor(name) for name in checkpoint.tensors}, token_map


@pytest.fixture(scope="session")
def reference(tensors: Any) -> Reference:
    return Reference(CONFIG, tensors[0], numerics="exact", token_map=tensors[1])


@pytest.fixture(scope="session")
def module() -> Any:
    with ir.Context():
        yield build_graph(CONFIG, OPTIONS)


@pytest.fixture
def player(module: ir.Module, tensors: Any) -> Player:
    return Player(module, CONFIG, OPTIONS, tensors[0].__getitem__, tensors[1])


def expected(reference: Reference, tokens: NDArray[Any]) -> tuple[Output, DraftOutput]:
    """The reference's results for a whole sequence, and the block drafted behind its greedy next token."""
    state = reference.start()
    output = reference.forward(state, tokens, record=True)
    return output, reference.draft(state, int(output.logits[-1].argmax()))


@pytest.fixture(scope="session")
def whole(reference: Reference) -> tuple[Output, DraftOutput]:
    return expected(reference, PROMPT)


def assert_equal(logits: NDArray[Any], last: Played, want: tuple[Output, DraftOutput]) -> None:
    output, draft = want
    np.testing.assert_allclose(logits, output.logits, rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(last.sampled[-1], output.logits[-1].argmax())
    np.testing.assert_array_equal(last.drafts, draft.tokens)
    np.testing.assert_allclose(last.confidences, draft.confidences, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("sizes", [[109], [1] * 109, [7] * 15 + [4], [16] * 6 + [13], [33, 33, 33, 10], [37] + [1] * 43 + [29]],
                         ids=["whole", "by-1", "by-7", "by-16", "by-33", "37-43x1-29"])
def test_prompt_in_chunks(player: Player, whole: tuple[Output, DraftOutput], sizes: list[int]) -> None:
    ends = np.cumsum(sizes)
    played = [player.play([Chunk(1, PROMPT[end - size : end])])[0] for size, end in zip(sizes, ends, strict=True)]
    assert ends[-1] == len(PROMPT)
    assert_equal(np.concatenate([p.logits for p in played]), played[-1], whole)


def test_prompt_reaches_what_it_is_meant_to_test(whole: tuple[Output, DraftOutput]) -> None:
    """Candidates bite, the selection is a true choice, and the prompt is longer than every ring."""
    output, _ = whole
    scores = output.layers[4].index_scores
    assert scores is not None
    visible = np.arange(len(PROMPT)) <= np.arange(len(PROMPT))[:, None]
    assert (np.isneginf(scores) & visible).sum() > 100
    assert len(output.selected[1][-1]) == CONFIG.text.index_topk < len(PROMPT) // 2
    assert len(PROMPT) > CONFIG.ring_tokens


def test_sequences_share_steps(player: Player, reference: Reference, whole: tuple[Output, DraftOutput]) -> None:
    """Three sequences, chunks of other sizes in every step, rows in changing order: each is what it is alone."""
    tokens = [PROMPT, *OTHERS]
    wants = [whole, *(expected(reference, other) for other in OTHERS)]
    logits: list[list[NDArray[Any]]] = [[], [], []]
    last: dict[int, Played] = {}
    for plan in ([(0, 40), (1, 1)], [(1, 30), (0, 1), (2, 1)], [(0, 2), (1, 51)], [(1, 1), (0, 66)]):
        chunks = [Chunk(slot, tokens[slot][player.lengths[slot] :][:count]) for slot, count in plan]
        for (slot, _), played in zip(plan, player.play(chunks), strict=True):
            logits[slot].append(played.logits)
            last[slot] = played
    for slot, want in enumerate(wants):
        assert_equal(np.concatenate(logits[slot]), last[slot], want)


def test_slot_is_used_again(player: Player, reference: Reference) -> None:
    """A new sequence in an old slot sees nothing of its predecessor: look-back, windows, pairs and entries start anew."""
    player.play([Chunk(2, PROMPT)])
    player.lengths[2] = 0
    first, second = OTHERS[0][:3], OTHERS[0][3:31]
    played = [player.play([Chunk(2, part)])[0] for part in (first, second)]
    assert_equal(np.concatenate([p.logits for p in played]), played[-1], expected(reference, OTHERS[0][:31]))


def test_step_continues_from_the_token_it_sampled(player: Player, reference: Reference) -> None:
    state = reference.start()
    logits = reference.forward(state, PROMPT[:45]).logits
    played = player.play([Chunk(0, OTHERS[0][:5]), Chunk(1, PROMPT[:45])])[1]
    for _ in range(4):
        logits = reference.forward(state, [int(logits[-1].argmax())]).logits
        played = player.play([Chunk(1, [-1])])[0]
        np.testing.assert_allclose(played.logits, logits, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("start", [44, 45], ids=["even", "odd"])
@pytest.mark.parametrize("accepted", range(BLOCK + 1))
def test_rejected_drafts_leave_no_trace(player: Player, reference: Reference, start: int, accepted: int) -> None:
    """A verified block is taken back to any length; rings, pairs and look-back still hold what the next step needs."""
    player.play([Chunk(0, PROMPT[:start])])
    wrong = [int(t) for t in (PROMPT[start + 1 : start + 1 + BLOCK] + 7) % 256 + 3]
    right = [int(t) for t in PROMPT[start + 1 : start + 1 + accepted]]
    player.play([Chunk(0, [int(PROMPT[start]), *right, *wrong[accepted:]])])
    kept = start + 1 + accepted
    player.lengths[0] = kept
    played = player.play([Chunk(0, PROMPT[kept : kept + 3])])[0]
    output, draft = expected(reference, PROMPT[: kept + 3])
    np.testing.assert_allclose(played.logits, output.logits[kept:], rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(played.drafts, draft.tokens)


def test_kept_rows_and_asked_rows(player: Player, whole: tuple[Output, DraftOutput]) -> None:
    """A sequence that keeps all its rows is not disturbed by one that keeps a suffix; logits come for asked rows only."""
    played = player.play([Chunk(2, OTHERS[0], keep=24, ask=2), Chunk(0, PROMPT, ask=5)])
    assert played[0].logits.shape == (2, CONFIG.text.vocab_size) and np.isfinite(played[0].logits).all()
    assert_equal(np.concatenate([whole[0].logits[:-5], played[1].logits]), played[1], whole)


def test_replay_floor(module: ir.Module, tensors: Any, player: Player) -> None:
    """Kept rows depend on nothing below the floor but entries: an empty decoder ring (NaN here) is never read, the encoder saw all rows."""
    alone = player.play([Chunk(1, PROMPT, keep=24)])[0]
    exact = Player(module, CONFIG, OPTIONS, tensors[0].__getitem__, tensors[1])
    full = exact.play([Chunk(1, PROMPT)])[0]
    assert np.isfinite(alone.logits).all() and alone.logits.shape[0] == 24
    assert np.abs(alone.logits - full.logits[-24:]).max() > 1e-3
    for name in ("layers.1.attn.entries", "layers.1.attn.keys", "layers.3.attn.entries", "layers.3.attn.keys", "layers.2.attn.window"):
        np.testing.assert_array_equal(player.states[name].value, exact.states[name].value, err_msg=name)
    after = player.play([Chunk(1, [5])])[0]
    assert np.isfinite(after.logits).all()


def test_features_may_come_from_the_encoder(tmp_path: Path) -> None:
    """Draft targets below the boundary, one of them an Engram layer: @encoder hands the features over, @decoder takes the kept rows."""
    data = json.loads((Path(config_module.__file__).parent / "config-tiny.json").read_text())
    data["text_config"]["dspark_target_layer_ids"] = [0, 2]
    config = parse_config(data)
    stored = {spec.name: values for spec, values in random_weights(config, 3)}
    token_map = np.array(json.loads(token_map_json(config)))
    output, draft = expected(Reference(config, stored, numerics="exact", token_map=token_map), OTHERS[0])
    with ir.Context():
        module = build_graph(config, OPTIONS)
        player = Player(module, config, OPTIONS, stored.__getitem__, token_map)
        player.play([Chunk(0, OTHERS[0][:40]), Chunk(1, PROMPT[:5], keep=2)])
        last = player.play([Chunk(1, PROMPT[5:12], keep=2), Chunk(0, OTHERS[0][40:])])[1]
    np.testing.assert_allclose(last.logits, output.logits[40:], rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(last.drafts, draft.tokens)
    np.testing.assert_allclose(last.confidences, draft.confidences, rtol=0, atol=TOLERANCE)


def test_sampling_settings_reach_the_draw(player: Player) -> None:
    """top_k = 1 at a high temperature is greedy for target and draft; without it, seeds tell apart."""
    greedy = player.play([Chunk(0, PROMPT[:20])])[0]
    drawn = {}
    for seed in (1, 2):
        player.lengths[0] = 0
        drawn[seed] = player.play([Chunk(0, PROMPT[:20])], temperature=30.0, seeds=seed)[0]
    player.lengths[0] = 0
    narrowed = player.play([Chunk(0, PROMPT[:20])], temperature=30.0, seeds=1, top_k=1)[0]
    np.testing.assert_array_equal(narrowed.sampled, greedy.sampled)
    np.testing.assert_array_equal(narrowed.drafts, greedy.drafts)
    assert (drawn[1].sampled != drawn[2].sampled).any() and (drawn[1].drafts != drawn[2].drafts).any()
    assert len(set(drawn[1].drafts.tolist())) > 1
