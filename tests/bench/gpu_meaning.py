"""Every kernel of an artifact against its op's meaning, on its own device: `python -m tests.bench.gpu_meaning ARTIFACT CASES`.

Steps of awkward row counts run launch by launch over random weights and states (meanings/scene.py). Before a launch that is checked, results and
the rows behind every operand's count are poisoned (NaN, then ids far out of range); behind it, rows of the first, middle and last instances
are compared with the meaning of the operands that lay there, whole rows at a time, and what lies behind the count must be as it was. Meanings
run in processes of their own. It needs the runtime, numpy and CASES (meanings/cases.py): no compiler, no checkpoint.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from tapeout.runtime.artifact import Artifact
from tapeout.runtime.artifact_set import open_artifact
from tapeout.runtime.device import open_device
from tests.bench.meanings.cases import Case, load_cases
from tests.bench.meanings.launch import Collector
from tests.bench.meanings.scene import Memory, fill_states, opened
from tests.bench.meanings.verdicts import JOBS, verdict

ROWS = (1, 2, 63, 64, 65, 257)  # and the largest bucket, and one less
POISON = (0xFF, 0x7F)  # NaN and -1; ids far behind every table


def check(
    artifact: Artifact, device: Any, cases: dict[str, Case], rows: Sequence[int], only: str | None = None, workers: int = 1
) -> list[dict[str, Any]]:
    """Verdicts on every launch that is checked in steps of these row counts, meanings in processes that inherit the data."""
    programs, tensors = opened(artifact, device)
    memory = Memory(device)
    fill_states(programs, memory)
    collector = Collector(programs, tensors, cases, memory)
    JOBS.clear()
    for number, count in enumerate(rows):
        JOBS.extend(collector.step(count, POISON[number % 2], only, last=number == len(rows) // 2))
    print(f"{len(JOBS)} launches of {len(rows)} steps to compare", flush=True)
    if workers < 2:
        return [verdict(number) for number in range(len(JOBS))]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        return pool.map(verdict, range(len(JOBS)), chunksize=1)


def row_counts(artifact: Artifact) -> list[int]:
    """Awkward ones, and the largest."""
    most = artifact.manifest.options.max_rows
    return [*(r for r in ROWS if r < most - 1), most - 1, most]


# -- the suite


def summary(verdicts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each kernel: worst error over bound, whether bit for bit everywhere, what is wrong."""
    table: dict[str, dict[str, Any]] = {}
    for v in verdicts:
        row = table.setdefault(v["kernel"], {"kernel": v["kernel"], "op": v["op"], "launches": 0, "rows": [], "ratio": 0.0, "relative": 0.0,
                                             "flips": 0, "same": True, "wrong": []})  # fmt: skip
        row["launches"] += 1
        row["rows"] = sorted({*row["rows"], v["count"]})
        for result in v["results"]:
            row["ratio"] = max(row["ratio"], result["ratio"])
            row["relative"] = max(row["relative"], result.get("relative", 0.0))
            row["flips"] += result.get("flips", 0)
            row["same"] &= result["same"]
            if result["wrong"]:
                row["wrong"].append(f"{v['count']} rows: {result['wrong']}")
    return list(table.values())


def show(table: Sequence[dict[str, Any]], kernels: int) -> int:
    """The table; returns how many kernels are wrong or were not reached."""
    print(f"{'kernel':34} {'op':32} {'error/bound':>11} {'relative':>9} {'bits':>5}")
    for row in sorted(table, key=lambda r: -r["ratio"]):
        bits = "equal" if row["same"] else f"{row['flips']} codes" if row["flips"] else "near"
        print(f"{row['kernel']:34} {row['op']:32} {row['ratio']:11.3g} {row['relative']:9.2g} {bits:>5}")
        for sentence in row["wrong"][:3]:
            print(f"    WRONG {sentence}")
    wrong = sum(bool(row["wrong"]) for row in table)
    equal = sum(row["same"] for row in table)
    print(f"{len(table)} of {kernels} kernels checked, {equal} equal bit for bit, {wrong} wrong")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """0 every kernel is inside its bound, 1 one is not."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu_meaning", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("cases", type=Path, help="what meanings.cases wrote")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", type=lambda t: [int(w) for w in t.split(",")], help="row counts; default: awkward ones and the largest")
    parser.add_argument("--only", help="kernels whose symbol begins with this")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes for meanings")
    parser.add_argument("--json", "-o", type=Path)
    given = parser.parse_args(arguments)
    artifact, started = open_artifact(given.artifact, given.device), time.perf_counter()
    device, cases = open_device(artifact, 1), load_cases(given.cases)
    verdicts = check(artifact, device, cases, given.rows or row_counts(artifact), given.only, given.workers)
    names = {k.symbol for k in artifact.manifest.kernels if given.only is None or k.symbol.startswith(given.only)}
    kernels = sum(not cases[name].part for name in names)
    table = summary(verdicts)
    wrong = show(table, kernels)
    print(f"{len(verdicts)} comparisons in {time.perf_counter() - started:.1f} s")
    if given.json:
        given.json.write_text(json.dumps({"artifact": artifact.manifest.identity, "kernels": table, "wrong": wrong}, default=float) + "\n")
    device.close()
    return 1 if wrong or len(table) < kernels else 0


if __name__ == "__main__":
    sys.exit(main())
