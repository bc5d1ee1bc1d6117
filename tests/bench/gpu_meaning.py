"""Every kernel of an artifact against its op's meaning, on its own device: `python -m tests.bench.gpu_meaning ARTIFACT CASES`.

Steps of awkward row counts run launch by launch over random weights and states (meanings/scene.py). Before a launch that is checked, results and
the rows behind every operand's count are poisoned (NaN, then ids far out of range); behind it, rows of the first, middle and last instances
are compared with the meaning of the operands that lay there, whole rows at a time, and what lies behind the count must be as it was. Meanings
run in processes of their own. It needs the runtime, numpy and CASES (meanings/cases.py): no compiler, no checkpoint.
"""

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from tapeout.runtime.artifact import Artifact
from tapeout.runtime.artifact_set import open_artifact
from tapeout.runtime.device import open_device
from tests.bench.gpu_acceptance import LATE
from tests.bench.meanings.cases import Case, load_cases
from tests.bench.meanings.launch import Collector, Job, Weight
from tests.bench.meanings.scene import Memory, fill_states, opened
from tests.bench.meanings.verdicts import JOBS, verdicts_of

ROWS = (1, 2, 13, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257)  # one, primes, and about blocks and buckets; then the largest bucket, and one less
WIDE = 5  # of so many steps, one does its products once more with scales far apart
SHARE = 5e8  # elements of weights from which a piece of work is large enough
NOT_IN_TIME = "not compared in time"
POISON = (0xFF, 0x7F)  # NaN and -1; ids far behind every table


def check(
    artifact: Artifact, device: Any, cases: dict[str, Case], rows: Sequence[int], only: str | None = None, workers: int = 1,
    seconds: float = math.inf,
) -> list[dict[str, Any]]:  # fmt: skip
    """Verdicts on every launch that is checked in steps of these row counts, meanings in processes that inherit the data; what is not compared
    within `seconds` counts as wrong."""
    started = time.perf_counter()
    programs, *weights = opened(artifact, device)
    memory = Memory(device)
    fill_states(programs, memory)
    collector = Collector(programs, *weights, cases, memory)
    JOBS.clear()
    for number, count in enumerate(rows):
        JOBS.extend(collector.step(count, POISON[number % 2], only, last=number == len(rows) // 2, wide=number % WIDE == 2))
    print(f"{len(JOBS)} launches of {len(rows)} steps to compare after {time.perf_counter() - started:.1f} s", flush=True)
    largest_first = sorted(_shares(), key=lambda numbers: -sum(_size(JOBS[number]) for number in numbers))
    found: dict[int, dict[str, Any]] = {}
    if workers < 2:
        found.update(pair for numbers in largest_first for pair in verdicts_of(numbers))
    else:
        with multiprocessing.get_context("fork").Pool(workers) as pool:
            answers = pool.imap_unordered(verdicts_of, largest_first, chunksize=1)
            with suppress(multiprocessing.TimeoutError):
                while len(found) < len(JOBS) and (left := started + seconds - time.perf_counter()) > 0:
                    found.update(answers.next(None if math.isinf(left) else left))
    return [found.get(number) or _not_compared(job) for number, job in enumerate(JOBS)]


def _not_compared(job: Job) -> dict[str, Any]:
    late = {"same": False, "ratio": float("inf"), "wrong": NOT_IN_TIME}
    return {"kernel": job.case.symbol, "op": job.case.op, "rows": job.rows, "count": job.count, "results": [late]}


def _shares() -> list[list[int]]:
    """The jobs in pieces of work, those of one weight together as far as a piece may be large."""
    groups: dict[tuple[str, ...], list[list[int]]] = defaultdict(lambda: [[]])
    for number, job in enumerate(JOBS):
        pieces = groups[tuple(x.operand.name for x in job.inputs if isinstance(x, Weight)) or (job.case.symbol,)]
        if sum(_size(JOBS[n]) for n in pieces[-1]) > SHARE:
            pieces.append([])
        pieces[-1].append(number)
    return [numbers for pieces in groups.values() for numbers in pieces]


def _size(job: Any) -> float:
    """About the work of a comparison: elements of its weights."""
    return 1e6 + sum(float(np.prod([n or 1 for n in x.view.shape])) for x in job.inputs if isinstance(x, Weight))


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


def show(table: Sequence[dict[str, Any]], kernels: Sequence[str]) -> int:
    """The table; returns how many kernels are wrong or were not reached."""
    print(f"{'kernel':34} {'op':32} {'error/bound':>11} {'relative':>9} {'bits':>5}")
    for row in sorted(table, key=lambda r: -r["ratio"]):
        bits = "equal" if row["same"] else f"{row['flips']} codes" if row["flips"] else "near"
        print(f"{row['kernel']:34} {row['op']:32} {row['ratio']:11.3g} {row['relative']:9.2g} {bits:>5}")
        for sentence in row["wrong"][:3]:
            print(f"    WRONG {sentence}")
    wrong = sum(bool(row["wrong"]) for row in table)
    equal, missing = sum(row["same"] for row in table), sorted({*kernels} - {row["kernel"] for row in table})
    left = f"; not checked: {', '.join(missing)}" if missing else ""
    print(f"{len(table)} of {len(kernels)} kernels checked, {equal} equal bit for bit, {wrong} wrong{left}")
    return wrong + len(missing)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 every kernel is inside its bound, 1 one is not or was not reached, 4 no time was left for some."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu_meaning", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("cases", type=Path, help="what meanings.cases wrote")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", type=lambda t: [int(w) for w in t.split(",")], help="row counts; default: awkward ones and the largest")
    parser.add_argument("--only", help="kernels whose symbol begins with this")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes for meanings")
    parser.add_argument("--seconds", type=float, default=math.inf, help="from which on nothing more is compared")
    parser.add_argument("--json", "-o", type=Path)
    given = parser.parse_args(arguments)
    artifact, started = open_artifact(given.artifact, given.device), time.perf_counter()
    device, cases = open_device(artifact, 1), load_cases(given.cases)
    verdicts = check(artifact, device, cases, given.rows or row_counts(artifact), given.only, given.workers, given.seconds)
    names = [k.symbol for k in artifact.manifest.kernels if given.only is None or k.symbol.startswith(given.only)]
    table = summary(verdicts)
    wrong = show(table, [name for name in names if not cases[name].part])
    late = sum(result["wrong"] == NOT_IN_TIME for verdict in verdicts for result in verdict["results"])
    said = f", {late} of them {NOT_IN_TIME}" if late else ""
    print(f"{len(verdicts)} comparisons in {time.perf_counter() - started:.1f} s{said}")
    if given.json:
        given.json.write_text(json.dumps({"artifact": artifact.manifest.identity, "kernels": table, "wrong": wrong}, default=float) + "\n")
    device.close()
    found = any(not sentence.endswith(NOT_IN_TIME) for row in table for sentence in row["wrong"])
    unreached = wrong - sum(bool(row["wrong"]) for row in table)
    return 1 if found or unreached else LATE if late else 0


if __name__ == "__main__":
    sys.exit(main())
