"""The tokenizer of the trained checkpoint: deterministic, lossless, ids where the model expects them, compression by the general rule."""

import json
from pathlib import Path

import numpy as np
import pytest

from tapeout.models.deepseek_v41.config import shipped_config
from tapeout.models.deepseek_v41.token_map import load_token_map, token_map
from tapeout.models.deepseek_v41.tokenizer import Tokenizer, load_tokenizer
from tapeout.models.tiny.corpus import CorpusError, read_corpus
from tapeout.models.tiny.merges import FIRST_MERGE, IMAGE_ID, NOISE_ID, VOCABULARY, train_tokenizer
from tapeout.models.tiny.tokenizer import CHAT, FIRST_CHAT, IMAGE, NOISE, SPECIALS

SHIPPED = Path(__file__).parents[2] / "models/tiny/trained"
CONFIG = shipped_config("tiny-trained")
TEXTS = ["def f(self):\n    return self.x\n\n\nclass A:\n" * 9, "for i in range(10):\n\tprint(i, 'é…')\n" * 7]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(SHIPPED, CONFIG)


@pytest.mark.parametrize("text", [
    "", " ", "\n", "\r\n\t x", "def f(self):\n    return self._x1\n", "    \n\n  # é 漢字 🐍 \x00\x7f", "if x:\n\tpass\n" * 3, "trailing  \n\n\n",
    "a" * 300,
])  # fmt: skip
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_bos=False)
    assert tokenizer.decode(ids, skip_special=False) == text
    assert b"".join(tokenizer.token_bytes[i] for i in ids) == text.encode()
    stream = tokenizer.detokenizer()
    assert "".join(stream.push(i) for i in ids) + stream.finish() == text


def test_ids_are_where_the_model_expects_them(tokenizer: Tokenizer) -> None:
    piece = tokenizer.native.id_to_token
    assert [piece(i) for i in range(3)] == list(SPECIALS)
    assert [piece(i) for i in range(FIRST_CHAT, FIRST_MERGE)] == list(CHAT)
    assert (piece(IMAGE_ID), piece(NOISE_ID)) == (IMAGE, NOISE)
    assert (CONFIG.image_token_id, CONFIG.text.dspark_noise_token_id, CONFIG.text.vocab_size) == (IMAGE_ID, NOISE_ID, VOCABULARY)
    assert [tokenizer.token_bytes[3 + byte] for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert len(set(tokenizer.token_bytes)) == VOCABULARY  # every id is text of its own: none is unused, none is doubled


def test_indentation_and_words_are_single_tokens(tokenizer: Tokenizer) -> None:
    pieces = [tokenizer.token_bytes[i].decode() for i in tokenizer.encode("def f(self):\n        return self.x\n", add_bos=False)]
    assert pieces == ["def", " f", "(self", "):\n        ", "return", " self", ".", "x", "\n"]


def test_the_pinned_compression_is_the_general_rule(tokenizer: Tokenizer) -> None:
    pinned = load_token_map(SHIPPED, CONFIG, tokenizer)
    assert np.array_equal(pinned, token_map(tokenizer, VOCABULARY))
    assert int(pinned.max()) + 1 == CONFIG.text.engram_compressed_vocab_size == 1503
    words = [tokenizer.native.token_to_id(piece) for piece in ("test", "Ġtest", "Test", "ĠTest")]
    assert len({int(pinned[i]) for i in words}) == 1


def test_training_is_deterministic_and_small_texts_leave_unused_ids() -> None:
    first, second = (train_tokenizer(TEXTS) for _ in range(2))
    assert first == second
    vocabulary = json.loads(first)["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(VOCABULARY))
    assert any("unused" in piece for piece in vocabulary)
    assert train_tokenizer(TEXTS[:1]) != first


@pytest.mark.full
def test_the_shipped_tokenizer_comes_from_the_corpus() -> None:
    try:
        corpus = read_corpus()
    except CorpusError as error:
        pytest.skip(str(error))
    assert train_tokenizer(document.text for document in corpus.train) == (SHIPPED / "tokenizer.json").read_text()
