"""Random weights for any configuration: deterministic, in storage formats, and lively enough to show mistakes.

Every tensor is drawn from its own generator (seed, name), so its bytes do not depend on order. Gains keep activations near 1
while no mechanism is idle: gates, sinks, biases and mixers differ from trivial, index weights take both signs, neighbouring
scale blocks differ in exponent. How the head is made, for few close calls and useful drafts, is in `heads.py`.
"""

from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tapeout.models.deepseek_v41.config import ModelConfig
from tapeout.models.deepseek_v41.tensors import Dtype, TensorSpec, scale_name, tensor_table
from tapeout.models.tiny.heads import Floats, draw_for, shaped_rows

Array = NDArray[np.generic]
Values = Callable[[ModelConfig, TensorSpec, int], Array]

SPREAD = np.array([-2, -1, 0, 1, 2])  # exponents of scale blocks around their centre
SPREAD_RMS = float(np.sqrt(np.mean(4.0**SPREAD)))
FP4_RMS = 2.925747767665  # of the 16 codes, each as likely: sqrt(mean of 0, .5, 1, 1.5, 2, 3, 4, 6 squared)
E4M3_RMS = 12.0  # codes spread over many binades and stay far from 448
BIAS = 127  # of an E8M0 exponent

# Output gain of a linear, as a factor of 1/sqrt(inputs); unlisted ones have gain 1. One flipped FP8 or FP4 code moves
# selections downstream, so sublayers add a fraction of the residual: such noise then does not drown the logits.
GAINS = {
    "wgate": 1.5,
    "w1": 2.5,  # reaches the clamp now and then
    "w3": 2.5,
    "w2": 0.015,  # the product of two branches is large
    "wo_b": 0.25,
    "gate": 1.5,
    "engram.wkv": 0.15,
}


def random_weights(config: ModelConfig, seed: int = 0, values: "Values | None" = None) -> Iterator[tuple[TensorSpec, Array]]:
    """Yields every tensor of the table with its stored values: bfloat16, float32, float8_e4m3fn, or uint8 bytes.

    `values` draws all but the scales; by default `stored_values`.
    """
    table = tensor_table(config)
    for name, spec in table.items():
        if spec.dtype is Dtype.F8_E8M0:
            continue  # drawn with its weight
        yield spec, (values or stored_values)(config, spec, seed)
        scale = table.get(scale_name(name))
        if scale is not None:
            yield scale, stored_scale(spec, scale, seed)


def stored_values(config: ModelConfig, spec: TensorSpec, seed: int) -> Array:
    """Returns the values of one tensor that is not a scale."""
    draw = draw_for(seed, spec.name)
    match spec.dtype:
        case Dtype.F8_E4M3:
            return (draw.standard_normal(spec.shape, np.float32) * E4M3_RMS).astype(ml_dtypes.float8_e4m3fn)
        case Dtype.I8:
            return draw.integers(0, 256, spec.shape, dtype=np.uint8)
        case Dtype.F32:
            return _float32(spec, draw)
        case _:
            shaped = shaped_rows(config, spec, seed)
            return (_bfloat16(spec, draw) if shaped is None else shaped).astype(ml_dtypes.bfloat16)


def stored_scale(weight: TensorSpec, scale: TensorSpec, seed: int) -> Array:
    """Returns E8M0 bytes around the exponent that gives the linear its gain; along a row no two neighbours are equal."""
    draw = draw_for(seed, scale.name)
    packed = weight.dtype is Dtype.I8
    inputs = weight.shape[1] * (2 if packed else 1)
    rms = gain(weight.name) / (1.0 if "engram.embed" in weight.name else np.sqrt(inputs))
    centre = round(float(np.log2(rms / (SPREAD_RMS * (FP4_RMS if packed else E4M3_RMS)))))
    steps = draw.integers(1, len(SPREAD), scale.shape)
    steps[:, 0] = draw.integers(0, len(SPREAD), scale.shape[0])
    offsets = SPREAD[np.cumsum(steps, axis=1) % len(SPREAD)]
    return (BIAS + centre + offsets).astype(np.uint8)


def gain(name: str) -> float:
    """Returns the output gain of a linear from the last part of its name, or the last two."""
    parts = name.removesuffix(".weight").split(".")
    return GAINS.get(".".join(parts[-2:]), GAINS.get(parts[-1], 1.0))


def _float32(spec: TensorSpec, draw: np.random.Generator) -> Floats:
    """Returns mixers, sinks and gate biases."""
    kind = spec.name.rsplit("_", 1)[-1]
    normal = draw.standard_normal(spec.shape, np.float32)
    if kind == "fn":  # the streams have norm sqrt(4H) after the statistic, so coefficients get unit spread
        return np.asarray(normal / np.sqrt(np.float32(spec.shape[1])))
    if kind == "scale":
        return np.asarray(np.array([0.7, 0.9, 1.1], np.float32) + np.float32(0.05) * normal)
    if kind == "base":
        return np.asarray(np.float32(0.6) * normal)
    return np.asarray(normal if kind == "sink" else np.float32(0.25) * normal)


def _bfloat16(spec: TensorSpec, draw: np.random.Generator) -> Floats:
    """Returns norms, biases, delimiters and unquantised linears."""
    normal = draw.standard_normal(spec.shape, np.float32)
    name = spec.name
    if len(spec.shape) == 1:
        if "norm" in name:
            return np.asarray(1.0 + np.float32(0.15) * normal)
        return normal if name.startswith("image_") else np.asarray(np.float32(0.1) * normal)
    if name.endswith(("q_weight", "k_weight")):
        return np.asarray(1.2 * (1.0 + np.float32(0.3) * normal))
    return np.asarray(np.float32(gain(name)) * normal / np.sqrt(np.float32(spec.shape[1])))
