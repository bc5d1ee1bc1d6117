"""`tapeout run` on a GPU and on the CPU, on the tiny model that gpu_acceptance.py prepared: `python -m tests.bench.gpu_answers FOLDER [--past]`.

Whole processes with the command's own options, as a user starts them: their tokens must be equal. With `--past`, prompts share a prefix, drafts are
tried, and a second process finds the first one's cache in a folder.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

DEVICES = ("cuda", "cpu")
PROMPTS = ("Once upon a time", "The compiler said", "a", "In 1999, nine people and a dog walked over the bridge and", "0123456789")
PREFIX = 256  # tokens of two blocks of the cache, which both of these have in common
PAST = tuple("The compiler said that nine people and a dog walked over the bridge, and counted. " * 4 + word for word in ("Then", "But"))
SECONDS = 120  # of one process


def answered(folder: Path, device: str, prompts: Sequence[str], *options: object) -> list[dict[str, Any]]:
    """What `tapeout run` says of each prompt on a device; one row with what went wrong where it says nothing."""
    words = ["run", folder / "tiny-artifact", "--weights", folder / "tiny", "--device", device, "--json", *options]
    asked = (word for prompt in prompts for word in ("--prompt", prompt))
    command = [sys.executable, "-m", "tapeout.compiler", *map(str, words), *asked]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    rows = [json.loads(line) for line in said.stdout.splitlines() if line.startswith("{")][: len(prompts)]
    return rows if len(rows) == len(prompts) else [{"token_ids": [], "error": f"{device}: {said.stderr[-500:]}"}]


def same_answers(folder: Path) -> bool:
    """Prompts of several lengths."""
    with ThreadPoolExecutor(len(DEVICES)) as pool:
        found = list(pool.map(lambda device: answered(folder, device, PROMPTS, "--max-tokens", 48), DEVICES))
    return _told("the CPU's tokens", found, len(PROMPTS))


def same_with_a_past(folder: Path, *options: str) -> bool:
    """Speculation and a prefix cache; the prefix is found by the second process, on both devices."""

    def both(device: str) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
            how = ("--max-tokens", 24, "--spec", "auto", "--cache", "--cache-dir", cache, *options)
            return [row for asked in (PAST[:1], PAST) for row in answered(folder, device, asked, *how)]

    with ThreadPoolExecutor(len(DEVICES)) as pool:
        found = list(pool.map(both, DEVICES))
    hits = [[row.get("cache", {}).get("hit_tokens") for row in rows] for rows in found]
    equal = _told(f"the CPU's tokens; tokens found in the cache: {hits[0]}", found, 3)
    return equal and hits[0] == hits[1] == [0, PREFIX, PREFIX]


def _told(what: str, found: list[list[dict[str, Any]]], count: int) -> bool:
    """Whether both devices gave as many answers of the same tokens; says so."""
    tokens = [[row.get("token_ids") for row in rows] for rows in found]
    good = tokens[0] == tokens[1] and len(tokens[0]) == count and all(tokens[0])
    wrong = "" if good else f": {str([row.get('error', row.get('token_ids')) for rows in found for row in rows])[:800]}"
    print(f"{'equal' if good else 'DIFFERENT'}: {what}{wrong}", flush=True)
    return good


def main(arguments: Sequence[str] | None = None) -> int:
    """0 the same tokens, 1 others."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu_answers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--past", action="store_true", help="a shared prefix, speculation, a cache in a folder")
    parser.add_argument("--replay", choices=("exact", "compact"), help="with --past: how a prefix that was found is continued")
    given = parser.parse_args(arguments)
    options = ("--replay", given.replay) if given.replay else ()
    return 0 if (same_with_a_past(given.folder, *options) if given.past else same_answers(given.folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
