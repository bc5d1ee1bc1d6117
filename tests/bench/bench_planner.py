"""What planning a step takes on the host: `python -m tests.bench.bench_planner`.

Bounds at 256 sequences with blocks of 5: 0.2 ms for the peer's rule, 0.4 ms for ours, medians. A number of sequences that changes in
every step is the worst case of our rule, because its averages are carried over to the new number.
"""

from collections.abc import Callable, Iterator
from itertools import cycle
from statistics import median
from time import perf_counter

import numpy as np

from tapeout.runtime.cost import decode_table, step_times
from tapeout.runtime.planner import Memory, Rules, compat, plan, survival

POSITIONS = 5
REPEATS = 600
BOUNDS_MS = {"compat": 0.2, "ours": 0.4}


def medians(sequences: int) -> dict[str, float]:
    """Median milliseconds by rule; step times are included, as the engine needs them anew in each step."""
    most = (sequences + 1) * (1 + POSITIONS)
    sizes = [*range(8, most, 8), most]
    table = decode_table(sizes, 10 + 0.012 * np.array(sizes))
    random = np.random.default_rng(sequences)
    rates = [survival(random.beta(1, 0.5, (sequences + 1, POSITIONS))) for _ in range(40)]
    memories = {"ours": Memory(), "ours, changing": Memory(), "ours, lengths 0 3 5": Memory()}

    def ours(name: str, rules: Rules, counts: Iterator[int]) -> Callable[[np.ndarray, np.ndarray], None]:
        def run(budget: np.ndarray, newest: np.ndarray) -> None:
            count = next(counts)
            times = step_times(table, count, count * POSITIONS)
            _, memories[name] = plan(memories[name], rules, budget[:count], newest[:count], times)

        return run

    def peer(budget: np.ndarray, newest: np.ndarray) -> None:
        compat(budget[:sequences], newest[:sequences], step_times(table, sequences, sequences * POSITIONS))

    rules = {
        "compat": peer,
        "ours": ours("ours", Rules(), cycle([sequences])),
        "ours, changing": ours("ours, changing", Rules(), cycle([sequences, sequences + 1])),
        "ours, lengths 0 3 5": ours("ours, lengths 0 3 5", Rules(draft_ms=((0, 0.0), (3, 0.3), (5, 0.4))), cycle([sequences])),
    }
    return {name: timed(rule, rates) for name, rule in rules.items()}


def timed(rule: Callable[[np.ndarray, np.ndarray], object], rates: list[np.ndarray]) -> float:
    """Median milliseconds of a call, after the averages are full."""
    taken = []
    for step in range(REPEATS):
        budget, newest = rates[step % len(rates)], rates[(step + 1) % len(rates)]
        start = perf_counter()
        rule(budget, newest)
        taken.append(perf_counter() - start)
    return 1e3 * median(taken[64:])


def main() -> None:
    for sequences in (16, 64, 256):
        for name, ms in medians(sequences).items():
            bound = BOUNDS_MS.get(name) if sequences == 256 else None
            print(f"plan, {sequences:3} sequences, {name:20}: {ms:.3f} ms" + (f" (bound {bound} ms)" if bound else ""))


if __name__ == "__main__":
    main()
