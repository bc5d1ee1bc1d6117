"""plan-memory by brute force: whole step programs are played on an arena of tags, and every operand must still be what was written.

The values are followed through the planned module, calls included; the places come from the finished programs. Sizes are counted here again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tapeout.codegen.lower_to_tile import tile_kernels
from tapeout.codegen.plan_memory import ALIGNMENT, PlanMemory, _Block, _place
from tapeout.codegen.select_kernels import kernel_of
from tapeout.compiler.pipeline import run
from tapeout.compiler.programs import is_entry_point, step_programs
from tapeout.dialects._mlir import func, ir
from tapeout.dialects.types import Tensor, from_ir
from tapeout.models.deepseek_v41.config import ModelConfig
from tapeout.models.deepseek_v41.graph import GraphOptions, build_graph
from tapeout.passes.define import functions, operations
from tapeout.passes.extents import callee, extents
from tests.passes.modules import DRAFTS, PASSES, REAL, SETTINGS, TINY, graph, keeps_meaning

BYTES = {"bf16": 2, "f32": 4, "i32": 4, "i64": 8, "f8E4M3FN": 1, "i8": 1, "i16": 2, "f64": 8}
CONFIGS = pytest.mark.parametrize("config", [TINY, REAL], ids=["tiny", "real"])


def bound(extent: str | None, bucket: int) -> int:
    """Rows of an extent at most, as the options state it."""
    sequences = min(bucket, SETTINGS.max_sequences)
    return {None: 0, "sequences": sequences, "drafts": sequences * DRAFTS, "outputs": min(bucket, SETTINGS.outputs)}.get(extent, bucket)


def sizes_of(view: Any, rows: int) -> list[int]:
    """Bytes of the parts of a value: codes (FP4 two to a byte), then scales."""
    assert isinstance(view, Tensor), view
    count = 1
    for n in view.shape:
        count *= rows if n is None else n
    scaling = view.number.scaling
    if scaling is None:
        return [count * BYTES[view.number.element]]
    assert scaling.rows == 1
    return [count // 2 if view.number.element == "f4E2M1FN" else count, count // scaling.columns]


@dataclass(frozen=True)
class Step:
    """One launch: values it takes and makes (by number, None for what lies outside the arena), sizes of parts and workspaces."""

    takes: list[list[int | None]]
    makes: list[list[int]]
    sizes: list[list[int]]
    work: list[int]


@dataclass
class Flat:
    """A function as a list of launches, calls entered; every part of a value has a number."""

    bucket: int
    steps: list[Step] = field(default_factory=list)
    count: int = 0

    def fresh(self, parts: int) -> list[int]:
        self.count += parts
        return list(range(self.count - parts, self.count))

    def walk(self, function: func.FuncOp, taken: list[list[int | None]], names: list[str | None]) -> list[list[int | None]]:
        ragged = extents(function, names)
        known: dict[ir.Value, Any] = dict(zip(function.entry_block.arguments, taken, strict=True))
        *ops, ending = operations(function)
        for op in ops:
            inputs = [known[v] for v in op.operands]
            if op.name == "func.call":
                results = self.walk(callee(function, op), inputs, [ragged.get(v) for v in op.operands])
                known.update(zip(op.results, results, strict=True))
                continue
            views = [from_ir(r.type) for r in op.results]
            rows = [bound(ragged.get(r), self.bucket) for r in op.results]
            sizes = [sizes_of(v, n) for v, n in zip(views, rows, strict=True)]
            made = [self.fresh(len(s)) for s in sizes]
            known.update(zip(op.results, made, strict=True))
            most = max((bound(ragged[v], self.bucket) for v in (*op.results, *op.operands) if v in ragged), default=0)
            self.steps.append(Step(inputs, made, sizes, [w.elements(most) * BYTES[w.element] for w in kernel_of(op).workspaces]))
        return [known[v] for v in ending.operands]


def flat_steps(function: func.FuncOp, bucket: int) -> list[Step]:
    flat = Flat(bucket)
    outside = [[None] * len(_parts(kind)) for kind in function.type.inputs]
    flat.walk(function, outside, [_extent(function, i) for i in range(len(outside))])  # type: ignore[arg-type]
    return flat.steps


def _parts(kind: ir.Type) -> list[tuple[str, str]]:
    from tapeout.codegen.kernel import parts

    return parts(from_ir(kind))


def _extent(function: func.FuncOp, index: int) -> str | None:
    from tapeout.passes.extents import argument_attribute

    return argument_attribute(function, index, "tapeout.extent")


class Arena:
    """Which value each byte range holds; writing any byte of a range forgets what it held."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.held: dict[int, tuple[int, int]] = {}  # value -> (start, end)

    def write(self, value: int, start: int, size: int) -> None:
        assert start % ALIGNMENT == 0 and start + size <= self.size, (start, size, self.size)
        end = start + size
        self.held = {v: (a, b) for v, (a, b) in self.held.items() if b <= start or end <= a}
        self.held[value] = (start, end)

    def require(self, value: int, start: int) -> None:
        assert self.held.get(value, (None,))[0] == start, f"value {value} is expected at {start}, found {self.held.get(value)}"


def play(steps: list[Step], program: Any) -> None:
    """Runs a program's launches on an arena; fails where a launch reads bytes that another one has overwritten."""
    arena, homes = Arena(program.arena_bytes), {}  # type: ignore[var-annotated]
    assert len(steps) == len(program.launches)
    for number, (step, launch) in enumerate(zip(steps, program.launches, strict=True)):
        refs = iter(launch.buffers)
        reads = [(part, next(refs)) for value in step.takes for part in value]
        makes = [
            (part, size, next(refs))
            for parts, sizes in zip(step.makes, step.sizes, strict=True)
            for part, size in zip(parts, sizes, strict=True)
        ]
        work = [(-number * 100 - i - 1, size, next(refs)) for i, size in enumerate(step.work)]
        assert next(refs)[0] == "extent" and next(refs, None) is None
        for part, size, ref in (*makes, *work):
            homes[part] = ref
            if ref[0] == "arena":
                arena.write(part, ref[1], size)
        for part, ref in reads:
            if part is None:
                assert ref[0] in ("io", "weight", "state"), ref
            else:
                assert homes[part] == ref
                if ref[0] == "arena":
                    arena.require(part, ref[1])


def programs(module: ir.Module) -> Iterator[tuple[str, int, list[Step], Any]]:
    numbers = {choice: i for i, choice in enumerate(dict.fromkeys(tile_kernels_of(module)))}
    found = step_programs(module, numbers)
    for function in filter(is_entry_point, functions(module)):
        for bucket, program in found[function.name.value].items():
            yield function.name.value, int(bucket), flat_steps(function, int(bucket)), program


def tile_kernels_of(module: ir.Module) -> list[Any]:
    """Choices in program order, without building tile modules."""
    from tapeout.codegen.select_kernels import choice_of, launches

    return [choice_of(op) for op in launches(module)]


@CONFIGS
def test_no_two_live_values_share_bytes(config: ModelConfig) -> None:
    with graph(None, config) as module:
        run(module, PASSES)
        seen = 0
        for _, _, steps, program in programs(module):
            play(steps, program)
            seen += len(steps)
    assert seen > 900


def test_the_check_itself_finds_an_overlap() -> None:
    """Moving one value onto another one that is still to be read must fail."""
    with graph() as module:
        run(module, PASSES)
        steps, program = next((s, p) for name, bucket, s, p in programs(module) if name == "decoder" and bucket == 33)
        play(steps, program)
        moved = program.model_copy(
            update={
                "launches": tuple(
                    launch.model_copy(update={"buffers": tuple(("arena", 0) if ref[0] == "arena" else ref for ref in launch.buffers)})
                    for launch in program.launches
                )
            }
        )
        with pytest.raises(AssertionError, match=r"is expected at|assert"):
            play(steps, moved)


@CONFIGS
def test_arena_does_not_depend_on_context(config: ModelConfig) -> None:
    """No buffer grows with rows times context: a selection scores chunks, and a context beyond one chunk takes no more room."""
    longest = config.text.max_position_embeddings
    arenas = []
    for context in (longest // 2, longest):
        with ir.Context(), ir.Location.unknown():
            module = build_graph(config, GraphOptions(SETTINGS.max_sequences, context, 16))
            run(module, PASSES)
            arenas.append({(name, bucket): program.arena_bytes for name, bucket, _, program in programs(module)})
    assert longest >= 4096 and arenas[0] == arenas[1]


def test_larger_buckets_need_larger_arenas() -> None:
    with graph() as module:
        run(module, PASSES)
        for name in ("encoder", "decoder"):
            sizes = [p.arena_bytes for n, _, _, p in programs(module) if n == name]
            assert sizes == sorted(sizes) and sizes[0] > 0


def test_reuse_is_worth_it() -> None:
    """In a step of many rows the arena is a small part of the sum of all values."""
    with graph() as module:
        run(module, PASSES)
        for name, bucket, steps, program in programs(module):
            total = sum(size for s in steps for sizes in (*s.sizes, s.work) for size in sizes)
            if name in ("encoder", "decoder") and bucket == 33:
                assert program.arena_bytes < total / 3


def test_keeps_meaning() -> None:
    keeps_meaning(PlanMemory(SETTINGS.max_sequences, SETTINGS.outputs, DRAFTS))


def test_every_kernel_of_the_module_has_a_number() -> None:
    with graph() as module:
        run(module, PASSES)
        assert list(tile_kernels(module)) == list(dict.fromkeys(tile_kernels_of(module)))


@pytest.mark.parametrize(
    ("lives", "needed"),
    [
        ([], 0),
        ([(0, 0, 1)], 64),
        ([(0, 1, 64), (1, 2, 64)], 128),  # alive together at 1
        ([(0, 0, 64), (1, 1, 64)], 64),  # one after the other
        ([(0, 9, 65), (0, 3, 64), (4, 9, 64)], 192),  # 65 bytes take two units
        ([(0, 9, 0), (0, 9, 64)], 64),  # nothing takes no room
        ([(0, 9, -1), (0, 9, 64)], 64),  # placed by the caller
    ],
)
def test_first_fit(lives: list[tuple[int, int, int]], needed: int) -> None:
    blocks = [_Block(birth, death, n, None, slot) for slot, (birth, death, n) in enumerate(lives)]  # type: ignore[arg-type]
    assert _place(blocks) == needed
    for a in blocks:
        for b in blocks:
            if a is not b and min(a.size, b.size) > 0 and a.birth <= b.death and b.birth <= a.death:
                assert a.offset + a.size <= b.offset or b.offset + b.size <= a.offset
