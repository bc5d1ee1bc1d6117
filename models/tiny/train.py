"""Trains the checkpoint that ships as the tiny trained model: backbone, then draft stages (needs torch, `pip install -e '.[train]'`).

    python -m tapeout.models.tiny.train tokens -o FILE                        encodes the pinned corpus once
    python -m tapeout.models.tiny.train run --tokens FILE -o DIR [options]    one run; --resume DIR goes on from an earlier one
    python -m tapeout.models.tiny.train write --tokens FILE --resume DIR -o FILE   greedy text of a run's weights, for the draft stages
    python -m tapeout.models.tiny.train weights DIR... -o FILE                a run's weights as an .npz, for the export

A run is deterministic for its seed and options on one machine. It writes its weights, `log.jsonl`, and `figures.json`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import sysconfig
import time
import zipfile
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tapeout.models.deepseek_v41.config import ModelConfig, load_config, shipped_config
from tapeout.models.deepseek_v41.errors import InputError
from tapeout.models.tiny.corpus import CorpusError

if TYPE_CHECKING:
    from tapeout.models.tiny.differentiable.training import Plan

ASIDE_BYTES = 1_000_000


def main() -> int:
    """Parses the command line and runs; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tapeout.models.tiny.train", description="Trains the tiny checkpoint.")
    commands = parser.add_subparsers(dest="command", required=True)
    tokens = commands.add_parser("tokens", help="encode the corpus")
    tokens.add_argument("-o", "--output", required=True, metavar="FILE", type=Path)
    run = commands.add_parser("run", help="train")
    run.add_argument("--written", metavar="FILE", type=Path, help="greedy text of the resumed weights, from the command `write`")
    write = commands.add_parser("write", help="greedy text behind prompts of every split")
    for command, required in ((run, False), (write, True)):
        command.add_argument("--tokens", required=True, metavar="FILE", type=Path, help="written by the command `tokens`")
        command.add_argument("-o", "--output", required=True, metavar="FILE" if required else "DIR", type=Path)
        command.add_argument(
            "--resume", action="append", default=[], required=required, metavar="DIR", type=Path, help="parts of a state; may repeat"
        )
        command.add_argument("--config", metavar="FILE", type=Path, help="a config.json; by default that of the shipped checkpoint")
        command.add_argument("--device", default="cpu")
        command.add_argument("--set", action="append", default=[], metavar="NAME=NUMBER", help="a value of the plan; may repeat")
    weights = commands.add_parser("weights", help="weights of a run as float32 arrays by tensor name")
    weights.add_argument("folders", nargs="+", metavar="DIR", type=Path, help="folders with parts of a state")
    weights.add_argument("-o", "--output", required=True, metavar="FILE", type=Path)
    options = parser.parse_args()
    try:
        return {"tokens": _tokens, "run": _run, "write": _write, "weights": _weights}[options.command](options)
    except ImportError as error:
        print(f"error: {error.name} is not installed; pip install -e '.[train]'", file=sys.stderr)
    except (OSError, ValueError, CorpusError, InputError) as error:
        print(f"error: {error}", file=sys.stderr)
    return 1


def _config(options: argparse.Namespace) -> ModelConfig:
    return load_config(options.config) if options.config else shipped_config("tiny-trained")


def _tokens(options: argparse.Namespace) -> int:
    from tapeout.models.deepseek_v41.token_map import load_token_map
    from tapeout.models.deepseek_v41.tokenizer import load_tokenizer
    from tapeout.models.tiny.corpus import read_corpus
    from tapeout.models.tiny.differentiable.data import write_token_file

    config, folder, corpus = shipped_config("tiny-trained"), Path(__file__).with_name("trained"), read_corpus()
    tokenizer = load_tokenizer(folder, config)
    token_map = load_token_map(folder, config, tokenizer).astype(np.int64)
    splits = {name: [document.text for document in getattr(corpus, name)] for name in ("train", "held_out")}
    splits["aside"] = _bundled_sources()
    write_token_file(options.output, config, tokenizer, token_map, splits)
    print(options.output)
    return 0


def _bundled_sources() -> list[str]:
    """Texts of the packages that CPython bundles as wheels, about `ASIDE_BYTES` of them: Python that the corpus does not have."""
    folder = Path(sysconfig.get_path("stdlib"), "ensurepip", "_bundled")
    texts: dict[str, str] = {}
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            texts |= {name: archive.read(name).decode(errors="ignore") for name in archive.namelist() if name.endswith(".py")}
    if not texts:
        raise ValueError(f"no sources to set aside - {folder} - found no wheels, expected those of pip and setuptools - use a full CPython")
    size, chosen = 0, []
    for name in sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if size < ASIDE_BYTES:
            chosen.append(texts[name])
            size += len(texts[name])
    return chosen


def _run(options: argparse.Namespace) -> int:
    from tapeout.models.tiny.differentiable.training import Plan, Training

    plan = _plan(Plan, options.set)
    options.output.mkdir(parents=True, exist_ok=True)
    with (options.output / "log.jsonl").open("w") as file:
        started = time.monotonic()

        def log(entry: dict[str, Any]) -> None:
            line = json.dumps({"seconds": round(time.monotonic() - started, 1)} | entry)
            print(line, flush=True)
            file.write(line + "\n")
            file.flush()

        log({"plan": asdict(plan)})
        training = Training(_config(options), options.tokens, plan, options.resume, options.device, log, options.written)
        figures = training.run(options.output)
    (options.output / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def _write(options: argparse.Namespace) -> int:
    from tapeout.models.tiny.differentiable.data import write_written_file
    from tapeout.models.tiny.differentiable.training import Plan, Training

    plan = _plan(Plan, options.set)
    training = Training(_config(options), options.tokens, plan, options.resume, options.device, print)
    write_written_file(options.output, training.greedy_texts())
    print(options.output)
    return 0


def _weights(options: argparse.Namespace) -> int:
    from tapeout.models.tiny.differentiable.state import load_state
    from tapeout.models.tiny.differentiable.weights import stored_arrays

    weights, _ = load_state(options.folders)
    if not weights:
        raise ValueError(f"{options.folders[0]} - found no part-*.npz.xz, expected the folder of a run - name its output folder")
    with options.output.open("wb") as file:
        np.savez(file, **stored_arrays(weights))  # type: ignore[arg-type]
    print(options.output)
    return 0


def _plan(kind: type[Plan], changes: list[str]) -> Plan:
    known: dict[str, Callable[[float], float]] = {field.name: int if field.type == "int" else float for field in fields(kind)}
    values: dict[str, Any] = {}
    for change in changes:
        name, _, number = change.partition("=")
        if name not in known:
            raise ValueError(f"--set {change} - found the name '{name}', expected one of {', '.join(known)} - correct the name")
        values[name] = known[name](_number(change, number))
    return kind(**values)


def _number(change: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--set {change} - found '{text}', expected a number - write NAME=NUMBER") from None


if __name__ == "__main__":
    sys.exit(main())
