"""Single formulas of the reference against naive per-element loops and the golden values of model spec appendix C."""

from __future__ import annotations

import cmath
import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tapeout.models.deepseek_v41.reference import engram, mixer, moe, rope, sparse
from tapeout.models.deepseek_v41.reference.arithmetic import Arithmetic
from tapeout.models.deepseek_v41.reference.attention import Keys, attend, window_keys
from tapeout.models.deepseek_v41.reference.parameters import Parameters
from tests.models.random_checkpoint import Tensors, random_tensors, tiny_config

Array = NDArray[Any]
EXACT = Arithmetic(False, np.float64)
FAITHFUL = Arithmetic(True, np.float64)
SINKHORN = [
    [0.088392022, 0.215957347, 0.197079934, 0.498569697],
    [0.468412839, 0.154883964, 0.019129501, 0.357572697],
    [0.402998749, 0.362220223, 0.121606220, 0.113173809],
    [0.040195390, 0.266937467, 0.662183345, 0.030682796],
]
LAYER_1 = """
    3507628 26094887 36875744 59123204 76497369 87622947 109186021 122730918 136697021 155284773 171860214
    177904959 197363312 215093719 233690553 251711515 259313488 286992741 294902923 314858713 328162689 348118827
    362509550 383729552
"""
LAYER_14 = """
    479760 21082118 33005698 62289446 76931532 95894768 99694698 117599430 142177360 149505520 173443140 188100300
    207399932 209357764 239294159 243940891 258515087 283181207 302367745 310591021 324744634 342094812 360837763
    374548603
"""


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return random_tensors(tiny_config(), seed=11)


def _draw(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


# -- mixers


def test_sinkhorn_golden() -> None:
    logits = np.array([[[0, 1, 2, 3], [1, 0, -1, 2], [0.5, 0.5, 0.5, 0.5], [-2, 0, 2, -1]]], float)
    np.testing.assert_allclose(mixer.sinkhorn(logits, 20, 1e-6)[0], SINKHORN, atol=5e-10)


def _naive_mixer(streams: Array, fn: Array, base: Array, scale: Array) -> tuple[list[float], list[float], Array]:
    count, hidden = streams.shape
    u = [float(streams[i][d]) for i in range(count) for d in range(hidden)]
    rho = (sum(v * v for v in u) / len(u) + 1e-20) ** -0.5
    m = [rho * sum(float(fn[c, n]) * u[n] for n in range(len(u))) for c in range(len(fn))]
    logistic = [1 / (1 + math.exp(-(m[c] * scale[c // count] + base[c]))) for c in range(2 * count)]
    p = np.zeros((count, count))
    for i in range(count):
        row = [m[2 * count + count * i + j] * scale[2] + base[2 * count + count * i + j] for j in range(count)]
        total = sum(math.exp(v) for v in row)
        for j in range(count):
            p[i, j] = math.exp(row[j]) / total + 1e-6
    for step in range(39):  # columns, then 19 times rows and columns
        for a in range(count):
            line = [p[b, a] if step % 2 == 0 else p[a, b] for b in range(count)]
            for b in range(count):
                i, j = (b, a) if step % 2 == 0 else (a, b)
                p[i, j] = line[b] / (sum(line) + 1e-6)
    return [v + 1e-6 for v in logistic[:count]], [2 * v for v in logistic[count:]], p


def test_one_mixer_against_loops() -> None:
    streams, fn, base = _draw(2, 4, 6, seed=1), _draw(24, 24, seed=2), _draw(24, seed=3)
    scale = np.array([0.7, -1.1, 1.9])
    mix = mixer.mixing(streams, fn, base, scale, mixer.MixerSettings(4, 20, 1e-6, 1e-20))
    for row in range(2):
        pre, post, comb = _naive_mixer(streams[row], fn, base, scale)
        np.testing.assert_allclose(mix.pre[row], pre, rtol=1e-13)
        np.testing.assert_allclose(mix.post[row], post, rtol=1e-13)
        np.testing.assert_allclose(mix.comb[row], comb, rtol=1e-12)


def test_expand_leaves_streams_alone_without_output_and_with_identity() -> None:
    streams = FAITHFUL.bf16(_draw(3, 4, 5))
    idle = mixer.Mixing(np.zeros((3, 4)), np.zeros((3, 4)), np.tile(np.eye(4), (3, 1, 1)))
    np.testing.assert_array_equal(mixer.expand(_draw(3, 5, seed=9), streams, idle, FAITHFUL), streams)


def test_expand_sums_over_sources() -> None:
    comb = np.zeros((1, 4, 4))
    comb[0, 1, 3] = 1  # source 1 feeds destination 3
    streams, output = _draw(1, 4, 5), _draw(1, 5, seed=9)
    post = np.array([[0.0, 2.0, 0.0, 0.0]])
    moved = mixer.expand(output, streams, mixer.Mixing(post, post, comb), EXACT)[0]
    np.testing.assert_array_equal(moved, [np.zeros(5), 2 * output[0], np.zeros(5), streams[0, 1]])


def test_a_sublayer_collapses_with_the_earlier_pre_mix(tensors: Tensors) -> None:
    config = tiny_config()
    block = Parameters(tensors, np.float64).under("layers.0")
    streams, pre_mix = _draw(2, 4, 128), np.array([[0.0, 1, 0, 0], [0, 0, 0, 2]])
    seen: list[Array] = []

    def sublayer(x: Array) -> Array:
        seen.append(x)
        return np.zeros_like(x)

    settings = mixer.MixerSettings(4, 20, config.text.hc_eps, 1e-20)
    mixer.run_sublayer(block, "attn", streams, pre_mix, sublayer, settings, EXACT)
    expected = EXACT.rms(np.stack((streams[0, 1], 2 * streams[1, 3])), block.array("attn_norm.weight"), 1e-20)
    np.testing.assert_allclose(seen[0], expected, rtol=1e-14)


# -- rotary embedding

YARN = rope.Yarn(16, 65536, 32, 1)


@pytest.mark.parametrize(
    ("base", "yarn", "golden"),
    [
        (
            160000.0,
            YARN,
            {0: 1, 1: 6.876560219e-1, 14: 5.286856317e-3, 15: 3.635538584e-3, 16: 2.265625e-3, 20: 2.969777783e-4}
            | {24: 1.953125e-5, 25: 5.372312671e-6, 31: 5.680529037e-7},
        ),
        (10000.0, None, {1: 7.498942093e-1, 31: 1.333521432e-4}),
        (
            160000.0,
            rope.Yarn(16, 256, 32, 1),
            {1: 6.231882699e-1, 5: 8.168742304e-2, 9: 5.372312671e-3, 10: 1.477721264e-3},
        ),
    ],
)
def test_frequencies_golden(base: float, yarn: rope.Yarn | None, golden: dict[int, float]) -> None:
    omega = rope.frequencies(64, base, yarn)
    np.testing.assert_allclose([omega[i] for i in golden], list(golden.values()), rtol=1e-9)


def test_rotation_against_complex_numbers_and_back() -> None:
    omega = rope.frequencies(64, 160000.0, YARN).astype(np.float32)
    rotation, x, positions = rope.Rotation(omega, EXACT), _draw(2, 3, 80), np.array([7, 1_000_003])
    turned = rotation.apply(x, positions)
    np.testing.assert_array_equal(turned[..., :16], x[..., :16])
    for row, head, pair in ((0, 0, 0), (0, 2, 31), (1, 1, 1), (1, 2, 2)):
        angle = float(np.float32(positions[row]) * omega[pair])
        before = complex(x[row, head, 16 + 2 * pair], x[row, head, 17 + 2 * pair])
        after = before * cmath.exp(1j * angle)
        assert turned[row, head, 16 + 2 * pair] == pytest.approx(after.real, abs=1e-14)
        assert turned[row, head, 17 + 2 * pair] == pytest.approx(after.imag, abs=1e-14)
    np.testing.assert_allclose(rotation.undo(turned, positions), x, atol=1e-14)


def test_angles_are_fp32_products() -> None:
    omega = rope.frequencies(64, 160000.0, YARN).astype(np.float32)
    x = np.zeros((1, 64))
    x[0, 2] = 1.0
    turned = rope.Rotation(omega, EXACT).apply(x, np.array([1_000_003]))
    drifting = math.cos(1_000_003 * float(omega[1]))
    assert abs(turned[0, 2] - drifting) > 1e-3
    assert turned[0, 2] == math.cos(float(np.float32(1_000_003) * omega[1]))


# -- attention


def test_one_attention_head_against_loops() -> None:
    queries, vectors, sink = _draw(1, 2, 8), _draw(1, 5, 8, seed=2), np.array([0.3, -1.2])
    visible = np.array([[True, False, True, True, True]])
    got = attend(queries, Keys(vectors, visible), sink, EXACT)
    for head in range(2):
        logits = [
            sum(float(queries[0, head, d]) * float(v[d]) for d in range(8)) * 8**-0.5 if seen else None
            for v, seen in zip(vectors[0], visible[0], strict=True)
        ]
        weights = [0.0 if logit is None else math.exp(logit) for logit in logits]
        total = sum(weights) + math.exp(sink[head])
        expected = [sum(w * float(v[d]) for w, v in zip(weights, vectors[0], strict=True)) / total for d in range(8)]
        np.testing.assert_allclose(got[0, head], expected, rtol=1e-13)


def test_sink_only_and_sink_dominated_rows_yield_zero() -> None:
    queries, vectors = _draw(2, 2, 8), _draw(2, 3, 8, seed=2)
    none = Keys(vectors, np.zeros((2, 3), bool))
    assert not attend(queries, none, np.array([0.0, -50.0]), EXACT).any()
    assert not attend(queries, Keys(vectors[:, :0], none.visible[:, :0]), np.zeros(2), EXACT).any()
    every = Keys(vectors, np.ones((2, 3), bool))
    assert np.abs(attend(queries, every, np.array([800.0, 800.0]), EXACT)).max() < 1e-300


def test_a_vector_listed_twice_counts_twice() -> None:
    queries, vectors = _draw(1, 1, 8), _draw(1, 2, 8, seed=2)
    twice = Keys(vectors[:, [0, 1, 1]], np.ones((1, 3), bool))
    logits = (vectors[0] @ queries[0, 0]) * 8**-0.5
    weights = np.exp(logits) * [1, 2]
    expected = weights @ vectors[0] / (weights.sum() + 1)
    np.testing.assert_allclose(attend(queries, twice, np.zeros(1), EXACT)[0, 0], expected, rtol=1e-13)


def test_window_keys_by_position() -> None:
    rows = np.arange(9.0)[:, None]
    keys = window_keys(rows[:4], rows[4:], window=3)
    for index, position in enumerate(range(4, 9)):
        assert keys.vectors[index, keys.visible[index], 0].tolist() == [position - 2, position - 1, position]
    first = window_keys(rows[:0], rows[:4], window=3)
    assert [first.vectors[i, first.visible[i], 0].tolist() for i in range(4)] == [[0], [0, 1], [0, 1, 2], [1, 2, 3]]


# -- compressed entries


def test_one_compressor_group_against_loops() -> None:
    gates, latents = _draw(4, 6), _draw(4, 6, seed=5)
    pooled = sparse.pool_pairs(gates, latents)
    for group in range(2):
        for d in range(6):
            one, two = math.exp(gates[2 * group, d]), math.exp(gates[2 * group + 1, d])
            expected = (one * latents[2 * group, d] + two * latents[2 * group + 1, d]) / (one + two)
            assert pooled[group, d] == pytest.approx(expected, rel=1e-13)


def test_selection_takes_the_lowest_id_among_equals() -> None:
    scores = np.array([[1.0, 3, 3, 2, 3, -np.inf], [-1, -np.inf, -np.inf, -np.inf, -np.inf, -np.inf]])
    assert [row.tolist() for row in sparse.select(scores, 2).rows()] == [[1, 2], [0]]
    assert [row.tolist() for row in sparse.select(scores, 4).rows()] == [[1, 2, 3, 4], [0]]
    assert [row.tolist() for row in sparse.select(scores[:, :0], 4).rows()] == [[], []]


def test_candidate_blocks_keep_the_newest_and_the_best() -> None:
    settings = sparse.IndexSettings(heads=1, width=1, top=3, blocks=2, block_size=4)
    scores = np.full((3, 13), -5.0)
    scores[0, 6] = 9  # block 1 is best, block 3 is the newest and bad
    scores[1, 2] = scores[1, 9] = 1  # blocks 0 and 2 tie behind the newest: the lower one wins
    scores = sparse.within_visible(scores, np.array([13, 13, 0]))
    chosen = sparse.candidate_blocks(scores, np.array([13, 13, 0]), settings)
    assert [np.flatnonzero(row).tolist() for row in chosen] == [[1, 3], [0, 3], []]
    allowed = sparse.within_candidates(scores, chosen, settings)
    assert np.flatnonzero(allowed[0] > -np.inf).tolist() == [4, 5, 6, 7, 12]


# -- experts


def test_gate_golden() -> None:
    settings = moe.MoeSettings(active=2, scaling=1.5, limit=10.0)
    chosen, weights = moe.gate(np.array([[2.0, 1, 0, -1]]), np.zeros(4), settings)
    assert chosen.tolist() == [[0, 1]]
    np.testing.assert_allclose(weights, [[0.8400, 0.6600]], atol=5e-5)


def test_gate_bias_chooses_but_does_not_weigh_and_ties_go_low() -> None:
    settings = moe.MoeSettings(active=2, scaling=1.5, limit=10.0)
    chosen, weights = moe.gate(np.array([[2.0, 1, 1, 30]]), np.array([0, 0.0, 0, -9]), settings)
    assert chosen.tolist() == [[0, 1]]
    np.testing.assert_allclose(weights.sum(), 1.5)
    chosen, weights = moe.gate(np.array([[2.0, 1, 30, -40]]), np.array([0, 0, 0, 9.0]), settings)
    assert chosen.tolist() == [[3, 2]]
    small, large = math.sqrt(math.log1p(math.exp(-40))), math.sqrt(30)
    np.testing.assert_allclose(weights[0], [1.5 * small / (small + large), 1.5 * large / (small + large)], rtol=1e-12)


def _bf16(x: Array) -> Array:
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def _q8(x: Array) -> Array:
    out = np.array(x, np.float64)
    for start in range(0, len(out), 32):
        group = out[start : start + 32]
        scale = 2.0 ** math.ceil(math.log2(max(abs(group).max(), 1e-4) / 448))
        out[start : start + 32] = (group / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(float) * scale
    return out


def _same(x: Array) -> Array:
    return np.asarray(x)


def _loop_linear(weight: Array, x: Array) -> Array:
    return np.array([math.fsum(float(w) * float(v) for w, v in zip(row, x, strict=True)) for row in weight])


def _naive_moe(x: Array, block: Parameters, bf16: Any, q8: Any) -> Array:
    z = _loop_linear(block.matrix("ffn.gate"), x)
    scores = [math.sqrt(v if v > 20 else math.log1p(math.exp(v))) for v in z]
    bias = block.array("ffn.gate.bias")
    best = sorted(range(len(z)), key=lambda e: (-(scores[e] + bias[e]), e))[:2]
    total = sum(scores[e] for e in best) + 1e-20
    routed = [(f"ffn.experts.{e}", 1.5 * scores[e] / total) for e in best]
    out = np.zeros(len(x))
    for name, weight in [*routed, ("ffn.shared_experts", 1.0)]:
        g = bf16(_loop_linear(block.matrix(f"{name}.w1"), q8(x)))
        u = bf16(_loop_linear(block.matrix(f"{name}.w3"), q8(x)))
        pairs = [(min(float(a), 10.0), max(min(float(b), 10.0), -10.0)) for a, b in zip(g, u, strict=True)]
        activated = np.array([a / (1 + math.exp(-a)) * b * weight for a, b in pairs])
        out = out + bf16(_loop_linear(block.matrix(f"{name}.w2"), q8(bf16(activated))))
    return np.asarray(bf16(out))


@pytest.mark.parametrize("arithmetic", [EXACT, FAITHFUL], ids=["exact", "faithful"])
def test_one_moe_token_against_loops(tensors: Tensors, arithmetic: Arithmetic) -> None:
    block = Parameters(tensors, np.float64).under("layers.3")
    x = _bf16(_draw(3, 128, seed=8) * np.array([[1.0], [0.1], [6.0]]))  # the last row reaches the clamp
    rounding = (_bf16, _q8) if arithmetic.is_faithful else (_same, _same)
    got = moe.moe(x, block, moe.MoeSettings(2, 1.5, 10.0), arithmetic)
    for row in range(3):
        np.testing.assert_allclose(got[row], _naive_moe(x[row], block, *rounding), rtol=1e-11, atol=1e-11)


# -- Engram


def _tables(layers: tuple[int, ...], orders: int, heads: int, vocabulary: int, compressed: int) -> Iterator[Array]:
    for one in engram.engram_hashes(layers, orders, heads, vocabulary, compressed):
        yield engram.hash_rows(np.array([[11, 7, 5, 3][:orders]], np.int64), one)[0]


def test_engram_golden_rows_of_the_released_model() -> None:
    first, second = _tables((1, 14), 4, 8, 16_000_000, 99092)
    assert first.tolist() == [int(v) for v in LAYER_1.split()]
    assert second.tolist() == [int(v) for v in LAYER_14.split()]


def test_engram_golden_rows_of_the_tiny_model() -> None:
    first, second = _tables((1, 2), 3, 2, 256, 486)
    assert first.tolist() == [98, 290, 662, 954] and second.tolist() == [161, 495, 750, 1001]
    hashes = engram.engram_hashes((1, 2), 3, 2, 256, 486)
    assert hashes[0].primes.tolist() == [[257, 263], [269, 271]]
    assert hashes[1].primes.tolist() == [[277, 281], [283, 293]]
    assert hashes[1].multipliers.tolist() == [15599337840602443, 7563982961475545, 4617643475272425]


def test_look_back_pads_at_the_start_only() -> None:
    compressed = np.array([5, 6, 7, 8], np.int64)
    whole = engram.look_back(compressed, 4, 3, pad=2)
    assert whole.tolist() == [[5, 2, 2], [6, 5, 2], [7, 6, 5], [8, 7, 6]]
    assert engram.look_back(compressed, 1, 3, pad=2).tolist() == [[8, 7, 6]]


@pytest.mark.parametrize("arithmetic", [EXACT, FAITHFUL], ids=["exact", "faithful"])
def test_one_engram_token_against_loops(tensors: Tensors, arithmetic: Arithmetic) -> None:
    bf16, quantise = (_bf16, _q8) if arithmetic.is_faithful else (_same, _same)
    block = Parameters(tensors, np.float64).under("layers.1")
    streams, rows = _bf16(_draw(1, 4, 128, seed=4)), np.array([[3, 500, 700, 1059]])
    got = engram.engram(streams, rows, block, 1e-20, arithmetic)
    table, scale = tensors["layers.1.engram.embed.weight"], tensors["layers.1.engram.embed.scale"]
    eta = [float(table[r, d]) * 2.0 ** (int(scale[r, d // 32]) - 127) for r in rows[0] for d in range(128)]
    projected = bf16(_loop_linear(block.matrix("engram.wkv"), quantise(bf16(np.array(eta)))))
    value = projected[512:]
    for i in range(4):
        x, key = streams[0, i], projected[128 * i : 128 * i + 128]
        q, k = (tensors[f"layers.1.engram.{name}"][i].astype(float) for name in ("q_weight", "k_weight"))
        rho = [(sum(v * v for v in vector) / 128 + 1e-20) ** -0.5 for vector in (x, key)]
        delta = sum(x[d] * q[d] * k[d] * key[d] for d in range(128)) * rho[0] * rho[1] * 128**-0.5
        gate = 1 / (1 + math.exp(-math.copysign(math.sqrt(max(abs(delta), 1e-6)), delta)))
        np.testing.assert_allclose(got[0, i], bf16(x + gate * value), rtol=1e-11, atol=1e-12)


def test_engram_gate_at_zero_is_not_one_half(tensors: Tensors) -> None:
    block = Parameters(tensors, np.float64).under("layers.1")
    rows = np.array([[3, 500, 700, 1059]])
    zero = engram.engram(np.zeros((1, 4, 128)), rows, block, 1e-20, EXACT)
    value = (block.fp8_rows("engram.embed", rows[0]).reshape(1, -1) @ block.matrix("engram.wkv").T)[0, 512:]
    gate = 1 / (1 + math.exp(-1e-3))
    np.testing.assert_allclose(zero[0, 2], gate * value, rtol=1e-12)
