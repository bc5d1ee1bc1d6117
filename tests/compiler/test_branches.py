"""What launches wait for: just the conflicts, over random accesses; and the tiny model run in the worst order that the waits allow."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tapeout.codegen import plan_memory
from tapeout.compiler import driver, pipeline
from tapeout.compiler import programs as programs_of
from tapeout.compiler.api import compile_path
from tapeout.compiler.branches import Branches
from tapeout.runtime.artifact import Artifact, Program, load_artifact
from tapeout.runtime.device import Call, open_device
from tapeout.runtime.program import Draw, LoadedPrograms, StepRows
from tests.bench.greedy import load_programs
from tests.end_to_end.conftest import SETTINGS, Model, model  # noqa: F401 (the fixture)

SMALL = 128
Access = tuple[list[tuple[Any, int]], list[tuple[Any, int]]]


def closure(waits: Sequence[tuple[int, ...]]) -> list[set[int]]:
    """All launches that each one runs behind."""
    out: list[set[int]] = []
    for number, distances in enumerate(waits):
        direct = {number - d for d in distances}
        out.append(direct.union(*(out[i] for i in direct)))
    return out


def meet(one: tuple[Any, int], other: tuple[Any, int]) -> bool:
    (a, n), (b, m) = one, other
    if a[0] != "arena" or b[0] != "arena":
        return bool(a == b)
    return bool(a[1] < b[1] + m and b[1] < a[1] + n)


def expected(accesses: Sequence[Access], line: Sequence[int] = ()) -> list[set[int]]:
    """By definition: behind every earlier launch that it conflicts with, those of the line behind the last of the line, and behind what those are
    behind."""
    out: list[set[int]] = []
    for number, (reads, writes) in enumerate(accesses):
        direct = {
            i for i in range(number)
            if any(meet(x, y) for x in reads for y in accesses[i][1]) or any(meet(x, y) for x in writes for part in accesses[i] for y in part)
        }  # fmt: skip
        direct |= {max(i for i in line if i < number)} if number in line[1:] else set()
        out.append(direct.union(*(out[i] for i in direct)))
    return out


@pytest.mark.parametrize("in_line", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_waits_are_the_conflicts_and_no_more(seed: int, in_line: bool) -> None:
    """Ranges of many lengths that cut each other, named values among them; no distance follows from others. A line leaves some launches out."""
    random = np.random.default_rng(seed)

    def place() -> tuple[Any, int]:
        if random.random() < 0.2:
            return ("state", f"s{random.integers(3)}", "values"), 0
        return ("arena", int(random.integers(0, 40)) * 64), int(random.integers(1, 6)) * 64

    accesses = [([place() for _ in range(random.integers(0, 4))], [place() for _ in range(random.integers(1, 3))]) for _ in range(60)]
    beside = random.random(len(accesses)) < 0.3
    branches = Branches(in_line=in_line)
    waits = [branches.add(reads, writes, beside=bool(apart)) for (reads, writes), apart in zip(accesses, beside, strict=True)]
    found = closure(waits)
    assert found == expected(accesses, [int(n) for n in np.flatnonzero(~beside)] if in_line else ())
    for number, distances in enumerate(waits):
        direct = [number - d for d in distances]
        assert direct == sorted(direct, reverse=True) and not any(i in found[j] for i in direct for j in direct)


def test_a_chain_and_two_branches() -> None:
    branches = Branches()
    a, b, c, d = ((("arena", 64 * i), 64) for i in range(4))
    assert branches.add([], [a]) == ()
    assert branches.add([a], [b]) == (1,) and branches.add([a], [c]) == (2,), "both read the first"
    assert branches.add([b, c], [d]) == (1, 2)
    assert branches.add([], [a]) == (2, 3), "whoever overwrites waits for readers"
    assert branches.add([(("io", "tokens", "values"), 0)], [d]) == (2,)


def test_a_line_and_one_launch_beside_it() -> None:
    branches = Branches(in_line=True)
    a, b, c, d = ((("arena", 64 * i), 64) for i in range(4))
    assert branches.add([], [a]) == ()
    assert branches.add([], [b], beside=True) == ()
    assert branches.add([], [c]) == (2,) and branches.add([], [d]) == (1,), "the line does not wait for what it does not use"
    assert branches.add([b, d], [a]) == (1, 3)
    assert branches.add([], [d], beside=True) == (1,), "what is overwritten has been read"


# -- the whole model


@pytest.fixture(scope="module")
def apart(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """The tiny model for the CPU, planned as for a GPU, small buckets alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_memory, "APART_ROWS", SMALL)
        patch.setattr(programs_of, "APART_ROWS", SMALL)
        patch.setattr(pipeline, "CHIPS", {"cpu": None})
        patch.setattr(driver, "CHIPS", {"cpu": None})
        folder = tmp_path_factory.mktemp("apart")
        compile_path(model.weights, folder / "artifact", SETTINGS, cache=model.artifact.parent / "cache")
    return folder / "artifact"


def worst(calls: Sequence[Call]) -> list[Call]:
    """An order in which every call runs as early or as late as the waits allow: of those that may run, the last."""
    waits: list[set[int]] = []
    base: set[int] = set()
    for number, call in enumerate(calls):
        if call.after is None:
            base = set(range(number))
        waits.append(base if not call.after else base | {number - d for d in call.after})
    done: list[int] = []
    left = set(range(len(calls)))
    while left:
        number = max(i for i in left if waits[i] <= set(done))
        done.append(number)
        left.remove(number)
    return [replace(calls[i], after=None) for i in done]


def results(programs: LoadedPrograms, reorder: bool) -> list[Any]:
    """Logits, tokens and drafts of two chunks of a prompt, three decoded tokens and a chunk in a large bucket, of two sequences."""
    out = []
    if reorder:
        for buckets in programs.artifact.programs:
            for bucket in programs.artifact.buckets:
                for entry in ("encoder", "decoder", "sample", "draft") if buckets == "step" else ():
                    programs._calls[entry, bucket] = worst(programs.calls((entry, bucket)))
    for start, size in [(0, 5), (5, 4), (9, 1), (10, 1), (11, 1), (12, SMALL)]:
        rows = StepRows()
        for slot in (3, 1):
            rows.add(slot, start, [3 + (7 * slot + 11 * i) % 250 for i in range(start, start + size)])
        rows.outputs += [size - 1, 2 * size - 1]
        rows.draws += [Draw(0.0, -1, 1.0, 1, slot, start + size) for slot in (3, 1)]
        programs.step(rows, drafting=True, logits=True)
        out += [programs.array(name)[:2].copy() for name in ("logits", "sampled", "drafts", "confidences")]
    return out


def test_the_worst_order_gives_the_same_bits(model: Model, apart: Path) -> None:  # noqa: F811
    found = []
    for folder, reorder in ((model.artifact, False), (apart, False), (apart, True)):
        artifact = load_artifact(folder)
        device = open_device(artifact, 1)
        found.append(results(load_programs(artifact, model.weights, device), reorder))
        device.close()
    for one in found[1:]:
        for a, b in zip(found[0], one, strict=True):
            np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


def test_small_buckets_branch_and_large_ones_are_a_line_but_for_lookups(apart: Path) -> None:
    artifact = load_artifact(apart)
    moved, beside = 0, 0
    for buckets in artifact.programs.values():
        for bucket, program in buckets.items():
            waits = [launch.after for launch in program.launches]
            assert None not in waits
            if bucket > SMALL:
                behind, lookups = closure([after or () for after in waits]), _lookups(artifact, program)
                line = [n for n in range(len(waits)) if n not in lookups]
                assert all(before in behind[number] for before, number in pairwise(line))
                for number in lookups:
                    use = next(n for n in line if number in behind[n])
                    assert use - number > 20 and number - max(behind[number], default=-1) > 0 and not behind[number] & set(line[1:]) - behind[use]
                    beside += len({*range(number)} - behind[number]) > 0
            if bucket <= SMALL:
                moved += [call.grid for call in worst(_numbered(waits))] != list(range(len(waits)))
                depth = [0] * len(waits)
                for number, after in enumerate(waits):
                    depth[number] = 1 + max((depth[number - d] for d in after or ()), default=0)
                assert max(depth) < 0.8 * len(waits) or len(waits) < 20, "there is something to run side by side"
    assert moved and beside and artifact.buckets[0] <= SMALL < artifact.buckets[-1] <= plan_memory.APART_ROWS


def _lookups(artifact: Artifact, program: Program) -> list[int]:
    return [n for n, launch in enumerate(program.launches) if artifact.manifest.kernels[launch.kernel].family == "lookup"]


def _numbered(waits: Sequence[Any]) -> list[Call]:
    return [Call(0, (), number, after if number else None) for number, after in enumerate(waits)]  # type: ignore[arg-type]
