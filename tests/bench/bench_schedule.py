"""Host cost of one schedule and commit cycle, without detokenization: `python -m tests.bench.bench_schedule`.

Bounds, medians: 1.0 ms at 256 running sequences, 0.35 ms at 64. Every sequence decodes; results come from an array made beforehand, so the
device costs nothing. Printed without drafts, with drafts of 5 (accepted at random, with confidences) that are all verified, and planned by our
rule with calibration; synchronously and with one step in flight. Planning has a bound of its own: `bench_planner`.
"""

from collections import deque
from statistics import median
from time import perf_counter

import numpy as np

from tapeout.runtime.blocks import BlockPool
from tapeout.runtime.cost import decode_table
from tapeout.runtime.params import SamplingParams
from tapeout.runtime.prefix import CacheIdentity, PrefixIndex
from tapeout.runtime.replay import Mode, ReplayRules
from tapeout.runtime.request import Request
from tapeout.runtime.scheduler import Scheduler, SchedulerOptions
from tapeout.runtime.step import Step, StepResult

BOUNDS_MS = {256: 1.0, 64: 0.35}
STEPS, WARM_UP = 400, 60
PROMPT, CONTEXT, BLOCK = 256, 8192, 128


def scheduler_of(sequences: int, drafts: int, plan: str) -> Scheduler:
    """A scheduler with `sequences` requests submitted, memory for all."""
    width = -(-CONTEXT // BLOCK)
    pool = BlockPool(sequences * width + 1, BLOCK, np.zeros((sequences, width), np.int32))
    rules = ReplayRules(Mode.COMPACT, 140, block=BLOCK)
    most = sequences * (1 + drafts)
    sizes = [*range(8, most, 8), most]
    times = decode_table(sizes, 10 + 0.012 * np.array(sizes))
    options = SchedulerOptions(max_rows=8192, max_context=CONTEXT, drafts=drafts, alignment=BLOCK, plan=plan, decode_times=times)
    found = Scheduler(options, pool, sequences, PrefixIndex(pool, rules, CacheIdentity("bench")), eos_id=1, clock=perf_counter)
    params = SamplingParams(temperature=0, max_tokens=CONTEXT)
    for i in range(sequences):
        found.roster.add(Request(f"r{i}", tuple(range(i + 2, i + 2 + PROMPT)), params, i))
    return found


def answered(step: Step, drafts: int, random: np.random.Generator) -> StepResult:
    """Tokens for every output: as many as a draft acceptance of one half gives."""
    decode, firsts = len(step.slots), sum(piece.yields for piece in step.pieces)
    widths = step.widths
    if step.draft_total is not None:  # the device's split; which drafts these are costs the host nothing
        each, more = divmod(step.draft_total, max(1, decode))
        widths = np.minimum(widths, 1 + each + (np.arange(decode) < more))
    luck = random.random((decode, drafts)) < 0.5
    counts = np.minimum(1 + np.cumprod(luck, axis=1).sum(axis=1), widths).astype(np.int64)
    counts = np.concatenate([counts, np.ones(firsts, np.int64)])
    tokens = random.integers(2, 1000, int(counts.sum())).astype(np.int32)
    logprobs, outputs = np.zeros(len(tokens), np.float32), decode + firsts
    if not drafts:
        return StepResult(counts, tokens, logprobs, widths)
    guesses, confidences = np.zeros((outputs, drafts), np.int32), random.random((outputs, drafts))
    return StepResult(counts, tokens, logprobs, widths, guesses, confidences, ms=10 + 0.012 * float(widths.sum()))


def median_ms(sequences: int, drafts: int, depth: int, plan: str = "all") -> float:
    """Median milliseconds of propose and commit while all sequences decode."""
    scheduler, random = scheduler_of(sequences, drafts, plan), np.random.default_rng(0)
    in_flight: deque[Step] = deque()
    taken = []
    while len(taken) < STEPS + WARM_UP:
        start = perf_counter()
        step = scheduler.propose()
        used = perf_counter() - start
        if step is None:
            raise RuntimeError("nothing to run")
        in_flight.append(step)
        if len(in_flight) > depth:
            oldest = in_flight.popleft()
            result = answered(oldest, drafts, random)
            start = perf_counter()
            scheduler.commit(oldest, result)
            scheduler.events()
            used += perf_counter() - start
        if len(step.slots) == sequences:
            taken.append(used)
    return 1e3 * median(taken[WARM_UP:])


def main() -> None:
    for sequences, bound in BOUNDS_MS.items():
        for drafts, plan in ((0, "all"), (5, "all"), (5, "ours")):
            for depth in (0, 1):
                how = f"drafts {drafts}{', planned' if plan == 'ours' else ''}, {'one step in flight' if depth else 'synchronous'}"
                ms = median_ms(sequences, drafts, depth, plan)
                print(f"schedule and commit, {sequences:3} sequences, {how:38}: {ms:.3f} ms" + (f" (bound {bound} ms)" if plan == "all" else ""))


if __name__ == "__main__":
    main()
