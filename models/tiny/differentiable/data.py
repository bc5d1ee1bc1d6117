"""Token files and batches: what a training step reads.

A token file holds three splits as one stream each, [BOS] document [EOS] after [BOS] document [EOS], and the bytes behind every token
id, so that losses can be told in bits per byte on a machine without tokenizer or corpus. Batches depend on seed and step alone.
"""

from __future__ import annotations

import io
import lzma
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tapeout.models.deepseek_v41.config import ModelConfig
    from tapeout.models.deepseek_v41.tokenizer import Tokenizer

Ids = NDArray[np.int64]
_WARM_ROWS = 2  # no replay starts within this many rows of the end: there would be nothing to learn from


@dataclass(frozen=True)
class TokenFile:
    """Streams of ids: `train`, `held_out`, and `aside`, text of neither, that the confidence head is fitted behind.

    `byte_counts` `[V]` is zero for ids that stand for no text.
    """

    train: Ids
    held_out: Ids
    aside: Ids
    byte_counts: Ids
    token_map: Ids


def write_token_file(path: Path, config: ModelConfig, tokenizer: Tokenizer, token_map: Ids, splits: dict[str, list[str]]) -> None:
    """Encodes documents and writes them compressed; `splits` maps `train`, `held_out` and `aside` to texts."""
    streams = {name: _stream(config, tokenizer, texts) for name, texts in splits.items()}
    counts = _byte_counts(config, tokenizer)
    buffer = io.BytesIO()
    np.savez(buffer, byte_counts=counts, token_map=token_map.astype(np.int32), **streams)  # type: ignore[arg-type]
    path.write_bytes(lzma.compress(buffer.getvalue(), preset=6))


def read_token_file(path: Path) -> TokenFile:
    """Reads what `write_token_file` wrote."""
    found = _arrays(path)
    return TokenFile(*(found[name].astype(np.int64) for name in ("train", "held_out", "aside", "byte_counts", "token_map")))


def _stream(config: ModelConfig, tokenizer: Tokenizer, texts: list[str]) -> NDArray[np.uint16]:
    encoded = tokenizer.native.encode_batch(texts, add_special_tokens=False)
    parts = [[config.bos_token_id, *found.ids, config.eos_token_id] for found in encoded]
    return np.concatenate([np.array(part, np.uint16) for part in parts])


def _byte_counts(config: ModelConfig, tokenizer: Tokenizer) -> NDArray[np.uint8]:
    special = set(tokenizer.native.get_added_tokens_decoder())
    pieces = [tokenizer.native.id_to_token(token) or "" for token in range(config.text.vocab_size)]
    # Byte-level pieces spell every byte with one character.
    return np.array([0 if token in special else len(piece) for token, piece in enumerate(pieces)], np.uint8)


@dataclass(frozen=True)
class WrittenFile:
    """Greedy text of a backbone: `tokens` `[n, L]`, prompts first, zeros last; `starts` `[n]`; `count` written tokens in each row."""

    tokens: Ids
    starts: Ids
    count: int


def write_written_file(path: Path, parts: dict[str, WrittenFile]) -> None:
    """Keeps texts by the split their prompts came from."""
    arrays: dict[str, NDArray[np.int32]] = {}
    for name, part in parts.items():
        arrays |= {f"{name} tokens": part.tokens.astype(np.int32), f"{name} starts": part.starts.astype(np.int32)}
        arrays[f"{name} count"] = np.int32(part.count)  # type: ignore[assignment]
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    path.write_bytes(lzma.compress(buffer.getvalue(), preset=6))


def read_written_file(path: Path) -> dict[str, WrittenFile]:
    """Reads what `write_written_file` wrote."""
    found = _arrays(path)
    names = [name.removesuffix(" count") for name in found if name.endswith(" count")]
    return {
        name: WrittenFile(found[f"{name} tokens"].astype(np.int64), found[f"{name} starts"].astype(np.int64), int(found[f"{name} count"]))
        for name in names
    }


def _arrays(path: Path) -> dict[str, NDArray[np.generic]]:
    try:
        with np.load(io.BytesIO(lzma.decompress(path.read_bytes()))) as found:
            return dict(found)
    except (lzma.LZMAError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"a token file cannot be read - {path} - found {error}, expected compressed arrays - write it again") from error


def batch_starts(tokens: int, batch: int, length: int, seed: int, step: int) -> Ids:
    """First positions `[batch]` of the sequences of a step: every epoch tiles the stream anew, in another order."""
    per_epoch = (tokens - 1) // length - 1
    slots = step * batch + np.arange(batch)
    starts = np.empty(batch, np.int64)
    for epoch in np.unique(slots // per_epoch):
        draw = np.random.default_rng([seed, int(epoch)])
        shift, order = draw.integers(length), draw.permutation(per_epoch)
        inside = slots // per_epoch == epoch
        starts[inside] = shift + order[slots[inside] % per_epoch] * length
    return starts


def replay_floors(batch: int, length: int, keep: int, share: float, seed: int, step: int) -> Ids:
    """Window floors `[batch, length]` that cut a `share` of the sequences where a replay would start, others nowhere.

    A replay rebuilds the last `keep` rows of a prompt and decoding goes on from there; so behind a cut no other follows for at least
    `keep` rows, and rows up to the next cut see nothing before their own.
    """
    draw = np.random.default_rng([seed, step, 1])
    floors = np.zeros((batch, length), np.int64)
    for row in range(round(batch * share)):
        start = int(draw.integers(0, keep))
        while start < length - _WARM_ROWS:
            floors[row, start:] = start
            start += keep + int(draw.integers(0, 4 * keep))
    return floors
