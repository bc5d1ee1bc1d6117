"""Random text tensors of any small configuration, in storage dtypes, made for the reference's own tests.

Promises: names, shapes and dtypes of model spec 10 without vision; neighbouring scale blocks differ by powers of two, so
a transposed or shifted scale is visible; activations stay of order one. Nothing here uses the package's tensor table.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tapeout.models import deepseek_v41
from tapeout.models.deepseek_v41.config import ModelConfig, parse_config

Tensors = dict[str, NDArray[Any]]


def tiny_token_map() -> NDArray[np.int64]:
    """The map of model spec appendix B: ids 68...93 (ASCII upper case) share the key of id + 32."""
    order: dict[int, int] = {}
    keys = [token + 32 if 68 <= token <= 93 else token for token in range(512)]
    return np.array([order.setdefault(key, len(order)) for key in keys], np.int64)


def tiny_config(**text: object) -> ModelConfig:
    """The shipped tiny configuration with some `text_config` values replaced."""
    raw = json.loads((Path(deepseek_v41.__file__).parent / "config-tiny.json").read_text())
    raw["text_config"].update(text)
    return parse_config(raw)


def prompt(count: int, seed: int) -> NDArray[np.int64]:
    """`count` text ids between 3 and 258, EOS among them at position 5 when it fits."""
    ids = np.random.default_rng(seed).integers(3, 259, count)
    ids[5:6] = 1
    return ids


class _Maker:
    def __init__(self, seed: int) -> None:
        self.draw = np.random.default_rng(seed)
        self.tensors: Tensors = {}

    def bf16(self, name: str, *shape: int, spread: float | None = None) -> None:
        size = spread if spread is not None else shape[-1] ** -0.5
        self.tensors[name] = (self.draw.standard_normal(shape) * size).astype(ml_dtypes.bfloat16)

    def norm(self, name: str, width: int) -> None:
        self.tensors[name] = (1 + 0.3 * self.draw.standard_normal(width)).astype(ml_dtypes.bfloat16)

    def f32(self, name: str, *shape: int, spread: float = 1.0, centre: float = 0.0) -> None:
        self.tensors[name] = (centre + spread * self.draw.standard_normal(shape)).astype(np.float32)

    def fp8(self, name: str, rows: int, columns: int) -> None:
        codes = np.clip(self.draw.standard_normal((rows, columns)) * 16, -448, 448)
        self.tensors[f"{name}.weight"] = codes.astype(ml_dtypes.float8_e4m3fn)
        self._scale(name, (-(-rows // 32), -(-columns // 32)), 1 / (16 * columns**0.5))

    def fp8_table(self, name: str, rows: int, columns: int) -> None:
        codes = self.draw.standard_normal((rows, columns)) * 16
        self.tensors[f"{name}.weight"] = codes.astype(ml_dtypes.float8_e4m3fn)
        self._scale(name, (rows, columns // 32), 1 / 16)

    def fp4(self, name: str, rows: int, columns: int) -> None:
        packed = self.draw.integers(0, 256, (rows, columns // 2), np.uint8)
        self.tensors[f"{name}.weight"] = packed.view(np.int8)
        self._scale(name, (rows, columns // 32), 1 / (2.9 * columns**0.5))

    def _scale(self, name: str, shape: tuple[int, int], size: float) -> None:
        exponent = 127 + round(math.log2(size)) + self.draw.integers(-1, 2, shape)
        self.tensors[f"{name}.scale"] = exponent.astype(np.uint8)


def random_tensors(config: ModelConfig, seed: int = 0) -> Tensors:
    """All text tensors of `config` (model spec 10)."""
    text, make = config.text, _Maker(seed)
    width, hidden = text.head_dim, text.hidden_size
    make.bf16("embed.weight", text.vocab_size, hidden, spread=1.0)
    make.bf16("head.weight", text.vocab_size, hidden)
    make.norm("norm.weight", hidden)
    for layer in range(text.num_hidden_layers):
        _block(make, f"layers.{layer}", text, text.n_routed_experts)
    for layer in text.kv_source_layer_ids:
        name = f"layers.{layer}.attn"
        make.bf16(f"{name}.compressor.wkv.weight", width, hidden)
        if text.compress_ratios[layer] == 2:
            make.bf16(f"{name}.compressor.wgate.weight", width, hidden)
        make.norm(f"{name}.compressor.norm.weight", width)
        make.bf16(f"{name}.indexer.wk.weight", text.index_head_dim, width)
        make.norm(f"{name}.indexer.k_norm.weight", text.index_head_dim)
    for layer in text.index_source_layer_ids:
        name = f"layers.{layer}.attn.indexer"
        make.fp8(f"{name}.wq_b", text.index_n_heads * text.index_head_dim, text.q_lora_rank)
        make.bf16(f"{name}.weights_proj.weight", text.index_n_heads, hidden)
    for layer, rows in zip(text.engram_layer_ids, text.engram_num_embeddings, strict=True):
        _engram(make, f"layers.{layer}.engram", text, rows)
    for stage in range(text.num_nextn_predict_layers):
        _block(make, f"mtp.{stage}", text, text.dspark_n_routed_experts)
    _draft_ends(make, text)
    return make.tensors


def _block(make: _Maker, name: str, text: Any, experts: int) -> None:
    hidden, inner = text.hidden_size, text.moe_intermediate_size
    heads, width = text.num_attention_heads, text.head_dim
    for norm in ("attn_norm", "ffn_norm"):
        make.norm(f"{name}.{norm}.weight", hidden)
    make.f32(f"{name}.attn.attn_sink", heads)
    make.fp8(f"{name}.attn.wq_a", text.q_lora_rank, hidden)
    make.norm(f"{name}.attn.q_norm.weight", text.q_lora_rank)
    make.fp8(f"{name}.attn.wq_b", heads * width, text.q_lora_rank)
    make.fp8(f"{name}.attn.wkv", width, hidden)
    make.norm(f"{name}.attn.kv_norm.weight", width)
    low_rank = text.o_groups * text.o_lora_rank
    make.fp8(f"{name}.attn.wo_a", low_rank, heads * width // text.o_groups)
    make.fp8(f"{name}.attn.wo_b", hidden, low_rank)
    streams = text.hc_mult
    for kind in ("attn", "ffn"):
        rows = (2 + streams) * streams
        make.f32(f"{name}.hc_{kind}_fn", rows, streams * hidden, spread=(streams * hidden) ** -0.5)
        make.f32(f"{name}.hc_{kind}_base", rows)
        make.f32(f"{name}.hc_{kind}_scale", 3, spread=0.2, centre=0.8)
    make.bf16(f"{name}.ffn.gate.weight", experts, hidden)
    make.f32(f"{name}.ffn.gate.bias", experts, spread=0.2)
    make.f32(f"{name}.ffn.gate.bias_vl", experts, spread=0.2)
    for expert in range(experts):
        make.fp4(f"{name}.ffn.experts.{expert}.w1", inner, hidden)
        make.fp4(f"{name}.ffn.experts.{expert}.w3", inner, hidden)
        make.fp4(f"{name}.ffn.experts.{expert}.w2", hidden, inner)
    make.fp8(f"{name}.ffn.shared_experts.w1", inner, hidden)
    make.fp8(f"{name}.ffn.shared_experts.w3", inner, hidden)
    make.fp8(f"{name}.ffn.shared_experts.w2", hidden, inner)


def _engram(make: _Maker, name: str, text: Any, rows: int) -> None:
    columns = (text.engram_max_ngram_size - 1) * text.engram_n_heads * text.engram_head_dim
    make.fp8_table(f"{name}.embed", rows, text.engram_head_dim)
    make.fp8(f"{name}.wkv", (text.hc_mult + 1) * text.hidden_size, columns)
    make.bf16(f"{name}.q_weight", text.hc_mult, text.hidden_size, spread=1.0)
    make.bf16(f"{name}.k_weight", text.hc_mult, text.hidden_size, spread=1.0)


def _draft_ends(make: _Maker, text: Any) -> None:
    hidden, last = text.hidden_size, f"mtp.{text.num_nextn_predict_layers - 1}"
    make.fp8("mtp.0.main_proj", hidden, len(text.dspark_target_layer_ids) * hidden)
    make.norm("mtp.0.main_norm.weight", hidden)
    make.norm(f"{last}.norm.weight", hidden)
    make.bf16(f"{last}.markov_head.embed.weight", text.vocab_size, text.dspark_markov_rank, spread=1.0)
    make.bf16(f"{last}.markov_head.head.weight", text.vocab_size, text.dspark_markov_rank)
    make.bf16(f"{last}.confidence_head.proj.weight", 1, hidden + text.dspark_markov_rank)
