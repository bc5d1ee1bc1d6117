"""Settings of a run: flag before file before environment before default, every rule, all problems together, unknown names refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from tapeout.compiler.commands import main
from tapeout.compiler.errors import SettingsError
from tapeout.compiler.run_settings import PREFIX, RULES, Settings, resolved


def written(tmp_path: Path, data: object) -> Path:
    path = tmp_path / "settings.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_every_setting_has_a_default() -> None:
    assert resolved({}, None, {}) == Settings()
    assert Settings().sentence == "settings: all by default" and set(Settings().values) == set(RULES)


def test_the_order_of_sources(tmp_path: Path) -> None:
    file = written(tmp_path, {"workers": 3, "keep": 40, "spec": "auto"})
    environment = {"TAPEOUT_RUN_WORKERS": "4", "TAPEOUT_RUN_KEEP": "50", "TAPEOUT_RUN_CACHE": "true", "TAPEOUT_RUN_STEP_MS": "2.5", "HOME": "/x"}
    found = resolved({"workers": 2, "keep": None}, file, environment)
    assert {name: (found.values[name], found.sources[name]) for name in RULES if found.sources[name] != "default"} == {
        "workers": (2, "flag"), "keep": (40, "file"), "spec": ("auto", "file"), "cache": (True, "environment"), "step_ms": (2.5, "environment"),
    }  # fmt: skip
    assert found.sentence == "settings: workers 2 (flag), step_ms 2.5 (environment), spec auto (file), keep 40 (file), cache true (environment)"


@pytest.mark.parametrize(("name", "good", "bad"), [
    ("workers", [1, "256"], [0, 257, 2.0, True, "-1", "x", "\u0661"]),
    ("device", ["cpu", "ascend-sim"], ["gpu", 1, True]),
    ("cache_blocks", [2, "9"], [1, 2.5, None, []]),
    ("chunk_tokens", [1], [0, "1.0"]),
    ("step_ms", [0.5, "3", 7], [0, -1, "inf", "nan", "x", True, [], 10**400]),
    ("asynchronous", [True, "false", "1"], ["yes", 1, 0, None]),
    ("spec", ["off", "auto", "1", 5], ["0", 6, True, "all"]),
    ("replay", ["off", "mask", "compact"], ["exact", 1]),
    ("keep", [1], [0, "a"]),
    ("cache", [False, "TRUE"], [2, "on"]),
    ("cache_dir", ["folder"], ["", 3, True, "a\0b", "\ud800"]),
    ("snapshot_mib", [1, "4096"], [0, 2**31, "1e3"]),
    ("cache_dir_mib", [1], [0]),
])  # fmt: skip
def test_each_rule(tmp_path: Path, name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert resolved({}, written(tmp_path, {name: value}), {}).sources[name] == "file"
        if isinstance(value, str):
            assert resolved({}, None, {PREFIX + name.upper(): value}).sources[name] == "environment"
    for value in bad:
        with pytest.raises(SettingsError) as caught:
            resolved({}, written(tmp_path, {name: value}), {})
        (problem,) = caught.value.problems
        assert problem.startswith(f"--settings {tmp_path}/settings.json, {name}: found ") and problem.endswith(f", expected {RULES[name].expected}")


@pytest.mark.parametrize("name", ["cache_blocks", "chunk_tokens", "keep", "snapshot_mib", "cache_dir_mib"])
def test_a_number_that_is_too_large_is_not_told_that_it_is_too_small(name: str) -> None:
    with pytest.raises(SettingsError) as caught:
        resolved({name: 2**31, "replay": "mask"}, None, {})
    least = 2 if name == "cache_blocks" else 1
    assert caught.value.problems == (f"--{name.replace('_', '-')}: found 2147483648, expected a whole number from {least} to 2147483647",)


def test_all_problems_come_together(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        resolved({"keep": 0}, written(tmp_path, {"speck": 1, "workers": "many"}), {"TAPEOUT_RUN_WRKERS": "1", "TAPEOUT_RUN_SPEC": "9"})
    places = [problem.split(": found")[0] for problem in caught.value.problems]
    file = f"--settings {tmp_path}/settings.json"
    assert places == [f"{file}, speck", "environment, TAPEOUT_RUN_WRKERS", f"{file}, workers", "environment, TAPEOUT_RUN_SPEC", "--keep"]


@pytest.mark.parametrize(
    ("text", "sentence"), [("{", "found no JSON ("), ("[]", "found list, expected one object"), ("[" * 99_999, "found no JSON ("),
                          ('{"keep": 40, "workers": 1, "keep": 50}', "found key keep twice, expected each key once")]
)
def test_files_that_are_no_settings(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(SettingsError, match=r"settings\.json: ") as caught:
        resolved({}, written(tmp_path, text), {})
    assert sentence in caught.value.problems[0]


def test_the_command_refuses_before_anything_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    common = ["run", str(tmp_path / "none"), "--weights", str(tmp_path / "none"), "--prompt", "a"]
    assert main([*common, "--workers", "0"]) == 1
    assert capsys.readouterr().err == "tapeout: [C101] settings do not fit: --workers: found 0, expected a whole number from 1 to 256\n"
    monkeypatch.setenv("TAPEOUT_RUN_DEVICE", "abacus")
    assert main(common) == 1
    assert "environment, TAPEOUT_RUN_DEVICE: found abacus, expected one of cpu, cuda, ascend, ascend-sim" in capsys.readouterr().err


def test_what_would_be_ignored_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        resolved({"keep": 40}, written(tmp_path, {"replay": "off"}), {})
    assert caught.value.problems == ("--keep: found 40 without replay, expected --replay mask or compact beside it",)
    with pytest.raises(SettingsError, match=r"--record: found r.jsonl without drafts, expected --spec auto or 1 to 5 beside it$"):
        resolved({}, None, {}, record=Path("r.jsonl"))
    assert resolved({"spec": "2"}, None, {}, record=Path("r.jsonl")).record is not None


def test_a_long_value_is_cut() -> None:
    with pytest.raises(SettingsError) as caught:
        resolved({"device": "x" * 10_000}, None, {})
    (device,) = caught.value.problems
    assert len(device) < 400 and device.startswith("--device: found xxx") and "…, expected one of cpu" in device


def test_an_empty_folder_name_is_not_this_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "artifact", "--weights", "weights", "--prompt", "a", "--cache-dir", ""]) == 1
    assert capsys.readouterr().err == "tapeout: [C101] settings do not fit: --cache-dir: found an empty text, expected the path of a folder\n"


@pytest.mark.parametrize(("option", "value"), [("device", "gpu"), ("spec", "6"), ("replay", "exact")])
def test_choices_have_one_home(capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    """A flag is refused by the rule of the setting, together with the other problems; the help quotes it."""
    assert main(["run", "artifact", "--weights", "weights", "--prompt", "a", f"--{option}", value, "--workers", "0"]) == 1
    problems = f"--{option}: found {value}, expected {RULES[option].expected}"
    error = capsys.readouterr().err
    assert problems in error and "--workers: found 0" in error
    assert main(["run", "--help"]) == 0
    assert RULES[option].expected in " ".join(capsys.readouterr().out.split())
