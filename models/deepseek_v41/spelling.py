"""Reads both spellings of a configuration into one set of canonical values (docs/model.md, section 2.3).

Promises: unknown keys and disagreements are problems, bookkeeping keys are listed, and every canonical key remembers how the
file spelled it, so later messages name what the user wrote. Types and ranges are checked by `schema.py`, rules by `rules.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel

from tapeout.models.deepseek_v41.errors import Problem, shown
from tapeout.models.deepseek_v41.schema import QuantizationConfig, RopeScaling, TextConfig, TopConfig, VisionConfig

SECTIONS: dict[str, type[BaseModel]] = {
    "": TopConfig,
    "text_config": TextConfig,
    "vision_config": VisionConfig,
    "quantization_config": QuantizationConfig,
}
BOOKKEEPING = frozenset(("auto_map", "torch_dtype", "_name_or_path", "transformers_version", "use_cache", "initializer_range"))
SECOND_SPELLING = ("layer_types", "compress_rates", "rope_parameters")
SLIDING = "sliding_attention"
_ROTARY = ("rope_theta", "rope_type", "type", "partial_rotary_factor")


@dataclass
class Reading:
    """Canonical values per section, and what was noticed while reading them."""

    allow_unknown: bool
    values: dict[str, dict[str, object]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    spelled: dict[str, str] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)  # canonical paths whose fault is already reported
    unusable: set[str] = field(default_factory=set)  # keys of text_config that rules must not read

    def respell(self, path: str) -> str:
        """Returns the file's own path for a canonical one."""
        for known in sorted(self.spelled, key=len, reverse=True):
            if path == known or path.startswith((f"{known}.", f"{known}[")):
                return self.spelled[known] + path[len(known) :]
        return path

    def is_settled(self, path: str) -> bool:
        """Says whether a canonical path lies at or below one whose fault is already reported."""
        return any(path == known or path.startswith((f"{known}.", f"{known}[")) for known in self.settled)

    def give_up(self, key: str) -> None:
        """Takes a key of text_config out of further checks: what is wrong with it has been said."""
        self.settled.add(f"text_config.{key}")
        self.unusable.add(key)

    def refuse(self, code: str, path: str, found: str, expected: str, fix: str) -> None:
        self.problems.append(Problem(code, path, found, expected, fix))


def read_spelling(data: Mapping[str, object], allow_unknown: bool) -> Reading:
    """Returns the canonical reading of a whole configuration."""
    reading = Reading(allow_unknown)
    reading.values[""] = _known_keys(reading, "", data, [*TopConfig.model_fields, *SECTIONS])
    for name in list(SECTIONS)[1:]:
        section = reading.values[""].pop(name, None)
        _read_section(reading, name, section, present=name in data)
    if "text_config" in reading.values:
        _read_ratios(reading, reading.values["text_config"])
        _read_rotary(reading, reading.values["text_config"])
        _default_index_sources(reading, reading.values["text_config"])
    return reading


def _read_section(reading: Reading, name: str, section: object, present: bool) -> None:
    if not isinstance(section, Mapping):
        found, code = (shown(section), "M107") if present else ("nothing", "M105")
        reading.refuse(code, name, found, "an object", f"take {name} from the released config.json")
        return
    known = [*SECTIONS[name].model_fields, *(SECOND_SPELLING if name == "text_config" else ())]
    reading.values[name] = _known_keys(reading, name, section, known)


def _known_keys(reading: Reading, section: str, raw: Mapping[str, object], known: list[str]) -> dict[str, object]:
    """Returns the members whose keys are known, lists as tuples; the rest is ignored or refused by name."""
    kept: dict[str, object] = {}
    for key, value in raw.items():
        path = f"{section}.{key}" if section else str(key)
        if key in known and key != "":
            kept[key] = _frozen(value)
        elif key in BOOKKEEPING or (key == "model_type" and section):
            reading.ignored.append(path)
        elif key == "tie_word_embeddings":
            _read_tie(reading, path, value)
        elif reading.allow_unknown:
            reading.ignored.append(path)
        else:
            reading.refuse("M106", path, shown(value), _nearest(str(key), known), "remove it, or allow unknown keys")
    return kept


def _read_tie(reading: Reading, path: str, value: object) -> None:
    reading.ignored.append(path)
    if value is not False:
        reading.refuse("M108", path, shown(value), "false", "embedding and head are separate tensors in this model")


def _nearest(key: str, known: list[str]) -> str:
    """Returns the hint for an unknown key: its home in another section, or the nearest name in this one."""
    from difflib import get_close_matches

    homes = [name for name, model in SECTIONS.items() if key in model.model_fields and key not in known]
    if homes:
        return f"this key as {homes[0]}.{key}" if homes[0] else f"the key {key} at the top level"
    close = get_close_matches(key, [name for name in known if name], n=1, cutoff=0.5)
    return f"a known key; the nearest is {close[0]}" if close else "a known key"


def _frozen(value: object) -> object:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


# -- layer_types with compress_rates, in place of compress_ratios


def _read_ratios(reading: Reading, text: dict[str, object]) -> None:
    new = {key: text.pop(key) for key in ("layer_types", "compress_rates") if key in text}
    if not new:
        return
    for key in ("layer_types", "compress_rates"):
        if key not in new:
            fix = "give both, or compress_ratios alone"
            reading.refuse("M105", f"text_config.{key}", "nothing", f"the partner of {next(iter(new))}", fix)
    if "compress_ratios" not in text:
        reading.spelled["text_config.compress_ratios"] = "text_config.layer_types"
    ratios = _ratios_of(reading, new["layer_types"], new["compress_rates"]) if len(new) == 2 else None
    if ratios is None:
        reading.give_up("compress_ratios")
    elif "compress_ratios" in text:
        _compare_ratios(reading, ratios, text["compress_ratios"])
    else:
        text["compress_ratios"] = ratios


def _ratios_of(reading: Reading, types: object, rates: object) -> tuple[object, ...] | None:
    """Returns the ratio of every layer, or None when a problem was reported. A sliding layer needs no rate: it is 0."""
    before = len(reading.problems)
    if not isinstance(types, tuple):
        reading.refuse("M107", "text_config.layer_types", shown(types), "a list of layer type names", "correct it")
    if not isinstance(rates, Mapping) or not rates:
        expected = "an object from layer type name to ratio"
        reading.refuse("M107", "text_config.compress_rates", shown(rates), expected, "correct it")
    if not (isinstance(types, tuple) and isinstance(rates, Mapping) and rates):
        return None
    table = {**rates, SLIDING: 0}
    for name, rate in rates.items():
        allowed = (0,) if name == SLIDING else (1, 2)
        if type(rate) is not int or rate not in allowed:
            expected = " or ".join(map(str, allowed))
            reading.refuse("M108", f"text_config.compress_rates.{name}", shown(rate), expected, "correct the ratio")
    for i, name in enumerate(types):
        if not isinstance(name, str) or name not in table:
            expected = f"one of {', '.join(sorted(map(str, table)))}"
            reading.refuse("M108", f"text_config.layer_types[{i}]", shown(name), expected, "name a type with a rate")
    return tuple(table[name] for name in types) if len(reading.problems) == before else None


def _compare_ratios(reading: Reading, ratios: tuple[object, ...], given: object) -> None:
    if not isinstance(given, tuple):
        return  # the type is refused later, under its own name
    differing = [i for i, pair in enumerate(zip(ratios, given, strict=False)) if not _same(*pair)]
    if differing or len(ratios) != len(given):
        at = f"[{differing[0]}]" if differing else ""
        found = f"ratio {ratios[differing[0]]}" if differing else f"{len(ratios)} entries"
        expected = f"{given[differing[0]]} as in compress_ratios" if differing else f"{len(given)}, as in compress_ratios"
        reading.refuse("M109", f"text_config.layer_types{at}", found, expected, "keep one of the two spellings")
        reading.give_up("compress_ratios")


# -- rope_parameters by role, in place of rope_theta, compress_rope_theta and rope_scaling


def _read_rotary(reading: Reading, text: dict[str, object]) -> None:
    nested = text.pop("rope_parameters", None)
    flat = text.get("rope_scaling")
    if isinstance(flat, Mapping):
        text["rope_scaling"] = _scaling(reading, "text_config.rope_scaling", flat, ())
    if nested is None:
        return
    place = "text_config.rope_parameters"
    if not isinstance(nested, Mapping):
        reading.refuse("M107", place, shown(nested), "an object with the roles main and compress", "correct it")
        nested = {}
        for key in ("rope_theta", "compress_rope_theta", "rope_scaling"):
            reading.give_up(key)
    for role in nested:
        if role not in ("main", "compress"):
            _unknown(reading, f"{place}.{role}", nested[role], "one of the roles main and compress")
    _read_main(reading, text, nested.get("main"), f"{place}.main")
    _read_compress(reading, text, nested.get("compress"), f"{place}.compress")


def _read_main(reading: Reading, text: dict[str, object], role: object, place: str) -> None:
    settings = role if isinstance(role, Mapping) else {}
    for key in settings:
        if key not in _ROTARY:
            _unknown(reading, f"{place}.{key}", settings[key], _nearest(str(key), [*_ROTARY]))
    kind = _kind(reading, place, settings)
    if kind not in (None, "default"):
        fix = "window layers have no scaling in this model"
        reading.refuse("M116", f"{place}.rope_type", shown(kind), "'default' or nothing", fix)
    _check_partial(reading, text, settings, place)
    _adopt(reading, text, "rope_theta", settings, f"{place}.rope_theta")


def _read_compress(reading: Reading, text: dict[str, object], role: object, place: str) -> None:
    settings = role if isinstance(role, Mapping) else {}
    _check_partial(reading, text, settings, place)
    _adopt(reading, text, "compress_rope_theta", settings, f"{place}.rope_theta")
    scaling = _scaling(reading, place, settings, ("rope_theta", "partial_rotary_factor"))
    flat = text.get("rope_scaling")
    if "rope_scaling" not in text:
        reading.spelled["text_config.rope_scaling"] = place
        text["rope_scaling"] = scaling
    elif isinstance(flat, Mapping):
        for key in RopeScaling.model_fields:
            if not _same(flat.get(key), scaling.get(key)):
                _disagree(reading, f"{place}.{key}", scaling.get(key), flat.get(key), "rope_scaling")
                reading.give_up("rope_scaling")


def _scaling(reading: Reading, place: str, raw: Mapping[str, object], beside: tuple[str, ...]) -> dict[str, object]:
    """Returns the YaRN members of `raw` under canonical names; `beside` are keys that are read elsewhere."""
    known = [*RopeScaling.model_fields, "type", *beside]
    for key in raw:
        if key not in known:
            _unknown(reading, f"{place}.{key}", raw[key], _nearest(str(key), known))
    scaling = {key: _frozen(raw[key]) for key in RopeScaling.model_fields if key in raw}
    kind = _kind(reading, place, raw)
    return scaling if kind is None else {**scaling, "rope_type": kind}


def _kind(reading: Reading, place: str, raw: Mapping[str, object]) -> object:
    """Returns the rotary type, spelled `rope_type` or `type`."""
    if "type" in raw and "rope_type" in raw and not _same(raw["type"], raw["rope_type"]):
        _disagree(reading, f"{place}.type", raw["type"], raw["rope_type"], "rope_type")
    if "type" in raw and "rope_type" not in raw and not place.endswith("main"):
        reading.spelled[f"{_canonical(place)}.rope_type"] = f"{place}.type"
    return raw.get("rope_type", raw.get("type"))


def _canonical(place: str) -> str:
    return "text_config.rope_scaling" if place.endswith("compress") else place


def _check_partial(reading: Reading, text: dict[str, object], raw: Mapping[str, object], place: str) -> None:
    """Checks the rotary share of a head, which newer files state beside the dimensions."""
    rotary, head = text.get("qk_rope_head_dim"), text.get("head_dim")
    given = raw.get("partial_rotary_factor")
    if given is None or type(rotary) is not int or type(head) is not int or head < 1:
        return
    if not _same(given, rotary / head):
        _disagree(reading, f"{place}.partial_rotary_factor", given, rotary / head, "qk_rope_head_dim / head_dim")


def _adopt(reading: Reading, text: dict[str, object], key: str, settings: Mapping[str, object], place: str) -> None:
    if key not in text:
        reading.spelled[f"text_config.{key}"] = place
        if "rope_theta" in settings:
            text[key] = _frozen(settings["rope_theta"])
    elif not _same(settings.get("rope_theta"), text[key]):
        _disagree(reading, place, settings.get("rope_theta"), text[key], key)
        reading.give_up(key)


def _unknown(reading: Reading, path: str, value: object, expected: str) -> None:
    if reading.allow_unknown:
        reading.ignored.append(path)
    else:
        reading.refuse("M106", path, shown(value), expected, "remove it, or allow unknown keys")


def _disagree(reading: Reading, path: str, found: object, other: object, name: str) -> None:
    expected = f"{shown(other)} as in {name}"
    reading.refuse("M109", path, shown(found), expected, "keep one of the two spellings")


def _same(one: object, other: object) -> bool:
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def _default_index_sources(reading: Reading, text: dict[str, object]) -> None:
    if "index_k_source_layer_ids" not in text:
        reading.settled.add("text_config.index_k_source_layer_ids")  # its faults are those of kv_source_layer_ids
        if "kv_source_layer_ids" in text:
            text["index_k_source_layer_ids"] = text["kv_source_layer_ids"]
