"""Simulate what the engine's rules would do under a load, with no device and no model."""

from pathlib import Path
from typing import Annotated, Any

import typer

command = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


@command.callback()
def simulators() -> None:
    """Simulate what the engine's rules would do under a load, with no device and no model."""


@command.command()
def speculation(
    preset: Annotated[str, typer.Option(help="a named scenario: published")] = "published",
    trace: Annotated[Path | None, typer.Option(help="replay recorded steps (JSON lines) instead of drawing them")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, max=1000, help="numbers of runs, seeds 0, 1, ...; default: 6")] = None,
    steps: Annotated[int | None, typer.Option(help="steps of a run")] = None,
    sequences: Annotated[list[int] | None, typer.Option(help="concurrent sequences; repeat for several")] = None,
    rules: Annotated[list[str] | None, typer.Option("--rule", help="planner rules to compare; repeat; all: every ablation")] = None,
    lag: Annotated[int | None, typer.Option(help="age in steps of the rates that the total rests on")] = None,
    persistence: Annotated[float | None, typer.Option(help="how much acceptance persists between steps, 0 to 1")] = None,
    variable_ms: Annotated[float | None, typer.Option(help="extra time of steps of unequal width")] = None,
    out: Annotated[Path | None, typer.Option(help="write the gain over concurrency as an SVG plot")] = None,
    as_json: Json = False,
) -> None:
    """Compare planner rules for speculative verification with verifying every draft."""
    from tapeout.compiler import report
    from tapeout.compiler.files import check_output, write_text
    from tapeout.runtime.sim import speculation as simulator
    from tapeout.runtime.sim.acceptance import persistence as persistence_of
    from tapeout.runtime.sim.acceptance import recorded_load

    if trace is not None:
        _refuse("--trace", {"seeds": seeds, "steps": steps, "sequences": sequences, "persistence": persistence})
    if out is not None:
        check_output(out, "--out")
    scenario = simulator.scenario_of(
        preset,
        seeds=tuple(range(seeds or 6)),
        steps=steps,
        sequences=tuple(sequences) if sequences else None,
        lag=lag,
        persistence=persistence,
        variable_ms=variable_ms,
    )
    named = list(simulator.RULES) if rules == ["all"] else rules or ["fixed", "peer", "shadow", "ours"]
    if trace is None:
        lines, known = simulator.simulated(scenario, named), {"persistence": scenario.process.persistence}
        targets = [*simulator.published_targets(lines), *simulator.small_batch_target(lines)] if preset == "published" else []
    else:
        load = recorded_load(trace)
        scenario = simulator.for_trace(scenario, load)
        lines, known = simulator.simulated_trace(load, scenario, named), {"persistence": persistence_of(load), "steps": load.steps}
        targets = []
    if out is not None:
        write_text(out, simulator.gain_plot(lines), "--out")
    data = simulator.as_data(scenario, known, lines, targets, trace)
    report.emit(data, as_json, lambda: _show(data, out))


@command.command()
def serving(
    arrivals: Annotated[Path | None, typer.Option(help="JSON lines: at_ms, prompt_tokens, output_tokens, group, shared_tokens")] = None,
    requests: Annotated[int | None, typer.Option(min=1, max=1_000_000, help="requests to draw; default: 500")] = None,
    rate: Annotated[float | None, typer.Option(help="requests a second; default: 8")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="of the drawn load; default: 0")] = None,
    shared: Annotated[float | None, typer.Option(help="share of each prompt that its group has in common; default: 0.5")] = None,
    slots: Annotated[int, typer.Option(min=1, max=4096, help="sequences at a time")] = 64,
    blocks: Annotated[int, typer.Option(min=2, max=1_000_000, help="cache blocks of 128 tokens")] = 4096,
    drafts: Annotated[int, typer.Option(min=0, max=8, help="drafts verified a step")] = 0,
    in_flight: Annotated[int, typer.Option(min=0, max=2, help="steps planned ahead; 0 is synchronous")] = 1,
    cache: Annotated[bool, typer.Option(help="reuse prefixes")] = True,
    as_json: Json = False,
) -> None:
    """Run arrivals through the scheduler on a device without a model: waits, idle slots, prefix hits, preemptions."""
    from tapeout.compiler import report
    from tapeout.runtime.sim import serving as simulator

    scenario = simulator.ServingScenario(slots=slots, blocks=blocks, drafts=drafts, in_flight=in_flight, is_caching=cache)
    if arrivals is None:
        load = simulator.drawn_arrivals(
            500 if requests is None else requests, 8.0 if rate is None else rate, seed or 0, shared=0.5 if shared is None else shared
        )
    else:
        _refuse("--arrivals", {"requests": requests, "rate": rate, "seed": seed, "shared": shared})
        load = simulator.recorded_arrivals(arrivals)
    data = simulator.simulated_serving(load, scenario)
    report.emit(data, as_json, lambda: _show_serving(data))


def _refuse(recorded: str, drawn: dict[str, Any]) -> None:
    """What says how a load is drawn would be ignored beside one that is recorded."""
    from tapeout.runtime.sim.errors import ScenarioRefused

    for name, value in drawn.items():
        if value is not None:
            raise ScenarioRefused(name, value, f"none beside {recorded}, as what is recorded is not drawn")


def _show_serving(data: dict[str, Any]) -> None:
    from tapeout.compiler import report

    names = [
        "seconds", "output_tokens_per_s", "queue_ms_p50", "queue_ms_p99", "queue_ms_max", "ttft_ms_p50", "ttft_ms_p99", "between_tokens_ms_p50",
        "idle_slot_share", "hit_share", "replayed_rows", "preemptions", "recomputed_rows", "wasted_rows", "evictions", "steps", "mixed_steps",
    ]  # fmt: skip
    report.table(f"{data['requests']} requests, {data['scenario']['slots']} slots", ["what", "found"], [[name, data[name]] for name in names])


def _show(data: dict[str, Any], out: Path | None) -> None:
    from tapeout.compiler import report

    columns = ["sequences", "rule", "accepted", "verified", "tokens_per_s", "gain_percent", "standard_error"]
    scenario = data["scenario"]
    drawn = f"seeds {scenario['seeds'][0]} to {scenario['seeds'][-1]}, {scenario['steps']} steps each"
    what = f"trace {data['trace']}" if data["trace"] else drawn
    persists = "unknown (too few steps)" if data["persistence"] is None else f"{data['persistence']:.3g}"
    report.table(
        f"{what}, persistence {persists}, lag {scenario['lag']}",
        columns,
        [[line[name] for name in columns] for line in data["lines"]],
    )
    if data["targets"]:
        columns = ["what", "published", "low", "high", "found", "is_met"]
        report.table(
            "published figures, at 60 sequences unless it says otherwise (the scenario was fitted to them)",
            columns,
            [[target[name] for name in columns] for target in data["targets"]],
        )
    if out is not None:
        print(f"plot: {out}")
