"""Compilation of the model's formulas, on demand: tests and small CPU runs call them as they are.

Formulas are compiled one by one rather than the model as a whole: each is compiled once and serves every layer of its kind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

F = TypeVar("F", bound=Callable[..., object])
_state = {"compiled": False}


def use_compilation(enabled: bool = True) -> None:
    """Says whether functions marked `fast` run compiled from here on."""
    _state["compiled"] = enabled
    if enabled:
        torch._dynamo.config.recompile_limit = 64


def fast(function: F) -> F:
    """Marks a function of tensors and frozen settings that may be compiled."""

    @functools.cache
    def compiled() -> Callable[..., object]:
        return torch.compile(function, dynamic=False)  # type: ignore[no-any-return]

    @functools.wraps(function)
    def call(*arguments: object, **named: object) -> object:
        return (compiled() if _state["compiled"] else function)(*arguments, **named)

    return call  # type: ignore[return-value]
