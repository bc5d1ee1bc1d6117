"""Sampling parameters: types first, then ranges; what is wrong is a ParameterError with field, value and what is allowed.

The table of fields, defaults and ranges is docs/runtime.md, section 1.2. Which of them a compiled sampler can do is asked with `unmet`;
nothing here is ever ignored in silence.
"""

import math
import numbers
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from tapeout.runtime.errors import ParameterRange, ParameterType, ParameterUnknown

GREEDY_BELOW = 1e-5  # temperatures below this mean the largest logit
MOST_INT = 2**31 - 1
MOST_STOP_TOKENS = 64
MOST_STOP_STRINGS = 16
MOST_BIASED = 1024
MOST_BIAS = 1e4
MOST_BRANCHES = 128
MOST_LOGPROBS = 1000
MOST_DRAFTS = 5
SEED_BITS = 64
_SEED_MASK = 2**SEED_BITS - 1
_SURROGATES = re.compile("[\ud800-\udfff]")  # no text that tokens spell has one: such a string would stop nothing

PEER_NAMES = {
    "seq_seed": "seed",
    "eos_id": "stop_token_ids; the tokenizer's own eos always counts unless ignore_eos",
    "first_n_token_no_eos": "min_tokens",
    "best_of": "n",
}
"""Fields of other runtimes and what stands for them here: they are refused, with this advice."""


@dataclass(frozen=True, init=False)
class SamplingParams:
    """How tokens of one request are drawn and when it ends. Greedy (temperature below 1e-5) ignores top_p, top_k and min_p.

    `max_tokens=0` fills the cache and yields no token. `seed=None` lets the request draw a seed, which its result reports. `priority`:
    smaller runs earlier. `deadline_ms` counts from submission. `logit_bias` is kept sorted by id; `golden_token_ids` forces output i to
    entry i unless that is -1. `spec` is "auto", "off" or the most drafts to verify in a step.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    max_tokens: int
    min_tokens: int
    seed: int | None
    ignore_eos: bool
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    golden_token_ids: tuple[int, ...]
    n: int
    priority: int
    deadline_ms: float | None
    logprobs: bool
    top_logprobs: int
    prompt_logprobs: bool
    logprobs_mode: str
    spec: str | int
    determinism: str

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        min_p: float = 0.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] = (),
        max_tokens: int = 16,
        min_tokens: int = 0,
        seed: int | None = None,
        ignore_eos: bool = False,
        stop: str | Iterable[str] = (),
        stop_token_ids: Iterable[int] = (),
        golden_token_ids: Iterable[int] = (),
        n: int = 1,
        priority: int = 0,
        deadline_ms: float | None = None,
        logprobs: bool = False,
        top_logprobs: int = 0,
        prompt_logprobs: bool = False,
        logprobs_mode: str = "raw",
        spec: str | int = "auto",
        determinism: str = "none",
        **unknown: object,
    ) -> None:
        given = locals()
        for name, value in unknown.items():
            raise ParameterUnknown(name, value, _nearest(name))
        typed = {name: read(name, given[name]) for name, read in _TYPES.items()}
        for name, value in typed.items():
            _check_range(name, value)
            object.__setattr__(self, name, value)
        if self.min_tokens > self.max_tokens:
            raise ParameterRange("min_tokens", min_tokens, f"at most max_tokens, {self.max_tokens}")
        if self.temperature < GREEDY_BELOW:
            for name, value in (("temperature", 0.0), ("top_p", 1.0), ("top_k", -1), ("min_p", 0.0)):
                object.__setattr__(self, name, value)

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> "SamplingParams":
        """Parameters from a mapping, as read from JSON; entries that are None count as not given."""
        return cls(**{name: value for name, value in given.items() if value is not None})

    @property
    def most_drafts(self) -> int:
        """Drafts to verify in a step at most; more than any block has where the planner decides."""
        if self.spec == "off":
            return 0
        return self.spec if isinstance(self.spec, int) else MOST_INT

    def with_seed(self, seed: int) -> "SamplingParams":
        """The same parameters with another seed."""
        return replace(self, seed=seed)


def request_seed(seed: int, index: int) -> int:
    """The seed of request `index` of a call in which all requests share one seed: the seed itself for 0, hashed on for others.

    Requests are MOST_BRANCHES steps of one generator apart and branches one step, so the draws of no two pairs (request, branch) of a call
    are seeded alike.
    """
    return _stepped(seed, index * MOST_BRANCHES)


def branch_seed(seed: int, branch: int) -> int:
    """The seed of answer `branch` of a request whose own seed is `seed`: the seed itself for 0."""
    return _stepped(seed, branch)


def _stepped(seed: int, steps: int) -> int:
    """The seed `steps` outputs further in the sequence of splitmix64 that contains it: different for all steps below 2^64."""
    return _mix((_unmix(seed) + steps * 0x9E3779B97F4A7C15) & _SEED_MASK)


def _mix(x: int) -> int:
    """The finaliser of splitmix64: a bijection of 64-bit numbers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _SEED_MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _SEED_MASK
    return x ^ (x >> 31)


def _unmix(x: int) -> int:
    """The inverse of `_mix`: shifts undone from the top down, products by the factors' inverses modulo 2^64."""
    x = ((x ^ (x >> 31) ^ (x >> 62)) * 0x319642B2D24D8EC3) & _SEED_MASK
    x = ((x ^ (x >> 27) ^ (x >> 54)) * 0x96DE1B173F119089) & _SEED_MASK
    return x ^ (x >> 30) ^ (x >> 60)


SAMPLER_FIELDS = (
    "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens", "golden_token_ids", "top_logprobs",
    "prompt_logprobs", "logprobs_mode", "spec",
)  # fmt: skip
"""Fields that need something of the device's sampler beyond temperature, top_k, top_p, seed and the token's log-probability."""


def unmet(params: SamplingParams, abilities: Collection[str]) -> tuple[str, object, object] | None:
    """The first field that asks for what a sampler with these abilities cannot do: name, value and the value that means "off"."""
    for name in SAMPLER_FIELDS:
        value, off = getattr(params, name), getattr(_DEFAULTS, name)
        # Without verification no draft is ever used: "off" and 0 ask for what happens anyway.
        if name not in abilities and value != off and not (name == "spec" and value in ("off", 0)):
            return name, value, off
    return None


# -- types


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ParameterType(name, value, _RANGES[name][0])
    try:
        return float(value)
    except OverflowError:
        raise ParameterRange(name, value, _RANGES[name][0]) from None


def _number_or_none(name: str, value: object) -> float | None:
    return None if value is None else _number(name, value)


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


def _word(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ParameterType(name, value, _RANGES[name][0])
    return value


def _spec(name: str, value: object) -> str | int:
    return value if isinstance(value, str) else _whole(name, value)


def _members(name: str, value: object, allowed: str) -> tuple[Any, ...]:
    """What a list of some kind holds."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ParameterType(name, value, allowed)
    try:
        return tuple(value)
    except TypeError:  # an array without axes
        raise ParameterType(name, value, allowed) from None


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    listed = _members(name, value, f"at most {MOST_STOP_TOKENS} token ids" if name == "stop_token_ids" else _RANGES[name][0])
    for token in listed:
        if isinstance(token, bool) or not isinstance(token, numbers.Integral):
            raise ParameterType(name, token, "whole numbers, each a token id")
    return tuple(operator.index(token) for token in listed)


def _strings(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    listed = _members(name, value, _RANGES[name][0])
    for text in listed:
        if not isinstance(text, str):
            raise ParameterType(name, text, "strings")
    return listed


def _biases(name: str, value: object) -> tuple[tuple[int, float], ...]:
    pairs = _members(name, tuple(value.items()) if isinstance(value, Mapping) else value, _RANGES[name][0])
    found: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ParameterType(name, pair, "pairs of token id and number")
        token, bias = pair
        if isinstance(token, bool) or not isinstance(token, numbers.Integral):
            raise ParameterType(name, token, "whole numbers, each a token id")
        found[operator.index(token)] = _number(name, bias)
    return tuple(sorted(found.items()))


_TYPES: dict[str, Callable[[str, object], Any]] = {
    "temperature": _number,
    "top_p": _number,
    "top_k": _whole,
    "min_p": _number,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "repetition_penalty": _number,
    "logit_bias": _biases,
    "max_tokens": _whole,
    "min_tokens": _whole,
    "seed": _seed,
    "ignore_eos": _fact,
    "stop": _strings,
    "stop_token_ids": _token_ids,
    "golden_token_ids": _token_ids,
    "n": _whole,
    "priority": _whole,
    "deadline_ms": _number_or_none,
    "logprobs": _fact,
    "top_logprobs": _whole,
    "prompt_logprobs": _fact,
    "logprobs_mode": _word,
    "spec": _spec,
    "determinism": _word,
}

# -- ranges

_RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "temperature": ("a finite number of at least 0", lambda x: 0 <= x < math.inf),
    "top_p": ("a number above 0 and at most 1", lambda x: 0 < x <= 1),
    "top_k": (f"-1 (off) or a whole number from 1 to {MOST_INT}", lambda x: x == -1 or 1 <= x <= MOST_INT),
    "min_p": ("a number from 0 to 1", lambda x: 0 <= x <= 1),
    "presence_penalty": ("a number from -2 to 2", lambda x: -2 <= x <= 2),
    "frequency_penalty": ("a number from -2 to 2", lambda x: -2 <= x <= 2),
    "repetition_penalty": ("a finite number above 0", lambda x: 0 < x < math.inf),
    "logit_bias": (
        f"at most {MOST_BIASED} token ids from 0 to {MOST_INT}, each with a number from -{MOST_BIAS:g} to {MOST_BIAS:g}",
        lambda x: len(x) <= MOST_BIASED and all(0 <= token <= MOST_INT and abs(bias) <= MOST_BIAS for token, bias in x),
    ),
    "max_tokens": (f"a whole number from 0 (fill the cache only) to {MOST_INT}", lambda x: 0 <= x <= MOST_INT),
    "min_tokens": (f"a whole number from 0 to {MOST_INT}", lambda x: 0 <= x <= MOST_INT),
    "stop": (
        f"at most {MOST_STOP_STRINGS} strings, none of them empty or with lone surrogates",
        lambda x: len(x) <= MOST_STOP_STRINGS and all(text and not _SURROGATES.search(text) for text in x),
    ),
    "stop_token_ids": (
        f"at most {MOST_STOP_TOKENS} ids from 0 to {MOST_INT}",
        lambda x: len(x) <= MOST_STOP_TOKENS and all(0 <= token <= MOST_INT for token in x),
    ),
    "golden_token_ids": (f"token ids from -1 (free) to {MOST_INT}", lambda x: all(-1 <= token <= MOST_INT for token in x)),
    "n": (f"a whole number from 1 to {MOST_BRANCHES}", lambda x: 1 <= x <= MOST_BRANCHES),
    "priority": (f"a whole number from -{MOST_INT} to {MOST_INT}; smaller runs earlier", lambda x: -MOST_INT <= x <= MOST_INT),
    "deadline_ms": ("a finite number above 0, or None", lambda x: x is None or 0 < x < math.inf),
    "top_logprobs": (f"a whole number from 0 to {MOST_LOGPROBS}", lambda x: 0 <= x <= MOST_LOGPROBS),
    "logprobs_mode": ("raw or processed", lambda x: x in ("raw", "processed")),
    "spec": (f"auto, off, or a whole number from 0 to {MOST_DRAFTS}", lambda x: x in ("auto", "off", *range(MOST_DRAFTS + 1))),
    "determinism": ("none or coupled", lambda x: x in ("none", "coupled")),
}


def _check_range(name: str, value: object) -> None:
    words, is_allowed = _RANGES.get(name, ("", lambda _: True))
    if not is_allowed(value):  # a NaN fails every comparison
        raise ParameterRange(name, value, words)


def _nearest(name: str) -> str:
    from difflib import get_close_matches

    if name in PEER_NAMES:
        return PEER_NAMES[name]
    known = [field.name for field in fields(SamplingParams)]
    close = get_close_matches(name, known, n=1)
    return f"{close[0]}?" if close else ", ".join(known)


_DEFAULTS = SamplingParams()
