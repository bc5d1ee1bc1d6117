"""A run that is interrupted, killed or fails loses no result that was there; --resume goes on from it; half a file never looks whole."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tapeout.compiler import result_files
from tapeout.compiler import run as run_module
from tapeout.compiler.commands import main
from tapeout.compiler.errors import FileRefused
from tapeout.compiler.prompts import Asked, Refused
from tapeout.models.deepseek_v41.tokenizer import FILE
from tapeout.runtime.engine import Engine
from tapeout.runtime.params import SamplingParams
from tests.end_to_end.conftest import Model, model  # noqa: F401 (the fixture)

COUNTS = [8, 2, 5, 1, 9, 3]
"""Tokens of each request: they end in another order than they are asked for."""
FIRST = ["3", "1", "5"]
"""The three that end first."""

PROGRAM = """
import os, sys
from tapeout.compiler import result_files
after, number, *arguments = sys.argv[1:]
left = [int(after)]
def ending(add):
    def adding(self, place, result):
        add(self, place, result)
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), int(number))
    return adding
for kind in (result_files.Kept, result_files.Held, result_files.Printed):
    kind.add = ending(kind.add)
sys.argv[1:] = arguments
from tapeout.compiler.commands import entry
entry()
"""


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"number {i}", "max_tokens": n, "ignore_eos": True}) + "\n" for i, n in enumerate(COUNTS)))
    return path


def common(model: Model, prompts: Path, *more: object) -> list[str]:  # noqa: F811
    return [str(a) for a in ("run", model.artifact, "--weights", model.weights, "--workers", 1, "--prompts", prompts, *more)]


def cut(arguments: list[str], after: int = 3, by: int = signal.SIGINT, **how: Any) -> "subprocess.CompletedProcess[str]":
    """A run that gets a signal right behind its result number `after`."""
    return subprocess.run([sys.executable, "-c", PROGRAM, str(after), str(int(by)), *arguments], capture_output=True, text=True, check=False, **how)


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def tokens(found: list[Any]) -> list[Any]:
    """What is the same in every run."""
    return [{name: line[name] for name in ("id", "prompt_tokens", "text", "token_ids", "finish_reason", "stop_reason")} for line in found]


@pytest.fixture
def whole(model: Model, prompts: Path, tmp_path: Path) -> list[Any]:  # noqa: F811
    """Result lines of a run that nobody interrupts."""
    assert main(common(model, prompts, "--out", tmp_path / "whole.jsonl")) == 0
    assert not (tmp_path / "whole.jsonl.partial").exists()
    return tokens(lines(tmp_path / "whole.jsonl")[:-1])


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_what_was_done_is_there_and_the_rest_can_follow(
    model: Model, prompts: Path, tmp_path: Path, whole: list[Any], capsys: pytest.CaptureFixture[str], by: signal.Signals  # noqa: F811
) -> None:
    out, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    out.write_text("results of last week\n")
    done = cut(common(model, prompts, "--out", out), by=by)
    head, *found = lines(partial)
    assert set(head) == {"partial"} and [line["id"] for line in found] == FIRST, "in the order in which they end, behind the name of the run"
    assert tokens(found) == [whole[int(line["id"])] for line in found] and out.read_text() == "results of last week\n"
    if by == signal.SIGKILL:
        assert done.returncode == -by
    else:
        said = "interrupted" if by == signal.SIGINT else f"interrupted by {by.name}"
        kept = f"tapeout: 3 of 6 results are in {partial}; the same command with --resume runs the others\n"
        assert (done.returncode, done.stderr) == (128 + by, f"{kept}tapeout: {said}\n")
    assert main(common(model, prompts, "--out", out)) == 1, "results are not thrown away"
    assert capsys.readouterr().err.endswith(
        f"tapeout: [C105] --out {partial}: found 3 results of a run that was interrupted, expected no such file; "
        "add --resume to go on from them, or remove the file\n"
    )
    assert main(common(model, prompts, "--out", out, "--resume", "--json")) == 0
    *found, totals = lines(out)
    assert tokens(found) == whole and not partial.exists()
    assert totals == json.loads(capsys.readouterr().out)
    counted = {name: totals["totals"][name] for name in ("requests", "failed", "resumed", "output_tokens")}
    assert counted == {"requests": 6, "failed": 0, "resumed": 3, "output_tokens": sum(COUNTS)}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.jsonl", "prompts.jsonl", "whole.jsonl"]


def test_a_run_may_be_cut_again_and_again(model: Model, prompts: Path, tmp_path: Path, whole: list[Any]) -> None:  # noqa: F811
    out = tmp_path / "out.jsonl"
    for after, resumed in ((1, 0), (1 + 1, 1), (2 + 2, 2)):  # results of earlier runs count as they are added
        assert cut(common(model, prompts, "--out", out, "--resume"), after=after).returncode == 130
        assert len(lines(tmp_path / "out.jsonl.partial")) == 1 + resumed + after - resumed
    assert main(common(model, prompts, "--out", out, "--resume")) == 0
    assert tokens(lines(out)[:-1]) == whole


def test_a_run_that_ends_before_its_first_result_leaves_nothing(model: Model, prompts: Path, tmp_path: Path) -> None:  # noqa: F811
    program = "import os, signal\nfrom tapeout.runtime.engine import Engine\nEngine.step = lambda self: os.kill(os.getpid(), signal.SIGTERM)\n"
    command = [sys.executable, "-c", program + PROGRAM, "9", "2", *common(model, prompts, "--out", tmp_path / "out.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (143, "tapeout: interrupted by SIGTERM\n")
    assert [p.name for p in tmp_path.iterdir()] == ["prompts.jsonl"]


@pytest.mark.parametrize(("fault", "code", "said"), [
    (MemoryError("Unable to allocate 9 GiB"), 1, "[C109] memory: found none left (Unable to allocate 9 GiB), expected what the command needs; free"),
    (RuntimeError("internal: a rule is broken"), 4, "internal error (RuntimeError: internal: a rule is broken); expected none: ")])  # fmt: skip
def test_a_run_that_fails_keeps_its_results_and_says_what_it_did(
    model: Model, prompts: Path, tmp_path: Path, whole: list[Any], fault: Exception, code: int, said: str,  # noqa: F811
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    step, steps = Engine.step, []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def failing(engine: Engine) -> Any:
        steps.append(engine)
        if len(steps) == 4:
            raise fault
        return step(engine)

    monkeypatch.setattr(Engine, "step", failing)
    more = ["--out", tmp_path / "out.jsonl", "--trace", tmp_path / "trace.json", "--metrics", tmp_path / "metrics.jsonl"]
    assert main(common(model, prompts, *more)) == code
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("tapeout: 3 of 6 results are in ") and second.startswith(f"tapeout: {said}")
    assert json.loads((tmp_path / "trace.json").read_text()) and lines(tmp_path / "metrics.jsonl")[-1]["steps"] == 3
    assert main(common(model, prompts, "--out", tmp_path / "out.jsonl", "--resume")) == 0
    assert tokens(lines(tmp_path / "out.jsonl")[:-1]) == whole


def test_only_the_same_run_goes_on(
    model: Model, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]  # noqa: F811
) -> None:
    out, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    assert cut(common(model, prompts, "--out", out)).returncode == 130
    left = partial.read_bytes()
    other = tmp_path / "other.jsonl"
    other.write_text(prompts.read_text().replace("number 4", "number four"))
    for arguments in (common(model, other), common(model, prompts, "--seed", 3), common(model, prompts, "--replay", "mask")):
        assert main([*arguments, "--out", str(out), "--resume"]) == 1
        assert f"[C105] --resume {partial}: found results of another run, expected the same artifact, weights, prompts" in capsys.readouterr().err
        assert partial.read_bytes() == left
    with partial.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for more in ([], ["--resume"]):
            assert main(common(model, prompts, "--out", out, *more)) == 1
            assert "found the file of a run that is under way, expected one run at a time; wait for it" in capsys.readouterr().err
    no_token_hangs_on = ["--device", "cpu", "--spec", "auto", "--asynchronous"]
    assert main(common(model, prompts, "--out", out, "--resume", *no_token_hangs_on)) == 0


def test_a_file_that_its_run_removes_meanwhile_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening and locking: what was locked is nobody's file any more."""
    path, lock, seen = tmp_path / "out.jsonl.partial", fcntl.flock, list[int]()

    def locking(file: int, how: int) -> None:
        lock(file, how)
        if not seen:
            path.unlink()
        seen.append(file)

    monkeypatch.setattr(fcntl, "flock", locking)
    file = result_files._locked(path)
    assert len(seen) == 2 and os.path.samestat(os.fstat(file), path.stat())
    os.close(file)


def test_the_name_of_a_run_is_of_all_that_decides_its_tokens(tmp_path: Path) -> None:
    """Another artifact, checkpoint, tokenizer, replay, keep, prompt, id or parameter is another run."""
    for folder, text in (("weights", "{}"), ("others", "{ }")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / FILE).write_text(text)
    one = Asked("0", "a", SamplingParams(), "--prompt 1")
    given: dict[str, Any] = {"identity": "i", "stamp": "s", "weights": tmp_path / "weights", "asked": [one]}

    def name(replay: str = "mask", keep: int | None = 9, **changes: Any) -> str:
        return run_module._name(**{**given, **changes}, settings=SimpleNamespace(values={"replay": replay, "keep": keep}))  # type: ignore[arg-type]

    names = [name(), name("compact"), name(keep=10), name(identity="j"), name(stamp="t"), name(weights=tmp_path / "others")]
    names += [name(asked=[replace(one, **{key: value})]) for key, value in {"prompt": "b", "id": "1", "params": SamplingParams(seed=1)}.items()]
    names += [name(asked=[one, one]), name(asked=[Refused("0", "--prompt 1", "error")])]
    assert len(set(names)) == len(names) and names[0] == name(asked=[replace(one, where="prompts.jsonl:1")])


def test_what_is_damaged_or_failed_runs_again(model: Model, prompts: Path, tmp_path: Path, whole: list[Any]) -> None:  # noqa: F811
    out, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    assert cut(common(model, prompts, "--out", out), after=5).returncode == 130
    head, *found = partial.read_text().splitlines()
    failed, strange = json.loads(found[1]) | {"finish_reason": "error"}, json.loads(found[2]) | {"spec": {"steps": "many"}}
    partial.write_text("\n".join([head, found[0], json.dumps(failed), json.dumps(strange), "[]", "{", '"' * 5000, "\0", found[3], found[4][:-9]]))
    assert main(common(model, prompts, "--out", out, "--resume")) == 0
    *results, totals = lines(out)
    assert tokens(results) == whole and totals["totals"]["resumed"] == 2


def test_a_run_that_has_ended_is_not_run_again(
    model: Model, prompts: Path, tmp_path: Path, whole: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    out = tmp_path / "out.jsonl"
    assert main(common(model, prompts, "--out", out, "--resume")) == 0
    left, facts = out.read_bytes(), out.stat()
    monkeypatch.setattr(Engine, "__init__", lambda *_: pytest.fail("weights were loaded"))
    capsys.readouterr()
    assert main(common(model, prompts, "--out", out, "--resume", "--trace", tmp_path / "t.json", "--spec", "auto")) == 0
    said = capsys.readouterr()
    assert said.out == "6 requests (6 of an earlier run): every result is there already, nothing was run\n"
    assert said.err == f"tapeout: warning: --trace {tmp_path}/t.json: not written, as nothing was run\n"
    assert main(common(model, prompts, "--out", out, "--resume", "--json")) == 0
    totals = json.loads(capsys.readouterr().out)["totals"]
    assert (totals["requests"], totals["resumed"], totals["run"]) == (6, 6, json.loads(left.splitlines()[-1])["totals"]["run"])
    assert main(common(model, prompts, "--out", out, "--resume", "--seed", 3)) == 1
    assert f"[C105] --resume {out}: found results of another run, expected the same artifact, weights, prompts" in capsys.readouterr().err
    assert out.read_bytes() == left and out.stat().st_mtime_ns == facts.st_mtime_ns
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.jsonl", "prompts.jsonl", "whole.jsonl"]


def test_of_a_run_that_has_ended_only_what_failed_runs_again(model: Model, prompts: Path, tmp_path: Path, whole: list[Any]) -> None:  # noqa: F811
    out = tmp_path / "out.jsonl"
    assert main(common(model, prompts, "--out", out)) == 0
    *found, totals = lines(out)
    found[2]["finish_reason"] = "error"
    out.write_text("".join(json.dumps(line) + "\n" for line in [*found[:4], *found[5:], totals]))
    assert main(common(model, prompts, "--out", out, "--resume")) == 0
    *results, totals = lines(out)
    assert tokens(results) == whole and totals["totals"]["resumed"] == 4
    out.write_text("results of last week\n")
    assert main(common(model, prompts, "--out", out, "--resume")) == 0 and lines(out)[-1]["totals"]["resumed"] == 0


def test_a_file_of_somebody_else_is_never_touched(
    model: Model, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]  # noqa: F811
) -> None:
    partial = tmp_path / "out.jsonl.partial"
    for content in ('{"id": "0"}\n', "no line feed", "[" * 100_000 + "\n", "\0\n"):
        partial.write_text(content)
        for more in ([], ["--resume"]):
            assert main(common(model, prompts, "--out", tmp_path / "out.jsonl", *more)) == 1
            assert f"[C105] --out {partial}: found a file that no run left behind, expected none; move it away" in capsys.readouterr().err
        assert partial.read_text() == content
    partial.write_text("")
    assert main(common(model, prompts, "--out", tmp_path / "out.jsonl")) == 0, "an empty one is nobody's"
    partial.mkdir()
    assert main(common(model, prompts, "--out", tmp_path / "out.jsonl")) == 1
    assert f"--out {partial}: found a folder" in capsys.readouterr().err


def test_resuming_needs_a_file(model: Model, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    for more, found in (([], "no --out"), (["--out", "/dev/null"], "--out /dev/null")):
        assert main(common(model, prompts, "--resume", *more)) == 1
        assert f"[C101] settings do not fit: --resume: found {found}, expected --out FILE with a regular file" in capsys.readouterr().err


LIMITED = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"


def test_a_full_disk_ends_no_run(model: Model, prompts: Path, tmp_path: Path, whole: list[Any]) -> None:  # noqa: F811
    """The file may hold 2,000 bytes: what does not fit is on standard output, which is a pipe."""
    out, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    command = [sys.executable, "-c", LIMITED + PROGRAM, "99", "2", *common(model, prompts, "--out", out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    _, *kept = lines(partial)
    assert kept and sorted(tokens([*kept, *printed]), key=lambda line: line["id"]) == whole and not out.exists()
    first, *_, second, third, last = done.stderr.splitlines()
    sentence = f"tapeout: [C105] --out {partial}: found File too large, expected room for each result as it ends; "
    assert done.returncode == 1 and first.startswith(sentence)
    assert second.startswith(f"tapeout: {len(kept)} of 6 results are in {partial}; ")
    assert third == f"tapeout: {len(printed)} results could not be written there and are on standard output"
    assert last.startswith(f"tapeout: [C105] --out {out}: found File too large")


def test_a_disk_that_is_full_from_the_start_is_said_before_anything_runs(model: Model, prompts: Path, tmp_path: Path) -> None:  # noqa: F811
    program = LIMITED.replace("2000", "10") + PROGRAM
    command = [sys.executable, "-c", program, "99", "2", *common(model, prompts, "--out", tmp_path / "out.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = f"tapeout: [C105] --out {tmp_path}/out.jsonl.partial: found File too large, expected a file that can be written; make room, "
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{said}or give another file\n")
    assert [p.name for p in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_standard_output_has_results_in_input_order_as_they_come(model: Model, prompts: Path) -> None:  # noqa: F811
    """Number 0 ends as the fifth of six: until then nothing is printed, and after an interrupt what is there."""
    command = common(model, prompts, "--json")
    for after, printed in ((3, ["1", "3", "5"]), (5, ["0", "1", "2", "3", "5"])):
        done = cut(command, after=after)
        assert (done.returncode, done.stderr) == (130, "tapeout: interrupted\n")
        assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == printed, "and no totals"
    assert cut(common(model, prompts), after=3).stdout.startswith("number 1")


def test_a_reader_gets_the_first_result_while_the_run_goes_on(model: Model, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a", "max_tokens": n, "ignore_eos": True}) + "\n" for n in (1, *[900] * 20)))
    command = [sys.executable, "-c", PROGRAM, "99", "2", *common(model, path, "--json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert json.loads(process.stdout.readline())["id"] == "0"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "" and process.stderr.read() == "tapeout: interrupted by SIGTERM\n"
    assert process.returncode == 143


def test_a_pipe_gets_what_is_there_without_totals(model: Model, prompts: Path) -> None:  # noqa: F811
    reader, writer = os.pipe()
    done = cut(common(model, prompts, "--out", f"/dev/fd/{writer}"), pass_fds=[writer])
    os.close(writer)
    with os.fdopen(reader) as file:
        assert [json.loads(line)["id"] for line in file] == sorted(FIRST)
    assert done.stderr.startswith(f"tapeout: 3 of 6 results are in /dev/fd/{writer}, without totals\n")


@pytest.mark.parametrize("after", [3, 99])
def test_what_a_device_does_not_take_is_on_standard_output(model: Model, prompts: Path, whole: list[Any], after: int) -> None:  # noqa: F811
    """A full one: of a run that ends and of one that is cut."""
    done = cut(common(model, prompts, "--out", "/dev/full"), after=after)
    printed = tokens([json.loads(line) for line in done.stdout.splitlines()])
    assert printed == [line for line in whole if after == 99 or line["id"] in FIRST]
    said = [f"{len(printed)} results could not be written there and are on standard output"]
    said += ["interrupted"] if after == 3 else ["[C105] --out /dev/full: found No space left on device, expected a file that can be written; "
                                               "make room, or give another file"]  # fmt: skip
    assert (done.returncode, done.stderr.splitlines()) == (130 if after == 3 else 1, [f"tapeout: {sentence}" for sentence in said])


def test_what_is_refused_is_said_also_where_results_cannot_be_written(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    """The disk is full when the run ends: requests that failed and files about the run are told beside it."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "max_tokens": 2}\n{"token_ids": []}\n')

    def full(path: Path, text: str, option: str) -> None:
        raise FileRefused(option, path, "No space left on device", "a file that can be written", "make room")

    for module in (run_module, result_files):
        monkeypatch.setattr(module, "write_text", full)
    out = tmp_path / "out.jsonl"
    assert main(common(model, tmp_path / "prompts.jsonl", "--out", out, "--trace", tmp_path / "t.json")) == 1
    said = [line.split(": found")[0] for line in capsys.readouterr().err.splitlines()]
    assert said[0].startswith("tapeout: [C105] --trace ") and said[1].startswith("tapeout: request 1: [Q101]")
    assert said[2].startswith("tapeout: 1 of 2 results are in ") and said[3].startswith("tapeout: [C105] --out ") and len(said) == 4


def test_a_request_that_got_nowhere_prints_nothing(model: Model, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    prompts = ("--prompt", "far too long " * 2000, "--prompt", "short", "--max-tokens", "1")
    assert main(["run", str(model.artifact), "--weights", str(model.weights), *prompts]) == 1
    said = capsys.readouterr()
    assert said.out.startswith("short") and said.out.count("\n") <= 2 and "prompt_length_exceeded" in said.err


def test_of_what_an_earlier_run_left_good_results_alone_stay_in_the_file(tmp_path: Path) -> None:
    good = {"id": "a", "prompt_tokens": 1, "text": "x", "token_ids": [5], "finish_reason": "stop", "cache": {"hit_tokens": 0},
            "spec": {"steps": 1, "verified": 0, "accepted": 0}}  # fmt: skip
    head, bad = {"partial": "the run"}, good | {"id": "b", "finish_reason": "error", "text": "y" * 300}
    left = tmp_path / "out.jsonl.partial"
    left.write_text("".join(json.dumps(line) + "\n" for line in (head, bad, good)) + '{"id": "cut')
    kept = result_files.Kept(tmp_path / "out.jsonl", [], resume=True)
    assert dict(kept.begin("the run")) == {"a": good}
    assert left.read_text() == "".join(json.dumps(line) + "\n" for line in (head, good))
    kept.give_up()
