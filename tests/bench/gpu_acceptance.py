"""Everything that is asked of a GPU target on real hardware, in two commands.

`python -m tests.bench.gpu_acceptance prepare FOLDER` on the compile host makes the tiny model and its CPU tokens, a true-width slice, artifacts of
both, the cases of their kernels and the forms of kernels that a race checker follows. FOLDER and this tree are copied to the GPU host, where
`python -m tests.bench.gpu_acceptance run FOLDER` runs part after part, each with seconds of its own and all within `--seconds`, prints what each
says and one table at the end, leaves logs and acceptance.json in FOLDER/results, and ends with 1 if something failed or was not done. The GPU
host needs the runtime's packages, cuda-bindings and, for the checkers, compute-sanitizer.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

LAYERS, EXPERTS = "0-2,8,14,20,21,24", 16
SLICE: dict[str, Any] = {"max_rows": 4096, "max_sequences": 64, "max_context": 4096, "buckets": (1, 16, 64, 128, 256, 4096)}
TINY: dict[str, Any] = {"max_rows": 64, "max_sequences": 8}
STEPS = (1, 64, 256, 4096)  # rows of the steps that are timed
SANITIZER = "compute-sanitizer"
SECONDS = 460  # of everything
LATE = 4  # exit code of a check that watches the time: nothing wrong, but not everything done
WIDEST = 400  # characters of a line that is repeated
LEAST = 5  # seconds: with fewer left a check is not begun
SAYS = 15  # seconds in front of its end at which a check that watches the time itself stops, to say what is left
Verdict = Literal["ok", "FAILED", "NOT DONE"]


@dataclass(frozen=True)
class Check:
    """One thing that is asked: a command, seconds it may take, what its output must hold, and which of its lines are worth repeating.

    A command that `watches` takes `--seconds` and says by itself what it did not do in them.
    """

    name: str
    command: list[str]
    seconds: int
    holds: tuple[str, ...] = ()
    tells: tuple[str, ...] = ()
    watches: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of a check: `says` in one line why it failed or was not done, `told` its lines worth repeating."""

    name: str
    verdict: Verdict
    seconds: float
    limit: int
    says: str
    told: tuple[str, ...]


def prepare(folder: Path, target: str) -> None:
    """Makes everything that the GPU host needs; about ten minutes on two cores."""
    from tapeout.compiler.api import compile_path
    from tapeout.compiler.settings import Settings
    from tapeout.models.deepseek_v41.slice import main as make_slice
    from tapeout.models.tiny import write_tiny
    from tapeout.runtime.artifact_set import open_artifact
    from tests.bench.gpu import expect

    write_tiny(folder / "tiny")
    compile_path(folder / "tiny", folder / "tiny-artifact", Settings(target=f"{target},cpu", **TINY))
    expected = expect(open_artifact(folder / "tiny-artifact", "cpu"), folder / "tiny", 0.0)
    (folder / "expected.json").write_text(json.dumps(expected) + "\n")
    make_slice(["--layers", LAYERS, "--experts", str(EXPERTS), "--config-only", "-o", str(folder / "slice-config")])
    compile_path(folder / "slice-config", folder / "slice-artifact", Settings(target=target, **SLICE))
    for name, config, settings in (("tiny", "tiny", TINY), ("slice", "slice-config", SLICE)):
        _prepare_checks(folder, name, folder / config, Settings(target=target, **settings))


def _prepare_checks(folder: Path, name: str, config: Path, settings: Any) -> None:
    """What the checks of an artifact's kernels need: what each means, and the forms that a race checker follows."""
    from tapeout.codegen.nvidia.facts import chip
    from tapeout.codegen.nvidia.toolchain import probe
    from tapeout.compiler.nvidia_assembler import assembler
    from tapeout.models.deepseek_v41.config import load_config
    from tapeout.runtime.artifact_set import open_artifact
    from tests.bench.gpu_arrivals import assemble
    from tests.bench.meanings.cases import case_data, cases_of

    cases = cases_of(load_config(config), settings)
    (folder / f"{name}-cases.json").write_text(json.dumps([case_data(case) for case in cases]) + "\n")
    tool = assembler(probe().folder, chip(settings.target)).path
    assemble(open_artifact(folder / f"{name}-artifact", "cuda"), folder / "own-arrivals", tool)


def python(*arguments: object) -> list[str]:
    """A module of this tree, as a command."""
    return [sys.executable, "-m", *map(str, arguments)]


def alone(folder: Path, slices: Path, decode: int) -> list[Check]:
    """What is timed or takes all processors, and so runs while nothing else does."""
    bits, equal = "but for []; a step's in 5 runs and launch by launch, but for []", ("equal: the CPU's tokens",)
    tokens = tuple(f"{how}: 64/64 prompts and 2048/2048 tokens equal, 0 wrong" for how in ("whole", "chunks of 7", "chunks of 16"))
    rows = ",".join(map(str, STEPS))
    answers, past = python("tests.bench.gpu_answers", folder), "tapeout run: speculation, prefix cache, a second process"
    return [
        Check("tapeout run gives the CPU's tokens", answers, 60, equal),
        Check(past, [*answers, "--past"], 60, equal, ("tokens found",)),
        Check(f"{past}, bounded replay", [*answers, "--past", "--replay", "compact"], 60, equal, ("tokens found",)),
        Check("tiny model", python("tests.bench.gpu", "run", folder / "tiny-artifact", folder / "tiny", "--expected", folder / "expected.json",
                                   "--rows", "1,8,64", "--most", 5, "-o", folder / "results/tiny.json"), 120, (*tokens, bits),
              ("greedy", "a row's bits")),
        Check("slice is made", python("tapeout.models.deepseek_v41.slice", "--layers", LAYERS, "--experts", EXPERTS, "-o", slices), 120),
        Check("slice decodes and is measured", python("tests.bench.gpu", "run", folder / "slice-artifact", slices, "--decode", decode, "--rows",
                                                      rows, "--most", 200, "-o", folder / "results/slice.json"), 150,
              (f"'tokens': {SLICE['max_sequences'] * decode}", "'logits_finite': True", "'same_one_after_the_other': True",
               "'same_through_the_engine': True", bits),
              ("tokens_a_second", "a row's bits", "bf16 matmul", "floors:", "of its floor:")),
    ]  # fmt: skip


def together(folder: Path, slices: Path, checker: str) -> list[Check]:
    """What is not timed, and may run at the same time; the longest first."""
    found = []
    for name, weights, seconds in (("slice", slices, 300), ("tiny", folder / "tiny", 120)):
        artifact, out = folder / f"{name}-artifact", folder / "results"
        steps, races = ("tests.bench.gpu", "steps", artifact, weights), ("tests.bench.gpu_races", artifact, "--weights", weights)
        every = ["--all"] if name == "tiny" else []  # there it takes no time
        memory = [checker, "--tool", "memcheck", "--print-limit", "5", *python(*steps)]
        found += [
            Check(f"{name}: every kernel within its op's bound", python("tests.bench.gpu_meaning", artifact, folder / f"{name}-cases.json", "-o",
                                                                         out / f"{name}-meaning.json"),
                  seconds, (" 0 wrong",), ("checked, ", "in time"), True),
            Check(f"{name}: kernels of all buckets give a row the same bits", python("tests.bench.gpu_bits", artifact, folder / f"{name}-cases.json",
                                                                                     weights, *every, "-o", out / f"{name}-bits.json"),
                  120, (", 0 with other bits",), ("pairs of kernels of few",), True),
            Check(f"{name}: memcheck", memory, seconds, ("ERROR SUMMARY: 0 errors",), ("ERROR SUMMARY",)),
            Check(f"{name}: racecheck", python(*races, "--own", folder / "own-arrivals", "--checker", checker, "-o", out / f"{name}-races.json"),
                  seconds, (" 0 with hazards",), ("kernels that use", "needed: ", "not through in time"), True),
        ]  # fmt: skip
    return found


def done(check: Check, folder: Path, end: float) -> Outcome:
    """Runs one check, killed with all that it started where it takes longer than it may or passes `end` (of time.monotonic); its output is kept."""
    left = int(end - time.monotonic())
    if left < LEAST:
        return _told(Outcome(check.name, "NOT DONE", 0.0, check.seconds, "not begun: no time was left", ()))
    limit, log = min(check.seconds, left), folder / "results" / f"{''.join(c if c.isalnum() else '-' for c in check.name)}.txt"
    command = [*check.command, "--seconds", str(max(1, limit - SAYS))] if check.watches else check.command
    started = time.monotonic()
    code = ended(command, log, limit)
    text = log.read_text(errors="replace")
    lines = text.splitlines()
    told = tuple(line for line in lines if any(words in line for words in check.tells))
    missing = [words for words in check.holds if words not in text]
    last = next((line.strip()[:160] for line in reversed(lines) if line.strip()), "nothing")
    verdict: Verdict = "ok"
    says = ""
    if code is None or (code == LATE and check.watches):
        verdict, says = "NOT DONE", f"stopped after {limit} s; its last line: {last}"
    elif code or missing:
        verdict, says = "FAILED", f"exit code {code}{f', without {missing[0]!r}' if missing else ''}; its last line: {last}"
    return _told(Outcome(check.name, verdict, time.monotonic() - started, limit, says, told))


def ended(command: Sequence[str], log: Path, seconds: float) -> int | str | None:
    """How a command ended: its exit code, what the system said where it could not be started, None where time was up."""
    with log.open("w") as out:
        try:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as error:
            out.write(f"{error}\n")
            return str(error.strerror)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _told(outcome: Outcome) -> Outcome:
    """Prints an outcome as soon as it is there."""
    first = f"{outcome.verdict:8} {outcome.name}: {outcome.seconds:.0f} s{f', {outcome.says}' if outcome.says else ''}"
    print("\n".join([first, *(f"         {line[:WIDEST]}" for line in outcome.told)]), flush=True)
    return outcome


def accept(folder: Path, slices: Path, decode: int, checker: str, seconds: int) -> int:
    """All checks; 1 if one failed or was not done."""
    (folder / "results").mkdir(exist_ok=True)
    started = time.monotonic()
    end = started + seconds
    found = [done(check, folder, end) for check in alone(folder, slices, decode)]
    checks = together(folder, slices, checker)
    with ThreadPoolExecutor(len(checks)) as pool:
        found += pool.map(lambda check: done(check, folder, end), checks)
    show(found, time.monotonic() - started)
    (folder / "results/acceptance.json").write_text(json.dumps([asdict(outcome) for outcome in found], indent=1) + "\n")
    return 0 if all(outcome.verdict == "ok" for outcome in found) else 1


def show(found: Sequence[Outcome], seconds: float) -> None:
    """Every check with its verdict, and how many hold."""
    print(f"\n{'check':80} {'':8} {'s':>5} {'of s':>5}")
    for outcome in found:
        print(f"{outcome.name[:80]:80} {outcome.verdict:8} {outcome.seconds:5.0f} {outcome.limit:5}{f'  {outcome.says}' if outcome.says else ''}")
    held = sum(outcome.verdict == "ok" for outcome in found)
    print(f"{held} of {len(found)} hold, in {seconds:.0f} s")


def main(arguments: Sequence[str] | None = None) -> int:
    """0 everything holds, 1 something does not."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu_acceptance", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("prepare", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default="sm90", help="prepare: the chip")
    parser.add_argument("--slice", type=Path, help="run: where the slice's checkpoint is written (9.4 GB); default: FOLDER/slice")
    parser.add_argument("--decode", type=int, default=256, help="run: tokens of every sequence")
    parser.add_argument("--checker", default=SANITIZER, help="run: path of compute-sanitizer")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="run: of everything; what is not done by then says so")
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.what == "prepare":
        prepare(given.folder, given.target)
        return 0
    return accept(given.folder, given.slice or given.folder / "slice", given.decode, given.checker, given.seconds)


if __name__ == "__main__":
    sys.exit(main())
