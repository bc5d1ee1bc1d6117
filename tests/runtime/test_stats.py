"""Statistics as JSON lines and Prometheus text, and traces that a viewer opens (docs/runtime.md, 11)."""

import json
import re
from pathlib import Path

from tapeout.runtime.stats import Histogram, Statistics
from tapeout.runtime.trace import Recorder
from tests.runtime.null import Serving, prompt, serving


def ran(**options: object) -> Serving:
    s = serving(drafts=5, blocks=30, **options)  # type: ignore[arg-type]
    for i in range(8):
        s.submit(f"r{i}", prompt(24, i % 2) + prompt(i, 50 + i), n=2 if i == 3 else 1, max_tokens=20, ignore_eos=True)
    s.run()
    return s


def test_a_histogram_says_how_values_lie() -> None:
    histogram = Histogram((1, 2, 5))
    for value in (0.5, 1, 1.5, 4, 9):
        histogram.observe(value)
    histogram.observe(2, times=3)
    assert (histogram.counts, histogram.sum, histogram.largest, histogram.total) == ([2, 4, 1, 1], 22.0, 9, 8)
    assert [histogram.quantile(share) for share in (0.25, 0.5, 0.8, 0.99)] == [1, 2, 5, 9]
    assert Histogram((1, 2)).quantile(0.5) == 0.0
    only = Histogram((10, 20))
    only.observe(12)
    assert only.quantile(0.5) == 12, "never more than the largest value"


def test_the_json_line_is_one_line_with_everything() -> None:
    s = ran()
    line = s.scheduler.statistics.json_line(running=3)
    found = json.loads(line)
    assert "\n" not in line and list(found) == sorted(found)
    counts = s.scheduler.statistics.counts
    assert found["output_tokens"] == counts.output_tokens == 9 * 20 and found["requests_finished"] == {"length": 8} and found["running"] == 3
    assert found["acceptance"] == counts.drafts_accepted / counts.drafts_verified and 0 < found["idle_slot_share"] < 1
    assert found["ttft_ms_max"] >= found["ttft_ms_p50"] > 0 and set(found["busy_ms"]) <= {"decode", "prompt", "mixed"}
    assert sum(by["steps"] for by in found["step_ms_by"]) == counts.steps and {by["rows"] & (by["rows"] - 1) for by in found["step_ms_by"]} == {0}
    assert found["decoder_prompt_rows"] == s.device.decoder_prompt_rows > 0
    assert json.loads(Statistics().json_line())["verified_mean"] == 0.0, "an engine that did nothing has a line too"


def test_prometheus_text_is_well_formed_and_adds_up() -> None:
    s = ran()
    text = s.scheduler.statistics.prometheus(blocks_free=7)
    sample = re.compile(r'tapeout_[a-z_]+(\{((rows|context|le|reason|place)="[^"]+",?)+\})? -?[0-9.e+]+(Inf)?')
    for line in text.splitlines():
        assert line.startswith("# TYPE tapeout_") or sample.fullmatch(line), line
    assert "tapeout_submitted_total 8\n" in text and 'tapeout_requests_finished_total{reason="length"} 8\n' in text
    assert "# TYPE tapeout_blocks_free gauge\ntapeout_blocks_free 7\n" in text
    buckets = [int(count) for count in re.findall(r'tapeout_ttft_ms_bucket\{le="[^"]+"\} (\d+)', text)]
    assert buckets == sorted(buckets) and buckets[-1] == 9 and "tapeout_ttft_ms_count 9\n" in text
    steps = [int(n) for n in re.findall(r'tapeout_step_ms_by_count\{rows="\d+",context="\d+"\} (\d+)', text)]
    assert len(steps) > 3 and sum(steps) == s.scheduler.statistics.counts.steps
    assert len(re.findall("# TYPE (.+) ", text)) == len(set(re.findall("# TYPE (.+) ", text)))


def test_prometheus_numbers_lose_no_digit() -> None:
    statistics = Statistics()
    statistics.ttft_ms.observe(12_345_678.5)
    statistics.ttft_ms.observe(1.25)
    statistics.hit_tokens.observe(1_000_000)
    text = statistics.prometheus(disk_bytes=16_384_123_457, planned_ms=0.1)
    assert "tapeout_ttft_ms_sum 12345679.75\n" in text, "small times count beside large sums: their rate is what is looked at"
    assert "tapeout_disk_bytes 16384123457\n" in text and "tapeout_planned_ms 0.1\n" in text
    assert 'tapeout_hit_tokens_bucket{le="1048576"} 1\n' in text and 'tapeout_ttft_ms_bucket{le="0.1"} 0\n' in text


def test_gauges_say_what_holds_now() -> None:
    s = serving(slots=2, blocks=30)
    for i in range(3):
        s.submit(f"r{i}", prompt(9, i), max_tokens=9, ignore_eos=True)
    s.driver.step()
    gauges = s.scheduler.gauges()
    assert (gauges["running"], gauges["waiting"], gauges["slots_free"], gauges["blocks_free"]) == (2, 1, 0, 29 - 4)
    assert gauges["prefix_unknown"] == 2
    assert json.loads(s.scheduler.statistics.json_line(**gauges))["waiting"] == 1
    assert "tapeout_blocks_unpromised 25\n" in s.scheduler.statistics.prometheus(**gauges)
    s.run()


def test_a_trace_keeps_requests_apart_whose_ids_come_again() -> None:
    recorder = Recorder()
    for at, name in enumerate(["a", "b", "a", "c"]):
        recorder.arrived(name, float(at), 3)
        recorder.finished(name, at + 0.5, "length", 1)
    tracks = [(event["args"]["name"], event["tid"]) for event in recorder.document()["traceEvents"] if event["name"] == "thread_name"]
    assert tracks == [("a", 1), ("b", 2), ("c", 3)]


def test_a_trace_tells_each_request_and_each_step(tmp_path: Path) -> None:
    recorder = Recorder()
    s = ran(recorder=recorder, depth=1)
    recorder.write(tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    events = document["traceEvents"]
    assert document["displayTimeUnit"] == "ms"
    assert all({"ph", "name", "pid", "tid"} <= set(event) and event["ph"] in "MXiC" for event in events)
    assert all(event["ts"] >= 0 and event.get("dur", 0) >= 0 for event in events if event["ph"] != "M")
    named = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert set(named) == {f"r{i}" for i in range(8)} and len(set(named.values())) == 8
    steps = [event for event in events if event["ph"] == "X" and event["name"].startswith("step ")]
    counts = s.scheduler.statistics.counts
    assert len(steps) == counts.steps and sum(step["args"]["prompt_rows"] for step in steps) == counts.prompt_rows
    for name, track in named.items():
        own = [event["name"] for event in events if event["tid"] == track and event["pid"] == 2 and event["ph"] in "iX"]
        assert own[0] == "arrived" and own[-1] == "finished" and own.count("first token") == (2 if name == "r3" else 1)
        assert own.count("running") == own.count("scheduled")
    by_branch = [event for event in events if event["ph"] == "C" and event["name"] == "r0 branch 0 tokens a step"]
    assert 1 + sum(event["args"]["tokens"] for event in by_branch) >= 20
