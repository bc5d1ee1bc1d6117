"""Chooses the files of the corpus and which are held out, and writes `corpus.json`: run once for a Python version, by hand.

    python -m tapeout.models.tiny.pinning LIBRARY

What is left out: tables that were generated, data that only looks like source, files that are not UTF-8 or not Python 3. Held out are whole
files, drawn by the hash of their path; a file that shares more than a few lines with another one is never held out, so that the measure is
about text that was not seen.
"""

import argparse
import ast
import hashlib
import json
import platform
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tapeout.models.tiny.corpus import PINS, TOPICS, Pins, digest_of, digest_of_pins, flat

LEFT_OUT = (
    "site-packages/",  # not the standard library
    "_sysconfigdata",  # written by the build, other bytes on every machine
    "config-",
    "encodings/",  # character tables, two dozen of them generated alike
    "html/entities.py",  # tables
    "stringprep.py",
    "re/_casefix.py",
    "msilib/",
    "lib2to3/tests/data/",  # other languages and near copies: test input
    "test/encoded_modules/",
    "test/cjkencodings/",
    "test/test_codecencodings_",
    "test/bad",
)
LEAST_BYTES, MOST_BYTES = 300, 300_000  # an empty file says nothing, and no single file should weigh much in the measure
MOST_DIGITS = 0.12  # of a file's characters: beyond, it is a table of numbers
HELD_OUT = 0.04  # of all bytes
HELD_OUT_BYTES = (1_000, 80_000)  # of one held-out file
WINDOW = 4  # consecutive lines that make a passage
MOST_SHARED = 0.08  # of a held-out file's passages that may occur in another file


def pin(library: Path) -> Pins:
    """Returns both splits, paths in order. Deterministic: nothing but the files decides."""
    files = dict(_chosen(library))
    held_out = _held_out(files)
    return {
        "train": {name: digest_of(data) for name, data in files.items() if name not in held_out},
        "held_out": {name: digest_of(files[name]) for name in files if name in held_out},
    }


def _chosen(library: Path) -> Iterator[tuple[str, bytes]]:
    seen = set()
    for path in sorted(library.rglob("*.py"), key=lambda p: p.relative_to(library).as_posix()):
        name = path.relative_to(library).as_posix()
        data = path.read_bytes()
        if name == TOPICS or (not name.startswith(LEFT_OUT) and data not in seen and _is_source(data)):
            seen.add(data)
            yield name, data


def _is_source(data: bytes) -> bool:
    if not LEAST_BYTES <= len(data) <= MOST_BYTES or b"\r" in data:
        return False
    try:
        text = data.decode()
        with warnings.catch_warnings(action="ignore"):
            ast.parse(text)
    except (UnicodeDecodeError, SyntaxError, ValueError):
        return False
    return sum(c.isdigit() for c in text) <= MOST_DIGITS * len(text)


def _held_out(files: dict[str, bytes]) -> set[str]:
    """Names drawn in the order of their path's hash until their bytes suffice; near copies of anything are passed over."""
    owners: dict[int, set[str]] = defaultdict(set)
    passages = {name: _passages(data) for name, data in files.items()}
    for name, own in passages.items():
        for passage in own:
            owners[passage].add(name)
    wanted, drawn = HELD_OUT * sum(map(len, files.values())), set()
    for name in sorted(files, key=lambda n: hashlib.sha256(n.encode()).hexdigest()):
        if wanted <= 0:
            break
        shared = sum(len(owners[passage]) > 1 for passage in passages[name])
        if HELD_OUT_BYTES[0] <= len(files[name]) <= HELD_OUT_BYTES[1] and shared <= MOST_SHARED * len(passages[name]):
            drawn.add(name)
            wanted -= len(files[name])
    return drawn


def _passages(data: bytes) -> set[int]:
    """Hashes of every run of `WINDOW` lines that are not blank, without their indentation."""
    lines = [line.strip() for line in data.splitlines() if line.strip()]
    return {hash(tuple(lines[i : i + WINDOW])) for i in range(max(1, len(lines) - WINDOW + 1))}


def _nested(files: dict[str, str]) -> dict[str, dict[str, str]]:
    folders: dict[str, dict[str, str]] = {}
    for name, digest in files.items():
        folder, _, own = name.rpartition("/")
        folders.setdefault(folder or ".", {})[own] = digest
    return folders


def _document(pinned: Pins) -> dict[str, object]:
    """What the list file holds; its SHA-256 is over the order in which a reader meets the files."""
    nested = {split: _nested(files) for split, files in pinned.items()}
    return {
        "python": platform.python_version(),
        "sha256": digest_of_pins({split: flat(folders) for split, folders in nested.items()}),
        **nested,
    }


def main() -> int:
    """The command: writes `corpus.json` beside this file for the Python that runs it."""
    parser = argparse.ArgumentParser(prog="python -m tapeout.models.tiny.pinning", description="Pins the corpus.")
    parser.add_argument("library", type=Path)
    library = parser.parse_args().library
    if not (library / TOPICS).is_file():
        print(f"error: {library}: found no {TOPICS}; expected the standard library of a whole CPython", file=sys.stderr)
        return 1
    pinned = pin(library)
    PINS.write_text(json.dumps(_document(pinned), indent=0) + "\n")
    print({split: len(files) for split, files in pinned.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
