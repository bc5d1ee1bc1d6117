"""bucket-rows: every function carries the buckets (refusals in tests/ir)."""

import pytest

from tapeout.passes.bucket_rows import BucketRows, buckets_of
from tapeout.passes.define import PassError, functions
from tests.passes.modules import graph, keeps_meaning


def test_keeps_meaning() -> None:
    keeps_meaning(BucketRows())


def test_buckets_are_on_every_function() -> None:
    with graph("bucket-rows") as module:
        with pytest.raises(PassError, match="the module has no row buckets; expected pass bucket-rows in front of this one"):
            buckets_of(module)
        BucketRows((1, 17)).run(module)
        assert buckets_of(module) == [1, 17]
        assert all("tapeout.buckets" in f.operation.attributes for f in functions(module))
