"""Prompt files: what a line is, what null means, what is refused, where, and that it harms no other request; seeds of a run and of a request."""

import json
from pathlib import Path
from typing import Any

import pytest

from tapeout.compiler.errors import FileRefused, SettingsError
from tapeout.compiler.prompts import Asked, Refused, read_prompts
from tapeout.runtime.params import request_seed

DEFAULTS: dict[str, Any] = {"max_tokens": 7, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "seed": None}


def found(tmp_path: Path, content: str | bytes, **defaults: Any) -> list[Asked | Refused]:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_prompts([], path, None, DEFAULTS | defaults)


def found_ids(tmp_path: Path, content: str | bytes) -> list[Asked | Refused]:
    path = tmp_path / "ids.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_prompts([], None, path, DEFAULTS)


def read(tmp_path: Path, content: str | bytes, **defaults: Any) -> list[Asked]:
    """Requests of a file in which nothing is refused."""
    return asked(found(tmp_path, content, **defaults))


def asked(all_of_them: list[Asked | Refused]) -> list[Asked]:
    assert not [one for one in all_of_them if isinstance(one, Refused)]
    return [one for one in all_of_them if isinstance(one, Asked)]


def refused(all_of_them: list[Asked | Refused]) -> Refused:
    """The one request that is refused."""
    (one,) = [one for one in all_of_them if isinstance(one, Refused)]
    return one


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\u0085"])
def test_only_a_line_feed_ends_a_line(tmp_path: Path, mark: str) -> None:
    line = json.dumps({"prompt": f"a{mark}b"}, ensure_ascii=False)
    assert [one.prompt for one in read(tmp_path, f"{line}\n{line}\n")] == [f"a{mark}b"] * 2


def test_form_feeds_are_no_line_ends_either(tmp_path: Path) -> None:
    one = refused(found(tmp_path, '{"prompt": "a"}\n{"prompt": "b"}\x0b{"prompt": "c"}\n'))
    assert one.error.startswith(f"[Q101] a prompt is refused - {tmp_path}/prompts.jsonl:2 - found no JSON (Extra data")
    one = refused(found_ids(tmp_path, "1 2\n3\x0b4\n"))
    assert f"{tmp_path}/ids.txt:2 - found '3\\x0b4', expected token ids" in one.error


def test_windows_files_are_read(tmp_path: Path) -> None:
    found = read(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"token_ids": [3]}\r\n')
    assert [(one.prompt, one.where) for one in found] == [("a", f"{tmp_path}/prompts.jsonl:1"), ([3], f"{tmp_path}/prompts.jsonl:3")]
    assert [one.prompt for one in asked(found_ids(tmp_path, "\ufeff1\t2\r\n\r\n 3\r\n"))] == [[1, 2], [3]]


def test_null_is_not_given(tmp_path: Path) -> None:
    nothing = {"id": None, "token_ids": None, "max_tokens": None, "temperature": None, "seed": None, "stop": None}
    (one,) = read(tmp_path, json.dumps({"prompt": "a", **nothing}), seed=5)
    assert (one.id, one.prompt, one.params.max_tokens, one.params.temperature, one.params.seed) == ("0", "a", 7, 1.0, 5)


@pytest.mark.parametrize(
    ("line", "where", "sentence"),
    [
        ('{"prompt": "b', "", "found no JSON (Unterminated string starting at: line 1 column 12 (char 11)), expected one object a line"),
        ("[1, 2]", "", "found list, expected an object with either `prompt` or `token_ids`"),
        ('{"token_ids": "x"}', ", token_ids", 'found "x", expected a list of whole numbers'),
        ('{"token_ids": [1, true]}', ", token_ids", "found [1, true], expected a list of whole numbers"),
        ('{"prompt": [1, 2]}', ", prompt", "found list, expected text"),
        ('{"prompt": null}', "", "found neither, expected an object with either `prompt` or `token_ids`"),
        ('{"prompt": "a", "token_ids": [1]}', "", "found both, expected an object with either `prompt` or `token_ids`"),
        ('{"prompt": "a", "prompt": "b"}', "", 'found key "prompt" twice, expected each key once'),
        ('{"prompt": "a", "tempreature": 1}', "", 'found an unknown field "tempreature", expected id, prompt, token_ids, temperature'),
        ('{"prompt": "a", "id": {"x": 1}}', ", id", 'found {"x": 1}, expected text or a whole number'),
        ('{"prompt": "a", "id": true}', ", id", "found true, expected text or a whole number"),
        ('{"prompt": ' + "[" * 100_000, "", "found JSON that is nested too deeply, expected one object a line"),
        (b'{"prompt": "\xff"}', "", "found bytes that are not UTF-8 (invalid start byte, byte 12), expected text in UTF-8"),
        (b'{"prompt": "\xe2\x82"}', "", "found bytes that are not UTF-8 (invalid continuation byte, byte 12), expected text in UTF-8"),
    ],
    ids=["cut", "list", "ids", "bool", "prompt", "null", "both", "key", "field", "object", "true", "deep", "latin", "half"],
)
def test_a_malformed_line_refuses_its_request_alone(tmp_path: Path, line: str | bytes, where: str, sentence: str) -> None:
    given = line if isinstance(line, bytes) else line.encode()
    first, second, third = found(tmp_path, b'{"prompt": "fine"}\n\n' + given + b'\n{"prompt": "fine too"}\n', seed=4)
    place = f"{tmp_path}/prompts.jsonl:3"
    assert isinstance(second, Refused) and (second.id, second.where) == ("1", place)
    assert second.error.startswith(f"[Q101] a prompt is refused - {place}{where} - {sentence}")
    assert isinstance(first, Asked) and isinstance(third, Asked)
    assert (first.prompt, third.prompt) == ("fine", "fine too") and third.params.seed == request_seed(4, 2), "seeds count refused requests"


def test_a_refused_line_keeps_its_id(tmp_path: Path) -> None:
    one = refused(found(tmp_path, '{"id": "mine", "prompt": 5}\n{"prompt": "fine"}\n'))
    assert one.id == "mine"


def test_two_requests_of_one_id_the_second_is_refused(tmp_path: Path) -> None:
    first, second, third = found(tmp_path, '{"prompt": "a", "id": 1}\n{"prompt": "b"}\n{"prompt": "c"}\n')
    place = f"{tmp_path}/prompts.jsonl"
    assert isinstance(first, Asked) and isinstance(second, Refused) and isinstance(third, Asked)
    expected = f"[Q102] the request id is in use - {place}:2, id - found '1', which {place}:1 has, expected an id of its own"
    assert second.error.startswith(expected) and (first.id, third.id) == ("1", "2")


@pytest.mark.parametrize("text", ["1 two", "１ 2", "-1", "1_0", "1,2", "1\u00a02", "9" * 19], ids=ascii)
def test_token_ids_are_ascii_digits(tmp_path: Path, text: str) -> None:
    first, second = found_ids(tmp_path, f"{text}\n5 6\n")
    assert isinstance(first, Refused) and isinstance(second, Asked) and second.prompt == [5, 6]
    assert f"{tmp_path}/ids.txt:1 - found " in first.error and "expected token ids separated by spaces" in first.error
    assert "not UTF-8" in refused(found_ids(tmp_path, b"1 2\n\xff\n")).error


@pytest.mark.parametrize(
    ("field", "value", "code"), [("temperature", "hot", "P101"), ("top_p", 2, "P102"), ("temperature", 10**400, "P102"), ("min_tokens", 8, "P102")]
)
def test_parameters_of_a_line_refuse_it_alone(tmp_path: Path, field: str, value: object, code: str) -> None:
    line = json.dumps({"prompt": "a", field: value})
    first, second = found(tmp_path, f"\n{line}\n" + '{"prompt": "b"}\n')
    assert isinstance(first, Refused) and isinstance(second, Asked)
    assert first.error.startswith(f"[{code}] ")
    assert f" - SamplingParams.{field} of request {tmp_path}/prompts.jsonl:2 - " in first.error


def test_parameters_of_the_command_line_name_the_option() -> None:
    with pytest.raises(SettingsError) as caught:
        read_prompts(["a"], None, None, DEFAULTS | {"top_p": 2.0})
    assert caught.value.problems == ("--top-p: found 2.0, expected a number above 0 and at most 1",)


def test_a_seed_of_the_run_gives_each_request_its_own(tmp_path: Path) -> None:
    each = read(tmp_path, '{"prompt": "a"}\n{"prompt": "a"}\n{"prompt": "a", "seed": 3}\n{"prompt": "a"}\n', seed=3)
    seeds = [one.params.seed for one in each]
    assert seeds == [3, request_seed(3, 1), 3, request_seed(3, 3)] and len(set(seeds)) == 3
    (again,) = asked(read_prompts(["a"], None, None, DEFAULTS | {"seed": seeds[1]}))
    assert again.params.seed == seeds[1]
    assert [one.params.seed for one in asked(read_prompts(["a", "a"], None, None, DEFAULTS))] == [None, None]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileRefused, match=r"^\[C105\] --prompts .*none: found No such file or directory, expected a readable file"):
        read_prompts([], tmp_path / "none", None, DEFAULTS)
    with pytest.raises(SettingsError, match=r"--prompts .*: found no line with a prompt"):
        read(tmp_path, " \r\n\n")
    with pytest.raises(SettingsError, match="no prompt: expected --prompt TEXT"):
        read_prompts([], None, None, DEFAULTS)


@pytest.mark.parametrize(("line", "end"), [
    ('{"prompt": "a", "max_token": 3}', 'found an unknown field "max_token", expected id, prompt, token_ids, temperature, {}, determinism - '
     "remove it, or write max_tokens"),
    ('{"prompt": "a", "xyzzy": 3}', 'found an unknown field "xyzzy", expected {} - remove it'),
    ("{'prompt': 'a'}", "found no JSON ({}), expected one object a line - correct the line: one JSON object, on one line"),
    ("[" * 100_000, "found JSON that is nested too deeply, expected one object a line - correct the line: one JSON object, on one line"),
    ('{"prompt": "a", "prompt": "b"}', 'found key "prompt" twice, expected each key once - remove one of the two'),
    ('{"prompt": "a", "id": 1.5}', "found 1.5, expected text or a whole number - give such an id, or none"),
    (b"\xff", "found bytes that are not UTF-8 (invalid start byte, byte 0), expected text in UTF-8 - convert the file"),
])  # fmt: skip
def test_a_refusal_says_what_to_do(tmp_path: Path, line: str | bytes, end: str) -> None:
    error = refused(found(tmp_path, line)).error
    first, last = end.split("{}") if "{}" in end else ("", end)
    assert first in error and error.endswith(last)
