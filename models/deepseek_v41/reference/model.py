"""The whole text model: backbone in chunks of any size, draft step (model spec 1 to 8).

Promises: written only from the model spec, without the dialects; chunking does not change a result beyond the rounding
of sums. Leaves to others: images, sampling, visibility floors of replay, reading checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from . import draft as dspark
from . import engram, sparse
from .arithmetic import Arithmetic
from .attention import (
    AttentionLayer,
    attend,
    joined,
    output_projection,
    query_heads,
    query_latent,
    window_keys,
    window_vectors,
)
from .formats import Array
from .mixer import collapse, run_sublayer, start_streams
from .moe import moe
from .parameters import Parameters
from .rope import Rotation, frequencies
from .state import DraftOutput, LayerRecord, Output, SequenceState, appended
from .topology import LayerRole, settings_of

if TYPE_CHECKING:
    from tapeout.models.deepseek_v41.config import ModelConfig


def argmax(logits: Array) -> int:
    """The lowest id among the largest logits."""
    return int(np.argmax(logits))


@dataclass
class _Chunk:
    """Values that travel down the stack while one chunk is processed (model spec 1.2)."""

    positions: Array
    tau: Array
    selections: dict[int, sparse.Selection] = field(default_factory=dict)
    candidates: Array | None = None
    index_scores: dict[int, Array] = field(default_factory=dict)


class Reference:
    """A plain forward pass of the text model.

    `exact` computes in float64 and rounds nothing, except omega and pos * omega to FP32 (model spec 4.2). `faithful`
    makes the casts of model spec 9.6. Where the two published codes differ (9.7) it follows the released one: attention
    output BF16 before and after the inverse rotation, `wo_a` on BF16, SwiGLU BF16 before `q8`, expert outputs added
    best score first and the shared expert last, raw confidence logit, FP32 head. Three choices of its own: softmax
    probabilities stay unrounded before the product with the values; index weights are not scaled and the index score is
    rounded once (row 6 of section 13); ties go to the lowest id. `accumulate` is the dtype of sums, means, softmax and
    mixers in `faithful`; the distance between its two values is the noise floor.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Array],
        *,
        numerics: Literal["exact", "faithful"] = "exact",
        accumulate: Literal["float32", "float64"] = "float64",
        token_map: Array | None = None,
    ) -> None:
        """`tensors`: checkpoint names without `model.` to arrays in storage dtypes; `token_map`: `[V]` compressed ids."""
        text = config.text
        self._arithmetic = _arithmetic(numerics, accumulate)
        self._settings = settings_of(config)
        self._vocabulary = text.vocab_size
        self._image_token = config.image_token_id
        self._token_map = _checked_token_map(token_map, text.vocab_size, text.engram_compressed_vocab_size)
        self._orders = text.engram_max_ngram_size
        self._engram_pad = int(self._token_map[text.engram_pad_token_id])
        self._hashes = engram.engram_hashes(
            tuple(text.engram_layer_ids),
            text.engram_max_ngram_size,
            text.engram_n_heads,
            text.engram_vocab_size,
            text.engram_compressed_vocab_size,
        )
        self._parameters = Parameters(tensors, self._arithmetic.dtype)
        self._layers = [self._attention_layer(f"layers.{role.number}", role.ratio) for role in self._settings.roles]
        self._stages = [self._attention_layer(dspark.stage_name(i), 0) for i in range(self._settings.stages)]

    def start(self) -> SequenceState:
        """The state of a sequence before its first token."""
        dtype, settings = self._arithmetic.dtype, self._settings
        owners = [role for role in settings.roles if role.owns_entries]
        empty = np.zeros((0, settings.attention.width), dtype)
        names = [f"layers.{role.number}" for role in settings.roles]
        names += [dspark.stage_name(stage) for stage in range(settings.stages)]
        return SequenceState(
            token_ids=np.zeros(0, np.int64),
            windows=dict.fromkeys(names, empty),
            entries={role.number: empty for role in owners},
            index_keys={role.number: np.zeros((0, settings.index.width), dtype) for role in owners},
            carries={role.number: (empty, empty) for role in owners if role.ratio == 2},
        )

    def forward(self, state: SequenceState, token_ids: Sequence[int] | Array, record: bool = False) -> Output:
        """Appends `token_ids` to the sequence and returns the results of these rows; refuses images and unknown ids."""
        ids = self._checked_ids(token_ids)
        start = state.length
        state.token_ids = np.concatenate((state.token_ids, ids))
        chunk = _Chunk(start + np.arange(len(ids)), self._look_back(state, len(ids)))
        streams, pre_mix = start_streams(self._parameters.rows("embed", ids), self._settings.mixer.streams)
        records: dict[int, LayerRecord] = {}
        taps: dict[int, Array] = {}
        for role in self._settings.roles:
            entering = streams, pre_mix
            streams = self._with_engram(streams, role, chunk)
            taps[role.number] = streams
            streams, pre_mix, rows = self._layer(streams, pre_mix, role, state, chunk)
            if record:
                attended, mixed = rows
                records[role.number] = LayerRecord(*entering, *attended, *mixed, chunk.index_scores.get(role.number))
        features = self._features([taps[target] for target in self._settings.targets])
        self._append_draft_windows(features, chunk.positions, state)
        hidden = collapse(streams, pre_mix, self._arithmetic)
        norm = self._parameters.array("norm.weight")
        normed = self._arithmetic.rms(hidden, norm, self._settings.attention.norm_epsilon)
        return Output(
            logits=normed @ self._parameters.matrix("head").T,
            hidden=hidden,
            normed=normed,
            features=features,
            selected={number: selection.rows() for number, selection in chunk.selections.items()},
            candidates=[] if chunk.candidates is None else [np.flatnonzero(row) for row in chunk.candidates],
            layers=records,
        )

    def draft(self, state: SequenceState, golden_token: int, sample: Callable[[Array], int] = argmax) -> DraftOutput:
        """Drafts behind `golden_token`, the token sampled from the last processed row; `state` stays as it is."""
        if state.length == 0:
            raise ValueError(
                "there is nothing to draft from - Reference.draft, state - found a sequence without tokens, expected at "
                "least one processed token - call forward first"
            )
        golden = int(self._checked_ids([golden_token])[0])
        windows = [state.windows[dspark.stage_name(stage)] for stage in range(self._settings.stages)]
        return dspark.draft(windows, state.length, golden, sample, self._parameters, self._stages, self._settings, self._arithmetic)

    def _attention_layer(self, name: str, ratio: int) -> AttentionLayer:
        settings = self._settings
        base, yarn = (settings.compressed_base, settings.yarn) if ratio else (settings.plain_base, None)
        omega = frequencies(settings.rotary_width, base, yarn).astype(np.float32)
        rotation = Rotation(omega, self._arithmetic)
        return AttentionLayer(self._parameters.under(name), rotation, settings.attention, self._arithmetic)

    def _look_back(self, state: SequenceState, count: int) -> Array:
        compressed = self._token_map[state.token_ids[-(count + self._orders) :]]
        return engram.look_back(compressed, count, self._orders, self._engram_pad)

    def _with_engram(self, streams: Array, role: LayerRole, chunk: _Chunk) -> Array:
        if role.engram is None:
            return streams
        rows = engram.hash_rows(chunk.tau, self._hashes[role.engram])
        block = self._layers[role.number].block
        return engram.engram(streams, rows, block, self._settings.attention.norm_epsilon, self._arithmetic)

    def _layer(
        self, streams: Array, pre_mix: Array, role: LayerRole, state: SequenceState, chunk: _Chunk
    ) -> tuple[Array, Array, list[tuple[Array, Array]]]:
        """Both sublayers; returns streams, pre-mix and (input, output) of attention and of the MoE."""
        settings, block = self._settings, self._layers[role.number].block
        seen: list[tuple[Array, Array]] = []

        def watched(x: Array, y: Array) -> Array:
            seen.append((x, y))
            return y

        def attention(x: Array) -> Array:
            return watched(x, self._attention(x, role, state, chunk))

        def experts(x: Array) -> Array:
            return watched(x, moe(x, block, settings.moe, self._arithmetic))

        for kind, sublayer in (("attn", attention), ("ffn", experts)):
            streams, pre_mix = run_sublayer(block, kind, streams, pre_mix, sublayer, settings.mixer, self._arithmetic)
        return streams, pre_mix, seen

    def _attention(self, x: Array, role: LayerRole, state: SequenceState, chunk: _Chunk) -> Array:
        """The steps of model spec 4.9, in its order."""
        layer = self._layers[role.number]
        name, window = f"layers.{role.number}", self._settings.attention.window
        latent = query_latent(x, layer)
        queries = query_heads(latent, chunk.positions, layer)
        vectors = window_vectors(x, chunk.positions, layer)
        keys = window_keys(state.windows[name], vectors, window)
        state.windows[name] = appended(state.windows[name], vectors, window)
        if role.owns_entries:
            self._append_entries(x, role, state)
        if role.selects:
            self._select(x, latent, role, state, chunk)
        if role.kv_source is not None and role.index_source is not None:
            stored, selection = state.entries[role.kv_source], chunk.selections[role.index_source]
            keys = joined(keys, sparse.entry_keys(stored, selection))
        heads = attend(queries, keys, layer.block.array("attn.attn_sink"), self._arithmetic)
        return output_projection(heads, chunk.positions, layer)

    def _append_entries(self, x: Array, role: LayerRole, state: SequenceState) -> None:
        layer, source = self._layers[role.number], role.number
        carry = state.carries.get(source, sparse.no_carry(self._settings.attention.width, self._arithmetic))
        latents, carry = sparse.compress(x, carry, role.ratio, layer)
        if role.ratio == 2:
            state.carries[source] = carry
        first = len(state.entries[source])
        positions = (first + np.arange(len(latents))) * role.ratio
        state.index_keys[source] = appended(state.index_keys[source], sparse.index_keys(latents, positions, layer))
        state.entries[source] = appended(state.entries[source], sparse.entries(latents, positions, layer))

    def _select(self, x: Array, latent: Array, role: LayerRole, state: SequenceState, chunk: _Chunk) -> None:
        settings = self._settings.index
        assert role.kv_source is not None, role
        keys = state.index_keys[role.kv_source]
        visible = (chunk.positions + 1) // role.ratio
        scores = sparse.index_scores(x, latent, chunk.positions, keys, settings, self._layers[role.number])
        scores = sparse.within_visible(scores, visible)
        if role.is_candidate_source:
            chunk.candidates = sparse.candidate_blocks(scores, visible, settings)
        if role.reads_candidates:
            assert chunk.candidates is not None, role
            scores = sparse.within_candidates(scores, chunk.candidates, settings)
        chunk.index_scores[role.number] = scores
        chunk.selections[role.number] = sparse.select(scores, settings.top)

    def _features(self, taps: list[Array]) -> Array:
        means = [self._arithmetic.bf16(streams.mean(axis=1)) for streams in taps]
        return np.concatenate(means, axis=1)

    def _append_draft_windows(self, features: Array, positions: Array, state: SequenceState) -> None:
        settings = self._settings.attention
        projected = dspark.main_features(features, self._parameters, settings.norm_epsilon, self._arithmetic)
        for stage, layer in enumerate(self._stages):
            name = dspark.stage_name(stage)
            vectors = window_vectors(projected, positions, layer)
            state.windows[name] = appended(state.windows[name], vectors, settings.window)

    def _checked_ids(self, token_ids: Sequence[int] | Array) -> Array:
        ids = np.asarray(token_ids, np.int64).reshape(-1)
        if not len(ids):
            raise ValueError("a chunk is empty - Reference.forward, token_ids - found no token, expected at least one - skip the call")
        for index, token in enumerate(ids.tolist()):
            place = f"Reference, token_ids[{index}]"
            if token == self._image_token:
                raise ValueError(
                    f"an image token cannot be computed - {place} - found {token}, the image token, expected text ids - "
                    "the reference covers the text model only, remove the image"
                )
            if not 0 <= token < self._vocabulary:
                raise ValueError(
                    f"a token id is outside the vocabulary - {place} - found {token}, expected 0 to "
                    f"{self._vocabulary - 1} - encode the text with this model's tokenizer"
                )
        return ids


def _arithmetic(numerics: str, accumulate: str) -> Arithmetic:
    dtypes: dict[str, type[np.floating[Any]]] = {"float32": np.float32, "float64": np.float64}
    if numerics not in ("exact", "faithful") or accumulate not in dtypes:
        raise ValueError(
            f"the numerics are unknown - Reference, numerics and accumulate - found '{numerics}' and '{accumulate}', "
            "expected 'exact' or 'faithful' and 'float32' or 'float64' - choose one of each"
        )
    if numerics == "exact" and accumulate != "float64":
        raise ValueError(
            "the exact numerics are float64 everywhere - Reference, accumulate - found 'float32', expected 'float64' - "
            "leave accumulate out or use numerics='faithful'"
        )
    return Arithmetic(numerics == "faithful", dtypes[accumulate])


def _checked_token_map(token_map: Array | None, vocabulary: int, compressed: int) -> Array:
    if token_map is None:
        raise ValueError(
            "the token map is missing - Reference, token_map - found None, expected an integer array of compressed ids - "
            "pass the map of model spec 6.1 (appendix B for the tiny model)"
        )
    ids = np.asarray(token_map)
    fits = ids.shape == (vocabulary,) and np.issubdtype(ids.dtype, np.integer)
    if not fits or ids.min() < 0 or ids.max() >= compressed:
        raise ValueError(
            f"the token map does not fit - Reference, token_map - found {ids.dtype} of shape {ids.shape}, expected "
            f"integers from 0 to {compressed - 1} of shape ({vocabulary},) - build it for this vocabulary"
        )
    return ids.astype(np.int64)
