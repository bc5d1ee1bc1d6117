"""Runs an artifact's programs on a device: owns every buffer, packs each launch table once, fills host inputs of a step.

Queue entries are `encoder` (the step program and the encoder in one table), `decoder`, `sample` and `draft`; entries that need no
host work in between are joined into one native call. A program runs in the smallest bucket that fits. Which rows to run, and what
their results mean, is the engine's business.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tapeout.runtime.artifact import EXTENTS, HOST_INPUTS, Artifact, Launch, StateSpec, Value
from tapeout.runtime.device.cpu import CpuDevice, LaunchTable, joined, launch_table
from tapeout.runtime.device.memory import Bytes, address, typed, value_bytes, zeroed
from tapeout.runtime.errors import BatchRefused, ProgramsInconsistent
from tapeout.runtime.weights import BoundWeights

ENTRY_PROGRAMS = {"encoder": ("step", "encoder"), "decoder": ("decoder",), "sample": ("sample",), "draft": ("draft",)}
CELL = 16  # int32 cells between run-time counts: one cache line each

Part = tuple[str, int]
"""An entry and the bucket it runs in."""


class Draw(NamedTuple):
    """How one output row is sampled. `position` is the index of the token to be drawn; temperature 0 takes the largest logit."""

    temperature: float
    top_k: int
    top_p: float
    seed: int  # as a signed 64-bit number
    slot: int
    position: int


@dataclass(slots=True)
class StepRows:
    """The rows of one step, column by column. Rows of a sequence are adjacent; `outputs` are the rows whose logits are wanted."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)

    def add(self, slot: int, position: int, tokens: Sequence[int]) -> None:
        """Appends the next rows of a sequence, the first at `position`."""
        start, count = len(self.tokens), len(tokens)
        self.tokens += tokens
        self.positions += range(position, position + count)
        self.slots += [slot] * count
        self.starts += [start] * count
        self.ends += [start + count] * count


class LoadedPrograms:
    """Programs of one artifact with their buffers on one device. Not thread safe: one step at a time."""

    def __init__(self, artifact: Artifact, weights: BoundWeights, device: CpuDevice, cache_blocks: int) -> None:
        self.artifact, self.device, self.cache_blocks = artifact, device, cache_blocks
        self._weights = weights
        self._counts = np.zeros(CELL * len(EXTENTS), dtype=np.int32)
        self._cells: dict[str, NDArray[np.int32]] = {
            name: self._counts[i * CELL : i * CELL + 1] for i, name in enumerate(EXTENTS)
        }
        sizes = [program.arena_bytes for buckets in artifact.programs.values() for program in buckets.values()]
        self.arena_bytes = max(sizes, default=0)
        self._arena = zeroed(self.arena_bytes, "arena")
        self._states = {
            (state.name, part.part): zeroed(self._state_rows(state) * part.row_bytes, f"state {state.name}")
            for state in artifact.manifest.states
            for part in state.parts
        }
        self._values, self._io = self._buffers()
        self._kernels = [device.kernel(kernel.symbol) for kernel in artifact.manifest.kernels]
        self._tables: dict[tuple[Part, ...], LaunchTable] = {}
        self._hosted = {name: self._host(name) for names in HOST_INPUTS.values() for name in names}
        self._prefill_constants()

    # -- buffers

    def has(self, name: str, part: str = "values") -> bool:
        """Says whether some program reads or writes the named value."""
        return (name, part) in self._values

    def array(self, name: str, part: str = "values") -> NDArray[np.generic]:
        """The whole buffer of a named value, sized for the largest bucket. Raises ProgramsInconsistent for an unknown name."""
        if (name, part) not in self._values:
            raise ProgramsInconsistent(f"{self.artifact.directory}: value {name}.{part}", "no such input or result", "one of the step's")
        value, shape = self._values[name, part]
        return typed(self._io[name, part], value.dtype, shape)

    @property
    def state_bytes(self) -> int:
        """Bytes of all states."""
        return sum(state.nbytes for state in self._states.values())

    @property
    def has_draft(self) -> bool:
        return "draft" in self.artifact.programs

    @property
    def vocabulary(self) -> int:
        """Rows of the head: the width of the logits."""
        return int(self.array("logits").shape[1])

    def _host(self, name: str) -> NDArray[np.generic]:
        """The buffer of a host input; a scratch array for one that no program of this artifact reads."""
        if self.has(name):
            return self.array(name)
        return np.zeros(self.artifact.buckets[-1], dtype=np.int64)

    def _state_rows(self, state: StateSpec) -> int:
        options = self.artifact.manifest.options
        if state.kind == "ring":
            return options.max_sequences * (state.length or 1) + self.artifact.buckets[-1]
        return self.cache_blocks * options.block_tokens // (state.ratio or 1)

    def _buffers(self) -> tuple[dict[tuple[str, str], tuple[Value, tuple[int, ...]]], dict[tuple[str, str], Bytes]]:
        """Every named value with its largest shape, and its bytes. Equal names are one buffer."""
        values: dict[tuple[str, str], tuple[Value, tuple[int, ...]]] = {}
        for buckets in self.artifact.programs.values():
            for bucket, program in buckets.items():
                for value in (*program.inputs, *program.results):
                    shape = tuple(self.artifact.bound(axis, bucket) if isinstance(axis, str) else axis for axis in value.shape)
                    known = values.get((value.name, value.part))
                    if known is None or value_bytes(value.dtype, shape) > value_bytes(value.dtype, known[1]):
                        values[value.name, value.part] = (value, shape)
        sized = values.items()
        return values, {key: zeroed(value_bytes(value.dtype, shape), f"value {value.name}") for key, (value, shape) in sized}

    def _prefill_constants(self) -> None:
        """What no step changes: all rows are kept (exact mode), and no window has a floor. The buffers start as zeros."""
        self._hosted["kept"][:] = np.arange(len(self._hosted["kept"]))

    # -- launch tables

    def bucket(self, rows: int) -> int:
        """The smallest bucket that holds `rows`. Raises BatchRefused."""
        for bucket in self.artifact.buckets:
            if rows <= bucket:
                return bucket
        raise BatchRefused("rows of a step", rows, f"at most {self.artifact.buckets[-1]}")

    def draft_bucket(self, sequences: int) -> int:
        """The smallest bucket whose bound of sequences holds `sequences`. Raises BatchRefused."""
        for bucket in self.artifact.buckets:
            if sequences <= self.artifact.bound("sequences", bucket):
                return bucket
        raise BatchRefused("drafting sequences", sequences, f"at most {self.artifact.manifest.options.max_sequences}")

    def run(self, *parts: Part) -> None:
        """Runs entries one after the other as one native call on each worker."""
        table = self._tables.get(parts)
        if table is None:
            table = self._tables[parts] = joined([self._packed(part) for part in parts])
        self.device.run(table)

    def _packed(self, part: Part) -> LaunchTable:
        if (part,) not in self._tables:
            entry, bucket = part
            launches = [
                launch for name in ENTRY_PROGRAMS[entry] for launch in self.artifact.programs[name][bucket].launches
            ]
            kernels = [self._kernels[launch.kernel] for launch in launches]
            self._tables[(part,)] = launch_table(kernels, [self._addresses(launch) for launch in launches])
        return self._tables[(part,)]

    def _addresses(self, launch: Launch) -> list[int]:
        return [self._address(ref) for ref in launch.buffers]

    def _address(self, ref: tuple[str, ...] | tuple[str, int]) -> int:
        match ref:
            case ("arena", int(offset)):
                return address(self._arena) + offset
            case ("io", str(name), str(part)):
                return address(self._io[name, part])
            case ("weight", str(name), str(part)):
                return address(self._weights.parts[name, part])
            case ("state", str(name), str(part)):
                return address(self._states[name, part])
            case ("extent", str(name)):
                return address(self._cells[name])
        raise ProgramsInconsistent("programs.json", ref, "a buffer reference")

    # -- a step

    def load(self, rows: StepRows) -> tuple[int, int]:
        """Fills the host inputs of encoder and decoder, all rows kept; returns the numbers of rows and outputs."""
        count, outputs, host = len(rows.tokens), len(rows.outputs), self._hosted
        if count > self.artifact.manifest.options.max_rows:
            raise BatchRefused("rows of a step", count, f"at most {self.artifact.manifest.options.max_rows}")
        if outputs > self.artifact.manifest.options.max_outputs:
            raise BatchRefused("rows that ask for logits", outputs, f"at most {self.artifact.manifest.options.max_outputs}")
        host["tokens"][:count] = rows.tokens
        host["positions"][:count] = rows.positions
        host["slots"][:count] = rows.slots
        host["starts"][:count] = host["kept_starts"][:count] = rows.starts
        host["ends"][:count] = host["kept_ends"][:count] = rows.ends
        host["outputs"][:outputs] = rows.outputs
        cells = self._cells
        cells["rows"][0] = cells["kept"][0] = count
        cells["outputs"][0] = outputs
        return count, outputs

    def load_draws(self, draws: Sequence[Draw]) -> None:
        """Fills the host inputs of sampling, one draw for each output row."""
        host, count = self._hosted, len(draws)
        temperature, top_k, top_p, seeds, slots, positions = zip(*draws, strict=True)
        host["temperature"][:count] = temperature
        host["top_k"][:count] = top_k
        host["top_p"][:count] = top_p
        host["seeds"][:count] = seeds
        host["sample_slots"][:count] = slots
        host["sample_positions"][:count] = positions

    def load_draft(self, draws: Sequence[Draw]) -> None:
        """Fills the host inputs of the draft: one sequence for each draw, whose token is the one at `draw.position`."""
        host, count = self._hosted, len(draws)
        temperature, top_k, top_p, seeds, slots, positions = zip(*draws, strict=True)
        host["golden_rows"][:count] = range(count)
        host["draft_positions"][:count] = [position - 1 for position in positions]
        host["draft_slots"][:count] = slots
        host["draft_temperature"][:count] = temperature
        host["draft_top_k"][:count] = top_k
        host["draft_top_p"][:count] = top_p
        host["draft_seeds"][:count] = seeds
        self._cells["sequences"][0] = count
        self._cells["drafts"][0] = count * self.artifact.draft_block

    def forward(self, rows: StepRows) -> None:
        """Encoder and decoder for `rows`; logits of the outputs are then in `array("logits")`."""
        count, outputs = self.load(rows)
        bucket = self.bucket(max(count, outputs))
        self.run(("encoder", bucket), ("decoder", bucket))

    def step(self, rows: StepRows, *, drafting: bool) -> None:
        """A whole step: forward, sample a token for each draw, draft behind it if asked. One native call on each worker.

        `rows.draws` pairs with `rows.outputs`. Results are then in `sampled`, `logprobs`, `drafts` and `confidences`.
        """
        count, outputs = self.load(rows)
        bucket = self.bucket(max(count, outputs))
        parts: list[Part] = [("encoder", bucket), ("decoder", bucket)]
        if outputs:
            self.load_draws(rows.draws)
            parts.append(("sample", self.bucket(outputs)))
            if drafting:
                self.load_draft(rows.draws)
                parts.append(("draft", self.draft_bucket(outputs)))
        self.run(*parts)

    def draft(self, golden: Sequence[int], draws: Sequence[Draw]) -> None:
        """The draft alone, behind given tokens; `draws[i].position` is the position of `golden[i]`."""
        self._cells["outputs"][0] = len(golden)
        self.array("sampled")[: len(golden)] = golden
        self.load_draft(draws)
        self.run(("draft", self.draft_bucket(len(golden))))
