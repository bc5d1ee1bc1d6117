"""A toy model with the runtime's whole contract: five programs in C, a paged state, an arena, weights; and its Python statement.

Its logits hash every token up to the row through the block table, so a wrong position, slot, block or chunk shows in all of them.
"""

import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapeout.runtime.artifact import (
    LIBRARY,
    ArtifactData,
    CpuLevel,
    Derived,
    Kernel,
    Launch,
    Manifest,
    ModelIdentity,
    Options,
    Program,
    Programs,
    Ref,
    Rotary,
    StatePart,
    StateSpec,
    Value,
    WeightOperand,
    WeightPart,
    Weights,
    config_fingerprint,
    load_artifact,
    write_artifact,
)
from tapeout.runtime.engine import Engine, EngineOptions
from tapeout.runtime.weights import bind_weights

VOCABULARY, EOS, DRAFTS = 37, 1, 3
BLOCK_TOKENS, MAX_CONTEXT, MAX_SEQUENCES, MAX_ROWS = 4, 61, 5, 24
MAX_BLOCKS = -(-MAX_CONTEXT // BLOCK_TOKENS)
BUCKETS = (4, 16, 32)
KERNELS = ("toy_step", "toy_embed", "toy_append", "toy_decode", "toy_sample", "toy_draft", "toy_add", "toy_shift")
EMBED = (np.arange(VOCABULARY, dtype=np.int32) * 7 + 3) % 101
MASK = 2**64 - 1


class Tensors:
    """A dictionary as a source of tensors."""

    def __init__(self, **tensors: NDArray[Any]) -> None:
        self.tensors = tensors

    def tensor(self, name: str, /) -> NDArray[Any]:
        return self.tensors[name]


@cache
def library(vocabulary: int = VOCABULARY) -> bytes:
    """The compiled kernels."""
    sizes = {"VOCABULARY": vocabulary, "MAX_BLOCKS": MAX_BLOCKS, "BLOCK_TOKENS": BLOCK_TOKENS, "DRAFTS": DRAFTS}
    source = Path(__file__).with_name("toy.c")
    with TemporaryDirectory() as folder:
        out = Path(folder, "libtapeout.so")
        defines = [f"-D{name}={value}" for name, value in sizes.items()]
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", *defines, "-o", str(out), str(source)], check=True)
        return out.read_bytes()


def launch(name: str, *refs: Ref) -> Launch:
    return Launch(kernel=KERNELS.index(name), buffers=refs, cost={"bytes": {"rows": 4.0, "constant": 1.5}})


def table(name: str, extent: str, dtype: str = "i32") -> Value:
    return Value(name=name, dtype=dtype, shape=(extent,), extent=extent)


def io(*names: str) -> list[Ref]:
    return [("io", name, "values") for name in names]


STATE: Ref = ("state", "entries", "values")
LAST: Ref = ("state", "last", "values")
ROWS: Ref = ("extent", "rows")
OUTPUTS: Ref = ("extent", "outputs")


def step() -> Program:
    rows = [table(name, "rows") for name in ("tokens", "positions", "slots", "starts", "ends", "floors")]
    block_table = Value(name="block_table", dtype="i32", shape=(MAX_SEQUENCES, MAX_BLOCKS))
    results = [table("patched", "rows"), table("entry_rows", "rows")]
    given = io("tokens", "positions", "slots", "block_table")
    launches = [launch("toy_step", *given, LAST, *io("patched", "entry_rows"), ROWS)]
    return Program(arena_bytes=0, inputs=(*rows, block_table), results=tuple(results), launches=tuple(launches))


def encoder(bucket: int) -> Program:
    once, twice, thrice = (("arena", 64 + i * 64 * bucket) for i in range(3))
    launches = (
        launch("toy_embed", *io("patched"), ("weight", "embed", "values"), once, ROWS),
        launch("toy_add", once, once, twice, ROWS),
        launch("toy_add", once, twice, thrice, ROWS),
        launch("toy_append", thrice, *io("entry_rows"), STATE, *io("streams"), ROWS),
    )
    inputs = (table("patched", "rows"), table("entry_rows", "rows"))
    return Program(arena_bytes=64 + 3 * 64 * bucket, inputs=inputs, results=(table("streams", "rows"),), launches=launches)


def decoder() -> Program:
    kept = [table(name, "kept") for name in ("kept", "kept_starts", "kept_ends", "kept_floors")]
    block_table = Value(name="block_table", dtype="i32", shape=(MAX_SEQUENCES, MAX_BLOCKS))
    given = [table(name, "rows") for name in ("streams", "positions", "slots")]
    logits = Value(name="logits", dtype="f32", shape=("outputs", VOCABULARY), extent="outputs")
    refs = io("streams", "kept", "outputs", "positions", "slots", "block_table")
    found = launch("toy_decode", *refs, STATE, *io("kept_starts", "kept_ends", "logits"), OUTPUTS)
    inputs = (*given, *kept, table("outputs", "outputs"), block_table)
    return Program(arena_bytes=0, inputs=inputs, results=(logits,), launches=(found,))


def sample() -> Program:
    kinds = {"temperature": "f32", "top_k": "i32", "top_p": "f32", "seeds": "i64", "sample_slots": "i32", "sample_positions": "i32"}
    logits = Value(name="logits", dtype="f32", shape=("outputs", VOCABULARY), extent="outputs")
    inputs = (logits, *(table(name, "outputs", dtype) for name, dtype in kinds.items()))
    results = (table("sampled", "outputs"), table("logprobs", "outputs", "f32"))
    refs = io("logits", "temperature", "seeds", "sample_slots", "sample_positions")
    drawn = launch("toy_sample", *refs, LAST, *io("sampled", "logprobs"), OUTPUTS)
    return Program(arena_bytes=0, inputs=inputs, results=results, launches=(drawn,))


def draft() -> Program:
    kinds = {"golden_rows": "i32", "draft_positions": "i32", "draft_slots": "i32", "draft_temperature": "f32", "draft_top_k": "i32"}
    kinds |= {"draft_top_p": "f32", "draft_seeds": "i64"}
    inputs = (table("sampled", "outputs"), *(table(name, "sequences", dtype) for name, dtype in kinds.items()))
    block = {"shape": ("sequences", DRAFTS), "extent": "sequences"}
    results = (Value(name="drafts", dtype="i32", **block), Value(name="confidences", dtype="f32", **block))
    refs = io("sampled", "golden_rows", "draft_positions", "drafts", "confidences")
    return Program(arena_bytes=0, inputs=inputs, results=results, launches=(launch("toy_draft", *refs, ("extent", "sequences")),))


def programs() -> Programs:
    each = {"step": lambda _: step(), "encoder": encoder, "decoder": lambda _: decoder(), "sample": lambda _: sample()}
    each["draft"] = lambda _: draft()
    return Programs(programs={name: {str(bucket): make(bucket) for bucket in BUCKETS} for name, make in each.items()})


def weights() -> Weights:
    embed = WeightPart(part="values", dtype="i32", shape=(VOCABULARY,), bytes=4 * VOCABULARY, layout="as_stored", tensors=("embed.weight",))
    angles = WeightPart(part="values", dtype="f32", shape=(9, 4), bytes=144, layout="packed", tensors=())
    rotary = Derived(rotary=Rotary(frequencies=(1.0, 0.25), positions=9))
    packed = WeightPart(
        part="scales", dtype="i8", shape=(1, 3, 4), bytes=12, layout="packed", tensors=("scale",), transforms=("transpose", "panels:4")
    )
    return Weights(
        operands=(
            WeightOperand(name="embed", kind="weight", parts=(embed,)),
            WeightOperand(name="rotary", kind="table", parts=(angles,), derived=rotary),
            WeightOperand(name="packed", kind="weight", parts=(packed,)),
        )
    )


def manifest() -> Manifest:
    config = {"architectures": ["Toy"], "eos_token_id": EOS, "ratio": 0.5, "nothing": None}
    kernels = tuple(
        Kernel(
            id=name.removeprefix("toy_"), target="cpu", symbol=name, op=f"toy.{name}", family="toy", variant="plain",
            source_sha256="0" * 64, abi="buffers-worker-workers", schedule={"rows": 1}, origin="default", reduction_order="ascending",
        )
        for name in KERNELS
    )  # fmt: skip
    int32 = StatePart(part="values", dtype="i32", row_bytes=4)
    states = (
        StateSpec(name="entries", kind="blocks", ratio=1, entry_shape=(1,), parts=(int32,), bytes_per_entry=4),
        StateSpec(name="last", kind="ring", length=1, entry_shape=(1,), parts=(int32,), bytes_per_entry=4),
    )
    return Manifest(
        model=ModelIdentity(architecture="Toy", config=config, fingerprint=config_fingerprint(config)),
        targets=("cpu",),
        options=Options(
            max_rows=MAX_ROWS, max_sequences=MAX_SEQUENCES, max_outputs=MAX_ROWS, max_context=MAX_CONTEXT, block_tokens=BLOCK_TOKENS,
            workspace_bytes=0, cpu="x86-64",
        ),
        cpu=CpuLevel(level="x86-64", features=("fpu",)),
        row_buckets=BUCKETS,
        states=states,
        toolchain={"cc": "any"},
        kernels=kernels,
    )  # fmt: skip


def data() -> ArtifactData:
    return ArtifactData(manifest(), programs(), weights(), {"rows": []})


def write_toy(directory: Path) -> Path:
    return write_artifact(directory, data(), {LIBRARY: library(), "source/cpu/toy.mlir": b"// toy\n"})


def tensors() -> Tensors:
    return Tensors(**{"embed.weight": EMBED, "scale": np.arange(3, 12, dtype=np.uint8).reshape(3, 3)})


def toy_engine(directory: Path, **options: Any) -> Engine:
    artifact = load_artifact(directory)
    return Engine(artifact, bind_weights(artifact.weights, tensors()), EngineOptions(**{"workers": 1, **options}))


# -- the same model in Python


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def toy_logits(tokens: Sequence[int]) -> NDArray[np.float32]:
    """Logits [len(tokens), V] of every prefix."""
    out, h = [], 1
    for position, token in enumerate(tokens):
        h = mix((h * 31 + 3 * int(EMBED[token]) * 1000 + position) & MASK)
        out.append([(mix((h + v) & MASK) % 4096) / 512 for v in range(VOCABULARY)])
    return np.array(out, dtype=np.float32)


def toy_token(tokens: Sequence[int], temperature: float, seed: int) -> int:
    """The token that follows."""
    logits, key = toy_logits(tokens)[-1], mix(seed ^ mix(len(tokens)))
    noise = np.array([(mix((key + v) & MASK) % 4096) / 512 for v in range(VOCABULARY)], dtype=np.float32)
    return int(np.argmax(logits + np.float32(temperature) * noise))


def toy_answer(prompt: Sequence[int], count: int, temperature: float = 0.0, seed: int = 0) -> list[int]:
    """Up to `count` tokens, ending with EOS or at the end of the context."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < count:
        tokens.append(toy_token(tokens, temperature, seed))
        if tokens[-1] == EOS or len(tokens) > MAX_CONTEXT:
            break
    return tokens[len(prompt) :]
