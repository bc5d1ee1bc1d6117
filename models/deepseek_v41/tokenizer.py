"""Text to token ids and back, through the checkpoint's tokenizer.json.

Promises: special ids are where the model expects them, every id given or taken lies in the vocabulary, and a stream of tokens
never yields half a UTF-8 character. Chat prompts are in `prompt.py`, the Engram token compression in `token_map.py`.
"""

import codecs
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers

from tapeout.models.deepseek_v41.config import ModelConfig
from tapeout.models.deepseek_v41.errors import Problem, TokenizerError, shown
from tapeout.models.deepseek_v41.paths import is_file, is_folder

if TYPE_CHECKING:
    import deepseek_recipe

FILE = "tokenizer.json"
SPECIAL_PIECES = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")  # ids 0, 1, 2


class Tokenizer:
    """A checked tokenizer. `native` is the object of the `tokenizers` library; ids run below `vocab_size`."""

    def __init__(self, native: tokenizers.Tokenizer, vocab_size: int, where: str) -> None:
        self.native = native
        self.vocab_size = vocab_size
        self.where = where

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Returns the ids of `text`, after BOS unless told otherwise. Special tokens spelled in the text count as such.

        Raises `TokenizerError` for text that is not Unicode (lone surrogates).
        """
        try:
            ids: list[int] = self.native.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError) as error:
            found = shown(text)
            problem = Problem("M307", "prompt", found, "a string without lone surrogates", "clean the text")
            raise TokenizerError(self.where, [problem]) from error
        return [0, *ids] if add_bos else ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Returns the text of `ids`; bytes that are not UTF-8 become U+FFFD. Raises `TokenizerError` for a foreign id."""
        return self.native.decode(self.checked(ids), skip_special_tokens=skip_special)

    def checked(self, ids: Iterable[int]) -> list[int]:
        """Returns `ids` as a list, each a whole number below `vocab_size`, or raises `TokenizerError`."""
        listed = list(ids)
        wrong = [(i, token) for i, token in enumerate(listed) if not self._is_id(token)]
        if wrong:
            expected = f"a whole number from 0 to {self.vocab_size - 1}"
            problems = [Problem("M305", f"token {i}", shown(t), expected, "correct the ids") for i, t in wrong[:20]]
            raise TokenizerError(self.where, problems)
        return listed

    def _is_id(self, token: object) -> bool:
        whole = isinstance(token, int) and not isinstance(token, bool)
        return whole and 0 <= token < self.vocab_size  # type: ignore[operator]

    def is_special(self, token: int) -> bool:
        """Says whether `token` is a control token, left out of decoded text."""
        return token in self._specials

    @cached_property
    def token_bytes(self) -> tuple[bytes, ...]:
        """The bytes that each id contributes to the text, for all ids of the vocabulary; empty for ids without a piece."""
        return tuple(_piece_bytes(self.native.id_to_token(token)) for token in range(self.vocab_size))

    def detokenizer(self, *, skip_special: bool = True) -> "Detokenizer":
        """Returns a fresh stream from ids to text."""
        return Detokenizer(self, skip_special)

    @cached_property
    def chat_native(self) -> "deepseek_recipe.Tokenizer":
        """The same tokenizer as an object of `deepseek-recipe`, which encodes chat prompts."""
        import deepseek_recipe

        return deepseek_recipe.Tokenizer.from_str(self.native.to_str())

    @cached_property
    def _specials(self) -> frozenset[int]:
        return frozenset(i for i, token in self.native.get_added_tokens_decoder().items() if token.special)


class Detokenizer:
    """Turns ids into text one by one; holds back the bytes of an unfinished character.

    What it has given out, with `finish`, is what `Tokenizer.decode` gives for all ids at once.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Returns the text that `token` completes, possibly none. Raises `TokenizerError` for a foreign id."""
        if not self._tokenizer._is_id(token):
            self._tokenizer.checked([token])
        if self._skip_special and self._tokenizer.is_special(token):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes[token])

    def finish(self) -> str:
        """Returns what is left, an unfinished character as U+FFFD, and starts afresh."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def load_tokenizer(path: str | Path, config: ModelConfig) -> Tokenizer:
    """Reads tokenizer.json, or the one of a folder, and checks it against the configuration. Raises `TokenizerError`."""
    file = Path(path)
    if is_folder(file):
        file = file / FILE
    if not is_file(file):
        problem = Problem("M301", str(file), "no file", "a tokenizer.json", "download it with the checkpoint")
        raise TokenizerError(str(file), [problem])
    try:
        native = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for every fault of the file
        problem = Problem("M301", str(file), str(error), "a tokenizer of the tokenizers library", "download it again")
        raise TokenizerError(str(file), [problem]) from error
    problems = _problems(native, config)
    if problems:
        raise TokenizerError(str(file), problems)
    return Tokenizer(native, config.text.vocab_size, str(file))


def _problems(native: tokenizers.Tokenizer, config: ModelConfig) -> list[Problem]:
    problems = []
    for token, piece in enumerate(SPECIAL_PIECES):
        if native.id_to_token(token) != piece:
            found, fix = shown(native.id_to_token(token)), "use the tokenizer of this model"
            problems.append(Problem("M302", f"id {token}", found, shown(piece), fix))
    highest, limit = max(native.get_vocab().values(), default=-1), config.text.vocab_size
    if highest >= limit:
        fix = "use the tokenizer of this checkpoint"
        problems.append(Problem("M303", f"id {highest}", "a piece", f"ids below vocab_size, {limit}", fix))
    decoder = type(native.decoder).__name__
    if decoder != "ByteLevel":
        problems.append(Problem("M301", "decoder", decoder, "ByteLevel", "use the tokenizer of this model"))
    return problems


def _byte_alphabet() -> dict[str, int]:
    """Returns the byte that each character of a byte-level piece stands for: printable Latin-1 itself, others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _piece_bytes(piece: str | None) -> bytes:
    """Returns the bytes of a piece; one with a character outside the byte alphabet stands for its own UTF-8."""
    if piece is None:
        return b""
    try:
        return bytes(_BYTES[character] for character in piece)
    except KeyError:
        return piece.encode()
