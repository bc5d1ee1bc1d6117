"""verify-tile: one refused kernel per rule, each with its sentence; sound kernels pass."""

from collections.abc import Callable
from typing import Any

import pytest

from tapeout.codegen import tile_builder as t
from tapeout.codegen.verify_tile import problems, verify_tile
from tapeout.dialects._mlir import arith, ir, linalg, math, passmanager, tensor

Body = Callable[..., Any]


def _tile(shape: list[int], kind: str = "f32") -> Any:
    return t.full(shape, 1, kind)


def _add(kind: str) -> Body:
    return lambda x: arith.addf(_tile([4], kind), _tile([4], kind)) and None


def _reduce_from(start: float, maker: Any = arith.addf, axes: tuple[int, ...] = (1,)) -> Body:
    def body(x: Any) -> None:
        value = _tile([2, 4])
        init = t.full([n for d, n in enumerate([2, 4]) if d not in axes], start)
        op = linalg.ReduceOp(result=[init.type], inputs=[value], inits=[init], dimensions=list(axes))
        block = op.regions[0].blocks.append(ir.F32Type.get(), ir.F32Type.get())
        with ir.InsertionPoint(block):
            linalg.YieldOp([maker(*block.arguments)])

    return body


def _different_numbers(x: Any) -> None:
    kind = ir.RankedTensorType.get([2], ir.F32Type.get())
    arith.constant(kind, ir.DenseElementsAttr.get([ir.FloatAttr.get_f32(1.0), ir.FloatAttr.get_f32(2.0)], kind))


def _permute(x: Any) -> None:
    empty = tensor.empty([2, 3, 4], ir.F32Type.get())
    linalg.transpose(_tile([2, 4, 3]), outs=[empty], permutation=[0, 2, 1])


def _insert_two(x: Any) -> None:
    linalg.broadcast(_tile([3]), outs=[tensor.empty([2, 3, 4], ir.F32Type.get())], dimensions=[0, 2])


REFUSED: dict[str, tuple[Body, str]] = {
    "foreign op": (lambda x: math.tanh(_tile([4])) and None, "'math.tanh' is not an op of tile kernels; found math.tanh"),
    "empty tile": (
        lambda x: tensor.empty([0, 4], ir.F32Type.get()) and None,
        "'tensor.empty' has a tile tensor<0x4xf32>; tile extents are known and positive",
    ),
    "rank": (
        lambda x: tensor.empty([1, 1, 1, 1, 2], ir.F32Type.get()) and None,
        "'tensor.empty' has a tile of 5 axes; tiles have at most 4",
    ),
    "element": (
        lambda x: tensor.empty([4], ir.Type.parse("f8E5M2")) and None,
        "'tensor.empty' has a tile of f8E5M2; elements are bf16, f16, f32, f64, f8E4M3FN, i8, i16, i32, i64, i1",
    ),
    "bf16 sum": (_add("bf16"), "'arith.addf' computes on bf16; widen it first: arithmetic is done on f32, f64, i16, i32, i64, index"),
    "f64 exp": (lambda x: t.exp(_tile([4], "f64")) and None, "'math.exp' is computed in f32, found f64; cast it first"),
    "numbers": (
        _different_numbers,
        "'arith.constant' holds different numbers; a constant tile is one number, others come from a buffer or tile.iota",
    ),
    "f64 to bf16": (
        lambda x: arith.truncf(ir.RankedTensorType.get([4], ir.BF16Type.get()), _tile([4], "f64")) and None,
        "'arith.truncf' converts bf16 and f64; go through f32, the one type that targets convert with",
    ),
    "start": (_reduce_from(1.0), "'linalg.reduce' starts from another value than the neutral one; combine that afterwards"),
    "product": (
        _reduce_from(1.0, arith.mulf),
        "'linalg.reduce' combines with arith.mulf; a reduction is one of "
        "arith.addf, arith.maxnumf, arith.minnumf, arith.addi, arith.maxsi, arith.minsi",
    ),
    "two axes": (_reduce_from(0.0, axes=(0, 1)), "'linalg.reduce' removes several axes; reduce one after the other"),
    "reduced type": (
        lambda x: t.reduce(_tile([4, 4], "i16"), "add", 0) and None,
        "'linalg.reduce' reduces i16 by arith.addi; that takes i32, i64",
    ),
    "permutation": (_permute, "'linalg.transpose' permutes axes by [0, 2, 1]; only two axes are exchanged"),
    "insertion": (_insert_two, "'linalg.broadcast' inserts 2 axes; insert one after the other"),
    "mixed product": (
        lambda x: linalg.matmul(_tile([2, 2], "bf16"), _tile([2, 2], "f16"), outs=[_tile([2, 2])]) and None,
        "'linalg.matmul' multiplies bf16 by f16 into f32; both are one of bf16, f16, f32, sums are f32",
    ),
    "narrow sum": (
        lambda x: linalg.matmul(_tile([2, 2], "bf16"), _tile([2, 2], "bf16"), outs=[_tile([2, 2], "bf16")]) and None,
        "'linalg.matmul' multiplies bf16 by bf16 into bf16; both are one of bf16, f16, f32, sums are f32",
    ),
    "i32 product": (
        lambda x: linalg.matmul(_tile([2, 2], "i32"), _tile([2, 2], "i32"), outs=[_tile([2, 2], "i32")]) and None,
        "'linalg.matmul' multiplies i32 by i32 into i32; both are one of bf16, f16, f32, sums are f32",
    ),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_rule_refuses_with_its_sentence(rule: str) -> None:
    body, sentence = REFUSED[rule]
    assert problems(t.kernel("k", {"x": "f32"}, body, lambda *b: [1])) == [sentence]


def test_grid_may_only_read_counts() -> None:
    module = t.kernel("k", {"x": "i32"}, lambda x: None, lambda x: [t.cast(t.reduce(_tile([4], "i32"), "add", 0), "i32") and 1])
    assert problems(module)[-1] == (
        "'linalg.reduce' is not an op of tile grid functions, which only read counts and compute with them; found linalg.reduce"
    )


MODULES = {
    "a kernel alone": (
        "func.func @k(%x: memref<?xf32>) { return }",
        "'builtin.module' holds a kernel and its grid function, nothing else; build it with tile_builder.kernel",
    ),
    "another name": (
        "func.func @k() { return } func.func @g() -> (index, index, index) { %c = arith.constant 1 : index return %c, %c, %c "
        ": index, index, index }",
        "'func.func' is called g; the grid function of k is k_grid",
    ),
    "results": (
        "func.func @k() { return } func.func @k_grid() -> index { %c = arith.constant 1 : index return %c : index }",
        "'func.func' returns ['index']; it must return 3 index values",
    ),
    "arguments": (
        "func.func @k(%x: memref<4xf32>) { return } func.func @k_grid() -> (index, index, index) { %c = arith.constant 1 : index "
        "return %c, %c, %c : index, index, index }",
        "'func.func' takes memref<4xf32>; a kernel takes flat buffers memref<?xT> of bf16, f16, f32, f64, f8E4M3FN, i8, i16, i32, i64",
    ),
}


@pytest.mark.parametrize("rule", MODULES)
def test_module_form(rule: str) -> None:
    text, sentence = MODULES[rule]
    with ir.Context():
        assert sentence in problems(ir.Module.parse(text))


def test_pass_reports_at_the_op() -> None:
    module = t.kernel("k", {"x": "f32"}, _add("bf16"), lambda *b: [1])
    with module.context:
        manager = passmanager.PassManager("builtin.module")
        manager.add(verify_tile, "verify-tile")
        with pytest.raises(ir.MLIRError) as caught:
            manager.run(module.operation)
    assert caught.value.error_diagnostics[0].message.startswith("'arith.addf' computes on bf16")


def test_sound_kernel_has_no_problems() -> None:
    def body(x: Any, y: Any) -> None:
        v = t.View(x, [4, 32]).load([0, 0], [4, 32])
        codes, scales = t.quantize_q8(t.round_bf16(t.softplus(v)))
        t.View(y, [4, 32]).store([0, 0], t.dequantize_q8(codes, scales))

    assert problems(t.kernel("k", {"x": "f32", "y": "f32"}, body, lambda *b: [1])) == []
