"""`run`: the output file is checked first and never replaces what is no file, JSON stays JSON, seeds reproduce, early ends say why."""

import fcntl
import json
import os
import re
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


def test_what_a_killed_writer_left_aside_goes_with_the_next_one(tmp_path: Path) -> None:
    """Of a writer that lives nothing is removed, nor of writers of other files."""
    program = (
        "import sys\nfrom pathlib import Path\nfrom tapeout.compiler.files import write_text\n"
        "def wait(self, target):\n    print('written', flush=True)\n    sys.stdin.read()\n"
        "Path.rename = wait\nwrite_text(Path(sys.argv[1]), 'cut off', '--out')"
    )
    writers = []
    for name in ("out", "out", "other"):
        started = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / name)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert started.stdout is not None and started.stdout.readline() == b"written\n"
        writers.append(started)
    killed, living, other = writers
    for one in (killed, other):
        one.kill()
        one.communicate()
    assert len([*tmp_path.iterdir()]) == 3
    files.write_text(tmp_path / "out", "whole", "--out")
    assert (tmp_path / "out").read_text() == "whole" and len([*tmp_path.iterdir()]) == 3
    living.communicate(b"")
    assert {path.name for path in tmp_path.iterdir()} >= {"out"} and len([*tmp_path.iterdir()]) == 2
    files.write_text(tmp_path / "other", "whole", "--out")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "other"}


def test_a_file_aside_that_another_writer_removes_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may look like one of a killed writer until it is locked."""
    lock, seen = fcntl.flock, list[int]()

    def locking(file: int, how: int) -> None:
        lock(file, how)
        if not seen:
            next(tmp_path.iterdir()).unlink()
        seen.append(how)

    monkeypatch.setattr(fcntl, "flock", locking)
    files.write_text(tmp_path / "out", "whole", "--out")
    assert seen == [fcntl.LOCK_EX] * 2 and [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").read_text() == "whole"


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
        ("-", "found the sign for standard input, expected a file that can be written; give a file, or /dev/stdout"),
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


def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[str, ...], int]]:
    """What each engine still holds when it is closed: requests and blocks."""
    held: list[tuple[tuple[str, ...], int]] = []
    close = LLM.close

    def closing(llm: LLM) -> None:
        blocks = llm.engine.blocks
        assert llm.engine.scheduler.roster.faults() == []
        held.append((tuple(llm.engine.scheduler.roster.requests), blocks.count - 1 - blocks.free_blocks))
        close(llm)

    monkeypatch.setattr(LLM, "close", closing)
    return held


BAD_LINES: list[tuple[bytes, str]] = [
    (b'{"token_ids": []}', "[Q101] a prompt is refused - {place} - found an empty prompt"),
    (b'{"token_ids": [99999999]}', "[Q101] a prompt is refused - {place}, token 0 - "),
    (b'{"prompt": "\\ud800"}', "[Q101] a prompt is refused - {place} - found '\\ud800', expected a string without lone surrogates"),
    (b'{"prompt": "cut', "[Q101] a prompt is refused - {place} - found no JSON"),
    (b'{"prompt": "\xff\xfe"}', "[Q101] a prompt is refused - {place} - found bytes that are not UTF-8"),
    (b'{"prompt": "a", "top_p": 7}', "[P102] a sampling parameter is outside its range - SamplingParams.top_p of request {place} - found 7.0"),
    (b'{"prompt": "a", "min_p": 0.5, "temperature": 1}', "[P104] the compiled sampler cannot do what "),
    (b'{"prompt": "a", "spec": 3}', "[P104] the compiled sampler cannot do what a sampling parameter asks for - SamplingParams.spec "
     "of request {place} - found 3 (int), expected auto or off, as this engine verifies no drafts (--spec) - "),
]


def test_what_is_refused_names_its_line_and_harms_no_other(
    model: Model, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,  # noqa: F811
) -> None:  # fmt: skip
    path = tmp_path / "prompts.jsonl"
    good = b'{"prompt": "one"}'
    path.write_bytes(good + b"\n")
    (alone, _), _ = run(model, capsys, "--prompts", path, "--max-tokens", 3)
    path.write_bytes(b"\n".join([*(line for line, _ in BAD_LINES), good]))
    held = watched(monkeypatch)
    lines, err = run(model, capsys, "--prompts", path, "--max-tokens", 3, code=1)
    assert len(lines) == len(BAD_LINES) + 2 and lines[-1]["totals"]["failed"] == len(BAD_LINES)
    assert lines[-2]["token_ids"] == alone["token_ids"] and lines[-2]["finish_reason"] == "length"
    sentences = err.splitlines()
    for i, (line, said, (_, expected)) in enumerate(zip(lines, sentences, BAD_LINES, strict=False)):
        assert (line["id"], line["finish_reason"], line["token_ids"]) == (str(i), "error", [])
        assert line["error"].startswith(expected.format(place=f"{path}:{i + 1}")) and said == f"tapeout: request {i}: {line['error']}"
    assert len(sentences) == len(BAD_LINES) and held == [((), 0)]


@pytest.mark.parametrize(("count", "told"), [(50, 50), (51, 51), (52, 51), (3000, 51)])
def test_a_file_that_holds_no_prompts_is_not_three_thousand_sentences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int, told: int
) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\n" * count)
    assert main(["run", str(tmp_path), "--weights", str(tmp_path), "--prompts", str(tmp_path / "binary"), "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == told and said[49].startswith("tapeout: request 49: [Q101] a prompt is refused - ")
    if told < count:
        assert said[50] == f"tapeout: and {count - 50} requests more; with --json or --out FILE each one's line says how it ended"
    assert len((tmp_path / "out").read_text().splitlines()) == count + 1


def test_a_prompt_of_ten_megabytes_is_refused_at_once(
    model: Model, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,  # noqa: F811
) -> None:  # fmt: skip
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "many words " * 950_000}) + '\n{"prompt": "one"}\n')
    held = watched(monkeypatch)
    lines, err = run(model, capsys, "--prompts", path, "--max-tokens", 2, code=1)
    assert [line.get("finish_reason") for line in lines] == ["prompt_length_exceeded", "length", None] and held == [((), 0)]
    assert "request 0 ended with prompt_length_exceeded: found at least " in err and "expected at most 1024; shorten the prompt" in err
    assert lines[0]["prompt_tokens"] < 100_000, "its beginning settles it: the rest is never cut into tokens"


def test_all_answers_of_a_request_are_in_its_line(
    model: Model, capsys: pytest.CaptureFixture[str], tmp_path: Path  # noqa: F811
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one", "n": 3, "temperature": 30, "logprobs": true}\n{"prompt": "one"}\n')
    lines, _ = run(model, capsys, "--prompts", path, "--max-tokens", 4, "--seed", 5)
    several, single, totals = lines
    assert [answer["index"] for answer in several["outputs"]] == [0, 1, 2] and "outputs" not in single
    assert {k: v for k, v in several["outputs"][0].items() if k != "index"} == {k: several[k] for k in several["outputs"][0] if k != "index"}
    assert len({tuple(answer["token_ids"]) for answer in several["outputs"]}) == 3
    assert all(len(answer["logprobs"]) == len(answer["token_ids"]) == 4 for answer in several["outputs"]) and "logprobs" not in single
    assert totals["totals"]["output_tokens"] == 3 * 4 + 4
    assert set(single) >= {"timing", "spec", "cache", "seed"} and single["timing"]["total_ms"] >= single["timing"]["ttft_ms"] > 0
    assert main(["run", str(model.artifact), "--weights", str(model.weights), "--prompts", str(path), "--max-tokens", "4", "--seed", "5"]) == 0
    assert capsys.readouterr().out == "".join(f"one{a['text']}\n" for a in several["outputs"]) + f"one{single['text']}\n"


def test_a_prompt_that_is_too_long_says_so(model: Model, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "ids.txt"
    path.write_text("5 6\n" + "5 " * 1025 + "\n")
    lines, err = run(model, capsys, "--token-ids", path, "--max-tokens", 1, code=1)
    assert [line.get("finish_reason") for line in lines] == ["length", "prompt_length_exceeded", None]
    assert err == (
        f"tapeout: {path}:2: request 1 ended with prompt_length_exceeded: found 1025 prompt tokens, expected at most 1024; shorten the prompt, "
        "or compile with a larger --max-context\n"
    )
    assert "request 1 - found 1025 tokens" in lines[1]["error"]
    path.write_text('{"token_ids": [], "id": "none"}\n' + json.dumps({"token_ids": [5] * 200, "id": "long"}))
    (tmp_path / "few.json").write_text('{"cache_blocks": 2}')
    lines, err = run(model, capsys, "--prompts", path, "--settings", tmp_path / "few.json", code=1)
    sentence = "found 200 prompt tokens, expected at most 16; shorten the prompt, or allow more cache_blocks"
    assert err.splitlines()[1] == f"tapeout: {path}:2: request long ended with prompt_length_exceeded: {sentence}"
    assert "request long - found 200 tokens, expected at most 16, the context - shorten the prompt" in lines[1]["error"], "its name is the user's"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_report_that_cannot_be_written_costs_no_tokens(model: Model, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:  # noqa: F811
    out, common = tmp_path / "out.jsonl", ["--prompt", "a", "--max-tokens", 3, "--trace", "/dev/full", "--metrics", "/dev/full"]
    lines, err = run(model, capsys, *common, code=1)
    assert len(lines[0]["token_ids"]) == 3
    assert [line.split(": found")[0] for line in err.splitlines()] == [f"tapeout: [C105] --{name} /dev/full" for name in ("trace", "metrics")]
    run(model, capsys, *common, "--out", out, code=1)
    assert json.loads(out.read_text().splitlines()[0])["token_ids"] == lines[0]["token_ids"]


def ended(reason: str, tokens: int, error: str | None = None, **params: Any) -> list[str]:
    rest: Any = {"timing": None, "speculation": None, "drafts": ()}
    answer = CompletionOutput(0, "", (1,) * tokens, None, reason, None, error)
    output = RequestOutput("r", None, (1, 2), (answer,), 0, **rest)
    return shortfalls(Run([output], 0.0, 0.0, 64, 64), [Asked("r", [1, 2], SamplingParams(**params), "ids.txt:1")])


def test_every_early_end_says_why() -> None:
    assert ended("stop", 1) == ended("length", 0) == []
    (text,) = ended("insufficient_system_resource", 3)
    assert text.startswith("ids.txt:1: request r ended with insufficient_system_resource: found too little memory for 5 tokens; ")
    (text,) = ended("deadline", 3, deadline_ms=5)
    assert "ended with deadline: found 3 tokens after 5.0 ms, expected its end by then; give a larger deadline_ms" in text
    (text,) = ended("error", 0, "[D120] the device lost a step")
    assert text.endswith("ended with error: found 0 tokens, expected its end; [D120] the device lost a step")
    assert ended("abort", 2)[0].endswith("ended with abort: found 2 tokens, expected its end; run it again")


def test_places_that_are_no_paths_are_refused() -> None:
    for places, sentence in (((5, "w0"), "LLM: artifact - found 5 (int)"), (("x", None), "LLM: weights - found None (NoneType)")):
        with pytest.raises(OptionRefused) as caught:
            LLM(*places)  # type: ignore[arg-type]
        assert sentence in str(caught.value) and "expected the path of a folder" in str(caught.value)


# -- mechanisms and what is written about them


def test_speculation_changes_no_token_and_says_what_it_did(model: Model, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:  # noqa: F811
    asked = ["--prompt", "Once upon a time", "--prompt", "two", "--max-tokens", 40]
    plain, _ = run(model, capsys, *asked)
    assert (plain[-1]["totals"]["verified_at"], plain[-1]["totals"]["accepted_length"]) == ([], 1.0)
    for spec in ("auto", "2", "5"):
        lines, _ = run(model, capsys, *asked, "--spec", spec, "--record", tmp_path / "steps.jsonl", "--metrics", tmp_path / "m.jsonl")
        assert [line.get("token_ids") for line in lines] == [line.get("token_ids") for line in plain]
        totals = lines[-1]["totals"]
        most = 5 if spec == "auto" else int(spec)
        assert len(totals["verified_at"]) == most and totals["verified_at"][0] > 0
        assert sum(line["spec"]["verified"] for line in lines[:-1]) == sum(totals["verified_at"])
        assert sum(line["spec"]["accepted"] for line in lines[:-1]) == sum(totals["accepted_at"])
        steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
        assert steps and all(set(step) >= {"sequences", "confidences", "rows"} for step in steps)
        metrics = json.loads((tmp_path / "m.jsonl").read_text().splitlines()[-1])
        assert metrics["drafts_verified"] == sum(totals["verified_at"]) and "calibration_error_1" in metrics
    assert main(["sim", "speculation", "--trace", str(tmp_path / "steps.jsonl"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lines"], "what a run records, the simulator replays"


def test_statistics_for_people(model: Model, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "prompts.jsonl"
    shared = "the same beginning of every prompt, " * 3
    path.write_text("".join(json.dumps({"prompt": shared + f"then number {i}"}) + "\n" for i in range(4)))
    common = ["run", str(model.artifact), "--weights", str(model.weights), "--prompts", str(path), "--max-tokens", "6", "--workers", "1", "--stats"]
    assert main([*common, "--spec", "3", "--replay", "compact", "--cache-dir", str(tmp_path / "kv")]) == 0
    first = capsys.readouterr().out
    assert "speculation: " in first and "drafts by their place in the block" in first and "replay: 88 of " in first, "22 rows of each prompt"
    assert main([*common, "--replay", "compact", "--cache-dir", str(tmp_path / "kv")]) == 0
    second = capsys.readouterr().out
    assert "cache: " in second and " prompt tokens reused, " in second and "blocks read from the folder" in second and "speculation" not in second
    answers = [[line for line in out.splitlines() if line.startswith("the same")] for out in (first, second)]
    assert answers[0] == answers[1] and len(answers[0]) == 4
    assert main([*common, "--spec", "auto"]) == 0
    assert re.search(r"plan of \d+ steps: everything is verified at first and now and then", capsys.readouterr().out), "a plan says why"
    assert main(common) == 0
    assert not {"speculation", "cache", "replay"} & {line.split(":")[0] for line in capsys.readouterr().out.splitlines()}


def test_metrics_as_prometheus_text(model: Model, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:  # noqa: F811
    run(model, capsys, "--prompt", "a", "--max-tokens", 3, "--metrics", tmp_path / "m.prom")
    assert "tapeout_output_tokens_total 3\n" in (tmp_path / "m.prom").read_text()
    run(model, capsys, "--prompt", "a", "--max-tokens", 250, "--metrics", tmp_path / "m.jsonl")
    steps = [json.loads(line)["steps"] for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert steps == [100, 200, 250], "a line every hundred steps, and one at the end"
    assert main(["run", str(model.artifact), "--weights", str(model.weights), "--prompt", "a", "--metrics", str(tmp_path)]) == 1
    assert f"[C105] --metrics {tmp_path}: found a folder" in capsys.readouterr().err


def test_engine_options_are_refused_in_a_sentence(model: Model, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "file").touch()
    for options, sentence in ((["--replay", "compact", "--keep", "3"], "[Q105] an engine option is refused - ReplayRules.keep - found 3, "),
                              (["--cache-dir", str(tmp_path / "file")], "[K101] the folder for stored cache entries cannot be used - ")):
        assert main(["run", str(model.artifact), "--weights", str(model.weights), "--prompt", "a", *options]) == 1
        assert sentence in capsys.readouterr().err


def test_no_file_that_is_named_twice_is_written(model: Model, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:  # noqa: F811
    prompts, link, new = tmp_path / "prompts.jsonl", tmp_path / "link", tmp_path / "new"
    prompts.write_text('{"prompt": "a"}\n')
    link.symlink_to(prompts)
    common = ["run", str(model.artifact), "--weights", str(model.weights), "--prompts", str(prompts)]
    for options, said in (
        (["--out", prompts], f"--out {prompts}: found the file of --prompts"), (["--trace", link], f"--trace {link}: found the file of --prompts"),
        (["--out", new, "--metrics", tmp_path / "." / "new"], f"--metrics {new}: found the file of --out"),
        (["--token-ids", "-", "--settings", "-"], "--token-ids -: found standard input, which --settings reads"),
    ):  # fmt: skip
        assert main([*common, *map(str, options)]) == 1
        assert capsys.readouterr().err.startswith(f"tapeout: [C105] {said}, expected a")
    assert prompts.read_text() == '{"prompt": "a"}\n' and not new.exists()
    assert main([*common, "--max-tokens", "1", "--trace", "/dev/null", "--metrics", "/dev/null"]) == 0, "a device may be named twice"


def test_a_stop_token_outside_the_vocabulary_is_refused(model: Model, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "stop_token_ids": [3, 99999]}\n')
    lines, _ = run(model, capsys, "--prompts", path, code=1)
    last = model.config.text.vocab_size - 1
    assert f"SamplingParams.stop_token_ids of request {path}:1 - found 99999 (int), expected ids of the vocabulary, 0 to {last}" in lines[0]["error"]


def test_a_cache_folder_that_takes_nothing_is_said(model: Model, tmp_path: Path) -> None:  # noqa: F811
    """Files of at most 1,000 bytes: the results are there, and a warning on the error stream."""
    program = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\nfrom tapeout.compiler.commands import entry\nentry()"
    shared = ["--prompt", "the same beginning of every prompt, " * 2, "--max-tokens", "2"]
    common = ["run", str(model.artifact), "--weights", str(model.weights), "--workers", "1", "--json", *shared, "--cache-dir", str(tmp_path / "kv")]
    done = subprocess.run([sys.executable, "-c", program, *common], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 2
    assert done.stderr.startswith(f"tapeout: warning: --cache-dir {tmp_path}/kv: found ") and done.stderr.endswith(
        " entries that were not saved (File too large), expected a folder that can be written; make room, or give another folder\n"
    )
    assert [p.name for p in (tmp_path / "kv").iterdir()] == []
    assert main(common) == 0 and len(list((tmp_path / "kv").iterdir())) > 0
