"""doctor: a package that cannot be imported, a folder that cannot be written, a version that is too old; exit 1 where something is missing."""

import subprocess
import sys
from pathlib import Path

import pytest

from tapeout.codegen.nvidia import toolchain
from tapeout.compiler import doctor
from tapeout.compiler.commands import main
from tapeout.runtime.device import cuda
from tapeout.runtime.errors import DriverMissing

GOOD = doctor.Finding("thing", "1", "1", True, "")


@pytest.mark.parametrize(
    ("version", "needed", "is_ok"),
    [
        ("20261001", "==20261001", True),
        ("20261002", "==20261001", False),
        ("2.0", ">=2.0", True),
        ("2.0.1", ">=2.0", True),
        ("1.26.4", ">=2.0", False),
        ("2", ">=2.0", True),
        ("0.10.0", ">=0.9", True),
        ("2.0rc1", ">=2.0", True),
        ("5", "", True),
    ],
)
def test_versions(version: str, needed: str, is_ok: bool) -> None:
    assert doctor.is_version(version, needed) == is_ok


def test_needed_versions_come_from_the_package_itself() -> None:
    assert doctor.needed_version("torch-mlir") == "==20261001" and doctor.needed_version("numpy") == ">=2.0"
    assert doctor.needed_version("unheard-of") == ""


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("raise ImportError('libc is too old')", "ImportError: libc is too old"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGILL)", "the import ends with signal 4"),
        ("", None),
    ],
    ids=["raises", "dies", "fine"],
)
def test_a_package_is_imported_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, fault: str | None
) -> None:
    (tmp_path / "odd_package.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert doctor.import_fault("odd_package") == fault
    assert doctor.import_fault("unheard_of.part") == "no module unheard_of"


def test_a_gpu_host_without_the_compilers_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line is there, says what is missing, and none of it stops who runs artifacts."""
    for name in ("platformdirs", "filelock", "torch_mlir", "triton", "jinja2"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delenv("TAPEOUT_CACHE_DIR", raising=False)
    monkeypatch.setattr(doctor, "import_fault", lambda module: f"no module {module}" if sys.modules.get(module.split(".")[0], 1) is None else None)
    found = {f.what: f for f in doctor.findings()}
    missing = {what for what, f in found.items() if not f.is_ok}
    assert {"filelock (compiling)", "platformdirs (compiling)", "torch-mlir (compiling)", "compile cache"} <= missing
    assert found["compile cache"].found.startswith("no place for it: ")
    assert not any(f.stops_running for f in found.values())


def test_a_package_that_is_there_but_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_mlir", None)
    found = doctor._package("torch-mlir", "torch_mlir.ir", "compiling", "pip install 'tapeout[compile]'")
    assert not found.is_ok and found.needed == "torch-mlir==20261001"
    assert found.found.endswith(", cannot be imported: no module torch_mlir")


def test_the_cache_folder_must_be_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAPEOUT_CACHE_DIR", str(tmp_path / "not" / "yet"))
    assert doctor._cache().is_ok and not (tmp_path / "not").exists()
    (tmp_path / "file").touch()
    monkeypatch.setenv("TAPEOUT_CACHE_DIR", str(tmp_path / "file"))
    found = doctor._cache()
    assert not found.is_ok and found.found == f"{tmp_path}/file/v1, as {tmp_path}/file is no folder"
    monkeypatch.setenv("TAPEOUT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    assert doctor._cache().found == f"{tmp_path}/v1, as {tmp_path} is not writable"


def test_a_linker_that_is_missing_or_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "cc").touch()
    for mode, script, words in ((0o644, "", "found no C compiler driver `cc` on the path"), (0o755, "#!/nowhere\n", "that does not run"),
                                (0o755, "#!/bin/sh\necho cannot find ld >&2; exit 1\n", "linking failed: cannot find ld;")):  # fmt: skip
        (tmp_path / "cc").write_text(script)
        (tmp_path / "cc").chmod(mode)
        assert not doctor._compiler().is_ok and words in doctor._compiler().remedy


def test_the_exit_code_says_whether_anything_can_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What only compiling needs is reported and no failure: a machine that runs artifacts is whole without it."""
    monkeypatch.setattr(doctor, "findings", lambda: [GOOD])
    assert main(["doctor"]) == 0 and capsys.readouterr().out == "ok      thing: found 1\n"
    for what, code in (("other (running)", 1), ("other (compiling)", 0)):
        bad = doctor.Finding(what, "none", "2", False, "get it")
        monkeypatch.setattr(doctor, "findings", lambda bad=bad: [GOOD, bad])
        assert main(["doctor"]) == code
        assert capsys.readouterr().out == f"ok      thing: found 1\nmissing {what}: found none, needed 2: get it\n"
        assert main(["doctor", "--json"]) == code and '"ok": false' in capsys.readouterr().out


@pytest.mark.parametrize(("capability", "is_ok", "words"), [
    ((9, 0), True, "Pretend GPU, compute capability 9.0, driver for CUDA 13.1, runs sm90"),
    ((10, 3), True, "Pretend GPU, compute capability 10.3, driver for CUDA 13.1, runs sm103"),
    ((8, 0), False, "Pretend GPU, compute capability 8.0, driver for CUDA 13.1"),
])  # fmt: skip
def test_the_gpu_and_what_it_runs(capability: tuple[int, int], is_ok: bool, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "load_driver", lambda: None)
    monkeypatch.setattr(cuda, "description", lambda driver: ("Pretend GPU", capability, (13, 1)))
    found = doctor._gpu()
    assert (found.found, found.is_ok, found.stops_running) == (words, is_ok, False)


def test_no_gpu_is_said_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise DriverMissing("CUDA driver", "no libcuda.so.1", "libcuda.so.1")

    monkeypatch.setattr(cuda, "load_driver", missing)
    found = doctor._gpu()
    assert not found.is_ok and not found.stops_running and found.found == "none: CUDA driver, no libcuda.so.1"
    assert "sm90, sm100, sm103" in found.needed


def test_every_assembler_is_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(toolchain, "probe", lambda: toolchain.Triton("3.9.0", tmp_path))
    rows = doctor._assemblers()
    assert [row.what for row in rows] == [f"assembler (compiling for {name})" for name in ("sm90", "sm100", "sm103")]
    assert all(row.found.startswith("no assembler at ") and not row.is_ok and not row.stops_running for row in rows)
    assert rows[2].needed == "CUDA 12.9 or later"
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "triton", None)
    assert doctor._assemblers() == []


def test_a_machine_without_the_bindings_is_looked_at_all_the_same() -> None:
    """As a GPU host is: nothing there compiles."""
    program = "import sys\nfor name in ('torch_mlir', 'triton', 'jinja2'): sys.modules[name] = None\n"
    program += "from tapeout.compiler.commands import main; sys.exit(main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "GPU (--device cuda)" in done.stdout and "compile cache" in done.stdout, done.stderr
