"""The configuration of a DeepSeek-V4.1 checkpoint: read strictly, then asked for derived facts (docs/model.md, section 2).

`load_config` and `parse_config` return one frozen `ModelConfig` or raise `ConfigError` with every problem of the file. Both
spellings of a file give equal objects. What a layer is, reads and owns is answered here and nowhere else.
"""

from bisect import bisect_right
from collections.abc import Mapping
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from tapeout.models.deepseek_v41.errors import ConfigError, Problem, shown
from tapeout.models.deepseek_v41.json_document import read_object
from tapeout.models.deepseek_v41.paths import is_folder
from tapeout.models.deepseek_v41.rope import rope_frequencies
from tapeout.models.deepseek_v41.rules import Known, Sections, broken_rules
from tapeout.models.deepseek_v41.schema import (
    QuantizationConfig,
    RopeScaling,
    TextConfig,
    TopConfig,
    VisionConfig,
    expectation,
)
from tapeout.models.deepseek_v41.spelling import SECTIONS, Reading, read_spelling

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tapeout.models.deepseek_v41.engram import EngramTable

__all__ = [
    "ConfigError",
    "LayerKind",
    "ModelConfig",
    "QuantizationConfig",
    "RopeScaling",
    "TextConfig",
    "VisionConfig",
    "load_config",
    "parse_config",
    "shipped_config",
]

SHIPPED = ("v4.1-flash", "tiny", "tiny-trained")


class LayerKind(Enum):
    """What a layer owns besides the common set (section 1.2)."""

    SWA = "sliding window only"
    FULL = "own entries, index keys and index queries"
    REINDEX = "own index queries over shared entries"
    REUSE = "shared entries and shared selection"


class ModelConfig(BaseModel):
    """A checked configuration. Layers count from 0; draft stages follow the backbone's layers."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    architectures: tuple[str, ...]
    model_type: str
    dtype: str
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    quantization: QuantizationConfig
    text: TextConfig
    vision: VisionConfig
    ignored: tuple[str, ...] = ()  # key paths that were accepted and have no effect; not part of equality

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelConfig) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @cached_property
    def _identity(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in type(self).model_fields if name != "ignored")

    def canonical(self) -> dict[str, Any]:
        """Returns config.json data in the first spelling, without ignored keys; `parse_config` reads it to an equal object."""
        data = self.model_dump(mode="json", exclude={"ignored"}, exclude_none=False)
        sections = {f"{name}_config": data.pop(name) for name in ("quantization", "text", "vision")}
        return data | sections

    # -- layers

    @property
    def layers(self) -> int:
        """Backbone layers."""
        return self.text.num_hidden_layers

    @property
    def draft_stages(self) -> int:
        return self.text.num_nextn_predict_layers

    def ratio(self, l: int) -> int:
        """Returns the compression ratio of layer `l` (0, 1 or 2); stage `i` of the draft is layer `layers + i`."""
        if not 0 <= l < self.layers + self.draft_stages:
            raise IndexError(f"layer {l} of {self.layers} layers and {self.draft_stages} draft stages")
        return self.text.compress_ratios[l]

    @cached_property
    def n_prefill(self) -> int:
        """The first decoder layer: the first one of ratio 1."""
        return self.text.compress_ratios.index(1)

    def is_decoder(self, l: int) -> bool:
        """Says whether backbone layer `l` runs only for rows that need logits or windows (section 1.3)."""
        return self.n_prefill <= l < self.layers

    def layer_kind(self, l: int) -> LayerKind:
        if self.ratio(l) == 0:
            return LayerKind.SWA
        if l in self.text.kv_source_layer_ids:
            return LayerKind.FULL
        return LayerKind.REINDEX if l in self.text.index_source_layer_ids else LayerKind.REUSE

    def kv_source(self, l: int) -> int | None:
        """Returns the layer whose compressed entries layer `l` reads; None for sliding layers."""
        return self._source(self.text.kv_source_layer_ids, l)

    def index_key_source(self, l: int) -> int | None:
        """Returns the layer whose index keys layer `l` is scored against."""
        return self._source(self.text.index_k_source_layer_ids, l)

    def topk_source(self, l: int) -> int | None:
        """Returns the layer whose selection layer `l` attends to."""
        return self._source(self.text.index_source_layer_ids, l)

    def _source(self, sources: tuple[int, ...], l: int) -> int | None:
        return sources[bisect_right(sources, l) - 1] if self.ratio(l) else None

    @property
    def candidate_source(self) -> int:
        """The layer whose scores choose the candidate blocks (section 4.6)."""
        return self.text.candidate_source_layer_id

    def uses_candidates(self, l: int) -> bool:
        """Says whether layer `l` selects inside candidate blocks: every index source after the candidate source."""
        return l in self.text.index_source_layer_ids and l > self.candidate_source

    # -- state

    @property
    def ring_tokens(self) -> int:
        """Slots of a sliding-window ring: the window, and room to take back a verified block (section 11.2)."""
        return self.text.sliding_window + self.text.dspark_block_size + 1

    @property
    def compressor_ring(self) -> int:
        """Slots of the ratio-2 compressor ring."""
        return 2 + self.text.dspark_block_size

    # -- scales

    @property
    def softmax_scale(self) -> float:
        """head_dim^(-1/2); the attention sink is not scaled by it."""
        return float(self.text.head_dim**-0.5)

    # -- rotary and Engram

    def rope_frequencies(self, ratio: int) -> "NDArray[np.float64]":
        """Returns radians per position of each rotated pair, float64 [R/2] (section 4.2)."""
        return rope_frequencies(self.text, ratio)

    @cached_property
    def engram_tables(self) -> "tuple[EngramTable, ...]":
        """The hash of each Engram layer, in the order of `engram_layer_ids` (section 6.2)."""
        from tapeout.models.deepseek_v41.engram import engram_tables

        return engram_tables(self.text)

    def engram_table(self, l: int) -> "EngramTable | None":
        """Returns the hash of layer `l`, or None when it has no Engram."""
        return next((table for table in self.engram_tables if table.layer == l), None)


def load_config(path: str | Path, *, allow_unknown_keys: bool = False) -> ModelConfig:
    """Reads a configuration file, or the config.json of a folder. Raises `ConfigError` with all its problems."""
    file = Path(path)
    if is_folder(file):
        file = file / "config.json"
    data, problems = read_object(file)
    if problems and not data:
        raise ConfigError(str(file), problems)
    return _parse(data, str(file), allow_unknown_keys, problems)


def parse_config(data: Mapping[str, Any], where: str = "config", *, allow_unknown_keys: bool = False) -> ModelConfig:
    """Checks a configuration given as a mapping, `where` being its name in messages. Raises `ConfigError`."""
    if not isinstance(data, Mapping):
        raise ConfigError(where, [Problem("M103", where, shown(data), "a JSON object", "pass the parsed config.json")])
    return _parse(data, where, allow_unknown_keys, [])


def shipped_config(name: str) -> ModelConfig:
    """Returns a configuration that comes with the package: "v4.1-flash", "tiny" or "tiny-trained"."""
    if name not in SHIPPED:
        problem = Problem("M101", name, "no such configuration", f"one of {', '.join(SHIPPED)}", "choose one of these")
        raise ConfigError(name, [problem])
    return load_config(Path(__file__).parent / f"config-{name}.json")


def _parse(data: Mapping[str, Any], where: str, allow_unknown: bool, earlier: list[Problem]) -> ModelConfig:
    reading = read_spelling(data, allow_unknown)
    problems = [*earlier, *reading.problems]
    invalid: dict[str, frozenset[str]] = {}
    for name, section in SECTIONS.items():
        faults = _section_problems(reading, name, section) if name in reading.values else []
        given_up = reading.unusable if name == "text_config" else set()
        invalid[name] = frozenset(key for key, _ in faults) | given_up
        problems += [problem for _, problem in faults if problem]
    known = {name: Known(reading.values.get(name, {}), invalid[name]) for name in SECTIONS}
    breaches = broken_rules(Sections(known[""], known["text_config"], known["vision_config"]))
    problems += [_respelled(reading, problem) for problem in breaches]
    if problems:
        raise ConfigError(where, problems)
    return _build(reading)


def _build(reading: Reading) -> ModelConfig:
    return ModelConfig(
        **TopConfig.model_validate(reading.values[""]).model_dump(),
        quantization=QuantizationConfig.model_validate(reading.values["quantization_config"]),
        text=TextConfig.model_validate(reading.values["text_config"]),
        vision=VisionConfig.model_validate(reading.values["vision_config"]),
        ignored=tuple(reading.ignored),
    )


def _respelled(reading: Reading, problem: Problem) -> Problem:
    path = reading.respell(problem.path)
    return Problem(problem.code, path, problem.found, problem.expected, problem.fix)


def _section_problems(reading: Reading, name: str, section: type[BaseModel]) -> list[tuple[str, Problem | None]]:
    """Returns (key, problem) for every wrong value of a section; no problem where it has been reported already."""
    try:
        section.model_validate(reading.values[name])
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False)
        return [(str(fault["loc"][0]), _field_problem(reading, name, section, fault)) for fault in faults]
    return []


def _field_problem(reading: Reading, name: str, section: type[BaseModel], fault: Mapping[str, Any]) -> Problem | None:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"])
    path = f"{name}{path}".lstrip(".")
    if reading.is_settled(path):
        return None
    code = _code(fault["type"], path)
    found = "nothing" if code == "M105" else shown(_listed(fault["input"]))
    fix = "add the key" if code == "M105" else "correct the value"
    return Problem(code, reading.respell(path), found, expectation(section, fault["loc"]), fix)


def _code(kind: str, path: str) -> str:
    if path.endswith("rope_type") and kind != "missing":
        return "M116"
    if kind == "missing":
        return "M105"
    if kind == "too_short":
        return "M110"
    return "M107" if kind.endswith("_type") else "M108"


def _listed(value: object) -> object:
    return [_listed(item) for item in value] if isinstance(value, tuple) else value
