"""`dspark` ops against loops over sequences and places of the block."""

import numpy as np
import pytest
from tests.dialects.harness import Case, agree, complaint, refusal
from tests.dialects.ragged import SLOTS, normal

from tapeout.dialects import dspark
from tapeout.dialects.define import REGISTRY
from tapeout.dialects.format import BF16, FP32, INT32, Q8, REAL, Array, Number, decode, encode
from tapeout.dialects.rows import TABLE
from tapeout.dialects.types import Ring, Tensor

SIZE, WINDOW, RING = 3, 4, 7
POSITIONS, OWNERS = [0, 2, 3, 11, 30], [3, 0, 4, 1, 2]
"""Windows of one token, of all but one, exactly full, and wrapped around the ring."""
NONE = np.zeros(0, np.int32)


def i32(values: list[int]) -> Array:
    return np.array(values, np.int32)


def test_block_is_the_golden_token_then_noise_behind_the_last_position() -> None:
    golden = [50, 40, 30, 20, 10]
    tokens, positions, slots = Case(dspark.block, [TABLE] * 3, noise=99, size=SIZE).run(i32(golden), i32(POSITIONS), i32(OWNERS))
    rows = [(y if n == 0 else 99, p + 1 + n, s) for y, p, s in zip(golden, POSITIONS, OWNERS, strict=True) for n in range(SIZE)]
    assert list(zip(tokens.tolist(), positions.tolist(), slots.tolist(), strict=True)) == rows


def test_block_of_one() -> None:
    found = Case(dspark.block, [TABLE] * 3, noise=0, size=1).run(i32([7]), i32([4]), i32([2]))
    assert [x.tolist() for x in found] == [[7], [5], [2]]


@pytest.mark.parametrize("size", [1, SIZE, 5])
@pytest.mark.parametrize(("window", "ring"), [(WINDOW, RING), (1, 1), (16, 19)])
def test_window_is_the_last_tokens_then_the_whole_block(size: int, window: int, ring: int) -> None:
    case = Case(dspark.window, [TABLE] * 2, window=window, ring=ring, sequences=SLOTS, size=size)
    ids, counts = case.run(i32(POSITIONS), i32(OWNERS))
    expected = []
    for s, (p, slot) in enumerate(zip(POSITIONS, OWNERS, strict=True)):
        row = [slot * ring + u % ring for u in range(max(0, p - window + 1), p + 1)] + [SLOTS * ring + s * size + n for n in range(size)]
        expected += [row] * size
    assert counts.tolist() == [len(row) for row in expected]
    assert ids.tolist() == [row + [-1] * (window + size - len(row)) for row in expected]


@pytest.mark.parametrize(("number", "result"), [(REAL, REAL), (FP32, FP32), (BF16, FP32)])
@pytest.mark.parametrize("step", range(SIZE))
def test_correct_adds_the_bias_to_one_place_of_every_block(step: int, number: Number, result: Number) -> None:
    base, bias = encode(normal(1, 4 * SIZE, 11), number), encode(normal(2, 4, 11), number)
    case = Case(dspark.correct, [Tensor((None, 11), number)] * 2, step=step, size=SIZE)
    assert case.results == [Tensor((None, 11), result)]
    expected = np.array([[float(base[s * SIZE + step, v]) + float(bias[s, v]) for v in range(11)] for s in range(4)])
    agree(case.run(base, bias), expected, result)


@pytest.mark.parametrize(("number", "result"), [(REAL, REAL), (BF16, FP32), (Q8, FP32)])
@pytest.mark.parametrize("size", [1, SIZE, 5])
def test_confidence_is_a_product_of_hidden_and_embedding_for_every_place(size: int, number: Number, result: Number) -> None:
    weight = BF16 if number == Q8 else number
    x, projection = encode(normal(1, 4 * size, 32), number), encode(normal(3, 1, 37), weight)
    embedded = [encode(normal(10 + n, 4, 5), weight) for n in range(size)]
    case = Case(dspark.confidence, [Tensor((None, 32), number), [Tensor((None, 5), weight)] * size, Tensor((1, 37), weight)])
    assert case.results == [Tensor((None, size), result)]
    expected = np.array([[sum(float(a) * float(b) for a, b in zip([*decode(x)[s * size + n], *decode(e)[s]], decode(projection)[0], strict=True))
                          for n, e in enumerate(embedded)] for s in range(4)])  # fmt: skip
    agree(case.run(x, embedded, projection), expected, result)


def test_results_are_counted_by_drafts_or_by_sequences() -> None:
    extents = {name: REGISTRY[f"dspark.{name}"].cls.extent(None, ["sequences"]) for name in ("block", "window", "correct", "confidence")}
    assert extents == {"block": "drafts", "window": "drafts", "correct": "sequences", "confidence": "sequences"}


def test_no_sequences() -> None:
    assert [x.shape for x in Case(dspark.block, [TABLE] * 3, noise=9, size=SIZE).run(NONE, NONE, NONE)] == [(0,)] * 3
    case = Case(dspark.window, [TABLE] * 2, window=WINDOW, ring=RING, sequences=SLOTS, size=SIZE)
    assert [x.shape for x in case.run(NONE, NONE)] == [(0, WINDOW + SIZE), (0,)]
    none = np.zeros((0, 6), np.float32)
    assert Case(dspark.correct, [Tensor((None, 6), FP32)] * 2, step=1, size=SIZE).run(none, none).shape == (0, 6)
    operands = [Tensor((None, 6), FP32), [Tensor((None, 6), FP32)] * SIZE, Tensor((1, 12), FP32)]
    assert Case(dspark.confidence, operands).run(none, [none] * SIZE, np.ones((1, 12), np.float32)).shape == (0, SIZE)


def test_cost_counts_one_row_a_sequence_or_a_place() -> None:
    block = Case(dspark.block, [TABLE] * 3, noise=9, size=5).cost(rows=999, sequences=2)
    assert (block.read, block.written) == (24, 120)
    window = Case(dspark.window, [TABLE] * 2, window=128, ring=134, sequences=8, size=5).cost(rows=999, sequences=2)
    assert (window.read, window.written) == (16, 10 * 134 * 4)
    correct = Case(dspark.correct, [Tensor((None, 100), FP32)] * 2, step=0, size=5).cost(rows=999, sequences=2)
    assert (correct.read, correct.written, correct.operations) == (1600, 800, {"f32": 200})
    operands = [Tensor((None, 30), BF16), [Tensor((None, 10), BF16)] * 5, Tensor((1, 40), BF16)]
    confidence = Case(dspark.confidence, operands).cost(rows=999, sequences=2)
    assert (confidence.read, confidence.written, confidence.operations) == (5 * 160 + 80, 5 * 8, {"f32": 5 * 160})


def test_refusals() -> None:
    wide, narrow = Tensor((None, 6), FP32), Tensor((None, 5), FP32)
    assert refusal(dspark.block, [TABLE, TABLE, wide], noise=9, size=2) == "dspark.block: slots is [?, 6] f32, expected rank 1"
    assert refusal(dspark.block, [TABLE] * 3, noise=9, size=0) == "dspark.block: attribute size is 0, expected at least 1"
    assert refusal(dspark.block, [TABLE] * 3, noise=-1, size=2) == "dspark.block: attribute noise is -1, expected a token id"
    assert refusal(dspark.window, [TABLE] * 2, window=8, ring=7, sequences=1, size=2) == (
        "dspark.window: a ring of 7 positions cannot hold a window of 8")
    assert refusal(dspark.window, [TABLE, wide], window=4, ring=7, sequences=1, size=2) == (
        "dspark.window: slots is [?, 6] f32, expected rank 1")
    assert refusal(dspark.correct, [wide, narrow], step=0, size=2) == (
        "dspark.correct: bias is [?, 5] f32, expected [?, 6] of real elements")
    assert refusal(dspark.correct, [wide, wide], step=2, size=2) == (
        "dspark.correct: attribute step is 2, expected a place in a block of 2")
    assert refusal(dspark.correct, [Ring(wide, 2), wide], step=0, size=2) == (
        "dspark.correct: base is ring of 2 x [?, 6] f32, expected a tensor")
    assert refusal(dspark.correct, [wide, wide], INT32, step=0, size=2) == (
        "dspark.correct: the result is [?, 6] i32, expected real elements")
    assert refusal(dspark.confidence, [wide, [narrow], Tensor((1, 12), FP32)]) == (
        "dspark.confidence: projection is [1, 12] f32, expected [1, 11] of real elements")
    assert refusal(dspark.confidence, [wide, [narrow] * 2, Tensor((1, 11), FP32)], Q8) == (
        "dspark.confidence: the result is f8E4M3FN*e8m0[1x32], expected one unscaled number a place")
    assert refusal(dspark.confidence, [wide, [], Tensor((1, 11), FP32)]) == "dspark.confidence: there are no parts, expected at least one"
    assert refusal(dspark.confidence, [wide, [narrow, wide], Tensor((1, 11), FP32)]) == (
        "dspark.confidence: parts are [?, 5] f32, [?, 6] f32, expected one type")
    assert refusal(dspark.confidence, [wide, [Tensor((None, 5), INT32)], Tensor((1, 11), FP32)]) == (
        "dspark.confidence: embedded is [?, 5] i32, expected real elements")


def test_the_verifier_says_the_same_of_text() -> None:
    case = Case(dspark.correct, [Tensor((None, 6), FP32)] * 2, step=1, size=SIZE)
    assert "'dspark.correct' attribute step is 3, expected a place in a block of 3" in complaint(case, "step = 1", "step = 3")
