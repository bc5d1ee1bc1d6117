"""Kernels of a step one by one: each launched alone on the step's own data, hot and with operands in turns, against what bounds it.

Bytes and operations are the costs that the compiler stated, at the counts of the step: its rows, the entries that it sees, the experts that its
own routing hit. Of a kernel's launches one is timed, with the launches that its op puts in front, and stands for all of them: one of as many rows as
most of them have.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tapeout.runtime.artifact import Artifact, Launch
from tapeout.runtime.device import Call
from tapeout.runtime.program import Draw, LoadedPrograms, Part, StepRows
from tests.bench.gpu_floors import floor_us
from tests.bench.gpu_library import product_us
from tests.bench.gpu_timing import TURNED_BYTES, MeasuredDevice, hot_and_cold, plain_us, spans_of, timed
from tests.bench.greedy import FIRST_TEXT

OPERATIONS = ("fp4", "fp8", "bf16", "f32")
GREEDY, SAMPLED = (0.0, -1, 1.0), (0.8, 50, 0.9)
"""Temperature, top_k, top_p."""
OFFSETS, OFFSETS_VIEW = 5, re.compile(r", \[(\d+)\] i32\)")
"""Buffer of an expert product that says where each expert's pairs begin, and its view."""


def filled(programs: LoadedPrograms, rows: int, position: int, settings: tuple[float, int, float] = GREEDY) -> tuple[Part, ...]:
    """Loads a step of `rows` rows, one a sequence where there are enough slots, and runs it; the parts that it ran."""
    options = programs.artifact.manifest.options
    each = -(-rows // min(rows, options.max_sequences))
    step = StepRows()
    for slot in range(-(-rows // each)):
        count = min(each, rows - slot * each)
        tokens = [int(t) for t in np.random.default_rng(slot).integers(FIRST_TEXT, programs.vocabulary, count)]  # rows of tables far apart
        step.add(slot, position, tokens)
    ends = {slot: number for number, slot in enumerate(step.slots)}
    step.outputs += list(ends.values())[: options.max_outputs]
    step.draws += [Draw(*settings, 0, slot, position + each) for slot in list(ends)[: options.max_outputs]]
    programs.step(step, drafting=programs.has_draft)
    return parts_of(programs, rows, len(step.outputs))


def parts_of(programs: LoadedPrograms, rows: int, outputs: int) -> tuple[Part, ...]:
    """What a step of so many rows and outputs runs, drafts included."""
    bucket = programs.bucket(rows)
    parts: list[Part] = [("encoder", bucket), ("decoder", bucket), ("sample", programs.bucket(outputs))]
    return (*parts, ("draft", programs.draft_bucket(outputs))) if programs.has_draft else tuple(parts)


def quantities(launch: Launch, counts: Mapping[str, float]) -> dict[str, float]:
    """Bytes and operations of a launch at run-time counts (`entries` and `experts` among them)."""
    return {
        name: sum(value * float(np.prod([counts.get(key, 1.0) for key in term.split("*") if key != "fixed"])) for term, value in terms.items())
        for name, terms in launch.cost.items()
    }


def _counts(programs: LoadedPrograms, rows: int, position: int) -> dict[str, float]:
    options, config = programs.artifact.manifest.options, programs.artifact.manifest.model.config["text_config"]
    assert isinstance(config, dict)
    outputs = min(rows, options.max_sequences)
    experts = min(int(str(config["n_routed_experts"])), rows * int(str(config["num_experts_per_tok"])))
    return {"rows": rows, "kept": rows, "outputs": outputs, "sequences": outputs, "drafts": outputs * programs.artifact.draft_block,
            "entries": position, "experts": experts}  # fmt: skip


Launches = list[tuple[Launch, Call]]


def _moved(launch: Launch, counts: Mapping[str, float]) -> float:
    cost = quantities(launch, counts)
    return cost.get("read", 0.0) + cost.get("written", 0.0)


def _typical(launches: Sequence[tuple[int, Launch]], counts: Mapping[str, float]) -> int:
    """The place of a launch of as many rows as most have, or of the most rows; the one that moves most of those."""
    rows = Counter(counts[str(launch.buffers[-1][1])] for _, launch in launches)
    most = max(rows, key=lambda count: (rows[count], count))
    return max((p for p, launch in launches if counts[str(launch.buffers[-1][1])] == most), key=lambda p: _moved(dict(launches)[p], counts))


def _is_part(launches: Launches, place: int) -> bool:
    """Whether a launch only prepares the next one: the same op's, whose cost stands on its last launch."""
    launch, _ = launches[place]
    return not launch.cost and place + 1 < len(launches) and launches[place + 1][0].buffers == launch.buffers


def kernels(
    programs: LoadedPrograms, device: MeasuredDevice, rows: int, position: int, tops: Mapping[str, float | None], empty_us: float
) -> dict[str, Any]:
    """A step of `rows` rows and each of its kernels; the kernels that draw once more with sampling settings."""
    parts = filled(programs, rows, position)
    whole = device.table([call for part in parts for call in programs.calls(part)])
    step_us = 1e6 * timed(device, whole)
    table = _table(programs, device, parts, _counts(programs, rows, position), tops, empty_us)
    drawn = filled(programs, rows, position, SAMPLED)
    for row in _table(programs, device, drawn, _counts(programs, rows, position), tops, empty_us, family="draw"):
        table.append({**row, "kernel": f"{row['kernel']} sampled", "launches": 0})
    table.sort(key=lambda row: -row["cold_us"] * row["launches"])
    return {"rows": rows, "position": position, "step_us": step_us, "launches": sum(len(programs.calls(part)) for part in parts),
            "sum_cold_us": sum(r["cold_us"] * r["launches"] for r in table), "sum_hot_us": sum(r["hot_us"] * r["launches"] for r in table),
            "kernels": table}  # fmt: skip


def _table(programs: LoadedPrograms, device: MeasuredDevice, parts: Sequence[Part], counts: dict[str, float],
           tops: Mapping[str, float | None], empty_us: float, family: str | None = None) -> list[dict[str, Any]]:  # fmt: skip
    launches = [(launch, call) for part in parts for launch, call in zip(programs.launches(*part), programs.calls(part), strict=True)]
    arena = max(programs.artifact.programs[name][bucket].arena_bytes for name, bucket in _programs(programs, parts))
    spans = spans_of(programs, arena)
    groups: dict[int, list[int]] = defaultdict(list)
    for place, (launch, _) in enumerate(launches):
        if not _is_part(launches, place) and family in (None, programs.artifact.manifest.kernels[launch.kernel].family):
            groups[launch.kernel].append(place)
    chosen = {_typical([(p, launches[p][0]) for p in places], counts): len(places) for places in groups.values()}
    found, done = [], 0
    for place, times in sorted(chosen.items()):
        launch, call = launches[place]
        start = next(p for p in range(place, -1, -1) if p == 0 or not _is_part(launches, p - 1))
        device.run(device.table([replace(one, after=None) for _, one in launches[done:start]]))  # the arena is as this op finds it
        done = start
        number = launch.kernel
        kernel = programs.artifact.manifest.kernels[number]
        pairs = _pairs(device, kernel.variant, call) if kernel.family == "expert_linear" else []
        if pairs:
            counts = {**counts, "experts": float(sum(n > 0 for n in pairs))}
        calls = [replace(one, after=None) for _, one in launches[start : place + 1]]  # one after the other
        seconds = hot_and_cold(device, calls, spans, _moved(launch, counts))
        row = _row(programs.artifact, number, times, launch, call, counts, seconds)
        found.append({**_held_against(row, device, tops, empty_us, device.may_begin_early(call)), "pairs": pairs})
    return found


def _programs(programs: LoadedPrograms, parts: Sequence[Part]) -> list[tuple[str, int]]:
    from tapeout.runtime.program import ENTRY_PROGRAMS

    return [(name, bucket) for entry, bucket in parts for name in ENTRY_PROGRAMS[entry]]


def _pairs(device: MeasuredDevice, variant: str, call: Call) -> list[int]:
    """Pairs of row and expert of an expert product, by expert."""
    count = OFFSETS_VIEW.search(variant)
    if count is None:
        return []
    offsets = np.frombuffer(device.read(call.buffers[OFFSETS], 4 * int(count[1])), np.int32)
    return [int(n) for n in np.diff(offsets)]


def _row(artifact: Artifact, number: int, launches: int, launch: Launch, call: Call, counts: Mapping[str, float],
         seconds: tuple[float, float]) -> dict[str, Any]:  # fmt: skip
    kernel, cost, (hot, cold) = artifact.manifest.kernels[number], quantities(launch, counts), seconds
    binary = kernel.binary
    return {
        "kernel": kernel.symbol, "family": kernel.family, "op": kernel.op, "variant": kernel.variant, "launches": launches,
        "rows": int(counts[str(launch.buffers[-1][1])]), "grid": list(call.grid or ()), "hot_us": 1e6 * hot, "cold_us": 1e6 * cold,
        "read": cost.get("read", 0.0), "written": cost.get("written", 0.0),
        "bytes": cost.get("read", 0.0) + cost.get("written", 0.0), "operations": sum(cost.get(kind, 0.0) for kind in OPERATIONS),
        "registers": binary.registers if binary else None, "spills": binary.spills if binary else None,
        "occupancy": binary.occupancy if binary else None,
    }  # fmt: skip


def _held_against(
    row: dict[str, Any], device: MeasuredDevice, tops: Mapping[str, float | None], empty_us: float, early: bool
) -> dict[str, Any]:
    """The row with its shares of the ceilings, what no launch can beat by them, and its floor with a plain kernel that moves as many bytes, launched
    in the same way, and a library's products of its shape."""
    copy, matmul, cold, hot = tops["copy"], tops["matmul"], row["cold_us"], row["hot_us"]
    bounds = [1e6 * amount / top for amount, top in ((row["bytes"], copy), (row["operations"], matmul)) if top]
    allowed = floor_us(row, row["rows"], tops, empty_us)
    return {
        **row,
        "copy_share": 1e6 * row["bytes"] / cold / copy if copy and cold > 0 else None,
        "matmul_share": 1e6 * row["operations"] / hot / matmul if matmul and hot > 0 else None,
        "bound_us": max(bounds, default=None), "floor_us": allowed, "floor": None if allowed is None or cold <= 0 else allowed / cold,
        "plain_us": None if allowed is None else plain_us(device, row["read"], row["written"], early), "early": early,
        "library_us": None if allowed is None else product_us(row, TURNED_BYTES),
    }  # fmt: skip


def show_step(step: Mapping[str, Any], most: int) -> None:
    """A step's kernels as a table, the most expensive first."""
    print(f"\nstep of {step['rows']} rows at {step['position']}: {step['step_us']:.0f} us, {step['launches']} launches, kernels alone "
          f"{step['sum_hot_us']:.0f} us hot, {step['sum_cold_us']:.0f} us cold")  # fmt: skip
    print(f"{'kernel':34} {'n':>3} {'rows':>5} {'hot us':>8} {'cold us':>8} {'bound':>8} {'MB':>8} {'Gop':>8} {'copy %':>7} {'mm %':>6} regs occ %")
    drawn = [r for r in step["kernels"] if not r["launches"]]
    for r in [*step["kernels"][:most], *(r for r in drawn if r not in step["kernels"][:most])]:
        shares = [f"{100 * r[k]:.1f}" if r[k] is not None else "-" for k in ("copy_share", "matmul_share")]
        print(f"{r['kernel']:34} {r['launches']:3} {r['rows']:5} {r['hot_us']:8.2f} {r['cold_us']:8.2f} {r['bound_us'] or 0:8.2f} "
              f"{r['bytes'] / 1e6:8.2f} {r['operations'] / 1e9:8.3f} {shares[0]:>7} {shares[1]:>6} {r['registers'] or 0:4} "
              f"{100 * (r['occupancy'] or 0):5.0f}")  # fmt: skip
