"""Prompt files: what a line is, what null means, what is refused and where; seeds of a run and of a request."""

import json
from pathlib import Path
from typing import Any

import pytest

from tapeout.compiler.errors import FileRefused, SettingsError
from tapeout.compiler.prompts import Asked, read_prompts
from tapeout.runtime.errors import ParameterError
from tapeout.runtime.params import request_seed

DEFAULTS: dict[str, Any] = {"max_tokens": 7, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "seed": None}


def read(tmp_path: Path, content: str | bytes, **defaults: Any) -> list[Asked]:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_prompts([], path, None, DEFAULTS | defaults)


def read_ids(tmp_path: Path, content: str) -> list[Asked]:
    path = tmp_path / "ids.txt"
    path.write_bytes(content.encode())
    return read_prompts([], None, path, DEFAULTS)


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\u0085"])
def test_only_a_line_feed_ends_a_line(tmp_path: Path, mark: str) -> None:
    line = json.dumps({"prompt": f"a{mark}b"}, ensure_ascii=False)
    assert [one.prompt for one in read(tmp_path, f"{line}\n{line}\n")] == [f"a{mark}b"] * 2


def test_form_feeds_are_no_line_ends_either(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"prompts.jsonl:2: not JSON"):
        read(tmp_path, '{"prompt": "a"}\n{"prompt": "b"}\x0b{"prompt": "c"}\n')
    with pytest.raises(SettingsError, match=r"ids.txt:2: found '3\\x0b4', expected token ids"):
        read_ids(tmp_path, "1 2\n3\x0b4\n")


def test_windows_files_are_read(tmp_path: Path) -> None:
    found = read(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"token_ids": [3]}\r\n')
    assert [(one.prompt, one.where) for one in found] == [("a", f"{tmp_path}/prompts.jsonl:1"), ([3], f"{tmp_path}/prompts.jsonl:3")]
    assert [one.prompt for one in read_ids(tmp_path, "\ufeff1\t2\r\n\r\n 3\r\n")] == [[1, 2], [3]]


def test_null_is_not_given(tmp_path: Path) -> None:
    nothing = {"id": None, "token_ids": None, "max_tokens": None, "temperature": None, "seed": None, "stop": None}
    (one,) = read(tmp_path, json.dumps({"prompt": "a", **nothing}), seed=5)
    assert (one.id, one.prompt, one.params.max_tokens, one.params.temperature, one.params.seed) == ("0", "a", 7, 1.0, 5)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"token_ids": "x"}', 'token_ids: found "x", expected a list of whole numbers'),
        ('{"token_ids": [1, true]}', "token_ids: found [1, true], expected a list of whole numbers"),
        ('{"prompt": [1, 2]}', "prompt: found list, expected text"),
        ('{"prompt": null}', "expected an object with either `prompt` or `token_ids`"),
        ('{"prompt": "a", "prompt": "b"}', "found key 'prompt' twice, expected each key once"),
        ('{"prompt": "a", "id": {"x": 1}}', 'id: found {"x": 1}, expected text or a whole number'),
        ('{"prompt": "a", "id": true}', "id: found true, expected text or a whole number"),
        ('{"prompt": ' + "[" * 100_000, "found JSON that is nested too deeply, expected one object a line"),
    ],
    ids=["ids", "bool", "prompt", "null", "key", "object", "true", "deep"],
)
def test_refused_lines(tmp_path: Path, line: str, sentence: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read(tmp_path, f'{{"prompt": "fine"}}\n\n{line}')
    assert caught.value.problems == (f"{tmp_path}/prompts.jsonl:3: {sentence}",)


def test_two_requests_of_one_id_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        read(tmp_path, '{"prompt": "a", "id": 1}\n{"prompt": "b"}\n')
    place = f"{tmp_path}/prompts.jsonl"
    assert caught.value.problems == (f"{place}:2: id: found '1', which {place}:1 has, expected an id of its own",)


@pytest.mark.parametrize("text", ["1 two", "１ 2", "-1", "1_0", "1,2", "1\u00a02", "9" * 19], ids=ascii)
def test_token_ids_are_ascii_digits(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError, match=r"ids.txt:1: found .*, expected token ids separated by spaces"):
        read_ids(tmp_path, text)


@pytest.mark.parametrize(
    ("field", "value", "code"), [("temperature", "hot", "P101"), ("top_p", 2, "P102"), ("temperature", 10**400, "P102")]
)
def test_parameters_of_a_line_name_it(tmp_path: Path, field: str, value: object, code: str) -> None:
    line = json.dumps({"prompt": "a", field: value})
    with pytest.raises(ParameterError) as caught:
        read(tmp_path, f"\n{line}\n")
    assert str(caught.value).startswith(f"[{code}] ")
    assert f" - SamplingParams.{field} of request {tmp_path}/prompts.jsonl:2 - " in str(caught.value)


def test_parameters_of_the_command_line_name_the_option() -> None:
    with pytest.raises(SettingsError) as caught:
        read_prompts(["a"], None, None, DEFAULTS | {"top_p": 2.0})
    assert caught.value.problems == ("--top-p: found 2.0, expected a number above 0 and at most 1",)


def test_a_seed_of_the_run_gives_each_request_its_own(tmp_path: Path) -> None:
    found = read(tmp_path, '{"prompt": "a"}\n{"prompt": "a"}\n{"prompt": "a", "seed": 3}\n{"prompt": "a"}\n', seed=3)
    seeds = [one.params.seed for one in found]
    assert seeds == [3, request_seed(3, 1), 3, request_seed(3, 3)] and len(set(seeds)) == 3
    (again,) = read_prompts(["a"], None, None, DEFAULTS | {"seed": seeds[1]})
    assert again.params.seed == seeds[1]
    assert [one.params.seed for one in read_prompts(["a", "a"], None, None, DEFAULTS)] == [None, None]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileRefused, match=r"^\[C105\] --prompts .*none: found No such file or directory, expected a readable file"):
        read_prompts([], tmp_path / "none", None, DEFAULTS)
    with pytest.raises(FileRefused, match=r"--prompts .*prompts.jsonl: found bytes that are not text"):
        read(tmp_path, b"\xff\xfe")
