"""`run`: the output file is checked first and never replaces what is no file, JSON stays JSON, seeds reproduce, early ends say why."""

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tapeout.compiler import files
from tapeout.compiler.commands import main
from tapeout.compiler.errors import FileRefused
from tapeout.compiler.prompts import Asked
from tapeout.compiler.run import Run, shortfalls
from tapeout.runtime.errors import OptionRefused
from tapeout.runtime.llm import LLM
from tapeout.runtime.params import SamplingParams, request_seed
from tapeout.runtime.request import CompletionOutput, RequestOutput
from tests.end_to_end.conftest import Model, model  # noqa: F401 (the fixture)

# -- files that are written


def test_a_link_is_followed_and_a_mode_is_kept(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to("real")
    files.write_text(link, "new", "--out")
    assert link.is_symlink() and real.read_text() == "new" and stat.S_IMODE(real.stat().st_mode) == 0o640
    dangling = tmp_path / "dangling"
    dangling.symlink_to("made")
    files.write_text(dangling, "new", "--out")
    assert dangling.is_symlink() and (tmp_path / "made").read_text() == "new"


def test_a_new_file_has_the_mode_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    files.write_text(tmp_path / "new", "x", "--out")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_pipes_and_devices_are_written_through(tmp_path: Path) -> None:
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    files.write_text(pipe, "through", "--out")
    reader.join(timeout=10)
    assert found == ["through"] and stat.S_ISFIFO(pipe.stat().st_mode)
    files.write_text(Path("/dev/null"), "nothing", "--out")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)  # noqa: PTH116
    with (tmp_path / "open").open("w") as file:
        files.write_text(Path(f"/dev/fd/{file.fileno()}"), "held", "--out")
        assert os.fstat(file.fileno()).st_ino == (tmp_path / "open").stat().st_ino
    assert (tmp_path / "open").read_text() == "held"


def test_standard_output_by_name_is_not_opened_again(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path\nfrom tapeout.compiler.files import write_text\n"
        "print('before')\nwrite_text(Path('/dev/stdout'), 'content\\n', '--out')\nprint('after')"
    )
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", program], stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "before\ncontent\nafter\n"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out"
    path.write_text("old")

    def full(self: Path, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(FileRefused, match=r"^\[C105\] --out .*out: found No space left on device, expected a file that can be written"):
        files.write_text(path, "new", "--out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"] and path.read_text() == "old"


def test_wrong_targets_are_refused_before_anything_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    common = ["run", str(tmp_path / "none"), "--weights", str(tmp_path / "none"), "--prompt", "a"]
    for place, sentence in (
        (tmp_path, "found a folder, expected a file that can be written; give a file in it"),
        (tmp_path / "no" / "out", f"found no folder {tmp_path}/no, expected a file in a folder that exists"),
        (tmp_path / "loop", "found "),
        (tmp_path / "file" / "out", "found Not a directory, expected a file that can be written"),
        (tmp_path / ("a" * 300), "found File name too long, expected a file that can be written"),
    ):
        assert main([*common, "--out", str(place)]) == 1
        assert capsys.readouterr().err.startswith(f"tapeout: [C105] --out {place}: {sentence}")
    assert main([*common, "--trace", str(tmp_path)]) == 1
    assert f"[C105] --trace {tmp_path}: found a folder" in capsys.readouterr().err


# -- runs


def run(model: Model, capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> tuple[list[Any], str]:  # noqa: F811
    """The JSON lines that a run prints, and what it says on stderr."""
    common = ["run", model.artifact, "--weights", model.weights, "--workers", 1, "--json", *arguments]
    assert main([str(a) for a in common]) == code
    out, err = capsys.readouterr()
    return [json.loads(line) for line in out.splitlines()], err


def test_one_seed_gives_equal_prompts_different_tokens(model: Model, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    common = ["--prompt", "one", "--max-tokens", 8, "--temperature", 20]  # the toy model is so sure of itself that 1 is greedy
    (first, second, _), _ = run(model, capsys, "--prompt", "one", *common, "--seed", 11)
    assert first["token_ids"] != second["token_ids"]
    assert (first["seed"], second["seed"]) == (11, request_seed(11, 1))
    for one in (first, second):
        (again, _), _ = run(model, capsys, *common, "--seed", one["seed"])
        assert again["token_ids"] == one["token_ids"] and again["seed"] == one["seed"]


def test_json_stays_json(model: Model, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:  # noqa: F811
    lines, _ = run(model, capsys, "--prompt", "a", "--max-tokens", 1, "--stats")
    assert [set(line) == {"totals"} for line in lines] == [False, True]
    out = tmp_path / "out.jsonl"
    lines, _ = run(model, capsys, "--prompt", "a", "--max-tokens", 1, "--out", out)
    assert lines == [json.loads(out.read_text().splitlines()[-1])] and lines[0]["totals"]["requests"] == 1


def test_what_the_engine_refuses_names_the_line(model: Model, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "prompts.jsonl"
    for line, sentence in (
        ('{"token_ids": []}', f"[Q101] a prompt is refused - {path}:2 - found an empty prompt"),
        ('{"token_ids": [99999999]}', f"[Q101] a prompt is refused - {path}:2, token 0 - "),
        ('{"prompt": "\\ud800"}', f"[Q101] a prompt is refused - {path}:2 - found '\\ud800', expected a string without lone surrogates"),
    ):
        path.write_text(f'{{"prompt": "fine"}}\n{line}\n')
        lines, err = run(model, capsys, "--prompts", path, code=1)
        assert lines == [] and sentence in err


def test_a_prompt_that_is_too_long_says_so(model: Model, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "ids.txt"
    path.write_text("5 6\n" + "5 " * 1025 + "\n")
    lines, err = run(model, capsys, "--token-ids", path, "--max-tokens", 1, code=1)
    assert [line.get("finish_reason") for line in lines] == ["length", "prompt_length_exceeded", None]
    assert err == (
        f"tapeout: {path}:2: request 1 ended with prompt_length_exceeded: found 1025 prompt tokens, expected at most 1024; shorten the prompt, "
        "or compile with a larger --max-context\n"
    )


def ended(reason: str, tokens: int, error: str | None = None, **params: Any) -> list[str]:
    rest: Any = {"timing": None, "speculation": None, "drafts": ()}
    answer = CompletionOutput(0, "", (1,) * tokens, None, reason, None, error)
    output = RequestOutput("r", None, (1, 2), (answer,), 0, **rest)
    return shortfalls(Run([output], 0.0, 0.0, 64), [Asked("r", [1, 2], SamplingParams(**params), "ids.txt:1")])


def test_every_early_end_says_why() -> None:
    assert ended("stop", 1) == ended("length", 0) == []
    (text,) = ended("insufficient_system_resource", 3)
    assert text.startswith("ids.txt:1: request r ended with insufficient_system_resource: found too little memory for 5 tokens; ")
    (text,) = ended("deadline", 3, deadline_ms=5)
    assert "ended with deadline: found 3 tokens after 5.0 ms, expected its end by then; give a larger deadline_ms" in text
    (text,) = ended("error", 0, "D120 of the device")
    assert "ended with error: found 0 tokens and D120 of the device, expected its end; run it again" in text


def test_places_that_are_no_paths_are_refused() -> None:
    for places, sentence in (((5, "w0"), "LLM: artifact - found 5 (int)"), (("x", None), "LLM: weights - found None (NoneType)")):
        with pytest.raises(OptionRefused) as caught:
            LLM(*places)  # type: ignore[arg-type]
        assert sentence in str(caught.value) and "expected the path of a folder" in str(caught.value)
