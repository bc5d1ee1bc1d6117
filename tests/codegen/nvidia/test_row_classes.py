"""Every row class of a product is one kernel in other pieces: the same bits for a row, whichever bucket it is in; and each is the op's meaning.

Triton's interpreter multiplies here as tensor cores do, one step of K after another: an order of sums that differed would show.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from tapeout.codegen.kernel import Request
from tapeout.codegen.nvidia import product_schedules
from tapeout.codegen.nvidia.facts import SM90, SM100, Chip
from tapeout.codegen.nvidia.overrides import expert_linear_sm90
from tapeout.codegen.nvidia.product_schedules import FEW, SOME, segments
from tapeout.codegen.select_kernels import Choice, build
from tapeout.dialects import mhc, moe, nn
from tapeout.dialects.format import BF16, FP4_WEIGHT, FP8_WEIGHT, FP32, INT32, Q8, Number, decode
from tapeout.dialects.types import Tensor
from tests.codegen.kernels.harness import INTERPRETED, TARGET, KernelCase, Target, numbers, uneven
from tests.codegen.kernels.test_experts import dispatched, expert_rows, fp4_weight
from tests.codegen.kernels.test_linear import fp8_weight, quantized_rows
from tests.codegen.kernels.test_streams import mixer_operands
from tests.codegen.nvidia import triton_interpreter
from tests.codegen.nvidia.test_emitted_kernels import run_emitted

BUCKETS = (FEW, SOME, 4 * SOME)


def _step_by_step(left: Any, right: Any, total: Any = 0.0) -> Any:
    for k in range(left.shape[1]):
        total = total + left[:, k : k + 1] * right[k : k + 1]
    return total


def _product(self: Any, a: Any, b: Any, acc: Any, precision: Any, imprecise: Any) -> Any:
    total = _step_by_step(triton_interpreter._decoded(a), triton_interpreter._decoded(b), np.array(acc.data, np.float32))
    return triton_interpreter.interpreter.TensorHandle(total, acc.dtype.scalar)


@pytest.fixture
def ordered_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_interpreter.interpreter.InterpreterBuilder, "create_dot", _product)
    monkeypatch.setattr(np, "matmul", _step_by_step)  # what block-scaled products of the interpreter call
    monkeypatch.setattr(product_schedules, "LEAST_OF_SMALL", 128)  # small shapes have segments too


def _case(make: Callable[[], KernelCase], chip: Chip, rows: int) -> KernelCase:
    def schedule(family: str, request: Request) -> Any:
        row = product_schedules.mixer(request, chip) if family == "mixer" else {}
        return product_schedules.for_bucket(family, request, row, rows, chip)

    token = TARGET.set(Target(schedule, run_emitted, (5,)))
    try:
        return make()
    finally:
        TARGET.reset(token)


def _same_in_all_classes(make: Callable[[], KernelCase], chip: Chip, given: Any, buckets: Sequence[int] = BUCKETS, **more: Any) -> list[KernelCase]:
    cases = [_case(make, chip, rows) for rows in buckets]
    first, *others = [list(case.run(INTERPRETED, *given, **more)) for case in cases]
    for found in others:
        for one, other in zip(first, found, strict=True):
            np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))
    assert len({(case.kernel.order, tuple(case.kernel.layouts.items())) for case in cases}) == 1
    return cases


@pytest.mark.usefixtures("ordered_products")
@pytest.mark.parametrize("chip", [SM90, SM100], ids=lambda chip: chip.name)
@pytest.mark.parametrize(("n", "k", "groups", "kinds"), [
    (256, 512, 1, "q8 fp8"), (128, 256, 2, "bf16 fp8"), (64, 384, 1, "bf16 bf16"), (96, 256, 1, "q8 fp8"), (40, 96, 1, "bf16 bf16"),
    (32, 512, 1, "bf16 bf16")])  # fmt: skip
def test_linear_layers(n: int, k: int, groups: int, kinds: str, chip: Chip):
    rows, weights = kinds.split()
    views = [Tensor((None, k * groups), Q8 if rows == "q8" else BF16), Tensor((n, k), FP8_WEIGHT if weights == "fp8" else BF16)]
    weight = fp8_weight(3, n, k) if weights == "fp8" else numbers(3, n, k)
    x = quantized_rows(1, 5, k * groups) if rows == "q8" else uneven(1, 5, k * groups)
    make = partial(KernelCase, partial(nn.linear, groups=groups, wide=True, out=FP32), views)
    cases = _same_in_all_classes(make, chip, (x, weight))
    (wanted,) = cases[0].meaning(x, weight)
    (found,) = cases[0].run(INTERPRETED, x, weight)
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3 * float(np.abs(wanted).max()))


@pytest.mark.usefixtures("ordered_products")
def test_segments_are_of_every_class():
    """The first case above has segments: some rows add them up in a launch of their own, few (by the override) and many in the instance."""
    views = [Tensor((None, 512), Q8), Tensor((256, 512), FP8_WEIGHT)]
    few, some, many = (_case(partial(KernelCase, partial(nn.linear, groups=1, wide=False, out=BF16), views), SM90, rows) for rows in BUCKETS)
    assert [len(case.kernel.before) for case in (few, some, many)] == [0, 2, 1]
    assert "then over 4 segments" in few.kernel.order and few.kernel.order == many.kernel.order


@pytest.mark.parametrize("chip", [SM90, SM100], ids=lambda chip: chip.name)
@pytest.mark.parametrize("rows", [1, 16, 64, 320, 4096])
def test_two_layers_of_the_same_rows_that_are_one_have_their_sums(rows: int, chip: Chip):
    """w1 and w3 of an expert, 2304 rows each: as one operand they have the segments, and so the bits, that each had alone."""
    def order(n: int, experts: int) -> str:
        q8, weight = Tensor((None, 5120), Q8), Tensor((n, 5120), FP8_WEIGHT)
        request = Request("nn.linear", (("groups", 1), ("wide", False)), (q8, weight), (Tensor((None, n), BF16),))
        if experts:
            views = (q8, Tensor((experts, n, 5120), FP4_WEIGHT), Tensor((None, 6), INT32), Tensor((experts + 1,), INT32))
            request = Request("moe.expert_linear", (("gathered", True),), views, (Tensor((None, 6, n), BF16),))
        family = "expert_linear" if experts else "linear"
        row = product_schedules.for_bucket(family, request, {}, rows, chip)
        return build(Choice(request, family, tuple(sorted(row.items())))).order

    assert all(order(2304, experts) == order(4608, experts) for experts in (0, 16, 384))


@pytest.mark.parametrize(("rows", "n", "split", "height"), [(128, 512, 1, 0), (256, 512, 1, 0), (4096, 512, 0, 0), (128, 32, 1, 0), (4096, 32, 1, 8)])
def test_narrow_bf16_layers_keep_their_segments_apart(rows: int, n: int, split: int, height: int):
    """Where instances were too few otherwise, or where what segments hand on is little beside x."""
    request = Request("nn.linear", (("groups", 1), ("wide", True)), (Tensor((None, 5120), BF16), Tensor((n, 5120), BF16)), (Tensor((None, n), FP32),))
    row, few = (product_schedules.linear_for(request, SM90, count) for count in (rows, 1))
    assert (row["split"], row.get("total_rows", 0)) == (split, height) and row["segments"] == few["segments"]


@pytest.mark.usefixtures("ordered_products")
@pytest.mark.parametrize("chip", [SM90, SM100], ids=lambda chip: chip.name)
@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize(("n", "out"), [(128, FP32), (256, BF16)])
def test_expert_products(n: int, out: Number, gathered: bool, chip: Chip):
    """Shapes without an override, and with: few pairs are decoded where they are multiplied, by instances of the experts that have any; of more
    each instance has one block."""
    buckets = (1, 4, *BUCKETS)
    experts, k, choices = 3, 256, 2
    views = [Tensor((None, k), Q8) if gathered else Tensor((None, choices, k), Q8), Tensor((experts, n, k), FP4_WEIGHT),
             Tensor((None, choices), INT32), Tensor((experts + 1,), INT32)]
    make = partial(KernelCase, partial(moe.expert_linear, gathered=gathered, out=out), views)
    given = expert_rows(5, k, choices, gathered), fp4_weight(3, experts, n, k), *dispatched(5, experts, choices)
    cases = _same_in_all_classes(make, chip, given, buckets)
    if chip is SM90 and n == 256:
        rows = [expert_linear_sm90.row(cases[0].request, bucket) for bucket in buckets]
        assert [(r["decoded"], r["block_n"], r["instances"]) for r in rows] == [(2, 128, 0), (2, 64, 0), *[(1, 256, 132)] * 2, (1, 128, 132)]
    (found,), (wanted,) = cases[0].run(INTERPRETED, *given), cases[0].meaning(*given)
    atol = 1e-3 if out == FP32 else 2.0**-8
    np.testing.assert_allclose(found.astype(np.float64), decode(wanted), rtol=atol, atol=atol * float(np.abs(decode(wanted)).max()))


@pytest.mark.usefixtures("ordered_products")
@pytest.mark.parametrize("chip", [SM90, SM100], ids=lambda chip: chip.name)
def test_the_mixer_adds_up_segments(chip: Chip, monkeypatch: pytest.MonkeyPatch):
    """A segment in two steps, in four, and groups of segments where sums lie in registers."""
    monkeypatch.setattr(product_schedules, "MIXER_JOINED", SOME)
    monkeypatch.setattr(product_schedules, "MIXER_SEGMENTS", 4)
    monkeypatch.setattr(product_schedules, "MIXER_GROUP", 2)
    s, h = 4, 256
    views = [Tensor((None, s, h), BF16), Tensor(((2 + s) * s, s * h), FP32), Tensor(((2 + s) * s,), FP32), Tensor((3,), FP32)]
    make = partial(KernelCase, partial(mhc.mixer, iterations=20, epsilon=1e-6, norm_epsilon=1e-6, out=(FP32,) * 3), views)
    given = mixer_operands(5, s, h)
    cases = _same_in_all_classes(make, chip, given)
    rows = [product_schedules.mixer_for(cases[0].request, chip, bucket) for bucket in BUCKETS]
    wanted = [(16, 128, 0), (64, 64, 0), (128, 64, 1)] if chip is SM90 else [(64, 64, 0), (64, 64, 0), (128, 64, 0)]
    assert [(row["block_rows"], row["block_k"], row.get("joined", 0)) for row in rows] == wanted
    for found, meant in zip(cases[0].run(INTERPRETED, *given), cases[0].meaning(*given), strict=True):
        np.testing.assert_allclose(found, meant, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("n", "k", "wanted"), [
    (5120, 8192, 8), (512, 5120, 8), (1792, 5120, 4), (5120, 2304, 2), (32768, 1280, 1), (64, 61, 1), (25600, 6144, 2)])
def test_segments_are_few_and_long(n: int, k: int, wanted: int):
    assert segments(n, k, -(-n // 64), SM90) == wanted


@pytest.mark.parametrize("n", [512, 1792])
def test_products_of_the_attentions_input_have_an_override_in_every_class(n: int):
    """Latent queries beside window vectors, and window vectors alone: one order of sums, one layout, and no plain form."""
    views = Tensor((None, 5120), Q8), Tensor((n, 5120), FP8_WEIGHT)
    request = Request("nn.linear", (("groups", 1), ("wide", False)), views, (Tensor((None, n), BF16),))
    rows = [product_schedules.linear_for(request, SM90, count) for count in (1, 16, 17, 64, 65, 128, 256, 320, 512, 4096)]
    kernels = [build(Choice(request, "linear", tuple(sorted(row.items())))) for row in rows]
    assert all(row["override"] for row in rows)
    assert len({(kernel.order, tuple(kernel.layouts.items())) for kernel in kernels}) == 1
