"""Products of several steps: sums start at zero, whatever the accumulators held."""

import pytest

from tapeout.dialects.format import BF16, FP8_WEIGHT, Q8
from tests.codegen.ascend.harness import on_ascend, tools
from tests.codegen.kernels.harness import COMPILED
from tests.codegen.kernels.test_linear import check, fp8_weight, linear_case, numbers, quantized_rows, uneven


@pytest.mark.parametrize("block_k", [64, 128])
@pytest.mark.parametrize("k", [128, 384])
def test_block_scaled_products_of_several_steps(k, block_k):
    """Every step of a loop would add to what lies in the accumulators, the first one too."""
    tools()
    with on_ascend():
        case = linear_case(48, k, 1, Q8, FP8_WEIGHT, block_k=block_k)
        for count in (1, 17):
            check(case, COMPILED, quantized_rows(count, count, k), fp8_weight(3, 48, k), 1, BF16)


def test_plain_products_of_several_steps():
    tools()
    with on_ascend():
        check(linear_case(48, 192, 1, block_k=64), COMPILED, uneven(1, 17, 192), numbers(3, 48, 192), 1, BF16)
