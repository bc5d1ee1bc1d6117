"""Real functions that several meanings use, in float64 and without overflow anywhere on the line, and checked row selection."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Real = NDArray[np.float64]
Ids = NDArray[np.integer[Any]]


def logistic(x: Real) -> Real:
    """1 / (1 + exp(-x)), full relative precision on both sides."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def softmax(x: Real, axis: int = -1) -> Real:
    """exp(x) over its sum along `axis`, which has at least one element."""
    grown = np.exp(x - x.max(axis=axis, keepdims=True))
    return grown / grown.sum(axis=axis, keepdims=True)


def root_mean(x: Real, epsilon: float) -> Real:
    """(mean of squares over the last axis + epsilon)^(-1/2), the axis kept."""
    return 1.0 / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + epsilon)


def select(value: Any, ids: Ids) -> Any:
    """Entries `ids` of the first axis of an array or `Scaled`; raises IndexError where one does not exist, negative ids included."""
    count = value.shape[0]
    wrong = ids[(ids < 0) | (ids >= count)]
    if wrong.size:
        raise IndexError(f"row {int(wrong[0])} selected, found {count} rows")
    return value[ids]
