"""The tokenizer of the trained checkpoint: byte-level BPE of 2,048 ids, its merges counted on the train split of the corpus.

Ids 0 to 265 are those of `tokenizer.py`: special tokens, the 256 bytes, chat marks. Merges follow, then the image and the noise token.
Deterministic: same texts, same file. The token compression that goes with it is derived by the general rule (docs/model.md, 6.1).

    python -m tapeout.models.tiny.merges -o DIR [--corpus PACK]     writes tokenizer.json, tokenizer_config.json, engram_token_map.json
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapeout.models.deepseek_v41.token_map import token_map
from tapeout.models.tiny.corpus import CorpusError, read_corpus
from tapeout.models.tiny.tokenizer import CHAT, FIRST_BYTE, FIRST_CHAT, IMAGE, NOISE, SPECIALS, added_token, byte_pieces

if TYPE_CHECKING:
    import tokenizers

VOCABULARY = 2048
FIRST_MERGE = FIRST_CHAT + len(CHAT)
IMAGE_ID, NOISE_ID = VOCABULARY - 2, VOCABULARY - 1
LONGEST_PIECE = 24  # bytes: no id is spent on a ruler of dashes

# What may become one id. First the end of a line with the punctuation before it and the indentation behind it, so that `:` and a step
# inwards are one token; then a word with the one character before it (` name`, `.name`, `(name`, `_name`); digits stay single.
PIECES = r"[^\s\p{L}\p{N}]*(?:[ \t]*\n)+[ \t]*|[^\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[ \t]+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str]) -> str:
    """Returns the text of tokenizer.json with the merges that `texts` ask for."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    native = Tokenizer(models.BPE())
    native.pre_tokenizer = _pre_tokenizer()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=256 + IMAGE_ID - FIRST_MERGE,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=LONGEST_PIECE,
        show_progress=False,
    )
    native.train_from_iterator(texts, trainer)
    trained = json.loads(native.to_str())
    return _document(trained["model"]["merges"], trained["pre_tokenizer"])


def write_tokenizer(folder: Path, texts: Iterable[str]) -> None:
    """Writes the three files into a folder that exists. Raises OSError."""
    from tokenizers import Tokenizer

    text = train_tokenizer(texts)
    (folder / "tokenizer.json").write_text(text)
    names = dict(zip(("bos_token", "eos_token", "pad_token"), SPECIALS, strict=True))
    names |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names, indent=1, ensure_ascii=False) + "\n")
    compressed = token_map(Tokenizer.from_str(text), VOCABULARY)
    (folder / "engram_token_map.json").write_text(json.dumps(compressed.tolist()) + "\n")


def _pre_tokenizer() -> "tokenizers.pre_tokenizers.PreTokenizer":
    from tokenizers import Regex, pre_tokenizers

    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PIECES), "isolated"), whole])  # type: ignore[list-item]


def _document(merges: list[list[str]], pre_tokenizer: dict[str, Any]) -> str:
    pieces = [*SPECIALS, *byte_pieces(), *CHAT]
    pieces += dict.fromkeys(left + right for left, right in merges)
    pieces += [f"<｜unused{i}｜>" for i in range(len(pieces), IMAGE_ID)]
    pieces += [IMAGE, NOISE]
    marks = [*range(FIRST_BYTE), *range(FIRST_CHAT, FIRST_MERGE), IMAGE_ID, NOISE_ID]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    plain: dict[str, object] = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    plain |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    document: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added_token(i, pieces[i]) for i in marks],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", **plain, "vocab": {piece: i for i, piece in enumerate(pieces)}, "merges": merges},
    }
    return json.dumps(document, ensure_ascii=False, indent=0) + "\n"


def main() -> int:
    """The command; returns 0, or 1 with the refusal on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m tapeout.models.tiny.merges", description="Trains the tokenizer of the trained checkpoint."
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write into; made when absent")
    parser.add_argument("--corpus", type=Path, help="a pack; by default this Python's library")
    given = parser.parse_args()
    try:
        corpus = read_corpus(given.corpus)
        given.output.mkdir(parents=True, exist_ok=True)
        write_tokenizer(given.output, (document.text for document in corpus.train))
    except (CorpusError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
