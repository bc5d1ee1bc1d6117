"""The parameter table of docs/runtime.md 1.2: every default, every accepted edge, every refusal with field, value and allowed."""

import math
from typing import Any

import numpy as np
import pytest

from tapeout.runtime.errors import ParameterError, ParameterRange, ParameterType, ParameterUnknown
from tapeout.runtime.params import MOST_INT, SamplingParams, request_seed

NAN, INF = math.nan, math.inf


def test_defaults() -> None:
    p = SamplingParams()
    given = (p.temperature, p.top_p, p.top_k, p.max_tokens, p.seed, p.ignore_eos, p.stop_token_ids, p.logprobs)
    assert given == (1.0, 1.0, -1, 16, None, False, (), False)


@pytest.mark.parametrize(
    ("field", "value", "stored"),
    [
        ("temperature", 1, 1.0),
        ("temperature", 1e-5, 1e-5),
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", 1e300, 1e300),
        ("top_p", 1, 1.0),
        ("top_p", 5e-324, 5e-324),
        ("top_k", -1, -1),
        ("top_k", 1, 1),
        ("top_k", MOST_INT, MOST_INT),
        ("top_k", np.int64(7), 7),
        ("max_tokens", 0, 0),
        ("max_tokens", MOST_INT, MOST_INT),
        ("seed", None, None),
        ("seed", 0, 0),
        ("seed", -1, 2**64 - 1),
        ("seed", 2**64 + 3, 3),
        ("seed", np.uint64(2**63), 2**63),
        ("ignore_eos", True, True),
        ("stop_token_ids", [1, np.int32(2)], (1, 2)),
        ("stop_token_ids", range(64), tuple(range(64))),
        ("stop_token_ids", np.array([5, 6]), (5, 6)),
        ("logprobs", True, True),
    ],
)
def test_accepted(field: str, value: Any, stored: Any) -> None:
    found = getattr(SamplingParams(**{field: value}), field)
    assert found == stored and type(found) is type(stored)


WRONG = [
    ("temperature", -1e-9, ParameterRange, "a finite number of at least 0"),
    ("temperature", NAN, ParameterRange, "a finite number of at least 0"),
    ("temperature", INF, ParameterRange, "a finite number of at least 0"),
    ("temperature", True, ParameterType, "a finite number of at least 0"),
    ("temperature", "1", ParameterType, "a finite number of at least 0"),
    ("temperature", 1j, ParameterType, "a finite number of at least 0"),
    ("temperature", None, ParameterType, "a finite number of at least 0"),
    ("top_p", 0, ParameterRange, "a number above 0 and at most 1"),
    ("top_p", 1.0000001, ParameterRange, "a number above 0 and at most 1"),
    ("top_p", NAN, ParameterRange, "a number above 0 and at most 1"),
    ("top_p", [0.5], ParameterType, "a number above 0 and at most 1"),
    ("top_k", 0, ParameterRange, f"-1 (off) or a whole number from 1 to {MOST_INT}"),
    ("top_k", -2, ParameterRange, f"-1 (off) or a whole number from 1 to {MOST_INT}"),
    ("top_k", MOST_INT + 1, ParameterRange, f"-1 (off) or a whole number from 1 to {MOST_INT}"),
    ("top_k", 5.0, ParameterType, f"-1 (off) or a whole number from 1 to {MOST_INT}"),
    ("top_k", False, ParameterType, f"-1 (off) or a whole number from 1 to {MOST_INT}"),
    ("max_tokens", -1, ParameterRange, f"a whole number from 0 (fill the cache only) to {MOST_INT}"),
    ("max_tokens", MOST_INT + 1, ParameterRange, f"a whole number from 0 (fill the cache only) to {MOST_INT}"),
    ("max_tokens", 2.5, ParameterType, f"a whole number from 0 (fill the cache only) to {MOST_INT}"),
    ("max_tokens", NAN, ParameterType, f"a whole number from 0 (fill the cache only) to {MOST_INT}"),
    ("max_tokens", None, ParameterType, f"a whole number from 0 (fill the cache only) to {MOST_INT}"),
    ("seed", True, ParameterType, "a whole number, of which 64 bits count, or None"),
    ("seed", 1.0, ParameterType, "a whole number, of which 64 bits count, or None"),
    ("seed", "7", ParameterType, "a whole number, of which 64 bits count, or None"),
    ("ignore_eos", 1, ParameterType, "True or False"),
    ("ignore_eos", None, ParameterType, "True or False"),
    ("stop_token_ids", 5, ParameterType, "at most 64 token ids"),
    ("stop_token_ids", "ab", ParameterType, "at most 64 token ids"),
    ("stop_token_ids", [-1], ParameterRange, f"at most 64 ids from 0 to {MOST_INT}"),
    ("stop_token_ids", list(range(65)), ParameterRange, f"at most 64 ids from 0 to {MOST_INT}"),
    ("logprobs", 5, ParameterType, "True or False"),
]


@pytest.mark.parametrize(("field", "value", "error", "allowed"), WRONG, ids=[f"{f}-{v!r:.20}" for f, v, _, _ in WRONG])
def test_refused(field: str, value: Any, error: type[ParameterError], allowed: str) -> None:
    with pytest.raises(error) as refused:
        SamplingParams(**{field: value})
    e = refused.value
    assert (e.field, e.allowed, e.request_id) == (field, allowed, None)
    assert e.value is value or e.value == value or list(e.value) == list(value)
    assert f"SamplingParams.{field}" in str(e) and f"expected {allowed}" in str(e)


@pytest.mark.parametrize("value", [True, None, 1.5, "1"])
def test_a_stop_token_of_the_wrong_type_is_the_value_named(value: Any) -> None:
    with pytest.raises(ParameterType) as refused:
        SamplingParams(stop_token_ids=[1, value])
    assert refused.value.value is value


def test_types_come_before_ranges() -> None:
    with pytest.raises(ParameterType) as refused:
        SamplingParams(temperature=-1, max_tokens=2.5)  # type: ignore[arg-type]
    assert refused.value.field == "max_tokens"


def test_unknown_fields_name_the_nearest_one() -> None:
    with pytest.raises(ParameterUnknown) as refused:
        SamplingParams(temprature=0.5)
    assert str(refused.value) == (
        "[P103] there is no such sampling parameter - SamplingParams.temprature - found 0.5 (float), expected temperature? - "
        "remove it, or use the nearest name"
    )
    with pytest.raises(ParameterUnknown, match="temperature, top_p, top_k"):
        SamplingParams(xyzzy=1)


def test_a_refusal_can_name_its_request() -> None:
    with pytest.raises(ParameterRange) as refused:
        SamplingParams(top_k=0)
    named = refused.value.for_request("r7")
    assert type(named) is ParameterRange and named.request_id == "r7"
    assert "SamplingParams.top_k of request r7" in str(named)


@pytest.mark.parametrize("temperature", [0, 0.0, 9.9e-6])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    p = SamplingParams(temperature=temperature, top_p=0.5, top_k=3)
    assert p.is_greedy and (p.temperature, p.top_p, p.top_k) == (0.0, 1.0, -1)


def test_from_mapping_takes_none_as_not_given() -> None:
    assert SamplingParams.from_mapping({"max_tokens": None, "top_k": 4}) == SamplingParams(top_k=4)
    with pytest.raises(ParameterUnknown):
        SamplingParams.from_mapping({"min_p": 0.1})


def test_parameters_are_values() -> None:
    p = SamplingParams(seed=5, top_k=2)
    assert p.with_seed(6) == SamplingParams(seed=6, top_k=2) and hash(p) == hash(SamplingParams(seed=5, top_k=2))
    with pytest.raises(AttributeError):
        p.seed = 1  # type: ignore[misc]


def test_shared_seeds_give_each_request_its_own() -> None:
    seeds = [request_seed(7, i) for i in range(1000)]
    assert seeds[0] == 7 and len(set(seeds)) == 1000
    assert request_seed(0, 1) == 0xE220A8397B1DCDAF, "the first output of splitmix64 seeded with 0"
    assert request_seed(2**64 - 1, 3) < 2**64
