"""The GPU suite: `python -m tests.bench.gpu run ARTIFACT WEIGHTS [--expected FILE] [--json FILE]` on a GPU host, from copied folders.

Prints greedy tokens against the CPU's (a file that `python -m tests.bench.gpu expect ARTIFACT WEIGHTS -o FILE` makes), the time of a step,
for every kernel its time, bytes and operations against ceilings measured in the same run, attention with full lists, and the floors. PyTorch,
if there, measures the ceilings and its library's products beside FP8 linears, nothing else. The runtime and these files are all it needs: no
compiler, no Triton.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tapeout.runtime.artifact import Artifact
from tapeout.runtime.artifact_set import open_artifact
from tapeout.runtime.device import Call, open_device
from tapeout.runtime.engine import Engine, EngineOptions
from tapeout.runtime.llm import LLM
from tapeout.runtime.params import SamplingParams
from tapeout.runtime.program import Draw, LoadedPrograms, StepRows
from tests.bench.gpu_attention import attention, show_attention
from tests.bench.gpu_floors import ATTENDED, FEW, attention_floors, show_floors
from tests.bench.gpu_kernels import filled, kernels, parts_of, show_step
from tests.bench.gpu_timing import MeasuredDevice, ceilings, empty_kernel_us, timed
from tests.bench.greedy import Answer, answers, bound_weights, compared, last_logits, load_programs, prompts_of
from tests.bench.meanings.scene import Memory

PROMPTS, TOKENS, LONGEST = 64, 32, 48
REPLAYS, IN_A_ROW = 5, 64


# -- correctness


def expect(artifact: Artifact, weights: Path, noise: float) -> dict[str, Any]:
    """What the CPU says: prompts, tokens, leads, logits behind the first prompts, and the model's noise."""
    device = open_device(artifact)
    programs = load_programs(artifact, weights, device)
    prompts = prompts_of(PROMPTS, min(LONGEST, artifact.buckets[-1]))
    found = answers(programs, prompts, TOKENS)
    logits = last_logits(programs, prompts[:8])
    device.close()
    return {
        "prompts": prompts,
        "tokens": [a.tokens for a in found],
        "leads": [a.leads for a in found],
        "logits": logits.tolist(),
        "noise": noise,
    }


def correctness(programs: LoadedPrograms, expected: dict[str, Any]) -> dict[str, Any]:
    """Tokens whole and in chunks, and the distance of logits."""
    wanted = [Answer(tokens, leads) for tokens, leads in zip(expected["tokens"], expected["leads"], strict=True)]
    count = len(wanted[0].tokens)
    started = time.perf_counter()
    out = {name: compared(answers(programs, expected["prompts"], count, chunk), wanted, expected["noise"]) for name, chunk in
           (("whole", None), ("chunks of 7", 7), ("chunks of 16", 16))}  # fmt: skip
    logits = np.array(expected["logits"], np.float32)
    difference = np.abs(last_logits(programs, expected["prompts"][: len(logits)]) - logits)
    distances = {"logits_rms": float(np.sqrt(np.mean(difference**2))), "logits_max": float(difference.max())}
    return {**out, **distances, "seconds": time.perf_counter() - started}


def empty_us(programs: LoadedPrograms, device: MeasuredDevice) -> float:
    """Microseconds of a graph's node that has nothing to do and begins when the one in front has ended: the smallest kernel of a step without
    rows."""
    programs.load(StepRows())
    device.upload(programs._inputs, programs._inputs_bytes)
    calls, found = programs.calls(("encoder", programs.artifact.buckets[0]))[:12], []
    device.table(calls)  # room for their scratch

    def in_a_row(call: Call) -> None:
        for _ in range(IN_A_ROW):
            device._launch(call)

    for call in calls:
        found.append(timed(device, device.recorded(partial(in_a_row, call))))
    return 1e6 * min(found) / IN_A_ROW


# -- bits


def same_in_every_bucket(programs: LoadedPrograms) -> dict[str, Any]:
    """Whether a decoded row has the same logits, token and drafts, bit for bit, among as many rows as each bucket holds, and in which not; and in
    which buckets a step's bits change when it runs again, or launch by launch, each finished before the next."""
    (prompt,) = prompts_of(1, min(LONGEST, programs.artifact.buckets[-1]), seed=3)
    first = StepRows()
    first.add(0, 0, prompt)
    programs.forward(first)
    seen: dict[int, tuple[bytes, ...]] = {}
    unsteady = []
    for bucket in programs.artifact.buckets:
        rows = _among(programs, bucket, len(prompt))
        runs = []
        for _ in range(REPLAYS):
            programs.step(rows, drafting=programs.has_draft, logits=True)
            runs.append(_bits(programs))
        seen[bucket] = runs[0]
        if len({*runs, _launch_by_launch(programs, len(rows.tokens), len(rows.outputs))}) > 1:
            unsteady.append(bucket)
    different = [bucket for bucket, bits in seen.items() if bits != seen[programs.artifact.buckets[0]]]
    return {"buckets": list(seen), "different": different, "unsteady": unsteady}


def _bits(programs: LoadedPrograms) -> tuple[bytes, ...]:
    """What the last step says of its first output."""
    names = ("logits", "sampled", *(("drafts", "confidences") if programs.has_draft else ()))
    return tuple(programs.array(name)[0].tobytes() for name in names)


def _launch_by_launch(programs: LoadedPrograms, rows: int, outputs: int) -> tuple[bytes, ...]:
    """The bits of the step that is loaded, over results that were overwritten first."""
    memory = Memory(programs.device)
    memory.fill(programs._results.address, programs._results_bytes, 0xFF)
    memory.fill(programs._fetched.address, programs.array("logits")[:outputs].nbytes, 0xFF)
    for part in parts_of(programs, rows, outputs):
        for call in programs.calls(part):
            memory.launch([call])
    programs.device.download(programs._results, programs._results_bytes)
    programs._fetch_logits(outputs)
    return _bits(programs)


def _among(programs: LoadedPrograms, count: int, position: int) -> StepRows:
    """The next row of slot 0 in the middle of `count` rows of other sequences; every sequence asks for its last row's logits, slot 0 first."""
    options, rows, ends = programs.artifact.manifest.options, StepRows(), {}
    others = min(options.max_sequences, count) - 1
    spread = [len(part) for part in np.array_split(np.arange(count - 1), others)] if others else []
    for place in range(others + 1):
        if place == others // 2:
            rows.add(0, position, [77])
            ends[0] = len(rows.tokens) - 1
        if place < others:
            rows.add(place + 1, 0, [int(t) for t in np.random.default_rng(place).integers(3, 259, spread[place])])
            ends[place + 1] = len(rows.tokens) - 1
    for slot in sorted(ends):
        rows.outputs.append(ends[slot])
        rows.draws.append(Draw(0.0, -1, 1.0, 0, slot, rows.positions[ends[slot]] + 1))
    return rows


# -- the suite


def decoded(programs: LoadedPrograms, device: MeasuredDevice, weights: Path, count: int) -> dict[str, Any]:
    """`count` tokens for every slot at once, and the time of it: by the programs alone, where each prompt is a step, and through the engine. And
    whether they are the same where every launch waits for the one in front to end, and through the engine, plainly and with queued steps."""
    prompts = prompts_of(programs.artifact.manifest.options.max_sequences, 20)
    answers(programs, prompts, 2, leads=False)
    started = time.perf_counter()
    found = answers(programs, prompts, count, leads=False)
    seconds = time.perf_counter() - started
    programs.forward(rows := StepRows([5], [0], [0], [0], [1], [0]))
    sound = bool(np.isfinite(programs.array("logits")[: len(rows.tokens)].astype(np.float32)).all())
    different = len({tuple(answer.tokens) for answer in found})
    with device.one_after_the_other(programs):
        same = [answer.tokens for answer in answers(programs, prompts, count, leads=False)] == [answer.tokens for answer in found]
    tokens = sum(len(answer.tokens) for answer in found)
    plain, waiting = through_the_engine(programs.artifact, weights, prompts, count, asynchronous=False)
    queued, engine = through_the_engine(programs.artifact, weights, prompts, count, asynchronous=True)
    agree = plain == queued == [answer.tokens for answer in found]
    return {"sequences": len(found), "tokens": tokens, "seconds": seconds, "tokens_a_second": tokens / seconds, "different": different,
            "logits_finite": sound, "same_one_after_the_other": same, "same_through_the_engine": agree,
            "engine_tokens_a_second": tokens / engine, "engine_synchronous": tokens / waiting}  # fmt: skip


def through_the_engine(
    artifact: Artifact, weights: Path, prompts: list[list[int]], count: int, *, asynchronous: bool
) -> tuple[list[list[int]], float]:
    """The same tokens by requests to an engine of its own: prompts share steps, and what the host does between two steps is in the time. Greedy
    tokens of every prompt, and the seconds that all took, which is what a user waits."""
    engine = Engine(artifact, bound_weights(artifact, weights), EngineOptions(asynchronous=asynchronous))
    llm = LLM.over(engine, None)
    try:
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        started = time.perf_counter()
        found = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
        seconds = time.perf_counter() - started
    finally:
        llm.close()
    return [list(result.outputs[0].token_ids) for result in found], seconds


def suite(
    artifact: Artifact, weights: Path, expected: dict[str, Any] | None, rows: Sequence[int], position: int, decode: int = 0
) -> dict[str, Any]:
    """Everything, as data."""
    started = time.perf_counter()
    device = MeasuredDevice(artifact)
    opened = time.perf_counter()
    programs = load_programs(artifact, weights, device)
    loaded = time.perf_counter()
    found: dict[str, Any] = {"artifact": artifact.manifest.identity, "target": artifact.target, "toolchain": artifact.manifest.toolchain,
                             "open_seconds": opened - started, "weights_seconds": loaded - opened}  # fmt: skip
    if expected is not None:
        found["correctness"] = correctness(programs, expected)
        print(_correctness_line(found["correctness"]), flush=True)
    found["bits"] = same_in_every_bucket(programs)
    bits = found["bits"]
    print(f"a row's bits are the same in buckets {bits['buckets']}, but for {bits['different']}; a step's in {REPLAYS} runs and launch by launch, "
          f"but for {bits['unsteady']}", flush=True)  # fmt: skip
    if decode:
        found["decoded"] = decoded(programs, device, weights, decode)
        print(found["decoded"], flush=True)
    found["ceilings"] = ceilings(device)
    found["empty_us"], found["empty_kernel_us"] = empty_us(programs, device), empty_kernel_us(device)
    found["steps"] = [kernels(programs, device, count, position, found["ceilings"], found["empty_us"]) for count in rows]
    found["attention"] = attention(artifact, device, timed, (FEW, ATTENDED))
    device.close()
    return found


def few_steps(artifact: Artifact, weights: Path) -> int:
    """A prefill in two chunks and four steps of one sequence, the last with drafts, then a step in every larger bucket: for a checker."""
    device = MeasuredDevice(artifact)
    programs = load_programs(artifact, weights, device)
    for answer in answers(programs, [list(range(10, 16))], 4, chunk=3):
        print(answer.tokens)
    filled(programs, 1, 9)
    if programs.has_draft:
        print(programs.array("drafts")[:1].tolist())
    for below, bucket in pairwise(artifact.buckets):
        filled(programs, below + 1, 20)
        print(f"bucket {bucket}: {programs.array('sampled')[:4].tolist()}")
    device.close()
    return 0


def _correctness_line(found: dict[str, Any]) -> str:
    parts = [
        f"{name}: {c['prompts_equal']}/{c['prompts']} prompts and {c['tokens_equal']}/{c['tokens']} tokens equal, {len(c['wrong'])} wrong"
        for name, c in found.items()
        if isinstance(c, dict)
    ]
    return f"greedy tokens against the CPU: {'; '.join(parts)}; logits rms {found['logits_rms']:.4g}, max {found['logits_max']:.4g}"


def show(found: dict[str, Any], most: int) -> None:
    """The figures as tables."""
    copy, matmul = found["ceilings"]["copy"], found["ceilings"]["matmul"]
    product = f"{matmul / 1e12:.0f} TFLOP/s" if matmul else "not measured"
    print(f"copy {copy / 1e12:.2f} TB/s, bf16 matmul {product}, empty launch {found['empty_us']:.2f} us (an empty kernel "
          f"{found['empty_kernel_us']:.2f} us), opened in {found['open_seconds']:.2f} s, weights in {found['weights_seconds']:.2f} s")  # fmt: skip
    for step in found["steps"]:
        show_step(step, most)
    show_floors(found["steps"])
    if found["attention"]:
        print()
        show_attention(found["attention"])
        print("attention with full lists, of its floor: " + ", ".join(f"{k} {100 * x:.0f} %" for k, x in attention_floors(found["attention"])))


def main(arguments: Sequence[str] | None = None) -> int:
    """0 done, 1 wrong tokens."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("expect", "run", "steps", "attend"),
                        help="steps: one chunked prefill and four steps, for a checker; attend: attention alone, with full lists")
    parser.add_argument("artifact", type=Path)
    parser.add_argument("weights", type=Path, help="checkpoint folder, or `random`: weights that are never written")
    parser.add_argument("--expected", type=Path, help="what `expect` wrote")
    parser.add_argument("--noise", type=float, default=0.0, help="`expect`: lead from which tokens must agree; 0 asks for all")
    parser.add_argument("--rows", type=lambda t: [int(w) for w in t.split(",")], default=[1], help="rows of the steps to time, as 1,8,64")
    parser.add_argument("--position", type=int, default=100, help="tokens in front of the timed rows")
    parser.add_argument("--decode", type=int, default=0, help="tokens to decode for every slot at once, timed as a whole")
    parser.add_argument("--most", type=int, default=25, help="rows of a table")
    parser.add_argument("--json", "-o", type=Path, help="write everything here")
    given = parser.parse_args(arguments)
    if given.what == "attend":
        artifact = open_artifact(given.artifact, "cuda")
        device = MeasuredDevice(artifact)
        show_attention(attention(artifact, device, timed, given.rows))
        device.close()
        return 0
    if given.what == "steps":
        return few_steps(open_artifact(given.artifact, "cuda"), given.weights)
    if given.what == "expect":
        found = expect(open_artifact(given.artifact, "cpu"), given.weights, given.noise)
    else:
        expected = json.loads(given.expected.read_text()) if given.expected else None
        found = suite(open_artifact(given.artifact, "cuda"), given.weights, expected, given.rows, given.position, given.decode)
        show(found, given.most)
    if given.json is not None:
        given.json.write_text(json.dumps(found) + "\n")
    wrong = [c for c in found.get("correctness", {}).values() if isinstance(c, dict) and c["wrong"]]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
