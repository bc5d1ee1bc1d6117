"""The GPU suite: `python -m tests.bench.gpu run ARTIFACT WEIGHTS [--expected FILE] [--json FILE]` on a GPU host, from copied folders.

Prints greedy tokens against the CPU's (a file that `python -m tests.bench.gpu expect ARTIFACT WEIGHTS -o FILE` makes), the time of a step,
and for every kernel its time, bytes and operations against ceilings measured in the same run. Times are of graph replays, between events;
`cold` clears more memory than the second-level cache holds before every launch. PyTorch, if there, measures the matrix ceiling and nothing
else. The runtime and these files are all it needs: no compiler, no Triton.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tapeout.runtime.artifact import Artifact, Launch
from tapeout.runtime.artifact_set import open_artifact
from tapeout.runtime.device import Call, open_device
from tapeout.runtime.device.cuda import CudaDevice
from tapeout.runtime.program import Draw, LoadedPrograms, Part, StepRows
from tests.bench.gpu_attention import attention, show_attention
from tests.bench.gpu_floors import reached, summary
from tests.bench.greedy import Answer, answers, compared, last_logits, load_programs, prompts_of

PROMPTS, TOKENS, LONGEST = 64, 32, 48
COPY_BYTES = 2 << 30
CLEARED_BYTES = 192 << 20  # of memory that pushes everything else out of the second-level cache
IN_A_GRAPH, REPEATS = 8, 5
MATRIX = 8192
OPERATIONS = ("fp4", "fp8", "bf16", "f32")


class MeasuredDevice(CudaDevice):
    """The device as it is, and graphs in which memory is cleared before every launch."""

    clears: tuple[int, int, int] | None = None
    launched = 0

    def _launch(self, call: Call) -> None:
        if self.clears is not None and self.launched % self.clears[2] == 0:
            self._driver("cuMemsetD8Async", self.clears[0], 0, self.clears[1], self._stream)
        self.launched += 1
        super()._launch(call)

    def cleared(self, calls: Sequence[Call], start: int, size: int, each: int) -> Any:
        """A graph that clears `size` bytes before every `each` calls."""
        self.clears, self.launched = (start, size, each), 0
        try:
            return self.table(calls, copies=False)
        finally:
            self.clears = None

    def memory_seconds(self, size: int, source: int | None = None) -> float:
        """Seconds of one clearing of `size` bytes, or of one copy within the GPU."""
        to = self._allocated(size, "measurement")
        driver, stream = self._driver, self._stream
        driver("cuStreamBeginCapture", stream, driver.module.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        for _ in range(IN_A_GRAPH):
            if source is None:
                driver("cuMemsetD8Async", to, 0, size, stream)
            else:
                driver("cuMemcpyDtoDAsync", to, source, size, stream)
        executable = driver("cuGraphInstantiate", driver("cuStreamEndCapture", stream), 0)
        return self._replayed(executable) / IN_A_GRAPH

    def _replayed(self, executable: Any) -> float:
        from tapeout.runtime.device.cuda import GraphTable

        return timed(self, GraphTable(executable, ()))


def timed(device: CudaDevice, table: Any) -> float:
    """Median seconds of one replay, after a warm one."""
    device.run(table)
    return float(np.median([device.seconds(table, 3) for _ in range(REPEATS)]))


# -- ceilings


def ceilings(device: MeasuredDevice) -> dict[str, float | None]:
    """Bytes a second of a copy (read plus written; the driver's or PyTorch's, whichever is faster) and operations a second of a large bf16
    product (None without PyTorch)."""
    source = device.memory(COPY_BYTES, "measurement").address
    copy, matmul = _torch_ceilings()
    return {"copy": max(copy, 2 * COPY_BYTES / device.memory_seconds(COPY_BYTES, source)), "matmul": matmul}


def _torch_ceilings() -> tuple[float, float | None]:
    try:
        import torch
    except ImportError:
        return 0.0, None
    factors = [torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    moved = [torch.empty(COPY_BYTES, device="cuda", dtype=torch.uint8) for _ in range(2)]
    copy = 2 * COPY_BYTES / _torch_seconds(lambda: moved[0].copy_(moved[1]))
    matmul = 2 * MATRIX**3 / _torch_seconds(lambda: factors[0] @ factors[1])
    return copy, matmul


def _torch_seconds(work: Callable[[], Any], repeats: int = 10) -> float:
    import torch

    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for _ in range(3):
        work()
    marks[0].record()
    for _ in range(repeats):
        work()
    marks[1].record()
    torch.cuda.synchronize()
    return float(marks[0].elapsed_time(marks[1])) / 1e3 / repeats


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


# -- steps and kernels


def filled(programs: LoadedPrograms, rows: int, position: int) -> tuple[Part, ...]:
    """Loads a step of `rows` rows, one a sequence where there are enough slots, and runs it; the parts that it ran."""
    options = programs.artifact.manifest.options
    each = -(-rows // min(rows, options.max_sequences))
    step = StepRows()
    for slot in range(-(-rows // each)):
        count = min(each, rows - slot * each)
        tokens = [int(t) for t in np.random.default_rng(slot).integers(3, 259, count)]
        step.add(slot, position, tokens)
    ends = {slot: number for number, slot in enumerate(step.slots)}
    step.outputs += list(ends.values())[: options.max_outputs]
    step.draws += [Draw(0.0, -1, 1.0, 0, slot, position + each) for slot in list(ends)[: options.max_outputs]]
    drafting = programs.has_draft
    programs.step(step, drafting=drafting)
    bucket, outputs = programs.bucket(rows), len(step.outputs)
    parts: list[Part] = [("encoder", bucket), ("decoder", bucket), ("sample", programs.bucket(outputs))]
    return (*parts, ("draft", programs.draft_bucket(outputs))) if drafting else tuple(parts)


def quantities(launch: Launch, counts: dict[str, float]) -> dict[str, float]:
    """Bytes and operations of a launch at run-time counts (`entries` and `experts` among them)."""
    return {
        name: sum(value * float(np.prod([counts.get(key, 1.0) for key in term.split("*") if key != "fixed"])) for term, value in terms.items())
        for name, terms in launch.cost.items()
    }


def kernels(programs: LoadedPrograms, device: MeasuredDevice, rows: int, position: int, tops: dict[str, float | None]) -> dict[str, Any]:
    """Times of a step of `rows` rows and of its kernels, each launched alone on the step's own data, with the launches that its op puts in front."""
    parts = filled(programs, rows, position)
    whole = device.table([call for part in parts for call in programs.calls(part)])
    config: Any = programs.artifact.manifest.model.config["text_config"]
    outputs = min(rows, programs.artifact.manifest.options.max_sequences)
    experts = min(config["n_routed_experts"], rows * config["num_experts_per_tok"])
    counts = {"rows": rows, "kept": rows, "outputs": outputs, "sequences": outputs, "drafts": outputs * programs.artifact.draft_block,
              "entries": position, "experts": experts}  # fmt: skip
    clear = device.memory(CLEARED_BYTES, "measurement").address
    clearing = device.memory_seconds(CLEARED_BYTES)
    launches = [(launch, call) for part in parts for launch, call in zip(programs.launches(*part), programs.calls(part), strict=True)]
    groups: dict[int, list[int]] = defaultdict(list)
    for place, (launch, _) in enumerate(launches):
        if not _is_part(launches, place):
            groups[launch.kernel].append(place)
    table = []
    for number, places in groups.items():
        middle = places[len(places) // 2]
        first, call = launches[middle]
        start = next(p for p in range(middle, -1, -1) if p == 0 or not _is_part(launches, p - 1))
        device.run(device.table([call for _, call in launches[:start]]))  # the arena is as this op finds it
        calls = [replace(one, after=None) for _, one in launches[start : middle + 1]]  # one after the other
        hot = timed(device, device.table(calls * IN_A_GRAPH, copies=False)) / IN_A_GRAPH
        cold = timed(device, device.cleared(calls * IN_A_GRAPH, clear, CLEARED_BYTES, len(calls))) / IN_A_GRAPH - clearing
        table.append(_row(programs.artifact, number, len(places), call, quantities(first, counts), (hot, cold), tops))
    table.sort(key=lambda row: -row["cold_us"] * row["launches"])
    return {"rows": rows, "position": position, "step_us": 1e6 * timed(device, whole), "launches": len(launches),
            "sum_cold_us": sum(r["cold_us"] * r["launches"] for r in table), "sum_hot_us": sum(r["hot_us"] * r["launches"] for r in table),
            "kernels": table}  # fmt: skip


def _is_part(launches: Sequence[tuple[Launch, Call]], place: int) -> bool:
    """Whether a launch only prepares the next one: the same op's, whose cost stands on its last launch."""
    launch, _ = launches[place]
    return not launch.cost and place + 1 < len(launches) and launches[place + 1][0].buffers == launch.buffers


def _row(artifact: Artifact, number: int, launches: int, call: Call, cost: dict[str, float], seconds: tuple[float, float],
         tops: dict[str, float | None]) -> dict[str, Any]:  # fmt: skip
    kernel = artifact.manifest.kernels[number]
    moved = cost.get("read", 0.0) + cost.get("written", 0.0)
    work = sum(cost.get(kind, 0.0) for kind in OPERATIONS)
    hot, cold = seconds
    copy, matmul = tops["copy"], tops["matmul"]
    binary = kernel.binary
    return {
        "kernel": kernel.symbol, "family": kernel.family, "op": kernel.op, "variant": kernel.variant, "launches": launches,
        "grid": list(call.grid or ()),
        "hot_us": 1e6 * hot, "cold_us": 1e6 * cold, "bytes": moved, "operations": work,
        "copy_share": moved / cold / copy if copy and cold > 0 else None,
        "matmul_share": work / hot / matmul if matmul and hot > 0 else None,
        "registers": binary.registers if binary else None, "spills": binary.spills if binary else None,
        "occupancy": binary.occupancy if binary else None,
    }  # fmt: skip


def empty_us(programs: LoadedPrograms, device: MeasuredDevice) -> float:
    """Microseconds of a launch that has nothing to do: the smallest kernel of a step without rows."""
    programs.load(StepRows())
    device.upload(programs._inputs, programs._inputs_bytes)
    calls = programs.calls(("encoder", programs.artifact.buckets[0]))
    return min(1e6 * timed(device, device.table([replace(call, after=None)] * 64, copies=False)) / 64 for call in calls[:12])


# -- the suite


def decoded(programs: LoadedPrograms, count: int) -> dict[str, Any]:
    """`count` tokens for every slot at once, and the time of it, the prompts' steps and the host's work included."""
    prompts = prompts_of(programs.artifact.manifest.options.max_sequences, 20)
    answers(programs, prompts, 2, leads=False)
    started = time.perf_counter()
    found = answers(programs, prompts, count, leads=False)
    seconds = time.perf_counter() - started
    programs.forward(rows := StepRows([5], [0], [0], [0], [1], [0]))
    sound = bool(np.isfinite(programs.array("logits")[: len(rows.tokens)].astype(np.float32)).all())
    different = len({tuple(answer.tokens) for answer in found})
    tokens = sum(len(answer.tokens) for answer in found)
    return {"sequences": len(found), "tokens": tokens, "seconds": seconds, "tokens_a_second": tokens / seconds, "different": different,
            "logits_finite": sound}  # fmt: skip


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
    if decode:
        found["decoded"] = decoded(programs, decode)
        print(found["decoded"], flush=True)
    found["ceilings"] = ceilings(device)
    found["empty_us"] = empty_us(programs, device)
    found["steps"] = [kernels(programs, device, count, position, found["ceilings"]) for count in rows]
    for step in found["steps"]:
        for kernel in step["kernels"]:
            kernel["floor"] = reached(kernel, step["rows"], found["ceilings"], found["empty_us"])
    device.close()
    return found


def few_steps(artifact: Artifact, weights: Path) -> int:
    """A prefill in two chunks and four steps of one sequence, the last with drafts: little enough to run under compute-sanitizer."""
    device = MeasuredDevice(artifact)
    programs = load_programs(artifact, weights, device)
    for answer in answers(programs, [list(range(10, 16))], 4, chunk=3):
        print(answer.tokens)
    filled(programs, 1, 9)
    if programs.has_draft:
        print(programs.array("drafts")[:1].tolist())
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
    print(f"copy {copy / 1e12:.2f} TB/s, bf16 matmul {product}, empty launch {found['empty_us']:.2f} us, opened in "
          f"{found['open_seconds']:.2f} s, weights in {found['weights_seconds']:.2f} s")  # fmt: skip
    for step in found["steps"]:
        print(f"\nstep of {step['rows']} rows at {step['position']}: {step['step_us']:.0f} us, {step['launches']} launches, kernels alone "
              f"{step['sum_hot_us']:.0f} us hot, {step['sum_cold_us']:.0f} us cold")  # fmt: skip
        print(f"{'kernel':34} {'n':>3} {'hot us':>8} {'cold us':>8} {'MB':>8} {'Gop':>8} {'copy %':>7} {'mm %':>6} {'floor %':>7} regs occ %")
        for r in step["kernels"][:most]:
            shares = [f"{100 * r[k]:.1f}" if r[k] is not None else "-" for k in ("copy_share", "matmul_share", "floor")]
            print(f"{r['kernel']:34} {r['launches']:3} {r['hot_us']:8.2f} {r['cold_us']:8.2f} {r['bytes'] / 1e6:8.2f} {r['operations'] / 1e9:8.3f} "
                  f"{shares[0]:>7} {shares[1]:>6} {shares[2]:>7} {r['registers'] or 0:4} {100 * (r['occupancy'] or 0):5.0f}")  # fmt: skip
        print(summary(step))


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
