"""bucket-rows: the row buckets of a module, the only static shape a step has.

Every public function is marked with the buckets it will be planned for. A bucket bounds every ragged extent of a step; the run-time counts
below it are data. Kernels may differ between buckets, the order of their sums does not.
"""

from dataclasses import dataclass
from typing import ClassVar

from tapeout.dialects._mlir import ir
from tapeout.dialects.define import from_attribute, to_attribute
from tapeout.passes.define import Pass, PassError, Promise, functions

BUCKETS = "tapeout.buckets"
MOST_ROWS = 1 << 16


@dataclass(frozen=True)
class BucketRows(Pass):
    """Sets `tapeout.buckets` of the module: `buckets` in ascending order, the last one is the largest step."""

    name: ClassVar[str] = "bucket-rows"
    keeps: ClassVar[Promise] = "bits"
    buckets: tuple[int, ...] = (16, 128, 512)

    def run(self, module: ir.Module) -> None:
        if not self.buckets or list(self.buckets) != sorted(set(self.buckets)) or not 1 <= self.buckets[0] <= self.buckets[-1] <= MOST_ROWS:
            raise PassError(f"bucket-rows{{buckets}}: expected ascending row counts from 1 to {MOST_ROWS}, found {list(self.buckets)}")
        for function in functions(module):
            function.operation.attributes[BUCKETS] = to_attribute(list(self.buckets))


def buckets_of(module: ir.Module) -> list[int]:
    """The buckets that bucket-rows has set."""
    found = next((f.operation.attributes[BUCKETS] for f in functions(module) if BUCKETS in f.operation.attributes), None)
    if found is None:
        raise PassError("the module has no row buckets; expected pass bucket-rows in front of this one")
    return [int(b) for b in from_attribute(found)]
