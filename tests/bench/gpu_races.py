"""Every kernel of an artifact under the race checker: `python -m tests.bench.gpu_races ARTIFACT` on a GPU host with compute-sanitizer.

A chunked prefill, four steps of one row and a step in every larger bucket run launch by launch. In each kind of step the first launch of every
kernel that uses shared memory is preceded by one of its first instances, of a copy of its binary under another name, and the checker looks at
those names alone: the rest runs at full speed. Several processes share the work, each launch goes to whoever comes first. Kernels whose groups
meet at barriers are checked in the form of gpu_arrivals.py. Prints kernels, their reports and the verdict.
"""

import argparse
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tapeout.runtime.artifact import Artifact
from tapeout.runtime.artifact_kernels import Binary
from tapeout.runtime.artifact_set import open_artifact
from tapeout.runtime.device import Call
from tapeout.runtime.device.cuda import CudaDevice, Loaded
from tapeout.runtime.program import Draw, StepRows
from tests.bench.gpu_acceptance import LATE
from tests.bench.gpu_arrivals import ELECTED, OWN
from tests.bench.greedy import RANDOM
from tests.bench.meanings.scene import Memory, fill_states, loaded, opened, rows_of

MARK = "Z"  # in place of the last underscore of a symbol: no symbol has a capital letter
BARRIERS = 64  # in a block; the checker follows as many as the compiler declares, and ours are made by inline assembly
INSTANCES = 64  # of a launch that are checked: the checker is slow, and instances share nothing in shared memory
PROCESSES, SECONDS = 6, 240
LEAST = (2026, 1)
"""The first release whose racecheck follows barriers of groups of warps on Hopper (release notes); older ones report the bytes by which Triton
sends groups of warps to work."""
CHECKED = re.compile(r"^checked (\w+) of step (\d+) rows (\d+): ([\d.]+) s$", re.MULTILINE)
REPORT = re.compile(r"(Error|Warning): Race reported between (\w+) access at ([\w.]+)\+0x([0-9a-f]+)")
OTHER = re.compile(r"and (\w+) access at ([\w.]+)\+0x([0-9a-f]+).*?\[(\d+) hazards?\]")
RELEASE = re.compile(r"Version (\d+)\.(\d+)")


# -- in the checker


class CopyingDevice(CudaDevice):
    """The device, which loads kernels when they are first launched, and marked copies of some."""

    def _load(self, folder: Path, symbol: str, binary: Binary) -> Loaded:
        return Loaded((folder, symbol, binary), binary)

    def _launch(self, call: Call, *, early: bool = False) -> None:
        function = self._kernels[call.kernel].function
        if isinstance(function, tuple):
            self._kernels[call.kernel] = super()._load(*function)
        super()._launch(call, early=early)

    def marked(self, artifact: Artifact, number: int, own: Path) -> int:
        """The number of a kernel's copy; a file of `own` is taken where there is one (gpu_arrivals.py)."""
        kernel = artifact.manifest.kernels[number]
        if kernel.binary is None:
            raise SystemExit(f"{kernel.symbol}: no binary; expected an artifact of a GPU")
        name, other = marked(kernel.symbol), own / f"{kernel.symbol}.cubin"
        binary = other if other.exists() else artifact.directory / kernel.binary.file
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "copy.cubin")
            path.write_bytes(binary.read_bytes().replace(kernel.symbol.encode(), name.encode()))
            facts = kernel.binary.model_copy(update={"file": path.name, "function": name})
            self._kernels.append(super()._load(path.parent, name, facts))
        return len(self._kernels) - 1


def marked(symbol: str) -> str:
    """The name of a kernel's copy: as long as the kernel's own, which stands in tables of the binary."""
    head, _, digest = symbol.rpartition("_")
    return f"{head}{MARK}{digest}"


def steps_of(artifact: Artifact, part: int) -> Iterator[tuple[str, StepRows]]:
    """Part 0: a prefill of six tokens in two chunks, four steps of one row. Part 1: one row more than each bucket but the last, most first."""
    text = [5, 17, 230, 44, 9, 101, 77, 3, 250, 12]
    for kind, spans in (("chunk", ((0, 3), (3, 6))), ("decode", ((6, 7), (7, 8), (8, 9), (9, 10)))) if part == 0 else ():
        for first, end in spans:
            rows = StepRows()
            rows.add(0, first, text[first:end])
            rows.outputs.append(end - first - 1)
            rows.draws.append(Draw(0.7, 50, 0.9, 3, 0, end))
            yield kind, rows
    for below, _ in reversed(list(pairwise(artifact.buckets))) if part == 1 else ():
        yield "larger", rows_of(artifact, below + 1)


def run_steps(given: Any) -> int:
    """What runs inside the checker; a file in `given.claims` says that some process checks a kernel in a kind of step."""
    artifact, started = open_artifact(given.artifact, "cuda"), time.perf_counter()
    device = CopyingDevice(artifact)
    programs, *_ = opened(artifact, device, given.weights)
    memory = Memory(device)
    fill_states(programs, memory)
    print(f"weights and states are there after {time.perf_counter() - started:.1f} s", flush=True)
    names, copies = set(names_of(artifact, given.only)), {}
    for number, (kind, rows) in enumerate(steps_of(artifact, given.part)):
        parts = loaded(programs, rows, memory)
        for call in [call for part in parts for call in programs.calls(part)]:
            symbol = artifact.manifest.kernels[call.kernel].symbol
            if symbol in names and _claimed(given.claims / f"{symbol}.{kind}"):
                begun = time.perf_counter()
                if call.kernel not in copies:
                    copies[call.kernel] = device.marked(artifact, call.kernel, given.own)
                memory.launch([replace(call, kernel=copies[call.kernel], grid=clipped(call.grid or (1, 1, 1), given.instances))])
                print(f"checked {symbol} of step {number} rows {len(rows.tokens)}: {time.perf_counter() - begun:.3f} s", flush=True)
            memory.launch([call])
        print(f"step {number} is through after {time.perf_counter() - started:.1f} s", flush=True)
    device.close()
    return 0


def names_of(artifact: Artifact, only: str) -> list[str]:
    """Kernels that use shared memory: there is nothing to race for elsewhere."""
    return [k.symbol for k in artifact.manifest.kernels if k.binary is not None and k.binary.shared_bytes and k.symbol.startswith(only)]


def clipped(grid: tuple[int, int, int], most: int) -> tuple[int, int, int]:
    """The first instances of a grid along its longest axis, about `most` in all and never fewer than one on any axis."""
    if math.prod(grid) <= most:
        return grid
    axis = max(range(3), key=lambda i: grid[i])
    others = math.prod(n for i, n in enumerate(grid) if i != axis)
    x, y, z = (max(1, most // others) if i == axis else n for i, n in enumerate(grid))
    return (x, y, z)


def _claimed(path: Path) -> bool:
    """Whether this process is the first to ask."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


# -- around the checker


@dataclass
class Row:
    """What was found of one kernel: launches that were checked, seconds of them, hazards by pair of accesses."""

    kernel: str
    rows: list[int] = field(default_factory=list)
    seconds: float = 0.0
    pairs: dict[str, int] = field(default_factory=dict)


def table_of(said: str, reports: str) -> dict[str, Row]:
    """Rows by symbol, from what the steps printed and what the checker reported."""
    table: dict[str, Row] = {}
    for symbol, _, rows, seconds in CHECKED.findall(said):
        row = table.setdefault(symbol, Row(symbol))
        row.rows.append(int(rows))
        row.seconds += float(seconds)
    first = None
    for line in reports.splitlines():
        if found := REPORT.search(line):
            first = found.groups()
        elif first and (found := OTHER.search(line)):
            symbol = first[2].replace(MARK, "_")
            pair = f"{first[0].lower()}: {first[1].lower()} at {first[3]}, {found[1].lower()} at {found[3]}"
            pairs = table.setdefault(symbol, Row(symbol)).pairs
            pairs[pair] = pairs.get(pair, 0) + int(found[4])
    return table


def show(table: dict[str, Row], kernels: Sequence[str], own: Path) -> int:
    """The table; returns how many kernels have reports or were not checked."""
    for row in sorted(table.values(), key=lambda r: (-len(r.pairs), -r.seconds)):
        form = "  every thread arrives for itself" if (own / f"{row.kernel}.cubin").exists() else ""
        print(f"{row.kernel:34} {len(row.rows):3} launches of {','.join(map(str, sorted(set(row.rows)))):12} rows {row.seconds:7.2f} s  "
              f"{sum(row.pairs.values())} hazards{form}")  # fmt: skip
        for pair, count in sorted(row.pairs.items())[:20]:
            print(f"    {count:6} {pair}")
    missing = [name for name in kernels if name not in table or not table[name].rows]
    bad = [row.kernel for row in table.values() if row.pairs]
    left = f"; not checked: {', '.join(missing)}" if missing else ""
    print(f"{len(kernels) - len(missing)} of {len(kernels)} kernels that use shared memory checked, {len(bad)} with hazards{left}")
    return len(bad) + len(missing)


@dataclass(frozen=True)
class Run:
    """What one process under the checker left."""

    said: str
    reports: str
    code: int | None

    @property
    def is_whole(self) -> bool:
        return self.code == 0 and "RACECHECK SUMMARY" in self.reports


def run_one(given: Any, folder: Path, number: int) -> Run:
    """One process that runs steps."""
    inside = ("--claims", folder / "claims", "--part", number % 2, "--only", given.only, "--weights", given.weights, "--instances", given.instances,
              "--own", given.own)  # fmt: skip
    words = ("--num-cuda-barriers", BARRIERS, "--kernel-name", f"kns={MARK}")
    return under(given, folder / str(number), words, "tests.bench.gpu_races", given.artifact, *inside)


def under(given: Any, place: Path, options: Sequence[object], *module: object) -> Run:
    """A module of this tree under the checker, killed with all that it started where it takes too long."""
    log, out = place.with_suffix(".log"), place.with_suffix(".txt")
    command = [given.checker, "--tool", "racecheck", "--print-limit", "0", *options, "--log-file", log, sys.executable, "-m", *module]
    with out.open("w") as stream:
        process = subprocess.Popen([str(word) for word in command], stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | None = process.wait(max(1.0, given.end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
    return Run(out.read_text(errors="replace"), log.read_text(errors="replace") if log.exists() else "", code)


def premise(given: Any, folder: Path) -> tuple[bool, str]:
    """Whether the checker follows what gpu_arrivals.py makes, and what it says of a producer and a consumer in both forms."""
    run = under(given, folder / "toys", (), "tests.bench.gpu_arrivals")
    table = table_of(run.said, run.reports)
    elected, own = (sum(table[name].pairs.values()) if name in table else 0 for name in (ELECTED, OWN))
    said = (f"a correct producer and consumer, one thread arriving for its group: {elected} hazards reported; every thread for itself: {own}"
            + ("" if run.is_whole else f"; exit code {run.code}: {run.said[-500:]}{run.reports[-500:]}"))  # fmt: skip
    return run.is_whole and not own, said


def check(given: Any) -> int:
    """Runs the processes and puts together what they found; 0 where every kernel was checked and none has a hazard, 4 where only time was short."""
    started, given.end = time.perf_counter(), time.monotonic() + given.seconds
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        Path(folder, "claims").mkdir()
        sound, said = premise(given, Path(folder))
        with ThreadPoolExecutor(given.processes) as pool:
            runs = list(pool.map(lambda number: run_one(given, Path(folder), number), range(given.processes)))
    table = table_of("\n".join(run.said for run in runs), "\n".join(run.reports for run in runs))
    wrong = show(table, names_of(open_artifact(given.artifact, "cuda"), given.only), given.own)
    broken = [f"process {i}: exit code {run.code}: {run.said[-1500:]}{run.reports[-1500:]}" for i, run in enumerate(runs) if not run.is_whole]
    print("\n".join([said, *(line for run in runs for line in run.said.splitlines() if " after " in line), *broken]))
    print(f"{time.perf_counter() - started:.1f} s")
    if given.json:
        found = {"kernels": [vars(row) for row in table.values()], "premise": said, "broken": broken, "said": [run.said for run in runs]}
        given.json.write_text(json.dumps(found) + "\n")
    late = [str(i) for i, run in enumerate(runs) if run.code is None]
    if late:
        print(f"{given.seconds} s are over: processes {', '.join(late)} of {len(runs)} were not through in time")
    hazards = any(row.pairs for row in table.values()) or len(broken) > len(late)
    return 1 if hazards or not sound or (wrong and not late) else LATE if late else 0


def unfit(checker: str) -> str | None:
    """Why a checker cannot be used, None if it can."""
    needed = f"needed: compute-sanitizer {LEAST[0]}.{LEAST[1]} or later: pip install nvidia-cuda-sanitizer-api, and give its path as --checker"
    path = shutil.which(checker)
    if path is None:
        return f"found no {checker}; {needed}"
    said = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", check=False).stdout
    found = RELEASE.search(said)
    if found is None or (int(found[1]), int(found[2])) < LEAST:
        return f"found {path}, {found[0] if found else 'no version'}; {needed}"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """0 every kernel is free of hazards, 1 one is not or was not checked, 3 no checker that is recent enough, 4 no time was left for some."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu_races", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--only", default="", help="kernels whose symbol begins with this")
    parser.add_argument("--checker", default="compute-sanitizer", help="path of compute-sanitizer")
    parser.add_argument("--weights", type=Path, default=RANDOM, help="checkpoint folder; default: weights that are never written")
    parser.add_argument("--own", type=Path, default=Path("own-arrivals"), help="folder of binaries in which every thread arrives for itself")
    parser.add_argument("--instances", type=int, default=INSTANCES, help="instances of a launch that are checked")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--seconds", type=int, default=SECONDS, help="from which on nothing more is checked")
    parser.add_argument("--claims", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--part", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--json", "-o", type=Path)
    given = parser.parse_args(arguments)
    if given.claims is not None:
        return run_steps(given)
    problem = unfit(given.checker)
    if problem is not None:
        print(problem)
        return 3
    return check(given)


if __name__ == "__main__":
    sys.exit(main())
