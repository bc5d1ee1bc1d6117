"""Everything that is asked of a GPU target on real hardware, in two commands.

`python -m tests.bench.gpu_acceptance prepare FOLDER` on the compile host makes the tiny model and its CPU tokens, a true-width slice, artifacts of
both, the cases of their kernels and the forms of kernels that a race checker follows. FOLDER and this tree are copied to the GPU host, where
`python -m tests.bench.gpu_acceptance run FOLDER` prints a line for each thing that is asked, leaves logs in FOLDER/results, and ends with 1 if
something failed. The GPU host needs the runtime's packages, cuda-bindings and, for the checkers, compute-sanitizer.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAYERS, EXPERTS = "0-2,8,14,20,21,24", 16
SLICE: dict[str, Any] = {"max_rows": 4096, "max_sequences": 64, "max_context": 4096, "buckets": (1, 16, 64, 128, 256, 4096)}
TINY: dict[str, Any] = {"max_rows": 64, "max_sequences": 8}
STEPS = (1, 64, 256, 4096)  # rows of the steps that are timed
PROMPTS = ("Once upon a time", "The compiler said", "a", "In 1999, nine people and a dog walked over the bridge and", "0123456789")
PREFIX = 256  # tokens of two blocks of the cache, which both of these have in common
PAST = tuple("The compiler said that nine people and a dog walked over the bridge, and counted. " * 4 + word for word in ("Then", "But"))
SANITIZER = "compute-sanitizer"


@dataclass(frozen=True)
class Check:
    """One thing that is asked: a command, seconds it may take, what its output must hold, and which of its lines are worth repeating."""

    name: str
    command: list[str]
    seconds: int
    holds: tuple[str, ...] = ()
    tells: tuple[str, ...] = ()


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
    bits = "but for []"
    tokens = tuple(f"{how}: 64/64 prompts and 2048/2048 tokens equal, 0 wrong" for how in ("whole", "chunks of 7", "chunks of 16"))
    rows = ",".join(map(str, STEPS))
    return [
        Check("tiny model", python("tests.bench.gpu", "run", folder / "tiny-artifact", folder / "tiny", "--expected", folder / "expected.json",
                                   "--rows", "1,8,64", "--most", 5, "-o", folder / "results/tiny.json"), 120, (*tokens, bits)),
        Check("slice is made", python("tapeout.models.deepseek_v41.slice", "--layers", LAYERS, "--experts", EXPERTS, "-o", slices), 180),
        Check("slice decodes and is measured", python("tests.bench.gpu", "run", folder / "slice-artifact", slices, "--decode", decode, "--rows",
                                                      rows, "--most", 200, "-o", folder / "results/slice.json"), 240,
              (f"'tokens': {SLICE['max_sequences'] * decode}", "'logits_finite': True", bits),
              ("tokens_a_second", "a row's bits", "bf16 matmul", "floors:", "of its floor:")),
    ]  # fmt: skip


def together(folder: Path, slices: Path, checker: str) -> list[Check]:
    """What is not timed, and may run at the same time."""
    found = []
    for name, weights in (("slice", slices), ("tiny", folder / "tiny")):
        artifact, out = folder / f"{name}-artifact", folder / "results"
        steps, races = ("tests.bench.gpu", "steps", artifact, weights), ("tests.bench.gpu_races", artifact, "--weights", weights)
        memory = [checker, "--tool", "memcheck", "--print-limit", "5", *python(*steps)]
        found += [
            Check(f"{name}: every kernel within its op's bound", python("tests.bench.gpu_meaning", artifact, folder / f"{name}-cases.json", "-o",
                                                                         out / f"{name}-meaning.json", "--seconds", 225), 240, (" 0 wrong",),
                  ("checked, ",)),
            Check(f"{name}: memcheck", memory, 240, ("ERROR SUMMARY: 0 errors",)),
            Check(f"{name}: racecheck", python(*races, "--own", folder / "own-arrivals", "--checker", checker, "-o", out / f"{name}-races.json"), 300,
                  (" 0 with hazards",), ("kernels that use", "needed: ")),
        ]  # fmt: skip
    return found


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
    said = [f"       {line}" for line in text.splitlines() if any(words in line for words in check.tells)]
    first = f"{'ok    ' if good else 'FAILED'} {check.name}: {seconds:.0f} s" + ("" if good else f", exit code {code}, see {log}")
    print("\n".join([first, *said]), flush=True)
    return good, seconds


def answered(folder: Path, device: str, prompts: Sequence[str], *options: object) -> list[dict[str, Any]]:
    """What `tapeout run` says of each prompt on a device; a row with what went wrong where it says nothing."""
    command = python("tapeout.compiler", "run", folder / "tiny-artifact", "--weights", folder / "tiny", "--device", device, "--json", *options,
                     *(word for prompt in prompts for word in ("--prompt", prompt)))  # fmt: skip
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    rows = [json.loads(line) for line in said.stdout.splitlines() if line.startswith("{")][: len(prompts)]
    return rows if len(rows) == len(prompts) else [{"token_ids": [], "error": f"{device}: {said.stderr[-500:]}"}]


def same_answers(folder: Path) -> bool:
    """`tapeout run` on the GPU and on the CPU: the same tokens."""
    found = [answered(folder, device, PROMPTS, "--max-tokens", 48) for device in ("cuda", "cpu")]
    return _told("tapeout run --device cuda gives the CPU's tokens", found, len(PROMPTS))


def same_with_a_past(folder: Path, *options: str) -> bool:
    """Prompts with a common prefix, speculation, and a cache that a second process finds in a folder: the CPU's tokens, and the prefix is found."""

    def both(device: str) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
            how = ("--max-tokens", 24, "--spec", "auto", "--cache", "--cache-dir", cache, *options)
            return [row for asked in (PAST[:1], PAST) for row in answered(folder, device, asked, *how)]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(both, ("cuda", "cpu")))
    hits = [[row.get("cache", {}).get("hit_tokens") for row in rows] for rows in found]
    name = f"speculation, prefix cache, a second process{''.join(f', {word}' for word in options)}: the CPU's tokens; tokens found {hits[0]}"
    return _told(name, found, 3) and hits[0] == hits[1] == [0, PREFIX, PREFIX]


def _told(name: str, found: list[list[dict[str, Any]]], count: int) -> bool:
    """Whether both devices gave as many answers of the same tokens; says so."""
    tokens = [[row.get("token_ids") for row in rows] for rows in found]
    good = tokens[0] == tokens[1] and len(tokens[0]) == count and all(tokens[0])
    wrong = "" if good else f": {str([row.get('error', row.get('token_ids')) for rows in found for row in rows])[:800]}"
    print(f"{'ok    ' if good else 'FAILED'} {name}{wrong}", flush=True)
    return good


def accept(folder: Path, slices: Path, decode: int, checker: str) -> int:
    """All checks; 1 if one failed."""
    (folder / "results").mkdir(exist_ok=True)
    good = [same_answers(folder), same_with_a_past(folder), same_with_a_past(folder, "--replay", "compact")]
    good += [done(check, folder)[0] for check in alone(folder, slices, decode)]
    with ThreadPoolExecutor(8) as pool:
        good += [one for one, _ in pool.map(lambda check: done(check, folder), together(folder, slices, checker))]
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
    parser.add_argument("--checker", default=SANITIZER, help="run: path of compute-sanitizer")
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.what == "prepare":
        prepare(given.folder, given.target)
        return 0
    return accept(given.folder, given.slice or given.folder / "slice", given.decode, given.checker)


if __name__ == "__main__":
    sys.exit(main())
