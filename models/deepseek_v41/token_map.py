"""The Engram token compression: a map from token id to a smaller id space (docs/model.md, section 6.1).

Tokens that differ only in case, accents, width or surrounding space share a compressed id. The map follows from the tokenizer;
a checkpoint may pin one in `engram_token_map.json` instead, as the tiny one does. Hashing is in `engram.py`.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tapeout.models.deepseek_v41.config import ModelConfig
from tapeout.models.deepseek_v41.errors import Problem, TokenizerError

if TYPE_CHECKING:
    import tokenizers

    from tapeout.models.deepseek_v41.tokenizer import Tokenizer

PINNED = "engram_token_map.json"
REPLACEMENT = "\ufffd"


def token_map(tokenizer: "Tokenizer | tokenizers.Tokenizer", vocab_size: int) -> NDArray[np.int32]:
    """Returns compressed ids, int32 [vocab_size], numbered by first appearance of their key.

    A piece that is not UTF-8 alone keeps its raw spelling as key. Ids without a piece decode to nothing and share one key.
    """
    native: tokenizers.Tokenizer = getattr(tokenizer, "native", tokenizer)  # type: ignore[arg-type]
    texts = native.decode_batch([[token] for token in range(vocab_size)], skip_special_tokens=False)
    normalize = _normalizer()
    numbers: dict[str, int] = {}
    compressed = np.empty(vocab_size, dtype=np.int32)
    for token, text in enumerate(texts):
        raw = native.id_to_token(token) if REPLACEMENT in text else None
        key = _key(text, normalize) if raw is None else raw
        compressed[token] = numbers.setdefault(key, len(numbers))
    return compressed


def load_token_map(directory: str | Path, config: ModelConfig, tokenizer: "Tokenizer") -> NDArray[np.int32]:
    """Returns the map of a checkpoint, pinned or derived, int32 [vocab_size].

    Raises `TokenizerError` when it does not have `engram_compressed_vocab_size` ids.
    """
    pinned = Path(directory) / PINNED
    source = pinned if pinned.exists() else Path(tokenizer.where)
    compressed = _read_pinned(pinned, config) if pinned.exists() else token_map(tokenizer, config.text.vocab_size)
    found, expected = int(compressed.max()) + 1, config.text.engram_compressed_vocab_size
    if found != expected:
        words = f"{expected}, the engram_compressed_vocab_size"
        fix = "use the tokenizer that belongs to this configuration"
        raise TokenizerError(str(source), [Problem("M304", "token map", f"{found} ids", words, fix)])
    return compressed


def _normalizer() -> "tokenizers.normalizers.Normalizer":
    from tokenizers import Regex, normalizers

    steps = (
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex("[ \t\r\n]+"), " "),
    )
    return normalizers.Sequence(list(steps))


def _key(text: str, normalize: "tokenizers.normalizers.Normalizer") -> str:
    """Returns the normal form; a lone space stays one, and what vanishes keeps its own text."""
    plain = normalize.normalize_str(text)
    if plain == " ":
        return plain
    return _stripped(plain) or text


def _stripped(text: str) -> str:
    from tokenizers.normalizers import Strip

    return Strip().normalize_str(text)


def _read_pinned(path: Path, config: ModelConfig) -> NDArray[np.int32]:
    """Returns a pinned map: one number per id, each at most one above all before it."""
    import json

    vocabulary = config.text.vocab_size
    expected = f"a list of {vocabulary} numbers, new ones in ascending order"
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _bad_pinned(path, str(error), expected) from error
    if not isinstance(values, list) or len(values) != vocabulary or not all(type(value) is int for value in values):
        raise _bad_pinned(path, f"{type(values).__name__} of another form", expected)
    highest = -1
    for token, value in enumerate(values):
        if not 0 <= value <= highest + 1:
            raise _bad_pinned(path, f"{value} at id {token}", expected)
        highest = max(highest, value)
    return np.array(values, dtype=np.int32)


def _bad_pinned(path: Path, found: str, expected: str) -> TokenizerError:
    return TokenizerError(str(path), [Problem("M304", path.name, found, expected, "restore the file of the checkpoint")])
