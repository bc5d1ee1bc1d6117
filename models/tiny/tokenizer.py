"""The tokenizer of the tiny checkpoint: ids 3 to 258 are the bytes 0 to 255, chat and special tokens have ids of their own.

Written as a tokenizer.json that the `tokenizers` library loads: byte-level BPE without merges. Unused ids carry a visible
piece, so that every id the model can produce decodes to text.
"""

import json

from tapeout.models.deepseek_v41.config import ModelConfig

FIRST_BYTE = 3
SPECIALS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
CHAT = ("<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>", "<think>", "</think>", "｜DSML｜")
FIRST_CHAT = FIRST_BYTE + 256
IMAGE = "<｜image｜>"
NOISE = "<｜noise｜>"


def tokenizer_json(config: ModelConfig) -> str:
    """Returns the text of tokenizer.json."""
    pieces = _pieces(config)
    special = [i for i, piece in enumerate(pieces) if i < FIRST_BYTE or (i >= FIRST_CHAT and "unused" not in piece)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    document: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added_token(i, pieces[i]) for i in special],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges": [],
        },
    }
    return json.dumps(document, ensure_ascii=False, indent=1) + "\n"


def token_map_json(config: ModelConfig) -> str:
    """Returns the pinned token compression: ASCII letters lose their case, all other ids stay apart (appendix B).

    It differs from the general rule of section 6.1 in tab, LF and CR, which that rule folds into the space.
    """
    keys = [i + 32 if FIRST_BYTE + ord("A") <= i <= FIRST_BYTE + ord("Z") else i for i in range(config.text.vocab_size)]
    numbers: dict[int, int] = {}
    return json.dumps([numbers.setdefault(key, len(numbers)) for key in keys]) + "\n"


def _pieces(config: ModelConfig) -> list[str]:
    pieces = [f"<｜unused{i}｜>" for i in range(config.text.vocab_size)]
    pieces[:FIRST_BYTE] = SPECIALS
    pieces[FIRST_BYTE:FIRST_CHAT] = byte_pieces()
    pieces[FIRST_CHAT : FIRST_CHAT + len(CHAT)] = CHAT
    pieces[config.image_token_id] = IMAGE
    pieces[config.text.dspark_noise_token_id] = NOISE
    return pieces


def byte_pieces() -> list[str]:
    """Returns the byte-level spelling of bytes 0 to 255: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256))
    return [chr(byte) if byte in printable else chr(256 + next(others)) for byte in range(256)]


def added_token(token: int, piece: str) -> dict[str, object]:
    """Returns the entry of a token that is taken whole wherever it is spelled."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": piece, **flags, "special": True}
