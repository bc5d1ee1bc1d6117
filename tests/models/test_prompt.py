"""Tokenizer, streaming text, chat prompts and token compression."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapeout.models.deepseek_v41.config import parse_config, shipped_config
from tapeout.models.deepseek_v41.errors import ChatError, TokenizerError
from tapeout.models.deepseek_v41.prompt import Tokenizer, encode_chat, load_tokenizer, render_chat
from tapeout.models.deepseek_v41.token_map import load_token_map, token_map
from tapeout.models.tiny import write_tiny
from tests.models.tiny_configs import tiny_document

CONFIG = shipped_config("tiny")
BUDGETS = {"low": 50, "high": 75, "xhigh": 75, "max": 100}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder, CONFIG)


# -- ids and text


def test_bytes_are_ids_from_three_on(tokenizer: Tokenizer) -> None:
    text = "Aé漢😀\x00\t\n"
    assert tokenizer.encode(text) == [0, *(3 + byte for byte in text.encode())]
    assert tokenizer.encode("", add_bos=False) == []
    assert tokenizer.token_bytes[3:259] == tuple(bytes([byte]) for byte in range(256))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([0, 68, 1], skip_special=False) == "<｜begin▁of▁sentence｜>A<｜end▁of▁sentence｜>"
    assert tokenizer.is_special(2) and not tokenizer.is_special(3)
    assert tokenizer.encode("<think>", add_bos=False) == [263]


ids_and_pieces = st.lists(
    st.one_of(
        st.integers(0, 511).map(lambda token: [token]),
        st.text(max_size=3).map(lambda text: [3 + byte for byte in text.encode()]),
    )
).map(lambda groups: [token for group in groups for token in group])


@settings(max_examples=300, deadline=None)
@given(ids=ids_and_pieces, skip=st.booleans())
def test_a_stream_gives_the_text_of_the_whole(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    stream = tokenizer.detokenizer(skip_special=skip)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.finish() == tokenizer.decode(ids, skip_special=skip)


@given(text=st.text())
@settings(max_examples=100, deadline=None)
def test_a_stream_never_gives_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    stream = tokenizer.detokenizer(skip_special=False)
    so_far = ""
    for byte in text.encode():
        so_far += stream.push(3 + byte)
        assert text.startswith(so_far)
    assert so_far == text and stream.finish() == ""


def test_an_unfinished_character_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    stream = tokenizer.detokenizer()
    assert [stream.push(3 + byte) for byte in "😀".encode()[:3]] == ["", "", ""]
    assert (stream.finish(), stream.push(68), stream.finish()) == ("�", "A", "")


@pytest.mark.parametrize("token", [-1, 512, 1.0, True, "3", None])
def test_foreign_ids_are_refused(tokenizer: Tokenizer, token: Any) -> None:
    for call in (lambda: tokenizer.decode([3, token]), lambda: tokenizer.detokenizer().push(token)):
        with pytest.raises(TokenizerError, match="expected a whole number from 0 to 511") as caught:
            call()
        assert caught.value.codes == ("M305",)


@pytest.mark.parametrize("text", ["a\ud800", 3, None])
def test_a_prompt_that_is_no_text(tokenizer: Tokenizer, text: Any) -> None:
    with pytest.raises(TokenizerError) as caught:
        tokenizer.encode(text)
    assert caught.value.codes == ("M307",)


# -- tokenizer files


def edited(folder: Path, target: Path, edit: Any) -> Path:
    document = json.loads((folder / "tokenizer.json").read_text())
    edit(document)
    (target / "tokenizer.json").write_text(json.dumps(document))
    return target


def swap_eos_and_pad(document: dict[str, Any]) -> None:
    names = [document["added_tokens"][i]["content"] for i in (1, 2)]
    for i, name in zip((2, 1), names, strict=True):
        document["model"]["vocab"][name] = i
        document["added_tokens"][i]["content"] = name


@pytest.mark.parametrize(
    ("edit", "codes"),
    [
        (swap_eos_and_pad, ("M302", "M302")),
        (lambda d: d["model"]["vocab"].update(extra=512), ("M303",)),
        (lambda d: d.update(decoder={"type": "Fuse"}), ("M301",)),
        (lambda d: d.pop("model"), ("M301",)),
    ],
)
def test_tokenizer_refused(folder: Path, tmp_path: Path, edit: Any, codes: tuple[str, ...]) -> None:
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(edited(folder, tmp_path, edit), CONFIG)
    assert caught.value.codes == codes


def test_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"\xff{}")
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(TokenizerError) as caught:
            load_tokenizer(path, CONFIG)
        assert caught.value.codes == ("M301",)


# -- chat


@pytest.mark.parametrize("effort", BUDGETS)
def test_reasoning_budgets_of_the_encoder(effort: str) -> None:  # R11
    prompt = render_chat({"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": effort})
    assert prompt.text == (
        "<｜begin▁of▁sentence｜><｜System｜>"
        f"Reasoning Effort: {BUDGETS[effort]} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
        "<｜User｜>Hi<｜Assistant｜><think>"
    )
    assert prompt.is_thinking and prompt.images == 0


def test_chat_without_thinking() -> None:
    messages = [{"role": "system", "content": "Short."}, {"role": "user", "content": "Hi"}]
    prompt = render_chat({"messages": messages, "thinking": {"type": "disabled"}, "model": "my own name"})
    assert prompt.text == "<｜begin▁of▁sentence｜><｜System｜>Short.<｜User｜>Hi<｜Assistant｜></think>"
    assert not prompt.is_thinking
    assert render_chat(json.dumps({"messages": messages, "thinking": {"type": "disabled"}})).text == prompt.text


def test_special_tokens_in_a_message_stay_text(tokenizer: Tokenizer) -> None:
    body = {"messages": [{"role": "user", "content": "<think>"}], "thinking": {"type": "disabled"}}
    ids = encode_chat(render_chat(body), tokenizer)
    assert ids == [0, 260, *(3 + byte for byte in b"<think>"), 261, 264]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": 3},
        {"messages": [{"role": "alien", "content": "x"}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "silly"},
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": -1},
        {"messages": [{"role": "user", "content": float("nan")}]},
        {"messages": [{"role": "user", "content": "x"}], "model": 3},
        {3: 4},
        "not json",
        b"\xff",
        "[1]",
        None,
    ],
)
def test_chat_refused(body: Any) -> None:
    with pytest.raises(ChatError) as caught:
        render_chat(body)
    assert caught.value.codes == ("M306",)


# -- token compression


def test_the_pinned_map_is_that_of_the_spec(folder: Path, tokenizer: Tokenizer) -> None:
    compressed = load_token_map(folder, CONFIG, tokenizer)
    expected = [t if t <= 99 else t - 32 if t <= 125 else t - 26 for t in range(512)]
    assert compressed.tolist() == expected and compressed.dtype == np.int32 and max(expected) + 1 == 486


def test_the_general_rule_also_folds_white_space(tokenizer: Tokenizer) -> None:
    derived = token_map(tokenizer, 512)
    space, tab, newline, carriage = (int(derived[3 + ord(c)]) for c in " \t\n\r")
    assert space == tab == newline == carriage
    pinned = np.array([t if t <= 99 else t - 32 if t <= 125 else t - 26 for t in range(512)])
    merged = [(i, j) for i in range(512) for j in range(i) if derived[i] == derived[j] and pinned[i] != pinned[j]]
    white = [3 + ord(c) for c in "\t\n\r "]
    assert merged == [(i, j) for i in white for j in white if j < i]
    assert int(derived.max()) + 1 == 486 - 3


def test_keys_of_the_general_rule() -> None:
    from tokenizers import Tokenizer as Native
    from tokenizers import decoders, models

    pieces = ["Cafe", "ＣＡＦＥ", "café", " cafe ", " ", "\t\n ", "\u3000", "\u0301", "", "x y", "x\r\n y", "É", "�"]
    native = Native(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=""))
    native.decoder = decoders.Fuse()
    # case, width, accent and outer space fold; lone spaces fold together, and so does the wide one, which NFKC makes one;
    # a lone accent vanishes and keeps its text; id 13 has no piece and shares the empty key; U+FFFD keeps its spelling.
    assert token_map(native, 14).tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 3, 4, 4, 5, 6, 3]


def test_a_map_of_another_size_is_refused(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="found 483 ids; expected 486, the engram_compressed_vocab_size"):
        load_token_map(tmp_path, CONFIG, tokenizer)
    document = tiny_document()
    document["text_config"]["engram_compressed_vocab_size"] = 483
    assert load_token_map(tmp_path, parse_config(document), tokenizer).max() == 482


@pytest.mark.parametrize("content", [b"[", b"{}", b"[0, 1]", b"\xff", b"[" + b"1, " * 511 + b"1]", b"[" + b"true, " * 511 + b"0]"])
def test_a_pinned_map_is_checked(tmp_path: Path, tokenizer: Tokenizer, content: bytes) -> None:
    (tmp_path / "engram_token_map.json").write_bytes(content)
    with pytest.raises(TokenizerError) as caught:
        load_token_map(tmp_path, CONFIG, tokenizer)
    assert caught.value.codes == ("M304",)
