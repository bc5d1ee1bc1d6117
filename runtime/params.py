"""Sampling parameters: types first, then ranges; what is wrong is a ParameterError with field, value and what is allowed.

The table of fields, defaults and ranges is docs/runtime.md, section 1.2.
"""

import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from tapeout.runtime.errors import ParameterRange, ParameterType, ParameterUnknown

GREEDY_BELOW = 1e-5  # temperatures below this mean the largest logit
MOST_INT = 2**31 - 1
MOST_STOP_TOKENS = 64
SEED_BITS = 64
_SEED_MASK = 2**SEED_BITS - 1


@dataclass(frozen=True, init=False)
class SamplingParams:
    """How tokens of one request are drawn and when it ends. Greedy (temperature below 1e-5) ignores top_p and top_k.

    `max_tokens=0` fills the cache and yields no token. `seed=None` lets the request draw a seed, which its result reports.
    """

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    seed: int | None
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    logprobs: bool

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        max_tokens: int = 16,
        seed: int | None = None,
        ignore_eos: bool = False,
        stop_token_ids: Iterable[int] = (),
        logprobs: bool = False,
        **unknown: object,
    ) -> None:
        for name, value in unknown.items():
            raise ParameterUnknown(name, value, _nearest(name))
        given = {
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "max_tokens": max_tokens,
            "seed": seed,
            "ignore_eos": ignore_eos,
            "stop_token_ids": stop_token_ids,
            "logprobs": logprobs,
        }
        typed = {name: _TYPES[name](name, value) for name, value in given.items()}
        for name, value in typed.items():
            _check_range(name, value)
            object.__setattr__(self, name, value)
        if self.temperature < GREEDY_BELOW:
            for name, value in (("temperature", 0.0), ("top_p", 1.0), ("top_k", -1)):
                object.__setattr__(self, name, value)

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> "SamplingParams":
        """Parameters from a mapping, as read from JSON; entries that are None count as not given."""
        return cls(**{name: value for name, value in given.items() if value is not None})

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def with_seed(self, seed: int) -> "SamplingParams":
        """The same parameters with another seed."""
        return replace(self, seed=seed)


def request_seed(seed: int, index: int) -> int:
    """The seed of request `index` of a call in which all requests share one seed: the seed itself for 0, hashed on for others."""
    return seed if index == 0 else _mix((seed + index * 0x9E3779B97F4A7C15) & _SEED_MASK)


def _mix(x: int) -> int:
    """The finaliser of splitmix64: a bijection of 64-bit numbers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _SEED_MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _SEED_MASK
    return x ^ (x >> 31)


# -- types


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ParameterType(name, value, _RANGES[name][0])
    return float(value)


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ParameterType(name, value, _RANGES[name][0])
    return operator.index(value)


def _seed(name: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ParameterType(name, value, "a whole number, of which 64 bits count, or None")
    seed: int = operator.index(value) & _SEED_MASK
    return seed


def _fact(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ParameterType(name, value, "True or False")
    return value


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    allowed = f"at most {MOST_STOP_TOKENS} token ids"
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ParameterType(name, value, allowed)
    listed = tuple(value)
    for token in listed:
        if isinstance(token, bool) or not isinstance(token, numbers.Integral):
            raise ParameterType(name, token, "whole numbers, each a token id")
    return tuple(operator.index(token) for token in listed)


_TYPES: dict[str, Callable[[str, object], Any]] = {
    "temperature": _number,
    "top_p": _number,
    "top_k": _whole,
    "max_tokens": _whole,
    "seed": _seed,
    "ignore_eos": _fact,
    "stop_token_ids": _token_ids,
    "logprobs": _fact,
}

# -- ranges

_RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "temperature": ("a finite number of at least 0", lambda x: 0 <= x < math.inf),
    "top_p": ("a number above 0 and at most 1", lambda x: 0 < x <= 1),
    "top_k": (f"-1 (off) or a whole number from 1 to {MOST_INT}", lambda x: x == -1 or 1 <= x <= MOST_INT),
    "max_tokens": (f"a whole number from 0 (fill the cache only) to {MOST_INT}", lambda x: 0 <= x <= MOST_INT),
    "stop_token_ids": (
        f"at most {MOST_STOP_TOKENS} ids from 0 to {MOST_INT}",
        lambda x: len(x) <= MOST_STOP_TOKENS and all(0 <= token <= MOST_INT for token in x),
    ),
}


def _check_range(name: str, value: object) -> None:
    words, is_allowed = _RANGES.get(name, ("", lambda _: True))
    if not is_allowed(value):  # a NaN fails every comparison
        raise ParameterRange(name, value, words)


def _nearest(name: str) -> str:
    from difflib import get_close_matches

    known = [field.name for field in fields(SamplingParams)]
    close = get_close_matches(name, known, n=1)
    return f"{close[0]}?" if close else ", ".join(known)
