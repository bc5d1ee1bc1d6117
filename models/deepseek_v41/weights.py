"""Which checkpoint tensors a weight operand of the graph is made of, and how the graph sees it.

An operand is named like its tensor without ".weight". The experts of a layer are one operand [E, N, K]. Tensors that multiply the same rows may
be one operand, their rows one below the other (`TOGETHER`): w1 and w3 are `w1+w3` [E, 2N, K]. Rotary tables and the token map are derived, not
stored. Vision tensors and the gate biases of image tokens are no operands of the text model.
"""

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Literal

from tapeout.dialects.format import BF16, FP4_WEIGHT, FP8_TABLE, FP8_WEIGHT, FP32, INT32, REAL, Number
from tapeout.dialects.types import Tensor
from tapeout.models.deepseek_v41.config import ModelConfig, RopeScaling
from tapeout.models.deepseek_v41.tensors import Dtype, Part, TensorSpec, scale_name, tensor_table

TOKEN_MAP = "engram.token_map"
PLAIN_ROTARY = "rotary.plain"
COMPRESSED_ROTARY = "rotary.compressed"
_EXPERT = re.compile(r"(?P<layer>.*\.ffn\.experts)\.\d+\.(?P<part>w[123])")
TOGETHER: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"(layers|mtp)\.\d+\.attn", ("wq_a", "wkv")),
    (r"layers\.\d+\.attn\.compressor", ("wgate", "wkv")),
    (r".*\.ffn\.(shared_)?experts", ("w1", "w3")),
)
"""Tensors that are one operand where all of them are there: what stands in front of their names (a pattern), and the names in the order of their
rows. All but the last end on a block of scales (the widths' rules in rules.py)."""
ALONE = r"mtp\.\d+\.attn\.wkv"
"""Tensors that are operands of their own besides: a draft stage makes window vectors of the main model's rows, and nothing else."""


@dataclass(frozen=True)
class Rotary:
    """A rotary table: row p holds cos(p w_i), then sin(p w_i), from FP32 angles (docs/model.md 4.2). `ratio` is that of its layers."""

    ratio: int
    base: float
    scaling: RopeScaling | None
    columns: int
    rows: int


@dataclass(frozen=True)
class TokenMap:
    """Token id to compressed id, made from the tokenizer (docs/model.md 6.1). `pad` is the id that the pad token must map to."""

    pad: int


@dataclass(frozen=True)
class WeightSource:
    """One operand: `tensors` (several: stacked along a leading axis) with their `scales`, or `derived`.

    `rows` where several tensors make one matrix, one below the other: the rows of each; `tensors` then has those of the first matrix, of the
    second, and so on. A "table" is read by rows and may stay where it is; a "weight" is read whole.
    """

    view: Tensor
    kind: Literal["weight", "table"]
    tensors: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()
    derived: Rotary | TokenMap | None = None
    rows: tuple[int, ...] = ()


def weight_sources(config: ModelConfig, positions: int | None = None) -> dict[str, WeightSource]:
    """Every operand by name, in the order of the checkpoint's table; rotary tables have `positions` rows (default: the model's longest)."""
    out: dict[str, WeightSource] = {}
    for name, specs in _by_operand(tensor_table(config).values()).items():
        out[name] = _stored(name, specs)
    return out | _derived(config, positions or config.text.max_position_embeddings)


def rotary_name(config: ModelConfig, layer: int) -> str:
    """The table of a layer, for its queries, window, entries and index vectors alike; draft stages follow the backbone's layers."""
    return COMPRESSED_ROTARY if config.ratio(layer) else PLAIN_ROTARY


def _by_operand(table: Iterable[TensorSpec]) -> dict[str, list[TensorSpec]]:
    groups: dict[str, list[TensorSpec]] = {}
    for spec in table:
        if spec.part is Part.VISION or spec.dtype is Dtype.F8_E8M0 or spec.name.endswith(".bias_vl"):
            continue
        name = spec.name.removesuffix(".weight")
        expert = _EXPERT.fullmatch(name)
        groups.setdefault(f"{expert['layer']}.{expert['part']}" if expert else name, []).append(spec)
    out: dict[str, list[TensorSpec]] = {}
    for name, specs in groups.items():
        place, parts = _together(name, groups)
        if parts:
            matrices = zip(*(groups[f"{place}.{part}"] for part in parts), strict=True)
            out[f"{place}.{'+'.join(parts)}"] = [spec for matrix in matrices for spec in matrix]
        if not parts or re.fullmatch(ALONE, name):
            out[name] = specs
    return out


def _together(name: str, groups: Container[str]) -> tuple[str, tuple[str, ...]]:
    """What stands in front of a name, and the parts of the operand that it is part of; none where it is one itself."""
    place, _, part = name.rpartition(".")
    parts = next((parts for pattern, parts in TOGETHER if part in parts and re.fullmatch(pattern, place)), ())
    return place, parts if all(f"{place}.{other}" in groups for other in parts) else ()


def _stored(name: str, specs: list[TensorSpec]) -> WeightSource:
    first, names = specs[0], tuple(spec.name for spec in specs)
    is_table = first.name.endswith("engram.embed.weight")
    number, count = _number(first, is_table), name.count("+") + 1
    together = tuple(spec.shape[0] for spec in specs[:count]) if count > 1 else ()
    rows, columns = sum(together) or first.shape[0], (n * 2 if first.dtype is Dtype.I8 else n for n in first.shape[1:])
    assert number.scaling is None or all(n % number.scaling.rows == 0 for n in together[:-1]), (name, together)
    view = Tensor((*((len(specs) // count,) if first.dtype is Dtype.I8 else ()), rows, *columns), number)
    scales = tuple(map(scale_name, names)) if number.scaling else ()
    return WeightSource(view, "table" if is_table else "weight", names, scales, rows=together)


def _number(spec: TensorSpec, is_table: bool) -> Number:
    match spec.dtype:
        case Dtype.F8_E4M3:
            return FP8_TABLE if is_table else FP8_WEIGHT
        case Dtype.I8:
            return FP4_WEIGHT
        case Dtype.F32:
            return FP32
    return BF16


def _derived(config: ModelConfig, positions: int) -> dict[str, WeightSource]:
    text, columns = config.text, config.text.qk_rope_head_dim
    angles = Tensor((positions, columns), REAL)
    plain = Rotary(0, float(text.rope_theta), None, columns, positions)
    compressed = Rotary(1, float(text.compress_rope_theta), text.rope_scaling, columns, positions)
    ids = Tensor((text.vocab_size,), INT32)
    return {
        PLAIN_ROTARY: WeightSource(angles, "table", derived=plain),
        COMPRESSED_ROTARY: WeightSource(angles, "table", derived=compressed),
        TOKEN_MAP: WeightSource(ids, "table", derived=TokenMap(text.engram_pad_token_id)),
    }
