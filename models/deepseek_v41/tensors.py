"""The tensor table of a checkpoint: every name with dtype, shape and group (docs/model.md, section 10).

Derived from the configuration alone. What the bytes mean is in section 9, where they lie is the checkpoint's index's business,
and sums over the table are in `ledger.py`.
"""

from collections.abc import Iterator
from enum import StrEnum
from math import prod
from typing import NamedTuple

from tapeout.models.deepseek_v41.config import LayerKind, ModelConfig

SCALE_BLOCK = 32  # one UE8M0 scale per 32 columns, and per 32 rows where rows are grouped too


class Dtype(StrEnum):
    """Storage types, spelled as safetensors spells them. I8 holds two FP4 values to the byte."""

    BF16 = "BF16"
    F32 = "F32"
    F8_E4M3 = "F8_E4M3"
    F8_E8M0 = "F8_E8M0"
    I8 = "I8"

    @property
    def width(self) -> int:
        """Bytes of one stored element."""
        return {"BF16": 2, "F32": 4}.get(self.value, 1)


class Group(StrEnum):
    """The accounting group of a tensor (section 12)."""

    EMBED = "embed"
    HEAD = "lm head + final norm"
    ATTENTION = "attention dense"
    NORMS = "layer norms, q/kv norms, sinks"
    COMPRESSORS = "compressors"
    INDEXERS = "indexers"
    MIXERS = "mHC mixers"
    GATES = "gates"
    ROUTED = "routed experts"
    SHARED = "shared experts"
    ENGRAM = "Engram projections and gates"
    ENGRAM_TABLES = "Engram tables"
    MAIN_PROJ = "main_proj"
    MARKOV = "Markov head"
    CONFIDENCE = "confidence head"
    VISION = "vision + aligner + delimiters"


class Part(StrEnum):
    """The part of the model a tensor serves; a caller may do without draft or vision."""

    TEXT = "text"
    DRAFT = "draft"
    VISION = "vision"


class TensorSpec(NamedTuple):
    """One stored tensor. `shape` counts stored elements, so packed FP4 has half as many columns as values."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    group: Group
    part: Part = Part.TEXT

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.width

    @property
    def parameters(self) -> int:
        """Logical parameters: an FP4 byte holds two, a scale holds none."""
        return prod(self.shape) * {Dtype.I8: 2, Dtype.F8_E8M0: 0}.get(self.dtype, 1)


def tensor_table(config: ModelConfig) -> dict[str, TensorSpec]:
    """Returns every tensor of the checkpoint by name, backbone first, then draft, then vision."""
    return {spec.name: spec for spec in _all(config)}


def scale_name(weight_name: str) -> str:
    """Returns the name of the scale tensor of a quantised weight."""
    return weight_name.removesuffix(".weight") + ".scale"


def _all(config: ModelConfig) -> Iterator[TensorSpec]:
    text = config.text
    vocabulary = (text.vocab_size, text.hidden_size)
    yield TensorSpec("embed.weight", Dtype.BF16, vocabulary, Group.EMBED)
    yield TensorSpec("head.weight", Dtype.BF16, vocabulary, Group.HEAD)
    yield TensorSpec("norm.weight", Dtype.BF16, (text.hidden_size,), Group.HEAD)
    for layer in range(config.layers):
        yield from _block(config, f"layers.{layer}.", text.n_routed_experts, Part.TEXT)
        yield from _sources(config, layer)
        yield from _engram(config, layer)
    for stage in range(config.draft_stages):
        yield from _block(config, f"mtp.{stage}.", text.dspark_n_routed_experts, Part.DRAFT)
    yield from _draft_ends(config)
    yield from _vision(config)


def _fp8(name: str, rows: int, columns: int, group: Group, part: Part, row_block: int = 32) -> Iterator[TensorSpec]:
    """Yields an FP8 weight and its UE8M0 scale per `row_block` x 32 block."""
    blocks = (-(-rows // row_block), -(-columns // SCALE_BLOCK))
    yield TensorSpec(f"{name}.weight", Dtype.F8_E4M3, (rows, columns), group, part)
    yield TensorSpec(f"{name}.scale", Dtype.F8_E8M0, blocks, group, part)


def _block(config: ModelConfig, p: str, experts: int, part: Part) -> Iterator[TensorSpec]:
    """Yields what every block has, backbone layer or draft stage."""
    yield from _attention(config, p, part)
    yield from _mixers(config, p, part)
    yield from _moe(config, p, experts, part)


def _attention(config: ModelConfig, p: str, part: Part) -> Iterator[TensorSpec]:
    text = config.text
    hidden, heads, head, groups = text.hidden_size, text.num_attention_heads, text.head_dim, text.o_groups
    for name, width in (
        ("attn_norm", hidden),
        ("ffn_norm", hidden),
        ("attn.q_norm", text.q_lora_rank),
        ("attn.kv_norm", head),
    ):
        yield TensorSpec(f"{p}{name}.weight", Dtype.BF16, (width,), Group.NORMS, part)
    yield TensorSpec(f"{p}attn.attn_sink", Dtype.F32, (heads,), Group.NORMS, part)
    for name, rows, columns in (
        ("wq_a", text.q_lora_rank, hidden),
        ("wq_b", heads * head, text.q_lora_rank),
        ("wkv", head, hidden),
        ("wo_a", groups * text.o_lora_rank, heads * head // groups),
        ("wo_b", hidden, groups * text.o_lora_rank),
    ):
        yield from _fp8(f"{p}attn.{name}", rows, columns, Group.ATTENTION, part)


def _mixers(config: ModelConfig, p: str, part: Part) -> Iterator[TensorSpec]:
    streams = config.text.hc_mult
    coefficients = (2 + streams) * streams
    for sublayer in ("attn", "ffn"):
        fn_shape = (coefficients, streams * config.text.hidden_size)
        yield TensorSpec(f"{p}hc_{sublayer}_fn", Dtype.F32, fn_shape, Group.MIXERS, part)
        yield TensorSpec(f"{p}hc_{sublayer}_base", Dtype.F32, (coefficients,), Group.MIXERS, part)
        yield TensorSpec(f"{p}hc_{sublayer}_scale", Dtype.F32, (3,), Group.MIXERS, part)


def _moe(config: ModelConfig, p: str, experts: int, part: Part) -> Iterator[TensorSpec]:
    hidden, width = config.text.hidden_size, config.text.moe_intermediate_size
    yield TensorSpec(f"{p}ffn.gate.weight", Dtype.BF16, (experts, hidden), Group.GATES, part)
    yield TensorSpec(f"{p}ffn.gate.bias", Dtype.F32, (experts,), Group.GATES, part)
    yield TensorSpec(f"{p}ffn.gate.bias_vl", Dtype.F32, (experts,), Group.GATES, part)
    linears = (("w1", width, hidden), ("w2", hidden, width), ("w3", width, hidden))
    # Shapes are made once: a released table has 92,160 expert tensors.
    stored = [(name, (rows, columns // 2), (rows, columns // SCALE_BLOCK)) for name, rows, columns in linears]
    i8, e8m0, routed = Dtype.I8, Dtype.F8_E8M0, Group.ROUTED
    for expert in range(experts):
        prefix = f"{p}ffn.experts.{expert}."
        for name, packed, scale in stored:
            yield TensorSpec(f"{prefix}{name}.weight", i8, packed, routed, part)
            yield TensorSpec(f"{prefix}{name}.scale", e8m0, scale, routed, part)
    for name, rows, columns in linears:
        yield from _fp8(f"{p}ffn.shared_experts.{name}", rows, columns, Group.SHARED, part)


def _sources(config: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    """Yields compressor and indexer of a source layer (section 1.2); a ratio-1 compressor has no gate."""
    kind, text, p = config.layer_kind(layer), config.text, f"layers.{layer}.attn."
    latent = (text.head_dim, text.hidden_size)
    if kind is LayerKind.FULL:
        yield TensorSpec(f"{p}compressor.wkv.weight", Dtype.BF16, latent, Group.COMPRESSORS)
        if config.ratio(layer) > 1:
            yield TensorSpec(f"{p}compressor.wgate.weight", Dtype.BF16, latent, Group.COMPRESSORS)
        yield TensorSpec(f"{p}compressor.norm.weight", Dtype.BF16, (text.head_dim,), Group.COMPRESSORS)
        keys = (text.index_head_dim, text.head_dim)
        yield TensorSpec(f"{p}indexer.wk.weight", Dtype.BF16, keys, Group.INDEXERS)
        yield TensorSpec(f"{p}indexer.k_norm.weight", Dtype.BF16, (text.index_head_dim,), Group.INDEXERS)
    if kind in (LayerKind.FULL, LayerKind.REINDEX):
        rows = text.index_n_heads * text.index_head_dim
        yield from _fp8(f"{p}indexer.wq_b", rows, text.q_lora_rank, Group.INDEXERS, Part.TEXT)
        weights = (text.index_n_heads, text.hidden_size)
        yield TensorSpec(f"{p}indexer.weights_proj.weight", Dtype.BF16, weights, Group.INDEXERS)


def _engram(config: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    table, text, p = config.engram_table(layer), config.text, f"layers.{layer}.engram."
    if table is None:
        return
    gates = (text.hc_mult, text.hidden_size)
    yield from _fp8(f"{p}embed", table.rows, text.engram_head_dim, Group.ENGRAM_TABLES, Part.TEXT, row_block=1)
    rows, columns = (text.hc_mult + 1) * text.hidden_size, table.columns * text.engram_head_dim
    yield from _fp8(f"{p}wkv", rows, columns, Group.ENGRAM, Part.TEXT)
    yield TensorSpec(f"{p}q_weight", Dtype.BF16, gates, Group.ENGRAM)
    yield TensorSpec(f"{p}k_weight", Dtype.BF16, gates, Group.ENGRAM)


def _draft_ends(config: ModelConfig) -> Iterator[TensorSpec]:
    """Yields the entry of the first stage and the heads of the last one (section 7)."""
    text, last = config.text, f"mtp.{config.draft_stages - 1}."
    hidden, rank = text.hidden_size, text.dspark_markov_rank
    features = len(text.dspark_target_layer_ids) * hidden
    yield from _fp8("mtp.0.main_proj", hidden, features, Group.MAIN_PROJ, Part.DRAFT)
    yield TensorSpec("mtp.0.main_norm.weight", Dtype.BF16, (hidden,), Group.NORMS, Part.DRAFT)
    yield TensorSpec(f"{last}norm.weight", Dtype.BF16, (hidden,), Group.NORMS, Part.DRAFT)
    for name in ("embed", "head"):
        shape = (text.vocab_size, rank)
        yield TensorSpec(f"{last}markov_head.{name}.weight", Dtype.BF16, shape, Group.MARKOV, Part.DRAFT)
    name = f"{last}confidence_head.proj.weight"
    yield TensorSpec(name, Dtype.BF16, (1, hidden + rank), Group.CONFIDENCE, Part.DRAFT)


def _vision(config: ModelConfig) -> Iterator[TensorSpec]:
    vision, hidden = config.vision, config.text.hidden_size
    width, inner = vision.hidden_size, vision.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "vision.patch_embed.proj.weight": (width, 3 * vision.patch_size**2),
        "vision.patch_embed.proj.bias": (width,),
    }
    for b in range(vision.num_hidden_layers):
        p = f"vision.blocks.{b}."
        shapes |= {f"{p}norm1.weight": (width,), f"{p}norm2.weight": (width,)}
        shapes |= {f"{p}attn.wqkv.weight": (3 * width, width), f"{p}attn.wqkv.bias": (3 * width,)}
        shapes |= {f"{p}attn.wo.weight": (width, width), f"{p}attn.wo.bias": (width,)}
        shapes |= {f"{p}mlp.w1.weight": (2 * inner, width), f"{p}mlp.w2.weight": (width, inner)}
    shapes |= {"vision.norm.weight": (width,)}
    shapes |= {"aligner.w1.weight": (hidden, width * vision.downsample_ratio**2), "aligner.w1.bias": (hidden,)}
    shapes |= {"aligner.w2.weight": (hidden, hidden), "aligner.w2.bias": (hidden,)}
    shapes |= dict.fromkeys(("image_start", "image_end", "image_newline"), (hidden,))
    for name, shape in shapes.items():
        yield TensorSpec(name, Dtype.BF16, shape, Group.VISION, Part.VISION)
