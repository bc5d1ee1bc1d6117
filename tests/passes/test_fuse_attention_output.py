"""fuse-attention-output: meaning kept to the bit on toy data, and the groups that the tiny model gets (text cases in tests/ir)."""

from collections import Counter

from tapeout.passes.fuse_attention_output import FuseAttentionOutput
from tests.passes.modules import graph, keeps_meaning, kinds


def test_keeps_meaning() -> None:
    keeps_meaning(FuseAttentionOutput())


def test_groups() -> None:
    """Every attention: 6 layers and 2 draft stages."""
    with graph("fuse-attention-output") as module:
        before = Counter(kinds(module))
        FuseAttentionOutput().run(module)
        after = Counter(kinds(module))
    assert after - before == {"attend_rotate": 8}
    assert before - after == {}


def test_a_second_run_changes_nothing() -> None:
    with graph("fuse-attention-output") as module:
        FuseAttentionOutput().run(module)
        once = kinds(module)
        FuseAttentionOutput().run(module)
        assert kinds(module) == once
