"""The tile interpreter: what each op means on small arrays, poison that shows, and refusals."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tapeout.codegen import tile_builder as t
from tapeout.codegen.tile_interpreter import InterpreterError, grid_of, run
from tests.codegen.both import kernel


def ragged_copy(extent: int | None = None) -> Any:
    """Copies row blocks of 4 of a [rows, 3] array; the store is not ragged, so that what was not loaded shows."""

    def body(x: Any, y: Any, counts: Any) -> None:
        rows = t.scalar(counts, 0) if extent is None else extent
        tile = t.View(x, [rows, 3]).load([t.mul(t.program_id(0), 4), 0], [4, 3])
        t.View(y, [None, 3]).store([t.mul(t.program_id(0), 4), 0], tile)

    return kernel({"x": "f32", "y": "f32", "counts": "i32"}, body, lambda *b: [t.ceil_div(t.scalar(b[2], 0), 4)])


def test_rows_beyond_the_extent_are_poison() -> None:
    x, y = np.arange(15, dtype=np.float32).reshape(5, 3), np.zeros((8, 3), np.float32)
    buffers = {"x": x, "y": y, "counts": np.array([5], np.int32)}
    assert grid_of(ragged_copy(), buffers) == (2, 1, 1)
    run(ragged_copy(), buffers)
    np.testing.assert_array_equal(y[:5], x)
    assert np.isnan(y[5:]).all()


def test_integer_poison_is_the_lowest_number() -> None:
    def body(x: Any, y: Any) -> None:
        t.View(y, [4]).store([0], t.View(x, [None]).load([0], [4], extent=1))

    y = np.zeros(4, np.int32)
    run(kernel({"x": "i32", "y": "i32"}, body), {"x": np.array([7], np.int32), "y": y})
    assert y.tolist() == [7, -(2**31), -(2**31), -(2**31)]


def test_store_drops_rows_beyond_the_extent() -> None:
    def body(y: Any) -> None:
        t.View(y, [5, 2]).store([4, 0], t.full([3, 2], 9.0))

    y = np.zeros((7, 2), np.float32)
    run(kernel({"y": "f32"}, body), {"y": y})
    assert y[:, 0].tolist() == [0, 0, 0, 0, 9, 0, 0]


def test_panels_and_lower_rank_boxes() -> None:
    def body(w: Any, y: Any) -> None:
        t.View(y, [3, 4]).store([0, 0], t.View(w, [2, 5, 8], panel=4).load([1, 2, 4], [3, 4]))

    w = np.arange(80, dtype=np.int32).reshape(2, 5, 8)
    y = np.zeros((3, 4), np.int32)
    run(
        kernel({"w": "i32", "y": "i32"}, body),
        {"w": np.ascontiguousarray(w.reshape(2, 5, 2, 4).transpose(0, 2, 1, 3)), "y": y},
    )
    np.testing.assert_array_equal(y, w[1, 2:5, 4:8])


def test_gather_reads_row_0_for_negative_ids_and_scatter_drops_them() -> None:
    def body(x: Any, ids: Any, y: Any, z: Any) -> None:
        rows = t.gather(x, ids, 1, 3, 2, row_stride=4, column=1)
        t.View(y, [3, 2]).store([0, 0], rows)
        t.scatter(rows, z, ids, 1, 2, row_stride=3, column=1)

    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    y, z = np.zeros((3, 2), np.float32), np.zeros((3, 3), np.float32)
    run(
        kernel({"x": "f32", "ids": "i32", "y": "f32", "z": "f32"}, body),
        {"x": x, "ids": np.array([9, -5, 2, 1], np.int32), "y": y, "z": z},
    )
    assert y.tolist() == [[1, 2], [9, 10], [5, 6]]
    assert z.tolist() == [[0, 0, 0], [0, 0, 0], [0, 9, 10]]


def test_compress_store_counts_what_it_wrote() -> None:
    def body(x: Any, y: Any, n: Any) -> None:
        values = t.View(x, [6]).load([0], [6])
        t.View(n, [1]).store([0], t.splat(t.compress_store(values, t.greater(values, 0), y, 1, 3), [1]))

    y, n = np.zeros(5, np.int32), np.zeros(1, np.int32)
    run(
        kernel({"x": "i32", "y": "i32", "n": "i32"}, body),
        {"x": np.array([0, 5, -1, 6, 7, 8], np.int32), "y": y, "n": n},
    )
    assert (y.tolist(), n.tolist()) == ([0, 5, 6, 0, 0], [2])


def test_loop_and_branch() -> None:
    def body(y: Any, n: Any) -> None:
        count = t.scalar(n, 0)
        total, tile = t.loop(0, count, 2, [0, t.full([2], 1.0)], lambda i, s, v: [t.add(s, i), t.mul(v, 2.0)])
        (tile,) = t.when(t.greater(total, 5), lambda: [t.mul(tile, 100.0)], lambda: [tile])
        t.when(t.equal(count, 0), lambda: t.View(y, [4]).store([2], t.full([2], -1.0)))
        t.View(y, [4]).store([0], tile)

    for count, expected in ((0, [1, 1, -1, -1]), (3, [4, 4, 0, 0]), (6, [800, 800, 0, 0])):
        y = np.zeros(4, np.float32)
        run(kernel({"y": "f32", "n": "i32"}, body), {"y": y, "n": np.array([count], np.int32)})
        assert y.tolist() == expected


def test_a_store_is_seen_by_a_later_load() -> None:
    def body(x: Any, y: Any) -> None:
        view = t.View(x, [2])
        view.store([0], t.add(view.load([0], [2]), 1.0))
        t.View(y, [2]).store([0], view.load([0], [2]))

    x, y = np.zeros(2, np.float32), np.zeros(2, np.float32)
    run(kernel({"x": "f32", "y": "f32"}, body), {"x": x, "y": y})
    assert y.tolist() == [1, 1]


def test_unsigned_integers_stand_for_signed_ones() -> None:
    def body(x: Any, y: Any) -> None:
        t.View(y, [2]).store([0], t.widen_unsigned(t.View(x, [2]).load([0], [2]), "i32"))

    y = np.zeros(2, np.int32)
    run(kernel({"x": "i8", "y": "i32"}, body), {"x": np.array([200, 3], np.uint8), "y": y})
    assert y.tolist() == [200, 3]


def test_explicit_grid() -> None:
    def body(y: Any) -> None:
        at = t.add(t.mul(t.program_id(0), 3), t.program_id(1))
        t.View(y, [None]).store([at], t.splat(at, [1]))

    y = np.full(6, -1, np.int32)
    run(kernel({"y": "i32"}, body), {"y": y}, grid=(2, 2))
    assert y.tolist() == [0, 1, -1, 3, 4, -1]


REFUSED = {
    "missing": ({"x": np.zeros(8, np.float32)}, r"kernel k takes buffers \['x', 'y', 'counts'\], found \['x'\]; pass exactly those"),
    "type": ({"x": np.zeros(8), "y": np.zeros(8, np.float32), "counts": np.ones(1, np.int32)},
             "buffer x holds float64, the kernel reads float32; convert it first"),
    "strided": ({"x": np.zeros((4, 6), np.float32)[:, ::2], "y": np.zeros(8, np.float32), "counts": np.ones(1, np.int32)},
                "buffer x is not contiguous; pass a contiguous copy"),
    "short": ({"x": np.zeros(2, np.float32), "y": np.zeros(24, np.float32), "counts": np.ones(1, np.int32)},
              "tile.load reaches outside its buffer"),
    "scale": ({"x": np.zeros(8, ml_dtypes.bfloat16), "y": np.zeros(8, np.float32), "counts": np.ones(1, np.int32)},
              "buffer x holds bfloat16, the kernel reads float32; convert it first"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_buffers_are_refused(case: str) -> None:
    buffers, sentence = REFUSED[case]
    with pytest.raises(InterpreterError, match=sentence):
        run(ragged_copy(), buffers)
