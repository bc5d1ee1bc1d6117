"""Embedding, head and Markov head of the random model, made to fit together.

Left to chance, the two best of 512 logits lie close, and a draft agrees with the backbone once in 512 times. Here rows of the
head differ in norm, which keeps the best two apart; and the head is mostly of the Markov head's rank, so that the Markov head
can hold the same preference of one token after another and a fair share of the drafts is right. Each text token has a favourite
successor, far ahead of the rest: greedy tokens then survive the noise of another order of sums at nearly every position.
"""

import zlib

import numpy as np
from numpy.typing import NDArray

from tapeout.models.deepseek_v41.config import ModelConfig
from tapeout.models.deepseek_v41.tensors import TensorSpec

Floats = NDArray[np.float32]

LOGIT_SPREAD = 4.0  # logits per unit of a head row: its random part spreads them by 4, its favourite by more
ROW_SPREAD = 0.12  # standard deviation of a head row's log norm
SILENT = 0.2  # norm factor of the head rows of ids that stand for no text
FAVOUR = 2.0  # how much a row of the head leans to the token it follows, against its random part of norm about 0.5
OWN_SHARE = 0.1  # of the head that the Markov head does not have
FIRST_TEXT, LAST_TEXT = 3, 258  # the ids of bytes 0 and 255, see `tokenizer.py`
EMBED_NORM = 2.0  # of an embedding's element; sublayers add about 0.2 each
NOISE_NORM = 3.0  # of the noise token, so that draft sublayers move it little


def draw_for(seed: int, name: str) -> np.random.Generator:
    """Returns the generator of one tensor."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def shaped_rows(config: ModelConfig, spec: TensorSpec, seed: int) -> Floats | None:
    """Returns embed, head or a Markov table, float32 of the table's shape; None for any other tensor."""
    name = spec.name
    if name == "embed.weight":
        return _embed(config, seed)
    if name == "head.weight":
        own = draw_for(seed, name).standard_normal(spec.shape, np.float32) / np.sqrt(np.float32(spec.shape[1]))
        shared = _outputs(config, seed) @ _inputs(config, seed)
        return np.asarray(_norms(config, seed) * (shared + np.float32(OWN_SHARE) * own))
    if name.endswith("markov_head.embed.weight"):
        return np.asarray(_embed(config, seed) @ _inputs(config, seed).T / np.float32(EMBED_NORM))
    if name.endswith("markov_head.head.weight"):
        return np.asarray(_norms(config, seed) * _outputs(config, seed))
    return None


def _inputs(config: ModelConfig, seed: int) -> Floats:
    """Returns the shared factor on the hidden side, [rank, H]; it maps hidden values near 1 to values near 1."""
    shape = (config.text.dspark_markov_rank, config.text.hidden_size)
    return np.asarray(draw_for(seed, "head inputs").standard_normal(shape, np.float32) / np.sqrt(np.float32(shape[1])))


def _outputs(config: ModelConfig, seed: int) -> Floats:
    """Returns the shared factor on the vocabulary side, [V, rank]: a random row, and for text the direction of its predecessor."""
    shape = (config.text.vocab_size, config.text.dspark_markov_rank)
    rows = draw_for(seed, "head outputs").standard_normal(shape, np.float32) / np.sqrt(np.float32(shape[1]))
    text = slice(FIRST_TEXT, min(LAST_TEXT + 1, shape[0]))
    seen = (_embed(config, seed) @ _inputs(config, seed).T)[text]
    before = draw_for(seed, "predecessors").permutation(len(seen))
    rows[text] += np.float32(FAVOUR) * (seen / np.linalg.norm(seen, axis=1, keepdims=True))[before]
    return np.asarray(rows)


def _norms(config: ModelConfig, seed: int) -> Floats:
    """Returns the norm of every head row, [V, 1]."""
    normal = draw_for(seed, "head norms").standard_normal((config.text.vocab_size, 1), np.float32)
    rows = np.float32(LOGIT_SPREAD) * np.exp(np.float32(ROW_SPREAD) * normal)
    rows[[config.bos_token_id, config.pad_token_id]] *= SILENT
    rows[LAST_TEXT + 1 :] *= SILENT
    return np.asarray(rows)


def _embed(config: ModelConfig, seed: int) -> Floats:
    """Returns the embedding, [V, H]; the head's shared factor does not see the noise token."""
    shape = (config.text.vocab_size, config.text.hidden_size)
    rows = draw_for(seed, "embed.weight").standard_normal(shape, np.float32)
    noise, factor = config.text.dspark_noise_token_id, _inputs(config, seed)
    if shape[1] > factor.shape[0]:
        seen = np.linalg.lstsq(factor.T, rows[noise], rcond=None)[0]
        rows[noise] -= factor.T @ seen
        rows[noise] *= NOISE_NORM
    return np.asarray(np.float32(EMBED_NORM) * rows)
