"""Declarations: what an op must state, what its attributes may be, and that builder and verifier speak from one rule."""

from types import SimpleNamespace
from typing import Any

import pytest

from tapeout.compiler.errors import ModuleRefused
from tapeout.compiler.opt import DIALECTS as MODULES
from tapeout.compiler.opt import run_passes
from tapeout.dialects import nn
from tapeout.dialects._mlir import func, ir
from tapeout.dialects.define import (
    DIALECTS,
    REGISTRY,
    Cost,
    Mismatch,
    Sizes,
    as_tuple,
    attributes_of,
    builder,
    cost_of,
    declaration_of,
    declare,
    from_attribute,
    load_dialects,
    moved_once,
    operand_groups,
    signature,
    to_attribute,
    views_of,
)
from tapeout.dialects.format import BF16, FP8_WEIGHT, FP32, INT32, Q8, REAL
from tapeout.dialects.types import Blocks, Ring, Tensor, from_ir, to_ir

TEXT = """
func.func @f(%x: tensor<?x64xbf16>, %p: tensor<?xi32>, %t: tensor<9x32xf32>) -> tensor<?x64xbf16> {
  %0 = nn.rope(%x, %p, %t) {heads = 1 : i64, width = 64 : i64, offset = 0 : i64, inverse = false}
    : (tensor<?x64xbf16>, tensor<?xi32>, tensor<9x32xf32>) -> tensor<?x64xbf16>
  return %0 : tensor<?x64xbf16>
}
"""


def test_every_registered_op_is_whole() -> None:
    assert len(MODULES) >= 11
    for name, declaration in REGISTRY.items():
        assert name == declaration.cls.OPERATION_NAME  # type: ignore[attr-defined]
        assert declaration.sentence.endswith((".", ":")) and declaration.sentence[0].isprintable(), name
        assert callable(declaration.infer) and callable(declaration.meaning) and callable(declaration.cost)
        assert signature(declaration).startswith(f"{name}(")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"__doc__": "A sentence."}, "Half needs infer, meaning"),
        ({"__doc__": "A sentence.", "infer": None}, "Half needs meaning"),
        ({"infer": None, "meaning": None}, "Half needs a docstring"),
        ({}, "Half needs infer, meaning, a docstring"),
    ],
)
def test_a_half_declaration_is_refused(given: dict[str, Any], sentence: str) -> None:
    before = dict(REGISTRY)
    with pytest.raises(TypeError, match=sentence):
        declare(type("Half", (), given))
    assert before == REGISTRY


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("heads = 1 : i64, ", "", "has no attribute heads"),
        ("heads = 1 : i64", 'heads = "one"', 'attribute heads is "one", expected a whole number or boolean'),
        ("heads = 1 : i64", "heads = 1.0 : f64", "attribute heads is 1.000000e+00 : f64, expected a whole number or boolean"),
        ("heads = 1 : i64", "heads = [1]", "attribute heads is [1], expected a whole number or boolean"),
        ("heads = 1 : i64", "heads", "attribute heads is unit, expected a whole number or boolean"),
        ("heads = 1 : i64", "heads = 0 : i64", "attribute heads is 0, expected at least 1"),
        ("tensor<9x32xf32>", "tensor<9x32xi8>", "unknown element type i8; known: f64, f32, bf16, f8E4M3FN, f4E2M1FN, i32, i64"),
        ("tensor<9x32xf32>", "tensor<*xf32>", "tensor<*xf32> is neither a ranked tensor nor a state handle"),
        ("tensor<9x32xf32>", "index", "index is neither a ranked tensor nor a state handle"),
        ("tensor<9x32xf32>", "tensor<9x32xf32, 1 : i64>", "tensor encoding 1 : i64 is not #format.scaled"),
    ],
    ids=["absent", "text", "float", "list", "unit", "zero", "element", "unranked", "index", "encoding"],
)
def test_the_verifier_says_what_is_wrong(old: str, new: str, sentence: str) -> None:
    """An error with place and sentence, whatever stands in the text; never an exception of Python."""
    with pytest.raises(ModuleRefused) as caught:
        run_passes(TEXT.replace(old, new), "")
    assert str(caught.value) == f"[C103] module 0: loc(\"-\":3:8): 'nn.rope' {sentence}"


def test_builder_and_verifier_share_one_rule() -> None:
    with ir.Context() as context, ir.Location.unknown():
        load_dialects(context)
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            function = func.FuncOp("f", ([to_ir(Tensor((None, 60), BF16)), to_ir(Tensor((60,), BF16))], []))
            x, weight = function.add_entry_block().arguments
            with ir.InsertionPoint(function.entry_block):
                with pytest.raises(Mismatch, match=r"^nn.quantize: the result is \[\?, 60\] f8E4M3FN"):
                    nn.quantize(x, out=Q8)
                made = nn.rms_norm(x, weight, epsilon=1e-6)
                func.ReturnOp([])
        assert from_ir(made.type) == Tensor((None, 60), BF16)
        op = made.owner
        assert declaration_of(op) is REGISTRY["nn.rms_norm"] and attributes_of(op) == SimpleNamespace(epsilon=1e-6)
        assert views_of(op) == ([Tensor((None, 60), BF16), Tensor((60,), BF16)], [Tensor((None, 60), BF16)])
        assert operand_groups(op) == [x, weight]
        assert cost_of(op.opview, Sizes(2)) == Cost(2 * 120 + 120, 2 * 120, {"f32": 4 * 2 * 60})


SWIGLU = """func.func @f(%x: tensor<?x128xbf16>) -> tensor<?x64xbf16> {
  %0 = moe.swiglu(%x) {limit = 1.0 : f64SEGMENTS} : (tensor<?x128xbf16>) -> tensor<?x64xbf16>
  return %0 : tensor<?x64xbf16>
}
"""


@pytest.mark.parametrize("sizes", [None, "33, 0, 0", "2, 0, 0", "0, 1, 0", "1"])
def test_optional_operands_are_counted(sizes: str | None) -> None:
    """MLIR looks at the counts only after our verifier has read operands by them."""
    run_passes(SWIGLU.replace("SEGMENTS", ", operandSegmentSizes = array<i32: 1, 0, 0>"), "")
    with pytest.raises(ModuleRefused) as caught:
        run_passes(SWIGLU.replace("SEGMENTS", "" if sizes is None else f", operandSegmentSizes = array<i32: {sizes}>"), "")
    found = "absent" if sizes is None else f"array<i32: {sizes}>"
    assert str(caught.value).endswith(f"'moe.swiglu' attribute operandSegmentSizes is {found}, expected array<i32: ...> with 1 for each of "
                                      "x, weights, order that is there and 0 for one that is not: 1 in all")  # fmt: skip


@pytest.mark.parametrize("value", [True, False, 0, -3, 2**40, 0.5, "words", [1, 2], [], [[1.5], ["a"]]], ids=str)
def test_attributes_return(value: object) -> None:
    with ir.Context(), ir.Location.unknown():
        found = from_attribute(to_attribute(value))
    assert found == value and type(found) is type(value)


def test_attributes_without_a_form() -> None:
    with ir.Context(), ir.Location.unknown():
        with pytest.raises(TypeError, match="no attribute form for None"):
            to_attribute(None)
        with pytest.raises(TypeError, match="attribute i32 has no Python form"):
            from_attribute(ir.Attribute.parse("i32"))


VIEWS = [
    Tensor((), FP32),
    Tensor((None, 3), REAL),
    Tensor((64, 64), FP8_WEIGHT),
    Tensor((None, 64), Q8),
    Ring(Tensor((64,), Q8), 7),
    Blocks(Tensor((), INT32), 2),
]


@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_views_return(view: Any) -> None:
    with ir.Context() as context, ir.Location.unknown():
        load_dialects(context)
        assert from_ir(to_ir(view)) == view


def test_costs_add_and_default_to_one_move() -> None:
    assert Cost(1, 2, {"bf16": 3}) + Cost(10, 20, {"bf16": 30, "f32": 5}) == Cost(11, 22, {"bf16": 33, "f32": 5})
    assert moved_once(
        None, [Tensor((None, 64), Q8), None, [Tensor((2,), FP32)] * 2, Ring(Tensor((4,), FP32), 7)], [Tensor((None,), BF16)], Sizes(3)
    ) == Cost(3 * 66 + 16, 6)


def test_dialects_load_twice_and_every_op_has_one_builder() -> None:
    with ir.Context() as context, ir.Location.unknown():
        load_dialects(context)
        load_dialects(context)
    assert len(DIALECTS) == len(set(DIALECTS))
    assert builder(REGISTRY["nn.rms_norm"].cls).__name__ == "rms_norm"
    assert as_tuple(None) == () and as_tuple((1, 2)) == (1, 2) and as_tuple(3) == (3,)
