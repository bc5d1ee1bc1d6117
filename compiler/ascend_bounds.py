"""What no launch of an Ascend plan can beat: bytes at memory rate, multiply-adds at cube rate, vector operations at one a cycle and core.

Bytes are what the op must move (its cost), multiply-adds and vector operations what the lowered kernel executes for the instances of the launch
(`codegen.ascend.work`), spread evenly over the blocks. Nothing is charged for starts, flags or waiting: figures rank kernels, they promise no time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from tapeout.codegen.ascend.facts import CORE, TARGETS, Chip, chip
from tapeout.codegen.ascend.work import PRODUCTS, VECTOR
from tapeout.compiler.cache import Cache
from tapeout.compiler.driver import Planned
from tapeout.compiler.gpu_bounds import experts_hit
from tapeout.compiler.settings import Settings
from tapeout.compiler.target_ascend import AscendTarget, lowered_kernels
from tapeout.models.deepseek_v41.config import ModelConfig
from tapeout.runtime.artifact import EXTENTS, Launch, extent_bound
from tapeout.runtime.cost import evaluated

KINDS = {"bf16": "bf16", "f32": "bf16", "f8E4M3FN": "fp8"}
"""Rates by element; f32 products have no rate of their own in the facts, and run no faster than bf16."""
SHARE = "share of experts"
"""The size that says which part of an expert kernel's instances find rows; the others leave at once."""
COSTS = ("bf16", "fp8", "fp4")
"""Quantities of a launch cost that are products."""


@dataclass(frozen=True)
class Bound:
    """Launches of one kernel in one entry point and bucket, microseconds of each; None where the facts hold no rate."""

    entry: str
    kernel: str
    bucket: int
    launches: int
    instances: int
    blocks: int
    bytes_us: float | None
    cube_us: float | None
    vector_us: float
    bound_us: float
    limit: str


def bounds(planned: Planned, config: ModelConfig, settings: Settings, store: Cache) -> tuple[list[dict[str, Any]], list[Bound]]:
    """The rows of every kernel, and the bounds of its launches in the smallest and the largest bucket with `max_context` entries visible.

    Compiles what the cache does not hold. Raises what a compile for the target raises.
    """
    target = AscendTarget(settings.target)
    made, _ = lowered_kernels(planned.kernels, settings.target, store, settings.jobs, lambda symbol: None)
    facts = [made[k.symbol]["facts"] for k in planned.kernels]
    keys = ("mode", "memory", "pipes", "pipe_flags", "core_flags", "barriers", "vector_functions", "flags", "instance", "step")
    kernels = [{"symbol": k.symbol, **{key: one[key] for key in keys}} for k, one in zip(planned.kernels, facts, strict=True)]
    found: dict[tuple[str, str, int, int], Bound] = {}
    for bucket in sorted({settings.row_buckets[0], settings.row_buckets[-1]}):
        for entry, programs in planned.programs.items():
            sizes = _sizes(entry, config, settings, bucket)
            for launch in programs[str(bucket)].launches:
                kernel, rows = planned.kernels[launch.kernel], int(sizes[str(launch.buffers[-1][1])])
                one = _bound(entry, bucket, launch, kernel.symbol, target.instances(kernel, rows), facts[launch.kernel], sizes, _chip(settings))
                key = (entry, kernel.symbol, bucket, one.instances)
                found[key] = one if key not in found else _worse(found[key], one)
    return kernels, list(found.values())


def _chip(settings: Settings) -> Chip:
    return chip(TARGETS[settings.target])


def _sizes(entry: str, config: ModelConfig, settings: Settings, bucket: int) -> dict[str, float]:
    """Every extent at its most, and the experts that so many rows are expected to touch."""
    block, text = config.text.dspark_block_size, cast(dict[str, Any], config.canonical()["text_config"])
    counts = {str(n): float(extent_bound(n, bucket, settings.max_sequences, settings.outputs, block)) for n in EXTENTS}
    hit, share = experts_hit(entry, text, counts)
    return {**counts, "entries": float(settings.max_context), "experts": hit, SHARE: share}


def _worse(first: Bound, second: Bound) -> Bound:
    """One row for launches of one kernel: the larger bound, and how many there are."""
    worse = max(first, second, key=lambda b: b.bound_us)
    return Bound(**{**asdict(worse), "launches": first.launches + second.launches})


def _bound(
    entry: str, bucket: int, launch: Launch, symbol: str, instances: int, facts: Mapping[str, Any], sizes: Mapping[str, float], on: Chip
) -> Bound:
    cost = evaluated(launch.cost, sizes)
    by_expert = any("experts" in term for terms in launch.cost.values() for term in terms)
    done = _executed(facts, instances * (sizes[SHARE] if by_expert else 1.0), cost)
    assert launch.grid is not None, "launches of this target say their blocks"
    blocks = launch.grid[0]
    moved, rate = cost.get("read", 0.0) + cost.get("written", 0.0), on.memory_bytes_per_s
    times = {
        "bytes": None if rate is None else 1e6 * moved / rate,
        "cube": _cube_us(done, blocks, on),
        "vector": 1e6 * done.get(VECTOR, 0.0) / blocks / CORE.clock_hz,
    }
    limit = max(times, key=lambda name: times[name] or 0.0)
    return Bound(entry, symbol, bucket, 1, instances, blocks, times["bytes"], times["cube"], times["vector"] or 0.0, times[limit] or 0.0, limit)


def _executed(facts: Mapping[str, Any], instances: float, cost: Mapping[str, float]) -> dict[str, float]:
    """Over the instances that find work. Steps are as many as the op's multiply-adds ask for, at least one an instance."""
    step = facts["step"]
    a_step = sum(value for key, value in step.items() if key.startswith(PRODUCTS))
    wanted = sum(cost.get(kind, 0.0) for kind in COSTS) / 2
    steps = max(instances, wanted / a_step) if a_step else instances
    return {key: facts["instance"].get(key, 0) * instances + step.get(key, 0) * steps for key in {*facts["instance"], *step}}


def _cube_us(done: Mapping[str, float], blocks: int, on: Chip) -> float | None:
    """Multiply-adds of each element at its rate, on as many cube cores as there are blocks."""
    rates = {"bf16": on.bf16_per_s, "fp8": on.fp8_per_s}
    total = 0.0
    for key, value in done.items():
        if key.startswith(PRODUCTS) and value:
            rate = rates[KINDS.get(key.removeprefix(f"{PRODUCTS}."), "bf16")]
            if rate is None:
                return None
            total += 1e6 * 2 * value / (rate * min(blocks, on.cube_cores) / on.cube_cores)
    return total


def rows_of(found: Sequence[Bound]) -> list[tuple[object, ...]]:
    """Table rows: kernel, where, launches, instances, blocks, and microseconds of a launch by bytes, cube, vector; the bound and what sets it."""
    return [(b.kernel, f"{b.entry} {b.bucket}", b.launches, b.instances, b.blocks, b.bytes_us, b.cube_us, b.vector_us, b.bound_us, b.limit)
            for b in sorted(found, key=lambda b: (b.bucket, -b.bound_us * b.launches))]
