"""Engram: ids and hashes bit-equal (golden rows of the model's specification among them), lookups exact, the gate inside its bound."""

from functools import partial

import numpy as np
import pytest

from tapeout.codegen.kernel import KernelError
from tapeout.dialects import engram, nn
from tapeout.dialects.format import BF16, FP32, INT32, Q4_INDEX, Q8, decode
from tapeout.dialects.state import State
from tapeout.dialects.types import Ring, Tensor
from tests.codegen.kernels.harness import HOW, ROWS, KernelCase, assert_close, assert_same, gamma, numbers, uneven
from tests.codegen.kernels.test_tables import STEPS, i32, rows_of

TABLE = Tensor((None,), INT32)


@pytest.mark.parametrize("how", HOW)
def test_compress_maps_tokens(how):
    case = KernelCase(engram.compress, [TABLE, Tensor((41,), INT32)], block_rows=4)
    token_map = np.random.default_rng(1).permutation(41).astype(np.int32)
    for count in ROWS:
        ids = i32(np.arange(count) * 9 % 41)
        assert_same(case.run(how, ids, token_map), case.meaning(ids, token_map))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("depth", "length"), [(3, 8), (4, 3), (2, 1)])
def test_lookback_reads_staged_rows_then_the_ring(how, depth, length):
    history = Ring(Tensor((1,), INT32), length)
    build = partial(engram.lookback, depth=depth, pad=2, length=length, sequences=5)
    case = KernelCase(build, [history, TABLE, TABLE, TABLE], block_rows=4)
    for sequences in STEPS:
        positions, slots, starts, _ = rows_of(sequences)
        state = State((np.arange(5 * length + len(positions), dtype=np.int32) + 100)[:, None])
        assert_same(case.run(how, state, positions, slots, starts, rows=len(positions)), case.meaning(state, positions, slots, starts))


@pytest.mark.parametrize("how", HOW)
def test_hash_golden_rows(how):
    """Layers 1 and 2 of the tiny configuration (docs/model.md, appendix C)."""
    for multipliers, primes, golden in [
        ([15624748274515705, 986816876211159, 7331925616191283], [257, 263, 269, 271], [98, 290, 662, 954]),
        ([15599337840602443, 7563982961475545, 4617643475272425], [277, 281, 283, 293], [161, 495, 750, 1001]),
    ]:
        case = KernelCase(partial(engram.hash, multipliers=multipliers, primes=primes, heads=2), [Tensor((None, 3), INT32)])
        (found,) = case.run(how, np.array([[11, 7, 5]], np.int32))
        np.testing.assert_array_equal(found, [golden])


@pytest.mark.parametrize("how", HOW)
def test_hash_is_the_formula_on_large_ids(how):
    multipliers, primes = [15624748274515705, 986816876211159, 7331925616191283, 3], [16000057, 97, 3, 16000409, 1, 7]
    case = KernelCase(partial(engram.hash, multipliers=multipliers, primes=primes, heads=2), [Tensor((None, 4), INT32)], block_rows=4)
    for count in ROWS:
        lookback = np.random.default_rng(count).integers(0, 500, (count, 4)).astype(np.int32)
        assert_same(case.run(how, lookback), case.meaning(lookback))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("number", [Q8, BF16, FP32])
@pytest.mark.parametrize(("columns", "width"), [(4, 128), (3, 32), (1, 64)])
def test_lookup_decodes_rows(how, number, columns, width):
    out = FP32 if number == FP32 else BF16
    case = KernelCase(partial(engram.lookup, out=out), [Tensor((None, columns), INT32), Tensor((29, width), number)], block_rows=4)
    table = uneven(1, 29, width, number=number)
    for count in ROWS:
        ids = i32(np.arange(count * columns) * 5 % 29).reshape(count, columns)
        assert_same(case.run(how, ids, table), case.meaning(ids, table))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("most", [1, 3])
def test_lookups_of_few_instances_take_turns(how, most):
    """Of one block each, of several, of as many and of fewer blocks than instances."""
    case = KernelCase(partial(engram.lookup, out=BF16), [Tensor((None, 3), INT32), Tensor((29, 32), Q8)], block_rows=4, instances=most)
    table = uneven(1, 29, 32, number=Q8)
    for count in ROWS:
        ids = i32(np.arange(count * 3) * 5 % 29).reshape(count, 3)
        assert_same(case.run(how, ids, table), case.meaning(ids, table))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("schedule", [{}, {"instances": 3}])
@pytest.mark.parametrize("number", [Q8, BF16, FP32])
def test_lookup_quantize_is_lookup_then_quantize(how, number, schedule):
    """A table's own scales need not be those of the quantizer: a group may be far below its scale, or all of it 0."""
    def build(ids, table):
        return nn.quantize(engram.lookup(ids, table, out=BF16), out=Q8)

    case = KernelCase(build, [Tensor((None, 3), INT32), Tensor((29, 64), number)], "lookup_quantize", block_rows=4, **schedule)
    table = uneven(1, 29, 64, number=number)
    if number == Q8:
        table.codes.view(np.uint8)[::3, :32] &= 0x87  # numbers below 2^-6 of the scale alone
        table.codes.view(np.uint8)[::7, 32:] = 0
    for count in ROWS:
        ids = i32(np.arange(count * 3) * 5 % 29).reshape(count, 3)
        assert_same(case.run(how, ids, table), case.meaning(ids, table))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("s", "h", "schedule"), [(4, 96, {"block_columns": 32}), (2, 40, {}), (4, 96, {"block_columns": 32, "held": 1}),
                                           (2, 40, {"held": 1, "ahead": 1})])
def test_gate_is_the_formula(how, s, h, schedule):
    """The gate's argument is a quotient of sums: its error is gamma of its magnitude, halved by the root, quartered by the logistic."""
    views = [Tensor((None, s, h), BF16), Tensor((None, (s + 1) * h), BF16), Tensor((s, h), BF16), Tensor((s, h), BF16)]
    case = KernelCase(partial(engram.gate, norm_epsilon=1e-6, floor=1e-6, out=BF16), views, **schedule)
    real = KernelCase(partial(engram.gate, norm_epsilon=1e-6, floor=1e-6, out=FP32), views)
    q, k = numbers(5, s, h), numbers(6, s, h)
    for count in ROWS:
        x, kv = uneven(count, count, s * h).reshape(count, s, h), uneven(count + 50, count, (s + 1) * h)
        (found,), (wanted,) = case.run(how, x, kv, q, k), real.meaning(x, kv, q, k)
        value = np.abs(decode(kv))[:, None, s * h :]
        assert_close(found, decode(wanted), np.abs(decode(wanted)) * 2.0**-22 + value * 8 * gamma(h), BF16)


@pytest.mark.parametrize("how", HOW)
def test_gate_opens_upwards_at_zero(how):
    """At a dot product of zero the sign is +, so the gate is logistic(sqrt(floor)), above one half."""
    views = [Tensor((None, 1, 32), BF16), Tensor((None, 64), BF16), Tensor((1, 32), BF16), Tensor((1, 32), BF16)]
    case = KernelCase(partial(engram.gate, norm_epsilon=1e-6, floor=0.25, out=FP32), views)
    kv = np.concatenate([np.zeros((1, 32)), np.full((1, 32), 1.0)], 1)
    one = numbers(1, 1, 32)
    (found,) = case.run(how, (0 * one)[:, None], kv.astype(one.dtype), one, one)
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-0.5)), rtol=1e-6)


def test_an_fp4_table_is_refused():
    with pytest.raises(KernelError, match="this kernel reads FP8 rows with a scale per 32 columns, BF16 or FP32 rows"):
        KernelCase(partial(engram.lookup, out=BF16), [Tensor((None, 2), INT32), Tensor((29, 64), Q4_INDEX)])
