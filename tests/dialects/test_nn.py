"""The nn ops: meaning against formulas written element by element, refusals, empty rows and costs."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.dialects.harness import Case, agree, complaint, element, refusal, same, tabulate, values

from tapeout.dialects import nn
from tapeout.dialects.define import REGISTRY, Cost
from tapeout.dialects.format import (
    BF16,
    FP4_WEIGHT,
    FP8_TABLE,
    FP8_WEIGHT,
    FP32,
    INT32,
    Q4_INDEX,
    Q4_MAIN,
    Q8,
    REAL,
    Number,
    Scaled,
    decode,
    encode,
)
from tapeout.dialects.types import Blocks, Tensor

ROWS = Tensor((None,), INT32)


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


# embed


@pytest.mark.parametrize("number", [REAL, BF16, FP8_TABLE], ids=str)
def test_embed(number: Number) -> None:
    case = Case(nn.embed, [ROWS, Tensor((5, 64), number)])
    table, wanted = values(1, 5, 64, number=number, block=32), ids(4, 0, 4)
    assert case.results == [Tensor((None, 64), BF16 if number == FP8_TABLE else number)]
    agree(case.run(wanted, table), tabulate((3, 64), lambda r, i: element(table, wanted[r], i)), case.results[0].number)


def test_embed_of_an_id_outside_the_table() -> None:
    case = Case(nn.embed, [ROWS, Tensor((5, 2), BF16)])
    for wrong in (-1, 5):
        with pytest.raises(IndexError, match=f"row {wrong} selected, found 5 rows"):
            case.run(ids(0, wrong), values(1, 5, 2, number=BF16))


# linear


def naive_linear(x: Any, w: Any, groups: int) -> np.ndarray:
    n, k = w.shape
    def y(r: int, o: int) -> float:
        g = o // (n // groups)
        return sum(element(w, o, i) * element(x, r, g * k + i) for i in range(k))
    return tabulate((x.shape[0], n), y)


@pytest.mark.parametrize(("x_number", "w_number", "n", "k", "groups"), [
    (REAL, REAL, 7, 5, 1), (REAL, REAL, 6, 5, 3), (BF16, BF16, 7, 13, 1), (BF16, BF16, 6, 4, 2), (Q8, FP8_WEIGHT, 33, 96, 1),
    (Q8, FP8_WEIGHT, 66, 32, 2), (Q8, FP4_WEIGHT, 7, 64, 1), (BF16, FP8_WEIGHT, 33, 64, 1), (BF16, REAL, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("wide", [False, True])
def test_linear(x_number: Number, w_number: Number, n: int, k: int, groups: int, wide: bool) -> None:
    case = Case(nn.linear, [Tensor((None, k * groups), x_number), Tensor((n, k), w_number)], groups=groups, wide=wide)
    narrow = BF16 if x_number == Q8 else x_number
    assert case.results == [Tensor((None, n), REAL if x_number == REAL else FP32 if wide else narrow)]
    x, w = values(1, 3, k * groups, number=x_number, block=32), values(2, n, k, number=w_number, block=32)
    agree(case.run(x, w), naive_linear(x, w, groups), case.results[0].number)


def test_linear_may_round_to_blocks() -> None:
    case = Case(nn.linear, [Tensor((None, 4), BF16), Tensor((64, 4), BF16)], out=Q8, groups=1, wide=False)
    x, w = values(1, 5, 4, number=BF16), values(2, 64, 4, number=BF16)
    agree(case.run(x, w), naive_linear(x, w, 1), Q8)


def test_linear_costs() -> None:
    case = Case(nn.linear, [Tensor((None, 64), Q8), Tensor((32, 64), FP4_WEIGHT)], groups=1, wide=False)
    assert case.cost(5) == Cost(5 * (64 + 2) + 32 * 32 + 32 * 2, 5 * 32 * 2, {"fp4": 2 * 5 * 32 * 64})
    kinds = {(Q8, FP8_WEIGHT): "fp8", (BF16, BF16): "bf16", (BF16, FP8_WEIGHT): "bf16", (REAL, REAL): "f32", (FP32, BF16): "f32",
             (BF16, FP32): "f32"}
    for (x, w), kind in kinds.items():
        grouped = Case(nn.linear, [Tensor((None, 64), x), Tensor((32, 32), w)], groups=2, wide=False)
        assert grouped.cost(3).operations == {kind: 2 * 3 * 32 * 32}


# rms_norm


@pytest.mark.parametrize("number", [REAL, BF16, Q8], ids=str)
@pytest.mark.parametrize("epsilon", [1e-20, 0.5])
def test_rms_norm(number: Number, epsilon: float) -> None:
    n = 64 if number == Q8 else 7
    case = Case(nn.rms_norm, [Tensor((None, n), number), Tensor((n,), BF16)], epsilon=epsilon)
    x, w = values(1, 3, n, number=number, block=32), values(2, n, number=BF16)
    def y(r: int, i: int) -> float:
        return element(w, i) * element(x, r, i) / math.sqrt(sum(element(x, r, j) ** 2 for j in range(n)) / n + epsilon)
    agree(case.run(x, w), tabulate((3, n), y), case.results[0].number)


def test_rms_norm_of_zeros_is_zero() -> None:
    case = Case(nn.rms_norm, [Tensor((None, 3), BF16), Tensor((3,), BF16)], epsilon=1e-20)
    zeros = encode(np.zeros((2, 3)), BF16)
    same(case.run(zeros, values(1, 3, number=BF16)), zeros)


# rope


def rope_case(number: Number, heads: int, width: int, rotated: int, offset: int = 0, inverse: bool = False) -> Case:
    operands = [Tensor((None, heads * width), number), ROWS, Tensor((9, rotated), FP32)]
    return Case(nn.rope, operands, heads=heads, width=width, offset=offset, inverse=inverse)


def naive_rope(x: Any, positions: np.ndarray, table: Any, heads: int, width: int, offset: int, sign: float) -> np.ndarray:
    half = table.shape[1] // 2
    def y(r: int, column: int) -> float:
        place = column % width - (width - 2 * half)
        if place < 0:
            return element(x, r, column)
        angle, pair = max(int(positions[r]) + offset, 0), place // 2
        cos, sin = element(table, angle, pair), sign * element(table, angle, half + pair)
        even, odd = element(x, r, column - place % 2), element(x, r, column - place % 2 + 1)
        return even * sin + odd * cos if place % 2 else even * cos - odd * sin
    return tabulate(x.shape, y)


@pytest.mark.parametrize("number", [REAL, BF16], ids=str)
@pytest.mark.parametrize(("heads", "width", "rotated"), [(1, 4, 4), (3, 10, 6), (2, 5, 2)])
@pytest.mark.parametrize(("offset", "inverse"), [(0, False), (-1, False), (0, True), (2, True)])
def test_rope(number: Number, heads: int, width: int, rotated: int, offset: int, inverse: bool) -> None:
    case = rope_case(number, heads, width, rotated, offset, inverse)
    x, positions, table = values(1, 4, heads * width, number=number), ids(0, 6, 1, 3), values(2, 9, rotated, number=FP32)
    wanted = naive_rope(x, positions, table, heads, width, offset, -1.0 if inverse else 1.0)
    agree(case.run(x, positions, table), wanted, number)


def test_rope_and_its_inverse_cancel() -> None:
    angles = np.outer(np.arange(9), [1.0, 0.3])
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    x, positions = values(3, 5, 12), ids(0, 8, 3, 3, 1)
    turned = rope_case(REAL, 2, 6, 4).run(x, positions, table)
    np.testing.assert_allclose(rope_case(REAL, 2, 6, 4, inverse=True).run(turned, positions, table), x, rtol=1e-6)  # an FP32 table
    assert np.abs(turned - x).max() > 0.1


def test_rope_beyond_its_table() -> None:
    with pytest.raises(IndexError, match="row 9 selected, found 9 rows"):
        rope_case(REAL, 1, 4, 4).run(values(1, 1, 4), ids(9), values(2, 9, 4, number=FP32))


# quantize


def test_quantize_golden() -> None:
    x = np.full((2, 64), 0.75)
    x[0, 31] = 500.0
    found = Case(nn.quantize, [Tensor((None, 64), REAL)], out=Q8).run(x)
    assert decode(found)[0, :32].tolist() == [0.75] * 31 + [512.0]
    assert found.scales.tolist() == [[128, 127 - 9], [127 - 9, 127 - 9]]  # 0.75 / 448 lies in (2^-10, 2^-9]


def naive_code(x: float, scale: float, codes: list[float]) -> float:
    """The nearest code, ties to the one of even place; `codes` ascend from 0."""
    ratio = min(abs(x) / scale, codes[-1])
    place = min(range(len(codes)), key=lambda i: (abs(codes[i] - ratio), i % 2))
    return math.copysign(codes[place], x)


@pytest.mark.parametrize("number", [Q4_INDEX, Q4_MAIN, Q8], ids=str)
def test_quantize_element_by_element(number: Number) -> None:
    columns = number.scaling.columns
    x = values(7, 3, 96, number=BF16, block=columns)
    found = Case(nn.quantize, [Tensor((None, 96), BF16)], out=number).run(x)
    e4m3 = [m * 2.0**-9 for m in range(8)] + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)][:-1]
    codes = e4m3 if number == Q8 else [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for r in range(3):
        for g in range(96 // columns):
            group = [float(v) for v in x[r, g * columns : (g + 1) * columns]]
            peak = max(abs(v) for v in group)
            scale = naive_code(peak / 6, 1.0, e4m3) if number == Q4_MAIN else 2.0 ** math.ceil(math.log2(peak / codes[-1]))
            wanted = [naive_code(v, scale, codes) * scale for v in group]
            assert decode(found)[r, g * columns : (g + 1) * columns].tolist() == wanted


# take, concat, columns, stack


TAKEN = [ROWS, Tensor((None, 3), BF16), Tensor((None, 2, 64), Q8), Tensor((6, 48), Q4_MAIN)]


@pytest.mark.parametrize("view", TAKEN, ids=str)
def test_take(view: Tensor) -> None:
    x = np.arange(6, dtype=np.int32) * 7 if view.number == INT32 else values(1, *view.sized(6), number=view.number)
    case = Case(nn.take, [view, ROWS])
    assert case.results == [Tensor((None, *view.shape[1:]), view.number)]
    same(case.run(x, ids(5, 0, 5)), x[[5, 0, 5]])
    with pytest.raises(IndexError, match="row -1 selected, found 6 rows"):
        case.run(x, ids(1, -1))


def test_rows_of_take_come_from_its_second_operand() -> None:
    assert REGISTRY["nn.take"].cls.extent(SimpleNamespace(), ["rows", "kept"]) == "kept"  # type: ignore[attr-defined]


@pytest.mark.parametrize("number", [REAL, BF16, Q8, Q4_MAIN], ids=str)
def test_concat(number: Number) -> None:
    parts = [values(i, 4, 96, number=number) for i in range(3)]
    found = Case(nn.concat, [[Tensor((None, 96), number)] * 3]).run(parts)
    np.testing.assert_array_equal(decode(found), tabulate((4, 288), lambda r, c: element(parts[c // 96], r, c % 96)))
    assert isinstance(found, Scaled) == (number.scaling is not None)


@pytest.mark.parametrize("number", [REAL, BF16, FP32], ids=str)
def test_columns(number: Number) -> None:
    x = values(2, 4, 13, number=number)
    case = Case(nn.columns, [Tensor((None, 13), number)], first=5, count=7)
    assert case.results == [Tensor((None, 7), number)]
    np.testing.assert_array_equal(decode(case.run(x)), tabulate((4, 7), lambda r, c: element(x, r, 5 + c)))


def test_stack() -> None:
    case = Case(nn.stack, [[ROWS, ROWS, ROWS]])
    same(case.run([ids(1, 2), ids(3, 4), ids(5, 6)]), np.array([[1, 3, 5], [2, 4, 6]], np.int32))


# all


EMPTY: list[tuple[Callable[..., Any], list[Any], dict[str, Any]]] = [
    (nn.embed, [ROWS, Tensor((5, 3), BF16)], {}),
    (nn.linear, [Tensor((None, 64), Q8), Tensor((64, 32), FP8_WEIGHT)], {"groups": 2, "wide": True}),
    (nn.rms_norm, [Tensor((None, 7), BF16), Tensor((7,), BF16)], {"epsilon": 1e-20}),
    (nn.rope, [Tensor((None, 8), BF16), ROWS, Tensor((9, 2), FP32)], {"heads": 2, "width": 4, "offset": 0, "inverse": True}),
    (nn.quantize, [Tensor((None, 32), BF16)], {"out": Q4_MAIN}),
    (nn.take, [Tensor((None, 32), Q8), ROWS], {}),
    (nn.concat, [[Tensor((None, 32), Q8)] * 2], {}),
    (nn.columns, [Tensor((None, 32), BF16)], {"first": 30, "count": 2}),
    (nn.stack, [[ROWS, ROWS]], {}),
]


@pytest.mark.parametrize(("op", "operands", "attributes"), EMPTY, ids=[e[0].__name__ for e in EMPTY])
def test_no_rows(op: Callable[..., Any], operands: list[Any], attributes: dict[str, Any]) -> None:
    def fill(v: Any) -> Any:
        if isinstance(v, list):
            return [fill(p) for p in v]
        return np.zeros(v.sized(0), np.int32) if v.number == INT32 else values(1, *v.sized(0), number=v.number)
    case = Case(op, operands, **attributes)
    found = case.run(*map(fill, operands))
    assert found.shape == case.results[0].sized(0)  # type: ignore[union-attr]


X, W = Tensor((None, 64), BF16), Tensor((32, 64), BF16)
ROPE = {"heads": 2, "width": 32, "offset": 0, "inverse": False}
TABLE = Tensor((9, 32), FP32)
REFUSED: list[tuple[Callable[..., Any], list[Any], dict[str, Any], str]] = [
    (nn.embed, [Tensor((None, 1), INT32), W], {}, "nn.embed: ids is [?, 1] i32, expected rank 1"),
    (nn.embed, [Tensor((None,), FP32), W], {}, "nn.embed: ids is [?] f32, expected [?] i32"),
    (nn.embed, [ROWS, Tensor((5, 3), INT32)], {}, "nn.embed: table is [5, 3] i32, expected [V, H] of real elements"),
    (nn.embed, [ROWS, Blocks(Tensor((5,), BF16), 2)], {}, "nn.embed: table is blocks of [5] bf16, one for 2 tokens, expected a tensor"),
    (nn.linear, [Tensor((3, 64), BF16), W], {"groups": 1, "wide": False}, "nn.linear: x is [3, 64] bf16, expected [?, K] of real elements"),
    (nn.linear, [X, Tensor((None, 64), BF16)], {"groups": 1, "wide": False},
     "nn.linear: weight is [?, 64] bf16, expected [N, K] of real elements"),
    (nn.linear, [X, W], {"groups": 3, "wide": False}, "nn.linear: groups is 3, which does not divide the 32 rows of the weight"),
    (nn.linear, [X, W], {"groups": 2, "wide": False}, "nn.linear: x is [?, 64] bf16, expected 128 columns: 2 group(s) of the weight's 64"),
    (nn.linear, [Tensor((None, 96), Q8), Tensor((32, 48), BF16)], {"groups": 2, "wide": False},
     "nn.linear: x is [?, 96] f8E4M3FN*e8m0[1x32]: a group of 48 columns cuts a scale block of 32"),
    (nn.linear, [X, W], {"groups": 1, "wide": 1}, "nn.linear: attribute wide is 1, expected true or false"),
    (nn.linear, [X, W], {"groups": 1, "wide": False, "out": INT32}, "nn.linear: the result is [?, 32] i32, expected real elements"),
    (nn.linear, [X, W], {"groups": 1, "wide": False, "out": FP8_WEIGHT},
     "nn.linear: the result is [?, 32] f8E4M3FN*e8m0[32x32]; rows can be quantized to f8E4M3FN*e8m0[1x32], f4E2M1FN*e4m3[1x16], "
     "f4E2M1FN*e8m0[1x32]"),
    (nn.rms_norm, [X, Tensor((63,), BF16)], {"epsilon": 1e-20}, "nn.rms_norm: weight is [63] bf16, expected [64] of real elements"),
    (nn.rms_norm, [X, Tensor((64,), BF16)], {"epsilon": -1.0}, "nn.rms_norm: epsilon is -1.0, expected a number at or above 0"),
    (nn.rope, [X, ROWS, TABLE], ROPE | {"heads": 3}, "nn.rope: x is [?, 64] bf16, expected 3 heads of 32 columns"),
    (nn.rope, [X, ROWS, Tensor((9, 34), FP32)], ROPE,
     "nn.rope: table is [9, 34] f32: it rotates 34 of 32 columns, expected an even part"),
    (nn.rope, [X, ROWS, Tensor((9, 3), FP32)], ROPE, "nn.rope: table is [9, 3] f32: it rotates 3 of 32 columns, expected an even part"),
    (nn.rope, [X, X, TABLE], ROPE, "nn.rope: positions is [?, 64] bf16, expected rank 1"),
    (nn.rope, [X, ROWS, TABLE], ROPE | {"width": 0}, "nn.rope: attribute width is 0, expected at least 1"),
    (nn.rope, [X, ROWS, TABLE], ROPE | {"inverse": 2}, "nn.rope: attribute inverse is 2, expected true or false"),
    (nn.quantize, [X], {}, "nn.quantize: the result is not chosen; ask for a block-scaled number with out="),
    (nn.quantize, [Tensor((None, None, 32), BF16)], {"out": Q8},
     "nn.quantize: x is [?, ?, 32] bf16, expected a ragged first axis and static others"),
    (nn.quantize, [X], {"out": BF16}, "nn.quantize: the result is bf16; ask for a block-scaled number with out="),
    (nn.quantize, [Tensor((None, 48), BF16)], {"out": Q8},
     "nn.quantize: the result is [?, 48] f8E4M3FN*e8m0[1x32]: its last axis is not a multiple of the 32 columns of one scale"),
    (nn.quantize, [Tensor((None, 64), Q8)], {"out": Q8}, "nn.quantize: x is [?, 64] f8E4M3FN*e8m0[1x32], which is block scaled already"),
    (nn.take, [Tensor((64, 64), FP8_WEIGHT), ROWS], {},
     "nn.take: x is [64, 64] f8E4M3FN*e8m0[32x32]: one scale covers several of its rows"),
    (nn.take, [Tensor((), BF16), ROWS], {}, "nn.take: x is [] bf16, expected at least one axis"),
    (nn.take, [X, Tensor((4,), INT32)], {}, "nn.take: rows is [4] i32, expected [?] i32"),
    (nn.concat, [[]], {}, "nn.concat: there are no parts, expected at least one"),
    (nn.concat, [[X, Tensor((None, 64), FP32)]], {}, "nn.concat: parts are [?, 64] bf16, [?, 64] f32, expected one type"),
    (nn.concat, [[Tensor((4, 4), BF16)]], {}, "nn.concat: parts are [4, 4] bf16, expected tensors [?, n]"),
    (nn.concat, [[Tensor((None, 48), Q8)]], {},
     "nn.concat: a part is [?, 48] f8E4M3FN*e8m0[1x32]: its columns are not whole scale blocks of 32"),
    (nn.columns, [X], {"first": 60, "count": 5}, "nn.columns: columns 60 to 64 asked for, x is [?, 64] bf16"),
    (nn.columns, [X], {"first": -1, "count": 5}, "nn.columns: columns -1 to 3 asked for, x is [?, 64] bf16"),
    (nn.columns, [X], {"first": 0, "count": 0}, "nn.columns: attribute count is 0, expected at least 1"),
    (nn.columns, [Tensor((None, 64), Q8)], {"first": 0, "count": 32},
     "nn.columns: x is [?, 64] f8E4M3FN*e8m0[1x32], expected rows that are not block scaled"),
    (nn.columns, [ROWS], {"first": 0, "count": 1}, "nn.columns: x is [?] i32, expected rank 2"),
    (nn.stack, [[ROWS, X]], {}, "nn.stack: parts are [?] i32, [?, 64] bf16, expected tensors [?]"),
]


@pytest.mark.parametrize(("op", "operands", "attributes", "sentence"), REFUSED, ids=[r[3][:60] for r in REFUSED])
def test_refused(op: Callable[..., Any], operands: list[Any], attributes: dict[str, Any], sentence: str) -> None:
    assert refusal(op, operands, **attributes) == sentence


def test_the_verifier_says_the_same_of_text() -> None:
    case = Case(nn.linear, [Tensor((None, 8), BF16), Tensor((6, 4), BF16)], groups=2, wide=False)
    said = "'nn.linear' "
    assert complaint(case, "groups = 2", "groups = 4") == said + "groups is 4, which does not divide the 6 rows of the weight"
    assert complaint(case, "wide = false", "wide = 3 : i64") == said + "attribute wide is 3, expected true or false"
    assert complaint(case, "groups = 2 : i64, ", "") == said + "has no attribute groups"
    assert complaint(case, "?x6xbf16", "?x7xbf16") == said + "result y is [?, 7] bf16, expected [?, 6] bf16"


def test_costs_count_what_is_touched() -> None:
    assert Case(nn.embed, [ROWS, Tensor((1000, 64), BF16)]).cost(5) == Cost(5 * 4 + 5 * 128, 5 * 128)
    assert Case(nn.embed, [ROWS, Tensor((1000, 64), FP8_TABLE)]).cost(5) == Cost(5 * 4 + 5 * 66, 5 * 128)
    assert Case(nn.rms_norm, [X, Tensor((64,), BF16)], epsilon=1e-20).cost(3) == Cost(3 * 128 + 128, 3 * 128, {"f32": 4 * 3 * 64})
    assert Case(nn.rope, [X, ROWS, TABLE], **ROPE).cost(3) == Cost(3 * 128 + 3 * 4 + 3 * 128, 3 * 128, {"f32": 3 * 3 * 64})
    assert Case(nn.quantize, [X], out=Q8).cost(3) == Cost(3 * 128, 3 * 66, {"f32": 3 * 3 * 64})
    assert Case(nn.take, [Tensor((None, 64), Q8), ROWS]).cost(3) == Cost(3 * 66 + 3 * 4, 3 * 66)
    assert Case(nn.concat, [[X, X]]).cost(3) == Cost(2 * 3 * 128, 3 * 256)
    assert Case(nn.columns, [X], first=5, count=7).cost(3) == Cost(3 * 14, 3 * 14)
    assert Case(nn.stack, [[ROWS, ROWS]]).cost(3) == Cost(24, 24)
