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
        if not _are_buckets(self.buckets):
            raise PassError(f"bucket-rows{{buckets}}: expected ascending row counts from 1 to {MOST_ROWS}, found {list(self.buckets)}")
        for function in functions(module):
            function.operation.attributes[BUCKETS] = to_attribute(list(self.buckets))


def _are_buckets(found: object) -> bool:
    if not isinstance(found, list | tuple) or not all(type(rows) is int for rows in found):
        return False
    return list(found) == sorted(set(found)) and bool(found) and 1 <= found[0] <= found[-1] <= MOST_ROWS


def buckets_of(module: ir.Module) -> list[int]:
    """The buckets that bucket-rows has set; raises `PassError` where it has not run, or text says something else."""
    found = next((f.operation.attributes[BUCKETS] for f in functions(module) if BUCKETS in f.operation.attributes), None)
    if found is None:
        raise PassError("the module has no row buckets; expected pass bucket-rows in front of this one")
    try:
        buckets = from_attribute(found)
    except TypeError:
        buckets = None
    if not _are_buckets(buckets):
        raise PassError(f"{BUCKETS} is {found}, expected a list of ascending row counts from 1 to {MOST_ROWS}, as pass bucket-rows sets it")
    return [int(rows) for rows in buckets]
