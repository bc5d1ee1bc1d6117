"""fuse-norm-quantize: meaning kept to the bit on toy data, and the groups that the tiny model gets (text cases in tests/ir)."""

from collections import Counter

from tapeout.passes.fuse_norm_quantize import FuseNormQuantize
from tests.passes.modules import graph, keeps_meaning, kinds


def test_keeps_meaning() -> None:
    keeps_meaning(FuseNormQuantize())


def test_groups() -> None:
    """Query latents (8), which lie beside window vectors, sublayer inputs but that of the boundary layer (15), the draft's features."""
    with graph("fuse-norm-quantize") as module:
        before = Counter(kinds(module))
        FuseNormQuantize().run(module)
        after = Counter(kinds(module))
    assert after - before == {"columns_norm_quantize": 8, "norm_quantize": 16}
    assert before - after == {}


def test_a_second_run_changes_nothing() -> None:
    with graph("fuse-norm-quantize") as module:
        FuseNormQuantize().run(module)
        once = kinds(module)
        FuseNormQuantize().run(module)
        assert kinds(module) == once
