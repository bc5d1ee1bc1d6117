"""What the override of attention for SM90 decodes, instruction by instruction: exact values of keys, in one order for both formats.

The whole kernel's numbers come from a GPU (`python -m tests.bench.gpu attend`); its requests and its compilation are in test_overrides.py.
"""

import re
from functools import cache

import ml_dtypes
import numpy as np
import pytest

from tapeout.codegen.lower_to_tile import lower
from tapeout.codegen.nvidia.facts import SM90
from tapeout.codegen.nvidia.overrides import attend_sm90, source_for
from tapeout.codegen.select_kernels import Choice
from tests.codegen.nvidia import ptx

KEPT = 2.0**-7
PAIRS = ((0, 4), (1, 5), (2, 6), (3, 7))
"""Which columns of eight lie in a register of two, one register after another."""


@cache
def _inline(name: str, number: int) -> str:
    """One of the inline texts of a function of the template."""
    source = source_for(lower(Choice(attend_sm90.CASE, "attend", tuple(sorted(attend_sm90.ROW.items())))), SM90)
    assert source is not None
    body = re.search(rf"def {name}\(.*?(?=\n@gluon|\Z)", source.text, re.DOTALL)
    assert body is not None
    return re.findall(r'inline_asm_elementwise\(\s*"""(.*?)"""', body[0], re.DOTALL)[number]


def _numbers(pair: np.ndarray) -> np.ndarray:
    return pair.view(ml_dtypes.bfloat16).astype(np.float64).reshape(-1, 2)


@pytest.mark.parametrize("scale", [*range(0x7F), 0x80, 0x81, 0x88, 0xC0, 0xFE])
def test_fp4_keys_are_exact_with_every_scale(scale: int):
    """Two words of eight codes: each code in each place, neighbours differ; scales from the smallest subnormal to 448, and negative ones."""
    codes = (np.arange(32)[:, None] * 3 + np.arange(8) * 5) % 16
    words = (codes.astype(np.uint64) << (4 * np.arange(8, dtype=np.uint64))).sum(1).astype(np.uint32)
    (factor,) = ptx.run(_inline("_decoded_fp4", 0), [np.full(32, scale, np.uint32)], [4], 1)
    found = ptx.run(_inline("_decoded_fp4", 1), [words, factor], [4] * 4, 1)
    values = codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    times = float(np.uint8(scale).view(ml_dtypes.float8_e4m3fn)) * KEPT
    for pair, places in zip(found, PAIRS, strict=True):
        np.testing.assert_array_equal(_numbers(pair), values[:, places] * times)


@pytest.mark.parametrize("scale", [20, 100, 126, 127, 128, 200])
def test_fp8_keys_are_exact_and_lie_as_fp4_ones_do(scale: int):
    """Two words of four codes at a time: all codes but the two that are no numbers, subnormal ones included."""
    codes = np.setdiff1d(np.arange(256), (0x7F, 0xFF))[(np.arange(254)[:, None] * 7 + np.arange(8) * 31) % 254].astype(np.uint8)
    words = codes.reshape(-1).view("<u4")
    factors = np.full(words.size, max(scale - 7, 0) * 0x00800080, np.uint32)
    even, odd = ptx.run(_inline("_decoded_fp8", 0), [words, factors], [4, 4], 2)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * 2.0 ** (scale - 127) * KEPT
    found = np.stack((even, odd), -1).reshape(-1, 4)  # as they are joined
    for i, places in enumerate(PAIRS):
        np.testing.assert_array_equal(_numbers(np.ascontiguousarray(found[:, i])), values[:, places])


def test_sums_leave_in_columns_own_order():
    """Four lanes have four times eight columns of a head, two next to each other of each as the products leave them: each gets eight."""
    lane, group, half = np.ix_(np.arange(32), np.arange(4), np.arange(2))
    columns = 100 * (lane // 4) + 8 * group + lane % 4 + 4 * half  # a head and a column, as keys lie
    (found,) = ptx.run(_inline("_in_order", 0), [columns.astype(np.uint16)], [2], 8)
    np.testing.assert_array_equal(found.reshape(32, 8), 100 * (lane[:, 0] // 4) + 8 * (lane[:, 0] % 4) + np.arange(8))


def test_shares_come_in_two_pieces_as_if_each_were_rounded_alone():
    shares = np.concatenate(([0.0, 1.0, 2.0**-126, 1 - 2.0**-24], np.random.default_rng(3).random(1021))).astype(np.float32)
    high, low = ptx.run(_inline("_two_pieces", 0), [shares], [2, 2], 2)
    wanted = shares.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(high.view(ml_dtypes.bfloat16), wanted)
    np.testing.assert_array_equal(low.view(ml_dtypes.bfloat16), (shares - wanted.astype(np.float32)).astype(ml_dtypes.bfloat16))
