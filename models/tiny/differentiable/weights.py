"""Weights of the differentiable model: first values, storage formats, and the way from and to checkpoint tensors.

Trained values are float32 by checkpoint name, with the experts of a block stacked as `P.ffn.experts.w1` and so on. `rounded` gives
what the model computes with: every tensor as its storage format would hold it, with straight gradients.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tapeout.models.deepseek_v41.tensors import Dtype, Part, TensorSpec, scale_name, tensor_table

from .casts import Numerics, round_fp4_rows, round_fp8_blocks, round_fp8_rows, straight

if TYPE_CHECKING:
    from tapeout.models.deepseek_v41.config import ModelConfig

Weights = dict[str, Tensor]
Arrays = dict[str, NDArray[Any]]

_EXPERT = re.compile(r"(.*\.ffn\.experts)\.(\d+)\.(w[123])\.weight")

# First values: standard deviation of a linear's output for inputs of deviation 1; unlisted ones have 1.
_GAINS = {"wo_b": 0.3, "w2": 0.3, "head": 0.3, "gate": 0.5, "weights_proj": 0.5, "markov_head.head": 0.02, "confidence_head.proj": 0.0}
_EMBED = 0.5
_TABLE = 0.5


def text_specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every text and draft tensor but scales."""
    specs = tensor_table(config)
    return {name: spec for name, spec in specs.items() if spec.part is not Part.VISION and spec.dtype is not Dtype.F8_E8M0}


def initial_weights(config: ModelConfig, seed: int) -> Weights:
    """First values on the CPU; every tensor is drawn from a generator of its own (seed, name)."""
    arrays = {name: _first(config, spec, seed) for name, spec in text_specs(config).items()}
    return load_weights(config, arrays)


def load_weights(config: ModelConfig, arrays: Mapping[str, NDArray[Any]]) -> Weights:
    """Float32 tensors by name, experts stacked, from arrays of real values under checkpoint names."""
    stacks: dict[str, list[Tensor]] = {}
    weights: Weights = {}
    for name in text_specs(config):
        value = torch.from_numpy(np.array(arrays[name], np.float32))
        found = _EXPERT.fullmatch(name)
        if found:
            stacks.setdefault(f"{found[1]}.{found[3]}", []).append(value)
        else:
            weights[name] = value
    return weights | {name: torch.stack(parts) for name, parts in stacks.items()}


def stored_arrays(weights: Weights) -> Arrays:
    """The inverse of `load_weights`: float32 arrays under checkpoint names."""
    arrays: Arrays = {}
    for name, value in weights.items():
        array = value.detach().float().cpu().numpy()
        if ".ffn.experts.w" in name:
            prefix, part = name.rsplit(".", 1)
            arrays |= {f"{prefix}.{expert}.{part}.weight": row for expert, row in enumerate(array)}
        else:
            arrays[name] = array
    return arrays


def rounded(weights: Weights, formats: Mapping[str, str], numerics: Numerics) -> Weights:
    """Every tensor as its storage format holds it, in the dtype the formulas take it in."""
    return {name: _rounded(value, formats[name], numerics) for name, value in weights.items()}


def formats_of(config: ModelConfig) -> dict[str, str]:
    """The format of every stacked name: `fp8 blocks`, `fp8 rows`, `fp4 rows`, `bf16` or `f32`."""
    table = tensor_table(config)
    formats: dict[str, str] = {}
    for name, spec in text_specs(config).items():
        found = _EXPERT.fullmatch(name)
        formats[f"{found[1]}.{found[3]}" if found else name] = _format(spec, table)
    return formats


def _format(spec: TensorSpec, table: Mapping[str, TensorSpec]) -> str:
    if spec.dtype is Dtype.I8:
        return "fp4 rows"
    if spec.dtype is Dtype.F8_E4M3:
        return "fp8 rows" if table[scale_name(spec.name)].shape[0] == spec.shape[0] else "fp8 blocks"
    return "f32" if spec.dtype is Dtype.F32 else "bf16"


_ROUNDINGS = {"fp8 blocks": round_fp8_blocks, "fp8 rows": round_fp8_rows, "fp4 rows": round_fp4_rows}


def _rounded(value: Tensor, form: str, numerics: Numerics) -> Tensor:
    if form == "f32":
        return value.to(numerics.wide)
    if not numerics.rounds:
        return value.to(numerics.dtype)
    if form == "bf16":
        return numerics.bf16(value)
    return straight(value, _ROUNDINGS[form](value.detach())).to(numerics.dtype)


def _first(config: ModelConfig, spec: TensorSpec, seed: int) -> NDArray[np.float32]:
    name, shape = spec.name, list(spec.shape)
    if spec.dtype is Dtype.I8:
        shape[-1] *= 2
    if "hc_" in name:
        return _first_mixer(config, name, shape, seed)
    if "norm" in name or name.endswith(("q_weight", "k_weight")):
        return np.ones(shape, np.float32)
    if len(shape) == 1:  # sinks and gate biases
        return np.zeros(shape, np.float32)
    return _spread(config, name, shape[-1]) * _normal(name, shape, seed)


def _spread(config: ModelConfig, name: str, inputs: int) -> np.float32:
    if name.endswith("engram.embed.weight"):
        return np.float32(_TABLE)
    if name.endswith("embed.weight"):
        return np.float32(_EMBED)
    parts = name.removesuffix(".weight").split(".")
    gain = _GAINS.get(".".join(parts[-2:]), _GAINS.get(parts[-1], 1.0))
    return np.float32(gain / np.sqrt(inputs))


def _first_mixer(config: ModelConfig, name: str, shape: list[int], seed: int) -> NDArray[np.float32]:
    """Mixers start near a plain residual network: streams stay themselves, and every sublayer reads one of them most."""
    streams = config.text.hc_mult
    if name.endswith("_fn"):
        return np.float32(0.3 / np.sqrt(shape[1])) * _normal(name, shape, seed)
    if name.endswith("_scale"):
        return np.full(shape, 0.5, np.float32)
    favourite = zlib.crc32(name.encode()) % streams
    pre = np.where(np.arange(streams) == favourite, 1.0, -1.0)
    return np.concatenate((pre, np.zeros(streams), 4.0 * np.eye(streams).reshape(-1))).astype(np.float32)


def _normal(name: str, shape: list[int], seed: int) -> NDArray[np.float32]:
    return np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape, np.float32)


def named(weights: Weights, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors whose names start with `prefix`."""
    return ((name, value) for name, value in weights.items() if name.startswith(prefix))
