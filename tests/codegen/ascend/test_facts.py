"""Chip facts: every target name of the compiler, cores by series, and the refusal of other names."""

import pytest

from tapeout.codegen.ascend.facts import CHIPS, CORE, ChipError, chip
from tapeout.runtime.device.ascend_simulator import memory


def test_every_target_name_has_its_cores():
    assert len(CHIPS) == 47
    assert {c.cube_cores for c in CHIPS.values()} == {4, 8, 28, 32, 36}
    found = chip("Ascend950DT_9592")
    assert (found.cube_cores, found.vector_cores, found.bf16_per_s, found.fp8_per_s) == (36, 72, None, 1000e12)


def test_the_cube_rate_follows_from_cores_and_clock():
    """16 x 16 x 16 multiply-adds a cycle and core in 16 bits; the quoted figure is that, rounded."""
    wanted = 32 * CORE.cube_tile**3 * 2 * CORE.clock_hz
    assert chip().bf16_per_s == pytest.approx(wanted, rel=0.01)


def test_another_name_is_refused_with_the_nearest():
    with pytest.raises(ChipError) as caught:
        chip("Ascend950PR_9588")
    assert str(caught.value).startswith("no Ascend 950 chip is called 'Ascend950PR_9588'; expected one of 47 names, nearest: Ascend950")


def test_the_simulator_holds_the_same_memories():
    """The runtime imports nothing of codegen, so it states them once more."""
    found = (memory.UNIFIED_BYTES, memory.L1_BYTES, memory.L0C_BYTES, memory.ALIGNMENT)
    assert found == (CORE.unified_bytes, CORE.l1_bytes, CORE.l0c_bytes, CORE.unified_alignment)
