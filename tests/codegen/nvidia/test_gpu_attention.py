"""The attention benchmark's own formula is the op's meaning, and it finds the kernels that it measures; no GPU is needed."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from tapeout.codegen.nvidia.overrides.attend_sm90 import CASE
from tapeout.dialects import mla, nn
from tapeout.dialects.format import BF16, Q4_MAIN, Q8, Scaled, decode
from tapeout.dialects.state import State
from tests.bench import gpu_attention
from tests.codegen.kernels.harness import KernelCase


class Memory:
    """A device that keeps what is sent to it."""

    def __init__(self) -> None:
        self.sent = 0

    def memory(self, size, what):
        self.sent += size
        return SimpleNamespace(address=self.sent)

    def _copy_up(self, start, array, size):
        assert array.nbytes == size


def unpacked(codes):
    import ml_dtypes

    return np.stack((codes & 15, codes >> 4), -1).reshape(len(codes), -1).view(ml_dtypes.float4_e2m1fn)


@pytest.mark.parametrize("selected", [0, 9])
def test_the_formula_is_the_meaning(selected, monkeypatch):
    import ml_dtypes

    monkeypatch.setattr(gpu_attention, "PHYSICAL", 40)
    one = gpu_attention.Attention(0, "attend", 7, selected, 50)
    device = Memory()
    held = gpu_attention.caches(device)
    given = gpu_attention.inputs(device, one, held, 2, 3)
    host, views = given.host, list(CASE.operands if selected else CASE.operands[:5] + CASE.operands[8:])
    ring = State(Scaled(held.host["ring_codes"].view(ml_dtypes.float8_e4m3fn), held.host["ring_scales"], Q8.scaling))
    entries = State(Scaled(unpacked(held.host["entry_codes"]), held.host["entry_scales"].view(ml_dtypes.float8_e4m3fn), Q4_MAIN.scaling))
    lists = [entries, host["ids"], host["counts"]] if selected else []
    values = [host["q"], ring, host["window_ids"], host["window_counts"], host["sink"], *lists, host["positions"], host["table"]]
    for i, value in enumerate(values):  # lists and tables of this case's own widths
        if isinstance(value, np.ndarray) and value.ndim == 2 and i:
            views[i] = type(views[i])((views[i].shape[0] and len(value), value.shape[1]), views[i].number)
    attend = partial(mla.attend, heads=64, scale=512**-0.5)
    turn = partial(nn.rope, heads=64, width=512, offset=0, inverse=True, out=BF16)
    case = KernelCase(lambda *v: turn(attend(*v[:-2], *[None] * (10 - len(v))), *v[-2:]), views, "attend_rotate", block_heads=64, block_keys=32)
    (wanted,) = case.meaning(*values).results
    for row in range(2):
        found = gpu_attention.expected(one, held, given, row)
        np.testing.assert_allclose(found, decode(wanted)[row].reshape(64, 512), rtol=2**-7, atol=2**-8 * np.abs(found).max())


def test_kernels_are_found_by_what_they_were_built_from():
    def artifact(*variants):
        kernels = [SimpleNamespace(op=op, symbol=f"k{i}", variant=text, schedule={"block_heads": 32}) for i, (op, text) in enumerate(variants)]
        return SimpleNamespace(manifest=SimpleNamespace(kernels=kernels))

    real, small = str(CASE), str(CASE).replace("32768", "256")
    found = gpu_attention.kernels_of(artifact(("nn.rope", "[?, 4] bf16"), (CASE.op, small), (CASE.op, real)))
    assert found == [gpu_attention.Attention(2, "k2", 128, 512, 32773, 0, 2)]
    assert found[0].grid(5) == (5, 2, 1) and replace(found[0], turns=3).grid(5) == (3, 2, 1)
    assert found[0].operations(256) == 256 * 64 * 640 * 512 * 4


def test_a_kernel_is_measured_where_the_bucket_launches_it():
    def program(*numbers):
        return SimpleNamespace(launches=[SimpleNamespace(kernel=n) for n in numbers])

    artifact = SimpleNamespace(programs={"step": {1: program(0), 64: program(1, 2), 256: program(3)}, "draft": {64: program(4)}})
    assert [gpu_attention.launched(artifact, rows) for rows in (1, 2, 64, 65, 256, 4096)] == [{0, 4}, {1, 2, 4}, {1, 2, 4}, {3, 4}, {3, 4}, {3, 4}]
