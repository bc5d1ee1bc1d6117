"""What the assembler says about a kernel, and the checks that a build must pass: before code is emitted and after it is assembled.

Registers, spills, stack and static shared memory are read from the log of `ptxas -v`; dynamic shared memory is the compiler's own figure.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tapeout.codegen.nvidia.emit import Source
from tapeout.codegen.nvidia.facts import Chip, occupancy

SPILL_FREE = ("attend", "expert_linear", "linear", "select_entries", "select_within", "expert_gate")
"""Families on whose inner loops a step spends its time: none of their rows may spill."""
TENSOR_CORE = ("linear", "expert_linear")
WARP, WARPGROUP = 32, 128
GENERATIONS = {9: "wgmma.mma_async", 10: "tcgen05.mma"}


@dataclass(frozen=True)
class Report:
    """Facts of one assembled kernel. Bytes of spills and stack are of one thread; `instructions` counts matrix instructions by kind."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack_bytes: int
    static_shared_bytes: int
    shared_bytes: int
    threads: int
    occupancy: float
    instructions: tuple[tuple[str, int], ...]
    scaled_products: int
    tensor_columns: int


KINDS = ("wgmma.mma_async", "tcgen05.mma", "block_scale", "mma.sync", "cp.async", "bar.sync")


def report(log: str, ptx: str, chip: Chip, warps: int, shared: int, tensor_columns: int, scaled_products: int) -> Report:
    """Reads the assembler's log (bytes and counts of the one kernel in it) and the PTX text; the rest is handed on."""

    def number(pattern: str) -> int:
        found = re.search(pattern, log)
        return int(found[1]) if found else 0

    registers, threads = number(r"Used (\d+) registers"), warps * WARP
    lines = [line for line in ptx.splitlines() if not line.lstrip().startswith("//")]
    counted = tuple((kind, sum(kind in line for line in lines)) for kind in KINDS)
    return Report(registers, number(r"(\d+) bytes spill stores"), number(r"(\d+) bytes spill loads"), number(r"(\d+) bytes stack frame"),
                  number(r"(\d+) bytes smem"), shared, threads, occupancy(chip, threads, max(registers, 1), shared, tensor_columns),
                  tuple((kind, n) for kind, n in counted if n), scaled_products, tensor_columns)


def before(family: str, schedule: Mapping[str, Any], source: Source, chip: Chip) -> list[str]:
    """What a schedule row asks for that the chip cannot give, as sentences; known before anything is compiled."""
    warps, found = int(schedule["warps"]), []
    several = source.first_warps and warps % 4 == 0  # groups of warps, each of a power of two, that are multiples of four together
    if warps < 1 or (warps & (warps - 1) and not several) or warps * WARP > 1024:
        found.append(f"{family}: warps is {warps}; expected 1, 2, 4, 8, 16 or 32")
    if not 1 <= int(schedule["stages"]) <= 8:
        found.append(f"{family}: stages is {schedule['stages']}; expected 1 to 8")
    if source.largest_tile > chip.tile_elements:
        found.append(f"{family}: a tile has {source.largest_tile} elements; expected at most {chip.tile_elements}: choose smaller blocks")
    return found


def after(family: str, found: Report, chip: Chip) -> list[str]:
    """What an assembled kernel uses that it may not, as sentences."""
    wrong, counts = [], dict(found.instructions)
    total = found.shared_bytes + found.static_shared_bytes
    if total > chip.shared_bytes_per_block:
        wrong.append(f"{family}: {total} bytes of shared memory; {chip.name} gives a block {chip.shared_bytes_per_block}: "
                     "choose smaller blocks or fewer stages")
    if found.tensor_columns > chip.tensor_memory_columns:
        wrong.append(f"{family}: {found.tensor_columns} columns of tensor memory; {chip.name} has {chip.tensor_memory_columns}: "
                     "choose smaller blocks")
    if family in SPILL_FREE and found.spill_stores + found.spill_loads:
        wrong.append(f"{family}: spills {found.spill_stores} bytes; expected none: choose smaller blocks or more warps")
    if found.scaled_products and chip.scaled_products and not counts.get("block_scale"):
        wrong.append(f"{family}: {found.scaled_products} block-scaled products became BF16 ones; expected tcgen05 with block_scale: "
                     "choose 128 rows and at least 128 of K a step")
    generation = GENERATIONS[chip.capability // 10]
    if family in TENSOR_CORE and not counts.get(generation) and found.threads >= WARPGROUP and found.scaled_products:
        wrong.append(f"{family}: its products use no {generation}; choose at least 64 rows")
    return wrong
