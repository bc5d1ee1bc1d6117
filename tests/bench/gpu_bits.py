"""The kernels of all row buckets against each other, bit for bit: `python -m tests.bench.gpu_bits ARTIFACT CASES WEIGHTS`.

A step of as many rows as the largest bucket holds runs launch by launch over random states. Where an op has other kernels in a smaller bucket, they
run on the same operands, as many rows at a time as that bucket holds, into memory of their own: every byte of every row must be what the largest
bucket's kernels wrote. Where two smaller buckets have the same kernels, all rows run in the larger one and some in the other; what has the same
kernels in all buckets is not run again. It needs the runtime, numpy and CASES (meanings/cases.py): no compiler.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tapeout.runtime.artifact import ALIGNMENT, Artifact, Launch
from tapeout.runtime.artifact_set import open_artifact
from tapeout.runtime.device import Call, open_device
from tapeout.runtime.errors import DeviceFailed
from tapeout.runtime.program import LoadedPrograms, Part
from tests.bench.gpu_acceptance import LATE
from tests.bench.greedy import RANDOM
from tests.bench.meanings.cases import Case, load_cases
from tests.bench.meanings.launch import OTHER_EXTENT, PATTERN, WHOLE, places_of, ragged, row_bytes
from tests.bench.meanings.scene import Memory, fill_states, loaded, opened, rows_of

SOME = 8  # of so many rows one is run where a larger bucket has the same kernels
NOT_IN_TIME = "not compared in time"
NO_ROWS = "not compared: the step has no such rows"
NOT_BY_ROW = "not compared: a row's result depends on its number or on other rows"


@dataclass(frozen=True)
class Comparison:
    """Kernels of a smaller bucket on `rows` of the largest bucket's; `wrong` is empty where all bits are equal."""

    op: str
    many: tuple[str, ...]
    few: tuple[str, ...]
    bucket: int
    rows: int
    bytes: int
    wrong: str


@dataclass(frozen=True)
class Op:
    """The launches of one op in one bucket; the last one's case is the op's."""

    case: Case
    symbols: tuple[str, ...]
    launches: tuple[tuple[Launch, Call], ...]


def ops_of(programs: LoadedPrograms, cases: dict[str, Case], parts: Sequence[Part]) -> list[Op]:
    """The ops of entries in their buckets, in order."""
    found, held = [], []
    for part in parts:
        for launch, call in zip(programs.launches(*part), programs.calls(part), strict=True):
            held.append((launch, replace(call, after=None)))
            case = cases[programs.artifact.manifest.kernels[launch.kernel].symbol]
            if not case.part:
                symbols = tuple(programs.artifact.manifest.kernels[one.kernel].symbol for one, _ in held)
                found.append(Op(case, symbols, tuple(held)))
                held = []
    return found


# -- rows in another order, and in pieces


@dataclass(frozen=True)
class Sorting:
    """Operands of an op whose rows are pairs of row and expert in the order of experts, which operands say how they lie, and whether its results
    lie so too. `order` has a pair for each place, `places` a place for each pair, `offsets` the place where each expert begins."""

    sorted: tuple[int, ...]
    order: int | None = None
    places: int | None = None
    offsets: int | None = None
    results: bool = True


def sorting_of(case: Case) -> Sorting | None:
    """How the rows of an op are sorted; None where they are not."""
    op = case.body[0]
    if op.name == "moe.expert_linear":
        return Sorting(() if op.attributes["gathered"] else (0,), order=2, offsets=3)
    if op.name == "moe.swiglu" and len(case.operands) > 1:
        return Sorting((0,), order=2)
    return Sorting((0,), places=1, results=False) if op.name == "moe.combine" else None


@dataclass(frozen=True)
class Sorted:
    """Pairs sorted within each piece: for each place that of the whole step's order, [pairs]; a piece's own order, places [pairs] and offsets
    [pieces, experts + 1]."""

    place: Any
    order: Any
    places: Any
    offsets: Any


def sorted_by_piece(order: Any, offsets: Any, pairs: int) -> Sorted:
    """What dispatch says of pieces of `pairs` pairs each, from what it says of all of them: `order` [all pairs], `offsets` [experts + 1]."""
    piece = order // pairs
    place = np.argsort(piece, kind="stable")
    base, count = piece[place] * pairs, -(-len(order) // pairs)
    local = order[place] - base
    places = np.empty_like(local)
    places[order[place]] = np.arange(len(order)) - base
    experts = np.searchsorted(offsets, place, side="right") - 1
    counts = np.zeros((count, len(offsets) - 1), np.int64)
    np.add.at(counts, (piece[place], experts), 1)
    starts = np.concatenate([np.zeros((count, 1), np.int64), np.cumsum(counts, axis=1)], axis=1)
    return Sorted(place, local.astype(np.int32), places.astype(np.int32), starts.astype(np.int32))


@dataclass(frozen=True)
class Placed:
    """A buffer of every piece: the first one's address, and the bytes from one to the next."""

    start: int
    step: int = 0


def in_pieces(rows: Any, size: int, step: int) -> Any:
    """Rows [n, bytes] in pieces of `size`, each at a multiple of `step` bytes."""
    n, each = rows.shape
    out = np.zeros((-(-n // size), step), np.uint8)
    padded = np.zeros((len(out) * size, each), np.uint8)
    padded[:n] = rows
    out[:, : size * each] = padded.reshape(len(out), -1)
    return out


def aligned(size: int) -> int:
    """Bytes from one buffer to the next."""
    return -(-size // ALIGNMENT) * ALIGNMENT


# -- comparing


class Comparer:
    """Runs a step of the largest bucket, and on the way whatever has other kernels in smaller ones."""

    def __init__(self, programs: LoadedPrograms, cases: dict[str, Case], memory: Memory) -> None:
        self._programs, self._cases, self._memory = programs, cases, memory
        self._other = programs.device.memory(programs.arena_bytes, "a second arena").address
        self._side: tuple[int, int] = (0, 0)

    def compared(self, *, every: bool = False, end: float = math.inf) -> Iterator[Comparison]:
        """Each pair of kernels once a bucket; with `every` also those that are the same. From `end` on (of time.monotonic) nothing is compared."""
        programs, memory = self._programs, self._memory
        parts = loaded(programs, rows_of(programs.artifact, programs.artifact.manifest.options.max_rows), memory)
        smaller = [bucket for bucket in programs.artifact.buckets if bucket < parts[0][1]]
        fewer = {bucket: ops_of(programs, self._cases, [(entry, bucket) for entry, _ in parts]) for bucket in smaller}
        seen: set[tuple[Any, int]] = set()
        for number, many in enumerate(ops_of(programs, self._cases, parts)):
            wanted: list[tuple[int, Op, bool]] = []
            for bucket in reversed(smaller):
                few = fewer[bucket][number]
                pair = (many.symbols, few.symbols)
                if (pair, bucket) not in seen and (few.symbols != many.symbols or (every and not _by_number(many.case))):
                    wanted.append((bucket, few, all(few.symbols != other.symbols for _, other, _ in wanted)))
                seen.add((pair, bucket))
            try:
                yield from self._op(many, wanted, end)
            except DeviceFailed as error:
                raise SystemExit(f"{many.case.op}, {' + '.join(many.symbols)}: {error}") from None

    def _op(self, many: Op, wanted: Sequence[tuple[int, Op, bool]], end: float) -> Iterator[Comparison]:
        calls, count = [call for _, call in many.launches], self._count(many)
        if not wanted or _by_number(many.case) or not count:
            self._memory.launch(calls)
            yield from (_said(many, few, bucket, 0, {}, NOT_BY_ROW if count else NO_ROWS) for bucket, few, _ in wanted)
            return
        for _, start, each in self._results(many):
            self._memory.fill(start, count * each, PATTERN)
        self._memory.launch(calls)
        whole = {name: self._memory.read(start, count * each).reshape(count, each) for name, start, each in self._results(many)}
        for bucket, few, whole_step in wanted:
            if time.monotonic() > end:
                yield _said(many, few, bucket, 0, {}, NOT_IN_TIME)
            else:
                rows = count if whole_step else -(-count // SOME)
                yield _said(many, few, bucket, rows, whole, self._differs(many, few, bucket, whole, rows))

    def _count(self, op: Op) -> int:
        return int(self._programs._cells[str(op.launches[-1][0].buffers[-1][1])][0])

    def _results(self, op: Op) -> Iterator[tuple[str, int, int]]:
        """Name, address and bytes of a row of every result."""
        for (name, element), start in zip(op.case.buffers, op.launches[-1][1].buffers, strict=False):
            if name.startswith("out"):
                yield name, start, row_bytes(_view(op.case, name), name, element)

    def _differs(self, many: Op, few: Op, bucket: int, whole: dict[str, Any], rows: int) -> str:
        """Runs `few` piece after piece on the first `rows` rows of the operands of `many`; what is wrong, if anything."""
        if few.case.buffers != many.case.buffers:
            return f"buffers differ: {few.case.buffers}"
        count, launch = self._count(many), few.launches[-1][0]
        size = min(self._programs.artifact.bound(str(launch.buffers[-1][1]), bucket), count)
        pairs = self._sorted(many, size, count)
        placed, results = self._placed(many, few, size, count, pairs)
        cell, pieces = many.launches[-1][1].buffers[-1], -(-rows // size)
        rows = min(count, pieces * size)
        left = count - (pieces - 1) * size if rows == count else size
        for numbers, held in ((range(pieces - 1), size), (range(pieces - 1, pieces), left)):
            self._memory.write(cell, np.array([held], np.int32))
            self._memory.launch([self._call(one, call, placed, number) for number in numbers for one, call in few.launches])
        self._memory.write(cell, np.array([count], np.int32))
        moved = pairs if (how := sorting_of(many.case)) is not None and how.results else None
        found = []
        for name, _, each in self._results(many):
            expected = _in_order(whole[name], moved, _view(many.case, name))[:rows]
            found.append(_difference(name, expected, self._read(results[name], each, size, rows)))
        return "; ".join(filter(None, found))

    def _sorted(self, many: Op, size: int, count: int) -> Sorted | None:
        how = sorting_of(many.case)
        if how is None:
            return None
        names = [name for name, _ in many.case.buffers]
        starts = dict(zip(names, many.launches[-1][1].buffers, strict=False))
        number = how.order if how.order is not None else how.places
        k = many.case.operands[number].shape[1]  # type: ignore[union-attr,index]
        order = self._memory.read(starts[f"in{number}"], 4 * count * k).view(np.int32)
        if how.order is None:
            order = np.argsort(order)
        offsets = np.array([0, len(order)])
        if how.offsets is not None:
            experts = many.case.operands[how.offsets].shape[0]  # type: ignore[union-attr]
            offsets = self._memory.read(starts[f"in{how.offsets}"], 4 * experts).view(np.int32)
        return sorted_by_piece(order.astype(np.int64), offsets, size * k)

    def _placed(self, many: Op, few: Op, size: int, count: int, pairs: Sorted | None) -> tuple[list[Placed], dict[str, Placed]]:
        """The buffers of the op's last launch by number: operands where they lie, or copied where pieces need them otherwise; and results by name."""
        case, call = many.case, many.launches[-1][1]
        places: list[Placed] = []
        aside: list[tuple[int, str, int, Any]] = []  # number of the buffer, name, bytes from piece to piece, content (None of a result)
        for (name, element), start, ref in zip(case.buffers, call.buffers, few.launches[-1][0].buffers, strict=False):
            view, is_result = _view(case, name), name.startswith("out")
            by_row = ref[0] not in ("weight", "state") and ragged(view) and bool(_times(case, name))
            step = size * row_bytes(view, name, element) * _times(case, name) if by_row else 0
            content = None if pairs is None or is_result else self._moved(case, name, element, start, count, size, pairs)
            if content is None and not is_result and step % ALIGNMENT:
                content = in_pieces(self._memory.read(start, count * step // size).reshape(count, -1), size, aligned(step))
            if is_result or content is not None:
                aside.append((len(places), name, aligned(step) if content is None else content.shape[1], content))
            places.append(Placed(start, step))
        pieces, results = -(-count // size), {}
        at = self._room(sum(aligned(pieces * step) for _, _, step, _ in aside))
        for number, name, step, content in aside:
            places[number] = Placed(at, step)
            if content is None:
                results[name] = places[number]
                self._memory.fill(at, pieces * step, PATTERN)
            else:
                self._memory.write(at, content)
            at += aligned(pieces * step)
        return places, results

    def _moved(self, case: Case, name: str, element: str, start: int, count: int, size: int, pairs: Sorted) -> Any:
        """The bytes [pieces, step] of an operand that lies otherwise in pieces; None where it does not."""
        how, number = sorting_of(case), _number(name)
        assert how is not None
        if number == how.offsets:
            return in_pieces(np.ascontiguousarray(pairs.offsets).view(np.uint8), 1, aligned(4 * pairs.offsets.shape[1]))
        for table, of in ((pairs.order, how.order), (pairs.places, how.places)):
            if number == of:
                rows = table.view(np.uint8).reshape(count, -1)
                return in_pieces(rows, size, aligned(size * rows.shape[1]))
        if number not in how.sorted:
            return None
        each = row_bytes(_view(case, name), name, element)
        rows = _in_order(self._memory.read(start, count * each).reshape(count, each), pairs, _view(case, name))
        return in_pieces(rows, size, aligned(size * each))

    def _call(self, launch: Launch, call: Call, placed: Sequence[Placed], piece: int) -> Call:
        """A launch on one piece: its operands and results, its workspaces in the second arena, the cell of its count."""
        buffers = [place.start + piece * place.step for place in placed]
        rest = list(zip(launch.buffers[len(placed) :], call.buffers[len(placed) :], strict=True))
        moved = [start - self._programs._arena + self._other if ref[0] == "arena" else start for ref, start in rest]
        return replace(call, buffers=(*buffers, *moved))

    def _read(self, placed: Placed, each: int, size: int, count: int) -> Any:
        pieces = -(-count // size)
        raw = self._memory.read(placed.start, pieces * placed.step).reshape(pieces, placed.step)
        return np.ascontiguousarray(raw[:, : size * each]).reshape(-1, each)[:count]

    def _room(self, size: int) -> int:
        """The address of so many bytes, the same memory for all."""
        if size > self._side[1]:
            self._side = (self._programs.device.memory(size, "operands in pieces").address, size)
        return self._side[0]


def _said(many: Op, few: Op, bucket: int, rows: int, whole: dict[str, Any], wrong: str) -> Comparison:
    size = sum(rows * held.shape[1] for held in whole.values())
    return Comparison(many.case.op, many.symbols, few.symbols, bucket, rows, size, wrong)


def _by_number(case: Case) -> bool:
    return not case.results or any(op.name.startswith(WHOLE) for op in case.body)


def _number(name: str) -> int:
    return int(name.removeprefix("in").removeprefix("out").partition("_")[0])


def _view(case: Case, name: str) -> Any:
    return (case.results if name.startswith("out") else case.operands)[_number(name)]


def _times(case: Case, name: str) -> int:
    """Rows of a buffer for each row of its launch; 0 where all pieces read all of it."""
    op = case.body[0]
    if name.startswith("out") or _number(name) not in OTHER_EXTENT.get(op.name, ()):
        return 1
    return 0 if op.name == "nn.take" else places_of(case)


def _in_order(rows: Any, pairs: Sorted | None, view: Any) -> Any:
    """Rows of pairs by piece; as they are where they are not sorted."""
    return rows if pairs is None else rows.reshape(len(rows) * view.shape[1], -1)[pairs.place].reshape(rows.shape)


def _difference(name: str, whole: Any, found: Any) -> str:
    if whole.size % 8 == 0 and np.array_equal(*(np.ascontiguousarray(x).reshape(-1).view(np.uint64) for x in (whole, found))):
        return ""
    differ = whole != found
    if not differ.any():
        return ""
    rows = np.flatnonzero(differ.any(axis=1))
    first = int(np.argmax(differ[rows[0]]))
    return f"{name}: {int(differ.sum())} of {differ.size} bytes in {len(rows)} rows differ, row {rows[0]} from byte {first} on"


# -- the suite


def check(artifact: Artifact, device: Any, cases: dict[str, Case], weights: Path = RANDOM, *, every: bool = False,
          seconds: float = math.inf) -> list[Comparison]:  # fmt: skip
    """All comparisons; what is not reached within `seconds` says so."""
    end = time.monotonic() + seconds
    programs, *_ = opened(artifact, device, weights)
    memory = Memory(device)
    fill_states(programs, memory)
    return list(Comparer(programs, cases, memory).compared(every=every, end=end))


def show(found: Sequence[Comparison]) -> int:
    """A line for each pair of kernels; returns how many pairs differ."""
    pairs: dict[Any, list[Comparison]] = {}
    for one in found:
        pairs.setdefault((one.many, one.few), []).append(one)
    print(f"{'op':32} {'kernels of few rows, last one':34} {'of many rows, last one':34} {'rows':>5} in pieces of")
    for (many, few), held in sorted(pairs.items(), key=lambda item: (item[1][0].op, item[0])):
        sizes = ", ".join(str(one.bucket) for one in held)
        print(f"{held[0].op:32} {few[-1]:34} {many[-1]:34} {max(one.rows for one in held):5} {sizes}")
        for one in held:
            if one.wrong:
                print(f"    WRONG in pieces of {one.bucket}: {one.wrong}")
    wrong = sum(any(one.wrong for one in held) for held in pairs.values())
    size = sum(one.bytes for one in found) / 1e9
    print(f"{len(pairs)} pairs of kernels of few and of many rows compared, {size:.1f} GB, {wrong} with other bits")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """0 all bits are equal, 1 some are not, 4 no time was left for some."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu_bits", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("cases", type=Path, help="what meanings.cases wrote")
    parser.add_argument("weights", type=Path, help="checkpoint folder, or `random`: weights that are never written")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--all", action="store_true", help="also where the kernels are the same")
    parser.add_argument("--seconds", type=float, default=math.inf, help="from which on nothing more is compared")
    parser.add_argument("--json", "-o", type=Path)
    given = parser.parse_args(arguments)
    started = time.perf_counter()
    artifact = open_artifact(given.artifact, given.device)
    device = open_device(artifact, 1)
    found = check(artifact, device, load_cases(given.cases), given.weights, every=given.all, seconds=given.seconds)
    wrong = show(found)
    print(f"in {time.perf_counter() - started:.1f} s")
    if given.json:
        given.json.write_text(json.dumps([asdict(one) for one in found]) + "\n")
    device.close()
    late = all(one.wrong == NOT_IN_TIME for one in found if one.wrong)
    return 0 if not wrong else LATE if late else 1


if __name__ == "__main__":
    sys.exit(main())
