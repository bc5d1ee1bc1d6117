"""fuse-draft-draw: meaning kept to the bit on toy data, and the groups that the tiny model gets (text cases in tests/ir)."""

from collections import Counter

from tapeout.passes.fuse_draft_draw import FuseDraftDraw
from tests.passes.modules import TINY, graph, keeps_meaning, kinds


def test_keeps_meaning() -> None:
    keeps_meaning(FuseDraftDraw())


def test_groups() -> None:
    """Every token of a block; the target's own draw has its logits from the head."""
    with graph("fuse-draft-draw") as module:
        before = Counter(kinds(module))
        FuseDraftDraw().run(module)
        after = Counter(kinds(module))
    assert after - before == {"correct_draw": TINY.text.dspark_block_size}
    assert before - after == {}


def test_a_second_run_changes_nothing() -> None:
    with graph("fuse-draft-draw") as module:
        FuseDraftDraw().run(module)
        once = kinds(module)
        FuseDraftDraw().run(module)
        assert kinds(module) == once
