"""Settings: every rule refuses, all problems come together, buckets follow from the largest step."""

import json
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from tapeout.codegen.tuned_rows import TunedRow
from tapeout.compiler import step_options as of
from tapeout.compiler.errors import FileRefused, SettingsError
from tapeout.compiler.settings import MEBIBYTE, Settings, parse_buckets
from tapeout.compiler.targets import MODULES
from tapeout.compiler.tuning import as_data, read_tuning

WRONG = [
    ({"target": "abacus"}, f"--target: found 'abacus', expected one of {', '.join(MODULES)}"),
    ({"target": "cpu,"}, f"--target: found 'cpu,', expected one of {', '.join(MODULES)}"),
    ({"target": "cpu,cpu"}, "--target: found 'cpu,cpu', expected each target once"),
    ({"cpu": "i386"}, "--cpu: found i386, expected one of x86-64-v3, native"),
    ({"max_rows": 0, "max_sequences": 0}, "--max-rows: found 0, expected 1 to 65536"),
    ({"max_rows": 65537}, "--max-rows: found 65537, expected 1 to 65536"),
    ({"max_sequences": 0}, "--max-sequences: found 0, expected 1 to --max-rows (512)"),
    ({"max_sequences": 513}, "--max-sequences: found 513, expected 1 to --max-rows (512)"),
    ({"max_context": 0}, "--max-context: found 0, expected 1 to 16777216"),
    ({"block_tokens": 7}, "--block-tokens: found 7, expected a multiple of 2 (the widest compression ratio) up to 65536"),
    ({"block_tokens": 0}, "--block-tokens: found 0, expected a multiple of 2 (the widest compression ratio) up to 65536"),
    ({"max_context": 1 << 25}, "--max-context: found 33554432, expected 1 to 16777216"),
    ({"block_tokens": 1 << 17}, "--block-tokens: found 131072, expected a multiple of 2 (the widest compression ratio) up to 65536"),
    ({"max_outputs": 7}, "--max-outputs: found 7, expected --max-sequences (8) to 65536"),
    ({"max_outputs": 65537}, "--max-outputs: found 65537, expected --max-sequences (8) to 65536"),
    ({"workspace_bytes": 1 << 19}, "--workspace: found 0.5 MiB, expected 1 to 1048576 MiB"),
    ({"workspace_bytes": 10**9 << 20}, "--workspace: found 1000000000 MiB, expected 1 to 1048576 MiB"),
    ({"buckets": (*range(1, 65), 512)}, "--row-buckets: found 65 counts, expected at most 64"),
    ({"max_rows": "x"}, "--max-rows: found 'x', expected a whole number"),
    ({"max_rows": True}, "--max-rows: found True, expected a whole number"),
    ({"max_context": 1e6}, "--max-context: found 1000000.0, expected a whole number"),
    ({"target": None}, "--target: found None, expected text"),
    ({"buckets": [16, 512]}, "--row-buckets: found [16, 512], expected a tuple of whole numbers"),
    ({"print_ir_after": "all"}, "--print-ir-after: found 'all', expected a tuple of names"),
    ({"dump": 5}, "--dump: found 5, expected a path or None"),
    ({"jobs": 0}, "--jobs: found 0, expected 1 to 256"),
    ({"buckets": (16, 8, 512)}, "--row-buckets: found [16, 8, 512], expected ascending counts"),
    ({"buckets": (16, 16, 512)}, "--row-buckets: found [16, 16, 512], expected ascending counts"),
    ({"buckets": (0, 512)}, "--row-buckets: found [0, 512], expected ascending counts"),
    ({"buckets": (16, 128)}, "--row-buckets: the last one is 128, expected --max-rows (512)"),
]


@pytest.mark.parametrize(("given", "sentence"), WRONG, ids=[next(iter(g)) + str(i) for i, (g, _) in enumerate(WRONG)])
def test_refuses(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings(**given)  # type: ignore[arg-type]
    assert sentence in caught.value.problems
    assert str(caught.value) == "[C101] settings do not fit: " + "; ".join(caught.value.problems)


def test_all_problems_come_together() -> None:
    with pytest.raises(SettingsError) as caught:
        Settings(target="abacus", cpu="i386", max_rows=0, max_sequences=0, max_context=0, block_tokens=1, workspace_bytes=0, jobs=0)
    assert [p.split(":")[0] for p in caught.value.problems] == [
        "--target",
        "--cpu",
        "--max-rows",
        "--max-sequences",
        "--max-context",
        "--block-tokens",
        "--workspace",
        "--jobs",
    ]


@pytest.mark.parametrize(
    ("rows", "buckets"), [(1, (1,)), (16, (16,)), (17, (16, 17)), (128, (16, 128)), (129, (16, 128, 129)), (512, (16, 128, 512))]
)
def test_default_buckets(rows: int, buckets: tuple[int, ...]) -> None:
    assert Settings(max_rows=rows, max_sequences=1).row_buckets == buckets


def test_given_buckets_and_immutability() -> None:
    settings = Settings(max_rows=33, buckets=(1, 33))
    assert settings.row_buckets == (1, 33)
    with pytest.raises(FrozenInstanceError):
        settings.max_rows = 3  # type: ignore[misc]


def test_parse_buckets() -> None:
    assert parse_buckets("16,128, 512") == (16, 128, 512) and parse_buckets("") == ()
    for text in ("16;128", "16,,512", "16,512,", ","):
        with pytest.raises(SettingsError) as caught:
            parse_buckets(text)
        assert caught.value.problems == (f"--row-buckets: found {text!r}, expected row counts as 16,128,512",)


def test_every_setting_of_a_compile_has_a_flag() -> None:
    from inspect import signature

    from tapeout.compiler.commands.compile_ import command

    spelled = {"workspace_bytes": "workspace", "buckets": "row_buckets", "tuned": "tuning"}
    assert {spelled.get(f.name, f.name) for f in fields(Settings)} <= set(signature(command).parameters)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ("[]", "found a JSON list, expected an object of requests"),
        ('{"a": {"b": 1}}', '"target" is null, expected "cpu", for which --target asks'),
        ('{"target": "sm90", "a": {"b": 1}}', '"target" is "sm90", expected "cpu", for which --target asks'),
        ('{"a": {"b": 1.5}, "b": 3}', "a: expected whole numbers by name, or such rows by how many rows a launch has at most, found {'b': 1.5}"),
        ('{"a": {"b": true}}', "a: expected whole numbers by name, or such rows by how many rows a launch has at most, found {'b': True}"),
        ('{"a": {"16": {"block": 1.5}}}', "a: expected whole numbers by name, or such rows by"),
        ('{"a": {"016": {"block": 1}}}', "a: expected whole numbers by name, or such rows by"),
        ('{"a": {"%s": {"block": 1}}}' % ("9" * 5000), "a: expected whole numbers by name, or such rows by"),
        ('{"a": {"block": 1}, "a": {"block": 2}}', "cannot be read as JSON (a appears twice)"),
    ],
)
def test_tuning_files_are_checked(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(text if "target" in sentence else text.replace('{"a"', '{"target": "cpu", "a"', 1))
    with pytest.raises(SettingsError) as caught:
        read_tuning(path, "cpu")
    assert sentence in caught.value.problems[0] and caught.value.problems[0].startswith(f"--tuning {path}: ")


def test_tuning_rows(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    data = {"target": "cpu", "b": {"y": 2, "x": 1}, "a": {}, "c": {"128": {"x": 3}, "16": {"x": 4}}}
    path.write_text(json.dumps(data))
    rows = read_tuning(path, "cpu")
    (tmp_path / "empty.json").write_text("{}")
    assert read_tuning(tmp_path / "empty.json", "cpu") == () and as_data((), "cpu") == {}
    assert rows == (TunedRow("a", ()), TunedRow("b", (("x", 1), ("y", 2))), TunedRow("c", (("x", 4),), 16), TunedRow("c", (("x", 3),), 128))
    assert as_data(rows, "cpu") == data and read_tuning(None, "cpu") == ()
    with pytest.raises(FileRefused, match=r"^\[C105\] --tuning .*none.json: found No such file or directory, expected a readable file; give another"):
        read_tuning(tmp_path / "none.json", "cpu")


@pytest.mark.parametrize("target", ["", " cpu", "cpu,", "sm90, cpu", "CPU"])
def test_a_target_is_named_to_the_letter(target: str) -> None:
    """A blank in front was taken off to be checked, and left on when kernels were chosen for it."""
    with pytest.raises(SettingsError) as caught:
        Settings(target=target)
    assert caught.value.problems[0].startswith(f"--target: found {target!r}, expected one of cpu, sm90, sm100")


def test_tuned_rows_are_of_one_target() -> None:
    with pytest.raises(SettingsError) as caught:
        Settings(target="sm90,cpu", tuned=(TunedRow("a", ()),))
    assert caught.value.problems == ("--tuning: rows are those of one target, found sm90,cpu; compile each with its own",)


def test_python_names_fields_and_takes_lists(tmp_path: Path) -> None:
    from tapeout.compiler.api import compile
    from tapeout.models import deepseek_v41

    tiny = Path(deepseek_v41.__file__).parent / "config-tiny.json"
    wrong: list[tuple[dict[str, object], str]] = [
        ({"max_rowz": 3}, "max_rowz: there is no such setting, expected max_rows"),
        ({"max_rows": "3"}, "max_rows: found '3', expected a whole number"),
        ({"dump": ""}, "dump: found '', expected the path of a folder"),
        ({"buckets": [16, 256]}, "buckets: the last one is 256, expected max_rows (512)"),
        ({"workspace_bytes": 1}, "workspace_bytes: found 9.53674316406e-07 MiB, expected 1 to 1048576 MiB"),
        ({"stop_after": "verify"}, "stop_after: ends a compile before anything is written; use tapeout.compiler.api.compile_path"),
        ({"max_context": 1 << 22}, "max_context: found 4194304, expected at most the model's 4096 positions"),
    ]
    for given, sentence in wrong:
        with pytest.raises(SettingsError) as caught:
            compile(tiny, tmp_path / "out", **given)
        assert caught.value.problems == (sentence,)
    with pytest.raises(SettingsError) as caught:
        compile(5, None)  # type: ignore[arg-type]
    assert caught.value.problems == ("path: found 5, expected a path", "output: found None, expected a path")


def test_an_error_crosses_processes_as_it_is() -> None:
    import pickle

    from tapeout.compiler.errors import FileRefused, ModuleRefused, WorkerLost

    for error in (SettingsError(["a", "b"]), ModuleRefused("x"), FileRefused("--out", Path("p"), "f", "e", "r"), WorkerLost("k", -9)):
        found = pickle.loads(pickle.dumps(error))
        assert (type(found), str(found)) == (type(error), str(error))


def test_the_command_line_offers_the_same_defaults() -> None:
    settings = Settings()
    assert (
        settings.max_rows,
        settings.max_sequences,
        settings.max_outputs,
        settings.max_context,
        settings.block_tokens,
        settings.workspace_bytes,
    ) == (of.ROWS, of.SEQUENCES, of.OUTPUTS, of.CONTEXT, of.BLOCK_TOKENS, of.WORKSPACE * MEBIBYTE)
