"""What Python adds to a decode step of one sequence: `python -m tests.bench.step_overhead`.

Runs the toy model, whose kernels take microseconds, and prints the step's time, that of its native calls, and the difference. The bound is
0.3 ms. With drafts a step verifies a block and drafts the next one: two native calls.
"""

import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from tapeout.runtime.device.cpu import LaunchTable
from tapeout.runtime.params import SamplingParams
from tests.runtime.toy import toy_engine, write_toy

STEPS = 40  # of one request; the toy context ends there
REPEATS = 25


def overhead_ms(directory: Path, workers: int, drafts: bool) -> tuple[float, float]:
    """Median milliseconds of a decode step and of the native calls within it."""
    engine = toy_engine(directory, workers=workers, drafts=drafts)
    native: list[float] = []
    run = engine.device.run

    def timed(table: LaunchTable, **how: bool) -> None:
        start = perf_counter()
        run(table, **how)
        native.append(perf_counter() - start)

    engine.device.run = timed  # type: ignore[method-assign]
    steps: list[float] = []
    calls: list[float] = []
    for _ in range(REPEATS):
        name = engine.submit([3, 4, 5], SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, logprobs=True))
        engine.step()
        while engine.has_work:
            native.clear()
            start = perf_counter()
            engine.step()
            steps.append(perf_counter() - start)
            calls.append(sum(native))
        engine.take(name)
    engine.close()
    return statistics.median(steps) * 1e3, statistics.median(calls) * 1e3


def main() -> None:
    with TemporaryDirectory() as folder:
        directory = write_toy(Path(folder, "artifact"))
        for workers in (1, 2):
            for drafts in (False, True):
                step, native = overhead_ms(directory, workers, drafts)
                name = f"workers {workers}, drafts {drafts!s:5}"
                print(f"{name}: step {step:.3f} ms, native calls {native:.3f} ms, Python {step - native:.3f} ms")


if __name__ == "__main__":
    main()
