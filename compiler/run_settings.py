"""Settings of `tapeout run`: each has one rule, and comes from its flag, a settings file, its environment variable, or its default, in that order.

`resolved` gives one frozen object and where each value came from; nothing below reads the environment. All problems are reported together. The
rules are all that is loaded with this file, so that a command's help can quote them.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapeout.compiler.errors import SettingsError
from tapeout.compiler.files import check_output, read_text
from tapeout.runtime.device_names import DEVICES
from tapeout.runtime.errors import MOST_SHOWN

if TYPE_CHECKING:
    from tapeout.runtime.llm import LLM
    from tapeout.runtime.reuse import CacheOptions

PREFIX = "TAPEOUT_RUN_"
MOST = 2**31 - 1
WORDS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class Rule:
    """What a setting may be, in words, and the value of it that a text (of a flag or the environment) or a JSON value stands for, or ValueError."""

    expected: str
    value: Callable[[Any], Any]
    default: Any = None


def _whole(least: int, most: int) -> Callable[[Any], int]:
    def read(given: Any) -> int:
        if isinstance(given, str) and given.isascii() and given.isdigit():
            given = int(given)
        if type(given) is not int or not least <= given <= most:
            raise ValueError
        return given

    return read


def _one_of(*names: str) -> Callable[[Any], str]:
    def read(given: Any) -> str:
        if isinstance(given, bool) or str(given) not in names:
            raise ValueError
        return str(given)

    return read


def _milliseconds(given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, str | int | float):
        raise ValueError
    try:
        value = float(given)
    except OverflowError:  # a whole number that no float holds
        raise ValueError from None
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def _fact(given: Any) -> bool:
    if type(given) is bool:
        return given
    if not isinstance(given, str) or given.lower() not in WORDS:
        raise ValueError
    return WORDS[given.lower()]


def _path(given: Any) -> Path:
    if not isinstance(given, str | Path) or not str(given) or "\0" in str(given):
        raise ValueError
    os.fsencode(given)  # raises UnicodeEncodeError, a ValueError, for what no path can hold
    return Path(given)


def _number(least: int, most: int = MOST, default: int | None = None) -> Rule:
    return Rule(f"a whole number from {least} to {most}", _whole(least, most), default)


RULES: dict[str, Rule] = {
    "workers": _number(1, 256),
    "device": Rule(f"one of {', '.join(DEVICES)}", _one_of(*DEVICES)),
    "cache_blocks": _number(2),
    "chunk_tokens": _number(1),
    "step_ms": Rule("a finite number of milliseconds above 0", _milliseconds),
    "asynchronous": Rule("true or false", _fact),
    "spec": Rule("off, auto, or 1 to 5", _one_of("off", "auto", "1", "2", "3", "4", "5"), "off"),
    "replay": Rule("off, mask or compact", _one_of("off", "mask", "compact"), "off"),
    "keep": _number(1),
    "cache": Rule("true or false", _fact, False),
    "cache_dir": Rule("the path of a folder", _path),
    "snapshot_mib": _number(1, default=256),
    "cache_dir_mib": _number(1, default=16_384),
}


@dataclass(frozen=True)
class Settings:
    """The settings of a run by name, and the source of each: flag, file, environment or default. `trace`, `metrics`, `record`: files to write."""

    values: Mapping[str, Any] = field(default_factory=lambda: {name: rule.default for name, rule in RULES.items()})
    sources: Mapping[str, str] = field(default_factory=lambda: dict.fromkeys(RULES, "default"))
    trace: Path | None = None
    metrics: Path | None = None
    record: Path | None = None

    def loaded(self, artifact: Path, weights: Path) -> "LLM":
        """The engine of these settings. Raises TapeoutError or an InputError of `models`."""
        from tapeout.runtime.llm import LLM

        own = self.values
        replay, spec = own["replay"], own["spec"]
        passed = {name: own[name] for name in ("workers", "device", "cache_blocks", "chunk_tokens", "step_ms", "asynchronous", "keep")}
        return LLM(artifact, weights, drafts=spec != "off", plan="ours" if spec == "auto" else "all", cache=self._cache(),
                   replay="exact" if replay == "off" else replay, trace=self.trace is not None, record_drafts=self.record is not None,
                   **passed)  # fmt: skip

    def _cache(self) -> "CacheOptions | None":
        from tapeout.runtime.reuse import MIB, CacheOptions

        own = self.values
        if not own["cache"] and own["cache_dir"] is None:
            return None
        return CacheOptions(own["snapshot_mib"] * MIB, folder=own["cache_dir"], folder_bytes=own["cache_dir_mib"] * MIB)

    def check_files(self) -> None:
        """Raises FileRefused for a file that cannot be written."""
        for option, path in self.files:
            check_output(path, option)

    @property
    def files(self) -> list[tuple[str, Path]]:
        """Options that name a file to write about the run, and their files."""
        named = (("--trace", self.trace), ("--metrics", self.metrics), ("--record", self.record))
        return [(option, path) for option, path in named if path is not None]

    @property
    def sentence(self) -> str:
        """Every setting that is not the default, with its value and source, for people."""
        shown = [f"{name} {_shown(self.values[name])} ({self.sources[name]})" for name in RULES if self.sources[name] != "default"]
        return f"settings: {', '.join(shown) or 'all by default'}"


def resolved(flags: Mapping[str, Any], file: Path | None, environment: Mapping[str, str], **files: Path | None) -> Settings:
    """The settings of a run. `flags`: what was given on the command line, None for what was not. Raises SettingsError or FileRefused."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    problems: list[str] = []
    given = [("flag", {name: value for name, value in flags.items() if value is not None}), ("file", _of_file(file, problems)),
             ("environment", _of_environment(environment, problems))]  # fmt: skip
    for name, rule in RULES.items():
        source, value = next(((source, some[name]) for source, some in given if name in some), ("default", rule.default))
        try:
            values[name] = value if source == "default" else rule.value(value)
        except ValueError:
            problems.append(f"{_place(name, source, file)}: found {_shown(value)}, expected {rule.expected}")
        sources[name] = source
    if "keep" in values and sources["keep"] == "flag" and values.get("replay") == "off":  # from elsewhere it may wait for a run with replay
        problems.append(f"--keep: found {_shown(flags['keep'])} without replay, expected --replay mask or compact beside it")
    if files.get("record") is not None and values.get("spec") == "off":
        problems.append(f"--record: found {files['record']} without drafts, expected --spec auto or 1 to 5 beside it")
    if problems:
        raise SettingsError(problems)
    return Settings(values, sources, **files)


def _of_file(file: Path | None, problems: list[str]) -> dict[str, Any]:
    if file is None:
        return {}

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        problems.extend(f"--settings {file}: found key {name} twice, expected each key once" for name in sorted(set(names)) if names.count(name) > 1)
        return dict(pairs)

    try:
        found = json.loads(read_text(file, "--settings"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        problems.append(f"--settings {file}: found no JSON ({error}), expected one object")
        return {}
    if not isinstance(found, dict):
        problems.append(f"--settings {file}: found {type(found).__name__}, expected one object")
        return {}
    problems += [f"--settings {file}, {name}: found an unknown key, expected {', '.join(RULES)}" for name in sorted(set(found) - set(RULES))]
    return found


def _of_environment(environment: Mapping[str, str], problems: list[str]) -> dict[str, str]:
    """Variables with our prefix; one that is no setting is a mistake, not somebody else's."""
    known = {f"{PREFIX}{name.upper()}": name for name in RULES}
    strange = sorted(name for name in environment if name.startswith(PREFIX) and name not in known)
    problems += [f"environment, {name}: found an unknown variable, expected {', '.join(known)}" for name in strange]
    return {known[name]: value for name, value in environment.items() if name in known}


def _place(name: str, source: str, file: Path | None) -> str:
    if source == "flag":
        return f"--{name.replace('_', '-')}"
    return f"--settings {file}, {name}" if source == "file" else f"environment, {PREFIX}{name.upper()}"


def _shown(value: object) -> str:
    text = "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return (text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…") or "an empty text"
