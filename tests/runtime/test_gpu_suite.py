"""Parts of the GPU suite that need no GPU: operands that take turns, kernels that only read, and what the race checker is shown and says."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tapeout.runtime.artifact import load_artifact, write_artifact
from tapeout.runtime.device import Call
from tests.bench import gpu_acceptance, gpu_arrivals, gpu_kernels, gpu_races, gpu_timing
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


def test_the_reading_kernels_assemble(tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    source = tmp_path / "read.ptx"
    source.write_text(gpu_timing.ptx())
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    for chip in ("sm_90", "sm_100"):
        done = subprocess.run(
            [tool, "-v", f"-arch={chip}", source, "-o", tmp_path / "read.cubin"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert all(f"'read_{n}'" in done.stderr for n in (0, *gpu_timing.IN_FLIGHT))


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
        ("2027.0", [], [], [1], 1, "process 1: exit code None"),
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


@pytest.mark.parametrize(
    ("text", "holds", "good"),
    [
        ("print('0 wrong')", ("0 wrong",), True),
        ("print('10 wrong')", (" 0 wrong",), False),
        ("print('0 wrong'); raise SystemExit(1)", ("0 wrong",), False),
        ("import time; print('0 wrong', flush=True); time.sleep(30)", ("0 wrong",), False),
    ],
)
def test_a_check_holds_by_exit_code_words_and_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, holds: tuple[str, ...], good: bool
) -> None:
    (tmp_path / "results").mkdir()
    check = gpu_acceptance.Check("every kernel's", [sys.executable, "-c", text], 3, holds, ("wrong",))
    assert gpu_acceptance.done(check, tmp_path)[0] == good
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("ok     every kernel's: " if good else "FAILED every kernel's: ")
    assert said[1].strip() == text.partition("'")[2].partition("'")[0]
    assert "wrong" in (tmp_path / "results" / "every-kernel-s.txt").read_text()


def test_everything_that_is_asked_has_a_check() -> None:
    checks = [*gpu_acceptance.alone(Path("f"), Path("s"), 256), *gpu_acceptance.together(Path("f"), Path("s"), "checker")]
    asked = [check.name for check in checks]
    assert len(set(asked)) == len(asked) == 9
    for name in ("slice", "tiny"):
        assert {f"{name}: memcheck", f"{name}: racecheck", f"{name}: every kernel within its op's bound"} <= set(asked)
    assert all(check.holds or check.name == "slice is made" for check in checks)


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

    monkeypatch.setattr(gpu_acceptance, "same_answers", lambda folder: True)
    monkeypatch.setattr(gpu_acceptance, "same_with_a_past", lambda folder, *options: True)
    monkeypatch.setattr(gpu_acceptance, "alone", lambda folder, slices, decode: [check("first", "all is well")])
    monkeypatch.setattr(
        gpu_acceptance, "together", lambda folder, slices, checker: [check("second", "all is well" if good else "not at all")]
    )
    assert gpu_acceptance.main(["run", str(tmp_path)]) == (0 if good else 1)
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == [
        "ok     first",
        "ok     second" if good else "FAILED second",
        f"{5 if good else 4} of 5 hold",
    ]
