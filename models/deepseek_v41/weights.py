"""Which checkpoint tensors a weight operand of the graph is made of, and how the graph sees it.

An operand is named like its tensor without ".weight". The experts of a layer are one operand [E, N, K]; rotary tables and the token map are
derived, not stored. Vision tensors and the gate biases of image tokens are no operands of the text model.
"""

import re
from collections.abc import Iterable
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

    A "table" is read by rows and may stay where it is; a "weight" is read whole.
    """

    view: Tensor
    kind: Literal["weight", "table"]
    tensors: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()
    derived: Rotary | TokenMap | None = None


def weight_sources(config: ModelConfig, positions: int | None = None) -> dict[str, WeightSource]:
    """Every operand by name, in the order of the checkpoint's table; rotary tables have `positions` rows (default: the model's longest)."""
    out: dict[str, WeightSource] = {}
    for name, specs in _by_operand(tensor_table(config).values()).items():
        out[name] = _stored(specs)
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
    return groups


def _stored(specs: list[TensorSpec]) -> WeightSource:
    first = specs[0]
    names = tuple(spec.name for spec in specs)
    is_table = first.name.endswith("engram.embed.weight")
    number = _number(first, is_table)
    rows, *columns = first.shape
    shape = (rows, *(n * 2 if first.dtype is Dtype.I8 else n for n in columns))
    view = Tensor((len(specs), *shape) if first.dtype is Dtype.I8 else shape, number)
    scales = tuple(map(scale_name, names)) if number.scaling else ()
    return WeightSource(view, "table" if is_table else "weight", names, scales)


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
