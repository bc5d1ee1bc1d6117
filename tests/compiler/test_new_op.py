"""A new op needs one definition: this file makes a dialect, an op and a kernel family of its own and touches nothing else.

The op gets its verifier, builder, text form, meaning, cost, documentation and passes from the declaration; its kernel is selected, compiled
and compared with the meaning like any other.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tapeout.codegen import kernel as kernels
from tapeout.codegen import tile_builder as t
from tapeout.codegen.costs import launch_cost
from tapeout.codegen.kernel import Kernel, Request, Schedule, family, width
from tapeout.codegen.row_values import bind, row_count
from tapeout.compiler import document
from tapeout.compiler.errors import ModuleRefused
from tapeout.compiler.opt import run_passes
from tapeout.dialects._mlir import ext, ir
from tapeout.dialects.define import DIALECTS, REGISTRY, Cost, Sizes, builder, cost_of, declare, moved_once, require
from tapeout.dialects.format import BF16, FP32, REAL, Array, Number, decode, encode
from tapeout.dialects.interpreter import Interpreter
from tapeout.dialects.rules import made, rows, shaped
from tapeout.dialects.text import parse, sugar, unsugar
from tapeout.dialects.types import Tensor
from tapeout.passes.define import functions, operations
from tests.codegen.kernels.harness import HOW, ROWS, KernelCase, assert_close, uneven
from tests.dialects.harness import Case, refusal


def define() -> Any:
    """Everything that a person who adds an op writes."""

    class Toy(ext.Dialect, name="toy"):
        """Ops of this test."""

    @declare
    class BlendOp(Toy.Operation, name="blend2", traits=[ext.Pure]):
        """y = amount * x + bias, rounded once.

        x [?, n], bias [n] -> [?, n].
        """

        y: ext.Result[Any]
        x: ext.Operand[Any]
        bias: ext.Operand[Any]
        amount: ir.FloatAttr

        @staticmethod
        def infer(a: Any, x: Any, bias: Any, *, out: Any) -> Tensor:
            view = rows(x, "x", 2)
            shaped(bias, "bias", view.shape[1])
            require(a.amount > 0, f"attribute amount is {a.amount}, expected above 0")
            return made(view.shape, out[0] or view.number)

        @staticmethod
        def meaning(a: Any, results: list[Tensor], x: Array, bias: Array) -> Any:
            return encode(a.amount * decode(x) + decode(bias), results[0].number)

        @staticmethod
        def cost(a: Any, operands: list[Any], results: list[Tensor], sizes: Sizes) -> Cost:
            """Two FP32 operations an element."""
            return moved_once(a, operands, results, sizes) + Cost(operations={"f32": 2 * sizes.rows * results[0].sized(0)[1]})

    @family("toy.blend2")
    def blend_rows(request: Request, schedule: Schedule) -> Kernel:
        """One row an instance."""
        n = width(request.operands[0])

        def body(*buffers: Any) -> None:
            b = bind(request, buffers)
            row = t.program_id(0)
            x = b.operands[0].load(b.rows, [row, 0], [1, n])
            bias = t.broadcast(b.operands[1].vector(n, t.index(0), n), 0, 1)
            b.results[0].store(b.rows, [row, 0], t.add(t.mul(x, request["amount"]), bias))

        return Kernel(body, lambda *b: [row_count(b)], "none")

    return SimpleNamespace(op=BlendOp, blend=builder(BlendOp), dialect=Toy, family=blend_rows)


@pytest.fixture(scope="module")
def toy() -> Iterator[Any]:
    """The op while this file runs; afterwards the registries are what they were."""
    found = define()
    yield found
    del REGISTRY["toy.blend2"]
    DIALECTS.remove(found.dialect)
    kernels._FAMILIES.pop("toy.blend2")


def views(n: int = 6, number: Number = BF16) -> list[Tensor]:
    return [Tensor((None, n), number), Tensor((n,), BF16)]


def test_builder_meaning_and_round_trip(toy: Any) -> None:
    case = Case(toy.blend, views(number=REAL), amount=0.5)
    x, bias = np.arange(12.0).reshape(2, 6), np.ones(6, np.float32)
    np.testing.assert_array_equal(case.run(x, bias), x / 2 + 1)
    assert case.results == [Tensor((None, 6), REAL)]


def test_builder_and_verifier_refuse_with_one_sentence(toy: Any) -> None:
    sentence = "attribute amount is -1.0, expected above 0"
    assert refusal(toy.blend, views(), amount=-1.0) == f"toy.blend2: {sentence}"
    case = Case(toy.blend, views(), amount=1.0)
    with pytest.raises(ModuleRefused, match=f"'toy.blend2' {sentence}"):
        run_passes(case.text.replace("1.000000e+00", "-1.000000e+00"), "")
    with pytest.raises(ModuleRefused, match=r"'toy.blend2' bias is \[7\] bf16, expected \[6\] of real elements"):
        run_passes(case.text.replace("tensor<6xbf16>", "tensor<7xbf16>"), "")
    with pytest.raises(ModuleRefused, match=r"'toy\.blend2' attribute amount is 1 : i64, expected a number with a point"):
        run_passes(case.text.replace("1.000000e+00 : f64", "1 : i64"), "")
    with pytest.raises(ModuleRefused, match=r"'toy.blend2' result y is \[\?, 7\] bf16, expected \[\?, 6\] bf16"):
        run_passes(case.text.replace("-> tensor<?x6xbf16>", "-> tensor<?x7xbf16>").replace("%0 : tensor<?x6", "%0 : tensor<?x7"), "")


def test_text_form(toy: Any) -> None:
    case = Case(toy.blend, views(), amount=1.0)
    readable = sugar(case.text)
    assert "%0 = toy.blend2(%arg0, %arg1) {amount = 1.000000e+00 : f64}" in readable
    assert unsugar(readable) == case.text
    with ir.Context():
        assert str(parse(readable)) == case.text


def test_cost(toy: Any) -> None:
    assert Case(toy.blend, views(), amount=1.0).cost(5) == Cost(5 * 6 * 2 + 6 * 2, 5 * 6 * 2, {"f32": 60})


def test_documentation(toy: Any) -> None:
    assert document.entry(REGISTRY["toy.blend2"]) == (
        "### `toy.blend2(x, bias) {amount} -> y`\n\ny = amount * x + bias, rounded once.\n\nx [?, n], bias [n] -> [?, n].\n\n"
        "Cost: Two FP32 operations an element.\n"
    )
    assert "## toy\n" in document.page()


SOURCE = """
func.func @f(%x: tensor<?x64xf64> {tapeout.extent = "rows"}, %b: tensor<64xbf16>) -> tensor<?x64xf64> {
  %0 = toy.blend2(%x, %b) {amount = 0.5 : f64, tapeout.layer = "layers.0"} : (tensor<?x64xf64>, tensor<64xbf16>) -> tensor<?x64xf64>
  %1 = toy.blend2(%0, %b) {amount = 0.5 : f64, tapeout.layer = "layers.1"} : (tensor<?x64xf64>, tensor<64xbf16>) -> tensor<?x64xf64>
  return %1 : tensor<?x64xf64>
}
"""


def test_every_pass_takes_it(toy: Any) -> None:
    """Numbers, extents, outlining, kernel choice and memory follow from the declaration and the family."""
    (text,) = run_passes(SOURCE, "verify,assign-formats,outline-layers,bucket-rows{buckets=[1 3]},select-kernels,plan-memory")
    assert text.count("func.func private") == 1 and text.count("call @f_part0(") == 2
    assert 'tapeout.kernel = "blend_rows"' in text and "tapeout.frame = [128, 384]" in text and "f64>" not in text
    with ir.Context(), ir.Location.unknown():
        module = parse(text)
        part, whole = functions(module)
        assert launch_cost(operations(part)[0], "rows")["f32"] == {"rows": 128.0}
        assert cost_of(operations(part)[0], Sizes(3)).operations == {"f32": 3 * 128}
        x, bias = encode(np.arange(128.0).reshape(2, 64), BF16), encode(np.ones(64), BF16)
        (found,) = Interpreter(whole).run(x, bias)
    np.testing.assert_array_equal(decode(found), decode(encode(decode(encode(decode(x) / 2 + 1, BF16)) / 2 + 1, BF16)))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("out", [BF16, FP32], ids=str)
def test_its_kernel_agrees_with_its_meaning(toy: Any, how: str, out: Number) -> None:
    case = KernelCase(lambda x, bias: toy.blend(x, bias, amount=0.75, out=out), views(48))
    assert case.family.name == "blend_rows"
    for count in ROWS:
        x, bias = uneven(count, count, 48), uneven(7, 48)
        (found,) = case.run(how, x, bias)
        exact = 0.75 * decode(x) + decode(bias)
        assert_close(found, exact, 2.0**-23 * (np.abs(decode(x)) + np.abs(decode(bias))), out)
