"""The noise floor: how far two faithful runs of the reference lie apart when only the dtype of their sums differs.

Promises: nothing is tuned; the floor is measured on the prompts given. Leaves to others: the bound that is built on it
(docs: the compiled model stays within twice the floor).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapeout.models.deepseek_v41.config import ModelConfig
from tapeout.models.deepseek_v41.reference import Output, Reference

Array = NDArray[Any]


@dataclass(frozen=True)
class NoiseFloor:
    """`rms` and `maximum` of the logit differences; `gaps` `[positions]` between the two best logits (float64 run);
    `selection_shares`: per index source, the share of rows whose selections differ.
    """

    rms: float
    maximum: float
    gaps: Array
    selection_shares: dict[int, float]


def noise_floor(config: ModelConfig, tensors: Mapping[str, Array], prompts: Sequence[Array], token_map: Array) -> NoiseFloor:
    """Runs each prompt whole, once with float32 and once with float64 sums."""
    narrow, wide = (_outputs(config, tensors, prompts, token_map, width) for width in ("float32", "float64"))
    pairs = list(zip(narrow, wide, strict=True))
    difference = np.concatenate([a.logits.astype(np.float64) - b.logits for a, b in pairs])
    best = np.sort(np.concatenate([output.logits for output in wide]), axis=1)[:, -2:]
    return NoiseFloor(
        rms=float(np.sqrt(np.mean(difference**2))),
        maximum=float(np.abs(difference).max()),
        gaps=best[:, 1] - best[:, 0],
        selection_shares={source: _differing_share(pairs, source) for source in wide[0].selected},
    )


def _outputs(
    config: ModelConfig, tensors: Mapping[str, Array], prompts: Sequence[Array], token_map: Array, accumulate: Any
) -> list[Output]:
    reference = Reference(config, tensors, numerics="faithful", accumulate=accumulate, token_map=token_map)
    return [reference.forward(reference.start(), ids) for ids in prompts]


def _differing_share(pairs: Sequence[tuple[Output, Output]], source: int) -> float:
    rows = [not np.array_equal(one, other) for a, b in pairs for one, other in zip(a.selected[source], b.selected[source], strict=True)]
    return float(np.mean(rows))
