"""What an artifact's files must agree on: the second half of `load_artifact`, in the order in which it runs.

Each check raises one typed error that names file and key, what was found and what would be right. Nothing is repaired.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NoReturn

from tapeout.runtime.artifact import (
    ALIGNMENT,
    BITS,
    HOST_INPUTS,
    HOST_RESULTS,
    LIBRARY,
    MANIFEST,
    ORDER,
    PROGRAMS,
    TUNING,
    WEIGHTS,
    Artifact,
    EntryPoint,
    Launch,
    Manifest,
    Program,
    Ref,
    StateSpec,
    Value,
    WeightOperand,
    WeightPart,
    config_fingerprint,
)
from tapeout.runtime.artifact_kernels import EARLY, Kernel
from tapeout.runtime.errors import CpuFeatureMissing, FieldsRefused, FileMissing, ProgramsInconsistent, WeightsInconsistent

Known = Mapping[str, Mapping[tuple[str, str], str]]
"""For io, weights and states: the (name, part) pairs that a launch may point at, and their elements."""


def files(directory: Path, manifest: Manifest) -> None:
    """Every file that the runtime reads is listed."""
    compiled = [path for kernel in manifest.kernels for path in kernel.files]
    needed = [PROGRAMS, WEIGHTS, TUNING, *([LIBRARY] if "cpu" in manifest.targets else []), *compiled]
    for path in needed:
        if path not in manifest.files:
            raise FileMissing(f"{directory / MANIFEST}: files", f"no entry {path}", "an entry for every file")


def manifest(directory: Path, manifest: Manifest) -> None:
    """Identity of the configuration, buckets in order, names said once, states whose bytes add up."""
    place = directory / MANIFEST
    found = config_fingerprint(manifest.model.config)
    if found != manifest.model.fingerprint:
        _manifest_refused(place, "model.fingerprint", manifest.model.fingerprint, found)
    buckets, options = manifest.row_buckets, manifest.options
    if list(buckets) != sorted(set(buckets)):
        _manifest_refused(place, "row_buckets", list(buckets), "ascending, each once")
    if options.max_rows > buckets[-1]:
        _manifest_refused(place, "options.max_rows", options.max_rows, f"at most {buckets[-1]}, the largest row bucket")
    if options.max_sequences > options.max_rows:
        _manifest_refused(place, "options.max_sequences", options.max_sequences, f"at most {options.max_rows} (max_rows)")
    if not options.max_sequences <= options.max_outputs <= options.max_rows:
        expected = f"from {options.max_sequences} (max_sequences) to {options.max_rows} (max_rows)"
        _manifest_refused(place, "options.max_outputs", options.max_outputs, expected)
    for key, names in (
        ("extents", manifest.extents),
        ("targets", manifest.targets),
        ("states", [state.name for state in manifest.states]),
        ("kernels", [kernel.id for kernel in manifest.kernels]),
    ):
        _once(place, key, names)
    for state in manifest.states:
        _state(place, state, options.block_tokens)
    for kernel in manifest.kernels:
        if kernel.target not in manifest.targets:
            _manifest_refused(place, f"kernels.{kernel.id}.target", kernel.target, " or ".join(manifest.targets))
        _binary(place, kernel, manifest)


def _binary(place: Path, kernel: Kernel, manifest: Manifest) -> None:
    """A kernel that takes scratch pointers lies in a binary of a chip, one that takes a lock in a lowered module; those of the library do not.
    Only where a chip can begin launches early is there a kernel that waits by itself."""
    for key, abi, row, level, chip in (
        ("binary", "buffers-scratch-profile", kernel.binary, manifest.gpu, "gpu"),
        ("lowered", "lock-workspace-buffers-grid", kernel.lowered, manifest.npu, "npu"),
    ):
        wanted = kernel.abi == abi
        if wanted != (row is not None) or (wanted and level is None):
            found = f"no {key}, or no {chip} in the manifest" if wanted else f"a {key}"
            _manifest_refused(place, f"kernels.{kernel.id}.{key}", found, f"a {key} and its chip" if wanted else f"none for abi {kernel.abi}")
    if kernel.binary and kernel.binary.waits and manifest.gpu and manifest.gpu.capability < EARLY:
        expected = f"false below compute capability {EARLY[0]}.{EARLY[1]}"
        _manifest_refused(place, f"kernels.{kernel.id}.binary.waits", f"true for {manifest.gpu.chip}", expected)


def _state(place: Path, state: StateSpec, block_tokens: int) -> None:
    key = f"states.{state.name}"
    ring = state.kind == "ring"
    if (state.length is not None) != ring or (state.ratio is not None) == ring:
        _manifest_refused(place, key, f"length {state.length}, ratio {state.ratio}", "length for a ring, ratio for blocks")
    if state.ratio is not None and block_tokens % state.ratio:
        _manifest_refused(place, f"{key}.ratio", state.ratio, f"a divisor of block_tokens = {block_tokens}")
    _once(place, f"{key}.parts", [part.part for part in state.parts])
    total = sum(part.row_bytes for part in state.parts)
    if total != state.bytes_per_entry:
        _manifest_refused(place, f"{key}.bytes_per_entry", state.bytes_per_entry, f"{total}, the sum of its parts")


def _once(place: Path, key: str, names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        _manifest_refused(place, key, f"{twice[0]} twice", "each name once")


def _manifest_refused(place: Path, key: str, found: object, expected: object) -> NoReturn:
    raise FieldsRefused(str(place), [f"{key}: found {found}, expected {expected}"])


# -- weights


def weights(directory: Path, operands: Sequence[WeightOperand]) -> None:
    """Names once, bytes that follow from shapes, as-stored parts of one tensor, derived tables without tensors."""
    place, seen = directory / WEIGHTS, set[str]()
    for operand in operands:
        if operand.name in seen:
            raise WeightsInconsistent(f"{place}: {operand.name}", "the name twice", "each operand once")
        seen.add(operand.name)
        _operand(place, operand)


def _operand(place: Path, operand: WeightOperand) -> None:
    where, derived = f"{place}: {operand.name}", operand.derived
    if len({part.part for part in operand.parts}) < len(operand.parts):
        raise WeightsInconsistent(where, "a part twice", "each part once")
    if derived is not None and (derived.rotary is None) == (derived.token_map is None):
        raise WeightsInconsistent(f"{where}.derived", "no rule or two rules", "rotary or token_map")
    if derived is not None and len(operand.parts) != 1:
        raise WeightsInconsistent(where, f"{len(operand.parts)} parts", "one part in a derived table")
    for part in operand.parts:
        _part(f"{where}.{part.part}", part, derived is not None)


def _part(where: str, part: WeightPart, derived: bool) -> None:
    expected = -(-prod(part.shape) * BITS[part.dtype] // 8)
    if part.bytes != expected:
        raise WeightsInconsistent(f"{where}.bytes", part.bytes, f"{expected}, from shape {list(part.shape)} of {part.dtype}")
    if derived and (part.tensors or part.transforms or part.layout != "packed"):
        raise WeightsInconsistent(where, "tensors, transforms or layout as_stored", "none of them in a derived table")
    if not derived and not part.tensors:
        raise WeightsInconsistent(f"{where}.tensors", "no tensor", "at least one")
    if part.layout == "as_stored" and (len(part.tensors) != 1 or part.transforms):
        raise WeightsInconsistent(
            where,
            f"{len(part.tensors)} tensors, transforms {list(part.transforms)}",
            "one tensor and no transform for layout as_stored",
        )


# -- programs


def by_bucket(
    directory: Path, manifest: Manifest, entries: Mapping[EntryPoint, Mapping[str, Program]]
) -> dict[str, dict[int, Program]]:
    """Entry points with integer bucket keys: all but `draft` are there, each with exactly the manifest's buckets."""
    place = directory / PROGRAMS
    missing = [name for name in ORDER if name != "draft" and name not in entries]
    if missing:
        raise ProgramsInconsistent(f"{place}: programs", f"no entry point {missing[0]}", ", ".join(ORDER))
    wanted = {str(bucket): bucket for bucket in manifest.row_buckets}
    for name, buckets in entries.items():
        if set(buckets) != set(wanted):
            raise ProgramsInconsistent(f"{place}: {name}", f"buckets {sorted(buckets)}", f"buckets {list(wanted)}")
    return {name: {bucket: entries[name][key] for key, bucket in wanted.items()} for name in ORDER if name in entries}


def programs(artifact: Artifact) -> None:
    """Every launch points at a kernel and at buffers that exist; every input has someone who fills it."""
    offered = set[str]()
    known = {
        "weight": {(operand.name, part.part): part.dtype for operand in artifact.weights for part in operand.parts},
        "state": {(state.name, part.part): part.dtype for state in artifact.manifest.states for part in state.parts},
    }
    for entry, buckets in artifact.programs.items():
        offered |= set(HOST_INPUTS[entry])
        for bucket, program in buckets.items():
            where = f"{artifact.directory / PROGRAMS}: {entry}.{bucket}"
            _values(where, entry, program, offered)
            io = {(value.name, value.part): value.dtype for value in (*program.inputs, *program.results)}
            _launches(artifact, where, program, {**known, "io": io})
        offered |= {value.name for program in buckets.values() for value in program.results}
    _io_shapes(artifact)


def _values(where: str, entry: str, program: Program, offered: set[str]) -> None:
    missing = set(HOST_RESULTS.get(entry, ())) - {value.name for value in program.results}
    if missing:
        raise ProgramsInconsistent(f"{where}.results", f"no {min(missing)}", ", ".join(HOST_RESULTS[entry]))
    for value in program.inputs:
        if value.name not in offered:
            known = ", ".join(sorted(offered))
            raise ProgramsInconsistent(f"{where}.inputs", value.name, f"an input of the engine or an earlier result: {known}")
    for value in (*program.inputs, *program.results):
        _value(where, value)


def _launches(artifact: Artifact, where: str, program: Program, known: Known) -> None:
    for index, launch in enumerate(program.launches):
        _launch(artifact, f"{where}.launches[{index}]", launch, program.arena_bytes, known)
        if max(launch.after or (), default=0) > index:
            raise ProgramsInconsistent(f"{where}.launches[{index}].after", list(launch.after or ()), f"distances to the {index} launches in front")
    for lifetime in program.lifetimes or ():
        ends = lifetime.offset + lifetime.bytes <= program.arena_bytes
        if not ends or not lifetime.first <= lifetime.last < len(program.launches) or lifetime.offset % ALIGNMENT:
            raise ProgramsInconsistent(
                f"{where}.lifetimes", lifetime.model_dump(), f"inside {program.arena_bytes} bytes and the launches"
            )


def _value(where: str, value: Value) -> None:
    lead = value.shape[0] if value.shape and isinstance(value.shape[0], str) else None
    if lead != value.extent or any(isinstance(axis, str) for axis in value.shape[1:]):
        raise ProgramsInconsistent(
            f"{where}: {value.name}",
            f"shape {list(value.shape)}, extent {value.extent}",
            "an extent names the first axis and only that",
        )


def _launch(artifact: Artifact, where: str, launch: Launch, arena_bytes: int, known: Known) -> None:
    kernels = artifact.manifest.kernels
    if launch.kernel >= len(kernels):
        raise ProgramsInconsistent(f"{where}.kernel", launch.kernel, f"below {len(kernels)}, the number of kernels")
    if kernels[launch.kernel].files and launch.grid is None:
        raise ProgramsInconsistent(f"{where}.grid", "none", "instances by axis: a launch on a chip says how many")
    for ref in launch.buffers:
        match ref:
            case ("arena", int(offset)):
                if offset >= arena_bytes or offset % ALIGNMENT:
                    raise ProgramsInconsistent(
                        f"{where}.buffers", f"arena offset {offset}", f"a multiple of {ALIGNMENT} below {arena_bytes}"
                    )
            case ("extent", str(name)):
                if name not in artifact.manifest.extents:
                    raise ProgramsInconsistent(f"{where}.buffers", f"extent {name}", ", ".join(artifact.manifest.extents))
            case (kind, str(name), str(part)):
                if (name, part) not in known[kind]:
                    raise ProgramsInconsistent(f"{where}.buffers", f"{kind} {name}.{part}", _nearest(name, part, known[kind]))
    kernel = kernels[launch.kernel]
    if kernel.parameters:
        _fits(where, kernel.symbol, launch.buffers, kernel.parameters, known)


_CELLS = {"ui8": "i8", "f8E8M0FNU": "i8", "f4E2M1FN": "i8"}
"""Elements that kernels read as bytes."""


def _fits(where: str, symbol: str, buffers: Sequence[Ref], parameters: Sequence[str], known: Known) -> None:
    """As many buffers as the kernel takes, each of the element it reads; what lies in the arena has no element of its own."""
    if len(buffers) != len(parameters):
        raise ProgramsInconsistent(f"{where}.buffers", f"{len(buffers)} buffers", f"{len(parameters)}, what {symbol} takes")
    for ref, wanted in zip(buffers, parameters, strict=True):
        match ref:
            case ("arena", _):
                continue
            case ("extent", _):
                found = "i32"
            case (kind, str(name), str(part)):
                found = known[kind][name, part]
        if _CELLS.get(found, found) != _CELLS.get(wanted, wanted):
            raise ProgramsInconsistent(f"{where}.buffers", f"{' '.join(map(str, ref))}, which holds {found}", f"{wanted}, what {symbol} takes")


def _nearest(name: str, part: str, known: Mapping[tuple[str, str], str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(f"{name}.{part}", [f"{n}.{p}" for n, p in sorted(known)], n=1, cutoff=0.0)
    return f"a declared one, such as {close[0]}" if close else "no such reference: none is declared"


def _io_shapes(artifact: Artifact) -> None:
    """Equal names are one buffer, so element, rank and inner axes agree in every program."""
    seen: dict[tuple[str, str], tuple[str, Value]] = {}
    for entry, buckets in artifact.programs.items():
        for program in buckets.values():
            for value in (*program.inputs, *program.results):
                first, other = seen.setdefault((value.name, value.part), (entry, value))
                if (other.dtype, other.shape[1:]) != (value.dtype, value.shape[1:]):
                    raise ProgramsInconsistent(
                        f"{artifact.directory / PROGRAMS}: {entry}: {value.name}",
                        f"{value.dtype} {list(value.shape)}",
                        f"{other.dtype} {list(other.shape)} as in {first}",
                    )


# -- the processor


def processor(artifact: Artifact, present: frozenset[str]) -> None:
    """The host has every feature that the library was compiled for."""
    missing = sorted(set(artifact.manifest.cpu.features) - present)
    if missing:
        raise CpuFeatureMissing(
            f"{artifact.directory / MANIFEST}: cpu.features",
            f"a processor without {', '.join(missing)}",
            f"{artifact.manifest.cpu.level}",
        )


def host_features() -> frozenset[str]:
    """Feature flags of this processor as Linux names them; none where /proc/cpuinfo does not exist."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    return frozenset(_flags(re.findall(r"^flags\s*:\s*(.*)$", text, flags=re.MULTILINE)))


def _flags(lines: Iterable[str]) -> set[str]:
    """Flags that every processor of the machine has."""
    sets = [set(line.split()) for line in lines]
    return set.intersection(*sets) if sets else set()
