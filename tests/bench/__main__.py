"""`make bench`: every benchmark of this folder, one after the other, each in its own process with one BLAS thread.

OPENBLAS_CORETYPE and OPENBLAS_L2_SIZE are removed first, so that numpy may use all that the machine has; products are printed for the
baseline (numpy limited to the same instruction set) and for this host (`native`).
"""

import os
import subprocess
import sys

NATIVE = {"OPENBLAS_NUM_THREADS": "1"}
SAME_INSTRUCTIONS = {**NATIVE, "OPENBLAS_CORETYPE": "Haswell"}
RUNS: list[tuple[str, list[str], dict[str, str]]] = [
    ("products, x86-64-v3 on both sides", ["tests.bench.bench_products"], SAME_INSTRUCTIONS),
    ("products, everything this host has on both sides", ["tests.bench.bench_products", "--cpu", "native"], NATIVE),
    ("a decode step of one sequence", ["tests.bench.decode"], NATIVE),
    ("what the engine adds to a step", ["tests.bench.step_overhead"], NATIVE),
    ("planning a step", ["tests.bench.bench_planner"], NATIVE),
    ("scheduling and committing a step", ["tests.bench.bench_schedule"], NATIVE),
    ("how good the trained checkpoint is", ["tests.bench.trained"], NATIVE),
    ("vector operations of Ascend kernels", ["tests.bench.ascend_operations"], NATIVE),
]


def main() -> int:
    """Runs all; the exit code is that of the first that failed."""
    worst = 0
    for title, arguments, environment in RUNS:
        print(f"\n== {title}: python -m {' '.join(arguments)}", flush=True)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS_")}
        done = subprocess.run([sys.executable, "-m", *arguments], env=kept | environment, check=False)
        worst = worst or done.returncode
    return worst


sys.exit(main())
