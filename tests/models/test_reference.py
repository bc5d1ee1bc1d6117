"""The whole reference: chunking, selection, wiring, Engram, drafts, refusals, noise floor (model spec appendix D)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from tapeout.models.deepseek_v41.reference import DraftOutput, Output, Reference, SequenceState, engram
from tapeout.models.deepseek_v41.reference import draft as dspark
from tapeout.models.deepseek_v41.reference import mixer as mixing
from tapeout.models.deepseek_v41.reference.attention import (
    attend,
    output_projection,
    query_heads,
    query_latent,
    window_keys,
    window_vectors,
)
from tapeout.models.deepseek_v41.reference.formats import q4idx, q8, round_bf16
from tapeout.models.deepseek_v41.reference.moe import moe
from tests.models.noise import noise_floor
from tests.models.random_checkpoint import Tensors, prompt, random_tensors, tiny_config, tiny_token_map

Array = NDArray[Any]
Width = Literal["float32", "float64"]
LENGTH = 101
CHUNKINGS = {"ones": [1] * LENGTH, "sevens": [7] * 14 + [3], "mixed": [37] + [1] * 43 + [21]}


@cache
def _tensors() -> Tensors:
    return random_tensors(tiny_config())


def _reference(tensors: Tensors | None = None, **text: object) -> Reference:
    config = tiny_config(**text)
    return Reference(config, _tensors() if tensors is None else tensors, token_map=tiny_token_map())


def _faithful(accumulate: Width = "float64") -> Reference:
    return Reference(tiny_config(), _tensors(), numerics="faithful", accumulate=accumulate, token_map=tiny_token_map())


def _fed(reference: Reference, ids: Array, sizes: list[int]) -> tuple[SequenceState, list[Output]]:
    state, outputs, start = reference.start(), [], 0
    for size in sizes:
        outputs.append(reference.forward(state, ids[start : start + size]))
        start += size
    assert start == len(ids) == state.length
    return state, outputs


def _whole(reference: Reference, count: int = LENGTH, seed: int = 0, record: bool = False) -> Output:
    return reference.forward(reference.start(), prompt(count, seed), record=record)


# -- chunking


@pytest.mark.parametrize("name", CHUNKINGS)
def test_chunked_equals_whole(name: str) -> None:
    reference, ids = _reference(), prompt(LENGTH, 0)
    whole_state, (whole,) = _fed(reference, ids, [LENGTH])
    state, outputs = _fed(reference, ids, CHUNKINGS[name])
    for part in ("logits", "hidden", "normed", "features"):
        joined = np.concatenate([getattr(output, part) for output in outputs])
        np.testing.assert_allclose(joined, getattr(whole, part), rtol=0, atol=1e-12)
    for source in (1, 3, 4):
        rows = [row.tolist() for output in outputs for row in output.selected[source]]
        assert rows == [row.tolist() for row in whole.selected[source]]
    blocks = [row.tolist() for output in outputs for row in output.candidates]
    assert blocks == [row.tolist() for row in whole.candidates]
    _assert_same_state(state, whole_state)


def _assert_same_state(one: SequenceState, other: SequenceState) -> None:
    assert one.token_ids.tolist() == other.token_ids.tolist()
    for name in ("windows", "entries", "index_keys"):
        mine, theirs = getattr(one, name), getattr(other, name)
        assert mine.keys() == theirs.keys()
        for key in mine:
            np.testing.assert_allclose(mine[key], theirs[key], rtol=0, atol=1e-12)
    for key, pair in one.carries.items():
        np.testing.assert_allclose(pair, other.carries[key], rtol=0, atol=1e-12)


def test_drafts_agree_from_states_reached_by_different_chunkings() -> None:
    reference, ids = _reference(), prompt(LENGTH, 0)
    drafts = [reference.draft(_fed(reference, ids, sizes)[0], 65) for sizes in CHUNKINGS.values()]
    for other in drafts[1:]:
        _assert_same_draft(drafts[0], other)


def _assert_same_draft(one: DraftOutput, other: DraftOutput) -> None:
    assert one.tokens.tolist() == other.tokens.tolist()
    np.testing.assert_allclose(one.logits, other.logits, rtol=0, atol=1e-12)
    np.testing.assert_allclose(one.confidences, other.confidences, rtol=0, atol=1e-12)


def test_a_copy_is_a_snapshot_to_roll_back_to() -> None:
    reference, ids = _reference(), prompt(40, 2)
    state, _ = _fed(reference, ids[:33], [33])
    before = state.copy()
    reference.forward(state, [9, 8, 7])
    again = reference.forward(before, ids[33:])
    np.testing.assert_allclose(again.logits, _whole(reference, 40, 2).logits[33:], rtol=0, atol=1e-12)


def test_later_tokens_do_not_reach_earlier_rows() -> None:
    reference, ids = _reference(), prompt(LENGTH, 0)
    changed = ids.copy()
    changed[70] = 300
    one, other = (reference.forward(reference.start(), tokens).logits for tokens in (ids, changed))
    np.testing.assert_allclose(one[:70], other[:70], rtol=0, atol=1e-12)
    assert (np.abs(one[70:] - other[70:]).max(axis=1) > 1e-6).all()


# -- entries, selection, candidates


def test_entry_is_visible_to_the_token_that_completes_it() -> None:
    reference = _reference()
    output = _whole(reference, 5)
    assert [row.tolist() for row in output.selected[1]] == [[], [0], [0], [0, 1], [0, 1]]
    assert [row.tolist() for row in output.selected[3]] == [list(range(n)) for n in range(1, 6)]


@pytest.mark.parametrize(("length", "waiting"), [(1, 1), (2, 0), (7, 1), (8, 0)])
def test_ratio_two_carry(length: int, waiting: int) -> None:
    reference = _reference()
    state, _ = _fed(reference, prompt(length, 0), [length])
    assert len(state.carries[1][0]) == len(state.carries[1][1]) == waiting
    assert len(state.entries[1]) == length // 2 and len(state.entries[3]) == length
    assert 3 not in state.carries


def test_selection_is_everything_until_top_k_is_reached() -> None:
    few, many = _whole(_reference()), _whole(_reference(index_topk=57))
    for source, ratio in ((1, 2), (3, 1), (4, 1)):
        for t, (small, large) in enumerate(zip(few.selected[source], many.selected[source], strict=True)):
            visible = (t + 1) // ratio
            assert len(small) == min(16, visible)
            if visible <= 57:
                assert large.tolist() == list(range(visible))
    np.testing.assert_allclose(few.logits[:16], many.logits[:16], rtol=0, atol=1e-12)
    assert np.abs(few.logits[17:] - many.logits[17:]).max(axis=1).min() > 1e-9


def test_candidates_restrict_beyond_64_entries_and_only_then() -> None:
    narrow, wide = _whole(_reference()), _whole(_reference(candidate_topk_blocks=64))
    assert all(len(blocks) == min(8, t // 8 + 1) for t, blocks in enumerate(narrow.candidates))
    assert all(t // 8 in blocks for t, blocks in enumerate(narrow.candidates))
    np.testing.assert_allclose(narrow.logits[:64], wide.logits[:64], rtol=0, atol=1e-12)
    pairs = list(zip(narrow.selected[4], wide.selected[4], strict=True))
    restricted = [t for t, (small, large) in enumerate(pairs) if small.tolist() != large.tolist()]
    assert len(restricted) >= 10 and min(restricted) >= 64
    assert [a.tolist() for a in narrow.selected[3]] == [b.tolist() for b in wide.selected[3]]


def test_restricted_selection_is_masked_top_k_of_the_unrestricted_scores() -> None:
    narrow, wide = _whole(_reference(), record=True), _whole(_reference(candidate_topk_blocks=64), record=True)
    sources, scores = wide.layers[3].index_scores, wide.layers[4].index_scores
    assert sources is not None and scores is not None
    for t in range(LENGTH):
        blocks = {b: max(sources[t, 8 * b : min(8 * b + 8, t + 1)]) for b in range(t // 8 + 1)}
        blocks[t // 8] = np.inf
        kept = sorted(blocks, key=lambda b: (-blocks[b], b))[:8]
        allowed = [j for j in range(t + 1) if j // 8 in kept]
        best = sorted(allowed, key=lambda j: (-scores[t, j], j))[:16]
        assert narrow.candidates[t].tolist() == sorted(kept)
        assert narrow.selected[4][t].tolist() == sorted(best)


# -- wiring: a source changes what its readers see and nothing else


def _muted(tensors: Tensors, layers: tuple[int, ...]) -> Tensors:
    """The tensors with the attention output of `layers` set to zero, so that only other layers show what they read."""
    changed = dict(tensors)
    for layer in layers:
        name = f"layers.{layer}.attn.wo_b.weight"
        changed[name] = np.zeros_like(changed[name])
    return changed


WIRING = [
    # tensor, layers whose attention is muted, first row whose logits move (None: none does)
    ("layers.1.attn.compressor.wkv.weight", (1,), 1),
    ("layers.1.attn.compressor.wgate.weight", (1,), 1),
    ("layers.1.attn.compressor.wkv.weight", (1, 2), None),
    ("layers.1.attn.indexer.wk.weight", (1,), 33),
    ("layers.1.attn.indexer.weights_proj.weight", (1,), 33),
    ("layers.1.attn.indexer.weights_proj.weight", (1, 2), None),
    ("layers.3.attn.compressor.wkv.weight", (3, 4), 0),
    ("layers.3.attn.compressor.wkv.weight", (3, 5), 0),
    ("layers.3.attn.compressor.wkv.weight", (3, 4, 5), None),
    ("layers.3.attn.indexer.wk.weight", (3, 4), 16),
    ("layers.3.attn.indexer.weights_proj.weight", (4, 5), 16),
    ("layers.3.attn.indexer.weights_proj.weight", (3,), 64),
    ("layers.3.attn.indexer.weights_proj.weight", (3, 4, 5), None),
    ("layers.4.attn.indexer.weights_proj.weight", (4,), 16),
    ("layers.4.attn.indexer.weights_proj.weight", (4, 5), None),
]


@pytest.mark.parametrize(("name", "muted", "first"), WIRING)
def test_readers_of_a_source(name: str, muted: tuple[int, ...], first: int | None) -> None:
    tensors = _muted(_tensors(), muted)
    poisoned = tensors | {name: -tensors[name][::-1]}
    clean, other = (_whole(_reference(each)).logits for each in (tensors, poisoned))
    moved = np.flatnonzero(np.abs(clean - other).max(axis=1) > 1e-9)
    if first is None:
        assert not len(moved)
    else:
        # a first row is a lower bound: the sets may happen to agree for a few rows behind it
        assert len(moved) > 10 and first <= moved[0] <= first + 12


def test_a_poisoned_cache_row_outside_every_set_is_never_read() -> None:
    reference, ids = _reference(), prompt(LENGTH + 1, 0)
    state, _ = _fed(reference, ids[:-1], [LENGTH])
    clean = reference.forward(state.copy(), ids[-1:], record=True)
    read = {1: {*clean.selected[1][0].tolist()}, 3: {*clean.selected[3][0].tolist(), *clean.selected[4][0].tolist()}}
    for source, rows in read.items():
        entries = state.entries[source].copy()
        entries[[j for j in range(len(entries)) if j not in rows]] = np.nan
        state.entries[source] = entries
    np.testing.assert_array_equal(reference.forward(state, ids[-1:]).logits, clean.logits)


# -- Engram and drafts


def test_engram_sees_the_look_back_and_no_more() -> None:
    tensors = _muted(_tensors(), (0, 1, 2, 3, 4, 5))  # without attention a row depends on its own three ids only
    reference, ids = _reference(tensors), prompt(30, 3)
    changed = ids.copy()
    changed[10] = 400
    one, other = (reference.forward(reference.start(), tokens).logits for tokens in (ids, changed))
    assert np.flatnonzero(np.abs(one - other).max(axis=1) > 1e-9).tolist() == [10, 11, 12]


def test_engram_folds_case_and_pads_the_start() -> None:
    tensors = _muted(_tensors(), (0, 1, 2, 3, 4, 5))
    reference = _reference(tensors)
    upper, lower = 3 + ord("A"), 3 + ord("a")
    after = [reference.forward(reference.start(), [first, 200, 201]).logits for first in (upper, lower)]
    assert np.abs(after[0][0] - after[1][0]).max() > 1e-3
    np.testing.assert_allclose(after[0][1:], after[1][1:], rtol=0, atol=1e-12)
    padded = reference.forward(reference.start(), [2, 2, 200]).logits[2]
    np.testing.assert_allclose(padded, reference.forward(reference.start(), [200]).logits[0], rtol=0, atol=1e-12)


def test_features_are_stream_means_entering_the_target_layers() -> None:
    output = _whole(_reference(), record=True)
    means = [output.layers[layer].streams.mean(axis=1) for layer in (3, 4, 5)]
    np.testing.assert_allclose(output.features, np.concatenate(means, axis=1), rtol=1e-13)


def test_features_are_tapped_behind_engram() -> None:
    reference = _reference(dspark_target_layer_ids=[0, 1, 2])
    output = _whole(reference, record=True)
    tau = engram.look_back(tiny_token_map()[prompt(LENGTH, 0)], LENGTH, 3, pad=2)
    for place, layer in ((1, 1), (2, 2)):
        rows = engram.hash_rows(tau, engram.engram_hashes((1, 2), 3, 2, 256, 486)[layer - 1])
        block = reference._layers[layer].block
        behind = engram.engram(output.layers[layer].streams, rows, block, 1e-20, reference._arithmetic)
        feature = output.features[:, 128 * place : 128 * place + 128]
        np.testing.assert_allclose(feature, behind.mean(axis=1), rtol=1e-12, atol=1e-13)


def test_a_draft_leaves_the_state_alone_and_depends_on_the_sampled_tokens() -> None:
    reference, ids = _reference(), prompt(50, 0)
    state, _ = _fed(reference, ids, [50])
    kept = state.copy()
    first = reference.draft(state, 65)
    _assert_same_state(state, kept)
    forced = iter([int(first.tokens[0]), 7, 8, 9, 10])
    second = reference.draft(state, 65, sample=lambda _: next(forced))
    assert second.tokens[1:].tolist() == [7, 8, 9, 10]
    np.testing.assert_array_equal(first.logits[:2], second.logits[:2])
    assert (first.logits[2:] != second.logits[2:]).any(axis=1).all()
    assert first.logits.shape == (5, 512) and first.confidences.shape == (5,)


def test_draft_logits_add_the_markov_term_of_the_token_before() -> None:
    tensors = _tensors()
    name = "mtp.1.markov_head.head.weight"
    base = _reference(tensors | {name: np.zeros_like(tensors[name])})
    state, _ = _fed(base, prompt(20, 0), [20])
    golden, forced = 65, [9, 300, 41, 2, 7]
    with_markov = _reference(tensors).draft(state, golden, sample=_replay(forced))
    without = base.draft(state, golden, sample=_replay(forced))
    embedded = tensors["mtp.1.markov_head.embed.weight"][[golden, *forced[:-1]]].astype(float)
    expected = without.logits + embedded @ tensors[name].astype(float).T
    np.testing.assert_allclose(with_markov.logits, expected, rtol=0, atol=1e-12)
    pairs = np.concatenate((without.hidden, embedded), axis=1)
    weight = tensors["mtp.1.confidence_head.proj.weight"].astype(float)[0]
    np.testing.assert_allclose(with_markov.confidences, pairs @ weight, rtol=1e-12)


def _replay(tokens: list[int]) -> Callable[[Array], int]:
    waiting = list(tokens)
    return lambda _: waiting.pop(0)


def test_every_draft_row_sees_the_window_and_the_whole_block() -> None:
    reference = _reference()
    layer, draw = reference._stages[1], np.random.default_rng(4)
    x, window, positions = draw.standard_normal((5, 128)), draw.standard_normal((16, 128)), 40 + np.arange(5)
    got = dspark._draft_attention(x, positions, window, layer)
    vectors = np.concatenate((window, window_vectors(x, positions, layer)))
    queries, sink = query_heads(query_latent(x, layer), positions, layer), layer.block.array("attn.attn_sink")
    heads = np.zeros_like(queries)
    for row in range(5):
        for head in range(4):
            weights = np.exp(vectors @ queries[row, head] * 128**-0.5)
            heads[row, head] = weights @ vectors / (weights.sum() + np.exp(sink[head]))
    np.testing.assert_allclose(got, output_projection(heads, positions, layer), rtol=1e-11, atol=1e-12)


def test_draft_window_holds_the_last_w_features_only() -> None:
    reference, ids = _reference(), prompt(50, 0)
    state, _ = _fed(reference, ids, [50])
    for stage in ("mtp.0", "mtp.1"):
        assert len(state.windows[stage]) == 16


@pytest.mark.parametrize("length", [3, 40])
def test_draft_of_one_token_is_a_plain_window_block(length: int) -> None:
    tensors = dict(_tensors())
    tensors["mtp.1.markov_head.head.weight"] = np.zeros_like(tensors["mtp.1.markov_head.head.weight"])
    reference = _reference(tensors, dspark_block_size=1)
    state, _ = _fed(reference, prompt(length, 6), [length])
    draft = reference.draft(state, 77)
    hidden = _plain_window_blocks(reference, state, 77)
    np.testing.assert_allclose(draft.hidden, hidden, rtol=0, atol=1e-12)
    normed = hidden / np.sqrt((hidden**2).mean()) * tensors["mtp.1.norm.weight"].astype(float)
    np.testing.assert_allclose(draft.logits, normed @ tensors["head.weight"].astype(float).T, rtol=0, atol=1e-12)
    pair = np.concatenate((hidden[0], tensors["mtp.1.markov_head.embed.weight"][77].astype(float)))
    np.testing.assert_allclose(draft.confidences, tensors["mtp.1.confidence_head.proj.weight"].astype(float) @ pair)


def _plain_window_blocks(reference: Reference, state: SequenceState, token: int) -> Array:
    """One token through the draft stages as if they were window layers whose window is one token longer."""
    settings, arithmetic = reference._settings, reference._arithmetic
    positions = np.array([state.length])
    streams, pre_mix = mixing.start_streams(reference._parameters.rows("embed", np.array([token])), 4)
    for stage, layer in enumerate(reference._stages):
        window = state.windows[f"mtp.{stage}"]

        def attention(x: Array, layer: Any = layer, window: Array = window) -> Array:
            own = window_vectors(x, positions, layer)
            keys = window_keys(window, own, settings.attention.window + 1)
            queries = query_heads(query_latent(x, layer), positions, layer)
            heads = attend(queries, keys, layer.block.array("attn.attn_sink"), arithmetic)
            return output_projection(heads, positions, layer)

        def experts(x: Array, layer: Any = layer) -> Array:
            return moe(x, layer.block, settings.draft_moe, arithmetic)

        for kind, sublayer in (("attn", attention), ("ffn", experts)):
            streams, pre_mix = mixing.run_sublayer(layer.block, kind, streams, pre_mix, sublayer, settings.mixer, arithmetic)
    return mixing.collapse(streams, pre_mix, arithmetic)


# -- records and numerics


def test_a_record_chains_from_layer_to_layer() -> None:
    tensors, output = _tensors(), _whole(_reference(), record=True)
    first = output.layers[0]
    np.testing.assert_array_equal(first.streams[:, 2], tensors["embed.weight"][prompt(LENGTH, 0)].astype(float))
    assert first.pre_mix[0].tolist() == [1, 0, 0, 0]
    record = output.layers[5]  # no Engram: the collapsed streams are the attention input before its norm
    collapsed = np.einsum("ns,nsh->nh", record.pre_mix, record.streams)
    weight = tensors["layers.5.attn_norm.weight"].astype(float)
    expected = weight * collapsed / np.sqrt((collapsed**2).mean(axis=1, keepdims=True))
    np.testing.assert_allclose(record.attention_input, expected, rtol=1e-12)
    assert record.index_scores is None and output.layers[4].index_scores is not None


@pytest.mark.parametrize("layer", [0, 4, 5])
def test_a_layer_collapses_with_the_pre_mix_of_the_sublayer_before(layer: int) -> None:
    tensors, output = _tensors(), _whole(_reference(), record=True)
    record = output.layers[layer]
    attention, between = _expanded(tensors, f"layers.{layer}.hc_attn", record.streams, record.attention_output)
    weight = tensors[f"layers.{layer}.ffn_norm.weight"].astype(float)
    collapsed = np.einsum("ns,nsh->nh", attention.pre, between)
    expected = weight * collapsed / np.sqrt((collapsed**2).mean(axis=1, keepdims=True))
    np.testing.assert_allclose(record.moe_input, expected, rtol=1e-11, atol=1e-12)
    experts, behind = _expanded(tensors, f"layers.{layer}.hc_ffn", between, record.moe_output)
    if layer == 5:
        np.testing.assert_allclose(output.hidden, np.einsum("ns,nsh->nh", experts.pre, behind), rtol=1e-11, atol=1e-11)
    else:
        np.testing.assert_allclose(output.layers[layer + 1].pre_mix, experts.pre, rtol=1e-12)
        np.testing.assert_allclose(output.layers[layer + 1].streams, behind, rtol=1e-11, atol=1e-12)


def _expanded(tensors: Tensors, name: str, streams: Array, output: Array) -> tuple[mixing.Mixing, Array]:
    """The mixer's coefficients and the streams behind its sublayer, without the reference's own sublayer code."""
    fn, base, scale = (tensors[f"{name}_{part}"].astype(float) for part in ("fn", "base", "scale"))
    mix = mixing.mixing(streams, fn, base, scale, mixing.MixerSettings(4, 20, 1e-6, 1e-20))
    carried = np.einsum("nij,nih->njh", mix.comb, streams)
    return mix, np.einsum("nj,nh->njh", mix.post, output) + carried


@pytest.mark.parametrize("accumulate", ["float32", "float64"])
def test_faithful_values_are_in_their_formats(accumulate: Width) -> None:
    reference = _faithful(accumulate)
    state = reference.start()
    output = reference.forward(state, prompt(LENGTH, 0), record=True)
    assert output.logits.dtype == np.dtype(accumulate)
    for record in output.layers.values():
        for part in (record.streams, record.attention_input, record.attention_output, record.moe_input, record.moe_output):
            assert part.dtype == np.dtype(accumulate)
            np.testing.assert_array_equal(round_bf16(part), part)
    for window in state.windows.values():
        np.testing.assert_array_equal(q8(window), window)
    for keys in state.index_keys.values():
        np.testing.assert_array_equal(q4idx(keys), keys)
    for entries in state.entries.values():
        groups = np.abs(entries.reshape(len(entries), -1, 16))
        assert max(len(np.unique(group)) for row in groups for group in row) <= 8
    assert (round_bf16(output.logits) != output.logits).any()


def test_the_two_accumulations_differ_less_than_the_casts_do() -> None:
    ids = [prompt(31, 1), prompt(LENGTH, 2)]
    floor = noise_floor(tiny_config(), _tensors(), ids, tiny_token_map())
    exact = np.concatenate([_reference().forward(_reference().start(), one).logits for one in ids])
    faithful = np.concatenate([_faithful().forward(_faithful().start(), one).logits for one in ids])
    casts = float(np.sqrt(np.mean((exact - faithful) ** 2)))
    assert 0 < floor.rms < casts
    assert floor.rms < floor.maximum
    assert floor.gaps.shape == (132,) and (floor.gaps >= 0).all()
    assert floor.selection_shares.keys() == {1, 3, 4}
    assert all(0 <= share <= 1 for share in floor.selection_shares.values())


def test_one_layer_deep_the_two_accumulations_are_close() -> None:
    narrow, wide = (_whole(_faithful(width), record=True).layers[1].streams for width in ("float32", "float64"))
    assert np.sqrt(np.mean((narrow - wide) ** 2)) < 1e-3 * wide.std()


# -- refusals


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([5, 509], "token_ids[1] - found 509, the image token"),
        ([512], "found 512, expected 0 to 511"),
        ([-1], "found -1, expected 0 to 511"),
        ([], "found no token"),
    ],
)
def test_refused_tokens(ids: list[int], words: str) -> None:
    reference = _reference()
    state = reference.start()
    with pytest.raises(ValueError) as error:
        reference.forward(state, ids)
    assert words in str(error.value)
    assert state.length == 0


def test_refused_arguments() -> None:
    config, tensors, token_map = tiny_config(), _tensors(), tiny_token_map()
    with pytest.raises(ValueError, match="token map is missing"):
        Reference(config, tensors)
    with pytest.raises(ValueError, match="token map does not fit"):
        Reference(config, tensors, token_map=token_map[:-1])
    with pytest.raises(ValueError, match="token map does not fit"):
        Reference(config, tensors, token_map=token_map + 1)
    with pytest.raises(ValueError, match="float64 everywhere"):
        Reference(config, tensors, accumulate="float32", token_map=token_map)
    with pytest.raises(ValueError, match="numerics are unknown"):
        Reference(config, tensors, numerics="fast", token_map=token_map)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nothing to draft from"):
        _reference().draft(_reference().start(), 5)
    lacking = {name: value for name, value in tensors.items() if name != "layers.3.attn.wkv.scale"}
    with pytest.raises(ValueError, match=r"tensors\['layers.3.attn.wkv.scale'\]"):
        _whole(_reference(lacking))
