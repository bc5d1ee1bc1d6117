"""Native code against the interpreter: elementwise, reductions, ragged rows, loops, branches, memory, at sizes off every boundary."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tapeout.codegen import tile_builder as t
from tests.codegen.both import agree, compiled, kernel

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
RNG = np.random.default_rng(11)
WIDTHS = (1, 3, 7, 16, 17, 40)
FLOAT_SUM = 1e-6  # two orders of a sum of at most 300 numbers of one sign or mixed


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("width", WIDTHS)
def test_elementwise_at_odd_widths_and_ragged_rows(width: int) -> None:
    block = 5

    def body(x: Any, y: Any, out: Any, counts: Any) -> None:
        rows = t.scalar(counts, 0)
        at = [t.mul(t.program_id(0), block), 0]
        a = t.View(x, [rows, width]).load(at, [block, width])
        b = t.cast(t.View(y, [rows, width]).load(at, [block, width]), "f32")
        value = t.select(t.less(a, b), t.sub(t.mul(a, b), a), t.maximum(b, -0.25))
        t.View(out, [rows, width]).store(at, t.cast(value, "bf16"))

    module = kernel(
        {"x": "f32", "y": "bf16", "out": "bf16", "counts": "i32"},
        body,
        lambda *b: [t.ceil_div(t.scalar(b[3], 0), block)],
    )
    for rows in (0, 1, 5, 6, 7, 11):
        poisoned = np.full((rows + 3, width), np.nan, np.float32)
        poisoned[:rows] = normal(rows, width)
        out = np.zeros((rows + 3, width), BF16)
        found = agree(module, {"x": poisoned, "y": poisoned.astype(BF16), "out": out, "counts": np.array([rows], np.int32)})
        assert not np.isnan(found["out"].astype(np.float32)).any()
        assert not found["out"][rows:].astype(np.float32).any()


def test_one_block_of_97_rows_serves_every_row_count() -> None:
    def body(x: Any, out: Any, counts: Any) -> None:
        rows = t.scalar(counts, 0)
        value = t.View(x, [rows, 24]).load([0, 0], [97, 24])
        t.View(out, [rows, 24]).store([0, 0], t.mul(value, t.broadcast(t.reduce(value, "max", 1), 1, 24)))

    module = kernel({"x": "f32", "out": "f32", "counts": "i32"}, body)
    for rows in (0, 1, 5, 6, 7, 97):
        agree(
            module,
            {"x": normal(rows, 24), "out": np.zeros((rows, 24), np.float32), "counts": np.array([rows], np.int32)},
        )


@pytest.mark.parametrize("count", [0, 1, 15, 16, 37, 40])
def test_ragged_line(count: int) -> None:
    def body(x: Any, out: Any, counts: Any) -> None:
        rows = t.scalar(counts, 0)
        t.View(out, [rows]).store([0], t.mul(t.View(x, [rows]).load([0], [40]), 2.0))

    out = np.zeros(40, np.float32)
    agree(
        kernel({"x": "f32", "out": "f32", "counts": "i32"}, body),
        {"x": normal(40), "out": out, "counts": np.array([count], np.int32)},
    )


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (4, 16), (5, 17), (2, 130), (7, 300), (3, 2), (3, 4), (8, 2)])
@pytest.mark.parametrize(
    ("kind", "number"), [("add", "f32"), ("max", "f32"), ("add", "i32"), ("max", "i32"), ("min", "i32"), ("add", "i64")]
)
def test_reductions_of_both_axes(shape: tuple[int, int], kind: str, number: str) -> None:
    def body(x: Any, rows: Any, columns: Any, whole: Any) -> None:
        value = t.View(x, shape).load([0, 0], shape)
        t.View(rows, [shape[0]]).store([0], t.reduce(value, kind, 1))
        t.View(columns, [shape[1]]).store([0], t.reduce(value, kind, 0))
        t.View(whole, [1]).store([0], t.broadcast(t.reduce(t.reduce(value, kind, 0), kind, 0), 0, 1))

    dtype = {"f32": np.float32, "i32": np.int32, "i64": np.int64}[number]
    x = (normal(*shape) * 1000).astype(dtype)
    buffers = {
        "x": x,
        "rows": np.zeros(shape[0], dtype),
        "columns": np.zeros(shape[1], dtype),
        "whole": np.zeros(1, dtype),
    }
    module = kernel(dict.fromkeys(buffers, number), body)
    agree(module, buffers, FLOAT_SUM * 8 if (kind, number) == ("add", "f32") else 0)


@pytest.mark.parametrize("shape", [(2, 3, 4), (3, 5, 2), (2, 4, 32), (1, 6, 16), (3, 2, 7), (2, 8, 48)])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_reductions_of_rank_3(shape: tuple[int, ...], axis: int) -> None:
    rest = [n for d, n in enumerate(shape) if d != axis]

    def body(x: Any, out: Any) -> None:
        t.View(out, rest).store([0, 0], t.reduce(t.View(x, shape).load([0, 0, 0], shape), "add", axis))

    agree(kernel({"x": "f32", "out": "f32"}, body), {"x": normal(*shape), "out": np.zeros(rest, np.float32)}, FLOAT_SUM)


def test_a_reduction_ignores_nan_in_max() -> None:
    def body(x: Any, out: Any) -> None:
        t.View(out, [2]).store([0], t.reduce(t.View(x, [2, 70]).load([0, 0], [2, 70]), "max", 1))

    x = normal(2, 70)
    x[0, ::3] = np.nan
    agree(kernel({"x": "f32", "out": "f32"}, body), {"x": x, "out": np.zeros(2, np.float32)})


@pytest.mark.parametrize("inner", [2, 3, 4, 8, 12, 32])
def test_reshapes_and_broadcasts_of_groups(inner: int) -> None:
    groups, rows = 6, 3
    width = groups * inner

    def body(x: Any, s: Any, out: Any, flat: Any) -> None:
        scale = t.View(s, [rows, groups]).load([0, 0], [rows, groups])
        split = t.split_last(t.View(x, [rows, width]).load([0, 0], [rows, width]), inner)
        scaled = t.mul(split, t.broadcast(scale, 2, inner))
        t.View(out, [rows, width]).store([0, 0], t.merge_last(t.add(scaled, t.broadcast(t.reduce(scaled, "max", 2), -1, inner))))
        t.View(flat, [rows * groups, inner]).store([0, 0], t.merge_first(scaled))

    shapes = {"x": (rows, width), "s": (rows, groups), "out": (rows, width), "flat": (rows * groups, inner)}
    agree(kernel(dict.fromkeys(shapes, "f32"), body), {name: normal(*shape) for name, shape in shapes.items()})


@pytest.mark.parametrize("turns", [0, 1, 2, 5])
def test_carried_tiles_and_scalars(turns: int) -> None:
    """Two tiles that change places, a count, a row read each turn; a loop without turns hands on what it got."""

    def body(x: Any, out: Any, total: Any, counts: Any) -> None:
        def step(i: Any, a: Any, b: Any, s: Any) -> list[Any]:
            row = t.reduce(t.View(x, [None, 24]).load([i, 0], [1, 24]), "add", 0)
            return [b, t.add(a, row), t.add(s, i)]

        a, b, s = t.loop(0, t.scalar(counts, 0), 1, [t.full([24], 1.0), t.full([24], 2.0), 0], step)
        t.View(out, [2, 24]).store([0, 0], t.broadcast(a, 0, 1))
        t.View(out, [2, 24]).store([1, 0], t.broadcast(b, 0, 1))
        t.View(total, [1]).store([0], t.splat(s, [1]))

    buffers = {
        "x": normal(5, 24),
        "out": np.zeros((2, 24), np.float32),
        "total": np.zeros(1, np.int32),
        "counts": np.array([turns], np.int32),
    }
    agree(kernel({"x": "f32", "out": "f32", "total": "i32", "counts": "i32"}, body), buffers)


CARRIED: dict[str, Callable[..., list[Any]]] = {
    "read at other places": lambda i, a, b: [t.add(t.transpose(a), 1.0), b],
    "one reads the other": lambda i, a, b: [t.mul(a, b), t.add(b, 1.0)],
    "both read both": lambda i, a, b: [t.add(a, b), t.sub(a, b)],
    "a row's sum beside the row": lambda i, a, b: [t.sub(a, t.broadcast(t.reduce(a, "max", 1), 1, 8)), t.add(a, b)],
    "each becomes the other's transpose": lambda i, a, b: [t.transpose(b), t.transpose(a)],
    "unchanged": lambda i, a, b: [a, t.mul(b, 0.5)],
    "product into the carried sum": lambda i, a, b: [t.dot(a, b, t.mul(a, 0.5)), b],
    "product that reads the old sum": lambda i, a, b: [t.dot(a, b, t.transpose(a)), t.dot(b, a, b)],
    "chained products": lambda i, a, b: [t.dot(b, b, t.dot(b, b, a)), b],
    "old value after the product": lambda i, a, b: [t.dot(b, b, t.mul(a, 0.5)), t.add(a, b)],
    "nested loop": lambda i, a, b: [*t.loop(0, 2, 1, [a], lambda j, v: [t.dot(b, b, v)]), b],
}


@pytest.mark.parametrize("case", CARRIED)
def test_carried_tiles_are_never_read_after_they_are_written(case: str) -> None:
    def body(x: Any, out: Any) -> None:
        view, result = t.View(x, [2, 8, 8]), t.View(out, [2, 8, 8])
        tiles = t.loop(0, 3, 1, [view.load([i, 0, 0], [8, 8]) for i in (0, 1)], CARRIED[case])
        for i, value in enumerate(tiles):
            result.store([i, 0, 0], value)

    x = RNG.integers(-1, 2, (2, 8, 8)).astype(np.float32)  # sums are exact in any order
    agree(kernel({"x": "f32", "out": "f32"}, body), {"x": x, "out": np.zeros((2, 8, 8), np.float32)})


def test_values_from_before_a_write_survive_it() -> None:
    def body(x: Any, out: Any, counts: Any) -> None:
        view = t.View(x, [4, 20])
        old = view.load([0, 0], [4, 20])
        view.store([0, 0], t.add(old, 1.0))
        new = view.load([0, 0], [4, 20])

        def step(i: Any) -> None:
            view.store([0, 0], t.mul(view.load([0, 0], [4, 20]), 2.0))
            t.View(out, [None, 20]).store([t.mul(i, 4), 0], t.add(t.mul(old, 100.0), new))

        t.loop(0, t.scalar(counts, 0), 1, [], step)

    buffers = {"x": normal(4, 20), "out": np.zeros((12, 20), np.float32), "counts": np.array([3], np.int32)}
    agree(kernel({"x": "f32", "out": "f32", "counts": "i32"}, body), buffers)


@pytest.mark.parametrize("rows", [0, 1, 3, 8])
@pytest.mark.parametrize("width", [3, 16, 33])
def test_gather_and_scatter(rows: int, width: int) -> None:
    def body(x: Any, source: Any, to: Any, out: Any, counts: Any) -> None:
        valid = t.scalar(counts, 0)
        found = t.gather(x, source, 1, 8, width, row_stride=width + 2, column=1, valid=valid)
        t.scatter(t.add(found, 1.0), out, to, 0, valid, row_stride=width + 1, column=t.scalar(counts, 1))

    source = np.array([99, 4, -1, 0, 6, 6, -3, 2, 1], np.int32)
    to = np.array([3, -1, 0, 7, 5, -9, 1, 2], np.int32)
    buffers = {"x": normal(7, width + 2), "source": source, "to": to, "out": np.zeros((8, width + 1), np.float32)}
    counts = np.array([rows, 1], np.int32)
    agree(
        kernel({"x": "f32", "source": "i32", "to": "i32", "out": "f32", "counts": "i32"}, body),
        {**buffers, "counts": counts},
    )


@pytest.mark.parametrize("length", [1, 5, 16, 37, 64])
@pytest.mark.parametrize("limit", [0, 2, 5, 100])
def test_compress_store(length: int, limit: int) -> None:
    def body(x: Any, out: Any, n: Any) -> None:
        first = t.compress_store(t.iota(length), t.greater(t.View(x, [length]).load([0], [length]), 0.0), out, 2, limit)
        again = t.compress_store(t.iota(length), t.less(t.View(x, [length]).load([0], [length]), -1.0), out, t.add(first, 2), limit)
        t.View(n, [1]).store([0], t.splat(t.add(t.mul(first, 1000), again), [1]))

    buffers = {"x": normal(length), "out": np.full(140, -7, np.int32), "n": np.zeros(1, np.int32)}
    agree(kernel({"x": "f32", "out": "i32", "n": "i32"}, body), buffers)


def test_64_bit_hash() -> None:
    def body(x: Any, m: Any, out: Any) -> None:
        value, divisor = t.cast(t.View(x, [37]).load([0], [37]), "i64"), t.View(m, [37]).load([0], [37])
        mixed = t.bit_xor(t.mul(value, 76632096046245), t.mul(t.add(value, 13), 4839876093313))
        mixed = t.bit_xor(mixed, t.shr_unsigned(mixed, 33))
        results = [t.remainder(mixed, 16000057), t.remainder_unsigned(mixed, 1009), t.remainder(mixed, divisor), t.quotient(mixed, divisor),
                   t.shr(mixed, 7), t.cast(t.less_unsigned(mixed, divisor), "i64")]  # fmt: skip
        for row, result in enumerate(results):
            t.View(out, [6, 37]).store([row, 0], t.broadcast(result, 0, 1))

    x = RNG.integers(-(2**31), 2**31, 37).astype(np.int32)
    buffers = {"x": x, "m": RNG.integers(1, 2**40, 37), "out": np.zeros((6, 37), np.int64)}
    agree(kernel({"x": "i32", "m": "i64", "out": "i64"}, body), buffers)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_branches_with_and_without_results(which: int) -> None:
    def body(x: Any, out: Any, counts: Any) -> None:
        value, w = t.View(x, [3, 20]).load([0, 0], [3, 20]), t.scalar(counts, 0)
        chosen, n = t.when(t.equal(w, 0), lambda: [t.mul(value, 2.0), 5], lambda: [t.transpose(t.transpose(value)), t.add(w, 1)])
        t.View(out, [None, 20]).store([0, 0], t.add(chosen, t.cast(t.splat(n, [3, 20]), "f32")))
        t.when(t.greater(w, 1), lambda: t.View(out, [None, 20]).store([3, 0], value))

    buffers = {"x": normal(3, 20), "out": np.zeros((6, 20), np.float32), "counts": np.array([which], np.int32)}
    agree(kernel({"x": "f32", "out": "f32", "counts": "i32"}, body), buffers)


def test_conversions() -> None:
    def body(x: Any, *outs: Any) -> None:
        v = t.View(x, [19]).load([0], [19])
        whole = t.cast(t.mul(v, 1000.0), "i32")
        results = [
            *(t.mul(t.cast(v, "f64"), 3.0), t.cast(v, "f16"), t.cast(whole, "i16"), t.cast(whole, "i8"), t.cast(t.greater(v, 0.0), "i32")),
            *(t.cast(whole, "f32"), t.cast(t.cast(whole, "i64"), "i32"), t.cast(t.cast(v, "bf16"), "f16")),
        ]
        for out, result in zip(outs, results, strict=True):
            t.View(out, [19]).store([0], result)

    kinds = {"d": "f64", "h": "f16", "s": "i16", "b": "i8", "m": "i32", "f": "f32", "l": "i32", "n": "f16"}
    dtypes = {"f64": np.float64, "f16": np.float16, "i16": np.int16, "i8": np.int8, "i32": np.int32, "f32": np.float32}
    buffers = {"x": normal(19)} | {name: np.zeros(19, dtypes[kind]) for name, kind in kinds.items()}
    agree(kernel({"x": "f32", **kinds}, body), buffers)


FUNCTIONS: dict[str, tuple[Callable[[Any], Any], Callable[[np.ndarray], np.ndarray]]] = {
    "exp": (t.exp, np.exp),
    "log": (t.log, np.log),
    "log1p": (t.log1p, np.log1p),
    "sqrt": (t.sqrt, np.sqrt),
    "rsqrt": (t.rsqrt, lambda x: 1 / np.sqrt(x)),
}
EDGES = np.array(
    [0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-45, 1.1e-38, 88.72, 88.73, 89, -87.4, -103.9, -104.5, 3e38, -3e38],
    np.float32,
)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_within_two_units_in_the_last_place(name: str) -> None:
    ours, exact = FUNCTIONS[name]
    spread = RNG.integers(0, 1 << 32, 1 << 15, dtype=np.uint32).view(np.float32)
    near = np.concatenate([RNG.uniform(-110, 95, 1 << 14), 1 + RNG.uniform(-0.5, 1, 1 << 13), RNG.standard_normal(1 << 13) * 1e-3])
    x = np.resize(np.concatenate([EDGES, spread, near.astype(np.float32)]), (2048, 32)).astype(np.float32)

    def body(x: Any, y: Any) -> None:
        at = [t.mul(t.program_id(0), 64), 0]
        t.View(y, [2048, 32]).store(at, ours(t.View(x, [2048, 32]).load(at, [64, 32])))

    found = compiled(kernel({"x": "f32", "y": "f32"}, body, lambda *b: [32]), {"x": x, "y": np.zeros_like(x)})["y"]
    with np.errstate(all="ignore"):
        expected = exact(x.astype(np.float64))
        rounded = expected.astype(np.float32)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(rounded))
        plain = np.isfinite(rounded)
        np.testing.assert_array_equal(found[~plain & ~np.isnan(rounded)], rounded[~plain & ~np.isnan(rounded)])
        ulps = np.abs(found[plain].astype(np.float64) - expected[plain]) / np.spacing(np.abs(rounded[plain])).astype(np.float64)
    assert ulps.max() <= 2, (x[plain][ulps.argmax()], ulps.max())


def test_a_row_does_not_know_its_place() -> None:
    """Bits of a row are those it has alone: statistics, quantisation and products of 1 to 13 rows."""

    def body(x: Any, w: Any, out: Any, counts: Any) -> None:
        rows = t.scalar(counts, 0)
        v = t.View(x, [rows, 72]).load([0, 0], [13, 72])
        normed = t.mul(v, t.broadcast(t.rsqrt(t.reduce(t.mul(v, v), "add", 1)), 1, 72))
        t.View(out, [rows, 40]).store([0, 0], t.silu(t.dot(normed, t.View(w, [72, 40]).load([0, 0], [72, 40]))))

    module = kernel(dict.fromkeys(("x", "w", "out"), "f32") | {"counts": "i32"}, body)
    x, w = normal(13, 72), normal(72, 40)
    whole = compiled(module, {"x": x, "w": w, "out": np.zeros((13, 40), np.float32), "counts": np.array([13], np.int32)})["out"]
    for first, last in ((0, 1), (12, 13), (3, 9), (1, 6), (5, 12)):
        part = {
            "x": x[first:last].copy(),
            "w": w,
            "out": np.zeros((last - first, 40), np.float32),
            "counts": np.array([last - first], np.int32),
        }
        np.testing.assert_array_equal(compiled(module, part)["out"], whole[first:last])


def test_a_carried_tile_keeps_rows_that_only_a_later_turn_stores() -> None:
    """Turn i stores i + 1 rows of a tile that the turn before made: all its rows have to be made."""

    def body(x: Any, out: Any) -> None:
        def step(i: Any, v: Any) -> list[Any]:
            t.View(out, [None, 8]).store([t.mul(i, 4), 0], v, extent=t.add(t.mul(i, 4), t.add(i, 1)))
            return [t.add(v, 1.0)]

        t.loop(0, 4, 1, [t.View(x, [4, 8]).load([0, 0], [4, 8])], step)

    agree(kernel({"x": "f32", "out": "f32"}, body), {"x": normal(4, 8), "out": np.zeros((16, 8), np.float32)})


@pytest.mark.parametrize("which", [0, 1])
def test_an_operand_staged_in_a_branch_is_staged_again_outside(which: int) -> None:
    def body(x: Any, w: Any, out: Any, counts: Any) -> None:
        a = t.cast(t.View(x, [4, 8]).load([0, 0], [4, 8]), "f32")
        b = t.View(w, [8, 16]).load([0, 0], [8, 16])
        taken = t.equal(t.scalar(counts, 0), 1)
        (first,) = t.when(taken, lambda: [t.dot(a, b)], lambda: [t.full([4, 16], 1.0)])
        t.View(out, [4, 16]).store([0, 0], t.dot(a, b, first))

    buffers = {"x": np.ones((4, 8), BF16), "w": np.ones((8, 16), np.float32), "out": np.zeros((4, 16), np.float32)}
    module = kernel({"x": "bf16", "w": "f32", "out": "f32", "counts": "i32"}, body)
    agree(module, {**buffers, "counts": np.array([which], np.int32)})


def test_products_of_one_operand_with_different_rows() -> None:
    def body(x: Any, w: Any, few: Any, many: Any, counts: Any) -> None:
        a, b = t.View(x, [12, 8]).load([0, 0], [12, 8]), t.View(w, [8, 16]).load([0, 0], [8, 16])
        t.View(few, [None, 16]).store([0, 0], t.dot(a, b), extent=t.scalar(counts, 0))
        t.View(many, [None, 16]).store([0, 0], t.dot(a, b, t.full([12, 16], 1.0)), extent=t.scalar(counts, 1))

    arrays = {"few": np.zeros((12, 16), np.float32), "many": np.zeros((12, 16), np.float32)}
    inputs = {"x": RNG.integers(-3, 4, (12, 8)).astype(BF16), "w": RNG.integers(-3, 4, (8, 16)).astype(BF16)}
    module = kernel({"x": "bf16", "w": "bf16", "few": "f32", "many": "f32", "counts": "i32"}, body)
    agree(module, {**inputs, **arrays, "counts": np.array([1, 11], np.int32)})


@pytest.mark.parametrize("rows", [0, 3, 8])
def test_rows_that_do_not_exist_are_not_read(rows: int) -> None:
    """A ragged load whose rows are all asked for, behind a mask: the array ends where memory does."""

    def body(x: Any, ids: Any, out: Any, counts: Any) -> None:
        count = t.scalar(counts, 0)
        real = t.broadcast(t.less(t.iota(8), t.splat(count, [8])), 1, 700)
        loaded = t.View(x, [count, 700]).load([0, 0], [8, 700])
        gathered = t.gather(x, ids, 0, 8, 700, valid=count)
        t.View(out, [16, 700]).store([0, 0], t.select(real, loaded, -1.0))
        t.View(out, [16, 700]).store([8, 0], t.select(real, gathered, -2.0))

    inputs = {"x": normal(rows, 700), "ids": np.arange(rows, dtype=np.int32)[::-1].copy()}
    module = kernel({"x": "f32", "ids": "i32", "out": "f32", "counts": "i32"}, body)
    agree(module, {**inputs, "out": np.zeros((16, 700), np.float32), "counts": np.array([rows], np.int32)})
