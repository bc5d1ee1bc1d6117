"""The parameter table of docs/runtime.md 1.2: every default, every accepted edge, every refusal with field, value and allowed."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from tapeout.runtime.errors import ParameterError, ParameterRange, ParameterType, ParameterUnknown
from tapeout.runtime.params import MOST_BRANCHES, MOST_INT, SAMPLER_FIELDS, SamplingParams, _mix, _unmix, branch_seed, request_seed, unmet

NAN, INF = math.nan, math.inf
BIAS = f"at most 1024 token ids from 0 to {MOST_INT}, each with a number from -10000 to 10000"


def test_a1_defaults() -> None:
    p = SamplingParams()
    given = (p.temperature, p.top_p, p.top_k, p.max_tokens, p.seed, p.ignore_eos, p.stop_token_ids, p.logprobs)
    assert given == (1.0, 1.0, -1, 16, None, False, (), False)
    more = (p.min_p, p.presence_penalty, p.frequency_penalty, p.repetition_penalty, p.logit_bias, p.min_tokens, p.stop, p.golden_token_ids)
    assert more == (0.0, 0.0, 0.0, 1.0, (), 0, (), ())
    rest = (p.n, p.priority, p.deadline_ms, p.top_logprobs, p.prompt_logprobs, p.logprobs_mode, p.spec, p.determinism)
    assert rest == (1, 0, None, 0, False, "raw", "auto", "none")
    assert len(dataclasses.fields(p)) == len(given) + len(more) + len(rest), "every field is in one of the three lists"


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
        ("min_p", 0, 0.0),
        ("min_p", 1, 1.0),
        ("presence_penalty", -2, -2.0),
        ("frequency_penalty", 2, 2.0),
        ("repetition_penalty", 1e-9, 1e-9),
        ("logit_bias", {7: 1, 3: -2.5}, ((3, -2.5), (7, 1.0))),
        ("logit_bias", [(9, np.float32(0.5))], ((9, 0.5),)),
        ("logit_bias", dict.fromkeys(range(1024), 1.0), tuple((i, 1.0) for i in range(1024))),
        ("min_tokens", 16, 16),
        ("stop", "END", ("END",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop", (str(i) for i in range(16)), tuple(str(i) for i in range(16))),
        ("golden_token_ids", [5, -1, 7], (5, -1, 7)),
        ("n", 128, 128),
        ("priority", -MOST_INT, -MOST_INT),
        ("deadline_ms", 0.5, 0.5),
        ("deadline_ms", None, None),
        ("top_logprobs", 1000, 1000),
        ("prompt_logprobs", True, True),
        ("logprobs_mode", "processed", "processed"),
        ("spec", "auto", "auto"),
        ("spec", "off", "off"),
        ("spec", 5, 5),
        ("determinism", "coupled", "coupled"),
    ],
)
def test_a1_accepted(field: str, value: Any, stored: Any) -> None:
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
    ("min_p", -0.1, ParameterRange, "a number from 0 to 1"),
    ("min_p", NAN, ParameterRange, "a number from 0 to 1"),
    ("min_p", True, ParameterType, "a number from 0 to 1"),
    ("presence_penalty", 2.01, ParameterRange, "a number from -2 to 2"),
    ("presence_penalty", "0", ParameterType, "a number from -2 to 2"),
    ("frequency_penalty", -INF, ParameterRange, "a number from -2 to 2"),
    ("frequency_penalty", None, ParameterType, "a number from -2 to 2"),
    ("repetition_penalty", 0, ParameterRange, "a finite number above 0"),
    ("repetition_penalty", INF, ParameterRange, "a finite number above 0"),
    ("logit_bias", {-1: 1.0}, ParameterRange, BIAS),
    ("logit_bias", {1: NAN}, ParameterRange, BIAS),
    ("logit_bias", {1: 1e5}, ParameterRange, BIAS),
    ("logit_bias", dict.fromkeys(range(1025), 1.0), ParameterRange, BIAS),
    ("logit_bias", 5, ParameterType, BIAS),
    ("logit_bias", "ab", ParameterType, BIAS),
    ("min_tokens", -1, ParameterRange, f"a whole number from 0 to {MOST_INT}"),
    ("min_tokens", 17, ParameterRange, "at most max_tokens, 16"),
    ("min_tokens", 1.0, ParameterType, f"a whole number from 0 to {MOST_INT}"),
    ("stop", [""], ParameterRange, "at most 16 strings, none of them empty or with lone surrogates"),
    ("stop", ["a", "b\ud800"], ParameterRange, "at most 16 strings, none of them empty or with lone surrogates"),
    ("stop", [str(i) for i in range(17)], ParameterRange, "at most 16 strings, none of them empty or with lone surrogates"),
    ("stop", 5, ParameterType, "at most 16 strings, none of them empty or with lone surrogates"),
    ("stop", b"ab", ParameterType, "at most 16 strings, none of them empty or with lone surrogates"),
    ("golden_token_ids", [-2], ParameterRange, f"token ids from -1 (free) to {MOST_INT}"),
    ("golden_token_ids", 3, ParameterType, f"token ids from -1 (free) to {MOST_INT}"),
    ("n", 0, ParameterRange, "a whole number from 1 to 128"),
    ("n", 129, ParameterRange, "a whole number from 1 to 128"),
    ("n", True, ParameterType, "a whole number from 1 to 128"),
    ("priority", MOST_INT + 1, ParameterRange, f"a whole number from -{MOST_INT} to {MOST_INT}; smaller runs earlier"),
    ("priority", 0.5, ParameterType, f"a whole number from -{MOST_INT} to {MOST_INT}; smaller runs earlier"),
    ("deadline_ms", 0, ParameterRange, "a finite number above 0, or None"),
    ("deadline_ms", INF, ParameterRange, "a finite number above 0, or None"),
    ("deadline_ms", "1", ParameterType, "a finite number above 0, or None"),
    ("top_logprobs", 1001, ParameterRange, "a whole number from 0 to 1000"),
    ("top_logprobs", -1, ParameterRange, "a whole number from 0 to 1000"),
    ("top_logprobs", True, ParameterType, "a whole number from 0 to 1000"),
    ("prompt_logprobs", 1, ParameterType, "True or False"),
    ("logprobs_mode", "both", ParameterRange, "raw or processed"),
    ("logprobs_mode", True, ParameterType, "raw or processed"),
    ("spec", "on", ParameterRange, "auto, off, or a whole number from 0 to 5"),
    ("spec", 6, ParameterRange, "auto, off, or a whole number from 0 to 5"),
    ("spec", True, ParameterType, "auto, off, or a whole number from 0 to 5"),
    ("determinism", "full", ParameterRange, "none or coupled"),
    ("determinism", 0, ParameterType, "none or coupled"),
]


@pytest.mark.parametrize(("field", "value", "error", "allowed"), WRONG, ids=[f"{f}-{v!r:.20}" for f, v, _, _ in WRONG])
def test_a1_refused(field: str, value: Any, error: type[ParameterError], allowed: str) -> None:
    with pytest.raises(error) as refused:
        SamplingParams(**{field: value})
    e = refused.value
    assert (e.field, e.allowed, e.request_id) == (field, allowed, None)
    if field != "logit_bias":
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
    with pytest.raises(ParameterUnknown, match="expected seed - "):
        SamplingParams(seq_seed=1)


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({}, None),
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.5, "stop_token_ids": [3], "n": 4, "priority": 3, "logprobs": True}, None),
        ({"min_p": 0.1}, ("min_p", 0.1, 0.0)),
        ({"logit_bias": {3: 1.0}}, ("logit_bias", ((3, 1.0),), ())),
        ({"repetition_penalty": 1.1}, ("repetition_penalty", 1.1, 1.0)),
        ({"spec": 3}, ("spec", 3, "auto")),
        ({"spec": 0}, None),
        ({"spec": "off"}, None),
        ({"logprobs_mode": "processed"}, ("logprobs_mode", "processed", "raw")),
    ],
)
def test_what_a_sampler_cannot_do_is_named(given: dict[str, Any], asked: object) -> None:
    assert unmet(SamplingParams(**given), ()) == asked
    assert unmet(SamplingParams(**given), SAMPLER_FIELDS) is None


def test_a_refusal_can_name_its_request() -> None:
    with pytest.raises(ParameterRange) as refused:
        SamplingParams(top_k=0)
    named = refused.value.for_request("r7")
    assert type(named) is ParameterRange and named.request_id == "r7"
    assert "SamplingParams.top_k of request r7" in str(named)


@pytest.mark.parametrize("temperature", [0, 0.0, 9.9e-6])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    p = SamplingParams(temperature=temperature, top_p=0.5, top_k=3)
    assert (p.temperature, p.top_p, p.top_k) == (0.0, 1.0, -1)


def test_from_mapping_takes_none_as_not_given() -> None:
    assert SamplingParams.from_mapping({"max_tokens": None, "top_k": 4}) == SamplingParams(top_k=4)
    with pytest.raises(ParameterUnknown):
        SamplingParams.from_mapping({"min_q": 0.1})


def test_parameters_are_values() -> None:
    p = SamplingParams(seed=5, top_k=2)
    assert p.with_seed(6) == SamplingParams(seed=6, top_k=2) and hash(p) == hash(SamplingParams(seed=5, top_k=2))
    with pytest.raises(AttributeError):
        p.seed = 1  # type: ignore[misc]


def test_shared_seeds_give_each_request_its_own() -> None:
    seeds = [request_seed(7, i) for i in range(1000)]
    assert seeds[0] == 7 and len(set(seeds)) == 1000
    assert branch_seed(0, 1) == 0xE220A8397B1DCDAF, "the first output of splitmix64 seeded with 0"
    assert request_seed(2**64 - 1, 3) < 2**64


@pytest.mark.parametrize("seed", [0, 1, 7, 2**63, 2**64 - 1])
def test_no_two_branches_of_a_call_share_a_seed(seed: int) -> None:
    seeds = [branch_seed(request_seed(seed, i), j) for i in range(200) for j in range(MOST_BRANCHES)]
    assert len(set(seeds)) == 200 * MOST_BRANCHES and all(0 <= one < 2**64 for one in seeds)
    assert seeds[0] == seed and request_seed(seed, 1) == branch_seed(branch_seed(seed, MOST_BRANCHES - 1), 1), "one sequence, cut in pieces"
    assert branch_seed(seed, 0) == request_seed(seed, 0) == seed
    assert [_unmix(_mix(one)) for one in seeds[:99]] == seeds[:99] == [_mix(_unmix(one)) for one in seeds[:99]]
