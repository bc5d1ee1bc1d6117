"""One step of an artifact, launch by launch: operands and results of the launches that are checked, as the meanings of their ops take them.

Before such a launch its results and the rows behind every operand's count are poisoned; behind it nothing but the result's rows may have
changed. Meanings see the operands that lay in memory, weights as the checkpoint stores them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from tapeout.dialects.format import Scaled
from tapeout.dialects.state import State
from tapeout.dialects.types import Blocks, Ring, Tensor
from tapeout.models.deepseek_v41.slice import SliceTensors
from tapeout.runtime.artifact import Launch, WeightOperand
from tapeout.runtime.device import Call
from tapeout.runtime.device.memory import NUMPY
from tapeout.runtime.errors import DeviceFailed
from tapeout.runtime.program import LoadedPrograms
from tests.bench.meanings.cases import Case
from tests.bench.meanings.scene import Memory, loaded, rows_of

PATTERN = 0xA5  # in results before a launch: no kernel makes it of poison
SAMPLED = 4  # rows at each of first, middle and last place
JOINING = ("stack", "concat", "rows_together")
"""Transforms that leave a weight as a meaning takes it."""
PRODUCTS, APART = ("nn.linear", "moe.expert_linear"), 24
WHOLE = ("step.", "cache.", "moe.dispatch", "mla.pool", "dspark.block", "dspark.window", "engram.lookback")
"""Ops of which a row's result depends on its number or on other rows: checked on all rows at once."""
OTHER_EXTENT = {"nn.take": (0,), "dspark.correct": (0,), "dspark.confidence": (0,), "dspark.block": (0, 1, 2), "dspark.window": (0, 1)}
"""Operands whose rows are not counted by the launch's own count."""


class Packed(State):
    """A state of FP4 rows as a device keeps them, two codes to a byte; unpacked where it is read."""

    def read(self, ids: Any) -> Any:
        held: Any = super().read(ids)
        return Scaled(unpacked(held.codes), held.scales, held.scaling)


def unpacked(codes: Any) -> Any:
    """FP4 codes [.., n] of bytes [.., n/2]."""
    raw = codes.view(np.uint8)
    return np.stack((raw & 15, raw >> 4), -1).reshape(*raw.shape[:-1], 2 * raw.shape[-1]).view(ml_dtypes.float4_e2m1fn)


@dataclass
class Job:
    """One launch to be compared: operands as its meaning takes them, results as the kernel left them, and where it was."""

    case: Case
    rows: int
    count: int
    inputs: list[Any]
    found: list[Any]
    untouched: str | None


# -- operands and results of a launch


@dataclass(frozen=True)
class Weight:
    """A weight as the checkpoint stores it, without the layouts that kernels asked for; made where it is compared, from what is mapped already."""

    operand: WeightOperand
    view: Tensor
    bound: Any
    tensors: SliceTensors

    def value(self) -> Any:
        """The operand of a meaning."""
        if self.operand.derived is not None:
            return self.bound[self.operand.name, "values"]
        return _value(self.view, [self._part(part) for part in self.operand.parts])

    def _part(self, part: Any) -> Any:
        if all(transform.partition(":")[0] in JOINING for transform in part.transforms):
            return self.bound[self.operand.name, part.part]
        found, each = [self.tensors.tensor(name) for name in part.tensors], max(1, len(part.stored))
        matrices = [np.concatenate(found[i : i + each]) if each > 1 else found[i] for i in range(0, len(found), each)]
        return np.stack(matrices) if len(self.view.shape) == 3 else matrices[0]


@dataclass(frozen=True)
class Rows:
    """A ragged operand or result on the device: rows are read when they are asked for."""

    memory: Memory
    view: Tensor
    parts: tuple[tuple[str, str, int], ...]
    count: int

    def all(self) -> Any:
        """Every row."""
        return self.at(np.arange(self.count))

    def at(self, rows: Any) -> Any:
        """Some rows."""
        return self._read(np.asarray(rows, np.int64), self.view.shape[1:])

    def flat(self, places: Any) -> Any:
        """Some places of the first two axes read as one."""
        return self._read(np.asarray(places, np.int64), self.view.shape[2:])

    def _read(self, rows: Any, rest: Any) -> Any:
        found = []
        for suffix, element, start in self.parts:
            shape = stored_shape(self.view, (1, *rest), suffix)
            dtype = NUMPY[element]
            raw = self.memory.rows(start, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, rows)
            found.append(raw.view(dtype).reshape(len(rows), *shape[1:]))
        return _value(self.view, found)


def stored_shape(tensor: Tensor, shape: tuple[int, ...], suffix: str) -> tuple[int, ...]:
    """The shape of one part of a value in memory."""
    if suffix == "_scales" and tensor.number.scaling is not None:
        return tuple(n or 0 for n in tensor.number.scaling.blocks(shape))
    return (*shape[:-1], shape[-1] // 2) if tensor.number.element == "f4E2M1FN" else shape


def row_bytes(view: Tensor, name: str, element: str) -> int:
    """Bytes of one row of a buffer, or of all of it where it is not ragged."""
    suffix = name.partition("_")[2]
    return int(np.prod(stored_shape(view, view.sized(1), f"_{suffix}" if suffix else ""))) * NUMPY[element].itemsize


def _value(tensor: Tensor, arrays: Sequence[Any]) -> Any:
    if tensor.number.scaling is None:
        return arrays[0]
    codes = unpacked(arrays[0]) if tensor.number.element == "f4E2M1FN" else arrays[0]
    return Scaled(codes, _scales(tensor, arrays[1]), tensor.number.scaling)


def _scales(tensor: Tensor, scales: Any) -> Any:
    assert tensor.number.scaling is not None
    return scales.view(np.uint8) if tensor.number.scaling.scale == "e8m0" else scales


Held = dict[str, tuple[str, int, Any]]
"""Element, address and reference of every buffer of a launch by name."""


class Reader:
    """Turns the buffers of a launch into what a meaning takes."""

    def __init__(self, programs: LoadedPrograms, parts: Any, tensors: SliceTensors, memory: Memory) -> None:
        self._programs, self._parts, self._tensors, self._memory = programs, parts, tensors, memory
        self._operands = {operand.name: operand for operand in programs.artifact.weights}

    def buffers(self, case: Case, launch: Launch, call: Call) -> Held:
        """Element, address and reference of every buffer by name."""
        named = zip(case.buffers, call.buffers, launch.buffers, strict=False)
        return {name: (element, start, ref) for (name, element), start, ref in named}

    def value(self, name: str, view: Any, held: Held, count: int) -> Any:
        """An operand or a result: a weight or a ragged value to be read later, a state or a plain table now."""
        parts = tuple((suffix, *held[name + suffix]) for suffix in ("", "_codes", "_scales") if name + suffix in held)
        ref = parts[0][3]
        if ref[0] == "weight":
            return Weight(self._operands[ref[1]], view, self._parts, self._tensors)
        if isinstance(view, Ring | Blocks):
            return self._state(view.entry, self._state_rows(ref[1]), parts)
        if ragged(view):
            return Rows(self._memory, view, tuple(part[:3] for part in parts), count)
        return _value(view, [self._array(element, start, stored_shape(view, view.sized(0), suffix)) for suffix, element, start, _ in parts])

    def _state(self, entry: Tensor, rows: int, parts: Any) -> State:
        shape = (rows, *entry.sized(0))
        found = [self._array(element, start, stored_shape(entry, shape, suffix)) for suffix, element, start, _ in parts]
        value = found[0] if entry.number.scaling is None else Scaled(found[0], _scales(entry, found[1]), entry.number.scaling)
        return (Packed if entry.number.element == "f4E2M1FN" else State)(value)

    def _state_rows(self, name: str) -> int:
        return next(self._programs._state_rows(s) for s in self._programs.artifact.manifest.states if s.name == name)

    def _array(self, element: str, start: int, shape: tuple[int, ...]) -> Any:
        dtype = NUMPY[element]
        return self._memory.read(start, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize).view(dtype).reshape(shape)


def ragged(view: Any) -> bool:
    """Whether a view's rows are counted at run time."""
    return isinstance(view, Tensor) and bool(view.shape) and view.shape[0] is None


# -- rows that are compared


def sampled(count: int) -> Any:
    """Rows of the first, middle and last instances, and those around blocks of 16 and 64."""
    places = [*range(SAMPLED), 15, 16, 63, 64, *range(count // 2, count // 2 + SAMPLED), *range(count - SAMPLED, count)]
    return np.array(sorted({p for p in places if 0 <= p < count}), np.int64)


def part_of(case: Case, inputs: list[Any], found: list[Any], count: int) -> tuple[Case, list[Any], list[Any]]:
    """Case, operands and results of the sampled rows alone, read now; of all rows where they depend on each other."""
    rows, name = sampled(count), case.body[0].name
    if not count or any(op.name.startswith(WHOLE) for op in case.body):
        return case, [_all(x) for x in inputs], [_all(x) for x in found]
    if name == "moe.expert_linear":
        return _sorted_positions(case, inputs, found, count)
    other = OTHER_EXTENT.get(name, ())
    taken = [x.at(rows) if isinstance(x, Rows) and i not in other else x for i, x in enumerate(inputs)]
    if name == "nn.take":
        taken = [inputs[0].at(taken[1]), np.arange(len(rows), dtype=np.int32)]
    elif name in ("dspark.correct", "dspark.confidence"):
        size = places_of(case)
        taken[0] = inputs[0].at((rows[:, None] * size + np.arange(size)).reshape(-1))
    elif name == "moe.combine":
        taken[0] = inputs[0].flat(taken[1].reshape(-1)).reshape(*taken[1].shape, -1)
        taken[1] = np.arange(taken[1].size, dtype=np.int32).reshape(taken[1].shape)
    elif name == "moe.swiglu" and len(case.operands) > 1:
        taken[1] = inputs[1].all()  # weights are found by pair number
    return case, taken, [x.at(rows) for x in found]


def places_of(case: Case) -> int:
    """Places of a draft block: rows of the first operand for each sequence."""
    op = case.body[0]
    return int(op.attributes["size"]) if op.name == "dspark.correct" else len(op.operands[1])


def _all(value: Any) -> Any:
    return value.all() if isinstance(value, Rows) else value


def _sorted_positions(case: Case, inputs: list[Any], found: list[Any], count: int) -> tuple[Case, list[Any], list[Any]]:
    """Expert products at sampled sorted positions: around each expert's first and last pair too, where few experts are."""
    x, weight, order, offsets = inputs[0], inputs[1], inputs[2].all(), inputs[3]
    k, gathered = order.shape[1], case.body[0].attributes["gathered"]
    edges = np.concatenate([offsets[1:-1], offsets[1:-1] - 1])[:8]
    at = np.unique(np.concatenate([sampled(count * k), edges[(edges >= 0) & (edges < count * k)]]).astype(np.int64))
    pairs = x.at(order.reshape(-1)[at] // k) if gathered else x.flat(at)
    few = np.searchsorted(at, offsets).astype(np.int32)
    op, result = case.body[0], case.results[0]
    y = Tensor((None, 1, result.shape[2]), result.number)  # type: ignore[union-attr]
    body = replace(op, attributes={**op.attributes, "gathered": True}, results=(y,))
    one = replace(case, body=(body,), results=(y,))
    return one, [pairs, weight, np.arange(len(at), dtype=np.int32)[:, None], few], [found[0].flat(at)[:, None]]


# -- collecting


class Collector:
    """Runs steps launch by launch and keeps what is to be compared: the first launch of every kernel, and its last one for one row count."""

    def __init__(self, programs: LoadedPrograms, parts: Any, tensors: SliceTensors, cases: dict[str, Case], memory: Memory) -> None:
        self._programs, self._cases, self._memory = programs, cases, memory
        self._reader = Reader(programs, parts, tensors, memory)
        self._symbols = [kernel.symbol for kernel in programs.artifact.manifest.kernels]

    def step(self, count: int, poison: int, only: str | None, last: bool = False, wide: bool = False) -> Iterator[Job]:
        """The jobs of one step of `count` rows. `wide`: products once more, with scales of their rows far apart."""
        programs = self._programs
        self._memory.fill(programs._arena, programs.arena_bytes, poison)
        parts = loaded(programs, rows_of(programs.artifact, count), self._memory)
        launches = [(launch, call) for part in parts for launch, call in zip(programs.launches(*part), programs.calls(part), strict=True)]
        buckets = [bucket for part in parts for bucket in [part[1]] * len(programs.launches(*part))]
        places: dict[str, int] = {}
        for place, (launch, _) in enumerate(launches):
            symbol = self._symbols[launch.kernel]
            if last or symbol not in places:
                places[symbol] = place
        wanted = {place: symbol for symbol, place in places.items() if (only is None or symbol.startswith(only)) and not self._cases[symbol].part}
        for place, (launch, call) in enumerate(launches):
            try:
                if place in wanted:
                    yield self._checked(wanted[place], launch, [call], count, buckets[place], poison)
                    first = next(p for p in range(place, -1, -1) if p == 0 or not self._is_part(launches, p - 1))
                    calls = [one for _, one in launches[first : place + 1]]
                    yield from self._wide(wanted[place], launch, calls, count, buckets[place], poison) if wide else ()
                else:
                    self._memory.launch([call])
            except DeviceFailed as error:
                raise SystemExit(f"step of {count} rows, launch {place}, {self._symbols[launch.kernel]}: {error}") from None

    def _is_part(self, launches: Sequence[tuple[Launch, Call]], place: int) -> bool:
        """Whether a launch only prepares the next one, which is the same op's."""
        return self._cases[self._symbols[launches[place][0].kernel]].part and launches[place + 1][0].buffers == launches[place][0].buffers

    def _wide(self, symbol: str, launch: Launch, calls: list[Call], rows: int, bucket: int, poison: int) -> Iterator[Job]:
        """A product on rows whose scales are moved by up to `APART` powers of two each, so that whatever holds for neighbouring numbers only is
        found out; then on its own rows again."""
        case, scaled = self._cases[symbol], self._cases[symbol].operands[0]
        if case.body[0].name not in PRODUCTS or not isinstance(scaled, Tensor) or scaled.number.scaling is None:
            return
        if scaled.number.scaling.scale != "e8m0" or not ragged(scaled):
            return
        element, start, _ = self._reader.buffers(case, launch, calls[-1])["in0_scales"]
        count = int(self._programs._cells[str(launch.buffers[-1][1])][0])
        scales = self._memory.read(start, count * row_bytes(scaled, "in0_scales", element))
        moved = np.random.default_rng(count).integers(-APART, APART + 1, scales.size)
        self._memory.write(start, np.clip(scales.astype(np.int64) + moved, 1, 253).astype(np.uint8))
        yield self._checked(symbol, launch, calls, rows, bucket, poison)
        self._memory.write(start, scales)
        self._memory.launch(calls)

    def _checked(self, symbol: str, launch: Launch, calls: list[Call], rows: int, bucket: int, poison: int) -> Job:
        case, held = self._cases[symbol], self._reader.buffers(self._cases[symbol], launch, calls[-1])
        extent = str(launch.buffers[-1][1])
        count, bound = int(self._programs._cells[extent][0]), self._programs.artifact.bound(extent, bucket)
        self._poison(case, held, count, bound, poison)
        counts = [self._count(case, i, count) for i in range(len(case.operands))]
        given = zip(case.operands, counts, strict=True)
        inputs = [None if view is None else self._reader.value(f"in{i}", view, held, n) for i, (view, n) in enumerate(given)]
        self._memory.launch(calls)
        states = [i for i, view in enumerate(case.operands) if isinstance(view, Ring | Blocks)]
        if case.results:
            found = [self._reader.value(f"out{i}", view, held, count) for i, view in enumerate(case.results)]
        else:
            found = [self._reader.value(f"in{i}", case.operands[i], held, count) for i in states]
        one, taken, results = part_of(case, inputs, found, count)
        return Job(one, rows, count, taken, results, self._written_behind(case, held, count, bound))

    def _poison(self, case: Case, held: Held, count: int, bound: int, poison: int) -> None:
        """Results get a pattern, rows of operands behind the count poison."""
        other = OTHER_EXTENT.get(case.body[0].name, ())
        for name, (element, start, _) in held.items():
            number = int(name.removeprefix("in").removeprefix("out").partition("_")[0])
            view = (case.results if name.startswith("out") else case.operands)[number]
            if not isinstance(view, Tensor):
                continue
            size = row_bytes(view, name, element)
            if name.startswith("out"):
                self._memory.fill(start, bound * size if ragged(view) else size, PATTERN)
            elif ragged(view) and number not in other:
                self._memory.fill(start + count * size, (bound - count) * size, poison)

    def _count(self, case: Case, number: int, count: int) -> int:
        """Rows of an operand, which the launch's count need not count."""
        cells, op = self._programs._cells, case.body[0]
        if number not in OTHER_EXTENT.get(op.name, ()):
            return count
        if op.name == "nn.take":
            return int(max(cells["rows"][0], cells["outputs"][0], cells["drafts"][0])) if count else 0
        return count * places_of(case) if op.name in ("dspark.correct", "dspark.confidence") else int(cells["sequences"][0])

    def _written_behind(self, case: Case, held: Held, count: int, bound: int) -> str | None:
        for name, (element, start, _) in held.items():
            view = case.results[int(name[3:].partition("_")[0])] if name.startswith("out") else None
            if isinstance(view, Tensor) and ragged(view):
                size = row_bytes(view, name, element)
                behind = self._memory.read(start + count * size, min((bound - count) * size, 1 << 22))
                if (behind != PATTERN).any():
                    return f"{name}: row {count + int(np.argmax(behind != PATTERN)) // size} was written, behind the {count} rows of the step"
        return None
