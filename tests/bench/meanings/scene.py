"""What the kernels of an artifact are checked on: random weights and states, steps of awkward row counts, and a device that runs launch by launch.

No checkpoint is needed: weights are those of a slice (models/deepseek_v41/slice.py), states are as if sequences had been there. Steps mix rows
that are decoded deep in their sequences, chunks of several lengths, and sequences that begin; up to `max_outputs` rows ask for logits.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from tapeout.models.deepseek_v41.config import parse_config
from tapeout.models.deepseek_v41.slice import SliceTensors
from tapeout.runtime.artifact import Artifact
from tapeout.runtime.device import Call
from tapeout.runtime.program import Draw, LoadedPrograms, Part, StepRows
from tapeout.runtime.transforms import Array
from tapeout.runtime.weights import Key
from tests.bench.greedy import RANDOM, bound_weights, load_programs

DRAWS = ((0.0, -1, 1.0), (1.0, -1, 1.0), (0.7, 50, 0.9), (2.0, -1, 0.9), (1.0, 1000, 1.0))
"""Temperature, top_k and top_p of the rows that draw, in turns; the last but one leaves nearly all of a flat vocabulary."""


class Memory:
    """Bytes behind addresses of a device, and launches one at a time, all on the device's stream: what a host writes is there before a kernel
    starts."""

    def __init__(self, device: Any) -> None:
        self._device, self._gpu = device, hasattr(device, "_driver")

    def read(self, start: int, size: int) -> Any:
        """A copy of `size` bytes."""
        out = np.empty(size, np.uint8)
        if size and self._gpu:
            self._device._driver("cuMemcpyDtoHAsync", out.ctypes.data, start, size, self._device._stream)
            self._device._driver("cuStreamSynchronize", self._device._stream)
        elif size:
            ctypes.memmove(out.ctypes.data, start, size)
        return out

    def rows(self, start: int, size: int, rows: Any) -> Any:
        """Copies of some rows of `size` bytes, neighbours at once."""
        out = np.empty((len(rows), size), np.uint8)
        runs = np.flatnonzero(np.diff(rows, prepend=-2) != 1) if len(rows) else []
        for first, end in zip(runs, [*runs[1:], len(rows)], strict=True):
            out[first:end] = self.read(start + int(rows[first]) * size, (end - first) * size).reshape(-1, size)
        return out

    def fill(self, start: int, size: int, byte: int) -> None:
        """Sets bytes."""
        if size > 0 and self._gpu:
            self._device._driver("cuMemsetD8Async", start, byte, size, self._device._stream)
        elif size > 0:
            ctypes.memset(start, byte, size)

    def write(self, start: int, array: Any) -> None:
        """Copies an array there."""
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if raw.size and self._gpu:
            self._device._copy_up(start, raw, raw.size)
        elif raw.size:
            ctypes.memmove(start, raw.ctypes.data, raw.size)

    def launch(self, calls: Sequence[Call]) -> None:
        """Runs calls and waits."""
        if not self._gpu:
            self._device.run(self._device.table(calls))
            return
        device = self._device
        device._enter()
        device._reserve_scratch(calls)
        for call in calls:
            device._launch(call)
        device._driver("cuStreamSynchronize", device._stream)


# -- a scene: weights, states, rows


def opened(artifact: Artifact, device: Any, weights: Path = RANDOM) -> tuple[LoadedPrograms, dict[Key, Array], SliceTensors]:
    """The artifact's programs over random weights in the true formats, blocks of the cache in no order; all parts of the weights, and what they are
    made of. A folder's weights must be those of the slice that `RANDOM` makes, where results are compared."""
    bound = bound_weights(artifact, weights)
    parts = dict(bound.parts)
    programs = load_programs(artifact, replace(bound, parts=cast(Any, parts)), device)
    table = programs.array("block_table")
    used = table[table > 0]
    table[table > 0] = np.random.default_rng(5).permutation(used)
    return programs, parts, SliceTensors(parse_config(artifact.manifest.model.config))


def fill_states(programs: LoadedPrograms, memory: Memory) -> None:
    """Random rows in every state, as if sequences had been there; rings' staging rows are poison."""
    for number, state in enumerate(programs.artifact.manifest.states):
        rows = programs._state_rows(state)
        for part in state.parts:
            random = np.random.default_rng([number, len(part.part)])
            size = rows * part.row_bytes
            if part.part == "scales" and part.dtype == "i8":
                raw = random.integers(118, 128, size, dtype=np.uint8)
            elif part.dtype in ("f8E4M3FN",):
                raw = random.integers(40, 80, size, dtype=np.uint8)
                if part.part == "codes":
                    raw |= random.integers(0, 2, size, dtype=np.uint8) << 7
            elif part.dtype == "f32":
                raw = random.standard_normal(size // 4, np.float32).view(np.uint8)
            elif part.dtype == "i32":
                raw = random.integers(0, 250, size // 4, dtype=np.int32).view(np.uint8)
            else:
                raw = random.integers(0, 256, size, dtype=np.uint8)
            memory.write(programs._states[state.name, part.part], raw)


def rows_of(artifact: Artifact, count: int) -> StepRows:
    """A step of `count` rows: decoded rows deep in their sequences, chunks of several lengths, sequences that begin."""
    options, random = artifact.manifest.options, np.random.default_rng(count)
    rows, left, slots = StepRows(), count, list(random.permutation(options.max_sequences))
    while left:
        slot = int(slots.pop())
        fair = -(-left // (len(slots) + 1))
        size = left if not slots else min(left, fair, options.max_context) if left > 4 * len(slots) else 1
        deepest = options.max_context - size
        position = int(random.choice([0, random.integers(0, deepest + 1), deepest]))
        rows.add(slot, position, [int(t) for t in random.integers(3, 259, size)])
        left -= size
    ends = list(dict.fromkeys(end - 1 for end in rows.ends))
    limit, chosen = min(options.max_outputs, count), set(ends)
    rows.outputs += [*ends, *(row for row in range(count) if row not in chosen)][:limit]
    for i, end in enumerate(rows.outputs):
        temperature, top_k, top_p = DRAWS[(i + count - 1) % len(DRAWS)]
        rows.draws.append(Draw(temperature, top_k, top_p, 1000 + i, rows.slots[end], rows.positions[end] + 1))
    return rows


def loaded(programs: LoadedPrograms, rows: StepRows, memory: Memory) -> list[Part]:
    """Fills host inputs and brings them to the device; the parts of the step, all in the bucket of its rows, so that every bucket's kernels run.

    The draft is made behind the first output of every sequence.
    """
    count, _ = programs.load(rows)
    programs.load_draws(rows.draws)
    bucket = programs.bucket(count)
    parts: list[Part] = [("encoder", bucket), ("decoder", bucket), ("sample", bucket)]
    if programs.has_draft:
        first = {draw.slot: number for number, draw in reversed(list(enumerate(rows.draws)))}
        numbers = sorted(first.values())
        programs.load_draft([rows.draws[number] for number in numbers], np.array(numbers, np.int64))
        parts.append(("draft", bucket))
    region = programs._inputs
    if region.host is not None and region.host.ctypes.data != region.address:
        memory.write(region.address, region.host[: programs._inputs_bytes])
    return parts
