"""fuse-swiglu-quantize: meaning kept to the bit on toy data, and the groups that the tiny model gets (text cases in tests/ir)."""

from collections import Counter

from tapeout.passes.fuse_swiglu_quantize import FuseSwigluQuantize
from tests.passes.modules import graph, keeps_meaning, kinds


def test_keeps_meaning() -> None:
    keeps_meaning(FuseSwigluQuantize())


def test_groups() -> None:
    """Routed and shared experts of 6 layers and 2 draft stages."""
    with graph("fuse-swiglu-quantize") as module:
        before = Counter(kinds(module))
        FuseSwigluQuantize().run(module)
        after = Counter(kinds(module))
    assert after - before == {"swiglu_quantize": 16}
    assert before - after == {}


def test_a_second_run_changes_nothing() -> None:
    with graph("fuse-swiglu-quantize") as module:
        FuseSwigluQuantize().run(module)
        once = kinds(module)
        FuseSwigluQuantize().run(module)
        assert kinds(module) == once
