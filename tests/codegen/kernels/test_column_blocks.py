"""Parts of a row's columns must be whole blocks; held blocks give the bits that re-read ones give."""

from functools import partial

import numpy as np
import pytest

from tapeout.codegen.kernel import KernelError
from tapeout.codegen.kernels.column_blocks import parts
from tapeout.dialects import nn
from tapeout.dialects.format import BF16
from tapeout.dialects.types import Tensor
from tests.codegen.kernels.harness import HOW, KernelCase, numbers


@pytest.mark.parametrize(("schedule", "extents"), [({}, []), ({"parts": 1}, []), ({"parts": 3}, [3]), ({"parts": 6}, [6])])
def test_parts_are_an_extent_of_the_grid(schedule, extents):
    assert parts(schedule, 96, 16) == extents


@pytest.mark.parametrize("count", [0, 4, 5, 12])
def test_parts_that_cut_a_block_are_refused(count):
    with pytest.raises(KernelError, match=f"parts is {count}, expected a number of parts of 96 columns that are whole blocks of 16"):
        parts({"parts": count}, 96, 16)


@pytest.mark.parametrize("how", HOW)
def test_held_rows_have_the_bits_of_rows_that_are_read_twice(how):
    x, weight = numbers(1, 7, 160), numbers(2, 160)
    build = partial(nn.rms_norm, epsilon=1e-6, out=BF16)
    found = []
    for held in (0, 1):
        case = KernelCase(build, [Tensor((None, 160), BF16), Tensor((160,), BF16)], block_rows=2, block_columns=32, held=held)
        found.append(case.run(how, x, weight).results[0].view(np.uint16))
    np.testing.assert_array_equal(*found)
