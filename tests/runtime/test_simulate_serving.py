"""`tapeout sim serving`: arrivals on the null device, drawn or recorded; what it reports is what the load was made of."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tapeout.compiler.commands.sim import command
from tapeout.runtime.sim.errors import ScenarioRefused
from tapeout.runtime.sim.serving import Arrival, ServingScenario, drawn_arrivals, recorded_arrivals, simulated_serving

SMALL = ServingScenario(slots=8, blocks=200, block_tokens=16, max_context=1024, max_rows=256, keep=20)


def load(count: int = 60) -> list[Arrival]:
    return drawn_arrivals(count, 50.0, 3, prompt_tokens=120, output_tokens=20, groups=3, shared=0.7)


def test_a_lone_request_waits_for_nothing() -> None:
    found = simulated_serving([Arrival(5000.0, 100, 11)], replace(SMALL, in_flight=0))
    assert (found["requests"], found["output_tokens"], found["prompt_rows"], found["queue_ms_max"]) == (1, 11, 100, 0.0)
    assert found["ttft_ms_max"] == pytest.approx(8.0 + 0.02 * 100) and found["seconds"] == pytest.approx(5.010 + 10 * 0.00802)
    assert found["idle_slot_share"] == 7 / 8


def test_a_run_is_a_function_of_load_and_scenario() -> None:
    once, again = (simulated_serving(load(), SMALL) for _ in range(2))
    assert once == again and once != simulated_serving(load(59), SMALL)
    assert once["requests_finished"] == {"length": 60}
    assert once["output_tokens"] == sum(arrival.output_tokens for arrival in load())


def test_caching_saves_rows_and_memory_bounds_it() -> None:
    with_cache, without = simulated_serving(load(), SMALL), simulated_serving(load(), replace(SMALL, is_caching=False))
    assert with_cache["hit_share"] > 0.2 and with_cache["prompt_rows"] < without["prompt_rows"] and without["lookups"] == {}
    assert with_cache["lookups"]["hit"] > 10 and sum(with_cache["lookups"].values()) == 60 + with_cache["preemptions"]
    tight = simulated_serving([replace(arrival, output_tokens=150) for arrival in load()], replace(SMALL, blocks=70))
    assert tight["preemptions"] > 0 and tight["evictions"] > 0 and tight["requests_finished"] == {"length": 60}


def test_a_prompt_beyond_every_context_ends_as_such_and_is_never_made() -> None:
    found = simulated_serving([Arrival(0.0, 2**31 - 1, 5), Arrival(1.0, 1024, 5), Arrival(2.0, 1025, 5)], SMALL)
    assert found["requests_finished"] == {"length": 1, "prompt_length_exceeded": 2}


def test_recorded_arrivals(tmp_path: Path) -> None:
    file = tmp_path / "load.jsonl"
    file.write_text('{"at_ms": 9, "prompt_tokens": 5, "output_tokens": 2}\n\n{"at_ms": 1.5, "prompt_tokens": 4, "output_tokens": 0, "group": 2}\n')
    assert recorded_arrivals(file) == [Arrival(1.5, 4, 0, 2), Arrival(9, 5, 2)]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"at_ms": 1}',
        '{"when": 1}',
        '{"at_ms": -1, "prompt_tokens": 1, "output_tokens": 1}',
        '{"at_ms": "x", "prompt_tokens": 1, "output_tokens": 1}',
        '{"at_ms": 1, "prompt_tokens": 1, "output_tokens": 1, "shared_tokens": 2}',
        '{"at_ms": 1e999, "prompt_tokens": 1, "output_tokens": 1}',
        '{"at_ms": true, "prompt_tokens": 1, "output_tokens": 1}',
        '{"at_ms": 1, "prompt_tokens": true, "output_tokens": 1}',
        '{"at_ms": 1, "prompt_tokens": 1.5, "output_tokens": 1}',
        '{"at_ms": 1, "prompt_tokens": 1, "output_tokens": 2147483648}',
        '{"at_ms": 1, "prompt_tokens": 1, "output_tokens": 1, "group": 99999999999999999999}',
        '{"at_ms": 1, "prompt_tokens": 1, "output_tokens": 1, "group": -1}',
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "load.jsonl"
    file.write_text('{"at_ms": 1, "prompt_tokens": 1, "output_tokens": 1}\n' + line)
    with pytest.raises(ScenarioRefused, match=r"load\.jsonl:2"):
        recorded_arrivals(file)
    with pytest.raises(ScenarioRefused, match=r"nowhere - found No such file or directory, expected a text file"):
        recorded_arrivals(file.parent / "nowhere")


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", None])
def test_a_file_without_arrivals_is_refused(tmp_path: Path, data: bytes | None) -> None:
    file = tmp_path / "load.jsonl"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(ScenarioRefused):
        recorded_arrivals(file)


@pytest.mark.parametrize("wrong", [(0, 1.0), (5, 0.0), (5, 1e-300), (5, float("nan"))])
def test_loads_are_checked(wrong: tuple[int, float]) -> None:
    with pytest.raises(ScenarioRefused):
        drawn_arrivals(*wrong, 0)
    with pytest.raises(ScenarioRefused):
        ServingScenario(blocks=1)


def test_the_command_prints_json_and_a_table() -> None:
    arguments = ["serving", "--requests", "12", "--rate", "20", "--slots", "4"]
    done = CliRunner().invoke(command, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["requests_finished"] == {"length": 12}
    assert "idle_slot_share" in CliRunner().invoke(command, arguments).output


@pytest.mark.parametrize("option", [("--requests", "7"), ("--rate", "8.0"), ("--seed", "0"), ("--shared", "0.5")])
def test_what_recorded_arrivals_leave_no_choice_of_is_refused(tmp_path: Path, option: tuple[str, str]) -> None:
    (tmp_path / "arrivals").write_text('{"at_ms": 1, "prompt_tokens": 5, "output_tokens": 3}\n')
    done = CliRunner().invoke(command, ["serving", "--arrivals", str(tmp_path / "arrivals"), *option])
    assert isinstance(done.exception, ScenarioRefused) and "expected none beside --arrivals" in str(done.exception)
