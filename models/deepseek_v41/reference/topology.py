"""Which layer owns and which layer reads each shared cache, derived from the configuration (model spec 1.2, 2.1).

Promises: one frozen `LayerRole` per backbone layer, and the settings of each formula in one frozen object per file.
Leaves to others: validation of the configuration, which has happened when a `ModelConfig` exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .attention import AttentionSettings
from .mixer import MixerSettings
from .moe import MoeSettings
from .rope import Yarn
from .sparse import IndexSettings

if TYPE_CHECKING:
    from tapeout.models.deepseek_v41.config import ModelConfig


@dataclass(frozen=True)
class LayerRole:
    """Sources of one backbone layer; `None` where the layer has window attention only."""

    number: int
    ratio: int
    kv_source: int | None
    index_source: int | None
    is_candidate_source: bool
    reads_candidates: bool
    engram: int | None

    @property
    def owns_entries(self) -> bool:
        """Compresses its own input and owns index keys (FULL layers)."""
        return self.kv_source == self.number

    @property
    def selects(self) -> bool:
        """Scores entries and publishes a selection (FULL and REINDEX layers)."""
        return self.index_source == self.number


@dataclass(frozen=True)
class Settings:
    """Everything the forward pass reads from a configuration."""

    roles: tuple[LayerRole, ...]
    attention: AttentionSettings
    index: IndexSettings
    mixer: MixerSettings
    moe: MoeSettings
    draft_moe: MoeSettings
    rotary_width: int
    plain_base: float
    compressed_base: float
    yarn: Yarn
    stages: int
    targets: tuple[int, ...]
    drafts: int
    noise_token: int


def settings_of(config: ModelConfig) -> Settings:
    """Reads the text part of a configuration."""
    text = config.text
    scaling = text.rope_scaling
    return Settings(
        roles=tuple(_role(config, number) for number in range(text.num_hidden_layers)),
        attention=AttentionSettings(text.num_attention_heads, text.head_dim, text.o_groups, text.sliding_window, text.rms_norm_eps),
        index=IndexSettings(
            text.index_n_heads,
            text.index_head_dim,
            text.index_topk,
            text.candidate_topk_blocks,
            text.candidate_block_size,
        ),
        mixer=MixerSettings(text.hc_mult, text.hc_sinkhorn_iters, text.hc_eps, text.rms_norm_eps),
        moe=MoeSettings(text.num_experts_per_tok, text.routed_scaling_factor, text.swiglu_limit),
        draft_moe=MoeSettings(text.dspark_num_experts_per_tok, text.routed_scaling_factor, text.swiglu_limit),
        rotary_width=text.qk_rope_head_dim,
        plain_base=float(text.rope_theta),
        compressed_base=float(text.compress_rope_theta),
        yarn=Yarn(scaling.factor, scaling.original_max_position_embeddings, scaling.beta_fast, scaling.beta_slow),
        stages=text.num_nextn_predict_layers,
        targets=tuple(text.dspark_target_layer_ids),
        drafts=text.dspark_block_size,
        noise_token=text.dspark_noise_token_id,
    )


def _role(config: ModelConfig, number: int) -> LayerRole:
    text = config.text
    ratio = text.compress_ratios[number]
    index_source = _nearest(text.index_source_layer_ids, number) if ratio else None
    return LayerRole(
        number=number,
        ratio=ratio,
        kv_source=_nearest(text.kv_source_layer_ids, number) if ratio else None,
        index_source=index_source,
        is_candidate_source=number == text.candidate_source_layer_id,
        reads_candidates=index_source == number and number > text.candidate_source_layer_id,
        engram=text.engram_layer_ids.index(number) if number in text.engram_layer_ids else None,
    )


def _nearest(sources: Sequence[int], number: int) -> int:
    """`max{s in sources : s <= number}`."""
    return max(source for source in sources if source <= number)
