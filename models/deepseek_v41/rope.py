"""Rotary frequencies of a layer: plain for ratio 0, YaRN for compressed layers (docs/model.md, section 4.2).

Frequencies are FP64. Angles are not formed here: the model multiplies FP32 position by FP32 frequency, and whoever builds a
table has to do the same.
"""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tapeout.models.deepseek_v41.schema import TextConfig


def yarn_corners(rotary: int, theta: float, fast: float, slow: float, original: int) -> tuple[int, int]:
    """Returns (low, high): pairs up to `low` keep their frequency, pairs from `high` on are divided by the factor.

    `d(n)` is the pair that makes `n` turns over the original context: theta^(-2d/R) * original = 2*pi*n.
    """

    def pair(turns: float) -> float:
        return rotary * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta))

    return max(math.floor(pair(fast)), 0), min(math.ceil(pair(slow)), rotary - 1)


def rope_frequencies(text: "TextConfig", ratio: int) -> "NDArray[np.float64]":
    """Returns the angular frequency of each rotated pair, radians per position, float64 [R/2].

    Ratio 0 (sliding layers and draft stages) uses `rope_theta` unscaled; any other ratio uses `compress_rope_theta` and YaRN.
    """
    import numpy as np

    pairs = np.arange(text.qk_rope_head_dim // 2, dtype=np.float64)
    if ratio == 0:
        return np.asarray(text.rope_theta ** (-2.0 * pairs / text.qk_rope_head_dim))
    scaling = text.rope_scaling
    theta, original = text.compress_rope_theta, scaling.original_max_position_embeddings
    low, high = yarn_corners(text.qk_rope_head_dim, theta, scaling.beta_fast, scaling.beta_slow, original)
    blend = np.clip((pairs - low) / (high - low), 0.0, 1.0)
    plain = theta ** (-2.0 * pairs / text.qk_rope_head_dim)
    return np.asarray(plain * (blend / scaling.factor + 1.0 - blend))
