"""fuse-collapse-norm: meaning kept to the bit on toy data, and the groups that the tiny model gets (text cases in tests/ir)."""

from collections import Counter

from tapeout.passes.fuse_collapse_norm import FuseCollapseNorm
from tests.passes.modules import graph, keeps_meaning, kinds


def test_keeps_meaning() -> None:
    keeps_meaning(FuseCollapseNorm())


def test_groups() -> None:
    """Sublayer inputs: 15 norm_quantize groups are opened; the boundary layer's and the head's norm quantize nothing."""
    with graph("fuse-collapse-norm") as module:
        before = Counter(kinds(module))
        FuseCollapseNorm().run(module)
        after = Counter(kinds(module))
    assert after - before == {"collapse_norm_quantize": 15, "collapse_norm": 2}
    assert before - after == {"norm_quantize": 15}


def test_a_second_run_changes_nothing() -> None:
    with graph("fuse-collapse-norm") as module:
        FuseCollapseNorm().run(module)
        once = kinds(module)
        FuseCollapseNorm().run(module)
        assert kinds(module) == once
