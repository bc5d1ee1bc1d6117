"""What no launch of a GPU plan can beat: bytes at the chip's memory rate, operations at the rate of the unit that does them.

Bytes and operations are the launch's own costs; rates are those of the vendor (codegen/nvidia/facts.py). Nothing is charged for starts or
waiting: figures rank kernels and say what sets their limit, they promise no time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tapeout.codegen.nvidia.facts import Chip
from tapeout.runtime.artifact import EXTENTS, Program, extent_bound
from tapeout.runtime.artifact_kernels import Kernel
from tapeout.runtime.cost import evaluated, experts_touched


@dataclass(frozen=True)
class Bound:
    """Launches of one kernel in one entry point and bucket, microseconds of the worst of them by bytes and by operations."""

    entry: str
    kernel: str
    bucket: int
    launches: int
    bytes_us: float
    work_us: float
    bound_us: float
    limit: str


def bounds(
    symbols: Sequence[str], programs: Mapping[str, Mapping[Any, Program]], chip: Chip, config: Mapping[str, Any], options: Any, block: int
) -> list[Bound]:
    """Bounds of all launches in the smallest and the largest bucket, with every extent at its most and `max_context` entries visible.

    `config` is the model's text configuration, `options` has the limits of the compile, `block` is the tokens of a draft.
    """
    found: dict[tuple[str, str, int], Bound] = {}
    for entry, buckets in programs.items():
        for bucket in sorted({min(buckets, key=int), max(buckets, key=int)}, key=int):
            sizes = _sizes(entry, config, options, int(bucket), block)
            for launch in buckets[bucket].launches:
                one = _bound(entry, symbols[launch.kernel], int(bucket), evaluated(launch.cost, sizes), chip)
                key = (entry, one.kernel, one.bucket)
                found[key] = one if key not in found else _worse(found[key], one)
    return list(found.values())


def _sizes(entry: str, config: Mapping[str, Any], options: Any, bucket: int, block: int) -> dict[str, float]:
    counts = {str(name): float(extent_bound(name, bucket, options.max_sequences, options.max_outputs, block)) for name in EXTENTS}
    return {**counts, "entries": float(options.max_context), "experts": experts_hit(entry, config, counts)[0]}


def experts_hit(entry: str, config: Mapping[str, Any], counts: Mapping[str, float]) -> tuple[float, float]:
    """How many experts of a layer the rows of an entry point are expected to hit, and their share; draft stages have experts of their own."""
    of, rows = ("dspark_", counts["drafts"]) if entry == "draft" else ("", counts["rows"])
    experts = config[f"{of}n_routed_experts"]
    hit = experts_touched(experts, config[f"{of}num_experts_per_tok"])(int(rows))
    return hit, hit / experts


def _bound(entry: str, symbol: str, bucket: int, cost: dict[str, float], chip: Chip) -> Bound:
    moved = 1e6 * (cost.pop("read", 0.0) + cost.pop("written", 0.0)) / chip.bandwidth
    work = {kind: 1e6 * amount / chip.operations(kind) for kind, amount in cost.items() if amount > 0}
    total = sum(work.values())
    limit = "memory" if moved >= total else max(work, key=lambda kind: work[kind])
    return Bound(entry, symbol, bucket, 1, moved, total, max(moved, total), limit)


def _worse(first: Bound, second: Bound) -> Bound:
    """One row for launches of one kernel: the larger bound, and how many there are."""
    worse = max(first, second, key=lambda b: b.bound_us)
    return Bound(**{**asdict(worse), "launches": first.launches + second.launches})


def rows_of(found: Sequence[Bound]) -> list[tuple[object, ...]]:
    """Table rows, largest share of a program first: kernel, where, launches, microseconds by bytes and operations, the bound, what sets it."""
    return [(b.kernel, f"{b.entry} {b.bucket}", b.launches, b.bytes_us, b.work_us, b.bound_us, b.limit)
            for b in sorted(found, key=lambda b: (b.bucket, -b.bound_us * b.launches))]


COLUMNS = ("kernel", "program", "launches", "bytes", "work", "bound", "limit")


def binary_rows(kernels: Sequence[Kernel]) -> list[tuple[object, ...]]:
    """Table rows of compiled kernels: what the assembler reported, and the share of a processor's threads that can be resident."""
    return [(k.symbol, b.warps, b.registers, b.spills, b.shared_bytes, b.local_bytes, f"{100 * b.occupancy:.0f} %")
            for k in kernels if (b := k.binary) is not None]


BINARY_COLUMNS = ("kernel", "warps", "registers", "spills", "shared", "local", "occupancy")
