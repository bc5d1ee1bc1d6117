"""Rules that join several keys of a configuration (docs/model.md, section 2.2).

A rule yields a problem for every breach. It reads values through `Known`, which stops the rule when a value it needs is absent
or already refused, so one wrong key never hides the breaches of unrelated ones. Ranges of single keys are in `schema.py`.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tapeout.models.deepseek_v41.engram_primes import layer_primes
from tapeout.models.deepseek_v41.errors import Problem
from tapeout.models.deepseek_v41.rope import yarn_corners

MOST_COLUMNS = 1 << 14  # Engram columns over all layers; the released model has 48


class _Unavailable(Exception):
    """A rule needs a value that is missing or refused; ends that rule only."""


@dataclass(frozen=True)
class Known:
    """The usable values of one section; asking for another one ends the rule."""

    values: Mapping[str, Any]
    invalid: frozenset[str]

    def __getattr__(self, key: str) -> Any:
        if key in self.invalid or key not in self.values:
            raise _Unavailable(key)
        return self.values[key]


@dataclass(frozen=True)
class Sections:
    """The usable values of a configuration."""

    top: Known
    text: Known
    vision: Known


def broken_rules(sections: Sections) -> list[Problem]:
    """Returns every breach, with canonical key paths, in the order of `_RULES`."""
    problems: list[Problem] = []
    for rule in _RULES:
        try:
            problems.extend(rule(sections))
        except _Unavailable:
            continue
    return problems


def _text(code: str, key: str, found: object, expected: str, fix: str) -> Problem:
    return Problem(code, f"text_config.{key}", str(found), expected, fix)


# -- lists and layers


def _ratio_length(s: Sections) -> Iterator[Problem]:
    layers, stages, ratios = s.text.num_hidden_layers, s.text.num_nextn_predict_layers, s.text.compress_ratios
    if len(ratios) != layers + stages:
        expected = f"{layers + stages}, {layers} layers and {stages} draft stages"
        yield _text("M110", "compress_ratios", f"{len(ratios)} entries", expected, "short lists are never padded")


def _ratios(s: Sections) -> tuple[int, ...]:
    """Returns the backbone's ratios; ends the rule when the list has the wrong length."""
    ratios: tuple[int, ...] = s.text.compress_ratios
    if len(ratios) != s.text.num_hidden_layers + s.text.num_nextn_predict_layers:
        raise _Unavailable("compress_ratios")
    return ratios[: s.text.num_hidden_layers]


def _boundary(s: Sections) -> int:
    """Returns the first ratio-1 layer, where the decoder begins."""
    ratios = _ratios(s)
    if 1 not in ratios:
        raise _Unavailable("compress_ratios")
    return ratios.index(1)


def _draft_ratios(s: Sections) -> Iterator[Problem]:
    layers = len(_ratios(s))
    for i, ratio in enumerate(s.text.compress_ratios[layers:], layers):
        if ratio != 0:
            yield _text("M115", f"compress_ratios[{i}]", ratio, "0", "draft stages have a sliding window only")


def _has_boundary(s: Sections) -> Iterator[Problem]:
    if 1 not in _ratios(s):
        yield _text("M111", "compress_ratios", "no layer of ratio 1", "at least one", "the decoder begins at a ratio-1 layer")


_LAYER_LISTS = (
    "kv_source_layer_ids",
    "index_k_source_layer_ids",
    "index_source_layer_ids",
    "engram_layer_ids",
    "dspark_target_layer_ids",
)


def _layer_lists(s: Sections) -> Iterator[Problem]:
    for key in _LAYER_LISTS:
        try:
            ids, layers = getattr(s.text, key), s.text.num_hidden_layers
        except _Unavailable:
            continue
        if key == "index_k_source_layer_ids" and ids is s.text.values.get("kv_source_layer_ids"):
            continue  # absent in the file, and so the same list
        for i, layer in enumerate(ids):
            if layer >= layers:
                yield _text("M111", f"{key}[{i}]", layer, f"a layer below {layers}", "correct the list")
            elif i and layer <= ids[i - 1]:
                expected = f"a layer above {ids[i - 1]}"
                yield _text("M111", f"{key}[{i}]", layer, expected, "list layers once each, in ascending order")


def _ids(s: Sections, key: str) -> tuple[int, ...]:
    """Returns a layer list that `_layer_lists` accepts; else ends the rule."""
    ids: tuple[int, ...] = getattr(s.text, key)
    if list(ids) != sorted(set(ids)) or ids[-1] >= s.text.num_hidden_layers:
        raise _Unavailable(key)
    return ids


# -- topology


def _sources_compress(s: Sections) -> Iterator[Problem]:
    ratios = _ratios(s)
    for key in ("kv_source_layer_ids", "index_source_layer_ids"):
        for i, layer in enumerate(_ids(s, key)):
            if ratios[layer] == 0:
                expected = "a layer with a ratio above 0"
                yield _text("M111", f"{key}[{i}]", f"{layer}, of ratio 0", expected, "a sliding layer has no entries")


def _consumers(s: Sections) -> Iterator[Problem]:
    """Every compressed layer reads the nearest source before it, of its own ratio, with no sliding layer in between."""
    ratios, sources = _ratios(s), _ids(s, "kv_source_layer_ids")
    for layer, ratio in enumerate(ratios):
        if ratio == 0:
            continue
        place = bisect_right(sources, layer)
        source = sources[place - 1] if place else None
        path = f"compress_ratios[{layer}]"
        if source is None:
            fix = "make it a source in kv_source_layer_ids"
            yield _text("M111", path, "a compressed layer before any KV source", f"a source at or before {layer}", fix)
        elif 0 in ratios[source:layer]:
            expected = f"compressed layers only from source {source} on"
            yield _text("M111", path, "a sliding layer between source and consumer", expected, "segments are contiguous")
        elif ratios[source] != ratio:
            expected = f"{ratios[source]}, the ratio of its KV source {source}"
            yield _text("M111", path, ratio, expected, "a consumer shares its source's entries")


def _refinement(s: Sections) -> Iterator[Problem]:
    kv, index = _ids(s, "kv_source_layer_ids"), _ids(s, "index_source_layer_ids")
    if _ids(s, "index_k_source_layer_ids") != kv:
        found, fix = list(_ids(s, "index_k_source_layer_ids")), "index keys derive from the source's own latents"
        yield _text("M111", "index_k_source_layer_ids", found, f"{list(kv)}, as kv_source_layer_ids", fix)
    missing = [layer for layer in kv if layer not in index]
    if missing:
        fix = "a selection may not outlive the entries it points to"
        yield _text("M111", "index_source_layer_ids", f"no {missing}", "every KV source as index source too", fix)


def _sharing_boundary(s: Sections) -> Iterator[Problem]:
    boundary, kv = _boundary(s), _ids(s, "kv_source_layer_ids")
    if boundary not in kv:
        expected = f"the first ratio-1 layer {boundary} as source"
        yield _text("M111", "kv_source_layer_ids", f"no {boundary}", expected, "sharing does not cross the boundary")
    for i, layer in enumerate(kv):
        if layer > boundary:
            expected = f"no source behind the boundary layer {boundary}"
            yield _text("M111", f"kv_source_layer_ids[{i}]", layer, expected, "the decoder produces no entries of its own")


def _candidate_source(s: Sections) -> Iterator[Problem]:
    source, index, ratios = s.text.candidate_source_layer_id, _ids(s, "index_source_layer_ids"), _ratios(s)
    if source not in index:
        expected = f"one of {list(index)}"
        yield _text("M112", "candidate_source_layer_id", source, expected, "the source ranks blocks by its own scores")
        return
    for layer in index:
        if layer > source and ratios[layer] != ratios[source]:
            found, expected = f"ratio {ratios[layer]}", f"{ratios[source]}, as the candidate source {source}"
            yield _text("M112", f"compress_ratios[{layer}]", found, expected, "candidate blocks count its entries")


def _candidate_counts(s: Sections) -> Iterator[Problem]:
    blocks, size, kept = s.text.candidate_topk_blocks, s.text.candidate_block_size, s.text.index_topk
    if blocks % 8:
        yield _text("M112", "candidate_topk_blocks", blocks, "a multiple of 8", "round it up")
    if (blocks - 1) * size + 1 < kept:  # the newest block may hold one entry only (section 4.6)
        found, expected = f"{blocks} blocks of {size}", f"at least {kept} visible entries, the index_topk"
        yield _text("M112", "candidate_topk_blocks", found, expected, "raise the blocks or lower index_topk")


# -- widths


def _widths(s: Sections) -> Iterator[Problem]:
    """Divisors are those of the storage formats: 128 for packed FP4 and fused FP8 rows, 32 for scale groups."""
    fixed = (
        ("hidden_size", 128, "experts pack FP4 along it"),
        ("moe_intermediate_size", 128, "experts pack FP4 along it"),
        ("q_lora_rank", 128, "its rows share one product with wkv"),
        ("head_dim", 32, "window entries have a scale per 32"),
        ("o_lora_rank", 32, "each group of wo_a ends on a scale block"),
        ("engram_head_dim", 128, "table rows are fetched in whole lines"),
    )
    for key, divisor, reason in fixed:
        try:
            width = getattr(s.text, key)
        except _Unavailable:
            continue
        if width % divisor:
            yield _text("M113", key, width, f"a multiple of {divisor}", reason)


def _heads(s: Sections) -> Iterator[Problem]:
    heads, groups, head, rotary = s.text.num_attention_heads, s.text.o_groups, s.text.head_dim, s.text.qk_rope_head_dim
    if heads % groups:
        expected = f"a multiple of o_groups, {groups}"
        yield _text("M113", "num_attention_heads", heads, expected, "every output group has as many heads")
    if head < rotary:
        yield _text("M113", "head_dim", head, f"at least qk_rope_head_dim, {rotary}", "the tail of a head is rotated")


def _experts(s: Sections) -> Iterator[Problem]:
    for active, total in (
        ("num_experts_per_tok", "n_routed_experts"),
        ("dspark_num_experts_per_tok", "dspark_n_routed_experts"),
    ):
        try:
            count, most = getattr(s.text, active), getattr(s.text, total)
        except _Unavailable:
            continue
        if count > most:
            yield _text("M108", active, count, f"at most {total}, {most}", "a token uses an expert once")


def _rotary(s: Sections) -> Iterator[Problem]:
    scaling = s.text.rope_scaling
    fast, slow = scaling["beta_fast"], scaling["beta_slow"]
    if fast <= slow:
        yield _text("M116", "rope_scaling.beta_fast", fast, f"above beta_slow, {slow}", "the two bound the blend")
        return
    original = scaling["original_max_position_embeddings"]
    low, high = yarn_corners(s.text.qk_rope_head_dim, s.text.compress_rope_theta, fast, slow, original)
    if low >= high:
        key, found = "rope_scaling.original_max_position_embeddings", f"{original}, which blends over {low}…{high}"
        yield _text("M116", key, found, "a length that leaves a ramp", "correct the YaRN settings")


# -- Engram, draft, ids, vision


def _engram_layers(s: Sections) -> Iterator[Problem]:
    boundary = _boundary(s)
    for i, layer in enumerate(_ids(s, "engram_layer_ids")):
        if layer >= boundary:
            expected = f"a layer below the boundary {boundary}"
            yield _text("M114", f"engram_layer_ids[{i}]", layer, expected, "Engram layers lie in the encoder")


def _engram_rows(s: Sections) -> Iterator[Problem]:
    layers, rows = _ids(s, "engram_layer_ids"), s.text.engram_num_embeddings
    if len(rows) != len(layers):
        expected = f"{len(layers)}, one for each Engram layer"
        yield _text("M110", "engram_num_embeddings", f"{len(rows)} entries", expected, "correct the list")
        return
    orders, heads = s.text.engram_max_ngram_size - 1, s.text.engram_n_heads
    if len(layers) * orders * heads > MOST_COLUMNS:
        expected = f"at most {MOST_COLUMNS} over all layers"
        yield _text("M114", "engram_n_heads", f"{len(layers) * orders * heads} hash columns", expected, "lower it")
        return
    primes = layer_primes(len(layers), orders, heads, s.text.engram_vocab_size)
    for i, layer in enumerate(primes):
        total = sum(sum(order) for order in layer)
        if rows[i] != total:
            expected = f"{total}, the sum of the layer's {orders * heads} primes"
            yield _text("M114", f"engram_num_embeddings[{i}]", rows[i], expected, "correct it or engram_vocab_size")


def _engram_ids(s: Sections) -> Iterator[Problem]:
    pad, compressed, vocabulary = (
        s.text.engram_pad_token_id,
        s.text.engram_compressed_vocab_size,
        s.text.vocab_size,
    )
    if compressed > vocabulary:
        expected = f"at most vocab_size, {vocabulary}"
        yield _text("M114", "engram_compressed_vocab_size", compressed, expected, "compression never adds ids")
    if pad != s.top.pad_token_id:
        yield _text("M114", "engram_pad_token_id", pad, f"pad_token_id, {s.top.pad_token_id}", "use one pad token")


def _draft_targets(s: Sections) -> Iterator[Problem]:
    boundary, targets = _boundary(s), _ids(s, "dspark_target_layer_ids")
    if targets[0] < boundary <= targets[-1]:
        expected = f"all below or all from the boundary {boundary} on"
        yield _text("M115", "dspark_target_layer_ids", list(targets), expected, "features come from one side")


def _token_ids(s: Sections) -> Iterator[Problem]:
    for section, prefix, key in ((s.top, "", "image_token_id"), (s.text, "text_config.", "dspark_noise_token_id")):
        try:
            token, vocabulary = getattr(section, key), s.text.vocab_size
        except _Unavailable:
            continue
        if token >= vocabulary:
            expected = f"below vocab_size, {vocabulary}"
            yield Problem("M108", prefix + key, str(token), expected, "an id is a row of the embedding")


def _vision_heads(s: Sections) -> Iterator[Problem]:
    width, heads = s.vision.hidden_size, s.vision.num_attention_heads
    if width % (4 * heads):
        expected = f"a multiple of 4 x num_attention_heads, {4 * heads}"
        fix = "a head rotates pairs by row and by column"
        yield Problem("M113", "vision_config.hidden_size", str(width), expected, fix)


_RULES: tuple[Callable[[Sections], Iterator[Problem]], ...] = (
    _ratio_length,
    _has_boundary,
    _draft_ratios,
    _layer_lists,
    _sources_compress,
    _consumers,
    _refinement,
    _sharing_boundary,
    _candidate_source,
    _candidate_counts,
    _widths,
    _heads,
    _experts,
    _rotary,
    _engram_layers,
    _engram_rows,
    _engram_ids,
    _draft_targets,
    _token_ids,
    _vision_heads,
)
