"""One layer of the model as ops: mixers around a sublayer, attention, entries and selection, experts, Engram (docs/model.md 3 to 6).

Backbone layers and draft stages are written by the same functions. Promises: a ring is staged before it is read and committed after its
last read. Which rows a function works on is its caller's choice (`Rows`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tapeout.dialects import cache, engram, mhc, mla, moe, nn, selection
from tapeout.dialects._mlir import ir
from tapeout.dialects.format import REAL
from tapeout.dialects.types import Ring, from_ir
from tapeout.models.deepseek_v41.config import ModelConfig
from tapeout.models.deepseek_v41.graph_function import Function
from tapeout.models.deepseek_v41.weights import rotary_name

GATE_FLOOR = 1e-6  # of the Engram gate (docs/model.md 6.3)


@dataclass(frozen=True)
class Engine:
    """Sizes that states and row tables depend on: sequence slots and tokens of a block."""

    sequences: int
    block_tokens: int


@dataclass(frozen=True)
class Layer:
    """A place to write a layer: tensors below `name`; `number` counts draft stages behind the backbone's layers."""

    f: Function
    config: ModelConfig
    engine: Engine
    name: str
    number: int
    positions: ir.Value

    def weight(self, name: str) -> ir.Value:
        return self.f.weight(f"{self.name}.{name}")

    def state(self, name: str) -> ir.Value:
        return self.f.state(f"{self.name}.{name}")

    def linear(self, label: str, x: ir.Value, weight: str, *, groups: int = 1, wide: bool = False) -> ir.Value:
        return nn.linear(x, self.weight(weight), groups=groups, wide=wide, loc=self.f.at(label))

    def norm(self, label: str, x: ir.Value, weight: str) -> ir.Value:
        return nn.rms_norm(x, self.weight(weight), epsilon=self.config.text.rms_norm_eps, loc=self.f.at(label))

    def rope(self, label: str, x: ir.Value, heads: int, *, offset: int = 0, inverse: bool = False) -> ir.Value:
        width = x.type.shape[1] // heads
        table = self.f.weight(rotary_name(self.config, self.number))
        return nn.rope(x, self.positions, table, heads=heads, width=width, offset=offset, inverse=inverse, loc=self.f.at(label))

    def stage(self, state: str, rows: ir.Value) -> None:
        ring = self.state(state)
        cache.stage(ring, rows, length=ring_length(ring), sequences=self.engine.sequences, loc=self.f.at(f"{state}.stage"))

    def commit(self, state: str, ids: ir.Value) -> None:
        ring = self.state(state)
        cache.commit(ring, ids, length=ring_length(ring), sequences=self.engine.sequences, loc=self.f.at(f"{state}.commit"))


def ring_length(ring: ir.Value) -> int:
    """Positions of one sequence that a ring keeps."""
    view = from_ir(ring.type)
    assert isinstance(view, Ring), view
    return view.length


@dataclass(frozen=True)
class Streams:
    """Residual streams X [?, S, H] and the pre-mix a [?, S] that the next sublayer collapses them with (docs/model.md 3.1)."""

    x: ir.Value
    premix: ir.Value


@dataclass(frozen=True)
class Selection:
    """Physical entry rows [?, K] that each row attends to, -1 padded, and how many [?]."""

    ids: ir.Value
    counts: ir.Value


@dataclass
class Rows:
    """Row tables of a function, and what its layers hand down the stack: selections by source layer, candidate blocks."""

    positions: ir.Value
    slots: ir.Value
    window_ids: ir.Value
    window_counts: ir.Value
    window_commits: ir.Value | None = None
    block_table: ir.Value | None = None
    selections: dict[int, Selection] = field(default_factory=dict)
    candidates: tuple[ir.Value, ir.Value] | None = None


@dataclass(frozen=True)
class EntryRows:
    """Row tables of layers that own entries: where completed entries go, by ratio, and the compressor's partner and commit rows."""

    entries: dict[int, ir.Value]
    partners: ir.Value | None
    commits: ir.Value | None


# -- sublayers


def sublayer_input(layer: Layer, kind: str, streams: Streams) -> ir.Value:
    """The collapsed and normed rows [?, H] that a sublayer ("attn" or "ffn") works on."""
    z = mhc.collapse(streams.x, streams.premix, loc=layer.f.at(f"{kind}.collapsed"))
    return layer.norm(f"{kind}.x", z, f"{kind}_norm")


def sublayer(layer: Layer, kind: str, streams: Streams, body: Callable[[ir.Value], ir.Value], x: ir.Value | None = None) -> Streams:
    """Runs `body` between collapse and expand in the shifted order (docs/model.md 3.3); `x` where its input exists already."""
    text, at = layer.config.text, layer.f.at
    parameters = (layer.weight(f"hc_{kind}_{part}") for part in ("fn", "base", "scale"))
    pre, post, comb = mhc.mixer(
        streams.x, *parameters, iterations=text.hc_sinkhorn_iters, epsilon=text.hc_eps, norm_epsilon=text.rms_norm_eps,
        loc=at(f"{kind}.mix"))
    y = body(sublayer_input(layer, kind, streams) if x is None else x)
    return Streams(mhc.expand(streams.x, y, post, comb, loc=at(f"{kind}.streams")), pre)


def block(layer: Layer, streams: Streams, rows: Rows, entry_rows: EntryRows | None = None, x: ir.Value | None = None) -> Streams:
    """Attention, then experts. `entry_rows` where the layer appends its own entries, `x` where its attention input exists already."""
    text = layer.config.text
    streams = sublayer(layer, "attn", streams, lambda x: attention(layer, x, rows, entry_rows), x)
    experts = text.n_routed_experts, text.num_experts_per_tok
    if layer.number >= layer.config.layers:
        experts = text.dspark_n_routed_experts, text.dspark_num_experts_per_tok
    return sublayer(layer, "ffn", streams, lambda x: mixture(layer, x, *experts))


# -- attention


def attention(layer: Layer, x: ir.Value, rows: Rows, entry_rows: EntryRows | None) -> ir.Value:
    """The steps of docs/model.md 4.9 in its order: window, entries, selection, attention, output projection."""
    text, at = layer.config.text, layer.f.at
    query_low, kv_low = _lows(layer, x)
    latent = layer.norm("attn.query_latent", query_low, "attn.q_norm")
    queries = layer.rope("attn.queries", layer.linear("attn.query_heads", latent, "attn.wq_b"), text.num_attention_heads)
    layer.stage("attn.window", _entries_of(layer, kv_low))
    if entry_rows is not None and layer.config.kv_source(layer.number) == layer.number:
        append_entries(layer, x, entry_rows)
    if layer.config.topk_source(layer.number) == layer.number:
        rows.selections[layer.number] = select(layer, x, latent, rows)
    o = mla.attend(
        queries, layer.state("attn.window"), rows.window_ids, rows.window_counts, layer.weight("attn.attn_sink"),
        *_selected_entries(layer, rows), heads=text.num_attention_heads, scale=layer.config.softmax_scale, loc=at("attn.heads"))
    if rows.window_commits is not None:
        layer.commit("attn.window", rows.window_commits)
    unturned = layer.rope("attn.unturned", o, text.num_attention_heads, inverse=True)
    low = layer.linear("attn.output_low", unturned, "attn.wo_a", groups=text.o_groups)
    return layer.linear("attn.output", low, "attn.wo_b")


def _lows(layer: Layer, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Rows [?, QL] and [?, D] that become latent queries and window vectors: one product makes both, side by side (docs/model.md 4.1)."""
    both, queries, width = layer.linear("attn.low", x, "attn.wq_a+wkv"), layer.config.text.q_lora_rank, layer.config.text.head_dim
    at = layer.f.at
    return (nn.columns(both, first=0, count=queries, loc=at("attn.query_low")),
            nn.columns(both, first=queries, count=width, loc=at("attn.kv_low")))


def window_entries(layer: Layer, x: ir.Value) -> ir.Value:
    """The window vectors [?, D] of rows `x`, key and value in one (docs/model.md 4.1)."""
    return _entries_of(layer, layer.linear("attn.kv_low", x, "attn.wkv"))


def _entries_of(layer: Layer, low: ir.Value) -> ir.Value:
    return layer.rope("attn.kv", layer.norm("attn.kv_latent", low, "attn.kv_norm"), 1)


def _selected_entries(layer: Layer, rows: Rows) -> tuple[Any, Any, Any]:
    """Blocks, ids and counts of the selection this layer attends to; three times None for window attention only."""
    source, owner = layer.config.topk_source(layer.number), layer.config.kv_source(layer.number)
    if source is None:
        return None, None, None
    selection = rows.selections[source]
    return layer.f.state(f"layers.{owner}.attn.entries"), selection.ids, selection.counts


def append_entries(layer: Layer, x: ir.Value, rows: EntryRows) -> None:
    """Compresses rows and appends the entries and index keys that they complete (docs/model.md 4.4, 4.5).

    A row that completes nothing computes values that no row id keeps. Entry j carries the position of its group's first token.
    """
    ratio = layer.config.ratio(layer.number)
    pooled = _pooled(layer, x, rows) if ratio == 2 else layer.linear("attn.pooled", x, "attn.compressor.wkv")
    latent = layer.norm("attn.entry_latent", pooled, "attn.compressor.norm")
    low = layer.norm("attn.key_latent", layer.linear("attn.key_low", latent, "attn.indexer.wk"), "attn.indexer.k_norm")
    for state, value in (("attn.keys", low), ("attn.entries", latent)):
        turned = layer.rope(f"{state}.new", value, 1, offset=1 - ratio)
        cache.append(layer.state(state), turned, rows.entries[ratio], loc=layer.f.at(f"{state}.append"))


def _pooled(layer: Layer, x: ir.Value, rows: EntryRows) -> ir.Value:
    """The latents of ratio 2, each pooled from a row's own pair (g, e) and that of the token before it."""
    layer.stage("attn.compressor", layer.linear("attn.pairs", x, "attn.compressor.wgate+wkv", wide=True))
    ring = layer.state("attn.compressor")
    pooled = mla.pool(ring, rows.partners, length=ring_length(ring), sequences=layer.engine.sequences, loc=layer.f.at("attn.pooled"))
    layer.commit("attn.compressor", rows.commits)
    return pooled


def select(layer: Layer, x: ir.Value, latent: ir.Value, rows: Rows) -> Selection:
    """The entries with the best index scores, inside candidate blocks where the layer is restricted to them (docs/model.md 4.5, 4.6)."""
    text, number, config = layer.config.text, layer.number, layer.config
    heads = layer.linear("attn.index_heads", latent, "attn.indexer.wq_b")
    queries = layer.rope("attn.index_queries", heads, text.index_n_heads)
    weights = layer.linear("attn.index_weights", x, "attn.indexer.weights_proj")
    keys = layer.f.state(f"layers.{config.index_key_source(number)}.attn.keys")
    operands = (queries, weights, keys, rows.positions, rows.slots, rows.block_table)
    facts: dict[str, Any] = {"heads": text.index_n_heads, "top_k": text.index_topk, "ratio": config.ratio(number),
                             "block_tokens": layer.engine.block_tokens, "score": "f64", "loc": layer.f.at("attn.selection")}
    if number == config.candidate_source:
        ids, counts, *candidates = selection.select_candidates(
            *operands, blocks=text.candidate_topk_blocks, block=text.candidate_block_size, **facts)
        rows.candidates = (candidates[0], candidates[1])
    elif config.uses_candidates(number) and rows.candidates is not None:
        ids, counts = selection.select_within(*operands, *rows.candidates, block=text.candidate_block_size, **facts)
    else:
        ids, counts = selection.select(*operands, **facts)
    return Selection(ids, counts)


# -- experts


def mixture(layer: Layer, x: ir.Value, experts: int, active: int) -> ir.Value:
    """Routed experts and the shared one on normed rows [?, H] (docs/model.md 5)."""
    text, at = layer.config.text, layer.f.at
    chosen, weights = moe.gate(
        x, layer.weight("ffn.gate"), layer.weight("ffn.gate.bias"), top_k=active, scale=text.routed_scaling_factor,
        loc=at("ffn.chosen"))
    order, places, offsets = moe.dispatch(chosen, experts=experts, loc=at("ffn.dispatch"))

    def expert(label: str, rows: ir.Value, part: str, gathered: bool) -> ir.Value:
        weight = layer.weight(f"ffn.experts.{part}")
        return moe.expert_linear(rows, weight, order, offsets, gathered=gathered, loc=at(label))

    inner = moe.swiglu(expert("ffn.gates_ups", x, "w1+w3", True), weights, order, limit=text.swiglu_limit, loc=at("ffn.inner"))
    outputs = expert("ffn.outputs", inner, "w2", False)
    return moe.combine(outputs, places, shared_expert(layer, x), loc=at("ffn.output"))


def shared_expert(layer: Layer, x: ir.Value) -> ir.Value:
    gate_up = layer.linear("ffn.shared_gate_up", x, "ffn.shared_experts.w1+w3")
    inner = moe.swiglu(gate_up, None, None, limit=layer.config.text.swiglu_limit, loc=layer.f.at("ffn.shared_inner"))
    return layer.linear("ffn.shared", inner, "ffn.shared_experts.w2")


# -- Engram


def engram_rows(layer: Layer, ids: ir.Value) -> ir.Value:
    """The joined table rows [?, C*w] of `ids` [?, C]. They hang on tokens alone: whoever writes this early can have them on their way early."""
    return engram.lookup(ids, layer.weight("engram.embed"), out=REAL, loc=layer.f.at(f"{layer.name}.engram.rows"))


def with_engram(layer: Layer, streams: Streams, rows: ir.Value) -> Streams:
    """Streams with the gated value of the looked-up `rows` added (docs/model.md 6.3)."""
    text, at = layer.config.text, layer.f.at
    kv = layer.linear("engram.kv", rows, "engram.wkv")
    gates = layer.weight("engram.q_weight"), layer.weight("engram.k_weight")
    x = engram.gate(streams.x, kv, *gates, norm_epsilon=text.rms_norm_eps, floor=GATE_FLOOR, loc=at("engram.streams"))
    return Streams(x, streams.premix)
