"""The states of a sequence as the graph names them: what one entry is, how long a ring is, in which format entries are kept.

Rings can take back a verified draft block (docs/model.md 11.2), so their lengths follow from the block. Which function reads or writes a
state is graph.py's business; bytes and addresses are the runtime's.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tapeout.dialects.format import INT32, REAL, Number
from tapeout.dialects.types import Blocks, Ring, Tensor
from tapeout.models.deepseek_v41.config import LayerKind, ModelConfig

HISTORY = "history"
LAST = "last"


@dataclass(frozen=True)
class StateSource:
    """A state handle; `format` is the number that real entries are kept in ("q8", "q4main", "q4index", "f32"), None for ids."""

    view: Ring | Blocks
    format: str | None


def state_sources(config: ModelConfig) -> dict[str, StateSource]:
    """Every state by name: the token states, then layer by layer, then the windows of the draft stages."""
    ids = Tensor((1,), INT32)
    states = {LAST: StateSource(Ring(ids, 1), None), HISTORY: StateSource(Ring(ids, history_ring(config)), None)}
    for l in range(config.layers):
        states |= dict(_of_layer(config, l))
    for stage in range(config.draft_stages):
        states[f"mtp.{stage}.attn.window"] = _window(config)
    return states


def history_ring(config: ModelConfig) -> int:
    """Compressed token ids kept: the longest n-gram without its newest token, and room to take back a verified block."""
    return config.text.engram_max_ngram_size - 1 + config.text.dspark_block_size + 1


def _of_layer(config: ModelConfig, l: int) -> Iterator[tuple[str, StateSource]]:
    text, ratio, name = config.text, config.ratio(l), f"layers.{l}.attn"
    yield f"{name}.window", _window(config)
    if config.layer_kind(l) is not LayerKind.FULL:
        return
    if ratio == 2:
        yield f"{name}.compressor", StateSource(Ring(_real(2 * text.head_dim), config.compressor_ring), "f32")
    yield f"{name}.entries", StateSource(Blocks(_real(text.head_dim), ratio), "q4main")
    yield f"{name}.keys", StateSource(Blocks(_real(text.index_head_dim), ratio), "q4index")


def _window(config: ModelConfig) -> StateSource:
    return StateSource(Ring(_real(config.text.head_dim), config.ring_tokens), "q8")


def _real(width: int, number: Number = REAL) -> Tensor:
    return Tensor((width,), number)
