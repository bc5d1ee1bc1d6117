"""fuse-query-path: meaning kept to the bit on toy data, and the groups that the tiny model gets (text cases in tests/ir)."""

from collections import Counter

from tapeout.passes.fuse_query_path import FuseQueryPath
from tests.passes.modules import graph, keeps_meaning, kinds


def test_keeps_meaning() -> None:
    keeps_meaning(FuseQueryPath())


def test_groups() -> None:
    """Window vectors of 6 layers and 2 stages beside their queries, of the stages alone in @decoder; 2 index keys, 2 entries, 3 index queries."""
    with graph("fuse-query-path") as module:
        before = Counter(kinds(module))
        FuseQueryPath().run(module)
        after = Counter(kinds(module))
    assert after - before == {"columns_norm_rope_quantize": 8, "norm_rope_quantize": 4, "rope_quantize": 5}
    assert before - after == {}


def test_a_second_run_changes_nothing() -> None:
    with graph("fuse-query-path") as module:
        FuseQueryPath().run(module)
        once = kinds(module)
        FuseQueryPath().run(module)
        assert kinds(module) == once
