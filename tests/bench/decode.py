"""A decode step of one sequence: native and Python time, the bytes it must move, and where the native time goes.

`python -m tests.bench.decode [ARTIFACT WEIGHTS]`; without arguments it makes and compiles the tiny model. One worker thread; medians.
With drafts a step verifies a block of drafts and makes the next one, in two native calls: six rows and a draft, for which there is no bound.
"""

import argparse
import ctypes
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from time import perf_counter

from tapeout.compiler.api import compile_path
from tapeout.compiler.settings import Settings
from tapeout.models.tiny import write_tiny
from tapeout.runtime.artifact import load_artifact
from tapeout.runtime.device.cpu import LaunchTable
from tapeout.runtime.engine import Engine, EngineOptions
from tapeout.runtime.llm import open_engine
from tapeout.runtime.params import SamplingParams

NATIVE_BOUND_MS, PYTHON_BOUND_MS = 0.8, 0.3
PROMPT, TOKENS = list(range(10, 110)), 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", nargs="?", type=Path)
    parser.add_argument("weights", nargs="?", type=Path)
    parser.add_argument("--kernels", type=int, default=12, help="rows of the table of kernels")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        artifact, weights = given.artifact, given.weights
        if artifact is None or weights is None:
            artifact, weights = Path(folder, "artifact"), Path(folder, "tiny")
            write_tiny(weights, seed=0)
            compile_path(weights, artifact, Settings())
        for drafts in (False, True):
            _report(artifact, weights, drafts, given.kernels)


def _report(artifact: Path, weights: Path, drafts: bool, rows: int) -> None:
    engine, _ = open_engine(load_artifact(artifact), weights, EngineOptions(workers=1, drafts=drafts))
    native, steps, table = _timed(engine)
    python = statistics.median(s - n for s, n in zip(steps, native, strict=True)) * 1e3
    middle, tokens = statistics.median(native) * 1e3, (TOKENS - 1) / len(steps)
    moved = _weight_bytes(engine)
    bound = (f" (bound {NATIVE_BOUND_MS})", f" (bound {PYTHON_BOUND_MS})") if not drafts else (" (drafts verified and made, no bound)", "")
    print(
        f"decode step, one sequence, drafts {'on' if drafts else 'off'}: native {middle:.3f} ms{bound[0]}, Python {python:.3f} ms{bound[1]}, "
        f"{tokens:.2f} tokens, {table.count} launches in the last call; weights {moved:,} B, at 10 GB/s {moved / 1e10 * 1e3:.3f} ms"
    )
    for symbol, calls, spent in _by_kernel(engine, table)[:rows]:
        print(f"  {spent * 1e6:8.1f} us in {calls:3} launches of {symbol}")
    engine.close()


def _timed(engine: Engine) -> tuple[list[float], list[float], LaunchTable]:
    """Native and whole seconds of each decode step, and the table that a step runs."""
    native, steps, seen, calls = [], [], [], []
    run = engine.device.run

    def timed(table: LaunchTable, **how: bool) -> None:
        start = perf_counter()
        run(table, **how)
        native.append(perf_counter() - start)
        seen.append(table)

    engine.device.run = timed  # type: ignore[method-assign]
    engine.submit(PROMPT, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
    engine.step()
    while engine.has_work:
        native.clear()
        start = perf_counter()
        engine.step()
        steps.append(perf_counter() - start)
        calls.append(sum(native))
    engine.device.run = run  # type: ignore[method-assign]
    return calls, steps, seen[-1]


def _weight_bytes(engine: Engine) -> int:
    """Bytes of the weights that a step of one row cannot avoid: everything but tables and the experts it does not choose."""
    total, text = 0, engine.artifact.manifest.model.config["text_config"]
    assert isinstance(text, dict)
    for operand in engine.artifact.weights:
        share = int(str(text["num_experts_per_tok"])) / int(str(text["n_routed_experts"])) if ".experts." in operand.name else 1.0
        if operand.kind == "weight" and not operand.name.startswith(("embed", "mtp")):
            total += int(sum(part.bytes for part in operand.parts) * share)
    return total


def _by_kernel(engine: Engine, table: LaunchTable, repeats: int = 50) -> list[tuple[str, int, float]]:
    """(symbol, launches, median seconds of all of them) of one step, each launch run alone on the step's own buffers."""
    names = {engine.device.kernel(k.symbol): k.symbol for k in engine.artifact.manifest.kernels}
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    calls, spent = defaultdict(int), defaultdict(float)
    for function, buffers in table.launches.tolist():
        times = []
        for _ in range(repeats):
            start = perf_counter()
            kind(function)(buffers, 0, 1)
            times.append(perf_counter() - start)
        calls[names[function]] += 1
        spent[names[function]] += statistics.median(times)
    return sorted(((n, calls[n], spent[n]) for n in calls), key=lambda row: -row[2])


if __name__ == "__main__":
    main()
