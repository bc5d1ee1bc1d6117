"""Everything that is asked of a GPU target on real hardware, in two commands.

`python -m tests.bench.gpu_acceptance prepare FOLDER` on the compile host makes the tiny model and its CPU tokens, a true-width slice, its artifact
and the cases of its kernels. FOLDER and this tree are copied to the GPU host, where `python -m tests.bench.gpu_acceptance run FOLDER` prints a line
for each thing that is asked, leaves logs in FOLDER/results, and ends with 1 if something failed. The GPU host needs the runtime's packages,
cuda-bindings and, for the checkers, compute-sanitizer.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAYERS, EXPERTS = "0-2,8,14,20,21,24", 16
SLICE = {"max_rows": 4096, "max_sequences": 64, "max_context": 4096}
TINY = {"max_rows": 64, "max_sequences": 8}
PROMPTS = ("Once upon a time", "The compiler said", "a", "In 1999, nine people and a dog walked over the bridge and", "0123456789")
DIGITS = ("0123", "4567", "89ab", "cdef")
"""Products by the first digit of their name: the race checker is slow, and several processes share the work."""
APART = ("linear", "attend")


@dataclass(frozen=True)
class Check:
    """One thing that is asked: a command, seconds it may take, and what its output must hold."""

    name: str
    command: list[str]
    seconds: int
    holds: tuple[str, ...] = ()


def prepare(folder: Path, target: str) -> None:
    """Makes everything that the GPU host needs; about ten minutes on two cores."""
    from tapeout.compiler.api import compile_path
    from tapeout.compiler.settings import Settings
    from tapeout.models.deepseek_v41.config import load_config
    from tapeout.models.deepseek_v41.slice import main as make_slice
    from tapeout.models.tiny import write_tiny
    from tapeout.runtime.artifact_set import open_artifact
    from tests.bench.gpu import expect
    from tests.bench.meanings.cases import case_data, cases_of

    write_tiny(folder / "tiny")
    compile_path(folder / "tiny", folder / "tiny-artifact", Settings(target=f"{target},cpu", **TINY))
    expected = expect(open_artifact(folder / "tiny-artifact", "cpu"), folder / "tiny", 0.0)
    (folder / "expected.json").write_text(json.dumps(expected) + "\n")
    make_slice(["--layers", LAYERS, "--experts", str(EXPERTS), "--config-only", "-o", str(folder / "slice-config")])
    settings = Settings(target=target, **SLICE)
    compile_path(folder / "slice-config", folder / "slice-artifact", settings)
    cases = cases_of(load_config(folder / "slice-config"), settings)
    (folder / "cases.json").write_text(json.dumps([case_data(case) for case in cases]) + "\n")


def python(*arguments: object) -> list[str]:
    """A module of this tree, as a command."""
    return [sys.executable, "-m", *map(str, arguments)]


def alone(folder: Path, slices: Path, decode: int) -> list[Check]:
    """What is timed or takes all processors, and so runs while nothing else does."""
    tokens = ("64/64 prompts and 2048/2048 tokens equal, 0 wrong",)
    meaning = ("tests.bench.gpu_meaning", folder / "slice-artifact", folder / "cases.json")
    return [
        Check("tiny model", python("tests.bench.gpu", "run", folder / "tiny-artifact", folder / "tiny", "--expected", folder / "expected.json",
                                   "--rows", "1,8,64", "--most", 5, "-o", folder / "results/tiny.json"), 120, tokens),
        Check("slice is made", python("tapeout.models.deepseek_v41.slice", "--layers", LAYERS, "--experts", EXPERTS, "-o", slices), 180),
        Check("slice decodes and is measured", python("tests.bench.gpu", "run", folder / "slice-artifact", slices, "--decode", decode, "--rows",
                                                      "1,64,256,4096", "--most", 40, "-o", folder / "results/slice.json"), 240,
              (f"'tokens': {SLICE['max_sequences'] * decode}", "'logits_finite': True")),
        Check("every kernel within its op's bound", python(*meaning, "-o", folder / "results/meaning.json"), 240, (" 0 wrong",)),
    ]  # fmt: skip


def together(folder: Path) -> list[Check]:
    """What is not timed, and may run at the same time."""
    steps = python("tests.bench.gpu", "steps", folder / "slice-artifact", "random")
    race = ["compute-sanitizer", "--tool", "racecheck", "--print-limit", "5"]
    names = {"others": [flag for name in APART for flag in ("--kernel-name-exclude", f"kns={name}")]}
    names["attention"] = ["--kernel-name", "kns=attend"]
    for number, digits in enumerate(DIGITS):
        names[f"products {number}"] = [flag for digit in digits for flag in ("--kernel-name", f"kns=linear_{digit}")]
    return [
        Check("memcheck", ["compute-sanitizer", "--tool", "memcheck", "--print-limit", "5", *steps], 240, ("ERROR SUMMARY: 0 errors",)),
        *(Check(f"racecheck, {name}", [*race, *flags, *steps], 480, ("0 hazards displayed",)) for name, flags in names.items()),
    ]


def done(check: Check, folder: Path) -> tuple[bool, float]:
    """Runs one check; its output is kept."""
    name = "".join(c if c.isalnum() else "-" for c in check.name)
    started, log = time.perf_counter(), folder / "results" / f"{name}.txt"
    with log.open("w") as out:
        try:
            code = subprocess.run(check.command, stdout=out, stderr=subprocess.STDOUT, timeout=check.seconds, check=False).returncode
        except (subprocess.TimeoutExpired, OSError) as error:
            out.write(f"{error}\n")
            code = -1
    text, seconds = log.read_text(errors="replace"), time.perf_counter() - started
    good = code == 0 and all(words in text for words in check.holds)
    print(f"{'ok    ' if good else 'FAILED'} {check.name}: {seconds:.0f} s" + ("" if good else f", exit code {code}, see {log}"), flush=True)
    return good, seconds


def same_answers(folder: Path) -> bool:
    """`tapeout run` on the GPU and on the CPU: the same tokens."""
    found: list[Any] = []
    for device in ("cuda", "cpu"):
        command = python("tapeout.compiler", "run", folder / "tiny-artifact", "--weights", folder / "tiny", "--device", device, "--max-tokens", 48,
                         "--json", *(word for prompt in PROMPTS for word in ("--prompt", prompt)))  # fmt: skip
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        found.append([json.loads(line).get("token_ids") for line in said.stdout.splitlines()[: len(PROMPTS)]] or said.stderr)
    good = found[0] == found[1] and len(found[0]) == len(PROMPTS)
    print(f"{'ok    ' if good else 'FAILED'} tapeout run --device cuda gives the CPU's tokens{'' if good else f': {str(found)[:500]}'}", flush=True)
    return good


def accept(folder: Path, slices: Path, decode: int) -> int:
    """All checks; 1 if one failed."""
    (folder / "results").mkdir(exist_ok=True)
    good = [same_answers(folder), *(done(check, folder)[0] for check in alone(folder, slices, decode))]
    with ThreadPoolExecutor(8) as pool:
        good += [one for one, _ in pool.map(lambda check: done(check, folder), together(folder))]
    print(f"{sum(good)} of {len(good)} hold")
    return 0 if all(good) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """0 everything holds, 1 something does not."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu_acceptance", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("prepare", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default="sm90", help="prepare: the chip")
    parser.add_argument("--slice", type=Path, help="run: where the slice's checkpoint is written (9.4 GB); default: FOLDER/slice")
    parser.add_argument("--decode", type=int, default=256, help="run: tokens of every sequence")
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.what == "prepare":
        prepare(given.folder, given.target)
        return 0
    return accept(given.folder, given.slice or given.folder / "slice", given.decode)


if __name__ == "__main__":
    sys.exit(main())
