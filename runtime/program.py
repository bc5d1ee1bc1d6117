"""Runs an artifact's programs on a device: plans every buffer, packs each launch table once, fills host inputs of a step.

Queue entries are `encoder` (the step program and the encoder in one table), `decoder`, `sample` and `draft`; entries that need no
host work in between are one table, which the device runs at once. A program runs in the smallest bucket that fits. Host inputs share one
block, results another, so that a device with memory of its own copies each once. Which rows to run, and what their results mean, is the
engine's business.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tapeout.runtime.artifact import ALIGNMENT, EXTENTS, HOST_INPUTS, HOST_RESULTS, Artifact, Launch, StateSpec, Value
from tapeout.runtime.device import Call, Device, Queueing, Readable, Region
from tapeout.runtime.device.memory import Bytes, typed, value_bytes
from tapeout.runtime.errors import BatchRefused, ProgramsInconsistent
from tapeout.runtime.state_memory import StateMemory
from tapeout.runtime.weights import BoundWeights

ENTRY_PROGRAMS = {"encoder": ("step", "encoder"), "decoder": ("decoder",), "sample": ("sample",), "draft": ("draft",)}
CELL = 16  # int32 cells between run-time counts: one cache line each
FETCHED = "logits"
"""The one result that is large and seldom wanted: it stays on the device until it is asked for."""

Part = tuple[str, int]
"""An entry and the bucket it runs in."""

Key = tuple[str, str]
"""Name and part of a value."""


class Draw(NamedTuple):
    """How one output row is sampled. `position` is the index of the token to be drawn; temperature 0 takes the largest logit."""

    temperature: float
    top_k: int
    top_p: float
    seed: int  # as a signed 64-bit number
    slot: int
    position: int


class DrawColumns(NamedTuple):
    """The same for many rows, one array a field [outputs]."""

    temperature: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    seeds: NDArray[np.int64]
    slots: NDArray[np.int64]
    positions: NDArray[np.int64]


@dataclass(slots=True)
class StepRows:
    """The rows of one step, column by column. Rows of a sequence are adjacent; `outputs` are the rows whose logits are wanted.

    `floors`: positions below which a row sees no window, empty: none. `kept`: the rows that run through the decoder half, None: all of them;
    then `outputs` count among the kept ones, and `kept_starts`, `kept_ends`, `kept_floors` are theirs.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    draws: Sequence[Draw] | DrawColumns = field(default_factory=list)
    floors: list[int] = field(default_factory=list)
    kept: list[int] | None = None
    kept_starts: list[int] = field(default_factory=list)
    kept_ends: list[int] = field(default_factory=list)
    kept_floors: list[int] = field(default_factory=list)

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

    def __init__(self, artifact: Artifact, weights: BoundWeights, device: Device, cache_blocks: int) -> None:
        self.artifact, self.device, self.cache_blocks = artifact, device, cache_blocks
        sizes = [program.arena_bytes for buckets in artifact.programs.values() for program in buckets.values()]
        self.arena_bytes = max(sizes, default=0)
        self._arena = device.memory(self.arena_bytes, "arena").address
        self._states = {
            (state.name, part.part): device.memory(self._state_rows(state) * part.row_bytes, f"state {state.name}").address
            for state in artifact.manifest.states
            for part in state.parts
        }
        self._values = self._shapes()
        self._io: dict[Key, int] = {}
        self._hosts: dict[Key, Bytes] = {}
        self._place_io()
        self._weights = self._placed(weights)
        self._kernels = [device.kernel(kernel.symbol) for kernel in artifact.manifest.kernels]
        self._calls: dict[Part, list[Call]] = {}
        self._tables: dict[tuple[Part, ...], tuple[Any, float]] = {}
        self._queued: dict[tuple[Part, ...], Any] = {}
        self._hosted = {name: self._host(name) for names in HOST_INPUTS.values() for name in names}
        self.states = StateMemory(artifact, self._states, device if isinstance(device, Readable) else None)

    # -- buffers

    def has(self, name: str, part: str = "values") -> bool:
        """Says whether some program reads or writes the named value."""
        return (name, part) in self._values

    def array(self, name: str, part: str = "values") -> NDArray[np.generic]:
        """The whole buffer of a named value, sized for the largest bucket. Raises ProgramsInconsistent for an unknown name."""
        if (name, part) not in self._values:
            raise ProgramsInconsistent(f"{self.artifact.directory}: value {name}.{part}", "no such input or result", "one of the step's")
        if (name, part) not in self._hosts:
            raise ProgramsInconsistent(f"{self.artifact.directory}: value {name}.{part}", "a value of the device", "an input or a result")
        value, shape = self._values[name, part]
        return typed(self._hosts[name, part], value.dtype, shape)

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

    def _shapes(self) -> dict[Key, tuple[Value, tuple[int, ...]]]:
        """Every named value with its largest shape. Equal names are one buffer."""
        values: dict[Key, tuple[Value, tuple[int, ...]]] = {}
        for buckets in self.artifact.programs.values():
            for bucket, program in buckets.items():
                for value in (*program.inputs, *program.results):
                    shape = tuple(self.artifact.bound(axis, bucket) if isinstance(axis, str) else axis for axis in value.shape)
                    known = values.get((value.name, value.part))
                    if known is None or value_bytes(value.dtype, shape) > value_bytes(value.dtype, known[1]):
                        values[value.name, value.part] = (value, shape)
        return values

    def _place_io(self) -> None:
        """Run-time counts and host inputs in one block, results in another, logits and inner values each by itself."""
        sizes = {key: value_bytes(value.dtype, shape) for key, (value, shape) in self._values.items()}
        given, read = _names(HOST_INPUTS), _names(HOST_RESULTS)
        inputs = [key for key in sizes if key[0] in given]
        results = [key for key in sizes if key[0] in read and key[0] != FETCHED]
        cells = 4 * CELL
        given_sizes = {("", name): cells for name in EXTENTS} | {key: sizes[key] for key in inputs}
        self._inputs, self._inputs_bytes = self._block("inputs", given_sizes)
        self._results, self._results_bytes = self._block("results", {key: sizes[key] for key in results})
        for key in sizes.keys() - {*inputs, *results}:
            region = self.device.memory(sizes[key], f"value {key[0]}", "fetched" if key[0] == FETCHED else "device")
            self._io[key] = region.address
            if region.host is not None:
                self._hosts[key] = region.host
            if key[0] == FETCHED:
                self._fetched = region
        self._cells: dict[str, NDArray[np.int32]] = {name: self._hosts["", name][:cells].view(np.int32) for name in EXTENTS}

    def _block(self, use: Literal["inputs", "results"], sizes: dict[Key, int]) -> tuple[Region, int]:
        """One region that holds several buffers, each at a 64-byte boundary, and its bytes."""
        starts, end = {}, 0
        for key, size in sizes.items():
            starts[key], end = end, end + _aligned(size)
        region = self.device.memory(end, f"{use} of a step", use)
        for key, start in starts.items():
            self._io[key] = region.address + start
            if region.host is not None:
                self._hosts[key] = region.host[start : start + max(sizes[key], 1)]
        return region, end

    def _placed(self, weights: BoundWeights) -> dict[Key, int]:
        """Addresses of the weights; tables that no rule makes are read by rows."""
        rows = {operand.name for operand in self.artifact.weights if operand.kind == "table" and operand.derived is None}
        return {key: self.device.place(array, f"weight {key[0]}", by_rows=key[0] in rows) for key, array in weights.parts.items()}

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

    def run(self, *parts: Part, rows: int) -> None:
        """Runs entries one after the other as one native call on each worker; `rows` of the step decide whether sharing it pays."""
        made = self._tables.get(parts)
        if made is None:
            launches = [launch for entry, bucket in parts for launch in self.launches(entry, bucket)]
            table = self.device.table([call for part in parts for call in self.calls(part)])
            made = self._tables[parts] = (table, rows_worth_sharing(launches))
        self.device.run(made[0], alone=rows < made[1])

    def calls(self, part: Part) -> list[Call]:
        """The kernel calls of an entry in a bucket, in order."""
        if part not in self._calls:
            entry, bucket = part
            self._calls[part] = [
                Call(self._kernels[launch.kernel], tuple(map(self._address, launch.buffers)), launch.grid, launch.after if number else None)
                for name in ENTRY_PROGRAMS[entry]
                for number, launch in enumerate(self.artifact.programs[name][bucket].launches)
            ]
        return self._calls[part]

    def launches(self, entry: str, bucket: int) -> list[Launch]:
        """The artifact's launches behind `calls`, in the same order."""
        return [launch for name in ENTRY_PROGRAMS[entry] for launch in self.artifact.programs[name][bucket].launches]

    def _address(self, ref: tuple[str, ...] | tuple[str, int]) -> int:
        match ref:
            case ("arena", int(offset)):
                return self._arena + offset
            case ("io", str(name), str(part)):
                return self._io[name, part]
            case ("weight", str(name), str(part)):
                return self._weights[name, part]
            case ("state", str(name), str(part)):
                return self._states[name, part]
            case ("extent", str(name)):
                return self._io["", name]
        raise ProgramsInconsistent("programs.json", ref, "a buffer reference")

    # -- a step

    def load(self, rows: StepRows) -> tuple[int, int]:
        """Fills the host inputs of encoder and decoder; returns the numbers of rows and outputs."""
        count, outputs, host = len(rows.tokens), len(rows.outputs), self._hosted
        if count > self.artifact.manifest.options.max_rows:
            raise BatchRefused("rows of a step", count, f"at most {self.artifact.manifest.options.max_rows}")
        if outputs > self.artifact.manifest.options.max_outputs:
            raise BatchRefused("rows that ask for logits", outputs, f"at most {self.artifact.manifest.options.max_outputs}")
        host["tokens"][:count] = rows.tokens
        host["positions"][:count] = rows.positions
        host["slots"][:count] = rows.slots
        host["starts"][:count], host["ends"][:count] = rows.starts, rows.ends
        host["floors"][:count] = rows.floors or 0
        host["outputs"][:outputs] = rows.outputs
        cells = self._cells
        cells["rows"][0], cells["outputs"][0] = count, outputs
        cells["kept"][0] = self._load_kept(rows, count)
        return count, outputs

    def _load_kept(self, rows: StepRows, count: int) -> int:
        """Fills the tables of the rows that the decoder half runs; returns how many they are."""
        host = self._hosted
        if rows.kept is None:
            host["kept"][:count] = np.arange(count)
            host["kept_starts"][:count], host["kept_ends"][:count] = rows.starts, rows.ends
            host["kept_floors"][:count] = rows.floors or 0
            return count
        kept = len(rows.kept)
        for name in ("kept", "kept_starts", "kept_ends", "kept_floors"):
            host[name][:kept] = getattr(rows, name)
        return kept

    def load_draws(self, draws: Sequence[Draw] | DrawColumns) -> None:
        """Fills the host inputs of sampling, one draw for each output row."""
        host, columns = self._hosted, _columns(draws)
        count = len(columns.seeds)
        host["temperature"][:count] = columns.temperature
        host["top_k"][:count] = columns.top_k
        host["top_p"][:count] = columns.top_p
        host["seeds"][:count] = columns.seeds
        host["sample_slots"][:count] = columns.slots
        host["sample_positions"][:count] = columns.positions

    def load_draft(self, draws: Sequence[Draw] | DrawColumns, outputs: NDArray[np.int64] | None = None) -> None:
        """Fills the host inputs of the draft: one sequence for each draw, whose token is the one at its position.

        `outputs`: which output yielded that token; the draw's own number where it is not given.
        """
        host, columns = self._hosted, _columns(draws)
        count = len(columns.seeds)
        host["golden_rows"][:count] = np.arange(count) if outputs is None else outputs
        host["draft_positions"][:count] = columns.positions - 1
        host["draft_slots"][:count] = columns.slots
        host["draft_temperature"][:count] = columns.temperature
        host["draft_top_k"][:count] = columns.top_k
        host["draft_top_p"][:count] = columns.top_p
        host["draft_seeds"][:count] = columns.seeds
        self._cells["sequences"][0] = count
        self._cells["drafts"][0] = count * self.artifact.draft_block

    def forward(self, rows: StepRows) -> None:
        """Encoder and decoder for `rows`; logits of the outputs are then in `array("logits")`."""
        count, outputs = self.load(rows)
        bucket = self.bucket(max(count, outputs))
        self.run(("encoder", bucket), ("decoder", bucket), rows=count)
        self._fetch_logits(outputs)

    def _fetch_logits(self, outputs: int) -> None:
        value, shape = self._values[FETCHED, "values"]
        self.device.download(self._fetched, value_bytes(value.dtype, (outputs, *shape[1:])))

    def step(self, rows: StepRows, *, drafting: bool, logits: bool = False) -> None:
        """A whole step: forward, sample a token for each draw, draft behind it if asked. One native call on each worker.

        `rows.draws` pairs with `rows.outputs`. Results are then in `sampled`, `logprobs`, `drafts` and `confidences`; `logits` on request.
        """
        self.run(*self._loaded(rows, drafting), rows=len(rows.tokens))
        if logits:
            self._fetch_logits(len(rows.outputs))

    def begin(self, rows: StepRows) -> Any:
        """A whole step without drafts, put behind those that the device (a `Queueing` one) runs: its results are there after `end`."""
        assert isinstance(self.device, Queueing)
        parts = self._loaded(rows, drafting=False)
        if parts not in self._queued:
            self._queued[parts] = self.device.table([call for part in parts for call in self.calls(part)], copies=False)
        return self.device.start(self._queued[parts])

    def end(self, begun: Any) -> None:
        """Waits for a step that `begin` returned; it may be asked again until `release`."""
        assert isinstance(self.device, Queueing)
        self.device.finish(begun)

    def release(self, begun: Any) -> None:
        """The results of a step have been read."""
        assert isinstance(self.device, Queueing)
        self.device.release(begun)

    def _loaded(self, rows: StepRows, drafting: bool) -> tuple[Part, ...]:
        """Fills the host inputs of a step; returns what it runs."""
        count, outputs = self.load(rows)
        bucket = self.bucket(max(count, outputs))
        parts: list[Part] = [("encoder", bucket)]
        if rows.kept is None or rows.kept:
            parts.append(("decoder", bucket))
        if outputs:
            self.load_draws(rows.draws)
            parts.append(("sample", self.bucket(outputs)))
            if drafting:
                self.load_draft(rows.draws)
                parts.append(("draft", self.draft_bucket(outputs)))
        return tuple(parts)

    def draft_behind(self, outputs: NDArray[np.int64], draws: DrawColumns) -> None:
        """The draft alone, behind tokens that the last step has sampled: `outputs` [sequences] are their rows."""
        self.load_draft(draws, outputs)
        self.run(("draft", self.draft_bucket(len(outputs))), rows=len(outputs))

    def draft(self, golden: Sequence[int], draws: Sequence[Draw]) -> None:
        """The draft alone, behind given tokens; `draws[i].position` is the position of `golden[i]`."""
        self._cells["outputs"][0] = len(golden)
        self.array("sampled")[: len(golden)] = golden
        self.device.upload(self._results, self._results_bytes)
        self.load_draft(draws)
        self.run(("draft", self.draft_bucket(len(golden))), rows=len(golden))


def _columns(draws: Sequence[Draw] | DrawColumns) -> DrawColumns:
    if isinstance(draws, DrawColumns):
        return draws
    return DrawColumns(*(np.array(column) for column in zip(*draws, strict=True)))


def _names(table: dict[str, tuple[str, ...]]) -> set[str]:
    return {name for names in table.values() for name in names}


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


BARRIER_SECONDS = 3e-6
OPERATIONS, BYTES = 40e9, 8e9
"""A barrier between two workers, and what one of them does in a second: orders of magnitude, for the one decision below."""


def rows_worth_sharing(launches: Sequence[Launch]) -> float:
    """From how many rows on a second worker saves more than the barriers cost, by the launches' own costs (docs/runtime.md, device)."""
    fixed = each = 0.0
    for launch in launches:
        for quantity, terms in launch.cost.items():
            rate = BYTES if quantity in ("read", "written") else OPERATIONS
            for term, value in terms.items():
                fixed, each = (fixed + value / rate, each) if term == "fixed" else (fixed, each + value / rate)
    needed = len(launches) * BARRIER_SECONDS - fixed
    return 0.0 if needed <= 0 or not each else needed / each
