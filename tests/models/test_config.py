"""Configurations: both spellings, derived facts, and every rule of model spec 2.2 and 2.3 refused by key path."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tapeout.models.deepseek_v41.config import (
    ConfigError,
    LayerKind,
    load_config,
    parse_config,
    shipped_config,
)
from tapeout.models.deepseek_v41.errors import CODES
from tests.models.tiny_configs import FOLDER, respelled, tiny_document

Edit = Callable[[dict[str, Any]], object]


def refused(edit: Edit, spelled: Callable[[dict[str, Any]], dict[str, Any]] = lambda d: d) -> ConfigError:
    document = spelled(tiny_document())
    edit(document)
    with pytest.raises(ConfigError) as caught:
        parse_config(document, "toy")
    return caught.value


def text(**values: object) -> Edit:
    return lambda document: document["text_config"].update(values)


# -- derived facts


def test_roles_of_the_released_layers() -> None:
    config = shipped_config("v4.1-flash")
    kinds = [config.layer_kind(layer) for layer in range(43)]
    assert [l for l, kind in enumerate(kinds) if kind is LayerKind.SWA] == [0, 1, 40, 41, 42]
    assert [l for l, kind in enumerate(kinds) if kind is LayerKind.FULL] == [2, 8, 14, 20]
    assert [l for l, kind in enumerate(kinds) if kind is LayerKind.REINDEX] == [24, 28, 32, 36]
    assert [config.kv_source(l) for l in (0, 1, 2, 7, 8, 19, 20, 39, 40)] == [None, None, 2, 2, 8, 14, 20, 20, None]
    assert [config.index_key_source(l) for l in (1, 13, 24, 39)] == [None, 8, 20, 20]
    assert [config.topk_source(l) for l in (0, 7, 23, 24, 31, 39)] == [None, 2, 20, 24, 28, 36]
    assert [l for l in range(40) if config.uses_candidates(l)] == [24, 28, 32, 36]
    assert (config.n_prefill, config.is_decoder(19), config.is_decoder(20), config.is_decoder(40)) == (
        20,
        False,
        True,
        False,
    )
    assert (config.ring_tokens, config.compressor_ring, config.candidate_source) == (134, 7, 20)
    assert config.softmax_scale == 512**-0.5


def test_roles_of_the_tiny_layers() -> None:
    config = shipped_config("tiny")
    kinds = [config.layer_kind(layer).name for layer in range(8)]
    assert kinds == ["SWA", "FULL", "REUSE", "FULL", "REINDEX", "REUSE", "SWA", "SWA"]
    assert (config.n_prefill, config.ring_tokens, config.compressor_ring) == (3, 22, 7)
    with pytest.raises(IndexError, match="layer 8 of 6 layers and 2 draft stages"):
        config.ratio(8)
    with pytest.raises(IndexError):
        config.ratio(-1)


def test_bookkeeping_keys_are_listed_and_not_compared() -> None:
    document = tiny_document()
    document |= {"auto_map": {}, "_name_or_path": "x", "torch_dtype": "bfloat16"}
    config = parse_config(document)
    assert config == shipped_config("tiny") and hash(config) == hash(shipped_config("tiny"))
    assert {"auto_map", "_name_or_path", "torch_dtype", "text_config.tie_word_embeddings"} <= set(config.ignored)
    changed = tiny_document()
    changed["text_config"]["index_topk"] = 8
    assert parse_config(changed) != config


def test_optional_keys_have_the_defaults_in_force() -> None:
    document = tiny_document()
    document["text_config"] |= {
        "index_k_source_layer_ids": [1, 3],
        "hc_shifted": True,
        "use_fp4_sparse_kv": True,
        "dspark_target_attn_input": True,
    }
    assert parse_config(document) == shipped_config("tiny")


def test_importing_the_config_needs_nothing_heavy() -> None:
    code = (
        "import sys, tapeout.models.deepseek_v41.config, tapeout.models.deepseek_v41.checkpoint,"
        "tapeout.models.deepseek_v41.prompt, tapeout.models.deepseek_v41.token_map;"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'torch_mlir', 'deepseek_recipe')"
        " or m.startswith('tapeout.dialects')])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["tiny", "v4.1-flash"])
def test_the_canonical_form_reads_back(name: str) -> None:
    config = shipped_config(name)
    again = parse_config(json.loads(json.dumps(config.canonical())))
    assert again == config and again.ignored == ()


# -- both spellings (R01 to R05, D01, D02)


def test_second_spelling_gives_an_equal_object() -> None:
    config = parse_config(respelled(tiny_document()))
    assert config == shipped_config("tiny")
    assert [config.ratio(layer) for layer in range(8)] == [0, 2, 2, 1, 1, 1, 0, 0]
    assert config.rope_frequencies(2).tobytes() == shipped_config("tiny").rope_frequencies(2).tobytes()


def test_a_file_with_both_spellings_must_agree() -> None:
    both = tiny_document()
    second = respelled(tiny_document())["text_config"]
    both["text_config"] |= {key: second[key] for key in ("layer_types", "compress_rates", "rope_parameters")}
    assert parse_config(both) == shipped_config("tiny")
    both["text_config"]["compress_ratios"][2] = 1
    both["text_config"]["compress_rope_theta"] = 10000
    both["text_config"]["rope_scaling"]["factor"] = 4
    with pytest.raises(ConfigError) as caught:
        parse_config(both)
    assert [(p.code, p.path) for p in caught.value.problems] == [
        ("M109", "text_config.layer_types[2]"),
        ("M109", "text_config.rope_parameters.compress.rope_theta"),
        ("M109", "text_config.rope_parameters.compress.factor"),
    ]


def test_rotary_type_may_be_spelled_type_and_states_the_rotary_share() -> None:
    document = respelled(tiny_document())
    compress = document["text_config"]["rope_parameters"]["compress"]
    compress["type"] = compress.pop("rope_type")
    compress["partial_rotary_factor"] = 0.5
    assert parse_config(document) == shipped_config("tiny")
    compress["partial_rotary_factor"] = 0.25
    with pytest.raises(ConfigError, match=r"compress\.partial_rotary_factor.*found 0\.25; expected 0\.5"):
        parse_config(document)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("spelled", [lambda d: d, respelled])
def test_another_rotary_type_is_an_error_never_a_fallback(key: str, spelled: Callable[..., Any]) -> None:
    def edit(document: dict[str, Any]) -> None:
        words = document["text_config"]
        place = words["rope_scaling"] if "rope_scaling" in words else words["rope_parameters"]["compress"]
        place.pop("rope_type")
        place[key] = "linear"

    error = refused(edit, spelled)
    place = "rope_scaling" if spelled is not respelled else "rope_parameters.compress"
    problem = error.problems[0]
    assert (problem.code, problem.path) == ("M116", f"text_config.{place}.{key}")
    assert (problem.found, problem.expected) == ("'linear'", "exactly 'yarn'")


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_window_layers_are_not_scaled(key: str) -> None:
    error = refused(lambda d: d["text_config"]["rope_parameters"]["main"].update({"rope_type": "yarn", key: "yarn"}), respelled)
    assert [(p.code, p.path, p.found) for p in error.problems] == [("M116", "text_config.rope_parameters.main.rope_type", "'yarn'")]


def test_a_layer_type_without_rate_is_refused_by_index() -> None:
    error = refused(lambda d: d["text_config"]["layer_types"].__setitem__(3, "linear_attention"), respelled)
    assert [(p.code, p.path) for p in error.problems] == [("M108", "text_config.layer_types[3]")]
    assert "compressed_sparse_attention, full_attention, sliding_attention" in error.problems[0].expected


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("spelled", [lambda d: d, respelled])
def test_ratios_are_never_padded(change: int, spelled: Callable[..., Any]) -> None:
    def edit(document: dict[str, Any]) -> None:
        key = "layer_types" if "layer_types" in document["text_config"] else "compress_ratios"
        ratios = document["text_config"][key]
        document["text_config"][key] = ratios[:-1] if change < 0 else [*ratios, ratios[-1]]

    error = refused(edit, spelled)
    key = "layer_types" if spelled is respelled else "compress_ratios"
    assert [(p.code, p.path) for p in error.problems] == [("M110", f"text_config.{key}")]
    assert error.problems[0].found == f"{8 + change} entries"
    assert error.problems[0].expected == "8, 6 layers and 2 draft stages"


# -- messages


def test_one_message_names_every_problem() -> None:
    def edit(document: dict[str, Any]) -> None:
        words = document["text_config"]
        del words["swiglu_limit"]
        words |= {"num_hidden_layer": 6, "compress_ratios": [0, 2, 7, 1, 1, 1, 0, 0]}
        document["vocab_size"] = 512

    assert str(refused(edit)) == (
        "toy: model configuration refused, 4 problems\n"
        "  [M106] vocab_size: a key is unknown: found 512; expected this key as text_config.vocab_size; "
        "remove it, or allow unknown keys\n"
        "  [M106] text_config.num_hidden_layer: a key is unknown: found 6; "
        "expected a known key; the nearest is num_hidden_layers; remove it, or allow unknown keys\n"
        "  [M105] text_config.swiglu_limit: a required key is missing: found nothing; "
        "expected a finite number above 0 and at most 1e+06; add the key\n"
        "  [M108] text_config.compress_ratios[2]: a value is outside its allowed set or range: found 7; "
        "expected one of 0, 1, 2; correct the value"
    )


def test_unknown_keys_may_be_allowed_and_are_then_listed() -> None:
    document = tiny_document()
    document["text_config"]["brand_new"] = {"a": 1}
    document["text_config"]["rope_scaling"]["mscale"] = 1.0
    with pytest.raises(ConfigError) as caught:
        parse_config(document)
    assert caught.value.codes == ("M106", "M106")
    config = parse_config(document, allow_unknown_keys=True)
    assert config == shipped_config("tiny")
    assert {"text_config.brand_new", "text_config.rope_scaling.mscale"} <= set(config.ignored)


RULES: dict[str, tuple[Edit, str, str]] = {
    "no ratio-1 layer": (
        text(compress_ratios=[0, 2, 2, 2, 2, 2, 0, 0], kv_source_layer_ids=[1], index_source_layer_ids=[1, 3, 4]),
        "M111",
        "text_config.compress_ratios",
    ),
    "a draft stage with a ratio": (
        text(compress_ratios=[0, 2, 2, 1, 1, 1, 0, 1]),
        "M115",
        "text_config.compress_ratios[7]",
    ),
    "descending sources": (text(kv_source_layer_ids=[3, 1]), "M111", "text_config.kv_source_layer_ids[1]"),
    "a source beyond the layers": (
        text(index_source_layer_ids=[1, 3, 6]),
        "M111",
        "text_config.index_source_layer_ids[2]",
    ),
    "a sliding source": (
        text(index_source_layer_ids=[0, 1, 3, 4]),
        "M111",
        "text_config.index_source_layer_ids[0]",
    ),
    "a consumer before any source": (
        text(kv_source_layer_ids=[2, 3], index_source_layer_ids=[2, 3, 4]),
        "M111",
        "text_config.compress_ratios[1]",
    ),
    "a consumer of another ratio": (
        text(compress_ratios=[0, 2, 2, 1, 1, 2, 0, 0]),
        "M111",
        "text_config.compress_ratios[5]",
    ),
    "a gap in a segment": (
        text(compress_ratios=[0, 2, 2, 1, 0, 1, 0, 0], index_source_layer_ids=[1, 3]),
        "M111",
        "text_config.compress_ratios[5]",
    ),
    "a KV source that selects nothing": (
        text(index_source_layer_ids=[3, 4]),
        "M111",
        "text_config.index_source_layer_ids",
    ),
    "index keys apart from their latents": (
        text(index_k_source_layer_ids=[1]),
        "M111",
        "text_config.index_k_source_layer_ids",
    ),
    "sharing across the boundary": (
        text(kv_source_layer_ids=[1, 4], index_source_layer_ids=[1, 4]),
        "M111",
        "text_config.kv_source_layer_ids",
    ),
    "a KV source in the decoder": (
        text(kv_source_layer_ids=[1, 3, 4]),
        "M111",
        "text_config.kv_source_layer_ids[2]",
    ),
    "a candidate source that does not select": (
        text(candidate_source_layer_id=5),
        "M112",
        "text_config.candidate_source_layer_id",
    ),
    "candidates over another ratio": (
        text(candidate_source_layer_id=1),
        "M112",
        "text_config.compress_ratios[3]",
    ),
    "candidate blocks not in eights": (text(candidate_topk_blocks=12), "M112", "text_config.candidate_topk_blocks"),
    "too few candidates": (text(index_topk=58), "M112", "text_config.candidate_topk_blocks"),
    "an expert width FP4 cannot pack": (text(moe_intermediate_size=160), "M113", "text_config.moe_intermediate_size"),
    "a query rank that cannot be fused": (text(q_lora_rank=64), "M113", "text_config.q_lora_rank"),
    "a head without whole scale groups": (text(head_dim=144), "M113", "text_config.head_dim"),
    "heads that do not fill groups": (text(num_attention_heads=5), "M113", "text_config.num_attention_heads"),
    "a narrow Engram head": (text(engram_head_dim=64), "M113", "text_config.engram_head_dim"),
    "one stream": (text(hc_mult=1), "M108", "text_config.hc_mult"),
    "unigrams only": (text(engram_max_ngram_size=1), "M108", "text_config.engram_max_ngram_size"),
    "no token compression": (
        lambda d: d["text_config"].pop("engram_compressed_vocab_size"),
        "M105",
        "text_config.engram_compressed_vocab_size",
    ),
    "more compressed ids than ids": (
        text(engram_compressed_vocab_size=513),
        "M114",
        "text_config.engram_compressed_vocab_size",
    ),
    "an Engram layer in the decoder": (text(engram_layer_ids=[1, 3]), "M114", "text_config.engram_layer_ids[1]"),
    "rows that are not the primes' sum": (
        text(engram_num_embeddings=[1060, 1136]),
        "M114",
        "text_config.engram_num_embeddings[1]",
    ),
    "rows for one layer of two": (text(engram_num_embeddings=[1060]), "M110", "text_config.engram_num_embeddings"),
    "another pad token": (text(engram_pad_token_id=1), "M114", "text_config.engram_pad_token_id"),
    "features from both sides": (
        text(dspark_target_layer_ids=[2, 3, 4]),
        "M115",
        "text_config.dspark_target_layer_ids",
    ),
    "features up to the boundary": (text(dspark_target_layer_ids=[2, 3]), "M115", "text_config.dspark_target_layer_ids"),
    "a noise token beyond the vocabulary": (
        text(dspark_noise_token_id=512),
        "M108",
        "text_config.dspark_noise_token_id",
    ),
    "more active experts than experts": (text(num_experts_per_tok=9), "M108", "text_config.num_experts_per_tok"),
    "more active draft experts than experts": (
        text(dspark_num_experts_per_tok=5),
        "M108",
        "text_config.dspark_num_experts_per_tok",
    ),
    "a YaRN ramp upside down": (
        lambda d: d["text_config"]["rope_scaling"].update(beta_slow=64),
        "M116",
        "text_config.rope_scaling.beta_fast",
    ),
    "a YaRN ramp without length": (
        lambda d: d["text_config"]["rope_scaling"].update(original_max_position_embeddings=5),
        "M116",
        "text_config.rope_scaling.original_max_position_embeddings",
    ),
    "another kernel's index head": (text(index_head_dim=64), "M108", "text_config.index_head_dim"),
    "too many index heads": (text(index_n_heads=33), "M108", "text_config.index_n_heads"),
    "an image token beyond the vocabulary": (lambda d: d.update(image_token_id=512), "M108", "image_token_id"),
    "vision heads that do not divide": (
        lambda d: d["vision_config"].update(num_attention_heads=3),
        "M113",
        "vision_config.hidden_size",
    ),
    "tied embeddings": (text(tie_word_embeddings=True), "M108", "text_config.tie_word_embeddings"),
    "another architecture": (lambda d: d.update(architectures=["DeepseekV4ForCausalLM"]), "M108", "architectures"),
    "two architectures": (lambda d: d["architectures"].append("X"), "M108", "architectures"),
    "another dtype": (lambda d: d.update(dtype="float16"), "M108", "dtype"),
    "another block size": (
        lambda d: d["quantization_config"].update(weight_block_size=[128, 128]),
        "M108",
        "quantization_config.weight_block_size",
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_rule(name: str) -> None:
    edit, code, path = RULES[name]
    problems = [(problem.code, problem.path) for problem in refused(edit).problems]
    assert (code, path) in problems
    assert {code for code, _ in problems} <= set(CODES)


# -- files


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    cases = {
        "absent.json": (None, "M101"),
        "text.json": (b"not json", "M102"),
        "latin.json": (b'{"a": "\xe9"}', "M102"),
        "deep.json": (b"[" * 200_000, "M102"),
        "list.json": (b"[1]", "M103"),
        "digits.json": (b'{"a": ' + b"9" * 5000 + b"}", "M102"),
    }
    for name, (content, code) in cases.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            load_config(tmp_path / name)
        assert caught.value.codes == (code,), name
        assert str(tmp_path / name) in str(caught.value)


def test_a_duplicate_key_is_refused_with_its_path(tmp_path: Path) -> None:
    content = (FOLDER / "config-tiny.json").read_text()
    (tmp_path / "config.json").write_text(content.replace('"head_dim": 128,', '"head_dim": 128, "head_dim": 256,'))
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path)
    assert caught.value.problems[0].code == "M104" and caught.value.problems[0].path == "text_config.head_dim"


def test_nan_and_infinity_are_refused_by_name(tmp_path: Path) -> None:
    content = (FOLDER / "config-tiny.json").read_text()
    content = content.replace('"swiglu_limit": 10.0', '"swiglu_limit": NaN').replace("1e-20", "1e999")
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path)
    found = {problem.path: problem.found for problem in caught.value.problems}
    assert found == {"text_config.swiglu_limit": "nan", "text_config.rms_norm_eps": "inf"}


def test_a_folder_and_its_file_read_alike(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_document()))
    assert load_config(tmp_path) == load_config(tmp_path / "config.json") == shipped_config("tiny")
    with pytest.raises(ConfigError, match=r"expected one of v4\.1-flash, tiny"):
        shipped_config("huge")
    with pytest.raises(ConfigError, match="M103"):
        parse_config([1])  # type: ignore[arg-type]


# -- documentation


def test_every_code_is_documented_with_its_sentence() -> None:
    page = (Path(__file__).parents[2] / "docs" / "model.md").read_text()
    rows = dict(line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith(("| M1", "| M2", "| M3")))
    assert rows == CODES
