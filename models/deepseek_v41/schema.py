"""The sections of a configuration as strict, frozen pydantic models (docs/model.md, section 2).

A field's type carries its range and, as description, the words that an error message uses. Rules that join several keys are in
`rules.py`; both spellings of a key are read in `spelling.py`. Field names are those of the released config.json.
"""

from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import CoreSchema, core_schema

from tapeout.models.deepseek_v41.errors import shown

MOST_INT = 2**31 - 1


def _whole(low: int, high: int = MOST_INT) -> Any:
    """Returns a required whole-number field; booleans and 3.0 are refused by the strict model."""
    return Field(ge=low, le=high, description=f"a whole number from {low} to {high}")


def _number(low: float, high: float, above: bool = False) -> Any:
    words = f"a finite number {'above' if above else 'from'} {low:g} {'and at most' if above else 'to'} {high:g}"
    bounds: dict[str, float] = {"gt" if above else "ge": low, "le": high}
    return Field(**bounds, allow_inf_nan=False, description=words)  # type: ignore[call-overload]


@dataclass(frozen=True)
class Only:
    """A field that takes one value. `Literal` would let true pass for 1, so type and value are both compared."""

    value: object

    @property
    def words(self) -> str:
        return f"exactly {shown(list(self.value) if isinstance(self.value, tuple) else self.value)}"

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def _check(self, found: object) -> object:
        number = type(self.value) is float and type(found) is int
        if not (number or _kinds(found) == _kinds(self.value)) or found != self.value:
            raise ValueError("another value")
        return self.value


def _kinds(value: object) -> list[type]:
    """Returns the types of a value and of its items, so that (32, 32.0) and (32, 32) differ."""
    return [type(value), *(type(item) for item in value)] if isinstance(value, tuple) else [type(value)]


Layers = Annotated[tuple[Annotated[int, _whole(0, 4095)], ...], Field(min_length=1, description="a list of at least one layer number")]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class QuantizationConfig(_Section):
    """How weights are stored: FP8 E4M3 with a UE8M0 scale per 32x32 block, experts in FP4 (section 9)."""

    quant_method: Annotated[str, Only("fp8")]
    activation_scheme: Annotated[str, Only("dynamic")]
    weight_block_size: Annotated[tuple[int, int], Only((32, 32))]
    scale_fmt: Annotated[str, Only("ue8m0")]
    expert_dtype: Annotated[str, Only("fp4")]


class RopeScaling(_Section):
    """YaRN settings; they apply to layers with a compression ratio above 0 only (section 4.2)."""

    rope_type: Annotated[str, Only("yarn")]
    factor: float = _number(1, 4096)
    beta_fast: float = _number(0, 4096, above=True)
    beta_slow: float = _number(0, 4096, above=True)
    original_max_position_embeddings: int = _whole(1)


class TextConfig(_Section):
    """The text path: backbone, Engram tables and DSpark draft stages. Dimensions are elements, windows are tokens."""

    vocab_size: int = _whole(8, 1 << 24)
    hidden_size: int = _whole(1, 1 << 20)
    moe_intermediate_size: int = _whole(1, 1 << 20)
    num_hidden_layers: int = _whole(1, 4096)
    num_attention_heads: int = _whole(1, 4096)
    num_key_value_heads: Annotated[int, Only(1)]
    head_dim: int = _whole(1, 1 << 16)
    qk_rope_head_dim: Annotated[int, Only(64)]
    q_lora_rank: int = _whole(1, 1 << 20)
    o_lora_rank: int = _whole(1, 1 << 20)
    o_groups: int = _whole(1, 4096)
    hidden_act: Annotated[str, Only("silu")]
    swiglu_limit: float = _number(0, 1e6, above=True)
    rms_norm_eps: float = _number(0, 1e-2, above=True)
    attention_bias: Annotated[bool, Only(False)]
    attention_dropout: Annotated[float, Only(0.0)]
    max_position_embeddings: int = _whole(1)
    rope_theta: float = _number(1, 1e12, above=True)
    compress_rope_theta: float = _number(1, 1e12, above=True)
    rope_scaling: RopeScaling
    n_routed_experts: int = _whole(1, 1 << 16)
    n_shared_experts: Annotated[int, Only(1)]
    num_experts_per_tok: int = _whole(1, 1 << 16)
    scoring_func: Annotated[str, Only("sqrtsoftplus")]
    topk_method: Annotated[str, Only("noaux_tc")]
    norm_topk_prob: Annotated[bool, Only(True)]
    routed_scaling_factor: float = _number(0, 1e6, above=True)
    sliding_window: int = _whole(1, 1 << 20)
    compress_ratios: tuple[Annotated[int, Field(ge=0, le=2, description="one of 0, 1, 2")], ...] = Field(
        description="a list of ratios, one of 0, 1, 2 for each layer and draft stage"
    )
    kv_source_layer_ids: Layers
    index_source_layer_ids: Layers
    index_k_source_layer_ids: Layers
    index_n_heads: int = _whole(1, 32)
    index_head_dim: Annotated[int, Only(128)]
    index_topk: int = _whole(1, 1 << 20)
    candidate_source_layer_id: int = _whole(0, 4095)
    candidate_topk_blocks: int = _whole(8, 4096)
    candidate_block_size: int = _whole(1, 16)
    hc_mult: int = _whole(2, 16)
    hc_sinkhorn_iters: int = _whole(1, 1024)
    hc_eps: float = _number(0, 1e-2, above=True)
    hc_shifted: Annotated[bool, Only(True)] = True
    engram_layer_ids: Layers
    engram_num_embeddings: tuple[Annotated[int, _whole(1, 2**62)], ...] = Field(
        min_length=1, description="a list of row counts, one for each Engram layer"
    )
    engram_max_ngram_size: int = _whole(2, 16)
    engram_vocab_size: int = _whole(2)
    engram_n_heads: int = _whole(1, 64)
    engram_head_dim: int = _whole(1, 1 << 16)
    engram_pad_token_id: int = _whole(0)
    engram_compressed_vocab_size: int = _whole(1)
    num_nextn_predict_layers: int = _whole(1, 64)
    dspark_block_size: int = _whole(1, 64)
    dspark_noise_token_id: int = _whole(0)
    dspark_target_layer_ids: Layers
    dspark_markov_rank: int = _whole(1, 1 << 16)
    dspark_n_routed_experts: int = _whole(1, 1 << 16)
    dspark_num_experts_per_tok: int = _whole(1, 1 << 16)
    dspark_target_attn_input: Annotated[bool, Only(True)] = True
    use_fp4_sparse_kv: Annotated[bool, Only(True)] = True


class VisionConfig(_Section):
    """The image encoder (appendix A). Sizes are pixels, except hidden and intermediate widths."""

    num_hidden_layers: int = _whole(1, 1024)
    hidden_size: int = _whole(1, 1 << 16)
    num_attention_heads: int = _whole(1, 1024)
    intermediate_size: int = _whole(1, 1 << 20)
    patch_size: int = _whole(1, 1024)
    rope_theta: float = _number(1, 1e12, above=True)
    downsample_ratio: int = _whole(1, 64)
    max_image_tokens: int = _whole(4, 1 << 20)
    min_pixels: int = _whole(1)
    max_wh_ratio: float | None = Field(ge=1, le=1e6, allow_inf_nan=False, description="null or a finite number from 1 to 1e+06")


class TopConfig(_Section):
    """The keys beside the sections."""

    architectures: Annotated[tuple[str, ...], Only(("DeepseekV41ForCausalLM",))]
    model_type: Annotated[str, Only("deepseek_v41")]
    dtype: Annotated[str, Only("bfloat16")]
    bos_token_id: Annotated[int, Only(0)]
    eos_token_id: Annotated[int, Only(1)]
    pad_token_id: Annotated[int, Only(2)]
    image_token_id: int = _whole(0)


def expectation(section: type[BaseModel], loc: tuple[object, ...]) -> str:
    """Returns the words for what belongs at `loc`, a pydantic error location below `section`."""
    field = section.model_fields.get(str(loc[0])) if loc else None
    if field is None:
        return "a known key"
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
        return expectation(field.annotation, loc[1:]) if len(loc) > 1 else "an object"
    notes = [note for part in get_args(field.annotation) for note in getattr(part, "__metadata__", ())]
    words = [note.words for note in field.metadata if isinstance(note, Only)]
    words += [note.description for note in notes if len(loc) > 1 and getattr(note, "description", None)]
    return words[0] if words else field.description or "a value of the documented type"
