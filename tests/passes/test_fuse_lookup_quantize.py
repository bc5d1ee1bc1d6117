"""fuse-lookup-quantize: meaning kept to the bit on toy data, and the groups that the tiny model gets (text cases in tests/ir)."""

from collections import Counter

from tapeout.passes.fuse_lookup_quantize import FuseLookupQuantize
from tests.passes.modules import TINY, graph, keeps_meaning, kinds


def test_keeps_meaning() -> None:
    keeps_meaning(FuseLookupQuantize())


def test_groups() -> None:
    """One for each table."""
    with graph("fuse-lookup-quantize") as module:
        before = Counter(kinds(module))
        FuseLookupQuantize().run(module)
        after = Counter(kinds(module))
    assert after - before == {"lookup_quantize": len(TINY.text.engram_layer_ids)}
    assert before - after == {}


def test_a_second_run_changes_nothing() -> None:
    with graph("fuse-lookup-quantize") as module:
        FuseLookupQuantize().run(module)
        once = kinds(module)
        FuseLookupQuantize().run(module)
        assert kinds(module) == once
