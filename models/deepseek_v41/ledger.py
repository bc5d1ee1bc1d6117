"""Sums over a configuration: tensors, bytes, parameters, work per token and state per sequence (docs/model.md, 11 and 12).

Exact integers from the tensor table and the layer roles; nothing is measured. Printing is the caller's.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import lcm

from tapeout.models.deepseek_v41.config import LayerKind, ModelConfig
from tapeout.models.deepseek_v41.tensors import Dtype, Group, Part, TensorSpec, tensor_table

SCORE_AND_LATENT = 2  # FP32 rows in a slot of the ratio-2 compressor ring
FP32_BYTES = 4


@dataclass(frozen=True)
class LedgerRow:
    """One group of tensors."""

    name: str
    tensors: int
    parameters: int
    size_bytes: int


@dataclass(frozen=True)
class WeightLedger:
    """The weights by group, part and dtype. `backbone` is the text path without the Engram tables."""

    groups: tuple[LedgerRow, ...]  # the text path, in the order of section 12.1
    draft_groups: tuple[LedgerRow, ...]
    backbone: LedgerRow
    engram_tables: LedgerRow
    draft: LedgerRow
    vision: LedgerRow
    total: LedgerRow
    bytes_by_dtype: tuple[tuple[Dtype, int], ...]


@dataclass(frozen=True)
class Component:
    """Matrix parameters that one token meets in the encoder and in the decoder."""

    name: str
    encoder: int
    decoder: int


@dataclass(frozen=True)
class ActiveLedger:
    """Active parameters per token (section 12.2). FLOPs are two per parameter; norms are left out."""

    components: tuple[Component, ...]
    prefill: int  # encoder, and entries and index keys of the boundary layer
    decode: int  # encoder and decoder, without the head
    head: int
    draft_token: int  # one drafted token, head and Markov head included
    draft_feature: int  # one verified token: main_proj and every stage's window projection

    @property
    def encoder(self) -> int:
        return sum(component.encoder for component in self.components)

    @property
    def decoder(self) -> int:
        return sum(component.decoder for component in self.components)

    @property
    def prefill_flops(self) -> int:
        return 2 * self.prefill

    @property
    def decode_flops(self) -> int:
        return 2 * (self.decode + self.head)


@dataclass(frozen=True)
class StateLedger:
    """Bytes a sequence carries (section 11)."""

    window_entry: int  # one token of one sliding window
    main_entry: int  # one compressed entry
    index_entry: int  # one index key
    compressor_slot: int
    bytes_per_token: int  # grows with the context
    encoder_rings: int  # the part kept for prefix reuse
    decoder_rings: int  # decoder layers and draft stages
    compressor_rings: int
    bytes_per_sequence: int  # all rings, rounded up to the allocation unit


def weight_ledger(config: ModelConfig) -> WeightLedger:
    """Returns the sums over the tensor table."""
    specs = list(tensor_table(config).values())
    text = [spec for spec in specs if spec.part is Part.TEXT]
    draft = [spec for spec in specs if spec.part is Part.DRAFT]
    tables = [spec for spec in text if spec.group is Group.ENGRAM_TABLES]
    return WeightLedger(
        groups=_grouped(text),
        draft_groups=_grouped(draft),
        backbone=_row("backbone", (spec for spec in text if spec.group is not Group.ENGRAM_TABLES)),
        engram_tables=_row("Engram tables", tables),
        draft=_row("DSpark", draft),
        vision=_row("vision", (spec for spec in specs if spec.part is Part.VISION)),
        total=_row("total", specs),
        bytes_by_dtype=tuple((dtype, sum(s.size_bytes for s in specs if s.dtype is dtype)) for dtype in Dtype),
    )


def _row(name: str, specs: Iterable[TensorSpec]) -> LedgerRow:
    kept = list(specs)
    return LedgerRow(name, len(kept), sum(spec.parameters for spec in kept), sum(spec.size_bytes for spec in kept))


def _grouped(specs: list[TensorSpec]) -> tuple[LedgerRow, ...]:
    by_group: dict[Group, list[TensorSpec]] = {group: [] for group in Group}
    for spec in specs:
        by_group[spec.group].append(spec)
    return tuple(_row(group.value, kept) for group, kept in by_group.items() if kept)


def active_ledger(config: ModelConfig) -> ActiveLedger:
    """Returns the matrix parameters one token meets, by component and side of the boundary."""
    text = config.text
    per_layer = _layer_parameters(config)
    encoder_layers = config.n_prefill
    components = [Component(name, count * encoder_layers, count * (config.layers - encoder_layers)) for name, count in per_layer.items()]
    components += [_sided(config, name, by_layer) for name, by_layer in _source_parameters(config).items()]
    boundary = _boundary_projection(config)
    encoder, decoder = (sum(getattr(c, side) for c in components) for side in ("encoder", "decoder"))
    head = text.vocab_size * text.hidden_size
    features = len(text.dspark_target_layer_ids) * text.hidden_size**2
    return ActiveLedger(
        components=tuple(components),
        prefill=encoder + boundary,
        decode=encoder + decoder,
        head=head,
        draft_token=_draft_parameters(config) + head + text.vocab_size * text.dspark_markov_rank,
        draft_feature=features + config.draft_stages * text.head_dim * text.hidden_size,
    )


def _attention_parameters(config: ModelConfig) -> int:
    text = config.text
    heads = text.num_attention_heads * text.head_dim
    query = text.q_lora_rank * (text.hidden_size + heads)
    output = text.o_lora_rank * heads + text.o_groups * text.o_lora_rank * text.hidden_size
    return query + text.head_dim * text.hidden_size + output


def _layer_parameters(config: ModelConfig) -> dict[str, int]:
    """Returns what every backbone layer costs a token."""
    text = config.text
    expert = 3 * text.hidden_size * text.moe_intermediate_size
    return {
        "attention dense": _attention_parameters(config),
        "routed experts": text.num_experts_per_tok * expert,
        "shared expert": expert,
        "gates": text.n_routed_experts * text.hidden_size,
        "mHC mixers": _mixer_parameters(config),
    }


def _mixer_parameters(config: ModelConfig) -> int:
    streams = config.text.hc_mult
    return 2 * (2 + streams) * streams * streams * config.text.hidden_size


def _draft_parameters(config: ModelConfig) -> int:
    """Returns what the draft stages cost a drafted token, heads excluded."""
    text = config.text
    experts = (text.dspark_num_experts_per_tok + 1) * 3 * text.hidden_size * text.moe_intermediate_size
    gate = text.dspark_n_routed_experts * text.hidden_size
    return config.draft_stages * (_attention_parameters(config) + experts + gate + _mixer_parameters(config))


def _source_parameters(config: ModelConfig) -> dict[str, dict[int, int]]:
    """Returns, by component, what the layers that own it cost a token."""
    text = config.text
    compress, keys, queries, engram = {}, {}, {}, {}
    for layer in range(config.layers):
        kind, ratio = config.layer_kind(layer), config.ratio(layer)
        if kind is LayerKind.FULL:
            compress[layer] = ratio * text.head_dim * text.hidden_size  # latent, and a gate at ratio 2
            keys[layer] = text.index_head_dim * text.head_dim
        if kind in (LayerKind.FULL, LayerKind.REINDEX):
            width = text.index_head_dim * text.q_lora_rank + text.hidden_size
            queries[layer] = text.index_n_heads * width
        table = config.engram_table(layer)
        if table is not None:
            columns = table.columns * text.engram_head_dim
            engram[layer] = (text.hc_mult + 1) * text.hidden_size * columns
    return {"compressors": compress, "index K": keys, "index Q + weights": queries, "Engram projection": engram}


def _sided(config: ModelConfig, name: str, by_layer: dict[int, int]) -> Component:
    encoder = sum(count for layer, count in by_layer.items() if layer < config.n_prefill)
    return Component(name, encoder, sum(by_layer.values()) - encoder)


def _boundary_projection(config: ModelConfig) -> int:
    """Returns what the boundary layer's entries and index keys cost every prompt token (section 1.3)."""
    by_component = _source_parameters(config)
    return sum(by_component[name].get(config.n_prefill, 0) for name in ("compressors", "index K"))


def state_ledger(config: ModelConfig) -> StateLedger:
    """Returns the bytes of the caches and rings of one sequence."""
    text = config.text
    window = text.head_dim + text.head_dim // 32  # E4M3, a UE8M0 scale per 32
    main = text.head_dim // 2 + text.head_dim // 16  # E2M1, an E4M3 scale per 16
    index = text.index_head_dim // 2 + text.index_head_dim // 32  # E2M1, a UE8M0 scale per 32
    slot = SCORE_AND_LATENT * text.head_dim * FP32_BYTES
    ratios = [config.ratio(layer) for layer in text.kv_source_layer_ids]
    ring = config.ring_tokens * window
    encoder = config.n_prefill * ring
    rest = (config.layers - config.n_prefill + config.draft_stages) * ring
    compressors = ratios.count(2) * config.compressor_ring * slot
    unit = lcm(32, window)
    return StateLedger(
        window_entry=window,
        main_entry=main,
        index_entry=index,
        compressor_slot=slot,
        bytes_per_token=sum((main + index) // ratio for ratio in ratios),
        encoder_rings=encoder,
        decoder_rings=rest,
        compressor_rings=compressors,
        bytes_per_sequence=-(-(encoder + rest + compressors) // unit) * unit,
    )
