"""The tile ops' own verifiers: one refused form per rule, with its sentence."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tapeout.codegen import tile_builder as t
from tapeout.dialects import tile
from tapeout.dialects._mlir import ir

Body = Callable[..., None]


def _i64(n: int) -> Any:
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), n)


def _array(*numbers: int) -> Any:
    return ir.ArrayAttr.get([_i64(n) for n in numbers])


def _load(box: list[int], at: int, shape: list[int], kind: str = "f32", extents: int = 0, panel: int = 0) -> Body:
    def body(x: Any, ids: Any) -> None:
        zero = t.index(0)
        out = ir.RankedTensorType.get(box, ir.Type.parse(kind))
        tile.LoadOp(out, x, [zero] * at, [zero] * extents, _array(*shape), _i64(panel))

    return body


def _gather(stride: int, box: list[int], swapped: bool = False) -> Body:
    def body(x: Any, ids: Any) -> None:
        zero = t.index(0)
        tile.GatherOp(ir.RankedTensorType.get(box, ir.F32Type.get()), x, x if swapped else ids, zero, zero, [], _i64(stride))

    return body


def _compress(values: list[int], mask: str = "i1", kind: str = "f32") -> Body:
    def body(x: Any, ids: Any) -> None:
        t.compress_store(t.full(values, 0, kind), t.full([4], 0, mask), x, 0, 4)

    return body


def _dot_scaled(a: list[int], sa: list[int], b: list[int], sb: list[int], scale: str = "i8") -> Body:
    def operand(shape: list[int], kind: str) -> Any:
        return t.full(shape, 1, kind)

    def body(x: Any, ids: Any) -> None:
        operands = [operand(a, "e4m3"), operand(sa, scale), operand(b, "e4m3"), operand(sb, scale)]
        t.dot_scaled(*operands)

    return body


REFUSED: dict[str, tuple[Body, str]] = {
    "element": (_load([4], 1, [4], "bf16"), "'tile.load' moves bf16 but the buffer holds f32; give them one element type"),
    "coordinates": (_load([4], 2, [4]), "'tile.load' needs one coordinate per axis: 1 axes, 2 coordinates"),
    "rank": (_load([2, 4], 1, [4]), "'tile.load' takes a box of rank 2 from an array of rank 1; the array needs at least as many axes"),
    "extents": (
        _load([4], 1, [4], extents=2),
        "'tile.load' takes at most one run-time extent, found 2; only the leading axis of the box is ragged",
    ),
    "unknown inner": (_load([2, 4], 2, [2, -1]), "'tile.load' needs known extents behind the first axis, found [2, -1]"),
    "too wide": (
        _load([4, 9], 2, [-1, 8]),
        "'tile.load' box [4, 9] is wider than the array [-1, 8]; only a ragged leading axis may reach beyond it",
    ),
    "too high": (
        _load([4, 8], 2, [3, 8]),
        "'tile.load' box [4, 8] is wider than the array [3, 8]; only a ragged leading axis may reach beyond it",
    ),
    "panel rank": (_load([16], 1, [16], panel=16), "'tile.load' panel 16 needs the last two axes of a box, both known"),
    "panel rows": (_load([4, 16], 2, [-1, 16], panel=16), "'tile.load' panel 16 needs the last two axes of a box, both known"),
    "panel columns": (
        _load([4, 8], 2, [4, 32], panel=16),
        "'tile.load' panel 16 divides neither or only one of the array's 32 and the box's 8 columns; it must divide both",
    ),
    "axis": (
        lambda x, ids: tile.ProgramIdOp(ir.IndexType.get(), _i64(4)) and None,
        "'tile.program_id' axis is 4; a grid has axes 0, 1 and 2, and 3 is the launched block",
    ),
    "iota": (
        lambda x, ids: tile.IotaOp(ir.RankedTensorType.get([4], ir.F32Type.get())) and None,
        "'tile.iota' makes a tensor<nxi32>, not tensor<4xf32>",
    ),
    "scalar": (lambda x, ids: t.scalar(x, 0) and None, "'tile.scalar' reads i32 buffers, not memref<?xf32>"),
    "gather rank": (_gather(4, [4]), "'tile.gather' moves rows of a rank 2 tile, not tensor<4xf32>"),
    "gather ids": (_gather(4, [2, 4], swapped=True), "'tile.gather' takes ids from an i32 buffer, not memref<?xf32>"),
    "gather stride": (_gather(3, [2, 4]), "'tile.gather' row_stride 3 is less than the 4 columns of the tile"),
    "scatter element": (
        lambda x, ids: t.scatter(t.full([2, 4], 0, "bf16"), x, ids, 0, 2),
        "'tile.scatter' moves bf16 but the buffer holds f32",
    ),
    "compress shapes": (_compress([5]), "'tile.compress_store' takes values and mask of one rank 1 shape, found [[5], [4]]"),
    "compress mask": (_compress([4], "i8"), "'tile.compress_store' takes an i1 mask, not tensor<4xi8>"),
    "compress element": (_compress([4], kind="i32"), "'tile.compress_store' writes i32 but the buffer holds f32"),
    "scaled shapes": (
        _dot_scaled([4, 64], [4, 1], [64, 8], [8, 2]),
        "'tile.dot_scaled' shapes disagree: 4x64 times 64x8 needs scales and sums [[4, 2], [8, 2], [4, 8], [4, 8]], "
        "found [[4, 1], [8, 2], [4, 8], [4, 8]]",
    ),
    "scaled elements": (
        _dot_scaled([4, 64], [4, 2], [64, 8], [8, 2], scale="i16"),
        "'tile.dot_scaled' takes elements ['f8E4M3FN', 'i8', 'f8E4M3FN', 'i8', 'f32', 'f32'], found "
        "['f8E4M3FN', 'i16', 'f8E4M3FN', 'i16', 'f32', 'f32']",
    ),
    "scaled operands": (
        _dot_scaled([4, 64], [4, 2], [64, 8], [8, 2]),
        "'tile.dot_scaled' takes a, sa, b and sb straight from tile.load or tile.gather",
    ),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_rule_refuses_with_its_sentence(rule: str) -> None:
    body, sentence = REFUSED[rule]
    with pytest.raises(ir.MLIRError) as caught:
        t.kernel("k", {"x": "f32", "ids": "i32"}, body, lambda *b: [1])
    assert sentence in [d.message for d in caught.value.error_diagnostics]


@pytest.mark.parametrize("computed", range(5))
def test_factors_and_scales_of_a_scaled_product_are_loaded(computed: int) -> None:
    """Whichever of the four is computed; with none the kernel is sound."""
    operands = [([4, 64], "e4m3"), ([4, 2], "i8"), ([64, 8], "e4m3"), ([8, 2], "i8")]

    def body(codes: Any, scales: Any) -> None:
        buffers = {"e4m3": codes, "i8": scales}
        given = [t.full(shape, 1, kind) if n == computed else t.View(buffers[kind], shape).load([0, 0], shape)
                 for n, (shape, kind) in enumerate(operands)]  # fmt: skip
        t.dot_scaled(*given)

    if computed == len(operands):
        t.kernel("k", {"codes": "e4m3", "scales": "i8"}, body, lambda *b: [1])
        return
    with pytest.raises(ir.MLIRError) as caught:
        t.kernel("k", {"codes": "e4m3", "scales": "i8"}, body, lambda *b: [1])
    assert [d.message for d in caught.value.error_diagnostics] == [REFUSED["scaled operands"][1]]


def test_a_packed_factor_has_its_even_codes_in_the_low_halves() -> None:
    codes = np.arange(32, dtype=np.uint8) % 16
    packed, two, one = (codes[::2] | codes[1::2] << 4).view(np.int8)[None], np.full((1, 1), 128, np.uint8), np.full((32, 1), 127, np.uint8)
    eye = np.eye(32, dtype=np.float32).astype(ml_dtypes.float8_e4m3fn)
    found = tile.DotScaledOp.meaning(packed, two.view(np.int8), eye, one.view(np.int8), np.zeros((1, 32), np.float32))
    assert found[0].tolist() == [2 * sign * n for sign in (1, -1) for n in (0, 0.5, 1, 1.5, 2, 3, 4, 6)] * 2


def test_ops_survive_text() -> None:
    def body(x: Any, ids: Any) -> None:
        view = t.View(x, [t.scalar(ids, 0), 32], 0)
        rows = t.gather(x, ids, t.program_id(1), 4, 8, row_stride=32, column=3, valid=2)
        t.scatter(rows, x, ids, 1, 3, row_stride=9)
        view.store([0, 0], view.load([1, 0], [4, 32]))
        t.compress_store(t.iota(4), t.less(t.iota(4), 2), ids, 0, 3)

    module = t.kernel("k", {"x": "f32", "ids": "i32"}, body, lambda *b: [2, t.scalar(b[1], 1)])
    with module.context:
        again = ir.Module.parse(str(module))
        assert str(again) == str(module)
        assert again.operation.verify()


def test_unused_reads_are_dropped_and_equal_ones_merged_between_writes() -> None:
    from tapeout.dialects._mlir import passmanager

    def body(x: Any, ids: Any) -> None:
        view = t.View(x, [8])
        a, b = view.load([0], [8]), view.load([0], [8])
        view.store([0], t.add(a, b))
        c = view.load([0], [8])
        view.store([0], c)
        view.load([0], [8])

    module = t.kernel("k", {"x": "f32", "ids": "i32"}, body, lambda *b: [1])
    with module.context:
        passmanager.PassManager.parse("builtin.module(cse)").run(module.operation)
    assert str(module).count("tile.load") == 2


def test_unspecified_elements_show() -> None:
    assert np.isnan(tile.unspecified([2], np.float32)).all()
    assert np.isnan(tile.unspecified([2], ml_dtypes.float8_e4m3fn).astype(np.float32)).all()
    assert (tile.unspecified([2], np.int8) == -128).all()
