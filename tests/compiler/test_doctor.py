"""doctor: a package that cannot be imported, a folder that cannot be written, a version that is too old; exit 1 where something is missing."""

import sys
from pathlib import Path

import pytest

from tapeout.compiler import doctor
from tapeout.compiler.commands import main

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
    assert (doctor._compiler().found, doctor._compiler().is_ok) == ("none", False)
    (tmp_path / "cc").write_text("#!/nowhere\n")
    (tmp_path / "cc").chmod(0o755)
    assert "which does not run" in doctor._compiler().found and not doctor._compiler().is_ok


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
