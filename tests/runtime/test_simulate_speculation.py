"""The speculation simulator: published figures with seeds and errors printed, ablations in their order, traces, plots, the command."""

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tapeout.compiler.commands import main
from tapeout.runtime.planner import survival
from tapeout.runtime.sim.acceptance import Process, drawn_load, persistence, recorded_load
from tapeout.runtime.sim.errors import ScenarioRefused, TraceRefused
from tapeout.runtime.sim.plot import Series, line_plot
from tapeout.runtime.sim.speculation import (
    PRESETS,
    RULES,
    Scenario,
    gain_plot,
    published_targets,
    recorded_table,
    replayed,
    scenario_of,
    scenario_table,
    simulated,
    simulated_trace,
    small_batch_target,
)

PUBLISHED = PRESETS["published"]
NOISE = 4.0  # standard errors


def shown(scenario, lines):
    print(f"seeds {scenario.seeds}, {scenario.steps} steps, persistence {scenario.process.persistence}")
    for x in lines:
        print(f"  {x.sequences:3.0f} {x.rule:10} accepted {x.accepted:.3f} verified {x.verified:.3f} {x.tokens_per_s:8.1f} tokens/s "
              f"gain {x.gain_percent:+.3f} +- {x.standard_error:.3f} %")
    return {(x.sequences, x.rule): x for x in lines}


def test_a10_the_published_figures() -> None:
    scenario = replace(PUBLISHED, sequences=(60,), seeds=(0, 1, 2, 3))
    lines = simulated(scenario, ["fixed", "peer", "ours"])
    at = shown(scenario, lines)
    targets = published_targets(lines)
    assert len(targets) == 5 and all(target.is_met for target in targets), targets
    assert at[60, "fixed"].verified == 5.0 and at[60, "fixed"].gain_percent == 0
    assert 3.2 <= at[60, "peer"].verified <= 4.4
    assert at[60, "fixed"].accepted == pytest.approx(3.29, rel=0.03) and at[60, "peer"].accepted == pytest.approx(3.20, rel=0.03)
    assert 4 <= at[60, "peer"].gain_percent <= 7 and at[60, "ours"].gain_percent >= at[60, "peer"].gain_percent - 0.1


@pytest.mark.parametrize("kept", [0.0, 0.8, 0.95])
def test_our_planner_loses_nothing_with_few_sequences(kept) -> None:
    scenario = scenario_of("published", sequences=(2, 4, 8, 15), seeds=(0, 1, 2), persistence=kept)
    at = shown(scenario, simulated(scenario, ["peer", "shadow", "ours"]))
    for n in scenario.sequences:
        line = at[n, "ours"]
        assert line.gain_percent >= -NOISE * line.standard_error - 0.01, line
        assert at[n, "shadow"].gain_percent >= -0.1
    (target,) = small_batch_target(list(at.values()))
    assert target.is_met and target.found == min(at[n, "ours"].gain_percent for n in scenario.sequences)
    worse = [replace(line, gain_percent=-1.0) if line.sequences == 4 else line for line in at.values()]
    assert not small_batch_target(worse)[0].is_met and small_batch_target([line for line in at.values() if line.rule == "peer"]) == []
    if kept == 0:
        assert all(at[n, "peer"].gain_percent < -0.3 for n in (2, 4, 8))  # the loss that ours avoids


@pytest.mark.full
@pytest.mark.parametrize(("kept", "gains"), [
    (0.0, {2: (-2.81, 0.0), 4: (-1.08, 0.0), 8: (-0.58, -0.03), 16: (0.58, 1.0), 60: (5.76, 5.95)}),
    (0.8, {2: (-0.86, -0.02), 4: (-0.33, 0.0), 8: (0.01, 0.02), 16: (0.97, 1.01), 60: (5.99, 5.97)}),
    (0.95, {2: (-0.06, 0.0), 4: (-0.01, 0.0), 8: (0.27, 0.27), 16: (1.23, 1.22), 60: (6.10, 6.09)}),
])
def test_peer_and_shadow_over_persistence(kept, gains) -> None:
    """Gains of an independent simulation of the same model, 5 seeds of 1,500 steps, peer and shadow.

    Its own standard errors are at most 0.17 points at 2 sequences and 0.05 at more.
    """
    scenario = scenario_of("published", sequences=tuple(gains), seeds=(0, 1, 2, 3, 4), steps=1500, persistence=kept)
    at = shown(scenario, simulated(scenario, ["peer", "shadow", "ours"]))
    for n, (peer, shadow) in gains.items():
        for rule, expected in (("peer", peer), ("shadow", shadow)):
            error = NOISE * (at[n, rule].standard_error ** 2 + (0.17 if n == 2 else 0.05) ** 2) ** 0.5
            assert at[n, rule].gain_percent == pytest.approx(expected, abs=error), (n, rule)
        assert at[n, "ours"].gain_percent >= -NOISE * at[n, "ours"].standard_error - 0.01


def test_ablations_come_in_their_order() -> None:
    """Fresh rates beat lagged ones; early stopping collapses on padded times; smoothing rates erases the gain."""
    scenario = replace(PUBLISHED, sequences=(60,), seeds=(0, 1), steps=300)
    gain = {x.rule: x.gain_percent for x in simulated(scenario, list(RULES))}
    assert gain["peer-lag-0"] > gain["shadow"] > gain["peer"] > 4
    assert abs(gain["mean-32"] - gain["shadow"]) < 0.3 and abs(gain["mean-4"] - gain["shadow"]) < 0.3
    assert gain["early-stop"] < -20 and gain["smoothed"] < 3
    few = replace(scenario, sequences=(2,))
    few_gain = {x.rule: x.gain_percent for x in simulated(few, ["peer", "peer-lag-0", "shadow"])}
    assert few_gain["peer"] < -1 < -0.2 < few_gain["shadow"] < few_gain["peer-lag-0"]


def test_the_cost_of_unequal_widths_is_charged() -> None:
    plain = replace(PUBLISHED, sequences=(16,), seeds=(0,), steps=200)
    dear = replace(plain, variable_ms=5.0)
    (peer, ours), (dear_peer, dear_ours) = (simulated(s, ["peer", "ours"]) for s in (plain, dear))
    assert dear_peer.gain_percent < -20 and peer.gain_percent > -1
    assert dear_ours.gain_percent == 0.0 <= ours.gain_percent + 0.1


def test_the_level_is_beta_distributed_and_persists() -> None:
    load = drawn_load(Process(noise=0.0, lowest=0.0, highest=1.0), 50, 1, 400, 0)
    level = np.concatenate([c[:, 0] for c in load.acceptance])
    assert level.mean() == pytest.approx(0.982 / 1.482, abs=0.01)
    assert level.var() == pytest.approx(0.982 * 0.5 / (1.482**2 * 2.482), abs=0.005)
    assert (level > 0.98).mean() == pytest.approx(0.13987, abs=0.01)  # 1 - I_0.98(0.982, 0.5), by another quadrature
    for kept in (0.0, 0.95):
        measured = persistence(drawn_load(Process(persistence=kept), 30, 5, 400, 1))
        assert abs(measured) < 0.1 if kept == 0 else 0.6 < measured < 0.95


def test_the_same_seed_gives_the_same_load_and_others_differ() -> None:
    one, same, other = (drawn_load(Process(), 3, 5, 4, seed) for seed in (5, 5, 6))
    assert np.array_equal(one.acceptance, same.acceptance) and not np.array_equal(one.acceptance, other.acceptance)


def test_verifying_everything_is_counted_by_hand() -> None:
    scenario = Scenario(positions=2, steps=2, seeds=(0,), sequences=(2,))
    load = drawn_load(scenario.process, 2, 2, 2, 0)
    found = replayed(load, scenario, scenario_table(scenario, 2), "fixed")
    tokens = sum(1 + a + a * b for step in load.acceptance for a, b in step.tolist())
    assert found.tokens == pytest.approx(tokens) and found.ms == pytest.approx(2 * (10.057 + 0.012 * 8))
    assert (found.verified, found.accepted) == (2.0, pytest.approx(tokens / 4))


def test_overconfident_heads_are_scored_by_what_is_true() -> None:
    honest = drawn_load(Process(), 8, 5, 50, 0)
    boastful = drawn_load(Process(overconfidence=3.0), 8, 5, 50, 0)
    assert np.array_equal(honest.acceptance, boastful.acceptance) and not np.array_equal(honest.confidences, boastful.confidences)
    table = scenario_table(PUBLISHED, 8)
    assert replayed(honest, PUBLISHED, table, "fixed") == replayed(boastful, PUBLISHED, table, "fixed")


@pytest.mark.parametrize(("field", "value"), [
    ("positions", 0), ("steps", 1), ("lag", -1), ("sequences", ()), ("sequences", (0,)), ("seeds", ()), ("seeds", (1, 1)),
    ("fixed_ms", 0.0), ("variable_ms", -1.0), ("row_ms", float("nan")), ("steps", 1_000_000), ("graph_rows", 0),
    ("process", Process(persistence=1.0)), ("process", Process(overconfidence=0.0)),
])
def test_scenarios_that_are_refused(field, value) -> None:
    with pytest.raises(ScenarioRefused):
        replace(PUBLISHED, **{field: value})


# -- traces


def write_trace(path: Path, steps: int = 40) -> Path:
    """Sequences that come and go: 5 of 7, another five in each step, with times 10 + 0.5 a row."""
    random = np.random.default_rng(0)
    level = random.uniform(0.3, 0.99, 7)
    lines = []
    for step in range(steps):
        names = [(step // 3 + i) % 7 for i in range(5)]
        confidences = np.clip(level[names][:, None] + random.normal(0, 0.03, (5, 4)), 0, 1)
        rows = int(random.integers(5, 26))
        lines.append(json.dumps({"sequences": names, "confidences": confidences.round(4).tolist(), "ms": 10 + 0.5 * rows, "rows": rows}))
    path.write_text("\n".join(lines) + "\n\n")
    return path


def test_a_trace_is_replayed(tmp_path) -> None:
    load = recorded_load(write_trace(tmp_path / "trace.jsonl"))
    assert load.steps == 40 and load.sequences[0] == (0, 1, 2, 3, 4) and load.sequences[3] == (1, 2, 3, 4, 5)
    scenario = replace(PUBLISHED, positions=4)
    table = recorded_table(load, scenario)
    np.testing.assert_allclose(table.ms[:, 0], 10 + 0.5 * table.rows, rtol=1e-3)
    fixed, peer, ours = simulated_trace(load, scenario, ["fixed", "peer", "ours"])
    assert fixed.sequences == 5 and fixed.verified == 4 and fixed.gain_percent == 0
    assert fixed.accepted == pytest.approx(np.mean([1 + survival(c).sum(axis=1).mean() for c in load.confidences]))
    assert peer.gain_percent > 1 and ours.verified < 4
    assert 0.8 < persistence(load) < 1


def test_a_trace_without_times_uses_the_scenario(tmp_path) -> None:
    path = tmp_path / "bare.jsonl"
    path.write_text('{"confidences": [[0.5, 0.25]]}\n{"confidences": [[0.5, 0.25], [1, 0]]}\n')
    load, scenario = recorded_load(path), replace(PUBLISHED, positions=2)
    assert recorded_table(load, scenario).ms.tolist() == scenario_table(scenario, 2).ms.tolist()
    (fixed,) = simulated_trace(load, scenario, ["fixed"])
    assert fixed.sequences == 1.5 and fixed.accepted == pytest.approx((1.625 + 1.625 + 2) / 3)


@pytest.mark.parametrize(("line", "found"), [
    ("{", "one JSON object"), ("[]", "key confidences"), ("{}", "key confidences"), ('{"confidences": 3}', "neither empty"),
    ('{"confidences": [[]]}', "neither empty"), ('{"confidences": [[0.5], [0.5, 0.5]]}', "equally long"), ('{"confidences": [["x"]]}', "numbers"),
    ('{"confidences": [[1.5]]}', "0 to 1"), ('{"confidences": [[NaN]]}', "0 to 1"), ('{"confidences": [[0.5]], "sequences": [1, 2]}', "1 different"),
    ('{"confidences": [[0.5], [0.5]], "sequences": [1, 1]}', "2 different"), ('{"confidences": [[0.5]], "sequences": ["a"]}', "1 different"),
    ('{"confidences": [[0.5]], "ms": 0}', "above 0"), ('{"confidences": [[0.5]], "ms": 1e308}', "up to 1000000000000"),
    ('{"confidences": [[0.5]], "ms": "1"}', "above 0"),
    ('{"confidences": [[0.5]], "rows": -1}', "at least 0"), ('{"confidences": [[0.5]], "rows": 1.5}', "whole number"),
    ("[" * 100_000, "one JSON object"), ('{"confidences": {"a": 1}}', "equally long"),
])
def test_traces_that_are_refused(tmp_path, line, found) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"confidences": [[0.5]]}\n' + line + "\n")
    with pytest.raises(TraceRefused, match=found) as refused:
        recorded_load(path)
    assert refused.value.where.startswith(f"{path}, line 2")


def test_files_that_are_no_trace(tmp_path) -> None:
    for content, found in ((b"", "no steps"), (b"\xff\xfe", "UTF-8"), (b'{"confidences": [[1]]}\n{"confidences": [[1, 1]]}', "one block length")):
        (tmp_path / "trace").write_bytes(content)
        with pytest.raises(TraceRefused, match=found):
            recorded_load(tmp_path / "trace")


# -- plots and the command


def test_a_plot_shows_every_point() -> None:
    text = line_plot("a < b", "x", "y", [Series("one", ((2, -1.5, 0.25), (64, 3.0, 0.0))), Series("two & more", ((8, 0.0, 0.5),))])
    root = ET.fromstring(text)
    marks = root.findall(".//{*}circle")
    assert len(marks) == 3 and root.find(".//{*}text").text == "a < b"
    x, y = ([float(m.get(k)) for m in marks] for k in ("cx", "cy"))
    assert x[0] < x[2] < x[1] and y[1] < y[2] < y[0]
    assert x[2] - x[0] == pytest.approx(2 / 5 * (x[1] - x[0]), abs=0.02)  # logarithmic: 2 to 8 is two of five doublings
    assert text == line_plot("a < b", "x", "y", [Series("one", ((2, -1.5, 0.25), (64, 3.0, 0.0))), Series("two & more", ((8, 0.0, 0.5),))])
    for series in ([], [Series("flat", ((4, 0.0, 0.0),))]):
        ET.fromstring(line_plot("t", "x", "y", series))


def test_the_gain_plot_has_a_line_for_each_rule() -> None:
    lines = simulated(replace(PUBLISHED, sequences=(2, 8), seeds=(0,), steps=20), ["fixed", "peer"])
    assert len(re.findall("<polyline", gain_plot(lines))) == 2


def run(capsys, *arguments):
    code = main(["sim", "speculation", *arguments])
    return code, capsys.readouterr()


def test_the_command_speaks_json_and_plots(capsys, tmp_path) -> None:
    out = tmp_path / "gain.svg"
    code, said = run(capsys, "--seeds", "2", "--steps", "60", "--sequences", "60", "--sequences", "4", "--out", str(out), "--json")
    data = json.loads(said.out)
    assert code == 0 and data["scenario"]["seeds"] == [0, 1] and len(data["lines"]) == 8 and len(data["targets"]) == 6
    assert ET.parse(out).getroot().tag.endswith("svg")
    code, said = run(capsys, "--seeds", "1", "--steps", "30", "--sequences", "60")
    assert code == 0 and "published figures" in said.out and "ours" in said.out


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_command_replays_a_trace_of_a_few_steps(capsys, tmp_path, steps) -> None:
    """They say nothing of how acceptance persists: the table says so, where it failed."""
    code, said = run(capsys, "--trace", str(write_trace(tmp_path / "t.jsonl", steps)))
    assert code == 0 and f"trace {tmp_path}/t.jsonl, persistence " in said.out
    assert steps > 1 or "persistence unknown (too few steps), lag 2" in said.out


@pytest.mark.parametrize("option", [("--seeds", "2"), ("--steps", "9"), ("--sequences", "3"), ("--persistence", "0.5")])
def test_what_a_trace_leaves_no_choice_of_is_refused(capsys, tmp_path, option) -> None:
    code, said = run(capsys, "--trace", str(write_trace(tmp_path / "t.jsonl")), *option)
    assert code == 1 and f"[S101] a simulated scenario is refused - {option[0].strip('-')} - found " in said.err
    assert "expected none beside --trace" in said.err


def test_the_command_replays_a_trace(capsys, tmp_path) -> None:
    code, said = run(capsys, "--trace", str(write_trace(tmp_path / "t.jsonl")), "--rule", "all", "--json")
    data = json.loads(said.out)
    assert code == 0 and [line["rule"] for line in data["lines"]] == list(RULES) and data["targets"] == [] and data["persistence"] > 0.8


@pytest.mark.parametrize("arguments", [
    ("--rule", "best"), ("--preset", "none"), ("--steps", "1"), ("--sequences", "0"), ("--persistence", "1"), ("--trace", "/nowhere/at/all"),
])
def test_the_command_refuses(capsys, arguments) -> None:
    code, said = run(capsys, *arguments)
    assert code == 1 and said.err.startswith("tapeout: ") and said.err.count("\n") == 1


def test_codes_are_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    for kind in (ScenarioRefused, TraceRefused):
        assert f"| {kind.code} | {kind.sentence} |" in page
