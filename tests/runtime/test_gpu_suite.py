"""Parts of the GPU suite that need no GPU: operands that take turns, kernels that only read, and what the race checker is shown and says."""

import ctypes
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tapeout.runtime.artifact import load_artifact, write_artifact
from tapeout.runtime.device import Call
from tests.bench import gpu_acceptance, gpu_answers, gpu_arrivals, gpu_kernels, gpu_races, gpu_timing
from tests.bench.gpu_timing import PLACE, Span, in_turns
from tests.runtime.fake_cuda import FakeDriver
from tests.runtime.test_cuda_device import gpu_data

ARENA, WEIGHT, OTHER = Span(1000, 300), Span(5000, 700), Span(9000, 50)


class Copying:
    """Writes down what is copied, and hands out memory at 10^6."""

    def __init__(self) -> None:
        self.copies: list[tuple[int, int, int]] = []
        self.sizes: list[int] = []

    def pool(self, size: int) -> int:
        self.sizes.append(size)
        return 10**6

    def copied(self, to: int, source: int, size: int) -> None:
        self.copies.append((to, source, size))


def test_operands_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many copies as pass the cache; addresses inside copied memory move with it, others stay; nothing that no call touches is copied."""
    monkeypatch.setattr(gpu_timing, "TURNED_BYTES", 3000)
    device, calls = Copying(), [Call(4, (1010, 5003, 77), (2, 1, 1)), Call(5, (1299, 12), (1, 1, 1))]
    made = in_turns(device, calls, [ARENA, WEIGHT, OTHER], 1000.0, 64)  # type: ignore[arg-type]
    arena, each = 2 * PLACE, 2 * PLACE + 3 * PLACE
    assert device.sizes == [2 * each]
    assert device.copies == [copy for at in (10**6, 10**6 + each) for copy in ((at, 1000, 300), (at + arena, 5000, 700))]
    assert made[0] == calls
    assert [[call.buffers for call in turn] for turn in made[1:]] == [
        [(at + 10, at + arena + 3, 77), (at + 299, 12)] for at in (10**6, 10**6 + each)
    ]
    assert [call.kernel for call in made[2]] == [4, 5]


def test_turns_are_bounded_by_time_memory_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [Call(0, (1000,), (1, 1, 1))]

    def turns(touched: float, most: int = 64) -> int:
        return len(in_turns(Copying(), calls, [ARENA], touched, most))  # type: ignore[arg-type]

    monkeypatch.setattr(gpu_timing, "TURNED_BYTES", 1000)
    assert (turns(1000), turns(2000), turns(999), turns(1), turns(1, 3)) == (1, 1, 2, 64, 3)
    monkeypatch.setattr(gpu_timing, "POOL_BYTES", 3 * 2 * PLACE)
    assert turns(1) == 4


@pytest.mark.parametrize("waits", [False, True])
def test_the_plain_kernels_assemble(tmp_path: Path, waits: bool) -> None:
    triton = pytest.importorskip("triton")
    source = tmp_path / "plain.ptx"
    source.write_text(gpu_timing.ptx(waits=waits))
    assert source.read_text().count("griddepcontrol.wait") == (len(gpu_timing.IN_FLIGHT) if waits else 0)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    for chip in ("sm_90", "sm_100"):
        done = subprocess.run(
            [tool, "-v", f"-arch={chip}", source, "-o", tmp_path / "plain.cubin"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert all(f"'plain_{n}'" in done.stderr for n in (0, *gpu_timing.IN_FLIGHT))


def test_launches_one_after_the_other_are_a_step_s_other_tables(tmp_path: Path, native: ctypes.CDLL) -> None:
    """Tables of the programs are made anew for as long as that lasts, and those from before are used again."""
    driver = FakeDriver(native)
    artifact = load_artifact(write_artifact(tmp_path / "a", *gpu_data(toy_add={"waits": True})), target="sm90")
    device = gpu_timing.MeasuredDevice(artifact, module=driver)
    add, before = device.kernel("toy_add"), {"a part": "a table"}
    line, programs = [Call(add, (1,), (1, 1, 1))] * 3, SimpleNamespace(_tables=before)
    with device.one_after_the_other(programs):  # type: ignore[arg-type]
        device.table(line)
        assert not driver.early and programs._tables == {}
    device.table(line)
    assert driver.early and programs._tables is before
    device.close()


# -- the race checker


def test_copies_have_names_of_their_own() -> None:
    assert gpu_races.marked("norm_rope_quantize_d9e5ff84f8") == "norm_rope_quantizeZd9e5ff84f8"


@pytest.mark.parametrize(
    ("grid", "clipped"),
    [((5, 2, 1), (5, 2, 1)), ((400, 1, 1), (132, 1, 1)), ((3, 1000, 1), (3, 44, 1)), ((200, 300, 1), (200, 1, 1)), ((1, 1, 1), (1, 1, 1))],
)
def test_grids_are_clipped_along_their_longest_axis(grid: Any, clipped: Any) -> None:
    assert gpu_races.clipped(grid, 132) == clipped


def test_reports_are_counted_by_kernel_and_pair() -> None:
    said = "".join(f"checked {what} s\n" for what in ("attend_8cc96f96fb of step 0 rows 3: 0.250", "attend_8cc96f96fb of step 2 rows 1: 0.500",
                                                     "rope_0 of step 2 rows 1: 1.000"))  # fmt: skip
    reports = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at attendZ8cc96f96fb+0x34b0
=========     and Read access at attendZ8cc96f96fb+0x3fa0 [128 hazards]
=========     and Read access at attendZ8cc96f96fb+0xcbb0 [256 hazards]
=========
========= Error: Race reported between Write access at attendZ8cc96f96fb+0x34b0
=========     and Read access at attendZ8cc96f96fb+0x3fa0 [2 hazards]
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""
    table = gpu_races.table_of(said, reports)
    assert (table["attend_8cc96f96fb"].rows, table["attend_8cc96f96fb"].seconds) == ([3, 1], 0.75)
    assert table["attend_8cc96f96fb"].pairs == {"error: write at 34b0, read at 3fa0": 130, "error: write at 34b0, read at cbb0": 256}
    assert table["rope_0"].pairs == {}
    assert gpu_races.show(table, ["attend_8cc96f96fb", "rope_0"], Path("none")) == 1  # the one with hazards
    assert gpu_races.show(table, ["attend_8cc96f96fb", "rope_0", "linear_1"], Path("none")) == 2  # and one that was not checked


def test_kernels_are_loaded_when_they_are_launched_and_copies_under_other_names(tmp_path: Path) -> None:
    artifact = load_artifact(write_artifact(tmp_path / "artifact", *gpu_data()), target="sm90")
    driver, symbol = FakeDriver(), artifact.manifest.kernels[0].symbol
    device = gpu_races.CopyingDevice(artifact, module=driver)
    assert "cuModuleLoadData" not in driver.names()
    device.table([Call(0, (64, 128), (1, 1, 1))] * 2)
    own = tmp_path / "own"
    own.mkdir()
    copy = device.marked(artifact, 0, own)
    (own / f"{symbol}.cubin").write_bytes(f"cubin {symbol} and {symbol} of its own".encode())
    other, name = device.marked(artifact, 0, own), gpu_races.marked(symbol)
    device.table([Call(number, (64, 128), (1, 1, 1)) for number in (copy, other)])
    loaded = [arguments[0] for called, arguments in driver.log if called == "cuModuleLoadData"]
    assert loaded == [f"cubin {symbol}".encode(), f"cubin {name}".encode(), f"cubin {name} and {name} of its own".encode()]
    assert [arguments[0] for called, arguments in driver.log if called == "cuLaunchKernel"] == [symbol, symbol, name, name]
    device.close()


CHECKER = """#!{python}
import json, sys, time
if "--version" in sys.argv:
    print("Version {release}.0.0 (build 1)")
    sys.exit()
value = lambda name: sys.argv[sys.argv.index(name) + 1]
if "tests.bench.gpu_arrivals" in sys.argv:
    with open(value("--log-file"), "w") as log:
        for toy in {toys}:
            print(f"========= Error: Race reported between Write access at {{toy}}+0x10", file=log)
            print(f"=========     and Read access at {{toy}}+0x20 [5 hazards]", file=log)
        print("========= RACECHECK SUMMARY: some", file=log)
    sys.exit()
assert value("--kernel-name") == "kns=Z" and value("--weights") == "random"
names = {names}
part = int(value("--part"))
for name in names[part::2]:
    print(f"checked {{name}} of step 0 rows 3: 0.100 s", flush=True)
with open(value("--log-file"), "w") as log:
    if part in {racing}:
        first, digest = names[part].rsplit("_", 1)
        print(f"========= Error: Race reported between Write access at {{first}}Z{{digest}}+0x10", file=log)
        print(f"=========     and Read access at {{first}}Z{{digest}}+0x20 [7 hazards]", file=log)
    print("========= RACECHECK SUMMARY: some", file=log)
if part in {hanging}:
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("release", "toys", "racing", "hanging", "code", "says"),
    [
        ("2026.3", ["toy_elected"], [], [], 0, ", 0 with hazards"),
        ("2026.3", ["toy_elected"], [], [], 0, "for its group: 5 hazards reported; every thread for itself: 0"),
        ("2026.3", ["toy_elected", "toy_own"], [], [], 1, "every thread for itself: 5"),
        ("2026.1", [], [1], [], 1, "      7 error: write at 10, read at 20"),
        ("2027.0", [], [], [1], gpu_races.LATE, "process 1: exit code None"),
        ("2025.3", [], [], [], 3, "Version 2025.3; needed: compute-sanitizer 2026.1 or later"),
    ],
)
def test_processes_under_the_checker_are_put_together(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    release: str,
    toys: list[str],
    racing: list[int],
    hanging: list[int],
    code: int,
    says: str,
) -> None:
    artifact = write_artifact(tmp_path / "artifact", *gpu_data())
    names = [k.symbol for k in gpu_data()[0].manifest.kernels]
    checker = tmp_path / "checker"
    checker.write_text(CHECKER.format(python=sys.executable, release=release, names=names, toys=toys, racing=racing, hanging=hanging))
    checker.chmod(0o755)
    given = [artifact, "--checker", checker, "--processes", "2", "--seconds", "2" if hanging else "20", "-o", tmp_path / "found.json"]
    assert gpu_races.main([str(word) for word in given]) == code
    assert says in capsys.readouterr().out
    if code < 3:
        found = json.loads((tmp_path / "found.json").read_text())
        assert {row["kernel"] for row in found["kernels"]} == set(names)
        assert [bool(row["pairs"]) for row in found["kernels"]].count(True) == len(racing)


def test_a_machine_without_the_checker_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_races.main(["nowhere", "--checker", "no-such-checker"]) == 3
    assert capsys.readouterr().out.startswith("found no no-such-checker; needed: compute-sanitizer 2026.1 or later")


# -- kernels that meet at barriers

PTX = """	@%p1 mbarrier.init.shared::cta.b64 [%r1], 1;
	@%p2 mbarrier.init.shared::cta.b64 [%r2], 2;
	st.shared.b32 [%r3], %r4;
	bar.sync 	4, 128;
	// begin inline asm
	@%p3 mbarrier.arrive.shared::cta.b64 _, [%r1];
	// end inline asm
	mbarrier.try_wait.parity.shared::cta.b64 complete, [%r2], %r5;
"""


def test_every_thread_arrives_for_itself() -> None:
    found = gpu_arrivals.own_arrivals(PTX)
    assert "	mbarrier.arrive.shared::cta.b64 _, [%r1];" in found
    assert "@%p1 mbarrier.init.shared::cta.b64 [%r1], 128;" in found and "[%r2], 256;" in found
    assert [line for line in found.splitlines() if "mbarrier" not in line] == [line for line in PTX.splitlines() if "mbarrier" not in line]
    assert gpu_arrivals.meets_at_barriers(PTX) and not gpu_arrivals.meets_at_barriers("bar.sync 0, 128;")


def test_both_forms_of_the_toy_assemble_and_differ_in_arrivals_only(tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    forms = gpu_arrivals.toys()
    for name, text in forms.items():
        (tmp_path / f"{name}.ptx").write_text(text)
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
        done = subprocess.run([tool, "-arch=sm_90", f"{name}.ptx", "-o", "out"], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    one, own = (text.splitlines() for text in forms.values())
    changed = [(a.strip(), b.strip()) for a, b in zip(one, own, strict=True) if a != b]
    assert changed[0] == (".visible .entry toy_elected(.param .u64 out)", ".visible .entry toy_own(.param .u64 out)")
    assert [a.split("]")[1] + b.split("]")[1] for a, b in changed[1:3]] == [", 1;, 128;"] * 2
    assert [a.removeprefix("@%p1 ") == b for a, b in changed[3:]] == [True, True]


def test_arrivals_without_a_meeting_are_not_changed() -> None:
    with pytest.raises(ValueError, match="without a meeting"):
        gpu_arrivals.own_arrivals(PTX.replace("bar.sync 	4, 128;", "\n\n\n\n"))
    with pytest.raises(ValueError, match="1 arrivals of another kind"):
        gpu_arrivals.own_arrivals(PTX + "@one mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r51], 32768;")
    with pytest.raises(ValueError, match=r"groups of \[64, 128\]"):
        gpu_arrivals.own_arrivals(PTX + PTX.replace("128", "64"))


# -- the acceptance


PART = gpu_acceptance.Check("every kernel's", [], 3, ("0 wrong",), ("wrong",))


@pytest.mark.parametrize(
    ("text", "verdict", "says"),
    [
        ("print('0 wrong')", "ok", ""),
        ("print('1 wrong')", "FAILED", "exit code 0, without '0 wrong'; its last line: 1 wrong"),
        ("print('0 wrong'); raise SystemExit(1)", "FAILED", "exit code 1; its last line: 0 wrong"),
        ("import time; print('0 wrong', flush=True); time.sleep(30)", "NOT DONE", "stopped after 3 s; its last line: 0 wrong"),
    ],
)
def test_a_check_holds_by_exit_code_words_and_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, verdict: str, says: str
) -> None:
    (tmp_path / "results").mkdir()
    found = gpu_acceptance.done(replace(PART, command=[sys.executable, "-c", text]), tmp_path, time.monotonic() + 99)
    assert (found.verdict, found.says) == (verdict, says)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"{verdict:8} every kernel's: ") and said[0].endswith(says)
    assert said[1].strip() == text.partition("'")[2].partition("'")[0]
    assert "wrong" in (tmp_path / "results" / "every-kernel-s.txt").read_text()


def test_a_check_ends_with_all_that_it_started(tmp_path: Path) -> None:
    """What a checker starts must not go on beside the next check."""
    (tmp_path / "results").mkdir()
    inner = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    found = gpu_acceptance.done(replace(PART, command=[sys.executable, "-c", outer]), tmp_path, time.monotonic() + 99)
    assert found.verdict == "NOT DONE"
    assert _is_gone(int((tmp_path / "pid").read_text()))


def _is_gone(process: int) -> bool:
    """Whether a process has ended; a dead one may wait for its parent a moment."""
    for _ in range(50):
        state = Path(f"/proc/{process}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.1)
    return False


def test_a_check_that_watches_the_time_is_told_it_and_says_what_is_left(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    text = f"import sys; print(sys.argv[1:], '0 wrong, 7 not in time'); raise SystemExit({gpu_acceptance.LATE})"
    check = replace(PART, command=[sys.executable, "-c", text], seconds=120)
    found = gpu_acceptance.done(replace(check, watches=True), tmp_path, time.monotonic() + 60.5)
    assert (found.verdict, found.limit) == ("NOT DONE", 60)
    assert found.told == ("['--seconds', '45'] 0 wrong, 7 not in time",)
    assert gpu_acceptance.done(check, tmp_path, time.monotonic() + 60.5).verdict == "FAILED"
    late = gpu_acceptance.done(check, tmp_path, time.monotonic() + 2)
    assert (late.verdict, late.seconds, late.says) == ("NOT DONE", 0.0, "not begun: no time was left")


def test_everything_that_is_asked_has_a_check() -> None:
    checks = [*gpu_acceptance.alone(Path("f"), Path("s"), 256), *gpu_acceptance.together(Path("f"), Path("s"), "checker")]
    asked = [check.name for check in checks]
    assert len(set(asked)) == len(asked) == 14
    for name in ("slice", "tiny"):
        of = ("memcheck", "racecheck", "every kernel within its op's bound", "kernels of all buckets give a row the same bits")
        assert {f"{name}: {what}" for what in of} <= set(asked)
    assert all(check.holds or check.name == "slice is made" for check in checks)


def test_checks_that_watch_the_time_take_it_as_an_option() -> None:
    for check in gpu_acceptance.together(Path("f"), Path("s"), "checker"):
        if check.watches:
            said = subprocess.run([*check.command[:3], "--help"], capture_output=True, text=True, check=True).stdout
            assert "--seconds" in said


# -- which launch stands for a kernel


def test_a_launch_of_the_usual_number_of_rows_stands_for_a_kernel() -> None:
    def launch(extent: str, read: float) -> Any:
        return SimpleNamespace(buffers=[("arena", 0), ("extent", extent)], cost={"read": {extent: read, "fixed": 7.0}})

    counts = {"rows": 64.0, "kept": 64.0, "drafts": 320.0}
    found = [(3, launch("rows", 1.0)), (5, launch("kept", 2.0)), (9, launch("drafts", 9.0))]
    assert gpu_kernels._typical(found, counts) == 5  # most have 64 rows; this one moves most of them
    assert gpu_kernels._typical([found[0], found[2]], counts) == 9  # as many of either: the one of more rows
    assert gpu_kernels.quantities(found[1][1], counts) == {"read": 135.0}


@pytest.mark.parametrize("good", [True, False])
def test_everything_together_ends_with_what_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, good: bool
) -> None:
    def check(name: str, words: str) -> gpu_acceptance.Check:
        return gpu_acceptance.Check(name, [sys.executable, "-c", f"print({words!r})"], 20, ("all is well",))

    monkeypatch.setattr(gpu_acceptance, "alone", lambda folder, slices, decode: [check("first", "all is well")])
    monkeypatch.setattr(
        gpu_acceptance, "together", lambda folder, slices, checker: [check("second", "all is well" if good else "not at all")]
    )
    assert gpu_acceptance.main(["run", str(tmp_path)]) == (0 if good else 1)
    said, second = capsys.readouterr().out.splitlines(), "ok" if good else "FAILED"
    assert [line.split(":")[0] for line in said[:2]] == ["ok       first", f"{second:8} second"]
    assert [line.split()[:2] for line in said[3:6]] == [["check", "s"], ["first", "ok"], ["second", second]]
    assert said[6].startswith(f"{2 if good else 1} of 2 hold, in ")
    rows = json.loads((tmp_path / "results/acceptance.json").read_text())
    assert [(row["name"], row["verdict"]) for row in rows] == [("first", "ok"), ("second", second)]


@pytest.mark.parametrize(
    ("cuda", "hits", "good"),
    [([[5, 6], [7]], None, True), ([[5, 6], [8]], None, False), ([[5, 6]], None, False), ([[5], [6], [7]], (0, 256, 256), True),
     ([[5], [6], [7]], (0, 0, 256), False)],
)  # fmt: skip
def test_answers_of_both_devices_are_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cuda: list[list[int]], hits: tuple[int, ...] | None, good: bool
) -> None:
    """The CPU says [5, 6], [7] of two prompts; with a past [5], then [6], [7] in a second process."""

    def answered(folder: Path, device: str, prompts: Any, *options: object) -> list[dict[str, Any]]:
        second = len(prompts) > 1
        texts = cuda if device == "cuda" else [[5, 6], [7]] if hits is None else [[5], [6], [7]]
        cached = hits if device == "cuda" and hits else (0, 256, 256)
        rows = [{"token_ids": ids, "cache": {"hit_tokens": n}} for ids, n in zip(texts, cached, strict=False)]
        return rows if hits is None else rows[1:] if second else rows[:1]

    monkeypatch.setattr(gpu_answers, "answered", answered)
    monkeypatch.setattr(gpu_answers, "PROMPTS", ("one", "two"))
    assert gpu_answers.main(["folder", *(["--past"] if hits else [])]) == (0 if good else 1)
    assert capsys.readouterr().out.startswith("DIFFERENT" if cuda != [[5, 6], [7]] and hits is None else "equal")
